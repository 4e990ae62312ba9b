"""Pooling in plain lax and jnp: the lowering on every platform but CUDA, and there for what no kernel takes.

Every function runs over the cells of the window in row-major order, with every window's k-th cell as one array.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _primitive
from jaxdnn._pool.geometry import Geometry, Pairs

# Cells ---------------------------------------------------------------------------------------------------------------


def out_shape(x: Any, g: Geometry) -> tuple[int, ...]:
  return (*x.shape[: -g.rank - 1], *g.out_extent, x.shape[-1])


def _pad(x: Array, g: Geometry, *, sign: int = 1) -> Array:
  """With the padding around it, or without it where `sign` is -1."""
  spatial = [(sign * lo, sign * hi, 0) for lo, hi in g.padding]
  return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - g.rank - 1) + spatial + [(0, 0, 0)])


def _cell(k: Array, g: Geometry) -> list[Array]:
  """The position in its window of the k-th cell."""
  cells, k = [], k.astype(jnp.int32)
  for w in reversed(g.window):
    cells.append(lax.rem(k, np.int32(w)))
    k = lax.div(k, np.int32(w))
  return cells[::-1]


def _start(k: Array, g: Geometry, lead: int) -> list[Array]:
  """Where in the padded array the first window's k-th cell is."""
  zero = jnp.int32(0)
  return [*[zero] * lead, *(i * jnp.int32(d) for i, d in zip(_cell(k, g), g.dilation, strict=True)), zero]


def _cells(padded: Array, k: Array, g: Geometry) -> Array:
  """The k-th cell of every window; of a window that has none, anything."""
  lead = padded.ndim - g.rank - 1
  if g.bins:
    for axis, (cell, start) in enumerate(zip(_cell(k, g), g.starts(), strict=True), lead):
      padded = jnp.take(padded, jnp.asarray(start, jnp.int32) + cell, axis, mode="clip")
    return padded
  span = [(o - 1) * s + 1 for o, s in zip(g.out_extent, g.stride, strict=True)]
  sizes = (*padded.shape[:lead], *span, padded.shape[-1])
  block = lax.dynamic_slice(padded, _start(k, g, lead), sizes)
  return lax.slice(block, (0,) * block.ndim, sizes, (*[1] * lead, *g.stride, 1))


def _add_to_cells(padded: Array, values: Array, k: Array, g: Geometry) -> Array:
  """The adjoint of `_cells`: adds `values` to the k-th cell of every window."""
  lead = padded.ndim - g.rank - 1
  if g.bins:
    (added,) = jax.linear_transpose(lambda p: _cells(p, k, g), padded)(values)
    return padded + added
  config = [(0, 0, 0)] * lead + [(0, 0, s - 1) for s in g.stride] + [(0, 0, 0)]
  block = lax.pad(values, jnp.zeros((), values.dtype), config)
  start = _start(k, g, lead)
  return lax.dynamic_update_slice(padded, lax.dynamic_slice(padded, start, block.shape) + block, start)


def _inside(k: Array, g: Geometry) -> Array:
  """Whether the k-th cell of each window is in the window and in the input, not in the padding."""
  result = jnp.ones((1,) * (g.rank + 1), bool)
  dimensions = zip(_cell(k, g), g.window, g.starts(), g.sizes(), g.extent, g.dilation, strict=True)
  for axis, (cell, window, start, size, i, d) in enumerate(dimensions):
    cells = np.arange(window)[:, None]
    position = start + cells * d
    inside = (cells < size) & (position >= 0) & (position < i)
    shape = [-1 if a == axis else 1 for a in range(g.rank + 1)]
    result &= lax.dynamic_index_in_dim(inside, cell, keepdims=False).reshape(shape)
  return result


def _where(inside: Array, v: Array, otherwise: Array) -> Array:
  return jnp.where(inside.reshape((1,) * (v.ndim - inside.ndim) + inside.shape), v, otherwise)


def _for_each_cell(body: Callable[[Array, Any], Any], init: Any, g: Geometry) -> Any:
  if 0 in g.out_extent:
    return init
  # The first step stands outside the loop: under shard_map it gives the carry the type that the others keep.
  return lax.fori_loop(1, math.prod(g.window), body, body(jnp.int32(0), init))


def _padded_zeros(y: Array, g: Geometry) -> Array:
  padded = [i + lo + hi for i, (lo, hi) in zip(g.extent, g.padding, strict=True)]
  return jnp.zeros((*y.shape[: -g.rank - 1], *padded, y.shape[-1]), y.dtype)


# Selections ----------------------------------------------------------------------------------------------------------


def least(dtype: Any, minimum: bool) -> Any:
  """What the maximum, or the minimum, of nothing is."""
  if jnp.issubdtype(dtype, jnp.floating):
    return np.inf if minimum else -np.inf
  return jnp.iinfo(dtype).max if minimum else jnp.iinfo(dtype).min


def max_pool(x: Array, *, geometry: Geometry, minimum: bool, indexed: bool) -> list[Array]:
  g = geometry
  if not indexed and len(passes := g.passes()) > 1:
    for part in passes:
      (x,) = max_pool(x, geometry=part, minimum=minimum, indexed=False)
    return [x]
  padded = _pad(x, g)

  def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    best, index = carry
    v = _cells(padded, k, g)
    better = (v < best if minimum else v > best) | ((v != v) & (best == best)) | (index == g.no_cell)
    wins = _where(_inside(k, g), better, jnp.zeros_like(better))
    return jnp.where(wins, v, best), jnp.where(wins, k.astype(index.dtype), index)

  shape, nothing = out_shape(x, g), least(x.dtype, minimum)
  start = jnp.full(shape, nothing, x.dtype), jnp.full(shape, g.no_cell, g.index_dtype)
  best, index = _for_each_cell(step, start, g)
  return [best, index] if indexed else [best]


def gather(t: Array, index: Array, *, geometry: Geometry) -> Any:
  padded = _pad(t, geometry)

  def step(k: Array, y: Array) -> Array:
    return jnp.where(index == k.astype(index.dtype), _cells(padded, k, geometry), y)

  return _for_each_cell(step, jnp.zeros(index.shape, t.dtype), geometry)


def scatter(g: Array, index: Array, *, geometry: Geometry) -> Array:
  if geometry.is_whole:
    cells = jnp.arange(math.prod(geometry.window), dtype=index.dtype).reshape((*geometry.window, 1))
    cells = cells.reshape((1,) * (g.ndim - cells.ndim) + cells.shape)
    return jnp.where(index == cells, g, jnp.zeros_like(g))
  wide = g.astype(_primitive.accumulator_dtype(g.dtype))

  def step(k: Array, padded: Array) -> Array:
    chosen = index == k.astype(index.dtype)
    return _add_to_cells(padded, jnp.where(chosen, wide, jnp.zeros_like(wide)), k, geometry)

  return _pad(_for_each_cell(step, _padded_zeros(wide, geometry), geometry), geometry, sign=-1).astype(g.dtype)


# Sums ----------------------------------------------------------------------------------------------------------------


def sum_pool(x: Array, *, geometry: Geometry, divisor: float | Pairs) -> Array:
  padded = _pad(x.astype(_primitive.accumulator_dtype(x.dtype)), geometry)

  def step(k: Array, y: Array) -> Array:
    v = _cells(padded, k, geometry)
    return y + _where(_inside(k, geometry), v, jnp.zeros_like(v))

  total: Array = _for_each_cell(step, jnp.zeros(out_shape(x, geometry), padded.dtype), geometry)
  return divided(total, geometry, divisor).astype(x.dtype)


def sum_pool_bwd(g: Array, *, geometry: Geometry, divisor: float | Pairs) -> Array:
  share = divided(g.astype(_primitive.accumulator_dtype(g.dtype)), geometry, divisor)
  if geometry.is_whole:
    return jnp.broadcast_to(share.astype(g.dtype), (*g.shape[: -geometry.rank - 1], *geometry.extent, g.shape[-1]))

  def step(k: Array, padded: Array) -> Array:
    return _add_to_cells(padded, _where(_inside(k, geometry), share, jnp.zeros_like(share)), k, geometry)

  padded = _for_each_cell(step, _padded_zeros(share, geometry), geometry)
  return _pad(padded, geometry, sign=-1).astype(g.dtype)


def divided(y: Array, g: Geometry, divisor: float | Pairs) -> Array:
  """By a number, or by the number of each window's cells in the input and so much padding; an empty sum is 0."""
  if not isinstance(divisor, tuple):
    return y if divisor == 1 else y / jnp.asarray(divisor, y.dtype)
  return y / jnp.maximum(cells(y, g, divisor), 1)


def cells(y: Array, g: Geometry, counted: Pairs) -> Array:
  """The number of each window's cells in the input and `counted` padding, of y's rank and type."""
  count = jnp.ones((1,) * y.ndim, y.dtype)
  for axis, inside in zip(range(-g.rank - 1, -1), g.counts(counted), strict=True):
    count = count * inside.astype(y.dtype).reshape([-1 if a == axis else 1 for a in range(-y.ndim, 0)])
  return count
