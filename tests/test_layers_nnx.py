"""`jaxdnn.nnx`: each layer beside Flax's, with the same arguments and variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdnn import nnx as jnnx
from layer_checks import as_users_have_it, assert_close, primitives, random, random_like, value_and_gradients

assert as_users_have_it  # A fixture.

IMAGES, ROWS = (2, 7, 6, 4), (2, 9, 4)
MASK = (np.arange(48).reshape(3, 4, 4) % 3 > 0).astype(np.float32)

# Arguments, the shape of x, and the primitives that compute the layer.
TABLE = [
  ("Conv", dict(in_features=4, out_features=6, kernel_size=(3, 2), strides=2, feature_group_count=2), IMAGES),
  ("Conv", dict(in_features=4, out_features=3, kernel_size=3, padding="CAUSAL", dtype=jnp.bfloat16), (3, *ROWS)),
  ("Conv", dict(in_features=4, out_features=3, kernel_size=(3, 3), padding="CIRCULAR", kernel_dilation=2), IMAGES),
  ("Conv", dict(in_features=4, out_features=3, kernel_size=3, input_dilation=2, padding=1, use_bias=False), ROWS),
  ("Conv", dict(in_features=4, out_features=4, kernel_size=3, mask=MASK), ROWS[1:]),
  ("ConvTranspose", dict(in_features=4, out_features=3, kernel_size=(4, 3), strides=(2, 1)), IMAGES),
  ("ConvTranspose", dict(in_features=4, out_features=3, kernel_size=(5,), strides=2, padding="CIRCULAR"), ROWS),
  (
    "ConvTranspose",
    dict(in_features=4, out_features=4, kernel_size=3, transpose_kernel=True, mask=MASK, preferred_element_type="f4"),
    ROWS,
  ),
  ("BatchNorm", dict(num_features=4), IMAGES),
  ("BatchNorm", dict(num_features=4, use_running_average=True, dtype=jnp.bfloat16), IMAGES),
  ("BatchNorm", dict(num_features=6, axis=2, momentum=0.7, epsilon=0.1, use_bias=False, use_scale=False), IMAGES),
  ("LayerNorm", dict(num_features=4), IMAGES),
  ("LayerNorm", dict(num_features=4, reduction_axes=(1, 2), use_scale=False, dtype=jnp.float16), ROWS),
  ("RMSNorm", dict(num_features=4, epsilon=0.1), IMAGES),
  ("GroupNorm", dict(num_features=4, num_groups=2), IMAGES),
  ("GroupNorm", dict(num_features=4, num_groups=None, group_size=1, use_bias=False, dtype=jnp.bfloat16), ROWS),
  ("InstanceNorm", dict(num_features=4), IMAGES),
  ("InstanceNorm", dict(num_features=7, feature_axes=1, use_bias=False), IMAGES),
]
PRIMITIVE = {
  "Conv": {"conv_fwd", "conv_fused"},
  "ConvTranspose": {"conv_fwd", "conv_dgrad"},
  "BatchNorm": {"batch_norm_train", "batch_norm_apply"},
  "LayerNorm": {"layer_norm", "group_norm"},
  "RMSNorm": {"layer_norm"},
  "GroupNorm": {"group_norm"},
  "InstanceNorm": {"group_norm"},
}


def made(module, name, **arguments):
  """The layer as a function of its variables and x, and those variables' values, as a dictionary."""
  layer = getattr(module, name)(**arguments, rngs=nnx.Rngs(0))
  definition, state = nnx.split(layer)

  def call(state, x, **options):
    layer = nnx.merge(definition, state)
    y = layer(x, **options)
    return y, nnx.state(layer, nnx.BatchStat)

  return call, state


def compare(ours, stock, state, *operands):
  results = jax.jit(lambda *o: [value_and_gradients(call, *o) for call in (ours, stock)])(state, *operands)
  assert_close(*results)


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_layer(row):
  name, arguments, shape = TABLE[row]
  ours, state = made(jnnx, name, **arguments)
  stock, theirs = made(nnx, name, **arguments)
  assert issubclass(getattr(jnnx, name), getattr(nnx, name))
  jax.tree.map(np.testing.assert_array_equal, state, theirs)
  state, x = random_like(theirs), random(shape)
  compare(ours, stock, state, x)
  found = primitives(ours, state, x)
  assert found and set(found) <= PRIMITIVE[name]


def test_activation_and_residual():
  x, residual = random(IMAGES), random(IMAGES, seed=2)
  for name, arguments, primitive in [
    ("Conv", dict(in_features=4, out_features=4, kernel_size=(3, 3)), "conv_fused"),
    ("BatchNorm", dict(num_features=4), "batch_norm_train"),
  ]:
    ours, state = made(jnnx, name, **arguments, activation="relu")
    stock, _ = made(nnx, name, **arguments)
    state = random_like(state)

    def reference(state, x, residual, stock=stock):
      y, stats = stock(state, x)
      return nnx.relu(y + residual), stats

    with_residual = lambda state, x, residual, ours=ours: ours(state, x, residual=residual)  # noqa: E731
    compare(with_residual, reference, state, x, residual)
    assert primitives(lambda *o, f=with_residual: f(*o)[0], state, x, residual) == [primitive]


def test_activation():
  x = random(IMAGES)
  for name, arguments in [("GroupNorm", dict(num_features=4, num_groups=2)), ("InstanceNorm", dict(num_features=4))]:
    ours, state = made(jnnx, name, **arguments, activation="silu")
    stock, _ = made(nnx, name, **arguments)
    y, want = jax.jit(lambda state, x, o=ours, s=stock: (o(state, x)[0], nnx.silu(s(state, x)[0])))(state, x)
    assert_close(y, want)


@pytest.mark.parametrize("running", [True, False])
def test_batch_norm_with_mask(running):
  x, mask = random(IMAGES), jnp.asarray(np.arange(14).reshape(2, 7, 1, 1) % 3 > 0)
  (ours, state), (stock, _) = (made(m, "BatchNorm", num_features=4) for m in (jnnx, nnx))
  options = dict(use_running_average=running, mask=mask)
  compare(lambda *o: ours(*o, **options), lambda *o: stock(*o, **options), random_like(state), x)


def test_a_hook_of_the_users():
  calls = []

  def mine(*args, **kwargs):
    calls.append(args)
    return jax.lax.conv_general_dilated(*args, **kwargs)

  layer = jnnx.Conv(4, 3, 3, conv_general_dilated=mine, activation="relu", rngs=nnx.Rngs(0))
  assert layer(random(ROWS)).min() == 0 and len(calls) == 1


def test_modes_of_a_network():
  class Network(nnx.Module):
    def __init__(self):
      self.norm, self.drop = jnnx.BatchNorm(4, rngs=nnx.Rngs(0)), jnnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))

    def __call__(self, x):
      return self.drop(self.norm(x))

  network, x = Network(), random(IMAGES)
  first, second = network(x), network(x)
  assert 0.3 < np.mean(first == 0) < 0.7 and np.any(first != second)
  mean = network.norm.mean[...]
  network.eval()
  np.testing.assert_allclose(network(x), (x - mean) / np.sqrt(network.norm.var[...] + 1e-5), rtol=1e-3, atol=1e-5)
  np.testing.assert_array_equal(network.norm.mean[...], mean)


def test_dropout():
  x = random((40, 50))
  layer = jnnx.Dropout(0.25, broadcast_dims=(1,), rng_collection="noise")
  y = layer(x, rngs=nnx.Rngs(noise=1))
  np.testing.assert_array_equal(y, layer(x, rngs=nnx.Rngs(noise=1)["noise"]))
  assert set(np.asarray(y != 0).sum(1)) == {0, 50}
  np.testing.assert_allclose(y, np.where(y != 0, x / 0.75, 0), rtol=1e-6)
  key = jax.random.key(0)
  assert primitives(lambda x, key: layer(x, rngs=key), x, key) == ["dropout"]
  np.testing.assert_array_equal(layer(x, deterministic=True), x)
  np.testing.assert_array_equal(jnnx.Dropout(1.0)(x), 0 * x)
  with pytest.raises(ValueError, match="rngs"):
    layer(x)
  with pytest.raises(ValueError, match="deterministic"):
    jnnx.Dropout(0.5, deterministic=None)(x)


def test_local_response_norm_and_pools():
  from jaxdnn import linen, local_response_norm

  x = random(IMAGES)
  np.testing.assert_array_equal(jnnx.LocalResponseNorm(3, k=1.0)(x), local_response_norm(x, 3, k=1.0))
  assert (jnnx.max_pool, jnnx.avg_pool, jnnx.min_pool) == (linen.max_pool, linen.avg_pool, linen.min_pool)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_masks(name):
  x, mask = random(IMAGES), jnp.asarray(np.arange(14).reshape(2, 7, 1, 1) % 3 > 0)
  arguments = dict(num_groups=2) if name == "GroupNorm" else {}
  ours, stock = (getattr(library, name)(4, **arguments, rngs=nnx.Rngs(0)) for library in (jnnx, nnx))
  assert_close(ours(x, mask=mask), jnp.where(mask, stock(x, mask=jnp.broadcast_to(mask, x.shape)), 0))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_what_is_not_supported_raises(name):
  x, layer = random(IMAGES), getattr(jnnx, name)
  arguments = dict(num_groups=2) if name == "GroupNorm" else {}
  with pytest.raises(NotImplementedError, match=f"{name}: axis_name"):
    layer(4, **arguments, axis_name="i", rngs=nnx.Rngs(0))(x)


def test_errors():
  x, rngs = random(IMAGES), nnx.Rngs(0)
  with pytest.raises(NotImplementedError, match="axis_index_groups"):
    jnnx.BatchNorm(4, axis_name="i", axis_index_groups=[[0]], rngs=rngs)(x)
  with pytest.raises(ValueError, match="use_running_average"):
    jnnx.BatchNorm(4, use_running_average=None, rngs=rngs)(x)
  with pytest.raises(ValueError, match="first axis"):
    jnnx.InstanceNorm(2, feature_axes=0, rngs=rngs)(x)
  with pytest.raises(ValueError, match="activation"):
    jnnx.Conv(4, 3, (3, 3), activation="nothing", rngs=rngs)(x)
