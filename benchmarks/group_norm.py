"""Group and instance normalization, forward and backward, in both layouts, against their formulas compiled by XLA."""

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

import group_norm_cases
import jaxdnn
from benchmarks.harness import Draw, Work, itemsize
from group_norm_cases import Case

QUICK = ((32, 64, 64, 320), (16, 16, 16, 1280))


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for name, cases in (("group_norm", group_norm_cases.GROUP), ("instance_norm", group_norm_cases.INSTANCE)):
    for case in cases:
      if quick and case.shape not in QUICK:
        continue
      for layout in (case, group_norm_cases.first(case)):
        for dtype in dtypes:
          yield from directions(name, shrunk(layout, shrink), dtype)
  fused = Case((32, 64, 64, 320), 32)
  for dtype in dtypes:
    yield from directions("group_norm_silu", shrunk(fused, shrink), dtype, activation="silu")


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for case in group_norm_cases.SWEEP[:: 8 if quick else 1]:
    for layout in (case, group_norm_cases.first(case)):
      yield from directions("group_norm", shrunk(layout, shrink), dtypes[0])


def directions(name: str, case: Case, dtype: str, activation: str | None = None) -> Iterator[Work]:
  x, parameter = Draw(case.shape, dtype), Draw((case.channels,), "float32")
  size = math.prod(case.shape) * itemsize(dtype)
  text = f"{'x'.join(map(str, case.shape))} groups {case.groups} axis {case.axis}"
  ours = partial(normalize, case, activation)
  xla = partial(formula, case, activation)
  yield Work(name, text, dtype, "fwd", ours, xla, (x, parameter, parameter), 2 * size)
  operands = (x, parameter, parameter, x)
  yield Work(name, text, dtype, "bwd", ours, xla, operands, 3 * size, backward=True, inputs=3)


def normalize(case: Case, activation: str | None, x: Array, scale: Array, bias: Array) -> Array:
  return jaxdnn.group_norm(x, case.groups, scale, bias, axis=case.axis, activation=activation)


def formula(case: Case, activation: str | None, x: Array, scale: Array, bias: Array) -> Array:
  """What flax.linen.GroupNorm computes (use_fast_variance=False), with the channels on either side."""
  per_group = case.channels // case.groups
  if case.axis == 1:
    shape, axes = (x.shape[0], case.groups, per_group, -1), (2, 3)
    broadcast = (1, -1, *[1] * (x.ndim - 2))
  else:
    shape, axes = (x.shape[0], -1, case.groups, per_group), (1, 3)
    broadcast = (*[1] * (x.ndim - 1), -1)
  wide = x.astype(jnp.float32).reshape(shape)
  mean = wide.mean(axes, keepdims=True)
  variance = jnp.square(wide - mean).mean(axes, keepdims=True)
  xhat = ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
  p = xhat * scale.reshape(broadcast) + bias.reshape(broadcast)
  return (jax.nn.silu(p) if activation == "silu" else p).astype(x.dtype)


def shrunk(case: Case, factor: int) -> Case:
  """A case small enough for a trial without a GPU."""
  if factor == 1:
    return case
  groups = max(case.groups // factor, 1)
  channels = groups * max(case.channels // case.groups // factor, 1)
  shape = [max(n // factor, 2) for n in case.shape]
  shape[case.axis] = channels
  return Case(tuple(shape), groups, case.axis)
