"""The kernels of small groups: what they take, and problems around their limits against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conv_checks
import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import check_epilogue, coarse, not_finite
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients, out_spatial
from jaxdnn._conv.primitives import GROUPED
from numerics import assert_close, exact

RESULTS = {"forward": "y", "data_gradient": "x", "filter_gradient": "w"}


def algorithms(direction, channels, groups, dtype="bfloat16", window=(3, 3), features=None, **options):
  x = jax.ShapeDtypeStruct((options.pop("batch", 32), *options.pop("spatial", (56, 56)), channels * groups), dtype)
  w = jax.ShapeDtypeStruct((*window, channels, (features or channels) * groups), dtype)
  options = {"padding": SAME3, "precision": "default", "groups": groups, **options}
  return jaxdnn.conv_algorithms(x, w, direction=direction, **options)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("direction", RESULTS)
@pytest.mark.parametrize("stride", [1, 2])
def test_is_chosen(direction, stride, hopper):
  for dtype in ("bfloat16", "float16", "float32"):
    for channels, groups in ((4, 32), (8, 32), (16, 28), (2, 64), (2, 8), (4, 12), (8, 19)):
      first = algorithms(direction, channels, groups, dtype, stride=stride, hopper=hopper)[0]
      if (dtype, direction, channels, stride) == ("float32", "filter_gradient", 4, 2):
        assert first.tile == "simt runs" and first.exactness == "float32"  # the CUDA cores take no longer
        continue
      assert first.name == first.tile == GROUPED
      assert first.exactness == ("float32 of tf32" if dtype == "float32" else "float32")
      assert (first.workspace_bytes > 0) == (first.splits > 1) == (direction == "filter_gradient")
  if direction != "filter_gradient":
    assert algorithms(direction, 24, 17, stride=stride, hopper=hopper)[0].name == GROUPED


def test_other_small_groups():
  """Channels that are no whole 16 bytes: of few columns, the CUDA cores are ahead of tensor cores' tiles left empty."""
  first = lambda *args, **options: algorithms("forward", *args, **options)[0].tile  # noqa: E731
  volume = {"window": (1, 3, 3), "spatial": (39, 39, 39), "padding": ((0, 0), (1, 1), (1, 1)), "batch": 5}
  for dtype in ("bfloat16", "float16"):
    assert first(2, 2, dtype, **volume) == "simt 128x8"
    assert first(2, 23, dtype, batch=121, spatial=(33, 33), stride=4) == "simt 128x8"
  assert first(2, 2, "float64", precision="highest", **volume) == "simt 64x32"


@pytest.mark.parametrize("direction", RESULTS)
def test_is_not_offered(direction):
  names = lambda *a, **k: {each.name for each in algorithms(direction, *a, **k)}  # noqa: E731
  assert GROUPED in names(4, 32, padding=((-1, 2), (0, 3)))
  assert GROUPED not in names(4, 31)  # 124 channels
  assert GROUPED not in names(1, 32)
  assert GROUPED not in names(32, 4)
  assert GROUPED not in names(16, 1)
  assert (GROUPED in names(24, 2)) == (direction != "filter_gradient")
  assert GROUPED not in names(24, 2, "float32")
  assert GROUPED not in names(24, 2, window=(3, 3, 3), spatial=(8, 8, 8), padding="SAME")
  assert GROUPED not in names(4, 32, features=8)
  assert GROUPED not in names(4, 32, window=(5, 5))
  assert GROUPED not in names(4, 32, window=(1, 3), padding=((0, 0), (1, 1)))
  assert GROUPED not in names(4, 32, stride=3)
  assert GROUPED not in names(4, 32, stride=(1, 2))
  assert GROUPED not in names(4, 32, dilation=2)
  assert GROUPED not in names(4, 32, "float64")
  assert GROUPED not in names(4, 32, "float32", precision="high")
  assert GROUPED not in names(4, 32, batch=0)
  volume = dict(window=(3, 3, 3), spatial=(8, 8, 8), padding="SAME")
  of_planes = direction == "filter_gradient"
  assert GROUPED in names(4, 32, **volume)
  assert GROUPED not in names(4, 32, stride=2, **volume)
  assert (GROUPED in names(4, 32, stride=(1, 2, 2), **volume)) == of_planes
  assert (GROUPED in names(4, 32, **{**volume, "window": (4, 3, 3)})) == of_planes
  assert (GROUPED in names(16, 4, "float32", **volume)) == of_planes  # else a filter of too many registers
  assert GROUPED not in names(4, 32, window=(3,), spatial=(56,), padding="SAME")


def case(channels, groups, batch, spatial, stride=1, padding=SAME3):
  name = f"{groups}x{channels}@{'x'.join(map(str, spatial))}s{stride}"
  return ConvCase(name, batch, spatial, groups * channels, (3, 3), groups * channels, (stride,) * 2, padding,
                  groups=groups)  # fmt: skip


def volume(channels, groups, batch, spatial, padding=((1, 1),) * 3, window=3, stride=1):
  name = f"{window}x3x3.{groups}x{channels}@{'x'.join(map(str, spatial))}s{stride}"
  return ConvCase(name, batch, spatial, groups * channels, (window, 3, 3), groups * channels, (1, stride, stride),
                  padding, groups=groups)  # fmt: skip


PADDINGS = (
  ((0, 0), (0, 0)), ((2, 2), (2, 2)), ((0, 1), (0, 1)), ((1, 0), (2, 1)), ((-1, 2), (1, -1)), ((3, 0), (0, 4)),
)  # fmt: skip
# Every width of groups, and widths of lines around a warp's columns and of less, where several images lie side by side;
# parts of the channels that are not full (48, 40 and 24 channels); more tiles than warps.
CASES = [
  *(
    case(channels, 48 // channels if n % 2 else 64 // channels, 1 + n % 5, (1 + n % 7, width), 1 + n // 8 % 2)
    for channels in (2, 4, 8, 16)
    for n, width in enumerate((1, 5, 14, 15, 16, 17, 31, 56, 1, 5, 14, 15, 16, 17, 31, 56))
  ),
  *(
    case(24, 2 + n % 3, 1 + n % 5, (1 + n % 7, width), 1 + n // 8 % 2)
    for n, width in enumerate((1, 5, 14, 15, 16, 17, 31, 56, 1, 5, 14, 15, 16, 17, 31, 56))
  ),
  *(case(4, 8, 3, (9, 12), stride, padding) for stride in (1, 2) for padding in PADDINGS),
  *(case(n, 3, 2, (8, 9), stride, padding) for n in (16, 24) for stride in (1, 2) for padding in PADDINGS),
  *(case(channels, 24 // channels, 2, (6, 19), stride) for channels in (2, 4, 8) for stride in (1, 2)),
  case(8, 5, 3, (7, 14)),
  case(4, 32, 40, (40, 33)),
  case(8, 16, 40, (41, 34), 2),
  case(24, 17, 40, (14, 14)),
]


VOLUMES = [
  *(volume(channels, 48 // channels, 1 + n, (1 + n, 5 + n, 13 + 4 * n)) for n, channels in enumerate((2, 4, 8, 16))),
  volume(4, 6, 2, (3, 4, 9), ((2, 0), (0, 1), (1, 3))),
  volume(8, 4, 1, (6, 7, 12), ((-1, 2), (1, -1), (0, 0))),
  volume(8, 16, 3, (9, 14, 33)),
]
# For the filter gradient alone: other depths of the window, and strides.
PLANES = [
  volume(4, 6, 2, (5, 8, 9), ((3, 2), (0, 1), (1, 3)), window=4),
  volume(16, 3, 1, (4, 9, 18), ((1, 1),) * 3, window=2, stride=2),
  volume(8, 3, 3, (6, 11, 20), ((-1, 0), (1, 1), (1, 1)), window=5, stride=2),
  volume(2, 8, 2, (3, 7, 17), ((0, 0), (1, 1), (1, 1)), window=1),
]


def check(case, dtype, out_dtype, draw=coarse):
  depth, channels = case.window[0], case.c // case.groups
  of_planes = len(case.window) == 3 and (depth != 3 or case.stride[1] > 1 or (dtype == "float32" and channels == 16))
  results = "w" if of_planes else "yx" if channels == 24 else "yxw"
  if channels == 24 and dtype == "float32":
    return  # such have no kernel here
  if min(out_spatial(case.spatial, case.window, *case.geometry)) > 0:
    conv_checks.check(case, GROUPED, dtype, out_dtype, draw=draw, results=results)


@pytest.mark.gpu
@pytest.mark.parametrize(
  "dtype, out_dtype", [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32"), ("float32",) * 2]
)
def test_kernels(dtype, out_dtype):
  for each in CASES:
    check(each, dtype, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("each", [*VOLUMES, *PLANES], ids=lambda c: c.name)
def test_volumes(each):
  for dtype, out_dtype in (("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32"), ("float32",) * 2):
    check(each, dtype, out_dtype)
    with np.errstate(invalid="ignore"):
      check(each, dtype, out_dtype, not_finite)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_under_the_sanitizer(dtype):
  check(VOLUMES[4], dtype, dtype)
  check(PLANES[0], dtype, dtype)
  for channels, stride in ((4, 1), (4, 2), (16, 1), (16, 2), (24, 1), (24, 2)):
    check(case(channels, 48 // channels, 3, (5, 9), stride, PADDINGS[3]), dtype, dtype)
    with np.errstate(invalid="ignore"):
      check(case(channels, 48 // channels, 3, (5, 9), stride), dtype, dtype, not_finite)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  channels = int(rng.choice([2, 4, 8, 16, 24]))
  padding = tuple((int(a), int(b)) for a, b in rng.integers(-2, 5, (2, 2)))
  spatial = tuple(int(v) for v in rng.integers(4, 40, 2))
  groups = max(1, 8 // channels) * int(rng.integers(2, 17))
  each = case(channels, groups, int(rng.integers(1, 9)), spatial, int(rng.integers(1, 3)), padding)
  check(each, "bfloat16", "bfloat16")
  check(each, "float32", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("channels", [2, 4, 8, 16, 24])
@pytest.mark.parametrize("stride", [1, 2])
def test_infinities_stay_in_their_group(dtype, channels, stride):
  with np.errstate(invalid="ignore"):
    check(case(channels, max(2, 64 // channels), 3, (9, 18), stride), dtype, dtype, not_finite)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stride", [1, 2])
def test_batch_of_problems(dtype, stride):
  x, w = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate(((3, 2, 11, 9, 48), (3, 3, 3, 4, 48))))
  layer = dict(stride=stride, padding=SAME3, groups=12, precision="default", algorithm=GROUPED)
  y = jax.vmap(lambda x, w: jaxdnn.conv(x, w, **layer))(x, w)
  g = jnp.asarray(coarse(y.shape, dtype, 2))
  dx = jax.vmap(lambda g, w: jaxdnn.conv_dgrad(g, w, (11, 9), **layer))(g, w)
  dw = jax.vmap(lambda x, g: jaxdnn.conv_wgrad(x, g, (3, 3), **layer))(x, g)
  geometry = (stride,) * 2, SAME3, (1, 1), (1, 1), 12
  for i in range(3):
    operands = [exact(a[i]) for a in (x, w, g)]
    assert_close(y[i], conv_oracle(*operands[:2], *geometry), dtype, terms=36, scale=12)
    want_dx, want_dw = conv_gradients(*operands, *geometry)
    assert_close(dx[i], want_dx, dtype, terms=36, scale=12)
    assert_close(dw[i], want_dw, dtype, terms=g[i].size // 48, scale=20)


@pytest.mark.gpu
@pytest.mark.parametrize("channels, stride", [(4, 1), (8, 2), (16, 1), (24, 1), (24, 2)])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", None), ("float32", None), ("bfloat16", "float32")])
def test_epilogue(channels, stride, activation, dtype, out_dtype):
  if channels == 24 and dtype == "float32":
    pytest.skip("groups of 24 are of 16-bit floats")
  each = case(channels, 48 // channels, 3, (7, 18), stride)
  layer = dict(stride=stride, padding=SAME3, groups=each.groups, activation=activation)
  check_epilogue(GROUPED, each.x_shape, each.w_shape, dtype, out_dtype, **layer)


@pytest.mark.gpu
def test_infinities_and_an_epilogue():
  conv_checks.check_infinities_in_groups(GROUPED, (3, 3), SAME3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arrays_that_begin_anywhere(dtype):
  """XLA may place an operand within a larger buffer; those that are not on 16 bytes take another kernel."""
  each = case(4, 12, 1, (6, 7))
  x, w, g = coarse((3, 6, 7, 48), dtype), coarse(each.w_shape, dtype, 1), coarse((1, 6, 7, 48), dtype, 2)
  layer = dict(padding=SAME3, groups=12, precision="default", algorithm=GROUPED)

  def sliced(flat, offset):
    return jax.lax.slice(flat, (offset,), (offset + 6 * 7 * 48,)).reshape(1, 6, 7, 48)

  def forward(flat, w, offset):
    return jaxdnn.conv(sliced(flat, offset), w, **layer)

  def filter_gradient(flat, g, offset):
    return jaxdnn.conv_wgrad(sliced(flat, offset), g, (3, 3), **layer)

  for offset in (0, 1, 3):
    moved = exact(x).reshape(-1)[offset:][: 6 * 7 * 48].reshape(1, 6, 7, 48)
    got = jax.jit(forward, static_argnums=2)(x.reshape(-1), w, offset)
    assert_close(got, conv_oracle(moved, exact(w), *each.geometry, 12), dtype, terms=36, scale=12)
    dw = jax.jit(filter_gradient, static_argnums=2)(x.reshape(-1), g, offset)
    want = conv_gradients(moved, exact(w), exact(g), *each.geometry, 12)[1]
    assert_close(dw, want, dtype, terms=42, scale=20)
