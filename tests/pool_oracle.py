"""Pooling by brute force in NumPy: every window of every element, one cell after the other.

Geometry is spelled out: `padding` is a (low, high) pair, and every argument has an entry, per spatial dimension.
"""

import itertools
import math

import numpy as np


def same_padding(extent, window, stride, dilation, *, lower=False):
  pads = []
  for i, w, s, d in zip(extent, window, stride, dilation, strict=True):
    total = max(0, (-(-i // s) - 1) * s + (w - 1) * d + 1 - i)
    pads.append(((total + 1) // 2, total // 2) if lower else (total // 2, (total + 1) // 2))
  return tuple(pads)


def out_extent(extent, window, stride, padding, dilation):
  spans = [i + lo + hi - (w - 1) * d for i, w, (lo, hi), d in zip(extent, window, padding, dilation, strict=True)]
  return tuple(len(range(0, max(span, 0), s)) for span, s in zip(spans, stride, strict=True))


def windows(extent, window, stride, padding, dilation):
  """For each output position, `(position, cells)`: the input position of each cell inside the input, in order."""
  for o in np.ndindex(*out_extent(extent, window, stride, padding, dilation)):
    cells = []
    for k in itertools.product(*map(range, window)):
      i = tuple(a * s - lo + b * d for a, s, (lo, _), b, d in zip(o, stride, padding, k, dilation, strict=True))
      if all(0 <= a < n for a, n in zip(i, extent, strict=True)):
        cells.append(i)
    yield o, cells


def _spatial(x, rank):
  """As [batch, *spatial, channels]."""
  return x.reshape(math.prod(x.shape[: -rank - 1]), *x.shape[-rank - 1 :])


def bins(extent, out):
  """Adaptive pooling's windows, in the form of `windows`."""
  for o in np.ndindex(*out):
    ranges = [range(a * i // b, -(-(a + 1) * i // b)) for a, i, b in zip(o, extent, out, strict=True)]
    yield o, list(itertools.product(*ranges))


def lp_pool(x, g, power, *geometry):
  """`(y, dx)` in float64: the norms, and the pull-back of `g`."""
  total = avg_pool(np.abs(x) ** power, g, *geometry, True)[0] * math.prod(geometry[0])
  y = total ** (1 / power)
  with np.errstate(divide="ignore", invalid="ignore"):
    share = np.where(y == 0, 0, g * y ** (1 - power))
  dx = avg_pool(x, share, *geometry, True)[1] * math.prod(geometry[0])
  return y, dx * np.sign(x) * np.abs(x) ** (power - 1)


def max_pool(x, g, window, stride, padding, dilation, where=None):
  """`(y, dx)` in float64: the maxima of what `where`, of x's shape, keeps, and the pull-back of `g`."""
  rank, shape = len(window), x.shape
  extent = shape[-rank - 1 : -1]
  out = (*shape[: -rank - 1], *out_extent(extent, window, stride, padding, dilation), shape[-1])
  keep = _spatial(np.ones(shape, bool) if where is None else where, rank)
  x, g = _spatial(x, rank), _spatial(g, rank)
  y, dx = np.full(_spatial(np.empty(out), rank).shape, -np.inf), np.zeros(x.shape)
  for o, cells in windows(extent, window, stride, padding, dilation):
    for n, c in np.ndindex(x.shape[0], x.shape[-1]):
      winner = None
      for i in cells:
        if not keep[(n, *i, c)]:
          continue
        v, best = x[(n, *i, c)], None if winner is None else x[(n, *winner, c)]
        if winner is None or (not np.isnan(best) and (v > best or np.isnan(v))):
          winner = i
      if winner is not None:
        y[(n, *o, c)] = x[(n, *winner, c)]
        dx[(n, *winner, c)] += g[(n, *o, c)]
  return y.reshape(out), dx.reshape(shape)


def avg_pool(x, g, window, stride, padding, dilation, count_include_pad, where=None):
  """`(y, dx)` in float64: the averages of what `where`, of x's shape, keeps, and the pull-back of `g`."""
  rank, shape = len(window), x.shape
  extent = shape[-rank - 1 : -1]
  out = (*shape[: -rank - 1], *out_extent(extent, window, stride, padding, dilation), shape[-1])
  keep = _spatial(np.ones(shape, bool) if where is None else where, rank)
  x, g = _spatial(x, rank), _spatial(g, rank)
  y, dx = np.zeros(_spatial(np.empty(out), rank).shape), np.zeros(x.shape)
  for o, cells in windows(extent, window, stride, padding, dilation):
    inside = sum((keep[(slice(None), *i)] * 1 for i in cells), np.zeros_like(y[:, *[0] * rank], int))
    count = np.maximum(inside + (math.prod(window) - len(cells)) * count_include_pad, 1)
    for i in cells:
      here = keep[(slice(None), *i)]
      y[(slice(None), *o)] += np.where(here, x[(slice(None), *i)], 0) / count
      dx[(slice(None), *i)] += np.where(here, g[(slice(None), *o)] / count, 0)
  return y.reshape(out), dx.reshape(shape)
