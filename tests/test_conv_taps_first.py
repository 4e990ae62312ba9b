"""Hopper's kernels in the order of steps that much to read again takes: all taps of some channels before the next."""

import pytest

from conv_cases import ConvCase
from conv_checks import check

# Pixels times taps times channels beyond 60 MB in one direction: forward, with steps that blocks share; gradients,
# dilated and of phases that have fewer taps than others; and three dimensions.
CASES = [
  ConvCase("2d", 1, (64, 62), 256, (7, 7), 64, padding=((3, 3),) * 2),
  ConvCase("dilated", 2, (40, 50), 160, (5, 5), 448, padding=((6, 2), (4, 9)), rhs_dilation=(3, 2)),
  ConvCase("strided", 1, (117, 90), 160, (6, 7), 384, (2, 2), padding=((3, 3), (2, 3))),
  ConvCase("3d", 1, (12, 20, 20), 384, (3, 3, 3), 64, padding=((1, 1),) * 3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["wgmma 128x128", "wgmma 128x160", "wgmma 256x64", "wgmma 192x128 across"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case, tile):
  for dtype in ("bfloat16", "float32"):
    check(case, tile, dtype, dtype, results="yx")
