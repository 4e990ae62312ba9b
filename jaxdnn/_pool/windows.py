"""The public functions of pooling over sliding windows."""

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn import _masks
from jaxdnn._arguments import Padding, flag, floating, number, window_rank
from jaxdnn._eager import compiled
from jaxdnn._pool import masked, primitives
from jaxdnn._pool.apply import check_number, over_windows
from jaxdnn._pool.geometry import Geometry, Pairs, make_geometry, spatial_axes

# Maximum and minimum -------------------------------------------------------------------------------------------------


@overload
def max_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  return_indices: Literal[False] = False,
  layout: str | None = None,
  where: Array | None = None,
) -> Array: ...
@overload
def max_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  return_indices: Literal[True],
  layout: str | None = None,
  where: Array | None = None,
) -> tuple[Array, Array]: ...
@compiled
def max_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  return_indices: bool = False,
  layout: str | None = None,
  where: Array | None = None,
) -> Array | tuple[Array, Array]:
  """Maximum over sliding windows: `y[o] = max over k of x[o * stride - low + k * dilation]`, channel by channel.

  Args:
    x: floating-point or integer array `[..., *spatial, channels]`, with any number of leading dimensions, or as
      `layout` says.
    window: 1 to 3 integers: the window's size along each spatial dimension, and how many of those there are.
    stride: distance between windows, one integer or one per spatial dimension. **None means 1**, as in `flax.linen`
      and `lax.reduce_window`; it does not mean `window`, as elsewhere.
    padding: "VALID" (none), "SAME" (an output of `ceil(input / stride)`, the odd cell at the end), "SAME_LOWER" (the
      odd cell at the start), one integer for every side, or a `(low, high)` pair per spatial dimension. Negative
      padding crops.
    dilation: distance between the cells of a window, one integer or one per spatial dimension.
    ceil_mode: whether a last window that is cut off by the end of the padded input counts. The last window must then
      start in the input or in the padding before it, and `padding` may not crop the end.
    return_indices: whether to return where the maxima are, too.
    layout: None, or one letter per dimension of `x`, with N the batch, C the channels and any others the spatial
      dimensions in order: "NHWC", "NCHW", "NCDHW", "NCL". Channels-first costs no transpose.
    where: booleans that broadcast to the shape of `x`. Elements where it is False are as padding: they never win,
      whatever they are, NaN included, and have no gradient. XLA selects before the kernel; derivatives and indices
      take a second, of the mask, which is small where the mask has one channel.

  Returns:
    An array of `x`'s type and layout, of spatial extent `max(0, (input + low + high - (window - 1) * dilation - 1) //
    stride + 1)`. The first maximum in row-major window order is the one that counts, and the first NaN before any
    number; derivatives of every order, in both modes, follow that element alone. Padding never counts: a window that
    holds nothing else gives -inf (the least integer), and no gradient. Zeros of both signs are equal, and which of
    them is the result is not specified.

    With `return_indices` also an integer array like it: the row-major position of each maximum in the spatial
    dimensions of `x`, as `max_unpool` takes it; -1 where a window holds nothing but padding.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, a `where` that does not broadcast to `x`, or an `x`
      sharded along a spatial dimension.

  Example:
    >>> x = jnp.array([[[1.0], [3.0], [2.0], [5.0]]])
    >>> jaxdnn.max_pool(x, (2,), stride=2)
    Array([[[3.],
            [5.]]], dtype=float32)
    >>> jaxdnn.max_pool(x, (2,), stride=2, where=x != 3.0)
    Array([[[1.],
            [5.]]], dtype=float32)
  """
  return _select("max_pool", x, window, stride, padding, dilation, ceil_mode, return_indices, layout, where)


@compiled
def min_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  return_indices: bool = False,
  layout: str | None = None,
  where: Array | None = None,
) -> Array | tuple[Array, Array]:
  """Minimum over sliding windows: `max_pool` with the order reversed, and its arguments.

  The first minimum counts, and the first NaN before any number; a window of nothing but padding gives +inf (the
  greatest integer).

  Args:
    x: as in `max_pool`.
    window: as in `max_pool`.
    stride: as in `max_pool`: None means 1.
    padding: as in `max_pool`.
    dilation: as in `max_pool`.
    ceil_mode: as in `max_pool`.
    return_indices: as in `max_pool`.
    layout: as in `max_pool`.
    where: as in `max_pool`.

  Returns:
    As `max_pool`.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, a `where` that does not broadcast to `x`, or an `x`
      sharded along a spatial dimension.

  Example:
    >>> jaxdnn.min_pool(jnp.array([[[1.0], [3.0], [2.0], [5.0]]]), (2,), stride=2)
    Array([[[1.],
            [2.]]], dtype=float32)
  """
  return _select("min_pool", x, window, stride, padding, dilation, ceil_mode, return_indices, layout, where)


def _select(
  name: str,
  x: Any,
  window: Any,
  stride: Any,
  padding: Any,
  dilation: Any,
  ceil_mode: bool,
  indices: bool,
  layout: Any,
  where: Any,
) -> Any:
  x, indices = check_number(name, x), flag(name, "return_indices", indices)
  spatial, geometry, _ = _windows(name, x, window, stride, padding, dilation, ceil_mode, layout)
  minimum = name == "min_pool"

  def pool(x: Array, *mask: Array) -> Any:
    if mask:
      y, *index = masked.max_pool(x, *mask, geometry, minimum, indices)
    elif indices:
      y, *index = primitives.indexed_max_pool(x, geometry=geometry, minimum=minimum)
    else:
      y, index = primitives.max_pool(x, geometry=geometry, minimum=minimum), []
    return (y, flat_indices(name, index[0], geometry)) if indices else y

  return over_windows(pool, [x, *_mask(name, where, x, spatial)], spatial)


def flat_indices(name: str, index: Array, g: Geometry) -> Array:
  """Row-major positions in the input, from the numbers of cells in their windows; -1 for no cell."""
  size = math.prod(g.extent)
  if size > 2**31 and not jax.config.read("jax_enable_x64"):
    raise ValueError(f"{name}: indices into {g.extent} need 64-bit integers; enable jax_enable_x64")
  dtype = jnp.dtype(jnp.int32 if size <= 2**31 else jnp.int64)
  rest, flat, pitch = index.astype(dtype), jnp.zeros(index.shape, dtype), 1
  for d in reversed(range(g.rank)):
    start = jnp.asarray(g.starts()[d], dtype).reshape((-1,) + (1,) * (g.rank - d))
    start = start.reshape((1,) * (index.ndim - start.ndim) + start.shape)
    flat = flat + (start + rest % g.window[d] * g.dilation[d]) * pitch
    rest, pitch = rest // g.window[d], pitch * g.extent[d]
  return jnp.where(index == g.no_cell, jnp.full_like(flat, -1), flat)


# Sums ----------------------------------------------------------------------------------------------------------------


@compiled
def avg_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  count_include_pad: bool = True,
  divisor_override: float | None = None,
  layout: str | None = None,
  where: Array | None = None,
) -> Array:
  """Average over sliding windows: `y[o] = sum over k of x[o * stride - low + k * dilation] / count`.

  Args:
    x: floating-point array `[..., *spatial, channels]`, with any number of leading dimensions, or as `layout` says.
    window: 1 to 3 integers: the window's size along each spatial dimension, and how many of those there are.
    stride: distance between windows, one integer or one per spatial dimension. **None means 1**, as in `flax.linen`
      and `lax.reduce_window`; it does not mean `window`, as elsewhere.
    padding: as in `max_pool`.
    dilation: distance between the cells of a window, one integer or one per spatial dimension.
    ceil_mode: as in `max_pool`. Cells of the last window past the padded input are not counted.
    count_include_pad: whether padding counts. True: `count` is the size of the window (what of it lies in the padded
      input). False: it is the number of the window's cells that lie inside `x`.
    divisor_override: None, or the number that takes the place of `count`.
    layout: as in `max_pool`.
    where: booleans that broadcast to the shape of `x`. Elements where it is False are not summed, whatever they are,
      NaN included, have no gradient, and do not count; padding counts as before. The average then is two sums by the
      kernel, of the selected elements, of which those of 16 bits become float32 arrays, and of the mask; one sum with
      `divisor_override`.

  Returns:
    An array of `x`'s type and layout, of spatial extent as in `max_pool`. A window that holds nothing but padding and
    masked elements gives 0. The 16-bit types are summed in float32.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, a `where` that does not broadcast to `x`, or an `x`
      sharded along a spatial dimension.

  Example:
    >>> jaxdnn.avg_pool(jnp.array([[[1.0], [3.0], [2.0]]]), (2,), padding="SAME", count_include_pad=False)
    Array([[[2. ],
            [2.5],
            [2. ]]], dtype=float32)
    >>> jaxdnn.avg_pool(jnp.array([[[1.0], [3.0], [jnp.nan]]]), (3,), where=jnp.array([[True], [True], [False]]))
    Array([[[2.]]], dtype=float32)
  """
  name = "avg_pool"
  x = floating(name, "x", x)
  count_include_pad = flag(name, "count_include_pad", count_include_pad)
  spatial, geometry, padded = _windows(name, x, window, stride, padding, dilation, ceil_mode, layout)
  counted = padded if count_include_pad else ((0, 0),) * geometry.rank
  if divisor_override is not None:
    divisor: float | Pairs = _positive(name, "divisor_override", divisor_override)
  elif where is not None:
    return over_windows(  # type: ignore[no-any-return]
      lambda x, mask: masked.avg_pool(x, mask, geometry, counted), [x, *_mask(name, where, x, spatial)], spatial
    )
  else:
    divisor = _count(geometry, counted)
  return over_windows(  # type: ignore[no-any-return]
    lambda x: primitives.sum_pool_in_passes(x, geometry=geometry, divisor=divisor), [_kept(name, where, x)], spatial
  )


@compiled
def sum_pool(
  x: Array,
  window: Sequence[int],
  *,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  layout: str | None = None,
  where: Array | None = None,
) -> Array:
  """Sum over sliding windows: `avg_pool` without the division.

  Args:
    x: floating-point or integer array `[..., *spatial, channels]`, or as `layout` says.
    window: as in `max_pool`.
    stride: as in `max_pool`: None means 1.
    padding: as in `max_pool`.
    dilation: as in `max_pool`.
    ceil_mode: as in `max_pool`.
    layout: as in `max_pool`.
    where: booleans that broadcast to the shape of `x`. Elements where it is False are not summed, whatever they are,
      NaN included, and have no gradient: XLA selects before the kernel.

  Returns:
    As `avg_pool`. Integers are summed in their own type.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, a `where` that does not broadcast to `x`, or an `x`
      sharded along a spatial dimension.

  Example:
    >>> jaxdnn.sum_pool(jnp.array([[[1.0], [3.0], [2.0]]]), (2,))
    Array([[[4.],
            [5.]]], dtype=float32)
  """
  x = check_number("sum_pool", x)
  spatial, geometry, _ = _windows("sum_pool", x, window, stride, padding, dilation, ceil_mode, layout)
  return over_windows(  # type: ignore[no-any-return]
    lambda x: primitives.sum_pool_in_passes(x, geometry=geometry, divisor=1.0), [_kept("sum_pool", where, x)], spatial
  )


@compiled
def lp_pool(
  x: Array,
  window: Sequence[int],
  *,
  power: float = 2.0,
  stride: int | Sequence[int] | None = None,
  padding: Padding = "VALID",
  dilation: int | Sequence[int] = 1,
  ceil_mode: bool = False,
  layout: str | None = None,
  where: Array | None = None,
) -> Array:
  """Norm of sliding windows: `y[o] = (sum over k of |x[o * stride - low + k * dilation]|^power)^(1 / power)`.

  Unlike `torch.nn.functional.lp_pool2d`, which raises `x` itself to the power, this takes magnitudes: the two agree for
  even powers and for nonnegative `x`. Powers are taken and summed in float32 for the 16-bit types, without scaling:
  `|x|^power` must stay in range.

  Args:
    x: floating-point array `[..., *spatial, channels]`, or as `layout` says.
    window: as in `max_pool`.
    power: a positive number, at least 1 for a norm.
    stride: as in `max_pool`: None means 1.
    padding: as in `max_pool`; it adds nothing.
    dilation: as in `max_pool`.
    ceil_mode: as in `max_pool`.
    layout: as in `max_pool`.
    where: as in `sum_pool`.

  Returns:
    An array of `x`'s type and layout. Where it is 0, its derivatives are 0.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an argument of the wrong length, rank or range, a `where` that does not broadcast to `x`, or an `x`
      sharded along a spatial dimension.

  Example:
    >>> jaxdnn.lp_pool(jnp.array([[[3.0], [4.0]]]), (2,))
    Array([[[5.]]], dtype=float32)
  """
  name = "lp_pool"
  x = floating(name, "x", x)
  power = _positive(name, "power", power)
  spatial, geometry, _ = _windows(name, x, window, stride, padding, dilation, ceil_mode, layout)
  return over_windows(  # type: ignore[no-any-return]
    lambda x: primitives.lp_pool(x, geometry=geometry, power=power), [_kept(name, where, x)], spatial
  )


def _windows(
  name: str, x: Array, window: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, layout: Any
) -> tuple[tuple[int, ...], Geometry, Pairs]:
  """The spatial dimensions, the geometry, and the padding without what `ceil_mode` adds."""
  spatial = spatial_axes(name, layout, window_rank(name, window), x.shape)
  extent = tuple(x.shape[d] for d in spatial)
  geometry, padded = make_geometry(name, extent, window, stride, padding, dilation, flag(name, "ceil_mode", ceil_mode))
  return spatial, geometry, padded


def _mask(name: str, where: Any, x: Array, spatial: tuple[int, ...]) -> list[Array]:
  return [] if where is None else [masked.spread(name, where, x, spatial)]


def _kept(name: str, where: Any, x: Array) -> Array:
  """`x`, and 0 where there is a mask that is False."""
  where = _masks.beside(name, where, x)
  return x if where is None else _masks.select(where, x)


def _count(g: Geometry, counted: Pairs) -> float | Pairs:
  """What divides each window's sum: its number of cells if that is the same everywhere, else what is counted."""
  whole = all((c == w).all() for c, w in zip(g.counts(counted), g.window, strict=True))
  return float(math.prod(g.window)) if whole else counted


def _positive(name: str, argument: str, value: Any) -> float:
  given = number(name, argument, value)
  if not 0 < given < math.inf:
    raise ValueError(f"{name}: {argument} must be positive and finite, got {value!r}")
  return given
