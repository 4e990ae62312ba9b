"""The kernels that go plane by plane: what they take, and problems around their limits against the float64 oracle."""

import jax
import numpy as np
import pytest

import conv_checks
import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check_epilogue, coarse
from jaxdnn._conv.primitives import DIRECT, OPERANDS, PLANES, plan
from jaxdnn._conv.spec import ConvSpec

DIRECTIONS = {"forward": "y", "data_gradient": "x", "filter_gradient": "w"}
DTYPES = [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32"), ("float32",) * 2]


def algorithms(direction, c, k, dtype="bfloat16", window=(3, 3), **options):
  x = jax.ShapeDtypeStruct((options.pop("batch", 32), *options.pop("spatial", (56, 56)), c), dtype)
  w = jax.ShapeDtypeStruct((*window, c // options.get("groups", 1), k), dtype)
  return jaxdnn.conv_algorithms(x, w, direction=direction, **{"padding": "SAME", "precision": "default", **options})


def planned(result, models, x_shape, w_shape, dtype="bfloat16", **options):
  """What is chosen for so many problems at once."""
  padding = options.pop("padding", ((1, 1),) * (len(w_shape) - 2))
  case = ConvCase("", x_shape[0], x_shape[1:-1], x_shape[-1], w_shape[:-2], w_shape[-1], padding=padding, **options)
  spec = ConvSpec(*case.geometry, 1, case.spatial, case.window, None, None)
  shapes = {"x": x_shape, "w": w_shape, "y": (x_shape[0], *spec.y_spatial, w_shape[-1])}
  operands = [jax.ShapeDtypeStruct((models, *shapes[name]), dtype) for name in OPERANDS[result]]
  return plan(result, *operands, spec, np.dtype(dtype), hopper=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("result", "yxw")
def test_is_chosen(result, dtype):
  """For many models at once, and for volumes of few channels."""
  for channels in (16, 24, 32, 40, 64):
    chosen = planned(result, 64, (16, 32, 32, channels), (3, 3, channels, channels), dtype)
    # The direct filter gradient has whole filters in a block, and loses less where channels are no whole 32.
    direct = result == "w" and dtype == "bfloat16" and channels in (24, 40, 64)
    assert chosen["algorithm"] == chosen["tile"] == (DIRECT if direct else PLANES), channels
    assert (chosen["workspace_bytes"] > 0) == (result == "w")
  assert planned(result, 1, (1, 96, 96, 96, 32), (3, 3, 3, 32, 32), dtype)["algorithm"] == PLANES
  volumes = planned(result, 2, (1, 48, 48, 48, 64), (3, 3, 3, 64, 64), dtype)["algorithm"]
  # Where the filter gradient's model has the two near each other, either.
  assert volumes in ((PLANES, "implicit_gemm_wgmma") if result == "w" else (PLANES,))
  if result != "w":  # a position in an image is not worth the eight of a product
    assert planned(result, 64, (1, 4, 4, 32), (3, 3, 32, 32), dtype)["algorithm"] != PLANES


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_is_not_offered(direction):
  names = lambda *a, **k: {each.name for each in algorithms(direction, *a, **k)}  # noqa: E731
  assert PLANES in names(32, 32, padding=((-1, 2), (0, 3)), dilation=(1, 2))
  assert PLANES in names(8, 24, window=(3, 3, 3), spatial=(8, 8, 8), dilation=(1, 2, 2))
  # Two planes of 64 channels, with what a dilated window sees, are too large beside the filter.
  dilated = names(64, 64, window=(3, 3, 3), spatial=(8, 8, 8), dilation=(1, 3, 3))
  assert (PLANES in dilated) == (direction == "filter_gradient")
  assert PLANES in names(64, 64)
  assert PLANES not in names(36, 32) and PLANES not in names(32, 36)
  assert PLANES not in names(136, 32) and PLANES not in names(32, 136)
  # An image's lines are dealt out where that comes out even.
  assert (PLANES in names(32, 32, padding=2, dilation=2)) == (direction != "filter_gradient")
  assert PLANES not in names(32, 32, padding=2, dilation=2, spatial=(55, 56))
  assert PLANES not in names(32, 32, padding=1, dilation=2)
  assert PLANES not in names(32, 32, window=(5, 5)) and PLANES not in names(32, 32, window=(3, 1))
  assert PLANES not in names(32, 32, window=(1, 3, 3), spatial=(8, 8, 8))
  assert PLANES not in names(32, 32, window=(3,), spatial=(4000,))
  assert PLANES not in names(32, 32, hopper=False)
  # A stride of two in all dimensions the filter gradient takes, of 32 channels, of 16 bits, undilated, in whole pairs.
  assert (PLANES in names(32, 40, stride=2)) == (direction == "filter_gradient")
  assert PLANES not in names(40, 32, stride=2) and PLANES not in names(32, 32, stride=2, spatial=(56, 55))
  assert PLANES not in names(32, 32, "float32", stride=2) and PLANES not in names(32, 32, stride=2, dilation=(1, 2))
  assert PLANES not in names(32, 32, stride=(1, 2)) and PLANES not in names(32, 32, stride=3)
  # Groups take the place of problems, in two dimensions.
  assert (PLANES in names(96, 96, groups=4)) == (direction != "filter_gradient")
  assert PLANES not in names(64, 64, groups=8, window=(3, 3, 3), spatial=(8, 8, 8))
  assert PLANES not in names(48, 48, groups=4)  # of 12 channels
  assert PLANES not in names(32, 32, "float64")
  assert PLANES in names(36, 4, "float32") and PLANES in names(64, 64, "float32", window=(3, 3, 3), spatial=(8, 8, 8))
  assert PLANES not in names(34, 32, "float32") and PLANES not in names(68, 68, "float32")
  for precision in ("high", "highest"):  # their products are of TF32, once
    assert PLANES not in names(32, 32, "float32", precision=precision)
  assert PLANES not in names(32, 32, batch=0)


_ = ConvCase
SAME333 = ((1, 1),) * 3
# Channels and features of whole and of part of 32; columns, images, lines and planes of whole tiles, and one more or
# fewer; padding beyond the window and of less than nothing; several tiles to a block, and parts of them.
CASES = [
  _("c32k32", 8, (9, 32), 32, (3, 3), 32, padding=SAME3),
  *(_(f"c{n}k{n}", 2, (5, 9), n, (3, 3), n, padding=SAME3) for n in (16, 24, 40, 48, 56, 64)),
  _("c8k16", 9, (6, 31), 8, (3, 3), 16, padding=SAME3),
  _("c24k64", 7, (8, 33), 24, (3, 3), 64, padding=SAME3),
  _("c64k8", 17, (7, 15), 64, (3, 3), 8, padding=SAME3),
  _("one_image", 1, (13, 65), 32, (3, 3), 40, padding=SAME3),
  _("no_padding", 3, (5, 18), 16, (3, 3), 24),
  _("negative_padding", 2, (12, 19), 16, (3, 3), 24, padding=((-2, 1), (3, -3))),
  _("far_padding", 1, (6, 5), 8, (3, 3), 16, padding=((7, 0), (0, 9))),
  _("dilated", 3, (9, 20), 16, (3, 3), 32, padding=((1, 1), (5, 5)), rhs_dilation=(1, 5)),
  _("one_line", 4, (1, 40), 32, (3, 3), 32, padding=SAME3),
  _("many_images", 130, (14, 14), 16, (3, 3), 16, padding=SAME3),
  _("3d", 2, (5, 9, 17), 32, (3, 3, 3), 32, padding=SAME333),
  _("3d_c64", 1, (6, 15, 16), 64, (3, 3, 3), 64, padding=SAME333),
  _("3d_c40k24", 2, (3, 7, 9), 40, (3, 3, 3), 24, padding=((2, 0), (0, 1), (1, 3))),
  _("3d_dilated", 1, (7, 9, 12), 8, (3, 3, 3), 8, padding=((0, 1), (2, 2), (3, 1)), rhs_dilation=(1, 2, 3)),
  _("3d_large", 2, (20, 33, 31), 16, (3, 3, 3), 16, padding=SAME333),
]


# In the place of problems: whole and part of 16, 32 and 64 channels.
GROUPED = [
  _("groups8to16", 3, (6, 31), 40, (3, 3), 80, padding=SAME3, groups=5),
  _("groups16", 2, (7, 15), 48, (3, 3), 48, padding=SAME3, groups=3),
  _("groups24", 33, (14, 14), 72, (3, 3), 72, padding=SAME3, groups=3),
  _("groups48", 2, (9, 20), 96, (3, 3), 96, padding=((-1, 2), (0, 3)), groups=2),
  _("groups64to32", 3, (8, 9), 128, (3, 3), 64, padding=((1, 1), (5, 5)), rhs_dilation=(1, 5), groups=2),
]


# Lines that are dealt out.
DEALT = [
  _("apart2", 3, (12, 17), 32, (3, 3), 32, padding=((2, 2),) * 2, rhs_dilation=(2, 2)),
  _("apart3", 2, (15, 70), 24, (3, 3), 40, padding=((3, 6), (0, 1)), rhs_dilation=(3, 1)),
  _("apart8", 1, (32, 40), 16, (3, 3), 16, padding=((8, 8), (5, 5)), rhs_dilation=(8, 5)),
]


# Of which there is the filter gradient alone.
STRIDED = [
  _("s2", 3, (12, 18), 32, (3, 3), 32, stride=(2, 2), padding=SAME3),
  _("s2_even_padding", 2, (13, 36), 32, (3, 3), 40, stride=(2, 2), padding=((0, 1), (2, 0))),
  _("s2_negative_padding", 1, (9, 140), 32, (3, 3), 8, stride=(2, 2), padding=((-1, 3), (-1, 2))),
  _("s2_no_padding", 5, (6, 8), 32, (3, 3), 72, stride=(2, 2)),
  _("s2_3d", 2, (10, 12, 18), 32, (3, 3, 3), 64, stride=(2, 2, 2), padding=SAME333),
  _("s2_3d_odd", 1, (7, 11, 22), 32, (3, 3, 3), 24, stride=(2, 2, 2), padding=((0, 1), (2, 1), (1, -1))),
  _("s2_3d_large", 1, (33, 20, 40), 32, (3, 3, 3), 16, stride=(2, 2, 2), padding=((0, 0), (1, 0), (0, 1))),
]


def dtypes_of(case):
  return [dtypes for dtypes in DTYPES if case.stride[0] == 1 or dtypes[0] != "float32"]


def check(case, dtype, out_dtype, models=1, draw=coarse):
  results = "w" if case.stride[0] > 1 else "yx" if case.groups > 1 or case.rhs_dilation[0] > 1 else "yxw"
  conv_checks.check(case, PLANES, dtype, out_dtype, draw=draw, models=models, results=results)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *GROUPED, *DEALT, *STRIDED], ids=lambda c: c.name)
def test_kernels(case):
  for dtype, out_dtype in dtypes_of(case):
    check(case, dtype, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
  "case", [CASES[0], CASES[8], CASES[10], CASES[17], CASES[19], STRIDED[1]], ids=lambda c: c.name
)
def test_many_problems(case):
  """Models do not mix, whose images do not fill a tile."""
  for models in (3, 70):
    for dtype, out_dtype in dtypes_of(case):
      if dtype == out_dtype:
        check(case, dtype, out_dtype, models)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
  "case",
  [CASES[1], CASES[12], CASES[19], CASES[20], GROUPED[1], GROUPED[2], DEALT[0], STRIDED[1], STRIDED[4]],
  ids=lambda c: c.name,
)
def test_kernels_under_the_sanitizer(case):
  for dtype, out_dtype in dtypes_of(case):
    if dtype == out_dtype != "float16":
      check(case, dtype, out_dtype, 1 if case in GROUPED + DEALT else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(30))
def test_random_problems(seed, dtype):
  rng = np.random.default_rng(seed)
  rank = int(rng.integers(2, 4))
  spatial = tuple(int(n) for n in rng.integers(4, 40 if rank == 2 else 14, rank))
  padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 5, (rank, 2)))
  size = np.dtype(dtype).itemsize
  c, k = (16 // size * int(n) for n in rng.integers(1, 4 * size + 1, 2))
  most = 1 if rank == 3 and max(c, k) * size > 64 else 2  # for shared memory
  stride = int(rng.integers(1, 3)) if dtype != "float32" else 1
  if stride == 2:
    c, spatial = 32, (*spatial[:-1], spatial[-1] // 2 * 2)
  dilation = (1, *(int(n) for n in rng.integers(1, (most if stride == 1 else 1) + 1, rank - 1)))
  # A window that is wider than what there is has no result.
  padding = tuple((max(lo, 2), hi) if n + lo + hi <= 2 * d else (lo, hi)
                  for n, (lo, hi), d in zip(spatial, padding, dilation, strict=True))  # fmt: skip
  case = _("random", int(rng.integers(1, 12)), spatial, c, (3,) * rank, k, stride=(stride,) * rank, padding=padding,
           rhs_dilation=dilation)  # fmt: skip
  check(case, dtype, dtype, int(rng.integers(1, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_infinities_stay_in_their_windows(dtype):
  conv_checks.check_infinities(check, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [8, 32, 56])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize(
  "dtype, out_dtype", [("bfloat16", None), ("float16", None), ("bfloat16", "float32"), ("float32", None)]
)
def test_epilogue(features, activation, dtype, out_dtype):
  for shapes in (((3, 7, 18, 40), (3, 3, 40, features)), ((2, 4, 7, 9, 16), (3, 3, 3, 16, features))):
    check_epilogue(PLANES, *shapes, dtype, out_dtype, padding="SAME", activation=activation)
  layer = dict(padding="SAME", groups=2, activation=activation)
  check_epilogue(PLANES, (3, 7, 18, 16), (3, 3, 8, 2 * features), dtype, out_dtype, **layer)
  layer = dict(padding="SAME", dilation=2, activation=activation)
  check_epilogue(PLANES, (3, 8, 18, 16), (3, 3, 16, features), dtype, out_dtype, **layer)


@pytest.mark.gpu
def test_vmap():
  conv_checks.check_vmap(PLANES)
