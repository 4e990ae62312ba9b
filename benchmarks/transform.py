"""Tensor transforms and patches, against jnp.transpose, jnp.pad, astype and lax.conv_general_dilated_patches."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn
from benchmarks.harness import Draw, Work, itemsize

NHWC_TO_NCHW, NCHW_TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)
QUICK = ("256x56x56x64 NHWC to NCHW", "8192x8192 transposed", "pad 3 to 4", "im2col 3x3 256x56x56x64")

# (name, shape, permutation, padding)
LAYOUTS = (
  ("256x56x56x64 NHWC to NCHW", (256, 56, 56, 64), NHWC_TO_NCHW, None),
  ("256x64x56x56 NCHW to NHWC", (256, 64, 56, 56), NCHW_TO_NHWC, None),
  ("64x56x56x256 NHWC to NCHW", (64, 56, 56, 256), NHWC_TO_NCHW, None),
  ("64x256x56x56 NCHW to NHWC", (64, 256, 56, 56), NCHW_TO_NHWC, None),
  ("256x7x7x2048 NHWC to NCHW", (256, 7, 7, 2048), NHWC_TO_NCHW, None),
  ("256x2048x7x7 NCHW to NHWC", (256, 2048, 7, 7), NCHW_TO_NHWC, None),
  ("256x224x224x3 NHWC to NCHW", (256, 224, 224, 3), NHWC_TO_NCHW, None),
  ("256x3x224x224 NCHW to NHWC", (256, 3, 224, 224), NCHW_TO_NHWC, None),
  ("32x224x224x3 NHWC to NCHW", (32, 224, 224, 3), NHWC_TO_NCHW, None),
  ("32x3x224x224 NCHW to NHWC", (32, 3, 224, 224), NCHW_TO_NHWC, None),
  ("8192x8192 transposed", (8192, 8192), (1, 0), None),
  ("64x1024x16x64 heads first", (64, 1024, 16, 64), (0, 2, 1, 3), None),
  ("256x224x224x3 pad 3 to 4", (256, 224, 224, 3), None, ((0, 0), (0, 0), (0, 0), (0, 1))),
  ("256x224x224x3 pad 3 to 8", (256, 224, 224, 3), None, ((0, 0), (0, 0), (0, 0), (0, 5))),
  ("256x3x224x224 to NHWC, pad 3 to 8", (256, 3, 224, 224), NCHW_TO_NHWC, ((0, 0), (0, 0), (0, 0), (0, 5))),
  ("256x56x56x64 pad 1", (256, 56, 56, 64), None, ((0, 0), (1, 1), (1, 1), (0, 0))),
  ("256x58x58x64 crop 1", (256, 58, 58, 64), None, ((0, 0), (-1, -1), (-1, -1), (0, 0))),
  ("256x64x58x58 crop 1", (256, 64, 58, 58), None, ((0, 0), (0, 0), (-1, -1), (-1, -1))),
)

# Extents beside the usual ones, and every small number of channels.
SWEEP = (
  *((f"{m}x{n} transposed", (m, n), (1, 0), None) for m in (8191, 8192, 8193) for n in (8191, 8193)),
  *((f"64x224x224x{c} NHWC to NCHW", (64, 224, 224, c), NHWC_TO_NCHW, None) for c in (1, 2, 4, 5, 8, 12, 16, 17, 33)),
  *((f"64x{c}x224x224 NCHW to NHWC", (64, c, 224, 224), NCHW_TO_NHWC, None) for c in (2, 4, 5, 8, 12, 16, 17, 33)),
  ("256x55x57x65 NHWC to NCHW", (256, 55, 57, 65), NHWC_TO_NCHW, None),
  ("256x65x55x57 NCHW to NHWC", (256, 65, 55, 57), NCHW_TO_NHWC, None),
  ("64x63x65x129 reversed", (64, 63, 65, 129), (3, 2, 1, 0), None),
  ("256x225x225x3 crop 1", (256, 225, 225, 3), None, ((0, 0), (0, -1), (0, -1), (0, 0))),
  ("256x224x224x4 crop 4 to 3", (256, 224, 224, 4), None, ((0, 0), (0, 0), (0, 0), (0, -1))),
  ("4194304x8x4 transposed", (1 << 22, 8, 4), (0, 2, 1), None),
)

# (name, shape, window, stride, padding)
PATCHES = (
  ("256x56x56x64", (256, 56, 56, 64), (3, 3), 1, "SAME"),
  ("32x224x224x3", (32, 224, 224, 3), (7, 7), 2, "SAME"),
  ("128x56x56x96", (128, 56, 56, 96), (2, 2), 2, "VALID"),
)


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for dtype in dtypes:
    for case in LAYOUTS:
      if not quick or case[0] in QUICK:
        yield layout(*case, dtype, shrink)
    if not quick:
      yield from conversions(dtype, shrink)
  for dtype in dtypes:
    for case in PATCHES[: 1 if quick else None]:
      yield from patches(*case, dtype, shrink)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for dtype in dtypes:
    for case in SWEEP[:: 8 if quick else 1]:
      yield layout(*case, dtype, shrink)


def layout(name: str, shape: tuple[int, ...], permutation: Any, padding: Any, dtype: str, shrink: int) -> Work:
  """Moves alone: what lands in the result is read, all of the result is written."""
  shape = shrunk(shape, shrink)
  permutation = permutation or tuple(range(len(shape)))

  def xla(x: Array) -> Array:
    x = x.transpose(permutation)
    return lax.pad(x, jnp.zeros((), x.dtype), [(lo, hi, 0) for lo, hi in padding]) if padding else x

  ours = partial(jaxdnn.transform, permutation=permutation, padding=padding)
  out = jax.eval_shape(ours, jax.ShapeDtypeStruct(shape, dtype)).shape
  read = math.prod(min(shape[d], n) for d, n in zip(permutation, out, strict=True))
  moved = (read + math.prod(out)) * itemsize(dtype)
  return Work("transform", name, dtype, "fwd", ours, xla, (Draw(shape, dtype),), moved)


def conversions(dtype: str, shrink: int) -> Iterator[Work]:
  """To the other type; a picture to a normalised batch; and the sum of two arrays."""
  other = "float32" if dtype == "bfloat16" else "bfloat16"
  shape = shrunk((8192, 8192), shrink)
  count, sizes = math.prod(shape), itemsize(dtype) + itemsize(other)
  ours, xla = partial(jaxdnn.transform, dtype=other), lambda x: x.astype(other)
  yield Work("transform", f"8192x8192 to {other}", dtype, "fwd", ours, xla, (Draw(shape, dtype),), count * sizes)
  ours = partial(jaxdnn.transform, dtype=other, permutation=(1, 0))
  xla = lambda x: x.T.astype(other)  # noqa: E731
  name = f"8192x8192 transposed to {other}"
  yield Work("transform", name, dtype, "fwd", ours, xla, (Draw(shape, dtype),), count * sizes)
  ours = partial(jaxdnn.transform, permutation=(1, 0), alpha=2, beta=0.5)
  xla = lambda x, y: x.T * jnp.asarray(2, dtype) + y * jnp.asarray(0.5, dtype)  # noqa: E731
  operands = Draw(shape, dtype), Draw(shape[::-1], dtype)
  yield Work("transform", "8192x8192 2 x.T + y / 2", dtype, "fwd", ours, xla, operands, 3 * count * itemsize(dtype))
  shape = shrunk((256, 224, 224, 3), shrink)
  ours = partial(jaxdnn.transform, permutation=NHWC_TO_NCHW, dtype=dtype, alpha=1 / 255)
  xla = lambda x: (x.astype("float32") * (1 / 255)).astype(dtype).transpose(NHWC_TO_NCHW)  # noqa: E731
  operands = (Draw(shape, "uint8", high=255),)
  moved = math.prod(shape) * (1 + itemsize(dtype))
  yield Work("transform", "256x224x224x3 bytes to NCHW / 255", dtype, "fwd", ours, xla, operands, moved)


def patches(
  name: str, shape: tuple[int, ...], window: tuple[int, ...], stride: int, padding: str, dtype: str, shrink: int
) -> Iterator[Work]:
  """im2col in the order of lax, so that both do the same, would cost a transpose; each side has its own order."""
  if shrink > 1:
    shape = (2, *(3 * w for w in window), 3)
  ours = partial(jaxdnn.im2col, window=window, stride=stride, padding=padding)
  x = jax.ShapeDtypeStruct(shape, dtype)
  spatial = "HW"[: len(window)]
  xla = partial(
    lax.conv_general_dilated_patches,
    filter_shape=window,
    window_strides=(stride,) * len(window),
    padding=padding,
    dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
  )
  cols = jax.eval_shape(ours, x).shape
  moved = (math.prod(shape) + math.prod(cols)) * itemsize(dtype)
  case = f"{'x'.join(map(str, window))} {name} stride {stride}"
  operands = Draw(shape, dtype), Draw(cols, dtype)
  yield Work("transform", f"im2col {case}", dtype, "fwd", *map(first, (ours, xla)), operands, moved)
  yield Work("transform", f"col2im {case}", dtype, "fwd", *map(adjoint, (ours, xla)), operands, moved)


def first(f: Any) -> Any:
  return lambda x, g: f(x)


def adjoint(f: Any) -> Any:
  return lambda x, g: jax.linear_transpose(f, x)(g)[0]


def shrunk(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
  """A shape small enough for a trial without a GPU."""
  return tuple(max(n // factor, 2) for n in shape) if factor > 1 else shape
