"""Dropout from a JAX key: zeroes elements at random and scales the others up.

Whether an element is kept is a function of the key and of the element's number in memory order, by the counter-based
generator Philox4x32-7. So nothing is kept for the backward pass, which draws the same mask again, and the mask is the
same on every platform, for every element type, however the array is sharded. A call of the generator decides 8
elements, by 16 bits each; a second one has more bits for those that tie with the threshold.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _partition, _primitive, _sharding
from jaxdnn._arguments import array, flag, floating, number
from jaxdnn._eager import compiled

# Public functions ----------------------------------------------------------------------------------------------------


@compiled
def dropout(
  x: Array, rate: float, key: Array | None, *, broadcast_dims: Sequence[int] = (), deterministic: bool = False
) -> Array:
  """Zeroes each element with probability `rate` and divides the others by `1 - rate`.

  Args:
    x: floating-point array of any shape.
    rate: the probability, in [0, 1], a number known when the function is traced; its resolution is 2^-32. With 0 the
      result is x itself, with 1 it is 0, also where x is NaN or infinite.
    key: a single JAX key, as `jax.random.key` or `jax.random.PRNGKey` make it. Its words are the key of a generator of
      its own, so that nothing that jax.random draws from the same key is related to the mask; do not use one key for
      two dropouts. With `deterministic` it may be None.
    broadcast_dims: dimensions along which the mask is the same, such as the spatial ones where whole channels are
      dropped.
    deterministic: returns x, for inference.

  Returns:
    An array like `x`. As in jax.random, examples that `vmap` maps over have the same mask if they share the key, and
    independent ones if the keys are mapped as well. Under a mesh with explicit axes the mask is that of the whole
    array; inside `shard_map` fold the shard's index into the key.

  Raises:
    TypeError: `x` is not floating-point, `rate` is not a number, or `key` is not a key.
    ValueError: `rate` is not in [0, 1], there are several keys, or `broadcast_dims` are not dimensions of x.

  Example:
    >>> jaxdnn.dropout(jnp.ones(8), 0.5, jax.random.key(0))
    Array([0., 2., 0., 0., 0., 2., 0., 2.], dtype=float32)
  """
  x, rate = floating("dropout", "x", x), number("dropout", "rate", rate)
  deterministic = flag("dropout", "deterministic", deterministic)
  if not 0 <= rate <= 1:
    raise ValueError(f"dropout: rate must be in [0, 1], got {rate}")
  dims = _dimensions(x, broadcast_dims)
  if key is None and deterministic:
    return x
  words = _key_words(key)
  if deterministic or rate == 0:
    return x
  if rate == 1:
    return jnp.zeros_like(x)
  if not dims:
    return _dropout(x, words, rate)
  shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
  kept = _dropout(jnp.ones(shape, x.dtype), words, rate) > 0
  return _scaled(x, kept, rate)


def _dimensions(x: Array, dims: Sequence[int]) -> tuple[int, ...]:
  try:
    given = tuple(map(operator.index, dims))
  except TypeError:
    raise TypeError(f"dropout: broadcast_dims must be a sequence of integers, got {dims!r}") from None
  if any(not -x.ndim <= d < x.ndim for d in given):
    raise ValueError(f"dropout: broadcast_dims must be dimensions of x {x.shape}, got {given}")
  return tuple(d % x.ndim for d in given)


def _key_words(key: Any) -> Array:
  """The words of a key, two or four of them."""
  key = array("dropout", "key", key)
  if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    if key.shape != ():
      raise ValueError(f"dropout: key must be a single key, got an array of keys of shape {key.shape}")
    key = jax.random.key_data(key)
  if key.dtype != np.uint32 or key.shape not in ((2,), (4,)):
    raise TypeError(f"dropout: key must be a JAX key of two or four 32-bit words, got {key.dtype} of shape {key.shape}")
  return key


def _dropout(x: Array, key: Array, rate: float) -> Array:
  """Over shards: rows of elements that are neighbours in the whole array, `pitch` apart, from `start` on.

  Without shards the key as it is given is the seed, so that nothing has to be computed before the mask.
  """
  spec, shape = jax.typeof(x).sharding.spec, x.shape
  sharded = [d for d, axis in enumerate(spec) if axis is not None]
  inner = sharded[-1] if sharded else 0
  # Rows are evenly spaced if one dimension before them is cut, and is the outermost that is not 1.
  if any(math.prod(shape[:d]) > 1 for d in sharded[:-1]):
    raise ValueError(
      f"dropout: x of shape {shape} is sharded as {spec}; of the dimensions before the last one that is sharded, only "
      "the outermost may be sharded too. Reshard it first."
    )
  pitch = math.prod(shape[inner:])

  def of_shard(x: Array, key: Array) -> Array:
    strides = {d: math.prod(shape[d + 1 :]) * x.shape[d] for d in sharded}
    seed = key
    if sharded:
      start = jnp.zeros(2, np.uint32)
      for d in sharded:
        start = _add_product(start, lax.axis_index(spec[d]).astype(np.uint32), strides[d])
      seed = jnp.concatenate([_padded(key, SEED_WORDS - 2), start])
    rows = x.reshape(math.prod(x.shape[:inner]), math.prod(x.shape[inner:]))
    y = _primitive.bind(
      dropout_p,
      rows,
      seed,
      rate=rate,
      pitch=pitch,
      start_multiple=math.gcd(*strides.values()),
    )
    return y.reshape(x.shape)

  every = tuple(range(x.ndim))
  return _sharding.map_shards(of_shard, [x, key], keep=[every, ()], out_like=(0, every))


# The generator -------------------------------------------------------------------------------------------------------
#
# Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, by whom seven rounds pass
# BigCrush. Words are uint32 throughout, since 64-bit integers are off in JAX unless they are asked for.

PER_CALL = 8
SEED_WORDS = 6
"""Four of the key, and the two of the first element's number, the lower one first. The last of a seed may be missing,
and are 0."""


def _padded(words: Array, count: int) -> Array:
  """[..., count], of which those that are missing are 0."""
  return jnp.concatenate([words, jnp.zeros((*words.shape[:-1], count - words.shape[-1]), np.uint32)], -1)


def _multiply(a: Array, b: Any) -> tuple[Array, Array]:
  """The upper and the lower word of a product."""
  b = jnp.asarray(b, np.uint32)
  low, high = np.uint32(0xFFFF), np.uint32(16)
  ll, lh = (a & low) * (b & low), (a & low) * (b >> high)
  hl, hh = (a >> high) * (b & low), (a >> high) * (b >> high)
  middle = (ll >> high) + (lh & low) + (hl & low)
  return hh + (lh >> high) + (hl >> high) + (middle >> high), a * b


def _add_product(start: Array, a: Array, b: int) -> Array:
  """start + a b, of two words each, the lower one first."""
  high, low = _multiply(a, b & 0xFFFFFFFF)
  total = start[0] + low
  carry = (total < low).astype(np.uint32)
  return jnp.stack([total, start[1] + high + carry + a * jnp.asarray(b >> 32, np.uint32)])


def philox(counter: Sequence[Array], key: Sequence[Array], rounds: int = 7) -> tuple[Array, Array, Array, Array]:
  """Philox4x32 of four words of counter and two of key."""
  c0, c1, c2, c3 = counter
  k0, k1 = key
  for _ in range(rounds):
    high0, low0 = _multiply(c0, 0xD2511F53)
    high1, low1 = _multiply(c2, 0xCD9E8D57)
    c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    k0, k1 = k0 + np.uint32(0x9E3779B9), k1 + np.uint32(0xBB67AE85)
  return c0, c1, c2, c3


def _halves(call: tuple[Array, Array], key: Array, stream: int) -> Array:
  """The 16 bits of each element of a call, [..., PER_CALL]. The calls' numbers are two words each."""
  low, high = call
  k0, k1, k2, k3 = (jnp.broadcast_to(key[..., i : i + 1], low.shape) for i in range(4))
  words = philox((low, high | np.uint32(stream << 31), k2, k3), (k0, k1))
  return jnp.stack([part for w in words for part in (w & np.uint32(0xFFFF), w >> np.uint32(16))], axis=-1)


def _kept(call: tuple[Array, Array], key: Array, rate: float) -> Array:
  """Which elements of each call are kept, [..., PER_CALL]."""
  # 32 bits an element: the lower 15 of its half of a word, then the upper one, then those of the second stream.
  half = _halves(call, key, 0)
  upper = (half & np.uint32(0x7FFF)) << np.uint32(17)
  return (upper | (half >> np.uint32(15)) << np.uint32(16) | _halves(call, key, 1)) >= np.uint32(threshold(rate))


def threshold(rate: float) -> int:
  return min(round(rate * 2**32), 2**32 - 1)


# Reference -----------------------------------------------------------------------------------------------------------


def _reference(x: Array, seed: Array, *, rate: float, pitch: int, start_multiple: int) -> Array:
  """x is [..., rows, columns], seed [..., words]. Each row draws whole calls and drops those on either side."""
  seed = _padded(seed, SEED_WORDS)
  rows, columns = x.shape[-2:]
  if pitch == columns:
    rows, columns = 1, rows * columns
  whole = start_multiple % PER_CALL == 0 and (rows == 1 or pitch % PER_CALL == 0)
  lead = x.shape[:-2]
  row = jnp.broadcast_to(lax.iota(np.uint32, rows), (*lead, rows))
  start = jnp.broadcast_to(seed[..., None, 4:], (*lead, rows, 2))
  # A single row may be of symbolic length, which is no factor.
  first = start if rows == 1 else jnp.moveaxis(_add_product(jnp.moveaxis(start, -1, 0), row, pitch), 0, -1)
  skipped = first[..., 0] & np.uint32(PER_CALL - 1)
  low = (first[..., 0] >> np.uint32(3)) | (first[..., 1] << np.uint32(29))
  calls = columns // PER_CALL + 2
  low = low[..., None] + lax.iota(np.uint32, calls).reshape([1] * (len(lead) + 1) + [calls])
  high = (first[..., 1] >> np.uint32(3))[..., None] + (low < low[..., :1]).astype(np.uint32)
  kept = _kept((low, high), seed[..., None, :], rate).reshape(*lead, rows, calls * PER_CALL)
  if not whole:
    take = lambda row, n: lax.dynamic_slice(row, (n,), (columns,))  # noqa: E731
    for _ in range(len(lead) + 1):
      take = jax.vmap(take)
    kept = take(kept, skipped.astype(np.int32))
  kept = kept[..., :columns].reshape(x.shape)
  return _scaled(x, kept, rate)


def _scaled(x: Array, kept: Array, rate: float) -> Array:
  """A select, not a product: what is dropped may be NaN."""
  wide = x.astype(_primitive.accumulator_dtype(x.dtype))
  return jnp.where(kept, wide * (1 / (1 - rate)), 0).astype(x.dtype)


# Primitive and differentiation ---------------------------------------------------------------------------------------
#
# dropout  x, seed -> y
#
# Linear in x with a diagonal Jacobian: its own tangent map and its own adjoint.


def _abstract(x: Any, seed: Any, **_: Any) -> Any:
  return _primitive.out_aval(x, x.shape)


dropout_p = _primitive.define(
  "dropout", abstract_eval=_abstract, reference=_reference, params=["rate", "pitch", "start_multiple"]
)


def _transpose(g: Array, seed: Array, **params: Any) -> Array:
  return _primitive.bind(dropout_p, g, seed, **params)


_primitive.linear_in_first(dropout_p, _reference, transpose=_transpose)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _supported(x: Any, seed: Any, **_: Any) -> bool:
  """Rows and problems are found by 32-bit divisions of vectors' and blocks' numbers."""
  return math.prod(x.shape) < 1 << 34


def _attributes(x: Any, seed: Any, *, rate: float, pitch: int, start_multiple: int) -> dict[str, Any]:
  return {
    "threshold": threshold(rate), "scale": 1 / (1 - rate), "pitch": pitch, "start_multiple": start_multiple
  }  # fmt: skip


def _on_shards(
  axes: _partition.Axes, x: Array, seed: Array, *, rate: float, pitch: int, start_multiple: int
) -> list[Array]:
  """Columns begin at the shard's first."""
  columns, seed = x.shape[-1], _padded(seed, SEED_WORDS)
  if names := axes.get("columns"):
    start = _add_product(jnp.moveaxis(seed[..., 4:], -1, 0), lax.axis_index(names).astype(np.uint32), columns)
    seed = jnp.concatenate([seed[..., :4], jnp.moveaxis(start, 0, -1)], -1)
    start_multiple = math.gcd(start_multiple, columns)
  return [_primitive.bind(dropout_p, x, seed, rate=rate, pitch=pitch, start_multiple=start_multiple)]


_primitive.set_shards(dropout_p, "... . columns, ... . -> ... . columns", _on_shards)
_primitive.batch_leading(dropout_p)
_primitive.lower_to_cuda(dropout_p, "jaxdnn.dropout.v1", _reference, attributes=_attributes, supported=_supported)
