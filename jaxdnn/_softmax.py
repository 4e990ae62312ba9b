"""Softmax, softmin and log-softmax over any set of axes, with or without a mask.

    softmax      y = exp(x - m) / s
    log_softmax  y = x - m - log(s)      m = max(x),  s = sum(exp(x - m)),  over the entries that the mask keeps

The primitives work on [..., n, inner], over the last but one dimension: adjacent axes become n by a reshape that moves
nothing, so channels-first data needs no transpose. On a GPU each is one pass over memory. Derivatives are functions of
the output, which (with the mask) is all that differentiation keeps.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn import _axes, _primitive
from jaxdnn._eager import compiled

# Public functions ----------------------------------------------------------------------------------------------------


@compiled
def softmax(
  x: Array, axis: int | Sequence[int] = -1, *, where: Array | None = None, fully_masked: str = "zero"
) -> Array:
  """Softmax, `exp(x - m) / sum(exp(x - m))` with `m = max(x)`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    axis: the axis to normalise over, or several for one joint softmax. The default is the last.
    where: booleans that broadcast to the shape of `x`; entries where it is False take no part.
    fully_masked: what a row without an unmasked entry becomes: "zero", "nan", or "uniform" (1 / n, which is what
      adding a large negative number to masked entries gives).

  Returns:
    An array like `x` whose entries sum to 1 over `axis`. Entries masked by `where` are 0; whatever `x` holds there, NaN
    and infinities included, changes no value, and the gradient there is 0. A row that has NaN or +inf, or nothing but
    -inf, is NaN.

  Raises:
    TypeError: `x` is not floating-point, `axis` is not an integer or integers, or `where` is not boolean.
    ValueError: an axis is out of range or named twice, `where` does not broadcast to `x`, or `fully_masked` is none of
      the three.

  Example:
    >>> jaxdnn.softmax(jnp.array([0.0, 0.0, 9.0]), where=jnp.array([True, True, False]))
    Array([0.5, 0.5, 0. ], dtype=float32)
  """
  return _apply("softmax", softmax_p, x, axis, where, fully_masked)


@compiled
def softmin(
  x: Array, axis: int | Sequence[int] = -1, *, where: Array | None = None, fully_masked: str = "zero"
) -> Array:
  """Softmax of `-x`. Arguments, result and errors are those of `softmax`; here -inf makes a row NaN.

  Example:
    >>> jaxdnn.softmin(jnp.array([1.0, 1.0, jnp.inf]))
    Array([0.5, 0.5, 0. ], dtype=float32)
  """
  return _apply("softmin", softmax_p, -_axes.checked("softmin", x), axis, where, fully_masked)


@compiled
def log_softmax(
  x: Array, axis: int | Sequence[int] = -1, *, where: Array | None = None, fully_masked: str = "zero"
) -> Array:
  """Logarithm of softmax, `x - m - log(sum(exp(x - m)))` with `m = max(x)`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    axis: the axis to normalise over, or several for one joint softmax. The default is the last.
    where: booleans that broadcast to the shape of `x`; entries where it is False take no part.
    fully_masked: what a row without an unmasked entry becomes, as a probability: "zero" (-inf here), "nan" or "uniform"
      (-log n).

  Returns:
    An array like `x`. Entries masked by `where` are -inf; whatever `x` holds there changes no value, and the gradient
    there is 0. A row that has NaN or +inf, or nothing but -inf, is NaN.

  Raises:
    TypeError: `x` is not floating-point, `axis` is not an integer or integers, or `where` is not boolean.
    ValueError: an axis is out of range or named twice, `where` does not broadcast to `x`, or `fully_masked` is none of
      the three.

  Example:
    >>> jaxdnn.log_softmax(jnp.array([1e4, 1e4]))
    Array([-0.6931472, -0.6931472], dtype=float32)
  """
  return _apply("log_softmax", log_softmax_p, x, axis, where, fully_masked)


FULLY_MASKED = ("zero", "nan", "uniform")


def _apply(op: str, p: Any, x: Array, axis: Any, where: Array | None, fully_masked: str) -> Array:
  x = _axes.checked(op, x)
  axes = _axes.canonical(op, axis, x.ndim)
  if not isinstance(fully_masked, str) or fully_masked not in FULLY_MASKED:
    raise ValueError(f"{op}: fully_masked must be one of {', '.join(map(repr, FULLY_MASKED))}, got {fully_masked!r}")
  masks = () if where is None else (_axes.aligned_mask(op, where, x.shape),)
  return _axes.grouped(lambda *a: _primitive.bind(p, *a, fully_masked=fully_masked), axes, x, *masks)


# Reference -----------------------------------------------------------------------------------------------------------
#
# Masked entries leave before any arithmetic, and the last select returns nothing to them: in both modes and every
# order. A row without entries is computed over zeros, so that not even an intermediate is NaN.


def _sum(x: Array) -> Array:
  return jnp.sum(x, axis=-2, keepdims=True)


def _widen(x: Array) -> Array:
  return x.astype(_primitive.accumulator_dtype(x.dtype))


def _masked(x: Array, mask: Sequence[Array], fill: Any) -> Array:
  """`x`, and `fill` where the mask, if there is one, is False."""
  return jnp.where(mask[0], x, jnp.asarray(fill, x.dtype)) if mask else x


def _shifted(x: Array, mask: Sequence[Array]) -> Array:
  """x - m."""
  if mask:
    x = _masked(x, mask, jnp.where(jnp.any(mask[0], axis=-2, keepdims=True), -jnp.inf, 0))
  # The initial value is for n = 0. A NaN maximum makes the row NaN; so does -inf - -inf.
  return x - jnp.max(x, axis=-2, keepdims=True, initial=-jnp.inf)


def _without_entries(fully_masked: str, n: int) -> float:
  """What `fully_masked` makes of a row, as a probability."""
  return {"zero": 0.0, "nan": math.nan, "uniform": 1 / n if n else 0.0}[fully_masked]


def _absent(mask: Sequence[Array], present: float, fully_masked: float) -> Any:
  """What masked entries become: `present` in rows that have others."""
  return jnp.where(jnp.any(mask[0], axis=-2, keepdims=True), present, fully_masked) if mask else present


def _softmax_reference(x: Array, *mask: Array, fully_masked: str) -> Array:
  e = jnp.exp(_shifted(_widen(x), mask))
  y = e / _sum(e)
  return _masked(y, mask, _absent(mask, 0.0, _without_entries(fully_masked, x.shape[-2]))).astype(x.dtype)


def _softmax_bwd_reference(g: Array, y: Array, *mask: Array) -> Array:
  wg, wy = (_masked(_widen(a), mask, 0) for a in (g, y))
  return _masked(wy * (wg - _sum(wy * wg)), mask, 0).astype(g.dtype)


def _log_softmax_reference(x: Array, *mask: Array, fully_masked: str) -> Array:
  # In this order: x - (m + log(s)) would round log(s) away where m is large.
  d = _shifted(_widen(x), mask)
  y = d - jnp.log(_sum(jnp.exp(d)))
  uniform = _without_entries(fully_masked, x.shape[-2])
  return _masked(y, mask, _absent(mask, -jnp.inf, math.log(uniform) if uniform else -math.inf)).astype(x.dtype)


def _log_softmax_lin_reference(t: Array, y: Array, *mask: Array) -> Array:
  wt = _masked(_widen(t), mask, 0)
  return _masked(wt - _sum(jnp.exp(_masked(_widen(y), mask, -jnp.inf)) * wt), mask, 0).astype(t.dtype)


def _log_softmax_bwd_reference(g: Array, y: Array, *mask: Array) -> Array:
  wg = _masked(_widen(g), mask, 0)
  return _masked(wg - jnp.exp(_masked(_widen(y), mask, -jnp.inf)) * _sum(wg), mask, 0).astype(g.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------
#
# Operands are [..., n, inner]; a mask, where there is one, broadcasts to them.


def _abstract(x: Any, *_: Any, **params: Any) -> Any:
  return _primitive.out_aval(x, x.shape)


def _define(name: str, reference: Any, *params: str) -> Any:
  return _primitive.define(name, abstract_eval=_abstract, reference=reference, params=params)


softmax_p = _define("softmax", _softmax_reference, "fully_masked")
softmax_bwd_p = _define("softmax_bwd", _softmax_bwd_reference)
log_softmax_p = _define("log_softmax", _log_softmax_reference, "fully_masked")
log_softmax_lin_p = _define("log_softmax_lin", _log_softmax_lin_reference)
log_softmax_bwd_p = _define("log_softmax_bwd", _log_softmax_bwd_reference)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# softmax          x    -> y
# softmax_bwd      g, y -> y (g - sum(y g))      J  = diag(y) - y y',  symmetric
# log_softmax      x    -> y
# log_softmax_lin  t, y -> t - sum(exp(y) t)     J  = I - 1 exp(y)'
# log_softmax_bwd  g, y -> g - exp(y) sum(g)     J' = I - exp(y) 1'
#
# So softmax_bwd is the tangent map, the cotangent map, and its own adjoint; the two maps of log_softmax are each
# other's adjoints. A mask selects on both sides of J and leaves all that as it is.


def _set_tangent(p: Any, lin: Any) -> None:
  def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    y = _primitive.bind(p, *primals, **params)
    t, *_ = tangents
    _, *mask = primals
    return y, _primitive.zero_tangent(y) if _primitive.is_zero(t) else _primitive.bind(lin, t, y, *mask)

  _primitive.set_jvp(p, jvp)


def _set_adjoint(p: Any, reference: Any, adjoint: Any) -> None:
  _primitive.linear_in_first(p, reference, transpose=lambda g, *kept: _primitive.bind(adjoint, g, *kept))


_set_tangent(softmax_p, softmax_bwd_p)
_set_tangent(log_softmax_p, log_softmax_lin_p)
_set_adjoint(softmax_bwd_p, _softmax_bwd_reference, softmax_bwd_p)
_set_adjoint(log_softmax_lin_p, _log_softmax_lin_reference, log_softmax_bwd_p)
_set_adjoint(log_softmax_bwd_p, _log_softmax_bwd_reference, log_softmax_lin_p)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _mask_index(*operands: Any, **params: Any) -> list[int]:
  return [i for i, a in enumerate(operands) if a.dtype == jnp.bool_]


def _supported(x: Any, *_: Any, **params: Any) -> bool:
  # A mask's leading dimensions must fold into a few.
  return x.ndim <= 8


def _register(p: Any, target: str, reference: Any, **attributes: Any) -> None:
  def all_attributes(x: Any, *_: Any, fully_masked: str | None = None) -> dict[str, Any]:
    fill = {} if fully_masked is None else {"without_entries": _without_entries(fully_masked, x.shape[-2])}
    return {**attributes, **fill}

  _primitive.batch_leading(p, broadcast=_mask_index)
  _primitive.set_shards(p, "... . inner")
  _primitive.lower_to_cuda(
    p,
    target,
    reference,
    attributes=all_attributes,
    supported=_supported,
    workspace=lambda x, *_, **params: _axes.workspace("softmax", x),
  )


_register(softmax_p, "jaxdnn.softmax.v2", _softmax_reference, log=False)
_register(log_softmax_p, "jaxdnn.softmax.v2", _log_softmax_reference, log=True)
_register(softmax_bwd_p, "jaxdnn.softmax_bwd.v2", _softmax_bwd_reference, map="softmax")
_register(log_softmax_lin_p, "jaxdnn.softmax_bwd.v2", _log_softmax_lin_reference, map="log_softmax_jvp")
_register(log_softmax_bwd_p, "jaxdnn.softmax_bwd.v2", _log_softmax_bwd_reference, map="log_softmax_vjp")
