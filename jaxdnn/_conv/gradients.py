"""The two gradients of a convolution, callable by themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from jaxdnn._arguments import Padding, arrays, extents
from jaxdnn._conv import layout
from jaxdnn._conv.gemm import convolve
from jaxdnn._conv.layout import DimensionNumbers
from jaxdnn._conv.padding import PaddingMode
from jaxdnn._conv.spec import ConvSpec, channels_last, check_channels, make_spec, result_dtype
from jaxdnn._eager import compiled


@compiled
def conv_dgrad(
  g: Array,
  w: Array,
  x_spatial: Sequence[int],
  *,
  stride: int | Sequence[int] = 1,
  padding: Padding = "VALID",
  padding_mode: PaddingMode = "zeros",
  dilation: int | Sequence[int] = 1,
  groups: int = 1,
  dimension_numbers: DimensionNumbers = None,
  precision: Any = None,
  preferred_element_type: Any = None,
  algorithm: str | None = None,
  workspace_limit: int | None = None,
) -> Array:
  """Data gradient of a convolution: the cotangent of `x` in `y = conv(x, w)`, given the cotangent `g` of `y`.

  Args:
    g: cotangent of the convolution's result, [N, *out_spatial, K] or as `dimension_numbers` says.
    w: the convolution's filter, [*window, C / groups, K] or as `dimension_numbers` says.
    x_spatial: the input's spatial extents, which a strided convolution's output does not determine.
    stride, padding, padding_mode, dilation, groups, dimension_numbers: those of the convolution; see `conv`.
    precision: as in `conv_general_dilated`.
    preferred_element_type: dtype of the result, by default the operands'.
    algorithm, workspace_limit: as in `conv_general_dilated`.

  Returns:
    [N, *x_spatial, C], or as `dimension_numbers` says for the convolution's input.

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> dx = jaxdnn.conv_dgrad(g, w, (28, 28), stride=2, padding='SAME')
  """
  where = "conv_dgrad"
  g, w = arrays(where, g=g, w=w)
  numbers = layout.dimension_numbers(where, g, w, dimension_numbers or channels_last(w.ndim - 2))
  dtype = result_dtype(where, g, w, preferred_element_type)
  x_spatial = extents(where, "x_spatial", x_spatial, w.ndim - 2)
  spec = make_spec(
    where, x_spatial, layout.spatial(w, numbers.rhs_spec), stride=stride, padding=padding, lhs_dilation=None,
    rhs_dilation=dilation, groups=groups, precision=precision, algorithm=algorithm, workspace_limit=workspace_limit,
    padding_mode=padding_mode,
  )  # fmt: skip
  k, w_in = (w.shape[d] for d in numbers.rhs_spec[:2])
  check_channels(where, w_in * spec.groups, w_in, k, spec.groups, 1)
  _check_gradient(where, g, numbers, spec, k)
  return data_gradient(g, w, numbers, spec, dtype)


def data_gradient(
  g: Array, w: Array, numbers: lax.ConvDimensionNumbers, spec: ConvSpec, dtype: np.dtype[Any]
) -> Array:
  def apply(g: Array, w: Array) -> Array:
    y, w = layout.to_canonical(g, numbers.out_spec)[None], layout.filter_to_canonical(w, numbers.rhs_spec)[None]
    return layout.from_canonical(convolve("x", {"y": y, "w": w}, spec, dtype)[0], numbers.lhs_spec)

  return layout.by_batch(apply, (g, w), numbers.out_spec, numbers.lhs_spec)


@compiled
def conv_wgrad(
  x: Array,
  g: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] = 1,
  padding: Padding = "VALID",
  padding_mode: PaddingMode = "zeros",
  dilation: int | Sequence[int] = 1,
  groups: int = 1,
  dimension_numbers: DimensionNumbers = None,
  precision: Any = None,
  preferred_element_type: Any = None,
  algorithm: str | None = None,
  workspace_limit: int | None = None,
) -> Array:
  """Filter gradient of a convolution: the cotangent of `w` in `y = conv(x, w)`, given the cotangent `g` of `y`.

  Args:
    x: the convolution's input, [N, *spatial, C] or as `dimension_numbers` says.
    g: cotangent of the convolution's result, [N, *out_spatial, K] or as `dimension_numbers` says.
    window: the filter's spatial extents.
    stride, padding, padding_mode, dilation, groups, dimension_numbers: those of the convolution; see `conv`.
    precision: as in `conv_general_dilated`.
    preferred_element_type: dtype of the result, by default the operands'.
    algorithm, workspace_limit: as in `conv_general_dilated`.

  Returns:
    [*window, C / groups, K], or as `dimension_numbers` says for the filter. The sum over images and positions has a
    fixed order: equal inputs give equal bits.

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> dw = jaxdnn.conv_wgrad(x, g, (3, 3), padding='SAME')
  """
  where = "conv_wgrad"
  x, g = arrays(where, x=x, g=g)
  numbers = layout.dimension_numbers(where, x, g, dimension_numbers or channels_last(x.ndim - 2))
  dtype = result_dtype(where, x, g, preferred_element_type)
  window = extents(where, "window", window, x.ndim - 2)
  spec = make_spec(
    where, layout.spatial(x, numbers.lhs_spec), window, stride=stride, padding=padding, lhs_dilation=None,
    rhs_dilation=dilation, groups=groups, precision=precision, algorithm=algorithm, workspace_limit=workspace_limit,
    padding_mode=padding_mode,
  )  # fmt: skip
  (images, c), k = (x.shape[d] for d in numbers.lhs_spec[:2]), g.shape[numbers.out_spec[1]]
  check_channels(where, c, c // max(spec.groups, 1), k, spec.groups, 1)
  _check_gradient(where, g, numbers, spec, k)
  if g.shape[numbers.out_spec[0]] != images:
    raise ValueError(f"{where}: x has {images} images but g has {g.shape[numbers.out_spec[0]]}")
  known = {"x": layout.to_canonical(x, numbers.lhs_spec)[None], "y": layout.to_canonical(g, numbers.out_spec)[None]}
  return layout.filter_from_canonical(convolve("w", known, spec, dtype)[0], numbers.rhs_spec)


def _check_gradient(where: str, g: Array, numbers: lax.ConvDimensionNumbers, spec: ConvSpec, k: int) -> None:
  if layout.spatial(g, numbers.out_spec) != spec.y_spatial or g.shape[numbers.out_spec[1]] != k:
    raise ValueError(
      f"{where}: g of shape {g.shape} must have spatial extents {spec.y_spatial} and {k} channels, which is what the "
      f"convolution of an input of extents {spec.x_spatial} with a filter of extents {spec.window} gives"
    )
