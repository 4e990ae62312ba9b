"""Groups of whole lines and tiles, by Hopper's general kernels, against the float64 oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import WGMMA_TILES, check, check_epilogue, parameters, planned, takes
from numerics import exact, sample

WGMMA = "implicit_gemm_wgmma"
_ = ConvCase
CASES = [
  _("two", 2, (7, 6), 128, (3, 3), 256, padding=SAME3, groups=2),  # of 64 channels and 128 features
  _("three", 1, (6, 9), 384, (3, 3), 384, padding=SAME3, groups=3),
  _("strided", 2, (9, 11), 256, (3, 3), 256, (2, 2), SAME3, groups=2),
  _("phases", 1, (5, 6), 256, (4, 4), 256, padding=((2, 2),) * 2, lhs_dilation=(2, 2), groups=2),
  _("1x1", 3, (8, 8), 512, (1, 1), 512, groups=4),
  _("3d", 1, (4, 3, 5), 128, (3, 3, 3), 128, padding=((1, 1),) * 3, groups=2),
  _("320", 1, (6, 5), 640, (3, 3), 640, padding=SAME3, groups=2),  # two tiles of 160 columns
]


def test_is_chosen():
  """Where each step and tile is of one group, and the filter need not be copied first."""
  case = _("", 32, (28, 28), 256, (3, 3), 256, padding=SAME3, groups=2)
  for result in "yxw":
    assert planned(case, result)["algorithm"] == WGMMA
  assert planned(case, "y", "float32", "wgmma 128x128") and planned(case, "y", "float32", "wgmma 128x160") is None
  assert planned(case, "w", "float32")["algorithm"] == WGMMA
  for channels, features, results in ((96, 128, ""), (64, 96, ""), (64, 192, "yxw"), (128, 64, "yxw")):
    case = _("", 8, (28, 28), 2 * channels, (3, 3), 2 * features, padding=SAME3, groups=2)
    taken = "".join(result for result in "yxw" if planned(case, result, algorithm="wgmma 64x64"))
    assert taken == results, (channels, features)
  assert planned(_("", 8, (28, 28), 128, (3, 3), 256, padding=SAME3, groups=2), "x", algorithm="wgmma 128x128") is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("tile", parameters(WGMMA_TILES))
def test_kernels(tile, case):
  for dtype, out_dtype in (("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32"), ("float32",) * 2):
    results = [r for r in "yxw" if takes(tile, r, dtype, out_dtype) and planned(case, r, dtype, tile, out_dtype)]
    check(case, tile, dtype, out_dtype, results="".join(results))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["wgmma 64x64", "wgmma 128x128", "wgmma 128x64", "wgmma 96x128 across"])
@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", None), ("float16", "float32"), ("float32", None)])
def test_epilogue(tile, dtype, out_dtype):
  if takes(tile, "y", dtype, out_dtype or dtype):
    layer = dict(padding="SAME", groups=2, activation="gelu")
    check_epilogue(tile, (2, 8, 8, 256), (3, 3, 128, 256), dtype, out_dtype, **layer)


@pytest.mark.gpu
def test_infinities_stay_in_their_group():
  pixels = (2, 8, 8, 256)
  x, w, g = (sample(shape, "bfloat16", i) for i, shape in enumerate((pixels, (3, 3, 128, 256), pixels)))
  x[0, 3, 3, 5], g[1, 4, 4, 7] = np.inf, np.nan
  layer = dict(padding="SAME", groups=2, algorithm="wgmma 128x128")
  results = (
    jaxdnn.conv(x, w, **layer), jaxdnn.conv_dgrad(jnp.asarray(g), w, (8, 8), **layer),
    jaxdnn.conv_wgrad(x, jnp.asarray(g), (3, 3), **layer),
  )  # fmt: skip
  for result in results:
    halves = np.isfinite(exact(result)[..., :128]), np.isfinite(exact(result)[..., 128:])
    assert not halves[0].all() and halves[1].all()
