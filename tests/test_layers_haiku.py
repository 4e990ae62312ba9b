"""`jaxdnn.haiku`: each module beside Haiku's, with the same arguments, parameters and state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

hk = pytest.importorskip("haiku")

from jaxdnn import haiku as jhk  # noqa: E402
from jaxdnn import local_response_norm  # noqa: E402
from layer_checks import as_users_have_it, assert_close, primitives, random, random_like, value_and_gradients  # noqa: E402

assert as_users_have_it  # A fixture.

ROWS, IMAGES, FIRST, VOLUMES = (2, 9, 4), (2, 7, 6, 4), (2, 4, 7, 6), (2, 4, 3, 6, 4)
MASK = (np.arange(36).reshape(3, 4, 3) % 3 > 0).astype(np.float32)
BOTH = dict(create_scale=True, create_offset=True)

TABLE = [
  ("Conv1D", dict(output_channels=3, kernel_shape=3, mask=MASK), ROWS),
  ("Conv1D", dict(output_channels=6, kernel_shape=3, rate=2, padding=hk.pad.causal, feature_group_count=2), ROWS),
  ("Conv2D", dict(output_channels=5, kernel_shape=(3, 2), stride=2, padding="valid"), IMAGES),
  ("Conv2D", dict(output_channels=5, kernel_shape=3, data_format="NCHW", padding=[(1, 2), (0, 1)]), FIRST),
  ("Conv2D", dict(output_channels=5, kernel_shape=3, data_format="NCHW"), FIRST[1:]),
  ("Conv3D", dict(output_channels=2, kernel_shape=2, with_bias=False), VOLUMES),
  ("ConvND", dict(num_spatial_dims=1, output_channels=2, kernel_shape=2), ROWS[1:]),
  ("DepthwiseConv1D", dict(channel_multiplier=2, kernel_shape=3, rate=2), ROWS),
  ("DepthwiseConv2D", dict(channel_multiplier=1, kernel_shape=(3, 2), stride=2, data_format="NCHW"), FIRST),
  ("DepthwiseConv3D", dict(channel_multiplier=1, kernel_shape=2, with_bias=False), VOLUMES),
  ("Conv1DTranspose", dict(output_channels=4, kernel_shape=3, stride=2, padding=[(1, 2)]), ROWS[1:]),
  ("Conv2DTranspose", dict(output_channels=3, kernel_shape=(4, 3), stride=(2, 1)), IMAGES),
  ("Conv2DTranspose", dict(output_channels=3, kernel_shape=3, stride=2, output_shape=(13, 12)), IMAGES),
  (
    "Conv2DTranspose",
    dict(output_channels=3, kernel_shape=2, stride=3, output_shape=(21, 17), padding="VALID", data_format="NCHW"),
    FIRST,
  ),
  ("Conv3DTranspose", dict(output_channels=2, kernel_shape=2, padding="VALID", with_bias=False), VOLUMES),
  ("LayerNorm", dict(axis=-1, **BOTH), IMAGES),
  ("LayerNorm", dict(axis=slice(1, None), create_scale=True, create_offset=False), IMAGES),
  ("LayerNorm", dict(axis=(1, 2), param_axis=(1, -1), use_fast_variance=True, eps=0.1, **BOTH), IMAGES),
  ("InstanceNorm", dict(**BOTH), IMAGES),
  ("InstanceNorm", dict(create_scale=True, create_offset=False, data_format="NCHW"), FIRST),
  ("RMSNorm", dict(axis=-1), IMAGES),
  ("RMSNorm", dict(axis=slice(1, None), eps=0.1, param_axis=1), ROWS),
  ("GroupNorm", dict(groups=2), IMAGES),
  ("GroupNorm", dict(groups=2, create_offset=False, data_format="NCHW"), FIRST),
  ("GroupNorm", dict(groups=2, axis=-1, create_scale=False), ROWS),
  ("GroupNorm", dict(groups=2, axis=1, eps=0.1), IMAGES),
  ("MaxPool", dict(window_shape=(3, 2, 1), strides=(2, 1, 1), padding="SAME"), IMAGES),
  ("MaxPool", dict(window_shape=2, strides=2, padding="VALID", channel_axis=1), FIRST),
  ("AvgPool", dict(window_shape=(3, 2, 1), strides=(2, 1, 1), padding="SAME"), IMAGES),
  ("AvgPool", dict(window_shape=2, strides=2, padding="VALID", channel_axis=1), FIRST),
  ("AvgPool", dict(window_shape=3, strides=(1, 2, 1), padding="SAME", channel_axis=None), ROWS),
]
PRIMITIVE = {"Conv": {"conv_fwd", "conv_fused"}, "Depthwise": {"conv_fwd", "conv_fused"}, "Group": {"group_norm"}}
PRIMITIVE |= {"Layer": {"layer_norm", "group_norm"}, "Instance": {"group_norm"}, "RMS": {"layer_norm"}}
PRIMITIVE |= {"Max": {"max_pool"}, "Avg": {"sum_pool"}}


def transformed(module, name, /, *args, arguments, **options):
  """The module as `init` and `apply`; options are of its call."""
  return hk.transform_with_state(lambda x, *more: getattr(module, name)(**arguments)(x, *args, *more, **options))


def applied(f):
  return lambda params, x, state, *more: f.apply(params, state, None, x, *more)


def compare(ours, stock, params, x, state=None):
  calls = [lambda params, x, f=f: applied(f)(params, x, state or {}) for f in (ours, stock)]
  assert_close(*jax.jit(lambda *o: [value_and_gradients(call, *o) for call in calls])(params, x))


def shapes_of(f, x, *more):
  return jax.eval_shape(f.init, jax.random.PRNGKey(0), x, *more)


@pytest.mark.filterwarnings("ignore:When running under vmap")
@pytest.mark.parametrize("row", range(len(TABLE)))
def test_layer(row):
  name, arguments, shape = TABLE[row]
  assert issubclass(getattr(jhk, name), getattr(hk, name))
  ours, stock = (transformed(module, name, arguments=arguments) for module in (jhk, hk))
  x = random(shape)
  shapes = shapes_of(stock, x)
  assert shapes_of(ours, x) == shapes
  params = random_like(shapes[0])
  compare(ours, stock, params, x)
  found = primitives(applied(ours), params, x, {})
  (expected,) = (names for start, names in PRIMITIVE.items() if name.startswith(start))
  assert found and set(found) <= expected


BATCH_NORM = [
  (dict(decay_rate=0.9, **BOTH), IMAGES),
  (dict(decay_rate=0.5, create_scale=True, create_offset=False, data_format="NCHW", eps=0.1), FIRST),
  (dict(decay_rate=0.5, create_scale=False, create_offset=False, axis=(0,)), (7, 3, 4)),
]


@pytest.mark.parametrize("row", range(len(BATCH_NORM)))
def test_batch_norm(row):
  arguments, shape = BATCH_NORM[row]
  x = random(shape)
  train, theirs = (transformed(m, "BatchNorm", is_training=True, arguments=arguments) for m in (jhk, hk))
  shapes = shapes_of(theirs, x)
  assert shapes_of(train, x) == shapes
  params, state = map(random_like, shapes)
  state = jax.tree.map(lambda a: jnp.asarray(3, a.dtype) if a.dtype == jnp.int32 else a, state)
  compare(train, theirs, params, x, state)
  infer, theirs = (transformed(m, "BatchNorm", is_training=False, arguments=arguments) for m in (jhk, hk))
  compare(infer, theirs, params, x, state)
  assert primitives(lambda *o: applied(train)(*o)[0], params, x, state) == ["batch_norm_train"]


def test_batch_norm_of_the_batch_alone():
  arguments, shape = BATCH_NORM[0]
  x = random(shape)
  ours, stock = (
    transformed(m, "BatchNorm", is_training=False, test_local_stats=True, arguments=arguments) for m in (jhk, hk)
  )
  compare(ours, stock, random_like(shapes_of(ours, x)[0]), x)


def test_batch_norm_over_devices():
  arguments = dict(cross_replica_axis="i", **BATCH_NORM[0][0])
  x = random((3, *IMAGES))
  ours, stock = (transformed(m, "BatchNorm", is_training=True, arguments=arguments) for m in (jhk, hk))
  single = transformed(hk, "BatchNorm", is_training=True, arguments=BATCH_NORM[0][0])
  params, state = map(random_like, shapes_of(single, x[0]))
  state = jax.tree.map(lambda a: jnp.asarray(3, a.dtype) if a.dtype == jnp.int32 else a, state)
  calls = [jax.vmap(applied(f), (None, 0, None), axis_name="i") for f in (ours, stock)]
  assert_close(*jax.jit(lambda *o: [call(*o) for call in calls])(params, x, state))


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "GroupNorm"])
def test_parameters_of_the_call(name):
  x, scale, offset = random(IMAGES), random((2, 1, 1, 4), 2), random((4,), 3)
  arguments = {
    "BatchNorm": dict(decay_rate=0.9, create_scale=False, create_offset=True),
    "LayerNorm": dict(axis=-1, create_scale=False, create_offset=True),
    "GroupNorm": dict(groups=2, create_scale=False, create_offset=True),
  }[name]
  options = dict(is_training=False, test_local_stats=True) if name == "BatchNorm" else {}
  ours, stock = (transformed(m, name, arguments=arguments, scale=scale, **options) for m in (jhk, hk))
  params = random_like(shapes_of(stock, x)[0])
  compare(ours, stock, params, x)
  with pytest.raises(ValueError, match="create_offset"):
    shapes_of(transformed(jhk, name, arguments=arguments, offset=offset, **options), x)


@pytest.mark.parametrize("name", ["Conv2D", "BatchNorm", "GroupNorm", "InstanceNorm", "DepthwiseConv2D"])
def test_activation_and_residual(name):
  arguments, options, primitive = {
    "Conv2D": (dict(output_channels=4, kernel_shape=3), {}, "conv_fused"),
    "DepthwiseConv2D": (dict(channel_multiplier=1, kernel_shape=3), {}, "conv_fused"),
    "BatchNorm": (BATCH_NORM[0][0], dict(is_training=True), "batch_norm_train"),
    "GroupNorm": (dict(groups=2), {}, "group_norm"),
    "InstanceNorm": (BOTH, {}, "group_norm"),
  }[name]
  x = random(IMAGES)
  residual = random(IMAGES, seed=2) if name not in ("GroupNorm", "InstanceNorm") else None
  stock = transformed(hk, name, arguments=arguments, **options)
  extra = {} if residual is None else {"residual": residual}
  ours = transformed(jhk, name, arguments={**arguments, "activation": "relu"}, **options, **extra)
  params, state = stock.init(jax.random.PRNGKey(0), x)
  y, _ = jax.jit(applied(ours))(params, x, state)
  assert_close(y, jax.nn.relu(stock.apply(params, state, None, x)[0] + (0 if residual is None else residual)))
  assert primitives(lambda *o: applied(ours)(*o)[0], params, x, state) == [primitive]


def test_names_in_a_network_are_haikus():
  def network(m):
    def f(x):
      x = m.BatchNorm(True, True, 0.9)(m.Conv2D(3, 3)(m.Conv2D(3, 3)(x)), True)
      return m.InstanceNorm(True, True)(m.GroupNorm(1)(x))

    return hk.transform_with_state(f)

  x = random(IMAGES)
  assert shapes_of(network(jhk), x) == shapes_of(network(hk), x)


def test_local_response_norm_and_dropout():
  x, key = random(IMAGES), jax.random.PRNGKey(0)
  f = hk.transform(lambda x: jhk.LocalResponseNorm(3, k=1.0)(x))
  np.testing.assert_array_equal(f.apply({}, None, x), local_response_norm(x, 3, k=1.0))
  drop = hk.transform(lambda x: jhk.dropout(hk.next_rng_key(), 0.5, x, (1, 2)))
  y = drop.apply({}, key, x)
  np.testing.assert_array_equal(y, np.where(y[:, :1, :1] != 0, 2 * x, 0))
  assert primitives(lambda x: jhk.dropout(key, 0.5, x), x) == ["dropout"]


@pytest.mark.parametrize(
  ("layer", "error", "match"),
  [
    (lambda: jhk.Conv2D(3, 3)(jnp.ones((1, *IMAGES))), ValueError, "Conv2D: inputs"),
    (lambda: jhk.Conv2D(3, 3, mask=MASK)(jnp.ones(IMAGES)), ValueError, "mask must have the shape"),
    (lambda: jhk.Conv1D(3, 3, activation="nothing")(jnp.ones(ROWS)), ValueError, "activation"),
    (lambda: jhk.Conv1DTranspose(3, 3, stride=2, output_shape=30)(jnp.ones(ROWS)), ValueError, "output_shape"),
    (lambda: jhk.GroupNorm(3)(jnp.ones(IMAGES)), ValueError, "groups=3"),
    (lambda: jhk.max_pool(jnp.ones(IMAGES), 2, 2, "FULL"), ValueError, "padding"),
    (lambda: jhk.avg_pool(jnp.ones(IMAGES), 2, 2, "SAME", 4), ValueError, "channel_axis"),
    (
      lambda: jhk.BatchNorm(True, True, 0.9, cross_replica_axis="i", cross_replica_axis_index_groups=[[0]])(
        jnp.ones(IMAGES), True
      ),
      NotImplementedError,
      "cross_replica_axis_index_groups",
    ),
  ],
)
def test_errors(layer, error, match):
  with pytest.raises(error, match=match):
    jax.eval_shape(hk.transform_with_state(layer).init, jax.random.PRNGKey(0))
