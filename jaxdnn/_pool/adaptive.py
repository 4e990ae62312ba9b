"""Adaptive pooling: as many windows as asked for, over an input of any extent."""

import operator
from collections.abc import Sequence
from typing import Any

from jax import Array

from jaxdnn._arguments import flag, floating, is_sequence
from jaxdnn._eager import compiled
from jaxdnn._pool import primitives
from jaxdnn._pool.apply import check_number, over_windows
from jaxdnn._pool.geometry import Geometry, make_bins, spatial_axes
from jaxdnn._pool.windows import flat_indices


@compiled
def adaptive_avg_pool(x: Array, output_size: Sequence[int | None], *, layout: str | None = None) -> Array:
  """Average over bins: output o of O over an extent I covers the elements `floor(o I / O)` to `ceil((o + 1) I / O)`.

  Bins differ by at most one element in size and overlap by at most one; each sum is divided by its bin's own size. They
  are `torch.nn.functional.adaptive_avg_pool1d`'s to `3d`'s. An `output_size` of ones is global pooling.

  Args:
    x: floating-point array `[..., *spatial, channels]`, with any number of leading dimensions, or as `layout` says.
    output_size: 1 to 3 integers, the output's spatial extents; None keeps the input's.
    layout: as in `max_pool`.

  Returns:
    An array of `x`'s type and layout, of spatial extent `output_size`.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, or an `x` sharded along a spatial dimension.

  Example:
    >>> jaxdnn.adaptive_avg_pool(jnp.arange(5.0).reshape(1, 5, 1), (2,))
    Array([[[1.],
            [3.]]], dtype=float32)
  """
  x = floating("adaptive_avg_pool", "x", x)
  spatial, geometry = _bins("adaptive_avg_pool", x, output_size, layout)
  divisor = ((0, 0),) * geometry.rank if geometry.bins else float(_cells(geometry))
  return over_windows(  # type: ignore[no-any-return]
    lambda x: primitives.sum_pool_in_passes(x, geometry=geometry, divisor=divisor), [x], spatial
  )


@compiled
def adaptive_max_pool(
  x: Array, output_size: Sequence[int | None], *, return_indices: bool = False, layout: str | None = None
) -> Array | tuple[Array, Array]:
  """Maximum over the bins of `adaptive_avg_pool`, by the rules of `max_pool` for ties and NaN.

  Args:
    x: floating-point or integer array `[..., *spatial, channels]`, or as `layout` says.
    output_size: as in `adaptive_avg_pool`.
    return_indices: as in `max_pool`.
    layout: as in `max_pool`.

  Returns:
    An array of `x`'s type and layout, of spatial extent `output_size`; with `return_indices` also the positions of the
    maxima, as in `max_pool`.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, or an `x` sharded along a spatial dimension.

  Example:
    >>> jaxdnn.adaptive_max_pool(jnp.arange(5.0).reshape(1, 5, 1), (2,))
    Array([[[2.],
            [4.]]], dtype=float32)
  """
  name = "adaptive_max_pool"
  x, return_indices = check_number(name, x), flag(name, "return_indices", return_indices)
  spatial, geometry = _bins(name, x, output_size, layout)

  def pool(x: Array) -> Any:
    if not return_indices:
      return primitives.max_pool(x, geometry=geometry)
    y, index = primitives.indexed_max_pool(x, geometry=geometry)
    return y, flat_indices(name, index, geometry)

  return over_windows(pool, [x], spatial)  # type: ignore[no-any-return]


def _bins(name: str, x: Array, output_size: Any, layout: Any) -> tuple[tuple[int, ...], Geometry]:
  if not is_sequence(output_size):
    raise TypeError(f"{name}: output_size must be a sequence of 1 to 3 integers or None, got {output_size!r}")
  if not 1 <= len(output_size) <= 3:
    raise ValueError(f"{name}: output_size must have 1 to 3 entries, one per spatial dimension, got {output_size!r}")
  spatial = spatial_axes(name, layout, len(output_size), x.shape)
  extent = tuple(x.shape[d] for d in spatial)
  try:
    bins = tuple(i if o is None else operator.index(o) for i, o in zip(extent, output_size, strict=True))
  except TypeError as e:
    raise TypeError(f"{name}: output_size must be a sequence of integers or None, got {output_size!r}") from e
  if any(b < 0 for b in bins):
    raise ValueError(f"{name}: output_size must not be negative, got {output_size!r}")
  return spatial, make_bins(name, extent, bins)


def _cells(g: Geometry) -> int:
  cells = 1
  for w in g.window:
    cells *= w
  return cells
