"""Local response and divisive normalization, forward and backward, against lax.reduce_window and its gradient."""

import math
from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

import jaxdnn
import lrn_cases
from benchmarks.harness import Draw, Work, itemsize
from lrn_cases import LrnCase

QUICK = ((512, 27, 27, 256), (512, 256, 27, 27), (128, 56, 56, 64))
NAMES = {"across_channels": "lrn", "within_channel": "lrn.box", "divisive": "divnorm"}
ALPHA, BETA, K = 1e-4, 0.75, 2.0


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  cases = [case for case in lrn_cases.BENCHMARKS if not quick or case.shape in QUICK]
  return rows(cases, dtypes, shrink)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  return rows(lrn_cases.SWEEP[:: 8 if quick else 1], dtypes, shrink)


def rows(cases: list[LrnCase], dtypes: list[str], shrink: int) -> Iterator[Work]:
  for case in cases:
    case = case._replace(shape=tuple(max(n // shrink, min(n, 2)) for n in case.shape))
    for dtype in dtypes:
      yield from directions(case, dtype)


def directions(case: LrnCase, dtype: str) -> Iterator[Work]:
  x, size = Draw(case.shape, dtype), math.prod(case.shape) * itemsize(dtype)
  ours, xla = partial(jaxdnn_form, case), partial(reduce_window_form, case)
  name = f"{NAMES[case.mode]}.n{case.size}.{'x'.join(map(str, case.shape))}"
  name += ".first" if case.options.get("axis") == 1 else ""
  means = case.mode == "divisive"
  # x, the means where there are any, and y; backward x, the means, dy and dx.
  yield Work("lrn", name, dtype, "fwd", ours, xla, (x, x, x), (3 if means else 2) * size)
  yield Work("lrn", name, dtype, "bwd", ours, xla, (x, x, x), (4 if means else 3) * size, backward=True)


def jaxdnn_form(case: LrnCase, x: Array, means: Array, *unused: Array) -> Array:
  if case.mode == "divisive":
    return jaxdnn.divisive_norm(x, means, size=case.size, alpha=ALPHA, beta=BETA, k=K, **case.options)
  return jaxdnn.local_response_norm(x, case.size, alpha=ALPHA, beta=BETA, k=K, mode=case.mode, **case.options)


def reduce_window_form(case: LrnCase, x: Array, means: Array, *unused: Array) -> Array:
  """As one would write it in lax, in float32 inside."""
  dtype, channels = x.dtype, case.options.get("axis", -1) % x.ndim
  coupled = (channels,) if case.mode == "across_channels" else tuple(d for d in range(1, x.ndim) if d != channels)
  window = [case.size if d in coupled else 1 for d in range(x.ndim)]
  x = x.astype(jnp.float32)

  def box_sum(v: Array) -> Array:
    return lax.reduce_window(v, 0.0, lax.add, window, (1,) * v.ndim, "SAME")

  energy = box_sum(x * x)
  if case.mode == "divisive":
    # The sum of (x - m)² around each centre's own m, expanded: nothing else is a sum over windows.
    m = means.astype(jnp.float32)
    cells = box_sum(jnp.ones([n if d in coupled else 1 for d, n in enumerate(x.shape)], jnp.float32))
    energy = energy - 2 * m * box_sum(x) + m * m * cells
  divisor = K + ALPHA / case.size ** len(coupled) * energy
  return (x * divisor**-BETA).astype(dtype)
