"""Convolution with what follows it in a layer, in one kernel: `activation(conv(x, w) scale + bias + residual)`.

    x  [B, N, *S, C]      w  [B, *R, C/groups, K]      scale, bias  [B, K]      residual, y  [B, N, *P, K]

Nothing but the derivative is kept for the backward pass: of functions whose derivative the output tells, the output,
which the next layer keeps anyway. For the others the kernel stops before the activation when differentiated. Of causal
depthwise layers x is kept and nothing else: one kernel makes all gradients (`causal_gradient.py`).

Only int8 and float8 operands have a scale. Such a layer is differentiated in the scale, the bias and the residual, not
in the operands, whose own type would round their cotangents to nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _primitive
from jaxdnn._activation import ACTIVATIONS, elementwise
from jaxdnn._conv import aligned, causal_gradient, gemm, primitives
from jaxdnn._conv.gemm import convolve
from jaxdnn._conv.spec import IDENTITY, ConvSpec

FROM_OUTPUT = ("relu", "clipped_relu", "sigmoid", "tanh")
"""Activations whose derivative is a function of their output alone."""


CLAMPS = ("relu", "clipped_relu")
"""Activations that are clamps: of a rounded number and of the number itself they are the same when rounded."""


def check_activation(where: str, activation: str | None) -> None:
  if activation is not None and activation not in ACTIVATIONS:
    raise ValueError(f"{where}: activation must be None or one of {sorted(ACTIVATIONS)}, got {activation!r}")


def fused(
  x: Array, w: Array, bias: Array | None, residual: Array | None, spec: ConvSpec, dtype: Any, kind: str | None,
  scale: Array | None = None,
) -> Array:  # fmt: skip
  """The layer, where bias and residual are of the type `dtype`; in steps where the kernels have no epilogue."""
  dtype = np.dtype(dtype)
  extras = [a for a in (bias, residual, scale) if a is not None]
  params: dict[str, Any] = dict(
    spec=spec,
    dtype=dtype,
    kind=kind or IDENTITY,
    parameter=ACTIVATIONS[kind].parameter if kind else 0.0,
    bias=bias is not None,
    residual=residual is not None,
    scale=scale is not None,
  )
  narrower = dtype.itemsize < x.dtype.itemsize
  plain = kind is None and not extras and not causal_gradient.takes(x, w, spec, dtype)
  # Integers' sums become floats where they are scaled, and nowhere else.
  unscaled = x.dtype == np.int8 and scale is None
  of_several_kernels = spec.algorithm in (gemm.NAME, aligned.NAME)
  if plain or unscaled or narrower or of_several_kernels or not jnp.issubdtype(dtype, jnp.floating):
    return _in_steps(x, w, *extras, **params)
  if spec.algorithm is not None:
    primitives.check_algorithm("y", x, w, spec, dtype)
  return _primitive.bind(conv_fused_p, x, w, *extras, **params)


def _add_extras(y: Array, extras: Any, bias: bool, residual: bool, scale: bool = False) -> Array:
  def of_features(a: Array) -> Array:
    return a.reshape(a.shape[0], *(1,) * (y.ndim - 2), a.shape[-1]).astype(y.dtype)

  if scale:
    y = y * of_features(extras[-1])
  if bias:
    y = y + of_features(extras[0])
  return y + extras[int(bias)].astype(y.dtype) if residual else y


def _in_steps(
  x: Array, w: Array, *extras: Array, spec: ConvSpec, dtype: Any, kind: str, parameter: float, bias: bool,
  residual: bool, scale: bool,
) -> Array:  # fmt: skip
  """The same from the operators that it consists of, each with its own rules."""
  y = convolve("y", {"x": x, "w": w}, spec, _scaled_sums(x) if scale else dtype)
  y = _add_extras(y.astype(np.float32) if scale else y, extras, bias, residual, scale)
  return (y if kind == IDENTITY else elementwise.activate(kind, y, parameter)).astype(dtype)


def _scaled_sums(x: Array) -> type:
  """What sums are kept in until they are scaled; integers wrap."""
  return np.int32 if x.dtype == np.int8 else np.float32


def _reference(
  x: Array, w: Array, *extras: Array, spec: ConvSpec, dtype: Any, kind: str, parameter: float, bias: bool,
  residual: bool, scale: bool,
) -> Array:  # fmt: skip
  """Rounded once, as the kernel does it."""
  least = np.dtype(np.float32) if scale else _primitive.accumulator_dtype(x.dtype)
  wide = max(least, np.dtype(dtype), key=lambda t: t.itemsize)
  sums = _scaled_sums(x) if scale else wide
  y = _add_extras(primitives.REFERENCES["y"](x, w, spec=spec, dtype=sums).astype(wide), extras, bias, residual, scale)
  return (y if kind == IDENTITY else ACTIVATIONS[kind].forward(y, parameter)).astype(dtype)


def _abstract(x: Any, w: Any, *_: Any, spec: ConvSpec, dtype: Any, **__: Any) -> Any:
  return primitives.abstract(x, w, result="y", spec=spec, dtype=dtype)


conv_fused_p = _primitive.define(
  "conv_fused",
  abstract_eval=_abstract,
  reference=_reference,
  params=["spec", "dtype", "kind", "parameter", "bias", "residual", "scale"],
)

# Differentiation -----------------------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, kind: str, parameter: float, **params: Any) -> Any:
  if params["scale"]:
    return _jvp_scaled(primals, tangents, kind=kind, parameter=parameter, **params)
  if not params["residual"] and causal_gradient.takes(primals[0], primals[1], params["spec"], params["dtype"]):
    y = _primitive.bind(conv_fused_p, *primals, kind=kind, parameter=parameter, **params)
    if all(map(_primitive.is_zero, tangents)):
      return y, _primitive.zero_tangent(y)
    return y, causal_gradient.tangent(primals, tangents, kind, parameter, params["spec"])
  if kind != IDENTITY and kind not in FROM_OUTPUT:
    z, dz = _jvp(primals, tangents, kind=IDENTITY, parameter=0.0, **params)
    activate = lambda z: elementwise.activate(kind, z, parameter)  # noqa: E731
    return (activate(z), dz) if _primitive.is_zero(dz) else jax.jvp(activate, [z], [dz])
  y = _primitive.bind(conv_fused_p, *primals, kind=kind, parameter=parameter, **params)
  (x, w, *_), (dx, dw, *dextras) = primals, tangents
  pairs = [pair for pair, d in (((dx, w), dx), ((x, dw), dw)) if not _primitive.is_zero(d)]
  terms = [convolve("y", {"x": a, "w": b}, params["spec"], params["dtype"]) for a, b in pairs]
  if params["bias"] and not _primitive.is_zero(dextras[0]):
    terms.append(_add_extras(jnp.zeros_like(y), dextras, bias=True, residual=False))
  if params["residual"] and not _primitive.is_zero(dextras[-1]):
    terms.append(dextras[-1])
  if not terms:
    return y, _primitive.zero_tangent(y)
  dy = functools.reduce(jnp.add, terms)
  if kind == IDENTITY:
    return y, dy
  f, wide = ACTIVATIONS[kind], _primitive.accumulator_dtype(y.dtype)
  kept = y.astype(wide) if f.inside is None else f.inside(y, parameter)
  return y, f.scale(dy.astype(wide), kept, parameter).astype(y.dtype)


def _jvp_scaled(primals: Any, tangents: Any, **params: Any) -> Any:
  (x, w, *extras), (dx, dw, *dextras) = primals, tangents
  if not (_primitive.is_zero(dx) and _primitive.is_zero(dw)):
    raise TypeError(
      f"conv: no derivative with respect to x of {x.dtype} and w of {w.dtype} with x_scale or w_scale, since their "
      "cotangents would be rounded to that type. To train, wrap the quantized layer in jax.custom_vjp and compute "
      "gradients of wider operands with jaxdnn.conv_dgrad and jaxdnn.conv_wgrad; to hold x or w fixed, use "
      "jax.lax.stop_gradient"
    )
  y = _primitive.bind(conv_fused_p, *primals, **params)
  moving = [i for i, d in enumerate(dextras) if not _primitive.is_zero(d)]
  if not moving:
    return y, _primitive.zero_tangent(y)

  def of_moving(*values: Array) -> Array:
    full = list(extras)
    for i, value in zip(moving, values, strict=True):
      full[i] = value
    return _in_steps(x, w, *full, **params)

  return y, jax.jvp(of_moving, [extras[i] for i in moving], [dextras[i] for i in moving])[1]


_primitive.set_jvp(conv_fused_p, _jvp)

# Batching ------------------------------------------------------------------------------------------------------------


def _batch(operands: Any, dims: Any, **params: Any) -> tuple[Array, int]:
  """More images where filter and bias are shared, more problems where x and w both have the axis, else in steps."""
  size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
  front = [jnp.moveaxis(a, d, 0) if d is not None else None for a, d in zip(operands, dims, strict=True)]
  x, w, *_ = front
  # Of features, as the filter: the bias comes first, the scale last.
  of_features = {1} | ({2} if params["bias"] else set()) | ({len(front) - 1} if params["scale"] else set())
  shared = all(front[i] is None for i in of_features)
  if x is None or (w is None and not shared):
    return jax.vmap(functools.partial(_in_steps, **params), dims)(*operands), 0

  every = [jnp.broadcast_to(a, (size, *a.shape)) if f is None else f for a, f in zip(operands, front, strict=True)]
  fold: Callable[[Array], Array]
  if w is None:
    # [V, B, N, ...] -> [B, V N, ...]
    fold = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], size * a.shape[2], *a.shape[3:])  # noqa: E731
    folded = (a if i in of_features else fold(every[i]) for i, a in enumerate(operands))
    y = _primitive.bind(conv_fused_p, *folded, **params)
    return jnp.moveaxis(y.reshape(y.shape[0], size, y.shape[1] // size, *y.shape[2:]), 1, 0), 0
  fold = lambda a: a.reshape(size * a.shape[1], *a.shape[2:])  # noqa: E731
  y = _primitive.bind(conv_fused_p, *map(fold, every), **params)
  return y.reshape(size, y.shape[0] // size, *y.shape[1:]), 0


_primitive.set_batching(conv_fused_p, _batch)

# CUDA lowering -------------------------------------------------------------------------------------------------------


def _rule(*_: Any, bias: bool, residual: bool, scale: bool, **__: Any) -> str:
  return ", ".join(["b n", "b", *["b"] * bias, *["b n"] * residual, *["b"] * scale]) + " -> b n"


_primitive.set_shards(conv_fused_p, _rule)
_primitive.lower_to_cuda(
  conv_fused_p,
  primitives.TARGETS["y"],
  _reference,
  attributes=functools.partial(primitives.attributes, result="y"),
  supported=functools.partial(primitives.supported, result="y"),
  workspace=functools.partial(primitives.workspace, result="y"),
  **primitives.BYTES,
)


def _rewrite(
  x: Any, w: Any, *_: Any, spec: ConvSpec, dtype: Any, kind: str, parameter: float, bias: bool, residual: bool,
  scale: bool,
) -> Callable[..., Array] | None:  # fmt: skip
  """With zeros added to all operands, where the larger problem is the faster one; and with what follows the bias left
  to XLA, where the fastest kernel has nothing of it."""
  params: dict[str, Any] = dict(spec=spec, dtype=dtype, kind=kind, parameter=parameter, bias=bias, residual=residual)
  choice = aligned.worthwhile("y", x, w, spec, dtype, residual=residual)
  if choice is not None:
    names = ["x", "w", *(["bias"] if bias else []), *(["y"] if residual else [])]

    def larger(*operands: Array) -> Array:
      larger = (aligned.enlarge(choice, name, a) for name, a in zip(names, operands, strict=True))
      y = _primitive.bind(conv_fused_p, *larger, scale=scale, **(params | {"spec": choice.spec}))
      return aligned.cut(choice, "y", y)

    return larger
  if kind == IDENTITY and not residual:
    return None
  clamp = kind in CLAMPS and not residual
  # Rounded once: but for a clamp, which commutes with that, it is done to sums of the wider type.
  sums = dtype if clamp else _primitive.accumulator_dtype(dtype)
  planned = primitives.plan("y", x, w, spec, sums, hopper=True)
  if not planned or planned["finish"] == "any" or (clamp and planned["finish"] == "clamp"):
    return None

  def apart(x: Array, w: Array, *extras: Array) -> Array:
    without = params | {"dtype": sums, "kind": IDENTITY, "parameter": 0.0, "residual": False}
    y = _primitive.bind(conv_fused_p, x, w, *(b.astype(sums) for b in extras[:bias]), scale=scale, **without)
    y = _add_extras(y, extras[bias:], bias=False, residual=residual)
    return (y if kind == IDENTITY else ACTIVATIONS[kind].forward(y, parameter)).astype(dtype)

  return apart


_primitive.rewrite_on_cuda(conv_fused_p, _rewrite)
