"""Many problems at once, each with a filter of its own, by Hopper's general kernels, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import WGMMA_TILES, check, coarse, parameters, takes
from conv_oracle import out_spatial
from jaxdnn._conv.primitives import OPERANDS, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, exact, sample

WGMMA = "implicit_gemm_wgmma"
TILES = [tile for tile in WGMMA_TILES if "copied" not in tile]
_ = ConvCase
# Problems of whole tiles, and those whose last rows and pixels of a step are the next one's; phases, alike or not.
CASES = [
  _("whole", 2, (8, 16), 64, (3, 3), 64, padding=SAME3),
  _("tail", 1, (7, 7), 64, (3, 3), 72, padding=SAME3),
  _("1x1", 2, (6, 5), 128, (1, 1), 136),
  _("strided", 2, (9, 11), 24, (3, 3), 40, (2, 2), SAME3),
  _("side_by_side", 2, (8, 8), 32, (2, 2), 64, (2, 2)),
  _("1d", 3, (50,), 64, (5,), 128, padding=((2, 2),)),
  _("3d", 1, (5, 4, 6), 16, (3, 3, 3), 24, padding=((1, 1),) * 3),
]
TRANSPOSED = _("transposed", 2, (5, 6), 32, (4, 4), 24, padding=((2, 2),) * 2, lhs_dilation=(2, 2))


def has_workspace_for_copies(tile, dtype):
  """Forward in TF32 these copy the filter first, which is done for one problem alone."""
  return dtype == "float32" and tile in ("wgmma 128x160", "wgmma 128x256")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("result", "yxw")
def test_is_chosen(result, dtype):
  """For problems that no kernel of few channels takes, and of one image each, as of gradients of single examples."""
  for batch, channels, window in ((1, 64, 3), (8, 128, 3), (4, 256, 1)):
    spatial, padding = (32, 32), ((window // 2,) * 2,) * 2
    spec = ConvSpec((1, 1), padding, (1, 1), (1, 1), 1, spatial, (window,) * 2, None, None)
    pixels, w = (64, batch, *spatial, channels), (64, window, window, channels, channels)
    shapes = {"x": pixels, "w": w, "y": pixels}
    operands = [jax.ShapeDtypeStruct(shapes[name], dtype) for name in OPERANDS[result]]
    chosen = plan(result, *operands, spec, np.dtype(dtype), hopper=True)
    assert chosen["algorithm"] == WGMMA and chosen["cluster"] == 1
    assert result == "w" or chosen["workspace_bytes"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("tile", parameters(TILES))
def test_kernels(tile, case):
  for dtype, out_dtype in (("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32"), ("float32",) * 2):
    results = "xw" if has_workspace_for_copies(tile, dtype) else "yxw"
    check(case, tile, dtype, out_dtype, models=3, results=results)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("tile", ["wgmma 128x128", "wgmma 128x64"])
def test_three_products(tile, case):
  check(case, tile, "float32", "float32", (lax.Precision.HIGH,) * 2, sample, models=3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_transposed(tile):
  for dtype in ("bfloat16", "float32"):
    check(TRANSPOSED, tile, dtype, dtype, models=2, results="x" if has_workspace_for_copies(tile, dtype) else "yx")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  rank = int(rng.integers(1, 4))
  small = lambda lo, hi: tuple(int(v) for v in rng.integers(lo, hi + 1, rank))  # noqa: E731
  c, k = (8 * int(n) for n in rng.integers(1, 20, 2))
  padding = tuple((int(a), int(b)) for a, b in rng.integers(0, 3, (rank, 2)))
  case = _("random", int(rng.integers(1, 4)), small(3, (60, 14, 6)[rank - 1]), c, small(1, 3), k, small(1, 2), padding,
           rhs_dilation=small(1, 2))  # fmt: skip
  if min(out_spatial(case.spatial, case.window, *case.geometry)) > 0:
    for dtype in ("bfloat16", "float32"):
      check(case, WGMMA, dtype, dtype, models=int(rng.integers(2, 6)))


def not_finite(shape, dtype, seed):
  """Infinities and a NaN at the ends of x and y, of all problems but the first."""
  a = coarse(shape, dtype, seed)
  if seed % 3 != 1 and seed >= 3:
    a[0, 0, 0, -1], a[0, -1, -1, 0], a[-1, shape[1] // 2, shape[2] // 2, -1] = np.inf, -np.inf, np.nan
  return a


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_infinities_stay_in_their_problem(dtype):
  """The pixels that a step reads beyond its problem's last are the next one's."""
  with np.errstate(invalid="ignore"):
    for case in CASES[1:4]:
      for tile in ("wgmma 64x64", "wgmma 128x128", "wgmma 128x256"):
        results = "".join(r for r in "yxw" if takes(tile, r, dtype, dtype))
        if has_workspace_for_copies(tile, dtype):
          results = results.replace("y", "")
        check(case, tile, dtype, dtype, draw=not_finite, models=3, results=results)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["wgmma 64x64", "wgmma 128x128", "wgmma 96x128 across", "wgmma 256x160"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("size", [(7, 9), (8, 8)])
def test_epilogue(tile, activation, size):
  """Bias and residual too are each problem's own, which end within a tile or do not."""
  shapes = ((3, 2, *size, 64), (3, 3, 3, 64, 136), (3, 136), (3, 2, *size, 136))
  x, w, b, r = (jnp.asarray(sample(s, "bfloat16", i)) for i, s in enumerate(shapes))

  def layer(name):
    def one(x, w, b, r):
      return jaxdnn.conv(x, w, b, residual=r, padding="SAME", activation=activation, algorithm=name)

    return jax.vmap(one)(x, w, b, r)

  got, want = layer(tile), layer("implicit_gemm")
  assert_close(got, exact(want), "bfloat16", terms=576, scale=72)
