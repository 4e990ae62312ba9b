"""Normalizations of Haiku as subclasses that call other kernels, and dropout."""

from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn
from jaxdnn._layers import norms


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
  if isinstance(axis, slice):
    return tuple(range(ndim)[axis])
  return tuple(sorted({a % ndim for a in ((axis,) if isinstance(axis, int) else axis)}))


def _parameters(
  layer: Any, shape: Sequence[int], dtype: Any, scale: Any = None, offset: Any = None
) -> tuple[Array | None, Array | None]:
  """The layer's own where it creates them, else the call's."""
  for kind, given in (("scale", scale), ("offset", offset)):
    if given is not None and getattr(layer, f"create_{kind}"):
      raise ValueError(f"{type(layer).__name__}: {kind} must not be given in the call with create_{kind}=True")
  if layer.create_scale:
    scale = hk.get_parameter("scale", shape, dtype, layer.scale_init)
  if getattr(layer, "create_offset", False):
    offset = hk.get_parameter("offset", shape, dtype, layer.offset_init)
  return scale, offset


def _affine(y: Array, scale: Any, offset: Any, activation: str | None, residual: Any = None) -> Array:
  """What follows a kernel where the parameters are the call's, of any shape that broadcasts."""
  y = y if scale is None else y * lax.broadcast_to_rank(jnp.asarray(scale), y.ndim)
  y = y if offset is None else y + lax.broadcast_to_rank(jnp.asarray(offset), y.ndim)
  return norms.activate(y, activation, residual)


class BatchNorm(hk.BatchNorm):
  """`haiku.BatchNorm`, with residual and activation in the same kernel, unless scale or offset are the call's.

  Statistics are computed in float32 at least and never as E[x²] - E[x]²; they are kept in the type of the data, as
  Haiku keeps them. Over `cross_replica_axis`, shards are weighed by how many entries they have;
  `cross_replica_axis_index_groups` are not supported.

  Args:
    activation: None (default), or the name of an activation, as "relu". The others are Haiku's.

  Example:
    >>> norm = jhk.BatchNorm(True, True, 0.9, activation="relu")  # inside hk.transform_with_state
    >>> y = norm(x, is_training=True, residual=shortcut)
  """

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

  def __call__(
    self,
    inputs: Array,
    is_training: bool,
    test_local_stats: bool = False,
    scale: Array | None = None,
    offset: Array | None = None,
    *,
    residual: Array | None = None,
  ) -> Array:
    """An array like `inputs`; arguments are Haiku's, and a `residual` that is added before the activation."""
    norms.refuse("BatchNorm", cross_replica_axis_index_groups=self.cross_replica_axis_index_groups)
    inputs, ndim = jnp.asarray(inputs), jnp.ndim(inputs)
    reduced = _axes(range(ndim) if self.axis is None else self.axis, ndim)
    if self.axis is None:
      reduced = tuple(d for d in reduced if d != self.channel_index % ndim)
    kept = tuple(d for d in range(ndim) if d not in reduced)
    shape = [1 if d in reduced else n for d, n in enumerate(inputs.shape)]
    given = scale is not None or offset is not None
    scale, offset = _parameters(self, shape, inputs.dtype, scale, offset)
    flat: Any = lambda a: None if a is None else a.reshape([inputs.shape[d] for d in kept])  # noqa: E731
    local = is_training or test_local_stats
    running = None if local else (flat(self.mean_ema.average), flat(self.var_ema.average))
    fused: Any = (None,) * 4 if given else (flat(scale), flat(offset), self.activation, residual)
    y, stats = norms.batch_norm(
      inputs, kept, fused[0], fused[1], running, epsilon=self.eps, dtype=inputs.dtype,
      axis_name=self.cross_replica_axis, activation=fused[2], residual=fused[3],
    )  # fmt: skip
    if is_training and stats is not None:
      self.mean_ema(stats.mean.reshape(shape).astype(inputs.dtype))
      self.var_ema(stats.var.reshape(shape).astype(inputs.dtype))
    return _affine(y, scale, offset, self.activation, residual) if given else y


class LayerNorm(hk.LayerNorm):
  """`haiku.LayerNorm`, in one pass where `param_axis` is `axis` or the last alone. Statistics are float32 at least.

  Example:
    >>> y = jhk.LayerNorm(-1, True, True)(x)  # inside hk.transform; scale, offset [C]
  """

  activation: str | None = None

  def __call__(self, inputs: Array, scale: Array | None = None, offset: Array | None = None) -> Array:
    """An array like `inputs`; a scale or offset that the layer does not create may be given here."""
    inputs = jnp.asarray(inputs)
    given = scale is not None or offset is not None
    scale, offset = _parameters(self, _shape(self, inputs), inputs.dtype, scale, offset)
    fused = (None, None, None) if given else (scale, offset, self.activation)
    y = norms.layer_norm(
      inputs, _axes(self.axis, inputs.ndim), _axes(self.param_axis, inputs.ndim), *fused[:2], epsilon=self.eps,
      dtype=inputs.dtype, activation=fused[2],
    )  # fmt: skip
    return _affine(y, scale, offset, self.activation) if given else y


class InstanceNorm(LayerNorm, hk.InstanceNorm):
  """`haiku.InstanceNorm`, with an activation in the same kernel.

  Args:
    activation: None (default), or the name of an activation. The others are Haiku's.

  Example:
    >>> y = jhk.InstanceNorm(True, True, activation="relu")(x)  # inside hk.transform; x [N, ..., C]
  """

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation


class RMSNorm(hk.RMSNorm):
  """`haiku.RMSNorm`, in one pass where `param_axis` is `axis`.

  Example:
    >>> y = jhk.RMSNorm(-1)(x)  # inside hk.transform; scale [C]
  """

  def __call__(self, inputs: Array) -> Array:
    """An array like `inputs`."""
    inputs = jnp.asarray(inputs)
    scale, _ = _parameters(self, _shape(self, inputs), inputs.dtype)
    return norms.layer_norm(
      inputs, _axes(self.axis, inputs.ndim), _axes(self.param_axis, inputs.ndim), scale, None, epsilon=self.eps,
      dtype=inputs.dtype, center=False,
    )  # fmt: skip


def _shape(layer: Any, inputs: Array) -> tuple[int, ...]:
  """Of the parameters: without dimensions of size 1 where they lie along the last axis alone, else with."""
  features, ndim = _axes(layer.param_axis, inputs.ndim), inputs.ndim
  if features == (ndim - 1,):
    return inputs.shape[-1:]
  return tuple(n if d in features else 1 for d, n in enumerate(inputs.shape))


class GroupNorm(hk.GroupNorm):
  """`haiku.GroupNorm`, with an activation in the same kernel, unless scale or offset are the call's.

  Args:
    activation: None (default), or the name of an activation, as "silu". The others are Haiku's.

  Example:
    >>> y = jhk.GroupNorm(8, activation="silu")(x)  # inside hk.transform; x [N, ..., C]; scale, offset [C]
  """

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

  def __call__(self, x: Array, scale: Array | None = None, offset: Array | None = None) -> Array:
    """An array like `x`; a scale or offset that the layer does not create may be given here."""
    channel, axes, groups = self.channel_index % x.ndim, _axes(self.axis, x.ndim), self.groups
    channels = x.shape[channel]
    if channels % groups:
      raise ValueError(f"GroupNorm: groups={groups} does not divide the {channels} channels")
    if channel not in axes:  # What is reduced then are other axes alone.
      axes, groups = (*axes, channel), channels
    given = scale is not None or offset is not None
    scale, offset = _parameters(self, (channels, *(1,) * (x.ndim - 1 - channel)), x.dtype, scale, offset)
    fused = (None, None, None) if given else (scale, offset, self.activation)
    y = norms.group_norm(
      x, groups, *fused[:2], axis=axes, epsilon=self.eps, dtype=x.dtype, channels=channel, activation=fused[2]
    )
    return _affine(y, scale, offset, self.activation) if given else y


class LocalResponseNorm(hk.Module):
  """`jaxdnn.local_response_norm` as a layer, which Haiku does not have; arguments and defaults are the function's.

  Example:
    >>> y = jhk.LocalResponseNorm(5)(x)  # inside hk.transform
  """

  def __init__(self, size: int | Sequence[int] = 5, *, name: str | None = None, **options: Any):
    super().__init__(name=name)
    self.size, self.options = size, options

  def __call__(self, x: Array) -> Array:
    """An array like `x`."""
    return jaxdnn.local_response_norm(x, self.size, **self.options)


def dropout(rng: Array, rate: float, x: Array, broadcast_dims: Sequence[int] = ()) -> Array:
  """`haiku.dropout`, whose mask is drawn again in the backward pass and kept nowhere. It is not Haiku's mask.

  Args:
    rng: a JAX key, as `hk.next_rng_key()`.
    rate: the probability of zeroing, a number in [0, 1].
    x: floating-point array.
    broadcast_dims: dimensions along which the mask is the same.

  Returns:
    An array like `x`.

  Raises:
    TypeError, ValueError: as `jaxdnn.dropout` does.

  Example:
    >>> y = jhk.dropout(hk.next_rng_key(), 0.1, x)
  """
  return jaxdnn.dropout(x, rate, rng, broadcast_dims=broadcast_dims)
