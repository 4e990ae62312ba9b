"""Piecewise linear activations, and hard_swish. Derivatives at the kinks are those of jax.nn.

Each takes `bias`, one value for each index along `axis`: f(x + bias) in one pass, whose backward pass gives the
gradients of x and the bias in one as well.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._activation import channelwise
from jaxdnn._activation.apply import along_channels, apply, positive
from jaxdnn._arguments import array, floating, number
from jaxdnn._eager import compiled


@compiled
def relu(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Rectified linear unit, `max(x, 0)`.

  Args:
    x: floating-point array of any shape.
    bias: added to x first: one value for each index along `axis`, or None.
    axis: the dimension of x that `bias` belongs to.

  Returns:
    An array like `x`. NaN stays NaN. The derivative at 0, and at NaN, is 0. A bit an element is kept for it.

  Raises:
    TypeError: `x` or `bias` is not floating-point.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.relu(jnp.array([-1.0, 0.0, 2.0]))
    Array([0., 0., 2.], dtype=float32)
  """
  return apply("relu", x, None, bias, axis)


@compiled
def clipped_relu(x: Array, ceiling: float = 6.0, *, bias: Array | None = None, axis: int = -1) -> Array:
  """Rectified linear unit with a ceiling, `min(max(x, 0), ceiling)`.

  Args:
    x, bias, axis: as in `relu`.
    ceiling: the largest value, positive.

  Returns:
    An array like `x`. NaN stays NaN. The derivative is 1 inside, and 0 at 0, at the ceiling and at NaN; cuDNN's is 1
    at the ceiling.

  Raises:
    TypeError: `x` or `bias` is not floating-point, or `ceiling` is not a number.
    ValueError: `ceiling` is not positive, or `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.clipped_relu(jnp.array([-1.0, 0.5, 2.0]), 1.0)
    Array([0. , 0.5, 1. ], dtype=float32)
  """
  return apply("clipped_relu", x, positive("clipped_relu", "ceiling", ceiling), bias, axis)


@compiled
def relu6(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`clipped_relu` with a ceiling of 6.

  Example:
    >>> jaxdnn.relu6(jnp.array([-1.0, 3.0, 7.0]))
    Array([0., 3., 6.], dtype=float32)
  """
  return apply("clipped_relu", x, 6.0, bias, axis)


@compiled
def leaky_relu(
  x: Array, negative_slope: float = 0.01, *, bias: Array | None = None, axis: int = -1
) -> Array:
  """`x` where x >= 0, else `negative_slope * x`.

  Args:
    x, bias, axis: as in `relu`.
    negative_slope: a number; for a trained slope see `prelu`.

  Returns:
    An array like `x`. The derivative at 0 is 1, as in jax.nn; torch's is the slope.

  Raises:
    TypeError: `x` or `bias` is not floating-point, or `negative_slope` is not a number.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.leaky_relu(jnp.array([-1.0, 2.0]), 0.25)
    Array([-0.25,  2.  ], dtype=float32)
  """
  return apply("leaky_relu", x, number("leaky_relu", "negative_slope", negative_slope), bias, axis)


@compiled
def prelu(x: Array, alpha: Array | float, *, axis: int = -1) -> Array:
  """Parametric rectified linear unit: `x` where x >= 0, else `alpha * x`.

  Args:
    x: floating-point array of any shape.
    alpha: the slope below 0: a scalar, or one value for each index along `axis`. Differentiable: its gradient, the sum
      of g x over x < 0, comes out of the pass that makes the gradient of x.
    axis: the dimension of x that `alpha` belongs to.

  Returns:
    An array like `x`. The derivative at 0 is 1, as in `flax.linen.PReLU`; torch's is alpha.

  Raises:
    TypeError: `x` or `alpha` is not floating-point.
    ValueError: `alpha` is neither a scalar nor fits `axis`.

  Example:
    >>> jaxdnn.prelu(jnp.array([[-1.0, -1.0]]), jnp.array([0.5, 0.25]))
    Array([[-0.5 , -0.25]], dtype=float32)
  """
  x = floating("prelu", "x", x)
  slopes: Any = jnp.asarray(alpha, x.dtype) if isinstance(alpha, (int, float)) else array("prelu", "alpha", alpha)
  if slopes.ndim == 0:
    return along_channels("prelu", channelwise.PRELU, x[..., None], "alpha", slopes[None], -1)[..., 0]
  return along_channels("prelu", channelwise.PRELU, x, "alpha", slopes, axis)


@compiled
def hard_sigmoid(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`min(max(x + 3, 0), 6) / 6`.

  Args:
    x, bias, axis: as in `relu`.

  Returns:
    An array like `x`. The derivative is 1/6 inside, and 0 at -3, at 3 and at NaN.

  Raises:
    TypeError: `x` or `bias` is not floating-point.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.hard_sigmoid(jnp.array([-3.0, 0.0, 6.0]))
    Array([0. , 0.5, 1. ], dtype=float32)
  """
  return apply("hard_sigmoid", x, None, bias, axis)


@compiled
def hard_tanh(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`min(max(x, -1), 1)`.

  Args:
    x, bias, axis: as in `relu`.

  Returns:
    An array like `x`. The derivative at -1, at 1 and at NaN is 1, as in jax.nn; torch's at -1 and 1 is 0.

  Raises:
    TypeError: `x` or `bias` is not floating-point.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.hard_tanh(jnp.array([-3.0, 0.5, 6.0]))
    Array([-1. ,  0.5,  1. ], dtype=float32)
  """
  return apply("hard_tanh", x, None, bias, axis)


@compiled
def hard_swish(x: Array, *, bias: Array | None = None, axis: int = -1) -> Array:
  """`x * hard_sigmoid(x)`.

  Args:
    x, bias, axis: as in `relu`.

  Returns:
    An array like `x`. The derivative is 0 at -3 and 1 at 3.

  Raises:
    TypeError: `x` or `bias` is not floating-point.
    ValueError: `bias` does not fit `axis`.

  Example:
    >>> jaxdnn.hard_swish(jnp.array([-3.0, 3.0]))
    Array([-0.,  3.], dtype=float32)
  """
  return apply("hard_swish", x, None, bias, axis)


hard_silu = hard_swish
