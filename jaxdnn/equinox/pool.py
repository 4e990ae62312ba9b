"""Pooling layers of `equinox.nn` as subclasses that call other kernels."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax import Array

import jaxdnn
from jaxdnn.equinox.check import check_rank


def _layout(x: Array) -> str:
  return "NC" + "DHW"[4 - x.ndim :]


def _pooled(pool: Callable[..., Any], layer: Any, x: Array) -> Array:
  check_rank(layer, x)
  padding = list(layer.padding)
  if layer.use_ceil:  # Equinox's rule: one more window wherever the last one leaves something over.
    each = zip(x.shape[1:], padding, layer.kernel_size, layer.stride, strict=True)
    padding = [(lo, hi + s if (n + lo + hi - k) % s else hi) for n, (lo, hi), k, s in each]
  return pool(x[None], layer.kernel_size, stride=layer.stride, padding=padding, layout=_layout(x))[0]


class _MaxPool(eqx.nn.Pool):
  def __call__(self, x: Array, *, key: Any = None) -> Array:
    """The maxima [channels, *spatial] of x [channels, *spatial]; `key` is ignored."""
    return _pooled(jaxdnn.max_pool, self, x)


class _AvgPool(eqx.nn.Pool):
  def __call__(self, x: Array, *, key: Any = None) -> Array:
    """The averages [channels, *spatial] of x [channels, *spatial], in which padding counts; `key` is ignored."""
    return _pooled(jaxdnn.avg_pool, self, x)


class MaxPool1d(_MaxPool, eqx.nn.MaxPool1d):
  """`equinox.nn.MaxPool1d`."""


class MaxPool2d(_MaxPool, eqx.nn.MaxPool2d):
  """`equinox.nn.MaxPool2d`."""


class MaxPool3d(_MaxPool, eqx.nn.MaxPool3d):
  """`equinox.nn.MaxPool3d`."""


class AvgPool1d(_AvgPool, eqx.nn.AvgPool1d):
  """`equinox.nn.AvgPool1d`."""


class AvgPool2d(_AvgPool, eqx.nn.AvgPool2d):
  """`equinox.nn.AvgPool2d`."""


class AvgPool3d(_AvgPool, eqx.nn.AvgPool3d):
  """`equinox.nn.AvgPool3d`."""


def _has_equal_bins(layer: Any, x: Array) -> bool:
  """Where bins differ in size, Equinox's are others than jaxdnn's, and its own layer computes them."""
  if x.ndim - 1 != len(layer.target_shape):
    raise ValueError(
      f"{type(layer).__name__}: x must be [channels, *spatial] with {len(layer.target_shape)} spatial dimensions, got "
      f"shape {x.shape}"
    )
  return all(n % t == 0 for n, t in zip(x.shape[1:], layer.target_shape, strict=True))


class _AdaptiveMaxPool(eqx.nn.AdaptivePool):
  def __call__(self, x: Array, *, key: Any = None) -> Array:
    """The maxima [channels, *target_shape] of x [channels, *spatial]; `key` is ignored."""
    if not _has_equal_bins(self, x):
      return super().__call__(x)
    return jaxdnn.adaptive_max_pool(x[None], tuple(self.target_shape), layout=_layout(x))[0]


class _AdaptiveAvgPool(eqx.nn.AdaptivePool):
  def __call__(self, x: Array, *, key: Any = None) -> Array:
    """The averages [channels, *target_shape] of x [channels, *spatial]; `key` is ignored."""
    if not _has_equal_bins(self, x):
      return super().__call__(x)
    return jaxdnn.adaptive_avg_pool(x[None], tuple(self.target_shape), layout=_layout(x))[0]


class AdaptiveMaxPool1d(_AdaptiveMaxPool, eqx.nn.AdaptiveMaxPool1d):
  """`equinox.nn.AdaptiveMaxPool1d`, by a kernel where the target divides the input."""


class AdaptiveMaxPool2d(_AdaptiveMaxPool, eqx.nn.AdaptiveMaxPool2d):
  """`equinox.nn.AdaptiveMaxPool2d`, by a kernel where the target divides the input."""


class AdaptiveMaxPool3d(_AdaptiveMaxPool, eqx.nn.AdaptiveMaxPool3d):
  """`equinox.nn.AdaptiveMaxPool3d`, by a kernel where the target divides the input."""


class AdaptiveAvgPool1d(_AdaptiveAvgPool, eqx.nn.AdaptiveAvgPool1d):
  """`equinox.nn.AdaptiveAvgPool1d`, by a kernel where the target divides the input."""


class AdaptiveAvgPool2d(_AdaptiveAvgPool, eqx.nn.AdaptiveAvgPool2d):
  """`equinox.nn.AdaptiveAvgPool2d`, by a kernel where the target divides the input."""


class AdaptiveAvgPool3d(_AdaptiveAvgPool, eqx.nn.AdaptiveAvgPool3d):
  """`equinox.nn.AdaptiveAvgPool3d`, by a kernel where the target divides the input."""
