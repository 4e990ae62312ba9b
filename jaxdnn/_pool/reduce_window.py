"""`jax.lax.reduce_window`, argument for argument, for the reducers that pooling has."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._arguments import Padding, dilated, explicit_padding, per_dimension
from jaxdnn._eager import compiled
from jaxdnn._pool import primitives
from jaxdnn._pool.apply import check_number, over_windows
from jaxdnn._pool.geometry import make_geometry
from jaxdnn._pool.reference import least

_REDUCERS = {
  **dict.fromkeys((lax.max, jnp.maximum), "max"),
  **dict.fromkeys((lax.min, jnp.minimum), "min"),
  **dict.fromkeys((lax.add, jnp.add), "add"),
}


@compiled
def reduce_window(
  operand: Array,
  init_value: Any,
  computation: Callable[..., Any],
  window_dimensions: Sequence[int],
  window_strides: Sequence[int] | None = None,
  padding: Padding = "VALID",
  base_dilation: Sequence[int] | None = None,
  window_dilation: Sequence[int] | None = None,
) -> Array:
  """Reduces sliding windows by a maximum, a minimum or a sum: `jax.lax.reduce_window`, argument for argument.

  Unlike lax's, every one of these has derivatives of every order in both modes, with dilation, and deterministic ones.

  Args:
    operand: floating-point or integer array.
    init_value: a scalar that is no tracer: what padding holds, and where each reduction starts. Of a sum it must be 0.
    computation: `lax.max`, `lax.min` or `lax.add` (or `jnp.maximum`, `jnp.minimum`, `jnp.add`).
    window_dimensions: the window's size along each dimension of `operand`.
    window_strides: distance between windows along each dimension; default 1.
    padding: "VALID", "SAME", "SAME_LOWER", or a `(low, high)` pair per dimension. Negative padding crops. As in lax,
      the strings know nothing of `base_dilation`: they pad as for the operand without gaps.
    base_dilation: distance between the operand's elements, whose gaps hold `init_value`; default 1.
    window_dilation: distance between a window's cells; default 1.

  Returns:
    An array of the operand's type. A maximum is the first in row-major window order, or the first NaN. Windows that
    reach along more than three dimensions are reduced three dimensions at a time.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: another reducer, or an argument of the wrong length or range.

  Example:
    >>> jaxdnn.reduce_window(jnp.array([1.0, 3.0, 2.0]), 0.0, lax.add, (2,), (1,), "VALID")
    Array([4., 5.], dtype=float32)
  """
  name = "reduce_window"
  x = check_number(name, operand, "operand")
  kind = _REDUCERS.get(computation) if callable(computation) else None
  if kind is None:
    raise ValueError(
      f"{name}: computation must be lax.max, lax.min or lax.add, got {computation!r}; for others there is "
      "jax.lax.reduce_window"
    )
  init = _initial(name, init_value, x.dtype)
  window = per_dimension(name, "window_dimensions", window_dimensions, x.ndim)
  strides = per_dimension(name, "window_strides", 1 if window_strides is None else window_strides, x.ndim)
  spacing = per_dimension(name, "base_dilation", 1 if base_dilation is None else base_dilation, x.ndim)
  dilation = per_dimension(name, "window_dilation", 1 if window_dilation is None else window_dilation, x.ndim)
  if kind == "add" and init != 0:
    raise ValueError(f"{name}: init_value of a sum must be 0, got {init_value!r}")
  reach = [dilated(w, d) for w, d in zip(window, dilation, strict=True)]
  pads = explicit_padding(name, padding, x.shape, reach, strides)
  if any(d > 1 for d in spacing):
    gap = jnp.asarray(init if kind == "add" else least(x.dtype, kind == "min"), x.dtype)
    x = lax.pad(x, gap, [(0, 0, d - 1) for d in spacing])
  y = pool_any_rank(name, kind, x, window, strides, pads, dilation)
  if kind != "add" and init != least(x.dtype, kind == "min"):
    y = (jnp.maximum if kind == "max" else jnp.minimum)(y, jnp.asarray(init, y.dtype))
  return y


def pool_any_rank(
  name: str,
  kind: str,
  x: Array,
  window: Sequence[int],
  strides: Sequence[int],
  padding: Sequence[tuple[int, int]],
  dilation: Sequence[int],
) -> Array:
  """The reduction `kind` with an entry per dimension of `x`, three dimensions at a time.

  Innermost first, which keeps the first maximum in row-major order the winner.
  """
  active = [d for d in range(x.ndim) if window[d] > 1 or strides[d] > 1 or any(padding[d])]
  dtype = x.dtype
  if len(active) > 3 and kind == "add" and dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
    x = x.astype(jnp.float32)
  while active:
    *active, axes = [*active[:-3], tuple(active[-3:])]  # type: ignore[assignment, misc]
    x = _pool_axes(name, kind, x, axes, window, strides, padding, dilation)  # type: ignore[arg-type]
  return x.astype(dtype)


def _pool_axes(
  name: str, kind: str, x: Array, axes: tuple[int, ...], window: Any, strides: Any, padding: Any, dilation: Any
) -> Array:
  # Dimensions between pooled ones are pooled by windows of one, if that makes three dimensions at most.
  between = tuple(range(axes[0], axes[-1] + 1))
  if len(between) <= 3:
    axes = between
  geometry, _ = make_geometry(
    name,
    tuple(x.shape[d] for d in axes),
    tuple(window[d] for d in axes),
    tuple(strides[d] for d in axes),
    tuple(padding[d] for d in axes),
    tuple(dilation[d] for d in axes),
  )
  if kind == "add":
    return over_windows(  # type: ignore[no-any-return]
      lambda x: primitives.sum_pool_in_passes(x, geometry=geometry, divisor=1.0), [x], axes
    )
  minimum = kind == "min"
  return over_windows(  # type: ignore[no-any-return]
    lambda x: primitives.max_pool(x, geometry=geometry, minimum=minimum), [x], axes
  )


def _initial(name: str, value: Any, dtype: Any) -> Any:
  if isinstance(value, jax.core.Tracer):
    raise TypeError(f"{name}: init_value must be a constant, got the tracer {value}")
  try:
    initial = np.asarray(value)
    if initial.ndim or np.iscomplexobj(initial):
      raise TypeError
    return initial.astype(np.float64).item() if jnp.issubdtype(dtype, jnp.floating) else int(initial)
  except (TypeError, ValueError, OverflowError) as e:
    raise TypeError(f"{name}: init_value must be a scalar of operand's type {dtype}, got {value!r}") from e
