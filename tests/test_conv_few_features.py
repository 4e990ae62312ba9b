"""The kernels of few features: what they take, and problems around their limits against the float64 oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check_epilogue, coarse
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn._conv.fused import fused
from jaxdnn._conv.primitives import FEW_FEATURES, OPERANDS, convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact, sample

RESULTS = {"forward": "y", "data_gradient": "x"}
HOPPER = "few_features wgmma"
DTYPES = [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32"), ("float32",) * 2]


def algorithms(direction, gathered, few, dtype="bfloat16", window=(3, 3), **options):
  """Of a result of `few` channels a pixel, from `gathered` of the operand."""
  c, k = (gathered, few) if direction == "forward" else (few, gathered)
  x = jax.ShapeDtypeStruct((options.pop("batch", 8), *options.pop("spatial", (112, 112)), c), dtype)
  w = jax.ShapeDtypeStruct((*window, c, k), dtype)
  return jaxdnn.conv_algorithms(x, w, direction=direction, **{"padding": "SAME", "precision": "default", **options})


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("direction", RESULTS)
def test_is_chosen(direction, hopper):
  for dtype in ("bfloat16", "float16", "float32"):
    for gathered, few, window in ((64, 3, (3, 3)), (32, 1, (3, 3)), (32, 3, (5, 5)), (16, 2, (3, 3))):
      first = algorithms(direction, gathered, few, dtype, window, hopper=hopper)[0]
      assert first.name == FEW_FEATURES
      assert first.tile == (HOPPER if hopper and dtype != "float32" else FEW_FEATURES)
      assert first.exactness == ("float32 of tf32" if dtype == "float32" else "float32")
      assert first.workspace_bytes == 0 and first.splits == 1


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_chosen_for_gradients_of_first_layers(dtype, hopper):
  for few, features, window, stride in ((3, 64, 7, 2), (3, 32, 3, 2), (3, 96, 4, 4), (1, 32, 5, 2)):
    options = dict(spatial=(224, 224), stride=stride, padding="VALID", hopper=hopper)
    # Windows that lie side by side are one product for Hopper's kernels.
    want = "implicit_gemm_wgmma" if hopper and window == stride else FEW_FEATURES
    assert algorithms("data_gradient", features, few, dtype, (window,) * 2, **options)[0].name == want


def takes(dtype="bfloat16", window=(4, 4), padding=((2, 2), (2, 2)), lhs_dilation=(2, 2), hopper=False):
  """What is chosen forward over a dilated input, or that it is this algorithm."""
  spec = ConvSpec((1, 1), padding, lhs_dilation, (1, 1), 1, (32, 32), window, None, FEW_FEATURES)
  x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((1, 128, 32, 32, 64), (1, *window, 64, 3)))
  best = plan("y", x, w, dataclasses.replace(spec, algorithm=None), np.dtype(dtype), hopper=hopper)
  named = plan("y", x, w, spec, np.dtype(dtype), hopper=hopper)
  assert named is None or best["cycles"] <= named["cycles"]
  return best["algorithm"], named is not None


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_chosen_over_a_dilated_input(dtype, hopper):
  assert takes(dtype, hopper=hopper) == (FEW_FEATURES, True)
  assert takes(dtype, (7, 5), ((-1, 3), (0, 9)), (1, 5), hopper)[1]
  assert not takes(dtype, (8, 4), hopper=hopper)[1]


@pytest.mark.parametrize("direction", RESULTS)
def test_is_not_offered(direction):
  names = lambda *a, **k: {each.name for each in algorithms(direction, *a, **k)}  # noqa: E731
  assert FEW_FEATURES in names(64, 8, padding=((-1, 2), (0, 3)))
  assert FEW_FEATURES in names(12, 3, "float32")
  assert FEW_FEATURES in names(64, 3, "float32", window=(5, 5))
  assert FEW_FEATURES in names(32, 3, window=(7, 7))
  assert FEW_FEATURES in names(64, 3, window=(5,), spatial=(4000,))
  assert FEW_FEATURES not in names(64, 9)
  assert FEW_FEATURES not in names(12, 3)
  assert FEW_FEATURES not in names(4, 3, "float32")
  assert FEW_FEATURES in names(512, 3)
  assert FEW_FEATURES in names(64, 1, window=(3, 56))
  assert FEW_FEATURES not in names(64, 3, window=(8, 3))
  assert FEW_FEATURES not in names(64, 1, window=(3, 57))
  assert FEW_FEATURES not in names(64, 8, window=(3, 8))
  assert FEW_FEATURES not in names(2048, 3)
  for stride in (2, (1, 2), (9, 1)):
    assert (FEW_FEATURES in names(64, 3, stride=stride)) == (direction == "data_gradient")
  assert FEW_FEATURES not in names(64, 3, stride=(1, 4000))
  assert (FEW_FEATURES in names(64, 16, window=(2, 3), stride=2)) == (direction == "data_gradient")
  assert FEW_FEATURES not in names(64, 17, window=(2, 3), stride=2)
  assert FEW_FEATURES not in names(64, 3, dilation=2)
  assert FEW_FEATURES not in names(64, 3, "float64")
  assert FEW_FEATURES not in names(64, 3, "float32", precision="high")
  assert FEW_FEATURES not in names(64, 3, batch=0)
  volume = dict(spatial=(8, 8, 8))
  assert FEW_FEATURES in names(64, 3, window=(3, 3, 3), **volume)
  assert FEW_FEATURES in names(64, 3, window=(3, 7, 7), **volume)
  assert FEW_FEATURES not in names(64, 3, window=(8, 3, 3), **volume)
  assert FEW_FEATURES not in names(64, 3, window=(3, 3, 3), stride=(2, 1, 1), **volume)
  assert FEW_FEATURES not in {each.name for each in algorithms("filter_gradient", 64, 3)}


def case(gathered, few, window, batch, spatial, padding=SAME3, **more):
  """Forward; `check` has its data gradient with the channels exchanged."""
  name = f"{'x'.join(map(str, window))}.{gathered}-{few}@{'x'.join(map(str, spatial))} {padding} {more}"
  return ConvCase(name, batch, spatial, gathered, window, few, padding=padding, **more)


PADDINGS = (
  ((0, 0), (0, 0)), ((2, 2), (2, 2)), ((0, 1), (0, 1)), ((1, 0), (2, 1)), ((-1, 2), (1, -1)), ((3, 0), (0, 4)),
)  # fmt: skip
WINDOWS = ((3, 3), (1, 1), (5, 5), (3, 2), (1, 7), (7, 1), (2, 3), (4, 4), (6, 5))
WIDTHS = (1, 5, 14, 31, 32, 33, 70, 2, 40)
# Every window with every number of features; widths of lines around a warp's columns and of less, where several images
# lie side by side; channels that are a part of a step, one slice and several; more lines than warps.
CASES = [
  *(
    case(gathered, 1 + (n + i) % 8, window, 1 + n % 4, (1 + (2 * n + i) % 9, WIDTHS[(n + 2 * i) % 9]), ((3, 3), (3, 3)))
    for i, gathered in enumerate((8, 16, 24, 64, 136))
    for n, window in enumerate(WINDOWS)
    if gathered * window[0] * window[1] <= 1600  # else the filter is too large
  ),
  *(case(24, 3, (3, 3), 3, (9, 12), padding) for padding in PADDINGS),
  *(case(80, 5, (5, 4), 2, (8, 35), padding) for padding in PADDINGS if padding[0] != (-1, 2)),
  case(136, 2, (3, 3), 2, (6, 37)),
  case(64, 3, (3, 3), 16, (120, 130)),
  case(32, 1, (5, 5), 40, (24, 24), ((4, 4), (4, 4))),
]

# Data gradients of these strides, and forward over an operand dilated by as much: windows that lie over each other,
# side by side and apart; extents that a stride does not divide.
STRIDES = ((2, 2), (4, 4), (1, 2), (3, 1), (2, 3), (5, 4), (1, 1), (8, 9))
STRIDED_WINDOWS = ((7, 7), (3, 3), (4, 4), (5, 2), (2, 16), (1, 7), (6, 11), (1, 1), (3, 5))
STRIDED = [
  dict(
    gathered=(8, 24, 64, 40, 96)[n % 5],
    few=min(1 + 3 * (n + i) % (8 if max(stride) == 1 else 16), 40 // max(window[1], stride[1])),
    window=window, batch=1 + n % 3, apart=stride, padding=PADDINGS[(n + i) % 6],
  )
  for i, stride in enumerate(STRIDES) for n, window in enumerate(STRIDED_WINDOWS)
]  # fmt: skip


def dilated(gathered, few, window, batch, apart, padding, spatial=(7, 23)):
  """Forward over an input dilated by `apart`."""
  return case(gathered, few, window, batch, spatial, padding, lhs_dilation=apart)


def strided(gathered, few, window, batch, apart, padding, spatial=(25, 97)):
  """For the data gradient, whose extents are `spatial`."""
  return case(gathered, few, window, batch, spatial, padding, stride=apart)


def check(case, dtype, out_dtype, draw=coarse, results="yx", algorithm=FEW_FEATURES):
  """Returns in how many directions the kernels take the problem."""
  spec = ConvSpec(*case.geometry, 1, case.spatial, case.window, None, algorithm)
  if min(spec.y_spatial) == 0:
    return 0
  taken = 0
  for result in results:
    c, k = (case.c, case.k) if result == "y" else (case.k, case.c)
    shapes = {"x": (case.batch, *case.spatial, c), "w": (*case.window, c, k), "y": (case.batch, *spec.y_spatial, k)}
    arrays = {name: draw(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
    oracle = [exact(arrays[name]) for name in "xwy"]
    forward = result == "y"
    want = conv_oracle(*oracle[:2], *case.geometry) if forward else conv_gradients(*oracle, *case.geometry)[0]
    terms = case.c * int(np.prod(case.window))
    operands = {name: jnp.asarray(arrays[name])[None] for name in OPERANDS[result]}
    if not plan(result, *operands.values(), spec, np.dtype(out_dtype), hopper=algorithm == HOPPER):
      continue
    taken += 1
    f = lambda a, b, r=result: convolve(r, dict(zip(OPERANDS[r], (a, b), strict=True)), spec, out_dtype)  # noqa: E731
    got = assert_repeatable(f, *operands.values(), repeats=3)
    assert_close(got[0], want, out_dtype, terms=terms, scale=3 * np.sqrt(terms))
  return taken


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", DTYPES)
def test_kernels(dtype, out_dtype):
  for each in CASES:
    assert check(each, dtype, out_dtype) == 2, each.name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", DTYPES)
def test_strides(dtype, out_dtype):
  for each in STRIDED:
    for one, result in ((strided(**each), "x"), (dilated(**each), "y")):
      assert check(one, dtype, out_dtype, results=result) == 1, one.name


# Several planes of the window, also beyond the operand's; a result of more planes than it.
VOLUMES = [
  case(24, 3, (3, 3, 3), 2, (5, 9, 12), ((1, 1),) * 3),
  case(64, 3, (3, 7, 7), 2, (4, 13, 20), ((1, 1), (3, 3), (3, 3))),
  case(16, 1, (2, 3, 5), 3, (3, 8, 33), ((3, 0), (1, 1), (2, 2))),
  case(136, 2, (5, 3, 3), 1, (7, 6, 17), ((-1, 3), (0, 2), (1, 1))),
  case(40, 5, (1, 3, 3), 2, (4, 7, 9), ((0, 0), (1, 1), (1, 1))),
  case(64, 3, (3, 3, 3), 4, (16, 40, 70), ((1, 1),) * 3),
]
STRIDED_VOLUMES = [
  dict(gathered=64, few=3, window=(3, 7, 7), batch=2, apart=(1, 2, 2), padding=((1, 1), (3, 3), (3, 3))),
  dict(gathered=24, few=2, window=(2, 3, 4), batch=1, apart=(1, 2, 3), padding=((2, 0), (1, 0), (0, 2))),
]


@pytest.mark.gpu
@pytest.mark.parametrize("each", VOLUMES, ids=lambda c: c.name)
def test_volumes(each):
  for dtype, out_dtype in DTYPES:
    # The filter of some floats is too large for shared memory.
    assert check(each, dtype, out_dtype) == (0 if dtype == "float32" and each.window[1] == 7 else 2)


@pytest.mark.gpu
def test_planes_side_by_side():
  """Planes that a window has to itself are images of their own, of so many planes."""
  patches = case(24, 3, (2, 3, 3), 2, (6, 7, 9), ((0, 0), (1, 1), (1, 1)), stride=(2, 1, 1))
  for dtype, out_dtype in DTYPES:
    assert check(patches, dtype, out_dtype) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("each", STRIDED_VOLUMES, ids=lambda c: str(c["window"]))
def test_strides_of_volumes(each):
  for dtype, out_dtype in DTYPES[: 3 if each["window"][1] == 7 else 4]:
    assert check(strided(**each, spatial=(5, 25, 40)), dtype, out_dtype, results="x") == 1
    assert check(dilated(**each, spatial=(4, 9, 21)), dtype, out_dtype, results="y") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [126, 127, 128, 129, 253, 254, 255, 256, 383, 385])
def test_columns_around_those_of_blocks(width):
  """Of a window's line in one, two and three parts; the last in blocks of half as many pixels."""
  layer = dict(window=(3, 3), batch=2, apart=(2, 2), padding=SAME3, spatial=(9, width))
  for few in (2, 5, 8):
    for gathered in (16, 200):
      assert check(strided(gathered, few, **layer), "bfloat16", "bfloat16", results="x") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_dimension(dtype):
  for window, padding in (((1,), (0, 0)), ((5,), (2, 2)), ((7,), (0, 6))):
    assert check(case(24, 3, window, 3, (75,), (padding,)), dtype, dtype) == 2


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_under_the_sanitizer(dtype):
  for gathered, few, window in ((24, 3, (3, 3)), (64, 8, (5, 5)), (136, 1, (2, 3))):
    assert check(case(gathered, few, window, 3, (5, 19), PADDINGS[3]), dtype, dtype) == 2
    with np.errstate(invalid="ignore"):
      check(case(gathered, few, window, 2, (5, 37)), dtype, dtype, not_finite)
  check(VOLUMES[0], dtype, dtype)
  check(strided(**STRIDED_VOLUMES[1], spatial=(4, 11, 25)), dtype, dtype, results="x")
  for each in STRIDED[:27:4]:
    assert check(strided(**each), dtype, dtype, results="x") == check(dilated(**each), dtype, dtype, results="y") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  padding = tuple((int(a), int(b)) for a, b in rng.integers(-2, 7, (2, 2)))
  window, spatial = (tuple(int(v) for v in rng.integers(lo, hi, 2)) for lo, hi in ((1, 8), (7, 60)))
  each = case(8 * int(rng.integers(1, 10)), int(rng.integers(1, 9)), window, int(rng.integers(1, 7)), spatial, padding)
  check(each, "bfloat16", "bfloat16")
  check(each, "float32", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_strides(seed):
  rng = np.random.default_rng(seed)
  few = int(rng.integers(1, 9))
  window = (int(rng.integers(1, 8)), int(rng.integers(1, 1 + min(20, 56 // few))))
  layer = dict(
    gathered=8 * int(rng.integers(1, 10)), few=few, window=window, batch=int(rng.integers(1, 5)),
    apart=tuple(int(v) for v in rng.integers(1, 6, 2)),
    padding=tuple((int(a), int(b)) for a, b in rng.integers(-2, 7, (2, 2))),
  )  # fmt: skip
  for dtype in ("bfloat16", "float32"):
    check(strided(**layer, spatial=tuple(int(v) for v in rng.integers(25, 90, 2))), dtype, dtype, results="x")
    check(dilated(**layer, spatial=tuple(int(v) for v in rng.integers(3, 40, 2))), dtype, dtype, results="y")


def not_finite(shape, dtype, seed):
  """Infinities and a NaN among the gathered operands, not in the filter."""
  a = coarse(shape, dtype, seed)
  if seed != 1:
    a[0, 0, 0, -1], a[0, -1, -1, 0], a[-1, shape[1] // 2, shape[2] // 2, -1] = np.inf, -np.inf, np.nan
  return a


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("window", [(3, 3), (2, 5), (5, 5)])
def test_infinities_stay_in_their_windows(dtype, window):
  with np.errstate(invalid="ignore"):
    for gathered, few in ((24, 3), (64, 8)):
      assert check(case(gathered, few, window, 3, (9, 35), ((2, 2), (2, 2))), dtype, dtype, not_finite) == 2
      layer = min(gathered, 32), few, window, 3
      assert check(strided(*layer, (2, 2), ((2, 2), (2, 2))), dtype, dtype, not_finite, "x") == 1
      assert check(dilated(*layer, (2, 2), ((2, 2), (2, 2))), dtype, dtype, not_finite, "y") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_of_problems(dtype):
  layer = dict(padding="SAME", precision="default", algorithm=FEW_FEATURES)
  x, w = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate(((3, 2, 11, 9, 24), (3, 3, 3, 24, 5))))
  y = jax.vmap(lambda x, w: jaxdnn.conv(x, w, **layer))(x, w)
  geometry = (1, 1), SAME3, (1, 1), (1, 1)
  g, v = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate(((3, 2, 11, 9, 24), (3, 3, 3, 5, 24))))
  dx = jax.vmap(lambda g, v: jaxdnn.conv_dgrad(g, v, (11, 9), **layer))(g, v)
  for i in range(3):
    assert_close(y[i], conv_oracle(exact(x[i]), exact(w[i]), *geometry), dtype, terms=216, scale=45)
    want = conv_gradients(np.zeros((2, 11, 9, 5)), exact(v[i]), exact(g[i]), *geometry)[0]
    assert_close(dx[i], want, dtype, terms=216, scale=45)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [1, 3, 8])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", None), ("float32", None), ("bfloat16", "float32")])
def test_epilogue(features, activation, dtype, out_dtype):
  shapes = (3, 7, 18, 40), (3, 3, 40, features)
  check_epilogue(FEW_FEATURES, *shapes, dtype, out_dtype, padding="SAME", activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, out_dtype", DTYPES)
def test_epilogue_over_a_dilated_input(dtype, out_dtype):
  spec = ConvSpec((1, 1), SAME3, (2, 3), (1, 1), 1, (7, 18), (4, 4), None, FEW_FEATURES)
  for features in (1, 3, 8):
    x, w = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate(((2, 3, 7, 18, 40), (2, 4, 4, 40, features))))
    assert plan("y", x, w, spec, np.dtype(out_dtype), hopper=False)
    y_shape = (2, 3, *spec.y_spatial, features)
    b, r = (jnp.asarray(sample(s, out_dtype, i)) for i, s in ((2, (2, features)), (3, y_shape)))
    for bias, residual, kind in ((b, None, None), (None, r, "relu"), (b, r, "gelu")):
      got, want = (
        fused(x, w, bias, residual, dataclasses.replace(spec, algorithm=name), np.dtype(out_dtype), kind)
        for name in (FEW_FEATURES, "implicit_gemm")
      )
      assert_close(got, exact(want), out_dtype, terms=640, scale=3 * np.sqrt(640))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arrays_that_begin_anywhere(dtype):
  """XLA may place an operand within a larger buffer; those that are not on 16 bytes take another kernel."""
  x, w = coarse((3, 6, 7, 48), dtype), coarse((3, 3, 48, 3), dtype, 1)

  def f(flat, w, offset):
    x = jax.lax.slice(flat, (offset,), (offset + 6 * 7 * 48,)).reshape(1, 6, 7, 48)
    return jaxdnn.conv(x, w, padding=SAME3, precision="default", algorithm=FEW_FEATURES)

  for offset in (0, 1, 3):
    got = jax.jit(f, static_argnums=2)(x.reshape(-1), w, offset)
    operand = exact(x).reshape(-1)[offset:][: 6 * 7 * 48].reshape(1, 6, 7, 48)
    want = conv_oracle(operand, exact(w), (1, 1), SAME3, (1, 1), (1, 1))
    assert_close(got, want, dtype, terms=432, scale=3 * np.sqrt(432))
