"""Convolution with unshared weights: a filter of its own for each output position.

The patches of the input and the filters are as many matrix products as there are positions, which is a batch of
convolutions without spatial dimensions: one kernel, with its epilogue and its gradients.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._arguments import Padding, arrays, per_dimension
from jaxdnn._conv import layout
from jaxdnn._conv.fused import check_activation, fused
from jaxdnn._conv.layout import DimensionNumbers
from jaxdnn._conv.spec import LAX, ConvSpec, channels_last, make_spec, result_dtype
from jaxdnn._eager import compiled
from jaxdnn._transform import im2col


@compiled
def conv_local(
  x: Array,
  w: Array,
  b: Array | None = None,
  *,
  stride: int | Sequence[int] = 1,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  activation: str | None = None,
  precision: Any = None,
  preferred_element_type: Any = None,
) -> Array:
  """Locally connected layer: a convolution whose every output position has a filter, and a bias, of its own.

  The patches of `x` are written out, prod(window) times what `x` takes; what limits such a layer is that each of its
  weights is read for one position only.

  Args:
    x: input, [..., *spatial, C] with 1 to 3 spatial dimensions and any number of leading batch dimensions.
    w: filters [*out_spatial, *window, C, K] of the same dtype; the rank is half of what `w` has beside C and K.
    b: biases [*out_spatial, K], or None.
    stride, padding, dilation: as in `conv`, but padding is zeros: a string of lax's, an int, or pairs.
    activation: None, or the name of an activation, as in `conv`.
    precision: as in `conv_general_dilated`.
    preferred_element_type: dtype of the result, by default the operands'.

  Returns:
    [..., *out_spatial, K].

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> x, w = jnp.ones((2, 8, 8, 3)), jnp.ones((6, 6, 3, 3, 3, 4))
    >>> jaxdnn.conv_local(x, w).shape
    (2, 6, 6, 4)
  """
  where = "conv_local"
  x, w = arrays(where, x=x, w=w)
  rank = (w.ndim - 2) // 2
  if w.ndim % 2 or not 1 <= rank <= 3:
    raise ValueError(f"{where}: w must be [*out_spatial, *window, C, K] of rank 4, 6 or 8, got shape {w.shape}")
  if x.ndim < rank + 1:
    raise ValueError(f"{where}: x of shape {x.shape} has too few dimensions for filters w of shape {w.shape}")
  check_activation(where, activation)
  (*leading, c), window = (*x.shape[: x.ndim - rank - 1], x.shape[-1]), w.shape[rank : 2 * rank]
  spec = make_spec(
    where, x.shape[-rank - 1 : -1], window, stride=stride, padding=padding, lhs_dilation=None, rhs_dilation=dilation,
    groups=1, precision=precision,
  )  # fmt: skip
  _check_filters(where, w.shape[:rank], w.shape[-2], spec, c)
  if b is not None and jnp.shape(b) != (*spec.y_spatial, w.shape[-1]):
    raise ValueError(f"{where}: b must have shape {(*spec.y_spatial, w.shape[-1])}, got {jnp.shape(b)}")
  y = _local(
    x.reshape(math.prod(leading), *x.shape[len(leading) :]),
    w.reshape(*spec.y_spatial, math.prod(window) * c, w.shape[-1]),
    b, spec, result_dtype(where, x, w, preferred_element_type), channels_last(rank), "window_channels", activation,
  )  # fmt: skip
  return y.reshape(*leading, *y.shape[1:])


@compiled
def conv_general_dilated_local(
  lhs: Array,
  rhs: Array,
  window_strides: Sequence[int],
  padding: Padding,
  filter_shape: Sequence[int],
  lhs_dilation: Sequence[int] | None = None,
  rhs_dilation: Sequence[int] | None = None,
  dimension_numbers: DimensionNumbers = None,
  precision: Any = None,
) -> Array:
  """Convolution with unshared weights: `jax.lax.conv_general_dilated_local`, argument for argument.

  Args:
    lhs: input of rank n + 2, with 1 to 3 spatial dimensions.
    rhs: filters of rank n + 2 and the same dtype: their spatial dimensions are the output's, and their input channels
      C * prod(filter_shape), all of the window for the first channel of `lhs`, then for the next.
    window_strides: n positive ints.
    padding: as in `conv_general_dilated`.
    filter_shape: n positive ints, the window.
    lhs_dilation, rhs_dilation, dimension_numbers, precision: as in `conv_general_dilated`; the holes of a dilated
      input are stored here.

  Returns:
    The result, laid out as `dimension_numbers` says.

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> x, w = jnp.ones((2, 8, 3)), jnp.ones((6, 9, 4))
    >>> jaxdnn.conv_general_dilated_local(x, w, (1,), 'VALID', (3,), dimension_numbers=('NWC', 'WIO', 'NWC')).shape
    (2, 6, 4)
  """
  where = "conv_general_dilated_local"
  lhs, rhs = arrays(where, lhs=lhs, rhs=rhs)
  numbers = layout.dimension_numbers(where, lhs, rhs, dimension_numbers)
  rank = lhs.ndim - 2
  if not 1 <= rank <= 3:
    raise ValueError(f"{where}: lhs must have 1 to 3 spatial dimensions, got shape {lhs.shape}")
  filter_shape = per_dimension(where, "filter_shape", filter_shape, rank)
  spec = make_spec(
    where, layout.spatial(lhs, numbers.lhs_spec), filter_shape, stride=window_strides, padding=padding,
    lhs_dilation=lhs_dilation, rhs_dilation=1 if rhs_dilation is None else rhs_dilation, groups=1,
    precision=precision, names=LAX,
  )  # fmt: skip
  c, inputs = lhs.shape[numbers.lhs_spec[1]], rhs.shape[numbers.rhs_spec[1]]
  if inputs != c * math.prod(filter_shape):
    raise ValueError(
      f"{where}: rhs must have {c} * {math.prod(filter_shape)} input channels for filter_shape={filter_shape}, "
      f"got {inputs}"
    )
  _check_filters(where, layout.spatial(rhs, numbers.rhs_spec), c, spec, c)
  return _local(lhs, rhs, None, spec, result_dtype(where, lhs, rhs, None), numbers, "channels_window", None)


def _check_filters(where: str, positions: Sequence[int], w_in: int, spec: ConvSpec, c: int) -> None:
  if tuple(positions) != spec.y_spatial or w_in != c:
    raise ValueError(
      f"{where}: there must be filters of {c} channels for output positions {spec.y_spatial}, which is what windows of "
      f"{spec.window} over spatial extents {spec.x_spatial} give, got {w_in} channels and positions {tuple(positions)}"
    )


def _local(
  x: Array, w: Array, b: Array | None, spec: ConvSpec, dtype: np.dtype[Any], numbers: lax.ConvDimensionNumbers,
  order: str, activation: str | None,
) -> Array:  # fmt: skip
  """Where the filters' input channels are a patch's features in the given order."""

  def apply(x: Array, w: Array, *bias: Array) -> Array:
    x, w = layout.to_canonical(x, numbers.lhs_spec), layout.filter_to_canonical(w, numbers.rhs_spec)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((0, 0, d - 1) for d in spec.lhs_dilation), (0, 0, 0)])
    patches = im2col(
      x, spec.window, stride=spec.stride, padding=spec.padding, dilation=spec.rhs_dilation, order=order
    )
    (n, *out, features), k = patches.shape, w.shape[-1]
    positions = math.prod(out)
    y = fused(
      patches.reshape(n, positions, features).swapaxes(0, 1), w.reshape(positions, features, k),
      bias[0].reshape(positions, k) if bias else None, None,
      ConvSpec((), (), (), (), 1, (), (), spec.precision), dtype, activation,
    )  # fmt: skip
    return layout.from_canonical(y.swapaxes(0, 1).reshape(n, *out, k), numbers.out_spec)

  extras = [] if b is None else [(jnp.asarray(b, dtype), ())]
  return layout.by_batch(apply, (x, w), numbers.lhs_spec, numbers.out_spec, extras)
