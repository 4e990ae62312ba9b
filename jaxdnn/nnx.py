"""The layers of `flax.nnx`, by jaxdnn's kernels: `from jaxdnn import nnx as jnnx`, and `jnnx.Conv` for `nnx.Conv`.

Each layer is a subclass of Flax's, with its constructor, its defaults and its variables under the same names, so that a
model that trades one for the other keeps its checkpoints. Where the kernels can do what follows a layer as well, it has
`activation=` and takes a `residual=` in the call. Needs Flax: `pip install flax`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

try:
  from flax import nnx
except ModuleNotFoundError as e:
  raise ImportError("jaxdnn.nnx needs Flax: pip install flax") from e

import jaxdnn
from jaxdnn._layers import convs, norms
from jaxdnn.linen.pool import avg_pool as avg_pool
from jaxdnn.linen.pool import max_pool as max_pool
from jaxdnn.linen.pool import min_pool as min_pool
from jaxdnn.linen.pool import pool as pool

# Convolution ---------------------------------------------------------------------------------------------------------


class Conv(nnx.Conv):
  """`flax.nnx.Conv`, with bias, residual and activation in the convolution's kernel.

  'CIRCULAR', 'REFLECT' and 'CAUSAL' padding is found by index, without a padded copy. With `input_dilation`,
  `out_sharding`, padding wider than the input, or a `conv_general_dilated` of one's own, Flax's layer runs, by that
  function or jaxdnn's, and the rest follows it.

  Args:
    activation: None (default), or the name of an activation, as "relu". The others are Flax's.

  Example:
    >>> layer = jnnx.Conv(3, 32, (3, 3), activation="relu", rngs=nnx.Rngs(0))  # kernel [3, 3, 3, 32], bias [32]
    >>> y = layer(jnp.ones((8, 28, 28, 3)))
  """

  def __init__(
    self,
    *args: Any,
    activation: str | None = None,
    conv_general_dilated: Any = jaxdnn.conv_general_dilated,
    **kwargs: Any,
  ):
    super().__init__(*args, conv_general_dilated=conv_general_dilated, **kwargs)
    self.activation = activation

  def __call__(self, inputs: Array, out_sharding: Any = None, *, residual: Array | None = None) -> Array:
    """The layer's result [*batch, *spatial, out_features].

    Args:
      inputs: [*batch, *spatial, in_features] with any number of batch dimensions.
      out_sharding: as in `flax.nnx.Conv`.
      residual: array like the result, added before the activation.
    """
    if out_sharding is not None or not convs.is_fused(self, inputs):
      return norms.activate(super().__call__(inputs, out_sharding), self.activation, residual)
    kernel, bias = convs.masked(self, self.kernel[...]), None if self.bias is None else self.bias[...]
    inputs, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
    return convs.conv(self, inputs, kernel, bias, residual)


class ConvTranspose(nnx.ConvTranspose):
  """`flax.nnx.ConvTranspose`, as a data gradient: no zero is inserted between the input's elements.

  Example:
    >>> layer = jnnx.ConvTranspose(3, 16, (4, 4), strides=(2, 2), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 8, 8, 3))).shape
    (1, 16, 16, 16)
  """

  def __call__(self, inputs: Array) -> Array:
    """The layer's result [*batch, *spatial, out_features] for inputs [*batch, *spatial, in_features]."""
    kernel, bias = convs.masked(self, self.kernel[...]), None if self.bias is None else self.bias[...]
    inputs, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
    return convs.conv_transpose(self, inputs, kernel, bias)


# Normalization -------------------------------------------------------------------------------------------------------


def _parameters(layer: Any) -> tuple[Array | None, Array | None]:
  """Scale and bias, in the type in which they are kept."""
  scale, bias = layer.scale, getattr(layer, "bias", None)
  return None if scale is None else scale[...], None if bias is None else bias[...]


class BatchNorm(nnx.BatchNorm):
  """`flax.nnx.BatchNorm`, with residual and activation in the same kernel.

  Statistics are float32 at least and never E[x²] - E[x]², whatever `use_fast_variance` says; over `axis_name`, shards
  are weighed by how many entries they have. `axis_index_groups` are not supported.

  Args:
    activation: None (default), or the name of an activation, as "relu". The others are Flax's.

  Example:
    >>> layer = jnnx.BatchNorm(32, activation="relu", rngs=nnx.Rngs(0))  # scale, bias, mean, var [32]
    >>> y = layer(x, residual=shortcut)
  """

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

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
      use_running_average: normalize with the running statistics, not the batch's; by default as the constructor says.
      mask: what counts in the statistics: broadcasts to `x`, with size 1 along `axis`. All of `x` is normalized.
      residual: array like `x`, added before the activation.
    """
    norms.refuse("BatchNorm", axis_index_groups=self.axis_index_groups)
    if use_running_average is None:
      use_running_average = self.use_running_average
    if use_running_average is None:
      raise ValueError("BatchNorm: use_running_average must be given to the constructor or in the call")
    (scale, bias), running = _parameters(self), (self.mean[...], self.var[...])
    # The result has the type that Flax promotes all to, but nothing is rounded to it before the statistics.
    promoted, *_ = self.promote_dtype((x, *running, scale, bias), dtype=self.dtype)
    y, stats = norms.batch_norm(
      x, self.axis, scale, bias, running if use_running_average else None, epsilon=self.epsilon, dtype=promoted.dtype,
      axis_name=self.axis_name, mask=mask, activation=self.activation, residual=residual,
    )  # fmt: skip
    if stats is not None:
      running = jaxdnn.update_running_stats(running, stats, momentum=self.momentum, convention="flax")
      # References, which Flax's variables may be, take no values that are being differentiated.
      self.mean[...], self.var[...] = jax.lax.stop_gradient(running)
    return y


class LayerNorm(nnx.LayerNorm):
  """`flax.nnx.LayerNorm`, in one pass where `feature_axes` are `reduction_axes` or the last alone.

  Statistics are float32 at least, about the mean. Not over an `axis_name`.

  Example:
    >>> y = jnnx.LayerNorm(64, rngs=nnx.Rngs(0))(x)  # x [..., 64]; scale, bias [64]
  """

  def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    return _layer_norm(self, x, self.reduction_axes, mask)


class RMSNorm(nnx.RMSNorm):
  """`flax.nnx.RMSNorm`, in one pass where `feature_axes` are `reduction_axes`. Not over an `axis_name`.

  Example:
    >>> y = jnnx.RMSNorm(64, rngs=nnx.Rngs(0))(x)  # x [..., 64]; scale [64]
  """

  def __call__(self, x: Array, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    return _layer_norm(self, x, self.reduction_axes, mask, center=False)


class GroupNorm(nnx.GroupNorm):
  """`flax.nnx.GroupNorm`, with an activation in the same kernel. Not over an `axis_name`.

  Args:
    activation: None (default), or the name of an activation, as "silu". The others are Flax's.

  Example:
    >>> y = jnnx.GroupNorm(64, num_groups=8, activation="silu", rngs=nnx.Rngs(0))(x)  # x [N, ..., 64]
  """

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

  def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    norms.refuse("GroupNorm", axis_name=self.axis_name, axis_index_groups=self.axis_index_groups)
    scale, bias = _parameters(self)
    promoted, *_ = self.promote_dtype((x, scale, bias), dtype=self.dtype)
    return norms.group_norm(
      x, self.num_groups, scale, bias, axis=self.reduction_axes, epsilon=self.epsilon, dtype=promoted.dtype,
      mask=mask, activation=self.activation,
    )  # fmt: skip


class InstanceNorm(nnx.InstanceNorm):
  """`flax.nnx.InstanceNorm`, with an activation in the same kernel. Not over an `axis_name`.

  Args:
    activation: None (default), or the name of an activation. The others are Flax's.

  Example:
    >>> y = jnnx.InstanceNorm(64, rngs=nnx.Rngs(0))(x)  # x [N, ..., 64]
  """

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

  def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
    """An array like `x`, of the layer's `dtype`. 0, and not in the statistics, where `mask` is False."""
    return _layer_norm(self, x, norms.instance_axes(self.feature_axes, x.ndim), mask, activation=self.activation)


def _layer_norm(layer: Any, x: Array, axis: int | Sequence[int], mask: Array | None, **options: Any) -> Array:
  name = type(layer).__name__
  norms.refuse(name, axis_name=layer.axis_name, axis_index_groups=layer.axis_index_groups)
  scale, bias = _parameters(layer)
  promoted, *_ = layer.promote_dtype((x, scale, bias), dtype=layer.dtype)
  return norms.layer_norm(
    x, axis, layer.feature_axes, scale, bias, epsilon=layer.epsilon, dtype=promoted.dtype, mask=mask, **options
  )


class LocalResponseNorm(nnx.Module):
  """`jaxdnn.local_response_norm` as a layer, which Flax does not have; arguments and defaults are the function's.

  Example:
    >>> y = jnnx.LocalResponseNorm(size=5)(x)
  """

  def __init__(
    self,
    size: int | Sequence[int] = 5,
    *,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 2.0,
    mode: str = "across_channels",
    axis: int = -1,
    divide_by_size: bool = True,
    padding: str = "SAME",
  ):
    self.size = size if isinstance(size, int) else tuple(size)
    self.alpha, self.beta, self.k, self.mode, self.axis = alpha, beta, k, mode, axis
    self.divide_by_size, self.padding = divide_by_size, padding

  def __call__(self, x: Array) -> Array:
    """An array like `x`."""
    return jaxdnn.local_response_norm(
      x, self.size, alpha=self.alpha, beta=self.beta, k=self.k, mode=self.mode, axis=self.axis,
      divide_by_size=self.divide_by_size, padding=self.padding,
    )  # fmt: skip


# Dropout -------------------------------------------------------------------------------------------------------------


class Dropout(nnx.Dropout):
  """`flax.nnx.Dropout`, whose mask is drawn again in the backward pass and kept nowhere. It is not Flax's mask.

  Example:
    >>> y = jnnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))(x)
  """

  def __call__(self, inputs: Array, *, deterministic: bool | None = None, rngs: Any = None) -> Array:
    """An array like `inputs`: these themselves if `deterministic`, by default as the constructor says.

    Args:
      inputs: floating-point array.
      deterministic: whether nothing is dropped.
      rngs: `nnx.Rngs`, an `nnx.RngStream` or a key, by default the constructor's.
    """
    deterministic = self.deterministic if deterministic is None else deterministic
    if deterministic is None:
      raise ValueError("Dropout: deterministic must be given to the constructor or in the call")
    if deterministic or self.rate == 0:
      return inputs
    if self.rate == 1:  # Needs no key, and takes none from the stream.
      return jnp.zeros_like(inputs)
    rngs = self.rngs if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs):
      rngs = rngs[self.rng_collection]
    if rngs is None:
      raise ValueError("Dropout: rngs must be given to the constructor or in the call")
    key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
    return jaxdnn.dropout(inputs, self.rate, key, broadcast_dims=self.broadcast_dims)
