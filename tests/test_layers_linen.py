"""`jaxdnn.linen`: each layer beside Flax's, with the same arguments and parameters."""

import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn import linen as jnn
from layer_checks import as_users_have_it, assert_close, primitives, random, random_like, value_and_gradients

assert as_users_have_it  # A fixture.

IMAGES, ROWS, VOLUMES = (2, 7, 6, 4), (2, 9, 4), (2, 4, 3, 5, 4)


def mask_of(shape):
  return (np.arange(np.prod(shape)).reshape(shape) % 3 > 0).astype(np.float32)


CONV = [
  (dict(features=5, kernel_size=(3, 3)), IMAGES),
  (dict(features=6, kernel_size=(3, 2), strides=(2, 1), padding="VALID", feature_group_count=2), IMAGES),
  (dict(features=8, kernel_size=(3, 3), kernel_dilation=2, padding=2, feature_group_count=4, use_bias=False), IMAGES),
  (dict(features=3, kernel_size=(4, 3), padding="CIRCULAR", strides=2, kernel_dilation=(1, 2)), IMAGES),
  (dict(features=3, kernel_size=(2, 5), padding="REFLECT"), IMAGES),
  (dict(features=3, kernel_size=3, padding="CAUSAL", kernel_dilation=2), ROWS),
  (dict(features=3, kernel_size=(8,), padding="REFLECT"), (2, 4, 4)),
  (dict(features=3, kernel_size=(3,), strides=None, padding=[(2, 0)]), ROWS[1:]),
  (dict(features=3, kernel_size=(2, 1, 3), padding=(1, (0, 2), 1)), VOLUMES),
  (dict(features=3, kernel_size=(3, 3)), (2, 1, *IMAGES)),
  (dict(features=3, kernel_size=(3, 3), input_dilation=(2, 1), padding=1), IMAGES),
  (dict(features=3, kernel_size=(3, 3), mask=mask_of((3, 3, 4, 3))), IMAGES),
  (dict(features=3, kernel_size=(3, 3), dtype=jnp.bfloat16), IMAGES),
  (dict(features=3, kernel_size=(3, 3), param_dtype=jnp.float16, dtype=jnp.float16), IMAGES),
]
LOCAL = [
  (dict(features=5, kernel_size=(3, 2), padding="VALID", strides=(2, 1)), IMAGES),
  (dict(features=5, kernel_size=(3,), kernel_dilation=2, padding="CIRCULAR"), ROWS),
  (dict(features=5, kernel_size=3, padding="CAUSAL", use_bias=False), (3, *ROWS)),
  (dict(features=2, kernel_size=(2,), mask=mask_of((9, 8, 2))), ROWS),
  (dict(features=2, kernel_size=(2,), input_dilation=(2,), padding=[(1, 0)]), ROWS),
]
TRANSPOSE = [
  (dict(features=5, kernel_size=(3, 3), strides=(2, 2)), IMAGES),
  (dict(features=5, kernel_size=(2, 4), strides=(3, 1), padding="VALID", transpose_kernel=True), IMAGES),
  (dict(features=5, kernel_size=3, kernel_dilation=(2,), padding=(1,), use_bias=False), ROWS),
  (dict(features=3, kernel_size=(6, 3), strides=(2, 2), padding="CIRCULAR", transpose_kernel=True), IMAGES),
  (dict(features=3, kernel_size=(4, 5), strides=(1, 3), padding="CIRCULAR"), IMAGES),
  (dict(features=3, kernel_size=(9,), strides=(2,), padding="CIRCULAR"), (2, 1, 3, 4)),
  (dict(features=3, kernel_size=(2,), strides=(3,), padding="CIRCULAR", transpose_kernel=True), ROWS[1:]),
  (dict(features=3, kernel_size=(4,), mask=mask_of((4, 4, 3)), dtype=jnp.bfloat16), ROWS),
]
BATCH_NORM = [
  (dict(use_running_average=False), IMAGES),
  (dict(use_running_average=True), IMAGES),
  (dict(use_running_average=False, axis=1, momentum=0.7, epsilon=0.1, use_bias=False), IMAGES),
  (dict(use_running_average=False, axis=(1, -1), use_scale=False), IMAGES),
  (dict(use_running_average=False, dtype=jnp.bfloat16), IMAGES),
  (dict(use_running_average=True, param_dtype=jnp.bfloat16, force_float32_reductions=False, dtype=jnp.bfloat16), ROWS),
]
LAYER_NORM = [
  (dict(), IMAGES),
  (dict(reduction_axes=(1, 2, 3), use_bias=False), IMAGES),
  (dict(reduction_axes=(-1, 1), feature_axes=(1, -1), epsilon=0.1), IMAGES),
  (dict(reduction_axes=-1, feature_axes=(1, 2)), IMAGES),
  (dict(reduction_axes=(1, 2), feature_axes=-1, use_scale=False), IMAGES),
  (dict(dtype=jnp.bfloat16), ROWS),
]
RMS_NORM = [
  (dict(), IMAGES),
  (dict(reduction_axes=(1, 2, 3), epsilon=0.1), IMAGES),
  (dict(use_scale=False, dtype=jnp.float16), ROWS),
]
GROUP_NORM = [
  (dict(num_groups=2), IMAGES),
  (dict(num_groups=None, group_size=1, use_bias=False, epsilon=0.1), IMAGES),
  (dict(num_groups=4, reduction_axes=(-1,), use_scale=False), IMAGES),
  (dict(num_groups=2, reduction_axes=(1, 3)), IMAGES),
  (dict(num_groups=2, dtype=jnp.bfloat16), (3, 8)),
]
INSTANCE_NORM = [
  (dict(), IMAGES),
  (dict(feature_axes=1, epsilon=0.1, use_bias=False), IMAGES),
  (dict(feature_axes=(1, -1)), IMAGES),
  (dict(use_scale=False, dtype=jnp.bfloat16), ROWS),
]
TABLE = {
  "Conv": CONV,
  "ConvLocal": LOCAL,
  "ConvTranspose": TRANSPOSE,
  "BatchNorm": BATCH_NORM,
  "LayerNorm": LAYER_NORM,
  "RMSNorm": RMS_NORM,
  "GroupNorm": GROUP_NORM,
  "InstanceNorm": INSTANCE_NORM,
}
CASES = [(name, i) for name, rows in TABLE.items() for i in range(len(rows))]
PRIMITIVE = {
  "Conv": {"conv_fwd", "conv_fused"},
  "ConvLocal": {"im2col", "conv_fwd"},
  "ConvTranspose": {"conv_fwd", "conv_dgrad"},
  "BatchNorm": {"batch_norm_train", "batch_norm_apply"},
  "LayerNorm": {"layer_norm", "group_norm"},
  "RMSNorm": {"layer_norm"},
  "GroupNorm": {"group_norm"},
  "InstanceNorm": {"group_norm", "layer_norm"},
}


def applied(layer, *args, **kwargs):
  """A function of variables and x: the result, and the statistics that changed."""
  return lambda variables, x, **more: layer.apply(variables, x, *args, mutable=["batch_stats"], **kwargs, **more)


def compare(ours, stock, variables, *operands):
  results = jax.jit(lambda *o: [value_and_gradients(call, *o) for call in (ours, stock)])(variables, *operands)
  assert_close(*results)


def variables_of(layer, x):
  return jax.eval_shape(layer.init, jax.random.key(0), x)


@pytest.mark.parametrize(("name", "row"), CASES)
def test_layer(name, row):
  arguments, shape = TABLE[name][row]
  ours, stock = getattr(jnn, name)(**arguments), getattr(nn, name)(**arguments)
  assert isinstance(ours, getattr(nn, name)) and type(ours).__name__ == name
  x = random(shape)
  shapes = variables_of(stock, x)
  assert variables_of(ours, x) == shapes
  variables = random_like(shapes)
  compare(applied(ours), applied(stock), variables, x)
  found = primitives(applied(ours), variables, x)
  assert found and set(found) <= PRIMITIVE[name]


@pytest.mark.parametrize(
  ("name", "dtype"),
  [("Conv", jnp.bfloat16), ("BatchNorm", jnp.bfloat16), ("LayerNorm", jnp.int32), ("GroupNorm", jnp.bfloat16)],
)
def test_types_of_data_promote_with_the_parameters(name, dtype):
  arguments, shape = TABLE[name][0]
  x = random(shape, dtype=dtype)
  ours, stock = getattr(jnn, name)(**arguments), getattr(nn, name)(**arguments)
  variables = random_like(variables_of(stock, x))
  assert_close(*jax.jit(lambda *o: [applied(layer)(*o) for layer in (ours, stock)])(variables, x))


def test_initial_values_are_flax():
  x = random(IMAGES)
  ours, stock = (m.Conv(**CONV[0][0]).init(jax.random.key(3), x) for m in (jnn, nn))
  jax.tree.map(np.testing.assert_array_equal, ours, stock)


def test_names_in_a_network_are_flax():
  def network(m):
    class Network(nn.Module):
      @nn.compact
      def __call__(self, x):
        x = m.BatchNorm(True)(m.Conv(3, (3, 3))(x))
        return m.GroupNorm(1)(m.Conv(3, (3, 3))(x))

    return Network()

  assert variables_of(network(jnn), random(IMAGES)) == variables_of(network(nn), random(IMAGES))


@pytest.mark.parametrize(
  ("name", "activation"),
  [
    ("Conv", "relu"),
    ("Conv", "gelu_tanh"),
    ("ConvLocal", "relu"),
    ("BatchNorm", "relu"),
    ("BatchNorm", "gelu_tanh"),
    ("GroupNorm", "gelu_tanh"),
    ("InstanceNorm", "relu"),
  ],
)
def test_activation_and_residual(name, activation):
  arguments, shape = TABLE[name][0]
  act = {"relu": nn.relu, "gelu_tanh": nn.gelu}[activation]
  stock, ours = getattr(nn, name)(**arguments), getattr(jnn, name)(**arguments, activation=activation)
  x = random(shape)
  variables = random_like(variables_of(stock, x))
  if name not in ("Conv", "BatchNorm"):

    def reference(variables, x):
      y, stats = applied(stock)(variables, x)
      return act(y), stats

    compare(applied(ours), reference, variables, x)
    return
  residual = random(jax.eval_shape(applied(stock), variables, x)[0].shape, seed=2)

  def reference_with_residual(variables, x, residual):
    y, stats = applied(stock)(variables, x)
    return act(y + residual), stats

  compare(lambda v, x, r: applied(ours)(v, x, residual=r), reference_with_residual, variables, x, residual)
  if activation == "relu":
    found = primitives(lambda v, x, r: applied(ours)(v, x, residual=r)[0], variables, x, residual)
    assert found == [{"Conv": "conv_fused", "BatchNorm": "batch_norm_train"}[name]]


def test_extras_follow_flax_where_the_layer_is_not_one_kernel():
  x = random(ROWS)
  arguments = dict(features=3, kernel_size=(3,), input_dilation=(2,), padding=1)
  ours, stock = jnn.Conv(**arguments, activation="relu"), nn.Conv(**arguments)
  variables = random_like(variables_of(stock, x))
  y = jax.jit(stock.apply)(variables, x)
  assert_close(jax.jit(ours.apply)(variables, x, -2 * y), nn.relu(-y))
  calls = []

  def mine(*args, **kwargs):
    calls.append(args)
    return jax.lax.conv_general_dilated(*args, **kwargs)

  jax.eval_shape(jnn.Conv(3, (3,), conv_general_dilated=mine).apply, variables, x)
  assert len(calls) == 1


def test_circular_padding_makes_no_copy():
  x = random(IMAGES)
  layer = jnn.Conv(3, (3, 3), padding="CIRCULAR")
  variables = random_like(variables_of(layer, x))
  program = str(jax.make_jaxpr(layer.apply)(variables, x))
  assert "concatenate" not in program and " pad[" not in program


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_with_mask(train):
  x, mask = random(IMAGES), jnp.asarray(mask_of((2, 7, 1, 1)), bool)
  ours, stock = jnn.BatchNorm(), nn.BatchNorm()
  options = dict(use_running_average=not train, mask=mask)
  variables = random_like(jax.eval_shape(lambda: stock.init(jax.random.key(0), x, use_running_average=True)))
  compare(applied(ours, **options), applied(stock, **options), variables, x)


@pytest.mark.parametrize(
  ("name", "arguments", "shape"),
  [
    ("LayerNorm", dict(use_fast_variance=False), IMAGES),
    ("LayerNorm", dict(reduction_axes=(1, 3)), IMAGES),
    ("RMSNorm", {}, (1, 6, 4)),
    ("GroupNorm", dict(num_groups=2), (2, 7, 1, 1)),
    ("InstanceNorm", {}, IMAGES),
  ],
)
def test_masks(name, arguments, shape):
  x, mask = random(IMAGES), jnp.asarray(mask_of(shape), bool)
  ours, stock = (getattr(library, name)(**arguments) for library in (jnn, nn))
  variables = random_like(variables_of(stock, x))

  def unmasked(variables, x):
    return jnp.where(mask, stock.apply(variables, x, mask=jnp.broadcast_to(mask, x.shape)), 0), {}

  compare(lambda variables, x: (ours.apply(variables, x, mask=mask), {}), unmasked, variables, x)


def test_batch_norm_over_devices():
  x = random((3, *IMAGES))
  arguments = dict(use_running_average=False, axis_name="shards")
  ours, stock = jnn.BatchNorm(**arguments), nn.BatchNorm(**arguments)
  variables = random_like(variables_of(ours, x[0]))
  over_shards = [jax.vmap(applied(layer), (None, 0), axis_name="shards") for layer in (ours, stock)]
  assert_close(*jax.jit(lambda *o: [call(*o) for call in over_shards])(variables, x))


def test_dropout():
  x, rngs = random((40, 50)), {"dropout": jax.random.key(0)}
  layer = jnn.Dropout(0.25)
  np.testing.assert_array_equal(layer.apply({}, x, deterministic=True), x)
  y = layer.apply({}, x, deterministic=False, rngs=rngs)
  kept = np.asarray(y != 0)
  assert 0.7 < kept.mean() < 0.8
  np.testing.assert_allclose(y, np.where(kept, x / 0.75, 0), rtol=1e-6)
  np.testing.assert_array_equal(y, layer.apply({}, x, deterministic=False, rngs=rngs))
  assert np.any(y != layer.apply({}, x, False, jax.random.key(1)))
  rows = jnn.Dropout(0.5, (1,), False, "noise").apply({}, x, rngs={"noise": jax.random.key(0)})
  assert set(np.asarray(rows != 0).sum(1)) == {0, 50}
  np.testing.assert_array_equal(jnn.Dropout(1.0, deterministic=False).apply({}, x), 0 * x)
  np.testing.assert_array_equal(jnn.Dropout(0.0, deterministic=False).apply({}, x), x)
  assert primitives(lambda x: layer.apply({}, x, deterministic=False, rngs=rngs), x) == ["dropout"]
  with pytest.raises(ValueError, match="deterministic"):
    layer.apply({}, x)


def test_local_response_norm():
  x = random(IMAGES)
  y = jnn.LocalResponseNorm(3, alpha=2.0, k=1.0).apply({}, x)
  energy = np.square(np.pad(x, [(0, 0)] * 3 + [(1, 1)]))
  np.testing.assert_allclose(y, x * (1 + 2 / 3 * sum(energy[..., i : i + 4] for i in range(3))) ** -0.75, rtol=1e-5)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_what_is_not_supported_raises(name):
  x = random(IMAGES)
  options = dict(num_groups=2) if name == "GroupNorm" else {}
  with pytest.raises(NotImplementedError, match=f"{name}: axis_name"):
    variables_of(getattr(jnn, name)(**options, axis_name="i"), x)


@pytest.mark.parametrize(
  ("layer", "error", "match"),
  [
    (lambda: jnn.BatchNorm(False, axis_name="i", axis_index_groups=[[0]]), NotImplementedError, "axis_index_groups"),
    (lambda: jnn.GroupNorm(2, 2), ValueError, "either num_groups or group_size"),
    (lambda: jnn.GroupNorm(None, 3), ValueError, "group_size=3 does not divide the 4"),
    (lambda: jnn.GroupNorm(3), ValueError, "num_groups"),
    (lambda: jnn.GroupNorm(2, reduction_axes=(1, 2)), ValueError, "must include"),
    (lambda: jnn.InstanceNorm(feature_axes=(0, -1)), ValueError, "first axis"),
    (lambda: jnn.Conv(3, (3, 3), mask=np.ones((3, 3, 3, 3))), ValueError, "mask must have the kernel's shape"),
    (lambda: jnn.Conv(3, (3, 3), padding="CAUSAL"), ValueError, "CAUSAL"),
    (lambda: jnn.Conv(3, (3, 3), activation="nothing"), ValueError, "activation"),
    (lambda: jnn.ConvLocal(3, (3, 3), activation="nothing"), ValueError, "activation"),
    (lambda: jnn.ConvLocal(3, (3, 3), feature_group_count=2), NotImplementedError, "feature_group_count"),
  ],
)
def test_errors(layer, error, match):
  with pytest.raises(error, match=match):
    variables_of(layer(), random(IMAGES))


def test_without_the_libraries():
  code = """
import sys
sys.modules |= dict.fromkeys(["flax", "haiku", "equinox"])
import importlib
import jax.numpy as jnp
import jaxdnn.linen
assert jaxdnn.linen.max_pool(jnp.ones((1, 4, 1)), (2,)).shape == (1, 3, 1)
assert not hasattr(jaxdnn.linen, "Convolution")
for name, package in [("linen.layers", "flax"), ("nnx", "flax"), ("haiku", "dm-haiku"), ("equinox", "equinox")]:
  try:
    importlib.import_module("jaxdnn." + name)
  except ImportError as e:
    assert str(e).endswith("pip install " + package), e
  else:
    raise AssertionError(name)
"""
  subprocess.run([sys.executable, "-P", "-c", code], check=True)
