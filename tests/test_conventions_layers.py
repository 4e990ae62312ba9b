"""Rows of docs/conventions.md: softmax, losses and normalization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conventions import close, first, flax_layer, image, needs
from numerics import sample

# Softmax and losses ---------------------------------------------------------------------------------------------------


def test_softmax_axis():
  x = image((2, 3, 4, 5))
  for axis in (1, (1, 2, 3)):
    close(jaxdnn.softmax(x, axis), jax.nn.softmax(jnp.asarray(x), axis))


@needs("torch")
def test_softmax_masked_row(torch):
  x, nothing = jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
  np.testing.assert_array_equal(jaxdnn.softmax(x, where=nothing), 0)
  assert torch.full((2, 3), -np.inf).softmax(-1).isnan().all()
  assert np.isnan(jaxdnn.softmax(x, where=nothing, fully_masked="nan")).all()
  close(jaxdnn.softmax(x, where=nothing, fully_masked="uniform"), jax.nn.softmax(jnp.where(nothing, x, -1e30)))


@needs("torch")
def test_softmax_infinite_row(torch):
  x = np.array([[-np.inf, -np.inf], [np.inf, 1.0], [-np.inf, 1.0]])
  np.testing.assert_array_equal(jaxdnn.softmax(x), jax.nn.softmax(jnp.asarray(x)))
  np.testing.assert_array_equal(jaxdnn.softmax(x), torch.tensor(x).softmax(-1))


def test_logsumexp_axis():
  x = jnp.asarray(image((3, 4)))
  close(jaxdnn.logsumexp(x, tuple(range(x.ndim))), jax.nn.logsumexp(x))
  close(jaxdnn.logsumexp(x), jax.nn.logsumexp(x, axis=-1))


def losses():
  return sample((6, 5, 3), "float64"), np.random.default_rng(0).integers(0, 5, (6, 3))


@needs("torch")
def test_loss_axis(torch):
  x, labels = losses()
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels))
  close(jaxdnn.cross_entropy(x, labels, axis=1), want)


@needs("torch")
def test_loss_reduction(torch):
  x, labels = losses()
  for reduction in ("mean", "sum", "none"):
    want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), reduction=reduction)
    close(jaxdnn.cross_entropy(x, labels, axis=1, reduction=reduction), want)


@needs("torch")
def test_loss_ignore(torch):
  x, labels = losses()
  labels[::2] = -100
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels))
  close(jaxdnn.cross_entropy(x, labels, axis=1, ignore_index=-100), want)
  assert np.isnan(jaxdnn.cross_entropy(x, labels, axis=1))


@needs("torch")
def test_loss_weight(torch):
  (x, labels), weight = losses(), np.array([1.0, 2.0, 0.5, 0.0, 3.0])
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), weight=torch.tensor(weight))
  close(jaxdnn.cross_entropy(x, labels, axis=1, weight=weight), want)


@needs("torch")
def test_loss_smoothing(torch):
  x, labels = losses()
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), label_smoothing=0.1)
  close(jaxdnn.cross_entropy(x, labels, axis=1, label_smoothing=0.1), want)


# Normalization --------------------------------------------------------------------------------------------------------


@needs("torch")
def test_batch_momentum(torch):
  x = image((8, 5, 5, 3))
  layer = torch.nn.BatchNorm2d(3, dtype=torch.float64)
  y = layer(torch.tensor(first(x)))
  got, stats = jaxdnn.batch_norm(x)
  mean, var = jaxdnn.update_running_stats((np.zeros(3), np.ones(3)), stats, momentum=0.1, convention="torch")
  close(first(got), y)
  close(mean, layer.running_mean)
  close(var, layer.running_var)


@needs("flax.linen")
def test_batch_variance(linen):
  x = image((8, 5, 5, 3))
  layer = linen.BatchNorm(use_running_average=False, momentum=0.99, dtype="float64", param_dtype="float64")
  y, updated = flax_layer(layer, x)
  got, stats = jaxdnn.batch_norm(x)
  mean, var = jaxdnn.update_running_stats((np.zeros(3), np.ones(3)), stats, momentum=0.99, convention="flax")
  close(got, y, 1e-6)
  close(mean, updated["batch_stats"]["mean"], 1e-6)
  close(var, updated["batch_stats"]["var"], 1e-6)


@needs("torch")
def test_batch_one_value(torch):
  y, stats = jaxdnn.batch_norm(jnp.array([[5.0, 7.0]]), bias=jnp.array([1.0, 2.0]))
  np.testing.assert_array_equal(y, [[1, 2]])
  np.testing.assert_array_equal(stats.var, 0)
  with pytest.raises(ValueError):
    torch.nn.BatchNorm1d(2)(torch.ones(1, 2))


@needs("flax.linen")
def test_batch_mask(linen):
  x, mask = image((8, 3)), np.arange(8)[:, None] % 3 != 0
  layer = linen.BatchNorm(use_running_average=False, dtype="float64", param_dtype="float64")
  want, _ = flax_layer(layer, x, mask=jnp.asarray(mask))
  got, stats = jaxdnn.batch_norm(x, where=jnp.asarray(mask))
  close(np.asarray(got)[mask[:, 0]], np.asarray(want)[mask[:, 0]], 1e-6)
  close(stats.mean, x[mask[:, 0]].mean(0))


def test_batch_per_activation():
  x = image((8, 2, 3, 4))
  got, _ = jaxdnn.batch_norm(x, axis=(1, 2, 3))
  close(got, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))


@needs("torch")
def test_layer_epsilon(torch):
  x = 1e-3 * image((3, 6))
  close(jaxdnn.layer_norm(x), torch.nn.functional.layer_norm(torch.tensor(x), (6,)))
  linen = pytest.importorskip("flax.linen")
  layer = linen.LayerNorm(dtype="float64", param_dtype="float64")
  close(jaxdnn.layer_norm(x, epsilon=1e-6), flax_layer(layer, x)[0], 1e-6)


def test_layer_zero_centred():
  x, scale = image((3, 6)), image((6,), 1)
  close(jaxdnn.layer_norm(x, scale, zero_centered=True), jaxdnn.layer_norm(x, 1 + scale))


@needs("flax.linen")
def test_norm_mask(linen):
  x, where = image((3, 4, 6)), np.random.default_rng(0).random((3, 4, 6)) < 0.7
  where[0, 0] = False
  layer = linen.LayerNorm(dtype="float64", param_dtype="float64", use_fast_variance=False)
  want = np.asarray(flax_layer(layer, x, mask=jnp.asarray(where))[0])
  got = np.asarray(jaxdnn.layer_norm(x, epsilon=1e-6, where=where))
  close(got[where], want[where])
  np.testing.assert_array_equal(got[~where], 0)
  assert np.isnan(want[0, 0]).all() and want[1:][~where[1:]].all()


@needs("torch")
def test_rms_epsilon(torch):
  x = 1e-3 * image((3, 6))
  close(jaxdnn.rms_norm(x, epsilon=jnp.finfo(x.dtype).eps), torch.nn.functional.rms_norm(torch.tensor(x), (6,)))
  linen = pytest.importorskip("flax.linen")
  layer = linen.RMSNorm(dtype="float64", param_dtype="float64")
  close(jaxdnn.rms_norm(x), flax_layer(layer, x)[0], 1e-6)


@needs("flax.linen")
def test_group_epsilon(linen):
  x = 1e-3 * image((3, 5, 6))
  layer = linen.GroupNorm(num_groups=3, dtype="float64", param_dtype="float64")
  close(jaxdnn.group_norm(x, 3, epsilon=1e-6), flax_layer(layer, x)[0], 1e-6)


@needs("flax.linen")
def test_group_count(linen):
  x = image((3, 5, 64))
  layer = linen.GroupNorm(dtype="float64", param_dtype="float64")
  close(jaxdnn.group_norm(x, 32, epsilon=1e-6), flax_layer(layer, x)[0], 1e-6)


@needs("torch")
def test_group_axis(torch):
  x = image((3, 6, 5))
  close(jaxdnn.group_norm(x, 3, axis=1), torch.nn.functional.group_norm(torch.tensor(x), 3))


@needs("torch")
def test_instance(torch):
  x = image((3, 6, 5))
  close(jaxdnn.instance_norm(x, axis=1), torch.nn.functional.instance_norm(torch.tensor(x)))
  close(jaxdnn.instance_norm(x, axis=1), jaxdnn.group_norm(x, 6, axis=1))
