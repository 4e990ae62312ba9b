"""The direct kernels: what they take, and problems around their limits against the float64 oracle."""

import jax
import numpy as np
import pytest

import conv_checks
import jaxdnn
from conv_cases import OTHERS, SAME3, ConvCase
from conv_checks import check_epilogue, coarse
from jaxdnn._conv.primitives import DIRECT, plan
from jaxdnn._conv.spec import ConvSpec

DIRECTIONS = ("forward", "data_gradient", "filter_gradient")
DTYPES = [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")]


def names(direction, c, k, dtype="bfloat16", window=(3, 3), **options):
  x = jax.ShapeDtypeStruct((options.pop("batch", 32), *options.pop("spatial", (56, 56)), c), dtype)
  w = jax.ShapeDtypeStruct((*window, c // options.get("groups", 1), k), dtype)
  layer = {"padding": "SAME", "precision": "default", **options}
  return {each.name for each in jaxdnn.conv_algorithms(x, w, direction=direction, **layer)}


def test_is_chosen():
  """For groups of 48 to 64 channels, and in the filter gradient of 24, with small windows on small images and with long
  ones on sequences."""
  for case in OTHERS:
    if case.name.startswith(("regnet.w24", "regnet.w48", "regnet.w56", "wav2vec.pos")):
      of_grouped = case.name.startswith("regnet.w24")  # but for its filter gradient
      for result, operands in (("w", "xy"),) if of_grouped else (("y", "xw"), ("x", "yw"), ("w", "xy")):
        shapes = {"x": case.x_shape, "w": case.w_shape, "y": (*case.x_shape[:-1], case.k)}
        spec = ConvSpec(*case.geometry, case.groups, case.spatial, case.window, None, None)
        arrays = (jax.ShapeDtypeStruct((1, *shapes[name]), "bfloat16") for name in operands)
        chosen = plan(result, *arrays, spec, np.dtype("bfloat16"), hopper=True)
        assert chosen["algorithm"] == chosen["tile"] == DIRECT, (case.name, result)
        assert (chosen["workspace_bytes"] > 0) == (result == "w")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_is_not_offered(direction):
  assert DIRECT in names(direction, 32, 32, padding=((-1, 2), (0, 3)), dilation=(1, 2))
  assert DIRECT in names(direction, 8, 64, window=(5, 7))
  assert DIRECT in names(direction, 64, 8, window=(31,), spatial=(99,))
  assert DIRECT in names(direction, 96, 96, groups=4) and DIRECT not in names(direction, 48, 48, groups=4)
  assert DIRECT not in names(direction, 36, 32) and DIRECT not in names(direction, 32, 36)
  # Small groups are merged where all of them have as many channels as features, and whole vectors.
  for n in (2, 4, 8, 16):
    assert DIRECT in names(direction, 8 * n, 8 * n, groups=8, window=(4, 4))
    assert (DIRECT in names(direction, 8 * n, 16 * n, groups=8)) == (n >= 8)
  assert DIRECT not in names(direction, 20, 20, groups=5) and DIRECT not in names(direction, 24, 24, groups=4)
  assert (DIRECT in names(direction, 64, 64, groups=16, stride=2)) == (direction == DIRECTIONS[0])
  # All of a merged filter is there at once, but of its gradient.
  assert (DIRECT in names(direction, 64, 64, groups=16, window=(128,), spatial=(400,))) == (direction == DIRECTIONS[2])
  # What is gathered has 64 channels of a group at most; of the filter gradient x.
  gathered, other = ((64, 72), (72, 64)) if direction == "data_gradient" else ((72, 64), (64, 72))
  assert DIRECT not in names(direction, *gathered) and DIRECT in names(direction, *other)
  # Planes may be images, where no window leaves them.
  assert DIRECT in names(direction, 32, 32, window=(1, 3, 3), spatial=(8, 8, 8))
  # Volumes of one group, or of merged ones; not in the filter gradient.
  volumes = direction != DIRECTIONS[2]
  assert (DIRECT in names(direction, 32, 32, window=(3, 3, 3), spatial=(8, 8, 8))) == volumes
  assert (DIRECT in names(direction, 32, 32, window=(1, 3, 3), spatial=(8, 8, 8), padding=1)) == volumes
  assert (DIRECT in names(direction, 32, 32, groups=8, window=(4, 4, 4), spatial=(8, 8, 8))) == volumes
  assert DIRECT not in names(direction, 64, 64, groups=2, window=(3, 3, 3), spatial=(8, 8, 8))
  assert DIRECT not in names(direction, 32, 32, hopper=False)
  # Strides of two, or of four where pixels side by side make a row of 64 channels. Not backward.
  forward = direction == "forward"
  for c, stride in ((32, 2), (24, 2), (64, (1, 2)), (16, (1, 4)), (48, (2, 1))):
    assert (DIRECT in names(direction, c, 32, stride=stride)) == forward
  for c, stride in ((24, (1, 4)), (16, (1, 3)), (32, (4, 1)), (32, (3, 2))):
    assert DIRECT not in names(direction, c, 32, stride=stride)
  for spatial in ((56, 57), (57, 56)):
    assert (DIRECT in names(direction, 32, 32, stride=2, spatial=spatial)) == forward
  assert DIRECT not in names(direction, 32, 32, stride=2, spatial=(8, 1))
  assert (DIRECT in names(direction, 32, 32, stride=2, dilation=(1, 2))) == forward
  assert (DIRECT in names(direction, 64, 64, stride=2, groups=2)) == forward
  assert DIRECT not in names(direction, 32, 32, "float32") and DIRECT not in names(direction, 32, 32, batch=0)
  # A window sees too much for shared memory, or for a box.
  assert DIRECT not in names(direction, 64, 64, dilation=(40, 40), padding=40)
  assert DIRECT not in names(direction, 8, 8, dilation=(256, 1), padding=256, spatial=(600, 8))
  assert DIRECT not in names(direction, 8, 8, window=(3,), dilation=1 << 28, padding=1 << 28, spatial=(600,))


_ = ConvCase
# Channels and results of one to four steps, in tiles of 32, 48 and 64; blocks of part of a line, of lines, of an image
# and of several, and one more or fewer; windows of any size, also of one tap; lines of two boxes.
CASES = [
  _("c32k32", 8, (9, 32), 32, (3, 3), 32, padding=SAME3),
  *(_(f"c{n}k{n}", 2, (5, 9), n, (3, 3), n, padding=SAME3) for n in (8, 16, 24, 40, 48, 56, 64)),
  _("c8k64", 9, (6, 31), 8, (3, 3), 64, padding=SAME3),
  _("c64k8", 7, (8, 33), 64, (3, 3), 8, padding=SAME3),
  _("1x1", 3, (7, 11), 24, (1, 1), 32),
  _("2x5", 5, (7, 11), 24, (2, 5), 40, padding=((1, 0), (2, 3))),
  _("7x7", 3, (14, 14), 32, (7, 7), 48, padding=((3, 3),) * 2),
  _("no_padding", 3, (5, 18), 16, (3, 3), 24),
  _("negative_padding", 2, (12, 19), 16, (3, 3), 24, padding=((-2, 1), (3, -3))),
  _("far_padding", 1, (6, 5), 8, (3, 3), 16, padding=((7, 0), (0, 9))),
  _("dilated", 3, (20, 20), 16, (3, 3), 32, padding=((3, 3), (5, 5)), rhs_dilation=(3, 5)),
  # Lines so far apart are an image of their own, where they are whole ones and the window begins with one.
  _("residues", 2, (24, 20), 16, (3, 3), 32, padding=((8, 8), (3, 3)), rhs_dilation=(8, 3)),
  _("residues_images", 9, (12, 14), 32, (4, 3), 40, padding=((4, 8), (1, 1)), rhs_dilation=(4, 1)),
  _("residues_cropped", 3, (20, 9), 24, (2, 3), 24, padding=((-5, 0), (1, 1)), rhs_dilation=(5, 1)),
  _("no_residues", 3, (20, 9), 24, (2, 3), 24, padding=((3, 2), (1, 1)), rhs_dilation=(5, 1)),
  _("many_images", 66, (7, 7), 16, (3, 3), 16, padding=SAME3),
  _("wide", 1, (3, 600), 16, (3, 3), 16, padding=SAME3),
  _("1d", 3, (400,), 48, (128,), 48, padding=((64, 63),)),
  _("1d_two_boxes", 1, (256,), 8, (9,), 8, padding=((4, 4),)),
  _("1d_dilated", 2, (300,), 24, (3,), 16, padding=((90, 90),), rhs_dilation=(90,)),
  _("1d_short", 300, (3,), 16, (2,), 16, padding=((1, 0),)),
  _("planes", 2, (3, 9, 10), 16, (1, 3, 3), 24, padding=((0, 0), *SAME3)),
  _("volumes", 2, (5, 9, 10), 16, (3, 3, 3), 24, padding=(*SAME3, (1, 1))),
  _("volumes_uneven", 3, (6, 7, 12), 32, (2, 3, 4), 40, padding=((1, 0), (1, 1), (2, 1))),
  _("volumes_dilated", 1, (9, 10, 11), 24, (3, 2, 2), 16, padding=((4, 3), (2, 0), (0, 3)), rhs_dilation=(4, 2, 3)),
  _("volumes_cropped", 4, (5, 6, 5), 8, (2, 2, 2), 64, padding=((-1, 1), (0, -1), (1, 0))),
  _("groups8to16", 3, (6, 31), 40, (3, 3), 80, padding=SAME3, groups=5),
  _("groups24", 33, (14, 14), 72, (3, 3), 72, padding=SAME3, groups=3),
  _("groups48", 2, (14, 14), 96, (3, 3), 96, padding=((-1, 2), (0, 3)), groups=2),
  _("groups64to32", 3, (8, 9), 128, (3, 3), 64, padding=((1, 1), (5, 5)), rhs_dilation=(1, 5), groups=2),
  _("groups_1d", 2, (70,), 96, (16,), 96, padding=((8, 7),), groups=2),
]
BY_NAME = {case.name: case for case in CASES}


# Strides over pixels that make rows, and those for which lines and their pixels are dealt out to parts.
STRIDED = [
  _("2x2", 3, (10, 22), 32, (3, 3), 64, (2, 2), SAME3),
  _("1d", 3, (70,), 32, (4,), 40, (2,), ((1, 1),)),
  _("columns", 2, (9, 36), 32, (3, 4), 24, (1, 2), ((1, 1), (0, 3))),
  _("lines", 2, (10, 19), 48, (4, 3), 48, (2, 1), ((2, 1), (1, 1))),
  _("c16", 2, (8, 44), 16, (5, 5), 32, (2, 2), ((2, 2), (2, 2))),
  _("fours", 2, (7, 44), 16, (3, 7), 72, (1, 4), ((1, 1), (3, 3))),
  _("cropped", 2, (12, 20), 32, (2, 3), 64, (2, 2), ((-1, 2), (-3, 4))),
  _("one_tap", 3, (8, 12), 32, (1, 1), 32, (2, 2), ((1, 0), (0, 1))),
  _("many_images", 66, (8, 8), 32, (3, 3), 32, (2, 2), SAME3),
  _("planes", 2, (3, 8, 10), 32, (1, 3, 3), 24, (1, 2, 2), ((0, 0), *SAME3)),
  _("wide", 1, (4, 1200), 32, (3, 3), 32, (2, 2), SAME3),
  # Lines that end with a pixel or some that are no whole row, and parts of unequal lines.
  _("odd", 3, (9, 21), 32, (3, 3), 64, (2, 2), SAME3),
  _("odd_1d", 3, (71,), 32, (5,), 40, (2,), ((2, 2),)),
  _("odd_columns", 2, (8, 37), 32, (3, 4), 24, (1, 2), ((1, 1), (0, 3))),
  _("odd_lines", 2, (11, 20), 48, (4, 3), 48, (2, 1), ((2, 1), (1, 1))),
  _("odd_c16", 2, (7, 45), 16, (5, 5), 32, (2, 2), ((2, 2), (2, 2))),
  *(_(f"fours_and_{n}", 2, (6, 44 + n), 16, (3, 7), 72, (1, 4), ((1, 1), (3, 3))) for n in (1, 2, 3)),
  _("odd_cropped", 2, (13, 21), 32, (2, 3), 64, (2, 2), ((-1, 2), (-3, 4))),
  _("odd_far", 2, (5, 7), 32, (3, 3), 32, (2, 2), ((4, 5), (6, 3))),
  _("odd_many_images", 66, (7, 7), 32, (3, 3), 32, (2, 2), SAME3),
  _("odd_wide", 1, (5, 1201), 32, (3, 3), 32, (2, 2), SAME3),
  _("three_pixels", 5, (3, 3), 32, (3, 3), 32, (2, 2), SAME3),
  _("parts", 3, (9, 22), 24, (3, 3), 48, (2, 2), SAME3),
  _("parts_c64", 2, (11, 13), 64, (5, 4), 40, (2, 2), ((2, 2), (1, 3))),
  _("parts_1d", 3, (131,), 48, (7,), 40, (2,), ((3, 2),)),
  _("parts_one_tap", 3, (7, 12), 40, (1, 1), 32, (2, 2), ((1, 0), (0, 1))),
  _("parts_cropped", 2, (13, 21), 8, (2, 3), 64, (2, 2), ((-1, 2), (-3, 4))),
  _("parts_dilated", 2, (19, 30), 16, (3, 4), 32, (2, 2), ((2, 2), (4, 5)), rhs_dilation=(2, 3)),
  _("parts_wide", 1, (4, 1201), 64, (3, 3), 32, (2, 2), SAME3),
  _("volumes", 2, (7, 10, 22), 16, (3, 3, 3), 64, (2, 2, 2), (*SAME3, (1, 1))),
  _("volumes_odd", 2, (9, 9, 11), 32, (3, 3, 3), 40, (3, 2, 2), (*SAME3, (1, 1))),
  _("volumes_parts", 2, (6, 9, 11), 24, (2, 3, 3), 32, (2, 2, 2), ((0, 1), *SAME3)),
  _("groups", 3, (10, 23), 72, (3, 3), 72, (2, 2), SAME3, groups=3),
  _("merged", 3, (10, 23), 64, (4, 4), 64, (2, 2), ((1, 2), (2, 1)), groups=16),
  _("merged_columns", 2, (6, 40), 40, (2, 3), 40, (1, 2), ((1, 0), (1, 1)), groups=5),
  _("merged_1d", 2, (200,), 32, (9,), 32, (2,), ((4, 4),), groups=2),
]


def transposed(case):
  """The layer whose data gradient gathers what this one does forward."""
  y = ConvSpec(*case.geometry, 1, case.spatial, case.window, None, None).y_spatial
  reach = [(w - 1) * d for w, d in zip(case.window, case.rhs_dilation, strict=True)]
  low = [r - pad for r, (pad, _) in zip(reach, case.padding, strict=True)]
  high = [n + r - 1 - (o - 1) * s - a
          for n, r, o, s, a in zip(case.spatial, reach, y, case.stride, low, strict=True)]  # fmt: skip
  return ConvCase(case.name, case.batch, y, case.k, case.window, case.c,
                  padding=tuple(zip(low, high, strict=True)), lhs_dilation=case.stride,
                  rhs_dilation=case.rhs_dilation, groups=case.groups)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", STRIDED, ids=lambda c: c.name)
def test_strides(case):
  for dtypes in DTYPES:
    conv_checks.check(case, DIRECT, *dtypes, results="y")
    conv_checks.check(transposed(case), DIRECT, *dtypes, results="x")
  conv_checks.check(case, DIRECT, "bfloat16", "bfloat16", models=3, results="y")


@pytest.mark.gpu
@pytest.mark.sanitize
def test_strides_under_the_sanitizer():
  for case in (c for c in STRIDED if c.name in ("2x2", "fours", "odd", "fours_and_3", "parts", "merged")):
    conv_checks.check(case, DIRECT, "bfloat16", "bfloat16", results="y")
    conv_checks.check(transposed(case), DIRECT, "bfloat16", "bfloat16", results="x")


def check(case, dtype, out_dtype, models=1, draw=coarse):
  # The operand that is gathered has 64 channels of a group at most.
  results = "".join(r for r, n in (("y", case.c), ("x", case.k), ("w", case.c)) if n // case.groups <= 64)
  if case.name.startswith("volumes"):
    results = results.replace("w", "")
  conv_checks.check(case, DIRECT, dtype, out_dtype, draw=draw, models=models, results=results)


@pytest.mark.gpu
@pytest.mark.parametrize(
  "case",
  [
    *CASES,
    _("k144", 2, (9, 9), 64, (3, 3), 144, padding=SAME3),
    _("c144", 2, (9, 9), 144, (3, 3), 40, padding=SAME3),
  ],
  ids=lambda c: c.name,
)
def test_kernels(case):
  for dtype, out_dtype in DTYPES:
    check(case, dtype, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["c24k24", "many_images", "1d_dilated", "groups8to16", "residues", "volumes"])
def test_many_problems(name):
  """Models do not mix, whose images do not fill a block."""
  for models in (3, 20):
    check(BY_NAME[name], "bfloat16", "bfloat16", models)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
  "name", ["c24k24", "c48k48", "c8k64", "2x5", "1d_two_boxes", "groups64to32", "residues", "volumes"]
)
def test_kernels_under_the_sanitizer(name):
  check(BY_NAME[name], "bfloat16", "bfloat16", 1 if BY_NAME[name].groups > 1 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  rank, groups = int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 5]))
  spatial = tuple(int(n) for n in rng.integers(4, 400 if rank == 1 else 40, rank))
  window = tuple(int(n) for n in rng.integers(1, 40 if rank == 1 else 6, rank))
  dilation = tuple(int(n) for n in rng.integers(1, 4, rank))
  padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 5, (rank, 2)))
  # A window that is wider than what there is has no result.
  padding = tuple((max(lo, (w - 1) * d), hi) if n + lo + hi <= (w - 1) * d else (lo, hi)
                  for n, (lo, hi), w, d in zip(spatial, padding, window, dilation, strict=True))  # fmt: skip
  c, k = (8 * int(n) for n in rng.integers(1, 9, 2))
  case = _("random", int(rng.integers(1, 12)), spatial, c * groups, window, k * groups, padding=padding,
           rhs_dilation=dilation, groups=groups)  # fmt: skip
  check(case, *DTYPES[seed % 3], int(rng.integers(1, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_infinities_stay_in_their_windows(dtype):
  conv_checks.check_infinities(check, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [8, 32, 48, 56])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", None), ("float16", None), ("bfloat16", "float32")])
def test_epilogue(features, activation, dtype, out_dtype):
  layer = {"padding": "SAME", "activation": activation}
  check_epilogue(DIRECT, (3, 7, 18, 40), (5, 3, 40, features), dtype, out_dtype, **layer)
  check_epilogue(DIRECT, (3, 7, 18, 16), (3, 3, 8, 2 * features), dtype, out_dtype, groups=2, **layer)


@pytest.mark.gpu
def test_vmap():
  conv_checks.check_vmap(DIRECT)
