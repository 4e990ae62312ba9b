"""Elementwise activations: y = f(x).

Forward and backward are one primitive each, with the function's name as a static parameter; on a GPU both are one pass
over memory at full vector width. What is kept for the backward pass is what takes least memory: a bit an element of a
function with two slopes, the output where the derivative is a function of it, else the input.
"""

import math
from typing import Any

import numpy as np
from jax import Array

from jaxdnn import _primitive
from jaxdnn._activation.functions import ACTIVATIONS, mask_rule, mask_shape, unpack

# Reference -----------------------------------------------------------------------------------------------------------


def _forward_reference(x: Array, *, kind: str, parameter: float, masked: bool, rank: int) -> list[Array]:
  wide = x.astype(_primitive.accumulator_dtype(x.dtype))
  y = ACTIVATIONS[kind].forward(wide, parameter).astype(x.dtype)
  return [y, ACTIVATIONS[kind].mask(wide, parameter, rank)] if masked else [y]


def _backward_reference(g: Array, residual: Array, *, kind: str, parameter: float, rank: int) -> Array:
  wide = _primitive.accumulator_dtype(g.dtype)
  if ACTIVATIONS[kind].residual == "mask":
    residual = unpack(residual, g.shape, rank)
  else:
    residual = residual.astype(wide)
  return ACTIVATIONS[kind].scale(g.astype(wide), residual, parameter).astype(g.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _forward_abstract(x: Any, *, masked: bool, rank: int, **_: Any) -> Any:
  y = _primitive.out_aval(x, x.shape)
  return [y, _primitive.out_aval(x, mask_shape(x.shape, rank), np.uint8)] if masked else [y]


def _backward_abstract(g: Any, residual: Any, **_: Any) -> Any:
  return _primitive.out_aval(g, g.shape)


activation_p = _primitive.define(
  "activation",
  abstract_eval=_forward_abstract,
  reference=_forward_reference,
  params=["kind", "parameter", "masked", "rank"],
  multiple_results=True,
)
activation_bwd_p = _primitive.define(
  "activation_bwd",
  abstract_eval=_backward_abstract,
  reference=_backward_reference,
  params=["kind", "parameter", "rank"],
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# activation      x           -> y, mask
# activation_bwd  g, residual -> g f'        residual: x, y, or the mask
#
# The Jacobian is diagonal, hence symmetric: activation_bwd is the tangent map, the cotangent map, and its own adjoint.
# The mask is written only where the rule below asks for it.


def activate(kind: str, x: Array, parameter: float) -> Array:
  (y,) = _primitive.bind(activation_p, x, kind=kind, parameter=parameter, masked=False, rank=x.ndim)
  return y


def _jvp(primals: Any, tangents: Any, *, kind: str, parameter: float, masked: bool, rank: int) -> Any:
  params: dict[str, Any] = dict(kind=kind, parameter=parameter, rank=rank)
  (x,), (t,) = primals, tangents
  kept = ACTIVATIONS[kind].residual
  out = _primitive.bind(activation_p, x, masked=masked or kept == "mask", **params)
  if _primitive.is_zero(t):
    dy = _primitive.zero_tangent(out[0])
  else:
    dy = _backward(t, {"input": x, "output": out[0], "mask": out[-1]}[kept], **params)
  results = 2 if masked else 1
  return out[:results], [dy, *map(_primitive.zero_tangent, out[1:])][:results]


def _backward(g: Array, residual: Array, **params: Any) -> Array:
  return _primitive.bind(activation_bwd_p, g, residual, **params)


_primitive.set_jvp(activation_p, _jvp)
_primitive.linear_in_first(activation_bwd_p, _backward_reference, transpose=_backward)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _supported(x: Any, *_: Any, kind: str, rank: int, **__: Any) -> bool:
  """The bits of many ragged rows are found by a 32-bit division."""
  rows, n = math.prod(x.shape[: x.ndim - rank]), math.prod(x.shape[x.ndim - rank :])
  return ACTIVATIONS[kind].residual != "mask" or rows == 1 or n % 8 == 0 or rows * (n + 7) < 1 << 31


def _attributes(*_: Any, kind: str, parameter: float, rank: int, **__: Any) -> dict[str, Any]:
  return {"kind": kind, "parameter": float(parameter), "rank": rank}


def _forward_rule(x: Any, *, masked: bool, rank: int, **_: Any) -> str:
  if not masked:
    return "..."
  data, mask = mask_rule(x.shape, rank)
  return f"{data} -> {data}, {mask}"


def _backward_rule(g: Any, residual: Any, *, kind: str, rank: int, **_: Any) -> str:
  if ACTIVATIONS[kind].residual != "mask":
    return "..."
  data, mask = mask_rule(g.shape, rank)
  return f"{data}, {mask} -> {data}"


_primitive.set_shards(activation_p, _forward_rule)
_primitive.set_shards(activation_bwd_p, _backward_rule)

for _p, _target, _reference in (
  (activation_p, "jaxdnn.activation.v2", _forward_reference),
  (activation_bwd_p, "jaxdnn.activation_bwd.v2", _backward_reference),
):
  _primitive.batch_leading(_p)
  _primitive.lower_to_cuda(_p, _target, _reference, attributes=_attributes, supported=_supported)
