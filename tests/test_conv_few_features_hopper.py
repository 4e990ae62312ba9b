"""Hopper's kernels of few features: what they take, and problems around their limits against the float64 oracle."""

import numpy as np
import pytest

from conv_checks import check_epilogue
from jaxdnn._conv.primitives import FEW_FEATURES
from test_conv_few_features import (
  CASES,
  DTYPES,
  HOPPER,
  PADDINGS,
  RESULTS,
  SAME3,
  STRIDED,
  STRIDED_VOLUMES,
  VOLUMES,
  algorithms,
  case,
  check,
  dilated,
  not_finite,
  strided,
)

SHORT = DTYPES[:3]


def test_what_they_take():
  def tile(direction, gathered, few, dtype="bfloat16", window=(3, 3), **options):
    f = lambda hopper: algorithms(direction, gathered, few, dtype, window, hopper=hopper, **options)  # noqa: E731
    of = [[each.tile for each in f(hopper) if each.name == FEW_FEATURES] for hopper in (False, True)]
    assert of[0] == [FEW_FEATURES] and of[1] in ([FEW_FEATURES], [HOPPER])
    return of[1] == [HOPPER]

  for direction in RESULTS:
    assert tile(direction, 64, 3) and tile(direction, 8, 1) and tile(direction, 136, 8, "float16", (4, 3))
    assert tile(direction, 64, 4, window=(7, 7)) and tile(direction, 24, 2, window=(3, 3, 3), spatial=(8, 8, 8))
    assert not tile(direction, 64, 3, "float32") and not tile(direction, 64, 8, window=(5, 3))
    # Results before all of the operand.
    assert not tile(direction, 64, 3, padding=((3 if direction == "forward" else -1, 3), (1, 1)))
  for few, features, window in ((3, 64, 7), (4, 64, 7), (1, 64, 7), (4, 32, 3), (3, 32, 3)):
    assert tile("data_gradient", features, few, window=(window,) * 2, stride=2, spatial=(224, 224))
  assert tile("data_gradient", 64, 3, window=(3, 7, 7), stride=(1, 2, 2), spatial=(16, 112, 112))
  assert not tile("data_gradient", 96, 3, window=(7, 7), stride=4)


@pytest.mark.gpu
@pytest.mark.parametrize("i, dtypes", [*enumerate(SHORT)])
def test_kernels(i, dtypes):
  """Every case in one of the types."""
  taken = [check(each, *dtypes, algorithm=HOPPER) for each in CASES[i::3]]
  for each in STRIDED[i::3]:
    for one, result in ((strided(**each), "x"), (dilated(**each), "y")):
      taken.append(check(one, *dtypes, results=result, algorithm=HOPPER))
  assert sum(taken) >= 30


@pytest.mark.gpu
def test_volumes():
  for dtypes in SHORT:
    assert sum(check(each, *dtypes, algorithm=HOPPER) for each in VOLUMES) == 2 * len(VOLUMES)
    for each in STRIDED_VOLUMES:
      assert check(strided(**each, spatial=(5, 25, 40)), *dtypes, results="x", algorithm=HOPPER) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [126, 127, 128, 129, 254, 255, 256, 257, 513])
def test_columns_around_those_of_blocks(width):
  for few in (1, 3, 4):
    each = strided(64, few, (3, 3), 2, (2, 2), SAME3, spatial=(9, width))
    assert check(each, "bfloat16", "bfloat16", results="x", algorithm=HOPPER) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [(3, 3), (2, 5), (5, 5)])
def test_infinities_stay_in_their_windows(dtype, window):
  """Zeros beside the window meet them."""
  with np.errstate(invalid="ignore"):
    each = case(24, 3, window, 3, (9, 35), ((2, 2), (2, 2)))
    # Forward by two lines there are results before all of the operand.
    assert check(each, dtype, dtype, not_finite, algorithm=HOPPER) == (1 if window[0] == 2 else 2)
    for few, stride in ((3, (2, 2)), (1, (2, 3)), (2, (1, 2))):
      each = strided(32, few, window, 3, stride, ((2, 2), (2, 2)))
      assert check(each, dtype, dtype, not_finite, "x", HOPPER) == 1


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  for gathered, few, window in ((24, 3, (3, 3)), (64, 3, (5, 5)), (136, 1, (2, 3))):
    assert check(case(gathered, few, window, 3, (5, 19), PADDINGS[3]), *DTYPES[0], algorithm=HOPPER) == 2
    with np.errstate(invalid="ignore"):
      check(case(gathered, few, window, 2, (5, 37)), *DTYPES[0], not_finite, algorithm=HOPPER)
  check(VOLUMES[0], *DTYPES[0], algorithm=HOPPER)
  check(strided(**STRIDED_VOLUMES[1], spatial=(4, 11, 25)), *DTYPES[0], results="x", algorithm=HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  padding = tuple((int(a), int(b)) for a, b in rng.integers(-2, 5, (2, 2)))
  window = tuple(int(v) for v in rng.integers(1, 8, 2))
  layer = dict(
    gathered=8 * int(rng.integers(1, 10)), few=int(rng.integers(1, 5)), window=window, batch=int(rng.integers(1, 7)),
    padding=padding,
  )  # fmt: skip
  check(case(**layer, spatial=tuple(int(v) for v in rng.integers(7, 60, 2))), *DTYPES[0], algorithm=HOPPER)
  layer["apart"] = tuple(int(v) for v in rng.integers(1, 4, 2))
  spatial = tuple(int(v) for v in rng.integers(25, 90, 2))
  check(strided(**layer, spatial=spatial), *DTYPES[0], results="x", algorithm=HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_epilogue(features, activation):
  """Bias and relu are the kernels' own; with others they hand the problem on."""
  shapes = (3, 7, 18, 40), (3, 3, 40, features)
  for dtypes in SHORT:
    check_epilogue(HOPPER, *shapes, *dtypes, padding="SAME", activation=activation)
