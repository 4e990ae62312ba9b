"""What local response and divisive normalization are tested and timed on."""

from typing import Any, NamedTuple


class LrnCase(NamedTuple):
  shape: tuple[int, ...]
  size: int | tuple[int, ...] = 5
  mode: str = "across_channels"
  """Or "within_channel", or "divisive": with means."""
  options: dict[str, Any] = {}  # noqa: RUF012


ACROSS = [
  # Channels that fill vectors, miss them, are fewer than the window, or none.
  *(LrnCase((3, 2, c)) for c in (1, 2, 3, 5, 8, 16, 17, 24, 40, 64, 65, 96, 100, 129, 256, 264, 1000)),
  *(LrnCase((2, c, 3, 5), options={"axis": 1}) for c in (1, 2, 4, 17, 40, 96)),
  *(LrnCase((2, c, 4, 6), options={"axis": 1}) for c in (3, 33)),
  # Rows that begin anywhere, long enough for warps of their own.
  *(LrnCase((2, c, 17, 19), n, options={"axis": 1}) for c, n in ((11, 3), (23, 5), (2, 5), (13, 7))),
  LrnCase((1, 14, 271), options={"axis": 1, "beta": 0.6}),
  LrnCase((700, 8)),
  LrnCase((2, 1100, 2), options={"axis": 1}),
  LrnCase((2, 9, 3, 4), options={"axis": 2}),
  LrnCase((9,)),
  # Windows: none, even on either side, wide, wider than any kernel holds, wider than the array.
  *(LrnCase((5, 48), n) for n in (1, 2, 3, 4, 6, 7, 9, 16, 17, 19, 200)),
  *(LrnCase((5, 39), n) for n in (1, 3, 4, 7, 9, 16, 19, 200)),
  *(LrnCase((5, 48), n, options={"padding": "SAME_LOWER"}) for n in (2, 4, 8)),
  *(LrnCase((2, 12, 8), n, options={"axis": 1}) for n in (1, 3, 4, 7, 9, 16, 200)),
  *(LrnCase((2, 12, 3), n, options={"axis": 1, "padding": "SAME_LOWER"}) for n in (3, 4, 7)),
  # The same over several warps and tiles, in rows that fill vectors and that do not.
  *(LrnCase((90, c), n) for c in (24, 31) for n in (2, 4, 6, 8, 9, 12, 13, 15, 16, 17)),
  *(LrnCase((90, c), n, options={"padding": "SAME_LOWER"}) for c in (24, 31) for n in (2, 6, 12, 16)),
  *(LrnCase((3000 // c, c), n) for c, n in ((1, 5), (2, 5), (3, 4), (5, 9), (7, 15), (9, 17), (250, 5), (513, 5))),
  # Even ones across strided channels, of a vector's columns and of others.
  *(LrnCase((2, c, 8), n, options={"axis": 1}) for c in (2, 70) for n in (2, 4, 6)),
  *(LrnCase((2, c, 8), n, options={"axis": 1, "padding": "SAME_LOWER"}) for c in (2, 70) for n in (2, 4, 6)),
  *(LrnCase((2, 40, 3, 5), n, options={"axis": 1, "beta": 0.6}) for n in (2, 4, 6)),
  *(LrnCase((2, 40, 3, 5), n, options={"axis": 1, "padding": "SAME_LOWER"}) for n in (2, 4, 6)),
  # Parameters.
  *(LrnCase((5, 24), options={"beta": b}) for b in (0.5, 1.0, 0.6, 2.0, -0.5, 0.0)),
  LrnCase((5, 24), options={"alpha": 0.0}),
  LrnCase((5, 24), options={"alpha": 30.0, "divide_by_size": False, "k": 1.0}),
  LrnCase((5, 21), options={"k": 0.0, "alpha": 1.0}),
]

WITHIN = [
  LrnCase((2, 7, 6, 8), 3, "within_channel"),
  LrnCase((2, 7, 6, 5), 3, "within_channel"),
  LrnCase((2, 9, 11, 4), 5, "within_channel"),
  LrnCase((1, 8, 9, 3), 7, "within_channel"),
  LrnCase((2, 3, 7, 6), 3, "within_channel", {"axis": 1}),
  LrnCase((2, 3, 8, 16), 5, "within_channel", {"axis": 1}),
  LrnCase((2, 2, 9, 10), 7, "within_channel", {"axis": 1}),
  LrnCase((2, 5, 4, 6, 3), 3, "within_channel"),
  LrnCase((2, 2, 5, 4, 6), 3, "within_channel", {"axis": 1}),
  LrnCase((2, 7, 6, 4), (2, 4), "within_channel"),
  LrnCase((2, 7, 6, 4), (4, 3), "within_channel", {"padding": "SAME_LOWER"}),
  LrnCase((2, 7, 6, 4), (1, 3), "within_channel"),
  LrnCase((2, 7, 6, 4), (3, 1), "within_channel"),
  LrnCase((2, 5, 4, 6, 2), (3, 1, 3), "within_channel"),
  LrnCase((2, 5, 4, 6, 2), (1, 3, 1), "within_channel"),
  LrnCase((2, 3, 9, 4), (5,), "within_channel"),
  LrnCase((2, 9, 3, 4), 3, "within_channel", {"axis": 2}),
  LrnCase((2, 20, 40, 4), 33, "within_channel"),
  LrnCase((2, 5, 4, 3), 1, "within_channel"),
  # Rows wider than a block, images taller than a block's share, many planes, and a single row or column.
  *(LrnCase((1, 9, 300, 2), n, "within_channel") for n in (3, 5, 7)),
  LrnCase((1, 9, 130, 48), 3, "within_channel"),
  *(LrnCase((1, 2, 9, 300), n, "within_channel", {"axis": 1}) for n in (3, 5, 7)),
  LrnCase((1, 90, 5, 8), 7, "within_channel"),
  LrnCase((5, 7, 6, 4), 5, "within_channel", {"axis": 1}),
  LrnCase((1, 9, 70, 48), 7, "within_channel"),
  LrnCase((1, 30, 7, 3), 5, "within_channel"),
  LrnCase((2, 1, 9, 6), 5, "within_channel"),
  LrnCase((2, 9, 1, 6), 5, "within_channel"),
  # Cubes: several tiles either way, many planes, slices that are not full, and a single plane, row and column.
  *(LrnCase(shape, 3, "within_channel") for shape in ((2, 5, 7, 6, 8), (1, 3, 90, 5, 8), (1, 4, 3, 75, 24))),
  *(LrnCase(shape, 3, "within_channel") for shape in ((1, 37, 3, 4, 40), (2, 1, 9, 6, 16), (3, 6, 1, 1, 8))),
]

DIVISIVE = [
  LrnCase((2, 7, 6, 8), 3, "divisive"),
  LrnCase((2, 7, 6, 5), 5, "divisive"),
  LrnCase((2, 3, 7, 6), 4, "divisive", {"axis": 1}),
  LrnCase((2, 3, 5, 4, 6), 3, "divisive", {"axis": 1}),
  *(LrnCase((2, 9, c), 3, "divisive") for c in (5, 65)),  # channels that fill no line of memory, and more
  LrnCase((2, 2, 9), 5, "divisive", {"axis": 1, "padding": "SAME_LOWER"}),
  LrnCase((2, 6, 5, 4), (3, 1), "divisive"),
  LrnCase((2, 8, 9, 6), 7, "divisive"),
  *(LrnCase((2, 3, 9, 8), n, "divisive", {"axis": 1}) for n in (3, 5, 7)),
  *(LrnCase((2, 3, 8, 5), n, "divisive", {"axis": 1}) for n in (3, 5, 7)),
  *(LrnCase((1, 9, 300, 2), n, "divisive") for n in (3, 5, 7)),
  LrnCase((1, 2, 9, 300), 5, "divisive", {"axis": 1}),
  LrnCase((1, 9, 130, 48), 3, "divisive"),
  LrnCase((1, 90, 5, 8), 5, "divisive"),
  LrnCase((1, 12, 70, 48), 5, "divisive"),
  LrnCase((1, 30, 7, 3), 3, "divisive"),
  LrnCase((2, 3, 30, 12), 7, "divisive", {"axis": 1}),
]

EMPTY = [
  LrnCase((0, 4)),
  LrnCase((3, 0)),
  LrnCase((2, 3, 0), options={"axis": 1}),
  LrnCase((2, 0, 3), options={"axis": 1}),
  LrnCase((2, 0, 3, 4), 3, "within_channel"),
  LrnCase((0, 3, 3, 4), 3, "divisive"),
]

# AlexNet and GoogLeNet in both layouts, and spatial boxes.
BENCHMARKS = [
  LrnCase((512, 55, 55, 96)),
  LrnCase((512, 27, 27, 256)),
  LrnCase((512, 96, 55, 55), options={"axis": 1}),
  LrnCase((512, 256, 27, 27), options={"axis": 1}),
  LrnCase((128, 56, 56, 64)),
  LrnCase((128, 56, 56, 192)),
  LrnCase((128, 64, 56, 56), options={"axis": 1}),
  LrnCase((128, 192, 56, 56), options={"axis": 1}),
  *(LrnCase((128, 56, 56, 64), n, "within_channel") for n in (3, 5, 7)),
  *(LrnCase((128, 64, 56, 56), n, "within_channel", {"axis": 1}) for n in (3, 5, 7)),
  LrnCase((128, 56, 56, 64), 5, "divisive"),
  LrnCase((128, 64, 56, 56), 5, "divisive", {"axis": 1}),
]

# Their neighbours: channels from 1 to 4096, windows from 1 to 15, images of other sizes.
SWEEP = [
  *(LrnCase(((1 << 26) // c, c)) for c in (1, 2, 3, 5, 8, 17, 32, 48, 65, 100, 128, 250, 513, 1000, 2048, 4096)),
  *(LrnCase((1 << 18, 128), n) for n in (1, 3, 4, 7, 9, 15)),
  *(LrnCase((64, c, 60, 60), options={"axis": 1}) for c in (3, 16, 65, 256)),
  LrnCase((4096, 128, 7, 7), options={"axis": 1}),
  LrnCase((512, 192, 28, 28), options={"axis": 1}),
  LrnCase((1024, 192, 14, 14), 4, options={"axis": 1}),
  LrnCase((8, 224, 224, 64), 5, "within_channel"),
  LrnCase((64, 55, 55, 96), 3, "within_channel"),
  LrnCase((64, 27, 27, 255), 5, "within_channel"),
  LrnCase((64, 96, 55, 55), 5, "within_channel", {"axis": 1}),
  LrnCase((8, 64, 224, 224), 3, "within_channel", {"axis": 1}),
  LrnCase((4, 32, 64, 64, 32), 3, "within_channel"),
]
