"""The public convolution functions: check, canonicalise, bind."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxdnn._arguments import Padding, arrays, dilated, explicit_padding, integer, per_dimension
from jaxdnn._conv import layout
from jaxdnn._conv.fused import check_activation, fused
from jaxdnn._conv.gemm import convolve
from jaxdnn._conv.gradients import data_gradient
from jaxdnn._conv.layout import DimensionNumbers
from jaxdnn._conv.padding import PaddingMode
from jaxdnn._conv.spec import LAX, ConvSpec, channels_last, check_channels, is_float8, make_spec, result_dtype
from jaxdnn._eager import compiled


@compiled
def conv_general_dilated(
  lhs: Array,
  rhs: Array,
  window_strides: Sequence[int],
  padding: Padding,
  lhs_dilation: Sequence[int] | None = None,
  rhs_dilation: Sequence[int] | None = None,
  dimension_numbers: DimensionNumbers = None,
  feature_group_count: int = 1,
  batch_group_count: int = 1,
  precision: Any = None,
  preferred_element_type: Any = None,
  out_sharding: Any = None,
  *,
  algorithm: str | None = None,
  workspace_limit: int | None = None,
) -> Array:
  """General n-dimensional convolution: `jax.lax.conv_general_dilated`, argument for argument.

  Args:
    lhs: input of rank n + 2.
    rhs: filter of rank n + 2, of the same dtype; or, unlike lax, of the other one of float8_e4m3fn and float8_e5m2.
    window_strides: n positive ints.
    padding: 'VALID', 'SAME', 'SAME_LOWER', or n (low, high) pairs; negative padding crops.
    lhs_dilation: n positive ints (default 1): spacing of the input's elements. The holes are never stored.
    rhs_dilation: n positive ints (default 1): spacing of the filter's taps.
    dimension_numbers: as in lax; None means ('NCHW', 'OIHW', 'NCHW') and its like. Anything but channels-last
      ('NHWC', 'HWIO', 'NHWC') is a logical transpose around a channels-last call.
    feature_group_count: number of groups of channels.
    batch_group_count: number of groups of the batch. At most one of the two may exceed 1.
    precision: as in lax, of float32 on a GPU: DEFAULT rounds the operands to TF32 (11 bits of mantissa), HIGH adds up
      three products of TF32 parts (about 22 bits), HIGHEST computes in float32. Of float8 on Hopper, DEFAULT adds up
      to 128 products with 13 bits, HIGH and HIGHEST all in float32. None defers to `jax_default_matmul_precision`.
    preferred_element_type: dtype of the result, by default the operands'. Sums are held in float32 for 16-bit and
      float8 operands in any case, and those of int8 in int32; a narrower integer, such as int8's default, wraps.
    out_sharding: as in lax: the sharding of the result under a mesh with explicit axes.
    algorithm: the name of a kernel, or of one of its tiles, as `conv_algorithms` lists them; or None (default) for what
      is modelled to be the fastest. Not part of lax's signature. Gradients choose their own.
    workspace_limit: bytes of scratch memory, by default 256 MiB, that this call and its gradients may take for partial
      sums of the filter gradient, the one thing that needs any (and, forward in TF32, for a transposed filter; and, by
      default up to 1 GiB, for copies with zeros where channels are no whole 16 bytes). A slower kernel without may be
      chosen instead. Not part of lax's signature.

  Returns:
    The convolution, laid out as `dimension_numbers` says. A padded tap reads the number 0, so a padded position times
    an infinite weight is NaN, as in lax, but where a kernel leaves out what is padding alone.

  Raises:
    ValueError, TypeError: shapes, group counts, dtypes or geometry that do not fit; the message has the values.

  Example:
    >>> y = jaxdnn.conv_general_dilated(x, w, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  """
  where = "conv_general_dilated"
  lhs, rhs = arrays(where, lhs=lhs, rhs=rhs)
  numbers = layout.dimension_numbers(where, lhs, rhs, dimension_numbers)
  dtype = result_dtype(where, lhs, rhs, preferred_element_type)
  spec = make_spec(
    where,
    layout.spatial(lhs, numbers.lhs_spec),
    layout.spatial(rhs, numbers.rhs_spec),
    stride=window_strides,
    padding=padding,
    lhs_dilation=lhs_dilation,
    rhs_dilation=1 if rhs_dilation is None else rhs_dilation,
    groups=feature_group_count,
    precision=precision,
    algorithm=algorithm,
    workspace_limit=workspace_limit,
    names=LAX,
  )
  images, c = (lhs.shape[d] for d in numbers.lhs_spec[:2])
  k, w_in = (rhs.shape[d] for d in numbers.rhs_spec[:2])
  b = integer(where, "batch_group_count", batch_group_count)
  check_channels(where, c, w_in, k, spec.groups, images, b, LAX)
  out = _forward(lhs, rhs, numbers, spec, dtype, b)
  return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)


def _forward(
  lhs: Array, rhs: Array, numbers: lax.ConvDimensionNumbers, spec: ConvSpec, dtype: np.dtype[Any], b: int = 1
) -> Array:
  """Of `b` groups of the batch."""
  k = rhs.shape[numbers.rhs_spec[0]]

  def apply(lhs: Array, rhs: Array) -> Array:
    x, w = layout.to_canonical(lhs, numbers.lhs_spec), layout.filter_to_canonical(rhs, numbers.rhs_spec)
    # A group of the batch with its share of the output channels is a problem of its own.
    x = x.reshape(b, x.shape[0] // b, *x.shape[1:])
    w = jnp.moveaxis(w.reshape(*w.shape[:-1], b, k // b), -2, 0)
    y = jnp.moveaxis(convolve("y", {"x": x, "w": w}, spec, dtype), 0, -2)
    return layout.from_canonical(y.reshape(*y.shape[:-2], k), numbers.out_spec)

  return layout.by_batch(apply, (lhs, rhs), numbers.lhs_spec if b == 1 else None, numbers.out_spec)


@compiled
def conv(
  x: Array,
  w: Array,
  b: Array | None = None,
  *,
  stride: int | Sequence[int] = 1,
  padding: Padding = "VALID",
  padding_mode: PaddingMode = "zeros",
  dilation: int | Sequence[int] = 1,
  groups: int = 1,
  dimension_numbers: DimensionNumbers = None,
  activation: str | None = None,
  residual: Array | None = None,
  x_scale: ArrayLike | None = None,
  w_scale: ArrayLike | None = None,
  precision: Any = None,
  preferred_element_type: Any = None,
  algorithm: str | None = None,
  workspace_limit: int | None = None,
) -> Array:
  """Convolution layer: `activation(conv(x, w) x_scale w_scale + b + residual)`, in one kernel. Depthwise ones
  of 3x3, 5x5, 7x7 and 3x3x3 windows leave a residual, and activations but 'relu' and 'clipped_relu', to one of XLA's.

  Args:
    x: input, channels-last [..., *spatial, C] with any number of leading batch dimensions, or as
      `dimension_numbers` says.
    w: filter [*window, C / groups, K] of the same dtype; its rank gives the number of spatial dimensions.
    b: bias [K], or None.
    stride: step between windows, an int or one per spatial dimension.
    padding: 'VALID' (default), 'SAME', 'SAME_LOWER', an int for every side, or (low, high) pairs, of which negative
      ones crop; or, as in flax, 'CAUSAL' for one dimension, whose outputs then see no later input, and 'CIRCULAR' and
      'REFLECT', which are padding of that mode for an output like the input.
    padding_mode: what is read beyond the edges, one of PyTorch's names or one a dimension: 'zeros' (default);
      'reflect', the elements beside the edge, mirrored (padding below the input's size); 'replicate', the edge;
      'circular', the other end (padding up to the input's size). A padded copy is never made: kernels find the
      elements by index.
    dilation: spacing of the filter's taps, an int or one per spatial dimension.
    groups: number of groups of channels; C for a depthwise convolution.
    dimension_numbers: None for channels-last, else as in `jax.lax.conv_general_dilated`, e.g.
      ('NCHW', 'OIHW', 'NCHW').
    activation: None, or the name of an activation of this library, with its default parameter; 'gelu' is the exact one,
      'gelu_tanh' the approximation.
    residual: array like the result, added before the activation, or None.
    x_scale, w_scale: what one step of quantized operands is worth: scalars, and of the filter also [K], one for each
      output channel. With either, x and w are int8, or float8_e4m3fn and float8_e5m2 in any mixture, the result is
      float32 (default), bfloat16 or float16, and the float32 product of both multiplies the sums: int32 ones of int8,
      exact up to 2^31 and wrapping there, float32 ones of float8. Differentiable in scales, b and residual; in x and w
      of float8, a TypeError says what to do instead.
    precision: as in `conv_general_dilated`; of float8 on Hopper, HIGH and HIGHEST are more exact and slower.
    preferred_element_type: dtype of the result, by default the operands', or float32 with a scale.
    algorithm, workspace_limit: as in `conv_general_dilated`.

  Returns:
    [..., *out_spatial, K], or as `dimension_numbers` says.

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> x, w = jnp.ones((8, 28, 28, 1)), jnp.ones((5, 5, 1, 32))
    >>> jaxdnn.conv(x, w, jnp.zeros(32), activation='relu').shape
    (8, 24, 24, 32)
  """
  x, w = arrays("conv", x=x, w=w)
  check_activation("conv", activation)
  rank = w.ndim - 2
  leading: tuple[int, ...] | None = None
  if dimension_numbers is None:
    if rank < 0 or x.ndim < rank + 1:
      raise ValueError(f"conv: x of shape {x.shape} has too few dimensions for a filter w of shape {w.shape}")
    if x.ndim != rank + 2:
      leading = x.shape[: x.ndim - rank - 1]
      x = x.reshape(math.prod(leading), *x.shape[len(leading) :])
  given = channels_last(rank) if dimension_numbers is None else dimension_numbers
  numbers = layout.dimension_numbers("conv", x, w, given)
  scale = _scale("conv", x, w, x_scale, w_scale, w.shape[numbers.rhs_spec[0]])
  if scale is None:
    dtype = result_dtype("conv", x, w, preferred_element_type)
  else:
    dtype = result_dtype("conv", x, w, np.float32 if preferred_element_type is None else preferred_element_type)
    if dtype not in (np.float32, np.float16, jnp.bfloat16):
      raise TypeError(
        f"conv: with x_scale or w_scale, preferred_element_type must be float32, bfloat16 or float16, got {dtype}"
      )
  spec = make_spec(
    "conv",
    layout.spatial(x, numbers.lhs_spec),
    layout.spatial(w, numbers.rhs_spec),
    stride=stride,
    padding=padding,
    padding_mode=padding_mode,
    lhs_dilation=None,
    rhs_dilation=dilation,
    groups=groups,
    precision=precision,
    algorithm=algorithm,
    workspace_limit=workspace_limit,
  )
  images, c = (x.shape[d] for d in numbers.lhs_spec[:2])
  k, w_in = (w.shape[d] for d in numbers.rhs_spec[:2])
  check_channels("conv", c, w_in, k, spec.groups, images)
  if b is not None:
    if jnp.shape(b) != (k,):
      raise ValueError(f"conv: b must have shape {(k,)}, one entry per output channel, got {jnp.shape(b)}")
    b = jnp.asarray(b, dtype)
  if residual is not None:
    canonical = (images, *spec.y_spatial, k)
    shape = tuple(canonical[layout.canonical_order(numbers.out_spec).index(d)] for d in range(len(canonical)))
    shape = shape if leading is None else (*leading, *shape[1:])
    if jnp.shape(residual) != shape:
      raise ValueError(f"conv: residual must have the result's shape {shape}, got {jnp.shape(residual)}")
    residual = jnp.asarray(residual, dtype)
    residual = residual if leading is None else residual.reshape(images, *shape[len(leading) :])

  # The epilogue is computed channels-last, so that nothing stands between its transpose to the caller's layout and the
  # next convolution's transpose back, and XLA cancels the two.
  def apply(x: Array, w: Array, *extras: Array) -> Array:
    rest = iter(extras)
    bias = None if b is None else next(rest)[None]
    added = None if residual is None else layout.to_canonical(next(rest), numbers.out_spec)[None]
    factor = None if scale is None else next(rest)[None]
    x, w = layout.to_canonical(x, numbers.lhs_spec)[None], layout.filter_to_canonical(w, numbers.rhs_spec)[None]
    return layout.from_canonical(fused(x, w, bias, added, spec, dtype, activation, factor)[0], numbers.out_spec)

  every = ((b, ()), (residual, (numbers.out_spec[0],)), (scale, ()))
  extras = [(a, kept) for a, kept in every if a is not None]
  y = layout.by_batch(apply, (x, w), numbers.lhs_spec, numbers.out_spec, extras)
  return y if leading is None else y.reshape(*leading, *y.shape[1:])


def _scale(where: str, x: Array, w: Array, x_scale: Any, w_scale: Any, features: int) -> Array | None:
  """The factor of each output channel's sums, [features] of float32, or None."""
  if x_scale is None and w_scale is None:
    return None
  if not (x.dtype == w.dtype == np.int8 or (is_float8(x.dtype) and is_float8(w.dtype))):
    raise TypeError(
      f"{where}: x_scale and w_scale go with int8 operands, or with float8_e4m3fn and float8_e5m2, got {x.dtype} and "
      f"{w.dtype}"
    )
  shapes: tuple[tuple[int, ...], ...] = ((), (features,))
  factor = jnp.ones(features, np.float32)
  for name, value, taken in (("x_scale", x_scale, 1), ("w_scale", w_scale, 2)):
    if value is None:
      continue
    if jnp.shape(value) not in shapes[:taken]:
      allowed = " or ".join(map(str, shapes[:taken]))
      raise ValueError(f"{where}: {name} must have shape {allowed}, got {jnp.shape(value)}")
    factor = factor * jnp.broadcast_to(jnp.asarray(value, np.float32), (features,))
  return factor


@compiled
def conv_transpose(
  lhs: Array,
  rhs: Array,
  strides: Sequence[int],
  padding: Padding,
  rhs_dilation: Sequence[int] | None = None,
  dimension_numbers: DimensionNumbers = None,
  transpose_kernel: bool = False,
  precision: Any = None,
  preferred_element_type: Any = None,
  use_consistent_padding: bool = False,
  *,
  groups: int = 1,
) -> Array:
  """Transposed ("fractionally strided") convolution: `jax.lax.conv_transpose`, plus `groups`.

  Args:
    lhs: input of rank n + 2.
    rhs: filter of rank n + 2, of the same dtype.
    strides: n positive ints, the spacing that the output gives to the input's elements.
    padding: 'SAME' (output extent `stride` times the input's), 'VALID', or n (low, high) pairs, which pad the dilated
      input; with `use_consistent_padding` they are the padding of the convolution that this one transposes.
    rhs_dilation: n positive ints (default 1): spacing of the filter's taps.
    dimension_numbers: as in `conv_general_dilated`, but None means channels-last.
    transpose_kernel: False applies `rhs` as it is; True flips it and swaps its channel axes, so that the result is the
      data gradient of the convolution with `rhs`, as Keras and PyTorch define the layer.
    precision: as in `conv_general_dilated`.
    preferred_element_type: dtype of the result, by default the operands'.
    use_consistent_padding: see `padding`.
    groups: number of groups of channels. With `transpose_kernel`, groups of the convolution that is transposed.

  Returns:
    The transposed convolution. It is computed as a data gradient: no zero is ever inserted into the input.

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> y = jaxdnn.conv_transpose(x, w, (2, 2), 'SAME')  # [N, H, W, C] -> [N, 2H, 2W, K]
  """
  where = "conv_transpose"
  lhs, rhs = arrays(where, lhs=lhs, rhs=rhs)
  rank = lhs.ndim - 2
  if lhs.ndim != rhs.ndim or rank < 0:
    raise ValueError(f"{where}: lhs and rhs must have the same rank, at least 2, got {lhs.shape} and {rhs.shape}")
  given = channels_last(rank) if dimension_numbers is None else dimension_numbers
  numbers = layout.dimension_numbers(where, lhs, rhs, given)
  strides = per_dimension(where, "strides", strides, rank)
  dilation = per_dimension(where, "rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, rank)
  window = layout.spatial(rhs, numbers.rhs_spec)
  extents = [dilated(r, d) for r, d in zip(window, dilation, strict=True)]
  pads = _transpose_padding(where, padding, extents, strides, use_consistent_padding)
  dtype = result_dtype(where, lhs, rhs, preferred_element_type)
  static: dict[str, Any] = {"rhs_dilation": dilation, "groups": groups, "precision": precision}
  (images, c), (k, w_in) = ([lhs.shape[d] for d in numbers.lhs_spec[:2]], [rhs.shape[d] for d in numbers.rhs_spec[:2]])
  if not transpose_kernel:
    spec = make_spec(
      where, layout.spatial(lhs, numbers.lhs_spec), window, stride=1, padding=pads, lhs_dilation=strides, **static
    )
    check_channels(where, c, w_in, k, spec.groups, images)
    return _forward(lhs, rhs, numbers, spec, dtype)
  out_spatial = [
    max(0, dilated(i, u) + lo + hi - e + 1)
    for i, u, (lo, hi), e in zip(layout.spatial(lhs, numbers.lhs_spec), strides, pads, extents, strict=True)
  ]
  # The convolution with output `lhs` and input the result: its low padding mirrors ours, and its high padding is what
  # makes the extents meet.
  forward_pads = [
    (e - 1 - lo, dilated(i, u) + e - 1 - o - (e - 1 - lo))
    for i, u, o, (lo, _), e in zip(
      layout.spatial(lhs, numbers.lhs_spec), strides, out_spatial, pads, extents, strict=True
    )
  ]
  spec = make_spec(where, out_spatial, window, stride=strides, padding=forward_pads, lhs_dilation=None, **static)
  check_channels(where, w_in * spec.groups, w_in, k, spec.groups, images)
  if k != c:
    raise ValueError(
      f"{where}: with transpose_kernel the filter's output channels are those of lhs, {c}, but rhs has {k}"
    )
  transposed = lax.ConvDimensionNumbers(numbers.out_spec, numbers.rhs_spec, numbers.lhs_spec)
  return data_gradient(lhs, rhs, transposed, spec, dtype)


def _transpose_padding(
  where: str, padding: Padding, extents: Sequence[int], strides: Sequence[int], consistent: bool
) -> tuple[tuple[int, int], ...]:
  """Padding of the dilated input. For 'SAME' and 'VALID' it gives outputs of `stride * n` and the full extent."""
  if isinstance(padding, str):
    mode = padding.upper()
    if mode == "VALID":
      return tuple((e - 1, u - 1 + max(e - u, 0)) for e, u in zip(extents, strides, strict=True))
    if mode == "SAME":
      low = [e - 1 if u > e - 1 else -(-(e + u - 2) // 2) for e, u in zip(extents, strides, strict=True)]
      return tuple((lo, e + u - 2 - lo) for lo, e, u in zip(low, extents, strides, strict=True))
    raise ValueError(f"{where}: padding must be 'SAME', 'VALID' or (low, high) pairs, got {padding!r}")
  pads = explicit_padding(where, padding, extents, extents, strides)
  return tuple((e - 1 - lo, e - 1 - hi) for e, (lo, hi) in zip(extents, pads, strict=True)) if consistent else pads
