"""Activations: elementwise nonlinear functions.

Each activation is one row of `ACTIVATIONS`. Forward and backward are one primitive each, with the function's name as
a static parameter; on a GPU both are one pass over memory at full vector width. The derivative is written as a
function of the *output*, so that the output is all that differentiation keeps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import _primitive, _sharding

# Public functions ----------------------------------------------------------------------------------------------------


def relu(x: Array) -> Array:
  """Rectified linear unit, `max(x, 0)`.

  Args:
    x: floating-point array of any shape.

  Returns:
    An array like `x`. NaN stays NaN. The derivative at 0, and at NaN, is 0.

  Raises:
    TypeError: `x` is not floating-point.

  Example:
    >>> jaxdnn.relu(jnp.array([-1.0, 0.0, 2.0]))
    Array([0., 0., 2.], dtype=float32)
  """
  return apply("relu", x)


def sigmoid(x: Array) -> Array:
  """Logistic sigmoid, `1 / (1 + exp(-x))`.

  Args:
    x: floating-point array of any shape.

  Returns:
    An array like `x`, in [0, 1], without overflow at either end. The derivative is `y (1 - y)`.

  Raises:
    TypeError: `x` is not floating-point.

  Example:
    >>> jaxdnn.sigmoid(jnp.array([0.0]))
    Array([0.5], dtype=float32)
  """
  return apply("sigmoid", x)


def tanh(x: Array) -> Array:
  """Hyperbolic tangent.

  Args:
    x: floating-point array of any shape.

  Returns:
    An array like `x`, in [-1, 1]. The derivative is `1 - y²`.

  Raises:
    TypeError: `x` is not floating-point.

  Example:
    >>> jaxdnn.tanh(jnp.array([0.0]))
    Array([0.], dtype=float32)
  """
  return apply("tanh", x)


def apply(kind: str, x: Array) -> Array:
  """The activation named `kind`, one of `ACTIVATIONS`."""
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{kind}: x must be floating-point, got {x.dtype}")
  every = tuple(range(x.ndim))
  return _sharding.map_shards(
    lambda x: _primitive.bind(activation_p, x, kind=kind), [x], keep=[every], out_like=(0, every)
  )


# Reference -----------------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
  """`forward(x)`, and `backward(g, y)`: `g` times the derivative, the latter as a function of the output `y`."""

  forward: Callable[[Array], Array]
  backward: Callable[[Array, Array], Array]


ACTIVATIONS = {
  # Selects rather than products: NaN must pass through relu, and a cotangent of inf must vanish where y is 0.
  "relu": Activation(lambda x: jnp.where(x <= 0, 0, x), lambda g, y: jnp.where(y > 0, g, 0)),
  "sigmoid": Activation(jax.lax.logistic, lambda g, y: g * (y * (1 - y))),
  "tanh": Activation(jax.lax.tanh, lambda g, y: g * (1 - y * y)),
}


def _forward_reference(x: Array, *, kind: str) -> Array:
  wide = _primitive.accumulator_dtype(x.dtype)
  return ACTIVATIONS[kind].forward(x.astype(wide)).astype(x.dtype)


def _backward_reference(g: Array, y: Array, *, kind: str) -> Array:
  wide = _primitive.accumulator_dtype(g.dtype)
  return ACTIVATIONS[kind].backward(g.astype(wide), y.astype(wide)).astype(g.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _abstract(x: Any, *_: Any, kind: str) -> Any:
  return _primitive.out_aval(x, x.shape)


activation_p = _primitive.define("activation", abstract_eval=_abstract, reference=_forward_reference, params=["kind"])
activation_bwd_p = _primitive.define(
  "activation_bwd", abstract_eval=_abstract, reference=_backward_reference, params=["kind"]
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# activation      x    -> y
# activation_bwd  g, y -> g f'(y)
#
# The Jacobian is diagonal, hence symmetric: activation_bwd is the tangent map, the cotangent map, and its own adjoint.


def _jvp(primals: Any, tangents: Any, *, kind: str) -> Any:
  y = _primitive.bind(activation_p, *primals, kind=kind)
  (t,) = tangents
  return y, _primitive.zero_tangent(y) if _primitive.is_zero(t) else _backward(t, y, kind=kind)


def _backward(g: Array, y: Array, *, kind: str) -> Array:
  return _primitive.bind(activation_bwd_p, g, y, kind=kind)


_primitive.set_jvp(activation_p, _jvp)
_primitive.linear_in_first(activation_bwd_p, _backward_reference, transpose=_backward)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------

for _p, _target, _reference in (
  (activation_p, "jaxdnn.activation.v1", _forward_reference),
  (activation_bwd_p, "jaxdnn.activation_bwd.v1", _backward_reference),
):
  _primitive.batch_leading(_p)
  _primitive.lower_to_cuda(_p, _target, _reference, attributes=lambda *_, kind: {"kind": kind})
