"""The static parameters of a convolution, and how arguments become them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdnn._arguments import Padding, dilated, explicit_padding, per_dimension
from jaxdnn._conv.padding import PaddingMode, layer_padding

Precision = tuple[lax.Precision, lax.Precision] | None


@dataclasses.dataclass(frozen=True)
class ConvSpec:
  """What the operands' shapes do not say. All three primitives carry the same one."""

  stride: tuple[int, ...]
  padding: tuple[tuple[int, int], ...]
  lhs_dilation: tuple[int, ...]
  rhs_dilation: tuple[int, ...]
  groups: int
  x_spatial: tuple[int, ...]  # a strided convolution's output does not determine its input's extents
  window: tuple[int, ...]
  precision: Precision
  algorithm: str | None = None  # of this primitive; its gradients choose theirs
  workspace_limit: int | None = None  # in bytes, of this primitive and its gradients; or the library's own
  padding_mode: tuple[str, ...] = ()  # of `padding.MODES`, one a dimension; or none, all zeros

  @property
  def rank(self) -> int:
    return len(self.window)

  @property
  def y_spatial(self) -> tuple[int, ...]:
    padded = (dilated(i, d) + lo + hi for i, d, (lo, hi) in zip(self.x_spatial, self.lhs_dilation, self.padding))  # noqa: B905
    extents = (dilated(r, d) for r, d in zip(self.window, self.rhs_dilation, strict=True))
    return tuple(
      (p - e) // u + 1 if p >= e else 0 for p, e, u in zip(padded, extents, self.stride, strict=True)
    )


def channels_last(rank: int) -> lax.ConvDimensionNumbers:
  """The dimension numbers of [N, *spatial, C], [*window, I, O], [N, *spatial, K]."""
  data = (0, rank + 1, *range(1, rank + 1))
  return lax.ConvDimensionNumbers(data, (rank + 1, rank, *range(rank)), data)


def make_spec(
  where: str,
  x_spatial: Sequence[int],
  window: Sequence[int],
  *,
  stride: int | Sequence[int],
  padding: Padding,
  lhs_dilation: int | Sequence[int] | None,
  rhs_dilation: int | Sequence[int] | None,
  groups: int,
  precision: Any,
  algorithm: str | None = None,
  workspace_limit: int | None = None,
  padding_mode: PaddingMode | None = None,
) -> ConvSpec:
  """Checks and canonicalises; `where` is the caller's name, for messages.

  Without a `padding_mode`, `padding` is as in lax; with one, as in `conv`.
  """
  rank = len(window)
  stride = per_dimension(where, "stride", stride, rank)
  lhs_dilation = per_dimension(where, "lhs_dilation", 1 if lhs_dilation is None else lhs_dilation, rank)
  rhs_dilation = per_dimension(where, "rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, rank)
  if isinstance(padding, str) and any(d != 1 for d in lhs_dilation):
    raise ValueError(
      f"{where}: padding={padding!r} is ambiguous with lhs_dilation={lhs_dilation}; give (low, high) pairs or use "
      "conv_transpose"
    )
  if workspace_limit is not None and (not isinstance(workspace_limit, int) or workspace_limit < 0):
    raise ValueError(f"{where}: workspace_limit must be None or a number of bytes, got {workspace_limit!r}")
  extents = [dilated(r, d) for r, d in zip(window, rhs_dilation, strict=True)]
  if padding_mode is None:
    pads = explicit_padding(where, padding, x_spatial, extents, stride)
    modes: tuple[str, ...] = ()
  else:
    pads, modes = layer_padding(where, padding, padding_mode, x_spatial, extents, stride)
  for i, d, (lo, hi) in zip(x_spatial, lhs_dilation, pads, strict=True):
    if dilated(i, d) + lo + hi < 0:
      raise ValueError(
        f"{where}: padding={pads} removes more than there is of the (dilated) input extents "
        f"{tuple(dilated(i, d) for i, d in zip(x_spatial, lhs_dilation, strict=True))}"
      )
  return ConvSpec(
    stride, pads, lhs_dilation, rhs_dilation, groups, tuple(x_spatial), tuple(window), canonical_precision(precision),
    algorithm, workspace_limit, modes,
  )  # fmt: skip


def canonical_precision(precision: Any) -> Precision:
  """A pair of `lax.Precision`, or None for the default; as in lax, None defers to `jax_default_matmul_precision`."""
  if precision is None:
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision is None:
      return None
  pair = precision if isinstance(precision, list | tuple) else (precision, precision)
  try:
    lhs, rhs = (p if isinstance(p, lax.Precision) else lax.Precision(p) for p in pair)
  except ValueError as e:
    raise ValueError(f"precision must be None, a lax.Precision, its name, or a pair of these, got {precision!r}") from e
  return lhs, rhs


def check_channels(where: str, c: int, w_in: int, w_out: int, groups: int, batch: int, batch_groups: int) -> None:
  """The rules on channel, group and batch counts, which are lax's."""
  if groups < 1 or batch_groups < 1:
    raise ValueError(f"{where}: group counts must be positive, got groups={groups}, batch_group_count={batch_groups}")
  if groups > 1 and batch_groups > 1:
    raise ValueError(f"{where}: at most one of groups={groups} and batch_group_count={batch_groups} may exceed 1")
  if c % groups:
    raise ValueError(f"{where}: groups={groups} does not divide the input's {c} channels")
  if c // groups != w_in:
    raise ValueError(
      f"{where}: the filter takes {w_in} input channels per group, but the input has {c} channels in groups={groups}"
    )
  if w_out % (groups * batch_groups):
    raise ValueError(
      f"{where}: the filter's {w_out} output channels are not a multiple of the group count {groups * batch_groups}"
    )
  if batch % batch_groups:
    raise ValueError(f"{where}: batch_group_count={batch_groups} does not divide the batch size {batch}")


FLOAT8 = frozenset(np.dtype(d) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2))
"""The 8-bit floats that kernels take, also one type for the input and the other for the filter."""


def is_float8(dtype: Any) -> bool:
  return np.dtype(dtype) in FLOAT8


def sums_dtype(a: Any, b: Any, terms: int, dtype: Any) -> np.dtype[Any]:
  """What a forward convolution is computed in, before it is converted to `dtype`.

  Sums of int8 products wrap in int32, and so does what is narrower; what is wider can be had of them where none can
  wrap. float8 has float32 sums.
  """
  dtype = np.dtype(dtype)
  if a.dtype == b.dtype == np.int8:
    narrow = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 4
    if narrow or terms * 2**14 < 2**31:
      return np.dtype(np.int32)
  return np.dtype(np.float32) if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating) else dtype


def result_dtype(where: str, a: Any, b: Any, preferred: Any) -> np.dtype[Any]:
  """The result's element type: the operands' own, which must agree, or the wider one that is asked for.

  Two types of float8 may be mixed, which lax does not take, if the result's type is given.
  """
  if a.dtype != b.dtype and not (is_float8(a.dtype) and is_float8(b.dtype) and preferred is not None):
    mixed = "; of two float8 types, give preferred_element_type" if is_float8(a.dtype) and is_float8(b.dtype) else ""
    raise TypeError(f"{where}: operands must have the same dtype, got {a.dtype} and {b.dtype}{mixed}")
  if preferred is None:
    return np.dtype(a.dtype)
  preferred = np.dtype(jax.dtypes.canonicalize_dtype(preferred))
  kinds = (jnp.signedinteger, jnp.unsignedinteger, jnp.floating, jnp.complexfloating)
  same_kind = any(jnp.issubdtype(a.dtype, k) and jnp.issubdtype(preferred, k) for k in kinds)
  widened = jnp.issubdtype(a.dtype, jnp.integer) and jnp.issubdtype(preferred, jnp.floating)
  if not (same_kind or widened) or preferred.itemsize < np.dtype(a.dtype).itemsize:
    raise TypeError(f"{where}: preferred_element_type={preferred} cannot hold a sum of {a.dtype} products")
  return preferred

