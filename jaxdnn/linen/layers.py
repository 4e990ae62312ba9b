"""Layers of `flax.linen` as subclasses that call other kernels; attributes that are not described are Flax's."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

try:
  import flax.linen as nn
  from flax.linen.dtypes import canonicalize_dtype
except ModuleNotFoundError as e:
  raise ImportError("the layers of jaxdnn.linen need Flax: pip install flax") from e

import jaxdnn
from jaxdnn._layers import convs, norms

# Convolution ---------------------------------------------------------------------------------------------------------


class Conv(nn.Conv):
  """`flax.linen.Conv`, with bias, residual and activation in the convolution's kernel.

  'CIRCULAR', 'REFLECT' and 'CAUSAL' padding is found by index, without a padded copy. With `input_dilation`,
  padding wider than the input, or a `conv_general_dilated` of one's own, Flax's layer runs, by that function or
  jaxdnn's, and the rest follows it.

  Attributes:
    activation: None (default), or the name of an activation, as "relu".

  Example:
    >>> layer = jnn.Conv(32, (3, 3), activation="relu")
    >>> variables = layer.init(jax.random.key(0), x)  # x [..., H, W, C]; kernel [3, 3, C, 32], bias [32]
    >>> y = layer.apply(variables, x)
  """

  conv_general_dilated: Any = jaxdnn.conv_general_dilated
  activation: str | None = None

  @nn.compact
  def __call__(self, inputs: Array, residual: Array | None = None) -> Array:
    """The layer's result [*batch, *spatial, features].

    Args:
      inputs: [*batch, *spatial, channels] with any number of batch dimensions.
      residual: array like the result, added before the activation.
    """
    if not convs.is_fused(self, inputs):
      return norms.activate(super().__call__(inputs), self.activation, residual)
    shape = (*convs.window(self), inputs.shape[-1] // self.feature_group_count, self.features)
    kernel = convs.masked(self, self.param("kernel", self.kernel_init, shape, self.param_dtype))
    bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    return convs.conv(self, inputs, kernel, bias, residual)


class ConvLocal(nn.ConvLocal):
  """`flax.linen.ConvLocal`: a filter and a bias of its own for each output position.

  Attributes:
    activation: None (default), or the name of an activation.

  Example:
    >>> layer = jnn.ConvLocal(4, (3, 3), padding="VALID")
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8, 8, 3)))  # kernel [6, 6, 27, 4], bias [6, 6, 4]
  """

  activation: str | None = None

  @nn.compact
  def __call__(self, inputs: Array) -> Array:
    """The layer's result [*batch, *positions, features] for inputs [*batch, *spatial, channels]."""
    if self.feature_group_count != 1:
      raise NotImplementedError(f"ConvLocal: feature_group_count must be 1, got {self.feature_group_count}")
    x, padding = convs.local_inputs(self, inputs)
    positions = convs.positions(self, x, padding)
    shape = (*positions, math.prod(convs.window(self)) * x.shape[-1], self.features)
    kernel = convs.masked(self, self.param("kernel", self.kernel_init, shape, self.param_dtype))
    shape = (*positions, self.features)
    bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
    x, kernel, bias = self.promote_dtype(x, kernel, bias, dtype=self.dtype)
    return convs.conv_local(self, inputs, x, padding, kernel, bias)


class ConvTranspose(nn.ConvTranspose):
  """`flax.linen.ConvTranspose`, as a data gradient: no zero is inserted between the input's elements.

  Example:
    >>> layer = jnn.ConvTranspose(16, (4, 4), strides=(2, 2))
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((1, 8, 8, 3)))  # y [1, 16, 16, 16]
  """

  @nn.compact
  def __call__(self, inputs: Array) -> Array:
    """The layer's result [*batch, *spatial, features] for inputs [*batch, *spatial, channels]."""
    channels = (inputs.shape[-1], self.features)
    shape = (*convs.window(self), *(channels[::-1] if self.transpose_kernel else channels))
    kernel = convs.masked(self, self.param("kernel", self.kernel_init, shape, self.param_dtype))
    bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    return convs.conv_transpose(self, inputs, kernel, bias)


# Normalization -------------------------------------------------------------------------------------------------------


def _sizes(x: Array, axes: int | Sequence[int]) -> list[int]:
  axes = axes if isinstance(axes, Sequence) else [axes]
  return [x.shape[d] for d in sorted({d % x.ndim for d in axes})]


def _parameters(layer: Any, shape: list[int], use_bias: bool) -> tuple[Array | None, Array | None]:
  scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype) if layer.use_scale else None
  return scale, layer.param("bias", layer.bias_init, shape, layer.param_dtype) if use_bias else None


class BatchNorm(nn.BatchNorm):
  """`flax.linen.BatchNorm`, with residual and activation in the same kernel.

  Statistics are float32 at least and never E[x²] - E[x]², whatever `use_fast_variance` and `force_float32_reductions`
  say; over `axis_name`, shards are weighed by how many entries they have. `axis_index_groups` are not supported.

  Attributes:
    activation: None (default), or the name of an activation, as "relu".

  Example:
    >>> layer = jnn.BatchNorm(use_running_average=False, momentum=0.9, activation="relu")
    >>> variables = layer.init(jax.random.key(0), x)  # params: scale, bias [C]; batch_stats: mean, var [C]
    >>> y, changed = layer.apply(variables, x, residual=shortcut, mutable=["batch_stats"])
  """

  activation: str | None = None

  @nn.compact
  def __call__(
    self,
    x: Array,
    use_running_average: bool | None = None,
    *,
    mask: Array | None = None,
    residual: Array | None = None,
  ) -> Array:
    """An array like `x`, of the layer's `dtype`.

    Args:
      x: array with the features along `axis`.
      use_running_average: normalize with the running statistics, not the batch's; here or in the constructor.
      mask: what counts in the statistics: broadcasts to `x`, with size 1 along `axis`. All of `x` is normalized.
      residual: array like `x`, added before the activation.
    """
    norms.refuse("BatchNorm", axis_index_groups=self.axis_index_groups)
    use_running_average = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
    shape, kept = _sizes(x, self.axis), jnp.float32 if self.force_float32_reductions else self.param_dtype
    mean = self.variable("batch_stats", "mean", jnp.zeros, shape, kept)
    var = self.variable("batch_stats", "var", jnp.ones, shape, kept)
    scale, bias = _parameters(self, shape, self.use_bias)
    running = mean.value, var.value
    y, stats = norms.batch_norm(
      x, self.axis, scale, bias, running if use_running_average else None, epsilon=self.epsilon,
      dtype=canonicalize_dtype(x, scale, bias, dtype=self.dtype),
      axis_name=None if self.is_initializing() else self.axis_name,
      mask=mask, activation=self.activation, residual=residual,
    )  # fmt: skip
    if stats is not None and not self.is_initializing():
      mean.value, var.value = jaxdnn.update_running_stats(running, stats, momentum=self.momentum, convention="flax")
    return y


class LayerNorm(nn.LayerNorm):
  """`flax.linen.LayerNorm`, in one pass where `feature_axes` are `reduction_axes` or the last alone.

  Statistics are float32 at least, about the mean. Not over an `axis_name`.

  Example:
    >>> y, variables = jnn.LayerNorm().init_with_output(jax.random.key(0), x)  # params: scale, bias [C]
  """

  @nn.compact
  def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    return _layer_norm(self, x, self.reduction_axes, self.use_bias, mask)


class RMSNorm(nn.RMSNorm):
  """`flax.linen.RMSNorm`, in one pass where `feature_axes` are `reduction_axes`. Not over an `axis_name`.

  Example:
    >>> y, variables = jnn.RMSNorm().init_with_output(jax.random.key(0), x)  # params: scale [C]
  """

  @nn.compact
  def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    return _layer_norm(self, x, self.reduction_axes, False, mask, center=False)


class GroupNorm(nn.GroupNorm):
  """`flax.linen.GroupNorm`, with an activation in the same kernel. Not over an `axis_name`.

  Attributes:
    activation: None (default), or the name of an activation, as "silu".

  Example:
    >>> layer = jnn.GroupNorm(num_groups=8, activation="silu")
    >>> y, variables = layer.init_with_output(jax.random.key(0), x)  # x [N, ..., C]; params: scale, bias [C]
  """

  activation: str | None = None

  @nn.compact
  def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    norms.refuse("GroupNorm", axis_name=self.axis_name, axis_index_groups=self.axis_index_groups)
    if (self.num_groups is None) == (self.group_size is None):
      raise ValueError(
        "GroupNorm: either num_groups or group_size must be given, and the other None, got "
        f"num_groups={self.num_groups} (32 by default) and group_size={self.group_size}"
      )
    if self.group_size is not None and x.shape[-1] % self.group_size:
      raise ValueError(f"GroupNorm: group_size={self.group_size} does not divide the {x.shape[-1]} channels")
    groups = self.num_groups if self.group_size is None else x.shape[-1] // self.group_size
    scale, bias = _parameters(self, [x.shape[-1]], self.use_bias)
    return norms.group_norm(
      x, groups, scale, bias, axis=self.reduction_axes, epsilon=self.epsilon,
      dtype=canonicalize_dtype(x, scale, bias, dtype=self.dtype), mask=mask, activation=self.activation,
    )  # fmt: skip


class InstanceNorm(nn.InstanceNorm):
  """`flax.linen.InstanceNorm`, with an activation in the same kernel. Not over an `axis_name`.

  Attributes:
    activation: None (default), or the name of an activation.

  Example:
    >>> y, variables = jnn.InstanceNorm().init_with_output(jax.random.key(0), x)  # x [N, ..., C]
  """

  activation: str | None = None

  @nn.compact
  def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    axes = norms.instance_axes(self.feature_axes, x.ndim)
    return _layer_norm(self, x, axes, self.use_bias, mask, activation=self.activation)


def _layer_norm(
  layer: Any, x: Array, axis: int | Sequence[int], use_bias: bool, mask: Array | None, **options: Any
) -> Array:
  name = type(layer).__name__
  norms.refuse(name, axis_name=layer.axis_name, axis_index_groups=layer.axis_index_groups)
  scale, bias = _parameters(layer, _sizes(x, layer.feature_axes), use_bias)
  return norms.layer_norm(
    x, axis, layer.feature_axes, scale, bias, epsilon=layer.epsilon,
    dtype=canonicalize_dtype(x, scale, bias, dtype=layer.dtype), mask=mask, **options,
  )  # fmt: skip


class LocalResponseNorm(nn.Module):
  """`jaxdnn.local_response_norm` as a layer, which Flax does not have; attributes and defaults are the function's.

  Example:
    >>> y = jnn.LocalResponseNorm(size=5).apply({}, x)
  """

  size: int | Sequence[int] = 5
  alpha: float = 1e-4
  beta: float = 0.75
  k: float = 2.0
  mode: str = "across_channels"
  axis: int = -1
  divide_by_size: bool = True
  padding: str = "SAME"

  def __call__(self, x: Array) -> Array:
    """An array like `x`."""
    return jaxdnn.local_response_norm(
      x, self.size, alpha=self.alpha, beta=self.beta, k=self.k, mode=self.mode, axis=self.axis,
      divide_by_size=self.divide_by_size, padding=self.padding,
    )  # fmt: skip


# Dropout -------------------------------------------------------------------------------------------------------------


class Dropout(nn.Dropout):
  """`flax.linen.Dropout`, whose mask is drawn again in the backward pass and kept nowhere. It is not Flax's mask.

  Example:
    >>> y = jnn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": jax.random.key(0)})
  """

  @nn.compact
  def __call__(self, inputs: Array, deterministic: bool | None = None, rng: Array | None = None) -> Array:
    """An array like `inputs`: these themselves if `deterministic`, here or in the constructor."""
    if nn.merge_param("deterministic", self.deterministic, deterministic) or self.rate == 0:
      return inputs
    # A rate of 1 needs no key, and takes none from the collection.
    key = self.make_rng(self.rng_collection) if rng is None and self.rate < 1 else rng
    if key is None:
      return jnp.zeros_like(inputs)
    return jaxdnn.dropout(inputs, self.rate, key, broadcast_dims=self.broadcast_dims)
