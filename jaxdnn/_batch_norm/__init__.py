"""Batch normalization: training with the statistics of the batch, inference with given ones, running averages."""

from jaxdnn._batch_norm.public import BatchStats as BatchStats
from jaxdnn._batch_norm.public import batch_norm as batch_norm
from jaxdnn._batch_norm.public import batch_norm_inference as batch_norm_inference
from jaxdnn._batch_norm.public import update_running_stats as update_running_stats
