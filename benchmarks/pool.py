"""Pooling, forward and backward, against lax.reduce_window and its gradient."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn
import pool_cases
from benchmarks.harness import Draw, Work, itemsize
from pool_cases import PoolCase

QUICK = ("rn50.3x3s2", "incep.3x3s1", "global.7x7")
OURS = {
  "max": jaxdnn.max_pool,
  "avg": jaxdnn.avg_pool,
  "lp": partial(jaxdnn.lp_pool, power=2.0),
}


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  return over(pool_cases.BENCHMARKS, dtypes, quick, shrink)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  return over(pool_cases.SWEEP, dtypes, quick, shrink)


def over(table: dict[str, list[PoolCase]], dtypes: list[str], quick: bool, shrink: int) -> Iterator[Work]:
  for kind, cases in table.items():
    for case in cases:
      if quick and case.name not in QUICK:
        continue
      for dtype in dtypes:
        yield from directions(kind, shrunk(case, shrink), dtype)


def directions(kind: str, case: PoolCase, dtype: str) -> Iterator[Work]:
  ours, xla = (adaptive, bins) if kind == "adaptive" else (partial(pool, kind), partial(reduce_window, kind))
  ours, xla = partial(ours, case), partial(xla, case)
  x = Draw(case.shape, dtype)
  y = Draw(jax.eval_shape(ours, jax.ShapeDtypeStruct(*x[:2])).shape, dtype)
  size, out = math.prod(x.shape) * itemsize(dtype), math.prod(y.shape) * itemsize(dtype)
  name = f"{kind}.{case.name}"
  yield Work("pool", name, dtype, "fwd", ours, xla, (x, y), size + out)
  # Which element was the maximum takes a byte at least; the norm's gradient reads x and y.
  kept = {"max": math.prod(y.shape), "lp": size + out}.get(kind, 0)
  yield Work("pool", name, dtype, "bwd", ours, xla, (x, y), size + out + kept, backward=True)


def pool(kind: str, case: PoolCase, x: Array, *unused: Array) -> Array:
  return OURS[kind](x, case.window, stride=case.stride, padding=case.padding, layout=case.layout)


def reduce_window(kind: str, case: PoolCase, x: Array, *unused: Array) -> Array:
  """As flax.linen pools, in either layout."""
  rank = len(case.window)
  last = 0 if case.layout else 1
  lead = x.ndim - rank - last

  def everywhere(values: Sequence, other: object) -> tuple:
    return (other,) * lead + tuple(values) + (other,) * last

  stride = case.stride or 1
  strides = everywhere((stride,) * rank if isinstance(stride, int) else stride, 1)
  padding = case.padding
  if isinstance(padding, int):
    padding = everywhere(((padding, padding),) * rank, (0, 0))
  arguments = everywhere(case.window, 1), strides, padding
  if kind == "max":
    return lax.reduce_window(x, -jnp.inf, lax.max, *arguments)
  if kind == "lp":
    return jnp.sqrt(lax.reduce_window(x * x, 0.0, lax.add, *arguments))
  return lax.reduce_window(x, 0.0, lax.add, *arguments) / math.prod(case.window)


def adaptive(case: PoolCase, x: Array, *unused: Array) -> Array:
  return jaxdnn.adaptive_avg_pool(x, case.window)


def bins(case: PoolCase, x: Array, *unused: Array) -> Array:
  """Adaptive pooling as ports of PyTorch models write it: a mean for each bin."""
  for axis, out in enumerate(case.window, 1):
    extent = x.shape[axis]
    ends = [(o * extent // out, -(-(o + 1) * extent // out)) for o in range(out)]
    x = jnp.concatenate([lax.slice_in_dim(x, *e, axis=axis).mean(axis, keepdims=True) for e in ends], axis)
  return x


def shrunk(case: PoolCase, factor: int) -> PoolCase:
  """The same kind of pooling, small enough for a trial without a GPU."""
  if factor == 1:
    return case
  rank = len(case.window)
  around = (1,) * (len(case.shape) - rank)
  least = (*around, *case.window) if case.layout else (*around[1:], *case.window, 1)
  return case._replace(shape=tuple(max(n // factor, low) for n, low in zip(case.shape, least, strict=True)))
