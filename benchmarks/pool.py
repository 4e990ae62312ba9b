"""Pooling, forward and backward, against lax.reduce_window and its gradient."""

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn
import pool_cases
from benchmarks.harness import Draw, Work, itemsize
from pool_cases import PoolCase

QUICK = ("rn50.3x3s2", "incep.3x3s1", "global.7x7")
OURS = {"max": jaxdnn.max_pool, "avg": jaxdnn.avg_pool}


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for kind, cases in pool_cases.BENCHMARKS.items():
    for case in cases:
      if quick and case.name not in QUICK:
        continue
      case = shrunk(case, shrink)
      for dtype in dtypes:
        yield from directions(kind, case, dtype)


def directions(kind: str, case: PoolCase, dtype: str) -> Iterator[Work]:
  ours = partial(pool, kind, case)
  xla = partial(reduce_window, kind, case)
  x = Draw(case.shape, dtype)
  y = Draw(jax.eval_shape(ours, jax.ShapeDtypeStruct(*x[:2])).shape, dtype)
  moved = (math.prod(x.shape) + math.prod(y.shape)) * itemsize(dtype)
  name = f"{kind}.{case.name}"
  yield Work("pool", name, dtype, "fwd", ours, xla, (x, y), moved)
  # Which element was the maximum takes a byte at least.
  moved += math.prod(y.shape) if kind == "max" else 0
  yield Work("pool", name, dtype, "bwd", ours, xla, (x, y), moved, backward=True)


def pool(kind: str, case: PoolCase, x: Array, *unused: Array) -> Array:
  return OURS[kind](x, case.window, stride=case.stride, padding=case.padding)


def reduce_window(kind: str, case: PoolCase, x: Array, *unused: Array) -> Array:
  """As flax.linen pools."""
  rank = len(case.window)
  lead = x.ndim - rank - 1
  stride = case.stride or 1
  strides = (stride,) * rank if isinstance(stride, int) else stride
  window, strides = (1,) * lead + case.window + (1,), (1,) * lead + strides + (1,)
  padding = case.padding
  if isinstance(padding, int):
    padding = ((0, 0),) * lead + ((padding, padding),) * rank + ((0, 0),)
  if kind == "max":
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
  return lax.reduce_window(x, 0.0, lax.add, window, strides, padding) / math.prod(case.window)


def shrunk(case: PoolCase, factor: int) -> PoolCase:
  """The same kind of pooling, small enough for a trial without a GPU."""
  if factor == 1:
    return case
  least = (1,) * (len(case.shape) - len(case.window) - 1) + case.window + (1,)
  return case._replace(shape=tuple(max(n // factor, low) for n, low in zip(case.shape, least, strict=True)))
