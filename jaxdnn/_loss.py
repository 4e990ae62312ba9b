"""Losses of a classifier: softmax cross-entropy and negative log-likelihood.

For logits x and a distribution q of the classes, with p = softmax(x),

    cross-entropy      log(sum(exp(x))) - sum(q x)      gradient    p - q

Cross-entropy reads the logits once and keeps a few numbers a row; its gradient reads them once more and is written once
(`_log_partition`). Probabilities are never stored. What remains to do here is done on one number a row.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _axes, _primitive
from jaxdnn._arguments import number
from jaxdnn._eager import compiled
from jaxdnn._log_partition import log_partition_p

# Public functions ----------------------------------------------------------------------------------------------------


@compiled
def nll_loss(
  log_probs: Array,
  labels: Array,
  *,
  axis: int = -1,
  weight: Array | None = None,
  ignore_index: int | None = None,
  reduction: str = "mean",
) -> Array:
  """Negative log-likelihood, `-log_probs[label]` for every label.

  Args:
    log_probs: floating-point array with the classes along `axis`, as `log_softmax` returns it.
    labels: integers in [0, classes), of the shape of `log_probs` without `axis`.
    axis: the axis of the classes. The default is the last.
    weight: a factor for each class, [classes]. A label's loss is multiplied by the weight of its class, and the mean
      divides by the sum of these weights.
    ignore_index: a label, in range or not, that takes no part: its loss and its gradient are 0, and the mean does not
      count it.
    reduction: "mean" over all labels (the default), "sum", or "none".

  Returns:
    A scalar, or with "none" an array of the shape of `labels`, in the dtype of `log_probs`; the computation and the
    reduction are in float32 at least. A label out of range makes its loss NaN, and with it the mean and the sum, and
    contributes nothing to the gradient. The mean over no labels is NaN.

  Raises:
    TypeError: `log_probs` or `weight` is not floating-point, or `labels`, `axis` or `ignore_index` is not integer.
    ValueError: `axis` is out of range, `labels` or `weight` has another shape, or `reduction` is none of the three.

  Example:
    >>> jaxdnn.nll_loss(jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([1]))
    Array(1.3862944, dtype=float32)
  """
  op = "nll_loss"
  log_probs, labels, axis = _checked(op, "log_probs", log_probs, labels, axis, reduction)
  weights = _checked_weight(op, weight, log_probs, axis)
  wide = log_probs.astype(_primitive.accumulator_dtype(log_probs.dtype))
  numbers, factors, blank = _numbered(op, labels, wide.shape[axis], ignore_index, wide.dtype, *weights)
  # A select against an iota and a sum, not a gather, whose gradient is a scatter: XLA fuses both directions, the result
  # is the same on every run, and an entry of -inf that is not the label's is never multiplied by zero.
  classes = jax.lax.broadcasted_iota(numbers.dtype, wide.shape, axis)
  entries = jnp.sum(jnp.where(jnp.expand_dims(numbers, axis) == classes, wide, 0), axis)
  losses = jnp.where(numbers < 0, blank, -entries if factors is None else -entries * factors)
  return _reduced(losses, factors, reduction).astype(log_probs.dtype)


@compiled
def cross_entropy(
  logits: Array,
  labels: Array,
  *,
  axis: int = -1,
  weight: Array | None = None,
  ignore_index: int | None = None,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  reduction: str = "mean",
) -> Array:
  """Softmax cross-entropy, `log(sum(exp(logits))) - logits[label]` for every label.

  With soft labels q it is `-sum(q log_softmax(logits))`. The gradient of the mean over N labels is
  `(softmax(logits) - onehot) / N`.

  Args:
    logits: floating-point array with the classes along `axis`.
    labels: integers in [0, classes), of the shape of `logits` without `axis`; or soft labels, floating-point of the
      shape of `logits`, in which the loss is differentiable as well.
    axis: the axis of the classes. The default is the last.
    weight: a factor for each class, [classes]. An integer label's loss is multiplied by the weight of its class, and
      the mean divides by the sum of these weights; soft labels are multiplied class by class, and the mean divides by
      their number of rows.
    ignore_index: a label, in range or not, that takes no part: its loss and its gradient are 0, whatever its logits
      are, and the mean does not count it. Only with integer labels.
    label_smoothing: in [0, 1]; labels become `(1 - label_smoothing) labels + label_smoothing / classes`. The second
      part is multiplied by `weight` class by class.
    z_loss: factor of `logsumexp(logits)²`, added to every loss that is not ignored, before the reduction.
    reduction: "mean" over all labels (the default), "sum", or "none".

  Returns:
    A scalar, or with "none" an array of the shape of `logits` without `axis`, in the dtype of `logits`; the computation
    and the reduction are in float32 at least. A label out of range makes its loss NaN, and with it the mean and the
    sum, and contributes nothing to the gradient. The mean over no labels is NaN. Logits of -inf are classes of
    probability 0, of no consequence where the labels give them no weight.

  Raises:
    TypeError: `logits` or `weight` is not floating-point, `labels` is neither integer nor floating-point, `axis` or
      `ignore_index` is not integer, or `label_smoothing` or `z_loss` is not a number.
    ValueError: `axis` is out of range, `labels` or `weight` has another shape, `label_smoothing` is not in [0, 1],
      `reduction` is none of the three, or `ignore_index` is given with soft labels.

  Example:
    >>> jaxdnn.cross_entropy(jnp.array([[0.0, 0.0]]), jnp.array([1]))
    Array(0.6931472, dtype=float32)
  """
  op = "cross_entropy"
  logits, labels, axis = _checked(op, "logits", logits, labels, axis, reduction, soft=True)
  weights = _checked_weight(op, weight, logits, axis)
  smoothing, z_factor = number(op, "label_smoothing", label_smoothing), number(op, "z_loss", z_loss)
  if not 0 <= smoothing <= 1:
    raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
  losses_of = functools.partial(_losses, axis=axis, smoothing=smoothing, z_loss=z_factor)
  if jnp.issubdtype(labels.dtype, jnp.floating):
    if ignore_index is not None:
      raise ValueError(f"{op}: ignore_index is an integer label and soft labels have none, got {ignore_index}")
    if weights:
      labels = labels * _along(weights[0], axis, labels.ndim).astype(labels.dtype)
    return _reduced(losses_of(logits, labels, weights, None), None, reduction).astype(logits.dtype)
  dtype = _primitive.accumulator_dtype(logits.dtype)
  numbers, factors, blank = _numbered(op, labels, logits.shape[axis], ignore_index, dtype, *weights)
  losses = jnp.where(numbers < 0, blank, losses_of(logits, numbers, weights, factors))
  return _reduced(losses, factors, reduction).astype(logits.dtype)


# Arguments -----------------------------------------------------------------------------------------------------------

REDUCTIONS = ("mean", "sum", "none")


def _checked(
  op: str, name: str, scores: Array, labels: Array, axis: Any, reduction: str, soft: bool = False
) -> tuple[Array, Array, int]:
  scores, labels = jnp.asarray(scores), jnp.asarray(labels)
  if not jnp.issubdtype(scores.dtype, jnp.floating):
    raise TypeError(f"{op}: {name} must be floating-point, got {scores.dtype}")
  if reduction not in REDUCTIONS:
    raise ValueError(f"{op}: reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
  axes = _axes.canonical(op, axis, scores.ndim)
  if len(axes) != 1:
    raise ValueError(f"{op}: axis must be one axis, that of the classes, got {axis!r}")
  if soft and jnp.issubdtype(labels.dtype, jnp.floating) and labels.shape == scores.shape:
    return scores, labels, axes[0]
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    but = f" of shape {labels.shape}; soft labels have the shape of {name}, {scores.shape}" if soft else ""
    raise TypeError(f"{op}: labels must be integers, got {labels.dtype}{but}")
  want = (*scores.shape[: axes[0]], *scores.shape[axes[0] + 1 :])
  if labels.shape != want:
    raise ValueError(
      f"{op}: labels must have the shape of {name} without axis {axes[0]}, {want} for {name} of shape "
      f"{scores.shape}; got {labels.shape}"
    )
  return scores, labels, axes[0]


def _checked_weight(op: str, weight: Array | None, scores: Array, axis: int) -> list[Array]:
  """The weight in the accumulator's type, if there is one."""
  if weight is None:
    return []
  weight = jnp.asarray(weight)
  if not jnp.issubdtype(weight.dtype, jnp.floating):
    raise TypeError(f"{op}: weight must be floating-point, got {weight.dtype}")
  if weight.shape != (scores.shape[axis],):
    raise ValueError(f"{op}: weight must have one entry a class, ({scores.shape[axis]},), got {weight.shape}")
  return [weight.astype(_primitive.accumulator_dtype(scores.dtype))]


def _numbered(
  op: str, labels: Array, classes: int, ignore_index: int | None, dtype: Any, *weights: Array
) -> tuple[Array, Array | None, Any]:
  """What integer labels say.

  Returns:
    Numbers of classes, -1 for labels that are ignored or out of range; the weight of each label in the mean, None where
    all are 1; and the losses of labels that are -1.
  """
  if labels.dtype.itemsize < 4:
    labels = labels.astype(np.int32)
  limits = np.iinfo(labels.dtype)
  # Compared as they are, since to narrow a label could bring it into range.
  inside = (labels >= 0) & (labels < classes) if classes <= limits.max else labels >= 0
  ignored = None
  if ignore_index is not None:
    try:
      index = operator.index(ignore_index)
    except TypeError:
      raise TypeError(f"{op}: ignore_index must be an integer, got {ignore_index!r}") from None
    ignored = labels == index if limits.min <= index <= limits.max else jnp.zeros_like(inside)
  valid = inside if ignored is None else inside & ~ignored
  numbers = jnp.where(valid, labels.astype(np.int32 if classes <= 2**31 else np.int64), -1)
  factors = _of_labels(weights[0], numbers) if weights else None
  if ignored is None:
    return numbers, factors, jnp.nan
  factors = jnp.ones(numbers.shape, dtype) if factors is None else factors
  # No NaN but for a label that deserves it: `jax_debug_nans` looks at this array.
  return numbers, jnp.where(ignored, 0, factors), jnp.where(inside | ignored, jnp.zeros((), dtype), jnp.nan)


# Computation ---------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def _of_labels(weight: Array, numbers: Array) -> Array:
  """The weight of each label; of those without a class, any."""
  return weight.at[numbers].get(mode="clip")


@_of_labels.defjvp
def _of_labels_jvp(primals: Any, tangents: Any) -> Any:
  """A sum over classes, so that the gradient is one over labels: that of a gather adds in any order on a GPU."""
  weight, numbers = primals
  chosen = jax.nn.one_hot(numbers, weight.size, dtype=np.bool_)
  return _of_labels(weight, numbers), jnp.sum(jnp.where(chosen, tangents[0], 0), -1)


def _along(values: Array, axis: int, ndim: int) -> Array:
  return jnp.expand_dims(values, [d for d in range(ndim) if d != axis])


def _losses(
  logits: Array,
  targets: Array,
  weights: list[Array],
  factors: Array | None,
  *,
  axis: int,
  smoothing: float,
  z_loss: float,
) -> Array:
  """The loss of each row: of soft targets, or of numbers of classes that are multiplied by `factors`."""
  classes, soft = logits.shape[axis], targets.ndim == logits.ndim
  class_weights = [_along(w, axis, logits.ndim) for w in weights] if smoothing else []
  row_factors = [] if factors is None else [jnp.expand_dims(factors, axis)]
  smooth = "none" if not smoothing else "weighted" if class_weights else "uniform"

  def on_view(x: Array, t: Array, *rest: Array) -> Array:
    w, f = rest[: len(class_weights)], rest[len(class_weights) :]
    m, sums = _primitive.bind(log_partition_p, x, t, *w, targets="soft" if soft else "labels", smooth=smooth)
    if not soft and (z_loss or w):
      # Rows without a label leave here: no derivative multiplies what they hold, which may be NaN, by zero.
      without = t < 0
      m, sums = jnp.where(without, 0, m), jnp.where(without, 0, sums)
    l, score = sums[..., 0:1, :], sums[..., 1:2, :]
    losses = sums[..., 2:3, :] * l - score if soft else l - score
    losses = losses * f[0] if f else losses
    if smoothing:
      total_weight = jnp.sum(w[0], axis=-2, keepdims=True) if w else classes
      losses = (1 - smoothing) * losses + smoothing / classes * (total_weight * l - sums[..., -1:, :])
    return losses + z_loss * (m + l) ** 2 if z_loss else losses

  rows = targets if soft else jnp.expand_dims(targets, axis)
  return jnp.squeeze(_axes.grouped(on_view, (axis,), logits, rows, *class_weights, *row_factors), axis)


def _reduced(losses: Array, factors: Array | None, reduction: str) -> Array:
  if reduction == "none":
    return losses
  total = jnp.sum(losses)
  if reduction == "sum":
    return total
  return total / (losses.size if factors is None else jnp.sum(factors)) if losses.size else total * jnp.nan
