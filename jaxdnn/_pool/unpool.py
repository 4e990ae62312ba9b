"""The partial inverse of max pooling."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._arguments import Padding, array, flag, floating, per_dimension, window_rank
from jaxdnn._eager import compiled
from jaxdnn._pool import primitives
from jaxdnn._pool.apply import over_windows
from jaxdnn._pool.geometry import Geometry, make_geometry, spatial_axes


@compiled
def max_unpool(
  y: Array,
  indices: Array,
  window: Sequence[int],
  *,
  extent: int | Sequence[int],
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  layout: str | None = None,
) -> Array:
  """Puts the elements of `y` where `max_pool` found them, and zeros elsewhere.

  Elements that share a position add, in a fixed order; `torch.nn.functional.max_unpool2d` keeps any one of them. An
  index must lie in its own window, where `max_pool` and `min_pool` with the same arguments put it: an element with any
  other index is dropped, and its gradient is 0. The derivative in `y` is the gather of what went where.

  Args:
    y: floating-point array `[..., *spatial, channels]`, or as `layout` says.
    indices: integers of the same shape, as `max_pool(..., return_indices=True)` returns them.
    window: as given to `max_pool`.
    extent: the result's spatial extents, those of the array that was pooled: one integer or one per dimension.
    stride: as given to `max_pool`: None means 1.
    padding: as given to `max_pool`.
    dilation: as given to `max_pool`.
    ceil_mode: as given to `max_pool`.
    layout: as in `max_pool`.

  Returns:
    An array of `y`'s type and layout, of spatial extent `extent`.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, a `y` that is not what pooling an array of this
      `extent` gives, or operands sharded along a spatial dimension.

  Example:
    >>> x = jnp.array([[[1.0], [3.0], [2.0], [5.0]]])
    >>> y, indices = jaxdnn.max_pool(x, (2,), stride=2, return_indices=True)
    >>> jaxdnn.max_unpool(y, indices, (2,), stride=2, extent=4)[0, :, 0]
    Array([0., 3., 0., 5.], dtype=float32)
  """
  name = "max_unpool"
  y, indices = floating(name, "y", y), array(name, "indices", indices)
  if not jnp.issubdtype(indices.dtype, jnp.integer):
    raise TypeError(f"{name}: indices must be integers, got {indices.dtype}")
  if indices.shape != y.shape:
    raise ValueError(f"{name}: indices must have y's shape {y.shape}, got {indices.shape}")
  rank = window_rank(name, window)
  spatial = spatial_axes(name, layout, rank, y.shape)
  out = per_dimension(name, "extent", extent, rank)
  geometry, _ = make_geometry(name, out, window, stride, padding, dilation, flag(name, "ceil_mode", ceil_mode))
  pooled = tuple(y.shape[d] for d in spatial)
  if pooled != geometry.out_extent:
    raise ValueError(
      f"{name}: pooling an extent of {out} gives {geometry.out_extent}, but y has spatial extents {pooled}"
    )

  def unpool(y: Array, indices: Array) -> Any:
    return primitives.scatter(y, _cell_numbers(indices, geometry), geometry=geometry)

  return over_windows(unpool, [y, indices], spatial)  # type: ignore[no-any-return]


def _cell_numbers(flat: Array, g: Geometry) -> Array:
  """The inverse of `flat_indices`; what lies outside its window becomes no cell."""
  # As in `flat_indices`, but signed and wide enough for -1.
  rest = flat if flat.dtype.itemsize >= 4 and jnp.issubdtype(flat.dtype, jnp.signedinteger) else flat.astype(jnp.int32)
  valid, number, pitch = rest >= 0, jnp.zeros_like(rest), 1
  for d in reversed(range(g.rank)):
    start = jnp.asarray(g.starts()[d], rest.dtype).reshape((-1,) + (1,) * (g.rank - d))
    start = start.reshape((1,) * (flat.ndim - start.ndim) + start.shape)
    # Into the outermost dimension goes all that is left, so that a flat index past the end lies in no window.
    position = rest if d == 0 else rest % g.extent[d]
    offset = position - start
    cell = offset // g.dilation[d]
    valid = valid & (offset % g.dilation[d] == 0) & (cell >= 0) & (cell < g.window[d]) & (position < g.extent[d])
    number, rest, pitch = number + cell * pitch, rest // g.extent[d], pitch * g.window[d]
  return jnp.where(valid, number, jnp.full_like(number, g.no_cell)).astype(g.index_dtype)
