"""Pooling: the maximum or the average over sliding windows, in one to three spatial dimensions.

Output element `o` of one channel covers the input positions `o * stride - low + k * dilation` for `k` below `window`,
in each spatial dimension; those outside the input are padding, which no maximum takes and no average adds.

Arrays are channels-last with any number of leading dimensions; another `layout` is a transpose around that call. On a
GPU one thread computes a few channels of one element, backward too: it gathers what an input element receives from
the windows over it, so that nothing needs atomics and every run gives the same bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _primitive, _sharding
from jaxdnn._arguments import Padding, dilated, explicit_padding, per_dimension

# Public functions ----------------------------------------------------------------------------------------------------


def max_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  layout: str | None = None,
) -> Array:
  """Maximum over sliding windows: `y[o] = max over k of x[o * stride - low + k * dilation]`, channel by channel.

  Args:
    x: floating-point or integer array `[..., *spatial, channels]`, with any number of leading dimensions, or as
      `layout` says.
    window: 1 to 3 integers: the window's size along each spatial dimension, and how many of those there are.
    stride: distance between windows, one integer or one per spatial dimension. **None means 1**, as in `flax.linen`
      and `lax.reduce_window`; it does not mean `window`, as elsewhere.
    padding: "VALID" (none), "SAME" (an output of `ceil(input / stride)`, the odd cell at the end), "SAME_LOWER" (the
      odd cell at the start), one integer for every side, or a `(low, high)` pair per spatial dimension. Negative
      padding crops.
    dilation: distance between the cells of a window, one integer or one per spatial dimension.
    layout: None, or one letter per dimension of `x`, with N the batch, C the channels and any others the spatial
      dimensions in order: "NHWC", "NCHW", "NCDHW", "NCL".

  Returns:
    An array of `x`'s type and layout, of spatial extent `max(0, (input + low + high - (window - 1) * dilation - 1) //
    stride + 1)`. The first maximum in row-major window order is the one that counts, and the first NaN before any
    number; derivatives of every order, in both modes, follow that element alone. Padding never counts: a window that
    holds nothing else gives -inf (the least integer), and no gradient.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, or an `x` sharded along a spatial dimension.

  Example:
    >>> jaxdnn.max_pool(jnp.array([[[1.0], [3.0], [2.0], [5.0]]]), (2,), stride=2)
    Array([[[3.],
            [5.]]], dtype=float32)
  """
  x = jnp.asarray(x)
  if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
    raise TypeError(f"max_pool: x must be floating-point or integer, got {x.dtype}")
  return _apply("max_pool", _max_pool, x, window, stride, padding, dilation, layout)


def avg_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  count_include_pad: bool = True,
  layout: str | None = None,
) -> Array:
  """Average over sliding windows: `y[o] = sum over k of x[o * stride - low + k * dilation] / count`.

  Args:
    x: floating-point array `[..., *spatial, channels]`, with any number of leading dimensions, or as `layout` says.
    window: 1 to 3 integers: the window's size along each spatial dimension, and how many of those there are.
    stride: distance between windows, one integer or one per spatial dimension. **None means 1**, as in `flax.linen`
      and `lax.reduce_window`; it does not mean `window`, as elsewhere.
    padding: as in `max_pool`.
    dilation: distance between the cells of a window, one integer or one per spatial dimension.
    count_include_pad: whether padding counts. True: `count` is the size of the window, everywhere. False: it is the
      number of the window's cells that lie inside `x`.
    layout: as in `max_pool`.

  Returns:
    An array of `x`'s type and layout, of spatial extent as in `max_pool`. A window that holds nothing but padding
    gives 0. The 16-bit types are summed in float32.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, or an `x` sharded along a spatial dimension.

  Example:
    >>> jaxdnn.avg_pool(jnp.array([[[1.0], [3.0], [2.0]]]), (2,), padding="SAME", count_include_pad=False)
    Array([[[2. ],
            [2.5],
            [2. ]]], dtype=float32)
  """
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"avg_pool: x must be floating-point, got {x.dtype}")

  def call(x: Array, geometry: Geometry) -> Any:
    return _avg_pool(x, geometry=geometry, include_pad=bool(count_include_pad))

  return _apply("avg_pool", call, x, window, stride, padding, dilation, layout)


class Geometry(NamedTuple):
  """Where the windows lie: the static parameter of every pooling primitive, an entry per spatial dimension."""

  extent: tuple[int, ...]
  """Of the input, which the output's does not determine."""
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
      max(0, (i + lo + hi - dilated(w, d)) // s + 1)
      for i, w, s, (lo, hi), d in zip(*self, strict=True)
    )

  @property
  def index_dtype(self) -> np.dtype[Any]:
    """Of a cell's row-major number in its window; the greatest uint8, or -1, stands for no cell."""
    return np.dtype(np.uint8 if math.prod(self.window) <= 255 else np.int32)

  @property
  def no_cell(self) -> int:
    return 255 if self.index_dtype == np.uint8 else -1


def _apply(
  name: str,
  call: Callable[[Array, Geometry], Array],
  x: Array,
  window: Any,
  stride: Any,
  padding: Any,
  dilation: Any,
  layout: Any,
) -> Array:
  """`call(x, geometry)` with `x` channels-last, shard by shard where it is sharded."""
  if isinstance(window, str) or not isinstance(window, Sequence | np.ndarray):
    raise TypeError(f"{name}: window must be a sequence of 1 to 3 integers, got {window!r}")
  rank = len(window)
  if not 1 <= rank <= 3:
    raise ValueError(f"{name}: window must have 1 to 3 entries, one per spatial dimension, got {window!r}")
  order = _channels_last_order(name, layout, rank, x.shape)
  if x.ndim < rank + 1:
    raise ValueError(f"{name}: window {tuple(window)} needs x of shape [..., {rank} spatial, channels], got {x.shape}")
  x = x.transpose(order)
  geometry = _geometry(name, x.shape[-rank - 1 : -1], window, stride, padding, dilation)
  kept = (*range(x.ndim - rank - 1), x.ndim - 1)
  y = _sharding.map_shards(
    lambda x: call(x, geometry), [x], keep=[kept], out_like=(0, [d if d in kept else None for d in range(x.ndim)])
  )
  return y.transpose(np.argsort(order))


def _channels_last_order(name: str, layout: Any, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
  if layout is None:
    return tuple(range(len(shape)))
  if not isinstance(layout, str):
    raise TypeError(f"{name}: layout must be a string or None, got {layout!r}")
  spatial = [letter for letter in layout if letter not in "NC"]
  if len(set(layout)) != len(layout) or len(spatial) != rank or len(layout) != rank + 2:
    raise ValueError(
      f"{name}: layout must name N, C and the {rank} spatial dimensions of window once each, got {layout!r}"
    )
  if len(layout) != len(shape):
    raise ValueError(f"{name}: layout {layout!r} needs x of {len(layout)} dimensions, got shape {shape}")
  return tuple(layout.index(letter) for letter in ("N", *spatial, "C"))


def _geometry(name: str, extent: tuple[int, ...], window: Any, stride: Any, padding: Any, dilation: Any) -> Geometry:
  rank = len(extent)
  window, dilation = per_dimension(name, "window", window, rank), per_dimension(name, "dilation", dilation, rank)
  stride = per_dimension(name, "stride", 1 if stride is None else stride, rank)
  dilation = tuple(1 if w == 1 else d for w, d in zip(window, dilation, strict=True))
  reach = tuple(dilated(w, d) for w, d in zip(window, dilation, strict=True))
  padding = explicit_padding(name, padding, extent, reach, stride)
  padded = [i + lo + hi for i, (lo, hi) in zip(extent, padding, strict=True)]
  for i, (lo, hi), p, r in zip(extent, padding, padded, reach, strict=True):
    if -lo > i or -hi > i or p < 0:
      raise ValueError(f"{name}: padding ({lo}, {hi}) crops more than the {i} elements of a spatial dimension")
    if max(i, abs(lo), abs(hi), p, r) >= 2**30:
      raise ValueError(f"{name}: a spatial dimension of {i} with padding ({lo}, {hi}) or a window over {r} pass 2**30")
  if math.prod(window) >= 2**30:
    raise ValueError(f"{name}: window {window} has more than 2**30 cells")
  # A stride past the padded input and the input's extent give the same one window.
  stride = tuple(min(s, max(p, 1)) for s, p in zip(stride, padded, strict=True))
  return Geometry(tuple(extent), window, stride, padding, dilation)


# Reference -----------------------------------------------------------------------------------------------------------
#
# All five run over the cells of the window in row-major order, with every window's k-th cell as one array.


def _pad(x: Array, value: Any, g: Geometry) -> Array:
  config = [(0, 0, 0)] * (x.ndim - g.rank - 1) + [(lo, hi, 0) for lo, hi in g.padding] + [(0, 0, 0)]
  return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _crop(padded: Array, g: Geometry) -> Array:
  return _pad(padded, 0, g._replace(padding=tuple((-lo, -hi) for lo, hi in g.padding)))


def _cell_start(k: Array, ndim: int, g: Geometry) -> list[Array]:
  zero = jnp.zeros_like(k)
  cell = [i * d for i, d in zip(jnp.unravel_index(k, g.window), g.dilation, strict=True)]
  return [zero] * (ndim - g.rank - 1) + cell + [zero]


def _cells(padded: Array, k: Array, g: Geometry) -> Array:
  """The k-th cell of every window."""
  lead = padded.ndim - g.rank - 1
  span = [(o - 1) * s + 1 for o, s in zip(g.out_extent, g.stride, strict=True)]
  sizes = (*padded.shape[:lead], *span, padded.shape[-1])
  block = lax.dynamic_slice(padded, _cell_start(k, padded.ndim, g), sizes)
  return lax.slice(block, (0,) * block.ndim, sizes, (*[1] * lead, *g.stride, 1))


def _add_to_cells(padded: Array, values: Array, k: Array, g: Geometry) -> Array:
  """The adjoint of `_cells`: adds `values` to the k-th cell of every window."""
  lead = padded.ndim - g.rank - 1
  config = [(0, 0, 0)] * lead + [(0, 0, s - 1) for s in g.stride] + [(0, 0, 0)]
  block = lax.pad(values, jnp.zeros((), values.dtype), config)
  start = _cell_start(k, padded.ndim, g)
  return lax.dynamic_update_slice(padded, lax.dynamic_slice(padded, start, block.shape) + block, start)


def _for_each_cell(body: Callable[[Array, Any], Any], init: Any, g: Geometry) -> Any:
  if 0 in g.out_extent:
    return init
  # The first step stands outside the loop: under shard_map it gives the carry the type that the others keep.
  return lax.fori_loop(1, math.prod(g.window), body, body(jnp.int32(0), init))


def _max_pool_reference(x: Array, *, geometry: Geometry, indexed: bool) -> list[Array]:
  g = geometry
  least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min  # type: ignore[no-untyped-call]
  padded = _pad(x, least, g)
  inside = _pad(jnp.ones((*[1] * (x.ndim - g.rank - 1), *g.extent, 1), bool), False, g)

  def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    best, index = carry
    v = _cells(padded, k, g)
    better = (v > best) | ((v != v) & (best == best)) | (index == g.no_cell)
    wins = better & _cells(inside, k, g)
    return jnp.where(wins, v, best), jnp.where(wins, k.astype(index.dtype), index)

  shape = _out_shape(x, g)
  best, index = _for_each_cell(step, (jnp.full(shape, least, x.dtype), jnp.full(shape, g.no_cell, g.index_dtype)), g)
  return [best, index] if indexed else [best]


def _gather_reference(t: Array, index: Array, *, geometry: Geometry) -> Any:
  padded = _pad(t, 0, geometry)

  def step(k: Array, y: Array) -> Array:
    return jnp.where(index == k.astype(index.dtype), _cells(padded, k, geometry), y)

  return _for_each_cell(step, jnp.zeros(index.shape, t.dtype), geometry)


def _scatter_reference(g: Array, index: Array, *, geometry: Geometry) -> Array:
  wide = g.astype(_primitive.accumulator_dtype(g.dtype))

  def step(k: Array, padded: Array) -> Array:
    chosen = index == k.astype(index.dtype)
    return _add_to_cells(padded, jnp.where(chosen, wide, jnp.zeros_like(wide)), k, geometry)

  return _crop(_for_each_cell(step, _padded_zeros(wide, geometry), geometry), geometry).astype(g.dtype)


def _avg_pool_reference(x: Array, *, geometry: Geometry, include_pad: bool) -> Array:
  padded = _pad(x.astype(_primitive.accumulator_dtype(x.dtype)), 0, geometry)
  total: Array = _for_each_cell(
    lambda k, y: y + _cells(padded, k, geometry), jnp.zeros(_out_shape(x, geometry), padded.dtype), geometry
  )
  return (total / _count(total, geometry, include_pad)).astype(x.dtype)


def _avg_pool_bwd_reference(g: Array, *, geometry: Geometry, include_pad: bool) -> Array:
  wide = g.astype(_primitive.accumulator_dtype(g.dtype))
  share = wide / _count(wide, geometry, include_pad)
  padded = _for_each_cell(
    lambda k, padded: _add_to_cells(padded, share, k, geometry), _padded_zeros(wide, geometry), geometry
  )
  return _crop(padded, geometry).astype(g.dtype)


def _padded_zeros(y: Array, g: Geometry) -> Array:
  padded = [i + lo + hi for i, (lo, hi) in zip(g.extent, g.padding, strict=True)]
  return jnp.zeros((*y.shape[: -g.rank - 1], *padded, y.shape[-1]), y.dtype)


def _count(y: Array, g: Geometry, include_pad: bool) -> Array:
  """What each window's sum is divided by: 1 where the sum is empty."""
  if include_pad:
    return jnp.asarray(math.prod(g.window), y.dtype)
  count = jnp.ones((1,) * y.ndim, y.dtype)
  for axis, i, w, s, (lo, _), d, o in zip(range(-g.rank - 1, -1), *g, g.out_extent, strict=True):
    start = np.arange(o) * s - lo
    inside = np.minimum(w, -((start - i) // d)) - np.maximum(0, -(start // d))
    count = count * np.maximum(inside, 0).astype(y.dtype).reshape([o if a == axis else 1 for a in range(-y.ndim, 0)])
  return jnp.maximum(count, 1)


# Primitives ----------------------------------------------------------------------------------------------------------


def _out_shape(x: Any, g: Geometry) -> tuple[int, ...]:
  return (*x.shape[: -g.rank - 1], *g.out_extent, x.shape[-1])


def _max_pool_abstract(x: Any, *, geometry: Geometry, indexed: bool) -> Any:
  y = _primitive.out_aval(x, _out_shape(x, geometry))
  return [y, _primitive.out_aval(x, y.shape, geometry.index_dtype)] if indexed else [y]


def _down(x: Any, *_: Any, geometry: Geometry, **__: Any) -> Any:
  return _primitive.out_aval(x, _out_shape(x, geometry))


def _up(g: Any, *_: Any, geometry: Geometry, **__: Any) -> Any:
  return _primitive.out_aval(g, (*g.shape[: -geometry.rank - 1], *geometry.extent, g.shape[-1]))


max_pool_p = _primitive.define(
  "max_pool",
  abstract_eval=_max_pool_abstract,
  reference=_max_pool_reference,
  params=["geometry", "indexed"],
  multiple_results=True,
)
pool_gather_p = _primitive.define(
  "pool_gather", abstract_eval=_down, reference=_gather_reference, params=["geometry"]
)
pool_scatter_p = _primitive.define(
  "pool_scatter", abstract_eval=_up, reference=_scatter_reference, params=["geometry"]
)
avg_pool_p = _primitive.define(
  "avg_pool", abstract_eval=_down, reference=_avg_pool_reference, params=["geometry", "include_pad"]
)
avg_pool_bwd_p = _primitive.define(
  "avg_pool_bwd", abstract_eval=_up, reference=_avg_pool_bwd_reference, params=["geometry", "include_pad"]
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# max_pool      x        -> y, index   index: the row-major number of each window's winning cell
# pool_gather   t, index -> y          the tangent of the element that won
# pool_scatter  g, index -> x          the sum over the windows that an element won
# avg_pool      x        -> y          linear
# avg_pool_bwd  g        -> x
#
# With the index fixed, max pooling is linear: pool_gather and pool_scatter are each other's adjoint, and so are the
# two of average pooling. Nothing is kept for the backward pass but the index, a byte an element; without
# differentiation it is not even written, since the rule below is what asks for it.


def _max_pool(x: Array, geometry: Geometry) -> Any:
  (y,) = _primitive.bind(max_pool_p, x, geometry=geometry, indexed=False)
  return y


def _max_pool_jvp(primals: Any, tangents: Any, *, geometry: Geometry, indexed: bool) -> Any:
  y, index = _primitive.bind(max_pool_p, *primals, geometry=geometry, indexed=True)
  (t,) = tangents
  dy = _primitive.zero_tangent(y) if _primitive.is_zero(t) else _gather(t, index, geometry=geometry)
  results = 2 if indexed else 1
  return [y, index][:results], [dy, _primitive.zero_tangent(index)][:results]


def _gather(t: Array, index: Array, **params: Any) -> Any:
  return _primitive.bind(pool_gather_p, t, index, **params)


def _scatter(g: Array, index: Array, **params: Any) -> Any:
  return _primitive.bind(pool_scatter_p, g, index, **params)


def _avg_pool(x: Array, **params: Any) -> Any:
  return _primitive.bind(avg_pool_p, x, **params)


def _avg_pool_bwd(g: Array, **params: Any) -> Any:
  return _primitive.bind(avg_pool_bwd_p, g, **params)


_primitive.set_jvp(max_pool_p, _max_pool_jvp)
_primitive.linear_in_first(pool_gather_p, _gather_reference, transpose=_scatter)
_primitive.linear_in_first(pool_scatter_p, _scatter_reference, transpose=_gather)
_primitive.linear_in_first(avg_pool_p, _avg_pool_reference, transpose=_avg_pool_bwd)
_primitive.linear_in_first(avg_pool_bwd_p, _avg_pool_bwd_reference, transpose=_avg_pool)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _attributes(*_: Any, geometry: Geometry, **params: Any) -> dict[str, Any]:
  """The high padding is left out: it only says where the output ends."""
  low = [lo for lo, _ in geometry.padding]
  spec = {"window": geometry.window, "stride": geometry.stride, "low": low, "dilation": geometry.dilation}
  flags = {k: v for k, v in params.items() if k == "include_pad"}
  return {k: np.asarray(v, np.int64) for k, v in spec.items()} | flags


for _p, _target, _reference in (
  (max_pool_p, "jaxdnn.max_pool.v1", _max_pool_reference),
  (pool_gather_p, "jaxdnn.pool_gather.v1", _gather_reference),
  (pool_scatter_p, "jaxdnn.pool_scatter.v1", _scatter_reference),
  (avg_pool_p, "jaxdnn.avg_pool.v1", _avg_pool_reference),
  (avg_pool_bwd_p, "jaxdnn.avg_pool_bwd.v1", _avg_pool_bwd_reference),
):
  _primitive.batch_leading(_p)
  _primitive.lower_to_cuda(_p, _target, _reference, attributes=_attributes)
