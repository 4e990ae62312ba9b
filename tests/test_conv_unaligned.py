"""The kernels of unaligned channels: what they take, and problems around their limits against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check_epilogue, coarse
from conv_oracle import conv as conv_oracle
from conv_padding_checks import oracle
from jaxdnn._conv.primitives import OPERANDS, UNALIGNED, convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact

DIRECTIONS = {"forward": "y", "data_gradient": "x", "filter_gradient": "w"}
DTYPES = [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32"), ("float32",) * 2]


def algorithms(direction, c, k, dtype="bfloat16", window=(3, 3), **options):
  x = jax.ShapeDtypeStruct((options.pop("batch", 32), *options.pop("spatial", (56, 56)), c), dtype)
  w = jax.ShapeDtypeStruct((*window, c // options.get("groups", 1), k), dtype)
  return jaxdnn.conv_algorithms(x, w, direction=direction, **{"padding": "SAME", "precision": "default", **options})


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_chosen(direction, dtype):
  for c, k in ((65, 65), (64, 65), (65, 64), (129, 129), (257, 257)):
    first = next(each for each in algorithms(direction, c, k, dtype) if each.name not in ("gemm", "aligned"))
    assert first.name == first.tile == UNALIGNED, (c, k)
    assert first.exactness == ("float32 of tf32" if dtype == "float32" else "float32")
    # Partial sums, beside operands in whole chunks of 16 bits; or the filter as the kernel wants it: whole tiles of 72
    # columns, depth in whole 32 bytes.
    size = np.dtype(dtype).itemsize
    packed = {n: 32 * 57 * 57 * -(-n * size // 16) * 16 for n in (c, k)}
    assert (first.splits > 1) == (direction == "filter_gradient")
    if first.splits > 1:
      packs = packed[c] + packed[k] if dtype != "float32" else 0
      assert first.workspace_bytes >= first.splits * 9 * c * k * 4 + packs
    else:
      depth, columns = (c, k) if direction == "forward" else (k, c)
      assert first.workspace_bytes >= 9 * depth * -(-columns // 72) * 72 * size


def test_large_batches_are_packed_in_parts():
  """The filter gradient's workspace stays within its limit, which all of the operands would pass."""
  for batch in (32, 512, 4096):
    (found,) = (each for each in algorithms("filter_gradient", 65, 65, batch=batch) if each.name == UNALIGNED)
    assert found.workspace_bytes <= 256 << 20
    # The slices of a part, times the window's lines, are blocks for most of the 132 multiprocessors.
    images = (128 << 20) // (2 * 9 * 57 * 57 * 16)
    assert found.splits // -(-batch // images) * 3 >= 100 or batch == 4096


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_is_not_offered(direction):
  names = lambda *a, **k: {each.name for each in algorithms(direction, *a, **k)}  # noqa: E731
  assert UNALIGNED in names(65, 65, padding=((-1, 2), (0, 3)), dilation=2)
  assert UNALIGNED in names(65, 65, window=(3, 3, 3), spatial=(8, 8, 8))
  assert UNALIGNED in names(65, 65, window=(5,), spatial=(4000,))
  assert UNALIGNED in names(60, 60) and UNALIGNED not in names(60, 60, "float32")
  assert UNALIGNED in names(65, 65, "float32")
  assert UNALIGNED not in names(64, 64)
  assert UNALIGNED not in names(65, 65, hopper=False)
  assert UNALIGNED not in names(65, 65, stride=2)
  assert UNALIGNED not in names(66, 66, groups=2)
  assert UNALIGNED not in names(65, 65, "float64")
  assert UNALIGNED not in names(65, 65, "float32", precision="high")
  assert UNALIGNED not in names(65, 65, batch=0)


_ = ConvCase
# Filters that stay and that come in parts, one slice and several, columns in several tiles; windows whose lines a strip
# holds together or one by one; padding beyond the window and of less than nothing; several tiles to a block.
CASES = [
  _("c65k65", 2, (9, 8), 65, (3, 3), 65, padding=SAME3),
  _("c64k65", 2, (15, 14), 64, (3, 3), 65, padding=SAME3),
  _("c65k64", 2, (15, 14), 65, (3, 3), 64, padding=SAME3),
  _("c65k72", 1, (9, 8), 65, (3, 3), 72, padding=SAME3),
  _("c31k33", 1, (9, 8), 31, (3, 3), 33, padding=((0, 3), (2, -1)), rhs_dilation=(1, 2)),
  _("negative_padding", 2, (12, 11), 9, (3, 3), 20, padding=((-2, 1), (3, -3))),
  _("far_padding", 1, (6, 5), 5, (3, 2), 7, padding=((7, 0), (0, 9))),
  _("window_as_input", 3, (3, 4), 21, (3, 4), 11),
  _("c1k9", 2, (9, 8), 1, (3, 3), 9),
  _("c130k127", 2, (5, 7), 130, (1, 1), 127),
  _("c129k145", 1, (20, 19), 129, (3, 3), 145, padding=SAME3),
  _("c257k83", 1, (9, 9), 257, (3, 3), 83, padding=SAME3),
  _("wide_line", 1, (4, 400), 37, (3, 3), 41, padding=SAME3),
  _("wider_line", 1, (3, 900), 70, (3, 3), 21, padding=SAME3),
  _("5x4", 2, (9, 10), 17, (5, 4), 12, padding=((2, 2), (1, 2)), rhs_dilation=(2, 1)),
  _("1d", 3, (150,), 29, (5,), 67, padding=((2, 2),)),
  _("3d", 1, (5, 4, 6), 11, (3, 3, 3), 19, padding=((1, 1),) * 3),
  _("3d_dilated", 1, (5, 7, 9), 83, (2, 3, 2), 75, padding=((1, 2), (1, 0), (1, 1)), rhs_dilation=(2, 2, 1)),
  _("long", 90, (28, 28), 65, (3, 3), 65, padding=SAME3),
  _("long_c64k65", 80, (28, 30), 64, (3, 3), 65, padding=SAME3),
  _("long_c33k35", 80, (28, 30), 33, (3, 3), 35, padding=SAME3),
  _("long_1x1", 80, (30, 30), 67, (1, 1), 41),
  _("parts", 17, (1 << 19,), 1, (3,), 2),
]
# Elements of the input beyond the edges: in all dimensions and in some, beyond one edge, as far as there are any, and
# of the lines that a window of several planes meets.
PADDED = [
  _("circular", 2, (9, 8), 65, (3, 3), 65, padding=SAME3, padding_mode=("circular",) * 2),
  _("reflect", 2, (9, 8), 31, (3, 3), 70, padding=SAME3, padding_mode=("reflect",) * 2),
  _("replicate", 2, (6, 5), 9, (4, 3), 20, padding=((2, 4), (3, 1)), padding_mode=("replicate",) * 2),
  _("lines", 3, (7, 9), 17, (3, 3), 12, padding=SAME3, padding_mode=("reflect", "zeros")),
  _("columns", 3, (7, 9), 17, (3, 3), 12, padding=SAME3, padding_mode=("zeros", "circular")),
  _("less_than_all", 2, (9, 8), 21, (4, 5), 19, padding=((2, 0), (0, 3)), padding_mode=("circular",) * 2),
  _("cropped", 2, (9, 12), 13, (3, 3), 9, padding=((2, 1), (-1, 1)), padding_mode=("circular", "replicate")),
  _("as_wide", 4, (21,), 67, (4,), 29, padding=((18, 15),), rhs_dilation=(2,), padding_mode=("circular",)),
  _("wide_line", 1, (4, 400), 37, (3, 3), 41, padding=SAME3, padding_mode=("reflect", "circular")),
  _("3d", 2, (5, 4, 6), 11, (3, 3, 3), 19, padding=((1, 1),) * 3, padding_mode=("circular", "reflect", "zeros")),
]
LONG_PADDED = _("long", 80, (28, 28), 36, (3, 3), 37, padding=SAME3, padding_mode=("circular", "reflect"))


def check(case, dtype, out_dtype, draw=coarse):
  """Returns in how many directions the kernels take the problem."""
  modes = () if case.padding_mode == "zeros" else case.padding_mode
  spec = ConvSpec(*case.geometry, 1, case.spatial, case.window, None, UNALIGNED, padding_mode=modes)
  if min(spec.y_spatial) <= 0:
    return 0
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  arrays = {name: draw(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
  call = dict(stride=case.stride, padding=case.padding, dilation=case.rhs_dilation, groups=1)
  modes = modes or ("zeros",) * len(case.window)
  wants = dict(zip("yxw", oracle(*(arrays[name] for name in "xwy"), **call, padding_mode=modes), strict=True))
  taken = 0
  for result, want in wants.items():
    operands = {name: jnp.asarray(arrays[name])[None] for name in OPERANDS[result]}
    if not plan(result, *operands.values(), spec, np.dtype(out_dtype), hopper=True):
      continue
    taken += 1
    f = lambda a, b, r=result: convolve(r, dict(zip(OPERANDS[r], (a, b), strict=True)), spec, out_dtype)  # noqa: E731
    got = assert_repeatable(f, *operands.values(), repeats=3)
    window = int(np.prod(case.window))
    terms = {"y": window * case.c, "x": window * case.k, "w": int(np.prod(shapes["y"][:-1]))}[result]
    assert_close(got[0], want, out_dtype, terms=terms, scale=3 * np.sqrt(terms))
  return taken


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case):
  for dtype, out_dtype in DTYPES:
    assert check(case, dtype, out_dtype) == 3


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", PADDED, ids=lambda c: c.name)
def test_padding_that_is_not_zeros(case):
  for dtype in ("bfloat16", "float32"):
    assert check(case, dtype, dtype) == 3


@pytest.mark.gpu
def test_padding_of_many_images():
  for dtype in ("bfloat16", "float32"):
    assert check(LONG_PADDED, dtype, dtype) == 3


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_elements_beyond_edges_are_found_where_they_are(direction, dtype):
  """Without a frame, in as much memory: but in the data gradient, where elements stand for several positions."""

  def planned(mode):
    found = algorithms(direction, 129, 129, dtype, spatial=(28, 28), padding_mode=mode)
    return next(each for each in found if each.name == UNALIGNED)

  plain = planned("zeros")
  for mode in ("circular", "reflect", "replicate"):
    same = direction != "data_gradient" or mode == "circular"
    assert (planned(mode).microseconds < 1.1 * plain.microseconds) == same
    assert planned(mode).workspace_bytes < 1.1 * plain.workspace_bytes


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4], CASES[10], CASES[16]], ids=lambda c: c.name)
def test_kernels_under_the_sanitizer(case):
  for dtype in ("bfloat16", "float32"):
    assert check(case, dtype, dtype) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  rank = int(rng.integers(1, 4))
  small = lambda lo, hi: tuple(int(v) for v in rng.integers(lo, hi + 1, rank))  # noqa: E731
  padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 6, (rank, 2)))
  c, k = (int(v) for v in rng.integers(1, 150, 2))
  case = _(
    "random", int(rng.integers(1, 5)), small(4, 12 if rank < 3 else 6), c, small(1, 4), k, padding=padding,
    rhs_dilation=small(1, 2),
  )  # fmt: skip
  check(case, "bfloat16", "bfloat16")
  check(case, "float32", "float32")


def not_finite(shape, dtype, seed):
  """Infinities and a NaN among the gathered operands, not in the filter."""
  a = coarse(shape, dtype, seed)
  if seed != 1:
    a[0, 0, 0, -1], a[0, -1, -1, 0], a[-1, shape[1] // 2, shape[2] // 2, -1] = np.inf, -np.inf, np.nan
  return a


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_infinities_stay_in_their_windows(dtype):
  """Neither what fills up channels and columns nor pixels between the lines carries them anywhere."""
  with np.errstate(invalid="ignore"):
    for c, k in ((65, 65), (17, 30), (129, 75)):
      assert check(_("", 3, (9, 13), c, (3, 3), k, padding=SAME3), dtype, dtype, not_finite) == 3


@pytest.mark.gpu
def test_floats_are_rounded_to_nearest():
  """Not cut off: 1 + 0.75 / 1024 is 1 + 1 / 1024 in TF32, whether lines are whole chunks or not."""
  near = np.float32(1 + 0.75 / 1024)
  for c, k in ((65, 65), (64, 65), (65, 64)):
    spec = ConvSpec((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), 1, (9, 8), (1, 1), None, UNALIGNED)
    shapes = {"x": (1, 2, 9, 8, c), "w": (1, 1, 1, c, k), "y": (1, 2, 9, 8, k)}
    for result, names in OPERANDS.items():
      terms = {"y": c, "x": k, "w": 144}[result]
      for exact_one in names:
        operands = {n: jnp.full(shapes[n], 1 if n == exact_one else near, jnp.float32) for n in names}
        got = np.asarray(convolve(result, operands, spec, np.dtype(np.float32)))
        np.testing.assert_allclose(got, terms * (1 + 1 / 1024), rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [9, 65, 137])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", None), ("float32", None), ("bfloat16", "float32")])
def test_epilogue(features, activation, dtype, out_dtype):
  shapes = (3, 7, 18, 41), (3, 3, 41, features)
  check_epilogue(UNALIGNED, *shapes, dtype, out_dtype, padding="SAME", activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arrays_that_begin_anywhere(dtype):
  """Arrays that are not on 16 bytes take another kernel."""
  x, w = coarse((2, 6, 7, 48), dtype), coarse((3, 3, 48, 65), dtype, 1)

  def f(flat, w, offset):
    x = jax.lax.slice(flat, (offset,), (offset + 6 * 7 * 48,)).reshape(1, 6, 7, 48)
    return jaxdnn.conv(x, w, padding=SAME3, precision="default")

  for offset in (0, 1, 3):
    got = jax.jit(f, static_argnums=2)(x.reshape(-1), w, offset)
    operand = exact(x).reshape(-1)[offset:][: 6 * 7 * 48].reshape(1, 6, 7, 48)
    want = conv_oracle(operand, exact(w), (1, 1), SAME3, (1, 1), (1, 1))
    assert_close(got, want, dtype, terms=432, scale=3 * np.sqrt(432))
