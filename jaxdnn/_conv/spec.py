"""The static parameters of a convolution, and how arguments become them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdnn._arguments import Padding, dilated, explicit_padding, integer, per_dimension
from jaxdnn._conv.padding import PaddingMode, layer_padding

IDENTITY = "identity"
"""What no activation is called in parameters and attributes."""

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


class Names(NamedTuple):
  """What a function calls its arguments, for messages."""

  stride: str = "stride"
  dilation: str = "dilation"
  groups: str = "groups"


OURS = Names()
LAX = Names("window_strides", "rhs_dilation", "feature_group_count")
_MOST_BYTES = 2**63 - 1


def make_spec(
  where: str,
  x_spatial: Sequence[int],
  window: Sequence[int],
  *,
  stride: int | Sequence[int],
  padding: Padding,
  lhs_dilation: int | Sequence[int] | None,
  rhs_dilation: int | Sequence[int],
  groups: int,
  precision: Any,
  algorithm: str | None = None,
  workspace_limit: int | None = None,
  padding_mode: PaddingMode | None = None,
  names: Names = OURS,
) -> ConvSpec:
  """Checks and canonicalises; `where` is the caller's name, for messages.

  Without a `padding_mode`, `padding` is as in lax; with one, as in `conv`.
  """
  rank = len(window)
  stride = per_dimension(where, names.stride, stride, rank)
  lhs_dilation = per_dimension(where, "lhs_dilation", 1 if lhs_dilation is None else lhs_dilation, rank)
  rhs_dilation = per_dimension(where, names.dilation, rhs_dilation, rank)
  if isinstance(padding, str) and any(d != 1 for d in lhs_dilation):
    raise ValueError(
      f"{where}: padding={padding!r} is ambiguous with lhs_dilation={lhs_dilation}; give (low, high) pairs or use "
      "conv_transpose"
    )
  if workspace_limit is not None:
    workspace_limit = min(integer(where, "workspace_limit", workspace_limit), _MOST_BYTES)
    if workspace_limit < 0:
      raise ValueError(f"{where}: workspace_limit must be None or a number of bytes, got {workspace_limit}")
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
    stride, pads, lhs_dilation, rhs_dilation, integer(where, names.groups, groups), tuple(x_spatial), tuple(window),
    canonical_precision(where, precision), algorithm, workspace_limit, modes,
  )  # fmt: skip


_ALGORITHMS = {
  "TF32_TF32_F32_X3": lax.Precision.HIGH,
  "BF16_BF16_F32_X3": lax.Precision.HIGH,
  "BF16_BF16_F32_X6": lax.Precision.HIGHEST,
  "BF16_BF16_F32_X9": lax.Precision.HIGHEST,
  "F32_F32_F32": lax.Precision.HIGHEST,
  "F64_F64_F64": lax.Precision.HIGHEST,
}
"""The algorithms of dot products that ask for more than rounded operands."""


def canonical_precision(where: str, precision: Any) -> Precision:
  """A pair of `lax.Precision`, or None for the default; as in lax, None defers to `jax_default_matmul_precision`."""
  if precision is None:
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision is None:
      return None
  pair = precision if isinstance(precision, list | tuple) else (precision, precision)
  try:
    if isinstance(precision, lax.DotAlgorithm):
      return (_of_algorithm(precision),) * 2
    lhs, rhs = map(_one_precision, pair)
  except (TypeError, ValueError) as e:
    raise ValueError(
      f"{where}: precision must be None, a lax.Precision or its name, a pair of these, a lax.DotAlgorithmPreset or its "
      f"name, or a lax.DotAlgorithm, got {precision!r}"
    ) from e
  return lhs, rhs


def _one_precision(p: Any) -> lax.Precision:
  if isinstance(p, str) and p in lax.DotAlgorithmPreset.__members__:
    p = lax.DotAlgorithmPreset[p]
  if isinstance(p, lax.DotAlgorithmPreset):
    return _ALGORITHMS.get(p.name, lax.Precision.DEFAULT)
  return p if isinstance(p, lax.Precision) else lax.Precision(p)


def _of_algorithm(algorithm: lax.DotAlgorithm) -> lax.Precision:
  if np.dtype(algorithm.lhs_precision_type).itemsize >= 4 or algorithm.num_primitive_operations > 3:
    return lax.Precision.HIGHEST
  return lax.Precision.HIGH if algorithm.num_primitive_operations == 3 else lax.Precision.DEFAULT


def check_channels(
  where: str, c: int, w_in: int, w_out: int, groups: int, batch: int, batch_groups: int = 1, names: Names = OURS
) -> None:
  """The rules on channel, group and batch counts, which are lax's."""
  given = f"{names.groups}={groups}"
  for name, count in ((names.groups, groups), ("batch_group_count", batch_groups)):
    if count < 1:
      raise ValueError(f"{where}: {name} must be positive, got {count}")
  if groups > 1 and batch_groups > 1:
    raise ValueError(f"{where}: at most one of {given} and batch_group_count={batch_groups} may exceed 1")
  if c % groups:
    raise ValueError(f"{where}: {given} does not divide the input's {c} channels")
  if c // groups != w_in:
    raise ValueError(
      f"{where}: the filter takes {w_in} input channels per group, but the input has {c} channels and {given}"
    )
  if w_out % (groups * batch_groups):
    raise ValueError(
      f"{where}: the filter's {w_out} output channels are not a multiple of "
      f"{given if batch_groups == 1 else f'batch_group_count={batch_groups}'}"
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
  try:
    preferred = np.dtype(jax.dtypes.canonicalize_dtype(preferred))
  except TypeError as e:
    raise TypeError(f"{where}: preferred_element_type must be None or an element type, got {preferred!r}") from e
  given, kinds = np.dtype(a.dtype), (jnp.integer, jnp.floating, jnp.complexfloating)
  same_kind = any(jnp.issubdtype(given, k) and jnp.issubdtype(preferred, k) for k in kinds)
  widened = jnp.issubdtype(given, jnp.integer) and jnp.issubdtype(preferred, jnp.floating)
  loses_sign = jnp.issubdtype(given, jnp.signedinteger) and jnp.issubdtype(preferred, jnp.unsignedinteger)
  fits = (same_kind or widened) and not loses_sign and preferred.itemsize >= given.itemsize
  if not (fits or given == np.bool_):
    raise TypeError(f"{where}: preferred_element_type={preferred} cannot hold a sum of {given} products")
  return preferred
