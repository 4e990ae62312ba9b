"""Convolution with bias, residual and activation, against lax and what XLA fuses of the rest."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
from jax import Array, lax

import conv_cases
import jaxdnn
from benchmarks.conv import convolve, count, flops_of, shrunk
from benchmarks.harness import Draw, Work, itemsize
from conv_cases import ConvCase

# Of the convolutions' cases: the activation, and whether a residual is added before it.
LAYERS: dict[str, tuple[str | None, bool]] = {
  "rn50.stem7x7s2": ("relu", False),
  "rn50.3x3.64@56": ("relu", False),
  "rn50.3x3.128@28": ("relu", False),
  "rn50.1x1.64-256@56": ("relu", True),
  "rn50.3x3.512@7": ("relu", False),
  "sd.3x3.640@32": ("silu", True),
  "mbv2.dw3x3.144@56": ("clipped_relu", False),
  "mbv2.dw3x3s2.96@112": ("clipped_relu", False),
  "effnet.dw5x5.240@28": ("silu", False),
  "convnext.dw7x7.96@56": (None, False),
  "convnext.stem4x4s4": (None, False),
  "replk.dw31x31.128@56": (None, True),
  "x3d.dw3x3x3.108@16x28": ("silu", False),
  "resnext.g32.128@56": ("relu", False),
  "regnet.w24.408@14": ("relu", False),
  "vgg.3x3.64@224": ("relu", False),
  "unet3d.3x3x3.32@96": ("relu", False),
  "odd.3x3.65@56": ("relu", False),
}
OF_JAX = {"relu": jax.nn.relu, "clipped_relu": jax.nn.relu6, "silu": jax.nn.silu}
QUICK = ("rn50.3x3.64@56", "mbv2.dw3x3.144@56")


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  cases = {case.name: case for case in (*conv_cases.DENSE, *conv_cases.OTHERS)}
  for name in QUICK if quick else LAYERS:
    kind, residual = LAYERS[name]
    case = shrunk(cases[name], shrink)
    counts = count(case)
    results = (case.batch, *counts.outputs, case.k)
    for dtype in dtypes:
      operands = [Draw(shape, dtype) for shape in (case.x_shape, case.w_shape, (case.k,))]
      operands += [Draw(results, dtype)] * residual
      moved = sum(math.prod(operand.shape) for operand in operands) + math.prod(results)
      after = "+".join(["bias", *["residual"] * residual, *([kind] if kind else [])])
      yield Work(
        "conv_fused", f"{name} {after}", dtype, "fwd", partial(ours, case, kind), partial(xla, case, kind),
        tuple(operands), moved * itemsize(dtype), flops_of(case, counts),
        "fma" if case.c == case.groups > 1 else dtype, tuned=True,
      )  # fmt: skip


def ours(case: ConvCase, kind: str | None, x: Array, w: Array, b: Array, residual: Array | None = None) -> Array:
  return jaxdnn.conv(
    x, w, b, stride=case.stride, padding=case.padding, dilation=case.rhs_dilation, groups=case.groups, activation=kind,
    residual=residual,
  )  # fmt: skip


def xla(case: ConvCase, kind: str | None, x: Array, w: Array, b: Array, residual: Array | None = None) -> Any:
  y = convolve(lax.conv_general_dilated, case, x, w)
  y = y + b if residual is None else y + b + residual
  return y if kind is None else OF_JAX[kind](y)
