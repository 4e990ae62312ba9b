"""Shapes of layer norm and RMS norm, for tests and benchmarks."""

from typing import NamedTuple


class Case(NamedTuple):
  rows: int
  n: int


# Row lengths around every change of kernel: vectors and their halves, lanes, warps, blocks, clusters.
LENGTHS = (
  *range(1, 10), 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 66, 96, 100, 127, 128, 129, 130, 255, 256, 257, 264, 500, 511,
  512, 513, 514, 520, 768, 769, 770, 776, 1000, 1023, 1024, 1025, 1026, 1032, 2047, 2048, 2050, 2056, 4095, 4096, 4098,
  4104, 8190, 8191, 8192, 8193, 8194, 8200,
)  # fmt: skip
WIDE = (
  10241, 12288, 16383, 16384, 16386, 16392, 32766, 32767, 32768, 32776, 65535, 65536, 65544, 70002, 81919, 81930,
  131071, 131072, 131080, 262144, 262145, 262152, 300000,
)  # fmt: skip

# Rows that fill a block's groups, miss them, and need every block.
ROWS = (
  Case(1, 40), Case(9, 768), Case(33, 65), Case(2, 40), Case(7, 24), Case(300, 17), Case(130, 2056), Case(5000, 24),
  Case(9, 1001), Case(70, 513), Case(77, 577), Case(301, 2), Case(1001, 4), Case(401, 8),
  Case(1024, 264), Case(1025, 264), Case(600, 16), Case(40, 4096),
)  # fmt: skip

# What models ask for, widths from a head to a wide decoder, and few rows, as in decoding.
BENCHMARKS = (
  Case(65536, 768),
  Case(16384, 4096),
  Case(8192, 8192),
  Case(131072, 128),
  Case(1024, 12288),
  Case(4096, 16384),
  Case(1024, 2048),
  Case(64, 16384),
  Case(32, 4096),
  Case(8, 8192),
  Case(8, 65536),
  Case(1, 262144),
)

# Their neighbours: rows of every kind of length.
SWEEP = (
  1, 3, 8, 17, 32, 64, 100, 127, 128, 192, 256, 384, 512, 577, 640, 768, 1000, 1001, 1024, 1280, 1536, 2048, 2560, 3072,
  4095, 4096, 5120, 6144, 8192, 8193, 12288, 16384, 24576, 32768, 65536, 65537, 131072, 262144,
)  # fmt: skip
