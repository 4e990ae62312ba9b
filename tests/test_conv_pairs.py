"""Pairs of pixels that are taken for one: what they stand for, and problems around their limits against the float64
oracle."""

import dataclasses

import numpy as np
import pytest

from conv_cases import SAME3, ConvCase
from conv_checks import OF_PAIRS, check, not_finite, planned
from jaxdnn._conv.primitives import DIRECT
from test_conv_fused import check as check_fused

TILES = sorted(OF_PAIRS)
_ = ConvCase
# Of 32 channels that are gathered, or stored, at two pixels a step of the last dimension.
DOWN = [
  _("1d", 3, (70,), 32, (4,), 64, (2,), ((1, 1),)),
  _("1d k3", 2, (140,), 32, (3,), 72, (2,), ((1, 1),)),
  _("1d k7 asymmetric", 2, (66,), 32, (7,), 8, (2,), ((4, 1),)),
  _("2d", 2, (9, 22), 32, (3, 3), 64, (2, 2), SAME3),
  _("2d cropped", 2, (10, 20), 32, (2, 5), 136, (1, 2), ((1, 0), (-1, 2))),
  _("2d dilated, beyond the edges", 1, (7, 12), 32, (3, 4), 24, (3, 2), ((5, 4), (6, 5)), rhs_dilation=(2, 1)),
  _("2d with rows that meet nothing", 2, (9, 12), 32, (1, 4), 40, (2, 2), ((0, 0), (1, 1))),
  _("3d", 1, (5, 6, 14), 32, (3, 3, 3), 64, (2, 2, 2), ((1, 1),) * 3),
]
UP = [
  _("1d", 3, (35,), 64, (4,), 32, padding=((2, 2),), lhs_dilation=(2,)),
  _("1d k3", 2, (70,), 72, (3,), 32, padding=((1, 2),), lhs_dilation=(2,)),
  _("1d k5 asymmetric", 2, (40,), 8, (5,), 32, padding=((4, 1),), lhs_dilation=(2,)),
  _("2d", 2, (5, 11), 64, (4, 4), 32, padding=((2, 2),) * 2, lhs_dilation=(2, 2)),
  _("2d side by side", 2, (5, 11), 72, (2, 2), 32, padding=SAME3, lhs_dilation=(2, 2)),
  _("2d in boxes", 2, (4, 16), 136, (3, 2), 32, padding=((1, 1), (1, 1)), lhs_dilation=(1, 2)),
  _("2d cropped", 2, (9, 12), 40, (3, 6), 32, (2, 1), ((-1, 1), (2, 4)), lhs_dilation=(1, 2)),
  _("3d side by side", 1, (3, 4, 9), 64, (2, 2, 2), 32, padding=((1, 1),) * 3, lhs_dilation=(2, 2, 2)),
  _("3d", 1, (3, 4, 7), 24, (4, 1, 3), 32, padding=((2, 2), (0, 0), (1, 2)), lhs_dilation=(2, 1, 2)),
]


@pytest.mark.parametrize("case", [*DOWN, *UP], ids=lambda c: c.name)
def test_both_directions_are_taken(case):
  for result in "yx":
    for tile in TILES:
      assert planned(case, result, algorithm=tile) and planned(case, result, "float16", tile)
      assert planned(case, result, "float32", tile) is None
  assert all(planned(case, "w", algorithm=tile) is None for tile in TILES)


@pytest.mark.parametrize(
  "change",
  [
    dict(c=40),
    dict(c=64, groups=2),
    dict(stride=(2, 1)),
    dict(stride=(2, 3)),
    dict(spatial=(56, 57)),
    dict(window=(3, 1)),  # which would meet half of each pair
    dict(window=(3, 2), padding=((1, 1), (1, 1))),  # and each pair by one tap
    dict(rhs_dilation=(1, 2)),
    dict(lhs_dilation=(1, 2)),
  ],
  ids=str,
)
def test_others_are_not(change):
  case = _("", 8, (56, 56), 32, (3, 3), 64, (2, 2), SAME3)
  for result in "yx":
    assert planned(case, result, algorithm=TILES[1])
    assert planned(case, result, algorithm=TILES[1], models=2) is None
    assert planned(dataclasses.replace(case, **change), result, algorithm=TILES[1]) is None


def test_are_chosen():
  """For large layers of such channels, down and up. What is gathered in one or two dimensions, the direct kernel brings
  once for all taps."""
  down, up = ({"padding": ((1, 1),) * 3, step: (2, 2, 2)} for step in ("stride", "lhs_dilation"))
  for case, pairs, direct in (
    (_("", 1, (96, 96, 96), 32, (3, 3, 3), 64, **down), "yx", ""),
    (_("", 1, (48, 48, 48), 64, (2, 2, 2), 32, **up), "yx", ""),
    (_("", 16, (112, 112), 32, (3, 3), 64, (2, 2), SAME3), "x", "y"),
    (_("", 4, (51200,), 64, (4,), 32, padding=((2, 2),), lhs_dilation=(2,)), "y", "x"),
  ):
    assert all(planned(case, result)["tile"] in TILES for result in pairs), case
    assert all(planned(case, result)["tile"] == DIRECT for result in direct), case


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("case", [*DOWN, *UP], ids=lambda c: c.name)
def test_values(case, tile):
  for dtype in ("bfloat16", "float16"):
    check(case, tile, dtype, dtype, results="yx")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("case", [*DOWN[:4], *UP[:5]], ids=lambda c: c.name)
def test_infinities_go_nowhere_else(case, tile):
  """Of a pair's pixels, windows that begin or end between them meet one alone."""
  wide = dataclasses.replace(case, spatial=(*case.spatial[:-1], 2 * case.spatial[-1]))

  def draw(shape, dtype, seed):
    return not_finite(shape if len(shape) == 4 else (shape[0], 1, *shape[1:]), dtype, seed).reshape(shape)

  with np.errstate(invalid="ignore"):
    check(wide, tile, "bfloat16", "bfloat16", draw=draw, results="yx")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "relu", "gelu"])
@pytest.mark.parametrize("tile", TILES)
def test_epilogue(tile, kind):
  for case in (DOWN[3], UP[0], UP[4]):
    assert check_fused(case, tile, "bfloat16", "bfloat16", kind)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_under_the_sanitizer():
  for case in (DOWN[3], UP[0], UP[4]):
    for tile in TILES:
      check(case, tile, "bfloat16", "bfloat16", results="yx")
