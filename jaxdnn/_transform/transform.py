"""Permute, pad or crop, convert, scale and accumulate, in one pass over memory.

    out = alpha · T(x) + beta · y      T: dimensions permuted, then padded or cropped

On a GPU dimensions that stay neighbours are merged first, so that what remains is copying rows or transposing
matrices; both read and write whole cache lines. T is linear but for the value of its padding: its adjoint crops where
it padded, pads where it cropped and permutes back, which is a transform again.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _primitive, _sharding
from jaxdnn._arguments import array
from jaxdnn._eager import compiled

INTEGERS = frozenset(np.dtype(d) for d in (np.int8, np.uint8, np.int32))

# Public function -----------------------------------------------------------------------------------------------------


@compiled
def transform(
  x: Array,
  y: Array | None = None,
  *,
  permutation: Sequence[int] | None = None,
  padding: Sequence[tuple[int, int]] | None = None,
  pad_value: float = 0.0,
  dtype: Any = None,
  alpha: float = 1.0,
  beta: float = 0.0,
) -> Array:
  """One pass of `alpha * T(x) + beta * y`, where T permutes the dimensions of `x` and then pads or crops them.

  Args:
    x: floating-point, int8, uint8 or int32 array.
    y: array of the result's shape and type, or None. It is not read where `beta` is 0, and may then hold NaN.
    permutation: dimension `d` of the result is dimension `permutation[d]` of `x`, as in `jnp.transpose`. None keeps
      the order.
    padding: a `(low, high)` pair for each dimension **of the result**; negative numbers crop, as in `lax.pad`. None
      pads nothing.
    pad_value: what padding holds, before `alpha`.
    dtype: of the result; None means that of `y`, or else that of `x`.
    alpha: factor of the transformed `x`, a Python number.
    beta: factor of `y`, a Python number.

  Returns:
    An array of type `dtype`. Where nothing is scaled or added, values convert directly; else the arithmetic is in
    float32, or in float64 where an operand or the result is. A conversion to an integer rounds to nearest, ties to
    even, and saturates; NaN becomes 0. Derivatives in `x` and `y` exist where their types and `dtype` are
    floating-point, and are 0 elsewhere.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, shape or range, or an operand sharded along a padded dimension.

  Example:
    >>> image = jnp.arange(6, dtype=jnp.uint8).reshape(1, 2, 3)
    >>> jaxdnn.transform(image, permutation=(2, 0, 1), padding=((0, 1), (0, 0), (0, 0)), dtype="float32", alpha=0.5)
    Array([[[0. , 1.5]],
    <BLANKLINE>
           [[0.5, 2. ]],
    <BLANKLINE>
           [[1. , 2.5]],
    <BLANKLINE>
           [[0. , 0. ]]], dtype=float32)
  """
  x = array("transform", "x", x)
  y = None if y is None else array("transform", "y", y)
  dtype = _dtype(dtype if dtype is not None else x.dtype if y is None else y.dtype)
  for name, type_ in (("x", x.dtype), ("dtype", dtype)):
    if not (jnp.issubdtype(type_, jnp.floating) or type_ in INTEGERS):
      raise TypeError(f"transform: {name} must be floating-point, int8, uint8 or int32, got {type_}")
  permutation = _permutation(permutation, x.ndim)
  padding = _padding(padding, [x.shape[d] for d in permutation])
  pad_value, alpha, beta = (
    _number(name, value) for name, value in (("pad_value", pad_value), ("alpha", alpha), ("beta", beta))
  )
  spec = Spec(x.dtype, dtype, permutation, padding, pad_value, alpha, beta)
  shape = spec.out_shape(x.shape)
  if y is None and beta != 0:
    raise ValueError(f"transform: beta = {beta} needs y")
  if y is not None and (y.shape != shape or y.dtype != dtype):
    raise ValueError(f"transform: y must be {dtype}{list(shape)}, the result's, got {y.dtype}{list(y.shape)}")
  operands = [x] if y is None or beta == 0 else [x, y]
  free = [d for d, pad in enumerate(padding) if pad == (0, 0)]
  _check_alike(operands, permutation)
  return _sharding.map_shards(
    lambda *operands: _apply(*operands, spec=spec),
    operands,
    keep=[[permutation[d] for d in free], free][: len(operands)],
    out_like=(0, [permutation[d] if d in free else None for d in range(x.ndim)]),
  )


class Spec(NamedTuple):
  """The static parameter of the primitive."""

  in_dtype: np.dtype[Any]
  dtype: np.dtype[Any]
  permutation: tuple[int, ...]
  padding: tuple[tuple[int, int], ...]
  pad_value: float = 0.0
  alpha: float = 1.0
  beta: float = 0.0

  @property
  def operands(self) -> int:
    return 1 if self.beta == 0 else 2

  @property
  def is_identity(self) -> bool:
    moves = self.permutation != tuple(range(len(self.permutation))) or any(map(any, self.padding))
    return not moves and self.operands == 1 and self.alpha == 1 and self.in_dtype == self.dtype

  def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[d] + lo + hi for d, (lo, hi) in zip(self.permutation, self.padding, strict=True))

  def adjoint(self) -> "Spec":
    """Crops where this pads, pads where it crops, and permutes back."""
    back = tuple(int(d) for d in np.argsort(self.permutation))
    crop = tuple((-self.padding[d][0], -self.padding[d][1]) for d in back)
    return Spec(self.dtype, self.in_dtype, back, crop, alpha=self.alpha)


def _dtype(value: Any) -> np.dtype[Any]:
  try:
    return jax.dtypes.canonicalize_dtype(np.dtype(value))
  except TypeError:
    raise TypeError(f"transform: dtype must be an element type, got {value!r}") from None


def _permutation(value: Any, ndim: int) -> tuple[int, ...]:
  try:
    axes = tuple(range(ndim)) if value is None else tuple(operator.index(d) for d in value)
  except TypeError:
    raise TypeError(f"transform: permutation must be a sequence of integers, got {value!r}") from None
  positive = tuple(d % ndim for d in axes if -ndim <= d < ndim)
  if sorted(positive) != list(range(ndim)) or len(axes) != ndim:
    raise ValueError(f"transform: permutation must name each of the {ndim} dimensions of x once, got {value!r}")
  return positive


def _padding(value: Any, extents: Sequence[int]) -> tuple[tuple[int, int], ...]:
  if value is None:
    return ((0, 0),) * len(extents)
  try:
    pads = tuple((operator.index(lo), operator.index(hi)) for lo, hi in value)
  except (TypeError, ValueError):
    raise TypeError(f"transform: padding must be a sequence of (low, high) pairs of integers, got {value!r}") from None
  if len(pads) != len(extents):
    raise ValueError(f"transform: padding must have a pair for each of {len(extents)} dimensions, got {pads}")
  for extent, (lo, hi) in zip(extents, pads, strict=True):
    if extent + lo + hi < 0:
      raise ValueError(f"transform: padding ({lo}, {hi}) crops more than the {extent} elements of a dimension")
  return pads


def _number(name: str, value: Any) -> float:
  if isinstance(value, jax.core.Tracer) or not isinstance(value, int | float | np.number) or isinstance(value, bool):
    raise TypeError(f"transform: {name} must be a Python number, got {value!r}")
  return float(value)


def _check_alike(operands: Sequence[Array], permutation: tuple[int, ...]) -> None:
  x, *rest = (tuple(jax.typeof(a).sharding.spec) for a in operands)
  for spec in rest:
    want = tuple(x[d] for d in permutation)
    if spec != want:
      raise ValueError(f"transform: y is sharded as {spec}, the transformed x as {want}. Reshard one of them first.")


# Reference -----------------------------------------------------------------------------------------------------------


def _reference(x: Array, *y: Array, spec: Spec) -> Array:
  converts = spec.alpha == 1 and not y
  integers = INTEGERS.issuperset((x.dtype, spec.dtype))
  if converts and (x.dtype == spec.dtype or integers):
    wide = np.dtype(spec.dtype if x.dtype == spec.dtype else np.int32)
  else:
    wide = np.dtype(np.float64 if np.dtype(np.float64) in (x.dtype, spec.dtype) else np.float32)
  value = x.astype(wide).transpose(spec.permutation)
  # Cropped, then padded: lax.pad with negative padding reads out of bounds on CPUs (openxla issue 48713).
  kept = [_inside(extent, lo, hi) for extent, (lo, hi) in zip(value.shape, spec.padding, strict=True)]
  starts = [begin - lo if end > begin else 0 for (begin, end, _), (lo, _) in zip(kept, spec.padding, strict=True)]
  value = lax.slice(value, starts, [s + end - begin for s, (begin, end, _) in zip(starts, kept, strict=True)])
  fill = _convert(jnp.asarray(spec.pad_value, np.float64 if wide == np.float64 else np.float32), wide)
  value = lax.pad(value, fill, [(begin, extent - end, 0) for begin, end, extent in kept])
  if not converts:
    value = value * jnp.asarray(spec.alpha, wide)
  if y:
    value = value + jnp.asarray(spec.beta, wide) * y[0].astype(wide)
  return _convert(value, spec.dtype)


def _inside(extent: int, low: int, high: int) -> tuple[int, int, int]:
  """Where the input lies in the padded or cropped dimension, [begin, end), and that dimension's extent."""
  out = extent + low + high
  begin = min(max(low, 0), out)
  return begin, max(min(low + extent, out), begin), out


def _convert(value: Array, dtype: Any) -> Array:
  """To `dtype`; to integers by rounding to nearest, ties to even, and saturating."""
  if jnp.issubdtype(dtype, jnp.floating) or value.dtype == dtype:
    return value.astype(dtype)
  least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
  if jnp.issubdtype(value.dtype, jnp.integer):
    return jnp.clip(value, least, most).astype(dtype)
  rounded = jnp.where(jnp.isnan(value), 0, jnp.round(value))
  # float32 has no 2^31 - 1: what is not below 2^31 does not go through the conversion.
  fits = (rounded >= least) & (rounded < float(most + 1))
  edge = jnp.where(rounded < 0, least, most).astype(dtype)
  return jnp.where(fits, jnp.where(fits, rounded, 0).astype(dtype), edge)


# Primitive -----------------------------------------------------------------------------------------------------------


def _abstract(x: Any, *_: Any, spec: Spec) -> Any:
  return _primitive.out_aval(x, spec.out_shape(x.shape), spec.dtype)


transform_p = _primitive.define("transform", abstract_eval=_abstract, reference=_reference, params=["spec"])


def _apply(*operands: Array, spec: Spec) -> Array:
  out: Array = operands[0] if spec.is_identity else _primitive.bind(transform_p, *operands, spec=spec)
  return out


def resized(x: Array, shape: Sequence[int]) -> Array:
  """Padded with zeros, or cropped, at the end of each dimension."""
  padding = tuple((0, wanted - extent) for extent, wanted in zip(x.shape, shape, strict=True))
  return _apply(x, spec=Spec(x.dtype, x.dtype, tuple(range(x.ndim)), padding))


# Differentiation -----------------------------------------------------------------------------------------------------
#
# transform  x, y -> alpha T(x) + beta y    T = pad . permute, affine in x for a pad_value other than 0
# tangent    t, s -> alpha T(t) + beta s    with pad_value 0
# adjoint    g -> alpha T'(g), beta g       T' = permute back . crop


def _scale(g: Array, factor: float) -> Array:
  return _apply(g, spec=Spec(g.dtype, g.dtype, tuple(range(g.ndim)), ((0, 0),) * g.ndim, alpha=factor))


def _jvp(primals: Any, tangents: Any, *, spec: Spec) -> Any:
  out = _primitive.bind(transform_p, *primals, spec=spec)
  moving = [
    jnp.issubdtype(p.dtype, jnp.floating) and not _primitive.is_zero(t) for p, t in zip(primals, tangents, strict=True)
  ]
  if not any(moving) or not jnp.issubdtype(out.dtype, jnp.floating):
    return out, _primitive.zero_tangent(out)
  if not moving[0]:
    return out, _scale(tangents[1], spec.beta)
  terms = [t for t, moves in zip(tangents, moving, strict=True) if moves]
  return out, _apply(*terms, spec=spec._replace(pad_value=0.0, beta=spec.beta if len(terms) == 2 else 0.0))


def _transpose(cts: Any, *, spec: Spec) -> Any:
  (g,) = cts
  dx = _apply(g, spec=spec.adjoint())
  return [dx] if spec.operands == 1 else [dx, _scale(g, spec.beta)]


_primitive.linear(transform_p, lambda spec: spec.operands, lambda *a, **k: [_reference(*a, **k)], _transpose)
# This one drops what does not move, and drops the padding's value.
_primitive.set_jvp(transform_p, _jvp)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _batch(operands: Any, dims: Any, *, spec: Spec) -> Any:
  """The mapped dimension of x is permuted to the front with the others, without a move of its own."""
  size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
  x, at = (operands[0], dims[0]) if dims[0] is not None else (_repeat(operands[0], size), 0)
  y = [
    _repeat(y, size) if d is None else jnp.moveaxis(y, d, 0) for y, d in zip(operands[1:], dims[1:], strict=True)
  ]
  permutation = (at, *(d + (d >= at) for d in spec.permutation))
  return _apply(x, *y, spec=spec._replace(permutation=permutation, padding=((0, 0), *spec.padding))), 0


def _repeat(x: Array, size: int) -> Array:
  return jnp.broadcast_to(x, (size, *x.shape))


def _attributes(*_: Any, spec: Spec) -> dict[str, Any]:
  """The high padding is left out: it only says where the output ends."""
  return {
    "permutation": np.asarray(spec.permutation, np.int64),
    "low": np.asarray([lo for lo, _ in spec.padding], np.int64),
    "pad_value": spec.pad_value,
    "alpha": spec.alpha,
    "beta": spec.beta,
  }


def _supported(x: Any, *_: Any, spec: Spec) -> bool:
  return 0 < x.ndim <= 12 and (spec.dtype in INTEGERS or spec.dtype in _primitive.KERNEL_DTYPES)


def _rule(x: Any, *_: Any, spec: Spec) -> str:
  """What is neither padded nor cropped is independent."""
  out = [f"d{d}" if pad == (0, 0) else "." for d, pad in zip(spec.permutation, spec.padding, strict=True)]
  given = [name if (name := f"d{d}") in out else "." for d in range(x.ndim)]
  return f"{' '.join(given)}{', ' + ' '.join(out) if spec.operands == 2 else ''} -> {' '.join(out)}"


_primitive.set_batching(transform_p, _batch)
_primitive.set_shards(transform_p, _rule)
_primitive.lower_to_cuda(
  transform_p, "jaxdnn.transform.v1", _reference, attributes=_attributes, supported=_supported, integers=INTEGERS
)
