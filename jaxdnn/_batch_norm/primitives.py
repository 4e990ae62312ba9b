"""Primitives of batch normalization.

With x [..., n, c, s] and everything else of a channel [..., c]:

    mean, var  of x over n and s, var biased
    p        = (x - mean) a + bias,       a = scale / sqrt(var + epsilon)
    y        = f(p) or f(p + residual)

Channels-last data is [n, c, 1] and channels-first data [n, c, s], so neither moves. Statistics and parameters are
float32, float64 for float64 data. Where a mask [..., n, s] is False, an entry takes no part: whatever x and the
cotangent hold there, NaN included, every result is 0 there and no sum knows of it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _primitive
from jaxdnn._activation import ACTIVATIONS


class Spec(NamedTuple):
  """What is static: f is the activation, "identity" for none."""

  epsilon: float
  activation: str
  parameter: float = 0.0


FUSED = frozenset(
  ("identity", "relu", "clipped_relu", "leaky_relu", "sigmoid", "tanh", "silu", "hard_swish", "gelu", "gelu_tanh")
)
"""The activations that the kernels know."""

# Reference -----------------------------------------------------------------------------------------------------------


def _wide(x: Array) -> Array:
  return x.astype(_primitive.accumulator_dtype(x.dtype))


def _spread(v: Array) -> Array:
  """[..., c] as [..., 1, c, 1]."""
  return v[..., None, :, None]


def _only(where: Array | None, x: Array) -> Array:
  return x if where is None else jnp.where(where[..., :, None, :], x, jnp.zeros((), x.dtype))


def _sum(x: Array) -> Array:
  return jnp.sum(x, axis=(-3, -1))


def _named(names: Sequence[str], arrays: Sequence[Array]) -> tuple[Array | None, Array | None]:
  """The optional operands: the residual or what stands for it in derivatives, and the mask."""
  given = dict(zip(names, arrays, strict=True))
  return given.get("source"), given.get("where")


def _activate(spec: Spec, p: Array) -> Array:
  return p if spec.activation == "identity" else ACTIVATIONS[spec.activation].forward(p, spec.parameter)


def _slope(spec: Spec, p: Array, source: Array | None, t: Array) -> Array:
  """`t` times f' at p. The source is the residual, but the output y where that says what relu's derivative is."""
  if spec.activation == "identity":
    return t
  if source is not None:
    p = _wide(source) if spec.activation == "relu" else p + _wide(source)
  f = ACTIVATIONS[spec.activation]
  if f.inside is not None:
    return f.scale(t, f.inside(p, spec.parameter), spec.parameter)
  return f.scale(t, p if f.residual == "input" else _activate(spec, p), spec.parameter)


def _affine(spec: Spec, x: Array, mean: Array, var: Array, scale: Array, bias: Array) -> tuple[Array, Array, Array]:
  """x - mean, a and p."""
  centered = _wide(x) - _spread(mean)
  a = _spread(scale * jax.lax.rsqrt(var + spec.epsilon))
  return centered, a, centered * a + _spread(bias)


def _statistics_reference(x: Array, *where: Array) -> tuple[Array, Array]:
  mask = where[0] if where else None
  wide = _wide(_only(mask, x))
  n = jnp.maximum(count(x, mask), 1)[..., None]
  # Relative to one of the entries, so that rounding is relative to the deviation.
  top = jnp.max(wide if mask is None else jnp.where(mask[..., :, None, :], wide, -jnp.inf), (-3, -1), initial=-jnp.inf)
  origin = jnp.where(jnp.isneginf(top), jnp.zeros((), top.dtype), top)
  d = _only(mask, wide - _spread(origin))
  mean = _sum(d) / n
  return origin + mean, _sum(_only(mask, jnp.square(d - _spread(mean)))) / n


def count(x: Array, where: Array | None) -> Array:
  """Entries of a channel, [...] in the type of the statistics."""
  dtype = _primitive.accumulator_dtype(x.dtype)
  if where is None:
    return jnp.full(x.shape[:-3], x.shape[-3] * x.shape[-1], dtype)
  return jnp.sum(where, axis=(-2, -1), dtype=jnp.int32).astype(dtype)


def _apply_reference(x: Array, *affine_and_rest: Array, spec: Spec, rest: tuple[str, ...]) -> list[Array]:
  affine, (source, where) = affine_and_rest[:4], _named(rest, affine_and_rest[4:])
  _, _, p = _affine(spec, _only(where, x), *affine)
  if source is not None:
    p = p + _wide(_only(where, source))
  return [_only(where, _activate(spec, p).astype(x.dtype))]


def _train_reference(
  x: Array, scale: Array, bias: Array, *optional: Array, spec: Spec, rest: tuple[str, ...]
) -> list[Array]:
  _, where = _named(rest, optional)
  mean, var = _statistics_reference(x, *([] if where is None else [where]))
  return [*_apply_reference(x, mean, var, scale, bias, *optional, spec=spec, rest=rest), mean, var]


def _tangent_reference(k: Array, *operands: Array, spec: Spec, rest: tuple[str, ...], slot: str) -> list[Array]:
  t = None if slot == "none" else operands[0]
  x, *affine_and_rest = operands[0 if slot == "none" else 1 :]
  affine, (source, where) = affine_and_rest[:4], _named(rest, affine_and_rest[4:])
  centered, a, p = _affine(spec, _only(where, x), *affine)
  inner = _spread(k[..., 0, :]) + _spread(k[..., 1, :]) * centered
  wide_t = None if t is None else _wide(_only(where, t))
  if wide_t is not None and slot != "outer":
    inner = inner + (a * wide_t if slot == "scaled" else wide_t)
  out = _slope(spec, p, None if source is None else _only(where, source), inner)
  if wide_t is not None and slot == "outer":
    out = out + wide_t
  return [_only(where, out).astype(x.dtype)]


def _sums_reference(
  g: Array, x: Array, *affine_and_rest: Array, spec: Spec, rest: tuple[str, ...], slot: str
) -> list[Array]:
  affine, (source, where) = affine_and_rest[:4], _named(rest, affine_and_rest[4:])
  centered, a, p = _affine(spec, _only(where, x), *affine)
  h = _slope(spec, p, None if source is None else _only(where, source), _wide(_only(where, g)))
  h = _only(where, h)
  sums = jnp.stack([_sum(h), _sum(h * centered)], -2)
  if slot in ("none", "outer"):
    return [sums]
  return [sums, (a * h if slot == "scaled" else h).astype(x.dtype)]


def _moments_reference(
  t: Array, x: Array, *affine_and_rest: Array, spec: Spec, rest: tuple[str, ...]
) -> list[Array]:
  affine, (_, where) = affine_and_rest[:4], _named(rest, affine_and_rest[4:])
  centered, a, p = _affine(spec, _only(where, x), *affine)
  wide_t = _wide(_only(where, t))
  out = _only(where, a * _slope(spec, p, None, wide_t)).astype(x.dtype)
  return [out, jnp.stack([_sum(wide_t), _sum(wide_t * centered)], -2)]


def _gradient_reference(
  g: Array, k: Array, x: Array, *affine_and_rest: Array, spec: Spec, rest: tuple[str, ...]
) -> list[Array]:
  affine, (_, where) = affine_and_rest[:4], _named(rest, affine_and_rest[4:])
  centered, a, p = _affine(spec, _only(where, x), *affine)
  dx = a * _slope(spec, p, None, _wide(_only(where, g))) + (_spread(k[..., 0, :]) + _spread(k[..., 1, :]) * centered)
  return [_only(where, dx).astype(x.dtype)]


# Derivatives of a training step, made of other primitives.


def _train_tangent(
  dx: Array, dscale: Array, dbias: Array, x: Array, mean: Array, var: Array, scale: Array, bias: Array, *, spec: Spec
) -> list[Array]:
  affine = mean, var, scale, bias
  t, sums = _primitive.bind(moments_p, dx, x, *affine, spec=spec, rest=())
  root, n = jax.lax.rsqrt(var + spec.epsilon), count(x, None)[..., None]
  dmean, half_dvar = sums[..., 0, :] / n, sums[..., 1, :] / n
  k = jnp.stack([dbias - scale * root * dmean, dscale * root - scale * root * root * root * half_dvar], -2)
  return list(_primitive.bind(tangent_p, k, t, x, *affine, spec=spec, rest=(), slot="outer"))


def train_gradient(
  g: Array, x: Array, mean: Array, var: Array, scale: Array, bias: Array, *, spec: Spec, names: tuple[str, ...] = ()
) -> list[Array]:
  """Over the shards of the mesh axes `names`, if there are any."""
  affine = mean, var, scale, bias
  (sums,) = _primitive.bind(sums_p, g, x, *affine, spec=spec, rest=(), slot="none")
  root, n = jax.lax.rsqrt(var + spec.epsilon), count(x, None)[..., None]
  if names:
    sums, n = jax.lax.psum((sums, n), names)
  dbias, dscale = sums[..., 0, :], sums[..., 1, :] * root
  k = jnp.stack([dbias, dscale * root], -2) * (-scale * root / n)[..., None, :]
  (dx,) = _primitive.bind(gradient_p, g, k, x, *affine, spec=spec, rest=())
  return [dx, dscale, dbias]


# Primitives ----------------------------------------------------------------------------------------------------------


def _of_channels(x: Any, *inner: int) -> Any:
  """[..., *inner, c] for x [..., n, c, s]."""
  return _primitive.out_aval(x, (*x.shape[:-3], *inner, x.shape[-2]), _primitive.accumulator_dtype(x.dtype))


def _like(x: Any) -> Any:
  return _primitive.out_aval(x, x.shape)


def _define(name: str, reference: Any, abstract: Any, params: Sequence[str]) -> Any:
  return _primitive.define(
    f"batch_norm_{name}", abstract_eval=abstract, reference=reference, params=params, multiple_results=True
  )


def _abstract_tangent(*avals: Any, slot: str, **_: Any) -> list[Any]:
  return [_like(avals[1])]


def _abstract_sums(g: Any, x: Any, *_: Any, slot: str, **__: Any) -> list[Any]:
  return [_of_channels(x, 2)] if slot in ("none", "outer") else [_of_channels(x, 2), _like(x)]


statistics_p = _define("statistics", _statistics_reference, lambda x, *_: [_of_channels(x)] * 2, [])
apply_p = _define("apply", _apply_reference, lambda x, *_, **__: [_like(x)], ["spec", "rest"])
train_p = _define(
  "train", _train_reference, lambda x, *_, **__: [_like(x), _of_channels(x), _of_channels(x)], ["spec", "rest"]
)
tangent_p = _define("tangent", _tangent_reference, _abstract_tangent, ["spec", "rest", "slot"])
sums_p = _define("sums", _sums_reference, _abstract_sums, ["spec", "rest", "slot"])
moments_p = _define(
  "moments", _moments_reference, lambda t, x, *_, **__: [_like(x), _of_channels(x, 2)], ["spec", "rest"]
)
gradient_p = _define("gradient", _gradient_reference, lambda g, k, x, *_, **__: [_like(x)], ["spec", "rest"])
train_tangent_p = _define(
  "train_tangent", _train_tangent, lambda dx, dscale, dbias, x, *_, **__: [_like(x)], ["spec"]
)
train_gradient_p = _define(
  "train_gradient", train_gradient, lambda g, x, *_, **__: [_like(x), _of_channels(x), _of_channels(x)], ["spec"]
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# Two pairs of linear maps, each other's adjoints. D is the diagonal matrix f'(p), k and m are pairs for each channel,
# and x' = x - mean:
#
#   tangent    k, t -> D (k0 + k1 x') + t            sums      g    -> (sum D g, sum D g x'),  g
#   moments    t    -> a D t,  (sum t, sum t x')     gradient  g, k -> a D g + k0 + k1 x'
#
# A tangent dx of x goes through moments, which gives those of mean and var, and its other result then through tangent
# (transform.py). Backward that is sums, which reads g and x, and gradient, which reads them again: g itself is what
# passes between them, and D is computed from x both times. The slots of tangent say where t enters:
#
#   outer   t + D (...), as above: t went through D before
#   inner   D (t + ...), what a residual does; sums then returns D g, and no other map needs D
#   scaled  D (a t + ...), with given statistics
#   none    there is no t
#
# The two together are the derivative of y in a training step, of x, scale and bias at once, and its adjoint:
#
#   train_tangent  dx, dscale, dbias -> dy        train_gradient  g -> dx, dscale, dbias


def _transpose_tangent(cts: Any, *operands: Any, slot: str, **params: Any) -> tuple[Any, ...]:
  (g,) = cts
  k, *t = _primitive.bind(sums_p, g, *operands, slot=slot, **params)
  return (k, g) if slot == "outer" else (k, *t)


def _transpose_sums(cts: Any, *operands: Any, slot: str, **params: Any) -> Any:
  return _primitive.bind(tangent_p, *cts, *operands, slot=slot if len(cts) > 1 else "none", **params)


def _transpose_moments(cts: Any, *operands: Any, **params: Any) -> Any:
  return _primitive.bind(gradient_p, *cts, *operands, **params)


def _transpose_gradient(cts: Any, *operands: Any, **params: Any) -> Any:
  return _primitive.bind(moments_p, *cts, *operands, **params)


_primitive.linear(
  tangent_p, lambda slot, **_: 1 if slot == "none" else 2, _tangent_reference, transpose=_transpose_tangent
)
_primitive.linear(sums_p, 1, _sums_reference, transpose=_transpose_sums)
_primitive.linear(moments_p, 1, _moments_reference, transpose=_transpose_moments)
_primitive.linear(gradient_p, 2, _gradient_reference, transpose=_transpose_gradient)

_primitive.linear(
  train_tangent_p,
  3,
  _train_tangent,
  transpose=lambda cts, *operands, **params: _primitive.bind(train_gradient_p, *cts, *operands, **params),
)
_primitive.linear(
  train_gradient_p,
  1,
  train_gradient,
  transpose=lambda cts, *operands, **params: _primitive.bind(train_tangent_p, *cts, *operands, **params),
)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _attributes(
  *_: Any, spec: Spec, rest: tuple[str, ...] = (), slot: str | None = None
) -> dict[str, Any]:
  static = {"epsilon": float(spec.epsilon), "activation": spec.activation, "parameter": float(spec.parameter)}
  given = {"source": "source" in rest, "where": "where" in rest}
  return {**static, **given, **({} if slot is None else {"slot": slot})}


def _workspace(x: Any, *_: Any, **__: Any) -> int:
  """Room for the blocks' partial results: four numbers for each channel, from as many blocks as can share one."""
  channels, reduced = max(1, math.prod(x.shape[:-3]) * x.shape[-2]), x.shape[-3] * x.shape[-1]
  rows = max(8, min(4096, reduced // 4, (1 << 18) // channels))
  return 4 * _primitive.accumulator_dtype(x.dtype).itemsize * channels * rows


_FORMS = {"x": "... n c s", "v": "... c", "k": "... . c", "source": "... n c s", "where": "... n s"}


def rule(operands: str, results: str, rest: Sequence[str] = ()) -> str:
  """How a primitive may be divided whose operands and results are like x, values of channels v, or pairs of these k."""
  return f"{', '.join(_FORMS[o] for o in (*operands, *rest))} -> {', '.join(_FORMS[r] for r in results)}"


_primitive.set_shards(apply_p, lambda *_, rest, **__: rule("xvvvv", "x", rest))
_primitive.set_shards(
  tangent_p, lambda *_, rest, slot, **__: rule("kxvvvv" if slot == "none" else "kxxvvvv", "x", rest)
)
_primitive.set_shards(
  sums_p, lambda *_, rest, slot, **__: rule("xxvvvv", "k" if slot in ("none", "outer") else "kx", rest)
)
_primitive.set_shards(moments_p, lambda *_, rest, **__: rule("xxvvvv", "xk", rest))
_primitive.set_shards(gradient_p, lambda *_, rest, **__: rule("xkxvvvv", "x", rest))


def _supported(*avals: Any, **_: Any) -> bool:
  """Places in a run of a channel's elements are 32-bit, also those of the vectors at its ends."""
  return all(a.shape[-1] <= 2**31 - 17 for a in avals)


def _register(
  p: Any, reference: Any, attributes: Any = _attributes, supported: Any = _supported, **options: Any
) -> None:
  _primitive.batch_leading(p)
  target = p.name.replace("_", ".", 1) + ".v1"
  _primitive.lower_to_cuda(p, target, reference, attributes=attributes, supported=supported, **options)


_register(statistics_p, _statistics_reference, lambda *avals: {"where": len(avals) > 1}, workspace=_workspace)
_register(apply_p, _apply_reference)
_register(train_p, _train_reference, workspace=_workspace)
_register(tangent_p, _tangent_reference)
_register(sums_p, _sums_reference, workspace=_workspace)
_register(moments_p, _moments_reference, workspace=_workspace)
_register(gradient_p, _gradient_reference)
_primitive.batch_leading(train_tangent_p)
_register(
  train_gradient_p,
  train_gradient,
  workspace=_workspace,
  supported=lambda g, *rest, **_: g.dtype != np.float64 and g.size > 0 and _supported(g, *rest),
)
