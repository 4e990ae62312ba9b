"""Divisive normalization with given means."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import _primitive
from jaxdnn._eager import compiled
from jaxdnn._lrn.response import lrn_p
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
  sum_over_cells,
  supported,
  to_response,
  widen,
)

# Public function ------------------------------------------------------------------------------------------------------


@compiled
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
  """Divisive normalization, `x / (k + alpha * v)^beta`, with `v_i` the mean of `(x_j - means_i)²` over a box around i.

  What cuDNN computes (`cudnnDivisiveNormalizationForward`, read from version 9.19): the numerator is `x` itself, and a
  box is compared with the mean of its own centre. The gradients are cuDNN's too for an odd `size`; for an even one its
  backward pass takes the same window as its forward pass, and so differs from the derivative, which this is. For local
  contrast normalization pass `x - means` without means, or see `local_contrast_norm`.

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
    lie outside and add nothing.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument out of range, or an `x` sharded along a spatial dimension.

  Example:
    >>> x = jnp.array([[[1.0], [2.0], [4.0]]])
    >>> jaxdnn.divisive_norm(x, x - 1, size=3, alpha=3.0, beta=1.0, k=1.0)
    Array([[[0.16666667],
            [0.18181819],
            [1.3333334 ]]], dtype=float32)
  """
  op = "divisive_norm"
  x, axis = checked(op, x, axis)
  axes, extents = spatial(op, size, axis, x.ndim)
  response = to_response(op, extents, alpha, beta, k, padding)
  if means is None:
    return apply(lrn_p, [x], axes, axis, response)
  means = jnp.asarray(means)
  if means.dtype != x.dtype:
    raise TypeError(f"{op}: means must be of x's type {x.dtype}, got {means.dtype}")
  if means.ndim > x.ndim or any(m not in (1, d) for m, d in zip(means.shape[::-1], x.shape[::-1], strict=False)):
    raise ValueError(f"{op}: means of shape {means.shape} do not broadcast to x of shape {x.shape}")
  return apply(divisive_p, [x, _like(means, x)], axes, axis, response)


def _like(means: Array, x: Array) -> Array:
  """`means` in the shape of `x`, and sharded like it over explicit mesh axes."""
  means = jnp.broadcast_to(means, x.shape)
  sharding = jax.typeof(x).sharding
  return means if jax.typeof(means).sharding.spec == sharding.spec else jax.sharding.reshard(means, sharding)


# Reference ------------------------------------------------------------------------------------------------------------
#
# Deviations are squared one by one: expanding the square would lose the digits of a small deviation from a large mean.


def _powers(x: Array, m: Array, response: Response) -> tuple[Array, Array]:
  (energy,) = sum_over_cells(lambda xj: [(xj - m) ** 2], [x], response)
  return powers(energy, response)


def _reference(x: Array, m: Array, *, response: Response) -> Array:
  wx = widen(x)
  return (wx * _powers(wx, widen(m), response)[0]).astype(x.dtype)


def _jvp_reference(tx: Array, tm: Array, x: Array, m: Array, *, response: Response) -> Array:
  wx, wm, wtx, wtm = map(widen, (x, m, tx, tm))
  p, q = _powers(wx, wm, response)
  (drift,) = sum_over_cells(lambda xj, tj: [(xj - wm) * (tj - wtm)], [wx, wtx], response)
  return (wtx * p - q * wx * drift).astype(x.dtype)


def _vjp_reference(g: Array, x: Array, m: Array, *, response: Response) -> list[Array]:
  wg, wx, wm = map(widen, (g, x, m))
  p, q = _powers(wx, wm, response)
  r = q * wx * wg
  (deviation,) = sum_over_cells(lambda xj: [xj - wm], [wx], response)
  (pull,) = sum_over_cells(lambda ri, mi: [ri * (wx - mi)], [r, wm], response, adjoint=True)
  return [(wg * p - pull).astype(x.dtype), (r * deviation).astype(x.dtype)]


# Primitives -----------------------------------------------------------------------------------------------------------


def _abstract(x: Any, *_: Any, response: Response) -> Any:
  return _primitive.out_aval(x, x.shape)


def _abstract_pair(x: Any, *_: Any, response: Response) -> Any:
  return [_primitive.out_aval(x, x.shape)] * 2


divisive_p = _primitive.define("divisive", abstract_eval=_abstract, reference=_reference, params=["response"])
divisive_jvp_p = _primitive.define(
  "divisive_jvp", abstract_eval=_abstract, reference=_jvp_reference, params=["response"]
)
divisive_vjp_p = _primitive.define(
  "divisive_vjp", abstract_eval=_abstract_pair, reference=_vjp_reference, params=["response"], multiple_results=True
)

# Differentiation ------------------------------------------------------------------------------------------------------
#
# divisive      x, m         -> y_i = x_i D_i^-beta
# divisive_jvp  tx, tm, x, m -> D_i^-beta tx_i - q_i x_i sum over j of (x_j - m_i) (tx_j - tm_i)
# divisive_vjp  g, x, m      -> dx_j = D_j^-beta g_j - sum over i of r_i (x_j - m_i)      r_i = q_i x_i g_i
#                               dm_i = r_i sum over j of (x_j - m_i)
#
# The last two are each other's adjoint; j runs over the window of i, and i over the windows that hold j.


def _jvp(primals: Any, tangents: Any, *, response: Response) -> Any:
  y = _primitive.bind(divisive_p, *primals, response=response)
  if all(map(_primitive.is_zero, tangents)):
    return y, _primitive.zero_tangent(y)
  tangents = map(_primitive.instantiate, tangents)
  return y, _primitive.bind(divisive_jvp_p, *tangents, *primals, response=response)


def _cotangents(cts: Any, x: Array, m: Array, *, response: Response) -> Any:
  return _primitive.bind(divisive_vjp_p, *cts, x, m, response=response)


def _tangents(cts: Any, x: Array, m: Array, *, response: Response) -> Any:
  return [_primitive.bind(divisive_jvp_p, *cts, x, m, response=response)]


_primitive.set_jvp(divisive_p, _jvp)
_primitive.linear(divisive_jvp_p, 2, lambda *a, **k: [_jvp_reference(*a, **k)], transpose=_cotangents)
_primitive.linear(divisive_vjp_p, 1, _vjp_reference, transpose=_tangents)

# Batching and CUDA lowering -------------------------------------------------------------------------------------------


def _scratch(g: Any, *_: Any, response: Response) -> int:
  """Other windows than boxes are summed in two passes."""
  return 0 if is_box(g, response) else pair_of_values(g)


def _register(p: Any, target: str, reference: Any, **options: Any) -> None:
  _primitive.batch_leading(p)
  _primitive.set_shards(p, shards)
  _primitive.lower_to_cuda(p, target, reference, attributes=attributes, supported=supported, **options)


_register(divisive_p, "jaxdnn.divisive.v1", _reference)
_register(divisive_jvp_p, "jaxdnn.divisive_jvp.v1", _jvp_reference)
_register(divisive_vjp_p, "jaxdnn.divisive_vjp.v1", _vjp_reference, workspace=_scratch)
