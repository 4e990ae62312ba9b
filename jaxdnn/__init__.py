"""GPU deep-learning primitives for JAX."""

from jaxdnn._activation import relu as relu
from jaxdnn._activation import sigmoid as sigmoid
from jaxdnn._activation import tanh as tanh
from jaxdnn._batch_norm import BatchStats as BatchStats
from jaxdnn._batch_norm import batch_norm as batch_norm
from jaxdnn._batch_norm import batch_norm_inference as batch_norm_inference
from jaxdnn._batch_norm import update_running_stats as update_running_stats
from jaxdnn._conv import conv as conv
from jaxdnn._conv import conv_dgrad as conv_dgrad
from jaxdnn._conv import conv_general_dilated as conv_general_dilated
from jaxdnn._conv import conv_transpose as conv_transpose
from jaxdnn._conv import conv_wgrad as conv_wgrad
from jaxdnn._group_norm import group_norm as group_norm
from jaxdnn._group_norm import instance_norm as instance_norm
from jaxdnn._layer_norm import adaptive_layer_norm as adaptive_layer_norm
from jaxdnn._layer_norm import add_layer_norm as add_layer_norm
from jaxdnn._layer_norm import add_rms_norm as add_rms_norm
from jaxdnn._layer_norm import layer_norm as layer_norm
from jaxdnn._layer_norm import rms_norm as rms_norm
from jaxdnn._log_partition import logsumexp as logsumexp
from jaxdnn._loss import cross_entropy as cross_entropy
from jaxdnn._loss import nll_loss as nll_loss
from jaxdnn._lrn import divisive_norm as divisive_norm
from jaxdnn._lrn import local_contrast_norm as local_contrast_norm
from jaxdnn._lrn import local_response_norm as local_response_norm
from jaxdnn._pool import adaptive_avg_pool as adaptive_avg_pool
from jaxdnn._pool import adaptive_max_pool as adaptive_max_pool
from jaxdnn._pool import avg_pool as avg_pool
from jaxdnn._pool import lp_pool as lp_pool
from jaxdnn._pool import max_pool as max_pool
from jaxdnn._pool import max_unpool as max_unpool
from jaxdnn._pool import min_pool as min_pool
from jaxdnn._pool import reduce_window as reduce_window
from jaxdnn._pool import sum_pool as sum_pool
from jaxdnn._softmax import log_softmax as log_softmax
from jaxdnn._softmax import softmax as softmax
from jaxdnn._softmax import softmin as softmin
from jaxdnn._transform import col2im as col2im
from jaxdnn._transform import im2col as im2col
from jaxdnn._transform import transform as transform

__version__ = "0.1.0"
