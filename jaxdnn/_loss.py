"""Losses of a classifier: negative log-likelihood and softmax cross-entropy with integer labels.

The label's entry is taken by a select against an iota and a sum, not by a gather, whose gradient is a scatter: XLA
fuses both directions, the result is the same on every run, and an entry of -inf that is not the label's is never
multiplied by zero.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _primitive, _softmax

# Public functions ----------------------------------------------------------------------------------------------------


def nll_loss(log_probs: Array, labels: Array, *, axis: int = -1, reduction: str = "mean") -> Array:
  """Negative log-likelihood, `-log_probs[label]` for every label.

  Args:
    log_probs: floating-point array with the classes along `axis`, as `log_softmax` returns it.
    labels: integers in [0, classes), of the shape of `log_probs` without `axis`.
    axis: the axis of the classes. The default is the last.
    reduction: "mean" over all labels (the default), "sum", or "none".

  Returns:
    A scalar, or with "none" an array of the shape of `labels`, in the dtype of `log_probs`; the computation and the
    reduction are in float32 at least. A label out of range makes its loss NaN, and with it the mean and the sum, and
    contributes nothing to the gradient. The mean over no labels is NaN.

  Raises:
    TypeError: `log_probs` is not floating-point, or `labels` or `axis` is not integer.
    ValueError: `axis` is out of range, `labels` has another shape, or `reduction` is none of the three.

  Example:
    >>> jaxdnn.nll_loss(jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([1]))
    Array(1.3862944, dtype=float32)
  """
  log_probs, labels, axis = _checked("nll_loss", "log_probs", log_probs, labels, axis, reduction)
  wide = log_probs.astype(_primitive.accumulator_dtype(log_probs.dtype))
  return REDUCTIONS[reduction](_negative_entries(wide, labels, axis)).astype(log_probs.dtype)


def cross_entropy(logits: Array, labels: Array, *, axis: int = -1, reduction: str = "mean") -> Array:
  """Softmax cross-entropy with integer labels, `log(sum(exp(logits))) - logits[label]` for every label.

  The gradient of the mean over N labels is `(softmax(logits) - onehot) / N`.

  Args:
    logits: floating-point array with the classes along `axis`.
    labels: integers in [0, classes), of the shape of `logits` without `axis`.
    axis: the axis of the classes. The default is the last.
    reduction: "mean" over all labels (the default), "sum", or "none".

  Returns:
    A scalar, or with "none" an array of the shape of `labels`, in the dtype of `logits`; the computation and the
    reduction are in float32 at least. A label out of range makes its loss NaN, and with it the mean and the sum, and
    contributes nothing to the gradient. The mean over no labels is NaN. Logits of -inf are classes of probability 0.

  Raises:
    TypeError: `logits` is not floating-point, or `labels` or `axis` is not integer.
    ValueError: `axis` is out of range, `labels` has another shape, or `reduction` is none of the three.

  Example:
    >>> jaxdnn.cross_entropy(jnp.array([[0.0, 0.0]]), jnp.array([1]))
    Array(0.6931472, dtype=float32)
  """
  logits, labels, axis = _checked("cross_entropy", "logits", logits, labels, axis, reduction)
  wide = logits.astype(_primitive.accumulator_dtype(logits.dtype))
  losses = _negative_entries(_softmax.log_softmax(wide, axis), labels, axis)
  return REDUCTIONS[reduction](losses).astype(logits.dtype)


REDUCTIONS: dict[str, Callable[[Array], Array]] = {"mean": jnp.mean, "sum": jnp.sum, "none": lambda losses: losses}


def _checked(op: str, name: str, scores: Array, labels: Array, axis: Any, reduction: str) -> tuple[Array, Array, int]:
  scores, labels = jnp.asarray(scores), jnp.asarray(labels)
  if not jnp.issubdtype(scores.dtype, jnp.floating):
    raise TypeError(f"{op}: {name} must be floating-point, got {scores.dtype}")
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    raise TypeError(f"{op}: labels must be integers, got {labels.dtype}")
  if reduction not in REDUCTIONS:
    raise ValueError(f"{op}: reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
  axes = _softmax.canonical_axes(op, axis, scores.ndim)
  if len(axes) != 1:
    raise ValueError(f"{op}: axis must be one axis, that of the classes, got {axis!r}")
  want = (*scores.shape[: axes[0]], *scores.shape[axes[0] + 1 :])
  if labels.shape != want:
    raise ValueError(
      f"{op}: labels must have the shape of {name} without axis {axes[0]}, {want} for {name} of shape "
      f"{scores.shape}; got {labels.shape}"
    )
  return scores, labels, axes[0]


# Computation ---------------------------------------------------------------------------------------------------------


def _negative_entries(log_probs: Array, labels: Array, axis: int) -> Array:
  classes = log_probs.shape[axis]
  if labels.dtype.itemsize < 4:
    # An iota of int8 would wrap around; of a wider type labels are compared as they are, since to narrow one could
    # bring it into range.
    labels = labels.astype(np.int32)
  numbers = jax.lax.broadcasted_iota(labels.dtype, log_probs.shape, axis)
  entries = jnp.sum(jnp.where(jnp.expand_dims(labels, axis) == numbers, log_probs, 0), axis)
  return jnp.where((labels >= 0) & (labels < classes), -entries, jnp.nan)
