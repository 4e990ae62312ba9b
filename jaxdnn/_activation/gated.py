"""Gated linear units: one half of x times an activation of the other, both halves in one pass.

x is [..., 2, n], of which the gate is the second half, or the first; the result is [..., n]. The backward pass reads x
and the cotangent and writes the gradient of both halves.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn import _primitive, _sharding
from jaxdnn._activation.functions import ACTIVATIONS
from jaxdnn._arguments import flag, floating, index_of_axis, one_of
from jaxdnn._eager import compiled

GATES = ("identity", "relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh")

# Public functions ----------------------------------------------------------------------------------------------------


@compiled
def glu(x: Array, axis: int = -1, activation: str = "sigmoid", *, gate: str = "second") -> Array:
  """Gated linear unit: `a f(b)` for the two halves a, b of x along `axis`.

  Args:
    x: floating-point array, of even extent along `axis`.
    axis: the dimension that is halved.
    activation: f: 'identity' (bilinear), 'relu' (ReGLU), 'sigmoid' (GLU), 'tanh', 'silu' (SwiGLU), 'gelu' or
      'gelu_tanh' (GEGLU).
    gate: which half f is applied to, 'second' as in `jax.nn.glu` and torch, or 'first'.

  Returns:
    An array with half the extent along `axis`. The input is what is kept for the backward pass.

  Raises:
    TypeError: `x` is not floating-point.
    ValueError: `axis` is not a dimension of x or its extent is odd, or `activation` or `gate` is unknown.

  Example:
    >>> jaxdnn.glu(jnp.array([[2.0, 0.0]]))
    Array([[1.]], dtype=float32)
  """
  x = floating("glu", "x", x)
  axis = index_of_axis("glu", x.shape, axis)
  activation = one_of("glu", "activation", activation, GATES)
  gate = one_of("glu", "gate", gate, ("first", "second"))
  if x.shape[axis] % 2:
    raise ValueError(f"glu: x {x.shape} has an odd extent {x.shape[axis]} along axis {axis}")

  def of_shard(x: Array) -> Array:
    shape = (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :])
    halves = x.reshape(math.prod(x.shape[:axis]), 2, math.prod(shape[axis:]))
    return _primitive.bind(gate_p, halves, kind=activation, gate_first=gate == "first").reshape(shape)

  others = tuple(d for d in range(x.ndim) if d != axis)
  like = tuple(d if d != axis else None for d in range(x.ndim))
  return _sharding.map_shards(of_shard, [x], keep=[others], out_like=(0, like))


@compiled
def swiglu(x: Array, axis: int = -1, *, gate: str = "first") -> Array:
  """`silu(a) b` for the two halves a, b of x: `glu` with 'silu', whose gate is by default the first half.

  Example:
    >>> jaxdnn.swiglu(jnp.array([[0.0, 2.0]]))
    Array([[0.]], dtype=float32)
  """
  return glu(x, axis, "silu", gate=gate)


@compiled
def geglu(x: Array, axis: int = -1, *, approximate: bool = True, gate: str = "first") -> Array:
  """`gelu(a) b` for the two halves a, b of x: `glu` with a gelu, whose gate is by default the first half.

  Args:
    x, axis, gate: as in `glu`.
    approximate: as in `gelu`.

  Example:
    >>> jaxdnn.geglu(jnp.array([[0.0, 2.0]]))
    Array([[0.]], dtype=float32)
  """
  return glu(x, axis, "gelu_tanh" if flag("geglu", "approximate", approximate) else "gelu", gate=gate)


@compiled
def reglu(x: Array, axis: int = -1, *, gate: str = "first") -> Array:
  """`relu(a) b` for the two halves a, b of x: `glu` with 'relu', whose gate is by default the first half.

  Example:
    >>> jaxdnn.reglu(jnp.array([[3.0, 2.0]]))
    Array([[6.]], dtype=float32)
  """
  return glu(x, axis, "relu", gate=gate)


# Reference -----------------------------------------------------------------------------------------------------------


def _halves(x: Array, gate_first: bool) -> tuple[Array, Array]:
  """The value and the gate, in the accumulator's type."""
  wide = x.astype(_primitive.accumulator_dtype(x.dtype))
  return wide[..., int(gate_first), :], wide[..., int(not gate_first), :]


def _apply(kind: str, gate: Array) -> tuple[Array, Array]:
  """The activation of the gate and its derivative."""
  if kind == "identity":
    return gate, jnp.ones_like(gate)
  row = ACTIVATIONS[kind]
  y = row.forward(gate)
  residual = {"input": gate, "output": y, "mask": gate if row.inside is None else row.inside(gate, row.parameter)}
  return y, row.scale(jnp.ones_like(gate), residual[row.residual], row.parameter)


def _forward_reference(x: Array, *, kind: str, gate_first: bool) -> Array:
  value, gate = _halves(x, gate_first)
  return (value * _apply(kind, gate)[0]).astype(x.dtype)


def _tangent_reference(t: Array, x: Array, *, kind: str, gate_first: bool) -> Array:
  value, gate = _halves(x, gate_first)
  dvalue, dgate = _halves(t, gate_first)
  y, slope = _apply(kind, gate)
  return (dvalue * y + value * slope * dgate).astype(t.dtype)


def _backward_reference(g: Array, x: Array, *, kind: str, gate_first: bool) -> Array:
  value, gate = _halves(x, gate_first)
  y, slope = _apply(kind, gate)
  wide = g.astype(value.dtype)
  parts = [wide * y, wide * value * slope]
  return jnp.stack(parts[::-1] if gate_first else parts, axis=-2).astype(g.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _down(x: Any, *_: Any, **__: Any) -> Any:
  return _primitive.out_aval(x, (*x.shape[:-2], x.shape[-1]))


def _up(g: Any, *_: Any, **__: Any) -> Any:
  return _primitive.out_aval(g, (*g.shape[:-1], 2, g.shape[-1]))


gate_p = _primitive.define(
  "gate", abstract_eval=_down, reference=_forward_reference, params=["kind", "gate_first"]
)
gate_jvp_p = _primitive.define(
  "gate_jvp", abstract_eval=_down, reference=_tangent_reference, params=["kind", "gate_first"]
)
gate_bwd_p = _primitive.define(
  "gate_bwd", abstract_eval=_up, reference=_backward_reference, params=["kind", "gate_first"]
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# gate      x    -> y
# gate_jvp  t, x -> the derivative at x along t
# gate_bwd  g, x -> dx
#
# The last two are each other's adjoint. The tangent map has no kernel: XLA fuses it with its surroundings.


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
  (x,), (t,) = primals, tangents
  y = _primitive.bind(gate_p, x, **params)
  return y, _primitive.zero_tangent(y) if _primitive.is_zero(t) else _tangent(t, x, **params)


def _tangent(t: Array, x: Array, **params: Any) -> Array:
  return _primitive.bind(gate_jvp_p, t, x, **params)


def _backward(g: Array, x: Array, **params: Any) -> Array:
  return _primitive.bind(gate_bwd_p, g, x, **params)


_primitive.set_jvp(gate_p, _jvp)
_primitive.linear_in_first(gate_jvp_p, _tangent_reference, transpose=_backward)
_primitive.linear_in_first(gate_bwd_p, _backward_reference, transpose=_tangent)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _attributes(*_: Any, kind: str, gate_first: bool) -> dict[str, Any]:
  parameter = 0.0 if kind == "identity" else ACTIVATIONS[kind].parameter
  return {"kind": kind, "parameter": float(parameter), "gate_first": gate_first}


for _p in (gate_p, gate_jvp_p, gate_bwd_p):
  _primitive.batch_leading(_p)
_primitive.set_shards(gate_p, "... . n -> ... n")
_primitive.set_shards(gate_bwd_p, "... n, ... . n -> ... . n")
for _p, _target, _reference in (
  (gate_p, "jaxdnn.gate.v1", _forward_reference),
  (gate_bwd_p, "jaxdnn.gate_bwd.v1", _backward_reference),
):
  # Rows are found by a 32-bit division, in chunks of eight or more.
  _primitive.lower_to_cuda(
    _p, _target, _reference, attributes=_attributes, supported=lambda x, *_, **__: 8 * x.shape[-1] < 1 << 31
  )
