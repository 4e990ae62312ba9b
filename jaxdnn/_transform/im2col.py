"""Patches of images, and their sum: the two halves of a convolution through a matrix product.

    im2col   cols[..., o, (k, c)] = x[..., o * stride - low + k * dilation, c]        0 in the padding
    col2im   x[..., i, c] = sum of cols[..., o, (k, c)] over all o, k with i = o * stride - low + k * dilation

Each is the other's adjoint, and linear, so that two primitives are closed under differentiation. On a GPU the patches
are rows of a strided view of `x`; the sum gathers, in a fixed order and without atomics.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _primitive, _sharding
from jaxdnn._arguments import (
  Padding,
  array,
  dilated,
  explicit_padding,
  extents,
  floating,
  one_of,
  per_dimension,
  window_rank,
)
from jaxdnn._eager import compiled
from jaxdnn._transform.transform import INTEGERS

ORDERS = ("window_channels", "channels_window")

# Public functions ----------------------------------------------------------------------------------------------------


@compiled
def im2col(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] = 1,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  order: str = "window_channels",
) -> Array:
  """The patch of `x` under each position of a sliding window, as one vector of features.

  Args:
    x: array `[..., *spatial, channels]` of any type, with any number of leading dimensions.
    window: 1 to 3 integers: the window's size along each spatial dimension, and how many of those there are.
    stride: distance between windows, one integer or one per spatial dimension.
    padding: "VALID" (none), "SAME" (an output of `ceil(input / stride)`, the odd cell at the end), "SAME_LOWER" (the
      odd cell at the start), one integer for every side, or a `(low, high)` pair per spatial dimension. Negative
      padding crops. Padding is 0.
    dilation: distance between the cells of a window, one integer or one per spatial dimension.
    order: of the features. "window_channels": all channels of the window's first cell, then of the next, in row-major
      order, as the rows of an HWIO filter reshaped to a matrix. "channels_window": all cells of the first channel, then
      of the next, as in `lax.conv_general_dilated_patches` and `torch.nn.functional.unfold`; it costs a transpose.

  Returns:
    An array `[..., *out_spatial, prod(window) * channels]` of `x`'s type, of spatial extent `max(0, (input + low + high
    - (window - 1) * dilation - 1) // stride + 1)`.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, or an `x` sharded along a spatial dimension or channels.

  Example:
    >>> jaxdnn.im2col(jnp.array([[1], [2], [3], [4]]), (2,), stride=2)
    Array([[1, 2],
           [3, 4]], dtype=int32)
  """
  x = array("im2col", "x", x)
  rank = window_rank("im2col", window)
  one_of("im2col", "order", order, ORDERS)
  if x.ndim < rank + 1:
    raise ValueError(f"im2col: window {tuple(window)} needs x of shape [..., {rank} spatial, channels], got {x.shape}")
  patches = _patches("im2col", x.shape[-rank - 1 : -1], window, stride, padding, dilation)

  def call(x: Array) -> Array:
    cols: Array = _primitive.bind(im2col_p, x, patches=patches)
    return _merge_features(cols, order)

  lead = range(x.ndim - rank - 1)
  return _sharding.map_shards(call, [x], keep=[lead], out_like=(0, [*lead, *[None] * (rank + 1)]))


@compiled
def col2im(
  cols: Array,
  spatial: Sequence[int],
  window: Sequence[int],
  *,
  stride: int | Sequence[int] = 1,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  order: str = "window_channels",
) -> Array:
  """Adds patches into an array, each where `im2col` takes it from: the adjoint of `im2col`.

  Args:
    cols: floating-point array `[..., *out_spatial, prod(window) * channels]`, as `im2col` returns it.
    spatial: the result's spatial extents, which those of `cols` do not determine.
    window: as in `im2col`.
    stride: as in `im2col`.
    padding: as in `im2col`. What falls on padding is dropped.
    dilation: as in `im2col`.
    order: of the features, as in `im2col`. `torch.nn.functional.fold` takes "channels_window".

  Returns:
    An array `[..., *spatial, channels]` of the type of `cols`. Elements under several windows receive the sum, in
    float32 for the 16-bit types and in the same order on every run; elements under none are 0.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, or `cols` sharded along other than leading dimensions.

  Example:
    >>> jaxdnn.col2im(jnp.array([[1.0, 2.0], [3.0, 4.0]]), (3,), (2,))
    Array([[1.],
           [5.],
           [4.]], dtype=float32)
  """
  cols = floating("col2im", "cols", cols)
  rank = window_rank("col2im", window)
  one_of("col2im", "order", order, ORDERS)
  patches = _patches("col2im", extents("col2im", "spatial", spatial, rank), window, stride, padding, dilation)
  cells = math.prod(patches.window)
  if cols.ndim < rank + 1 or cols.shape[-rank - 1 : -1] != patches.out_extent or cols.shape[-1] % cells:
    raise ValueError(
      f"col2im: cols must have shape [..., {', '.join(map(str, patches.out_extent))}, {cells} * channels] for the "
      f"spatial extents {patches.extent}, got {cols.shape}"
    )

  def call(cols: Array) -> Array:
    x: Array = _primitive.bind(col2im_p, _split_features(cols, cells, order), patches=patches)
    return x

  lead = range(cols.ndim - rank - 1)
  return _sharding.map_shards(call, [cols], keep=[lead], out_like=(0, [*lead, *[None] * (rank + 1)]))


class Patches(NamedTuple):
  """Where the windows lie: the static parameter of both primitives, an entry per spatial dimension."""

  extent: tuple[int, ...]
  """Of the image, which that of the patches does not determine."""
  window: tuple[int, ...]
  stride: tuple[int, ...]
  padding: tuple[tuple[int, int], ...]
  dilation: tuple[int, ...]

  @property
  def rank(self) -> int:
    return len(self.window)

  @property
  def out_extent(self) -> tuple[int, ...]:
    return tuple(
      max(0, (i + lo + hi - dilated(w, d)) // s + 1) for i, w, s, (lo, hi), d in zip(*self, strict=True)
    )


def _patches(op: str, extent: tuple[int, ...], window: Any, stride: Any, padding: Any, dilation: Any) -> Patches:
  rank = len(extent)
  window, stride, dilation = (
    per_dimension(op, name, value, rank)
    for name, value in (("window", window), ("stride", stride), ("dilation", dilation))
  )
  dilation = tuple(1 if w == 1 else d for w, d in zip(window, dilation, strict=True))
  reach = tuple(dilated(w, d) for w, d in zip(window, dilation, strict=True))
  padding = explicit_padding(op, padding, extent, reach, stride)
  padded = [i + lo + hi for i, (lo, hi) in zip(extent, padding, strict=True)]
  for i, (lo, hi), p, r in zip(extent, padding, padded, reach, strict=True):
    if -lo > i or -hi > i or p < 0:
      raise ValueError(f"{op}: padding ({lo}, {hi}) crops more than the {i} elements of a spatial dimension")
    if max(i, abs(lo), abs(hi), p, r) >= 2**30:
      raise ValueError(f"{op}: a spatial dimension of {i} with padding ({lo}, {hi}) or a window over {r} pass 2**30")
  # A stride past the padded input and the input's extent give the same one window.
  stride = tuple(min(s, max(p, 1)) for s, p in zip(stride, padded, strict=True))
  return Patches(tuple(extent), window, stride, padding, dilation)


def _merge_features(cols: Array, order: str) -> Array:
  if order == "channels_window":
    cols = jnp.swapaxes(cols, -1, -2)
  return cols.reshape(*cols.shape[:-2], cols.shape[-2] * cols.shape[-1])


def _split_features(cols: Array, cells: int, order: str) -> Array:
  lead, features = cols.shape[:-1], cols.shape[-1]
  if order == "channels_window":
    return jnp.swapaxes(cols.reshape(*lead, features // cells, cells), -1, -2)
  return cols.reshape(*lead, cells, features // cells)


# Reference -----------------------------------------------------------------------------------------------------------
#
# Both run over the cells of the window in row-major order. The primitives' patches are [..., *out, cell, channel].


def _pad(x: Array, patches: Patches) -> Array:
  """Pads with zeros, then crops: lax.pad with negative padding reads out of bounds on CPUs (openxla issue 48713)."""
  lead = x.ndim - patches.rank - 1
  grow = [(max(lo, 0), max(hi, 0), 0) for lo, hi in patches.padding]
  x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * lead + grow + [(0, 0, 0)])
  for axis, (lo, hi) in enumerate(patches.padding, lead):
    x = lax.slice_in_dim(x, max(-lo, 0), x.shape[axis] - max(-hi, 0), axis=axis)
  return x


def _cell(k: tuple[int, ...], patches: Patches) -> tuple[Any, ...]:
  """Where the windows' cells number k lie in the padded image."""
  spans = zip(k, patches.stride, patches.dilation, patches.out_extent, strict=True)
  return (..., *(slice(i * d, i * d + (o - 1) * s + 1, s) for i, s, d, o in spans), slice(None))


def _im2col_reference(x: Array, *, patches: Patches) -> Array:
  lead = x.shape[: -patches.rank - 1]
  if 0 in patches.out_extent:
    return jnp.zeros((*lead, *patches.out_extent, math.prod(patches.window), x.shape[-1]), x.dtype)
  padded = _pad(x, patches)
  return jnp.stack([padded[_cell(k, patches)] for k in np.ndindex(*patches.window)], axis=-2)


def _col2im_reference(cols: Array, *, patches: Patches) -> Array:
  lead, channels = cols.shape[: -patches.rank - 2], cols.shape[-1]
  wide = cols.astype(_primitive.accumulator_dtype(cols.dtype))
  padded = [i + lo + hi for i, (lo, hi) in zip(patches.extent, patches.padding, strict=True)]
  x = jnp.zeros((*lead, *padded, channels), wide.dtype)
  if 0 not in patches.out_extent:
    for i, k in enumerate(np.ndindex(*patches.window)):
      x = x.at[_cell(k, patches)].add(wide[..., i, :])
  opposite = patches._replace(padding=tuple((-lo, -hi) for lo, hi in patches.padding))
  return _pad(x, opposite).astype(cols.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _im2col_abstract(x: Any, *, patches: Patches) -> Any:
  lead = x.shape[: -patches.rank - 1]
  return _primitive.out_aval(x, (*lead, *patches.out_extent, math.prod(patches.window), x.shape[-1]))


def _col2im_abstract(cols: Any, *, patches: Patches) -> Any:
  return _primitive.out_aval(cols, (*cols.shape[: -patches.rank - 2], *patches.extent, cols.shape[-1]))


im2col_p = _primitive.define(
  "im2col", abstract_eval=_im2col_abstract, reference=_im2col_reference, params=["patches"]
)
col2im_p = _primitive.define(
  "col2im", abstract_eval=_col2im_abstract, reference=_col2im_reference, params=["patches"]
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# im2col  x -> cols
# col2im  cols -> x    each linear, and the other's adjoint


def _im2col(x: Array, **params: Any) -> Any:
  return _primitive.bind(im2col_p, x, **params)


def _col2im(cols: Array, **params: Any) -> Any:
  return _primitive.bind(col2im_p, cols, **params)


_primitive.linear_in_first(im2col_p, _im2col_reference, transpose=_col2im)
_primitive.linear_in_first(col2im_p, _col2im_reference, transpose=_im2col)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _attributes(*_: Any, patches: Patches) -> dict[str, Any]:
  """The high padding is left out: it only says where the output ends."""
  low = [lo for lo, _ in patches.padding]
  spec = {"window": patches.window, "stride": patches.stride, "low": low, "dilation": patches.dilation}
  return {k: np.asarray(v, np.int64) for k, v in spec.items()}


def _rule(patches: Patches) -> tuple[str, str]:
  """Of x and of cols."""
  return "... " + ". " * patches.rank + "c", "... " + ". " * (patches.rank + 1) + "c"


_primitive.set_shards(im2col_p, lambda _, patches: " -> ".join(_rule(patches)))
_primitive.set_shards(col2im_p, lambda _, patches: " -> ".join(_rule(patches)[::-1]))

for _p, _target, _ref in (
  (im2col_p, "jaxdnn.im2col.v1", _im2col_reference),
  (col2im_p, "jaxdnn.col2im.v1", _col2im_reference),
):
  _primitive.batch_leading(_p)
  _primitive.lower_to_cuda(_p, _target, _ref, attributes=_attributes, integers=INTEGERS)
