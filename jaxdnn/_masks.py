"""What `where=` of layer and group norm becomes: selections, and statistics in plain jnp. Knows no operator.

An operator selects before any arithmetic and after it, so that what masked entries hold, NaN included, reaches no value
and no derivative, in either mode and to any order. Between the two stands its kernel where rows are masked as a whole,
and `normalized` where they are not.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import _axes, _primitive


def beside(op: str, where: Any, x: Array) -> Array | None:
  """The mask that `op` is given for `x`, of its rank and sharded as it is; None if there is none."""
  return None if where is None else _axes.sharded_like(x, _axes.aligned_mask(op, where, x.shape))


def select(where: Array, x: Array) -> Array:
  """`x`, and 0 where the mask, which broadcasts to it, is False."""
  return jnp.where(where, x, jnp.zeros((), x.dtype))


def is_by_row(where: Array, axes: Sequence[int], epsilon: float, dtype: jnp.dtype) -> bool:
  """Whether a kernel without masks will do between two selections: the mask is the same all along `axes`.

  A row of zeros then has the inverse deviation `1 / sqrt(epsilon)`, which must be a number.
  """
  tiny = float(jnp.finfo(_primitive.accumulator_dtype(dtype)).tiny)
  return epsilon >= tiny and all(where.shape[a] == 1 for a in axes)


def normalized(x: Array, where: Array, axes: tuple[int, ...], *, epsilon: float, center: bool = True) -> Array:
  """`(x - mean) / sqrt(variance + epsilon)` in the accumulator's type, with the statistics of what is not masked.

  Args:
    x: the data after `select`.
    where: booleans of the rank of `x` that broadcast to it.
    axes: what mean and variance are taken over.
    epsilon: added to the variance.
    center: whether there is a mean; if not, it is 0.

  Returns:
    An array of the shape of `x`, 0 where it is masked.
  """
  x = x.astype(_primitive.accumulator_dtype(x.dtype))
  repeats = math.prod(x.shape[a] for a in axes if where.shape[a] == 1)
  count = jnp.sum(where, axes, keepdims=True, dtype=jnp.int32).astype(x.dtype) * repeats

  def mean(a: Array) -> Array:
    return jnp.sum(a, axes, keepdims=True) / jnp.maximum(count, 1)

  if center:
    x = select(where, x - mean(x))
    # What rounding took off the mean, which in exact arithmetic is 0 whatever x is.
    x = select(where, x - jax.lax.stop_gradient(mean(x)))
  # Of nothing the variance is 1, so that an epsilon of 0 makes no infinity.
  variance = jnp.where(count > 0, mean(jnp.square(x)), jnp.ones((), x.dtype))
  return x * jax.lax.rsqrt(variance + epsilon)
