"""Operators over any set of axes, as calls on [..., n, inner] views. Knows no operator.

Adjacent axes become the one dimension n by a reshape that moves nothing; only axes that are not adjacent must move.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxdnn import _extension, _sharding
from jaxdnn._arguments import array


def checked(op: str, x: Any) -> Array:
  """`x` as an array, which must be floating-point."""
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"{op}: x must be floating-point, got {x.dtype}")
  return x


def canonical(op: str, axis: Any, ndim: int) -> tuple[int, ...]:
  """`axis`, one or several, as ascending non-negative numbers."""
  try:
    given = tuple(operator.index(a) for a in (axis if isinstance(axis, Sequence) else (axis,)))
  except TypeError:
    raise TypeError(f"{op}: axis must be an integer or a tuple of integers, got {axis!r}") from None
  if not given or not all(-ndim <= a < ndim for a in given):
    raise ValueError(f"{op}: axis must name axes of an array of rank {ndim}, got {axis!r}")
  axes = tuple(sorted(a % ndim for a in given))
  if len(set(axes)) != len(axes):
    raise ValueError(f"{op}: axis names the same axis of an array of rank {ndim} twice, got {axis!r}")
  return axes


def aligned_mask(op: str, where: Array, shape: tuple[int, ...]) -> Array:
  """`where` with leading dimensions of size 1, up to the rank of `shape`."""
  where = array(op, "where", where)
  if where.dtype != jnp.bool_:
    raise TypeError(f"{op}: where must be boolean, got {where.dtype}")
  aligned = (*[1] * (len(shape) - where.ndim), *where.shape)
  if len(aligned) != len(shape) or any(w not in (1, d) for w, d in zip(aligned, shape, strict=True)):
    raise ValueError(f"{op}: where of shape {where.shape} does not broadcast to x of shape {shape}")
  return where.reshape(aligned)


def workspace(op: str, x: Any) -> int:
  """Bytes of scratch memory of the kernels of `op`, "softmax" or "loss", for a view [..., n, inner] like `x`."""
  *lead, n, inner = x.shape
  return _extension.native.softmax_workspace(op, x.dtype.name, math.prod(lead), n, inner)


def grouped(f: Callable[..., Array], axes: tuple[int, ...], x: Array, *others: Array) -> Array:
  """Calls `f` on views [..., n, inner] of `x` and of what broadcasts to it, in which `axes` are n.

  Returns:
    The result of `f`, in the shape of `x`; or with 1 for each of `axes`, where `f` leaves 1 of n.
  """
  free, every = [d for d in range(x.ndim) if d not in axes], range(x.ndim)
  return _sharding.map_shards(
    lambda *a: _on_views(f, axes, *a),
    [x, *(sharded_like(x, a) for a in others)],
    keep=[free, *[every] * len(others)],
    out_like=(0, [d if d in free else None for d in every]),
  )


def sharded_like(x: Array, other: Array) -> Array:
  """`other`, of the rank of `x`, sharded over explicit mesh axes as `x` is wherever it does not broadcast."""
  spec = jax.typeof(x).sharding.spec
  if all(axis is None for axis in spec):
    return other
  sizes = zip(spec, other.shape, strict=True)
  return jax.sharding.reshard(other, PartitionSpec(*[axis if size > 1 else None for axis, size in sizes]))


def _on_views(f: Callable[..., Array], axes: tuple[int, ...], x: Array, *others: Array) -> Array:
  start, stop = axes[0], axes[-1] + 1
  if stop - start != len(axes):
    order = [*(d for d in range(x.ndim) if d not in axes), *axes]
    last = tuple(range(x.ndim - len(axes), x.ndim))
    moved = _on_views(f, last, *(a.transpose(order) for a in (x, *others)))
    return moved.transpose([order.index(d) for d in range(x.ndim)])
  y = f(*(_view(a, x.shape, start, stop) for a in (x, *others)))
  reduced = y.shape[-2] != math.prod(x.shape[start:stop])
  return y.reshape([1 if reduced and d in axes else n for d, n in enumerate(x.shape)])


def _view(a: Array, shape: tuple[int, ...], start: int, stop: int) -> Array:
  """`a`, which broadcasts to `shape`, as [..., n, inner], each of the two whole or 1."""

  def whole(part: slice) -> tuple[int, ...]:
    return a.shape[part] if all(size == 1 for size in a.shape[part]) else shape[part]

  n, inner = whole(slice(start, stop)), whole(slice(stop, None))
  return jnp.broadcast_to(a, (*a.shape[:start], *n, *inner)).reshape(*a.shape[:start], math.prod(n), math.prod(inner))
