"""float32 on the CUDA cores in runs of pixels, for few columns and small groups, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check, check_epilogue, not_finite, planned
from conv_oracle import conv_gradients
from numerics import exact, sample

TILE = "simt runs"
HIGHEST = (lax.Precision.HIGHEST,) * 2
_ = ConvCase
# Groups of one, two, four and eight lanes, whole and not; several chunks of channels; runs that end in a line; more
# taps than a run has pixels, and one; phases, and those without taps; other dimensions' strides and dilations. In the
# filter gradient also lanes of several lines, and of several groups; windows in parts; columns strided or apart.
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
  _("single", 2, (7, 9), 1, (3, 3), 1, padding=SAME3),
  _("groups_of_2", 2, (9, 17), 66, (3, 3), 66, padding=SAME3, groups=33),
  _("odd_groups", 2, (9, 11), 15, (3, 3), 21, padding=SAME3, groups=3),
  _("strided_groups", 3, (15, 22), 64, (3, 3), 64, (2, 2), SAME3, groups=8),
  _("columns_apart", 2, (9, 23), 24, (3, 3), 24, padding=((1, 1), (4, 4)), rhs_dilation=(1, 4), groups=3),
  _("five_by_five", 2, (13, 14), 16, (5, 5), 16, padding=((2, 2), (2, 2)), groups=2),
  _("many_lines", 7, (64, 70), 8, (3, 3), 8, padding=SAME3, groups=2),
  _("all_padding", 2, (3, 3), 8, (2, 2), 8, padding=((4, 4), (5, 5)), groups=2),
  _("1d", 3, (301,), 16, (5,), 8, padding=((4, 3),), groups=2),
  _("1d_strided", 3, (301,), 16, (11,), 8, (2,), ((4, 3),), groups=2),
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
  assert chosen((32, 56, 56, 128), (3, 3, 4, 128), "filter_gradient", groups=32) == TILE
  assert chosen((32, 28, 28, 256), (3, 3, 256, 256), "filter_gradient") != TILE


def test_limits():
  takes = lambda case, dtype="float32": "".join(r for r in "yxw" if planned(case, r, dtype, TILE))  # noqa: E731
  assert takes(CASES[1]) == "yxw" and not takes(CASES[1], "float64") and not takes(CASES[1], "bfloat16")
  assert takes(_("", 2, (9, 9), 6, (3, 3), 8)) == "xw" and takes(_("", 2, (9, 9), 8, (3, 3), 6)) == "yw"
  assert takes(_("", 2, (9, 9), 8, (3, 3), 8, (1, 2))) == "xw"
  assert takes(_("", 2, (9, 9), 8, (3, 4), 8, (1, 3))) == "x"
  assert takes(_("", 2, (9, 9), 8, (3, 3), 8, rhs_dilation=(1, 2))) == "w"
  assert takes(_("", 2, (9, 9), 8, (3, 3), 8, (1, 2), rhs_dilation=(1, 2))) == "x"
  assert takes(_("", 2, (9, 9), 8, (1, 1), 8, rhs_dilation=(1, 2))) == "yxw"
  assert takes(_("", 1, (40, 40), 4, (14, 14), 4)) == "w" and takes(_("", 1, (40, 40), 4, (13, 14), 4)) == "yxw"


def taken(case):
  results = "".join(r for r in "yxw" if planned(case, r, "float32", TILE))
  assert results, case.name
  return results


SANITIZED = (
  "least", "groups_of_12", "odd_columns", "three_channels", "phases_without_taps", "dilated_input", "odd_groups",
  "strided_groups", "columns_apart", "five_by_five", "all_padding", "1d_strided",
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=pytest.mark.sanitize if c.name in SANITIZED else [], id=c.name) for c in CASES]
)
def test_kernels(case):
  check(case, TILE, "float32", "float32", HIGHEST, sample, results=taken(case))


@pytest.mark.gpu
def test_models_and_infinities():
  check(CASES[1], TILE, "float32", "float32", HIGHEST, sample, models=3, results="yxw")
  for case in CASES:
    if min(case.x_shape[-1], case.w_shape[-1]) > 5 and len(case.window) == 2:
      check(case, TILE, "float32", "float32", HIGHEST, not_finite, results=taken(case))


@pytest.mark.gpu
def test_epilogue():
  layer = {"padding": "SAME", "reference": "simt 64x32"}
  check_epilogue(TILE, (3, 9, 11, 36), (3, 3, 36, 7), "float32", None, activation="gelu", **layer)
  check_epilogue(TILE, (3, 9, 11, 64), (3, 3, 8, 32), "float32", None, activation="relu", groups=8, **layer)


@pytest.mark.gpu
def test_long_sums_are_no_less_exact_than_laxs():
  x, g = sample((8, 96, 96, 16), "float32", 0), sample((8, 96, 96, 16), "float32", 1)
  want = conv_gradients(exact(x), np.zeros((3, 3, 4, 16)), exact(g), (1, 1), SAME3, (1, 1), (1, 1), 4)[1]
  options = {"padding": "SAME", "precision": "highest"}
  dims = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 4}
  f = lambda w: lax.conv_general_dilated(jnp.asarray(x), w, (1, 1), **options, **dims)  # noqa: E731
  theirs = jax.vjp(f, jnp.zeros((3, 3, 4, 16), "float32"))[1](jnp.asarray(g))[0]
  error = lambda got: np.sqrt(np.mean((exact(got) - want) ** 2))  # noqa: E731
  ours = jaxdnn.conv_wgrad(jnp.asarray(x), jnp.asarray(g), (3, 3), **options, groups=4, algorithm=TILE)
  assert error(ours) <= 1.5 * error(theirs)
