"""What a layer reads beyond its input's edges: zeros, or elements of the input."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._arguments import Padding, explicit_padding, is_sequence

PaddingMode = str | Sequence[str]
ZEROS, REFLECT, REPLICATE, CIRCULAR = MODES = ("zeros", "reflect", "replicate", "circular")
"""As PyTorch names them, in the order of the kernels' `PadMode`."""

_NUMPY = {ZEROS: "constant", REFLECT: "reflect", REPLICATE: "edge", CIRCULAR: "wrap"}
_FLAX = {"CIRCULAR": CIRCULAR, "REFLECT": REFLECT}


def layer_padding(
  where: str, padding: Padding, mode: PaddingMode, spatial: Sequence[int], extents: Sequence[int],
  stride: Sequence[int],
) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:  # fmt: skip
  """(low, high) pairs, and a mode for each dimension, or () where there is nothing but zeros.

  Beside what `explicit_padding` takes there are flax's strings. `extents` are those of the dilated window.
  """
  modes: tuple[Any, ...] = tuple(mode) if is_sequence(mode) else (mode,) * len(spatial)
  if len(modes) != len(spatial) or any(m not in MODES for m in modes):
    raise ValueError(
      f"{where}: padding_mode must be one of {MODES}, or one of them for each of {len(spatial)} spatial dimensions, "
      f"got {mode!r}"
    )
  name = padding.upper() if isinstance(padding, str) else None
  if name in _FLAX:
    if any(m not in (ZEROS, _FLAX[name]) for m in modes):
      raise ValueError(f"{where}: padding={padding!r} and padding_mode={mode!r} contradict each other")
    modes = (_FLAX[name],) * len(spatial)
    padding = [((e - 1) // 2, e // 2) if e else (0, 0) for e in extents]
  elif name == "CAUSAL":
    if len(spatial) != 1:
      raise ValueError(f"{where}: padding={padding!r} is for one spatial dimension, got {len(spatial)}")
    padding = [(max(0, extents[0] - 1), 0)]
  pads = explicit_padding(where, padding, spatial, extents, stride)
  # Zeros come without comparisons, which symbolic extents do not have.
  for size, pair, m in zip(spatial, pads, modes, strict=True):
    if m == ZEROS:
      continue
    most = {REFLECT: size - 1, CIRCULAR: size}.get(m, max(pair) if size else 0)
    if max(pair) > max(0, most):
      limit = f"at most {max(0, most)}" if m != REPLICATE else "of an input that has elements"
      raise ValueError(
        f"{where}: padding_mode={m!r} takes padding {limit} in a dimension of size {size}, got padding={pads} for an "
        f"input of extents {tuple(spatial)}"
      )
  # Where there is no padding its mode says nothing, and equal problems should be equal.
  modes = tuple(m if m != ZEROS and max(pair) > 0 else ZEROS for m, pair in zip(modes, pads, strict=True))
  return pads, modes if any(m != ZEROS for m in modes) else ()


def beyond(padding: Sequence[tuple[int, int]], modes: Sequence[str]) -> list[tuple[int, int]]:
  """How many elements `extend` adds to each dimension; what is left of its padding crops, or is zeros."""
  return [(max(lo, 0), max(hi, 0)) if m != ZEROS else (0, 0) for (lo, hi), m in zip(padding, modes, strict=True)]


def extend(x: Array, added: Sequence[tuple[int, int]], modes: Sequence[str]) -> Array:
  """x [B, N, *S, C] with its padding written out: the reference of what kernels find by index."""
  for d, (pair, mode) in enumerate(zip(added, modes, strict=True)):
    if any(pair):
      widths: Any = [pair if axis == d + 2 else (0, 0) for axis in range(x.ndim)]
      x = jnp.pad(x, widths, mode=_NUMPY[mode])
  return x


def fold(x: Array, added: Sequence[tuple[int, int]], modes: Sequence[str]) -> Array:
  """The adjoint of `extend`: each element has what it stands for added."""
  for d, ((lo, hi), mode) in enumerate(zip(added, modes, strict=True)):
    if lo or hi:
      x = _fold_dimension(x, d + 2, lo, hi, mode)
  return x


def _fold_dimension(x: Array, axis: int, lo: int, hi: int, mode: str) -> Array:
  n = x.shape[axis] - lo - hi
  low, inner, high = (
    lax.slice_in_dim(x, begin, begin + size, axis=axis) for begin, size in ((0, lo), (lo, n), (lo + n, hi))
  )
  # What lies beyond the edges, in the elements' order, and the first of these.
  if mode == CIRCULAR:
    parts = (low, n - lo), (high, 0)
  elif mode == REFLECT:
    parts = (lax.rev(low, [axis]), 1), (lax.rev(high, [axis]), n - 1 - hi)
  else:
    parts = (low.sum(axis, keepdims=True), 0), (high.sum(axis, keepdims=True), n - 1)
  for part, first in parts:
    if size := part.shape[axis]:
      widths = [(first, n - first - size, 0) if a == axis else (0, 0, 0) for a in range(x.ndim)]
      inner = inner + lax.pad(part, jnp.zeros((), x.dtype), widths)
  return inner
