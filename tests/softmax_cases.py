"""Shapes and axes of softmax, for tests and benchmarks."""

from typing import NamedTuple


class Case(NamedTuple):
  shape: tuple[int, ...]
  axis: int | tuple[int, ...] = -1


# Row lengths around every change of kernel: a warp's lanes, its registers, a block's, and past them.
LENGTHS = (
  *range(1, 19), 31, 32, 33, 44, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025,
  2047, 2048, 2049, 4095, 4096, 4100, 5000, 8191, 8192, 8193, 16384, 16388, 70000,
)  # fmt: skip

# Axis first, in the middle, last, several, not adjacent; columns that fill a vector, miss it, or outnumber a tile.
AXES = (
  Case((7,)),
  Case((5, 3), 0),
  Case((10, 32), 0),
  Case((300, 100), 0),
  Case((2, 17, 3), 1),
  Case((3, 21, 32), 1),
  Case((2, 5, 100), 1),
  Case((2, 130, 8), -2),
  Case((1, 2000, 4), 1),
  Case((2, 3, 4, 5), (1, 2)),
  Case((2, 3, 4, 5), (3, 1, 2)),
  Case((2, 3, 4, 5), (0, 1)),
  Case((2, 3, 4, 5), (0, 2)),
  Case((2, 3, 4, 5), (-1, 0)),
  Case((2, 3, 4, 5), (0, 1, 2, 3)),
)

EMPTY = (Case((0,)), Case((0, 4)), Case((4, 0)), Case((2, 0, 3), 1), Case((2, 3, 0), 1), Case((0, 3, 2), (0, 1)))

# What models ask for: attention rows, classifiers, vocabularies, segmentation maps channels-first, whole images.
BENCHMARKS = (
  Case((64, 16, 512, 512)),
  Case((8, 16, 2048, 2048)),
  Case((65536, 10)),
  Case((1000000, 10)),
  Case((65536, 128)),
  Case((8192, 1000)),
  Case((8192, 4096)),
  Case((8192, 8192)),
  Case((4096, 32768)),
  Case((4096, 50257)),
  Case((1024, 131072)),
  Case((16, 21, 512, 512), 1),
  Case((16, 150, 128, 128), 1),
  Case((256, 1000, 7, 7), 1),
  Case((8, 1000, 64, 64), 1),
  Case((64, 256, 56, 56), (1, 2, 3)),
)
