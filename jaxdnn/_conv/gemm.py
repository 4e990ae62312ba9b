"""The algorithm `gemm`: the input's patches are written out, and one matrix product does the rest.

The textbook way, with a workspace as large as the window times the input, kept as what the implicit products are
compared with. The product itself is a convolution without spatial dimensions, computed by the library's kernels.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import Array

from jaxdnn import _primitive
from jaxdnn._conv import aligned, primitives
from jaxdnn._conv.primitives import OPERANDS
from jaxdnn._conv.spec import ConvSpec
from jaxdnn._transform import col2im, im2col

NAME = "gemm"


def convolve(result: str, arrays: Mapping[str, Array], spec: ConvSpec, dtype: Any) -> Array:
  """`primitives.convolve`, also by the algorithms that are more than one kernel where they are asked for."""
  if spec.algorithm == aligned.NAME:
    return aligned.convolve(result, arrays, spec, dtype)
  if spec.algorithm != NAME:
    return primitives.convolve(result, arrays, spec, dtype)
  if not takes(spec):
    raise ValueError(
      f"{primitives.NAMES[result]}: algorithm={NAME!r} takes one group, 1 to 3 spatial dimensions, an input that is "
      f"not dilated and padding with zeros, got groups={spec.groups}, {spec.rank} dimensions, "
      f"lhs_dilation={spec.lhs_dilation} and padding_mode={spec.padding_mode}"
    )
  a, b = (arrays[name] for name in OPERANDS[result])
  channels = b.shape[-2] if result == "x" else a.shape[-1]
  needed = patches_bytes(result, math.prod(a.shape[:2]), channels, spec, a.dtype)
  if spec.workspace_limit is not None and needed > spec.workspace_limit:
    raise ValueError(
      f"{primitives.NAMES[result]}: algorithm={NAME!r} needs {needed} bytes for its patches, more than "
      f"workspace_limit={spec.workspace_limit}"
    )
  batch = a.shape[0]
  patches: dict[str, Any] = dict(stride=spec.stride, padding=spec.padding, dilation=spec.rhs_dilation)

  def matrix(name: str, array: Array) -> Array:
    array = im2col(array, spec.window, **patches) if name == "x" else array
    return array.reshape(batch, math.prod(array.shape[1:-1]), array.shape[-1])

  matrices = {name: matrix(name, arrays[name]) for name in OPERANDS[result]}
  if result == "y":
    y = primitives.convolve("y", matrices, matrix_spec(spec, needed), dtype)
    return y.reshape(*a.shape[:2], *spec.y_spatial, y.shape[-1])
  if result == "w":
    w = primitives.convolve("w", matrices, matrix_spec(spec, needed), dtype)
    return w.reshape(batch, *spec.window, a.shape[-1], w.shape[-1])
  # The patches overlap, so they are summed before they are rounded.
  wide = max(_primitive.accumulator_dtype(a.dtype), np.dtype(dtype), key=lambda t: t.itemsize)
  x = primitives.convolve("x", matrices, matrix_spec(spec, needed), wide)
  x = x.reshape(*a.shape[:2], *spec.y_spatial, x.shape[-1])
  return col2im(x, spec.x_spatial, spec.window, **patches).astype(dtype)


def takes(spec: ConvSpec) -> bool:
  holes = any(d != 1 for d in spec.lhs_dilation)
  return spec.groups == 1 and 1 <= spec.rank <= 3 and not holes and not spec.padding_mode


def matrix_spec(spec: ConvSpec, patches: int) -> ConvSpec:
  """Of the product: a convolution of as many images as there are patches, in the memory that these leave."""
  limit = None if spec.workspace_limit is None else max(0, spec.workspace_limit - patches)
  return ConvSpec((), (), (), (), 1, (), (), spec.precision, workspace_limit=limit)


def patches_bytes(result: str, images: int, channels: int, spec: ConvSpec, dtype: Any) -> int:
  stored = _primitive.accumulator_dtype(dtype) if result == "x" else np.dtype(dtype)
  return images * math.prod(spec.y_spatial) * math.prod(spec.window) * channels * stored.itemsize
