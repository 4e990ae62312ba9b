"""Checks of arguments that several operators take. Each raises with the operator, the argument and its value."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Padding = str | int | Sequence[tuple[int, int]]


def array(where: str, name: str, value: Any) -> Array:
  """`value` as an array."""
  try:
    if value is None or isinstance(value, str):  # Of which jnp.asarray makes NaN, or a number.
      raise TypeError
    return jnp.asarray(value)
  except (TypeError, ValueError, OverflowError):
    raise TypeError(f"{where}: {name} must be an array, got {value!r}") from None


def arrays(where: str, **given: Any) -> tuple[Array, ...]:
  """The given arguments as arrays."""
  return tuple(array(where, name, value) for name, value in given.items())


def floating(where: str, name: str, value: Any) -> Array:
  """`value` as an array, which must be floating-point."""
  x = array(where, name, value)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{where}: {name} must be floating-point, got {x.dtype}")
  return x


def flag(where: str, name: str, value: Any) -> bool:
  """A bool, and nothing that merely counts as true: "none" does."""
  if not isinstance(value, bool | np.bool_):
    raise TypeError(f"{where}: {name} must be True or False, got {value!r}")
  return bool(value)


def number(where: str, name: str, value: Any) -> float:
  """A number that is known when the function is traced; NaN and infinities are numbers."""
  try:
    if isinstance(value, str | bytes):
      raise TypeError
    return float(value)
  except (TypeError, ValueError, OverflowError):
    known = " known when the function is traced" if isinstance(value, jax.core.Tracer) else ""
    raise TypeError(f"{where}: {name} must be a number{known}, got {value!r}") from None


def one_of(where: str, name: str, value: Any, allowed: Sequence[str]) -> str:
  """A string, one of `allowed`."""
  if not isinstance(value, str) or value not in allowed:
    names = [repr(a) for a in allowed]
    choice = " or ".join(names) if len(names) == 2 else f"one of {', '.join(names)}"
    raise ValueError(f"{where}: {name} must be {choice}, got {value!r}")
  return value


def index_of_axis(where: str, shape: tuple[int, ...], axis: Any) -> int:
  """`axis` as the number of a dimension of x, from 0."""
  try:
    index = operator.index(axis)
  except TypeError:
    raise TypeError(f"{where}: axis must be an integer, got {axis!r}") from None
  if not -len(shape) <= index < len(shape):
    raise ValueError(f"{where}: axis must be a dimension of x {shape}, got {axis!r}")
  return index % len(shape)


def dilated(extent: int, dilation: int) -> int:
  """Extent after putting `dilation - 1` holes between neighbours."""
  return 0 if extent == 0 else (extent - 1) * dilation + 1


def is_sequence(value: Any) -> bool:
  """Whether it has entries: a tuple, a list or such, or an array that is no scalar."""
  return (isinstance(value, Sequence) and not isinstance(value, str | bytes)) or bool(getattr(value, "shape", ()))


def window_rank(where: str, window: Any) -> int:
  """How many spatial dimensions `window` asks for."""
  if not is_sequence(window):
    raise TypeError(f"{where}: window must be a sequence of 1 to 3 integers, got {window!r}")
  if not 1 <= len(window) <= 3:
    raise ValueError(f"{where}: window must have 1 to 3 entries, one per spatial dimension, got {window!r}")
  return len(window)


def integer(where: str, name: str, value: Any) -> int:
  """An integer of any type."""
  try:
    return operator.index(value)
  except TypeError as e:
    raise TypeError(f"{where}: {name} must be an int, got {value!r}") from e


def per_dimension(where: str, name: str, value: Any, rank: int) -> tuple[int, ...]:
  """One positive integer per spatial dimension, from such a sequence or a single integer."""
  value = tuple(value) if isinstance(value, Iterator) else value
  try:
    values = tuple(map(operator.index, value)) if is_sequence(value) else (operator.index(value),) * rank
  except TypeError as e:
    raise TypeError(f"{where}: {name} must be an int or a sequence of {rank} ints, got {value!r}") from e
  if len(values) != rank:
    raise ValueError(f"{where}: {name} must have one entry for each of the {rank} spatial dimensions, got {values}")
  if any(v < 1 for v in values):
    raise ValueError(f"{where}: {name} must be positive, got {values}")
  return values


def extents(where: str, name: str, value: Any, rank: int) -> tuple[int, ...]:
  """A size for each spatial dimension, none negative."""
  try:
    sizes = tuple(map(operator.index, value))
  except TypeError as e:
    raise TypeError(f"{where}: {name} must be a sequence of {rank} integers, got {value!r}") from e
  if len(sizes) != rank:
    raise ValueError(f"{where}: {name} must have {rank} entries, got {sizes}")
  if any(n < 0 for n in sizes):
    raise ValueError(f"{where}: {name} must not be negative, got {sizes}")
  return sizes


def explicit_padding(
  where: str, padding: Any, spatial: Sequence[int], window: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, int], ...]:
  """(low, high) pairs, from such pairs, one int for every side, or 'VALID', 'SAME', 'SAME_LOWER'."""
  if isinstance(padding, str):
    mode = padding.upper()
    if mode not in ("VALID", "SAME", "SAME_LOWER"):
      raise ValueError(f"{where}: padding must be 'VALID', 'SAME', 'SAME_LOWER' or explicit, got {padding!r}")
    return tuple(lax.padtype_to_pads(spatial, window, stride, mode))
  padding = tuple(padding) if isinstance(padding, Iterator) else padding
  try:
    if not is_sequence(padding):
      return ((operator.index(padding), operator.index(padding)),) * len(window)
    pads = tuple((operator.index(lo), operator.index(hi)) for lo, hi in padding)
  except (TypeError, ValueError) as e:
    raise ValueError(f"{where}: padding must be a string, an int or (low, high) pairs, got {padding!r}") from e
  if len(pads) != len(window):
    raise ValueError(f"{where}: padding must be one (low, high) pair for each of {len(window)} dimensions, got {pads}")
  return pads
