"""GPU deep-learning primitives for JAX."""

from jaxdnn._activation import relu as relu
from jaxdnn._activation import sigmoid as sigmoid
from jaxdnn._activation import tanh as tanh
from jaxdnn._conv import conv as conv
from jaxdnn._conv import conv_dgrad as conv_dgrad
from jaxdnn._conv import conv_general_dilated as conv_general_dilated
from jaxdnn._conv import conv_transpose as conv_transpose
from jaxdnn._conv import conv_wgrad as conv_wgrad
from jaxdnn._loss import cross_entropy as cross_entropy
from jaxdnn._loss import nll_loss as nll_loss
from jaxdnn._pool import avg_pool as avg_pool
from jaxdnn._pool import max_pool as max_pool
from jaxdnn._softmax import log_softmax as log_softmax
from jaxdnn._softmax import softmax as softmax

__version__ = "0.1.0"
