"""GPU deep-learning primitives for JAX."""

from jaxdnn._activation import relu as relu
from jaxdnn._activation import sigmoid as sigmoid
from jaxdnn._activation import tanh as tanh

__version__ = "0.1.0"
