"""Causal depthwise convolution of sequences: the short convolution of state-space and linear-attention layers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import _activation
from jaxdnn._arguments import arrays
from jaxdnn._conv.fused import check_activation
from jaxdnn._conv.public import conv
from jaxdnn._eager import compiled
from jaxdnn._primitive import accumulator_dtype


@compiled
def causal_conv1d(
  x: Array,
  w: Array,
  b: Array | None = None,
  *,
  activation: str | None = None,
  initial_state: Array | None = None,
  segment_ids: Array | None = None,
  return_final_state: bool = False,
  precision: Any = None,
) -> Any:
  """Each channel's weighted sum of its last inputs: `y[t] = activation(Σ_j w[j] x[t - (k - 1) + j] + b)`.

  What comes before the sequence is zero, or `initial_state`: fed piece by piece, each piece with the final state of the
  one before, a sequence gives what it gives as a whole.

  Args:
    x: sequences [..., L, C].
    w: filter [k, C] of the same dtype; its last row weights the current input.
    b: bias [C], or None.
    activation: None, or the name of an activation, as in `conv`; state-space layers use 'silu'.
    initial_state: the k - 1 inputs before x, [..., k - 1, C], or None for zeros.
    segment_ids: integers [..., L], or None. Inputs of another segment than that of the output count as zero: sequences
      that are packed into one do not see each other. The initial state belongs to the first position's segment. With
      segments the sum is elementwise code that XLA fuses; without, it is a depthwise kernel, and so are all gradients
      together of 2 to 4 taps.
    return_final_state: whether to return the state after x as well.
    precision: as in `conv`.

  Returns:
    y, like x; or, with `return_final_state`, (y, state): the last k - 1 inputs [..., k - 1, C], those of other segments
    than the last position's as zeros.

  Raises:
    ValueError, TypeError: arguments that do not fit; the message has the values.

  Example:
    >>> x, w = jnp.ones((2, 10, 8)), jnp.ones((4, 8))
    >>> y, state = jaxdnn.causal_conv1d(x[:, :6], w, activation='silu', return_final_state=True)
    >>> rest = jaxdnn.causal_conv1d(x[:, 6:], w, activation='silu', initial_state=state)
  """
  x, w = arrays("causal_conv1d", x=x, w=w)
  if w.ndim != 2 or x.ndim < 2 or w.shape[0] < 1 or w.shape[1] != x.shape[-1]:
    raise ValueError(f"causal_conv1d: x [..., L, C] and w [k, C] do not fit, got {x.shape} and {w.shape}")
  if x.dtype != w.dtype:
    raise TypeError(f"causal_conv1d: x and w must have the same dtype, got {x.dtype} and {w.dtype}")
  (*leading, length, c), before = x.shape, w.shape[0] - 1
  n = math.prod(leading)
  b = _checked("b", b, (c,))
  check_activation("causal_conv1d", activation)
  state = _checked("initial_state", initial_state, (*leading, before, c))
  ids = _checked("segment_ids", segment_ids, (*leading, length))
  if ids is not None and not jnp.issubdtype(ids.dtype, jnp.integer):
    raise TypeError(f"causal_conv1d: segment_ids must be integers, got {ids.dtype}")
  x = x.reshape(n, length, c)
  state = None if state is None else state.reshape(n, before, c).astype(x.dtype)
  if ids is None or x.size == 0:
    y = _by_kernel(x, w, b, state, activation, precision)
    ids = None
  else:
    ids = ids.reshape(n, length)
    y = _by_taps(x, w, b, state, ids, activation)
  y = y.reshape(*leading, length, c)
  if not return_final_state:
    return y
  return y, _final_state(x, state, ids, before).reshape(*leading, before, c)


def _checked(name: str, a: Array | None, shape: tuple[int, ...]) -> Array | None:
  if a is not None and jnp.shape(a) != shape:
    raise ValueError(f"causal_conv1d: {name} must have shape {shape}, got {jnp.shape(a)}")
  return None if a is None else jnp.asarray(a)


def _by_kernel(
  x: Array, w: Array, b: Array | None, state: Array | None, activation: str | None, precision: Any
) -> Array:
  before, c = w.shape[0] - 1, w.shape[1]
  if c == 0:  # Of which there are no groups.
    return x

  def layer(x: Array, pad: int) -> Array:
    return conv(x, w[:, None], b, padding=((pad, 0),), groups=c, activation=activation, precision=precision)

  y = layer(x, before)
  if state is None or before == 0 or x.shape[1] == 0:
    return y
  # Only the first outputs see the state: they are computed once more, and the sequence is not copied.
  head = layer(jnp.concatenate([state, x[:, :before]], 1), 0)
  return jax.lax.dynamic_update_slice_in_dim(y, head, 0, 1)


def _by_taps(
  x: Array, w: Array, b: Array | None, state: Array | None, ids: Array, activation: str | None
) -> Array:
  before, wide = w.shape[0] - 1, accumulator_dtype(x.dtype)
  inputs = _with_state(x, state, before)
  segments, length = _with_first(ids, before), x.shape[1]
  y = jnp.zeros(x.shape, wide)
  for j in range(before + 1):
    same = (segments[:, j : j + length] == ids)[..., None]
    y = y + w[j].astype(wide)[None, None] * jnp.where(same, inputs[:, j : j + length], 0).astype(wide)
  y = (y if b is None else y + jnp.asarray(b, wide)[None, None]).astype(x.dtype)
  return y if activation is None else _activation.apply(activation, y)


def _with_state(x: Array, state: Array | None, before: int) -> Array:
  if state is None:
    state = jnp.zeros((x.shape[0], before, x.shape[2]), x.dtype)
  return jnp.concatenate([state, x], 1)


def _final_state(x: Array, state: Array | None, ids: Array | None, before: int) -> Array:
  last = _with_state(x[:, max(x.shape[1] - before, 0) :], state, before)
  last = last[:, last.shape[1] - before :]
  if ids is None:
    return last
  segments = _with_first(ids, before)[:, ids.shape[1] :]
  return jnp.where((segments == ids[:, -1:])[..., None], last, 0)


def _with_first(ids: Array, before: int) -> Array:
  """What comes before the sequence belongs to its first segment."""
  return jnp.concatenate([jnp.repeat(ids[:, :1], before, 1), ids], 1)
