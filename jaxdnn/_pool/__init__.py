"""Pooling: one number for each sliding window of an array, in one to three spatial dimensions.

    y[o] = max, min, sum, mean or Lp norm over k of x[o * stride - low + k * dilation]

with k below `window` in each spatial dimension. Positions outside the input are padding, which no maximum takes and no
sum adds. Adaptive pooling has no stride: window o of O over an extent I is [floor(o I / O), ceil((o + 1) I / O)).

`geometry.py` says where windows lie and turns arguments into that; `primitives.py` holds three closed families: the
selections (max, min) with the gather and scatter of what they selected, the sums with their adjoint, and the Lp norm
with its tangent and adjoint; `masked.py` pools what a mask keeps by means of these; `windows.py`, `adaptive.py`,
`unpool.py` and `reduce_window.py` hold the public functions.
"""

from jaxdnn._pool.adaptive import adaptive_avg_pool as adaptive_avg_pool
from jaxdnn._pool.adaptive import adaptive_max_pool as adaptive_max_pool
from jaxdnn._pool.reduce_window import reduce_window as reduce_window
from jaxdnn._pool.unpool import max_unpool as max_unpool
from jaxdnn._pool.windows import avg_pool as avg_pool
from jaxdnn._pool.windows import lp_pool as lp_pool
from jaxdnn._pool.windows import max_pool as max_pool
from jaxdnn._pool.windows import min_pool as min_pool
from jaxdnn._pool.windows import sum_pool as sum_pool
