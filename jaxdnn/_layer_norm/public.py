"""The public functions: arguments checked, axes brought to the end, rows bound to the primitive."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn import _axes, _masks, _primitive, _sharding
from jaxdnn._arguments import number
from jaxdnn._eager import compiled
from jaxdnn._layer_norm.primitives import absent, as_returned, is_absent, layer_norm_p


@compiled
def layer_norm(
  x: Array,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int | Sequence[int] = -1,
  epsilon: float = 1e-5,
  zero_centered: bool = False,
  where: Array | None = None,
) -> Array:
  """Layer normalisation, `(x - mean) / sqrt(variance + epsilon) * scale + bias`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    scale: floating-point array of the shape of `x` along `axis`, in the order of `x`; None is 1. It is best kept in
      float32, whatever `x` is: its gradient then is summed and returned in float32.
    bias: like `scale`; None is 0.
    axis: the axis over which mean and variance are taken, or several. The variance is the mean of squares, without
      Bessel's correction.
    epsilon: what is added to the variance, positive.
    zero_centered: `1 + scale` takes the place of `scale`.
    where: booleans that broadcast to the shape of `x`. Entries where it is False count nowhere: the result there is 0,
      its gradient is 0, and whatever `x` holds there, NaN included, changes nothing. A mask of whole rows, of size 1
      along `axis`, is two selections around the kernel; with any other, XLA's own fusions run instead.

  Returns:
    An array like `x`. Mean and variance are computed in two passes over data that is read once, so that rows whose mean
    is far larger than their deviation lose nothing. A row that has NaN or an infinity is NaN.

  Raises:
    TypeError: an array is not floating-point, `axis` is not an integer or integers, `epsilon` is not a number, or
      `where` is not boolean.
    ValueError: an axis is out of range or named twice, `scale` or `bias` is of another shape, `epsilon` is not
      positive, or `where` does not broadcast to `x`.

  Example:
    >>> jaxdnn.layer_norm(jnp.array([1.0, 2.0, 3.0]), bias=jnp.ones(3))
    Array([-0.22473562,  1.        ,  2.2247355 ], dtype=float32)
    >>> jaxdnn.layer_norm(jnp.array([1.0, 3.0, jnp.nan]), where=jnp.array([True, True, False]))
    Array([-0.999995,  0.999995,  0.      ], dtype=float32)
  """
  return _norm("layer_norm", x, None, scale, bias, axis, epsilon, zero_centered, where, center=True)[0]


@compiled
def rms_norm(
  x: Array,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int | Sequence[int] = -1,
  epsilon: float = 1e-6,
  zero_centered: bool = False,
  where: Array | None = None,
) -> Array:
  """Root-mean-square normalisation, `x / sqrt(mean(x²) + epsilon) * scale + bias`.

  Args:
    x: floating-point array of rank 1 or more. 16-bit floats are computed in float32.
    scale: floating-point array of the shape of `x` along `axis`, best kept in float32; None is 1.
    bias: like `scale`; None is 0.
    axis: the axis over which the mean is taken, or several.
    epsilon: what is added to the mean of squares, positive.
    zero_centered: `1 + scale` takes the place of `scale`.
    where: booleans that broadcast to the shape of `x`, as for `layer_norm`.

  Returns:
    An array like `x`. A row that has NaN is NaN; one that has an infinity is NaN there and 0 elsewhere.

  Raises:
    TypeError, ValueError: as `layer_norm` does.

  Example:
    >>> jaxdnn.rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0]))
    Array([0.84852815, 2.2627418 ], dtype=float32)
  """
  return _norm("rms_norm", x, None, scale, bias, axis, epsilon, zero_centered, where, center=False)[0]


@compiled
def add_layer_norm(
  x: Array,
  residual: Array,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int | Sequence[int] = -1,
  epsilon: float = 1e-5,
  zero_centered: bool = False,
  where: Array | None = None,
) -> tuple[Array, Array]:
  """Residual addition and layer normalisation in one pass: `s = x + residual` and `layer_norm(s, ...)`.

  Args:
    x: floating-point array of rank 1 or more.
    residual: array of the shape and element type of `x`.
    scale, bias, axis, epsilon, zero_centered: as `layer_norm` takes them.
    where: the mask of `layer_norm(s, ...)`, before which XLA then adds. The sum itself knows none.

  Returns:
    `(layer_norm(s, ...), s)`, both like `x`; the former is computed from `s` as it is returned. Their two gradients
    too are added in one pass.

  Raises:
    TypeError: as `layer_norm` does, or `residual` has another element type than `x`.
    ValueError: as `layer_norm` does, or `residual` has another shape than `x`.

  Example:
    >>> y, s = jaxdnn.add_layer_norm(jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0]))
    >>> s
    Array([4., 8.], dtype=float32)
  """
  _check_given("add_layer_norm", residual)
  y, total = _norm("add_layer_norm", x, residual, scale, bias, axis, epsilon, zero_centered, where, center=True)
  return y, total


@compiled
def add_rms_norm(
  x: Array,
  residual: Array,
  scale: Array | None = None,
  bias: Array | None = None,
  *,
  axis: int | Sequence[int] = -1,
  epsilon: float = 1e-6,
  zero_centered: bool = False,
  where: Array | None = None,
) -> tuple[Array, Array]:
  """Residual addition and RMS normalisation in one pass: `s = x + residual` and `rms_norm(s, ...)`.

  Args:
    x: floating-point array of rank 1 or more.
    residual: array of the shape and element type of `x`.
    scale, bias, axis, epsilon, zero_centered: as `rms_norm` takes them.
    where: as in `add_layer_norm`.

  Returns:
    `(rms_norm(s, ...), s)`, both like `x`; the former is computed from `s` as it is returned.

  Raises:
    TypeError, ValueError: as `add_layer_norm` does.

  Example:
    >>> y, s = jaxdnn.add_rms_norm(jnp.array([1.0, 2.0]), jnp.array([2.0, 2.0]))
    >>> y
    Array([0.84852815, 1.1313709 ], dtype=float32)
  """
  _check_given("add_rms_norm", residual)
  y, total = _norm("add_rms_norm", x, residual, scale, bias, axis, epsilon, zero_centered, where, center=False)
  return y, total


@compiled
def adaptive_layer_norm(
  x: Array,
  scale: Array,
  shift: Array,
  *,
  epsilon: float = 1e-6,
  zero_centered: bool = True,
  where: Array | None = None,
) -> Array:
  """Layer normalisation over the last axis with a scale and a shift for each example: `h * (1 + scale) + shift`.

  This is what conditions diffusion transformers (there called modulation). The gradients of `scale` and `shift` are
  sums over the positions of their example alone.

  Args:
    x: floating-point array [*batch, *positions, n].
    scale: floating-point array [*batch, n] of rank 1 or more.
    shift: array of the shape of `scale`.
    epsilon: what is added to the variance, positive.
    zero_centered: `1 + scale` is what multiplies, as is customary here; if False, it is `scale`.
    where: booleans that broadcast to the shape of `x`, as for `layer_norm`.

  Returns:
    An array like `x`.

  Raises:
    TypeError: an array is not floating-point, or `where` is not boolean.
    ValueError: `scale` or `shift` does not fit the shape of `x`, `epsilon` is not positive, or `where` does not
      broadcast to `x`.

  Example:
    >>> x = jnp.array([[[1.0, 3.0], [2.0, 6.0]]])
    >>> jaxdnn.adaptive_layer_norm(x, jnp.array([[0.0, 1.0]]), jnp.array([[5.0, 5.0]]), epsilon=1e-20)
    Array([[[4., 7.],
            [4., 7.]]], dtype=float32)
  """
  op = "adaptive_layer_norm"
  x = _axes.checked(op, x)
  _check_epsilon(op, epsilon)
  if x.ndim == 0:
    raise ValueError(f"{op}: x must have rank 1 or more, got a scalar")
  for name, value in (("scale", scale), ("shift", shift)):
    if value is None:
      raise TypeError(f"{op}: {name} must be an array, got None")
  parameters = [_parameter(op, name, value, None, x) for name, value in (("scale", scale), ("shift", shift))]
  lead = min(max(0, parameters[0].ndim - 1), x.ndim - 1)
  for name, a in zip(("scale", "shift"), parameters, strict=True):
    if a.shape != (*x.shape[:lead], x.shape[-1]):
      raise ValueError(
        f"{op}: {name} must have leading dimensions of x, and its last; got {a.shape} for x of shape {x.shape}"
      )
  where = _masks.beside(op, where, x)
  if x.size == 0:
    return x

  constants: Any = dict(center=True, epsilon=float(epsilon), offset=float(zero_centered))

  def on_shard(x: Array, *parameters: Array) -> Array:
    problems = math.prod(x.shape[:lead])
    y, *_ = _primitive.bind(
      layer_norm_p,
      x.reshape(problems, -1, x.shape[-1]),
      absent(3, x.dtype),
      *(a.reshape(problems, -1) for a in parameters),
      statistics=False,
      **constants,
    )
    return y.reshape(x.shape)

  free = range(x.ndim - 1)
  batch = range(lead)
  like = [_axes.sharded_like(x, a.reshape(*a.shape[:-1], *[1] * (x.ndim - a.ndim), a.shape[-1])) for a in parameters]

  def kernel(x: Array) -> Array:
    return _sharding.map_shards(on_shard, [x, *like], keep=[free, batch, batch], out_like=(0, range(x.ndim)))

  return kernel(x) if where is None else _masked(kernel, x, where, (x.ndim - 1,), *like, **constants)


def _norm(
  op: str,
  x: Any,
  residual: Any,
  scale: Any,
  bias: Any,
  axis: Any,
  epsilon: float,
  zero_centered: bool,
  where: Any,
  *,
  center: bool,
) -> tuple[Array, ...]:
  """The norm, followed by the sum where there is a residual."""
  x = _axes.checked(op, x)
  axes = _axes.canonical(op, axis, x.ndim)
  _check_epsilon(op, epsilon)
  shape = tuple(x.shape[a] for a in axes)
  scale, bias = _parameter(op, "scale", scale, shape, x), _parameter(op, "bias", bias, shape, x)
  operands = [x]
  if residual is not None:
    residual = jnp.asarray(residual)
    if residual.dtype != x.dtype:
      raise TypeError(f"{op}: residual must be {x.dtype} as x is, got {residual.dtype}")
    if residual.shape != x.shape:
      raise ValueError(f"{op}: residual must have the shape of x, {x.shape}, got {residual.shape}")
    operands.append(_axes.sharded_like(x, residual))
  where = _masks.beside(op, where, x)
  if x.size == 0:
    return tuple(operands)

  constants: Any = dict(center=center, epsilon=float(epsilon), offset=float(zero_centered))
  order = [*(d for d in range(x.ndim) if d not in axes), *axes]
  back = [order.index(d) for d in range(x.ndim)]
  n = math.prod(shape)

  def on_shard(*operands: Array) -> tuple[Array, ...]:
    *data, scale, bias = operands
    rows = [a.transpose(order).reshape(1, -1, n) for a in data]
    results = _primitive.bind(
      layer_norm_p,
      *(rows if len(rows) == 2 else (*rows, absent(3, x.dtype))),
      *(a if is_absent(a) else a.reshape(1, n) for a in (scale, bias)),
      statistics=False,
      **constants,
    )
    local = [data[0].shape[d] for d in order]
    return tuple(y.reshape(local).transpose(back) for y in results[: len(data)])

  def kernel(*data: Array) -> Any:
    free = [d for d in range(x.ndim) if d not in axes]
    return _sharding.map_shards(
      on_shard,  # type: ignore[arg-type]
      [*data, scale, bias],
      keep=[*[free] * len(data), (), ()],
      out_like=(0, range(x.ndim)),
    )

  if where is None:
    return tuple(kernel(*operands))
  total = operands[0] if residual is None else as_returned(operands[0] + operands[1])
  affine = [1 if d not in axes else n for d, n in enumerate(x.shape)]
  parameters = [a if is_absent(a) else a.reshape(affine) for a in (scale, bias)]
  y = _masked(lambda x: kernel(x)[0], total, where, axes, *parameters, **constants)
  return (y,) if residual is None else (y, total)


def _masked(
  kernel: Callable[[Array], Array],
  x: Array,
  where: Array,
  axes: tuple[int, ...],
  scale: Array,
  bias: Array,
  *,
  center: bool,
  epsilon: float,
  offset: float,
) -> Array:
  """The norm of what is not masked, by the kernel where the mask is one of rows. `scale` and `bias` broadcast to x."""
  x = _masks.select(where, x)

  def on_shard(x: Array, where: Array, scale: Array, bias: Array) -> Array:
    y = _masks.normalized(x, where, axes, epsilon=epsilon, center=center)
    y = y if is_absent(scale) else y * (scale + offset)
    return (y if is_absent(bias) else y + bias).astype(x.dtype)

  if _masks.is_by_row(where, axes, epsilon, x.dtype):
    y = kernel(x)
  else:
    free = [d for d in range(x.ndim) if d not in axes]
    y = _sharding.map_shards(on_shard, [x, where, scale, bias], keep=[free] * 4, out_like=(0, range(x.ndim)))
  return _masks.select(where, y)


def _check_given(op: str, residual: Any) -> None:
  if residual is None:
    raise TypeError(f"{op}: residual must be an array, got None")


def _check_epsilon(op: str, epsilon: float) -> None:
  if not number(op, "epsilon", epsilon) > 0:
    raise ValueError(f"{op}: epsilon must be positive, got {epsilon}")


def _parameter(op: str, name: str, value: Any, shape: tuple[int, ...] | None, x: Array) -> Array:
  """A parameter in the accumulator's type; None is absent. `shape` is the shape it must have, if that is known."""
  wide = _primitive.accumulator_dtype(x.dtype)
  if value is None:
    return absent(2, wide)
  value = jnp.asarray(value)
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise TypeError(f"{op}: {name} must be floating-point, got {value.dtype}")
  if shape is not None and value.shape != shape:
    raise ValueError(
      f"{op}: {name} must have the shape of x along axis, {shape}, got {value.shape} for x of shape {x.shape}"
    )
  return value.astype(wide)
