"""Convolution: forward, data gradient and filter gradient against lax, which calls cuDNN.

What lax does not pad with, `jnp.pad` writes out before it.
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import conv_cases
import jaxdnn
from benchmarks.harness import Draw, Work, itemsize
from conv_cases import ConvCase

QUICK = ("rn50.stem7x7s2", "rn50.3x3.128@28", "convnext.dw7x7.96@56", "ensemble.e64.3x3.32@32", "mnist.conv2")
NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
OF_NUMPY: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for family, cases in (("conv_dense", conv_cases.DENSE), ("conv_other", conv_cases.OTHERS)):
    for case in cases:
      if quick and case.name not in QUICK:
        continue
      for dtype in dtypes:
        yield from directions(family, shrunk(case, shrink), dtype)
  if not quick:
    for dtype in dtypes:
      yield from local(dtype, batch=32, side=32 // shrink, channels=32 // shrink)
      yield from causal(dtype, batch=4, length=2048 // shrink, channels=4096 // shrink)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for case in conv_cases.OTHERS[:: 8 if quick else 1]:
    for neighbour in conv_cases.neighbours(shrunk(case, shrink)):
      yield from directions("conv_other", neighbour, dtypes[0])


def directions(family: str, case: ConvCase, dtype: str, *, precision: str = "") -> Iterator[Work]:
  """`precision`, if any, is ours; lax then computes at its highest."""
  more = ({"precision": precision}, {"precision": "highest"}) if precision else ({}, {})
  apis = (jaxdnn.conv_general_dilated, lax.conv_general_dilated)
  ours, xla = (partial(convolve, api, case, **each) for api, each in zip(apis, more, strict=True))
  counts = count(case)
  models = (case.models,) if case.models else ()
  x, w = Draw((*models, *case.x_shape), dtype), Draw((*models, *case.w_shape), dtype)
  y = Draw((*models, case.batch, *counts.outputs, case.k), dtype)
  x_size, w_size, y_size = (math.prod(operand.shape) for operand in (x, w, y))
  x_read = x_size // math.prod(case.spatial) * counts.touched
  flops = flops_of(case, counts)
  elements = {"fwd": x_read + w_size + y_size, "dgrad": y_size + w_size + x_size, "wgrad": x_read + y_size + w_size}
  functions = {"fwd": forward, "dgrad": data_gradient, "wgrad": filter_gradient}
  unit = "fma" if case.c == case.groups > 1 or precision == "highest" else dtype
  products = 3 if precision == "high" and unit != "fma" else 1
  for direction, function in functions.items():
    yield Work(
      family, f"{case.name} {precision}".strip(), dtype, direction, partial(function, ours), partial(function, xla),
      (x, w, y), elements[direction] * itemsize(dtype), products * flops, unit, tuned=True,
    )  # fmt: skip


def local(dtype: str, *, batch: int, side: int, channels: int) -> Iterator[Work]:
  """A 3x3 layer whose positions have filters of their own."""
  x = Draw((batch, side, side, channels), dtype)
  w = Draw((side, side, 9 * channels, channels), dtype)
  layer: Any = {"window_strides": (1, 1), "padding": "SAME", "filter_shape": (3, 3), "dimension_numbers": NUMBERS[2]}
  ours, xla = (partial(api, **layer) for api in (jaxdnn.conv_general_dilated_local, lax.conv_general_dilated_local))
  bytes_ = (2 * math.prod(x.shape) + math.prod(w.shape)) * itemsize(dtype)
  flops = 2 * batch * math.prod(w.shape)
  functions = {"fwd": forward, "dgrad": data_gradient, "wgrad": filter_gradient}
  for direction, function in functions.items():
    yield Work(
      "conv_other", f"local.3x3.{channels}@{side}", dtype, direction, partial(function, ours), partial(function, xla),
      (x, w, x), bytes_, flops, dtype, tuned=True,
    )  # fmt: skip


def causal(dtype: str, *, batch: int, length: int, channels: int) -> Iterator[Work]:
  """The short causal convolution of state-space layers with its bias and activation, and all gradients of it."""

  def ours(x: Array, w: Array, b: Array) -> Array:
    return jaxdnn.causal_conv1d(x, w, b, activation="silu")

  def xla(x: Array, w: Array, b: Array) -> Array:
    y = lax.conv_general_dilated(
      x, w[:, None], (1,), ((taps - 1, 0),), dimension_numbers=NUMBERS[1], feature_group_count=channels
    )
    return jax.nn.silu(y + b)

  taps = 4
  x, w, b = Draw((batch, length, channels), dtype), Draw((taps, channels), dtype), Draw((channels,), dtype)
  size, flops = math.prod(x.shape) * itemsize(dtype), 2 * taps * math.prod(x.shape)
  name = f"causal_conv1d.silu4.{channels}"
  yield Work("conv_other", name, dtype, "fwd", ours, xla, (x, w, b), 2 * size, flops, "fma", tuned=True)
  yield Work(
    "conv_other", name, dtype, "bwd", ours, xla, (x, w, b, x), 3 * size, 2 * flops, "fma", backward=True, inputs=3,
    tuned=True,
  )  # fmt: skip


def convolve(api: Any, case: ConvCase, x: Array, w: Array, **options: Any) -> Array:
  def one(x: Array, w: Array) -> Array:
    padding: Any = case.padding
    if case.padding_mode != "zeros":
      if api is jaxdnn.conv_general_dilated:
        return jaxdnn.conv(
          x, w, stride=case.stride, padding=padding, padding_mode=case.padding_mode, dilation=case.rhs_dilation,
          groups=case.groups, **options,
        )  # fmt: skip
      x, padding = jnp.pad(x, ((0, 0), *padding, (0, 0)), mode=OF_NUMPY[case.padding_mode]), "VALID"
    return api(
      x, w, case.stride, padding, lhs_dilation=case.lhs_dilation, rhs_dilation=case.rhs_dilation,
      dimension_numbers=NUMBERS[len(case.window)], feature_group_count=case.groups, **options,
    )  # fmt: skip

  return jax.vmap(one)(x, w) if case.models else one(x, w)


def forward(conv: Any, x: Array, w: Array, y: Array) -> Array:
  return conv(x, w)


def data_gradient(conv: Any, x: Array, w: Array, y: Array) -> Array:
  return jax.linear_transpose(lambda x: conv(x, w), x)(y)[0]


def filter_gradient(conv: Any, x: Array, w: Array, y: Array) -> Array:
  return jax.linear_transpose(lambda w: conv(x, w), w)(y)[0]


class Counts(NamedTuple):
  outputs: tuple[int, ...]
  pairs: int
  """Of an output position and a tap that meet an element of x: zeros of the padding and of a dilation cost nothing."""
  touched: int
  """Positions of x that some output reads."""


def flops_of(case: ConvCase, counts: Counts) -> int:
  return 2 * max(case.models, 1) * case.batch * counts.pairs * (case.c // case.groups) * case.k


def count(case: ConvCase) -> Counts:
  outputs, pairs, touched = [], 1, 1
  for n, window, stride, (low, high), lhs, rhs in zip(case.spatial, case.window, *case.geometry, strict=True):
    extent = (n - 1) * lhs + 1
    o = (extent + low + high - (window - 1) * rhs - 1) // stride + 1
    at = np.arange(o)[:, None] * stride + np.arange(window) * rhs - low
    if case.padding_mode != "zeros":
      at = np.pad(np.arange(n), (low, high), mode=OF_NUMPY[case.padding_mode])[at + low]
    at = at[(at >= 0) & (at < extent) & (at % lhs == 0)]
    outputs.append(o)
    pairs *= at.size
    touched *= np.unique(at).size
  return Counts(tuple(outputs), pairs, touched)


def shrunk(case: ConvCase, factor: int) -> ConvCase:
  """The same kind of convolution, small enough for a trial without a GPU."""
  if factor == 1:
    return case
  spatial = tuple(
    max(n // factor, (w - 1) * d + 1) for n, w, d in zip(case.spatial, case.window, case.rhs_dilation, strict=True)
  )
  groups = max(1, case.groups // factor)
  c, k = case.c // case.groups, case.k // case.groups
  if case.groups == 1:
    c, k = max(1, c // factor), max(1, k // factor)
  return dataclasses.replace(
    case, batch=max(1, case.batch // factor), spatial=spatial, c=groups * c, k=groups * k, groups=groups,
    models=case.models and max(1, case.models // factor),
  )  # fmt: skip
