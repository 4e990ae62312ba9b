"""How a public pooling function reaches a primitive: layout, sharding, geometry."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _sharding
from jaxdnn._arguments import array

Pool = Callable[..., Any]
"""Of arrays `[leading..., *spatial, trailing]`, to one or several such arrays."""


def check_number(name: str, x: Any, argument: str = "x") -> Array:
  x = array(name, argument, x)
  if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
    raise TypeError(f"{name}: {argument} must be floating-point or integer, got {x.dtype}")
  return x


def over_windows(pool: Pool, operands: Sequence[Array], spatial: Sequence[int]) -> Any:
  """`pool(*operands)` along the dimensions `spatial`, shard by shard where an operand is sharded.

  What follows the spatial dimensions becomes one trailing dimension, so that channels-first and channels-last both
  are calls without a transpose; spatial dimensions that are not neighbours are brought together.
  """
  ndim, rank = operands[0].ndim, len(spatial)
  first = spatial[0]
  adjacent = tuple(spatial) == tuple(range(first, first + rank))
  others = [d for d in range(ndim) if d not in spatial]
  order = [*others[:-1], *spatial, *others[-1:]] if others else list(spatial)
  lead = first if adjacent else max(len(others) - 1, 0)

  def call(*xs: Array) -> Any:
    if not adjacent:
      xs = tuple(x.transpose(order) for x in xs)
    trailing = xs[0].shape[lead + rank :]
    results = pool(*(x.reshape(*x.shape[: lead + rank], math.prod(x.shape[lead + rank :])) for x in xs))

    def restore(y: Array) -> Array:
      y = y.reshape(*y.shape[:-1], *trailing)
      return y if adjacent else y.transpose(np.argsort(order))

    return tuple(map(restore, results)) if isinstance(results, tuple) else restore(results)

  out_like = 0, [d if d in others else None for d in range(ndim)]
  return _sharding.map_shards(call, operands, keep=[others] * len(operands), out_like=out_like)
