"""Public functions of batch normalization: arguments, the [n, c, s] view, and explicit meshes."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxdnn import _activation, _axes, _primitive
from jaxdnn._arguments import array, number
from jaxdnn._batch_norm import transform
from jaxdnn._batch_norm.primitives import FUSED, Spec
from jaxdnn._eager import compiled


class BatchStats(NamedTuple):
  """Statistics of a batch, for `update_running_stats`."""

  mean: Array
  """In the shape of the scale: the sizes of `axis`. Float32, or float64 for float64 data."""
  var: Array
  """Biased: the mean of the squared deviations from the mean."""
  entries: Array
  """How many entries each channel had, over all shards; a scalar."""


jax.export.register_namedtuple_serialization(BatchStats, serialized_name="jaxdnn.BatchStats")


@compiled
def batch_norm(
  x: Array,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int | Sequence[int] = -1,
  epsilon: float = 1e-5,
  activation: str | None = None,
  residual: Array | None = None,
  where: Array | None = None,
  axis_name: Any = None,
) -> tuple[Array, BatchStats]:
  """Batch normalization in training: `activation((x - mean) / sqrt(var + epsilon) * scale + bias + residual)`.

  Mean and variance are those of this batch, for each index along `axis`, over all other axes. Their derivatives are
  part of the result's, and both are differentiable themselves, in either mode and to any order.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    scale: in the shape of the sizes of `axis`, ascending; 1 if None.
    bias: the same; 0 if None.
    axis: the axis, or axes, with statistics of their own: -1 for channels-last data and 1 for channels-first, neither
      of which is transposed, or all but the batch for per-activation statistics.
    epsilon: added to the variance.
    activation: name of an activation, as `jaxdnn.relu`'s is "relu". Fused, as is its derivative, which costs no memory.
    residual: array like `x`, added before the activation.
    where: booleans that broadcast to the shape of `x`, with size 1 along `axis`. Entries where it is False count
      nowhere: the result there is 0, its gradient is 0, and whatever `x` holds there, NaN included, changes nothing.
    axis_name: mesh axes, or axes of a `vmap` or `pmap` with that name, to take the statistics over: one name or a
      tuple. The shards are weighed by how many entries they have. Under a mesh with explicit axes, an `x` that is
      sharded along the axes to reduce is synchronised by itself.

  Returns:
    An array like `x`, and the statistics. One entry for each channel gives a variance of 0 and the bias, as equal
    entries do; or NaN where `epsilon` is 0. Without an entry, mean and variance are 0.

  Raises:
    TypeError: `x` is not floating-point, an operand has the wrong type, or `axis` is not made of integers.
    ValueError: an axis is out of range or named twice, a shape does not fit, or the activation is unknown.

  Example:
    >>> y, stats = jaxdnn.batch_norm(jnp.array([[1.0, 5.0], [3.0, 5.0]]), epsilon=1e-12, bias=jnp.array([0.0, 7.0]))
    >>> y
    Array([[-1.,  7.],
           [ 1.,  7.]], dtype=float32)
    >>> stats.mean, stats.var
    (Array([2., 5.], dtype=float32), Array([1., 0.], dtype=float32))
  """
  op = "batch_norm"
  x, axes = _checked(op, x, axis, epsilon)
  scale, bias = _parameters(op, x, axes, scale=scale, bias=bias)
  residual = _residual(op, x, residual)
  if where is not None:
    where = _axes.aligned_mask(op, where, x.shape)
    if any(where.shape[a] != 1 for a in axes):
      raise ValueError(f"{op}: where must have size 1 along axis {axis!r}, got shape {where.shape} for x {x.shape}")
  spec, after = _spec(op, epsilon, activation)
  names = tuple(axis_name) if isinstance(axis_name, tuple | list) else () if axis_name is None else (axis_name,)

  def local(names: Any, x: Array, scale: Array, bias: Array, residual: Any, where: Any) -> tuple[Array, ...]:
    view = _View(x.shape, axes)
    mask = None if where is None else view.mask(where)
    big = view.data(x)
    extra = None if residual is None else view.data(residual)
    y, mean, var = transform.train(spec, names, big, scale.reshape(-1), bias.reshape(-1), extra, mask)
    n = transform.count(big, mask, names)
    y = after(view.undo(y))
    if where is not None and activation not in (None, *FUSED):
      y = jnp.where(where, y, jnp.zeros((), y.dtype))
    return y, mean.reshape(scale.shape), var.reshape(scale.shape), n

  y, mean, var, n = _over_shards(op, local, names, axes, x, [scale, bias], residual, where)
  return y, BatchStats(mean, var, n)


@compiled
def batch_norm_inference(
  x: Array,
  mean: Array,
  var: Array,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int | Sequence[int] = -1,
  epsilon: float = 1e-5,
  activation: str | None = None,
  residual: Array | None = None,
) -> Array:
  """Batch normalization with given statistics: the same formula, with the mean and variance that are passed.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    mean: in the shape of the sizes of `axis`, ascending.
    var: the same.
    scale: the same; 1 if None.
    bias: the same; 0 if None.
    axis: the axis, or axes, with statistics of their own.
    epsilon: added to the variance.
    activation: name of an activation.
    residual: array like `x`, added before the activation.

  Returns:
    An array like `x`, differentiable in every operand.

  Raises:
    TypeError: `x` is not floating-point, an operand has the wrong type, or `axis` is not made of integers.
    ValueError: an axis is out of range or named twice, a shape does not fit, or the activation is unknown.

  Example:
    >>> jaxdnn.batch_norm_inference(jnp.array([[1.0, 5.0]]), jnp.array([0.0, 5.0]), jnp.array([1.0, 4.0]), epsilon=0.0)
    Array([[1., 0.]], dtype=float32)
  """
  op = "batch_norm_inference"
  x, axes = _checked(op, x, axis, epsilon)
  given = _parameters(op, x, axes, mean=mean, var=var, scale=scale, bias=bias)
  residual = _residual(op, x, residual)
  spec, after = _spec(op, epsilon, activation)

  def local(names: Any, x: Array, *others: Any) -> tuple[Array, ...]:
    *given, residual, _ = others
    view = _View(x.shape, axes)
    extra = None if residual is None else view.data(residual)
    return (after(view.undo(transform.infer(spec, view.data(x), *(v.reshape(-1) for v in given), extra))),)

  return _over_shards(op, local, None, axes, x, given, residual, None)[0]


def update_running_stats(
  running: tuple[Array, Array], batch: BatchStats, *, momentum: float | Array, convention: str
) -> tuple[Array, Array]:
  """The running mean and variance after one more batch.

  Args:
    running: mean and variance so far.
    batch: the batch's statistics.
    momentum: a weight in [0, 1]: which one, `convention` says.
    convention: "flax" or "torch".
      "flax": `momentum * old + (1 - momentum) * new`, with the biased variance; usually 0.9 to 0.99.
      "torch", which is cuDNN's too: `(1 - momentum) * old + momentum * new`, with the unbiased variance, that is
      multiplied by `entries / (entries - 1)`; usually 0.1. A momentum of 1 replaces, and `1 / (1 + i)` for batches
      i = 0, 1, ... makes the plain average.

  Returns:
    Mean and variance, in the types of `running`. A single entry has a variance of 0 in both conventions, never NaN, and
    a batch without entries changes nothing.

  Raises:
    TypeError: `batch` is not what `batch_norm` returns, or a running value is not floating-point.
    ValueError: the convention is neither, or a running value has another shape than the batch's.

  Example:
    >>> _, stats = jaxdnn.batch_norm(jnp.array([[1.0], [3.0]]))
    >>> start = jnp.zeros(1), jnp.ones(1)
    >>> jaxdnn.update_running_stats(start, stats, momentum=0.5, convention="torch")
    (Array([1.], dtype=float32), Array([1.5], dtype=float32))
  """
  op = "update_running_stats"
  if convention not in ("flax", "torch"):
    raise ValueError(f"{op}: convention must be 'flax' or 'torch', got {convention!r}")
  if not isinstance(batch, BatchStats):
    raise TypeError(f"{op}: batch must be the statistics that batch_norm returns, got {type(batch).__name__}")
  if not isinstance(running, tuple | list) or len(running) != 2:
    raise TypeError(f"{op}: running must be a pair of arrays, mean and variance, got {type(running).__name__}")
  mean, var = map(jnp.asarray, running)
  for name, old, new in (("mean", mean, batch.mean), ("variance", var, batch.var)):
    if not jnp.issubdtype(old.dtype, jnp.floating):
      raise TypeError(f"{op}: the running {name} must be floating-point, got {old.dtype}")
    if old.shape != new.shape:
      raise ValueError(f"{op}: the running {name} must have the batch's shape {new.shape}, got {old.shape}")
  n = batch.entries
  unbiased = convention == "torch"
  new_var = batch.var * (n / jnp.maximum(n - 1, 1)).astype(batch.var.dtype) if unbiased else batch.var

  def average(old: Array, new: Array) -> Array:
    weight = array(op, "momentum", momentum).astype(old.dtype)
    new_weight = weight if unbiased else 1 - weight
    return jnp.where(n > 0, (1 - new_weight) * old + new_weight * new.astype(old.dtype), old)

  return average(mean, batch.mean), average(var, new_var)


# Arguments -----------------------------------------------------------------------------------------------------------


def _checked(op: str, x: Any, axis: Any, epsilon: Any) -> tuple[Array, tuple[int, ...]]:
  x = _axes.checked(op, x)
  if not number(op, "epsilon", epsilon) >= 0:
    raise ValueError(f"{op}: epsilon must not be negative, got {epsilon}")
  return x, _axes.canonical(op, axis, x.ndim)


def _parameters(op: str, x: Array, axes: tuple[int, ...], **given: Any) -> list[Array]:
  """Each in the type of the statistics; 0, or for the scale 1, where it is None."""
  shape, dtype = tuple(x.shape[a] for a in axes), _primitive.accumulator_dtype(x.dtype)
  arrays = []
  for name, value in given.items():
    if value is None:
      arrays.append(jnp.full(shape, name == "scale", dtype))
      continue
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
      raise TypeError(f"{op}: {name} must be floating-point, got {value.dtype}")
    if value.shape != shape:
      raise ValueError(f"{op}: {name} must have shape {shape}, x {x.shape} along axis {axes}, got {value.shape}")
    arrays.append(value.astype(dtype))
  return arrays


def _residual(op: str, x: Array, residual: Any) -> Array | None:
  if residual is None:
    return None
  residual = jnp.asarray(residual)
  if residual.dtype != x.dtype:
    raise TypeError(f"{op}: residual must have the type of x, {x.dtype}; got {residual.dtype}")
  if residual.shape != x.shape:
    raise ValueError(f"{op}: residual must have the shape of x, {x.shape}; got {residual.shape}")
  return residual


def _spec(op: str, epsilon: float, activation: str | None) -> tuple[Spec, Callable[[Array], Array]]:
  """What the primitives fuse, and what is left to do after them."""
  plain = Spec(float(epsilon), "identity")
  if activation is None:
    return plain, lambda y: y
  known = _activation.ACTIVATIONS
  if not isinstance(activation, str) or activation not in known:
    raise ValueError(f"{op}: activation must be None or one of {', '.join(sorted(known))}, got {activation!r}")
  if activation in FUSED:
    return plain._replace(activation=activation, parameter=known[activation].parameter), lambda y: y
  return plain, lambda y: _activation.apply(activation, y)


# Views and shards ----------------------------------------------------------------------------------------------------


class _View:
  """Arrays of one shape as [n, c, s], c being `axes`. Only axes that are not adjacent must move."""

  def __init__(self, shape: tuple[int, ...], axes: tuple[int, ...]):
    adjacent = axes[-1] - axes[0] + 1 == len(axes)
    rest = [d for d in range(len(shape)) if d not in axes]
    self.order = list(range(len(shape))) if adjacent else [*rest, *axes]
    self.moved = tuple(shape[d] for d in self.order)
    start = axes[0] if adjacent else len(rest)
    self.parts = self.moved[:start], self.moved[start : start + len(axes)], self.moved[start + len(axes) :]

  def data(self, x: Array) -> Array:
    return x.transpose(self.order).reshape([math.prod(part) for part in self.parts])

  def mask(self, where: Array) -> Array:
    before, channels, after = self.parts
    full = jnp.broadcast_to(where.transpose(self.order), (*before, *[1] * len(channels), *after))
    return full.reshape(math.prod(before), math.prod(after))

  def undo(self, y: Array) -> Array:
    return y.reshape(self.moved).transpose([self.order.index(d) for d in range(len(self.order))])


def _over_shards(
  op: str,
  local: Callable[..., tuple[Array, ...]],
  names: tuple[Any, ...] | None,
  axes: tuple[int, ...],
  x: Array,
  given: Sequence[Array],
  residual: Array | None,
  where: Array | None,
) -> tuple[Array, ...]:
  """Calls `local(names, x, *given, residual, where)`, once per shard where `x` is sharded over explicit mesh axes.

  `given` are sharded as `x` is along `axes`, and so are the results after the first; the last of several is one number.
  With `names`, those of the mesh axes along which the others of x's dimensions are sharded are added to them.
  """
  spec = jax.typeof(x).sharding.spec
  if all(axis is None for axis in spec):
    return local(names, x, *given, residual, where)
  channels = PartitionSpec(*[spec[a] for a in axes])
  reduced = [spec[d] for d in range(x.ndim) if d not in axes and spec[d] is not None]
  flat = tuple(name for entry in reduced for name in (entry if isinstance(entry, tuple) else (entry,)))
  given = [jax.sharding.reshard(v, channels) for v in given]
  residual = None if residual is None else jax.sharding.reshard(residual, PartitionSpec(*spec))
  where = None if where is None else _axes.sharded_like(x, where)
  operands = [x, *given, residual, where]
  specs = [None if a is None else PartitionSpec(*jax.typeof(a).sharding.spec) for a in operands]
  out = (PartitionSpec(*spec),) if names is None else (PartitionSpec(*spec), channels, channels, PartitionSpec())
  inner = None if names is None else (*names, *flat)
  return jax.shard_map(lambda *a: local(inner, *a), in_specs=tuple(specs), out_specs=out)(*operands)
