"""Hopper's kernels with an image's edges apart: windows that leave it do without taps that meet padding alone."""

import jax.numpy as jnp
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import WGMMA_TILES, check, check_epilogue, planned, takes
from jaxdnn._conv.primitives import EDGES
from numerics import sample

DILATED = ConvCase("dilated", 3, (19, 17), 64, (3, 3), 72, padding=((6, 6), (5, 5)), rhs_dilation=(6, 5))
# Where the windows that begin beside an image and those that end there are the same; windows of the padding alone;
# more pixels than windows; uneven padding; one dimension and three; steps; and a dilated input.
CASES = [
  ConvCase("7x7", 5, (7, 7), 128, (3, 3), 64, padding=SAME3),
  DILATED,
  ConvCase("narrow", 4, (9, 5), 64, (3, 3), 64, padding=((6, 6), (4, 4)), rhs_dilation=(6, 4)),
  ConvCase("beside", 2, (6, 8), 64, (3, 3), 64, padding=((5, 4), (3, 6))),
  ConvCase("cropped", 2, (11, 9), 64, (4, 5), 64, padding=((-1, 3), (4, -2))),
  ConvCase("even", 3, (8, 10), 72, (2, 4), 136, padding=((1, 0), (2, 1))),
  ConvCase("1d", 6, (33,), 64, (5,), 128, padding=((8, 8),), rhs_dilation=(4,)),
  ConvCase("3d", 2, (4, 6, 5), 64, (3, 3, 3), 64, padding=((1, 1),) * 3),
  ConvCase("strided", 3, (15, 14), 64, (5, 3), 64, (2, 1), padding=((2, 2), (1, 1))),
  ConvCase("holes", 2, (7, 6), 64, (3, 3), 64, padding=((2, 2), (2, 2)), lhs_dilation=(1, 2)),
]
TILES = [
  "wgmma 128x128", "wgmma 256x64", "wgmma 64x128", "wgmma 128x160", "wgmma 128x256", "wgmma 192x128 across",
  "wgmma 96x128 across",
]  # fmt: skip


def results_of(case):
  """Where an image has more padding than a window is wide, its gradient meets none, and no tap meets all of it."""
  return {"beside": "y", "holes": "y"}.get(case.name, "yxw")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("result", ["y", "x"])
def test_chosen_where_much_is_padding(result, dtype):
  """Nearly half of what a window with a dilation of 12 meets around 33x33 pixels, and nothing of a window of one."""
  aspp = ConvCase("", 32, (33, 33), 2048, (3, 3), 256, padding=((12, 12),) * 2, rhs_dilation=(12, 12))
  apart = planned(aspp, result, dtype, None)
  assert apart["tile"].endswith(EDGES)
  whole = planned(aspp, result, dtype, apart["tile"].removesuffix(EDGES))
  assert whole["tile"] + EDGES == apart["tile"] and apart["cycles"] < 0.75 * whole["cycles"]
  assert apart["workspace_bytes"] == whole["workspace_bytes"]
  for padding, window in ((((0, 0),) * 2, (3, 3)), (((0, 0),) * 2, (1, 1))):
    none = ConvCase("", 32, (33, 33), 256, window, 256, padding=padding)
    if result == "y":
      assert planned(none, result, dtype, "wgmma 128x128" + EDGES) is None


def test_names():
  x, w = jnp.zeros((2, 7, 7, 64), "bfloat16"), jnp.zeros((3, 3, 64, 64), "bfloat16")
  for name in ("mma 128x64" + EDGES, "direct" + EDGES):
    with pytest.raises(ValueError, match=f"algorithm='{name}' cannot do this problem"):
      jaxdnn.conv(x, w, padding="SAME", algorithm=name)
  with pytest.raises(ValueError, match="algorithm must be None or one of"):
    jaxdnn.conv(x, w, padding="SAME", algorithm=EDGES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_edges_of_every_case(case):
  for result in "yxw":
    has_edges = planned(case, result, algorithm="wgmma 128x128" + EDGES) is not None
    assert has_edges == (result in results_of(case)), result


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case, tile):
  for dtype, out_dtype in (("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")):
    check(case, tile + EDGES, dtype, out_dtype, results=results_of(case))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["wgmma 128x128", "wgmma 128x64"])
@pytest.mark.parametrize("case", CASES[:4], ids=lambda c: c.name)
def test_three_products(case, tile):
  high = (lax.Precision.HIGH,) * 2
  check(case, tile + EDGES, "float32", "float32", high, sample, results=results_of(case))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["wgmma 128x128", "wgmma 128x64", "wgmma 192x128 across"])
def test_many_problems(tile):
  """Rows of a problem that fill its tiles, and others, after which the next one's begin."""
  full = ConvCase("", 64, (4, 4), 64, (3, 3), 64, padding=SAME3)
  for case in (full, CASES[0]):
    check(case, tile + EDGES, "bfloat16", "bfloat16", models=3, results="yx")


@pytest.mark.gpu
def test_more_tiles_than_multiprocessors():
  case = ConvCase("", 128, (14, 13), 64, (3, 3), 128, padding=((2, 2), (2, 2)), rhs_dilation=(2, 2))
  for tile in ("wgmma 64x64", "wgmma 128x128"):
    for dtype in ("bfloat16", "float32"):
      check(case, tile + EDGES, dtype, dtype, results="yx")


# Tiles within a block's steps, and pieces of tiles of several sets of taps; taps whose lines are no whole tiles.
MANY = ConvCase("many", 4, (9, 8), 256, (3, 3), 520, padding=SAME3)
LONG = ConvCase("long", 32, (12, 12), 72, (5, 3), 64, padding=((4, 4), (3, 3)), rhs_dilation=(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [tile for tile in WGMMA_TILES if takes(tile, "w", "bfloat16", "float32")])
def test_pieces_of_filter_gradients(tile):
  for case in (MANY, LONG):
    for dtype, out_dtype in (("bfloat16", "float32"), ("float32", "float32")):
      check(case, tile + EDGES, dtype, out_dtype, results="w")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["wgmma 128x128", "wgmma 128x160", "wgmma 192x128 across"])
def test_epilogue(tile):
  layer = {"padding": DILATED.padding, "dilation": DILATED.rhs_dilation, "activation": "gelu"}
  for dtype in ("bfloat16", "float32"):
    check_epilogue(tile + EDGES, DILATED.x_shape, DILATED.w_shape, dtype, None, **layer)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("tile", ["wgmma 128x64", "wgmma 192x128 across"])
def test_kernels_under_the_sanitizer(tile):
  for case in (CASES[0], CASES[3], CASES[7]):
    check(case, tile + EDGES, "bfloat16", "bfloat16", results=results_of(case))
