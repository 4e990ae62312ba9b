"""The networks that `benchmarks.models` trains, in Flax: ResNet-50, ConvNeXt-T and MobileNetV2.

Which functions compute them is a field: `conv_general_dilated` is every convolution's, given to `flax.linen.Conv`, and
with `ours` normalisation, activations and pooling are jaxdnn's too. The parameters are the same either way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn
import jaxdnn.linen

ACTIVATIONS = {"relu": nn.relu, "clipped_relu": nn.relu6, None: lambda x: x}
"""Flax's, by jaxdnn's names."""


class BatchNorm(nn.BatchNorm):
  """Flax's, and what follows it: the residual and the activation, which in `jaxdnn.linen.BatchNorm` are one kernel."""

  activation: str | None = None

  @nn.compact
  def __call__(self, x: Array, *, residual: Array | None = None) -> Array:
    y = super().__call__(x)
    return ACTIVATIONS[self.activation](y if residual is None else y + residual)


class Network(nn.Module):
  """What the networks have in common: layers of float32 parameters that compute in `dtype`."""

  conv_general_dilated: Callable[..., Array] = lax.conv_general_dilated
  ours: bool = False
  dtype: Any = jnp.bfloat16
  classes: int = 1000

  def conv(self, features: int, window: int, stride: int = 1, **options: Any) -> nn.Conv:
    return nn.Conv(
      features, (window, window), (stride, stride), dtype=self.dtype,
      conv_general_dilated=self.conv_general_dilated, **options,
    )  # fmt: skip

  def batch_norm(self, activation: str | None, **options: Any) -> nn.BatchNorm:
    layer = jaxdnn.linen.BatchNorm if self.ours else BatchNorm
    return layer(use_running_average=False, momentum=0.9, dtype=self.dtype, activation=activation, **options)

  def classify(self, x: Array) -> Array:
    return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


class ResNet(Network):
  """He et al. 2015, bottlenecks with their stride in the 3x3 layer: [N, H, W, 3] to [N, classes]. By default of 50
  layers."""

  stages: tuple[int, ...] = (3, 4, 6, 3)
  width: int = 64

  @nn.compact
  def __call__(self, x: Array) -> Array:
    conv = partial(self.conv, use_bias=False)
    x = self.batch_norm("relu")(conv(self.width, 7, 2, padding=3)(x.astype(self.dtype)))
    max_pool = jaxdnn.linen.max_pool if self.ours else nn.max_pool
    x = max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
    for stage, blocks in enumerate(self.stages):
      width = self.width << stage
      for block in range(blocks):
        stride = 2 if stage and not block else 1
        y = self.batch_norm("relu")(conv(width, 1)(x))
        y = self.batch_norm("relu")(conv(width, 3, stride, padding=1)(y))
        y = conv(4 * width, 1)(y)
        if not block:
          x = self.batch_norm(None)(conv(4 * width, 1, stride)(x))
        x = self.batch_norm("relu", scale_init=nn.initializers.zeros)(y, residual=x)
    return self.classify(x)


class ConvNeXt(Network):
  """Liu et al. 2022, without stochastic depth: [N, H, W, 3] to [N, classes]. By default the tiny one."""

  stages: tuple[int, ...] = (3, 3, 9, 3)
  width: int = 96

  @nn.compact
  def __call__(self, x: Array) -> Array:
    norm = partial(jaxdnn.linen.LayerNorm if self.ours else nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
    dense, gelu = partial(nn.Dense, dtype=self.dtype), jaxdnn.gelu if self.ours else nn.gelu
    x = norm()(self.conv(self.width, 4, 4, padding="VALID")(x.astype(self.dtype)))
    for stage, blocks in enumerate(self.stages):
      width = self.width << stage
      if stage:
        x = self.conv(width, 2, 2, padding="VALID")(norm()(x))
      for block in range(blocks):
        y = norm()(self.conv(width, 7, padding=3, feature_group_count=width)(x))
        y = dense(width)(gelu(dense(4 * width)(y)))
        scale = self.param(f"scale_{stage}_{block}", nn.initializers.constant(1e-6), (width,), jnp.float32)
        x = x + y * scale.astype(self.dtype)
    return self.classify(norm()(x))


class MobileNetV2(Network):
  """Sandler et al. 2018, of width 1: [N, H, W, 3] to [N, classes]."""

  stages: tuple[tuple[int, int, int, int], ...] = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
  )  # fmt: skip
  """Of each: expansion, features, blocks, and the first block's stride."""
  last: int = 1280

  @nn.compact
  def __call__(self, x: Array) -> Array:
    conv = partial(self.conv, use_bias=False)
    x = self.batch_norm("clipped_relu")(conv(32, 3, 2, padding=1)(x.astype(self.dtype)))
    for expansion, features, blocks, first_stride in self.stages:
      for block in range(blocks):
        stride, width = 1 if block else first_stride, expansion * x.shape[-1]
        y = x if expansion == 1 else self.batch_norm("clipped_relu")(conv(width, 1)(x))
        y = self.batch_norm("clipped_relu")(conv(width, 3, stride, padding=1, feature_group_count=width)(y))
        residual = x if stride == 1 and features == x.shape[-1] else None
        x = self.batch_norm(None)(conv(features, 1)(y), residual=residual)
    return self.classify(self.batch_norm("clipped_relu")(conv(self.last, 1)(x)))
