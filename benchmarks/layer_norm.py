"""Layer norm, RMS norm and their fused forms, forward and backward, against their formulas compiled by XLA."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn
import layer_norm_cases
from benchmarks.harness import Draw, Work, itemsize
from layer_norm_cases import Case

QUICK = (Case(65536, 768), Case(16384, 4096), Case(1024, 12288))
SWEEP_ELEMENTS = 1 << 26


def layer_formula(x: Array, scale: Array, bias: Array) -> Array:
  """What flax.linen.LayerNorm computes (use_fast_variance=False)."""
  wide = x.astype(jnp.float32)
  d = wide - wide.mean(-1, keepdims=True)
  return (d * jax.lax.rsqrt(jnp.square(d).mean(-1, keepdims=True) + 1e-5) * scale + bias).astype(x.dtype)


def rms_formula(x: Array, scale: Array) -> Array:
  wide = x.astype(jnp.float32)
  return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def adaptive_formula(x: Array, scale: Array, shift: Array) -> Array:
  return layer_formula(x, (1 + scale)[:, None], shift[:, None])


def add_formula(x: Array, residual: Array, scale: Array) -> tuple[Array, Array]:
  total = x + residual
  return rms_formula(total, scale), total


# name -> (ours, XLA's, number of parameters)
FUNCTIONS: dict[str, tuple[Callable, Callable, int]] = {
  "layer_norm": (jaxdnn.layer_norm, layer_formula, 2),
  "rms_norm": (jaxdnn.rms_norm, rms_formula, 1),
}


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for case in layer_norm_cases.BENCHMARKS:
    if quick and case not in QUICK:
      continue
    for name in FUNCTIONS:
      for dtype in dtypes:
        yield from directions(name, shrunk(case, shrink), dtype)
  for dtype in dtypes:
    yield from adaptive(32, shrunk(Case(1024, 1152), shrink), dtype)
    yield add(shrunk(Case(16384, 4096), shrink), dtype)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for n in layer_norm_cases.SWEEP[:: 8 if quick else 1]:
    yield from directions("layer_norm", shrunk(Case(SWEEP_ELEMENTS // n, n), shrink), dtypes[0])


def directions(name: str, case: Case, dtype: str) -> Iterator[Work]:
  ours, xla, count = FUNCTIONS[name]
  x, parameters = Draw(case, dtype), (Draw((case.n,), "float32"),) * count
  size = case.rows * case.n * itemsize(dtype)
  text = f"{case.rows}x{case.n}"
  yield Work(name, text, dtype, "fwd", ours, xla, (x, *parameters), 2 * size)
  yield Work(name, text, dtype, "bwd", ours, xla, (x, *parameters, x), 3 * size, backward=True, inputs=1 + count)


def adaptive(batch: int, case: Case, dtype: str) -> Iterator[Work]:
  x, parameter = Draw((batch, *case), dtype), Draw((batch, case.n), "float32")
  size = batch * case.rows * case.n * itemsize(dtype)
  text = f"{batch}x{case.rows}x{case.n}"
  both = (jaxdnn.adaptive_layer_norm, adaptive_formula)
  yield Work("adaptive_layer_norm", text, dtype, "fwd", *both, (x, parameter, parameter), 2 * size)
  operands = (x, parameter, parameter, x)
  yield Work("adaptive_layer_norm", text, dtype, "bwd", *both, operands, 3 * size, backward=True, inputs=3)


def add(case: Case, dtype: str) -> Work:
  """Value and gradients in one program: the sum is read again, and its cotangent joins the norm's."""
  x, parameter = Draw(case, dtype), Draw((case.n,), "float32")
  size = case.rows * case.n * itemsize(dtype)

  def with_gradients(f: Callable) -> Callable[..., Any]:
    def both(x: Array, residual: Array, scale: Array, g: Array, g_sum: Array) -> Any:
      y, vjp = jax.vjp(f, x, residual, scale)
      return y, vjp((g, g_sum))

    return both

  ours, xla = with_gradients(jaxdnn.add_rms_norm), with_gradients(add_formula)
  operands = (x, x, parameter, x, x)
  return Work("add_rms_norm", f"{case.rows}x{case.n}", dtype, "fwd+bwd", ours, xla, operands, 8 * size)


def shrunk(case: Case, factor: int) -> Case:
  """A case small enough for a trial without a GPU."""
  return Case(*(max(d // factor, 2) for d in case)) if factor > 1 else case
