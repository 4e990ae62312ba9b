"""The kernels of few input channels: what they take, and problems around their limits against the float64 oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, SAME7, ConvCase
from conv_checks import coarse
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn._conv.primitives import FEW_CHANNELS, OPERANDS, convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact, sample

HOPPER = "few_channels wgmma"


def algorithms(direction, window, c, k, dtype="bfloat16", spatial=(224, 224), batch=32, **options):
  x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((batch, *spatial, c), (*window, c, k)))
  return jaxdnn.conv_algorithms(x, w, direction=direction, **{"padding": "SAME", "precision": "default", **options})


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("direction", ["forward", "filter_gradient"])
def test_is_chosen(direction, hopper):
  for dtype in ("bfloat16", "float16", "float32"):
    for window, c, k, stride in (((7, 7), 3, 64, 2), ((3, 3), 3, 32, 1), ((5, 5), 1, 40, 1)):
      first = algorithms(direction, window, c, k, dtype, stride=stride, hopper=hopper)[0]
      assert first.name == FEW_CHANNELS
      assert first.exactness == ("float32 of tf32" if dtype == "float32" else "float32")
      assert (first.workspace_bytes > 0) == (first.splits > 1) == (direction == "filter_gradient")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_chosen_for_the_gradient_of_few_features(dtype):
  for window, c, k, spatial in (((3, 3), 64, 3, (256, 256)), ((5, 5), 40, 1, (64, 64))):
    first = algorithms("data_gradient", window, c, k, dtype, spatial)[0]
    assert first.name == FEW_CHANNELS and first.splits == 1 and first.workspace_bytes == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_chosen_for_the_filter_gradient_of_few_features(dtype):
  for window, c, k, spatial in (((3, 3), 64, 3, (256, 256)), ((5, 5), 40, 1, (64, 64))):
    first = algorithms("filter_gradient", window, c, k, dtype, spatial)[0]
    assert first.name == FEW_CHANNELS and first.splits > 1


def test_is_not_offered():
  names = lambda *a, **k: {each.name for each in algorithms(*a, **k)}  # noqa: E731
  assert FEW_CHANNELS not in names("data_gradient", (7, 7), 3, 64)
  assert FEW_CHANNELS not in names("data_gradient", (3, 3), 64, 8)
  assert FEW_CHANNELS not in names("data_gradient", (3, 3), 64, 3, stride=2)
  assert FEW_CHANNELS not in names("data_gradient", (3, 3), 64, 3, dilation=(1, 2))
  assert FEW_CHANNELS in names("data_gradient", (3, 3), 64, 3, dilation=(2, 1))
  assert FEW_CHANNELS in names("filter_gradient", (3, 3), 64, 3, dilation=(2, 1))
  assert FEW_CHANNELS not in names("filter_gradient", (3, 3), 64, 8)
  assert FEW_CHANNELS not in names("filter_gradient", (3, 3), 64, 3, stride=2)
  for direction in ("forward", "filter_gradient"):
    assert FEW_CHANNELS not in names(direction, (7, 7), 3, 64, "float32", precision="high")
    assert FEW_CHANNELS not in names(direction, (7, 7), 3, 64, "float64")
    assert FEW_CHANNELS not in names(direction, (7, 7), 3, 64, dilation=(1, 2))
    assert FEW_CHANNELS in names(direction, (7, 7), 3, 64, dilation=(2, 1))
    # Longer lines than a strip.
    assert FEW_CHANNELS not in names(direction, (1, 1), 2048, 64)
    assert FEW_CHANNELS not in names(direction, (1, 1), 4, 64, batch=0)
  assert FEW_CHANNELS not in names("forward", (9, 9), 64, 64)


def test_hopper_has_kernels_of_strides():
  """Of 7x7 windows, and of patches of 4x4, on lines of whole fours of pixels."""

  def tiles(result, window, c, k, stride, width=224, dtype="bfloat16", out=None, models=1, hopper=True):
    padding = ((1, 1), (1, 1)) if stride < 4 else ((1, 1), (0, 4))
    case = ConvCase("", 32, (224, width), c, window, k, (stride, stride), padding)
    spec = ConvSpec(*case.geometry, 1, case.spatial, case.window, None, HOPPER)
    shapes = {"x": case.x_shape, "w": case.w_shape, "y": (32, *spec.y_spatial, k)}
    a, b = (jax.ShapeDtypeStruct((models, *shapes[name]), dtype) for name in OPERANDS[result])
    return plan(result, a, b, spec, np.dtype(out or dtype), hopper=hopper)

  for window, stride in (((7, 7), 2), ((6, 7), 2), ((4, 4), 4), ((3, 2), 4)):
    for c in (3, 4):
      assert tiles("y", window, c, 64, stride)["workspace_bytes"] == 0
      sums = tiles("w", window, c, 64, stride)
      # Of a single slice too.
      assert sums["workspace_bytes"] == sums["splits"] * np.prod(window) * c * 64 * 4
    assert (tiles("y", window, 3, 64, stride, dtype="float32") is None) == (stride == 4)
    assert tiles("w", window, 3, 64, stride, dtype="float32") is None
    for others in (dict(c=2), dict(c=5), dict(k=63), dict(k=32), dict(width=222), dict(models=2), dict(hopper=False),
                   dict(dtype="float64")):  # fmt: skip
      assert tiles("y", window, **{"c": 3, "k": 64, "stride": stride, **others}) is None
  assert tiles("y", (7, 7), 3, 64, 1) is None and tiles("x", (7, 7), 3, 64, 2) is None
  assert tiles("y", (5, 5), 3, 64, 2) is None and tiles("y", (7, 9), 3, 64, 2) is None


def test_hopper_has_kernels_of_volumes():
  """Forward of up to three planes, of which the filter stays in shared memory."""
  volume = dict(spatial=(16, 112, 112), batch=4, stride=(1, 2, 2))
  for depth in (1, 2, 3, 4):
    forward = algorithms("forward", (depth, 7, 7), 3, 64, **volume)
    assert (forward[0].tile == HOPPER) == (depth < 4)
    assert algorithms("filter_gradient", (depth, 7, 7), 3, 64, **volume)[0].tile == HOPPER
  assert algorithms("forward", (3, 7, 7), 3, 64, "float32", **volume)[0].tile != HOPPER


# Strips that are copied by 16, 4 and 2 bytes; windows that begin at odd and even elements; ragged tiles.
CASES = [
  ConvCase("stem", 2, (64, 64), 3, (7, 7), 64, (2, 2), SAME7),
  ConvCase("stem_odd", 2, (59, 59), 3, (7, 7), 64, (2, 2), SAME7),
  ConvCase("3x3", 2, (40, 40), 3, (3, 3), 64, padding=SAME3),
  ConvCase("3x3s2", 2, (75, 75), 3, (3, 3), 32, (2, 2)),
  ConvCase("mnist", 5, (28, 28), 1, (5, 5), 32, padding=((2, 2), (2, 2))),
  ConvCase("audio", 2, (4000,), 1, (10,), 136, (5,)),
  ConvCase("3d", 2, (9, 10, 12), 1, (3, 3, 3), 32, padding=((1, 1),) * 3),
  ConvCase("3d_s2", 2, (8, 9, 11), 2, (3, 5, 3), 64, (2, 2, 2), ((1, 1),) * 3, rhs_dilation=(1, 2, 1)),
  ConvCase("37_features", 3, (17, 19), 2, (3, 4), 37, padding=SAME3),
  ConvCase("one_feature", 3, (17, 19), 4, (3, 3), 1, padding=SAME3),
  ConvCase("narrow", 5, (3, 2), 3, (3, 3), 72, padding=SAME3),
  ConvCase("one_pixel", 7, (1, 1), 1, (1, 1), 8),
  ConvCase("seven_channels", 2, (21, 22), 7, (3, 3), 66, (2, 2), SAME3),
  ConvCase("negative_padding", 2, (31, 33), 5, (2, 3), 40, (3, 3), ((-2, -2), (3, -1))),
  ConvCase("lines_apart", 2, (31, 33), 3, (3, 3), 64, padding=((2, 2), (1, 1)), rhs_dilation=(2, 1)),
  ConvCase("far_padding", 2, (8, 8), 3, (3, 3), 64, padding=((5, 0), (0, 9))),
  ConvCase("alexnet", 2, (67, 67), 3, (11, 11), 96, (4, 4), ((2, 2), (2, 2))),
  ConvCase("long_line", 2, (5, 200), 1, (1, 129), 64, padding=((0, 0), (3, 3))),
  ConvCase("many_lines", 2, (40, 24), 1, (31, 5), 64, padding=((2, 2), (2, 2))),
  ConvCase("many_tiles", 40, (60, 64), 2, (3, 3), 40, padding=SAME3),
  # What Hopper's kernels take: several bands of lines, ragged; windows that begin anywhere in a four of pixels.
  ConvCase("stem_ragged", 3, (45, 92), 3, (7, 7), 72, (2, 2), ((3, 3), (2, 3))),
  ConvCase("stem_four_channels", 2, (30, 36), 4, (6, 7), 40, (1, 2), ((2, 2), (1, 4))),
  ConvCase("stem_many", 40, (64, 64), 3, (7, 7), 128, (2, 2), SAME7),
  # Strips of fewer fours of pixels than threads bring, more of them for a block than there are stages.
  ConvCase("stem_narrow", 800, (3, 16), 3, (7, 7), 64, (2, 2), SAME7),
]  # fmt: skip


# Of Hopper's kernels: two and three planes of a window, and others in the filter gradient alone.
VOLUMES = [
  ConvCase("stem_volume", 2, (5, 21, 24), 3, (3, 7, 7), 64, (1, 2, 2), ((1, 1), *SAME7)),
  ConvCase("stem_planes", 2, (6, 20, 28), 4, (2, 6, 7), 72, (2, 1, 2), ((-1, 2), (2, 2), (1, 4))),
  ConvCase("stem_deep", 1, (9, 18, 20), 3, (5, 7, 7), 40, (2, 2, 2), ((3, 2), *SAME7)),
  ConvCase("stem_many_volumes", 6, (8, 56, 56), 3, (3, 7, 7), 64, (1, 2, 2), ((1, 1), *SAME7)),
]  # fmt: skip


# Of Hopper's kernels of patches: one and two tiles of features for a block, and more; windows smaller than four.
PATCHES = [
  ConvCase("patches", 2, (40, 56), 3, (4, 4), 96, (4, 4)),
  ConvCase("patches_one_tile", 3, (45, 92), 4, (4, 4), 64, (4, 4), ((1, 2), (4, 5))),
  ConvCase("patches_overlapping", 2, (30, 36), 3, (3, 4), 200, (1, 4), ((2, 2), (0, 0))),
  ConvCase("patches_narrow", 5, (23, 40), 3, (3, 2), 40, (4, 4), ((0, 3), (0, 2))),
  ConvCase("patches_many", 40, (64, 64), 3, (4, 4), 136, (4, 4)),
]  # fmt: skip


# Gradients of few features, with strides (of a transposed convolution) and without.
FEW_FEATURES = [
  ConvCase("rgb", 2, (40, 40), 64, (3, 3), 3, padding=SAME3),
  ConvCase("generator", 2, (16, 16), 64, (4, 4), 3, padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)),
  ConvCase("odd", 3, (17, 19), 37, (3, 4), 2, padding=((0, 3), (2, 1))),
  ConvCase("one", 5, (28, 28), 33, (5, 5), 1),
  ConvCase("seven", 2, (21, 22), 66, (2, 3), 7, padding=((-2, 3), (0, -1))),
  ConvCase("lines_apart", 2, (31, 33), 40, (3, 3), 5, padding=((2, 2), (1, 1)), rhs_dilation=(2, 1)),
  ConvCase("audio", 2, (400,), 136, (10,), 1, padding=((9, 4),), lhs_dilation=(5,)),
  ConvCase("3d", 2, (6, 7, 9), 32, (3, 2, 3), 4, padding=((1, 1),) * 3, lhs_dilation=(2, 1, 3)),
  ConvCase("narrow", 5, (3, 2), 72, (3, 3), 3, padding=SAME3),
  ConvCase("many_tiles", 40, (60, 64), 40, (3, 3), 2, padding=SAME3),
]  # fmt: skip


def check(case, dtype, out_dtype, draw=sample, results="yw", algorithm=FEW_CHANNELS):
  """Returns in how many directions the kernels take the problem."""
  spec = ConvSpec(*case.geometry, 1, case.spatial, case.window, None, algorithm)
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  arrays = {name: draw(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
  oracle = [exact(arrays[name]) for name in "xwy"]
  wants = {"y": conv_oracle(*oracle[:2], *case.geometry)}
  wants["x"], wants["w"] = conv_gradients(*oracle, *case.geometry)
  terms = {"y": case.w_shape[:-1], "x": (*case.window, case.k), "w": shapes["y"][:-1]}
  terms = {name: int(np.prod(shape)) for name, shape in terms.items()}
  taken = 0
  for result in results:
    operands = {name: jnp.asarray(arrays[name])[None] for name in OPERANDS[result]}
    if plan(result, *operands.values(), spec, np.dtype(out_dtype), hopper=algorithm == HOPPER) is None:
      continue
    taken += 1
    f = lambda a, b, r=result: convolve(r, dict(zip(OPERANDS[r], (a, b), strict=True)), spec, out_dtype)  # noqa: E731
    got = assert_repeatable(f, *operands.values(), repeats=3)
    assert_close(got[0], wants[result], out_dtype, terms=terms[result], scale=3 * np.sqrt(terms[result]))
  return taken


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case):
  for dtypes in (("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")):
    assert check(case, *dtypes) == 2
  # Its products are of TF32, which coarse numbers are.
  taken = check(case, "float32", "float32", coarse)
  assert taken == 2 or case.name == "alexnet"


@pytest.mark.gpu
@pytest.mark.parametrize("case", VOLUMES, ids=lambda c: c.name)
def test_volumes(case):
  for dtypes in (("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")):
    assert check(case, *dtypes, algorithm=HOPPER) == (1 if case.name == "stem_deep" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PATCHES, ids=lambda c: c.name)
def test_patches(case):
  for dtypes in (("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")):
    assert check(case, *dtypes, algorithm=HOPPER) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("case", FEW_FEATURES, ids=lambda c: c.name)
def test_gradients_of_few_features(case):
  for dtypes in (("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")):
    assert check(case, *dtypes, results="xw") == 2
  assert check(case, "float32", "float32", coarse, results="xw") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_infinities_meet_no_padding_of_the_other_operand(dtype):
  """With x and y exchanged y has the padding; taps that an element of x does not meet there do not see it."""
  x, g = (np.array(coarse((2, 9, 11, c), dtype, c)) for c in (40, 3))
  x[0, 0, 0, 5], x[1, -1, -1, 0], x[1, 4, 0, 39] = np.inf, -np.inf, np.nan
  got = jaxdnn.conv_wgrad(x, g, (3, 3), padding=SAME3, precision="default", algorithm=FEW_CHANNELS)
  with np.errstate(invalid="ignore"):
    want = conv_gradients(exact(x), np.zeros((3, 3, 40, 3)), exact(g), (1, 1), SAME3, (1, 1), (1, 1))[1]
  assert np.isfinite(want).any((0, 1, 3))[[0, 5]].all()
  assert_close(got, want, dtype, terms=198, scale=42)


@pytest.mark.gpu
def test_random_gradients_of_few_features():
  rng = np.random.default_rng(1)
  taken = 0
  for _ in range(40):
    rank = int(rng.integers(1, 4))
    draw = lambda lo, hi, rank=rank: tuple(int(v) for v in rng.integers(lo, hi + 1, rank))  # noqa: E731
    padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 5, (rank, 2)))
    case = ConvCase("random", int(rng.integers(1, 5)), draw(4, 40 if rank < 3 else 8), int(rng.integers(1, 140)),
                    draw(1, 6 if rank < 3 else 3), int(rng.integers(1, 8)), (1,) * rank, padding, draw(1, 3),
                    (*draw(1, 2)[1:], 1))  # fmt: skip
    if min(ConvSpec(*case.geometry, 1, case.spatial, case.window, None).y_spatial) > 0:
      taken += check(case, "bfloat16", "bfloat16", results="xw")
      taken += check(case, "float32", "float32", coarse, results="xw")
  assert taken > 100


@pytest.mark.gpu
def test_random_problems():
  rng = np.random.default_rng(0)
  taken = 0
  for _ in range(60):
    rank = int(rng.integers(1, 4))
    draw = lambda lo, hi, rank=rank: tuple(int(v) for v in rng.integers(lo, hi + 1, rank))  # noqa: E731
    padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 5, (rank, 2)))
    case = ConvCase("random", int(rng.integers(1, 5)), draw(4, 50 if rank < 3 else 12), int(rng.integers(1, 8)),
                    draw(1, 6 if rank < 3 else 3), int(rng.integers(1, 140)), draw(1, 4), padding,
                    rhs_dilation=(*draw(1, 2)[1:], 1))  # fmt: skip
    if min(ConvSpec(*case.geometry, 1, case.spatial, case.window, None).y_spatial) > 0:
      taken += check(case, "bfloat16", "bfloat16") + check(case, "float32", "float32", coarse)
  assert taken > 150


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_of_problems(dtype):
  x, w = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate(((3, 2, 11, 9, 3), (3, 3, 3, 3, 40))))
  f = lambda x, w: jaxdnn.conv(x, w, padding="SAME", precision="default", algorithm=FEW_CHANNELS)  # noqa: E731
  for each, *operands in zip(jax.vmap(f)(x, w), x, w, strict=True):
    assert_close(each, conv_oracle(*(exact(a) for a in operands), (1, 1), SAME3, (1, 1), (1, 1)), dtype, terms=27)
  g, w = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate(((3, 2, 11, 9, 3), (3, 3, 3, 40, 3))))
  f = lambda g, w: jaxdnn.conv_dgrad(g, w, (11, 9), padding="SAME", precision="default", algorithm=FEW_CHANNELS)  # noqa: E731
  for each, *operands in zip(jax.vmap(f)(g, w), np.zeros((3, 2, 11, 9, 40)), w, g, strict=True):
    want = conv_gradients(*(exact(a) for a in operands), (1, 1), SAME3, (1, 1), (1, 1))[0]
    assert_close(each, want, dtype, terms=27, scale=6)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [64, 36, 33])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_epilogue(features, activation):
  shapes = (2, 18, 20, 3), (3, 3, 3, features), (features,)
  x, w, b = (jnp.asarray(sample(s, "bfloat16", i)) for i, s in enumerate(shapes))
  r = jnp.asarray(sample((2, 18, 20, features), "bfloat16", 3))
  layer = dict(padding="SAME", activation=activation)
  for residual in (None, r):
    got = jaxdnn.conv(x, w, b, residual=residual, algorithm=FEW_CHANNELS, **layer)
    want = jaxdnn.conv(x, w, b, residual=residual, algorithm="implicit_gemm", **layer)
    assert_close(got, exact(want), "bfloat16", terms=27, scale=6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_epilogue_of_strides(activation, dtype):
  """Hopper's kernels have bias and ReLU; what they leave to the others is here too."""
  for window, stride, padding in ((7, 2, "SAME"), (4, 4, "VALID"))[: 1 if dtype == "float32" else 2]:
    shapes = (2, 36, 40, 3), (window, window, 3, 72), (72,), (2, 36 // stride, 40 // stride, 72)
    x, w, b, r = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate(shapes))
    layer = dict(stride=stride, padding=padding, activation=activation, precision="default")
    for bias, residual in ((b, None), (b, r), (None, r)):
      got = jaxdnn.conv(x, w, bias, residual=residual, algorithm=HOPPER, **layer)
      want = jaxdnn.conv(x, w, bias, residual=residual, algorithm="implicit_gemm", **layer)
      assert_close(got, exact(want), dtype, terms=147, scale=36)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_not_finite_stays_local(dtype, value):
  """An input meets the taps of results that there are, and no others: neither neighbours in a word, nor what is beside
  the result in a tile."""

  def draw(shape, dtype, seed, operand=0):
    a = coarse(shape, dtype, seed)
    if seed == operand:
      a[0, -1, ..., 0] = value
    return a

  with np.errstate(invalid="ignore"):
    for name in ("stem_odd", "stem_ragged", "3x3", "3x3s2", "mnist", "37_features",
                 "many_lines"):  # fmt: skip
      check(next(c for c in CASES if c.name == name), dtype, dtype, draw)
    for case in FEW_FEATURES[:4]:
      check(case, dtype, dtype, partial(draw, operand=2), "x")
    if dtype == "bfloat16":
      for case in (*VOLUMES[:2], *PATCHES[:4]):
        check(case, dtype, dtype, draw, algorithm=HOPPER)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  for name in ("stem_odd", "stem_ragged", "3x3", "mnist", "37_features", "3d_s2", "many_lines"):
    check(next(c for c in CASES if c.name == name), "bfloat16", "bfloat16")
    check(next(c for c in CASES if c.name == name), "float32", "float32", coarse)
  for case in (*VOLUMES[:2], *PATCHES[:4]):
    check(case, "bfloat16", "bfloat16", algorithm=HOPPER)
  for case in FEW_FEATURES[:4]:
    check(case, "bfloat16", "bfloat16", results="xw")
    check(case, "float32", "float32", coarse, "xw")
