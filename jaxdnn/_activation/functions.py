"""The activations as functions, one row of a table each, in plain jnp.

They are the reference path of every kernel that applies an activation, and what second derivatives go through.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

Function = Callable[[Array, Any], Array]


class Activation(NamedTuple):
  """A function of x and a static parameter p, and its derivative as a function of what is kept of the forward pass.

  Attributes:
    function: `(x, p)` to y.
    residual: what differentiation keeps: the "input", the "output", or, of a function with two slopes, a "mask".
    derivative: `(input or output, p)` to f'.
    inside: `(x, p)` to the mask: where the first of the two slopes holds.
    slopes: `p` to the slopes inside and outside.
    parameter: the default of p.
  """

  function: Function
  residual: Literal["input", "output", "mask"]
  derivative: Function | None = None
  inside: Function | None = None
  slopes: Callable[[float], tuple[float, float]] | None = None
  parameter: float = 0.0

  def forward(self, x: Array, parameter: float | None = None) -> Array:
    return self.function(x, self.parameter if parameter is None else parameter)

  def scale(self, g: Array, residual: Array, parameter: float) -> Array:
    """`g` times the derivative; of a mask, the residual is a boolean an element."""
    if self.derivative is not None:
      return g * self.derivative(residual, parameter)
    assert self.slopes is not None
    # A slope of 0 is a switch, not a factor: an infinite cotangent of a unit that is off vanishes.
    inside, outside = (jnp.zeros_like(g) if slope == 0 else slope * g for slope in self.slopes(parameter))
    return jnp.where(residual, inside, outside)

  def mask(self, x: Array, parameter: float, rank: int) -> Array:
    """Whether each element is inside, a bit each, packed over the last `rank` dimensions together."""
    assert self.inside is not None
    bits = self.inside(x, parameter).reshape(*x.shape[: x.ndim - rank], math.prod(x.shape[x.ndim - rank :]))
    return jnp.packbits(bits, axis=-1, bitorder="little")


def mask_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
  lead = len(shape) - rank
  return (*shape[:lead], -(-math.prod(shape[lead:]) // 8))


def mask_rule(shape: tuple[int, ...], rank: int) -> tuple[str, str]:
  """How an array of this shape and its mask may be divided: along dimensions before the last `rank`, each of which has
  bytes of its own, and along the first of these where that cuts no byte."""
  cut = "n" if rank and math.prod(shape[len(shape) - rank + 1 :]) % 8 == 0 else "."
  return f"... {' '.join([cut, *'.' * (rank - 1)]) if rank else ''}", f"... {cut}"


def unpack(mask: Array, shape: tuple[int, ...], rank: int) -> Array:
  """The booleans of a mask of an array of this shape."""
  count = math.prod(shape[len(shape) - rank :])
  return jnp.unpackbits(mask, axis=-1, count=count, bitorder="little").reshape(shape).astype(bool)


# The pieces ----------------------------------------------------------------------------------------------------------

SELU_SCALE = 1.0507009873554804934193349852946
SELU_ALPHA = 1.6732632423543772848170429916717
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR


def negative_part(x: Array) -> Array:
  """min(x, 0) with derivative 1 at 0: what is exponentiated where x > 0 is not chosen must not overflow."""
  return jnp.where(x > 0, 0, x)


def elu(scale: float, alpha: float, width: float) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
  """The family of elu, celu and selu, and its derivative: not from the output, which rounds to -scale alpha."""

  def forward(x: Array) -> Array:
    return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(negative_part(x) / width))

  def derivative(x: Array) -> Array:
    return jnp.where(x > 0, scale, scale * alpha / width * jnp.exp(negative_part(x) / width))

  return forward, derivative


def softplus(x: Array, beta: float = 1.0) -> Array:
  # From 128 on it is x to a rounding, and beta x may be infinite.
  large = beta * x > 128
  return jnp.where(large, x, jnp.logaddexp(jnp.where(large, 0, beta * x), 0) / beta)


def silu_derivative(x: Array, beta: float) -> Array:
  # 1 - sigmoid(z) as sigmoid(-z), which does not cancel. Far out one of them is 0, and z must not be infinite.
  z = jnp.clip(beta * x, -1024, 1024)
  return lax.logistic(z) * (1 + z * lax.logistic(-z))


def hard_sigmoid(x: Array) -> Array:
  return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, (x + 3) / 6))


def hard_swish_derivative(x: Array) -> Array:
  return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, (2 * x + 3) / 6))


def normal_cdf(x: Array) -> Array:
  return lax.erfc(-math.sqrt(0.5) * x) / 2


def gelu_derivative(x: Array) -> Array:
  return normal_cdf(x) + x * jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh(x: Array) -> Array:
  # (1 + tanh u) / 2 is sigmoid(2 u), which does not cancel below 0.
  return x * lax.logistic(x * (GELU_LINEAR + GELU_CUBIC * x * x))


def gelu_tanh_derivative(x: Array) -> Array:
  # From 24 on it is 0 or 1, and farther out the cube would overflow.
  x = jnp.clip(x, -24, 24)
  u = x * (GELU_LINEAR + GELU_CUBIC * x * x)
  return lax.logistic(u) * (1 + x * (GELU_LINEAR + 3 * GELU_CUBIC * x * x) * lax.logistic(-u))


def mish(x: Array) -> Array:
  # tanh(log(1 + e^x)) as a ratio of polynomials in e^-|x|, which neither overflows nor cancels.
  e = jnp.exp(-jnp.abs(x))
  above, below = 1 + 2 * e, e * (e + 2)
  return x * jnp.where(x > 0, above / (above + 2 * e * e), below / (below + 2))


def mish_derivative(x: Array) -> Array:
  # 1 - tanh² of s as a product of sigmoids, which does not cancel. From 24 on the derivative is 1 to a rounding.
  x = jnp.clip(x, -1024, 24)
  s = softplus(x)
  return jnp.tanh(s) + 4 * x * lax.logistic(2 * s) * lax.logistic(-2 * s) * lax.logistic(x)


def squareplus_root(x: Array, b: float) -> Array:
  # Past 2^60 the square would overflow, and b is less than a rounding.
  large = abs(x) > 2.0**60
  return jnp.where(large, abs(x), jnp.sqrt(jnp.where(large, 0, x * x) + b))


def squareplus(x: Array, b: float) -> Array:
  # Below 0 the sum of x and the root cancels; b over their difference is the same number.
  root = squareplus_root(x, b)
  return jnp.where(x > 0, x / 2 + root / 2, b / 2 / (root - negative_part(x)))


def squareplus_derivative(x: Array, b: float) -> Array:
  low = jnp.where(x > 0, -x, x)
  root = squareplus_root(low, b)
  below = b / 2 / root / (root - low)
  return jnp.where(x > 0, 1 - below, below)


# The table -----------------------------------------------------------------------------------------------------------

SELU, SELU_DERIVATIVE = elu(SELU_SCALE, SELU_ALPHA, 1.0)

# Comparisons are such that NaN passes through. At a kink the derivative is jax.nn's, which the masks state.
ACTIVATIONS = {
  "relu": Activation(
    lambda x, _: jnp.where(x <= 0, 0, x), "mask", inside=lambda x, _: x > 0, slopes=lambda _: (1, 0)
  ),
  "clipped_relu": Activation(
    lambda x, p: jnp.where(x <= 0, 0, jnp.where(x >= p, p, x)),
    "mask",
    inside=lambda x, p: (x > 0) & (x < p),
    slopes=lambda _: (1, 0),
    parameter=6.0,
  ),
  "leaky_relu": Activation(
    lambda x, p: jnp.where(x >= 0, x, p * x),
    "mask",
    inside=lambda x, _: x >= 0,
    slopes=lambda p: (1, p),
    parameter=0.01,
  ),
  "hard_sigmoid": Activation(
    lambda x, _: hard_sigmoid(x), "mask", inside=lambda x, _: (x > -3) & (x < 3), slopes=lambda _: (1 / 6, 0)
  ),
  "hard_tanh": Activation(
    lambda x, _: jnp.where(x > 1, 1, jnp.where(x < -1, -1, x)),
    "mask",
    inside=lambda x, _: ~((x > 1) | (x < -1)),
    slopes=lambda _: (1, 0),
  ),
  "sigmoid": Activation(lambda x, _: lax.logistic(x), "output", lambda y, _: y * (1 - y)),
  "tanh": Activation(lambda x, _: jnp.tanh(x), "output", lambda y, _: (1 - y) * (1 + y)),
  "elu": Activation(lambda x, p: elu(1, p, 1)[0](x), "input", lambda x, p: elu(1, p, 1)[1](x), parameter=1.0),
  "celu": Activation(lambda x, p: elu(1, p, p)[0](x), "input", lambda x, p: elu(1, p, p)[1](x), parameter=1.0),
  "selu": Activation(lambda x, _: SELU(x), "input", lambda x, _: SELU_DERIVATIVE(x)),
  "softplus": Activation(softplus, "input", lambda x, p: lax.logistic(p * x), parameter=1.0),
  "log_sigmoid": Activation(lambda x, _: -softplus(-x), "input", lambda x, _: lax.logistic(-x)),
  "silu": Activation(lambda x, p: x * lax.logistic(p * x), "input", silu_derivative, parameter=1.0),
  "hard_swish": Activation(lambda x, _: x * hard_sigmoid(x), "input", lambda x, _: hard_swish_derivative(x)),
  "gelu": Activation(lambda x, _: x * normal_cdf(x), "input", lambda x, _: gelu_derivative(x)),
  "gelu_tanh": Activation(lambda x, _: gelu_tanh(x), "input", lambda x, _: gelu_tanh_derivative(x)),
  "mish": Activation(lambda x, _: mish(x), "input", lambda x, _: mish_derivative(x)),
  "soft_sign": Activation(lambda x, _: x / (1 + abs(x)), "input", lambda x, _: 1 / (1 + abs(x)) ** 2),
  "squareplus": Activation(squareplus, "input", squareplus_derivative, parameter=4.0),
}
