"""Hopper's filter gradients, whose tiles are shared out among blocks: the plan, and sums of every kind of pieces."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conv_cases import SAME3, ConvCase
from conv_checks import WGMMA_TILES, coarse, takes
from conv_oracle import conv_gradients
from jaxdnn._conv.primitives import convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact

MULTIPROCESSORS = 132


def tiles_of(dtype):
  return [t for t in WGMMA_TILES if takes(t, "w", dtype, dtype)]


TILES = tiles_of("bfloat16")


def spec_of(case, tile, limit=None):
  return ConvSpec(*case.geometry, 1, case.spatial, case.window, None, tile, limit)


def planned(case, tile, dtype="bfloat16", limit=None):
  spec = spec_of(case, tile, limit)
  shapes = (1, *case.x_shape), (1, case.batch, *spec.y_spatial, case.k)
  return plan("w", *(jax.ShapeDtypeStruct(s, dtype) for s in shapes), spec, jnp.dtype(dtype), hopper=True)


def shape_of(case, tile, dtype="bfloat16"):
  """Tiles, the steps of each, and the bytes of a piece of one."""
  rows, columns = (int(n) for n in tile.split()[1].split("x"))
  line = 128 // jnp.dtype(dtype).itemsize
  units = math.prod(case.window) * -(-case.c // line)
  pixels = case.batch * math.prod(spec_of(case, tile).y_spatial)
  return -(-units // (rows // line)) * -(-case.k // columns), -(-pixels // line), 4 * rows * columns


# 6 tiles of 128x128 and 123 steps; 72 and 80; 45 and 5; one tile of one step.
WIDE = ConvCase("wide", 40, (14, 14), 264, (1, 1), 136)
TALL = ConvCase("tall", 20, (16, 16), 1152, (1, 1), 1024)
SHORT = ConvCase("short", 2, (13, 11), 120, (3, 3), 600, padding=SAME3)
ONE = ConvCase("one", 1, (5, 5), 64, (1, 1), 64)
LONG = ConvCase("long", 32, (28, 28), 512, (3, 3), 512, padding=SAME3)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("case", [WIDE, TALL, SHORT, ONE, LONG], ids=lambda c: c.name)
def test_plan(case, tile):
  """Whole tiles need no workspace; else it is two pieces a block at most, whatever the shape."""
  tiles, steps, piece = shape_of(case, tile)
  p = planned(case, tile)
  if p["splits"] == 1:
    assert p["workspace_bytes"] == 0 and p["blocks"] == tiles
  else:
    slots = 1 if p["blocks"] % tiles == 0 else 2
    assert p["workspace_bytes"] == p["blocks"] * slots * piece
    assert p["blocks"] <= min(MULTIPROCESSORS, tiles * steps // 2)
    assert p["splits"] == -(-p["blocks"] // tiles) + slots - 1
  assert planned(ONE, tile)["splits"] == 1


def test_kinds_of_shares():
  """Parts of tiles that are equally long, where they leave few blocks idle; else spans, or whole tiles."""
  blocks = [planned(case, "wgmma 128x128")["blocks"] for case in (WIDE, TALL, SHORT)]
  assert blocks[0] > 120 and blocks[0] % 6 == 0
  assert blocks[1] > 99 and blocks[1] % 72 > 0
  assert blocks[2] == 45


def test_tiles_of_three_lines():
  """Nine taps are whole threes of lines: 30 tiles of 192x160, which four parts share, 120 of them, or 96 of 192x128."""
  for size, c, k, tile, tiles, parts in (
    (64, 320, 320, "wgmma 192x160", 30, 4), (32, 640, 640, "wgmma 192x160", 120, 1),
    (7, 512, 512, "wgmma 192x128", 96, 1),
  ):  # fmt: skip
    case = ConvCase("", 32 if size == 7 else 4, (size, size), c, (3, 3), k, padding=SAME3)
    p = planned(case, None)
    assert (p["tile"], p["blocks"], p["splits"]) == (tile, tiles * parts, parts)
    assert shape_of(case, tile)[0] == tiles


@pytest.mark.parametrize("tile", TILES)
def test_limit_of_the_workspace(tile):
  """A smaller one leaves fewer pieces, and none at all whole tiles."""
  tiles, _, piece = shape_of(WIDE, tile)
  plans = [planned(WIDE, tile, limit=n * 2 * piece) for n in (0, tiles + 1, 3 * tiles, MULTIPROCESSORS)]
  blocks = [p["blocks"] for p in plans]
  assert blocks[0] == tiles and plans[0]["workspace_bytes"] == 0
  assert blocks == sorted(blocks) and blocks[0] < blocks[-1]
  for p, n in zip(plans, (0, tiles + 1, 3 * tiles, MULTIPROCESSORS), strict=True):
    assert p["workspace_bytes"] <= n * 2 * piece


@pytest.mark.parametrize("tile", tiles_of("float32"))
def test_copies_of_floats(tile):
  """Long sums of many tiles have y transposed by a kernel before theirs, if there is room for the copy."""
  for case, copied in ((WIDE, 0), (TALL, 4 * 160 * 32 * 1024), (SHORT, 0), (ONE, 0)):
    tiles, _, piece = shape_of(case, tile, "float32")
    p = planned(case, tile, "float32")
    pieces = 0 if p["splits"] == 1 else p["blocks"] * (1 if p["blocks"] % tiles == 0 else 2)
    assert p["workspace_bytes"] == copied + pieces * piece, case.name
    assert planned(case, tile, "float32", limit=0)["workspace_bytes"] == 0


@functools.cache
def operands_and_result(case, dtype):
  x = coarse(case.x_shape, dtype)
  y = coarse((case.batch, *spec_of(case, None).y_spatial, case.k), dtype, 1)
  want = conv_gradients(exact(x), np.zeros(case.w_shape), exact(y), *case.geometry)[1]
  return jnp.asarray(x)[None], jnp.asarray(y)[None], want


@pytest.mark.gpu
@pytest.mark.parametrize(
  "dtype, tile",
  [
    pytest.param(dtype, t, marks=[pytest.mark.sanitize] if t in ("wgmma 64x64", "wgmma 128x256") else [])
    for dtype in ("bfloat16", "float32")
    for t in tiles_of(dtype)
  ],
)
def test_pieces(dtype, tile):
  """Whole tiles, equal parts of them, and spans that begin and end within tiles; of floats with and without a copy."""
  for case in (WIDE, TALL, SHORT):
    tiles, steps, piece = shape_of(case, tile, dtype)
    x, y, want = operands_and_result(case, dtype)
    terms = math.prod(y.shape[:-1])
    copied = 4 * steps * 32 * case.k if dtype == "float32" and case is TALL else 0
    seen = set()
    for most in (0, 2, 5, 2 * tiles, 3 * tiles + 1, MULTIPROCESSORS):
      limit = most and copied + most * 2 * piece
      p = planned(case, tile, dtype, limit)
      if (p["blocks"], p["workspace_bytes"]) in seen:
        continue
      seen.add((p["blocks"], p["workspace_bytes"]))
      spec = spec_of(case, tile, limit)
      f = lambda x, y, spec=spec: convolve("w", {"x": x, "y": y}, spec, jnp.dtype(dtype))  # noqa: E731
      got = assert_repeatable(f, x, y, repeats=3)
      assert_close(got[0], want, dtype, terms=terms, scale=np.sqrt(terms) * 3)
    assert (tiles, 0) in seen and (len(seen) > 2 or case is not WIDE)
