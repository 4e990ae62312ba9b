"""The planner, for those who want to know or to compare what it chooses from."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdnn._arguments import Padding
from jaxdnn._conv import aligned, gemm
from jaxdnn._conv.aligned import CLOCK_HZ
from jaxdnn._conv.padding import PaddingMode
from jaxdnn._conv.primitives import (
  ALGORITHMS,
  DEPTHWISE,
  DIRECT,
  FEW_CHANNELS,
  FEW_FEATURES,
  GROUPED,
  OPERANDS,
  PLANES,
  UNALIGNED,
  plan,
  products,
)
from jaxdnn._conv.spec import ConvSpec, check_channels, is_float8, make_spec, result_dtype, sums_dtype

_RESULTS = {"forward": "y", "data_gradient": "x", "filter_gradient": "w"}
_BYTES_PER_SECOND = 4e12
_LAUNCH_MICROSECONDS = 3.0  # of one more kernel


@dataclasses.dataclass(frozen=True)
class ConvAlgorithm:
  """One way to compute a convolution or a gradient of it."""

  name: str
  """What `algorithm=` takes; or the tile, for just that."""
  tile: str
  """The instruction, and the rows and columns of the result that a block, or warpgroup, computes at once."""
  splits: int
  """Parts, at most, of each of the filter gradient's sums, which a second kernel adds up in order."""
  workspace_bytes: int
  exactness: str
  """The type that sums are kept in, and what float32 operands are rounded to before: 'float32', 'float32 of tf32',
  'float32 of 3xtf32', 'float64', 'int32'; or 'float32 of 13 bits', where the tensor cores add 128 products of float8
  with 13 bits behind the point of the largest. Products of 16-bit and of 8-bit floats are exact."""
  microseconds: float
  """Modelled, for an H200."""


def conv_algorithms(
  x: Any,
  w: Any,
  *,
  direction: str = "forward",
  stride: int | Sequence[int] = 1,
  padding: Padding = "VALID",
  padding_mode: PaddingMode = "zeros",
  dilation: int | Sequence[int] = 1,
  groups: int = 1,
  precision: Any = None,
  preferred_element_type: Any = None,
  workspace_limit: int | None = None,
  hopper: bool = True,
) -> list[ConvAlgorithm]:
  """The kernels that can compute a convolution, or a gradient of it, fastest first.

  The first is what is used, or the next after 'gemm', which is only used where it is asked for. The order comes from a
  closed-form model of their times. Nothing is run or measured, and no GPU is needed.

  Args:
    x: input [N, *spatial, C]: an array, or anything with a shape and a dtype, such as `jax.ShapeDtypeStruct`.
    w: filter [*window, C / groups, K], likewise.
    direction: 'forward' (default), 'data_gradient' or 'filter_gradient'.
    stride, padding, padding_mode, dilation, groups, precision, preferred_element_type, workspace_limit: as in `conv`.
    hopper: whether for devices of compute capability 9.0 (default), which have kernels of their own.

  Returns:
    A list of `ConvAlgorithm`; empty where no kernel takes the problem and XLA computes it.

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> x, w = (jax.ShapeDtypeStruct(s, 'bfloat16') for s in ((32, 56, 56, 64), (3, 3, 64, 64)))
    >>> [a.name for a in jaxdnn.conv_algorithms(x, w, padding='SAME')]
    ['implicit_gemm_wgmma', 'planes', 'implicit_gemm_mma', 'gemm', 'implicit_gemm']
  """
  where = "conv_algorithms"
  if direction not in _RESULTS:
    raise ValueError(f"{where}: direction must be one of {tuple(_RESULTS)}, got {direction!r}")
  rank = len(w.shape) - 2
  if rank < 0 or len(x.shape) != rank + 2:
    raise ValueError(f"{where}: x and w must have the same rank, at least 2, got shapes {x.shape} and {w.shape}")
  spec = make_spec(
    where, x.shape[1:-1], w.shape[:-2], stride=stride, padding=padding, lhs_dilation=None, rhs_dilation=dilation,
    groups=groups, precision=precision, workspace_limit=workspace_limit, padding_mode=padding_mode,
  )  # fmt: skip
  check_channels(where, x.shape[-1], w.shape[-2], w.shape[-1], spec.groups, x.shape[0])
  dtype = result_dtype(where, x, w, preferred_element_type)
  if direction == "forward":
    dtype = sums_dtype(x, w, math.prod(w.shape[:-1]), dtype)
  shapes = {"x": x.shape, "w": w.shape, "y": (x.shape[0], *spec.y_spatial, w.shape[-1])}
  result = _RESULTS[direction]
  a, b = (jax.ShapeDtypeStruct((1, *shapes[name]), x.dtype) for name in OPERANDS[result])
  plans = [
    plan(result, a, b, dataclasses.replace(spec, algorithm=name), dtype, hopper=hopper)
    for name in (*ALGORITHMS, DEPTHWISE, FEW_CHANNELS, GROUPED, FEW_FEATURES, UNALIGNED, PLANES, DIRECT)
  ]
  found = [
    ConvAlgorithm(
      p["algorithm"], p["tile"], p["splits"], p["workspace_bytes"], _exactness(p["algorithm"], x.dtype, spec),
      p["cycles"] / CLOCK_HZ * 1e6,
    )
    for p in plans
    if p is not None
  ]  # fmt: skip
  if gemm.takes(spec) and found and np.dtype(x.dtype).itemsize > 1:
    found.append(_by_patches(result, shapes, spec, x.dtype, dtype, hopper))
  if aligned.takes(x) and (choice := aligned.choose(result, a, b, spec, dtype, hopper=hopper)):
    p = choice.plan
    found.append(
      ConvAlgorithm(
        aligned.NAME, p["tile"], p["splits"], choice.copies_bytes + p["workspace_bytes"],
        _exactness(p["algorithm"], x.dtype, spec), choice.seconds * 1e6,
      )
    )  # fmt: skip
  if spec.workspace_limit is not None:
    found = [each for each in found if each.workspace_bytes <= spec.workspace_limit]
  return sorted(found, key=lambda each: each.microseconds)


def _by_patches(
  result: str, shapes: dict[str, Any], spec: ConvSpec, dtype: Any, out_dtype: Any, hopper: bool
) -> ConvAlgorithm:
  """The best kernel for the product, and one more that writes, or sums, the patches."""
  n, c, k = shapes["x"][0], shapes["x"][-1], shapes["w"][-1]
  rows, terms = n * math.prod(spec.y_spatial), math.prod(spec.window) * c
  matrices = {"x": (1, rows, terms), "w": (1, terms, k), "y": (1, rows, k)}
  a, b = (jax.ShapeDtypeStruct(matrices[name], dtype) for name in OPERANDS[result])
  workspace = gemm.patches_bytes(result, n, c, spec, dtype)
  p = plan(result, a, b, gemm.matrix_spec(spec, workspace), out_dtype, hopper=hopper)
  assert p is not None
  # The patches are both written and read.
  moved = 2 * workspace + math.prod(shapes["x"]) * np.dtype(dtype).itemsize
  microseconds = p["cycles"] / CLOCK_HZ * 1e6 + moved / _BYTES_PER_SECOND * 1e6 + _LAUNCH_MICROSECONDS
  exactness = _exactness(p["algorithm"], dtype, spec)
  return ConvAlgorithm(
    gemm.NAME, p["tile"], p["splits"], workspace + p["workspace_bytes"], exactness, microseconds
  )


def _exactness(algorithm: str, dtype: Any, spec: ConvSpec) -> str:
  if np.dtype(dtype) == np.float64:
    return "float64"
  if np.dtype(dtype) == np.int8:
    return "int32"
  if is_float8(dtype) and algorithm == ALGORITHMS[0]:
    return "float32 of 13 bits"
  rounded = np.dtype(dtype) == np.float32 and algorithm not in (ALGORITHMS[-1], DEPTHWISE)
  return "float32 of " + {1: "tf32", 3: "3xtf32"}[products(spec)] if rounded else "float32"
