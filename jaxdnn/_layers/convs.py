"""The computation of convolutions in `flax.linen` and `flax.nnx`, whose layers name their attributes alike."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn
from jaxdnn._arguments import dilated, is_sequence
from jaxdnn._layers.norms import activate


def is_fused(layer: Any, inputs: Array) -> bool:
  """Whether the layer is one call of `jaxdnn.conv`: not with a function of the user's, nor a dilated input.

  Nor with padding that goes around the input, or reflects it, more than once, as Flax's may.
  """
  ours = layer.conv_general_dilated is jaxdnn.conv_general_dilated
  ours = ours and getattr(layer, "conv_general_dilated_cls", None) is None
  if not ours or any(d != 1 for d in _each(layer, "input_dilation")):
    return False
  if layer.padding not in ("CIRCULAR", "REFLECT"):
    return True
  spatial = inputs.shape[-len(window(layer)) - 1 : -1]
  once = [n - (layer.padding == "REFLECT") for n in spatial]
  extents = map(dilated, window(layer), _each(layer, "kernel_dilation"))
  return all(e // 2 <= n for e, n in zip(extents, once, strict=True))


def window(layer: Any) -> tuple[int, ...]:
  size = layer.kernel_size
  return (size,) if isinstance(size, int) else tuple(size)


def masked(layer: Any, kernel: Array) -> Array:
  if layer.mask is None:
    return kernel
  if layer.mask.shape != kernel.shape:
    raise ValueError(f"mask must have the kernel's shape {kernel.shape}, got {layer.mask.shape}")
  return kernel * layer.mask


def conv(layer: Any, inputs: Array, kernel: Array, bias: Array | None, residual: Array | None) -> Array:
  return jaxdnn.conv(
    inputs, kernel, bias, stride=_each(layer, "strides"), padding=_padding(layer),
    dilation=_each(layer, "kernel_dilation"), groups=layer.feature_group_count, activation=layer.activation,
    residual=residual, precision=layer.precision,
    preferred_element_type=getattr(layer, "preferred_element_type", None),
  )  # fmt: skip


def local_inputs(layer: Any, inputs: Array) -> tuple[Array, Any]:
  """The inputs with all leading dimensions as one, and what padding remains. Patches are copies anyway."""
  x, padding = _batched(inputs, len(window(layer)))[0], _padding(layer)
  if padding not in ("CIRCULAR", "REFLECT", "CAUSAL"):
    return x, padding
  if padding == "CAUSAL" and len(window(layer)) != 1:
    raise ValueError(f"ConvLocal: padding='CAUSAL' is for one spatial dimension, got kernel_size={window(layer)}")
  extents = map(dilated, window(layer), _each(layer, "kernel_dilation"))
  pairs = [(e - 1, 0) if padding == "CAUSAL" else ((e - 1) // 2, e // 2) for e in extents]
  mode: Any = {"CIRCULAR": "wrap", "REFLECT": "reflect", "CAUSAL": "constant"}[padding]
  return jnp.pad(x, [(0, 0), *pairs, (0, 0)], mode=mode), "VALID"


def positions(layer: Any, x: Array, padding: Any) -> tuple[int, ...]:
  """The output's spatial extents, for each of which a `ConvLocal` has a filter."""
  kernel = jax.ShapeDtypeStruct((*window(layer), x.shape[-1], 1), x.dtype)
  geometry = _geometry(layer)
  call = lambda x, w: jaxdnn.conv_general_dilated(x, w, padding=padding, **geometry)  # noqa: E731
  return jax.eval_shape(call, x, kernel).shape[1:-1]


def conv_local(layer: Any, inputs: Array, x: Array, padding: Any, kernel: Array, bias: Array | None) -> Array:
  y = jaxdnn.conv_general_dilated_local(
    x, kernel, padding=padding, filter_shape=window(layer), precision=layer.precision, **_geometry(layer)
  )
  y = y if bias is None else y + bias[None]
  return activate(y.reshape(*inputs.shape[: inputs.ndim - y.ndim + 1], *y.shape[1:]), layer.activation)


def _geometry(layer: Any) -> dict[str, Any]:
  """As lax names it."""
  spatial = "DHW"[3 - len(window(layer)) :]
  return {
    "window_strides": _each(layer, "strides"),
    "lhs_dilation": _each(layer, "input_dilation"),
    "rhs_dilation": _each(layer, "kernel_dilation"),
    "dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
  }


def conv_transpose(layer: Any, inputs: Array, kernel: Array, bias: Array | None) -> Array:
  x, lead = _batched(inputs, len(window(layer)))
  strides, dilation, padding = _each(layer, "strides"), _each(layer, "kernel_dilation"), _padding(layer)
  if padding == "CIRCULAR":
    x, padding = _periodic(x, list(map(dilated, window(layer), dilation)), strides, layer.transpose_kernel)
  y = jaxdnn.conv_transpose(
    x, kernel, strides, padding, rhs_dilation=dilation, transpose_kernel=layer.transpose_kernel,
    precision=layer.precision, preferred_element_type=layer.preferred_element_type,
  )  # fmt: skip
  if bias is not None:
    y = y + bias.astype(y.dtype).reshape(*[1] * (y.ndim - 1), -1)
  return y.reshape(*lead, *y.shape[1:])


def _periodic(x: Array, extents: list[int], strides: tuple[int, ...], transposed: bool) -> tuple[Array, Any]:
  """Input and padding of a transposed convolution of period n * stride.

  Flax wraps what the full one is longer than its period, `e - stride`, around: half of it, rounded up with
  `transpose_kernel` and else down, lies before the result. The same sums come of an input that continues periodically,
  by as many elements as reach into the result; there are `stride` times fewer of these than results to add up.
  """
  widths, pads = [], []
  for n, e, u in zip(x.shape[1:-1], extents, strides, strict=True):
    before = (max(e - u, 0) + transposed) // 2
    low, high = (e - 1 - before) // u, (u - 1 + before) // u
    first = e - 1 - before - low * u
    widths.append((low, high))
    pads.append((first, n * u + e - 2 - first - (n + low + high - 1) * u))
  return jnp.pad(x, [(0, 0), *widths, (0, 0)], mode="wrap"), pads


def _each(layer: Any, name: str) -> tuple[int, ...]:
  """One for each spatial dimension, of what may be one for all, or None for 1."""
  value = getattr(layer, name)
  value = 1 if value is None else value
  return (value,) * len(window(layer)) if isinstance(value, int) else tuple(value)


def _padding(layer: Any) -> Any:
  """A string, or pairs, of which Flax lets one number be both."""
  padding = layer.padding
  if isinstance(padding, str):
    return padding
  return [(p, p) if isinstance(p, int) else p for p in padding] if is_sequence(padding) else padding


def _batched(inputs: Array, rank: int) -> tuple[Array, tuple[int, ...]]:
  """All leading dimensions as one."""
  lead = inputs.shape[: inputs.ndim - rank - 1]
  return inputs.reshape(math.prod(lead), *inputs.shape[len(lead) :]), lead
