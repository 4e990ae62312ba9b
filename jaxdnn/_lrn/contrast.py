"""Local contrast normalization, built from average pooling."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from jaxdnn._eager import compiled
from jaxdnn._lrn.window import checked, finite, spatial, widen
from jaxdnn._pool import avg_pool


@compiled
def local_contrast_norm(
  x: Array,
  size: int | Sequence[int] = 9,
  *,
  epsilon: float = 1e-4,
  axis: int = -1,
  across_channels: bool = True,
) -> Array:
  """Local contrast normalization: `v = x - mean(x)`, then `v / max(c, sigma(v))`, both over a box around each element.

  As in Jarrett, Kavukcuoglu, Ranzato and LeCun, "What is the best multi-stage architecture for object recognition?",
  2009: `sigma(v)` is the root of the box's mean of `v²`, and `c` the mean of `sigma` over the image, so that what is
  flatter than the image's average is not blown up.

  Args:
    x: floating-point array of rank 3 or more. 16-bit floats are computed in float32.
    size: the box's extent, as in `divisive_norm`. The box is centred; of an even `size` the odd cell lies after.
    epsilon: the least divisor, positive: an image without any contrast gives 0.
    axis: the dimension of the channels.
    across_channels: True: a box holds all channels of its positions, as in the paper. False: each channel is
      normalised by itself.

  Returns:
    An array like `x`. The means are over the cells of a box that lie inside the image.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument out of range, or an `x` sharded along a spatial dimension.

  Example:
    >>> jaxdnn.local_contrast_norm(jnp.array([[[1.0], [1.0], [5.0], [5.0]]]), 3).ravel()
    Array([ 0.       , -1.2247449,  1.2247448,  0.       ], dtype=float32)
  """
  op = "local_contrast_norm"
  x, axis = checked(op, x, axis)
  axes, window = spatial(op, size, axis, x.ndim)
  least = finite(op, "epsilon", epsilon)
  if least <= 0:
    raise ValueError(f"{op}: epsilon must be positive, got {epsilon}")
  wide = jnp.moveaxis(widen(x), axis, -1)
  image = tuple(range(wide.ndim - 1 - len(axes), wide.ndim - 1))

  def box_mean(v: Array) -> Array:
    v = v.mean(-1, keepdims=True) if across_channels else v
    return avg_pool(v, window, padding="SAME", count_include_pad=False)

  v = wide - box_mean(wide)
  variance = box_mean(v * v)
  # The root has no derivative at 0: there sigma is below any divisor.
  some = variance > 0
  sigma = jnp.where(some, jnp.sqrt(jnp.where(some, variance, jnp.ones_like(variance))), jnp.zeros_like(variance))
  divisor = jnp.maximum(jnp.maximum(sigma, sigma.mean(image, keepdims=True)), jnp.asarray(least, wide.dtype))
  return jnp.moveaxis(v / divisor, -1, axis).astype(x.dtype)


