"""Convolution with what follows it in a layer, in one kernel: `activation(conv(x, w) + bias + residual)`.

    x  [B, N, *S, C]      w  [B, *R, C/groups, K]      bias  [B, K]      residual, y  [B, N, *P, K]

Nothing but the derivative is kept for the backward pass: of functions whose derivative the output tells, the output,
which the next layer keeps anyway. For the others the kernel stops before the activation when differentiated.
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
from jaxdnn._conv import gemm, primitives
from jaxdnn._conv.gemm import convolve
from jaxdnn._conv.spec import ConvSpec

IDENTITY = "identity"
FROM_OUTPUT = ("relu", "clipped_relu", "sigmoid", "tanh")
"""Activations whose derivative is a function of their output alone."""


def check_activation(where: str, activation: str | None) -> None:
  if activation is not None and activation not in ACTIVATIONS:
    raise ValueError(f"{where}: activation must be None or one of {sorted(ACTIVATIONS)}, got {activation!r}")


def fused(
  x: Array, w: Array, bias: Array | None, residual: Array | None, spec: ConvSpec, dtype: Any, kind: str | None
) -> Array:
  """The layer, where bias and residual are of the type `dtype`; in steps where the kernels have no epilogue."""
  dtype = np.dtype(dtype)
  extras = [a for a in (bias, residual) if a is not None]
  params: dict[str, Any] = dict(
    spec=spec,
    dtype=dtype,
    kind=kind or IDENTITY,
    parameter=ACTIVATIONS[kind].parameter if kind else 0.0,
    bias=bias is not None,
    residual=residual is not None,
  )
  narrower = dtype.itemsize < x.dtype.itemsize
  plain = kind is None and not extras
  if plain or narrower or spec.algorithm == gemm.NAME or not jnp.issubdtype(dtype, jnp.floating):
    return _in_steps(x, w, *extras, **params)
  if spec.algorithm is not None:
    primitives.check_algorithm("y", x, w, spec, dtype)
  return _primitive.bind(conv_fused_p, x, w, *extras, **params)


def _add_extras(y: Array, extras: Any, bias: bool, residual: bool) -> Array:
  if bias:
    b = extras[0].astype(y.dtype)
    y = y + b.reshape(b.shape[0], *(1,) * (y.ndim - 2), b.shape[-1])
  return y + extras[-1].astype(y.dtype) if residual else y


def _in_steps(
  x: Array, w: Array, *extras: Array, spec: ConvSpec, dtype: Any, kind: str, parameter: float, bias: bool,
  residual: bool,
) -> Array:  # fmt: skip
  """The same from the operators that it consists of, each with its own rules."""
  y = _add_extras(convolve("y", {"x": x, "w": w}, spec, dtype), extras, bias, residual)
  return y if kind == IDENTITY else elementwise.activate(kind, y, parameter)


def _reference(
  x: Array, w: Array, *extras: Array, spec: ConvSpec, dtype: Any, kind: str, parameter: float, bias: bool,
  residual: bool,
) -> Array:  # fmt: skip
  """Rounded once, as the kernel does it."""
  wide = max(_primitive.accumulator_dtype(x.dtype), np.dtype(dtype), key=lambda t: t.itemsize)
  y = _add_extras(primitives.REFERENCES["y"](x, w, spec=spec, dtype=wide), extras, bias, residual)
  return (y if kind == IDENTITY else ACTIVATIONS[kind].forward(y, parameter)).astype(dtype)


def _abstract(x: Any, w: Any, *_: Any, spec: ConvSpec, dtype: Any, **__: Any) -> Any:
  return primitives.abstract(x, w, result="y", spec=spec, dtype=dtype)


conv_fused_p = _primitive.define(
  "conv_fused",
  abstract_eval=_abstract,
  reference=_reference,
  params=["spec", "dtype", "kind", "parameter", "bias", "residual"],
)

# Differentiation -----------------------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, kind: str, parameter: float, **params: Any) -> Any:
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


_primitive.set_jvp(conv_fused_p, _jvp)

# Batching ------------------------------------------------------------------------------------------------------------


def _batch(operands: Any, dims: Any, **params: Any) -> tuple[Array, int]:
  """More images where filter and bias are shared, more problems where x and w both have the axis, else in steps."""
  size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
  front = [jnp.moveaxis(a, d, 0) if d is not None else None for a, d in zip(operands, dims, strict=True)]
  x, w, *extras = front
  shared_bias = not params["bias"] or extras[0] is None
  if x is None or (w is None and not shared_bias) or size == 0:
    return jax.vmap(functools.partial(_in_steps, **params), dims)(*operands), 0

  every = [jnp.broadcast_to(a, (size, *a.shape)) if f is None else f for a, f in zip(operands, front, strict=True)]
  fold: Callable[[Array], Array]
  if w is None:
    # [V, B, N, ...] -> [B, V N, ...]
    fold = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])  # noqa: E731
    kept = {1, 2} if params["bias"] else {1}
    y = _primitive.bind(conv_fused_p, *(a if i in kept else fold(every[i]) for i, a in enumerate(operands)), **params)
    return jnp.moveaxis(y.reshape(y.shape[0], size, -1, *y.shape[2:]), 1, 0), 0
  fold = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
  y = _primitive.bind(conv_fused_p, *map(fold, every), **params)
  return y.reshape(size, -1, *y.shape[1:]), 0


_primitive.set_batching(conv_fused_p, _batch)

# CUDA lowering -------------------------------------------------------------------------------------------------------


_primitive.lower_to_cuda(
  conv_fused_p,
  primitives.TARGETS["y"],
  _reference,
  attributes=functools.partial(primitives.attributes, result="y"),
  supported=functools.partial(primitives.supported, result="y"),
  workspace=functools.partial(primitives.workspace, result="y"),
)
