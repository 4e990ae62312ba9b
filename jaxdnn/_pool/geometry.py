"""Where the windows lie: the static parameter of every pooling primitive, and how arguments become it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdnn._arguments import dilated, explicit_padding, per_dimension

Pairs = tuple[tuple[int, int], ...]


class Geometry(NamedTuple):
  """An entry per spatial dimension. Arrays are `[leading..., *spatial, trailing]`, with any number leading."""

  extent: tuple[int, ...]
  """Of the input, which the output's does not determine."""
  window: tuple[int, ...]
  """Cells of a window; of the largest where they differ."""
  stride: tuple[int, ...]
  padding: Pairs
  dilation: tuple[int, ...]
  bins: tuple[int, ...] = ()
  """Output extents of adaptive pooling, in which stride (0), padding and dilation have no meaning; else empty."""

  @property
  def rank(self) -> int:
    return len(self.window)

  @property
  def out_extent(self) -> tuple[int, ...]:
    if self.bins:
      return self.bins
    return tuple(
      max(0, (i + lo + hi - dilated(w, d)) // s + 1)
      for i, w, s, (lo, hi), d in zip(*self[:5], strict=True)
    )

  @property
  def is_whole(self) -> bool:
    """Whether the only window is the whole input."""
    return set(self.out_extent) == {1} and self.window == self.extent and not any(map(any, self.padding))

  def passes(self) -> "list[Geometry]":
    """Geometries which, one after the other, do the same; more than one where that visits far fewer cells.

    The last dimension comes first, so that the first maximum in row-major order remains the winner.
    """
    alone, together = math.prod(self.window), math.prod(self.window[:-1])
    visits = self.window[-1] * math.prod(self.stride[:-1]) + together
    if self.bins or self.is_whole or alone < 4 * visits:
      return [self]
    lead, unit = self.rank - 1, (1,) * (self.rank - 1)
    inner = Geometry(
      self.extent,
      (*unit, self.window[-1]),
      (*unit, self.stride[-1]),
      (*((0, 0),) * lead, self.padding[-1]),
      (*unit, self.dilation[-1]),
    )
    outer = self._replace(
      extent=inner.out_extent,
      window=(*self.window[:-1], 1),
      stride=(*self.stride[:-1], 1),
      padding=(*self.padding[:-1], (0, 0)),
      dilation=(*self.dilation[:-1], 1),
    )
    return [inner, outer]

  @property
  def index_dtype(self) -> np.dtype[Any]:
    """Of a cell's row-major number in its window; the greatest uint8, or -1, stands for no cell."""
    return np.dtype(np.uint8 if math.prod(self.window) <= 255 else np.int32)

  @property
  def no_cell(self) -> int:
    return 255 if self.index_dtype == np.uint8 else -1

  def starts(self) -> list[np.ndarray[Any, Any]]:
    """For each dimension, the input position of every window's first cell, padding or not."""
    outputs = [np.arange(o, dtype=np.int64) for o in self.out_extent]
    if self.bins:
      return [o * i // max(b, 1) for o, i, b in zip(outputs, self.extent, self.bins, strict=True)]
    return [o * s - lo for o, s, (lo, _) in zip(outputs, self.stride, self.padding, strict=True)]

  def sizes(self) -> list[np.ndarray[Any, Any]]:
    """For each dimension, the number of every window's cells, padding included."""
    if self.bins:
      ends = [-(-np.arange(1, b + 1, dtype=np.int64) * i // b) for i, b in zip(self.extent, self.bins, strict=True)]
      return [end - start for end, start in zip(ends, self.starts(), strict=True)]
    return [np.full(o, w) for o, w in zip(self.out_extent, self.window, strict=True)]

  def counts(self, counted: Pairs) -> list[np.ndarray[Any, Any]]:
    """For each dimension, the number of every window's cells in the input and `counted` padding around it."""
    result = []
    for start, size, i, d, (lo, hi) in zip(
      self.starts(), self.sizes(), self.extent, self.dilation, counted, strict=True
    ):
      inside = np.minimum(size, -((start - i - hi) // d)) - np.maximum(0, -((start + lo) // d))
      result.append(np.maximum(inside, 0))
    return result


def spatial_axes(name: str, layout: Any, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
  """Which dimensions of an array are the spatial ones: the `rank` before the last, or as `layout` says."""
  if layout is None:
    if len(shape) < rank + 1:
      raise ValueError(f"{name}: x must have shape [..., {rank} spatial, channels], got {tuple(shape)}")
    return tuple(range(len(shape) - rank - 1, len(shape) - 1))
  if not isinstance(layout, str):
    raise TypeError(f"{name}: layout must be a string or None, got {layout!r}")
  spatial = tuple(i for i, letter in enumerate(layout) if letter not in "NC")
  if len(set(layout)) != len(layout) or len(spatial) != rank or len(layout) != rank + 2:
    raise ValueError(
      f"{name}: layout must name N, C and the {rank} spatial dimensions of window once each, got {layout!r}"
    )
  if len(layout) != len(shape):
    raise ValueError(f"{name}: layout {layout!r} needs x of {len(layout)} dimensions, got shape {tuple(shape)}")
  return spatial


def make_geometry(
  name: str,
  extent: tuple[int, ...],
  window: Any,
  stride: Any = None,
  padding: Any = "VALID",
  dilation: Any = 1,
  ceil_mode: bool = False,
) -> tuple[Geometry, Pairs]:
  """The geometry, and the padding as asked for: `ceil_mode` extends what is in the geometry."""
  rank = len(extent)
  window, dilation = per_dimension(name, "window", window, rank), per_dimension(name, "dilation", dilation, rank)
  stride = per_dimension(name, "stride", 1 if stride is None else stride, rank)
  dilation = tuple(1 if w == 1 else d for w, d in zip(window, dilation, strict=True))
  reach = tuple(dilated(w, d) for w, d in zip(window, dilation, strict=True))
  padding = explicit_padding(name, padding, extent, reach, stride)
  padded = [i + lo + hi for i, (lo, hi) in zip(extent, padding, strict=True)]
  for i, (lo, hi), p, r, s in zip(extent, padding, padded, reach, stride, strict=True):
    if -lo > i or -hi > i or p < 0:
      raise ValueError(f"{name}: padding ({lo}, {hi}) crops more than the {i} elements of a spatial dimension")
    if ceil_mode and hi < 0:
      raise ValueError(f"{name}: padding ({lo}, {hi}) crops the end, where ceil_mode lets a window reach past it")
    if max(i, abs(lo), abs(hi), p, r, s if ceil_mode else 0) >= 2**30:
      raise ValueError(f"{name}: a spatial dimension of {i} with padding ({lo}, {hi}) or a window over {r} pass 2**30")
  if math.prod(window) >= 2**30:
    raise ValueError(f"{name}: window {window} has more than 2**30 cells")
  asked = padding
  if ceil_mode:
    padding = tuple(
      (lo, _ceil_high(i, lo, hi, r, s)) for i, (lo, hi), r, s in zip(extent, padding, reach, stride, strict=True)
    )
    padded = [i + lo + hi for i, (lo, hi) in zip(extent, padding, strict=True)]
  # A stride past the padded input and the input's extent give the same one window.
  stride = tuple(min(s, max(p, 1)) for s, p in zip(stride, padded, strict=True))
  return Geometry(tuple(extent), window, stride, padding, dilation), asked


def _ceil_high(extent: int, low: int, high: int, reach: int, stride: int) -> int:
  """The high padding at which the last window ends, when outputs are counted by rounding up.

  That window must start in the input or in the padding before it.
  """
  reached = max(0, -((reach - extent - low - high) // stride) + 1)
  outputs = min(reached, -(-(extent + low) // stride))
  return (outputs - 1) * stride + reach - extent - low if outputs else high


def make_bins(name: str, extent: tuple[int, ...], bins: tuple[int, ...]) -> Geometry:
  """Adaptive pooling; plain pooling where the bins are equal and apart."""
  if all(b > 0 and i > 0 and i % b == 0 for i, b in zip(extent, bins, strict=True)):
    window = tuple(i // b for i, b in zip(extent, bins, strict=True))
    return make_geometry(name, extent, window, window)[0]
  if any(i == 0 and b > 0 for i, b in zip(extent, bins, strict=True)):
    raise ValueError(f"{name}: output_size {bins} needs a nonempty input, got spatial extents {extent}")
  if max(*extent, *bins) >= 2**30:
    raise ValueError(f"{name}: spatial extents {extent} or output_size {bins} pass 2**30")
  # A bin of I / O elements that starts or ends inside an element takes that one too.
  largest = tuple(min(max(i, 1), -(-i // b) + (i % b != 0)) if b else 1 for i, b in zip(extent, bins, strict=True))
  rank = len(extent)
  return Geometry(tuple(extent), largest, (0,) * rank, ((0, 0),) * rank, (1,) * rank, bins)
