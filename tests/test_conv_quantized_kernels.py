"""The kernels of int8 and float8 convolutions, by tile, on a GPU."""

import functools
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_cases import CASES, SAME3, ConvCase
from conv_oracle import conv as conv_oracle
from jaxdnn._conv.primitives import convolve, plan
from numerics import assert_close, assert_repeatable, exact, run_poisoned
from quantized_cases import (
  FLOAT8,
  floats8,
  integer_oracle,
  integers,
  layer,
  scaled_operands,
  scaled_oracle,
  spec_of,
  wrapping,
)

_ = ConvCase
MORE = [
  _("lines", 2, (9, 8), 272, (3, 3), 144, padding=SAME3),
  _("columns", 3, (20, 20), 128, (3, 3), 320, padding=SAME3),
  _("many_tiles", 20, (28, 28), 64, (1, 1), 208),
  _("phases", 2, (6, 7), 64, (3, 3), 80, padding=SAME3, lhs_dilation=(2, 2)),
  _("phases_alike", 3, (9, 7), 64, (2, 2), 80, padding=SAME3, lhs_dilation=(2, 2)),
  _("empty_phases", 2, (6, 7), 64, (1, 1), 80, lhs_dilation=(2, 2)),
  _("folded", 2, (6, 5), 16, (3, 3), 8, padding=SAME3, lhs_dilation=(2, 2)),
  _("c65", 2, (9, 8), 65, (3, 3), 65, padding=SAME3),
  _("c65k64", 2, (9, 8), 65, (3, 3), 64, padding=SAME3),
  _("g32", 2, (7, 8), 256, (3, 3), 256, padding=SAME3, groups=32),
  _("g3", 2, (7, 6), 51, (3, 3), 33, padding=SAME3, groups=3),
  _("depthwise64", 2, (9, 9), 64, (3, 3), 64, padding=SAME3, groups=64),
  _("1d", 3, (150,), 32, (5,), 48, (2,), ((2, 2),)),
  _("3d", 2, (5, 6, 4), 32, (3, 3, 3), 16, padding=((1, 1),) * 3),
]
TILES = ["mma 128x128", "mma 128x64", "wgmma 128x128", "wgmma 128x64"]


def run(case, tile, x, w, out, precision=None):
  """The result by that tile, three times the same; or None where it does not take the case."""
  spec = spec_of(case, tile, precision)
  x, w = jnp.asarray(x)[None], jnp.asarray(w)[None]
  if plan("y", x, w, spec, np.dtype(out), hopper=True) is None:
    return None
  return assert_repeatable(lambda x, w: convolve("y", {"x": x, "w": w}, spec, out), x, w, repeats=3)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_integer_kernels(tile):
  taken = 0
  for case, least in itertools.product([*CASES, *MORE], (-128, 127)):
    x, w = integers(case.x_shape, 1, least), integers(case.w_shape, 2, least)
    got = run(case, tile, x, w, np.int32)
    if got is not None:
      np.testing.assert_array_equal(got, integer_oracle(case, x, w), case.name)
      taken += 1
  assert taken >= (80 if tile == "mma 128x64" else 14 if tile.startswith("mma") else 50)


@pytest.mark.gpu
def test_integer_kernels_wrap():
  for tile, last in itertools.product(TILES, (131071, 131072)):
    x, w = wrapping(last)
    case = ConvCase("wrap", 1, (), x.shape[-1], (), 16)
    got = run(case, tile, x, w, np.int32)
    assert got is not None
    np.testing.assert_array_equal(got, np.int64(last * 128 * 128).astype(np.int32))


# Each of the 128 products that Hopper's tensor cores add is cut off 13 bits behind the point of the largest.
COARSE = 2.0**-10


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("types", FLOAT8, ids="*".join)
def test_float8_kernels(tile, types):
  precision = (lax.Precision.DEFAULT,) * 2
  taken = 0
  for case, out in itertools.product([*CASES, *MORE], ("float32", "bfloat16", "float16")):
    x, w = (floats8(s, t, i) for i, (s, t) in enumerate(zip((case.x_shape, case.w_shape), types, strict=True)))
    got = run(case, tile, x, w, jnp.dtype(out), precision)
    if got is None:
      continue
    taken += 1
    want, terms = conv_oracle(exact(x), exact(w), *case.geometry, case.groups), int(np.prod(case.w_shape[:-1]))
    if tile.startswith("wgmma"):
      error = np.abs(exact(got) - want)
      assert (error <= COARSE * 3 * np.sqrt(terms) + 2 * exact(jnp.finfo(out).eps) * np.abs(want)).all(), case.name
    else:
      assert_close(got, want, out, terms=terms, scale=3 * np.sqrt(terms))
  assert taken >= 12


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_every_byte(tile):
  """All pairs of the 256 bytes of each type, one a product, and so NaN and infinities too."""
  every = np.arange(256, dtype=np.uint8)
  case = ConvCase("bytes", 256, (), 16, (), 256)
  for types in (("int8", "int8"), *FLOAT8):
    x, w = (np.zeros(s, np.uint8) for s in ((256, 16), (16, 256)))
    x[:, 3], w[3] = every, every
    x, w = x.view(getattr(ml_dtypes, types[0], types[0])), w.view(getattr(ml_dtypes, types[1], types[1]))
    out = np.int32 if types[0] == "int8" else np.float32
    got = run(case, tile, x, w, out, (lax.Precision.DEFAULT,) * 2)
    want = exact(x[:, 3:4]) * exact(w[3:4])
    np.testing.assert_array_equal(exact(got), want)


def check_scaled(kind, out, c, k, groups, activation):
  x, w, x_scale, w_scale, b, r = scaled_operands(kind, (3, 9, 8, c), (3, 3, c // groups, k))
  w_scale /= 50 if kind == "int8" else 1
  b, r = b.astype(jnp.dtype(out)), r.astype(jnp.dtype(out))
  f = functools.partial(
    layer, x_scale=x_scale, w_scale=w_scale, activation=activation, groups=groups,
    preferred_element_type=jnp.dtype(out), precision="default",
  )  # fmt: skip
  for bias, residual in ((None, None), (b, None), (None, r), (b, r)):
    z = scaled_oracle(x, w, x_scale, w_scale, *(0.0 if a is None else a for a in (bias, residual)))
    act = {None: lambda v: v, "relu": jaxdnn.relu, "gelu": lambda v: jaxdnn.gelu(v, approximate=False)}[activation]
    want = exact(act(jnp.asarray(z)))
    for tile in [None, *(TILES if groups == 1 and c % 16 == 0 else ())]:
      got = run_poisoned(
        lambda x, w, b, r, tile=tile: f(x, w, b, residual=r, algorithm=tile), *map(jnp.asarray, (x, w)), bias, residual
      )
      coarse = kind == "float8" and (tile is None or tile.startswith("wgmma"))
      bound = (COARSE if coarse else 2.0**-20) * 10 * np.sqrt(9 * c // groups)
      bound = bound + 2 * exact(jnp.finfo(out).eps) * np.abs(want)
      assert (np.abs(exact(got) - want) <= bound).all(), (c, k, groups, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_scaled_kernels(kind, out, activation):
  for c, k, groups in ((64, 80, 1), (65, 33, 1), (16, 12, 4)):
    check_scaled(kind, out, c, k, groups, activation)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("tile", TILES)
def test_kernels_under_the_sanitizer(tile):
  wanted = ("lines", "phases", "phases_alike", "folded", "c65", "g32", "1d")
  for case in (each for each in MORE if each.name in wanted):
    x, w = integers(case.x_shape, 1), integers(case.w_shape, 2)
    got = run(case, tile, x, w, np.int32)
    if got is not None:
      np.testing.assert_array_equal(got, integer_oracle(case, x, w))
  x, w, x_scale, w_scale, b, r = scaled_operands("float8", (2, 9, 8, 64), (3, 3, 64, 80))
  got = layer(
    x, w, b, x_scale=x_scale, w_scale=w_scale, residual=r, activation="relu", algorithm=tile, precision="default"
  )
  want = np.maximum(scaled_oracle(x, w, x_scale, w_scale, b, r), 0)
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=0.1)
