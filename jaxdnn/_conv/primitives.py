"""The three convolution primitives, their reference and their rules.

Canonical operands, with S, R, P the spatial extents of input, filter and output, C and K the channel counts:

    x  [B, N, *S, C]      w  [B, *R, C/groups, K]      y  [B, N, *P, K]

The leading axis B holds independent problems: `vmap` over both operands adds to it, and the kernels take it as one
more grid dimension.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _extension, _primitive
from jaxdnn._arguments import dilated
from jaxdnn._conv.padding import MODES, beyond, extend, fold
from jaxdnn._conv.spec import FLOAT8, ConvSpec, Precision, channels_last, is_float8, sums_dtype

OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}
"""For each array of the trilinear form, the two that the primitive which computes it takes."""


def convolve(result: str, arrays: Mapping[str, Array], spec: ConvSpec, dtype: Any) -> Array:
  """Binds the primitive that computes `result` ('x', 'w' or 'y') from the other two, given in `arrays`.

  A cotangent may be wider than the other operand (`preferred_element_type`): both are brought to the wider type.
  """
  a, b = (arrays[name] for name in OPERANDS[result])
  common = max(a.dtype, b.dtype, key=lambda t: t.itemsize)
  if not (is_float8(a.dtype) and is_float8(b.dtype)):
    a, b = a.astype(common), b.astype(common)
  out_dtype = max(np.dtype(dtype), common, key=lambda t: t.itemsize)
  if result == "y":
    out_dtype = sums_dtype(a, b, math.prod(b.shape[1:-1]), out_dtype)
    if a.dtype == np.int8 and jnp.issubdtype(out_dtype, jnp.floating):  # sums that could wrap are floats'
      out_dtype = max(out_dtype, np.dtype(np.float32), key=lambda t: t.itemsize)
      a, b = a.astype(out_dtype), b.astype(out_dtype)
  if spec.algorithm is not None:
    check_algorithm(result, a, b, spec, out_dtype)
  return _primitive.bind(PRIMITIVES[result], a, b, spec=spec, dtype=out_dtype).astype(dtype)


# Reference -----------------------------------------------------------------------------------------------------------
#
# Each of the three is written as one plain channels-last convolution, which XLA:CPU runs fast inside loops as well; the
# transposes that lax derives are not. The problems of the batch are further groups. Padding that is not zeros is
# written out first.


def _extended(spec: ConvSpec) -> tuple[ConvSpec, dict[str, Any]]:
  """The problem whose input is the given one's with its padding; and what `extend` and `fold` want to know."""
  added = beyond(spec.padding, spec.padding_mode)
  spatial = tuple(size + lo + hi for size, (lo, hi) in zip(spec.x_spatial, added, strict=True))
  left = tuple((a - lo, b - hi) for (a, b), (lo, hi) in zip(spec.padding, added, strict=True))
  plain = dataclasses.replace(spec, padding=left, x_spatial=spatial, padding_mode=())
  return plain, {"added": added, "modes": spec.padding_mode}


def _forward_reference(x: Array, w: Array, *, spec: ConvSpec, dtype: Any) -> Array:
  if (empty := _if_empty("y", x, w, spec, dtype)) is not None:
    return empty
  if spec.padding_mode:
    plain, edges = _extended(spec)
    return _forward_reference(extend(x, **edges), w, spec=plain, dtype=dtype)
  y = _grouped_convolution(
    _split(x, spec.groups), _split(w, spec.groups), spec.y_spatial, spec.stride, spec.lhs_dilation, spec.rhs_dilation,
    [lo for lo, _ in spec.padding], spec.precision, dtype,
  )  # fmt: skip
  return _join(y, x.shape[0])


def _dgrad_reference(y: Array, w: Array, *, spec: ConvSpec, dtype: Any) -> Array:
  """x from y and the flipped filter with its channel axes exchanged; strides and input dilation change places."""
  if (empty := _if_empty("x", y, w, spec, dtype)) is not None:
    return empty
  if spec.padding_mode:
    plain, edges = _extended(spec)
    # Elements that stand for several positions have the sum of these, which is rounded once.
    wide = max(_primitive.accumulator_dtype(y.dtype), np.dtype(dtype), key=lambda t: t.itemsize)
    return fold(_dgrad_reference(y, w, spec=plain, dtype=wide), **edges).astype(dtype)
  filters = jnp.swapaxes(_split(w, spec.groups), -1, -2)
  filters = lax.rev(filters, range(1, 1 + spec.rank))
  low = [(r - 1) * d - lo for r, d, (lo, _) in zip(spec.window, spec.rhs_dilation, spec.padding, strict=True)]
  x = _grouped_convolution(
    _split(y, spec.groups), filters, spec.x_spatial, spec.lhs_dilation, spec.stride, spec.rhs_dilation, low,
    spec.precision, dtype,
  )  # fmt: skip
  return _join(x, y.shape[0])


def _wgrad_reference(x: Array, y: Array, *, spec: ConvSpec, dtype: Any) -> Array:
  """w from x with images as channels, and y as a filter over images; strides and filter dilation change places."""
  if (empty := _if_empty("w", x, y, spec, dtype)) is not None:
    return empty
  if spec.padding_mode:
    plain, edges = _extended(spec)
    return _wgrad_reference(extend(x, **edges), y, spec=plain, dtype=dtype)
  images_last, images_in = jnp.swapaxes(_split(x, spec.groups), 1, -1), jnp.moveaxis(_split(y, spec.groups), 1, -2)
  w = _grouped_convolution(
    images_last, images_in, spec.window, spec.rhs_dilation, spec.lhs_dilation, spec.stride,
    [lo for lo, _ in spec.padding], spec.precision, dtype,
  )  # fmt: skip
  return jnp.moveaxis(_join(w, x.shape[0]), 1, -2)


def _if_empty(result: str, a: Array, b: Array, spec: ConvSpec, dtype: Any) -> Array | None:
  """A sum of nothing, or no sum at all, which lax does not always take."""
  shape = _result_shape(result, a, b, spec)
  return jnp.zeros(shape, dtype) if 0 in (*a.shape, *b.shape, *shape) else None


def _split(a: Array, groups: int) -> Array:
  """[B, ..., groups·c] -> [B·groups, ..., c]"""
  a = a.reshape(*a.shape[:-1], groups, a.shape[-1] // groups)
  return jnp.moveaxis(a, -2, 1).reshape(a.shape[0] * groups, *a.shape[1:-2], a.shape[-1])


def _join(a: Array, batch: int) -> Array:
  """The inverse of `_split`."""
  a = jnp.moveaxis(a.reshape(batch, -1, *a.shape[1:]), 1, -2)
  return a.reshape(*a.shape[:-2], -1)


def _grouped_convolution(
  x: Array, w: Array, out: Sequence[int], stride: Sequence[int], lhs_dilation: Sequence[int],
  rhs_dilation: Sequence[int], low: Sequence[int], precision: Precision, dtype: Any,
) -> Array:  # fmt: skip
  """[G, N, *S, c], [G, *R, c, k] -> [G, N, *out, k], summed in the accumulator's type."""
  wide = max(_primitive.accumulator_dtype(x.dtype), np.dtype(dtype), key=lambda t: t.itemsize)
  (groups, *spatial, c), (*window, _, k) = (x.shape[0], *x.shape[2:]), w.shape[1:]
  lhs = jnp.moveaxis(x, 0, -2).reshape(x.shape[1], *spatial, groups * c).astype(wide)
  rhs = jnp.moveaxis(w, 0, -2).reshape(*window, c, groups * k).astype(wide)
  # High padding is what makes the wanted extents: last output position, plus the window, minus what is there.
  padding = [
    (lo, (o - 1) * u + dilated(r, e) - dilated(i, d) - lo)
    for o, u, r, e, i, d, lo in zip(out, stride, window, rhs_dilation, spatial, lhs_dilation, low, strict=True)
  ]
  rank = len(window)
  integers = not jnp.issubdtype(wide, jnp.inexact)
  plain = all(isinstance(p, int) and p >= 0 for pair in padding for p in pair)
  if integers or not plain or any(d != 1 for d in lhs_dilation):
    # XLA:CPU is wrong on some negative padding and on the dilation of unit dimensions, so these are made explicit, and
    # what a symbolic extent asks for, which lax takes in this way alone.
    # Cropping comes last: a crop may remove what the dilation put in.
    zero, edge = jnp.zeros((), wide), (0, 0, 0)
    lhs = lax.pad(lhs, zero, [edge, *((0, 0, d - 1) for d in lhs_dilation), edge])
    lhs = lax.pad(lhs, zero, [edge, *((lo, hi, 0) for lo, hi in padding), edge])
    padding, lhs_dilation = [(0, 0)] * rank, (1,) * rank
  if integers:
    return _integer_convolution(lhs, rhs, out, stride, rhs_dilation, groups).astype(dtype)
  y = lax.conv_general_dilated(
    lhs, rhs, stride, padding, lhs_dilation, rhs_dilation, channels_last(rank), groups, precision=precision
  )
  return jnp.moveaxis(y.reshape(*y.shape[:-1], groups, k), -2, 0).astype(dtype)


def _integer_convolution(
  x: Array, w: Array, out: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Array:
  """Of [N, *S, G·c] without padding and [*R, c, G·k], to [G, N, *out, k]: a matrix product for each element of the
  window, since XLA has no convolution of integers on GPUs."""
  *window, c, features = w.shape
  x, w = x.reshape(*x.shape[:-1], groups, c), w.reshape(*window, c, groups, features // groups)

  def seen(tap: Sequence[int]) -> Array:
    starts = [i * d for i, d in zip(tap, dilation, strict=True)]
    ends = [i + (o - 1) * u + 1 for i, o, u in zip(starts, out, stride, strict=True)]
    return lax.slice(x, (0, *starts, 0, 0), (x.shape[0], *ends, groups, c), (1, *stride, 1, 1))

  products = (jnp.einsum("n...gc,cgk->gn...k", seen(tap), w[tap]) for tap in np.ndindex(*window))
  return reduce(operator.add, products)


# Primitives ----------------------------------------------------------------------------------------------------------


def _result_shape(result: str, a: Any, b: Any, spec: ConvSpec) -> tuple[int, ...]:
  batch = a.shape[0]
  if result == "y":
    return (batch, a.shape[1], *spec.y_spatial, b.shape[-1])
  if result == "x":
    return (batch, a.shape[1], *spec.x_spatial, b.shape[-2] * spec.groups)
  return (batch, *spec.window, a.shape[-1] // spec.groups, b.shape[-1])


def abstract(a: Any, b: Any, *, result: str, spec: ConvSpec, dtype: Any) -> Any:
  return _primitive.out_aval(a, _result_shape(result, a, b, spec), dtype)


REFERENCES = {"y": _forward_reference, "x": _dgrad_reference, "w": _wgrad_reference}
NAMES = {"y": "conv_fwd", "x": "conv_dgrad", "w": "conv_wgrad"}
PRIMITIVES = {
  result: _primitive.define(
    NAMES[result],
    abstract_eval=partial(abstract, result=result),
    reference=REFERENCES[result],
    params=["spec", "dtype"],
  )
  for result in OPERANDS
}

# Differentiation -----------------------------------------------------------------------------------------------------
#
# conv_fwd    x, w -> y
# conv_dgrad  y, w -> x
# conv_wgrad  x, y -> w
#
# All three are linear in both operands and belong to one trilinear form, so the cotangent of an operand is the form's
# gradient in that operand: the primitive that computes it, from the result's cotangent and the other operand.


def _transpose(ct: Any, a: Any, b: Any, *, result: str, wrt: int, spec: ConvSpec, dtype: Any) -> Array:
  names = OPERANDS[result]
  unknown, known = ((a, b), (b, a))[wrt]
  spec = dataclasses.replace(spec, algorithm=None)
  return convolve(names[wrt], {result: ct, names[1 - wrt]: known}, spec, unknown.aval.dtype)


# Batching ------------------------------------------------------------------------------------------------------------
#
# An axis mapped over both operands joins the problems B. Mapped over one operand, it joins the dimension which that
# operand shares with the result, and which the other operand does not have: N between x and y, C between x and w, K
# between w and y. Channels come in groups, and the group stays outermost: (groups, mapped, rest), except in w, whose
# C axis is one group's.

_SHARED = {frozenset("xy"): "N", frozenset("xw"): "C", frozenset("wy"): "K"}


def _axis(name: str, dimension: str, ndim: int, groups: int) -> tuple[int, int]:
  """Where `dimension` is in the array `name`, and into how many groups it is split there."""
  if dimension == "N":
    return 1, 1
  if dimension == "C" and name == "w":
    return ndim - 2, 1
  return ndim - 1, groups


def _fold(a: Array, axis: int, groups: int) -> Array:
  """[V, ..., groups·c, ...] -> [..., groups·V·c, ...]"""
  v, *rest = a.shape
  a = a.reshape(v, *rest[:axis], groups, rest[axis] // groups, *rest[axis + 1 :])
  return jnp.moveaxis(a, 0, axis + 1).reshape(*rest[:axis], v * rest[axis], *rest[axis + 1 :])


def _unfold(a: Array, v: int, axis: int, groups: int) -> Array:
  """The inverse of `_fold`."""
  c = a.shape[axis] // (groups * v)
  split = a.reshape(*a.shape[:axis], groups, v, c, *a.shape[axis + 1 :])
  return jnp.moveaxis(split, axis + 1, 0).reshape(v, *a.shape[:axis], groups * c, *a.shape[axis + 1 :])


def _batch(operands: Any, dims: Any, *, result: str, spec: ConvSpec, dtype: Any) -> tuple[Array, int]:
  names = OPERANDS[result]
  arrays = {n: a if d is None else jnp.moveaxis(a, d, 0) for n, a, d in zip(names, operands, dims, strict=True)}
  mapped = [n for n, d in zip(names, dims, strict=True) if d is not None]
  v = arrays[mapped[0]].shape[0]
  ndim = spec.rank + 3
  if len(mapped) == 2:
    axes = {n: (0, 1) for n in "xwy"}
  else:
    shared = _SHARED[frozenset((mapped[0], result))]
    axes = {n: _axis(n, shared, ndim, spec.groups) for n in (mapped[0], result)}
  folded = {n: _fold(a, *axes[n]) if n in mapped else a for n, a in arrays.items()}
  return _unfold(convolve(result, folded, spec, dtype), v, *axes[result]), 0


# CUDA lowering -------------------------------------------------------------------------------------------------------


ALGORITHMS = ("implicit_gemm_wgmma", "implicit_gemm_mma", "implicit_gemm")
# Also the names of their one tile.
DEPTHWISE, FEW_CHANNELS, GROUPED, FEW_FEATURES = "depthwise", "few_channels", "grouped", "few_features"
UNALIGNED, PLANES, DIRECT = "unaligned", "planes", "direct"
# After the name of a tile of Hopper's: an image's edges are computed apart.
EDGES = " edges"


def tile_names() -> list[str]:
  """Names of all tiles: of Hopper's, but those of pairs, also with EDGES."""
  names = _extension.native.conv_tiles
  return names + [name + EDGES for name in names if name.startswith("wgmma") and not name.endswith("pairs")]


def plan(result: str, a: Any, b: Any, spec: ConvSpec, dtype: Any, *, hopper: bool) -> dict[str, Any] | None:
  """What the planner chooses for this call, or None if no kernel, or not the spec's algorithm, takes it.

  With hopper, on devices of compute capability 9.0. The algorithm, its tile, splits, blocks that share a tile
  ("cluster") or, of Hopper's filter gradient, all tiles ("blocks"), bytes of workspace, the modelled cycles, and what
  its kernels have of an epilogue ("finish"): "bias", also a "clamp" as of ReLU, or "any".
  """
  shapes = {name: aval.shape for name, aval in zip(OPERANDS[result], (a, b), strict=True)}
  shapes[result] = _result_shape(result, a, b, spec)
  return _extension.native.plan_conv(
    direction=NAMES[result],
    in_dtype=np.dtype(a.dtype).name,
    out_dtype=np.dtype(dtype).name,
    x=shapes["x"],
    w=shapes["w"],
    y=shapes["y"],
    **_geometry(spec),
    **_choice(spec),
    hopper=hopper,
  )


def check_algorithm(result: str, a: Array, b: Array, spec: ConvSpec, dtype: Any) -> None:
  names = (*ALGORITHMS, "gemm", *_extension.native.conv_tiles)
  if (spec.algorithm or "").removesuffix(EDGES) not in names:
    raise ValueError(f"{NAMES[result]}: algorithm must be None or one of {names}, got {spec.algorithm!r}")
  if plan(result, a, b, spec, dtype, hopper=True) is None:
    raise ValueError(
      f"{NAMES[result]}: algorithm={spec.algorithm!r} cannot do this problem: operands {a.dtype}{list(a.shape)} and "
      f"{b.dtype}{list(b.shape)}, result {dtype}, {spec}"
    )


def _plans(result: str, a: Any, b: Any, spec: ConvSpec, dtype: Any) -> list[dict[str, Any]]:
  """On any device: which one it will be is not known when a call is lowered."""
  found = (plan(result, a, b, spec, dtype, hopper=hopper) for hopper in (False, True))
  return [p for p in found if p is not None]


def supported(
  a: Any, b: Any, *_: Any, result: str, spec: ConvSpec, dtype: Any, scale: bool = False, **__: Any
) -> bool:
  # Of integers' sums the kernels make floats by a scale, after they may have wrapped.
  wraps = np.dtype(a.dtype) == np.int8 and jnp.issubdtype(dtype, jnp.floating) and not scale
  return not wraps and bool(_plans(result, a, b, spec, dtype))


def workspace(a: Any, b: Any, *_: Any, result: str, spec: ConvSpec, dtype: Any, **__: Any) -> int:
  return max(p["workspace_bytes"] for p in _plans(result, a, b, spec, dtype))


def products(spec: ConvSpec) -> int:
  """Of TF32 that the product of two float32 is made of, or 0 for float32's own arithmetic."""
  return (1, 3, 0)[max((p.value for p in spec.precision or ()), default=0)]


def _geometry(spec: ConvSpec) -> dict[str, Any]:
  return {
    "stride": spec.stride,
    "padding_low": tuple(lo for lo, _ in spec.padding),
    "lhs_dilation": spec.lhs_dilation,
    "rhs_dilation": spec.rhs_dilation,
    "padding_mode": tuple(MODES.index(m) for m in spec.padding_mode) or (0,) * spec.rank,
    "groups": spec.groups,
  }


def _choice(spec: ConvSpec) -> dict[str, Any]:
  """What the choice of a kernel depends on beside the geometry."""
  limit = _extension.native.conv_workspace_limit if spec.workspace_limit is None else spec.workspace_limit
  return {"products": products(spec), "algorithm": spec.algorithm or "", "workspace_limit": limit}


def attributes(
  a: Any, b: Any, *_: Any, result: str, spec: ConvSpec, kind: str = "identity", parameter: float = 0.0,
  bias: bool = False, residual: bool = False, scale: bool = False, **__: Any,
) -> dict[str, Any]:  # fmt: skip
  """Of the call, which forward has an epilogue as well (`fused.py`)."""
  given = {k: np.asarray(v, np.int64) if isinstance(v, tuple) else v for k, v in _geometry(spec).items()}
  epilogue = {
    "activation": kind, "parameter": float(parameter), "bias": bias, "residual": residual, "scale": scale,
  }  # fmt: skip
  return given | _choice(spec) | (epilogue if result == "y" else {})


BYTES: dict[str, Any] = {"integers": frozenset([np.dtype(np.int8)]), "more_floats": FLOAT8}
"""Element types that only convolution has kernels for."""

SHARDS = {"y": "b n, b -> b n", "x": "b n, b -> b n", "w": "b n, b n -> b"}
TARGETS = {"y": "jaxdnn.conv_fwd.v5", "x": "jaxdnn.conv_dgrad.v5", "w": "jaxdnn.conv_wgrad.v4"}

for _result, _p in PRIMITIVES.items():
  _primitive.bilinear(
    _p, partial(_transpose, result=_result, wrt=0), partial(_transpose, result=_result, wrt=1)
  )
  _primitive.set_batching(_p, partial(_batch, result=_result))
  _primitive.set_shards(_p, SHARDS[_result])
  _primitive.lower_to_cuda(
    _p,
    TARGETS[_result],
    REFERENCES[_result],
    attributes=partial(attributes, result=_result),
    supported=partial(supported, result=_result),
    workspace=partial(workspace, result=_result),
    **BYTES,
  )
