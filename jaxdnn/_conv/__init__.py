"""Convolution, and its two gradients, in 0 to 3 spatial dimensions (more through the reference).

    y[n, t, k] = Σ_{r, c} x[n, i, c] w[r, c, k]     over taps r, channels c of k's group, and i where
    i · lhs_dilation = t · stride - padding_lo + r · rhs_dilation, element by element over the spatial dimensions

This is one trilinear form in (x, w, y): forward, data gradient and filter gradient are its three gradients, one
primitive each (`primitives.py`), and each is the others' transpose. `public.py` and `gradients.py` turn any padding and
grouping into that form, `layout.py` any `dimension_numbers`; `spec.py` holds its static parameters. `fused.py` is a
layer in one kernel, `gemm.py` the textbook algorithm, `causal.py` the depthwise convolution of sequences, of which
`causal_gradient.py` makes all gradients together, `local.py` convolution with unshared weights, `algorithms.py` the
planner for those who ask.
"""

from jaxdnn._conv.algorithms import ConvAlgorithm as ConvAlgorithm
from jaxdnn._conv.algorithms import conv_algorithms as conv_algorithms
from jaxdnn._conv.causal import causal_conv1d as causal_conv1d
from jaxdnn._conv.gradients import conv_dgrad as conv_dgrad
from jaxdnn._conv.gradients import conv_wgrad as conv_wgrad
from jaxdnn._conv.local import conv_general_dilated_local as conv_general_dilated_local
from jaxdnn._conv.local import conv_local as conv_local
from jaxdnn._conv.public import conv as conv
from jaxdnn._conv.public import conv_general_dilated as conv_general_dilated
from jaxdnn._conv.public import conv_transpose as conv_transpose
