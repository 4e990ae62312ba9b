"""Group and instance normalization, with an activation fused.

    y = f(p)    p = (x - mean) rstd scale + bias    rstd = 1 / sqrt(variance + epsilon)

Mean and (biased) variance are those of a group: some neighbouring channels of one example, at every position. The
primitives work on [batch, n, spatial, channels] or [batch, n, channels, spatial], as the data are, with parameters
[batch, channels]; `batch` is 1 until parameters are mapped by `vmap`. On a GPU each is one pass over memory where a
group's data fit in the chip's shared memory. Differentiation keeps x and three numbers for each group.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import _activation, _extension, _masks, _primitive, _sharding
from jaxdnn._arguments import number
from jaxdnn._eager import compiled

# Public functions ----------------------------------------------------------------------------------------------------


@compiled
def group_norm(
  x: Array,
  num_groups: int,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int = -1,
  epsilon: float = 1e-5,
  activation: str | None = None,
  where: Array | None = None,
) -> Array:
  """Group normalization, `f((x - mean) / sqrt(variance + epsilon) * scale + bias)`.

  The first dimension of `x` counts examples, `axis` channels, the others positions. The channels make `num_groups`
  groups of neighbours, and mean and variance (biased) are those of one group of one example, over all positions.
  With one group this is layer normalization over all but the first dimension, with a parameter for each channel.

  Args:
    x: floating-point array of rank 2 or more, [N, ..., C] or [N, C, ...] or with the channels in between. The first
      two layouts are taken as they are; in between, channels move last.
    num_groups: number of groups, which must divide the number of channels.
    scale: one factor for each channel, or None for 1.
    bias: one summand for each channel, or None for 0.
    axis: the axis of the channels. The default is the last.
    epsilon: added to the variance.
    activation: name of the function f, such as "silu" or "relu" (these two run in the same kernel), or None for the
      identity.
    where: booleans that broadcast to the shape of `x`. Entries where it is False count nowhere: the result there is 0,
      its gradient is 0, and whatever `x` holds there, NaN included, changes nothing. A mask that is the same for all of
      a group, as of shape [N, 1, ..., 1], is two selections around the kernel; with any other, XLA's own fusions run.

  Returns:
    An array like `x`. Statistics and parameters are float32 at least, and the variance is taken about the mean, so
    that a large mean costs no digits. A group that has NaN or an infinity is NaN; one of equal values is f(bias), or
    NaN where `epsilon` is 0.

  Raises:
    TypeError: `x`, `scale` or `bias` is not floating-point, `num_groups` or `axis` is not an integer, or `where` is not
      boolean.
    ValueError: `x` has rank below 2, `axis` is out of range or the first, `num_groups` does not divide the channels,
      a parameter's shape is not [channels], `epsilon` is negative, there is no activation of that name, or `where` does
      not broadcast to `x`.

  Example:
    >>> jaxdnn.group_norm(jnp.array([[1.0, 3.0, 5.0, 5.0]]), 2, epsilon=0.25)
    Array([[-0.8944272,  0.8944272,  0.       ,  0.       ]], dtype=float32)
  """
  if num_groups is None:
    raise TypeError("group_norm: num_groups must be an integer, got None")
  return _apply("group_norm", x, num_groups, scale, bias, axis, epsilon, activation, where)


@compiled
def instance_norm(
  x: Array,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int = -1,
  epsilon: float = 1e-5,
  activation: str | None = None,
  where: Array | None = None,
) -> Array:
  """Instance normalization: group normalization in which every channel is a group.

  Args:
    x: floating-point array of rank 2 or more, [N, ..., C] or [N, C, ...] or with the channels in between.
    scale: one factor for each channel, or None for 1.
    bias: one summand for each channel, or None for 0.
    axis: the axis of the channels. The default is the last.
    epsilon: added to the variance.
    activation: name of a function to apply to the result, as for `group_norm`, or None.
    where: booleans, as for `group_norm`; the same at all positions, as of shape [N, 1, ..., C], they keep the kernel.

  Returns:
    An array like `x`, as for `group_norm`.

  Raises:
    TypeError: `x`, `scale` or `bias` is not floating-point, `axis` is not an integer, or `where` is not boolean.
    ValueError: `x` has rank below 2, `axis` is out of range or the first, a parameter's shape is not [channels],
      `epsilon` is negative, there is no activation of that name, or `where` does not broadcast to `x`.

  Example:
    >>> jaxdnn.instance_norm(jnp.array([[[1.0], [3.0]]]), epsilon=3.0)
    Array([[[-0.5],
            [ 0.5]]], dtype=float32)
  """
  return _apply("instance_norm", x, None, scale, bias, axis, epsilon, activation, where)


def _apply(
  op: str,
  x: Array,
  num_groups: int | None,
  scale: Array | None,
  bias: Array | None,
  axis: int,
  epsilon: float,
  activation: str | None,
  where: Array | None,
) -> Array:
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{op}: x must be floating-point, got {x.dtype}")
  channel_axis = _channel_axis(op, x.ndim, axis)
  channels = x.shape[channel_axis]
  # Without channels there is nothing to do in one group as in none.
  groups = max(channels, 1) if num_groups is None else _group_count(op, num_groups, channels)
  epsilon = number(op, "epsilon", epsilon)
  if not epsilon >= 0:
    raise ValueError(f"{op}: epsilon must be 0 or more, got {epsilon}")
  names = {*FUSED, *_activation.ACTIVATIONS}
  if activation is not None and (not isinstance(activation, str) or activation not in names):
    raise ValueError(f"{op}: activation must be None or one of {', '.join(sorted(names))}, got {activation!r}")
  wide = _primitive.accumulator_dtype(x.dtype)
  scale = _parameter(op, "scale", scale, channels, wide, 1)
  bias = _parameter(op, "bias", bias, channels, wide, 0)
  fused = activation if activation in FUSED else "identity"
  masks = []
  where = _masks.beside(op, where, x)
  if where is not None:
    x = _masks.select(where, x)
    own = (0, channel_axis) if groups == channels else (0,)
    if not _masks.is_by_row(where, [d for d in range(x.ndim) if d not in own], epsilon, x.dtype):
      masks = [where]

  def apply(x: Array, scale: Array, bias: Array, *masks: Array) -> Array:
    if masks:
      return _masked(x, scale, bias, masks[0], groups, channel_axis, epsilon, FUSED[fused])
    last = channel_axis in (1, x.ndim - 1)
    moved = x if last else jnp.moveaxis(x, channel_axis, -1)
    y = _bind(moved, scale, bias, groups, channels_last=channel_axis != 1, epsilon=epsilon, activation=fused)
    return y if last else jnp.moveaxis(y, -1, channel_axis)

  keep: list[Sequence[int]] = [(0,), (), (), *[(0,)] * len(masks)]
  y = _sharding.map_shards(apply, [x, scale, bias, *masks], keep=keep, out_like=(0, range(x.ndim)))
  y = y if activation in (None, fused) else _activation.apply(activation, y)
  return y if where is None else _masks.select(where, y)


def _channel_axis(op: str, ndim: int, axis: Any) -> int:
  try:
    given = operator.index(axis)
  except TypeError:
    raise TypeError(f"{op}: axis must be an integer, got {axis!r}") from None
  if ndim < 2:
    raise ValueError(f"{op}: x must have an axis of examples and one of channels, got rank {ndim}")
  if not -ndim <= given < ndim or given % ndim == 0:
    raise ValueError(f"{op}: axis must name an axis but the first of an array of rank {ndim}, got {axis!r}")
  return given % ndim


def _group_count(op: str, num_groups: Any, channels: int) -> int:
  try:
    groups = operator.index(num_groups)
  except TypeError:
    raise TypeError(f"{op}: num_groups must be an integer, got {num_groups!r}") from None
  if groups < 1 or channels % groups != 0:
    raise ValueError(f"{op}: num_groups must divide the {channels} channels, got {groups}")
  return groups


def _parameter(op: str, name: str, value: Array | None, channels: int, dtype: Any, default: int) -> Array:
  if value is None:
    return jnp.full((channels,), default, dtype)
  value = jnp.asarray(value)
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise TypeError(f"{op}: {name} must be floating-point, got {value.dtype}")
  if value.shape != (channels,):
    raise ValueError(f"{op}: {name} must have shape ({channels},), one for each channel, got {value.shape}")
  return value.astype(dtype)


def _bind(x: Array, scale: Array, bias: Array, groups: int, *, channels_last: bool, **params: Any) -> Array:
  n, *spatial = x.shape
  channels = spatial.pop(-1 if channels_last else 0)
  positions = math.prod(spatial)
  view = (1, n, positions, channels) if channels_last else (1, n, channels, positions)
  y: Array = _primitive.bind(
    group_norm_p, x.reshape(view), scale[None], bias[None], groups=groups, channels_last=channels_last, **params
  )[0]
  return y.reshape(x.shape)


def _masked(
  x: Array, scale: Array, bias: Array, where: Array, groups: int, axis: int, epsilon: float, f: Callable[[Array], Array]
) -> Array:
  """Without a kernel: the statistics are of what is not masked. What stands where it is, is left to the caller."""

  def split(a: Array) -> Array:
    parts = (1, 1) if a.shape[axis] == 1 else (groups, a.shape[axis] // groups)
    return a.reshape(*a.shape[:axis], *parts, *a.shape[axis + 1 :])

  affine = [-1 if d == axis else 1 for d in range(x.ndim)]
  axes = tuple(d for d in range(1, x.ndim + 1) if d != axis)
  h = _masks.normalized(split(x), split(where), axes, epsilon=epsilon).reshape(x.shape)
  return f(h * scale.reshape(affine) + bias.reshape(affine)).astype(x.dtype)


# Reference -----------------------------------------------------------------------------------------------------------

# Select, not maximum: the derivative at 0 is 0, as that of `jaxdnn.relu`.
FUSED = {
  "identity": lambda p: p,
  "relu": lambda p: jnp.where(p <= 0, jnp.zeros_like(p), p),
  "silu": lambda p: p * jax.lax.logistic(p),
}
"""The activations that run in the same kernel."""


def _by_group(x: Array, groups: int, channels_last: bool) -> tuple[Array, tuple[int, int]]:
  """`x` in wide numbers with its channels as [groups, channels of a group], and the axes that are normalized."""
  x = x.astype(_primitive.accumulator_dtype(x.dtype))
  b, n, *rest = x.shape
  if channels_last:
    return x.reshape(b, n, rest[0], groups, rest[1] // groups), (2, 4)
  return x.reshape(b, n, groups, rest[0] // groups, rest[1]), (3, 4)


def _statistics(x: Array, axes: tuple[int, int], epsilon: float) -> tuple[Array, Array, Array]:
  """Mean, what rounding took off it, and inverse deviation. A variance about the rounded mean would count that in."""
  mean = jnp.mean(x, axes, keepdims=True)
  rest = jnp.mean(x - mean, axes, keepdims=True)
  variance = jnp.mean(jnp.square((x - mean) - rest), axes, keepdims=True)
  return mean, rest, jax.lax.rsqrt(variance + epsilon)


def _normalize(
  x: Array, scale: Array, bias: Array, *, groups: int, channels_last: bool, epsilon: float, activation: str
) -> Array:
  grouped, axes = _by_group(x, groups, channels_last)
  mean, rest, rstd = _statistics(grouped, axes, epsilon)
  xhat = (((grouped - mean) - rest) * rstd).reshape(x.shape)
  broadcast = (slice(None), None, None) if channels_last else (slice(None), None, slice(None), None)
  return FUSED[activation](xhat * scale[broadcast] + bias[broadcast]).astype(x.dtype)


def _fwd_reference(x: Array, scale: Array, bias: Array, **params: Any) -> tuple[Array, Array]:
  grouped, axes = _by_group(x, params["groups"], params["channels_last"])
  statistics = jnp.stack([s.squeeze(axes) for s in _statistics(grouped, axes, params["epsilon"])], axis=-1)
  return _normalize(x, scale, bias, **params), statistics


# Both maps take the statistics from x again, so that derivatives in x are whole.


def _lin_reference(
  t: Array, tscale: Array, tbias: Array, x: Array, scale: Array, bias: Array, statistics: Array, **params: Any
) -> tuple[Array]:
  return (jax.jvp(lambda *a: _normalize(*a, **params), (x, scale, bias), (t, tscale, tbias))[1],)


def _bwd_reference(
  dy: Array, x: Array, scale: Array, bias: Array, statistics: Array, **params: Any
) -> tuple[Array, Array, Array]:
  dx, dscale, dbias = jax.vjp(lambda *a: _normalize(*a, **params), x, scale, bias)[1](dy)
  return dx, dscale, dbias


# Primitives ----------------------------------------------------------------------------------------------------------

_PARAMS = ("groups", "channels_last", "epsilon", "activation")


def _fwd_abstract(x: Any, scale: Any, bias: Any, *, groups: int, **_: Any) -> Any:
  return _primitive.out_aval(x, x.shape), _primitive.out_aval(x, (*x.shape[:2], groups, 3), scale.dtype)


def _lin_abstract(t: Any, *_: Any, **__: Any) -> Any:
  return (_primitive.out_aval(t, t.shape),)


def _bwd_abstract(dy: Any, x: Any, scale: Any, bias: Any, statistics: Any, **_: Any) -> Any:
  return tuple(_primitive.out_aval(dy, a.shape, a.dtype) for a in (x, scale, bias))


def _define(name: str, abstract_eval: Any, reference: Any) -> Any:
  return _primitive.define(
    name, abstract_eval=abstract_eval, reference=reference, params=_PARAMS, multiple_results=True
  )


group_norm_p = _define("group_norm", _fwd_abstract, _fwd_reference)
group_norm_lin_p = _define("group_norm_lin", _lin_abstract, _lin_reference)
group_norm_bwd_p = _define("group_norm_bwd", _bwd_abstract, _bwd_reference)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# group_norm      x, scale, bias                                -> y, statistics
# group_norm_lin  t, tscale, tbias; x, scale, bias, statistics  -> ty
# group_norm_bwd  dy;               x, scale, bias, statistics  -> dx, dscale, dbias
#
# The two maps are each other's adjoints. Nothing else sees the statistics, and what differentiates the maps in x takes
# the references, which compute them anew: so they need no tangent.


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
  y, statistics = _primitive.bind(group_norm_p, *primals, **params)
  if all(map(_primitive.is_zero, tangents)):
    ty = _primitive.zero_tangent(y)
  else:
    (ty,) = _primitive.bind(group_norm_lin_p, *map(_primitive.instantiate, tangents), *primals, statistics, **params)
  return (y, statistics), (ty, _primitive.zero_tangent(statistics))


def _lin(cts: Any, *residuals: Any, **params: Any) -> Any:
  return _primitive.bind(group_norm_lin_p, *cts, *residuals, **params)


def _bwd(cts: Any, *residuals: Any, **params: Any) -> Any:
  return _primitive.bind(group_norm_bwd_p, *cts, *residuals, **params)


_primitive.set_jvp(group_norm_p, _jvp)
_primitive.linear(group_norm_lin_p, 3, _lin_reference, transpose=_bwd)
_primitive.linear(group_norm_bwd_p, 1, _bwd_reference, transpose=_lin)

# Batching ------------------------------------------------------------------------------------------------------------


def _set_batching(p: Any, parameters: tuple[int, ...], *, sums: bool) -> None:
  """A mapped axis is one more of examples where all share the parameters, and of independent problems otherwise.

  Args:
    parameters: which operands are [batch, channels]. The others are [batch, n, ...].
    sums: whether some results are sums over the examples, so that problems must be kept apart.
  """

  def rule(operands: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    shared = not sums and all(dims[i] is None and operands[i].shape[0] == 1 for i in parameters)

    def fold(i: int, x: Array, d: int | None) -> Array:
      if shared and i in parameters:
        return x
      x = jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
      kept = x.shape[3:] if shared else x.shape[2:]
      return x.reshape((1, size * x.shape[2], *kept) if shared else (size * x.shape[1], *kept))

    def unfold(y: Array) -> Array:
      if shared:
        return y.reshape(size, 1, y.shape[1] // size, *y.shape[2:])
      return y.reshape(size, y.shape[0] // size, *y.shape[1:])

    out = _primitive.bind(p, *map(fold, range(len(operands)), operands, dims), **params)
    return [unfold(y) for y in out], [0] * len(out)

  _primitive.set_batching(p, rule)


_set_batching(group_norm_p, (1, 2), sums=False)
_set_batching(group_norm_lin_p, (1, 2, 4, 5), sums=False)
_set_batching(group_norm_bwd_p, (2, 3), sums=True)

# CUDA lowering -------------------------------------------------------------------------------------------------------


def _lower(p: Any, call: str, target: str, reference: Any) -> None:
  def workspace(x: Any, *_: Any, groups: int, channels_last: bool, **__: Any) -> int | None:
    return _extension.native.group_norm_workspace(call, x.dtype.name, channels_last, x.shape, groups)

  _primitive.lower_to_cuda(
    p,
    target,
    reference,
    attributes=lambda *_, **params: params,
    supported=lambda *avals, **params: workspace(*avals, **params) is not None,
    workspace=workspace,  # type: ignore[arg-type]
  )


_primitive.set_shards(group_norm_p, "b n, b, b -> b n, b n")
_primitive.set_shards(group_norm_lin_p, "b n, b, b, b n, b, b, b n -> b n")
_primitive.set_shards(group_norm_bwd_p, "b n, b n, b, b, b n -> b n, b, b")
_lower(group_norm_p, "fwd", "jaxdnn.group_norm.v1", _fwd_reference)
_lower(group_norm_lin_p, "jvp", "jaxdnn.group_norm_jvp.v1", _lin_reference)
_lower(group_norm_bwd_p, "bwd", "jaxdnn.group_norm_bwd.v1", _bwd_reference)
