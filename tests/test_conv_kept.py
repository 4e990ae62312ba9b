"""Hopper's dense kernels where sums are of few steps: a block has one column of tiles, and its filter stays."""

import numpy as np
import pytest

from conv_cases import ConvCase
from conv_checks import check, check_epilogue, not_finite

_ = ConvCase
TILE = "wgmma 128x128"
# More than two rounds of tiles each: rows that do not fill the last tile, columns that do not, lines of channels that
# are parts, numbers of steps up to the most that are kept, and one more.
KEPT = [
  _("one_step", 1, (185, 185), 64, (1, 1), 128),
  _("parts_of_lines", 2, (131, 131), 72, (1, 1), 200),
  _("four_steps", 1, (129, 107), 256, (1, 1), 384),
  _("five_steps", 1, (129, 107), 320, (1, 1), 384),
  _("stride", 3, (211, 210), 128, (1, 1), 256, (2, 2)),
  _("taps", 2, (131, 131), 64, (2, 2), 136, padding=((1, 0), (0, 1))),
  _("dilated_1d", 5, (7001,), 64, (3,), 64, padding=((10, 0),), rhs_dilation=(5,)),
  _("volumes", 2, (26, 26, 26), 16, (1, 1, 3), 64, padding=((0, 0), (0, 0), (1, 1))),
  _("groups", 1, (131, 137), 256, (1, 1), 256, groups=2),
  _("many_columns", 1, (33, 37), 64, (1, 1), 4104),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", KEPT, ids=lambda c: c.name)
def test_kernels(case):
  for dtype in ("bfloat16", "float16"):
    check(case, TILE, dtype, dtype, results="yx")
  check(case, TILE, "bfloat16", "float32", results="yx")


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_epilogue(out_dtype):
  for c, k, dtype in ((64, 256, "bfloat16"), (200, 136, "float16")):
    check_epilogue(TILE, (2, 131, 133, c), (1, 1, c, k), dtype, out_dtype)


@pytest.mark.gpu
def test_infinities_stay_where_they_are():
  with np.errstate(invalid="ignore"):
    check(KEPT[1], TILE, "bfloat16", "bfloat16", draw=not_finite, results="yx")


@pytest.mark.gpu
@pytest.mark.sanitize
def test_under_the_sanitizer():
  check(KEPT[-1], TILE, "bfloat16", "bfloat16", results="yx")
