"""float32 at HIGHEST, in the CUDA cores' tiles, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check, check_epilogue, not_finite, planned
from conv_oracle import conv as conv_oracle
from numerics import exact, sample

WIDE = ["simt 128x64", "simt 64x64", "simt 128x32", "simt 64x32"]
NARROW = ["simt 256x8", "simt 256x4"]  # not of the filter gradient
TILES = WIDE + NARROW
HIGHEST = (lax.Precision.HIGHEST,) * 2
_ = ConvCase
# Steps of 16 terms, of which several make a tap, or one is of several taps or ends within one; chunks of eight steps;
# edges of tiles in rows and columns; phases, and those without taps; channels that are filled up to fours; a few
# columns beyond a tile's, which a second launch computes where blocks are many; blocks so few that a cluster of them
# shares the steps, of which the last may have none.
CASES = [
  _("least", 1, (3, 4), 4, (1, 1), 4),
  _("steps", 2, (9, 15), 48, (3, 3), 68, padding=SAME3),
  _("taps_in_a_step", 3, (8, 11), 4, (3, 3), 132, padding=SAME3),
  _("across_taps", 2, (11, 6), 20, (3, 3), 36, padding=SAME3),
  _("a_chunk", 2, (8, 8), 128, (1, 1), 128),
  _("more_than_a_chunk", 1, (9, 13), 132, (1, 1), 64),
  _("many_chunks", 1, (7, 10), 256, (3, 3), 132, padding=SAME3),
  _("strided", 2, (15, 14), 32, (3, 3), 128, (2, 2), SAME3),
  _("phases_without_taps", 2, (15, 14), 132, (1, 1), 72, (2, 2)),
  _("dilated_input", 2, (6, 7), 64, (3, 3), 72, padding=SAME3, lhs_dilation=(2, 2)),
  _("dilated", 2, (23, 21), 16, (3, 3), 24, padding=((4, 4), (6, 6)), rhs_dilation=(4, 6)),
  _("negative_padding", 2, (12, 13), 16, (3, 3), 12, padding=((-2, 1), (3, -3))),
  _("1d", 3, (301,), 12, (5,), 136, (2,), ((4, 3),)),
  _("3d", 1, (7, 6, 5), 16, (3, 3, 3), 64, padding=((1, 1),) * 3),
  _("grouped", 2, (9, 9), 96, (3, 3), 192, padding=SAME3, groups=3),
  _("slices", 9, (28, 28), 32, (3, 3), 16, padding=SAME3),
  _("single", 2, (7, 9), 1, (3, 3), 1, padding=SAME3),
  _("odd", 2, (9, 11), 65, (3, 3), 67, padding=SAME3),
  _("odd_and_steps", 2, (9, 11), 63, (3, 3), 129, padding=SAME3),
  _("fours_to_odd", 1, (17, 18), 64, (3, 3), 3, padding=SAME3),
  _("stem", 2, (21, 22), 3, (7, 7), 66, (2, 2), ((3, 3), (2, 3))),
  _("odd_groups", 2, (9, 9), 15, (3, 3), 21, padding=SAME3, groups=3),
  _("odd_dilated_input", 2, (6, 7), 5, (3, 3), 6, padding=SAME3, lhs_dilation=(2, 3)),
  _("odd_slices", 9, (28, 28), 7, (3, 3), 9, padding=SAME3),
  _("many_blocks", 12, (28, 28), 35, (3, 3), 67, padding=SAME3),
  _("by_position", 40, (5, 5), 20, (3, 3), 40, padding=SAME3),
  _("by_position_whole", 128, (4, 4), 32, (3, 3), 36, padding=SAME3),
  _("full_gradient", 70, (7, 6), 16, (4, 3), 35),
  _("partly_outside", 9, (6, 7), 12, (5, 5), 33, padding=((2, 2), (2, 3))),
  _("by_position_dilated", 30, (9, 8), 8, (3, 3), 12, padding=((3, 3), (4, 4)), rhs_dilation=(3, 4)),
  _("by_position_strided", 33, (9, 8), 8, (5, 5), 12, (2, 2), ((2, 2), (2, 2))),
  _("all_padding", 17, (3, 3), 8, (2, 2), 5, padding=((4, 4), (5, 5))),
  _("by_position_1d", 65, (9,), 6, (5,), 13, padding=((2, 2),)),
  _("rest_in_runs", 12, (28, 28), 36, (3, 3), 68, padding=SAME3),
  _("few_blocks", 1, (7, 7), 260, (3, 3), 132, padding=SAME3),
  _("few_blocks_strided", 1, (9, 10), 256, (3, 3), 200, (2, 2), SAME3),
  _("few_blocks_by_position", 16, (4, 4), 64, (3, 3), 100, padding=SAME3),
  _("few_blocks_of_groups", 1, (5, 6), 270, (3, 3), 330, padding=SAME3, groups=2),
  _("by_position_3d", 12, (4, 3, 5), 5, (3, 3, 3), 9, padding=((1, 1),) * 3),
]


def test_are_for_floats():
  takes = lambda case, tile, dtype="float32": "".join(r for r in "yxw" if planned(case, r, dtype, tile))  # noqa: E731
  case = _("", 128, (14, 14), 256, (3, 3), 256, padding=SAME3)
  assert all(takes(case, tile) == "yxw" for tile in WIDE) and all(takes(case, tile) == "yx" for tile in NARROW)
  others = (*TILES, "simt 128x8")
  assert [tile for tile in others if takes(case, tile, "float64")] == ["simt 64x32"]
  assert [tile for tile in others if takes(case, tile, "float16")] == ["simt 64x32", "simt 128x8"]
  assert takes(case, "simt 128x8", "bfloat16") == "yx" and not takes(case, "simt 128x8")


def test_choice():
  def chosen(x_shape, w_shape, **options):
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x_shape, w_shape))
    return jaxdnn.conv_algorithms(x, w, padding="SAME", precision="highest", **options)[0].tile

  assert chosen((128, 56, 56, 256), (3, 3, 256, 256)) == "simt 128x64"
  assert chosen((32, 14, 14, 256), (3, 3, 256, 256)) == "simt 128x64"  # two blocks to a tile
  assert chosen((32, 14, 14, 256), (3, 3, 256, 256), hopper=False) == "simt 64x64"
  assert chosen((2, 96, 96, 96, 32), (3, 3, 3, 32, 32)) == "simt 128x32"
  assert chosen((2, 16, 16, 512), (1, 1, 512, 512)) == "simt 64x32"
  assert chosen((32, 56, 56, 64), (3, 3, 64, 3), stride=2) == "simt 256x4"
  assert chosen((32, 56, 56, 65), (3, 3, 65, 65)) == "simt 128x64"  # and another launch for the last column


def results_of(tile):
  return "yxw" if tile in WIDE else "yx"


SANITIZED = (
  "least", "steps", "across_taps", "phases_without_taps", "odd", "stem", "odd_groups", "odd_dilated_input",
  "by_position", "by_position_3d", "all_padding", "few_blocks", "rest_in_runs",
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=pytest.mark.sanitize if c.name in SANITIZED else [], id=c.name) for c in CASES]
)
def test_kernels(case, tile):
  check(case, tile, "float32", "float32", HIGHEST, sample, results=results_of(tile))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_models_and_infinities(tile):
  check(CASES[1], tile, "float32", "float32", HIGHEST, sample, models=3, results=results_of(tile))
  by_name = {case.name: case for case in CASES}
  check(by_name["by_position"], tile, "float32", "float32", HIGHEST, sample, models=3, results=results_of(tile))
  for case in (c for c in CASES if c.name in ("steps", "across_taps", "strided", "odd", "odd_groups")):
    check(case, tile, "float32", "float32", HIGHEST, not_finite, results=results_of(tile))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_epilogue(tile):
  layer = {"padding": "SAME", "reference": "simt 64x64" if tile == "simt 64x32" else "simt 64x32"}
  check_epilogue(tile, (3, 9, 11, 36), (3, 3, 36, 132), "float32", None, activation="gelu", **layer)
  check_epilogue(tile, (3, 9, 11, 36), (3, 3, 36, 67), "float32", None, activation="gelu", **layer)
  check_epilogue(tile, (3, 9, 11, 64), (3, 3, 32, 136), "float32", None, activation="relu", groups=2, **layer)


@pytest.mark.gpu
def test_long_sums_are_no_less_exact_than_laxs():
  x, w = sample((2, 14, 14, 512), "float32", 0), sample((3, 3, 512, 128), "float32", 1)
  want = conv_oracle(exact(x), exact(w), (1, 1), SAME3, (1, 1), (1, 1))
  dims = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest")
  theirs = exact(lax.conv_general_dilated(x, w, (1, 1), "SAME", **dims))
  error = lambda got: np.sqrt(np.mean((got - want) ** 2))  # noqa: E731
  for tile in TILES:
    ours = exact(jaxdnn.conv(jnp.asarray(x), w, padding="SAME", precision="highest", algorithm=tile))
    assert error(ours) <= 1.5 * error(theirs)
