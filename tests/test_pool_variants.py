"""Ceil mode, divisors, indices, unpooling and adaptive pooling, against brute force, and torch where it is there."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
import pool_oracle
from numerics import assert_close, assert_repeatable, exact, sample

# Ceil mode and divisors ----------------------------------------------------------------------------------------------


def ceil_extent(i, w, s, lo, hi, d):
  """The windows that start within the input or the padding before it, as far as they touch the padded input."""
  return sum(o * s < i + lo and o * s + (w - 1) * d + 1 - s < i + lo + hi for o in range(i + lo + hi + 1))


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("padding", [((0, 0),), ((1, 1),), ((1, 0),), ((0, 2),), ((1, 8),)], ids=str)
def test_ceil_mode(stride, padding):
  (lo, hi) = padding[0]
  sizes = [(i, w, d) for i, w, d in itertools.product((3, 7, 8), (2, 3), (1, 2)) if (w - 1) * d < i + lo + hi]
  arrays = {i: sample((1, i, 2), "float64") for i in (3, 7, 8)}

  @jax.jit
  def all_pools(arrays):
    pools = []
    for i, w, d in sizes:
      arguments = {"stride": stride, "padding": padding, "dilation": d, "ceil_mode": True}
      average = functools.partial(jaxdnn.avg_pool, arrays[i], (w,), **arguments)
      most = jaxdnn.max_pool(arrays[i], (w,), **arguments)
      pools.append((most, average(), average(count_include_pad=False), average(divisor_override=1.5)))
    return pools

  for (i, w, d), (most, including, excluding, by_override) in zip(sizes, all_pools(arrays), strict=True):
    outputs = ceil_extent(i, w, stride, lo, hi, d)
    more = (outputs - 1) * stride + (w - 1) * d + 1 - i - lo
    x, g = arrays[i], np.ones((1, outputs, 2))
    want, _ = pool_oracle.max_pool(x, g, (w,), (stride,), ((lo, more),), (d,))
    total = w * pool_oracle.avg_pool(x, g, (w,), (stride,), ((lo, more),), (d,), True)[0]
    np.testing.assert_array_equal(most, want)
    np.testing.assert_allclose(by_override, total / 1.5, rtol=1e-12, atol=1e-14)
    for include, got in ((True, including), (False, excluding)):
      count = [
        sum(-lo * include <= o * stride - lo + k * d < i + hi * include for k in range(w)) for o in range(outputs)
      ]
      np.testing.assert_allclose(got, total / np.maximum(count, 1)[:, None], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("padding", [((0, 0),), ((1, 8),)], ids=str)
def test_derivatives_in_ceil_mode(padding):
  average = functools.partial(jaxdnn.avg_pool, window=(3,), stride=2, padding=padding, dilation=2, ceil_mode=True)
  check_grads(jax.jit(average), (sample((1, 8, 2), "float64"),), 2)


# Indices and unpooling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [None, "NCHW"])
@pytest.mark.parametrize("pool", [jaxdnn.max_pool, jaxdnn.min_pool])
def test_indices(pool, layout):
  """The flat positions in the input at which the results are."""
  x = jnp.asarray(sample((2, 9, 8, 3), "float32"))
  x = x if layout is None else x.transpose(0, 3, 1, 2)
  arguments = {"stride": (2, 3), "padding": ((3, 1), (0, 2)), "dilation": (1, 2), "layout": layout}
  y, indices = jax.jit(lambda x: pool(x, (3, 2), return_indices=True, **arguments))(x)
  np.testing.assert_array_equal(y, pool(x, (3, 2), **arguments))
  assert indices.dtype == jnp.int32
  axis = (1, 2) if layout is None else (2, 3)
  flat = np.moveaxis(np.asarray(x), axis, (1, 2)).reshape(2, 72, 3)
  planes = [np.moveaxis(np.asarray(a), axis, (1, 2)).reshape(2, -1, 3) for a in (indices, y)]
  np.testing.assert_array_equal(planes[0] == -1, np.isinf(planes[1]))
  assert (planes[0] == -1).any()
  found = np.take_along_axis(flat, np.maximum(planes[0], 0), axis=1)
  np.testing.assert_array_equal(np.where(planes[0] == -1, planes[1], found), planes[1])


@pytest.mark.parametrize("window, stride, dilation", [((2, 2), 2, 1), ((3, 2), 1, 1), ((2, 3), 2, 2), ((17, 16), 1, 1)])
def test_unpool_is_the_adjoint_of_what_max_pool_took(window, stride, dilation):
  x = jnp.asarray(sample((2, 19, 18, 3), "float64"))
  arguments = {"stride": stride, "padding": ((1, 0), (0, 1)), "dilation": dilation}
  y, indices = jaxdnn.max_pool(x, window, return_indices=True, **arguments)

  def unpool(y, indices=indices):
    return jaxdnn.max_unpool(y, indices, window, extent=(19, 18), **arguments)

  got = unpool(y)
  want = np.zeros((2, 19 * 18, 3))
  for n, c in itertools.product(range(2), range(3)):
    np.add.at(want[n, :, c], np.asarray(indices)[n, ..., c].ravel(), np.asarray(y)[n, ..., c].ravel())
  np.testing.assert_allclose(got, want.reshape(x.shape), rtol=1e-12)
  check_grads(jax.jit(unpool), (y,), 2, modes=("fwd", "rev"))
  np.testing.assert_array_equal(
    jax.vmap(unpool, 2, 2)(jnp.stack([y, -y], 2), jnp.stack([indices] * 2, 2)), jnp.stack([got, -got], 2)
  )
  for wrong in (-1, -7, 19 * 18, 2**30):
    assert not unpool(y, jnp.full_like(indices, wrong)).any()


def test_unpool_errors():
  y = jnp.ones((2, 4, 4, 3))
  indices = jnp.zeros(y.shape, jnp.int32)
  for operands, more, error, message in (
    ((y, y), {}, TypeError, r"indices must be integers, got float64"),
    ((y, indices[:1]), {}, ValueError, r"indices must have y's shape \(2, 4, 4, 3\), got \(1, 4, 4, 3\)"),
    ((y, indices), {"extent": (9, 11)}, ValueError, r"pooling an extent of \(9, 11\) gives \(4, 5\), but y .* \(4,"),
    ((y, indices), {"extent": 0}, ValueError, r"extent must be positive, got \(0, 0\)"),
    ((indices, indices), {}, TypeError, r"y must be floating-point, got int32"),
  ):
    with pytest.raises(error, match=f"max_unpool: {message}"):
      jaxdnn.max_unpool(*operands, (2, 2), **{"extent": 8, "stride": 2, **more})


# Adaptive pooling ----------------------------------------------------------------------------------------------------

ADAPTIVE = [
  ((7,), (3,)),
  ((7,), (12,)),
  ((9, 8), (3, 4)),
  ((9, 8), (4, 3)),
  ((5, 6), (5, 6)),
  ((5, 6), (1, 1)),
  ((5, 6), (7, 1)),
  ((6, 5, 7), (2, 3, 7)),
  ((40, 31), (2, 1)),
  ((300,), (7,)),
  ((3, 2), (0, 1)),
]


def adaptive(x, g, t, out):
  f, h = (lambda x, pool=pool: pool(x, out) for pool in (jaxdnn.adaptive_max_pool, jaxdnn.adaptive_avg_pool))
  return [(jax.vjp(p, x)[0], jax.vjp(p, x)[1](g)[0], jax.jvp(p, (x,), (t,))[1]) for p in (f, h)]


def check_adaptive(extent, out, dtype, channels, run=jax.jit):
  x, g = sample((2, *extent, channels), dtype), sample((2, *out, channels), dtype, seed=1)
  t = sample(x.shape, dtype, seed=2)
  (most, most_dx, most_dy), (mean, mean_dx, mean_dy) = run(lambda *a: adaptive(*a, out))(*map(jnp.asarray, (x, g, t)))
  want = {k: np.zeros(g.shape) for k in ("max", "max_dy", "mean", "mean_dy")}
  want_dx = {k: np.zeros(x.shape) for k in ("max", "mean")}
  x, g, t = map(exact, (x, g, t))
  for o, cells in pool_oracle.bins(extent, out):
    at = (slice(None), *o)
    values = np.stack([x[(slice(None), *i)] for i in cells])
    tangents = np.stack([t[(slice(None), *i)] for i in cells])
    winner = values.argmax(0)
    want["max"][at], want["mean"][at], want["mean_dy"][at] = values.max(0), values.mean(0), tangents.mean(0)
    want["max_dy"][at] = np.take_along_axis(tangents, winner[None], 0)[0]
    for k, i in enumerate(cells):
      want_dx["max"][(slice(None), *i)] += np.where(winner == k, g[at], 0)
      want_dx["mean"][(slice(None), *i)] += g[at] / len(cells)
  terms = math.prod(extent)
  np.testing.assert_array_equal(exact(most), want["max"])
  np.testing.assert_array_equal(exact(most_dy), want["max_dy"])
  assert_close(most_dx, want_dx["max"], dtype, terms=terms, scale=4)
  assert_close(mean, want["mean"], dtype, terms=terms, scale=4)
  assert_close(mean_dy, want["mean_dy"], dtype, terms=terms, scale=4)
  assert_close(mean_dx, want_dx["mean"], dtype, terms=terms, scale=4)


@pytest.mark.parametrize("extent, out", ADAPTIVE)
def test_adaptive(extent, out):
  check_adaptive(extent, out, "float32", 3)


def test_adaptive_other_dtypes_and_vectors():
  for dtype in ("float64", "float16", "bfloat16"):
    check_adaptive((9, 8), (4, 3), dtype, 16)


@pytest.mark.parametrize("pool", [jaxdnn.adaptive_max_pool, jaxdnn.adaptive_avg_pool])
def test_adaptive_transformations(pool):
  x = jnp.asarray(np.random.default_rng(0).permutation(2 * 5 * 7 * 2).reshape(2, 5, 7, 2) / 10)
  check_grads(jax.jit(lambda x: pool(x, (3, 4))), (x,), 2, modes=("fwd", "rev"), eps=1e-3)
  gradient = jax.grad(lambda x: (pool(x, (3, 4)) ** 3).sum())
  stacked = jnp.stack([x, -x, 2 * x], 2)
  want = jnp.stack([gradient(v) for v in (x, -x, 2 * x)], 2)
  np.testing.assert_allclose(jax.vmap(gradient, 2, 2)(stacked), want, rtol=1e-12)
  np.testing.assert_array_equal(
    pool(x.transpose(0, 3, 1, 2), (3, None), layout="NCHW"), pool(x, (3, 7)).transpose(0, 3, 1, 2)
  )


def test_adaptive_indices_and_nan():
  x = jnp.asarray(sample((2, 7, 3), "float32")).at[:, 2].set(jnp.nan)
  y, indices = jaxdnn.adaptive_max_pool(x, (3,), return_indices=True)
  # Bins [0, 3), [2, 5) and [4, 7).
  np.testing.assert_array_equal(indices[:, :2], np.full((2, 2, 3), 2))
  np.testing.assert_array_equal(indices[:, 2], 4 + np.argmax(x[:, 4:], 1))
  assert np.isnan(y[:, :2]).all() and not np.isnan(y[:, 2]).any()


def test_adaptive_errors():
  x = jnp.ones((2, 6, 5, 3))
  for pool in (jaxdnn.adaptive_max_pool, jaxdnn.adaptive_avg_pool):
    for arguments, error, message in (
      ((x, 3), TypeError, r"output_size must be a sequence of 1 to 3 integers or None, got 3"),
      ((x, ()), ValueError, r"output_size must have 1 to 3 entries.*got \(\)"),
      ((x, (2, 1.5)), TypeError, r"output_size must be a sequence of integers or None, got \(2, 1\.5\)"),
      ((x, (2, -1)), ValueError, r"output_size must not be negative, got \(2, -1\)"),
      ((x[:, :0], (2, 2)), ValueError, r"output_size \(2, 2\) needs a nonempty input, got spatial extents \(0, 5\)"),
    ):
      with pytest.raises(error, match=f"{pool.__name__}: {message}"):
        pool(*arguments)


# PyTorch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("window, stride, padding", [(3, 2, 1), (2, 2, 0), (4, 3, 2)])
def test_equality_with_torch(window, stride, padding, ceil_mode):
  torch = pytest.importorskip("torch")
  F = torch.nn.functional
  x = sample((2, 3, 11, 10), "float32")
  ours = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode, "layout": "NCHW"}
  theirs = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
  y, indices = jaxdnn.max_pool(x, (window,) * 2, return_indices=True, **ours)
  want_y, want_indices = F.max_pool2d(torch.tensor(x), window, return_indices=True, **theirs)
  np.testing.assert_array_equal(y, want_y)
  np.testing.assert_array_equal(indices, want_indices)
  for more in ({}, {"count_include_pad": False}, {"divisor_override": 3}):
    got = jaxdnn.avg_pool(x, (window,) * 2, **ours, **more)
    np.testing.assert_allclose(got, F.avg_pool2d(torch.tensor(x), window, **theirs, **more), rtol=1e-5, atol=1e-6)
  if not ceil_mode and stride >= window:
    got = jaxdnn.max_unpool(y, indices, (window,) * 2, extent=(11, 10), **ours)
    want = F.max_unpool2d(want_y, want_indices, window, stride, padding, output_size=(11, 10))
    np.testing.assert_array_equal(got, want)
  for out in ((4, 3), (5, 10), (1, 1)):
    got, indices = jaxdnn.adaptive_max_pool(x, out, return_indices=True, layout="NCHW")
    want, want_indices = F.adaptive_max_pool2d(torch.tensor(x), out, return_indices=True)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(indices, want_indices)
    got = jaxdnn.adaptive_avg_pool(x, out, layout="NCHW")
    np.testing.assert_allclose(got, F.adaptive_avg_pool2d(torch.tensor(x), out), rtol=1e-5, atol=1e-6)
  magnitude = abs(x)
  got = jaxdnn.lp_pool(magnitude, (2, 2), power=3.0, stride=2, layout="NCHW")
  np.testing.assert_allclose(got, F.lp_pool2d(torch.tensor(magnitude), 3.0, 2), rtol=1e-5)


# On the GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("extent, out", ADAPTIVE[1::2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adaptive_kernels(extent, out, dtype):
  for channels in (3, 16):
    check_adaptive(extent, out, dtype, channels, run=lambda f: lambda *a: assert_repeatable(f, *a, repeats=2))
