"""Arguments that several operators take: one integer per spatial dimension, and padding."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Padding = str | int | Sequence[tuple[int, int]]


def dilated(extent: int, dilation: int) -> int:
  """Extent after putting `dilation - 1` holes between neighbours."""
  return 0 if extent == 0 else (extent - 1) * dilation + 1


def arrays(where: str, **given: Any) -> tuple[Array, ...]:
  """The given arguments as arrays."""

  def array(name: str, value: Any) -> Array:
    try:
      return jnp.asarray(value)
    except (TypeError, ValueError) as e:
      raise TypeError(f"{where}: {name} must be an array of numbers, got {value!r:.100}") from e

  return tuple(array(name, value) for name, value in given.items())


def integer(where: str, name: str, value: Any) -> int:
  try:
    return operator.index(value)
  except TypeError as e:
    raise TypeError(f"{where}: {name} must be an int, got {value!r}") from e


def per_dimension(where: str, name: str, value: Any, rank: int) -> tuple[int, ...]:
  """One positive integer per spatial dimension, from such a sequence or a single integer."""
  value = tuple(value) if isinstance(value, Iterator) else value
  try:
    values = (operator.index(value),) * rank if np.ndim(value) == 0 else tuple(operator.index(v) for v in value)
  except TypeError as e:
    raise TypeError(f"{where}: {name} must be an int or a sequence of {rank} ints, got {value!r}") from e
  if len(values) != rank:
    raise ValueError(f"{where}: {name} must have one entry for each of the {rank} spatial dimensions, got {values}")
  if any(v < 1 for v in values):
    raise ValueError(f"{where}: {name} must be positive, got {values}")
  return values


def explicit_padding(
  where: str, padding: Any, spatial: Sequence[int], window: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, int], ...]:
  """(low, high) pairs, from such pairs, one int for every side, or 'VALID', 'SAME', 'SAME_LOWER'."""
  if isinstance(padding, str):
    mode = padding.upper()
    if mode not in ("VALID", "SAME", "SAME_LOWER"):
      raise ValueError(f"{where}: padding must be 'VALID', 'SAME', 'SAME_LOWER' or explicit, got {padding!r}")
    return tuple((int(lo), int(hi)) for lo, hi in lax.padtype_to_pads(spatial, window, stride, mode))
  padding = tuple(padding) if isinstance(padding, Iterator) else padding
  try:
    if np.ndim(padding) == 0:
      return ((operator.index(padding), operator.index(padding)),) * len(window)
    pads = tuple((operator.index(lo), operator.index(hi)) for lo, hi in padding)
  except (TypeError, ValueError) as e:
    raise ValueError(f"{where}: padding must be a string, an int or (low, high) pairs, got {padding!r}") from e
  if len(pads) != len(window):
    raise ValueError(f"{where}: padding must be one (low, high) pair for each of {len(window)} dimensions, got {pads}")
  return pads
