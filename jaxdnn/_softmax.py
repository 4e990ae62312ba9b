"""Softmax and log-softmax over any set of axes.

    softmax      y = exp(x - m) / s
    log_softmax  y = x - m - log(s)      m = max(x),  s = sum(exp(x - m))

The primitives work on [..., n, inner], over the last but one dimension: adjacent axes become n by a reshape that moves
nothing, so channels-first data needs no transpose. On a GPU each is one pass over memory. Derivatives are functions of
the output, which is all that differentiation keeps.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn import _primitive, _sharding

# Public functions ----------------------------------------------------------------------------------------------------


def softmax(x: Array, axis: int | Sequence[int] = -1, *, where: Array | None = None) -> Array:
  """Softmax, `exp(x - m) / sum(exp(x - m))` with `m = max(x)`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    axis: the axis to normalise over, or several for one joint softmax. The default is the last.
    where: booleans that broadcast to the shape of `x`; entries where it is False take no part.

  Returns:
    An array like `x` whose entries sum to 1 over `axis`. Entries masked by `where` are 0, and so is a whole row
    without an unmasked entry; whatever `x` holds there, NaN and infinities included, changes no value, and the
    gradient there is 0. A row that has NaN or +inf, or nothing but -inf, is NaN.

  Raises:
    TypeError: `x` is not floating-point, `axis` is not an integer or integers, or `where` is not boolean.
    ValueError: an axis is out of range or named twice, or `where` does not broadcast to `x`.

  Example:
    >>> jaxdnn.softmax(jnp.array([0.0, 0.0, 9.0]), where=jnp.array([True, True, False]))
    Array([0.5, 0.5, 0. ], dtype=float32)
  """
  return _apply("softmax", softmax_p, x, axis, where, masked=0.0)


def log_softmax(x: Array, axis: int | Sequence[int] = -1, *, where: Array | None = None) -> Array:
  """Logarithm of softmax, `x - m - log(sum(exp(x - m)))` with `m = max(x)`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    axis: the axis to normalise over, or several for one joint softmax. The default is the last.
    where: booleans that broadcast to the shape of `x`; entries where it is False take no part.

  Returns:
    An array like `x`. Entries masked by `where` are -inf, and so is a whole row without an unmasked entry; whatever
    `x` holds there changes no value, and the gradient there is 0. A row that has NaN or +inf, or nothing but -inf, is
    NaN.

  Raises:
    TypeError: `x` is not floating-point, `axis` is not an integer or integers, or `where` is not boolean.
    ValueError: an axis is out of range or named twice, or `where` does not broadcast to `x`.

  Example:
    >>> jaxdnn.log_softmax(jnp.array([1e4, 1e4]))
    Array([-0.6931472, -0.6931472], dtype=float32)
  """
  return _apply("log_softmax", log_softmax_p, x, axis, where, masked=-math.inf)


def _apply(op: str, p: Any, x: Array, axis: Any, where: Array | None, *, masked: float) -> Array:
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{op}: x must be floating-point, got {x.dtype}")
  axes = canonical_axes(op, axis, x.ndim)
  if where is None:
    return _over_axes(p, x, axes)
  where = _aligned_mask(op, where, x.shape)
  keep = jnp.broadcast_to(where, x.shape)
  # Masked entries leave before any arithmetic, and the second select returns nothing to them: in both modes and every
  # order. A row without entries is computed over zeros, so that not even an intermediate is NaN.
  some = jnp.any(where, axes, keepdims=True)
  absent = jnp.where(some, jnp.array(-jnp.inf, x.dtype), jnp.array(0, x.dtype))
  y = _over_axes(p, jnp.where(keep, x, absent), axes)
  return jnp.where(keep, y, jnp.array(masked, x.dtype))


def canonical_axes(op: str, axis: Any, ndim: int) -> tuple[int, ...]:
  """`axis`, one or several, as ascending non-negative numbers."""
  try:
    given = tuple(operator.index(a) for a in (axis if isinstance(axis, Sequence) else (axis,)))
  except TypeError:
    raise TypeError(f"{op}: axis must be an integer or a tuple of integers, got {axis!r}") from None
  if not given or not all(-ndim <= a < ndim for a in given):
    raise ValueError(f"{op}: axis must name axes of an array of rank {ndim}, got {axis!r}")
  axes = tuple(sorted(a % ndim for a in given))
  if len(set(axes)) != len(axes):
    raise ValueError(f"{op}: axis names the same axis of an array of rank {ndim} twice, got {axis!r}")
  return axes


def _aligned_mask(op: str, where: Array, shape: tuple[int, ...]) -> Array:
  """`where` with leading dimensions of size 1, up to the rank of `shape`."""
  where = jnp.asarray(where)
  if where.dtype != jnp.bool_:
    raise TypeError(f"{op}: where must be boolean, got {where.dtype}")
  aligned = (*[1] * (len(shape) - where.ndim), *where.shape)
  if len(aligned) != len(shape) or any(w not in (1, d) for w, d in zip(aligned, shape, strict=True)):
    raise ValueError(f"{op}: where of shape {where.shape} does not broadcast to x of shape {shape}")
  return where.reshape(aligned)


def _over_axes(p: Any, x: Array, axes: tuple[int, ...]) -> Array:
  free = tuple(d for d in range(x.ndim) if d not in axes)
  every = range(x.ndim)
  return _sharding.map_shards(lambda x: _grouped(p, x, axes), [x], keep=[free], out_like=(0, every))


def _grouped(p: Any, x: Array, axes: tuple[int, ...]) -> Array:
  """Binds `p` on a view of `x` in which `axes` are one dimension. Only axes that are not adjacent must move."""
  start, stop = axes[0], axes[-1] + 1
  if stop - start != len(axes):
    order = (*(d for d in range(x.ndim) if d not in axes), *axes)
    moved = _grouped(p, x.transpose(order), tuple(range(x.ndim - len(axes), x.ndim)))
    return moved.transpose([order.index(d) for d in range(x.ndim)])
  view = (*x.shape[:start], math.prod(x.shape[start:stop]), math.prod(x.shape[stop:]))
  y: Array = _primitive.bind(p, x.reshape(view))
  return y.reshape(x.shape)


# Reference -----------------------------------------------------------------------------------------------------------


def _sum(x: Array) -> Array:
  return jnp.sum(x, axis=-2, keepdims=True)


def _widen(x: Array) -> Array:
  return x.astype(_primitive.accumulator_dtype(x.dtype))


def _shifted(x: Array) -> Array:
  # The initial value is for n = 0. A NaN maximum makes the row NaN; so does -inf - -inf.
  return x - jnp.max(x, axis=-2, keepdims=True, initial=-jnp.inf)


def _softmax_reference(x: Array) -> Array:
  e = jnp.exp(_shifted(_widen(x)))
  return (e / _sum(e)).astype(x.dtype)


def _softmax_bwd_reference(g: Array, y: Array) -> Array:
  wg, wy = _widen(g), _widen(y)
  return (wy * (wg - _sum(wy * wg))).astype(g.dtype)


def _log_softmax_reference(x: Array) -> Array:
  # In this order: x - (m + log(s)) would round log(s) away where m is large.
  d = _shifted(_widen(x))
  return (d - jnp.log(_sum(jnp.exp(d)))).astype(x.dtype)


def _log_softmax_lin_reference(t: Array, y: Array) -> Array:
  wt = _widen(t)
  return (wt - _sum(jnp.exp(_widen(y)) * wt)).astype(t.dtype)


def _log_softmax_bwd_reference(g: Array, y: Array) -> Array:
  wg = _widen(g)
  return (wg - jnp.exp(_widen(y)) * _sum(wg)).astype(g.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _abstract(x: Any, *_: Any) -> Any:
  return _primitive.out_aval(x, x.shape)


def _define(name: str, reference: Any) -> Any:
  return _primitive.define(name, abstract_eval=_abstract, reference=reference, params=[])


softmax_p = _define("softmax", _softmax_reference)
softmax_bwd_p = _define("softmax_bwd", _softmax_bwd_reference)
log_softmax_p = _define("log_softmax", _log_softmax_reference)
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
# other's adjoints.


def _set_tangent(p: Any, lin: Any) -> None:
  def jvp(primals: Any, tangents: Any) -> Any:
    y = _primitive.bind(p, *primals)
    (t,) = tangents
    return y, _primitive.zero_tangent(y) if _primitive.is_zero(t) else _primitive.bind(lin, t, y)

  _primitive.set_jvp(p, jvp)


def _set_adjoint(p: Any, reference: Any, adjoint: Any) -> None:
  _primitive.linear_in_first(p, reference, transpose=lambda g, y: _primitive.bind(adjoint, g, y))


_set_tangent(softmax_p, softmax_bwd_p)
_set_tangent(log_softmax_p, log_softmax_lin_p)
_set_adjoint(softmax_bwd_p, _softmax_bwd_reference, softmax_bwd_p)
_set_adjoint(log_softmax_lin_p, _log_softmax_lin_reference, log_softmax_bwd_p)
_set_adjoint(log_softmax_bwd_p, _log_softmax_bwd_reference, log_softmax_lin_p)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _register(p: Any, target: str, reference: Any, **attributes: Any) -> None:
  _primitive.batch_leading(p)
  _primitive.lower_to_cuda(p, target, reference, attributes=lambda *_: attributes)


_register(softmax_p, "jaxdnn.softmax.v1", _softmax_reference, log=False)
_register(log_softmax_p, "jaxdnn.softmax.v1", _log_softmax_reference, log=True)
_register(softmax_bwd_p, "jaxdnn.softmax_bwd.v1", _softmax_bwd_reference, map="softmax")
_register(log_softmax_lin_p, "jaxdnn.softmax_bwd.v1", _log_softmax_lin_reference, map="log_softmax_jvp")
_register(log_softmax_bwd_p, "jaxdnn.softmax_bwd.v1", _log_softmax_bwd_reference, map="log_softmax_vjp")
