"""logsumexp against NumPy in float64 and jax.nn: lengths, axes, masks, special values, derivatives of every order."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample
from softmax_cases import AXES, EMPTY, LENGTHS, Case

INF, NAN = np.inf, np.nan


def oracle(x, axis=-1, where=True):
  """The value, and the softmax that is its gradient."""
  x = np.where(where, exact(x), -INF)
  with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
    m = np.clip(np.max(x, axis, keepdims=True, initial=-1e300), -1e300, 1e300)
    y = m + np.log(np.sum(np.exp(x - m), axis, keepdims=True))
    return np.squeeze(y, axis), np.where(where, np.exp(x - y), 0)


def check_cases(cases, dtype):
  """Value, gradient and tangent of every case, all in one compilation."""
  xs = [2 * sample(c.shape, dtype, seed) for seed, c in enumerate(cases)]
  wanted = [oracle(x, c.axis) for x, c in zip(xs, cases, strict=True)]
  gs = [sample(y.shape, dtype, seed) for seed, (y, _) in enumerate(wanted)]

  def maps(case, x, g):
    f = functools.partial(jaxdnn.logsumexp, axis=case.axis)
    y, vjp = jax.vjp(f, x)
    return y, vjp(g)[0], jax.jvp(f, (x,), (x,))[1]

  results = jax.jit(lambda xs, gs: list(map(maps, cases, xs, gs)))(xs, gs)
  for case, x, g, (y, p), got in zip(cases, xs, gs, wanted, results, strict=True):
    axes = case.axis if isinstance(case.axis, tuple) else (case.axis,)
    n = max(1, math.prod(case.shape[a] for a in axes))
    assert_close(got[0], y, dtype, terms=n, scale=max(1, np.abs(y[np.isfinite(y)]).max(initial=1)))
    dx = p * np.expand_dims(exact(g), axes)
    assert_close(got[1], dx, dtype, terms=n, scale=np.abs(exact(g)).max(initial=1))
    assert_close(got[2], np.sum(p * exact(x), axes), dtype, terms=n, scale=max(1, np.abs(exact(x)).max(initial=1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(dtype):
  lengths = LENGTHS if jax.default_backend() == "gpu" else LENGTHS[::6]
  check_cases([Case((1 + n % 3, n)) for n in lengths], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_axes_and_empty_arrays(dtype):
  few = jax.default_backend() != "gpu" and dtype != "float32"
  check_cases(AXES[4::4] if few else AXES + EMPTY, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 40, 41, 1100, 70000])
def test_special_values(dtype, length):
  """As jax.nn: nothing but -inf is -inf, +inf is +inf, and NaN is NaN. The gradient of the first two rows is finite."""
  rows = np.full((7, length), -INF)
  rows[:, [0, length // 2, length - 1]] = [
    [-INF, 1, 2], [1, -INF, -INF], [-INF, -INF, -INF], [INF, 1, 2], [1, -INF, INF], [NAN, 1, 2], [INF, 2, NAN]
  ]  # fmt: skip
  x = jnp.asarray(rows, dtype)
  want = np.array([np.logaddexp(1, 2), 1, -INF, INF, INF, NAN, NAN])
  assert_close(jaxdnn.logsumexp(x), want, dtype, terms=4, scale=4)
  assert_close(jaxdnn.logsumexp(x.T, 0), want, dtype, terms=4, scale=4)
  np.testing.assert_allclose(
    exact(jaxdnn.logsumexp(x)), exact(jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)), rtol=1e-2
  )
  assert np.isfinite(exact(jax.grad(lambda x: jaxdnn.logsumexp(x).sum())(x[:2]))).all()


def test_extreme_magnitudes():
  """An offset of 1e7 keeps the gradient, which the rounded sum of origin and logarithm would not; so does the least
  finite number, with which masks are often filled."""
  for dtype, offset in [("float32", 1e7), ("float32", -1e7), ("float32", -3.4e38), ("bfloat16", -3.3e38)]:
    x = jnp.full((2, 8), offset, dtype)
    np.testing.assert_allclose(exact(jax.grad(lambda x: jaxdnn.logsumexp(x).sum())(x)), 1 / 8, rtol=1e-6)
    np.testing.assert_allclose(exact(jaxdnn.logsumexp(x)), exact(x[:, 0]), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks(dtype):
  """Masked entries change nothing, and have no gradient; a row without entries is -inf."""
  x = sample((2, 3, 4, 40), dtype)
  axes = itertools.cycle((-1, 1, (1, 2), (0, 3), -1))
  for shape in [(), (40,), (4, 1), (3, 1, 40), (2, 1, 1, 40), (2, 3, 4, 40)]:
    mask = np.random.default_rng(len(shape)).random(shape) < 0.6 if shape else np.True_
    junk = jnp.asarray(np.where(mask, exact(x), NAN), dtype)
    for axis in (next(axes), next(axes)):
      f = lambda x, axis=axis, mask=mask: jaxdnn.logsumexp(x, axis, where=jnp.asarray(mask), keepdims=True)  # noqa: E731
      y, vjp = jax.vjp(f, junk)
      want, p = oracle(x, axis, np.broadcast_to(mask, x.shape))
      assert_close(jnp.squeeze(y, axis), want, dtype, terms=40, scale=5)
      # No row is NaN: those without an entry have no gradient either.
      assert_close(vjp(jnp.ones_like(y))[0], np.nan_to_num(p), dtype, terms=40)


def test_second_order():
  x, mask = jnp.asarray(sample((3, 4), "float64")), jnp.asarray(np.arange(12).reshape(3, 4) % 5 != 0)
  for f in (jaxdnn.logsumexp, lambda x: jaxdnn.logsumexp(x, 0, where=mask)):
    check_grads(jax.jit(lambda x, f=f: jnp.sin(f(x))), (x,), order=2, modes=("fwd", "rev"))
  p = exact(jaxdnn.softmax(x[0]))
  np.testing.assert_allclose(jax.jit(jax.hessian(jaxdnn.logsumexp))(x[0]), np.diag(p) - np.outer(p, p), atol=1e-14)


def test_vmap_over_each_subset():
  x, mask = jnp.asarray(sample((3, 4, 5), "float64")), jnp.asarray(np.arange(15).reshape(3, 5) % 4 != 0)
  f = lambda x, m: jaxdnn.logsumexp(x, -1, where=m)  # noqa: E731
  each = jax.grad(lambda x, m: f(x, m).sum())
  for dx, dm in [(0, None), (None, 0), (0, 0), (1, None)]:
    xs, ms = (x if dx == 0 else jnp.moveaxis(x, 0, 1) if dx == 1 else x[0]), (mask if dm == 0 else mask[0])
    for g in (f, each):
      want = jnp.stack([g(x[0] if dx is None else x[i], mask[i] if dm == 0 else mask[0]) for i in range(3)])
      np.testing.assert_allclose(jax.vmap(g, (dx, dm))(xs, ms), want, rtol=1e-12)


def test_residuals_are_the_input_and_two_numbers_a_row():
  x = jnp.zeros((3, 400), jnp.bfloat16)
  kept = [(k.shape, k.dtype.name) for k in jax.tree.leaves(jax.vjp(jaxdnn.logsumexp, x)[1])]
  assert sorted(kept) == [((3, 1, 1), "float32"), ((3, 1, 1), "float32"), ((3, 400, 1), "bfloat16")]


def test_errors():
  with pytest.raises(TypeError, match="logsumexp: x must be floating-point, got int32"):
    jaxdnn.logsumexp(jnp.arange(3, dtype=jnp.int32))
  with pytest.raises(ValueError, match="logsumexp: axis must name axes of an array of rank 1, got 1"):
    jaxdnn.logsumexp(jnp.zeros(3), 1)
  with pytest.raises(ValueError, match=r"where of shape \(2,\) does not broadcast to x of shape \(3,\)"):
    jaxdnn.logsumexp(jnp.zeros(3), where=jnp.ones(2, bool))
  with pytest.raises(TypeError, match="where must be boolean, got int32"):
    jaxdnn.logsumexp(jnp.zeros(3), where=jnp.ones(3, jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_everything_and_repeat(dtype):
  for shape, axis in [((300, 10), -1), ((3, 1001), -1), ((2, 100000), -1), ((1, 3000001), -1), ((3, 200, 48), 1)]:
    x = jnp.asarray(sample(shape, dtype))
    f = functools.partial(jaxdnn.logsumexp, axis=axis)
    y, dx = assert_repeatable(lambda x, f=f: (f(x), jax.grad(lambda x: f(x).sum())(x)), x)
    assert_close(y, oracle(x, axis)[0], dtype, terms=shape[axis], scale=20)
    assert np.isfinite(exact(dx)).all()


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  for shape, axis in [((37, 10), -1), ((3, 1000), -1), ((1, 33001), -1), ((2, 21, 35), 1), ((2, 300, 40), 1)]:
    x = jnp.asarray(sample(shape, "float32"))
    assert_repeatable(lambda x, axis=axis: jax.grad(lambda x: jaxdnn.logsumexp(x, axis).sum())(x), x, repeats=2)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  for shape in [(1, 2**31 + 8), (2**28 + 1, 9)]:
    x = jnp.zeros(shape, jnp.bfloat16).at[-1, -1].set(20.0)
    y, vjp = jax.vjp(jaxdnn.logsumexp, x)
    want = np.log(shape[1] - 1 + np.exp(20.0))
    np.testing.assert_allclose(exact(y[-1]), want, rtol=1e-2)
    np.testing.assert_allclose(exact(vjp(y)[0][-1, -2:]), want * np.exp([-want, 20 - want]), rtol=3e-2)
    del x, y, vjp
