"""Dropout, forward and backward, against jax.random.bernoulli and a select."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn
from benchmarks.harness import Draw, Work, itemsize

RATE = 0.1
# The key is an operand, as in training: of one made within, XLA makes an iota, a kernel of its own.
KEY = Draw((2,), "uint32", 1 << 30)


def ours(x: Array, key: Array) -> Array:
  return jaxdnn.dropout(x, RATE, jax.random.wrap_key_data(key))


def xla(x: Array, key: Array) -> Array:
  kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 1 - RATE, x.shape)
  return jnp.where(kept, x / (1 - RATE), 0)


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for shape in ((16384, 8192),) if quick else ((16384, 8192), (64, 512, 1024)):
    for dtype in dtypes:
      yield from directions(tuple(max(n // shrink, 2) for n in shape), dtype)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for n in (1, 1000, 1 << 14, 1 << 17, (1 << 20) + 1, 1 << 22, 1 << 24, (1 << 28) + 3):
    yield from directions((max(n // shrink, 2),) if shrink > 1 else (n,), dtypes[0])


def directions(shape: tuple[int, ...], dtype: str) -> Iterator[Work]:
  x, size = Draw(shape, dtype), math.prod(shape) * itemsize(dtype)
  case = "x".join(map(str, shape))
  yield Work("dropout", case, dtype, "fwd", ours, xla, (x, KEY), 2 * size)
  yield Work("dropout", case, dtype, "bwd", ours, xla, (x, KEY, x), 2 * size, backward=True)
