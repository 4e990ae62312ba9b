"""`jaxdnn.equinox`: each layer beside Equinox's, with the same arguments and leaves."""

import io
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

eqx = pytest.importorskip("equinox")

from jaxdnn import equinox as jeqx  # noqa: E402
from jaxdnn import local_response_norm  # noqa: E402
from layer_checks import as_users_have_it, assert_close, primitives, random, random_like, value_and_gradients  # noqa: E402

assert as_users_have_it  # A fixture.

ROWS, IMAGES, VOLUMES = (3, 4, 9), (3, 4, 7, 6), (3, 4, 4, 3, 6)

# Arguments, and the shape of a batch.
TABLE = [
  ("Conv1d", (4, 6, 3), dict(stride=2, padding=1, groups=2), ROWS),
  ("Conv1d", (4, 3, 2), dict(padding="SAME_LOWER", padding_mode="REPLICATE", use_bias=False), ROWS),
  ("Conv2d", (4, 5, (3, 2)), dict(padding="SAME", stride=(1, 2)), IMAGES),
  ("Conv2d", (4, 5, 3), dict(padding=((1, 2), (0, 1)), padding_mode="CIRCULAR", groups=1), IMAGES),
  ("Conv2d", (4, 5, 3), dict(padding="SAME", dilation=2, padding_mode="REFLECT"), IMAGES),
  ("Conv3d", (4, 2, 3), dict(padding=(1, 0, 2), dtype=jnp.float16), VOLUMES),
  ("Conv", (2, 4, 2, 3), dict(), IMAGES),
  ("ConvTranspose1d", (4, 6, 3), dict(stride=2, output_padding=1, groups=2), ROWS),
  ("ConvTranspose2d", (4, 3, (4, 3)), dict(stride=(2, 1), padding="SAME", dilation=(1, 2)), IMAGES),
  ("ConvTranspose2d", (4, 3, (3, 5)), dict(stride=(2, 3), padding="SAME_LOWER", padding_mode="CIRCULAR"), IMAGES),
  ("ConvTranspose2d", (4, 3, 2), dict(stride=3, padding="SAME", use_bias=False), IMAGES),
  ("ConvTranspose3d", (4, 2, 2), dict(stride=2, padding=((1, 0), (0, 1), (0, 0))), VOLUMES),
  ("ConvTranspose", (1, 4, 2, 3), dict(padding="VALID"), ROWS),
  ("LayerNorm", ((4, 9),), dict(), ROWS),
  ("LayerNorm", (4,), dict(use_bias=False, dtype=jnp.bfloat16), (3, 4)),
  ("RMSNorm", ((4, 9),), dict(eps=0.1, use_weight=False), ROWS),
  ("GroupNorm", (2, 4), dict(), IMAGES),
  ("GroupNorm", (4,), dict(channelwise_affine=False), ROWS),
  ("MaxPool1d", (3,), dict(stride=2, padding=1), ROWS),
  ("MaxPool2d", ((3, 4),), dict(stride=2, padding=((1, 0), (0, 1)), use_ceil=True), IMAGES),
  ("MaxPool3d", (2,), dict(), VOLUMES),
  ("AvgPool1d", (4,), dict(stride=2, padding=1, use_ceil=True), ROWS),
  ("AvgPool2d", ((3, 2),), dict(stride=(1, 2), padding=1), IMAGES),
  ("AvgPool3d", (2,), dict(stride=2), VOLUMES),
  ("AdaptiveMaxPool1d", (3,), dict(), ROWS),
  ("AdaptiveAvgPool2d", ((1, 3),), dict(), IMAGES),
  ("AdaptiveAvgPool2d", ((3, 4),), dict(), IMAGES),
  ("AdaptiveMaxPool2d", ((3, 2),), dict(), IMAGES),
  ("AdaptiveAvgPool3d", ((2, 1, 3),), dict(), VOLUMES),
  ("AdaptiveMaxPool3d", (1,), dict(), VOLUMES),
  ("AdaptiveAvgPool1d", (3,), dict(), ROWS),
]
UNEQUAL_BINS = {("AdaptiveAvgPool2d", ((3, 4),)), ("AdaptiveMaxPool2d", ((3, 2),))}
PRIMITIVE = {"Conv": {"conv_fwd", "conv_fused"}, "Group": {"group_norm"}, "Layer": {"layer_norm"}}
PRIMITIVE |= {"RMS": {"layer_norm"}, "Max": {"max_pool"}, "Avg": {"sum_pool"}}


def leaves_and_call(layer):
  """The layer's arrays, and it as a function of these and a batch."""
  arrays, rest = eqx.partition(layer, eqx.is_array)
  leaves, structure = jax.tree.flatten(arrays)

  def call(leaves, x, *others, **options):
    layer = eqx.combine(structure.unflatten(leaves), rest)
    return jax.vmap(lambda x, *others: layer(x, *others, **options))(x, *others), ()

  return leaves, call


def compare(ours, stock, *operands):
  assert_close(*jax.jit(lambda *o: [value_and_gradients(call, *o) for call in (ours, stock)])(*operands))


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_layer(row):
  name, args, options, shape = TABLE[row]
  if name.startswith("Conv"):
    options = {**options, "key": jax.random.key(0)}
  ours, stock = (getattr(module, name)(*args, **options) for module in (jeqx, eqx.nn))
  assert isinstance(ours, getattr(eqx.nn, name))
  (leaves, ours), (theirs, stock) = map(leaves_and_call, (ours, stock))
  jax.tree.map(np.testing.assert_array_equal, leaves, theirs)
  leaves, x = random_like(leaves), random(shape, dtype=options.get("dtype", jnp.float32))
  compare(ours, stock, leaves, x)
  found = primitives(ours, leaves, x)
  if (name, args) in UNEQUAL_BINS:
    assert not found
    return
  (expected,) = (names for start, names in PRIMITIVE.items() if name.removeprefix("Adaptive").startswith(start))
  assert len(found) == 1 and set(found) <= expected


def batch_norm(module, mode, **options):
  layer, state = eqx.nn.make_with_state(module.BatchNorm)(4, "batch", mode=mode, **options)
  arrays, rest = eqx.partition(layer, eqx.is_array)
  leaves, structure = jax.tree.flatten(arrays)

  def call(leaves, x, state, *residual, inference=False):
    layer = eqx.combine(structure.unflatten(leaves), rest)
    state = jax.tree.map(lambda a: a, state)  # A copy, since a state is good for one call.

    def of_example(x, *residual):
      return layer(x, state, inference=inference, **({"residual": residual[0]} if residual else {}))

    return jax.vmap(of_example, out_axes=(0, None), axis_name="batch")(x, *residual)

  return leaves, state, call


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm(mode):
  (leaves, state, ours), (_, theirs, stock) = (batch_norm(m, mode, momentum=0.8, eps=0.1) for m in (jeqx, eqx.nn))
  leaves, x = random_like(leaves), random(IMAGES)

  def two_batches_and_inference(call, state, leaves, x):
    before = call(leaves, x, state, inference=True)[0] if mode == "batch" else 0  # Of "ema" it is undefined.
    y, state = call(leaves, x, state)
    z, state = call(leaves, x**2, state)
    return before + y + 2 * z + 3 * call(leaves, x, state, inference=True)[0], jax.tree.leaves(state)

  calls = [partial(two_batches_and_inference, *pair) for pair in ((ours, state), (stock, theirs))]
  assert_close(*jax.jit(lambda *o: [value_and_gradients(call, *o) for call in calls])(leaves, x))
  found = primitives(lambda *o: ours(*o)[0], leaves, x, state)
  assert found and set(found) <= {"batch_norm_statistics", "batch_norm_apply"}


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm_types(mode):
  (leaves, state, ours), (_, theirs, stock) = (batch_norm(m, mode) for m in (jeqx, eqx.nn))
  x = random(IMAGES, dtype=jnp.bfloat16 if mode == "batch" else jnp.float32)
  got, want = jax.jit(lambda *o: [ours(*o, state), stock(*o, theirs)])(leaves, x)
  assert_close((got[0], jax.tree.leaves(got[1])), (want[0], jax.tree.leaves(want[1])), tolerance=0.03)


def test_batch_norm_with_residual_and_activation():
  x, residual = random(IMAGES), random(IMAGES, seed=2)
  for mode in ("ema", "batch"):
    leaves, state, ours = batch_norm(jeqx, mode, activation="relu")
    _, theirs, stock = batch_norm(eqx.nn, mode)
    y, want = jax.jit(lambda *o, f=ours, g=stock, s=state, t=theirs: (f(*o[:2], s, o[2])[0], g(*o[:2], t)[0]))(
      leaves, x, residual
    )
    assert_close(y, jax.nn.relu(want + residual))


def test_conv_with_residual_and_activation():
  x, residual = random(IMAGES), random(IMAGES, seed=2)
  options = dict(padding=1, key=jax.random.key(0))
  ours, stock = jeqx.Conv2d(4, 4, 3, activation="relu", **options), eqx.nn.Conv2d(4, 4, 3, **options)
  call = jax.vmap(lambda x, residual: ours(x, residual=residual))
  assert_close(jax.jit(call)(x, residual), jax.nn.relu(jax.vmap(stock)(x) + residual))
  assert primitives(call, x, residual) == ["conv_fused"]


def test_group_norm_with_activation():
  x = random(IMAGES)
  ours, stock = jeqx.GroupNorm(2, 4, activation="silu"), eqx.nn.GroupNorm(2, 4)
  assert_close(jax.jit(jax.vmap(ours))(x), jax.nn.silu(jax.vmap(stock)(x)))


def test_files_are_interchangeable():
  make = lambda m, seed: eqx.nn.make_with_state(  # noqa: E731
    lambda key: [m.Conv2d(4, 3, 3, key=key), m.BatchNorm(3, "batch", mode="batch"), m.GroupNorm(1, 3)]
  )(jax.random.key(seed))
  for source, target in ((jeqx, eqx.nn), (eqx.nn, jeqx)):
    written, file = make(source, 0), io.BytesIO()
    eqx.tree_serialise_leaves(file, written)
    file.seek(0)
    read = eqx.tree_deserialise_leaves(file, make(target, 1))
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.leaves(tree) for tree in (read, written)))


def test_layers_in_a_sequence_pass_the_state():
  network, state = eqx.nn.make_with_state(
    lambda: eqx.nn.Sequential([jeqx.BatchNorm(4, "batch", mode="batch"), jeqx.MaxPool2d(2), jeqx.LocalResponseNorm(3)])
  )()
  x = random(IMAGES)
  y, after = jax.vmap(network, (0, None), (0, None), axis_name="batch")(x, state)
  assert y.shape == (3, 4, 6, 5) and np.any(after.get(network[0].batch_state_index)[0] != 0)
  assert jeqx.LayerNorm(4)(x[0, :, 0, 0], state)[1] is state


def test_local_response_norm():
  x = random(IMAGES)
  y = jax.vmap(jeqx.LocalResponseNorm(3, alpha=2.0, k=1.0))(x)
  assert_close(y, local_response_norm(x, 3, alpha=2.0, k=1.0, axis=1))


def test_dropout():
  x, key = random((40, 50)), jax.random.key(0)
  layer = jeqx.Dropout(0.25)
  y = layer(x, key=key)
  np.testing.assert_allclose(y, np.where(y != 0, x / 0.75, 0), rtol=1e-6)
  assert 0.7 < np.mean(y != 0) < 0.8
  for unchanged in (eqx.nn.inference_mode(layer)(x), layer(x, inference=True), jeqx.Dropout(0)(x)):
    np.testing.assert_array_equal(unchanged, x)
  assert primitives(lambda x, key: layer(x, key=key), x, key) == ["dropout"]
  mapped = eqx.tree_at(lambda l: l.p, layer, jnp.asarray(0.25))
  np.testing.assert_array_equal(mapped(x, key=key), eqx.nn.Dropout(0.25)(x, key=key))
  with pytest.raises(RuntimeError, match="key"):
    layer(x)


def test_errors():
  x, key = random(IMAGES), jax.random.key(0)
  for layer in (jeqx.Conv2d(4, 3, 3, key=key), jeqx.ConvTranspose2d(4, 3, 3, key=key), jeqx.MaxPool2d(2)):
    with pytest.raises(ValueError, match="vmap"):
      layer(x)
  for layer in (jeqx.LayerNorm(4), jeqx.RMSNorm(4), jeqx.AdaptiveAvgPool2d(1)):
    with pytest.raises(ValueError, match="shape"):
      layer(x)
  with pytest.raises(ValueError, match="activation"):
    jeqx.Conv2d(4, 3, 3, activation="nothing", key=key)(x[0])
