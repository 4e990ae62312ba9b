"""Activations with an operand per channel: y = f(x + bias), and prelu.

x is [..., outer, channels, inner] and the operand [..., channels]. The backward pass produces dx and the operand's
gradient, the sums over each channel, while it goes over the data once.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _extension, _primitive
from jaxdnn._activation.functions import ACTIVATIONS, mask_rule, mask_shape, unpack

PRELU = "prelu"
RANK = 3
"""Dimensions of one problem; those before them count independent ones, each with its own operand."""


def residual_of(kind: str) -> str:
  return "input" if kind == PRELU else ACTIVATIONS[kind].residual


# Reference -----------------------------------------------------------------------------------------------------------


def _spread(operand: Array) -> Array:
  """[..., channels] along x's dimensions."""
  return operand[..., None, :, None]


def _forward_reference(x: Array, operand: Array, *, kind: str, parameter: float, masked: bool) -> list[Array]:
  wide = _primitive.accumulator_dtype(x.dtype)
  z, p = x.astype(wide), _spread(operand.astype(wide))
  if kind == PRELU:
    return [jnp.where(z >= 0, z, p * z).astype(x.dtype)]
  y = ACTIVATIONS[kind].forward(z + p, parameter).astype(x.dtype)
  return [y, ACTIVATIONS[kind].mask(z + p, parameter, RANK)] if masked else [y]


def _scale(g: Array, residual: Array, operand: Array, kind: str, parameter: float) -> Array:
  """`g` times the derivative in x, all in the accumulator's type."""
  wide = _primitive.accumulator_dtype(operand.dtype)
  kept, p = residual_of(kind), _spread(operand.astype(wide))
  if kept == "mask":
    return ACTIVATIONS[kind].scale(g, unpack(residual, g.shape, RANK), parameter)
  r = residual.astype(wide)
  if kind == PRELU:
    return jnp.where(r >= 0, g, p * g)
  return ACTIVATIONS[kind].scale(g, r + p if kept == "input" else r, parameter)


def _below(x: Array) -> Array:
  """The derivative of prelu in its slope."""
  return jnp.where(x >= 0, 0, x)


def _tangent_reference(
  t: Array, toperand: Array, residual: Array, operand: Array, *, kind: str, parameter: float
) -> Array:
  wide = _primitive.accumulator_dtype(t.dtype)
  dx, dp = t.astype(wide), _spread(toperand.astype(wide))
  if kind == PRELU:
    y = _scale(dx, residual, operand, kind, parameter) + dp * _below(residual.astype(wide))
  else:
    y = _scale(dx + dp, residual, operand, kind, parameter)
  return y.astype(t.dtype)


def _backward_reference(g: Array, residual: Array, operand: Array, *, kind: str, parameter: float) -> list[Array]:
  wide = _primitive.accumulator_dtype(g.dtype)
  dx = _scale(g.astype(wide), residual, operand, kind, parameter)
  terms = g.astype(wide) * _below(residual.astype(wide)) if kind == PRELU else dx
  return [dx.astype(g.dtype), jnp.sum(terms, (-3, -1)).astype(g.dtype)]


# Primitives ----------------------------------------------------------------------------------------------------------


def _forward_abstract(x: Any, operand: Any, *, masked: bool, **_: Any) -> Any:
  y = _primitive.out_aval(x, x.shape)
  return [y, _primitive.out_aval(x, mask_shape(x.shape, RANK), np.uint8)] if masked else [y]


def _tangent_abstract(t: Any, *_: Any, **__: Any) -> Any:
  return _primitive.out_aval(t, t.shape)


def _backward_abstract(g: Any, residual: Any, operand: Any, **_: Any) -> Any:
  return [_primitive.out_aval(g, g.shape), _primitive.out_aval(g, operand.shape)]


channel_activation_p = _primitive.define(
  "channel_activation",
  abstract_eval=_forward_abstract,
  reference=_forward_reference,
  params=["kind", "parameter", "masked"],
  multiple_results=True,
)
channel_activation_jvp_p = _primitive.define(
  "channel_activation_jvp",
  abstract_eval=_tangent_abstract,
  reference=_tangent_reference,
  params=["kind", "parameter"],
)
channel_activation_bwd_p = _primitive.define(
  "channel_activation_bwd",
  abstract_eval=_backward_abstract,
  reference=_backward_reference,
  params=["kind", "parameter"],
  multiple_results=True,
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# channel_activation      x, b                  -> y, mask
# channel_activation_jvp  t, tb, residual, b    -> f' (t + tb)              residual: x, y, or the mask
# channel_activation_bwd  g, residual, b        -> g f', its channel sums
#
# The last two are each other's adjoint. The tangent map has no kernel: XLA fuses it with its surroundings.


def activate(kind: str, x: Array, operand: Array, parameter: float = 0.0) -> Array:
  (y,) = _primitive.bind(channel_activation_p, x, operand, kind=kind, parameter=parameter, masked=False)
  return y


def _jvp(primals: Any, tangents: Any, *, kind: str, parameter: float, masked: bool) -> Any:
  x, operand = primals
  kept = residual_of(kind)
  params = dict(kind=kind, parameter=parameter)
  out = _primitive.bind(channel_activation_p, x, operand, masked=masked or kept == "mask", **params)
  if all(map(_primitive.is_zero, tangents)):
    dy = _primitive.zero_tangent(out[0])
  else:
    residual = {"input": x, "output": out[0], "mask": out[-1]}[kept]
    dy = _tangent(map(_primitive.instantiate, tangents), residual, operand, **params)
  results = 2 if masked else 1
  return out[:results], [dy, *map(_primitive.zero_tangent, out[1:])][:results]


def _tangent(ts: Any, residual: Array, operand: Array, **params: Any) -> Array:
  return _primitive.bind(channel_activation_jvp_p, *ts, residual, operand, **params)


def _backward(g: Array, residual: Array, operand: Array, **params: Any) -> Any:
  return _primitive.bind(channel_activation_bwd_p, g, residual, operand, **params)


_primitive.set_jvp(channel_activation_p, _jvp)
_primitive.linear(
  channel_activation_jvp_p,
  2,
  lambda *a, **k: [_tangent_reference(*a, **k)],
  transpose=lambda cts, *residuals, **k: _backward(*cts, *residuals, **k),
)
_primitive.linear(
  channel_activation_bwd_p,
  1,
  _backward_reference,
  transpose=lambda cts, *residuals, **k: [_tangent(cts, *residuals, **k)],
)

# Batching ------------------------------------------------------------------------------------------------------------


def _forward_batching(operands: Any, dims: Any, *, masked: bool, **params: Any) -> Any:
  """An operand that all examples share makes them one problem, unless the bits of one begin within a byte."""
  (x, operand), (dx, doperand) = operands, dims
  if dx is not None and doperand is None:
    lead = x.ndim - 1 - RANK
    x = jnp.moveaxis(x, dx, lead)
    if not (masked and math.prod(x.shape[lead + 1 :]) % 8):
      merged = x.reshape(*x.shape[:lead], x.shape[lead] * x.shape[lead + 1], *x.shape[lead + 2 :])
      y, *mask = _primitive.bind(channel_activation_p, merged, operand, masked=masked, **params)
      mask = [m.reshape(*x.shape[: lead + 1], m.shape[-1] // max(x.shape[lead], 1)) for m in mask]
      return [y.reshape(x.shape), *mask], [lead] * (1 + len(mask))
    dx = lead
  size = x.shape[dx] if dx is not None else operand.shape[doperand]
  x, operand = (
    jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
    for a, d in ((x, dx), (operand, doperand))
  )
  out = _primitive.bind(channel_activation_p, x, operand, masked=masked, **params)
  return out, [0] * len(out)


# CUDA lowering -------------------------------------------------------------------------------------------------------


def _supported(x: Any, *_: Any, **__: Any) -> bool:
  """Channels are found by 32-bit divisions, in chunks of whole rows of them."""
  channels, inner = x.shape[-2:]
  return 8 * channels * inner < 1 << 31 and (x.ndim == RANK or math.prod(x.shape) < 1 << 28)


def _attributes(*_: Any, kind: str, parameter: float, **__: Any) -> dict[str, Any]:
  return {"kind": kind, "parameter": float(parameter)}


def _workspace(g: Any, *_: Any, **__: Any) -> int:
  groups = math.prod(g.shape[:-RANK])
  return _extension.native.channel_activation_workspace(g.dtype.itemsize, groups, *g.shape[-RANK:])


def _forward_rule(x: Any, *_: Any, masked: bool, **__: Any) -> str:
  if not masked:
    return "... n c s, ... c -> ... n c s"
  data, mask = mask_rule(x.shape, RANK)
  return f"{data}, ... . -> {data}, {mask}"


def _backward_rule(g: Any, *_: Any, kind: str, **__: Any) -> str:
  if residual_of(kind) != "mask":
    return "... n c s, ... n c s, ... c -> ... n c s, ... c"
  data, mask = mask_rule(g.shape, RANK)
  return f"{data}, {mask}, ... . -> {data}, ... ."


_primitive.set_shards(channel_activation_p, _forward_rule)
_primitive.set_shards(channel_activation_bwd_p, _backward_rule)
_primitive.set_batching(channel_activation_p, _forward_batching)
_primitive.batch_leading(channel_activation_jvp_p)
_primitive.batch_leading(channel_activation_bwd_p)
_primitive.lower_to_cuda(
  channel_activation_p,
  "jaxdnn.channel_activation.v1",
  _forward_reference,
  attributes=_attributes,
  supported=_supported,
)
_primitive.lower_to_cuda(
  channel_activation_bwd_p,
  "jaxdnn.channel_activation_bwd.v1",
  _backward_reference,
  attributes=_attributes,
  supported=_supported,
  workspace=_workspace,
)
