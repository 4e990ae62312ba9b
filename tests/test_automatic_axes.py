"""Operators on meshes with automatic axes, of eight CPU devices or of the GPUs that there are.

On CPUs they are divided as their CUDA calls are, and on each shard their references take the place of the kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn
from jaxdnn import _primitive
from numerics import DEVICES, sample
from test_sharding import OPERATORS, close, collectives, loss

pytestmark = [pytest.mark.mesh, pytest.mark.usefixtures("divided")]

X = (16, 4, 6)
MORE = {
  "relu_bytes": (jaxdnn.relu, [(8, 4, 6)]),
  "relu_bias": (lambda x, b: jaxdnn.relu(x, bias=b), [(16, 8), (8,)]),
  "prelu": (jaxdnn.prelu, [X, (6,)]),
  "rms_norm_two_batch_axes": (jaxdnn.rms_norm, [X, (6,)]),
  "add_layer_norm": (lambda x, s: jaxdnn.add_layer_norm(x, x, s)[0], [X, (6,)]),
  "softmax_where": (lambda x: jaxdnn.softmax(x, where=x[:, :1] > -1), [X]),
  "lp_pool": (lambda x: jaxdnn.lp_pool(x, (2,), power=3), [X]),
  "divisive_norm": (lambda x: jaxdnn.divisive_norm(x, x / 2, size=3), [X]),
  "cross_entropy": (
    lambda x: jaxdnn.cross_entropy(x, jnp.arange(16) % 6, label_smoothing=0.1, reduction="none"),
    [(16, 6)],
  ),
  "dropout": (lambda x: jaxdnn.dropout(x, 0.4, jax.random.key(3)), [(16, 3, 5)]),
  "batch_norm_inference": (
    lambda x, s: jaxdnn.batch_norm_inference(x, s, s * s + 1, s, s, activation="relu"),
    [X, (6,)],
  ),
}
BATCH = P("data")
NAMES = [*OPERATORS, *MORE]
# Bits of examples share bytes.
RAGGED = {"relu"}
# Statistics of masked elements are plain jnp, which XLA divides by itself.
WITHOUT_KERNEL = {"layer_norm_where", "group_norm_where"}


@pytest.fixture
def divided():
  from jax._src.interpreters import mlir  # no public name takes a rule back

  if jax.default_backend() != "cpu":
    yield
    return

  def register(p):
    reference = mlir._lowerings[p].rule

    def rule(ctx, *operands, **params):
      found = _primitive.by_shards(p, ctx, *operands, **params)
      return reference(ctx, *operands, **params) if found is None else found

    mlir.register_lowering(p, rule, platform="cpu")

  jax.clear_caches()
  for p in _primitive._shards:
    register(p)
  yield
  for p in _primitive._shards:
    del mlir._platform_specific_lowerings["cpu"][p]
  jax.clear_caches()


def operator(name):
  f, shapes = (OPERATORS | MORE)[name]
  return f, [jnp.asarray(sample(s, "float64", seed=i)) for i, s in enumerate(shapes)]


def mesh_of(*shape, names=("data", "model")):
  count = int(np.prod(shape))
  return Mesh(np.array(jax.devices()[:count]).reshape(shape), names[: len(shape)])


def place(mesh, args, spec=BATCH):
  """The first operand sharded, the others (filters) replicated."""
  return [jax.device_put(a, NamedSharding(mesh, P() if i else spec)) for i, a in enumerate(args)]


def pullback(f):
  return lambda *args: jax.vjp(f, *args)[1](f(*args))


@pytest.mark.parametrize("name", NAMES)
def test_values_and_collectives(name):
  f, args = operator(name)
  placed = place(mesh_of(DEVICES), args)
  y = jax.jit(f)(*placed)
  close(y, f(*args))
  close(f(*placed), f(*args))
  assert y.sharding.is_equivalent_to(NamedSharding(mesh_of(DEVICES), BATCH), y.ndim)
  assert ("CustomSPMDPartitioning" in jax.jit(f).lower(*placed).as_text()) == (name not in WITHOUT_KERNEL)
  assert collectives(f, *placed) == []
  argnums = tuple(range(len(args)))
  close(jax.jit(jax.grad(loss(f), argnums))(*placed), jax.grad(loss(f), argnums)(*args))
  close(jax.jit(lambda *a: jax.jvp(f, a, a))(*placed), jax.jvp(f, tuple(args), tuple(args)))
  if name not in RAGGED:
    assert collectives(pullback(f), *placed) == ["all-reduce"] * min(1, len(args) - 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation, with_residual", [(None, False), ("relu", False), ("relu", True)])
def test_batch_norm(masked, activation, with_residual):
  """Statistics are those of the whole batch, by sums over shards and without a gather."""
  x, s = (jnp.asarray(sample(shape, "float64", seed=i)) for i, shape in enumerate(((16, 5, 6), (6,))))

  def f(x, s):
    where = (jnp.arange(80).reshape(16, 5, 1) % 7 < 5) if masked else None
    residual = x if with_residual else None
    y, stats = jaxdnn.batch_norm(x, s, s, where=where, residual=residual, activation=activation)
    return y + (stats.mean + stats.var)[None, None]

  placed = place(mesh_of(DEVICES), [x, s])
  close(jax.jit(f)(*placed), f(x, s))
  close(jax.jit(jax.grad(loss(f), (0, 1)))(*placed), jax.grad(loss(f), (0, 1))(x, s))
  assert set(collectives(pullback(f), *placed)) == {"all-reduce"}


@pytest.mark.parametrize(
  "spec", [P(("data", "model")), P(("model", "data")), P("model"), P("data", "model"), P(None, "data")]
)
@pytest.mark.parametrize("name", ["conv_layer", "layer_norm", "group_norm", "max_pool", "dropout", "gelu_bias"])
def test_two_axes_and_coupled_dimensions(name, spec):
  f, args = operator(name)
  if args[0].shape[1] % 4:
    args[0] = jnp.concatenate([args[0]] * 4, 1)
  placed = place(mesh_of(DEVICES // 2, 2), args, spec)
  argnums = tuple(range(len(args)))
  close(jax.jit(f)(*placed), f(*args))
  close(jax.jit(jax.grad(loss(f), argnums))(*placed), jax.grad(loss(f), argnums)(*args))


@pytest.mark.parametrize(
  "devices", [slice(None, None, -1), slice(DEVICES // 2 - 1, DEVICES - 1), slice(DEVICES * 3 // 4)]
)
def test_other_devices(devices):
  """Shards are those of a mesh's own devices, in its order, and may be few."""
  f, args = operator("conv_layer")
  args[0] = jnp.concatenate([args[0]] * 3)
  placed = place(Mesh(np.array(jax.devices()[devices]), ("data",)), args)
  assert collectives(f, *placed) == []
  close(jax.jit(f)(*placed), f(*args))
  close(jax.jit(jax.grad(loss(f), (0, 1)))(*placed), jax.grad(loss(f), (0, 1))(*args))


def test_vmap_and_a_batch_that_does_not_divide():
  f, (x, w) = operator("conv")
  mesh = mesh_of(DEVICES)
  for stacked, axes in ((jnp.stack([x, -x]), (0, None)), (jnp.stack([x] * 8, 1), (1, None))):
    placed = jax.device_put(stacked, NamedSharding(mesh, P(None, "data")))
    per_example = jax.vmap(jax.grad(loss(f), (0, 1)), axes)
    close(jax.jit(per_example)(placed, w), per_example(stacked, w))
  six = jax.jit(lambda x: f(jnp.concatenate([x[:5], x[6:7]]), w))
  close(six(jax.device_put(x, NamedSharding(mesh, BATCH))), six(x))


def test_two_meshes_loops_and_export():
  f, (x, w) = operator("conv_layer")[0], operator("conv_layer")[1][:2]
  b = jnp.ones(4)
  one, two = mesh_of(DEVICES), mesh_of(DEVICES // 2, 2)
  xs, ws = jax.device_put(x, NamedSharding(one, BATCH)), jax.device_put(w, NamedSharding(two, P()))
  close(jax.jit(f)(xs, ws, b), f(x, w, b))
  many = lambda x, w: jax.lax.scan(lambda x, _: (f(x, w, b), None), x, None, 3)[0].sum()  # noqa: E731
  close(jax.jit(jax.grad(many, (0, 1)))(xs, ws), jax.grad(many, (0, 1))(x, w))
  checks = [jax.export.DisabledSafetyCheck.custom_call("jaxdnn.conv_fwd.v5")]  # what a GPU's program calls
  exported = jax.export.export(jax.jit(lambda x: f(x, w, b)), disabled_checks=checks)(xs)
  assert "CustomSPMDPartitioning" not in exported.mlir_module()
