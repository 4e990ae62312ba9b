"""Pooling of what a mask keeps: selections around the primitives, which know no masks.

    maximum   pool(where ? x : -inf), whose winner is set right where it is not the mask's
    average   sum(where ? x : 0) / sum(where ? 1 : 0)

A mask is an array in the view of a primitive, `[leading..., *spatial, trailing]`, whole in its spatial dimensions; in
the others it broadcasts, so that a mask without channels is pooled without them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _axes, _masks, _primitive
from jaxdnn._pool import primitives, reference
from jaxdnn._pool.geometry import Geometry, Pairs


def spread(name: str, where: Any, x: Array, spatial: Sequence[int]) -> Array:
  """The mask as `over_windows` takes it beside `x`: whole along `spatial`, and whole or absent after that."""
  where = _axes.aligned_mask(name, where, x.shape)
  after = range(spatial[-1] + 1, x.ndim)
  whole = {*spatial, *(after if any(where.shape[d] > 1 for d in after) else ())}
  shape = [x.shape[d] if d in whole else n for d, n in enumerate(where.shape)]
  return _axes.sharded_like(x, jnp.broadcast_to(where, shape))


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def max_pool(x: Array, where: Array, geometry: Geometry, minimum: bool, indexed: bool) -> tuple[Array, ...]:
  """The maximum, and the number of the cell that it is in with `indexed`."""
  nothing = jnp.asarray(reference.least(x.dtype, minimum), x.dtype)
  spared = jnp.where(where, x, nothing)
  if not indexed:
    return (primitives.max_pool(spared, geometry=geometry, minimum=minimum),)
  y, index = primitives.indexed_max_pool(spared, geometry=geometry, minimum=minimum)
  # A masked element ties with an unmasked -inf. Where that is the maximum, the first unmasked element is.
  some, first = primitives.indexed_max_pool(where.astype(jnp.float32), geometry=geometry)
  index = jnp.where(y == nothing, first, index)
  return y, jnp.where(some > 0, index, jnp.asarray(geometry.no_cell, index.dtype))


@max_pool.defjvp
def _max_pool_jvp(geometry: Geometry, minimum: bool, indexed: bool, primals: Any, tangents: Any) -> Any:
  (x, where), (t, _) = primals, tangents
  y, index = max_pool(x, where, geometry, minimum, True)
  # Of t only what the index names is read, which is unmasked.
  dy = primitives.gather(t, index, geometry=geometry)
  results = 2 if indexed else 1
  return (y, index)[:results], (dy, np.zeros(index.shape, jax.dtypes.float0))[:results]


def avg_pool(x: Array, where: Array, geometry: Geometry, padding: Pairs) -> Array:
  """The average of the unmasked elements, among which so much of `padding` counts as zeros; 0 where there is none."""
  wide = _primitive.accumulator_dtype(x.dtype)
  total, count = (
    primitives.sum_pool_in_passes(a.astype(wide), geometry=geometry, divisor=1.0)
    for a in (_masks.select(where, x), where)
  )
  nowhere = ((0, 0),) * geometry.rank
  if padding != nowhere:
    count = count + (reference.cells(count, geometry, padding) - reference.cells(count, geometry, nowhere))
  return (total / jnp.maximum(count, 1)).astype(x.dtype)
