"""Pooling with Haiku's signatures."""

import math
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn

Size = int | Sequence[int]


def max_pool(value: Array, window_shape: Size, strides: Size, padding: str, channel_axis: int | None = -1) -> Array:
  """`haiku.max_pool`.

  Args:
    value: floating-point array [N, ..., C], or with channels elsewhere.
    window_shape: one size for all dimensions but the first and `channel_axis`; or a size for each dimension, or for
      the last ones.
    strides: as `window_shape`.
    padding: "SAME" or "VALID".
    channel_axis: the axis of the channels, or None for none.

  Returns:
    An array of `value`'s type.

  Raises:
    ValueError: another padding, or an argument of the wrong length or range.

  Example:
    >>> y = jhk.max_pool(x, 2, 2, "VALID")
  """
  value, window, steps = _sizes("max_pool", value, window_shape, strides, padding, channel_axis)
  return jaxdnn.reduce_window(value, -jnp.inf, lax.max, window, steps, padding)


def avg_pool(value: Array, window_shape: Size, strides: Size, padding: str, channel_axis: int | None = -1) -> Array:
  """`haiku.avg_pool`, in which padding does not count; arguments as in `max_pool`."""
  value, window, steps = _sizes("avg_pool", value, window_shape, strides, padding, channel_axis)
  channel = next((d for d in (value.ndim - 1, 1) if d and window[d] == steps[d] == 1), None)
  if 3 <= value.ndim <= 5 and window[0] == steps[0] == 1 and channel is not None:
    spatial = [d for d in range(1, value.ndim) if d != channel]
    layout = "NDHWC"[: value.ndim - 1] + "C" if channel != 1 else "NCDHW"[: value.ndim]
    window, steps = (tuple(sizes[d] for d in spatial) for sizes in (window, steps))
    return jaxdnn.avg_pool(value, window, stride=steps, padding=padding, count_include_pad=False, layout=layout)
  total = jaxdnn.reduce_window(value, 0.0, lax.add, window, steps, padding)
  if padding == "VALID":
    return total / math.prod(window)
  ones = jnp.ones([n if w > 1 else 1 for n, w in zip(value.shape, window, strict=True)], value.dtype)
  counted = [s if w > 1 else 1 for s, w in zip(steps, window, strict=True)]
  return total / jaxdnn.reduce_window(ones, 0.0, lax.add, window, counted, padding)


def _sizes(op: str, value: Any, window: Any, strides: Any, padding: str, channel_axis: int | None) -> Any:
  """Of every dimension. A single number leaves out the first one, and the channels."""
  if padding not in ("SAME", "VALID"):
    raise ValueError(f"{op}: padding must be 'SAME' or 'VALID', got {padding!r}")
  value = jnp.asarray(value)
  if channel_axis is not None and not -value.ndim <= channel_axis < value.ndim:
    raise ValueError(f"{op}: channel_axis must be an axis of value {value.shape}, got {channel_axis}")
  channel = None if channel_axis is None else channel_axis % value.ndim

  def each(size: Any) -> tuple[int, ...]:
    if isinstance(size, int):
      return (1, *(1 if d == channel else size for d in range(1, value.ndim)))
    return (*(1,) * (value.ndim - len(size)), *size)

  return value, each(window), each(strides)


class MaxPool(hk.MaxPool):
  """`haiku.MaxPool`: `max_pool` as a module."""

  def __call__(self, value: Array) -> Array:
    """An array of `value`'s type."""
    return max_pool(value, self.window_shape, self.strides, self.padding, self.channel_axis)


class AvgPool(hk.AvgPool):
  """`haiku.AvgPool`: `avg_pool` as a module."""

  def __call__(self, value: Array) -> Array:
    """An array of `value`'s type."""
    return avg_pool(value, self.window_shape, self.strides, self.padding, self.channel_axis)
