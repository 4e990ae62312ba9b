"""Batch normalization of [..., n, c, s] as two functions with their tangents, composed from the primitives.

Between the primitives stands what couples shards: the statistics of a synchronised batch are merged, and the sums of
its tangents added, over named mesh axes. Transposing the tangents gives the backward pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import _primitive
from jaxdnn._batch_norm import primitives
from jaxdnn._batch_norm.primitives import Spec
from jaxdnn._partition import Axes

AxisNames = tuple[Any, ...]

ALONE_BYTES = 1 << 25
"""Up to this size of x, a training step is one call, which then is one kernel. Larger, it is never one, and statistics
of which alone use is made, as where a result is computed again for its derivative, come without the result."""


def count(x: Array, where: Array | None, axes: AxisNames) -> Array:
  """Entries of a channel, over all shards, [...] in the type of the statistics."""
  n = primitives.count(x, where)
  if where is None and axes:
    return n * jax.lax.psum(1, axes)
  return _sum_shards(n, axes)


def _sum_shards(x: Array, axes: AxisNames) -> Array:
  if not axes:
    return x
  manual = jax.sharding.get_abstract_mesh().manual_axes
  missing = tuple(a for a in axes if a in manual and a not in jax.typeof(x).manual_axis_type.varying)
  return jax.lax.psum(jax.lax.pcast(x, missing, to="varying") if missing else x, axes)


def _optional(source: Array | None, where: Array | None) -> tuple[tuple[str, ...], list[Array]]:
  """Names and arrays of the optional operands that there are."""
  given = {"source": source, "where": where}
  return tuple(n for n, a in given.items() if a is not None), [a for a in given.values() if a is not None]


# Statistics ----------------------------------------------------------------------------------------------------------


def _statistics(x: Array, where: Array | None, axes: AxisNames) -> tuple[Array, Array]:
  mean, var = _primitive.bind(primitives.statistics_p, x, *([] if where is None else [where]))
  if not axes:
    return mean, var
  # About a first approximation of the mean, as exact as a sum of means: what it lacks is small, and so is what its
  # square takes from the sum of squares.
  n = primitives.count(x, where)[..., None]
  total = jnp.maximum(count(x, where, axes), 1)[..., None]
  about = _sum_shards(n * mean, axes) / total
  off = mean - about
  sums = _sum_shards(jnp.stack([n * off, n * (var + off * off)], -2), axes) / total[..., None]
  rest, squares = sums[..., 0, :], sums[..., 1, :]
  # Rounding may leave less than nothing of a variance of 0.
  return about + rest, jnp.maximum(squares - rest * rest, 0)


# Training ------------------------------------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def train(
  spec: Spec, axes: AxisNames, x: Array, scale: Array, bias: Array, residual: Array | None, where: Array | None
) -> tuple[Array, Array, Array]:
  """y, mean and var, the statistics being those of `x` and, over the mesh axes `axes`, of all its shards."""
  if _is_small(x, axes):
    rest, arrays = _optional(residual, where)
    y, mean, var = _primitive.bind(primitives.train_p, x, scale, bias, *arrays, spec=spec, rest=rest)
    return y, mean, var
  mean, var = _statistics(x, where, axes)
  return _apply(spec, x, mean, var, scale, bias, residual, where), mean, var


def _is_small(x: Array, axes: AxisNames) -> bool:
  # A symbolic size is not compared.
  return not axes and isinstance(x.size, int) and x.size * x.dtype.itemsize <= ALONE_BYTES


def _apply(spec: Spec, x: Array, mean: Array, var: Array, scale: Array, bias: Array, *optional: Array | None) -> Array:
  rest, arrays = _optional(*optional)
  (y,) = _primitive.bind(primitives.apply_p, x, mean, var, scale, bias, *arrays, spec=spec, rest=rest)
  return y


@partial(train.defjvp, symbolic_zeros=True)
def _train_jvp(spec: Spec, axes: AxisNames, primals: Any, tangents: Any) -> Any:
  x, scale, bias, residual, where = primals
  y, mean, var = train(spec, axes, *primals)
  dx, dscale, dbias, dresidual = map(_present, tangents[:4])
  t, dmean, dvar = None, None, None
  if dx is not None:
    # With a residual, f' applies to the sum of both tangents, later.
    before = spec if residual is None else spec._replace(activation="identity")
    rest, arrays = _optional(None, where)
    t, sums = _primitive.bind(
      primitives.moments_p, dx, x, mean, var, scale, bias, *arrays, spec=before, rest=rest
    )
    n = jnp.maximum(count(x, where, axes), 1)[..., None]
    sums = _sum_shards(sums, axes)
    dmean, dvar = sums[..., 0, :] / n, 2 * sums[..., 1, :] / n
  zeros = jnp.zeros_like(mean)
  if dx is not None and residual is None and where is None and _is_small(x, axes):
    # Transposed, one call; of what is above then nothing is left, unless there is a cotangent of mean or var.
    parameters = [zeros if d is None else d for d in (dscale, dbias)]
    (dy,) = _primitive.bind(primitives.train_tangent_p, dx, *parameters, x, mean, var, scale, bias, spec=spec)
  else:
    slot = "outer" if residual is None else "inner"
    dy = _tangent(
      spec, slot, _total([t, dresidual]), (dmean, dvar, dscale, dbias), x, (mean, var, scale, bias), residual, y, where
    )
  return (y, mean, var), (dy, zeros if dmean is None else dmean, zeros if dvar is None else dvar)


# Automatic axes ------------------------------------------------------------------------------------------------------
#
# Where XLA divides the program, shards of the batch are merged in the same way.


def _reduced(axes: Axes) -> AxisNames:
  return (*axes.get("n", ()), *axes.get("s", ()))


def _statistics_on_shards(axes: Axes, x: Array, *where: Array) -> tuple[Array, Array]:
  return _statistics(x, where[0] if where else None, _reduced(axes))


def _train_on_shards(
  axes: Axes, x: Array, scale: Array, bias: Array, *optional: Array, spec: Spec, rest: tuple[str, ...]
) -> tuple[Array, Array, Array]:
  given = dict(zip(rest, optional, strict=True))
  mean, var = _statistics(x, given.get("where"), _reduced(axes))
  (y,) = _primitive.bind(primitives.apply_p, x, mean, var, scale, bias, *optional, spec=spec, rest=rest)
  return y, mean, var


def _train_gradient_on_shards(axes: Axes, *operands: Array, spec: Spec) -> list[Array]:
  return primitives.train_gradient(*operands, spec=spec, names=_reduced(axes))


_primitive.set_shards(
  primitives.statistics_p, lambda x, *where: primitives.rule("x", "vv", ["where"] * len(where)), _statistics_on_shards
)
_primitive.set_shards(
  primitives.train_p, lambda *_, rest, **__: primitives.rule("xvv", "xvv", rest), _train_on_shards
)
_primitive.set_shards(primitives.train_gradient_p, primitives.rule("xxvvvv", "xvv"), _train_gradient_on_shards)

# Inference -----------------------------------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def infer(
  spec: Spec, x: Array, mean: Array, var: Array, scale: Array, bias: Array, residual: Array | None
) -> Array:
  """y from given statistics."""
  return _apply(spec, x, mean, var, scale, bias, residual, None)


@partial(infer.defjvp, symbolic_zeros=True)
def _infer_jvp(spec: Spec, primals: Any, tangents: Any) -> Any:
  x, *affine, residual = primals
  y = infer(spec, *primals)
  dx, *daffine, dresidual = map(_present, tangents)
  linear = spec.activation == "identity" and all(d is None for d in daffine)
  if dx is None or (dresidual is None and not linear):
    t, slot = (dresidual, "inner") if dx is None else (dx, "scaled")
  else:
    _, var, scale, _ = affine
    a = (scale * jax.lax.rsqrt(var + spec.epsilon))[..., None, :, None]
    t, slot = _total([(a * dx.astype(a.dtype)).astype(x.dtype), dresidual]), "inner"
  if linear:
    return y, jnp.zeros_like(y) if t is None else t
  return y, _tangent(spec, slot, t, daffine, x, affine, residual, y, None)


# What both have in common --------------------------------------------------------------------------------------------


def _present(tangent: Any) -> Any:
  """The tangent, or None where there is none or it is a symbolic zero."""
  return None if isinstance(tangent, jax.custom_derivatives.SymbolicZero) else tangent


def _total(terms: Sequence[Any]) -> Any:
  present = [t for t in terms if t is not None]
  return sum(present[1:], present[0]) if present else None


def _tangent(
  spec: Spec,
  slot: str,
  t: Array | None,
  daffine: Sequence[Any],
  x: Array,
  affine: Sequence[Array],
  residual: Array | None,
  y: Array,
  where: Array | None,
) -> Array:
  """D (k0 + k1 (x - mean)) with `t` in its slot, (k0, k1) being the tangent of the affine map p of x."""
  _, var, scale, _ = affine
  dmean, dvar, dscale, dbias = daffine
  root = jax.lax.rsqrt(var + spec.epsilon)
  k1 = [
    None if dscale is None else dscale * root,
    None if dvar is None else scale * (root * root * root) * (-0.5 * dvar),
  ]
  k0 = [dbias, None if dmean is None else -scale * root * dmean]
  zeros = jnp.zeros_like(scale)
  k = jnp.stack([zeros if total is None else total for total in (_total(k0), _total(k1))], -2)
  # The output says where relu is on, and it is kept by whatever comes next.
  source = y if spec.activation == "relu" and residual is not None else residual
  if spec.activation == "identity":
    source = None
    slot = "outer" if slot == "inner" and where is None else slot
  rest, arrays = _optional(source, where)
  linear = [k] if t is None else [k, t]
  (dy,) = _primitive.bind(
    primitives.tangent_p, *linear, x, *affine, *arrays, spec=spec, rest=rest, slot="none" if t is None else slot
  )
  return dy
