"""Keeps the operands of a primitive's kernels where they are on meshes with automatic axes. Knows no operator.

On such a mesh XLA divides the program among the devices, and shardings are no part of any type. XLA does not see into a
custom call: left to itself it gathers the operands and computes the whole result on every device. So a primitive is
lowered through `custom_partitioning`: XLA is told along which dimensions it may divide the call, and calls back, while
it compiles, for the program of one shard: the primitive itself on the shard's shapes, and what has to be added up over
shards. That stands below the primitive, whose rules of differentiation and batching it leaves alone.

A rule says, in the manner of an einsum, which dimensions are independent:

    "b n, b n -> b"    the first dimensions of two operands, and of the result, which is a sum over n
    "... n . c"        of every operand and result: any number of dimensions, n, one that is coupled, and c

Dimensions after those named are coupled too. XLA gathers what is sharded along a coupled dimension, and what does not
divide evenly. A dimension may be a multiple of another of its name, as of examples the bytes of a mask are: then a part
of the one must belong to the same part of the other.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Axes = Mapping[str, tuple[str, ...]]
"""The mesh axes over which each named dimension is sharded; those of the others are not there."""

Names = list[str | None]
"""Of an array's dimensions; None for one that is coupled."""


def automatic(ctx: Any) -> Any:
  """The lowering context in the form that `custom_partitioning` needs, or None where XLA does not divide the program.

  That is on one device; inside `shard_map`, whose axis context counts no devices; and on explicit meshes, whose
  operands are not sharded here. What is exported must not call back, and of a program for several platforms this cannot
  be told.
  """
  module = ctx.module_context
  count = getattr(module.axis_context, "num_devices", 1)
  # Only their number matters here. JAX names the devices to primitives that ask for them through a private registry,
  # and then refuses programs with two meshes.
  devices = tuple(jax.devices()[:count])
  explicit = any(AxisType.Explicit in aval.sharding.mesh.axis_types for aval in ctx.avals_in)
  several = len(ctx.platforms or module.platforms) > 1
  shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
  if not 1 < count == len(devices) or explicit or several or module.lowering_parameters.for_export or not shardy:
    return None
  context = dataclasses.replace(module.axis_context, device_assignment=devices)
  return ctx.replace(module_context=module.replace(axis_context=context))


def partitioned(
  ctx: Any, whole: Callable[..., Sequence[Any]], rule: str, on_shards: Callable[..., Sequence[Any]] | None = None
) -> Callable[..., Sequence[Any]] | None:
  """The function `whole`, which XLA may divide among devices as `rule` says, or None if nothing can be divided.

  Args:
    ctx: from `automatic`.
    on_shards: `(axes, *operands)` to the results on one shard, given the mesh axes of each dimension. None stands for
      `whole` of the shard, and the sums over shards of those results that lack a dimension.
  """
  avals, devices = ctx.avals_in, ctx.module_context.axis_context.device_assignment
  count, arrays = len(avals), [*avals, *jax.eval_shape(whole, *avals)]
  names = _names(rule, arrays, count)
  extents = _extents(names, arrays)
  if not extents:
    return None
  summed = [[name for name in extents if name not in dims] for dims in names[count:]]

  def partition(_: Any, operands: Any, results: Any) -> Any:
    mesh, axes = _mesh(names, [a.sharding for a in (*operands, *results)], extents, devices)

    def of_shard(*operands: Any) -> tuple[Any, ...]:
      if on_shards is not None and axes:
        return tuple(on_shards(axes, *operands))
      over = [tuple(axis for name in dims for axis in axes.get(name, ())) for dims in summed]
      return tuple(lax.psum(a, o) if o and a.size else a for a, o in zip(whole(*operands), over, strict=True))

    shardings = [NamedSharding(mesh, PartitionSpec(*[name and axes.get(name) for name in dims])) for dims in names]
    return mesh, of_shard, tuple(shardings[count:]), tuple(shardings[:count])

  call = custom_partitioning(lambda *operands: tuple(whole(*operands)))
  call.def_partition(partition, decode_shardings=False, **_sharding_rule(names, arrays, count, extents))
  return call


# Rules ---------------------------------------------------------------------------------------------------------------


def _names(rule: str, arrays: Sequence[Any], operands: int) -> list[Names]:
  left, arrow, right = rule.partition("->")
  patterns = [*left.split(","), *right.split(",")] if arrow else [rule] * len(arrays)
  names = [_expanded(pattern.split(), a.ndim) for pattern, a in zip(patterns, arrays, strict=True)]
  for i, (dims, a) in enumerate(zip(names, arrays, strict=True)):
    # An operand's dimension of 1 may be there to be broadcast, and one of 0 says that there is no operand or result.
    least = 1 if i < operands else 0
    names[i] = [name if extent > least else None for name, extent in zip(dims, a.shape, strict=True)]
  return names


def _expanded(tokens: list[str], rank: int) -> Names:
  if tokens[:1] == ["..."]:
    tokens = [*(f"lead{d}" for d in range(rank - len(tokens) + 1)), *tokens[1:]]
  named: Names = [None if token == "." else token for token in tokens]
  return named + [None] * (rank - len(named))


def _extents(names: list[Names], arrays: Sequence[Any]) -> dict[str, int]:
  """The extent of each dimension that may be sharded: the least of those of its name, which must divide the others.

  Names of dimensions that may not are taken out of `names`.
  """
  found: dict[str, list[int]] = {}
  for name, extent in _dimensions(names, [a.shape for a in arrays]):
    found.setdefault(name, []).append(extent)
  extents = {name: min(e) for name, e in found.items() if min(e) > 1 and not any(n % min(e) for n in e)}
  for dims in names:
    dims[:] = [name if name in extents else None for name in dims]
  return extents


def _dimensions(names: Sequence[Names], of_arrays: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Any]]:
  """Each named dimension of each array, with what `of_arrays` has for it."""
  for dims, values in zip(names, of_arrays, strict=True):
    yield from ((name, value) for name, value in zip(dims, values, strict=True) if name is not None)


def _sharding_rule(names: Sequence[Names], arrays: Sequence[Any], operands: int, extents: Mapping[str, int]) -> Any:
  """Shardy's form of it: of a multiple the outer factor, and coupled dimensions each with a name of its own."""
  fresh = (f"own{i}" for i in itertools.count())
  coupled, factors = [], {}

  def dimension(name: str | None, extent: int) -> str:
    if name is not None and extent == extents[name]:
      return name
    own = next(fresh)
    if name is None:
      coupled.append(own)
      return own
    factors[own] = extent // extents[name]
    return f"({name} {own})"

  texts = [" ".join(map(dimension, dims, a.shape)) for dims, a in zip(names, arrays, strict=True)]
  rule = f"{', '.join(texts[:operands])} -> {', '.join(texts[operands:])}"
  return {"sharding_rule": rule, "need_replication_factors": tuple(coupled), **factors}


# Shards --------------------------------------------------------------------------------------------------------------
#
# What XLA gives is a sharding of each array by itself, without a mesh: which part of it each device has. From these
# parts follows a mesh on which they all have axes.


def _mesh(
  names: Sequence[Names], shardings: Sequence[Any], extents: Mapping[str, int], devices: Sequence[Any]
) -> tuple[Mesh, Axes]:
  """A mesh of all devices, and the axes of all dimensions that can be sharded as they are, those of operands first."""
  parts: dict[str, list[int]] = {}
  found: tuple[list[int], Axes] = [len(devices)], {}
  of_arrays = [_parts(s, len(dims), devices) for dims, s in zip(names, shardings, strict=True)]
  for name, part in _dimensions(names, of_arrays):
    shards = max(part) + 1
    if name in parts or shards == 1 or extents[name] % shards:
      continue
    with_it = _axes({**parts, name: part}, len(devices))
    if with_it is not None:
      parts[name], found = part, with_it
  sizes, axes = found
  return Mesh(np.array(devices).reshape(sizes), [f"axis{i}" for i in range(len(sizes))]), axes


def _parts(sharding: Any, rank: int, devices: Sequence[Any]) -> list[list[int]]:
  """For each dimension the number of the part that each device has."""
  if sharding is None:
    return [[0] * len(devices)] * rank
  # Of extents that every number of shards divides.
  indices = sharding.devices_indices_map((len(devices),) * rank)
  starts = [[indices[d][dim].start or 0 for d in devices] for dim in range(rank)]
  return [[start * len(set(of_dim)) // len(devices) for start in of_dim] for of_dim in starts]


def _axes(parts: Mapping[str, Sequence[int]], count: int) -> tuple[list[int], Axes] | None:
  """The sizes of the axes of a mesh, in order, on which each device has the given parts; None if there is none.

  A device's number is that of a cell of the mesh. Along an axis parts are numbered by steps of one size, and of all
  names one at most takes them.
  """
  table = np.array([*parts.values(), [0] * count])
  sizes, steps, stride = [], [], 1
  while stride < count:
    step = table[:, stride] - table[:, 0]
    ends = (m for m in range(2, count // stride) if (table[:, m * stride] != table[:, 0] + m * step).any())
    sizes.append(next(ends, count // stride))
    steps.append(step)
    stride *= sizes[-1]
  sizes, steps = sizes[::-1], steps[::-1]
  if stride != count:
    return None
  cells = np.indices(sizes).reshape(len(sizes), count)
  axes, labels = {}, [f"axis{i}" for i in range(len(sizes))]
  for row, name in enumerate(parts):
    mine = sorted((i for i, step in enumerate(steps) if step[row]), key=lambda i: -steps[i][row])
    number = np.zeros(count, int)
    for i in mine:
      number = number * sizes[i] + cells[i]
    if (number != table[row]).any() or any(np.count_nonzero(steps[i]) > 1 for i in mine):
      return None
    axes[name] = tuple(labels[i] for i in mine)
  return sizes, axes
