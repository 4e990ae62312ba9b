"""The primitives of layer norm and RMS norm, and their rules.

With s = x + residual over rows of n elements, and statistics of each row,

    h = (s - mean) rstd             rstd = 1 / sqrt(mean((s - mean)²) + epsilon);  RMS norm has mean 0
    y = h (scale + offset) + bias

Rows are [problems, rows, n] and parameters [problems, n]: a mapped axis without parameters of its own is more rows, and
one with them is more problems. An operand or result that is absent is an array of shape (0, 0) or (0, 0, 0), which
`_primitive.bind` keeps out of programs. Statistics and parameters are in the accumulator's type. The mean is [problems,
rows, 2], the unevaluated sum of two numbers: of rows around 1e4 with deviation 1e-2, a single float32 would be off by a
twentieth of the deviation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _extension, _primitive
from jaxdnn._primitive import is_absent


def absent(ndim: int, dtype: Any) -> Array:
  return jnp.zeros((0,) * ndim, dtype)


# Reference -----------------------------------------------------------------------------------------------------------


def _widen(x: Array) -> Array:
  return x.astype(_primitive.accumulator_dtype(x.dtype))


def as_returned(total: Array) -> Array:
  """The sum x + residual, rounded. XLA may skip the rounding of a value that it goes on with."""
  info = jnp.finfo(total.dtype)
  return lax.reduce_precision(total, info.nexp, info.nmant)


def _mean(x: Array) -> Array:
  return jnp.mean(x, axis=-1, keepdims=True)


def _statistics(x: Array, center: bool, epsilon: float) -> tuple[Array, Array]:
  """The mean, as two numbers, and the reciprocal deviation."""
  x = _widen(x)
  if not center:
    return absent(3, x.dtype), lax.rsqrt(_mean(x * x) + epsilon)[..., 0]
  mean = _mean(x)
  rest = _mean(x - mean)
  square = (x - mean - rest) ** 2
  return jnp.concatenate([mean, rest], -1), lax.rsqrt(_mean(square) + epsilon)[..., 0]


def _normalized(x: Array, mean: Array, rstd: Array) -> Array:
  x = _widen(x)
  if not is_absent(mean):
    x = x - mean[..., :1] - mean[..., 1:]
  return x * rstd[..., None]


def _times_scale(x: Array, scale: Array, offset: float) -> Array:
  return x if is_absent(scale) else x * (scale + offset)[:, None]


def _plus_bias(x: Array, bias: Array) -> Array:
  return x if is_absent(bias) else x + bias[:, None]


def _forward_reference(
  x: Array,
  residual: Array,
  scale: Array,
  bias: Array,
  *,
  center: bool,
  epsilon: float,
  offset: float,
  statistics: bool,
) -> list[Array]:
  total = absent(3, x.dtype) if is_absent(residual) else x + residual
  x = x if is_absent(residual) else as_returned(total)
  mean, rstd = _statistics(x, center, epsilon)
  y = _plus_bias(_times_scale(_normalized(x, mean, rstd), scale, offset), bias)
  kept = (mean, rstd) if statistics else (absent(3, mean.dtype), absent(2, rstd.dtype))
  return [y.astype(x.dtype), total, *kept]


def _tangent_reference(
  t: Array,
  dscale: Array,
  dbias: Array,
  x: Array,
  scale: Array,
  mean: Array,
  rstd: Array,
  *,
  center: bool,
  offset: float,
  carry: bool,
  **_: Any,
) -> list[Array]:
  h, wide = _normalized(as_returned(x) if carry else x, mean, rstd), _widen(t)
  moved = wide - _mean(wide) if center else wide
  dh = rstd[..., None] * (moved - h * _mean(wide * h))
  dy = _plus_bias(_times_scale(dh, scale, offset), dbias)
  dy = dy if is_absent(dscale) else dy + h * dscale[:, None]
  return [dy.astype(t.dtype), t if carry else absent(3, t.dtype)]


def _backward_reference(
  g: Array,
  g_sum: Array,
  x: Array,
  scale: Array,
  mean: Array,
  rstd: Array,
  *,
  center: bool,
  offset: float,
  bias: bool,
  carry: bool,
  **_: Any,
) -> list[Array]:
  h, wide = _normalized(as_returned(x) if carry else x, mean, rstd), _widen(g)
  q = _times_scale(wide, scale, offset)
  moved = q - _mean(q) if center else q
  dx = rstd[..., None] * (moved - h * _mean(q * h))
  dx = dx if is_absent(g_sum) else dx + _widen(g_sum)
  dscale = scale if is_absent(scale) else jnp.sum(wide * h, 1)
  return [dx.astype(x.dtype), dscale, jnp.sum(wide, 1) if bias else absent(2, wide.dtype)]


# Primitives ----------------------------------------------------------------------------------------------------------


def _forward_abstract(
  x: Any, residual: Any, scale: Any, bias: Any, *, center: bool, statistics: bool, **_: Any
) -> list[Any]:
  wide = _primitive.accumulator_dtype(x.dtype)
  mean = (*x.shape[:2], 2) if center and statistics else (0, 0, 0)
  return [
    _primitive.out_aval(x, x.shape),
    _primitive.out_aval(x, residual.shape),
    _primitive.out_aval(x, mean, wide),
    _primitive.out_aval(x, x.shape[:2] if statistics else (0, 0), wide),
  ]


def _tangent_abstract(t: Any, *_: Any, carry: bool, **__: Any) -> list[Any]:
  return [_primitive.out_aval(t, t.shape), _primitive.out_aval(t, t.shape if carry else (0, 0, 0))]


def _backward_abstract(g: Any, g_sum: Any, x: Any, scale: Any, *_: Any, bias: bool, **__: Any) -> list[Any]:
  wide = _primitive.accumulator_dtype(x.dtype)
  dbias = (x.shape[0], x.shape[2]) if bias else (0, 0)
  return [
    _primitive.out_aval(g, g.shape),
    _primitive.out_aval(g, scale.shape, wide),
    _primitive.out_aval(g, dbias, wide),
  ]


def _define(name: str, abstract_eval: Any, reference: Any, *params: str) -> Any:
  return _primitive.define(
    name,
    abstract_eval=abstract_eval,
    reference=reference,
    params=["center", "epsilon", "offset", *params],
    multiple_results=True,
    optional=True,
  )


layer_norm_p = _define("layer_norm", _forward_abstract, _forward_reference, "statistics")
layer_norm_lin_p = _define("layer_norm_lin", _tangent_abstract, _tangent_reference, "bias", "carry")
layer_norm_bwd_p = _define("layer_norm_bwd", _backward_abstract, _backward_reference, "bias", "carry")

# Differentiation -----------------------------------------------------------------------------------------------------
#
# layer_norm      x, residual, scale, bias             -> y, s, mean, rstd
# layer_norm_lin  t, dscale, dbias | s, scale, m, rstd -> dy, t       the tangents of y and s, from that of s
# layer_norm_bwd  g, g_sum         | s, scale, m, rstd -> ds, dscale, dbias
#
# The last two are linear before the bar and each other's adjoints. The statistics are not seen from outside and carry
# no tangent: they spare the kernels a pass, and what they contribute to a derivative in s is had by computing them from
# s again: 12 bytes a row, which layer_norm leaves absent until it is differentiated (`statistics`). `carry` says that s
# is a result, and `bias` that there is one.


def _jvp(primals: Any, tangents: Any, *, statistics: bool, **params: Any) -> Any:
  x, residual, scale, bias = primals
  moves = not all(map(_primitive.is_zero, tangents))
  y, total, mean, rstd = _primitive.bind(layer_norm_p, *primals, statistics=statistics or moves, **params)
  outs = [y, total, *((mean, rstd) if statistics else (mean[:0, :0, :0], rstd[:0, :0]))]
  zeros = [_primitive.zero_tangent(out) for out in outs]
  if not moves:
    return outs, zeros
  t, dresidual, dscale, dbias = map(_primitive.instantiate, tangents)
  carry = not is_absent(residual)
  dy, dtotal = _primitive.bind(
    layer_norm_lin_p,
    t + dresidual if carry else t,
    *(dscale, dbias, total if carry else x, scale, mean, rstd),
    bias=not is_absent(bias),
    carry=carry,
    **params,
  )
  return outs, [dy, dtotal, *zeros[2:]]


def _with_statistics(reference: Any) -> Callable[..., list[Array]]:
  """`reference`, whole as a function of its operand x, as statistics that are given have no derivative."""

  def whole(*operands: Any, center: bool, epsilon: float, **params: Any) -> list[Array]:
    *others, x, scale, _, _ = operands
    statistics = _statistics(x, center, epsilon)
    results: list[Array] = reference(*others, x, scale, *statistics, center=center, epsilon=epsilon, **params)
    return results

  return whole


def _tangent_transpose(cts: Sequence[Array], *residuals: Array, **params: Any) -> Any:
  return _primitive.bind(layer_norm_bwd_p, *cts, *residuals, **params)


def _backward_transpose(cts: Sequence[Array], *residuals: Array, **params: Any) -> Any:
  return _primitive.bind(layer_norm_lin_p, *cts, *residuals, **params)


_primitive.set_jvp(layer_norm_p, _jvp)
_primitive.linear(layer_norm_lin_p, 3, _with_statistics(_tangent_reference), _tangent_transpose)
_primitive.linear(layer_norm_bwd_p, 2, _with_statistics(_backward_reference), _backward_transpose)

# Batching ------------------------------------------------------------------------------------------------------------

# Which operands and results have rows, and which belong to a problem.
ROWS, PROBLEM = True, False


def _set_batching(p: Any, operand_kinds: Sequence[bool], result_kinds: Sequence[bool]) -> None:
  """The mapped axis becomes more rows where there is one problem and nothing of a problem is mapped, else problems."""

  def rule(operands: Any, dims: Any, **params: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
    # Mapped axes first; what is absent counts as not mapped.
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True)]
    mapped = [d is not None and any(a.shape[1:]) for a, d in zip(moved, dims, strict=True)]
    operands = [a if d is None or m else a[0] for a, d, m in zip(moved, dims, mapped, strict=True)]
    problems = operands[0].shape[mapped[0]]
    results = any(kind is PROBLEM for kind in result_kinds) and _has_parameters(operands, operand_kinds, **params)
    own = results or any(m and kind is PROBLEM for m, kind in zip(mapped, operand_kinds, strict=True))
    at = 0 if own or problems != 1 else 1

    def fold(a: Array, mapped: bool, kind: bool) -> Array:
      if is_absent(a) or (at == 1 and kind is PROBLEM):
        return a
      a = jnp.moveaxis(a if mapped else jnp.broadcast_to(a, (size, *a.shape)), 0, at)
      return a.reshape(*a.shape[:at], size * a.shape[at + 1], *a.shape[at + 2 :])

    def unfold(out: Array) -> tuple[Array, int | None]:
      if is_absent(out):
        return out, None
      return out.reshape(*out.shape[:at], size, out.shape[at] // size, *out.shape[at + 1 :]), at

    outs = _primitive.bind(p, *map(fold, operands, mapped, operand_kinds), **params)
    return tuple(zip(*map(unfold, outs), strict=True))

  _primitive.set_batching(p, rule)


def _has_parameters(operands: Sequence[Array], kinds: Sequence[bool], *, bias: bool, **_: Any) -> bool:
  return bias or any(kind is PROBLEM and not is_absent(a) for a, kind in zip(operands, kinds, strict=True))


_set_batching(layer_norm_p, (ROWS, ROWS, PROBLEM, PROBLEM), (ROWS, ROWS, ROWS, ROWS))
_set_batching(layer_norm_lin_p, (ROWS, PROBLEM, PROBLEM, ROWS, PROBLEM, ROWS, ROWS), (ROWS, ROWS))
_set_batching(layer_norm_bwd_p, (ROWS, ROWS, ROWS, PROBLEM, ROWS, ROWS), (ROWS, PROBLEM, PROBLEM))

# CUDA lowering -------------------------------------------------------------------------------------------------------
#
# The tangent map is left to XLA: it reads and writes rows as the reference does, and fuses into one kernel.


def _attributes(*_: Any, center: bool, epsilon: float, offset: float, **__: Any) -> dict[str, Any]:
  return {"center": center, "epsilon": np.float64(epsilon), "offset": np.float64(offset)}


def _workspace(backward: bool) -> Callable[..., int]:
  def size(*avals: Any, bias: bool = False, **_: Any) -> int:
    problems, rows, n = avals[0].shape
    gradients = bias + (not is_absent(avals[3])) if backward else None  # dbias and dscale
    return _extension.native.layer_norm_workspace(avals[0].dtype.name, problems, rows, n, gradients=gradients)

  return size


_primitive.set_shards(layer_norm_p, "b r, b r, b, b -> b r, b r, b r, b r")
_primitive.set_shards(layer_norm_bwd_p, "b r, b r, b r, b, b r, b r -> b r, b, b")

for _p, _target, _reference, _is_backward in (
  (layer_norm_p, "jaxdnn.layer_norm.v1", _forward_reference, False),
  (layer_norm_bwd_p, "jaxdnn.layer_norm_bwd.v1", _backward_reference, True),
):
  _primitive.lower_to_cuda(_p, _target, _reference, attributes=_attributes, workspace=_workspace(_is_backward))
