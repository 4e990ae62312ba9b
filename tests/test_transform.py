"""Tensor transforms against NumPy: layouts, padding, types, derivatives, compositions."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample
from transform_cases import EMPTY, PADDED, PERMUTED, Case, arguments, move

INTEGERS = ("int8", "uint8", "int32")
ALL = (*DTYPES, *INTEGERS)


def numpy_dtype(name):
  return np.dtype(getattr(ml_dtypes, name, name))


def values(shape, dtype, seed=0):
  """Normal values, or integers over the whole range of the type."""
  if dtype not in INTEGERS:
    return sample(shape, dtype, seed)
  info = np.iinfo(dtype)
  return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True)


def rounded(v, dtype):
  """float64 to the values that `dtype` can hold, as the docstring promises."""
  if dtype not in INTEGERS:
    with np.errstate(over="ignore"):
      return v.astype(numpy_dtype(dtype))
  info = np.iinfo(dtype)
  return np.clip(np.rint(np.where(np.isnan(v), 0, v)), info.min, info.max).astype(dtype)


def assert_same(got, want):
  got = np.asarray(got)
  assert got.dtype == want.dtype and got.shape == want.shape
  np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def check_moves(cases, dtype, pad_value=0):
  """Nothing but moves: exact, whatever the bits. All cases in one compilation."""
  xs = [values(c.shape, dtype, i) for i, c in enumerate(cases)]

  @jax.jit
  def all_cases(xs):
    return [jaxdnn.transform(x, pad_value=pad_value, **arguments(c)) for x, c in zip(xs, cases, strict=True)]

  for case, x, got in zip(cases, xs, all_cases(xs), strict=True):
    assert_same(got, move(x, case, pad_value))


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_permutations(dtype):
  check_moves(PERMUTED + EMPTY, dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_padding_and_crops(dtype):
  check_moves(PADDED + EMPTY, dtype, pad_value=3)


def test_pad_value_may_be_infinite():
  x = jnp.ones((2, 3), jnp.bfloat16)
  got = jaxdnn.transform(x, padding=((0, 1), (1, 0)), pad_value=-np.inf)
  np.testing.assert_array_equal(exact(got), [[-np.inf, 1, 1, 1], [-np.inf, 1, 1, 1], [-np.inf] * 4])


CONVERTED = (
  Case((1000,)),
  Case((3, 37)),
  Case((40, 70), (1, 0)),
  Case((2, 300, 3), (0, 2, 1), ((0, 0), (0, 1), (0, 0))),
  Case((2, 3, 300), (0, 2, 1), ((0, 0), (2, 0), (0, 1))),
)


@pytest.mark.parametrize("source", ALL)
def test_conversions(source):
  """Every pair of types, with values at the edges of the integer types, ties, and nothing scaled."""
  cases = list(itertools.product(ALL, CONVERTED))
  edges = [0.5, 1.5, -0.5, -2.5, 127.5, 126.5, -128.5, 255.5, 254.5, 300, -300, 2147483000, 3e9, -3e9, 1e30, -1e30]
  special = [np.nan, np.inf, -np.inf]

  def data(i, shape):
    x = values(shape, source, i)
    if source not in INTEGERS:
      x = (x.astype(np.float64) * 100).astype(x.dtype)
      with np.errstate(over="ignore"):
        x.reshape(-1)[: len(edges) + 3] = np.asarray(edges + special).astype(x.dtype)
    return x

  xs = [data(i, c.shape) for i, (_, c) in enumerate(cases)]

  @jax.jit
  def all_cases(xs):
    return [
      jaxdnn.transform(x, dtype=target, pad_value=7, **arguments(c)) for x, (target, c) in zip(xs, cases, strict=True)
    ]

  for (target, case), x, got in zip(cases, xs, all_cases(xs), strict=True):
    wide = x.astype(np.float64)
    narrows = source == "float64" and target not in ("float64", *INTEGERS)
    if narrows or (source == "int32" and target in ("float16", "bfloat16")):
      # Through float32 on the way, or not: both are within a rounding.
      want = move(wide, case, 7).astype(np.float32).astype(np.float64)
      np.testing.assert_allclose(exact(got), rounded(want, target).astype(np.float64), rtol=2.0**-8)
      assert got.dtype == numpy_dtype(target)
    else:
      assert_same(got, rounded(move(wide, case, 7), target))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_accumulate(dtype):
  cases = (*PERMUTED[::3], *PADDED[::2])
  xs = [values(c.shape, dtype, i) for i, c in enumerate(cases)]
  ys = [values(move(x, c).shape, dtype, i + 100) for i, (x, c) in enumerate(zip(xs, cases, strict=True))]

  @jax.jit
  def all_cases(xs, ys):
    return [
      jaxdnn.transform(x, y, pad_value=2, alpha=0.5, beta=-1.5, **arguments(c))
      for x, y, c in zip(xs, ys, cases, strict=True)
    ]

  for case, x, y, got in zip(cases, xs, ys, all_cases(xs, ys), strict=True):
    want = 0.5 * move(exact(x), case, 2) - 1.5 * exact(y)
    assert_close(got, want, dtype, scale=8)


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_images_become_activations(target):
  """Bytes, channels-last, to normalised floating-point numbers, channels-first, in one pass."""
  for shape in ((2, 17, 19, 3), (3, 16, 40, 3), (2, 16, 20, 4)):
    x = values(shape, "uint8")
    got = jaxdnn.transform(x, permutation=(0, 3, 1, 2), dtype=target, alpha=1 / 255)
    assert_close(got, exact(x).transpose(0, 3, 1, 2) / 255, target)
    back = jaxdnn.transform(got, permutation=(0, 2, 3, 1), dtype="uint8", alpha=255)
    assert np.abs(exact(back) - exact(x)).max() <= (1 if target == "bfloat16" else 0)


def test_beta_zero_does_not_read_y():
  x = jnp.ones((2, 3))
  y = jnp.full((2, 3), jnp.nan)
  np.testing.assert_array_equal(jaxdnn.transform(x, y, alpha=2.0), np.full((2, 3), 2.0))
  dx, dy = jax.grad(lambda x, y: jaxdnn.transform(x, y, alpha=2.0).sum(), (0, 1))(x, y)
  np.testing.assert_array_equal(dx, np.full((2, 3), 2.0))
  np.testing.assert_array_equal(dy, np.zeros((2, 3)))


def test_matches_jnp():
  x = jnp.asarray(sample((3, 4, 5), "float32"))
  np.testing.assert_array_equal(jaxdnn.transform(x, permutation=(2, -3, 1)), jnp.transpose(x, (2, 0, 1)))
  pads = ((1, 2), (0, 0), (3, 0))
  np.testing.assert_array_equal(jaxdnn.transform(x, padding=pads, pad_value=4), jnp.pad(x, pads, constant_values=4))
  np.testing.assert_array_equal(
    jaxdnn.transform(x, padding=((-1, 0), (0, -2), (-3, 2))), jnp.pad(x[1:, :2, 3:], ((0, 0), (0, 0), (0, 2)))
  )
  np.testing.assert_array_equal(exact(jaxdnn.transform(x, dtype=jnp.bfloat16)), exact(x.astype(jnp.bfloat16)))
  assert jaxdnn.transform(jnp.float32(3), alpha=2.0) == 6


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float64"])
def test_every_channel_count(dtype):
  counts = (*range(1, 34), 47, 63, 64, 65, 96, 127, 128, 129)
  check_moves([Case((2, 3, 97, c), (0, 3, 1, 2)) for c in counts], dtype)
  check_moves([Case((2, c, 3, 97), (0, 2, 3, 1)) for c in counts], dtype)
  check_moves([Case((2, 32 * c, 3), (0, 2, 1)) for c in counts], dtype)
  check_moves([Case((c, 150), None, ((0, 0), (-1 - c % 3, c % 5 - 2))) for c in counts], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_unaligned_slices(dtype):
  """Slices at odd offsets reach the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(values((3, 1001, 37), dtype))
  shape = (1001, 37)
  for case in (Case(shape, (1, 0)), Case(shape, (1, 0), ((1, 0), (0, 3))), Case(shape, None, ((1, 1), (-1, 0)))):
    got = jax.jit(lambda x, case=case: jaxdnn.transform(x[1], **arguments(case)))(x)
    assert_same(got, move(np.asarray(x)[1], case))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_everything_and_repeat(dtype):
  for case in (Case((130, 67), (1, 0)), Case((5, 3000, 3), (0, 2, 1)), Case((9, 33), None, ((0, 5), (-1, 3)))):
    x = jnp.asarray(values(case.shape, dtype))
    moved = assert_repeatable(lambda x, case=case: jaxdnn.transform(x, **arguments(case)), x)
    assert_same(moved, move(np.asarray(x), case))
    half = assert_repeatable(lambda x, case=case: jaxdnn.transform(x, dtype="float16", alpha=0.5, **arguments(case)), x)
    assert_close(half, 0.5 * move(exact(x), case), "float16")


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  for dtype in ("bfloat16", "float32"):
    check_moves((*PERMUTED[::2], *PADDED[::2]), dtype)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """One huge dimension, many, and transposed: the last elements differ, so that a wrapped offset shows."""
  n = 2**31 + 2**20
  x = jnp.zeros((n,), jnp.int8).at[-1].set(7).at[5].set(3)
  y = jaxdnn.transform(x, padding=((1, 2),))
  assert y.shape == (n + 3,) and y[n] == 7 and y[6] == 3 and y[0] == 0 and int(jnp.count_nonzero(y)) == 2
  del y
  y = jaxdnn.transform(x.reshape(2**16 + 2**5, 2**15), permutation=(1, 0))
  assert y[-1, -1] == 7 and y[5, 0] == 3 and int(jnp.count_nonzero(y)) == 2
  del y
  y = jaxdnn.transform(x, dtype=jnp.bfloat16)
  assert y[-1] == 7 and y[5] == 3 and int(jnp.count_nonzero(y)) == 2
