"""Between the public functions and the primitives: checks, canonical shapes, shards."""

import math
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from jaxdnn import _sharding
from jaxdnn._activation import channelwise, elementwise
from jaxdnn._activation.functions import ACTIVATIONS
from jaxdnn._arguments import array, floating, index_of_axis, number


def apply(kind: str, x: Array, parameter: float | None = None, bias: Array | None = None, axis: int = -1) -> Array:
  """The activation named `kind`, one of `ACTIVATIONS`, of x, or of x + bias with `bias` along `axis`."""
  x = floating(kind, "x", x)
  p = ACTIVATIONS[kind].parameter if parameter is None else parameter
  if bias is not None:
    return along_channels(kind, kind, x, "bias", bias, axis, p)
  every = tuple(range(x.ndim))
  return _sharding.map_shards(lambda x: elementwise.activate(kind, x, p), [x], keep=[every], out_like=(0, every))


def along_channels(
  where: str, kind: str, x: Array, name: str, operand: Any, axis: int, parameter: float = 0.0
) -> Array:
  """An activation whose `operand` has one value for each index along `axis` of x."""
  axis = index_of_axis(where, x.shape, axis)
  operand = array(where, name, operand)
  if operand.shape != (x.shape[axis],):
    raise ValueError(
      f"{where}: {name} must have shape ({x.shape[axis]},), that of axis {axis} of x {x.shape}, got {operand.shape}"
    )
  operand = floating(where, name, operand).astype(x.dtype)
  spec = jax.typeof(x).sharding.spec
  if jax.typeof(operand).sharding.spec[0] != spec[axis]:
    operand = jax.sharding.reshard(operand, PartitionSpec(spec[axis]))

  def of_shard(x: Array, operand: Array) -> Array:
    rows = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
    return channelwise.activate(kind, rows, operand, parameter).reshape(x.shape)

  every = tuple(range(x.ndim))
  return _sharding.map_shards(of_shard, [x, operand], keep=[every, (0,)], out_like=(0, every))


def positive(where: str, name: str, value: Any) -> float:
  value = number(where, name, value)
  if not value > 0:
    raise ValueError(f"{where}: {name} must be positive, got {value}")
  return value
