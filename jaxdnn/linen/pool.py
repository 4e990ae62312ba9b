"""Pooling with the signatures of `flax.linen`, for which Flax is not needed.

What differs: an average that excludes padding gives 0, not NaN, for a window of padding alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._arguments import array, explicit_padding, per_dimension
from jaxdnn._pool import windows
from jaxdnn._pool.reduce_window import reduce_window
from jaxdnn._pool.reference import least

FlaxPadding = str | Sequence[tuple[int, int]]


def max_pool(
  inputs: Array, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: FlaxPadding = "VALID"
) -> Array:
  """`flax.linen.max_pool`: the maximum over windows of any rank; `strides` default to ones.

  Args:
    inputs: `[..., *window dims, features]`.
    window_shape: the window's size along each spatial dimension.
    strides: distance between windows along each; None means 1.
    padding: "SAME", "VALID", or a `(low, high)` pair per spatial dimension.

  Returns:
    An array of the inputs' type.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length or range.

  Example:
    >>> y = linen.max_pool(x, window_shape=(2, 2), strides=(2, 2))
  """
  return pool(inputs, least(jnp.result_type(inputs), False), lax.max, window_shape, strides, padding)


def min_pool(
  inputs: Array, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: FlaxPadding = "VALID"
) -> Array:
  """`flax.linen.min_pool`; arguments as in `max_pool`."""
  return pool(inputs, least(jnp.result_type(inputs), True), lax.min, window_shape, strides, padding)


def avg_pool(
  inputs: Array,
  window_shape: Sequence[int],
  strides: Sequence[int] | None = None,
  padding: FlaxPadding = "VALID",
  count_include_pad: bool = True,
) -> Array:
  """`flax.linen.avg_pool`; arguments as in `max_pool`, and whether padding counts."""
  window_shape = _window("avg_pool", window_shape)
  if 1 <= len(window_shape) <= 3:
    return windows.avg_pool(inputs, window_shape, stride=strides, padding=padding, count_include_pad=count_include_pad)
  total = pool(inputs, 0.0, lax.add, window_shape, strides, padding)
  if count_include_pad:
    return total / math.prod(window_shape)
  lead = total.ndim - len(window_shape) - 1
  ones = jnp.ones((*(1,) * lead, *np.shape(inputs)[lead:-1], 1), total.dtype)
  return total / jnp.maximum(pool(ones, 0.0, lax.add, window_shape, strides, padding), 1)


def pool(
  inputs: Array,
  init: Any,
  reduce_fn: Callable[..., Any],
  window_shape: Sequence[int],
  strides: Sequence[int] | None,
  padding: FlaxPadding,
) -> Array:
  """`flax.linen.pooling.pool`: `reduce_window` over the dimensions before the last; `reduce_fn` as there."""
  inputs = array("pool", "inputs", inputs)
  window_shape = _window("pool", window_shape)
  rank = len(window_shape)
  lead = inputs.ndim - rank - 1
  if lead < 0:
    raise ValueError(
      f"pool: window_shape {window_shape} needs inputs of {rank + 1} dimensions or more, got {inputs.shape}"
    )
  strides = per_dimension("pool", "strides", 1 if strides is None else strides, rank)
  pads = explicit_padding("pool", padding, inputs.shape[lead:-1], window_shape, strides)
  around = (1,) * lead
  nothing = ((0, 0),) * lead
  return reduce_window(
    inputs, init, reduce_fn, (*around, *window_shape, 1), (*around, *strides, 1), (*nothing, *pads, (0, 0))
  )


def _window(name: str, window_shape: Any) -> tuple[int, ...]:
  try:
    rank = len(window_shape)
  except TypeError:
    raise TypeError(f"{name}: window_shape must be a sequence of integers, got {window_shape!r}") from None
  return per_dimension(name, "window_shape", window_shape, rank)
