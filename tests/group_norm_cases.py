"""Shapes of group and instance normalization, for tests and benchmarks."""

from typing import NamedTuple


class Case(NamedTuple):
  shape: tuple[int, ...]
  groups: int
  axis: int = -1

  @property
  def channels(self) -> int:
    return self.shape[self.axis]

  @property
  def terms(self) -> int:
    """Values that a group's statistics are taken over."""
    size = 1
    for n in self.shape[1:]:
      size *= n
    return max(1, size // self.groups)


def first(case: Case) -> Case:
  """The same case with the channels as the second dimension."""
  n, *spatial, channels = case.shape
  return Case((n, channels, *spatial), case.groups, 1)


# Groups within a vector, across vectors, of odd size, of one channel, of all; one position; odd numbers of positions;
# slabs for a few lanes, for a warp, for a block, for several blocks, for several times what a block holds.
_LAST = (
  Case((3, 4, 8), 2),
  Case((2, 3, 5, 6), 3),
  Case((2, 7, 7, 20), 4),
  Case((2, 8, 8, 3), 1),
  Case((2, 8, 8, 3), 3),
  Case((1, 16, 17), 17),
  Case((2, 9, 65), 5),
  Case((2, 4, 4, 129), 43),
  Case((2, 16, 16, 40), 4),
  Case((2, 8, 8, 320), 32),
  Case((3, 1, 24), 6),
  Case((5, 48), 4),
  Case((2, 2, 2050), 2),
  Case((1, 64, 4096), 1),
  Case((3, 1, 1), 1),
  Case((70, 2, 2, 2), 1),
)
CASES = (*_LAST, *(first(c) for c in _LAST if len(c.shape) > 2), Case((2, 3, 8, 5), 4, 2), Case((2, 4, 6, 3, 2), 3, -3))
# Large enough for Hopper's kernels in both layouts and in 16 bits, in several units for each block.
RING = Case((5, 44, 64, 600), 15)
# For which a GPU takes teams of blocks, some of whose data are read twice.
_LARGE_LAST = (
  Case((2, 64, 64, 96), 8),
  Case((1, 300, 301, 24), 3),
  Case((1, 2048, 2048, 8), 2),
  Case((3, 129, 128, 33), 11),
  Case((16, 47, 47, 256), 256),
  RING,
  RING._replace(groups=1),
  Case((2, 352, 368, 64), 1),
  Case((2, 200, 161, 240), 24),
)
LARGE = (*_LARGE_LAST, *map(first, _LARGE_LAST))

EMPTY = (Case((0, 3, 4), 2), Case((2, 0, 4), 2), Case((2, 3, 0), 1), Case((2, 4, 0), 2, 1))

# What models ask for: diffusion U-Nets at every level, a 3-D U-Net, one large image, style transfer.
GROUP = (
  Case((32, 64, 64, 320), 32),
  Case((8, 256, 256, 128), 32),
  Case((16, 32, 32, 640), 32),
  Case((16, 16, 16, 1280), 32),
  Case((4, 96, 96, 96, 32), 8),
  Case((1, 128, 128, 512), 32),
  Case((32, 64, 64, 320), 1),
)
INSTANCE = (Case((8, 256, 256, 64), 64), Case((16, 64, 64, 256), 256))
# Neighbours of those: every width of channels, odd sizes, few positions.
SWEEP = (
  *(Case((8, 64, 64, c), g) for c, g in (
    (1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 8), (16, 4), (17, 1), (24, 8), (32, 32), (48, 16), (64, 32), (65, 5),
    (96, 32), (129, 3), (192, 32), (256, 32), (321, 3), (512, 32), (768, 32), (1024, 32), (2048, 32), (4096, 32),
  )),
  *(Case((16, s, s, 256), 32) for s in (2, 4, 7, 14, 28, 31, 49, 56, 63, 128)),
  Case((1, 512, 512, 64), 16),
  Case((2048, 8, 8, 64), 8),
)  # fmt: skip
