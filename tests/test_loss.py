"""Losses against NumPy in float64 and optax: values, gradients, labels out of range, sharding, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from numerics import DEVICES, DTYPES, ROUNDOFF, assert_repeatable, exact, sample

LOSSES = {"nll_loss": jaxdnn.nll_loss, "cross_entropy": jaxdnn.cross_entropy}
BOTH = sorted(LOSSES)
REDUCE = {"mean": np.mean, "sum": np.sum, "none": lambda losses: losses}


def oracle(op, x, labels, axis=-1, reduction="mean"):
  x = exact(x)
  if op == "cross_entropy":
    m = x.max(axis, keepdims=True)
    x = x - m - np.log(np.exp(x - m).sum(axis, keepdims=True))
  return REDUCE[reduction](-np.take_along_axis(x, np.expand_dims(labels, axis), axis).squeeze(axis))


def onehot(labels, classes, axis=-1):
  return np.moveaxis(np.eye(classes)[labels], -1, axis)


@pytest.mark.parametrize("reduction", REDUCE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BOTH)
def test_values(op, dtype, reduction):
  rng = np.random.default_rng(0)
  for shape, axis in [((5,), 0), ((6, 10), -1), ((2, 7, 3, 4), 1)]:
    x = sample(shape, dtype)
    labels = rng.integers(shape[axis], size=shape[:axis] + shape[axis:][1:] if axis >= 0 else shape[:-1])
    got = jax.jit(functools.partial(LOSSES[op], axis=axis, reduction=reduction))(x, labels)
    assert got.dtype == x.dtype
    # Computed and reduced in float32 at least: 16-bit losses differ from the oracle by one rounding of the result.
    rtol = (1.01 * ROUNDOFF[dtype] + 1e-6) if np.dtype(x.dtype).itemsize < 4 else 64 * ROUNDOFF[dtype]
    np.testing.assert_allclose(exact(got), oracle(op, x, labels, axis, reduction), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("label_dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_label_dtypes(label_dtype):
  """300 classes: more than an int8 can number."""
  x = sample((4, 300), "float32")
  labels = np.array([0, 1, 100, 127], label_dtype)
  got = jaxdnn.cross_entropy(jnp.asarray(x), jnp.asarray(labels))
  np.testing.assert_allclose(got, oracle("cross_entropy", x, labels.astype(int)), rtol=1e-6)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("label", [-1, 3, 127, 2**31, 2**32 + 1])
def test_label_out_of_range_is_nan(op, label):
  """Wide labels too: 2**32 + 1 must not wrap around to 1. The row without a label gets no gradient, others theirs."""
  x, labels = jnp.asarray(sample((2, 3), "float32")), jnp.array([1, label])
  np.testing.assert_array_equal(np.isnan(LOSSES[op](x, labels, reduction="none")), [False, True])
  assert np.isnan(LOSSES[op](x, labels)) and np.isnan(LOSSES[op](x, labels, reduction="sum"))
  gradient = jax.grad(LOSSES[op])(x, labels)
  assert np.isfinite(gradient).all() and (gradient[1] == 0).all() and (gradient[0] != 0).any()


@pytest.mark.parametrize("op", BOTH)
def test_empty(op):
  def loss(reduction, shape):
    return LOSSES[op](jnp.zeros(shape), jnp.zeros(shape[:-1], int), reduction=reduction)

  assert np.isnan(loss("mean", (0, 3))) and loss("sum", (0, 3)) == 0 and loss("none", (0, 3)).shape == (0,)
  assert np.isnan(loss("none", (2, 0))).all(), "without classes every label is out of range"


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("reduction, scale", [("mean", 1 / 12), ("sum", 1)])
def test_gradient_is_softmax_minus_onehot(reduction, scale, axis):
  shape = (3, 4, 5) if axis == -1 else (3, 5, 4)
  x, labels = sample(shape, "float64"), np.random.default_rng(0).integers(5, size=(3, 4))
  got = jax.grad(jaxdnn.cross_entropy)(jnp.asarray(x), jnp.asarray(labels), axis=axis, reduction=reduction)
  p = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
  np.testing.assert_allclose(got, scale * (p - onehot(labels, 5, axis)), rtol=1e-12, atol=1e-16)
  got = jax.grad(jaxdnn.nll_loss)(jnp.asarray(x), jnp.asarray(labels), axis=axis, reduction=reduction)
  np.testing.assert_allclose(got, -scale * onehot(labels, 5, axis), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_gradient_is_rounded_once(dtype):
  x, labels = sample((8, 40), dtype), np.arange(8)
  got = jax.grad(jaxdnn.cross_entropy)(jnp.asarray(x), jnp.asarray(labels))
  assert got.dtype == x.dtype
  p = np.exp(exact(x)) / np.exp(exact(x)).sum(-1, keepdims=True)
  want = (p - onehot(labels, 40)) / 8
  np.testing.assert_allclose(exact(got), want, rtol=1.01 * ROUNDOFF[dtype] + 1e-5, atol=6e-8)


def test_reduction_is_not_in_sixteen_bits():
  """A bfloat16 running sum of ones stops at 256."""
  log_probs = jnp.full((4096, 2), -1, jnp.bfloat16)
  assert jaxdnn.nll_loss(log_probs, jnp.zeros(4096, int), reduction="sum") == 4096


@pytest.mark.parametrize("op", BOTH)
def test_minus_infinity_away_from_the_label(op):
  x = jnp.array([[0.0, -np.inf, 1.0], [-np.inf, 2.0, -np.inf]])
  labels = jnp.array([2, 1])
  assert np.isfinite(LOSSES[op](x, labels))
  assert np.isfinite(jax.grad(LOSSES[op])(x, labels)).all()
  assert np.isfinite(jax.hessian(LOSSES[op])(x, labels)).all()
  assert LOSSES[op](x, jnp.array([1, 0])) == np.inf, "a label of probability 0"


def test_large_offset():
  x = jnp.full((2, 8), 1e7, jnp.float32)
  np.testing.assert_allclose(jaxdnn.cross_entropy(x, jnp.array([0, 7])), np.log(8), rtol=1e-6)


def test_derivatives_of_every_order_and_mode():
  x, labels = jnp.asarray(sample((3, 4), "float64")), jnp.array([0, 3, 1])
  check_grads(jax.jit(lambda x: jaxdnn.cross_entropy(x, labels)), (x,), order=2, modes=("fwd", "rev"))


def test_matches_optax():
  x, labels = jnp.asarray(sample((3, 4, 5), "float64")), jnp.asarray(np.arange(12).reshape(3, 4) % 5)
  stock = optax.softmax_cross_entropy_with_integer_labels
  np.testing.assert_allclose(jaxdnn.cross_entropy(x, labels, reduction="none"), stock(x, labels), rtol=1e-12)
  mean = lambda x: stock(x, labels).mean()  # noqa: E731
  np.testing.assert_allclose(jax.grad(jaxdnn.cross_entropy)(x, labels), jax.grad(mean)(x), atol=1e-15)
  np.testing.assert_allclose(jaxdnn.nll_loss(jax.nn.log_softmax(x), labels), mean(x), rtol=1e-12)


@pytest.mark.parametrize("op", BOTH)
def test_vmap(op):
  x, labels = jnp.asarray(sample((3, 4, 5), "float64")), jnp.asarray(np.arange(12).reshape(3, 4) % 5)
  value_and_grad = jax.value_and_grad(LOSSES[op])
  for got, want in zip(
    jax.vmap(value_and_grad)(x, labels), zip(*map(value_and_grad, x, labels), strict=True), strict=True
  ):
    np.testing.assert_allclose(got, np.stack(want), rtol=1e-12, atol=1e-16)


@pytest.mark.mesh
@pytest.mark.parametrize("op", BOTH)
def test_explicit_mesh(op):
  x, labels = jnp.asarray(sample((8, 5), "float64")), jnp.asarray(np.arange(8) % 5)
  want = jax.value_and_grad(LOSSES[op])(x, labels)
  with jax.set_mesh(jax.make_mesh((DEVICES,), ("data",))):
    sharded = jax.device_put(x, P("data")), jax.device_put(labels, P("data"))
    got = jax.value_and_grad(LOSSES[op])(*sharded)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12, atol=1e-16)
    text = jax.jit(jax.value_and_grad(LOSSES[op])).lower(*sharded).compile().as_text()
    assert "all-gather" not in text


@pytest.mark.parametrize("op", BOTH)
def test_neither_gather_nor_scatter(op):
  """Their gradients would add in an order that changes from run to run."""
  text = jax.jit(jax.grad(LOSSES[op])).lower(jnp.zeros((4, 5)), jnp.zeros(4, int)).as_text()
  assert "gather" not in text and "scatter" not in text


@pytest.mark.parametrize("op, name", [("nll_loss", "log_probs"), ("cross_entropy", "logits")])
def test_errors(op, name):
  f, x, labels = LOSSES[op], jnp.zeros((2, 3)), jnp.zeros(2, int)
  with pytest.raises(TypeError, match=f"{op}: {name} must be floating-point, got int64"):
    f(jnp.zeros((2, 3), int), labels)
  for bad in (jnp.zeros(2), jnp.zeros(2, bool)):
    with pytest.raises(TypeError, match=f"{op}: labels must be integers, got {bad.dtype}"):
      f(x, bad)
  for shape in [(3,), (2, 3), (), (2, 1)]:
    with pytest.raises(ValueError, match=rf"labels must have the shape of {name} without axis 1, \(2,\)"):
      f(x, jnp.zeros(shape, int))
  for axis in (2, -3):
    with pytest.raises(ValueError, match=f"{op}: axis must name axes of an array of rank 2, got {axis}"):
      f(x, labels, axis=axis)
  with pytest.raises(ValueError, match=f"{op}: axis must be one axis"):
    f(x, labels, axis=(0, 1))
  with pytest.raises(TypeError, match=f"{op}: axis must be an integer"):
    f(x, labels, axis=0.5)
  with pytest.raises(ValueError, match=f"{op}: reduction must be one of 'mean', 'sum', 'none', got 'avg'"):
    f(x, labels, reduction="avg")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_on_a_gpu(dtype):
  x, labels = jnp.asarray(sample((300, 1000), dtype)), jnp.asarray(np.arange(300))
  value, gradient = assert_repeatable(jax.value_and_grad(jaxdnn.cross_entropy), x, labels)
  np.testing.assert_allclose(exact(value), oracle("cross_entropy", x, np.arange(300)), rtol=2 * ROUNDOFF[dtype] + 1e-6)
  assert np.isfinite(exact(gradient)).all()


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
@pytest.mark.parametrize("shape", [(3, 2**30 - 8), (2**22 + 1, 520), (2**28 + 1, 9)])
def test_more_than_2_to_the_31_elements(shape):
  """Long rows and short ones: 64-bit offsets. The last row differs, so that a wrapped offset shows."""
  rows, n = shape
  x = jnp.zeros(shape, jnp.bfloat16).at[-1, -1].set(20.0)
  labels = jnp.full(rows, n - 1)
  losses, vjp = jax.vjp(lambda x: jaxdnn.cross_entropy(x, labels, reduction="none"), x)
  p = np.array([1 / n, 1 / n, 1 / (1 + (n - 1) * np.exp(-20.0))])
  dx = vjp(jnp.ones_like(losses))[0]
  for row, want in zip((0, -2, -1), p, strict=True):
    np.testing.assert_allclose(exact(losses[row]), -np.log(want), rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(exact(dx[row, -1]), want - 1, rtol=1e-2, atol=1e-5)
  np.testing.assert_allclose(exact(dx[-2, :2]), p[0], rtol=1e-2)
