"""Batch normalization: masks, derivatives of every order, vmap, and what differentiation keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from batch_norm_cases import Case
from batch_norm_oracle import Oracle, operands
from numerics import ROUNDOFF, assert_close, exact, sample

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


def test_statistics_leave_an_exported_program():
  x = jnp.asarray(sample((4, 3), "float32"))
  checks = [jax.export.DisabledSafetyCheck.custom_call("jaxdnn.batch_norm_train.v1")]  # what a GPU's program calls
  exported = jax.export.export(jax.jit(jaxdnn.batch_norm), disabled_checks=checks)(x)
  _, stats = jax.export.deserialize(exported.serialize()).call(x)
  assert isinstance(stats, jaxdnn.BatchStats)
  np.testing.assert_array_equal(stats.var, jaxdnn.batch_norm(x)[1].var)
