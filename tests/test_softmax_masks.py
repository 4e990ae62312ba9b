"""Softmax and log-softmax with `where`: masks of every shape, of every kernel, and in every derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from numerics import assert_close, exact, sample
from softmax_oracle import BOTH, FUNCTIONS, oracle, oracle_jvp, oracle_vjp

INF, NAN = np.inf, np.nan
MASK = np.array([[True, True, False, True], [False, True, False, False], [False, False, False, False]])


@pytest.mark.parametrize("op", BOTH)
def test_masked_entries_change_nothing(op):
  """Neither the value nor a derivative depends on them, and theirs are 0: first order, second order, forward mode."""
  f = functools.partial(FUNCTIONS[op], where=jnp.asarray(MASK))
  clean, w = np.where(MASK, sample((3, 4), "float64"), 0), jnp.asarray(sample((3, 4), "float64", 1))
  want = np.full((3, 4), 0.0 if op == "softmax" else -INF)
  for row, keep in enumerate(MASK):
    want[row, keep] = oracle(op, clean[row, keep])

  def loss(x):
    return (w * jnp.sin(jnp.where(MASK, f(x), 0))).sum()

  @jax.jit
  def everything(x):
    return f(x), jax.grad(loss)(x), jax.jvp(f, (x,), (w,))[1], jax.hessian(loss)(x)

  with jax.debug_nans(True):
    value, first, forward, second = map(np.asarray, everything(clean))
  assert_close(value, want, "float64", terms=4)
  assert np.isfinite(first).all() and np.isfinite(forward).all() and np.isfinite(second).all()
  assert (first[~MASK] == 0).all() and (forward[~MASK] == 0).all() and (first[0, MASK[0]] != 0).all()
  assert (second[~MASK] == 0).all() and (second[:, :, ~MASK] == 0).all()
  for junk in (1e30, INF, -INF, NAN):
    for got, expected in zip(everything(np.where(MASK, clean, junk)), (value, first, forward, second), strict=True):
      np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("op", BOTH)
def test_an_unmasked_row_of_minus_infinity_is_nan(op):
  y = FUNCTIONS[op](jnp.array([-INF, -INF, 0.0]), where=jnp.array([True, True, False]))
  np.testing.assert_array_equal(y, [NAN, NAN, 0.0 if op == "softmax" else -INF])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", BOTH)
def test_mask_broadcasts_and_follows_several_axes(op, dtype):
  x = sample((2, 3, 4, 5), dtype)
  for shape in [(), (5,), (4, 1), (3, 1, 5), (2, 3, 4, 5)]:
    mask = np.random.default_rng(len(shape)).random(shape) < 0.6 if shape else np.True_
    for axis in (-1, (1, 2), (0, 3)):
      want = oracle(op, np.where(mask, exact(x), -INF), axis)
      want = np.where(np.broadcast_to(mask, x.shape), want, 0.0 if op == "softmax" else -INF)
      got = jax.jit(lambda x, mask, axis=axis: FUNCTIONS[op](x, axis, where=mask))(x, mask)
      assert_close(got, want, dtype, terms=20, scale=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", BOTH)
def test_masks_of_every_kernel(op, dtype):
  """Short rows, long ones, several blocks to a row, columns; masks by row, by column, causal; NaN under them."""
  problems = []
  for shape, axis, mask_shape in [
    ((2, 3, 5, 100), -1, (2, 1, 1, 100)),
    ((2, 3, 33, 640), -1, (33, 640)),
    ((3, 2049), -1, (3, 2049)),
    ((2, 70001), -1, (1, 70001)),
    ((2, 300, 36), 1, (2, 300, 1)),
    ((2, 300, 36), 1, (300, 36)),
  ]:
    mask = np.random.default_rng(len(problems)).random(mask_shape) < 0.7
    if len(mask) > 1:
      mask[0] = False
    whole = np.broadcast_to(mask, shape)
    x = jnp.asarray(np.where(whole, exact(sample(shape, dtype)), NAN), dtype)
    g = jnp.asarray(np.where(whole, exact(sample(shape, dtype, 1)), NAN), dtype)
    problems.append((axis, x, g, mask))

  @jax.jit
  def everything(arrays):
    results = []
    for (x, g, mask), (axis, *_) in zip(arrays, problems, strict=True):
      f = functools.partial(FUNCTIONS[op], axis=axis, where=mask)
      y, vjp = jax.vjp(f, x)
      results.append((y, vjp(g)[0], jax.jvp(f, (x,), (g,))[1]))
    return results

  for (axis, x, g, mask), (y, dx, dy) in zip(problems, everything([p[1:] for p in problems]), strict=True):
    n, masked = x.shape[axis], -INF if op == "log_softmax" else 0.0
    kept = np.broadcast_to(mask, x.shape)
    want = np.where(kept, oracle(op, np.where(kept, exact(x), -INF), axis), masked)
    scale = np.abs(want[np.isfinite(want)]).max(initial=1)
    assert_close(y, want, dtype, terms=n, scale=scale)
    g = np.where(kept, exact(g), 0)
    for got, linear in ((dx, oracle_vjp), (dy, oracle_jvp)):
      assert_close(got, np.where(kept, linear(op, y, g, axis), 0), dtype, terms=n, scale=5 * (1 + np.sqrt(n) / 8))


@pytest.mark.parametrize("op, values", [("softmax", (0, NAN, 1 / 4)), ("log_softmax", (-INF, NAN, -np.log(4)))])
def test_fully_masked_rows_are_what_is_asked_for(op, values):
  f, x = FUNCTIONS[op], jnp.asarray(sample((3, 4), "float32"))
  for fully_masked, value in zip(("zero", "nan", "uniform"), values, strict=True):
    y, vjp = jax.vjp(lambda x, k=fully_masked: f(x, where=jnp.asarray(MASK), fully_masked=k), x)
    np.testing.assert_allclose(y[2], np.full(4, value), rtol=1e-6)
    np.testing.assert_array_equal(exact(y[:2]), exact(f(x, where=jnp.asarray(MASK)))[:2])
    np.testing.assert_array_equal(vjp(jnp.ones_like(x))[0][2], 0)
  with pytest.raises(ValueError, match=f"{op}: fully_masked must be one of 'zero', 'nan', 'uniform', got 'mean'"):
    f(x, fully_masked="mean")


def test_masked_derivatives_of_every_order_and_mode():
  x = jnp.asarray(sample((3, 4), "float64"))
  check_grads(jax.jit(lambda x: jaxdnn.softmax(x, where=MASK)), (x,), order=2, modes=("fwd", "rev"))
  log = lambda x: jnp.where(MASK, jaxdnn.log_softmax(x, where=MASK), 0)  # noqa: E731
  check_grads(jax.jit(log), (x,), order=2, modes=("fwd", "rev"))


def test_softmin_is_softmax_of_the_negative():
  x, mask = jnp.asarray(sample((3, 4), "float64")), jnp.asarray(MASK)
  np.testing.assert_array_equal(jaxdnn.softmin(x, 0, where=mask), jaxdnn.softmax(-x, 0, where=mask))
  np.testing.assert_array_equal(jax.grad(lambda x: jaxdnn.softmin(x)[0, 0])(x)[1:], 0)
  with pytest.raises(TypeError, match="softmin: x must be floating-point, got int32"):
    jaxdnn.softmin(jnp.arange(3, dtype=jnp.int32))
