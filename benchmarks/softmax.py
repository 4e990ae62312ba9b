"""Softmax, log-softmax and logsumexp, forward and backward, and cross-entropy with its gradient, against jax.nn."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn
import softmax_cases
from benchmarks.harness import Draw, Work, itemsize

QUICK = ((1000000, 10), (8192, 8192), (4096, 50257), (8, 1000, 64, 64))
FUNCTIONS = {
  "softmax": (jaxdnn.softmax, jax.nn.softmax),
  "log_softmax": (jaxdnn.log_softmax, jax.nn.log_softmax),
}
LOGSUMEXP = jaxdnn.logsumexp, jax.nn.logsumexp
LOSS_SHAPES = ((1000000, 10), (65536, 128), (8192, 1000), (8192, 8192), (4096, 50257), (1024, 131072))
# Neighbours of what models ask for, in size and alignment, and few rows that are long.
SWEEP = (
  *(softmax_cases.Case((max(1, (1 << 26) // n), n)) for n in (1, 2, 7, 33, 64, 100, 257, 512, 1001, 1024, 1536, 2049)),
  *(softmax_cases.Case((max(1, (1 << 26) // n), n)) for n in (4097, 16384, 24001, 65536, 100003, 262144)),
  *(softmax_cases.Case(shape) for shape in ((8, 262144), (1, 1 << 20), (8, 1 << 24))),
  *(softmax_cases.Case((64, n, 64, 64), 1) for n in (3, 19, 64, 257)),
  *(softmax_cases.Case(shape, 1) for shape in ((512, 1000, 13), (64, 512, 7, 7), (4, 65536, 64))),
)


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for shape in LOSS_SHAPES:
    if quick and shape not in QUICK:
      continue
    for dtype in dtypes:
      yield loss(shrunk(shape, shrink), dtype)
      yield from reduction(shrunk(shape, shrink), dtype)
  for case in softmax_cases.BENCHMARKS:
    if quick and case.shape not in QUICK:
      continue
    for name, functions in FUNCTIONS.items():
      # The two differ little: log-softmax over rows alone.
      if name == "log_softmax" and len(case.shape) > 2:
        continue
      for dtype in dtypes:
        yield from directions(name, functions, shrunk(case.shape, shrink), case.axis, dtype)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for case in SWEEP[:: 4 if quick else 1]:
    yield from directions("softmax", FUNCTIONS["softmax"], shrunk(case.shape, shrink), case.axis, "bfloat16")


def directions(
  name: str, functions: tuple[Callable, Callable], shape: tuple[int, ...], axis: int | tuple[int, ...], dtype: str
) -> Iterator[Work]:
  ours, xla = (partial(along, function, axis) for function in functions)
  x, size = Draw(shape, dtype), math.prod(shape) * itemsize(dtype)
  case = describe(shape) if axis == -1 else f"{describe(shape)} axis {axis}"
  yield Work(name, case, dtype, "fwd", ours, xla, (x, x), 2 * size)
  yield Work(name, case, dtype, "bwd", ours, xla, (x, x), 3 * size, backward=True)


def along(function: Callable, axis: int | tuple[int, ...], x: Array, *unused: Array) -> Array:
  return function(x, axis=axis)


def reduction(shape: tuple[int, int], dtype: str) -> Iterator[Work]:
  ours, xla = (partial(along, function, -1) for function in LOGSUMEXP)
  x, rows = Draw(shape, dtype), Draw(shape[:1], dtype)
  size, row_bytes = math.prod(shape) * itemsize(dtype), shape[0] * itemsize(dtype)
  yield Work("logsumexp", describe(shape), dtype, "fwd", ours, xla, (x, rows), size + row_bytes)
  yield Work("logsumexp", describe(shape), dtype, "bwd", ours, xla, (x, rows), 2 * size + row_bytes, backward=True)


def loss(shape: tuple[int, int], dtype: str) -> Work:
  """The mean and its gradient at once, in which a row can be read once and its gradient written once."""
  operands = Draw(shape, dtype), Draw(shape[:1], "int32", high=shape[1])
  ours, xla = jax.value_and_grad(jaxdnn.cross_entropy), jax.value_and_grad(cross_entropy)
  moved = 2 * math.prod(shape) * itemsize(dtype) + 4 * shape[0]
  return Work("cross_entropy", describe(shape), dtype, "fwd+bwd", ours, xla, operands, moved)


def cross_entropy(logits: Array, labels: Array) -> Array:
  log_probs = jax.nn.log_softmax(logits)
  return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=-1))


def describe(shape: tuple[int, ...]) -> str:
  return "x".join(map(str, shape))


def shrunk(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
  """A shape small enough for a trial without a GPU."""
  return tuple(max(n // factor, 2) for n in shape) if factor > 1 else shape
