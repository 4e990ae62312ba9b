"""Windows as wide as the steps between them: patches, and sampling down or up by 2x2; and what they are planned as."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import WGMMA_TILES, check, check_epilogue, coarse, planned, takes
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn._conv.primitives import ALGORITHMS, OPERANDS
from numerics import assert_close, exact

_ = ConvCase
PATCHES = _("patches", 2, (32, 48), 3, (16, 16), 72, (16, 16))
# Patches whose lines are whole chunks of 16 bytes, and are not; windows side by side in some of the dimensions, among
# others; positions between which a dilated input has holes, side by side in all dimensions and in one.
CASES = [
  PATCHES,
  _("halves", 3, (10, 14), 24, (2, 2), 72, (2, 2)),
  _("thirds", 2, (9, 12), 5, (3, 3), 40, (3, 3)),
  _("lines", 2, (12, 9), 16, (4, 3), 24, (4, 2), ((0, 0), (1, 1))),
  _("columns", 2, (9, 12), 16, (3, 4), 24, (2, 4), ((1, 1), (0, 0))),
  _("1d", 3, (96,), 8, (4,), 136, (4,)),
  _("frames", 1, (3, 8, 12), 8, (1, 4, 2), 24, (1, 4, 2)),
  _("3d", 2, (4, 6, 8), 8, (2, 3, 2), 24, (2, 3, 2)),
  _("up2x2", 2, (9, 7), 72, (2, 2), 40, padding=SAME3, lhs_dilation=(2, 2)),
  # Whose results of a tap leave as boxes, of lines that 64 is a multiple of, and the other way round.
  _("halves_in_boxes", 3, (10, 16), 96, (2, 2), 72, (2, 2)),
  _("up_in_boxes", 2, (3, 128), 40, (2, 2), 64, padding=SAME3, lhs_dilation=(2, 2)),
  _("up4x4", 1, (9, 8), 40, (4, 4), 136, padding=((3, 3),) * 2, lhs_dilation=(4, 4)),
  _("up2x3", 2, (7, 6), 72, (2, 3), 40, padding=SAME3, lhs_dilation=(2, 3)),
  _("up_3d", 1, (3, 4, 5), 16, (2, 2, 2), 24, padding=((1, 1),) * 3, lhs_dilation=(2, 2, 2)),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
  "case, results, other",
  [
    (_("patches", 32, (224, 224), 3, (16, 16), 768, (16, 16)), "yw", _("", 448, (16, 14), 48, (16, 1), 768)),
    (_("patches", 32, (224, 224), 3, (16, 16), 768, (16, 16)), "x", _("", 32, (224, 14), 48, (16, 1), 768, (16, 1))),
    (_("halves", 32, (56, 56), 96, (2, 2), 192, (2, 2)), "yw", _("", 896, (2, 28), 192, (2, 1), 192)),
    (_("halves", 32, (56, 56), 96, (2, 2), 192, (2, 2)), "x", _("", 32, (56, 28), 192, (2, 1), 192, (2, 1))),
    (_("1d", 4, (4096,), 16, (8,), 256, (8,)), "yxw", _("", 4, (512,), 128, (1,), 256)),
    (_("frames", 2, (8, 96, 96), 8, (1, 4, 4), 64, (1, 4, 4)), "yw", _("", 384, (1, 4, 24), 32, (1, 4, 1), 64)),
    # Only one of the two dimensions.
    (_("lines", 8, (64, 64), 64, (4, 3), 64, (4, 2), ((0, 0), (1, 1))), "yw",
     _("", 128, (4, 64), 64, (4, 3), 64, (1, 2), ((0, 0), (1, 1)))),
    (_("columns", 8, (64, 64), 16, (3, 4), 64, (2, 4), ((1, 1), (0, 0))), "yxw",
     _("", 8, (64, 16), 64, (3, 1), 64, (2, 1), ((1, 1), (0, 0)))),
  ],
  ids=lambda v: v.name if isinstance(v, ConvCase) else v,
)  # fmt: skip
def test_planned_as_other_extents_of_the_same_arrays(case, results, other, dtype):
  assert np.prod(case.x_shape) == np.prod(other.x_shape) and np.prod(case.w_shape) == np.prod(other.w_shape)
  for result in results:
    for algorithm in (None, *ALGORITHMS):
      want = planned(other, result, dtype, algorithm)
      assert want is not None and planned(case, result, dtype, algorithm) == want


WHOLE = _("", 2, (64, 64), 3, (16, 16), 64, (16, 16))


@pytest.mark.parametrize(
  "change",
  [
    dict(spatial=(56, 56), padding=((4, 4), (4, 4))),
    dict(spatial=(72, 72), padding=((-4, -4), (-4, -4))),
    dict(spatial=(64, 60), padding=((0, 0), (0, 4))),
    dict(spatial=(64, 66)),
    dict(spatial=(66, 64)),
    dict(spatial=(63, 63), rhs_dilation=(2, 2)),
    dict(lhs_dilation=(2, 2)),
    dict(stride=(16, 8)),
    dict(stride=(16, 32)),
    dict(window=(16, 2), stride=(16, 2)),
    dict(c=6, groups=2),
  ],
  ids=str,
)
def test_windows_that_are_not_side_by_side_stay_as_they_are(change):
  """Of three channels, or of strides beyond the TMA unit's, Hopper's kernels take only what is folded."""
  for result in OPERANDS:
    assert planned(WHOLE, result, "bfloat16", "implicit_gemm_wgmma")
    other = dataclasses.replace(WHOLE, **change)
    assert planned(other, result, "bfloat16")
    assert planned(other, result, "bfloat16", "implicit_gemm_wgmma") is None


def test_many_phases_are_one():
  """Eight are the most that a launch takes, but for those that meet the same pixels."""
  up = _("", 2, (16, 16), 64, (4, 4), 64, padding=((3, 3),) * 2, lhs_dilation=(4, 4))
  assert planned(up, "y", "bfloat16", "implicit_gemm_wgmma")
  for change in (dict(padding=((2, 3),) * 2), dict(padding=((3, 2),) * 2), dict(window=(5, 5))):
    assert planned(dataclasses.replace(up, **change), "y", "bfloat16", "implicit_gemm_wgmma") is None
  down = _("", 2, (64, 64), 64, (4, 4), 64, (4, 4))
  assert planned(down, "x", "bfloat16", "implicit_gemm_wgmma")
  assert planned(dataclasses.replace(down, spatial=(65, 65)), "x", "bfloat16", "implicit_gemm_wgmma") is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case):
  names = ["implicit_gemm", "implicit_gemm_mma"]
  if (case.c * (case.window[-1] if case.stride == case.window else 1)) % 8 == 0:
    names += WGMMA_TILES
  for name in names:
    for dtype in ("bfloat16", "float16", "float32"):
      check(case, name, dtype, dtype)
    check(case, name, "bfloat16", "float32")


# Of 12 and of 4 channels after folding, which make 48 and 12 columns.
HALVES = [
  _("patches of 24 bytes", 3, (20, 28), 3, (4, 4), 40, (4, 4)),
  _("lines of 8 bytes", 2, (9, 14), 2, (3, 2), 72, (3, 2)),
]


def test_gradients_of_halves_of_chunks_are_for_16_bits_as_they_are():
  for case in HALVES:
    assert planned(case, "x", "bfloat16", "implicit_gemm_wgmma") and planned(case, "x", "float16", "wgmma 128x64")
    assert planned(case, "y", "bfloat16", "implicit_gemm_wgmma") is None
    assert planned(case, "w", "bfloat16", "implicit_gemm_wgmma") is None
    assert planned(case, "x", "bfloat16", "implicit_gemm_wgmma", "float32") is None
  assert planned(HALVES[0], "x", "float32", "implicit_gemm_wgmma")  # of 48 bytes
  assert planned(HALVES[1], "x", "float32", "implicit_gemm_wgmma")  # of 16
  assert planned(dataclasses.replace(HALVES[1], c=1, k=64), "x", "float32", "implicit_gemm_wgmma") is None
  overlapping = _("", 2, (10, 14), 12, (3, 1), 72, (2, 1))
  assert planned(overlapping, "x", "bfloat16", "implicit_gemm_wgmma") is None


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", HALVES, ids=lambda c: c.name)
def test_gradients_in_halves_of_chunks(case):
  y_shape = (case.batch, *(n // s for n, s in zip(case.spatial, case.stride, strict=True)), case.k)
  for dtype in ("bfloat16", "float16"):
    w, g = coarse(case.w_shape, dtype, 1), coarse(y_shape, dtype, 2)
    want, _ = conv_gradients(np.zeros(case.x_shape), exact(w), exact(g), *case.geometry)
    for tile in WGMMA_TILES:
      if takes(tile, "x", dtype, dtype):
        got = jaxdnn.conv_dgrad(g, w, case.spatial, stride=case.stride, algorithm=tile)
        assert_close(got, want, dtype, terms=case.k, scale=3 * np.sqrt(case.k))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["patches", "up2x2", "halves_in_boxes"])
def test_under_the_sanitizer(name):
  case = next(case for case in CASES if case.name == name)
  for tile in ("wgmma 128x64", "wgmma 96x128 across"):
    check(case, tile, "bfloat16", "bfloat16")
  check(case, "wgmma 128x128", "float32", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_epilogue(dtype):
  check_epilogue("implicit_gemm_wgmma", PATCHES.x_shape, (16, 16, 3, 72), dtype, None, stride=16, activation="relu")


@pytest.mark.gpu
def test_vmap_over_models():
  x, w = coarse((3, *PATCHES.x_shape), "bfloat16"), coarse((3, *PATCHES.w_shape), "bfloat16", 1)
  got = jax.vmap(lambda x, w: jaxdnn.conv(x, w, stride=16))(x, w)
  for each, *operands in zip(got, x, w, strict=True):
    assert_close(each, conv_oracle(*map(exact, operands), *PATCHES.geometry), "bfloat16", terms=768, scale=90)
