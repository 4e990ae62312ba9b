"""Layer norm, RMS norm and adaptive layer norm, alone or after a residual addition."""

from jaxdnn._layer_norm.public import adaptive_layer_norm as adaptive_layer_norm
from jaxdnn._layer_norm.public import add_layer_norm as add_layer_norm
from jaxdnn._layer_norm.public import add_rms_norm as add_rms_norm
from jaxdnn._layer_norm.public import layer_norm as layer_norm
from jaxdnn._layer_norm.public import rms_norm as rms_norm
