"""Shapes of the tensor transforms, and what NumPy makes of them."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
  shape: tuple[int, ...]
  permutation: tuple[int, ...] | None = None
  padding: tuple[tuple[int, int], ...] | None = None
  """Of the result's dimensions."""


def arguments(case):
  return {"permutation": case.permutation, "padding": case.padding}


def move(x, case, pad_value=0):
  """T(x) by NumPy, of any type."""
  x = x.transpose(case.permutation or range(x.ndim))
  for axis, (lo, hi) in enumerate(case.padding or ()):
    index = np.arange(-lo, x.shape[axis] + hi)
    inside = (index >= 0) & (index < x.shape[axis])
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    taken = np.take(x, np.where(inside, index, 0), axis) if x.shape[axis] else np.zeros(
      [index.size if a == axis else n for a, n in enumerate(x.shape)], x.dtype
    )  # fmt: skip
    x = np.where(inside.reshape(shape), taken, np.asarray(pad_value, x.dtype))
  return x


# Every form that a kernel treats by itself: wide matrices and narrow, runs of the input or result that go on over the
# next dimension, rows of odd lengths, elements of 16 bytes, small matrices, many dimensions.
PERMUTED = (
  Case((7,)),
  Case((1, 1), (1, 0)),
  Case((5, 1, 3), (1, 2, 0)),
  Case((17, 33), (1, 0)),
  Case((64, 64), (1, 0)),
  Case((128, 200), (1, 0)),
  Case((130, 67), (1, 0)),
  Case((257, 129), (1, 0)),
  # Rows of the result that begin anywhere, of one box, of two and of several.
  Case((301, 145), (1, 0)),
  Case((145, 301), (1, 0)),
  Case((301, 41), (1, 0)),
  Case((3, 41, 150), (0, 2, 1)),
  Case((2, 160, 96), (0, 2, 1)),
  Case((3, 70, 3), (0, 2, 1)),
  Case((3, 3, 700), (0, 2, 1)),
  Case((2, 12, 4100), (0, 2, 1)),
  Case((2, 6, 1999), (0, 2, 1)),
  # Dimensions a little longer than a box, or than two.
  Case((165, 140), (1, 0)),
  Case((2, 330, 161), (2, 1, 0)),
  Case((2, 500, 16), (0, 2, 1)),
  Case((2, 16, 500), (0, 2, 1)),
  Case((2, 48, 512), (0, 2, 1)),
  Case((2, 600, 5), (0, 2, 1)),
  Case((2, 49, 96), (0, 2, 1)),
  Case((2, 96, 49), (0, 2, 1)),
  Case((9, 13, 70), (2, 1, 0)),
  Case((200, 3, 8), (1, 0, 2)),
  Case((80, 70, 8), (1, 0, 2)),
  Case((20, 30, 2), (1, 0, 2)),
  Case((6, 5, 4), (1, 0, 2)),
  Case((300, 4, 5), (0, 2, 1)),
  Case((3, 5, 7, 66), (3, 1, 0, 2)),
  Case((2, 3, 9, 8), (0, 2, 3, 1)),
  Case((2, 3, 24, 16), (0, 2, 3, 1)),
  Case((2, 24, 16, 3), (0, 3, 1, 2)),
  Case((2, 3, 24, 40), (0, 2, 3, 1)),
  Case((3, 4, 20, 16), (0, 2, 3, 1)),
  Case((2, 2, 600), (0, 2, 1)),
  Case((3, 24, 40, 3), (0, 3, 1, 2)),
  Case((3, 20, 16, 4), (0, 3, 1, 2)),
  Case((3, 2, 96), (0, 2, 1)),
  Case((5, 96, 4), (0, 2, 1)),
  Case((4, 320), (1, 0)),
  Case((320, 2), (1, 0)),
  Case((2, 3, 4, 5, 6), (4, 3, 2, 1, 0)),
  Case((2, 2, 2, 2, 2, 2, 2, 2, 3), (8, 1, 6, 3, 4, 5, 2, 7, 0)),
)

PADDED = (
  Case((5,), None, ((2, 3),)),
  Case((5,), None, ((-2, -1),)),
  Case((4,), None, ((-9, 8),)),
  Case((4,), None, ((6, -7),)),
  Case((3, 4), None, ((-3, 5), (0, 0))),
  Case((6, 8, 3), None, ((0, 0), (0, 0), (0, 1))),
  Case((6, 8, 3), None, ((0, 0), (0, 0), (1, 4))),
  Case((6, 8, 5), None, ((1, 1), (1, 1), (0, 3))),
  Case((9, 33), None, ((0, 0), (-1, -2))),
  Case((4, 6, 16), None, ((-1, -1), (2, 1), (0, 0))),
  Case((3, 30, 40), None, ((0, 0), (1, 1), (1, 1))),
  Case((3, 600), (1, 0), ((0, 0), (0, 1))),
  Case((2, 3, 20, 30), (0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), (0, 5))),
  Case((2, 3, 24, 40), (0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), (0, 5))),
  Case((2, 3, 24, 40), (0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), (0, 1))),
  Case((2, 24, 41, 3), None, ((0, 0), (0, 0), (0, 0), (0, 5))),
  Case((2, 24, 41, 3), None, ((0, 0), (0, 0), (0, 0), (0, 1))),
  Case((2, 24, 41, 4), None, ((0, 0), (0, 0), (0, 0), (0, -1))),
  Case((3, 24, 40, 4), None, ((0, 0), (-1, 0), (0, 0), (0, -1))),
  Case((3, 24, 40, 4), None, ((0, 0), (0, 0), (0, 0), (-1, 0))),
  Case((3, 5, 7, 4), None, ((0, 0), (0, 0), (0, 0), (0, -1))),
  Case((2, 20, 30, 3), (0, 3, 1, 2), ((0, 0), (0, 1), (1, 1), (2, 2))),
  Case((70, 90), (1, 0), ((3, -5), (-7, 2))),
  Case((70, 90), (1, 0), ((-3, 5), (7, 2))),
  Case((150, 90), (1, 0), ((3, -5), (-7, 2))),
  Case((170, 90), (1, 0), ((-3, 5), (140, 1))),
  Case((2, 70, 5), (0, 2, 1), ((1, 0), (0, 0), (1, -2))),
  Case((2, 5, 200), (0, 2, 1), ((0, -1), (3, 3), (0, 0))),
  Case((2, 11, 3000), (0, 2, 1), ((1, 1), (-5, 7), (-1, 2))),
  Case((2, 300, 8), (0, 2, 1), ((0, 0), (-2, 1), (0, 0))),
)

EMPTY = (
  Case((0,)),
  Case((0, 3), (1, 0)),
  Case((2, 3), None, ((-1, -1), (0, 0))),
  Case((0, 3), (1, 0), ((0, 0), (1, 2))),
)


class Window(NamedTuple):
  spatial: tuple[int, ...]
  window: tuple[int, ...]
  stride: tuple[int, ...] | int = 1
  padding: tuple[tuple[int, int], ...] | str = "VALID"
  dilation: tuple[int, ...] | int = 1
  channels: int = 4
  lead: tuple[int, ...] = (2,)


WINDOWS = (
  Window((7,), (3,)),
  Window((9,), (3,), 2, ((1, 0),), channels=3),
  Window((9,), (3,), 3, ((2, 2),), 2, channels=5),
  Window((12,), (4,), 6, ((3, 1),), 4, channels=8),
  Window((12,), (5,), 4, ((9, 8),), 6, channels=1),
  Window((6, 5), (3, 2), 1, "SAME", channels=16),
  Window((6, 5), (3, 3), 2, "SAME", channels=3),
  Window((20, 96), (7, 7), 2, "SAME", channels=3),
  Window((9, 301), (3, 5), (2, 1), ((1, 3), (2, 0)), (1, 2), channels=3, lead=(3,)),
  Window((8, 2500), (3, 3), 1, "SAME", channels=1, lead=()),
  Window((8, 8), (2, 2), 2, channels=8),
  Window((8, 9), (4, 4), 4, ((-1, 1), (0, -1)), channels=2),
  Window((9, 7), (3, 3), (1, 2), ((2, 2), (-2, 3)), (2, 1), channels=6),
  Window((4, 4), (7, 7), 1, ((3, 3), (3, 3)), channels=3),
  Window((4, 5), (5, 2), 1, channels=4),
  Window((4, 5, 3), (2, 3, 2), (1, 2, 1), ((0, 1), (1, 1), (1, 0)), (2, 1, 1), channels=8),
  Window((6, 6), (1, 1), 2, channels=4, lead=()),
  Window((3, 3), (2, 2), 1, channels=4, lead=(0,)),
  Window((0, 3), (2, 2), 1, ((1, 1), (0, 0)), channels=2, lead=(2, 3)),
)
