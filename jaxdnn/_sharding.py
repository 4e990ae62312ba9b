"""Runs an operator shard by shard under an explicit mesh. Knows no operator.

XLA gathers the operands of a custom call that it does not know. Under a mesh with explicit axes the sharding of an
array is part of its type, so a public function can map itself over the shards with `jax.shard_map` and keep the data
where it is; inside a user's own `shard_map`, and on one device, nothing is left to do. Automatic axes, of which no type
tells, are `_partition`'s.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec


def map_shards(
  fn: Callable[..., Array],
  operands: Sequence[Array],
  *,
  keep: Sequence[Sequence[int]],
  out_like: tuple[int, Sequence[int | None]],
) -> Array:
  """Calls `fn(*operands)`, once per shard where an operand is sharded over explicit mesh axes.

  Args:
    fn: the operator, which must treat each index along a kept dimension independently.
    operands: its arrays.
    keep: for each operand, the dimensions that may be sharded.
    out_like: `(i, dims)`: dimension `d` of the result is sharded like dimension `dims[d]` of operand `i`, or not at
      all where `dims[d]` is None.

  Raises:
    ValueError: an operand is sharded along a dimension that is not in its `keep`.
  """
  specs = [tuple(jax.typeof(x).sharding.spec) for x in operands]
  if not any(axis is not None for spec in specs for axis in spec):
    return fn(*operands)
  for i, (x, spec, kept) in enumerate(zip(operands, specs, keep, strict=True)):
    for dim, axis in enumerate(spec):
      if axis is not None and dim not in kept:
        raise ValueError(
          f"operand {i} of shape {x.shape} is sharded over mesh axis {axis!r} along dimension {dim}, which this "
          f"operator couples; it may be sharded along dimensions {tuple(kept)} only. Reshard it first."
        )
  i, dims = out_like
  out: Any = [None if d is None else specs[i][d] for d in dims]
  # An operand without elements stands for one that is absent, and is made anew in each shard: where differentiation
  # keeps it, `shard_map` would make it a sharded result, and on a sharded array without elements XLA crashes.
  empty = [x.size == 0 and not any(spec) for x, spec in zip(operands, specs, strict=True)]

  def of_shard(*given: Array) -> Array:
    rest = iter(given)
    return fn(*[jnp.zeros(x.shape, x.dtype) if e else next(rest) for x, e in zip(operands, empty, strict=True)])

  present = [(PartitionSpec(*s), x) for x, s, e in zip(operands, specs, empty, strict=True) if not e]
  in_specs, given = zip(*present, strict=True)
  return jax.shard_map(of_shard, in_specs=in_specs, out_specs=PartitionSpec(*out))(*given)
