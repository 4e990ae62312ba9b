"""Batch normalization: inference, running statistics, and equality with other libraries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from batch_norm_cases import Case
from batch_norm_oracle import ACTIVATIONS, operands
from numerics import ROUNDOFF, assert_close, exact, sample

# Inference -----------------------------------------------------------------------------------------------------------


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
