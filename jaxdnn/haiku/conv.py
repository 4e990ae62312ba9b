"""Convolutions of Haiku as subclasses that call other kernels."""

import math
from typing import Any

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxdnn


def _parameters(layer: Any, dtype: Any, shape: tuple[int, ...], fan_in: int, features: int) -> tuple[Array, Any]:
  """The filter, masked, and the bias, which is kept with the dimensions that follow the channels."""
  init = layer.w_init or hk.initializers.TruncatedNormal(stddev=1 / np.sqrt(fan_in))
  w = hk.get_parameter("w", shape, dtype, init=init)
  mask = getattr(layer, "mask", None)
  if mask is not None:
    if mask.shape != shape:
      raise ValueError(f"{type(layer).__name__}: mask must have the shape of the weights {shape}, got {mask.shape}")
    w = w * mask
  if not layer.with_bias:
    return w, None
  trailing = () if layer.channel_index == -1 else (1,) * layer.num_spatial_dims
  return w, hk.get_parameter("b", (features, *trailing), dtype, init=layer.b_init).reshape(-1)


def _is_one(layer: Any, inputs: Array) -> bool:
  """Whether it is one example, without a batch dimension."""
  rank = layer.num_spatial_dims
  if inputs.ndim - rank not in (1, 2):
    raise ValueError(
      f"{type(layer).__name__}: inputs must have {rank} spatial dimensions, channels and at most a batch, got shape "
      f"{inputs.shape}"
    )
  return inputs.ndim == rank + 1


class _Convolution(hk.Module):
  """Layers that are one call of `jaxdnn.conv`."""

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation


def _conv(
  layer: Any, inputs: Any, window: tuple[int, ...], features: int, groups: int, residual: Any, **options: Any
) -> Array:
  one = _is_one(layer, inputs)
  x, residual = (a[None] if one and a is not None else a for a in (jnp.asarray(inputs), residual))
  w, b = _parameters(layer, x.dtype, (*window, features), math.prod(window), features)
  y = jaxdnn.conv(
    x, w, b, stride=layer.stride, padding=layer.padding, groups=groups, activation=layer.activation, residual=residual,
    **options,
  )  # fmt: skip
  return y[0] if one else y


class ConvND(_Convolution, hk.ConvND):
  """`haiku.ConvND`, with bias, residual and activation in the convolution's kernel.

  Args:
    activation: None (default), or the name of an activation, as "relu". The others are Haiku's.

  Example:
    >>> y = jhk.Conv2D(32, 3, activation="relu")(x)  # inside hk.transform; w [3, 3, C, 32], b [32]
  """

  def __call__(self, inputs: Array, *, precision: Any = None, residual: Array | None = None) -> Array:
    """The layer's result, laid out like `inputs`.

    Args:
      inputs: a batch in `data_format`, or one example without the batch dimension.
      precision: as in `jaxdnn.conv`.
      residual: array like the result, added before the activation.
    """
    channels = jnp.shape(inputs)[-1 if self.channel_index == -1 else -self.num_spatial_dims - 1]
    return _conv(
      self, inputs, (*self.kernel_shape, channels // self.feature_group_count), self.output_channels,
      self.feature_group_count, residual, dilation=self.kernel_dilation, dimension_numbers=self.dimension_numbers,
      precision=precision,
    )  # fmt: skip


class Conv1D(ConvND, hk.Conv1D):
  """`haiku.Conv1D`: `ConvND` of one spatial dimension."""


class Conv2D(ConvND, hk.Conv2D):
  """`haiku.Conv2D`: `ConvND` of two spatial dimensions."""


class Conv3D(ConvND, hk.Conv3D):
  """`haiku.Conv3D`: `ConvND` of three spatial dimensions."""


class _Depthwise(_Convolution):
  def __call__(self, inputs: Array, *, residual: Array | None = None) -> Array:
    """The layer's result, laid out like `inputs`, a batch in `data_format`; `residual` comes before the activation."""
    channels = jnp.shape(inputs)[self.channel_index]
    return _conv(
      self, inputs, (*self.kernel_shape, 1), self.channel_multiplier * channels, channels, residual,
      dilation=self.rhs_dilation, dimension_numbers=self.dn,
    )  # fmt: skip


class DepthwiseConv1D(_Depthwise, hk.DepthwiseConv1D):
  """`haiku.DepthwiseConv1D`, with bias, residual and activation in the convolution's kernel, as `ConvND` has them."""


class DepthwiseConv2D(_Depthwise, hk.DepthwiseConv2D):
  """`haiku.DepthwiseConv2D`, with bias, residual and activation in the convolution's kernel, as `ConvND` has them."""


class DepthwiseConv3D(_Depthwise, hk.DepthwiseConv3D):
  """`haiku.DepthwiseConv3D`, with bias, residual and activation in the convolution's kernel, as `ConvND` has them."""


class ConvNDTranspose(hk.ConvNDTranspose):
  """`haiku.ConvNDTranspose`: no zero is inserted between the input's elements.

  Example:
    >>> y = jhk.Conv2DTranspose(16, 4, stride=2)(x)  # inside hk.transform; x [N, H, W, C], y [N, 2H, 2W, 16]
  """

  def __call__(self, inputs: Array, *, precision: Any = None) -> Array:
    """The layer's result, laid out like `inputs`: a batch in `data_format`, or one example."""
    inputs, rank, one = jnp.asarray(inputs), self.num_spatial_dims, _is_one(self, inputs)
    x = inputs[None] if one else inputs
    channels = x.shape[self.channel_index]
    fan_in, shape = math.prod(self.kernel_shape) * channels, (*self.kernel_shape, self.output_channels, channels)
    w, b = _parameters(self, x.dtype, shape, fan_in, self.output_channels)
    padding = self.padding
    if self.output_shape is not None:
      spatial = x.shape[1:-1] if self.channel_index == -1 else x.shape[2:]
      each = zip(spatial, self.output_shape, self.kernel_shape, self.stride, strict=True)
      padding = [_padding_for(padding, *sizes) for sizes in each]
    y = jaxdnn.conv_transpose(x, w, self.stride, padding, dimension_numbers=self.dimension_numbers, precision=precision)
    if b is not None:
      y = y + b.reshape(*[1] * (rank + 1), -1) if self.channel_index == -1 else y + b.reshape(1, -1, *[1] * rank)
    return y[0] if one else y


def _padding_for(padding: str, size: int, out: int, kernel: int, stride: int) -> tuple[int, int]:
  """Padding of the dilated input for a result of `out` elements: that of the transpose of a convolution from these."""
  if padding not in ("VALID", "SAME"):
    raise ValueError(f"padding must be 'VALID' or 'SAME' where output_shape is given, got {padding!r}")
  expected = (out - kernel + stride) // stride if padding == "VALID" else -(-out // stride)
  if size != expected:
    raise ValueError(
      f"output_shape does not fit the input: of {out} elements a convolution with kernel {kernel}, stride {stride} and "
      f"padding {padding!r} makes {expected}, but the input has {size}"
    )
  reach = (size - 1) * stride + 1
  before = 0 if padding == "VALID" else max(0, reach + kernel - 1 - out) // 2
  low = kernel - 1 - before
  return low, out + kernel - 1 - reach - low


class Conv1DTranspose(ConvNDTranspose, hk.Conv1DTranspose):
  """`haiku.Conv1DTranspose`: `ConvNDTranspose` of one spatial dimension."""


class Conv2DTranspose(ConvNDTranspose, hk.Conv2DTranspose):
  """`haiku.Conv2DTranspose`: `ConvNDTranspose` of two spatial dimensions."""


class Conv3DTranspose(ConvNDTranspose, hk.Conv3DTranspose):
  """`haiku.Conv3DTranspose`: `ConvNDTranspose` of three spatial dimensions."""
