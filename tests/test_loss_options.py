"""Weights, ignored labels, smoothing, soft labels and z-loss against NumPy in float64, PyTorch and optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import jaxdnn
from numerics import DTYPES, ROUNDOFF, exact, sample

CASES = [((7, 10), -1), ((3, 130, 4), 1), ((2, 5, 3, 2), 1), ((2, 1100), -1), ((3, 41), -1)]
OPTIONS = [
  dict(),
  dict(weight=True),
  dict(ignore_index=-100),
  dict(weight=True, ignore_index=3),
  dict(label_smoothing=0.1),
  dict(weight=True, ignore_index=3, label_smoothing=0.3),
  dict(z_loss=1e-2, ignore_index=3),
]


def oracle(x, labels, axis, weight=None, ignore_index=None, label_smoothing=0.0, z_loss=0.0):
  """The definitions of PyTorch, written out: the losses, their mean, and its gradient.

  Labels are numbers, or soft where they have the rank of x.
  """
  x = np.moveaxis(exact(x), axis, -1)
  classes, soft = x.shape[-1], np.ndim(labels) == x.ndim
  w = np.ones(classes) if weight is None else exact(weight)
  present = np.ones(x.shape[:-1]) if soft else (labels != ignore_index).astype(float)
  numbers = None if soft else np.where(labels == ignore_index, 0, labels)
  q = np.moveaxis(exact(labels), axis, -1) if soft else np.eye(classes)[numbers]
  # The weight of a smoothed integer label is that of its class for its own part, and of each class for the other.
  q = ((1 - label_smoothing) * q + label_smoothing / classes) * w * present[..., None]
  lse = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
  losses = -np.sum(q * (x - lse[..., None]), -1) + z_loss * lse**2 * present
  count = present.size if soft else (w[numbers] * present).sum()
  p = np.exp(x - lse[..., None])
  gradient = p * (q.sum(-1) + 2 * z_loss * lse * present)[..., None] - q
  return losses, losses.sum() / count, np.moveaxis(gradient, -1, axis) / count


def drawn(shape, axis, dtype, options, soft=False, seed=0):
  rng = np.random.default_rng(seed)
  x, classes = sample(shape, dtype, seed), shape[axis]
  options = dict(options)
  if options.get("weight"):
    options["weight"] = (0.5 + rng.random(classes)).astype(exact(x).dtype if dtype == "float64" else "float32")
  if soft:
    q = rng.random(shape)
    return x, (q / q.sum(axis, keepdims=True)).astype(x.dtype), options
  labels = rng.integers(classes, size=np.delete(shape, axis))
  labels.flat[0] = options.get("ignore_index", labels.flat[0])
  return x, labels, options


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(dtype, soft):
  """All cases and options in two compilations."""
  options = [o for o in OPTIONS if not (soft and "ignore_index" in o)]
  few = jax.default_backend() != "gpu" and dtype != "float32"
  problems = [(axis, *drawn(shape, axis, dtype, o, soft)) for shape, axis in CASES[:: 2 if few else 1] for o in options]

  @jax.jit
  def everything(arrays):
    results = []
    for (x, labels, weight), (axis, *_, o) in zip(arrays, problems, strict=True):
      o = {**o, "weight": weight} if "weight" in o else o
      f = functools.partial(jaxdnn.cross_entropy, axis=axis, **o)
      results.append((f(x, labels, reduction="none"), *jax.value_and_grad(f)(x, labels)))
    return results

  results = everything([(x, labels, o.get("weight")) for _, x, labels, o in problems])
  for (axis, x, labels, o), (losses, mean, gradient) in zip(problems, results, strict=True):
    tolerance = dict(rtol=4 * ROUNDOFF[dtype] + 1e-6, atol=2e-6) if dtype != "float64" else dict(rtol=1e-11, atol=1e-12)
    assert losses.dtype == mean.dtype == gradient.dtype == x.dtype
    want_losses, want_mean, want = oracle(x, labels, axis, **o)
    np.testing.assert_allclose(exact(losses), want_losses, **tolerance)
    np.testing.assert_allclose(exact(mean), want_mean, **tolerance)
    tolerance["atol"] += 2 * ROUNDOFF[dtype] * np.abs(want).max()
    np.testing.assert_allclose(exact(gradient), want, **tolerance)


def test_matches_torch():
  torch = pytest.importorskip("torch")
  for shape, axis in CASES[:3]:
    for options in OPTIONS[:-1]:
      for soft in (False, True):
        if soft and "ignore_index" in options:
          continue
        x, labels, o = drawn(shape, axis, "float64", options, soft)
        given = {k: torch.tensor(v) if k == "weight" else v for k, v in o.items()}
        x_torch = torch.tensor(np.moveaxis(x, axis, 1), requires_grad=True)
        labels_torch = torch.tensor(np.moveaxis(labels, axis, 1) if soft else labels)
        want = torch.nn.functional.cross_entropy(x_torch, labels_torch, **given)
        want.backward()
        got, gradient = jax.value_and_grad(jaxdnn.cross_entropy)(jnp.asarray(x), jnp.asarray(labels), axis=axis, **o)
        np.testing.assert_allclose(got, want.item(), rtol=1e-12)
        np.testing.assert_allclose(np.moveaxis(gradient, axis, 1), x_torch.grad.numpy(), rtol=1e-10, atol=1e-15)


def test_matches_optax():
  x, q, _ = drawn((4, 6), -1, "float64", {}, soft=True)
  got = jaxdnn.cross_entropy(jnp.asarray(x), jnp.asarray(q), reduction="none")
  np.testing.assert_allclose(got, optax.softmax_cross_entropy(x, q), rtol=1e-12)
  q[0] = [0, 1, 0, 0, 0, 0]
  x[0, 2] = -np.inf
  got, gradient = jax.value_and_grad(lambda x: jaxdnn.cross_entropy(x, jnp.asarray(q)))(jnp.asarray(x))
  assert np.isfinite(got) and np.isfinite(gradient).all(), "a class of probability 0 without weight"


@pytest.mark.parametrize("options", OPTIONS)
def test_nll_loss_takes_weight_and_ignore_index(options):
  if {"label_smoothing", "z_loss"} & set(options):
    return
  x, labels, o = drawn((3, 10, 4), 1, "float64", options)
  got = jaxdnn.nll_loss(jax.nn.log_softmax(jnp.asarray(x), 1), jnp.asarray(labels), axis=1, **o)
  np.testing.assert_allclose(got, oracle(x, labels, 1, **o)[1], rtol=1e-12)


def test_ignored_rows_take_no_part_whatever_they_hold():
  x = jnp.asarray(sample((3, 4), "float32")).at[1].set(jnp.nan)
  for f in (jaxdnn.nll_loss, jaxdnn.cross_entropy):
    loss, gradient = jax.value_and_grad(functools.partial(f, ignore_index=7))(x, jnp.array([0, 7, 2]))
    assert np.isfinite(loss) and np.isfinite(gradient).all() and (gradient[1] == 0).all()
    assert np.isnan(f(x, jnp.array([7, 7, 7]), ignore_index=7)), "the mean over no labels"
    assert f(x, jnp.array([7, 7, 7]), ignore_index=7, reduction="sum") == 0
    with jax.debug_nans(True):
      f(x[::2], jnp.array([7, 2]), ignore_index=7)
    # An index that the labels' type cannot hold ignores nothing.
    assert np.isfinite(f(x[::2], jnp.array([0, 2], np.uint8), ignore_index=-100))


@pytest.mark.parametrize("held", [np.nan, np.inf, -np.inf])
def test_ignored_rows_take_no_part_in_any_derivative(held):
  """Of the z-loss and of smoothed labels too, in the logits and in the weights."""
  x, w = jnp.asarray(sample((3, 4), "float32")).at[1].set(held), jnp.array([0.5, 1.0, 0.0, 2.0], jnp.float32)
  f = functools.partial(jaxdnn.cross_entropy, label_smoothing=0.2, z_loss=1e-2, reduction="sum")
  for index in (-1, 7):
    ignoring = lambda x, w, i=index: f(x, jnp.array([0, i, 2]), weight=w, ignore_index=i)  # noqa: E731
    without = lambda x, w: f(x, jnp.array([0, 2]), weight=w)  # noqa: E731
    dx, dw = jax.grad(ignoring, (0, 1))(x, w)
    want_dx, want_dw = jax.grad(without, (0, 1))(x[::2], w)
    assert (dx[1] == 0).all()
    np.testing.assert_allclose(dx[::2], want_dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5)
    for derivative in (jax.hessian(ignoring, (0, 1)), jax.jacfwd(jax.jacfwd(ignoring, (0, 1)), (0, 1))):
      assert all(np.isfinite(h).all() for h in jax.tree.leaves(derivative(x, w)))


def test_gradient_in_weights_adds_in_order():
  """Over labels that share a class; a scatter would add them as they come."""
  x, labels = jnp.asarray(sample((50, 3), "float64")), jnp.arange(50) % 2
  gradient = jax.grad(lambda w: jaxdnn.cross_entropy(x, labels, weight=w, reduction="sum"))
  assert "scatter" not in jax.jit(gradient).lower(jnp.ones(3)).as_text()
  losses = jaxdnn.cross_entropy(x, labels, reduction="none")
  np.testing.assert_allclose(gradient(jnp.ones(3)), [losses[::2].sum(), losses[1::2].sum(), 0], rtol=1e-12)


def test_gradients_in_weights_that_are_zero():
  """Of soft labels that are one-hot, and of classes without weight, where a score must not lose its terms."""
  x, q = jnp.asarray(sample((3, 4), "float64")), jnp.eye(4)[:3]
  log_p = np.log(np.exp(x) / np.exp(x).sum(-1, keepdims=True))
  f = functools.partial(jaxdnn.cross_entropy, reduction="sum")
  for jacobian in (jax.jacrev, jax.jacfwd):
    np.testing.assert_allclose(jacobian(f, 1)(x, q), -log_p, rtol=1e-12)
    mixed = jacobian(jax.grad(f), 1)(x, q)[0, :, 0]
    np.testing.assert_allclose(mixed, np.exp(log_p[0])[:, None] - np.eye(4), rtol=1e-12)
    got = jacobian(lambda w: f(x, jnp.arange(3), weight=w, label_smoothing=0.2))(jnp.zeros(4))
    np.testing.assert_allclose(got, -0.8 * np.append(np.diag(log_p), 0) - 0.05 * log_p.sum(0), rtol=1e-12)


def test_derivatives_of_every_order_and_mode():
  """In the logits, in soft labels and in the weights."""
  x, q, o = drawn((3, 4), -1, "float64", dict(weight=True), soft=True)
  labels = jnp.array([0, 3, 9])
  f = functools.partial(jaxdnn.cross_entropy, label_smoothing=0.2, z_loss=1e-2)
  arrays = tuple(jnp.asarray(a) for a in (x, q, o["weight"]))
  check_grads(jax.jit(lambda x, q, w: f(x, q, weight=w)), arrays, order=2, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda x, w: f(x, labels, weight=w, ignore_index=9)), arrays[::2], order=2, modes=("fwd", "rev"))


def test_vmap_over_each_subset():
  x, labels, o = drawn((3, 4, 5), -1, "float64", dict(weight=True))
  x, labels, w = jnp.asarray(x), jnp.asarray(labels), jnp.stack([jnp.asarray(o["weight"]) * k for k in (1, 2, 3)])
  grad = jax.grad(lambda x, y, w: jaxdnn.cross_entropy(x, y, weight=w, label_smoothing=0.1, reduction="sum"), (0, 2))
  for dims in [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, None, 0)]:
    args = [a if d == 0 else a[0] for a, d in zip((x, labels, w), dims, strict=True)]
    each = [grad(*(a[i] if d == 0 else a for a, d in zip(args, dims, strict=True))) for i in range(3)]
    for got, want in zip(jax.vmap(grad, dims)(*args), zip(*each, strict=True), strict=True):
      np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-11, atol=1e-14)


def test_large_offset_keeps_the_gradient():
  """The rounded log-sum-exp alone would be off by a factor here."""
  x = jnp.full((2, 8), 1e7, jnp.float32)
  gradient = jax.grad(jaxdnn.cross_entropy)(x, jnp.array([0, 7]))
  np.testing.assert_allclose(gradient, (1 / 8 - np.eye(8)[[0, 7]]) / 2, rtol=1e-6)


def test_no_probabilities_are_kept():
  x, labels = jnp.zeros((64, 1000), jnp.bfloat16), jnp.zeros(64, int)
  kept = jax.tree.leaves(jax.vjp(lambda x: jaxdnn.cross_entropy(x, labels), x)[1])
  assert sum(k.size for k in kept) < x.size + 10 * 64
  assert [k.dtype for k in kept if k.size == x.size] == [jnp.bfloat16], "nothing of the size of x but x"


def test_errors():
  x, labels = jnp.zeros((2, 3)), jnp.zeros(2, int)
  for bad in (-0.1, 1.5, np.nan):
    with pytest.raises(ValueError, match=r"cross_entropy: label_smoothing must be in \[0, 1\], got"):
      jaxdnn.cross_entropy(x, labels, label_smoothing=bad)
  for name in ("label_smoothing", "z_loss"):
    with pytest.raises(TypeError, match=f"cross_entropy: {name} must be a number, got 'a'"):
      jaxdnn.cross_entropy(x, labels, **{name: "a"})
  with pytest.raises(ValueError, match="ignore_index is an integer label and soft labels have none, got 1"):
    jaxdnn.cross_entropy(x, x, ignore_index=1)
  for f in (jaxdnn.cross_entropy, jaxdnn.nll_loss):
    with pytest.raises(TypeError, match=r"ignore_index must be an integer, got 0\.5"):
      f(x, labels, ignore_index=0.5)
    with pytest.raises(TypeError, match="weight must be floating-point, got int64"):
      f(x, labels, weight=jnp.ones(3, int))
    with pytest.raises(ValueError, match=r"weight must have one entry a class, \(3,\), got \(2,\)"):
      f(x, labels, weight=jnp.ones(2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_row(dtype):
  """Lengths around the packed rows' limits, and many rows: the last block is not full."""
  for first in range(1, 521, 40):
    problems = [drawn((67, n), -1, dtype, {}) for n in range(first, first + 40)]
    results = jax.jit(lambda ps: [jax.value_and_grad(jaxdnn.cross_entropy)(*p) for p in ps])([p[:2] for p in problems])
    for (x, labels, _), (loss, gradient) in zip(problems, results, strict=True):
      rtol = 4 * ROUNDOFF[dtype] + 1e-6
      _, want_mean, want = oracle(x, labels, -1)
      np.testing.assert_allclose(exact(loss), want_mean, rtol=rtol, atol=rtol)
      np.testing.assert_allclose(exact(gradient), want, rtol=rtol, atol=rtol / 67)
