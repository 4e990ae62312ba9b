"""Batch normalization in training, forward and backward, in both layouts and fused, against its formula under XLA."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

import batch_norm_cases
import jaxdnn
from batch_norm_cases import Case
from benchmarks.harness import Draw, Work, itemsize

QUICK = ((256, 56, 56, 64), (256, 14, 14, 1024))
FUSED = ((256, 56, 56, 64), (256, 14, 14, 1024))


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for case in batch_norm_cases.BENCHMARKS:
    if quick and case.shape not in QUICK:
      continue
    for layout in (case, batch_norm_cases.first(case)):
      for dtype in dtypes:
        yield from directions(shrunk(layout, shrink), dtype)
        if case.shape in FUSED and layout is case:
          yield from directions(shrunk(layout, shrink), dtype, "relu")
          yield from directions(shrunk(layout, shrink), dtype, "silu")
          yield from with_residual(shrunk(layout, shrink), dtype)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for case in batch_norm_cases.SWEEP[:: 8 if quick else 1]:
    yield from directions(shrunk(case, shrink), dtypes[0])


def directions(case: Case, dtype: str, activation: str | None = None) -> Iterator[Work]:
  """x is read twice, and y written; backward dy and x are read twice, and dx written."""
  x, parameter = Draw(case.shape, dtype), Draw(case.channels, "float32")
  size = math.prod(case.shape) * itemsize(dtype)
  name = f"batch_norm_{activation}" if activation else "batch_norm"
  both = partial(ours, case, activation), partial(formula, case, activation)
  yield Work(name, describe(case), dtype, "fwd", *both, (x, parameter, parameter), 3 * size)
  yield Work(
    name, describe(case), dtype, "bwd", *both, (x, parameter, parameter, x), 5 * size, backward=True, inputs=3
  )


def with_residual(case: Case, dtype: str) -> Iterator[Work]:
  """y = relu(bn(x) + z); backward dy, x and y are read, dz written, dz and x read, dx written."""
  x, parameter = Draw(case.shape, dtype), Draw(case.channels, "float32")
  size = math.prod(case.shape) * itemsize(dtype)
  both = partial(residual_first, partial(ours, case, "relu")), partial(residual_first, partial(formula, case, "relu"))
  operands = (x, x, parameter, parameter)
  name = "batch_norm_add_relu"
  yield Work(name, describe(case), dtype, "fwd", *both, operands, 4 * size)
  yield Work(name, describe(case), dtype, "bwd", *both, (*operands, x), 7 * size, backward=True, inputs=4)


def residual_first(f: Callable, x: Array, z: Array, scale: Array, bias: Array) -> Array:
  return f(x, scale, bias, z)


def ours(case: Case, activation: str | None, x: Array, scale: Array, bias: Array, z: Array | None = None) -> Array:
  return jaxdnn.batch_norm(x, scale, bias, axis=case.axis, activation=activation, residual=z)[0]


def formula(case: Case, activation: str | None, x: Array, scale: Array, bias: Array, z: Array | None = None) -> Array:
  """What flax.linen.BatchNorm computes (use_fast_variance=False)."""
  wide, over = x.astype(jnp.float32), case.reduced
  d = wide - wide.mean(over, keepdims=True)
  parameters = (jnp.expand_dims(p, over) for p in (scale, bias))
  y = d * jax.lax.rsqrt(jnp.square(d).mean(over, keepdims=True) + 1e-5) * next(parameters) + next(parameters)
  if z is not None:
    y = y + z.astype(jnp.float32)
  return (getattr(jax.nn, activation)(y) if activation else y).astype(x.dtype)


def describe(case: Case) -> str:
  text = "x".join(map(str, case.shape))
  return text if case.axis == -1 else f"{text} axis {case.axis}"


def shrunk(case: Case, factor: int) -> Case:
  """A case small enough for a trial without a GPU."""
  return Case(tuple(max(d // factor, 2) for d in case.shape), case.axis) if factor > 1 else case
