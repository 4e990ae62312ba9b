"""float32 on the CUDA cores in runs of pixels, for few columns, against the float64 oracle."""

import jax
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check, check_epilogue, not_finite, planned
from numerics import sample

TILE = "simt runs"
HIGHEST = (lax.Precision.HIGHEST,) * 2
_ = ConvCase
# Groups of one, two, four and eight lanes, whole and not; several chunks of channels; runs that end in a line; more
# taps than a run has pixels, and one; phases, and those without taps; other dimensions' strides and dilations.
CASES = [
  _("least", 1, (3, 4), 4, (1, 1), 4),
  _("groups_of_4", 2, (9, 17), 64, (3, 3), 64, padding=SAME3, groups=16),
  _("groups_of_8", 2, (7, 9), 48, (3, 3), 48, padding=SAME3, groups=6),
  _("groups_of_12", 2, (7, 9), 36, (3, 3), 60, padding=SAME3, groups=3),
  _("groups_of_16", 1, (11, 24), 80, (3, 3), 80, padding=SAME3, groups=5),
  _("groups_of_20", 1, (8, 8), 40, (3, 3), 24, padding=SAME3, groups=2),
  _("chunks", 2, (9, 11), 68, (3, 3), 4, padding=SAME3),
  _("odd_columns", 2, (9, 11), 36, (3, 3), 7, padding=SAME3),
  _("many_runs", 5, (40, 67), 8, (3, 3), 4, padding=SAME3, groups=2),
  _("long", 2, (5, 40), 8, (2, 19), 4, padding=((1, 0), (9, 9))),
  _("stem", 2, (21, 22), 4, (7, 7), 64, (2, 2), ((3, 3), (2, 3))),
  _("three_channels", 2, (22, 21), 3, (7, 7), 36, (2, 2), ((3, 3), (2, 3))),
  _("phases_without_taps", 2, (15, 14), 4, (1, 1), 8, (2, 3)),
  _("dilated_input", 2, (6, 7), 8, (3, 3), 4, padding=SAME3, lhs_dilation=(2, 3)),
  _("lines_apart", 2, (23, 11), 8, (3, 3), 8, (2, 1), ((4, 4), (1, 1)), rhs_dilation=(3, 1)),
  _("negative_padding", 2, (12, 13), 16, (3, 3), 4, padding=((-2, 1), (3, -3))),
  _("1d", 3, (301,), 16, (5,), 8, padding=((4, 3),), groups=2),
  _("3d", 1, (7, 6, 5), 8, (3, 3, 3), 4, padding=((1, 1),) * 3),
]


def test_choice():
  def chosen(x_shape, w_shape, direction="forward", precision="highest", **options):
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x_shape, w_shape))
    options = {"direction": direction, "padding": "SAME", "precision": precision} | options
    return jaxdnn.conv_algorithms(x, w, **options)[0].tile

  assert chosen((32, 56, 56, 64), (3, 3, 64, 3)) == TILE
  assert chosen((32, 56, 56, 128), (3, 3, 4, 128), groups=32) == TILE
  for precision in ("highest", "high"):
    assert chosen((32, 224, 224, 3), (7, 7, 3, 64), "data_gradient", precision, stride=2) == TILE
  assert chosen((32, 56, 56, 64), (3, 3, 64, 64)) != TILE


def test_limits():
  takes = lambda case, dtype="float32": "".join(r for r in "yxw" if planned(case, r, dtype, TILE))  # noqa: E731
  assert takes(CASES[1]) == "yx" and not takes(CASES[1], "float64") and not takes(CASES[1], "bfloat16")
  assert takes(_("", 2, (9, 9), 6, (3, 3), 8)) == "x" and takes(_("", 2, (9, 9), 8, (3, 3), 6)) == "y"
  assert takes(_("", 2, (9, 9), 8, (3, 3), 8, (1, 2))) == "x"
  assert takes(_("", 2, (9, 9), 8, (3, 3), 8, rhs_dilation=(1, 2))) == ""
  assert takes(_("", 2, (9, 9), 8, (1, 1), 8, rhs_dilation=(1, 2))) == "yx"
  assert takes(_("", 1, (40, 40), 4, (14, 14), 4)) == "" and takes(_("", 1, (40, 40), 4, (13, 14), 4)) == "yx"


def taken(case):
  results = "".join(r for r in "yx" if planned(case, r, "float32", TILE))
  assert results, case.name
  return results


SANITIZED = ("least", "groups_of_12", "odd_columns", "three_channels", "phases_without_taps", "dilated_input")


@pytest.mark.gpu
@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=pytest.mark.sanitize if c.name in SANITIZED else [], id=c.name) for c in CASES]
)
def test_kernels(case):
  check(case, TILE, "float32", "float32", HIGHEST, sample, results=taken(case))


@pytest.mark.gpu
def test_models_and_infinities():
  check(CASES[1], TILE, "float32", "float32", HIGHEST, sample, models=3, results="yx")
  for case in CASES:
    if min(case.x_shape[-1], case.w_shape[-1]) > 5 and len(case.window) == 2:
      check(case, TILE, "float32", "float32", HIGHEST, not_finite, results=taken(case))


@pytest.mark.gpu
def test_epilogue():
  check_epilogue(TILE, (3, 9, 11, 36), (3, 3, 36, 7), "float32", None, padding="SAME", activation="gelu")
  check_epilogue(TILE, (3, 9, 11, 64), (3, 3, 8, 32), "float32", None, padding="SAME", activation="relu", groups=8)
