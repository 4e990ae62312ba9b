"""Small groups that the direct kernels merge: against the float64 oracle, and what infinities reach."""

import jax.numpy as jnp
import numpy as np
import pytest

import conv_checks
import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check_epilogue, coarse, not_finite
from jaxdnn._conv.primitives import DIRECT

DTYPES = [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")]


def case(name, batch, spatial, channels, groups, window, padding, dilation=(), stride=()):
  return ConvCase(name, batch, spatial, channels * groups, window, channels * groups, padding=padding,
                  rhs_dilation=dilation, stride=stride, groups=groups)  # fmt: skip


SAME4 = ((1, 2), (2, 1))
# Whole merged groups and parts of one; more channels than a merged group's, or fewer.
CASES = [
  *(case(f"{n}s4x4", 3, (9, 20), n, 64 // n, (4, 4), SAME4) for n in (2, 4, 8, 16)),
  *(case(f"{n}s3x3", 2, (6, 31), n, 40 // n, (3, 3), SAME3) for n in (2, 4, 8)),
  case("3_of_16", 2, (7, 9), 16, 3, (3, 3), SAME3),
  case("4_of_4", 5, (14, 14), 4, 4, (2, 2), ((1, 0), (0, 1))),
  case("19_of_8", 9, (14, 14), 8, 19, (4, 4), SAME4),
  case("5x7", 3, (7, 11), 4, 12, (5, 7), ((2, 2), (3, 3))),
  case("dilated", 2, (20, 20), 8, 8, (3, 3), ((3, 3), (5, 5)), (3, 5)),
  case("residues", 2, (18, 20), 8, 8, (3, 3), ((6, 6), (1, 1)), (6, 1)),
  case("cropped", 2, (12, 19), 4, 16, (4, 3), ((-2, 1), (3, -3))),
  case("1d", 3, (400,), 4, 16, (31,), ((15, 15),)),
  case("1d_two_boxes", 1, (256,), 8, 4, (9,), ((4, 4),)),
  case("1x1", 3, (7, 11), 16, 4, (1, 1), ((0, 0), (0, 0))),
  case("many_images", 66, (7, 7), 4, 16, (4, 4), SAME4),
  case("planes", 2, (3, 9, 10), 4, 8, (1, 4, 4), ((0, 0), *SAME4)),
]
VOLUMES = [
  case("4_of_8", 2, (5, 9, 10), 4, 8, (4, 4, 4), ((1, 2), (2, 1), (1, 2))),
  case("8_of_5", 3, (6, 7, 12), 8, 5, (2, 3, 2), ((1, 0), (1, 1), (0, 1))),
]
STRIDED = case("strided", 3, (10, 23), 4, 16, (4, 4), SAME4, stride=(2, 2))
BY_NAME = {each.name: each for each in CASES}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case):
  for dtypes in DTYPES:
    conv_checks.check(case, DIRECT, *dtypes)


@pytest.mark.gpu
@pytest.mark.parametrize("case", VOLUMES, ids=lambda c: c.name)
def test_volumes(case):
  for dtypes in DTYPES:
    conv_checks.check(case, DIRECT, *dtypes, results="yx")
  with np.errstate(invalid="ignore"):
    conv_checks.check(case, DIRECT, "bfloat16", "bfloat16", draw=not_finite, results="yx")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["4s4x4", "19_of_8", "many_images", "1d"])
def test_many_problems(name):
  for models in (3, 20):
    conv_checks.check(BY_NAME[name], DIRECT, "bfloat16", "bfloat16", models=models)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["2s4x4", "16s4x4", "4_of_4", "19_of_8", "1d_two_boxes"])
def test_kernels_under_the_sanitizer(name):
  conv_checks.check(BY_NAME[name], DIRECT, "bfloat16", "bfloat16", models=2)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  rank, channels = int(rng.integers(1, 3)), int(rng.choice([2, 4, 8, 16]))
  groups = int(rng.integers(1, 9)) * max(1, 8 // channels) + (channels >= 8)
  spatial = tuple(int(n) for n in rng.integers(6, 400 if rank == 1 else 40, rank))
  window = tuple(int(n) for n in rng.integers(1, 32 if rank == 1 else 6, rank))
  dilation = tuple(int(n) for n in rng.integers(1, 4, rank))
  padding = tuple((max(int(a), (w - 1) * d - n + 1), int(b)) for (a, b), n, w, d in
                  zip(rng.integers(0, 5, (rank, 2)), spatial, window, dilation, strict=True))  # fmt: skip
  each = case("random", int(rng.integers(1, 12)), spatial, channels, groups, window, padding, dilation)
  conv_checks.check(each, DIRECT, *DTYPES[seed % 3], models=int(rng.integers(1, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("name", ["2s4x4", "4s4x4", "8s4x4", "16s4x4", "19_of_8", "dilated", "residues", "cropped"])
def test_infinities_stay_in_their_group(name, dtypes):
  with np.errstate(invalid="ignore"):
    conv_checks.check(BY_NAME[name], DIRECT, *dtypes, draw=not_finite)
    conv_checks.check(STRIDED, DIRECT, *dtypes, draw=not_finite, results="y")


@pytest.mark.gpu
def test_infinities_and_an_epilogue():
  conv_checks.check_infinities_in_groups(DIRECT, (4, 4), SAME4)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [4, 16])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", None), ("float16", None), ("bfloat16", "float32")])
def test_epilogue(channels, activation, dtype, out_dtype):
  layer = {"padding": SAME4, "activation": activation, "groups": 48 // channels}
  check_epilogue(DIRECT, (3, 7, 18, 48), (4, 4, channels, 48), dtype, out_dtype, **layer)


@pytest.mark.gpu
def test_a_tap_of_another_group_is_not_read():
  """Where the filter of one group is not finite, the others' results are."""
  x, w = coarse((2, 9, 8, 64), "bfloat16", 0), coarse((4, 4, 4, 64), "bfloat16", 1)
  w[..., 20:24] = np.nan
  y = np.asarray(jaxdnn.conv(x, jnp.asarray(w), padding=SAME4, groups=16, algorithm=DIRECT), np.float32)
  assert np.isnan(y[..., 20:24]).all() and np.isfinite(np.delete(y, range(20, 24), axis=-1)).all()
