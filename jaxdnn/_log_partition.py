"""Log-sum-exp, and with it the scores of targets: what softmax losses are made of.

    m = an origin within the row      l = log(sum(exp(x - m)))      score = sum(q (x - m))  for weights q of entries

So logsumexp = m + l, and the cross-entropy of the distribution q is l - score. The pair (m, l) is kept as two numbers,
since their sum rounds l away where m is large. For differentiation m is a constant: whatever constant is subtracted,
the derivative of l is softmax, exp(x - m - l), and that of a score is q.

One primitive reads x once and returns one number a row of each; its adjoint reads x once more and writes the gradient.
Probabilities are never stored. Operands are [..., n, inner], and sums are over n.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _axes, _primitive
from jaxdnn._eager import compiled

# Public functions ----------------------------------------------------------------------------------------------------


@compiled
def logsumexp(x: Array, axis: int | Sequence[int] = -1, *, keepdims: bool = False, where: Array | None = None) -> Array:
  """Logarithm of the sum of exponentials, `m + log(sum(exp(x - m)))` with `m = max(x)`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    axis: the axis to sum over, or several. The default is the last.
    keepdims: keep the summed axes, with size 1.
    where: booleans that broadcast to the shape of `x`; entries where it is False take no part.

  Returns:
    An array of the shape of `x` without `axis`. A sum over nothing is -inf: over nothing but -inf, over a row without
    an unmasked entry, over an axis of size 0. A row that has +inf and no NaN is +inf. The gradient is the softmax, and
    0 at masked entries, whatever `x` holds there.

  Raises:
    TypeError: `x` is not floating-point, `axis` is not an integer or integers, or `where` is not boolean.
    ValueError: an axis is out of range or named twice, or `where` does not broadcast to `x`.

  Example:
    >>> jaxdnn.logsumexp(jnp.array([1e4, 1e4]))
    Array(10000.693, dtype=float32)
  """
  x = _axes.checked("logsumexp", x)
  axes = _axes.canonical("logsumexp", axis, x.ndim)
  masks = () if where is None else (_axes.aligned_mask("logsumexp", where, x.shape),)

  def on_view(x: Array, *mask: Array) -> Array:
    return _primitive.bind(log_partition_p, x, *mask, targets="mask" if mask else "none", smooth="none")[2]

  y = _axes.grouped(on_view, axes, x, *masks)
  return y if keepdims else jnp.squeeze(y, axes)


# Reference -----------------------------------------------------------------------------------------------------------
#
# A call is of one of four kinds, by its `targets`:
#   "none"     x                                          l
#   "mask"     x, mask that broadcasts to x               l
#   "labels"   x, labels [..., 1, inner]                  l, score of the one-hot q
#   "soft"     x, q like x                                l, score, sum(q)
# With `smooth` there is one more sum, the score of q = 1 ("uniform"), or of weights w of the classes ("weighted"): one
# more operand, [n, 1] up to leading 1s. The sums are [..., k, inner]. Without scores there is one more result, m + l in
# x's type.


def _sum(x: Array) -> Array:
  return jnp.sum(x, axis=-2, keepdims=True)


def _widen(x: Array) -> Array:
  return x.astype(_primitive.accumulator_dtype(x.dtype))


def _products(q: Array, x: Array) -> Array:
  """q x, but 0 for an entry of -inf without weight, which has no part in a score. Elsewhere x is its derivative."""
  apart = (q == 0) & jnp.isneginf(x)
  return jnp.where(apart, 0, q * jnp.where(apart, 0, x))


def _one_hot(labels: Array, n: int) -> Array:
  return labels == jax.lax.broadcasted_iota(labels.dtype, (*labels.shape[:-2], n, labels.shape[-1]), labels.ndim - 2)


def _scores(x: Array, targets: str, rest: Sequence[Array], smooth: str) -> list[Array]:
  """sum(q x) of each q: linear in x."""
  scores = []
  if targets == "labels":
    scores.append(_sum(jnp.where(_one_hot(rest[0], x.shape[-2]), x, 0)))
  if targets == "soft":
    scores.append(_sum(_products(rest[0].astype(x.dtype), x)))
  if smooth == "uniform":
    scores.append(_sum(x))
  if smooth == "weighted":
    # Rows without a label have no part in the weights' derivative, whatever they hold.
    labelled = jnp.where(rest[0] < 0, 0, x) if targets == "labels" else x
    scores.append(_sum(_products(jnp.broadcast_to(rest[-1].astype(x.dtype), x.shape), labelled)))
  return scores


def _with_mass(scores: list[Array], targets: str, mass: Array | None) -> Array:
  return jnp.concatenate([*scores[:2], mass, *scores[2:]] if mass is not None else scores, axis=-2)


def _is_alone(targets: str, smooth: str) -> bool:
  return targets in ("none", "mask") and smooth == "none"


def _log_partition_reference(x: Array, *rest: Array, targets: str, smooth: str) -> tuple[Array, ...]:
  wx = _widen(x)
  if targets == "mask":
    wx = jnp.where(rest[0], wx, -jnp.inf)
  lowest = jnp.finfo(wx.dtype).min
  # NaN reaches the sum by itself. The origin is finite, so that -inf is an exponential of 0 even in a row of them, and
  # +inf one of +inf; but a loss takes +inf for an origin, which makes the row NaN.
  m = jnp.max(jnp.where(jnp.isnan(wx), lowest, wx), axis=-2, keepdims=True, initial=lowest)
  m = jax.lax.stop_gradient(m if targets in ("labels", "soft") else jnp.minimum(m, jnp.finfo(wx.dtype).max))
  d = wx - m
  l = jnp.log(_sum(jnp.exp(d)))
  mass = _sum(rest[0].astype(wx.dtype)) if targets == "soft" else None
  sums = _with_mass([l, *_scores(d, targets, rest, smooth)], targets, mass)
  return (m, sums, (m + l).astype(x.dtype)) if _is_alone(targets, smooth) else (m, sums)


def _softmax(x: Array, m: Array, sums: Array, targets: str, rest: Sequence[Array]) -> Array:
  log_p = (_widen(x) - m) - sums[..., :1, :]
  return jnp.exp(jnp.where(rest[0], log_p, -jnp.inf) if targets == "mask" else log_p)


def _lin_reference(
  t: Array, x: Array, m: Array, sums: Array, *rest: Array, targets: str, smooth: str, narrow: bool
) -> Array:
  wt = _widen(t)
  if targets == "mask":
    wt = jnp.where(rest[0], wt, 0)
  scores = [_sum(_softmax(x, m, sums, targets, rest) * wt), *_scores(wt, targets, rest, smooth)]
  sums = _with_mass(scores, targets, jnp.zeros_like(scores[0]) if targets == "soft" else None)
  return sums.astype(x.dtype) if narrow else sums


def _bwd_reference(
  g: Array, x: Array, m: Array, sums: Array, *rest: Array, targets: str, smooth: str, narrow: bool
) -> Array:
  g = _widen(g)
  # A row whose cotangents are 0 takes no part, whatever it holds: ignored labels, labels out of range.
  p = _softmax(x, m, sums, targets, rest)
  dx = jnp.where(g[..., :1, :] == 0, 0, p * g[..., :1, :])
  if targets == "labels":
    dx += jnp.where(_one_hot(rest[0], x.shape[-2]), g[..., 1:2, :], 0)
  if targets == "soft":
    dx += jnp.where(g[..., 1:2, :] == 0, 0, rest[0].astype(dx.dtype) * g[..., 1:2, :])
  if smooth == "uniform":
    dx += g[..., -1:, :]
  if smooth == "weighted":
    dx += jnp.where(g[..., -1:, :] == 0, 0, rest[-1].astype(dx.dtype) * g[..., -1:, :])
  return dx.astype(x.dtype)


# Primitives ----------------------------------------------------------------------------------------------------------


def _sums_aval(x: Any, targets: str, smooth: str) -> Any:
  count = {"none": 1, "mask": 1, "labels": 2, "soft": 3}[targets] + (smooth != "none")
  return _primitive.out_aval(x, (*x.shape[:-2], count, x.shape[-1]), _primitive.accumulator_dtype(x.dtype))


def _abstract(x: Any, *_: Any, targets: str, smooth: str) -> Any:
  rows = (*x.shape[:-2], 1, x.shape[-1])
  m = _primitive.out_aval(x, rows, _primitive.accumulator_dtype(x.dtype))
  alone = (_primitive.out_aval(x, rows),) if _is_alone(targets, smooth) else ()
  return m, _sums_aval(x, targets, smooth), *alone


def _lin_abstract(t: Any, x: Any, *_: Any, targets: str, smooth: str, narrow: bool) -> Any:
  sums = _sums_aval(t, targets, smooth)
  return sums.update(dtype=x.dtype) if narrow else sums


PARAMS = ("targets", "smooth")

log_partition_p = _primitive.define(
  "log_partition",
  abstract_eval=_abstract,
  reference=_log_partition_reference,
  params=PARAMS,
  multiple_results=True,
)
log_partition_lin_p = _primitive.define(
  "log_partition_lin",
  abstract_eval=_lin_abstract,
  reference=_lin_reference,
  params=(*PARAMS, "narrow"),
)
log_partition_bwd_p = _primitive.define(
  "log_partition_bwd",
  abstract_eval=lambda g, x, *_, **params: _primitive.out_aval(x, x.shape),
  reference=_bwd_reference,
  params=(*PARAMS, "narrow"),
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# log_partition      x             -> m, sums = (l, scores...), and maybe m + l; m is constant
# log_partition_lin  t, x, m, sums -> sum(exp(x - m - l) t), sum(q t)...
# log_partition_bwd  g, x, m, sums -> exp(x - m - l) g[0] + q g[1] + ...
#
# The last two are each other's adjoints, with t's images and g in x's type where they are `narrow`: those of m + l, and
# else in the accumulator's. Derivatives in q and w, of which the scores are linear functions, are taken
# through the reference.


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
  x, *rest = primals
  dx, *drest = tangents
  m, sums, *alone = _primitive.bind(log_partition_p, *primals, **params)

  def of_x(narrow: bool) -> Any:
    return _primitive.bind(log_partition_lin_p, dx, x, m, sums, *rest, **params, narrow=narrow)

  terms = [] if _primitive.is_zero(dx) else [of_x(False)]
  moving = [i for i, d in enumerate(drest) if not _primitive.is_zero(d)]
  if moving:

    def of_weights(*values: Any) -> Array:
      full = list(rest)
      for i, value in zip(moving, values, strict=True):
        full[i] = value
      return _log_partition_reference(x, *full, **params)[1]

    terms.append(jax.jvp(of_weights, [rest[i] for i in moving], [drest[i] for i in moving])[1])
  total = sum(terms[1:], terms[0]) if terms else _primitive.zero_tangent(sums)
  of_alone = [_primitive.zero_tangent(y) if _primitive.is_zero(dx) else of_x(True) for y in alone]
  return (m, sums, *alone), (_primitive.zero_tangent(m), total, *of_alone)


_primitive.set_jvp(log_partition_p, _jvp)
_primitive.linear_in_first(
  log_partition_lin_p,
  _lin_reference,
  transpose=lambda g, *kept, **params: _primitive.bind(log_partition_bwd_p, g, *kept, **params),
)
_primitive.linear_in_first(
  log_partition_bwd_p,
  _bwd_reference,
  transpose=lambda t, *kept, **params: _primitive.bind(log_partition_lin_p, t, *kept, **params),
)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _broadcast_operands(*operands: Any, targets: str, smooth: str, **_: bool) -> list[int]:
  """The mask and the weights of classes."""
  masks = [i for i, a in enumerate(operands) if a.dtype == np.bool_]
  return [*masks, len(operands) - 1] if smooth == "weighted" else masks


def _supported(x: Any, *rest: Any, targets: str, smooth: str) -> bool:
  if (targets == "labels" and rest[0].dtype != np.int32) or (targets == "soft" and rest[0].dtype != x.dtype):
    return False
  # A mask's leading dimensions must fold into a few, and weights be the same in every row.
  weights = rest[-1].shape if smooth == "weighted" else (x.shape[-2], 1)
  return x.ndim <= 8 and math.prod(weights) == x.shape[-2]


for _p in (log_partition_p, log_partition_lin_p, log_partition_bwd_p):
  _primitive.batch_leading(_p, broadcast=_broadcast_operands)
  _primitive.set_shards(_p, "... . inner")


# The tangent map stays with XLA, which makes it one reduction.
_primitive.lower_to_cuda(
  log_partition_p,
  "jaxdnn.log_partition.v2",
  _log_partition_reference,
  attributes=lambda *_, **params: params,
  supported=_supported,
  workspace=lambda x, *_, **params: _axes.workspace("loss", x),
)
_primitive.lower_to_cuda(
  log_partition_bwd_p,
  "jaxdnn.log_partition_bwd.v2",
  _bwd_reference,
  attributes=lambda *_, narrow, **params: params,
  supported=lambda g, x, m, sums, *rest, narrow, **params: _supported(x, *rest, **params),
)
