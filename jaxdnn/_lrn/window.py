"""The windows of local normalization: their arguments, the canonical form of the primitives, and sums over them."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _primitive, _sharding
from jaxdnn._arguments import number, per_dimension

# Arguments -----------------------------------------------------------------------------------------------------------


class Response(NamedTuple):
  """The static parameter of every primitive: D = k + scale * (the sum over the window), to the power of -beta."""

  window: tuple[tuple[int, int], ...]
  """Cells before and after the element, per spatial dimension."""
  scale: float
  """What the sum over the window is multiplied by."""
  beta: float
  k: float


def checked(op: str, x: Any, axis: Any) -> tuple[Array, int]:
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{op}: x must be floating-point, got {x.dtype}")
  try:
    channels = operator.index(axis)
  except TypeError:
    raise TypeError(f"{op}: axis must be an integer, got {axis!r}") from None
  if not -x.ndim <= channels < x.ndim:
    raise ValueError(f"{op}: axis must name an axis of an array of rank {x.ndim}, got {axis}")
  return x, channels % x.ndim


def spatial(op: str, size: Any, axis: int, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The spatial dimensions, and the window's extent along each."""
  others = [d for d in range(ndim) if d != axis]
  rank = len(others) - 1 if np.ndim(size) == 0 else len(size)
  if not 1 <= rank <= 3 or rank > len(others):
    what = f"size {size!r} for all dimensions but the first and the channels" if np.ndim(size) == 0 else f"size {size}"
    raise ValueError(f"{op}: {what} must name 1 to 3 spatial dimensions, got an array of rank {ndim}")
  return tuple(others[len(others) - rank :]), per_dimension(op, "size", size, rank)


def finite(op: str, name: str, value: Any) -> float:
  given = number(op, name, value)
  if not math.isfinite(given):
    raise ValueError(f"{op}: {name} must be finite, got {value}")
  return given


def to_response(
  op: str, extents: tuple[int, ...], alpha: Any, beta: Any, k: Any, padding: Any, divide: bool = True
) -> Response:
  alpha, beta, k = (finite(op, name, v) for name, v in (("alpha", alpha), ("beta", beta), ("k", k)))
  if alpha < 0 or k < 0:
    raise ValueError(f"{op}: alpha and k must not be negative, got alpha={alpha} and k={k}")
  if not isinstance(padding, str) or padding not in ("SAME", "SAME_LOWER"):
    raise ValueError(f"{op}: padding must be 'SAME' or 'SAME_LOWER', got {padding!r}")
  window = tuple(((n - 1) // 2, n // 2) if padding == "SAME" else (n // 2, (n - 1) // 2) for n in extents)
  return Response(window, alpha / math.prod(extents) if divide else alpha, beta, k)


# Canonical form ------------------------------------------------------------------------------------------------------


def apply(
  p: Any, operands: Sequence[Array], axes: tuple[int, ...], channels: int, response: Response
) -> Array:
  """Binds `p` with `axes` as its spatial dimensions, shard by shard where the others are sharded."""
  every = tuple(range(operands[0].ndim))
  return _sharding.map_shards(
    lambda *operands: _grouped(p, operands, axes, channels, response),
    operands,
    keep=[[d for d in every if d not in axes]] * len(operands),
    out_like=(0, every),
  )


def _grouped(p: Any, operands: Sequence[Array], axes: tuple[int, ...], channels: int, response: Response) -> Array:
  """Views the operands as [..., *spatial, inner]. Only channels that lie between spatial dimensions must move."""
  if axes[-1] - axes[0] != len(axes) - 1:
    moved = [jnp.moveaxis(x, channels, -1) for x in operands]
    last = _grouped(p, moved, tuple(a - (a > channels) for a in axes), moved[0].ndim - 1, response)
    return jnp.moveaxis(last, -1, channels)
  shape = operands[0].shape
  # No window reaches past the array, and at either end dimensions with windows of one cell are like any other.
  window = [
    (min(before, max(shape[a] - 1, 0)), min(after, max(shape[a] - 1, 0)))
    for a, (before, after) in zip(axes, response.window, strict=True)
  ]
  coupled = [i for i, cells in enumerate(window) if cells != (0, 0)]
  if coupled:
    stop = axes[coupled[-1]] + 1
    view = (*shape[:stop], math.prod(shape[stop:]))
    response = response._replace(window=tuple(window[coupled[0] : coupled[-1] + 1]))
  else:
    view, response = (*shape, 1), response._replace(window=((0, 0),))
  y: Array = _primitive.bind(p, *(x.reshape(view) for x in operands), response=response)
  return y.reshape(shape)


# Sums for the references ---------------------------------------------------------------------------------------------


def widen(x: Array) -> Array:
  return x.astype(_primitive.accumulator_dtype(x.dtype))


def window_sum(v: Array, response: Response, *, adjoint: bool = False) -> Array:
  """The sum over each element's window; the adjoint's window is the mirrored one."""
  rank = len(response.window)
  padding = [(after, before) if adjoint else (before, after) for before, after in response.window]
  window = [before + after + 1 for before, after in padding]
  lead = v.ndim - rank - 1
  zero = np.zeros((), v.dtype)
  return lax.reduce_window(
    v, zero, lax.add, (*[1] * lead, *window, 1), (1,) * v.ndim, (*[(0, 0)] * lead, *padding, (0, 0))
  )


def sum_over_cells(
  term: Callable[..., Sequence[Array]], arrays: Sequence[Array], response: Response, *, adjoint: bool = False
) -> list[Array]:
  """Sums over each element's window of `term(*neighbours)`, where `neighbours` are the values of `arrays` there."""
  rank, shape = len(response.window), arrays[0].shape
  padding = [(after, before) if adjoint else (before, after) for before, after in response.window]
  sizes = [before + after + 1 for before, after in padding]
  config = [(0, 0, 0)] * (len(shape) - rank - 1) + [(lo, hi, 0) for lo, hi in padding] + [(0, 0, 0)]
  padded = [lax.pad(a, np.zeros((), a.dtype), config) for a in arrays]
  inside = lax.pad(jnp.ones(shape, bool), np.False_, config)

  def step(cell: Array, sums: list[Array]) -> list[Array]:
    start = [0] * (len(shape) - rank - 1) + list(jnp.unravel_index(cell, sizes)) + [0]
    neighbours = [lax.dynamic_slice(a, start, shape) for a in padded]
    here = lax.dynamic_slice(inside, start, shape)
    return [s + jnp.where(here, t, jnp.zeros_like(t)) for s, t in zip(sums, term(*neighbours), strict=True)]

  zeros = [jnp.zeros_like(t) for t in jax.eval_shape(term, *arrays)]
  return lax.fori_loop(0, math.prod(sizes), step, zeros)


def powers(energy: Array, response: Response) -> tuple[Array, Array]:
  """D^-beta, and q = 2 scale beta D^(-beta - 1), its derivative in half the energy, negated."""
  scale, beta, k = (jnp.asarray(v, energy.dtype) for v in (response.scale, response.beta, response.k))
  d = k + scale * energy
  p = lax.pow(d, -beta)
  return p, 2 * scale * beta * p / d


# CUDA lowering -------------------------------------------------------------------------------------------------------


def attributes(*_: Any, response: Response) -> dict[str, Any]:
  before, after = zip(*response.window, strict=True)
  numbers = {"scale": response.scale, "beta": response.beta, "k": response.k}
  return {"before": np.asarray(before, np.int64), "after": np.asarray(after, np.int64)} | {
    name: np.float64(v) for name, v in numbers.items()
  }


def shards(*_: Any, response: Response) -> str:
  return "... " + ". " * len(response.window) + "inner"


def supported(*avals: Any, response: Response) -> bool:
  # 0 times the logarithm of D would be NaN for a D of 0 or infinity.
  return response.beta != 0 and all(d < 2**30 for d in avals[0].shape[-1 - len(response.window) : -1])


def is_box(x: Any, response: Response) -> bool:
  """Whether the windows are odd square boxes that a kernel holds in registers, in types that are trained in."""
  reach, window = response.window[-1][0], response.window
  return 1 <= reach <= 3 and window == ((reach, reach),) * 2 and x.dtype in (jnp.float32, jnp.bfloat16)


def pair_of_values(x: Any) -> int:
  """Bytes of two values of each element, between a pass that computes them and one that sums over windows."""
  return 2 * math.prod(x.shape) * _primitive.accumulator_dtype(x.dtype).itemsize
