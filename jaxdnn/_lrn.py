"""Local response, divisive and local contrast normalization: every value divided by the energy of its neighbourhood.

    y = c D^-beta      D = k + a S(c²)      c = x - m

S sums over a window around each element, which is cut off at the borders: along the channels (local response
normalization across channels, a = alpha / size) or over a box of the spatial dimensions of one channel (within
channel, and with given means m divisive normalization; a = alpha / size^d, at the borders too).

The primitives work on [..., *spatial, inner] with one to three spatial dimensions, so that the channels are one when
the window runs along them: neither layout moves any data. On a GPU each is one pass over memory. Differentiation
keeps x alone: D costs less to compute again than to read.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _primitive, _sharding
from jaxdnn._arguments import per_dimension
from jaxdnn._pool import avg_pool

# Public functions ----------------------------------------------------------------------------------------------------


def local_response_norm(
  x: Array,
  size: int | Sequence[int] = 5,
  *,
  alpha: float = 1e-4,
  beta: float = 0.75,
  k: float = 2.0,
  mode: str = "across_channels",
  axis: int = -1,
  divide_by_size: bool = True,
  padding: str = "SAME",
) -> Array:
  """Local response normalization, `x / (k + alpha * mean(x²))^beta` with the mean over a window around each element.

  The defaults are cuDNN's and AlexNet's. PyTorch has `k=1` and `padding="SAME_LOWER"`. TensorFlow's `depth_radius`,
  `bias` and `alpha` are `size=2 * depth_radius + 1`, `k=bias` and `divide_by_size=False`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    size: the window's extent. Across channels an integer. Within a channel an integer for every spatial dimension, or
      1 to 3 integers for as many last dimensions besides the channels.
    alpha: the weight of the window's energy, not negative.
    beta: the exponent.
    k: what is added to the energy, not negative.
    mode: "across_channels": the window runs along `axis`. "within_channel": it is a box in the spatial dimensions, all
      but `axis` and the first unless `size` says which.
    axis: the dimension of the channels.
    divide_by_size: True: a mean, the sum over the window divided by the number of its cells, at the borders too.
      False: the sum itself.
    padding: where the odd cell of an even `size` goes: "SAME" after the element (cuDNN, `lax`), "SAME_LOWER" before it
      (PyTorch).

  Returns:
    An array like `x`. NaN reaches the elements whose window holds it, and so does infinity, as 0, or NaN for itself.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument out of range, or an `x` sharded along a dimension of the window.

  Example:
    >>> jaxdnn.local_response_norm(jnp.array([1.0, 2.0, 2.0]), 3, alpha=3.0, beta=0.5, k=0.0)
    Array([0.44721362, 0.6666667 , 0.70710677], dtype=float32)
  """
  op = "local_response_norm"
  x, axis = _checked(op, x, axis)
  axes: tuple[int, ...]
  if mode == "across_channels":
    try:
      axes, extents = (axis,), per_dimension(op, "size", operator.index(size), 1)  # type: ignore[arg-type]
    except TypeError:
      raise TypeError(f"{op}: size must be an integer across channels, got {size!r}") from None
  elif mode == "within_channel":
    axes, extents = _spatial(op, size, axis, x.ndim)
  else:
    raise ValueError(f"{op}: mode must be 'across_channels' or 'within_channel', got {mode!r}")
  response = _response(op, extents, alpha, beta, k, padding, divide_by_size)
  return _apply(op, [x], axes, axis, response)


def divisive_norm(
  x: Array,
  means: Array | None = None,
  *,
  size: int | Sequence[int] = 5,
  alpha: float = 1e-4,
  beta: float = 0.75,
  k: float = 2.0,
  axis: int = -1,
  padding: str = "SAME",
) -> Array:
  """Divisive normalization, `(x - means) / (k + alpha * mean((x - means)²))^beta`, the mean over a box around each.

  What cuDNN's `cudnnDivisiveNormalizationForward` computes. With `means` the average or a Gaussian blur of `x` it is
  local contrast normalization; the gradient with respect to `means` then flows on through that.

  Args:
    x: floating-point array of rank 2 or more. 16-bit floats are computed in float32.
    means: an array of `x`'s type that broadcasts to its shape. They need not be means. None is zeros.
    size: the box's extent: an integer for every dimension but `axis` and the first, or 1 to 3 integers for as many
      last dimensions besides the channels.
    alpha: the weight of the box's energy, not negative.
    beta: the exponent.
    k: what is added to the energy, not negative.
    axis: the dimension of the channels, each of which is normalised by itself.
    padding: as in `local_response_norm`.

  Returns:
    An array like `x`. The sum over a box is divided by the number of its cells, at the borders too, where some of them
    lie outside.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument out of range, or an `x` sharded along a spatial dimension.

  Example:
    >>> x = jnp.array([[[1.0], [2.0], [4.0]]])
    >>> jaxdnn.divisive_norm(x, x - 1, size=3, alpha=3.0, beta=1.0, k=1.0)
    Array([[[0.33333334],
            [0.25      ],
            [0.33333334]]], dtype=float32)
  """
  op = "divisive_norm"
  x, axis = _checked(op, x, axis)
  axes, extents = _spatial(op, size, axis, x.ndim)
  response = _response(op, extents, alpha, beta, k, padding, True)
  if means is None:
    return _apply(op, [x], axes, axis, response)
  means = jnp.asarray(means)
  if means.dtype != x.dtype:
    raise TypeError(f"{op}: means must be of x's type {x.dtype}, got {means.dtype}")
  if means.ndim > x.ndim or any(m not in (1, d) for m, d in zip(means.shape[::-1], x.shape[::-1], strict=False)):
    raise ValueError(f"{op}: means of shape {means.shape} do not broadcast to x of shape {x.shape}")
  return _apply(op, [x, _like(means, x)], axes, axis, response)


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
  x, axis = _checked(op, x, axis)
  axes, window = _spatial(op, size, axis, x.ndim)
  least = _number(op, "epsilon", epsilon)
  if least <= 0:
    raise ValueError(f"{op}: epsilon must be positive, got {epsilon}")
  wide = jnp.moveaxis(_widen(x), axis, -1)
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


class Response(NamedTuple):
  """The static parameter of every primitive."""

  window: tuple[tuple[int, int], ...]
  """Cells before and after the element, per spatial dimension."""
  scale: float
  """What the sum over the window is multiplied by."""
  beta: float
  k: float


def _checked(op: str, x: Any, axis: Any) -> tuple[Array, int]:
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{op}: x must be floating-point, got {x.dtype}")
  try:
    channels = operator.index(axis)
  except TypeError:
    raise TypeError(f"{op}: axis must be an integer, got {axis!r}") from None
  if not -x.ndim <= channels < x.ndim:
    raise ValueError(f"{op}: axis must name an axis of an array of rank {x.ndim}, got {axis}")
  return x, channels % x.ndim


def _spatial(op: str, size: Any, axis: int, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The spatial dimensions, and the window's extent along each."""
  others = [d for d in range(ndim) if d != axis]
  rank = len(others) - 1 if np.ndim(size) == 0 else len(size)
  if not 1 <= rank <= 3 or rank > len(others):
    what = f"size {size!r} for all dimensions but the first and the channels" if np.ndim(size) == 0 else f"size {size}"
    raise ValueError(f"{op}: {what} must name 1 to 3 spatial dimensions, got an array of rank {ndim}")
  return tuple(others[len(others) - rank :]), per_dimension(op, "size", size, rank)


def _number(op: str, name: str, value: Any) -> float:
  try:
    number = float(value)
  except (TypeError, ValueError) as e:
    raise TypeError(f"{op}: {name} must be a number, got {value!r}") from e
  if not math.isfinite(number):
    raise ValueError(f"{op}: {name} must be finite, got {value}")
  return number


def _response(
  op: str, extents: tuple[int, ...], alpha: Any, beta: Any, k: Any, padding: Any, divide: bool
) -> Response:
  alpha, beta, k = (_number(op, name, v) for name, v in (("alpha", alpha), ("beta", beta), ("k", k)))
  if alpha < 0 or k < 0:
    raise ValueError(f"{op}: alpha and k must not be negative, got alpha={alpha} and k={k}")
  if padding not in ("SAME", "SAME_LOWER"):
    raise ValueError(f"{op}: padding must be 'SAME' or 'SAME_LOWER', got {padding!r}")
  window = tuple(((n - 1) // 2, n // 2) if padding == "SAME" else (n // 2, (n - 1) // 2) for n in extents)
  return Response(window, alpha / math.prod(extents) if divide else alpha, beta, k)


def _like(means: Array, x: Array) -> Array:
  """`means` in the shape of `x`, and sharded like it over explicit mesh axes."""
  means = jnp.broadcast_to(means, x.shape)
  sharding = jax.typeof(x).sharding
  return means if jax.typeof(means).sharding.spec == sharding.spec else jax.sharding.reshard(means, sharding)


def _apply(op: str, operands: list[Array], axes: tuple[int, ...], channels: int, response: Response) -> Array:
  every = tuple(range(operands[0].ndim))
  free = tuple(d for d in every if d not in axes)
  return _sharding.map_shards(
    lambda *operands: _grouped(operands, axes, channels, response),
    operands,
    keep=[free] * len(operands),
    out_like=(0, every),
  )


def _grouped(operands: Sequence[Array], axes: tuple[int, ...], channels: int, response: Response) -> Array:
  """Binds lrn_p with `axes` as its spatial dimensions. Only channels that lie between them must move."""
  if axes[-1] - axes[0] != len(axes) - 1:
    moved = tuple(a - (a > channels) for a in axes)
    last = _grouped([jnp.moveaxis(x, channels, -1) for x in operands], moved, operands[0].ndim - 1, response)
    return jnp.moveaxis(last, -1, channels)
  shape = operands[0].shape
  # No window reaches past the array, and dimensions of windows of one cell are like any other at either end.
  cells = [
    (min(before, max(shape[a] - 1, 0)), min(after, max(shape[a] - 1, 0)))
    for a, (before, after) in zip(axes, response.window, strict=True)
  ]
  coupled = [i for i, cell in enumerate(cells) if cell != (0, 0)] or [0]
  start, stop = axes[coupled[0]], axes[coupled[-1]] + 1
  response = response._replace(window=tuple(cells[coupled[0] : coupled[-1] + 1]))
  view = (*shape[:stop], math.prod(shape[stop:]))
  assert stop - start == len(response.window)
  y: Array = _primitive.bind(lrn_p, *(x.reshape(view) for x in operands), response=response)
  return y.reshape(shape)


# Reference -----------------------------------------------------------------------------------------------------------


def _widen(x: Array) -> Array:
  return x.astype(_primitive.accumulator_dtype(x.dtype))


def _window_sum(v: Array, response: Response, *, adjoint: bool = False) -> Array:
  """The sum over each element's window; the adjoint's window is the mirrored one."""
  rank = len(response.window)
  padding = [(after, before) if adjoint else (before, after) for before, after in response.window]
  window = [before + after + 1 for before, after in padding]
  lead = v.ndim - rank - 1
  zero = np.zeros((), v.dtype)
  return lax.reduce_window(
    v, zero, lax.add, (*[1] * lead, *window, 1), (1,) * v.ndim, (*[(0, 0)] * lead, *padding, (0, 0))
  )


def _centred(x: Array, *means: Array) -> Array:
  return _widen(x) - _widen(means[0]) if means else _widen(x)


def _powers(c: Array, response: Response) -> tuple[Array, Array]:
  """D^-beta, and 2 a beta D^(-beta - 1)."""
  d = jnp.asarray(response.k, c.dtype) + jnp.asarray(response.scale, c.dtype) * _window_sum(c * c, response)
  p = lax.pow(d, jnp.asarray(-response.beta, c.dtype))
  return p, jnp.asarray(2 * response.scale * response.beta, c.dtype) * p / d


def _reference(x: Array, *means: Array, response: Response) -> Array:
  c = _centred(x, *means)
  return (c * _powers(c, response)[0]).astype(x.dtype)


def _jvp_reference(t: Array, x: Array, *means: Array, response: Response) -> Array:
  c, wt = _centred(x, *means), _widen(t)
  p, q = _powers(c, response)
  return (wt * p - q * c * _window_sum(c * wt, response)).astype(t.dtype)


def _vjp_reference(g: Array, x: Array, *means: Array, response: Response) -> Array:
  c, wg = _centred(x, *means), _widen(g)
  p, q = _powers(c, response)
  return (wg * p - c * _window_sum(q * c * wg, response, adjoint=True)).astype(g.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _abstract(x: Any, *_: Any, response: Response) -> Any:
  return _primitive.out_aval(x, x.shape)


lrn_p = _primitive.define("lrn", abstract_eval=_abstract, reference=_reference, params=["response"])
lrn_jvp_p = _primitive.define("lrn_jvp", abstract_eval=_abstract, reference=_jvp_reference, params=["response"])
lrn_vjp_p = _primitive.define("lrn_vjp", abstract_eval=_abstract, reference=_vjp_reference, params=["response"])

# Differentiation -----------------------------------------------------------------------------------------------------
#
# lrn      x, m    -> c D^-beta                                   c = x - m
# lrn_jvp  t, x, m -> D^-beta t - q c S(c t)                      q = 2 a beta D^(-beta - 1)
# lrn_vjp  g, x, m -> D^-beta g - c S'(q c g)
#
# S' sums over the mirrored window, so the last two are each other's adjoint. They are maps of the tangent of c: its
# difference from those of x and m is JAX's, whose transpose gives the cotangent of m, the negative of that of x.


def _jvp(primals: Any, tangents: Any, *, response: Response) -> Any:
  y = _primitive.bind(lrn_p, *primals, response=response)
  moving = [t if i == 0 else -t for i, t in enumerate(tangents) if not _primitive.is_zero(t)]
  if not moving:
    return y, _primitive.zero_tangent(y)
  t = moving[0] if len(moving) == 1 else tangents[0] - tangents[1]
  return y, _tangent_map(t, *primals, response=response)


def _tangent_map(t: Array, *residuals: Array, response: Response) -> Any:
  return _primitive.bind(lrn_jvp_p, t, *residuals, response=response)


def _cotangent_map(g: Array, *residuals: Array, response: Response) -> Any:
  return _primitive.bind(lrn_vjp_p, g, *residuals, response=response)


_primitive.set_jvp(lrn_p, _jvp)
_primitive.linear_in_first(lrn_jvp_p, _jvp_reference, transpose=_cotangent_map)
_primitive.linear_in_first(lrn_vjp_p, _vjp_reference, transpose=_tangent_map)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _attributes(*_: Any, response: Response) -> dict[str, Any]:
  before, after = zip(*response.window, strict=True)
  numbers = {"scale": response.scale, "beta": response.beta, "k": response.k}
  return {"before": np.asarray(before, np.int64), "after": np.asarray(after, np.int64)} | {
    name: np.float64(v) for name, v in numbers.items()
  }


def _held(x: Any, *means: Any, response: Response) -> bool:
  """Whether kernels hold the window in registers. Where they do not, the adjoint takes two passes."""
  (before, after), *more = response.window
  if means or more:
    return False
  return max(before, after) <= 8 if x.shape[-1] == 1 else before == after <= 3


def _scratch(g: Any, *residuals: Any, response: Response) -> int:
  held = _held(*residuals, response=response)
  return 0 if held else math.prod(g.shape) * _primitive.accumulator_dtype(g.dtype).itemsize


def _supported(*avals: Any, response: Response) -> bool:
  # 0 times the logarithm of D would be NaN for a D of 0 or infinity.
  return response.beta != 0 and all(d < 2**30 for d in avals[0].shape[-1 - len(response.window) : -1])


def _register(p: Any, target: str, reference: Any, **options: Any) -> None:
  _primitive.batch_leading(p)
  _primitive.lower_to_cuda(p, target, reference, attributes=_attributes, supported=_supported, **options)


_register(lrn_p, "jaxdnn.lrn.v1", _reference)
_register(lrn_jvp_p, "jaxdnn.lrn_jvp.v1", _jvp_reference)
_register(lrn_vjp_p, "jaxdnn.lrn_vjp.v1", _vjp_reference, workspace=_scratch)
