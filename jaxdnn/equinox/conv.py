"""Convolutions of `equinox.nn` as subclasses that call other kernels."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn
from jaxdnn.equinox.check import check_rank


def _channels_first(rank: int) -> lax.ConvDimensionNumbers:
  order = tuple(range(rank))
  return lax.ConvDimensionNumbers(order, order, order)


class Conv(eqx.nn.Conv):
  """`equinox.nn.Conv`, with bias, residual and activation in the convolution's kernel.

  Padding that is not zeros is found by index, without a padded copy.

  Args:
    activation: None (default), or the name of an activation, as "relu". The others are Equinox's.

  Example:
    >>> layer = jeqx.Conv2d(3, 32, 3, padding=1, activation="relu", key=jax.random.key(0))
    >>> y = jax.vmap(layer)(jnp.ones((8, 3, 28, 28)))
  """

  activation: str | None = eqx.field(static=True)

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

  def __call__(self, x: Array, *, key: Any = None, residual: Array | None = None) -> Array:
    """The layer's result [out_channels, *spatial].

    Args:
      x: [in_channels, *spatial].
      key: ignored.
      residual: array like the result, added before the activation.
    """
    check_rank(self, x)
    return jaxdnn.conv(
      x[None], self.weight, None if self.bias is None else self.bias.reshape(-1), stride=self.stride,
      padding=self.padding, padding_mode=self.padding_mode.lower(), dilation=self.dilation, groups=self.groups,
      dimension_numbers=_channels_first(x.ndim + 1), activation=self.activation,
      residual=None if residual is None else residual[None],
    )[0]  # fmt: skip


class Conv1d(Conv, eqx.nn.Conv1d):
  """`equinox.nn.Conv1d`: `Conv` of one spatial dimension."""


class Conv2d(Conv, eqx.nn.Conv2d):
  """`equinox.nn.Conv2d`: `Conv` of two spatial dimensions."""


class Conv3d(Conv, eqx.nn.Conv3d):
  """`equinox.nn.Conv3d`: `Conv` of three spatial dimensions."""


class ConvTranspose(eqx.nn.ConvTranspose):
  """`equinox.nn.ConvTranspose`: no zero is inserted between the input's elements.

  Example:
    >>> layer = jeqx.ConvTranspose2d(3, 16, 4, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((3, 8, 8))).shape
    (16, 16, 16)
  """

  def __call__(self, x: Array, *, key: Any = None) -> Array:
    """The layer's result [out_channels, *spatial] for x [in_channels, *spatial]; `key` is ignored."""
    check_rank(self, x)
    pads = _padding_of_transposed(self)
    if self.padding_mode == "CIRCULAR":
      # What whole strides of padding hold are elements of the input.
      whole = [(lo // s, hi // s) for (lo, hi), s in zip(pads, self.stride, strict=True)]
      x = jnp.pad(x, [(0, 0), *whole], mode="wrap")
      pads = [(lo % s, hi % s) for (lo, hi), s in zip(pads, self.stride, strict=True)]
    y = jaxdnn.conv_general_dilated(
      x[None], self.weight, (1,) * self.num_spatial_dims, pads, lhs_dilation=self.stride, rhs_dilation=self.dilation,
      dimension_numbers=_channels_first(x.ndim + 1), feature_group_count=self.groups,
    )[0]  # fmt: skip
    return y if self.bias is None else y + self.bias


def _padding_of_transposed(layer: Any) -> list[tuple[int, int]]:
  """Padding of the input with `stride - 1` holes between its elements.

  That of a transposed convolution is what the convolution's leaves of the dilated window's reach, `dilation (k - 1)`.
  """
  pairs = []
  given = layer.padding if not isinstance(layer.padding, str) else [layer.padding] * layer.num_spatial_dims
  each = zip(layer.kernel_size, layer.stride, layer.dilation, layer.output_padding, given, strict=True)
  for size, stride, dilation, extra, padding in each:
    reach = dilation * (size - 1)
    if padding == "VALID":
      low = high = 0
    elif isinstance(padding, str):  # As much as gives `stride` times the input's extent.
      total = reach - stride + extra + 1
      extra, total = max(0, -total), max(0, total)
      low = (total + (padding == "SAME_LOWER")) // 2
      high = total - low
    else:
      low, high = padding
    pairs.append((reach - low, reach - high + extra))
  return pairs


class ConvTranspose1d(ConvTranspose, eqx.nn.ConvTranspose1d):
  """`equinox.nn.ConvTranspose1d`: `ConvTranspose` of one spatial dimension."""


class ConvTranspose2d(ConvTranspose, eqx.nn.ConvTranspose2d):
  """`equinox.nn.ConvTranspose2d`: `ConvTranspose` of two spatial dimensions."""


class ConvTranspose3d(ConvTranspose, eqx.nn.ConvTranspose3d):
  """`equinox.nn.ConvTranspose3d`: `ConvTranspose` of three spatial dimensions."""
