"""Problems enlarged to what the fast kernels take: which ones, their values, and that nothing of the zeros shows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import coarse
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn import _extension
from jaxdnn._conv import aligned
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact, sample

built = pytest.mark.skipif(not _extension.TARGETS, reason="the CUDA kernels were not built")

CASES = [
  ConvCase("channels", 2, (9, 8), 13, (3, 3), 24, padding=SAME3),
  ConvCase("features", 2, (9, 8), 16, (3, 3), 13, (2, 1), SAME3),
  ConvCase("both", 3, (7, 5), 17, (3, 3), 33, padding=SAME3, rhs_dilation=(2, 1)),
  ConvCase("1d", 2, (40,), 65, (3,), 63, (2,)),
  ConvCase("3d", 1, (5, 6, 4), 7, (3, 3, 3), 9, padding=((1, 1),) * 3),
  ConvCase("transposed", 2, (6, 5), 6, (3, 3), 9, padding=((2, 1), (1, 2)), lhs_dilation=(2, 3)),
  ConvCase("depthwise", 2, (9, 9), 33, (3, 3), 33, padding=SAME3, groups=33),
  ConvCase("multiplier", 2, (9, 10), 13, (3, 3), 26, (2, 2), SAME3, groups=13),
  ConvCase("groups", 2, (7, 6), 15, (3, 3), 25, padding=SAME3, groups=5),
  ConvCase("windows left over", 2, (19, 23), 3, (4, 4), 40, (4, 4)),
  ConvCase("windows and channels", 2, (11, 8, 5), 5, (2, 2, 2), 9, (2, 2, 2)),
]


def calls(case, **more):
  """For y, x and w: the public function that computes it, and the names of its operands."""
  layer = {"stride": case.stride, "padding": case.padding, "dilation": case.rhs_dilation, "groups": case.groups} | more
  spatial, window = case.x_shape[1:-1], case.w_shape[:-2]
  if any(d > 1 for d in case.lhs_dilation):
    f = functools.partial(
      jaxdnn.conv_general_dilated, window_strides=case.stride, padding=case.padding, lhs_dilation=case.lhs_dilation,
      rhs_dilation=case.rhs_dilation, dimension_numbers=("NHWC", "HWIO", "NHWC"), **more,
    )  # fmt: skip
    return {"y": (f, "xw")}
  return {
    "y": (functools.partial(jaxdnn.conv, **layer), "xw"),
    "x": (lambda y, w: jaxdnn.conv_dgrad(y, w, spatial, **layer), "yw"),
    "w": (lambda x, y: jaxdnn.conv_wgrad(x, y, window, **layer), "xy"),
  }


def drawn(case, dtype, draw=coarse):
  spec = ConvSpec(*case.geometry, case.groups, case.spatial, case.window, None)
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  return {name: draw(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


def wanted(case, arrays):
  x, w, y = (exact(arrays[name]) for name in "xwy")
  dx, dw = conv_gradients(x, w, y, *case.geometry, case.groups)
  return {"y": conv_oracle(x, w, *case.geometry, case.groups), "x": dx, "w": dw}


def check(case, dtype, run, **more):
  arrays = drawn(case, dtype)
  wants = wanted(case, arrays)
  for result, (f, names) in calls(case, algorithm=aligned.NAME, **more).items():
    got = run(f, *(jnp.asarray(arrays[name]) for name in names))
    terms = wants["y"].size * int(np.prod(case.w_shape[:-1])) // wants[result].size
    assert_close(got, wants[result], dtype, terms=terms, scale=3 * np.sqrt(terms))


@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_oracle(case, dtype):
  check(case, dtype, lambda f, *operands: f(*operands))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_against_the_oracle(case, dtype):
  check(case, dtype, functools.partial(assert_repeatable, repeats=3), precision="default")


@built
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_zeros_meet_nothing_that_is_not_finite(bad):
  """Elements that no window reads stay unread, and channels of zeros do not make others NaN."""
  case = next(c for c in CASES if c.name == "windows left over")
  arrays = drawn(case, "float32")
  arrays["x"][:, 16:], arrays["x"][:, :, 20:] = bad, bad
  wants = wanted(case, arrays | {"x": np.nan_to_num(arrays["x"], posinf=0)})
  for result, (f, names) in calls(case, algorithm=aligned.NAME).items():
    got = f(*(jnp.asarray(arrays[name]) for name in names))
    np.testing.assert_allclose(exact(got), wants[result], rtol=1e-4, atol=1e-3)
  case = CASES[0]
  arrays = drawn(case, "float32")
  arrays["w"][0, 0, 0, 0] = arrays["x"][0, 2, 2, 1] = arrays["y"][0, 1, 1, 1] = bad
  for result, (f, names) in calls(case, algorithm=aligned.NAME).items():
    plain, _ = calls(case)[result]
    got, want = (exact(g(*(jnp.asarray(arrays[name]) for name in names))) for g in (f, plain))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


def algorithms(x_shape, w_shape, direction="forward", dtype="bfloat16", **layer):
  x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in (x_shape, w_shape))
  return jaxdnn.conv_algorithms(x, w, direction=direction, **{"precision": "default", **layer})


@built
@pytest.mark.parametrize("direction", ["forward", "data_gradient", "filter_gradient"])
def test_is_chosen_where_the_copies_pay(direction):
  long = algorithms((4, 8000, 511), (3, 511, 511), direction, stride=2)
  assert long[0].name == aligned.NAME and long[0].workspace_bytes >= 2 * 4 * 512 * (8000 + 3999)
  assert algorithms((4, 8000, 512), (3, 512, 512), direction, stride=2)[0].name == "implicit_gemm_wgmma"
  patches = algorithms((32, 225, 225, 3), (16, 16, 3, 768), direction, stride=16)
  implicit = [each for each in patches if each.name != "gemm"]
  assert implicit[0].name == aligned.NAME and implicit[0].tile.startswith("wgmma")
  wide = algorithms((4, 56, 56, 127), (31, 31, 1, 127), direction, padding="SAME", groups=127)
  assert wide[0].name == aligned.NAME and wide[0].tile == "depthwise"


@built
def test_channels_become_whole_lines_where_reading_gains_more_than_copying_loses():
  for c, dtype, wanted in ((257, "bfloat16", 320), (257, "float32", 288), (511, "bfloat16", 512)):
    spec = ConvSpec((1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), 1, (56, 56), (3, 3), None)
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 32, 56, 56, c), (1, 3, 3, c, c)))
    for result, a, b in (("y", x, w), ("x", x, w)):
      choice = aligned.choose(result, a, b, spec, np.dtype(dtype))
      assert (choice.wanted.c, choice.wanted.k) == (wanted, wanted)
      assert choice.copies_bytes >= 2 * 32 * 56 * 56 * wanted * np.dtype(dtype).itemsize


@built
def test_is_not_offered():
  for x_shape, w_shape, layer in (
    ((8, 28, 28, 64), (3, 3, 64, 64), {}),
    ((8, 28, 28, 136), (3, 3, 136, 136), {}),
    ((8, 28, 28, 64), (3, 3, 1, 64), {"groups": 64}),
    ((8, 28, 28, 64), (3, 3, 8, 64), {"groups": 8}),
    ((8, 32, 32, 8), (4, 4, 8, 64), {"stride": 4}),
    ((8, 33, 33, 8), (4, 4, 8, 64), {"stride": 4, "padding": ((0, 3), (0, 3))}),
    ((0, 28, 28, 65), (3, 3, 65, 65), {}),
    ((8, 28, 28, 65), (3, 3, 65, 65), {"dtype": "float64"}),
    ((8, 28, 28, 65), (3, 3, 65, 65), {"workspace_limit": 1000}),
  ):
    assert aligned.NAME not in [each.name for each in algorithms(x_shape, w_shape, **layer)]


@built
def test_refuses_by_name():
  x, w = jnp.zeros((2, 8, 8, 16), "float32"), jnp.zeros((3, 3, 16, 32), "float32")
  with pytest.raises(ValueError, match=r"conv_fwd: algorithm='aligned' takes .* got float32\[1, 2, 8, 8, 16\]"):
    jaxdnn.conv(x, w, algorithm=aligned.NAME)


def program(f, *shapes):
  operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
  return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@built
def test_the_program_has_the_larger_problem():
  x, w = (4, 8000, 511), (3, 511, 511)
  layer = functools.partial(jaxdnn.conv, stride=2)
  text = program(layer, x, w)
  assert text.count("@jaxdnn.transform.v1") == 3
  assert re.search(r"@jaxdnn.conv_fwd.*tensor<1x4x8000x512xbf16>, tensor<1x3x512x512xbf16>", text)
  fused = program(lambda x, w, b, r: layer(x, w, b, residual=r, activation="relu"), x, w, (511,), (4, 3999, 511))
  assert fused.count("@jaxdnn.transform.v1") == 5 and 'activation = "relu"' in fused
  named = program(functools.partial(layer, algorithm="implicit_gemm_mma"), x, w)
  assert "@jaxdnn.transform.v1" not in named
  limited = program(functools.partial(layer, workspace_limit=0), x, w)
  assert "@jaxdnn.transform.v1" not in limited


@pytest.mark.gpu
def test_is_what_runs():
  """The same bits by default as by name, also with bias, residual and activation in the kernel."""
  shapes = (4, 8000, 511), (3, 511, 511), (4, 7998, 511), (511,)
  x, w, y, b = (jnp.asarray(sample(shape, "bfloat16", seed)) for seed, shape in enumerate(shapes))
  for f, operands in (
    (jaxdnn.conv, (x, w)),
    (lambda y, w, **more: jaxdnn.conv_dgrad(y, w, (8000,), **more), (y, w)),
    (lambda x, y, **more: jaxdnn.conv_wgrad(x, y, (3,), **more), (x, y)),
  ):
    np.testing.assert_array_equal(exact(jax.jit(f)(*operands)), exact(f(*operands, algorithm=aligned.NAME)))
  got = assert_repeatable(lambda *a: jaxdnn.conv(*a[:3], residual=a[3], activation="relu"), x, w, b, y)
  want = np.maximum(conv_oracle(exact(x), exact(w), (1,), ((0, 0),), (1,), (1,), 1) + exact(b) + exact(y), 0)
  assert_close(got, want, "bfloat16", terms=3 * 511, scale=3 * np.sqrt(3 * 511))
