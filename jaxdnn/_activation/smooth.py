"""Smooth activations. Derivatives are closed forms, exact to a few roundings in both tails.

Each takes `bias` and `axis` as the piecewise linear ones do, and raises alike: TypeError where `x` or `bias` is not
floating-point or a parameter is not a number, ValueError where `bias` does not fit `axis`.
"""

from jax import Array

from jaxdnn._activation.apply import apply, positive
from jaxdnn._arguments import flag, number
from jaxdnn._eager import compiled


@compiled
def sigmoid(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Logistic sigmoid, `1 / (1 + exp(-x))`.

  Args:
    x: floating-point array of any shape.
    bias: added to x first: one value for each index along `axis`, or None.
    axis: the dimension of x that `bias` belongs to.

  Returns:
    An array like `x`, in [0, 1], without overflow at either end. The derivative is `y (1 - y)`, from the output.

  Raises:
    TypeError: `x` or `bias` is not floating-point.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.sigmoid(jnp.array([0.0]))
    Array([0.5], dtype=float32)
  """
  return apply("sigmoid", x, None, bias, axis)


@compiled
def tanh(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Hyperbolic tangent. The derivative is `1 - y²`, from the output; the rest as in `sigmoid`.

  Example:
    >>> jaxdnn.tanh(jnp.array([0.0]))
    Array([0.], dtype=float32)
  """
  return apply("tanh", x, None, bias, axis)


@compiled
def elu(x: Array, alpha: float = 1.0, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Exponential linear unit: `x` where x > 0, else `alpha (exp(x) - 1)`.

  Args:
    x, bias, axis: as in `sigmoid`.
    alpha: a number.

  Returns:
    An array like `x`. The derivative at 0 is alpha, as in jax.nn and torch; cuDNN's is 1. It does not vanish before
    `alpha exp(x)` does.

  Raises:
    TypeError: `x` or `bias` is not floating-point, or `alpha` is not a number.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.elu(jnp.array([-100.0, 2.0]))
    Array([-1.,  2.], dtype=float32)
  """
  return apply("elu", x, number("elu", "alpha", alpha), bias, axis)


@compiled
def celu(x: Array, alpha: float = 1.0, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Continuously differentiable exponential linear unit: `x` where x > 0, else `alpha (exp(x / alpha) - 1)`.

  Args:
    x, bias, axis: as in `sigmoid`.
    alpha: a positive number.

  Returns:
    An array like `x`. The derivative at 0 is 1.

  Raises:
    TypeError: `x` or `bias` is not floating-point, or `alpha` is not a number.
    ValueError: `alpha` is not positive, or `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.celu(jnp.array([-100.0, 2.0]), 2.0)
    Array([-2.,  2.], dtype=float32)
  """
  return apply("celu", x, positive("celu", "alpha", alpha), bias, axis)


@compiled
def selu(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Self-normalizing exponential linear unit, `1.0507 elu(x, 1.6733)`; the rest as in `elu`.

  Example:
    >>> jaxdnn.selu(jnp.array([1.0]))
    Array([1.050701], dtype=float32)
  """
  return apply("selu", x, None, bias, axis)


@compiled
def softplus(x: Array, beta: float = 1.0, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`log(1 + exp(beta x)) / beta`.

  Args:
    x, bias, axis: as in `sigmoid`.
    beta: a positive number; jax.nn has 1. There is no threshold past which it turns linear, as torch has: it is
      exact at both ends.

  Returns:
    An array like `x`. The derivative is `sigmoid(beta x)`.

  Raises:
    TypeError: `x` or `bias` is not floating-point, or `beta` is not a number.
    ValueError: `beta` is not positive, or `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.softplus(jnp.array([100.0]))
    Array([100.], dtype=float32)
  """
  return apply("softplus", x, positive("softplus", "beta", beta), bias, axis)


@compiled
def log_sigmoid(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`log(sigmoid(x))`, exact at both ends; the rest as in `sigmoid`.

  Example:
    >>> jaxdnn.log_sigmoid(jnp.array([-100.0]))
    Array([-100.], dtype=float32)
  """
  return apply("log_sigmoid", x, None, bias, axis)


@compiled
def silu(x: Array, beta: float = 1.0, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Sigmoid-weighted linear unit or swish, `x sigmoid(beta x)`.

  Args:
    x, bias, axis: as in `sigmoid`.
    beta: a number; jax.nn and torch have 1, cuDNN's swish takes it.

  Returns:
    An array like `x`. The derivative does not underflow before `exp(beta x)` does.

  Raises:
    TypeError: `x` or `bias` is not floating-point, or `beta` is not a number.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.silu(jnp.array([0.0, 100.0]))
    Array([  0., 100.], dtype=float32)
  """
  return apply("silu", x, number("silu", "beta", beta), bias, axis)


swish = silu


@compiled
def gelu(x: Array, approximate: bool = True, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Gaussian error linear unit: x times the standard normal distribution function.

  Args:
    x, bias, axis: as in `sigmoid`.
    approximate: whether the distribution function is approximated by a tanh, which is jax.nn's default; torch's is the
      exact one, `approximate=False`. The two differ by up to 5e-4.

  Returns:
    An array like `x`.

  Raises:
    TypeError: `x` or `bias` is not floating-point.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.gelu(jnp.array([1.0]), approximate=False)
    Array([0.8413447], dtype=float32)
  """
  return apply("gelu_tanh" if flag("gelu", "approximate", approximate) else "gelu", x, None, bias, axis)


@compiled
def mish(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`x tanh(softplus(x))`; the rest as in `sigmoid`.

  Example:
    >>> jaxdnn.mish(jnp.array([0.0, 100.0]))
    Array([  0., 100.], dtype=float32)
  """
  return apply("mish", x, None, bias, axis)


@compiled
def soft_sign(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`x / (1 + |x|)`; the rest as in `sigmoid`.

  Example:
    >>> jaxdnn.soft_sign(jnp.array([-1.0, 3.0]))
    Array([-0.5 ,  0.75], dtype=float32)
  """
  return apply("soft_sign", x, None, bias, axis)


softsign = soft_sign


@compiled
def squareplus(x: Array, b: float = 4.0, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`(x + sqrt(x² + b)) / 2`, without cancellation below 0.

  Args:
    x, bias, axis: as in `sigmoid`.
    b: a positive number: how smooth it is around 0.

  Returns:
    An array like `x`.

  Raises:
    TypeError: `x` or `bias` is not floating-point, or `b` is not a number.
    ValueError: `b` is not positive, or `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.squareplus(jnp.array([0.0]))
    Array([1.], dtype=float32)
  """
  return apply("squareplus", x, positive("squareplus", "b", b), bias, axis)
