"""Normalizations as layers have them: any axes, any element types, parameters along axes of their own.

Libraries give a layer's result a type that depends on its parameters'. Each function here computes in the wider of that
`dtype` and the type of `x`, so that no digits are lost before the statistics.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxdnn
from jaxdnn import _activation, _axes, _masks

Axes = int | Sequence[int]


def activate(y: Array, activation: str | None, residual: Any = None) -> Array:
  """What follows a layer, where its kernel has not done it."""
  if residual is not None:
    y = y + jnp.asarray(residual, y.dtype)
  if activation is None:
    return y
  if activation not in _activation.ACTIVATIONS:
    known = ", ".join(sorted(_activation.ACTIVATIONS))
    raise ValueError(f"activation must be None or one of {known}, got {activation!r}")
  return _activation.apply(activation, y)


def refuse(layer: str, **given: Any) -> None:
  """Raises where an argument is given for which there is nothing in the kernels."""
  for name, value in given.items():
    if value is not None:
      raise NotImplementedError(f"{layer}: {name}= is not supported, got {value!r}; the library's own layer has it")


def batch_norm(
  x: Array,
  axis: Axes,
  scale: Array | None,
  bias: Array | None,
  running: tuple[Array, Array] | None,
  *,
  epsilon: float,
  dtype: Any,
  axis_name: Any = None,
  mask: Any = None,
  activation: str | None = None,
  residual: Any = None,
) -> tuple[Array, jaxdnn.BatchStats | None]:
  """With the `running` mean and variance, or where that is None with the batch's, which are the second result.

  `mask` is that of the statistics alone, as Flax has it: what it leaves out is normalized all the same.
  """
  x, dtype = _wide(x, dtype)
  same: dict[str, Any] = {"axis": axis, "epsilon": epsilon}
  after: dict[str, Any] = {"activation": activation}
  after["residual"] = None if residual is None else jnp.asarray(residual, x.dtype)
  stats = None
  if running is None and mask is None:
    y, stats = jaxdnn.batch_norm(x, scale, bias, axis_name=axis_name, **same, **after)
    return y.astype(dtype), stats
  if running is None:
    stats = jaxdnn.batch_norm(x, axis_name=axis_name, where=jnp.asarray(mask, bool), **same)[1]
    running = stats.mean, stats.var
  y = jaxdnn.batch_norm_inference(x, running[0], running[1], scale, bias, **same, **after)
  return y.astype(dtype), stats


def layer_norm(
  x: Array,
  axis: Axes,
  features: Axes,
  scale: Array | None,
  bias: Array | None,
  *,
  epsilon: float,
  dtype: Any,
  center: bool = True,
  mask: Any = None,
  activation: str | None = None,
) -> Array:
  """Layer or instance norm, or with `center=False` RMS norm: statistics over `axis`, parameters along `features`.

  One kernel where it can be. Where parameters lie along other axes, they follow as operations that XLA fuses.
  """
  x, dtype = _wide(x, dtype)
  axes = _axes.canonical("layer_norm", axis, x.ndim) if axis != () else ()
  of = _axes.canonical("layer_norm", features, x.ndim)
  scale, bias = (None if a is None else a.reshape([x.shape[d] for d in of]) for a in (scale, bias))
  examples = tuple(d for d in range(1, x.ndim) if d not in of)  # What instance norm reduces.
  where = None if mask is None else jnp.asarray(mask, bool)
  same: dict[str, Any] = {"epsilon": epsilon, "where": where}
  one_channel = center and len(of) == 1 and of[0] > 0
  if axes == of:
    norm = jaxdnn.layer_norm if center else jaxdnn.rms_norm
    y = activate(norm(x, scale, bias, axis=axes, **same), activation)
  elif one_channel and axes == examples:
    y = jaxdnn.instance_norm(x, scale, bias, axis=of[0], activation=activation, **same)
  elif one_channel and axes == tuple(range(1, x.ndim)):
    y = jaxdnn.group_norm(x, 1, scale, bias, axis=of[0], activation=activation, **same)
  else:
    y = jaxdnn.layer_norm(x, axis=axes, **same) if center else jaxdnn.rms_norm(x, axis=axes, **same)
    y = activate(_affine(y, of, scale, bias), activation)
    y = y if where is None else _masks.select(where, y)
  return y.astype(dtype)


def instance_axes(features: Axes, ndim: int) -> tuple[int, ...]:
  """What an instance norm reduces: all axes but the first, which counts examples, and those of the features."""
  of = _axes.canonical("InstanceNorm", features, ndim)
  if 0 in of:
    raise ValueError(f"InstanceNorm: feature_axes must not include the first axis, got {features}")
  return tuple(d for d in range(1, ndim) if d not in of)


def group_norm(
  x: Array,
  groups: int,
  scale: Array | None,
  bias: Array | None,
  *,
  axis: Axes | None,
  epsilon: float,
  dtype: Any,
  channels: int = -1,
  mask: Any = None,
  activation: str | None = None,
) -> Array:
  """Group norm over `axis`, of which the channels must be one, by default all but the first. Others are examples."""
  x, dtype = _wide(x, dtype)
  channels %= x.ndim
  axes = _axes.canonical("group_norm", tuple(range(1, x.ndim)) or 0 if axis is None else axis, x.ndim)
  if channels not in axes:
    raise ValueError(f"GroupNorm: the axes to reduce must include the channels' axis {channels}, got {axis}")
  scale, bias = (None if a is None else a.reshape(-1) for a in (scale, bias))
  kept = [d for d in range(x.ndim) if d not in axes]
  order = [*kept, *axes]
  moved = x.transpose(order)
  examples, *others = math.prod(moved.shape[: len(kept)]), *moved.shape[len(kept) :]
  if mask is not None:
    mask = jnp.reshape(mask, (1,) * (x.ndim - jnp.ndim(mask)) + jnp.shape(mask)).transpose(order)
    inner = mask.shape[len(kept) :]
    mask = jnp.broadcast_to(mask, (*moved.shape[: len(kept)], *inner)).reshape(examples, *inner)
  y = jaxdnn.group_norm(
    moved.reshape(examples, *others), groups, scale, bias, axis=1 + axes.index(channels), epsilon=epsilon,
    activation=activation, where=None if mask is None else jnp.asarray(mask, bool),
  )  # fmt: skip
  return y.reshape(moved.shape).transpose([order.index(d) for d in range(x.ndim)]).astype(dtype)


def _wide(x: Array, dtype: Any) -> tuple[Array, np.dtype[Any]]:
  return x.astype(jnp.promote_types(x.dtype, dtype)), np.dtype(dtype)


def _affine(y: Array, features: tuple[int, ...], scale: Array | None, bias: Array | None) -> Array:
  shape = [y.shape[d] if d in features else 1 for d in range(y.ndim)]
  wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
  if scale is not None:
    wide = wide * scale.reshape(shape).astype(wide.dtype)
  if bias is not None:
    wide = wide + bias.reshape(shape).astype(wide.dtype)
  return wide.astype(y.dtype)
