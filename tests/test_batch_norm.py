"""Batch normalization against NumPy in float64: layouts, derivatives, masks, special values, running statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from batch_norm_cases import EMPTY, FIRST, LAST, Case
from jaxdnn import _extension
from numerics import ACCUMULATOR, DTYPES, ROUNDOFF, assert_close, assert_repeatable, exact, sample

ON_GPU = jax.default_backend() == "gpu"
BUILT = "jaxdnn.batch_norm_apply.v1" in _extension.TARGETS


def sigmoid(p):
  return 1 / (1 + np.exp(-p))


ACTIVATIONS = {
  None: (lambda p: p, np.ones_like),
  "relu": (lambda p: np.maximum(p, 0), lambda p: (p > 0) * 1.0),
  "sigmoid": (sigmoid, lambda p: sigmoid(p) * sigmoid(-p)),
  "tanh": (np.tanh, lambda p: 1 / np.cosh(p) ** 2),
}


class Oracle:
  """Value and derivatives in float64."""

  def __init__(self, case, x, scale, bias, *, epsilon=1e-5, activation=None, residual=None, where=True):
    self.case, self.where = case, np.broadcast_to(where, case.shape)
    self.f, self.df = ACTIVATIONS[activation]
    self.n = np.maximum(self.sum(np.ones(case.shape)), 1)
    self.scale, self.bias = (np.expand_dims(exact(v), case.reduced) for v in (scale, bias))
    x = np.where(self.where, exact(x), 0)
    self.mean = self.sum(x) / self.n
    self.centered = x - self.mean
    self.var = self.sum(self.centered**2) / self.n
    self.rstd = 1 / np.sqrt(self.var + epsilon)
    self.xhat = self.centered * self.rstd
    self.p = self.xhat * self.scale + self.bias + (0 if residual is None else exact(residual))

  def sum(self, v):
    return np.sum(np.where(self.where, v, 0), self.case.reduced, keepdims=True)

  def channels(self, v):
    return v.reshape(self.case.channels)

  def value(self):
    return np.where(self.where, self.f(self.p), 0)

  def vjp(self, dy, dmean=0.0, dvar=0.0):
    """Cotangents of x, scale, bias and the residual."""
    h = np.where(self.where, exact(dy), 0) * self.df(np.where(self.where, self.p, 0))
    dbias, dscale = self.sum(h), self.sum(h * self.xhat)
    dx = self.scale * self.rstd * (h - dbias / self.n - self.xhat * dscale / self.n)
    dx = dx + dmean / self.n + 2 * dvar * self.centered / self.n
    return np.where(self.where, dx, 0), self.channels(dscale), self.channels(dbias), h

  def jvp(self, t, tscale, tbias, tresidual=0.0):
    """Tangents of y, mean and var."""
    dmean, dvar = self.sum(t) / self.n, 2 * self.sum(t * self.centered) / self.n
    dxhat = (t - dmean) * self.rstd - self.xhat * dvar * self.rstd**2 / 2
    tscale, tbias = (np.expand_dims(v, self.case.reduced) for v in (tscale, tbias))
    dp = dxhat * self.scale + self.xhat * tscale + tbias + tresidual
    return np.where(self.where, self.df(self.p) * dp, 0), self.channels(dmean), self.channels(dvar)


def operands(case, dtype, seed=0):
  wide = ACCUMULATOR[dtype]
  x = 2 * sample(case.shape, dtype, seed) + np.ones((), np.float32).astype(sample((), dtype).dtype)
  return x, 1 + sample(case.channels, wide, seed + 1) / 4, sample(case.channels, wide, seed + 2)


def check_cases(cases, dtype, **options):
  """Value, statistics, cotangents and tangents of every case, all in one compilation."""
  wide = ACCUMULATOR[dtype]
  given = [operands(c, dtype, seed) for seed, c in enumerate(cases)]
  tangents = [
    (sample(c.shape, dtype, seed + 7), sample(c.channels, wide, seed + 8), sample(c.channels, wide, seed + 9))
    for seed, c in enumerate(cases)
  ]

  def maps(case, primals, tangents):
    def f(*primals):
      y, stats = jaxdnn.batch_norm(*primals, axis=case.axis, **options)
      return y, stats.mean, stats.var

    out, vjp = jax.vjp(f, *primals)
    return out, vjp((tangents[0], *map(jnp.zeros_like, out[1:]))), jax.jvp(f, primals, tangents)[1]

  results = jax.jit(lambda given, tangents: list(map(maps, cases, given, tangents)))(given, tangents)

  for case, primals, (t, *tparameters), (values, cotangents, forward) in zip(
    cases, given, tangents, results, strict=True
  ):
    oracle, n = Oracle(case, *primals, activation=options.get("activation")), max(1, case.terms)
    # Errors of the mean, of the deviations, and of what cancels where few entries make a channel.
    size = np.abs(oracle.scale * oracle.rstd).max(initial=0)
    spread = np.abs(oracle.xhat).max(initial=1)
    assert_close(values[0], oracle.value(), dtype, terms=n, scale=8 * (1 + size + spread))
    assert_close(values[1], oracle.channels(oracle.mean), wide, terms=n, scale=4)
    assert_close(values[2], oracle.channels(oracle.var), wide, terms=n, scale=8)
    scale = 4 * (1 + size) * spread**2 * np.abs(exact(t)).max(initial=1)
    dx, dscale, dbias, _ = oracle.vjp(t)
    assert_close(cotangents[0], dx, dtype, terms=n, scale=scale)
    assert_close(cotangents[1], dscale, wide, terms=n, scale=scale * np.sqrt(n))
    assert_close(cotangents[2], dbias, wide, terms=n, scale=scale * np.sqrt(n))
    dy, dmean, dvar = oracle.jvp(exact(t), *map(exact, tparameters))
    # Forward, an intermediate result is rounded to the data's type.
    rounding = ROUNDOFF[dtype] / ROUNDOFF[wide]
    assert_close(forward[0], dy, dtype, terms=n, scale=scale * rounding)
    assert_close(forward[1], dmean, wide, terms=n, scale=4)
    assert_close(forward[2], dvar, wide, terms=n, scale=8 * spread)


# Values and first derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", [LAST, FIRST], ids=["channels_last", "channels_first"])
def test_values_and_derivatives(cases, dtype):
  few = not ON_GPU and dtype != "float32"
  check_cases(cases[2::8] if few else cases[::2] if not ON_GPU else cases, dtype)


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a])
def test_activations(activation):
  cases = (LAST[4], LAST[16], FIRST[1], FIRST[8])
  for dtype in DTYPES if ON_GPU else ("float32",):
    check_cases(cases, dtype, activation=activation)


def test_empty_arrays():
  for case in EMPTY:
    x, scale, bias = operands(case, "float32")
    (y, stats), vjp = jax.vjp(lambda *a, case=case: jaxdnn.batch_norm(*a, axis=case.axis), x, scale, bias)
    assert y.shape == case.shape and stats.mean.shape == case.channels and stats.entries == case.terms
    assert not np.any(stats.mean) and not np.any(stats.var)
    for cotangent in vjp(jax.tree.map(jnp.ones_like, (y, stats))):
      np.testing.assert_array_equal(cotangent, np.zeros(cotangent.shape))


def test_unaligned_slice():
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(sample((3, 1001, 9), "bfloat16"))
  for axis in (0, 1):
    f = lambda x, axis=axis: jaxdnn.batch_norm(x, axis=axis)[0]  # noqa: E731
    np.testing.assert_allclose(exact(jax.jit(lambda x, f=f: f(x[1]))(x)), exact(f(x[1])), atol=0.05)


@pytest.mark.parametrize("activation", [None, "relu", "tanh"])
def test_residual(activation):
  """Forward, and backward with the residual's own cotangent."""
  for case in (LAST[3], LAST[18], FIRST[1], FIRST[8]):
    for dtype in ("float32", "bfloat16"):
      x, scale, bias = operands(case, dtype)
      z, g = sample(case.shape, dtype, 5), sample(case.shape, dtype, 6)

      def f(x, scale, bias, z, case=case):
        return jaxdnn.batch_norm(x, scale, bias, axis=case.axis, activation=activation, residual=z)[0]

      y, vjp = jax.vjp(jax.jit(f), x, scale, bias, z)
      oracle = Oracle(case, x, scale, bias, activation=activation, residual=z)
      assert_close(y, oracle.value(), dtype, terms=case.terms, scale=32)
      slack = 32 * ROUNDOFF[dtype] / ROUNDOFF["float32"]
      got = dict(zip(("dx", "dscale", "dbias", "dz"), vjp(jnp.asarray(g)), strict=True))
      for (name, value), want in zip(got.items(), oracle.vjp(g), strict=True):
        kind, terms = (dtype, 1) if name in ("dx", "dz") else ("float32", case.terms**2)
        assert_close(value, want, kind, terms=terms, scale=slack)


def test_mean_is_far_from_zero():
  """A mean of 1e4 with a deviation of 1e-2: nothing cancels, and y errs by no more than what the mean is rounded by."""
  for case in (Case((5000, 64)), Case((3000, 7)), Case((30, 5, 20, 20), 1), Case((40, 6, 7, 7), 1)):
    x = (1e4 + 1e-2 * sample(case.shape, "float64")).astype(np.float32)
    y, stats = jax.jit(functools.partial(jaxdnn.batch_norm, axis=case.axis, epsilon=0.0))(x)
    oracle = Oracle(case, x, np.ones(case.channels), np.zeros(case.channels), epsilon=0.0)
    np.testing.assert_allclose(stats.mean, oracle.channels(oracle.mean), rtol=2 * ROUNDOFF["float32"])
    np.testing.assert_allclose(stats.var, oracle.channels(oracle.var), rtol=1e-4)
    error = np.abs(exact(y) - oracle.value()).max()
    assert error < 1.2e4 * ROUNDOFF["float32"] / 0.9e-2


# Special values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_entry_for_each_channel(dtype):
  """The variance is 0 and the bias comes out, without NaN in any derivative; a running variance keeps its value."""
  x, bias = sample((1, 5), dtype), sample((5,), ACCUMULATOR[dtype])
  f = lambda x: jaxdnn.batch_norm(x, bias=bias)  # noqa: E731
  y, stats = f(x)
  np.testing.assert_array_equal(exact(y[0]), exact(bias.astype(x.dtype)))
  np.testing.assert_array_equal(exact(stats.mean), exact(x[0]))
  assert not np.any(stats.var) and stats.entries == 1
  np.testing.assert_allclose(exact(jax.grad(lambda x: f(x)[0].sum())(jnp.asarray(x))), 0, atol=1e-3)
  for convention in ("flax", "torch"):
    mean, var = jaxdnn.update_running_stats(
      (jnp.zeros(5), jnp.ones(5)), stats, momentum=0.5, convention=convention
    )
    assert np.isfinite(mean).all()
    np.testing.assert_allclose(var, 0.5)


def test_constant_input_has_finite_derivatives():
  x = jnp.full((6, 3), 2.0)
  loss = lambda x: jnp.sum(jnp.sin(jaxdnn.batch_norm(x, activation="relu")[0]))  # noqa: E731
  assert np.isfinite(jax.grad(loss)(x)).all() and np.isfinite(jax.hessian(loss)(x)).all()


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_value_spoils_its_channel_only(axis, value):
  for shape in ((5, 24, 24), (5, 20, 300)):
    x = sample(shape, "float32")
    x[2, 11, 7] = value
    y = exact(jaxdnn.batch_norm(x, axis=axis)[0])
    bad = np.zeros(shape, bool)
    bad[(..., 7) if axis == -1 else (slice(None), 11)] = True
    assert np.isnan(y[bad]).all() and np.isfinite(y[~bad]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_is_off_where_its_output_is_zero(dtype):
  """The backward pass computes on which side of 0 the pre-activation is once more, and must find the same."""
  for case in (Case((500, 24)), Case((3, 5, 20, 20), 1)):
    x, scale, _ = operands(case, dtype)
    x = np.round(x.astype(np.float32)).astype(x.dtype)
    relu = dict(axis=case.axis, activation="relu")
    y, stats = jaxdnn.batch_norm(x, scale, **relu)
    f = functools.partial(jaxdnn.batch_norm_inference, mean=stats.mean, var=stats.var, scale=scale, **relu)
    (dx,) = jax.vjp(f, jnp.asarray(x))[1](jnp.ones_like(y))
    np.testing.assert_array_equal(exact(dx) != 0, exact(y) > 0)


# Masks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  "case", [Case((4, 9, 6)), Case((4, 6, 9), 1), Case((3, 4, 30, 11), 1), Case((5, 3, 4), (1, 2))]
)
def test_masked_entries_change_nothing(case, dtype):
  """Neither a value nor a derivative depends on them, whatever they hold, and theirs are 0."""
  x, scale, bias = operands(case, dtype)
  z, g, t = (sample(case.shape, dtype, seed) for seed in (5, 6, 7))
  shape = tuple(1 if d in case.axes else n for d, n in enumerate(case.shape))
  where = np.random.default_rng(0).random(shape) < 0.6
  every = np.broadcast_to(where, case.shape)

  @jax.jit
  def everything(x, z, g, t):
    f = functools.partial(jaxdnn.batch_norm, axis=case.axis, where=where, activation="tanh")
    out, vjp = jax.vjp(lambda x, s, b, z: f(x, s, b, residual=z), x, scale, bias, z)
    plain = jax.vjp(lambda x, s, b: f(x, s, b)[0], x, scale, bias)
    return (
      out, vjp((g, *[jax.tree.map(jnp.ones_like, out[1])])), plain[0], plain[1](g),
      jax.jvp(lambda x: f(x, scale, bias)[0], (x,), (t,))[1],
    )  # fmt: skip

  clean = everything(x, z, g, t)
  (y, stats), (dx, dscale, dbias, dz), plain, (dx_plain, *_), dy = clean
  oracle = Oracle(case, x, scale, bias, activation="tanh", residual=z, where=where)
  assert stats.entries == int(where.sum())
  assert_close(y, oracle.value(), dtype, scale=32)
  assert_close(stats.mean, oracle.channels(oracle.mean), "float32", scale=32)
  assert_close(stats.var, oracle.channels(oracle.var), "float32", scale=32)
  slack = 64 * ROUNDOFF[dtype] / ROUNDOFF["float32"]
  want = oracle.vjp(g, dmean=1.0, dvar=1.0)
  for got, expected, kind in zip((dx, dscale, dbias, dz), want, (dtype, "float32", "float32", dtype), strict=True):
    assert_close(got, expected, kind, terms=case.terms, scale=slack)
  oracle = Oracle(case, x, scale, bias, activation="tanh", where=where)
  assert_close(dx_plain, oracle.vjp(g)[0], dtype, terms=case.terms, scale=slack)
  assert_close(dy, oracle.jvp(exact(t), 0 * scale, 0 * bias)[0], dtype, terms=case.terms, scale=slack)
  for array in (y, dx, dz, plain, dx_plain, dy):
    assert not exact(array)[~every].any()
  for junk in (1e30, np.inf, np.nan):
    spoiled = [np.where(every, a, np.asarray(junk, a.dtype)) for a in (x, z, g, t)]
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(everything(*spoiled)), strict=True):
      np.testing.assert_array_equal(exact(a), exact(b))


def test_nothing_unmasked():
  x, where = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 1), bool)
  y, stats = jaxdnn.batch_norm(x, where=where, activation="sigmoid")
  assert not np.any(y) and not np.any(stats.mean) and not np.any(stats.var) and stats.entries == 0
  assert not np.any(jax.grad(lambda x: jaxdnn.batch_norm(x, where=where)[0].sum())(x))
  running = jnp.full(3, 2.0), jnp.full(3, 3.0)
  for got, kept in zip(
    jaxdnn.update_running_stats(running, stats, momentum=0.1, convention="torch"), running, strict=True
  ):
    np.testing.assert_array_equal(got, kept)


def test_an_activation_without_a_kernel_leaves_masked_entries_zero():
  """What is not fused is applied after: softplus(0) is not 0."""
  where = jnp.array([[True], [False], [True]])
  y, _ = jaxdnn.batch_norm(jnp.ones((3, 2)), where=where, activation="softplus")
  np.testing.assert_allclose(y, np.where(where, np.log(2), 0) * np.ones((3, 2)))


# Derivatives and compositions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation, with_residual", [(None, True), ("tanh", False), ("tanh", True)])
def test_derivatives_of_every_order_and_mode(activation, with_residual):
  """Of the result and of the statistics, in every operand."""
  x, scale, bias = (jnp.asarray(a) for a in operands(Case((4, 3, 2)), "float64"))
  z = [jnp.asarray(sample((4, 3, 2), "float64", 5))] if with_residual else []
  where = jnp.array([[True, True, False], [True, True, True], [False, True, True], [True, True, True]])[..., None]

  @jax.jit
  def f(x, scale, bias, *z):
    y, stats = jaxdnn.batch_norm(
      x, scale, bias, activation=activation, residual=z[0] if z else None, where=where if with_residual else None
    )
    return y, stats.mean, stats.var

  check_grads(f, (x, scale, bias, *z), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_inference_derivatives_in_every_operand(activation):
  x, scale, bias = (jnp.asarray(a) for a in operands(Case((4, 2, 3), 1), "float64"))
  mean, var, z = bias / 2, scale**2, jnp.asarray(sample(x.shape, "float64", 5))
  f = jax.jit(functools.partial(jaxdnn.batch_norm_inference, axis=1, activation=activation))
  check_grads(f, (x, mean, var, scale, bias), order=2, modes=("fwd", "rev"))
  g = jax.jit(lambda *a: jaxdnn.batch_norm_inference(*a[:-1], axis=1, activation=activation, residual=a[-1]))
  check_grads(g, (x, mean, var, scale, bias, z), order=1, modes=("fwd", "rev"))


@pytest.mark.parametrize("activation", [None, "relu", "tanh"])
@pytest.mark.parametrize("case", [Case((7, 5, 24)), Case((7, 24, 5), 1), Case((2, 3, 20, 20), 1)])
def test_inference(case, activation):
  for dtype in ("float32", "bfloat16"):
    x, scale, bias = operands(case, dtype)
    z, g = sample(case.shape, dtype, 5), sample(case.shape, dtype, 6)
    mean, var = sample(case.channels, "float32", 3), 0.5 + sample(case.channels, "float32", 4) ** 2
    f = jax.jit(functools.partial(jaxdnn.batch_norm_inference, axis=case.axis, activation=activation))
    y, vjp = jax.vjp(f, x, mean, var, scale, bias)
    wide = functools.partial(np.expand_dims, axis=case.reduced)
    a = wide(scale / np.sqrt(exact(var) + 1e-5))
    centered = exact(x) - wide(mean)
    value, derivative = ACTIVATIONS[activation]
    p = centered * a + wide(bias)
    assert_close(y, value(p), dtype, scale=32)
    dx, dmean, dvar, dscale, dbias = vjp(jnp.asarray(g))
    h = exact(g) * derivative(p)
    assert_close(dx, h * a, dtype, scale=32)
    total = lambda v: np.sum(v, case.reduced)  # noqa: E731
    for got, want in (
      (dbias, total(h)),
      (dmean, total(-h * a)),
      (dscale, total(h * centered) / np.sqrt(exact(var) + 1e-5)),
      (dvar, total(-0.5 * h * centered) * scale / (exact(var) + 1e-5) ** 1.5),
    ):
      assert_close(got, want, "float32", terms=case.terms, scale=64)
    with_z = functools.partial(f, mean=mean, var=var, scale=scale, bias=bias)
    y, vjp = jax.vjp(lambda x, z, f=with_z: f(x, residual=z), x, z)
    assert_close(y, value(p + exact(z)), dtype, scale=32)
    dz = exact(g) * derivative(p + exact(z))
    slack = 64 * ROUNDOFF[dtype] / ROUNDOFF["float32"]
    for got, want in zip(vjp(jnp.asarray(g)), (dz * a, dz), strict=True):
      assert_close(got, want, dtype, scale=slack)


def test_vmap_over_every_subset_of_operands():
  x, scale, bias = operands(Case((3, 4, 5, 2)), "float64")
  scale, bias = np.stack([scale, -scale, scale + 1]), np.stack([bias, bias - 1, 2 * bias])
  z = sample(x.shape, "float64", 5)
  where = np.random.default_rng(0).random((3, 4, 5, 1)) < 0.7
  stacked = [x, scale, bias, z, where]

  def loss(x, scale, bias, z, where):
    y, stats = jaxdnn.batch_norm(x, scale, bias, residual=z, where=where, activation="tanh")
    return jnp.sum(jnp.sin(y)) + jnp.sum(stats.var)

  both = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
  for subset in ((0,), (1,), (3,), (4,), (0, 1, 2), (1, 2, 4), (0, 1, 2, 3, 4)):
    dims = [0 if i in subset else None for i in range(5)]
    given = [a if i in subset else a[0] for i, a in enumerate(stacked)]
    got = jax.vmap(both, dims)(*given)
    each = [both(*(a[j] if i in subset else a for i, a in enumerate(given))) for j in range(3)]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), rtol=1e-9, atol=1e-12), got, *each)


def test_vmap_over_any_axis():
  x = jnp.asarray(sample((3, 4, 5), "float64"))
  for d in range(3):
    got = jax.vmap(lambda x: jaxdnn.batch_norm(x)[0], d, d)(x)
    want = jnp.stack([jaxdnn.batch_norm(x.take(i, d))[0] for i in range(x.shape[d])], d)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_scan_and_remat():
  x = jnp.asarray(sample((6, 4), "float64"))
  f = lambda x: jaxdnn.batch_norm(x + x * x, activation="tanh")[0]  # noqa: E731
  scanned = lambda x: jax.lax.scan(jax.checkpoint(lambda c, _: (f(c), None)), x, None, length=2)[0].sum()  # noqa: E731
  np.testing.assert_allclose(jax.grad(scanned)(x), jax.grad(lambda x: f(f(x)).sum())(x), rtol=1e-9, atol=1e-12)


def test_what_is_kept_for_the_backward_pass():
  """x and numbers for each channel; a fused activation adds nothing, and with a residual relu adds its output."""
  x, z = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((8, 64), jnp.bfloat16)

  def big(f, *args):
    return [a.shape for a in jax.tree.leaves(jax.vjp(f, *args)[1]) if a.size >= x.size]

  for activation in (None, "relu", "tanh"):
    assert len(big(lambda x, a=activation: jaxdnn.batch_norm(x, activation=a)[0], x)) == 1
  added = lambda x, z: jaxdnn.batch_norm(x, activation="relu", residual=z)[0]  # noqa: E731
  assert len(big(added, x, z)) == 2
  assert big(lambda b: jaxdnn.batch_norm(x, bias=b)[0], jnp.zeros(64)) == [(8, 64, 1)]


# Running statistics, and other libraries ------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["flax", "torch"])
def test_running_statistics(convention):
  x = sample((10, 4), "float32")
  _, stats = jaxdnn.batch_norm(x)
  running = jnp.arange(4.0, dtype=jnp.float32), jnp.full(4, 2.0, jnp.float32)
  mean, var = jaxdnn.update_running_stats(running, stats, momentum=0.25, convention=convention)
  old, new = (0.25, 0.75) if convention == "flax" else (0.75, 0.25)
  np.testing.assert_allclose(mean, old * np.arange(4) + new * x.mean(0), rtol=1e-5)
  np.testing.assert_allclose(var, old * 2 + new * x.var(0, ddof=int(convention == "torch")), rtol=1e-5)
  assert mean.dtype == var.dtype == jnp.float32


def test_matches_flax():
  nn = pytest.importorskip("flax.linen")
  x = jnp.asarray(2 * sample((4, 5, 6, 3), "float32") + 1)
  mask = jnp.asarray(np.random.default_rng(0).random((4, 5, 6, 1)) < 0.7)
  for axis, where in ((-1, None), (1, None), ((1, 2, 3), None), (-1, mask)):
    layer = nn.BatchNorm(False, axis=axis, momentum=0.9, use_fast_variance=False)
    variables = layer.init(jax.random.key(0), x)
    want, updated = layer.apply(variables, x, mutable="batch_stats", mask=where)
    p, old = variables["params"], variables["batch_stats"]
    y, stats = jaxdnn.batch_norm(x, p["scale"], p["bias"], axis=axis, where=where)
    want = want if where is None else jnp.where(where, want, 0)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    running = jaxdnn.update_running_stats((old["mean"], old["var"]), stats, momentum=0.9, convention="flax")
    for got, name in zip(running, ("mean", "var"), strict=True):
      np.testing.assert_allclose(got, updated["batch_stats"][name], rtol=1e-5, atol=1e-6)
    inference = nn.BatchNorm(True, axis=axis).apply({"params": p, **updated}, x)
    got = jaxdnn.batch_norm_inference(x, *running, p["scale"], p["bias"], axis=axis)
    np.testing.assert_allclose(got, inference, rtol=1e-4, atol=1e-4)


def test_matches_torch():
  torch = pytest.importorskip("torch")
  x, scale, bias = operands(Case((4, 3, 5, 6), 1), "float32")
  g = sample(x.shape, "float32", 3)
  tx, ts, tb = (torch.tensor(a, requires_grad=True) for a in (x, scale, bias))
  running = torch.zeros(3), torch.ones(3)
  want = torch.nn.functional.batch_norm(tx, *running, ts, tb, training=True, momentum=0.1)
  want.backward(torch.tensor(g))
  (y, stats), vjp = jax.vjp(functools.partial(jaxdnn.batch_norm, axis=1), x, scale, bias)
  np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-4, atol=1e-5)
  cotangents = vjp((jnp.asarray(g), jax.tree.map(jnp.zeros_like, stats)))
  for got, t in zip(cotangents, (tx, ts, tb), strict=True):
    np.testing.assert_allclose(got, t.grad.numpy(), rtol=1e-3, atol=1e-4)
  start = jnp.zeros(3, jnp.float32), jnp.ones(3, jnp.float32)
  for got, expected in zip(
    jaxdnn.update_running_stats(start, stats, momentum=0.1, convention="torch"), running, strict=True
  ):
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-6)


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not BUILT, reason="built without the CUDA kernels")
@pytest.mark.parametrize("axis", [-1, 1])
def test_cuda_program(axis):
  def text(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  shape = (4, 6, 6, 8) if axis == -1 else (4, 8, 6, 6)
  f = lambda x: jaxdnn.batch_norm(x, axis=axis, activation="relu")[0]  # noqa: E731
  gradient = text(lambda x: jax.vjp(f, x)[1](x), shape)
  for target in ("statistics", "sums", "gradient"):
    assert gradient.count(f"@jaxdnn.batch_norm_{target}.v1") == 1
  assert 'activation = "relu"' in gradient and 'slot = "outer"' in gradient
  assert "transpose" not in gradient, "neither layout may move"
  tangent = text(lambda x: jax.jvp(f, (x,), (x,)), shape)
  assert "@jaxdnn.batch_norm_moments.v1" in tangent and "@jaxdnn.batch_norm_tangent.v1" in tangent


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors():
  x = jnp.zeros((2, 3, 4), jnp.float32)
  f = jaxdnn.batch_norm
  with pytest.raises(TypeError, match="batch_norm: x must be floating-point, got int32"):
    f(jnp.zeros((2, 3), jnp.int32))
  with pytest.raises(ValueError, match="axis must name axes of an array of rank 3, got 3"):
    f(x, axis=3)
  with pytest.raises(ValueError, match=r"names the same axis of an array of rank 3 twice, got \(1, -2\)"):
    f(x, axis=(1, -2))
  with pytest.raises(ValueError, match=r"scale must have shape \(4,\), x \(2, 3, 4\) along axis \(2,\), got \(3,\)"):
    f(x, jnp.zeros(3, jnp.float32))
  with pytest.raises(TypeError, match="bias must be floating-point, got int32"):
    f(x, None, jnp.zeros(4, jnp.int32))
  with pytest.raises(ValueError, match=r"residual must have the shape of x, \(2, 3, 4\); got \(2, 3\)"):
    f(x, residual=jnp.zeros((2, 3), jnp.float32))
  with pytest.raises(TypeError, match="residual must have the type of x, float32; got bfloat16"):
    f(x, residual=x.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match=r"activation must be None or one of .*, got 'rleu'"):
    f(x, activation="rleu")
  with pytest.raises(ValueError, match="epsilon must not be negative, got -1"):
    f(x, epsilon=-1.0)
  with pytest.raises(TypeError, match="where must be boolean, got float32"):
    f(x, where=x)
  with pytest.raises(ValueError, match=r"where must have size 1 along axis -1, got shape \(2, 3, 4\) for x"):
    f(x, where=x == 0)
  with pytest.raises(ValueError, match=r"batch_norm_inference: var must have shape \(4,\)"):
    jaxdnn.batch_norm_inference(x, jnp.zeros(4, jnp.float32), jnp.zeros((4, 1), jnp.float32))
  with pytest.raises(ValueError, match="convention must be 'flax' or 'torch', got 'cudnn'"):
    jaxdnn.update_running_stats((x, x), f(x)[1], momentum=0.1, convention="cudnn")


# On a GPU ------------------------------------------------------------------------------------------------------------


def check_repeatable(case, dtype, repeats=10, **options):
  x, scale, bias = (jnp.asarray(a) for a in operands(case, dtype))
  g = jnp.asarray(sample(case.shape, dtype, 3))
  f = lambda *a: jaxdnn.batch_norm(*a, axis=case.axis, **options)  # noqa: E731
  y, _ = assert_repeatable(f, x, scale, bias, repeats=repeats)
  assert np.isfinite(exact(y)).all()
  vjp = lambda *a: jax.vjp(lambda *a: f(*a)[0], *a[:-1])[1](a[-1])  # noqa: E731
  jvp = lambda *a: jax.jvp(lambda x: f(x, *a[1:-1])[0], a[:1], a[-1:])[1]  # noqa: E731
  for linear in (vjp, jvp):
    for result in jax.tree.leaves(assert_repeatable(linear, x, scale, bias, g, repeats=repeats)):
      assert np.isfinite(exact(result)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_everything_and_repeat(dtype):
  for case in (Case((5000, 64)), Case((3001, 7)), Case((300, 2050)), Case((9, 33, 17, 17), 1), Case((9, 33, 7, 7), 1)):
    check_repeatable(case, dtype, activation="relu")
  check_repeatable(Case((3001, 24)), dtype, where=jnp.asarray(np.arange(3001) % 3 != 0)[:, None], activation="silu")


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_under_the_sanitizer(dtype):
  for case in (Case((77, 7)), Case((40, 72)), Case((3, 5, 17, 17), 1), Case((3, 6, 7, 7), 1), Case((2, 3, 16, 20), 1)):
    check_repeatable(case, dtype, repeats=2, activation="relu")
  check_repeatable(Case((77, 7)), dtype, repeats=2, where=jnp.asarray(np.arange(77) % 3 != 0)[:, None])


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(1, 520, 40))
def test_every_width(first):
  for dtype in ("float32", "bfloat16"):
    check_cases([Case((3 + c % 50, c)) for c in range(first, first + 40)], dtype)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """64-bit offsets, in both layouts: the last channel differs, so that a wrapped offset shows."""
  for shape, axis in (((2**25 + 3, 65), -1), ((5, 3, 2**27 + 2**20), 1), ((2**31 + 11, 1), -1)):
    spike = (slice(None), -1)
    n = np.prod(shape) // shape[axis]

    def f(x, axis=axis):
      y, stats = jaxdnn.batch_norm(x, axis=axis)
      return y, stats

    x = jnp.zeros(shape, jnp.bfloat16).at[spike].set(3.0).at[(0,) * len(shape)].set(1.0)
    (y, stats), vjp = jax.vjp(jax.jit(f), x)
    assert stats.entries == np.float32(n)
    if shape[axis] > 1:
      np.testing.assert_allclose(exact(stats.mean[-1]), 3.0, rtol=1e-6)
      assert stats.var[-1] == 0
      np.testing.assert_allclose(exact(stats.mean[0]), 1 / n, rtol=1e-3)
      assert (y[spike] == 0).all()
    (dx,) = vjp((jnp.ones_like(y), jax.tree.map(jnp.zeros_like, stats)))
    assert jnp.abs(dx).max() < 1e-2
    del x, y, dx, vjp
