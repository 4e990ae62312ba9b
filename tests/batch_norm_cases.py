"""Shapes of batch normalization, for tests and benchmarks."""

import math
from typing import NamedTuple


class Case(NamedTuple):
  shape: tuple[int, ...]
  axis: int | tuple[int, ...] = -1

  @property
  def axes(self) -> tuple[int, ...]:
    """The axes with statistics of their own, ascending."""
    given = self.axis if isinstance(self.axis, tuple) else (self.axis,)
    return tuple(sorted(a % len(self.shape) for a in given))

  @property
  def reduced(self) -> tuple[int, ...]:
    return tuple(d for d in range(len(self.shape)) if d not in self.axes)

  @property
  def channels(self) -> tuple[int, ...]:
    return tuple(self.shape[a] for a in self.axes)

  @property
  def terms(self) -> int:
    """Values that a channel's statistics are taken over."""
    return math.prod(self.shape[d] for d in self.reduced)


# Channels-last: channels that fill vectors or not, from one to more than a block has threads; rows from one to many,
# with and without a rest when several are taken together.
LAST = (
  *(Case((rows, c)) for c, rows in (
    (1, 1), (1, 1003), (2, 77), (3, 500), (4, 33), (5, 1001), (7, 8), (8, 300), (12, 515), (16, 64), (17, 203), (24, 9),
    (33, 31), (48, 1000), (64, 5000), (65, 130), (100, 77), (128, 257), (255, 19), (256, 64), (257, 33), (520, 12),
    (1000, 3), (1032, 40), (2050, 7), (4100, 5),
  )),
  Case((4, 7, 7, 96)),
  Case((2, 3, 4, 5, 6)),
  Case((3,)),
)  # fmt: skip
# Channels-first: short and long runs, of whole vectors or not; the channels in the middle, first, several, apart; one
# statistic for each activation.
FIRST = (
  Case((4, 6, 5), 1),
  Case((3, 4, 7, 7), 1),
  Case((5, 3, 2, 2), 1),
  Case((64, 5, 1, 3), 1),
  Case((2, 16, 16, 16), 1),
  Case((3, 2, 17, 19), 1),
  Case((2, 3, 1, 260), 1),
  Case((2, 3, 1, 257), 1),
  Case((2, 5, 40, 40), 1),
  Case((6, 8, 13, 13), 1),
  Case((70, 3, 45, 45), 1),
  Case((1, 2, 100, 333), 1),
  Case((3, 1, 9, 50), 1),
  Case((2, 4, 3, 4, 5), 1),
  Case((6, 35), 0),
  Case((4, 3, 5), (1, 2)),
  Case((16, 4, 4, 8), (1, 2, 3)),
  Case((4, 3, 5, 2), (0, 2)),
  Case((2, 3, 4), (0, 1, 2)),
)
EMPTY = (Case((0, 3)), Case((3, 0)), Case((2, 0, 3)), Case((0, 3, 4), 1), Case((2, 3, 0), 1), Case((2, 0, 4), 1))


def first(case: Case) -> Case:
  """The same case with the channels as the second dimension."""
  n, *spatial, channels = case.shape
  return Case((n, channels, *spatial), 1)


# ResNet-50's, from its first layer to its last.
BENCHMARKS = (
  Case((256, 112, 112, 64)),
  Case((256, 56, 56, 64)),
  Case((256, 56, 56, 256)),
  Case((256, 28, 28, 512)),
  Case((256, 14, 14, 1024)),
  Case((256, 7, 7, 2048)),
)
# Every width of channels; images of every size; few entries; statistics for each activation.
SWEEP = (
  *(Case((64, (1 << 19) // c, c)) for c in (
    1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 31, 32, 48, 64, 65, 96, 100, 128, 192, 255, 256, 384, 512, 768, 1000, 1023, 1024,
    1536, 2048, 3072, 4096,
  )),
  *(Case((64, 256, s, s), 1) for s in (1, 2, 3, 5, 8, 13, 16, 17, 19, 32, 45, 64)),
  Case((8, 3, 1200, 1201), 1),
  Case((32, 14, 14, 64)),
  Case((8, 256)),
  Case((256, 28, 28, 128), (1, 2, 3)),
)  # fmt: skip
