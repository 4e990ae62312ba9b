"""Thousands of convolutions around the limits of the kernels, in every direction: the kernel that the planner chooses
and others that take the problem, against our own in float64, which test_conv_random.py holds to NumPy."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conv_cases import ConvCase
from conv_checks import OF_PAIRS, coarse
from jaxdnn._conv.primitives import EDGES, OPERANDS, convolve, plan, tile_names
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close

DTYPES = ("bfloat16", "float32", "float16")
SEEDS, PROBLEMS = 70, 40
RARE = {"simt patch", "wgmma 128x128 pairs"}  # tiles that few problems suit: tried wherever they can be
WINDOWS = {1: (1, 2, 3, 4, 5, 7, 16, 31), 2: (1, 2, 3, 3, 5, 7), 3: (1, 2, 3, 3)}
EXTENTS = {1: (8, 64, 128, 256), 2: (2, 4, 8, 14, 16, 32), 3: (2, 4, 8)}
WIDTHS = (8, 16, 32, 48, 64, 80, 96, 128)


def near(rng, edges):
  return max(1, int(rng.choice(edges)) + int(rng.integers(-1, 2)))


def channels(rng):
  """Input channels, output channels and groups."""
  whole = lambda most=17: 8 * int(rng.integers(1, most + 1))  # noqa: E731
  kind = rng.integers(11)
  if kind < 3:
    return whole(), whole(), 1
  if kind == 10:
    return whole(8), whole(8), 1
  if kind == 3:
    return near(rng, WIDTHS), near(rng, WIDTHS), 1
  if kind == 4:
    return int(rng.integers(1, 131)), int(rng.integers(1, 131)), 1
  if kind == 5:
    return int(rng.integers(1, 9)), whole(), 1
  if kind == 6:
    return whole(), int(rng.integers(1, 9)), 1
  if kind == 7:
    groups = near(rng, WIDTHS)
    return groups, groups * int(rng.choice((1, 1, 1, 2))), groups
  c, k = int(rng.choice((2, 4, 8, 8, 16, 16, 24, 32, 64))), int(rng.choice((4, 8, 16, 32)))
  groups = int(rng.integers(2, 9)) if c > 16 or rng.random() < 0.3 else 16 // c * int(rng.integers(1, 7))
  return groups * c, groups * (c if rng.random() < 0.7 else k), groups


def first_layer(rng):
  """Of a network: a window on three or four channels, with a stride."""
  side, stride = ((7, 2), (7, 2), (3, 2), (4, 4))[int(rng.integers(4))]
  window = (side - int(rng.integers(0, 2)), side)
  padding = tuple((int(a), int(b)) for a, b in rng.integers(0, side // 2 + 1, (2, 2)))
  spatial = near(rng, (16, 32)), 4 * int(rng.integers(2, 20))
  c, k = int(rng.integers(3, 5)), 8 * int(rng.integers(1, 17))
  return ConvCase("", int(rng.integers(1, 5)), spatial, c, window, k, (stride, stride), padding)


def two_at_a_step(rng):
  """A stride of two over 32 channels, or a result of 32 channels between which there is a hole."""
  rank = int(rng.integers(1, 4))
  window = (*(int(n) for n in rng.integers(1, 5, rank - 1)), int(rng.integers(2, 7)))
  spatial = tuple(near(rng, EXTENTS[rank]) for _ in range(rank))
  other, steps = 8 * int(rng.integers(1, 13)), (*(int(n) for n in rng.integers(1, 3, rank - 1)), 2)
  if rng.random() < 0.5:
    padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 4, (rank, 2)))
    return ConvCase("", int(rng.integers(1, 5)), (*spatial[:-1], 2 * spatial[-1]), 32, window, other, steps, padding)
  low = rng.integers(-1, 4, rank)
  padding = tuple((int(a), int(a + w % 2 + s - 1)) for a, w, s in zip(low, window, steps, strict=True))
  return ConvCase("", int(rng.integers(1, 5)), spatial, other, window, 32, padding=padding, lhs_dilation=steps)


def draw(rng):
  """A problem with an output, and the models that it is of."""
  kind = rng.random()
  while kind < 0.13:
    case = two_at_a_step(rng)
    if min(spec_of(case).y_spatial) > 0:
      return case, 1
  if kind < 0.19:
    return first_layer(rng), 1
  while True:
    rank = int(rng.choice((1, 2, 2, 3)))

    def each(values, same=0.7, rank=rank):
      """Mostly the same in all dimensions."""
      drawn = tuple(int(v) for v in rng.choice(values, rank))
      return drawn[:1] * rank if rng.random() < same else drawn

    c, k, groups = channels(rng)
    window, spatial = each(WINDOWS[rank]), tuple(near(rng, EXTENTS[rank]) for _ in range(rank))
    stride, holes, dilation = each((1, 1, 1, 2, 3)), each((1, 1, 1, 1, 2)), each((1, 1, 1, 1, 2, 3))
    kind = rng.random()
    if kind < 0.15:
      stride = window  # side by side
    elif kind < 0.55:  # what the kernels of one window want
      window, stride, holes, dilation = (3,) * rank, each((1, 1, 2), 1), (1,) * rank, each((1, 1, 2), 1)
    padding = tuple(((w - 1) * d // 2,) * 2 for w, d in zip(window, dilation, strict=True))
    if rng.random() < 0.4:
      padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 5, (rank, 2)))
    case = ConvCase("", int(rng.integers(1, 5)), spatial, c, window, k, stride, padding, holes, dilation, groups)
    if min(spec_of(case).y_spatial) > 0:
      return case, int(rng.integers(2, 6)) if rng.random() < 0.15 else 1


def spec_of(case, algorithm=None):
  return ConvSpec(*case.geometry, case.groups, case.spatial, case.window, None, algorithm)


def shapes_of(case, models):
  y = (case.batch, *spec_of(case).y_spatial, case.k)
  return {name: (models, *shape) for name, shape in (("x", case.x_shape), ("w", case.w_shape), ("y", y))}


def kernels(case, models, dtype):
  """By result, the tiles that take the problem; what the planner chooses comes first."""
  avals = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes_of(case, models).items()}
  found = {}
  for result, names in OPERANDS.items():
    one = lambda algorithm, a=avals[names[0]], b=avals[names[1]], r=result: plan(  # noqa: E731
      r, a, b, spec_of(case, algorithm), np.dtype(dtype), hopper=True
    )
    chosen = one(None)["tile"]
    found[result] = [chosen, *(t for t in tile_names() if t != chosen and one(t) is not None)]
  return found


def family(tile):
  return "pairs" if tile in OF_PAIRS else EDGES if tile.endswith(EDGES) else tile.split()[0]


def problems(seed):
  """Problems with an element type each, and for each result the tiles to try."""
  rng = np.random.default_rng(seed)
  for i in range(PROBLEMS):
    case, models = draw(rng)
    dtype = np.dtype(jnp.dtype(DTYPES[(seed + i) % len(DTYPES)]))
    tiles = {}
    for result, own in kernels(case, models, dtype).items():
      # Any tile; and any of an algorithm, of which some have one tile only.
      of = str(rng.choice(sorted({family(tile) for tile in own})))
      drawn = {own[0], str(rng.choice(own)), str(rng.choice([t for t in own if family(t) == of]))}
      tiles[result] = sorted(drawn | RARE.intersection(own))
    yield case, models, dtype, tiles


def test_every_kernel_has_many_problems():
  """Of each kernel and direction that there is."""
  met = collections.Counter(
    (result, tile)
    for seed in range(SEEDS)
    for *_, tiles in problems(seed)
    for result, own in tiles.items()
    for tile in own
  )
  assert min(met.values()) >= 10, met
  assert {tile for _, tile in met} == set(tile_names())


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(SEEDS))
def test_around_the_limits(seed):
  for case, models, dtype, tiles in problems(seed):
    arrays = {name: coarse(s, str(dtype), i) for i, (name, s) in enumerate(shapes_of(case, models).items())}

    @jax.jit
    def both(arrays, case=case, dtype=dtype, tiles=tiles):
      exactly = {name: a.astype(jnp.float64) for name, a in arrays.items()}
      wants = {result: convolve(result, exactly, spec_of(case), np.float64) for result in OPERANDS}
      return wants, {(r, t): convolve(r, arrays, spec_of(case, t), dtype) for r, own in tiles.items() for t in own}

    wants, gots = both(arrays)
    terms = {"y": math.prod(case.w_shape[:-1]), "x": math.prod(case.window) * case.k // case.groups}
    terms["w"] = math.prod(wants["y"].shape[1:-1])
    for (result, tile), got in gots.items():
      try:
        assert_close(got, wants[result], str(dtype), terms=terms[result], scale=3 * np.sqrt(terms[result]))
      except AssertionError as error:
        error.add_note(f"{result} by {tile!r} in {dtype}, {models} models of {case}")
        raise
