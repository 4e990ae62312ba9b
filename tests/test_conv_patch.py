"""float32 on the CUDA cores in patches, for sums of few terms, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check, check_epilogue, planned
from conv_oracle import conv_gradients
from numerics import exact, sample

TILE = "simt patch"
HIGHEST = (lax.Precision.HIGHEST,) * 2
_ = ConvCase
# Features of one, four and eight threads, whole and not, and of several blocks; lines of the window of fewer than four
# numbers, of fours, and of some more; tiles that end beyond the image; several tiles to a block; groups of threads with
# rows and columns of their own; one term, and the most; other dimensions' strides and dilations.
CASES = [
  _("least", 1, (1, 1), 1, (1, 1), 1),
  _("stem", 2, (37, 41), 3, (7, 7), 64, (2, 2), ((3, 3), (2, 3))),
  _("one_channel", 3, (28, 28), 1, (5, 5), 32),
  _("lenet", 3, (32, 31), 1, (5, 5), 6),
  _("many_tiles", 40, (56, 57), 3, (3, 3), 40, padding=SAME3),
  _("odd_features", 2, (19, 23), 3, (3, 3), 67, padding=SAME3),
  _("several_columns", 2, (9, 11), 4, (3, 3), 132, padding=SAME3),
  _("most_terms", 2, (9, 11), 16, (4, 4), 24, padding=((1, 2), (2, 1))),
  _("one_tap", 2, (9, 11), 32, (1, 1), 48),
  _("patches", 2, (17, 18), 3, (4, 4), 96, (4, 4)),
  _("wide_strides", 2, (23, 26), 2, (3, 2), 12, (3, 5), ((1, 1), (0, 4))),
  _("lines_apart", 2, (23, 11), 3, (3, 3), 20, (2, 1), ((4, 4), (1, 1)), rhs_dilation=(3, 1)),
  _("columns_apart", 2, (11, 23), 3, (3, 1), 20, padding=SAME3, rhs_dilation=(1, 2)),
  _("negative_padding", 2, (12, 13), 3, (3, 3), 4, padding=((-2, 1), (3, -3))),
  _("all_padding", 2, (3, 3), 2, (2, 2), 5, padding=((4, 4), (5, 5))),
  _("1d", 3, (801,), 1, (16,), 64, (3,), ((7, 8),)),
  _("3d", 2, (7, 9, 8), 2, (3, 3, 3), 33, (1, 2, 1), ((1, 1),) * 3),
]


def test_choice():
  def chosen(x_shape, w_shape, direction="forward", precision="highest", **options):
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x_shape, w_shape))
    options = {"direction": direction, "padding": "SAME", "precision": precision} | options
    return jaxdnn.conv_algorithms(x, w, **options)[0].tile

  for direction in ("forward", "filter_gradient"):
    assert chosen((32, 224, 224, 3), (7, 7, 3, 64), direction, stride=2) == TILE
    assert chosen((128, 28, 28, 1), (5, 5, 1, 32), direction, padding="VALID") == TILE
    assert chosen((32, 56, 56, 64), (3, 3, 64, 64), direction) != TILE
  assert chosen((8, 256, 256, 64), (3, 3, 64, 3), "data_gradient") == TILE


def test_limits():
  takes = lambda case, dtype="float32": "".join(r for r in "yxw" if planned(case, r, dtype, TILE))  # noqa: E731
  assert takes(CASES[2]) == "yw" and takes(CASES[0]) == "yxw"
  assert not takes(CASES[0], "float64") and not takes(CASES[0], "bfloat16")
  assert takes(_("", 2, (9, 9), 28, (3, 3), 28, padding=SAME3)) == "yxw"
  assert takes(_("", 2, (9, 9), 29, (3, 3), 29, padding=SAME3)) == ""
  assert takes(_("", 2, (9, 9), 3, (3, 3), 8, padding=SAME3, rhs_dilation=(1, 2))) == ""
  # With x and y exchanged there are no holes.
  assert takes(_("", 2, (9, 9), 3, (3, 3), 8, padding=SAME3, lhs_dilation=(2, 1))) == "w"
  assert takes(_("", 2, (9, 9), 4, (3, 3), 8, padding=SAME3, groups=2)) == ""


def taken(case):
  results = "".join(r for r in "yxw" if planned(case, r, "float32", TILE))
  assert results, case.name
  return results


SANITIZED = ("least", "stem", "one_channel", "odd_features", "wide_strides", "lines_apart", "all_padding", "1d", "3d")


@pytest.mark.gpu
@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=pytest.mark.sanitize if c.name in SANITIZED else [], id=c.name) for c in CASES]
)
def test_kernels(case):
  check(case, TILE, "float32", "float32", HIGHEST, sample, results=taken(case))


def not_finite(shape, dtype, seed):
  """Infinities and a NaN among what is gathered, also just beyond what the last windows see; not in the filter."""
  a = sample(shape, dtype, seed)
  if seed % 3 == 0:
    a[0, 0, 0, 0], a[0, -1, -1, -1], a[-1, shape[1] // 2, shape[2] // 2, 0] = np.inf, -np.inf, np.nan
  return a


@pytest.mark.gpu
def test_models_and_infinities():
  check(CASES[1], TILE, "float32", "float32", HIGHEST, sample, models=3, results="yw")
  check(CASES[2], TILE, "float32", "float32", HIGHEST, sample, models=3, results="yw")
  for case in CASES:
    if case.name in ("stem", "one_channel", "patches", "wide_strides"):
      check(case, TILE, "float32", "float32", HIGHEST, not_finite, results="yw")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("features", [7, 68])
def test_epilogue(activation, features):
  layer = {"padding": "SAME", "activation": activation, "reference": "simt 64x32"}
  check_epilogue(TILE, (3, 19, 21, 3), (3, 3, 3, features), "float32", None, **layer)


@pytest.mark.gpu
def test_long_sums_are_no_less_exact_than_laxs():
  x, g = sample((8, 96, 96, 3), "float32", 0), sample((8, 96, 96, 24), "float32", 1)
  want = conv_gradients(exact(x), np.zeros((3, 3, 3, 24)), exact(g), (1, 1), SAME3, (1, 1), (1, 1), 1)[1]
  options = {"padding": "SAME", "precision": "highest"}
  dims = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
  f = lambda w: lax.conv_general_dilated(jnp.asarray(x), w, (1, 1), **options, **dims)  # noqa: E731
  theirs = jax.vjp(f, jnp.zeros((3, 3, 3, 24), "float32"))[1](jnp.asarray(g))[0]
  error = lambda got: np.sqrt(np.mean((exact(got) - want) ** 2))  # noqa: E731
  ours = jaxdnn.conv_wgrad(jnp.asarray(x), jnp.asarray(g), (3, 3), **options, algorithm=TILE)
  assert error(ours) <= 1.5 * error(theirs)
