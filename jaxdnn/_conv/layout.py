"""From any layout to the primitives' channels-last form, and back.

A spec lists (batch, channel, *spatial) for x and y, and (out channel, in channel, *spatial) for the filter.
"""

from collections.abc import Callable, Sequence

from jax import Array, lax

from jaxdnn import _sharding

DimensionNumbers = lax.ConvDimensionNumbers | tuple[str, str, str] | None


def dimension_numbers(where: str, a: Array, b: Array, numbers: DimensionNumbers) -> lax.ConvDimensionNumbers:
  if a.ndim != b.ndim or a.ndim < 2:
    raise ValueError(f"{where}: operands must have the same rank, at least 2, got shapes {a.shape} and {b.shape}")
  found = lax.conv_dimension_numbers(a.shape, b.shape, numbers)
  if any(len(spec) != a.ndim or set(spec) != set(range(a.ndim)) for spec in found):
    raise ValueError(f"{where}: dimension_numbers must order all of 0 to {a.ndim - 1}, three times, got {found}")
  return found


def spatial(a: Array, spec: Sequence[int]) -> tuple[int, ...]:
  return tuple(a.shape[d] for d in spec[2:])


def canonical_order(spec: Sequence[int]) -> tuple[int, ...]:
  return (spec[0], *spec[2:], spec[1])


def to_canonical(a: Array, spec: Sequence[int]) -> Array:
  return a.transpose(canonical_order(spec))


def filter_to_canonical(w: Array, spec: Sequence[int]) -> Array:
  return w.transpose(*spec[2:], spec[1], spec[0])


def from_canonical(a: Array, spec: Sequence[int]) -> Array:
  order = canonical_order(spec)
  return a.transpose([order.index(d) for d in range(a.ndim)])


def filter_from_canonical(w: Array, spec: Sequence[int]) -> Array:
  order = (*spec[2:], spec[1], spec[0])
  return w.transpose([order.index(d) for d in range(w.ndim)])


def by_batch(
  fn: Callable[..., Array],
  operands: tuple[Array, Array],
  in_spec: Sequence[int] | None,
  out_spec: Sequence[int],
  extras: Sequence[tuple[Array, tuple[int, ...]]] = (),
) -> Array:
  """Runs `fn` on each shard of the first operand's batch dimension (any sharding is an error if `in_spec` is None).

  `extras` are more operands, each with the dimensions that may be sharded as the result is.
  """
  keep: tuple[int, ...] = () if in_spec is None else (in_spec[0],)
  dims = [in_spec[0] if in_spec is not None and d == out_spec[0] else None for d in range(len(out_spec))]
  more, kept = zip(*extras, strict=True) if extras else ((), ())
  return _sharding.map_shards(fn, (*operands, *more), keep=(keep, (), *kept), out_like=(0, dims))
