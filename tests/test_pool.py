"""Pooling over sliding windows against brute force in NumPy: values, winners, gradients, and the kernels."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
import pool_oracle
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample
from pool_cases import POOL

CASES = pytest.mark.parametrize("case", POOL, ids=lambda case: case.name)


def max_pool(case):
  return lambda x: jaxdnn.max_pool(x, case.window, **case.keywords)


def everything(case, x, g, t):
  """Every pooling of a case at once: values, pull-backs of `g`, push-forwards of `t`."""
  results = {}
  for name, more in (
    ("max_pool", {}),
    ("min_pool", {}),
    ("avg_pool", {"count_include_pad": True}),
    ("avg_pool", {"count_include_pad": False}),
    ("sum_pool", {}),
    ("lp_pool", {"power": 3.0}),
  ):
    f = functools.partial(getattr(jaxdnn, name), window=case.window, **case.keywords, **more)
    y, vjp = jax.vjp(f, x)
    key = name + "_excluding" * (not more.get("count_include_pad", True))
    results[key] = f(x), y, vjp(g)[0], jax.jvp(f, (x,), (t,))[1]
  return results


def check_everything(case, x, *, run=jax.jit):
  """The poolings of `x` against the oracle."""
  dtype, terms = str(x.dtype), math.prod(case.window)
  g, t = sample(case.out_shape, dtype, seed=1), sample(case.shape, dtype, seed=2)
  results = run(functools.partial(everything, case))(jnp.asarray(x), jnp.asarray(g), jnp.asarray(t))
  geometry = case.spelled_out
  for sign, name in ((1, "max_pool"), (-1, "min_pool")):
    y, y_again, dx, dy = results[name]
    want_y, want_dx = pool_oracle.max_pool(sign * exact(x), exact(g), *geometry)
    assert y.shape == case.out_shape and y.dtype == dtype
    np.testing.assert_array_equal(exact(y), sign * want_y)
    np.testing.assert_array_equal(exact(y_again), sign * want_y)
    assert_close(dx, want_dx, dtype, terms=terms, scale=4)
    # dy = J t, so that <dy, dy> = <Jᵀ dy, t>, with the oracle's Jᵀ.
    pulled_back = pool_oracle.max_pool(sign * exact(x), exact(dy), *geometry)[1]
    np.testing.assert_allclose((exact(dy) ** 2).sum(), (pulled_back * exact(t)).sum(), rtol=1e-9)
  for name, include, scale in (("avg_pool", True, 1), ("avg_pool_excluding", False, 1), ("sum_pool", True, terms)):
    y, y_again, dx, dy = results[name]
    want_y, want_dx = (scale * v for v in pool_oracle.avg_pool(exact(x), exact(g), *geometry, include))
    assert y.shape == case.out_shape
    for got, want in (
      (y, want_y), (y_again, want_y), (dy, scale * pool_oracle.avg_pool(exact(t), exact(g), *geometry, include)[0]),
      (dx, want_dx),
    ):  # fmt: skip
      assert_close(got, want, dtype, terms=terms, scale=4 * scale)
  y, _, dx, _ = results["lp_pool"]
  want_y, _ = pool_oracle.lp_pool(exact(x), exact(g), 3, *geometry)
  assert_close(y, want_y, dtype, terms=terms, scale=4 * terms)
  # The derivative is that at the y which was returned, rounded.
  if dtype in ("float32", "float64"):
    np.testing.assert_allclose(
      dx, pool_oracle.lp_pool(exact(x), exact(g), 3, *geometry)[1], rtol=1e-4, atol=1e-4 * terms
    )


# Values and gradients ------------------------------------------------------------------------------------------------


@CASES
def test_pools(case):
  check_everything(case, sample(case.shape, "float32"))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float32"])
def test_other_dtypes(dtype):
  for name in ("asymmetric", "dilation_meets_stride", "3x3s2_vectors", "rows_3x3s2"):
    case = next(c for c in POOL if c.name == name)
    check_everything(case, sample(case.shape, dtype))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_integers(dtype):
  x = np.random.default_rng(0).integers(0, 100, (2, 5, 4, 3)).astype(dtype)
  geometry = (2, 2), (1, 1), ((0, 0), (3, 0)), (1, 1)
  g = np.zeros((2, 4, 6, 3))
  limits = np.iinfo(dtype)
  for f, sign, nothing in ((jaxdnn.max_pool, 1, limits.min), (jaxdnn.min_pool, -1, limits.max)):
    y = f(x, (2, 2), padding=geometry[2])
    want = pool_oracle.max_pool(sign * exact(x), g, *geometry)[0]
    assert y.dtype == dtype
    np.testing.assert_array_equal(exact(y), np.where(want == -np.inf, nothing, sign * want))
  total = jaxdnn.sum_pool(x, (2, 2), padding=geometry[2])
  want = 4 * pool_oracle.avg_pool(exact(x), g, *geometry, True)[0]
  np.testing.assert_array_equal(total, want.astype(np.int64).astype(dtype))


@pytest.mark.parametrize("low, high", list(itertools.product((0, 1, 2), repeat=2)))
def test_equality_with_lax(low, high):
  """Where lax has the operation and is not wrong: no negative padding, no dilated gradient, no NaN."""
  x = jnp.asarray(sample((2, 9, 8, 3), "float32"))
  padding = ((0, 0), (low, high), (high, low), (0, 0))

  def stock(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), padding)

  def ours(x):
    return jaxdnn.max_pool(x, (3, 2), stride=(2, 1), padding=padding[1:3])

  np.testing.assert_array_equal(ours(x), stock(x))
  gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (ours, stock)]
  np.testing.assert_allclose(*gradients, rtol=1e-6)


def test_sums_of_16_bit_types_are_float32():
  """300 ones, of which bfloat16 would stop counting at 256."""
  x = jnp.ones((300, 1), jnp.bfloat16)
  assert jaxdnn.avg_pool(x, (300,))[0, 0] == 1
  _, vjp = jax.vjp(lambda x: jaxdnn.max_pool(x, (300,), padding=((299, 299),)), x)
  assert vjp(jnp.ones((599, 1), jnp.bfloat16))[0][0, 0] == 300


# Who wins ------------------------------------------------------------------------------------------------------------

OVERLAPPING = next(c for c in POOL if c.name == "channels5")
DILATED = next(c for c in POOL if c.name == "dilation_meets_stride")
MANY_CELLS = next(c for c in POOL if c.name == "more_than_255_cells")


@pytest.mark.parametrize("case", [OVERLAPPING, DILATED, MANY_CELLS], ids=lambda case: case.name)
@pytest.mark.parametrize("fill", ["equal", "negative", "minus_infinity", "zeros_of_both_signs", "few_values", "nan"])
def test_ties_and_special_values(case, fill):
  """First maximum in value, pull-back and push-forward; the same winner in all three."""
  x = sample(case.shape, "float32")
  x = {
    "equal": np.ones_like(x),
    "negative": -1 - np.abs(x),
    "minus_infinity": np.where(x < 1, -np.inf, x).astype(x.dtype),
    "zeros_of_both_signs": np.where(x < 0, -0.0, 0.0).astype(x.dtype),
    "few_values": np.round(x),
    "nan": np.where(x > 1, np.nan, x).astype(x.dtype),
  }[fill]
  rank = len(case.window)
  g, t = sample(case.out_shape, "float32", seed=1), sample(case.shape, "float32", seed=2)
  y, vjp = jax.vjp(max_pool(case), x)
  want_y, want_dx = pool_oracle.max_pool(exact(x), exact(g), *case.spelled_out)
  np.testing.assert_array_equal(exact(y), want_y)
  assert_close(vjp(jnp.asarray(g))[0], want_dx, "float32", terms=9, scale=4)
  _, dy = jax.jvp(max_pool(case), (x,), (t,))
  by_basis = np.zeros_like(y)
  for o, cells in pool_oracle.windows(case.extent, *case.spelled_out):
    one = np.zeros(y.shape)
    one[(slice(None), *o)] = 1
    if cells:
      chosen = pool_oracle.max_pool(exact(x), one, *case.spelled_out)[1]
      by_basis[(slice(None), *o)] = (chosen * t).sum(axis=tuple(range(1, rank + 1)))
  np.testing.assert_array_equal(dy, by_basis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", range(6))
def test_nan_wins_from_every_position(position, dtype):
  x = sample((2, 2, 3, 17), dtype)
  x[:, position // 3, position % 3] = np.nan
  y, vjp = jax.vjp(lambda x: jaxdnn.max_pool(x, (2, 3)), x)
  assert np.isnan(exact(y)).all()
  want = np.zeros(x.shape)
  want[:, position // 3, position % 3] = 1
  np.testing.assert_array_equal(exact(vjp(jnp.ones_like(y))[0]), want)


def test_first_of_two_nans_wins():
  x = jnp.array([[1.0], [jnp.nan], [jnp.inf], [jnp.nan]])
  dx = jax.grad(lambda x: jaxdnn.max_pool(x, (4,)).sum())(x)
  np.testing.assert_array_equal(dx[:, 0], [0, 1, 0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zeros_are_a_maximum(dtype):
  """More than 8192 of them, which another library's reduction took for none."""
  x = jnp.full((8200, 1), -0.0, dtype)
  y, index = jaxdnn.max_pool(x, (8200,), return_indices=True)
  assert y[0, 0] == 0 and index[0, 0] == 0
  np.testing.assert_array_equal(jaxdnn.reduce_window(x, -np.inf, jax.lax.max, (8193, 1), (7, 1), "VALID"), [[0], [0]])


def test_all_padding():
  """-inf, or 0 on average, and nothing for the gradient; a window of -inf data still has a winner."""
  x = jnp.full((1, 1), -jnp.inf)
  y, vjp = jax.vjp(lambda x: jaxdnn.max_pool(x, (2,), padding=((3, 3),)), x)
  np.testing.assert_array_equal(y[:, 0], [-np.inf] * 6)
  np.testing.assert_array_equal(vjp(jnp.array([[1.0], [2], [4], [8], [16], [32]]))[0], [[4 + 8]])
  for include in (True, False):
    y, vjp = jax.vjp(lambda x: jaxdnn.avg_pool(x, (2,), padding=3, count_include_pad=include), jnp.ones((1, 1)))  # noqa: B023
    np.testing.assert_array_equal(y[:, 0], [0, 0, *[0.5 if include else 1] * 2, 0, 0])
    np.testing.assert_array_equal(vjp(jnp.ones((6, 1)))[0], [[1.0 if include else 2.0]])


# On the GPU ----------------------------------------------------------------------------------------------------------


KERNELS = [
  "inception",
  "channels6",
  "dilation_meets_stride",
  "negative",
  "all_padding",
  "more_than_255_cells",
  "empty_input",
  "no_channels",
  "global_planes",
  "plane_in_bands",
  "2x2s2_cropped",
  "2x2s2_many_rows",
  "3x3s2_many_rows",
  "5x5s2",
] + [case.name for case in POOL if case.name.endswith("vectors") or case.name.startswith("rows")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels(name, dtype):
  """Into poisoned memory, twice, with bitwise equal results."""
  case = next(c for c in POOL if c.name == name)
  check_everything(case, sample(case.shape, dtype), run=lambda f: functools.partial(assert_repeatable, f, repeats=2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_choose(name, dtype):
  """Ties, NaN and -inf, alone in windows and together."""
  case = next(c for c in POOL if c.name == name)
  x, chance = np.round(sample(case.shape, dtype)), np.random.default_rng(3).random(case.shape)
  x = np.where(chance < 0.03, np.nan, np.where(chance < 0.5, -np.inf, x)).astype(x.dtype)
  g = sample(case.out_shape, dtype, seed=1)
  y, vjp = jax.vjp(max_pool(case), jnp.asarray(x))
  want_y, want_dx = pool_oracle.max_pool(exact(x), exact(g), *case.spelled_out)
  np.testing.assert_array_equal(exact(y), want_y)
  assert_close(vjp(jnp.asarray(g))[0], want_dx, dtype, terms=math.prod(case.window), scale=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_repeat(dtype):
  for name in ("resnet", "dilation_meets_stride", "channels5"):
    case = next(c for c in POOL if c.name == name)
    check_everything(case, sample(case.shape, dtype), run=lambda f: functools.partial(assert_repeatable, f))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_stay_in_bounds(name):
  case = next(c for c in POOL if c.name == name)
  for dtype in ("float32", "bfloat16"):
    x, g, t = (jnp.asarray(sample(s, dtype)) for s in (case.shape, case.out_shape, case.shape))
    jax.block_until_ready(everything(case, x, g, t))


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize(
  "shape, window", [((5, 2**29, 1), (2,)), ((5, 2**24, 4, 8), (3, 3)), ((5, 2**24, 4, 8), (2, 2))], ids=str
)
def test_more_than_2_31_elements(shape, window):
  """Offsets past 32 bits, in the forward pass and in the gradient, in kernels of each width."""
  x = jnp.zeros(shape, jnp.bfloat16)
  last = (-1,) * x.ndim
  x = x.at[last].set(1)
  for pool in (jaxdnn.max_pool, jaxdnn.sum_pool):
    y, vjp = jax.vjp(lambda x, pool=pool: pool(x, window, stride=2, padding=((0, 1),) * len(window)), x)
    assert y[last] == 1
    assert vjp(y)[0][last] == 1
    del y, vjp


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_large_windows(dtype):
  """Global pooling that blocks share, and windows with more cells than 15 bits number."""
  for shape, window in (((2, 70, 64, 8), (70, 64)), ((1, 200, 190, 3), (200, 190)), ((3, 20, 300, 1), (20, 299))):
    x = np.round(4 * sample(shape, "float32")).astype(jnp.dtype(dtype))
    x[0, 3, 2] = x[0, 7, 1] = 100
    mean = assert_repeatable(lambda x, w=window: jaxdnn.avg_pool(x, w), jnp.asarray(x))
    y, indices = assert_repeatable(lambda x, w=window: jaxdnn.max_pool(x, w, return_indices=True), jnp.asarray(x))
    flat = exact(x)[:, :, : window[1]].reshape(shape[0], -1, shape[-1])
    if window[1] == shape[2]:
      np.testing.assert_array_equal(indices[:, 0, 0], flat.argmax(1))
      np.testing.assert_array_equal(exact(y)[:, 0, 0], flat.max(1))
    assert_close(mean[:, 0, 0], flat.mean(1), dtype, terms=flat.shape[1], scale=4)
