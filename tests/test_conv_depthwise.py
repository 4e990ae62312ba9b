"""Depthwise convolution's own kernels: what they take, and each window against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, SAME7, ConvCase
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn._conv.fused import fused
from jaxdnn._conv.primitives import OPERANDS, convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact, sample

DIRECTIONS = ("forward", "data_gradient", "filter_gradient")


def struct(shape, dtype="bfloat16"):
  return jax.ShapeDtypeStruct(shape, dtype)


def algorithms(direction, groups, features, dtype="bfloat16", channels=1, **options):
  x, w = struct((8, 56, 56, groups * channels), dtype), struct((3, 3, channels, groups * features), dtype)
  return jaxdnn.conv_algorithms(x, w, direction=direction, padding="SAME", groups=groups, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_is_chosen(direction):
  for groups, features, dtype in ((64, 1, "bfloat16"), (63, 2, "float16"), (64, 1, "float32"), (17, 1, "bfloat16")):
    first = algorithms(direction, groups, features, dtype)[0]
    assert first.name == first.tile == "depthwise" and first.exactness == "float32"
    assert (first.workspace_bytes > 0) == (first.splits > 1)
    assert first.splits == 1 or direction == "filter_gradient"
  assert algorithms(direction, 64, 1, hopper=False)[0].name == "depthwise"
  assert algorithms(direction, 64, 1, workspace_limit=0)[0].workspace_bytes == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_is_not_offered(direction):
  for options in (dict(groups=64, features=1, dtype="float64"), dict(groups=32, features=2, channels=2)):
    assert "depthwise" not in {a.name for a in algorithms(direction, **options)}


def test_filter_gradient_of_large_windows_has_work_for_all():
  x, w = struct((4, 56, 56, 128)), struct((31, 31, 1, 128))
  first = jaxdnn.conv_algorithms(x, w, direction="filter_gradient", padding="SAME", groups=128)[0]
  # Eight channels of an image's half are a block's.
  assert (first.name, first.splits) == ("depthwise", 8)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_windows_on_small_images(direction):
  """One pass over few images; and not what takes a thread a tap."""

  def modelled(spatial, window, channels):
    x, w = struct((16, *spatial, channels)), struct((*window, 1, channels))
    options = dict(direction=direction, padding="SAME", groups=channels)
    return next(a for a in jaxdnn.conv_algorithms(x, w, **options) if a.name == "depthwise")

  for spatial, window in (((7, 7), (13, 13)), ((14, 14), (27, 27))):
    small = modelled(spatial, window, 1024)
    assert small.splits == 1 and small.workspace_bytes == 0
    assert small.microseconds < modelled(spatial, window, 1028).microseconds


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_windows_between_others(direction):
  """No kernel is compiled for their lines alone; they take what the next larger windows take."""

  def modelled(spatial, window):
    x, w = struct((16, *spatial, 96)), struct((*window, 1, 96))
    options = dict(direction=direction, padding="SAME", groups=96)
    return next(a for a in jaxdnn.conv_algorithms(x, w, **options) if a.name == "depthwise").microseconds

  for window, larger in (((4, 4), (5, 5)), ((6, 6), (7, 7)), ((8, 8), (9, 9)), ((8, 5), (9, 9))):
    assert modelled((56, 56), window) <= modelled((56, 56), larger)
  assert modelled((1000,), (30,)) <= modelled((1000,), (31,)) < 1.5 * modelled((1000,), (10,))


def case(name, batch, spatial, c, window, k=None, **geometry):
  return ConvCase(name, batch, spatial, c, window, k or c, groups=c, **geometry)


SAME5 = ((2, 2), (2, 2))
# Windows that are compiled for, in phases and segments of every kind, of channels that are chunks of 16 bytes and not;
# all others, whole and in pieces.
CASES = [
  case("3x3", 2, (19, 13), 96, (3, 3), padding=SAME3),
  case("3x3s2", 3, (20, 23), 24, (3, 3), stride=(2, 2), padding=SAME3),
  case("3x3s2_far", 2, (9, 11), 8, (3, 3), stride=(2, 2), padding=((5, 2), (-1, 4))),
  case("3x3s2_even", 2, (3, 21, 22), 20, (1, 3, 3), stride=(1, 2, 2), padding=((0, 0), (0, 1), (2, 0))),
  case("3x3s2_dilated", 1, (21, 22), 10, (3, 3), stride=(2, 2), padding=SAME5, rhs_dilation=(2, 2)),
  case("5x5", 2, (17, 9), 70, (5, 5), padding=SAME5),
  case("5x5s2", 2, (17, 30), 64, (5, 5), stride=(2, 2), padding=((1, 2), (2, 1))),
  case("5x5s2_far", 3, (9, 11), 8, (5, 5), stride=(2, 2), padding=((7, 2), (-1, 6))),
  case("5x5s2_planes", 2, (3, 21, 36), 20, (1, 5, 5), stride=(1, 2, 2), padding=((0, 0), (0, 3), (4, 1))),
  case("7x7", 2, (40, 15), 130, (7, 7), padding=SAME7),
  case("5x5_chunks", 2, (17, 29), 72, (5, 5), padding=SAME5),
  case("7x7_chunks", 2, (40, 15), 136, (7, 7), padding=SAME7),
  case("5x5_far", 3, (12, 33), 40, (5, 5), padding=((9, 2), (-2, 12))),
  case("7x7_valid", 9, (28, 28), 64, (7, 7)),
  case("7x7_tiles", 1, (9, 150), 40, (7, 7), padding=SAME7),
  case("7x7_parts", 2, (57, 30), 72, (7, 7), padding=SAME7),
  case("7x7_planes", 2, (5, 12, 20), 24, (1, 7, 7), stride=(2, 1, 1), padding=((1, 0), (3, 3), (2, 4))),
  case("4x4_chunks", 2, (17, 29), 40, (4, 4), padding=((1, 2), (2, 1))),
  case("6x6_chunks", 2, (30, 15), 24, (6, 6), padding=((2, 3), (3, 2))),
  case("8x8_tiles", 1, (9, 150), 24, (8, 8), padding=((3, 4), (4, 3))),
  case("9x9_chunks", 2, (40, 22), 72, (9, 9), padding=((4, 4),) * 2),
  case("9x9_parts", 2, (57, 30), 40, (9, 9), padding=((8, 8), (0, 3))),
  case("9x9_far", 3, (12, 33), 24, (9, 9), padding=((11, 2), (-2, 14))),
  case("2x9_far", 2, (9, 20), 16, (2, 9), padding=((3, 0), (12, -1))),
  case("9x2_planes", 2, (3, 25, 19), 24, (1, 9, 2), stride=(2, 1, 1), padding=((1, 0), (4, 4), (1, 0))),
  case("7x7s2", 1, (15, 15), 8, (7, 7), stride=(2, 2), padding=SAME7),
  case("7x7_on_few", 5, (3, 4), 48, (7, 7), padding=SAME7),
  case("dilated", 2, (25, 24), 12, (3, 3), padding=((3, 3), (4, 4)), rhs_dilation=(3, 4)),
  case("3x3_phases", 2, (25, 17), 40, (3, 3), padding=SAME5, rhs_dilation=(2, 2)),
  case("dilations_differ", 2, (19, 30), 24, (3, 3), padding=((3, 1), (4, 9)), rhs_dilation=(3, 4)),
  case("dilated_lines", 2, (40, 16), 72, (3, 3), padding=((3, 3), (1, 1)), rhs_dilation=(3, 1)),
  case("dilated_columns", 2, (7, 70), 8, (3, 3), padding=((1, 1), (-3, 8)), rhs_dilation=(1, 5)),
  case("dilated_far", 2, (5, 4), 16, (3, 3), padding=((6, 7), (9, 8)), rhs_dilation=(4, 6)),
  case("3x3s2_phases", 2, (31, 29), 16, (3, 3), stride=(2, 2), padding=((3, 2), (3, 5)), rhs_dilation=(3, 2)),
  case("3x3s2_one_phase", 2, (22, 21), 24, (3, 3), stride=(2, 2), padding=SAME5, rhs_dilation=(2, 2)),
  case("5x5_phases", 2, (21, 33), 24, (5, 5), padding=((4, 4), (6, 6)), rhs_dilation=(2, 3)),
  case("7x7_phases", 1, (27, 20), 16, (7, 7), padding=((9, 9),) * 2, rhs_dilation=(3, 3)),
  case("3d_phases", 2, (7, 9, 10), 8, (2, 3, 3), padding=((1, 2), (2, 2), (0, 3)), rhs_dilation=(3, 2, 2)),
  case("strides_differ", 2, (14, 15), 20, (3, 3), stride=(1, 2), padding=SAME3),
  case("stride_exceeds_window", 2, (21, 22), 6, (3, 2), stride=(4, 5)),
  case("far_padding", 1, (5, 6), 4, (3, 3), padding=((9, 2), (-2, 12))),
  case("transposed", 2, (6, 7), 18, (4, 4), padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)),
  case("transposed3", 2, (9, 13), 12, (3, 3), padding=((1, 2), (2, 1)), lhs_dilation=(2, 2)),
  case("transposed5", 2, (9, 13), 12, (5, 5), padding=((2, 3), (3, 2)), lhs_dilation=(2, 2)),
  case("both_dilations", 1, (6, 7), 3, (3, 2), padding=((4, 1), (3, 5)), lhs_dilation=(3, 2), rhs_dilation=(2, 3)),
  case("31x31", 1, (20, 22), 34, (31, 31), padding=((15, 15),) * 2),
  case("31x31_chunks", 2, (60, 22), 40, (31, 31), padding=((15, 15),) * 2),
  case("25x25_tiles", 1, (30, 131), 16, (25, 25), padding=((20, 20),) * 2),
  case("41x41", 1, (9, 70), 8, (41, 41), padding=((20, 20),) * 2),
  case("15x15", 2, (9, 40), 8, (15, 15), padding=((7, 7),) * 2),
  case("7x41_valid", 3, (33, 77), 24, (7, 41)),
  case("17x17_planes", 2, (3, 20, 34), 32, (1, 17, 17), padding=((0, 0), (8, 8), (0, 16))),
  case("9x13", 2, (11, 29), 16, (9, 13), padding=((4, 4), (6, 6))),
  case("image_13x13", 33, (7, 7), 16, (13, 13), padding=((6, 6),) * 2),
  case("image_27x27", 3, (14, 14), 8, (27, 27), padding=((13, 13),) * 2),
  case("image_31x31", 2, (7, 5), 8, (31, 31), padding=((15, 15),) * 2),
  case("image_far", 5, (9, 6), 24, (9, 11), padding=((4, 9), (-1, 8))),
  case("image_cut", 19, (12, 12), 16, (6, 4), padding=((-2, -1), (-3, 2))),
  case("image_valid", 17, (16, 16), 8, (9, 9)),
  case("image_planes", 3, (4, 7, 10), 8, (1, 11, 9), padding=((1, -2), (5, 5), (4, 4))),
  case("image_lines", 7, (3, 20), 16, (3, 13), padding=((1, 1), (6, 6))),
  case("image_many", 1060, (2, 3), 64, (5, 2), padding=((2, 2), (1, 0))),
  case("image_1d", 5, (60,), 8, (61,), padding=((60, 0),)),
  case("image_1d_far", 18, (9,), 8, (20,), padding=((3, 255),)),
  case("odd_channels", 2, (12, 13), 97, (3, 3), padding=SAME3),
  case("odd_channels_s2", 2, (20, 23), 29, (3, 3), stride=(2, 2), padding=SAME3),
  case("odd_channels_far", 2, (5, 6), 13, (3, 3), padding=((4, 2), (-2, 7))),
  case("odd_channels_far_s2", 2, (9, 11), 5, (3, 3), stride=(2, 2), padding=((5, 2), (-1, 4))),
  case("odd_channels_dilated", 2, (21, 22), 13, (3, 3), padding=SAME5, rhs_dilation=(2, 2)),
  case("odd_channels_planes", 2, (4, 7, 16), 9, (1, 3, 3), stride=(2, 1, 1), padding=((1, 0), (0, 1), (1, 2))),
  case("odd_channels_slabs", 1, (3, 9), 579, (3, 3), padding=SAME3),
  case("pairs_of_channels", 2, (18, 31), 30, (3, 3), padding=SAME3),
  case("pairs_of_channels_s2", 2, (20, 23), 22, (3, 3), stride=(2, 2), padding=((0, 1), (0, 1))),
  case("pairs_of_channels_slabs", 1, (4, 9), 1030, (3, 3), stride=(2, 2), padding=SAME3),
  case("one_channel", 3, (9, 20), 1, (5, 5), padding=SAME5),
  case("two_features", 2, (9, 12), 33, (3, 3), 66, padding=SAME3),
  case("two_features_chunks", 2, (17, 29), 40, (3, 3), 80, padding=SAME3),
  case("two_features_s2", 2, (20, 23), 72, (3, 3), 144, stride=(2, 2), padding=((0, 1), (0, 1))),
  case("two_features_far", 3, (5, 6), 8, (3, 3), 16, padding=((9, 2), (-2, 12))),
  case("two_features_dilated", 2, (19, 18), 16, (3, 3), 32, padding=SAME5, rhs_dilation=(2, 3)),
  case("four_features", 2, (9, 30), 24, (3, 3), 96, padding=SAME3),
  case("six_features", 2, (12, 15), 24, (3, 3), 144, padding=SAME3),
  case("ten_features_planes", 1, (2, 9, 8), 16, (1, 3, 3), 160, stride=(2, 1, 1), padding=((1, 0), (1, 1), (0, 2))),
  case("32_features", 1, (6, 20), 8, (3, 3), 256, padding=SAME3),
  case("64_features", 1, (6, 7), 8, (3, 3), 512, padding=SAME3),
  case("three_features_s2", 2, (9, 12), 8, (3, 3), 24, stride=(2, 2), padding=SAME3),
  case("causal", 2, (133,), 40, (4,), padding=((3, 0),)),
  case("causal3", 2, (37,), 12, (3,), padding=((2, 0),)),
  case("line2_far", 3, (2, 9), 8, (1, 2), padding=((0, 0), (13, 5))),
  case("line4_cut", 2, (3, 70), 20, (1, 4), stride=(2, 1), padding=((1, 0), (-5, 9))),
  case("1d31", 2, (150,), 34, (31,), padding=((15, 15),)),
  case("1d10_parts", 2, (1900,), 8, (10,), padding=((30, -3),)),
  case("1d25_few", 3, (89,), 40, (25,)),
  case("1d31_chunks", 3, (300,), 40, (31,), padding=((15, 15),)),
  case("1d57_planes", 2, (3, 1, 200), 16, (1, 1, 57), padding=((1, 0), (0, 0), (28, 28))),
  case("1d64_causal", 5, (257,), 24, (64,), padding=((63, 0),)),
  case("1d73_far", 1, (70,), 8, (73,), padding=((90, 200),)),
  case("1d64s3", 1, (301,), 7, (64,), stride=(3,), padding=((63, 0),), rhs_dilation=(2,)),
  case("3d", 2, (5, 9, 10), 12, (3, 3, 3), padding=((1, 1),) * 3),
  case("3d_chunks", 2, (5, 9, 20), 40, (3, 3, 3), padding=((1, 1),) * 3),
  case("3d_segments", 3, (2, 40, 30), 108, (3, 3, 3), padding=((1, 1),) * 3),
  case("3d_slabs", 1, (4, 6, 9), 264, (3, 3, 3), padding=((1, 1), (0, 2), (2, 1))),
  case("3d_columns", 1, (3, 5, 131), 64, (3, 3, 3), padding=((0, 0), (1, 1), (3, 0))),
  case("3d_planes", 3, (13, 7, 16), 20, (3, 3, 3), padding=((1, 1), (1, 1), (0, 2))),
  case("3d_wide", 1, (9, 21, 48), 36, (3, 3, 3), padding=((2, 0), (-1, 2), (1, 1))),
  case("3d_far", 2, (3, 4, 6), 8, (3, 3, 3), padding=((4, 5), (3, 6), (5, 7))),
  case("3d_s122", 1, (4, 9, 10), 6, (3, 3, 3), stride=(1, 2, 2), padding=((1, 1),) * 3),
  case("3d_time", 1, (9, 4, 5), 10, (5, 1, 1), padding=((2, 2), (0, 0), (0, 0))),
  case("many_pixels", 70, (28, 28), 8, (3, 3), padding=SAME3),
  case("empty_batch", 0, (5, 5), 4, (3, 3)),
  case("empty_input", 2, (0, 5), 4, (3, 3), padding=((2, 2), (0, 0))),
]  # fmt: skip


def spec_of(case):
  return ConvSpec(*case.geometry, case.groups, case.spatial, case.window, None, "depthwise")


def check(case, dtype, out_dtype, draw=sample, results="yxw"):
  spec = spec_of(case)
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  arrays = {name: draw(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
  oracle = [exact(arrays[name]) for name in "xwy"]
  wants = {"y": conv_oracle(*oracle[:2], *case.geometry, case.groups)}
  wants["x"], wants["w"] = conv_gradients(*oracle, *case.geometry, case.groups)
  taps = int(np.prod(case.window))
  terms = {"y": taps, "x": taps * case.k // case.c, "w": int(np.prod(shapes["y"][:-1]))}
  for result, want in wants.items():
    if result not in results:
      continue
    operands = {name: jnp.asarray(arrays[name])[None] for name in OPERANDS[result]}
    if plan(result, *operands.values(), spec, np.dtype(out_dtype), hopper=False) is None:
      assert result == "w" and max(case.lhs_dilation) > 1
      continue
    f = lambda a, b, r=result: convolve(r, dict(zip(OPERANDS[r], (a, b), strict=True)), spec, out_dtype)  # noqa: E731
    got = assert_repeatable(f, *operands.values(), repeats=3)
    assert_close(got[0], want, out_dtype, terms=max(1, terms[result]), scale=3 * np.sqrt(terms[result]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case):
  for dtype in ("bfloat16", "float16", "float32"):
    check(case, dtype, dtype)
  check(case, "bfloat16", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_small_images(seed):
  """Around what fills lines of eight pixels, fragments of 16 images, and blocks."""
  rng = np.random.default_rng(seed)
  rank = int(rng.integers(1, 3))
  spatial = tuple(int(i) for i in rng.integers(1, 18 if rank == 2 else 257, rank))
  window = tuple(int(i) for i in rng.integers(1, 20 if rank == 2 else 80, rank))
  low = [int(rng.integers(-min(2, i - 1), r + 3)) for i, r in zip(spatial, window, strict=True)]
  high = [max(r - i - a, int(rng.integers(-1, r))) for i, r, a in zip(spatial, window, low, strict=True)]
  padding = tuple(zip(low, high, strict=True))
  random = case("random", int(rng.integers(1, 40)), spatial, 8 * int(rng.integers(1, 4)), window, padding=padding)
  check(
    random, "bfloat16" if seed % 2 else "float16", "float32" if seed % 3 == 0 else ("float16", "bfloat16")[seed % 2]
  )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_bands(seed):
  """Around what fills strips of 16 results, runs of eight of them, lines of a window and its 16s of values."""
  rng = np.random.default_rng(seed)
  rank = int(rng.integers(1, 3))
  spatial = tuple(int(i) for i in rng.integers(9, 70, 2)) if rank == 2 else (int(rng.integers(65, 700)),)
  window = tuple(int(i) for i in rng.integers(3, 10, 2)) if rank == 2 else (int(rng.integers(10, 76)),)
  low = [int(rng.integers(-2, r + 3)) for r in window]
  high = [max(r - i - a, int(rng.integers(-2, r + 3))) for i, r, a in zip(spatial, window, low, strict=True)]
  padding = tuple(zip(low, high, strict=True))
  random = case("random", int(rng.integers(1, 9)), spatial, 8 * int(rng.integers(1, 8)), window, padding=padding)
  check(random, "bfloat16" if seed % 2 else "float16", ("float16", "bfloat16")[seed % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_volumes(seed):
  """Around what fills strips of 16 results, two of them side by side, and planes beside one another."""
  rng = np.random.default_rng(seed)
  spatial = tuple(int(rng.integers(1, most)) for most in (12, 20, 70))
  low = [int(rng.integers(-1 if i > 1 else 0, 6)) for i in spatial]
  high = [max(3 - i - a, int(rng.integers(-1, 5))) for i, a in zip(spatial, low, strict=True)]
  padding = tuple(zip(low, high, strict=True))
  random = case("random", int(rng.integers(1, 5)), spatial, 4 * int(rng.integers(1, 13)), (3, 3, 3), padding=padding)
  check(random, "bfloat16" if seed % 2 else "float16", ("float16", "bfloat16")[seed % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_dilation(seed):
  rng = np.random.default_rng(seed)
  window, stride = int(rng.choice([3, 3, 5, 7])), int(rng.choice([1, 1, 1, 2]))
  dilation = tuple(int(d) for d in rng.integers(1, 6, 2))
  reach = [(window - 1) * d for d in dilation]
  padding = tuple((int(rng.integers(-2, r + 3)), int(rng.integers(-2, r + 3))) for r in reach)
  spatial = tuple(int(rng.integers(max(1, 1 + r - sum(p)), r + 20)) for r, p in zip(reach, padding, strict=True))
  geometry = dict(stride=(stride,) * 2, padding=padding, rhs_dilation=dilation)
  random = case("random", 2, spatial, 8 * int(rng.integers(1, 6)), (window,) * 2, **geometry)
  dtype = ("bfloat16", "float16", "float32")[seed % 3]
  check(random, dtype, dtype if seed % 4 else "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_features(seed):
  rng = np.random.default_rng(seed)
  channels, features, stride = 8 * int(rng.integers(1, 5)), 2 * int(rng.integers(1, 5)), int(rng.choice([1, 1, 2]))
  padding = tuple((int(rng.integers(-1, 5)), int(rng.integers(0, 5))) for _ in range(2))
  spatial = tuple(int(rng.integers(4, 24)) for _ in range(2))
  random = case("random", 2, spatial, channels, (3, 3), channels * features, stride=(stride,) * 2, padding=padding)
  dtype = ("bfloat16", "float16", "float32")[seed % 3]
  check(random, dtype, dtype if seed % 4 else "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
  "window, groups, spatial, dilation, features",
  [
    (3, 20, (14, 20), 1, 1), (7, 24, (14, 20), 1, 1), (15, 24, (14, 20), 1, 1), (13, 24, (7, 9), 1, 1),
    (3, 24, (14, 20), 2, 1), (3, 16, (14, 20), 1, 4),
  ],
)  # fmt: skip
def test_batch_of_problems(window, groups, spatial, dilation, features, dtype):
  k = groups * features
  shapes = (3, 2, *spatial, groups), (3, window, window, 1, k), (3, 2, *spatial, k)
  x, w, g = (jnp.asarray(sample(s, dtype, i)) for i, s in enumerate(shapes))
  padding = ((window // 2 * dilation,) * 2,) * 2
  layer = dict(padding=padding, dilation=(dilation,) * 2, groups=groups, algorithm="depthwise")
  y = jax.vmap(lambda x, w: jaxdnn.conv(x, w, **layer))(x, w)
  dx = jax.vmap(lambda g, w: jaxdnn.conv_dgrad(g, w, spatial, **layer))(g, w)
  dw = jax.vmap(lambda x, g: jaxdnn.conv_wgrad(x, g, (window,) * 2, **layer))(x, g)
  geometry = (1, 1), padding, (1, 1), (dilation, dilation), groups
  for i in range(3):
    operands = [exact(a[i]) for a in (x, w, g)]
    assert_close(y[i], conv_oracle(*operands[:2], *geometry), dtype, terms=window**2, scale=3 * window)
    want_dx, want_dw = conv_gradients(*operands, *geometry)
    assert_close(dx[i], want_dx, dtype, terms=window**2 * features, scale=3 * window * features)
    assert_close(dw[i], want_dw, dtype, terms=560, scale=71)


@pytest.mark.gpu
@pytest.mark.parametrize(
  "window, columns, dilation", [(3, 30, 1), (7, 30, 1), (9, 30, 1), (15, 30, 1), (13, 13, 1), (3, 30, 2)]
)
@pytest.mark.parametrize("groups, features", [(24, 1), (20, 1), (7, 1), (24, 2)])
def test_epilogue(window, columns, dilation, groups, features):
  k = groups * features
  shapes = (2, 14, columns, groups), (window, window, 1, k), (k,), (2, 14, columns, k)
  x, w, b, r = (jnp.asarray(sample(s, "bfloat16", i)) for i, s in enumerate(shapes))
  padding = ((window // 2 * dilation,) * 2,) * 2
  sums = conv_oracle(x, w, (1, 1), padding, (1, 1), (dilation, dilation), groups)
  layer = dict(padding=padding, dilation=(dilation,) * 2, groups=groups, algorithm="depthwise")
  bound = dict(terms=window**2, scale=3 * window)
  assert_close(jaxdnn.conv(x, w, b, **layer), sums + exact(b), "bfloat16", **bound)
  assert_close(jaxdnn.conv(x, w, b, activation="relu", **layer), np.maximum(sums + exact(b), 0), "bfloat16", **bound)
  want = np.maximum(sums + exact(b) + exact(r), 0)
  assert_close(jaxdnn.conv(x, w, b, residual=r, activation="relu", **layer), want, "bfloat16", **bound)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_clamps(case):
  """ReLU and that up to a bound, in which NaN stays."""
  spec = spec_of(case)
  for dtype in ("bfloat16", "float32"):
    x, w, b = (sample(shape, dtype, i) for i, shape in enumerate((case.x_shape, case.w_shape, (case.k,))))
    x[-1:, ..., 0] = np.nan  # if there is an image
    taps = int(np.prod(case.window))
    sums = conv_oracle(exact(x), exact(w), *case.geometry, case.groups) + exact(b)
    for kind, most in (("relu", np.inf), ("clipped_relu", 6)):
      got = fused(x[None], w[None], b[None], None, spec, dtype, kind)[0]
      assert_close(got, np.clip(sums, 0, most), dtype, terms=taps, scale=3 * np.sqrt(taps))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("groups", [20, 7])
def test_epilogue_of_sequences(groups, window, dtype):
  x, w = (jnp.asarray(sample(s, dtype, i)) for i, s in enumerate(((3, 45, groups), (window, 1, groups))))
  b, r = (jnp.asarray(sample(s, dtype, 2 + i)) for i, s in enumerate(((groups,), x.shape)))
  padding = ((window - 1, 0),)
  sums = conv_oracle(x, w, (1,), padding, (1,), (1,), groups) + exact(b)
  layer = dict(padding=padding, groups=groups, algorithm="depthwise")
  bound = dict(terms=window + 2, scale=3 * window)
  assert_close(jaxdnn.conv(x, w, b, **layer), sums, dtype, **bound)
  assert_close(jaxdnn.conv(x, w, b, activation="relu", **layer), np.maximum(sums, 0), dtype, **bound)
  assert_close(jaxdnn.conv(x, w, b, residual=r, **layer), sums + exact(r), dtype, **bound)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_stays_local(value):
  """An input meets the taps of results that there are, and no others."""

  def draw(shape, dtype, seed):
    a = sample(shape, dtype, seed)
    if seed == 0:
      a[0, -1, ..., 0] = value
    return a

  with np.errstate(invalid="ignore"):
    names = ("3x3", "3x3s2", "7x7", "9x13", "causal", "causal3", "3d_columns", "odd_channels", "odd_channels_s2")
    for name in (*names, "dilations_differ", "four_features"):
      check(next(c for c in CASES if c.name == name), "float32", "float32", draw)
    bands = "5x5_far", "7x7_chunks", "7x7_valid", "9x9_far", "6x6_chunks", "1d31_chunks", "1d64_causal", "3d_planes"
    for name in (*bands, "31x31_chunks", "15x15", "image_far", "image_valid", "image_1d", "3d_columns", "3d_wide"):
      check(next(c for c in CASES if c.name == name), "bfloat16", "bfloat16", draw)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_not_finite_cotangent_stays_local(value):
  def draw(shape, dtype, seed):
    a = sample(shape, dtype, seed)
    if seed == 2:
      a[-1, 1, ..., 2] = value
    return a

  with np.errstate(invalid="ignore"):
    for name in ("31x31_chunks", "9x9_far", "1d73_far", "image_13x13", "image_far", "image_planes", "image_1d_far",
                 "3d_planes"):  # fmt: skip
      check(next(c for c in CASES if c.name == name), "bfloat16", "bfloat16", draw, "x")
    check(next(c for c in CASES if c.name == "image_valid"), "bfloat16", "bfloat16", draw)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  few = ("3x3s2", "7x7_on_few", "5x5_far", "9x13", "15x15", "odd_channels", "causal", "3d", "3d_chunks", "transposed3")
  names = "odd_channels_far_s2", "pairs_of_channels", "image_far", "image_planes", "dilated_far", "six_features"
  for name in (*few, *names, "5x5s2_far", "9x9_far", "4x4_chunks", "1d31_chunks", "1d73_far", "3d_planes", "3d_far"):
    check(next(c for c in CASES if c.name == name), "bfloat16", "bfloat16")
