"""Layers of int8 and float8 operands, scaled to bfloat16, against lax: a convolution to float32, then the scale.

On a GPU lax has no integer convolution with an integer result; that to float32 is exact where sums stay below 2^24.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

import conv_cases
import jaxdnn
from benchmarks.conv import NUMBERS, count, flops_of, shrunk
from benchmarks.harness import Draw, Work
from conv_cases import SAME3, ConvCase

DTYPES = {"int8": "int8", "e4m3": "float8_e4m3fn"}
CASES = [
  *(
    case
    for case in (*conv_cases.DENSE, *conv_cases.OTHERS)
    if case.name
    in (
      "rn50.1x1.64-256@56", "rn50.3x3.128@28", "rn50.3x3s2.256@28", "rn50.1x1.1024-256@14", "rn50.3x3.512@7",
      "vgg.3x3.512@28", "sd.3x3.1280@16", "resnext.g32.128@56", "odd.3x3.65@56", "rn50.stem7x7s2",
    )
  ),
  ConvCase("3x3.256@28", 32, (28, 28), 256, (3, 3), 256, padding=SAME3),
  ConvCase("1x1.1024-256@14.b64", 64, (14, 14), 1024, (1, 1), 256),
]  # fmt: skip


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  """The element types are this family's own, whatever `dtypes` are."""
  for case in CASES[:2] if quick else CASES:
    case = shrunk(case, shrink)
    for name, dtype in DTYPES.items():
      counts = count(case)
      high = 127 if dtype == "int8" else 0
      x, w = Draw(case.x_shape, dtype, high), Draw(case.w_shape, dtype, high)
      scale = Draw((case.k,), "float32")
      results = case.batch * math.prod(counts.outputs) * case.k
      yield Work(
        "conv_quantized", f"{name}.{case.name}", dtype, "fwd", partial(ours, case), partial(xla, case), (x, w, scale),
        math.prod(x.shape) + math.prod(w.shape) + 2 * results, flops_of(case, counts), "bytes", tuned=True,
      )  # fmt: skip


def ours(case: ConvCase, x: Array, w: Array, scale: Array) -> Array:
  return jaxdnn.conv(
    x, w, stride=case.stride, padding=case.padding, groups=case.groups, w_scale=scale,
    preferred_element_type=jnp.bfloat16,
  )  # fmt: skip


def xla(case: ConvCase, x: Array, w: Array, scale: Array) -> Any:
  y = lax.conv_general_dilated(
    x, w, case.stride, case.padding, dimension_numbers=NUMBERS[len(case.window)], feature_group_count=case.groups,
    preferred_element_type=jnp.float32,
  )  # fmt: skip
  return (y * scale).astype(jnp.bfloat16)
