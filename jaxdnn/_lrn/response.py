"""Local response normalization, across channels and within a channel."""

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn import _primitive
from jaxdnn._arguments import per_dimension
from jaxdnn._eager import compiled
from jaxdnn._lrn.window import (
  Response,
  apply,
  attributes,
  checked,
  is_box,
  pair_of_values,
  powers,
  shards,
  spatial,
  supported,
  to_response,
  widen,
  window_sum,
)

# Public function ------------------------------------------------------------------------------------------------------


@compiled
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
  x, axis = checked(op, x, axis)
  axes: tuple[int, ...]
  if mode == "across_channels":
    try:
      axes, extents = (axis,), per_dimension(op, "size", operator.index(size), 1)  # type: ignore[arg-type]
    except TypeError:
      raise TypeError(f"{op}: size must be an integer across channels, got {size!r}") from None
  elif mode == "within_channel":
    axes, extents = spatial(op, size, axis, x.ndim)
  else:
    raise ValueError(f"{op}: mode must be 'across_channels' or 'within_channel', got {mode!r}")
  return apply(lrn_p, [x], axes, axis, to_response(op, extents, alpha, beta, k, padding, divide_by_size))


# Reference ------------------------------------------------------------------------------------------------------------


def _powers(c: Array, response: Response) -> tuple[Array, Array]:
  return powers(window_sum(c * c, response), response)


def _reference(x: Array, *, response: Response) -> Array:
  c = widen(x)
  return (c * _powers(c, response)[0]).astype(x.dtype)


def _jvp_reference(t: Array, x: Array, *, response: Response) -> Array:
  c, wt = widen(x), widen(t)
  p, q = _powers(c, response)
  return (wt * p - q * c * window_sum(c * wt, response)).astype(t.dtype)


def _vjp_reference(g: Array, x: Array, *, response: Response) -> Array:
  c, wg = widen(x), widen(g)
  p, q = _powers(c, response)
  return (wg * p - c * window_sum(q * c * wg, response, adjoint=True)).astype(g.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _abstract(x: Any, *_: Any, response: Response) -> Any:
  return _primitive.out_aval(x, x.shape)


lrn_p = _primitive.define("lrn", abstract_eval=_abstract, reference=_reference, params=["response"])
lrn_jvp_p = _primitive.define("lrn_jvp", abstract_eval=_abstract, reference=_jvp_reference, params=["response"])
lrn_vjp_p = _primitive.define("lrn_vjp", abstract_eval=_abstract, reference=_vjp_reference, params=["response"])

# Differentiation -----------------------------------------------------------------------------------------------------
#
# lrn      x    -> x D^-beta
# lrn_jvp  t, x -> D^-beta t - q x S(x t)      S sums over the window, q = 2 scale beta D^(-beta - 1)
# lrn_vjp  g, x -> D^-beta g - x S'(q x g)     S' sums over the mirrored one
#
# The last two are each other's adjoint.


def _jvp(primals: Any, tangents: Any, *, response: Response) -> Any:
  y = _primitive.bind(lrn_p, *primals, response=response)
  (t,) = tangents
  return y, _primitive.zero_tangent(y) if _primitive.is_zero(t) else _tangent_map(t, *primals, response=response)


def _tangent_map(t: Array, x: Array, *, response: Response) -> Any:
  return _primitive.bind(lrn_jvp_p, t, x, response=response)


def _cotangent_map(g: Array, x: Array, *, response: Response) -> Any:
  return _primitive.bind(lrn_vjp_p, g, x, response=response)


_primitive.set_jvp(lrn_p, _jvp)
_primitive.linear_in_first(lrn_jvp_p, _jvp_reference, transpose=_cotangent_map)
_primitive.linear_in_first(lrn_vjp_p, _vjp_reference, transpose=_tangent_map)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _held(x: Any, response: Response) -> bool:
  """Whether a kernel holds what the adjoint needs of the window in registers, in types that are trained in."""
  *others, last = response.window
  if others:
    return is_box(x, response)
  if x.dtype == jnp.float64:
    return False
  return max(last) <= 8 if x.shape[-1] == 1 else last in ((1, 1), (2, 2), (3, 3))


def _scratch(g: Any, x: Any, *, response: Response) -> int:
  """Other windows are summed in two passes."""
  return 0 if _held(x, response) else pair_of_values(g)


def _register(p: Any, target: str, reference: Any, **options: Any) -> None:
  _primitive.batch_leading(p)
  _primitive.set_shards(p, shards)
  _primitive.lower_to_cuda(p, target, reference, attributes=attributes, supported=supported, **options)


_register(lrn_p, "jaxdnn.lrn.v1", _reference)
_register(lrn_jvp_p, "jaxdnn.lrn_jvp.v1", _jvp_reference)
_register(lrn_vjp_p, "jaxdnn.lrn_vjp.v1", _vjp_reference, workspace=_scratch)
