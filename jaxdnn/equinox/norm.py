"""Normalizations and dropout of `equinox.nn` as subclasses that call other kernels."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

import jaxdnn
from jaxdnn._layers import norms


class BatchNorm(eqx.nn.BatchNorm):
  """`equinox.nn.BatchNorm`, with residual and activation in the same kernel.

  In the mode "batch" training is one call; in "ema", which normalizes with the running statistics of this batch and
  those before, the batch's are taken in a pass of their own.

  Args:
    activation: None (default), or the name of an activation, as "relu". The others are Equinox's.

  Example:
    >>> norm, state = eqx.nn.make_with_state(jeqx.BatchNorm)(32, "batch", mode="batch", activation="relu")
    >>> y, state = jax.vmap(norm, (0, None), (0, None), axis_name="batch")(x, state)  # x [N, 32, *spatial]
  """

  activation: str | None = eqx.field(static=True)

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

  def __call__(
    self, x: Array, state: Any, *, key: Any = None, inference: bool | None = None, residual: Array | None = None
  ) -> tuple[Array, Any]:
    """An array like `x`, and the state after it.

    Args:
      x: [input_size, *spatial], inside a `vmap` with `axis_name`.
      state: of `equinox.nn.make_with_state`.
      key: ignored.
      inference: normalize with the running statistics; by default as the constructor says.
      residual: array like `x`, added before the activation.
    """
    inference = self.inference if inference is None else inference
    average = {"momentum": self.momentum, "convention": "flax"}
    if self.mode == "ema":
      running = state.get(self.ema_state_index)
      if not inference:
        stats = jaxdnn.batch_norm(x, axis=0, axis_name=self.axis_name)[1]
        mixed = jaxdnn.update_running_stats(running, stats, **average)
        first = state.get(self.ema_first_time_index)
        running = tuple(jnp.where(first, a.astype(b.dtype), b) for a, b in zip(stats[:2], mixed, strict=True))
        state = state.set(self.ema_first_time_index, jnp.array(False)).set(self.ema_state_index, running)
      return self._normalized(x, running, residual)[0], state
    counter, hidden = state.get(self.batch_counter), state.get(self.batch_state_index)
    if inference:
      total = jnp.where(counter == 0, 1, 1 - self.momentum**counter)
      return self._normalized(x, (hidden[0] / total, hidden[1] / total), residual)[0], state
    y, stats = self._normalized(x, None, residual)
    hidden = jaxdnn.update_running_stats(hidden, stats, **average)
    return y, state.set(self.batch_counter, counter + 1).set(self.batch_state_index, hidden)

  def _normalized(self, x: Array, running: tuple[Array, Array] | None, residual: Array | None) -> Any:
    given = [a for a in (self.weight, self.bias, *(running or ())) if a is not None]
    return norms.batch_norm(
      x, 0, self.weight, self.bias, running, epsilon=self.eps, dtype=jnp.result_type(x, *given),
      axis_name=self.axis_name, activation=self.activation, residual=residual,
    )  # fmt: skip


def _with_state(y: Array, state: Any) -> Any:
  """Norms return the state that they are given, if they are."""
  return y if state is None else (y, state)


def _check_shape(layer: Any, x: Array) -> None:
  if x.shape != layer.shape:
    raise ValueError(
      f"{type(layer).__name__}: x must have the layer's shape {layer.shape}, got {x.shape}; more dimensions go through "
      "jax.vmap"
    )


class LayerNorm(eqx.nn.LayerNorm):
  """`equinox.nn.LayerNorm`, in one pass.

  Example:
    >>> y = jax.vmap(jeqx.LayerNorm(64))(x)  # x [N, 64]; weight, bias [64]
  """

  def __call__(self, x: Array, state: Any = None, *, key: Any = None) -> Any:
    """An array like `x`, which has the layer's shape; and `state`, if it is given. `key` is ignored."""
    _check_shape(self, x)
    axes = tuple(range(x.ndim))
    return _with_state(jaxdnn.layer_norm(x, self.weight, self.bias, axis=axes, epsilon=self.eps), state)


class RMSNorm(eqx.nn.RMSNorm):
  """`equinox.nn.RMSNorm`, in one pass.

  Example:
    >>> y = jax.vmap(jeqx.RMSNorm(64))(x)  # x [N, 64]; weight, bias [64]
  """

  def __call__(self, x: Array, state: Any = None, *, key: Any = None) -> Any:
    """An array like `x`, which has the layer's shape; and `state`, if it is given. `key` is ignored."""
    _check_shape(self, x)
    axes = tuple(range(x.ndim))
    return _with_state(jaxdnn.rms_norm(x, self.weight, self.bias, axis=axes, epsilon=self.eps), state)


class GroupNorm(eqx.nn.GroupNorm):
  """`equinox.nn.GroupNorm`, with an activation in the same kernel.

  Args:
    activation: None (default), or the name of an activation, as "silu". The others are Equinox's.

  Example:
    >>> y = jax.vmap(jeqx.GroupNorm(8, 64, activation="silu"))(x)  # x [N, 64, *spatial]; weight, bias [64]
  """

  activation: str | None = eqx.field(static=True)

  def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.activation = activation

  def __call__(self, x: Array, state: Any = None, *, key: Any = None) -> Any:
    """An array like `x` [channels, *spatial]; and `state`, if it is given. `key` is ignored."""
    y = jaxdnn.group_norm(
      x[None], self.groups, self.weight, self.bias, axis=1, epsilon=self.eps, activation=self.activation
    )
    return _with_state(y[0], state)


class LocalResponseNorm(eqx.Module):
  """`jaxdnn.local_response_norm` as a layer, which Equinox does not have; arguments and defaults are the function's.

  Example:
    >>> y = jax.vmap(jeqx.LocalResponseNorm(5))(x)  # x [N, C, *spatial]
  """

  size: int | Sequence[int] = eqx.field(static=True, default=5)
  alpha: float = eqx.field(static=True, default=1e-4)
  beta: float = eqx.field(static=True, default=0.75)
  k: float = eqx.field(static=True, default=2.0)
  mode: str = eqx.field(static=True, default="across_channels")
  divide_by_size: bool = eqx.field(static=True, default=True)
  padding: str = eqx.field(static=True, default="SAME")

  def __call__(self, x: Array, *, key: Any = None) -> Array:
    """An array like `x` [channels, *spatial]; `key` is ignored."""
    return jaxdnn.local_response_norm(
      x[None], self.size, alpha=self.alpha, beta=self.beta, k=self.k, mode=self.mode, axis=1,
      divide_by_size=self.divide_by_size, padding=self.padding,
    )[0]  # fmt: skip


class Dropout(eqx.nn.Dropout):
  """`equinox.nn.Dropout`, whose mask is drawn again in the backward pass and kept nowhere. It is not Equinox's mask.

  A `p` that is an array, not a number, is left to Equinox.

  Example:
    >>> y = jeqx.Dropout(0.5)(x, key=jax.random.key(0))
  """

  def __call__(
    self, x: Array, *, key: Any = None, inference: bool | None = None, deterministic: bool | None = None
  ) -> Array:
    """An array like `x`: this itself if `inference`, by default as the constructor says."""
    if deterministic is not None or not isinstance(self.p, int | float):
      return super().__call__(x, key=key, inference=inference, deterministic=deterministic)
    if (self.inference if inference is None else inference) or self.p == 0:
      return x
    if key is None:
      raise RuntimeError("Dropout: key must be given, or inference=True")
    return jaxdnn.dropout(x, self.p, key)
