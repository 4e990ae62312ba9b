"""Batch normalization synchronised over shards: inside shard_map, under named vmaps, and on explicit meshes.

Results and gradients must equal those of one device, whatever the number of entries in each shard.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxdnn
from numerics import DEVICES, sample

COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
SHAPE, CHANNELS = (16, 5, 6), (6,)


def collectives(f, *args):
  return COLLECTIVE.findall(jax.jit(f).lower(*args).compile().as_text())


def close(a, b):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-9), a, b)


def operands(dtype="float64"):
  x = 2 * sample(SHAPE, dtype) + 3
  return tuple(map(jnp.asarray, (x, 1 + sample(CHANNELS, dtype, 1) / 4, sample(CHANNELS, dtype, 2))))


# The shards have from none of 10 entries to all of them.
UNEVEN = np.arange(16 * 5).reshape(16, 5, 1) % 10 < np.repeat([0, 1, 3, 10, 4, 7, 0, 9], 2).reshape(16, 1, 1)


def network(names, x, scale, bias, where=None, residual=None):
  y, stats = jaxdnn.batch_norm(
    x, scale, bias, axis_name=names, where=where, residual=residual, activation=None if residual is None else "relu"
  )
  return jnp.sum(jnp.sin(y)), (y, stats)


@pytest.mark.mesh
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("masked, with_residual", [(False, False), (True, False), (True, True), (False, True)])
def test_inside_shard_map(masked, with_residual, axis_type):
  mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(axis_type,))
  x, scale, bias = operands()
  where = jnp.asarray(UNEVEN) if masked else None
  residual = jnp.asarray(sample(SHAPE, "float64", 3)) if with_residual else None

  def loss(x, scale, bias, where, residual):
    total, (y, stats) = network("data", x, scale, bias, where, residual)
    return jax.lax.psum(total, "data") + jnp.sum(jnp.sin(stats.mean + stats.var)), (y, stats)

  big = P("data")
  specs = (big, P(), P(), big, big)
  sharded = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=(P(), (big, P())))
  alone = lambda *a: (lambda t, aux: (t + jnp.sum(jnp.sin(aux[1].mean + aux[1].var)), aux))(*network((), *a))  # noqa: E731
  args = (x, scale, bias, where, residual)
  differentiated = (0, 1, 2, *([4] if with_residual else []))
  with jax.set_mesh(mesh):
    placed = [None if a is None else jax.device_put(a, s) for a, s in zip(args, specs, strict=True)]
    got = jax.jit(jax.value_and_grad(sharded, differentiated, has_aux=True))(*placed)
  close(got, jax.value_and_grad(alone, differentiated, has_aux=True)(*args))


@pytest.mark.mesh
def test_forward_mode_and_second_order_inside_shard_map():
  mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
  x, scale, bias = operands()
  t = jnp.asarray(sample(SHAPE, "float64", 7))
  part = len(UNEVEN) // DEVICES

  def loss(names, x):
    total = network(names, x, scale, bias, jnp.asarray(UNEVEN) if not names else where_of_shard())[0]
    return jax.lax.psum(total, names) if names else total

  def where_of_shard():
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(UNEVEN), part * jax.lax.axis_index("data"), part)

  sharded = jax.shard_map(functools.partial(loss, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
  for f in (
    lambda loss: jax.jvp(loss, (x,), (t,)),
    lambda loss: jax.jvp(jax.grad(loss), (x,), (t,)),
    lambda loss: jax.grad(lambda x: jax.jvp(loss, (x,), (t,))[1])(x),
  ):
    close(jax.jit(lambda f=f: f(sharded))(), f(functools.partial(loss, ())))


@pytest.mark.mesh
def test_one_collective_backward():
  """Forward there are two: the mean has to be known before what is left of it. Backward there is one."""
  mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
  x, scale, bias = operands("float32")

  def shard(x, scale, bias):
    return jaxdnn.batch_norm(x, scale, bias, axis_name="data")[0]

  f = jax.shard_map(shard, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
  assert collectives(f, x, scale, bias) == ["all-reduce"] * 2
  assert collectives(lambda *a: jax.vjp(f, *a)[1](a[0]), x, scale, bias) == ["all-reduce"] * 3


def test_named_vmap():
  """Under vmap with an axis name, alone and inside another vmap, and with several names."""
  x, scale, bias = operands()
  f = lambda names: lambda x: network(names, x, scale, bias)[1]  # noqa: E731
  y, stats = f(())(x)
  parts = x.reshape(4, 4, *SHAPE[1:])
  got_y, got = jax.vmap(f("batch"), axis_name="batch")(parts)
  close(got_y.reshape(SHAPE), y)
  close(got, jax.tree.map(lambda a: jnp.stack([a] * 4), stats))
  # Several independent batches at once.
  both = jnp.stack([parts, 2 * parts])
  close(jax.vmap(jax.vmap(f("batch"), axis_name="batch"))(both)[0][0], got_y)
  nested = jax.vmap(jax.vmap(f(("a", "b")), axis_name="b"), axis_name="a")(x.reshape(4, 2, 2, *SHAPE[1:]))
  close(nested[0].reshape(SHAPE), y)
  loss = lambda parts: jnp.sum(jax.vmap(lambda x: network("batch", x, scale, bias)[0], axis_name="batch")(parts))  # noqa: E731
  close(jax.grad(loss)(parts).reshape(SHAPE), jax.grad(lambda x: network((), x, scale, bias)[0])(x))


def test_merging_loses_nothing():
  """Shards whose means differ little against their size, and one whose entries are all alike."""
  x = (1e4 + 1e-2 * sample((4, 500, 3), "float64")).astype(np.float32)
  x[2] = x[2, 0]
  _, stats = jax.vmap(lambda x: jaxdnn.batch_norm(x, axis_name="i"), axis_name="i")(x)
  exact = x.astype(np.float64).reshape(-1, 3)
  np.testing.assert_allclose(stats.mean[0], exact.mean(0), rtol=2e-7)
  # The means that are merged are float32, half a millionth of a millionth of their square.
  np.testing.assert_allclose(stats.var[0], exact.var(0), rtol=2e-2)
  assert stats.entries[0] == 2000


def test_merged_variance_is_not_negative():
  """Of entries that are all alike, in shards whose numbers of entries make the mean round."""
  x = np.broadcast_to((1e3 * sample(2000, "float64")).astype(np.float32), (7, 7, 2000))
  where = np.arange(7)[None, :, None] < np.array([6, 3, 2, 4, 6, 4, 3])[:, None, None]
  _, stats = jax.vmap(lambda x, m: jaxdnn.batch_norm(x, where=m, axis_name="i"), axis_name="i")(x, where)
  assert (np.asarray(stats.var) >= 0).all()


@pytest.mark.mesh
@pytest.mark.parametrize("spec", [P("a"), P(("a", "b")), P("a", None, "b"), P(None, None, "a"), P("a", "b")])
def test_explicit_mesh(spec):
  """The statistics are those of the whole batch however it is sharded, and no data is gathered."""
  mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
  x = jnp.asarray(sample((16, 4, 8), "float64"))
  scale, bias = jnp.asarray(sample((8,), "float64", 1)), jnp.asarray(sample((8,), "float64", 2))
  residual = jnp.asarray(sample(x.shape, "float64", 3))
  where = jnp.asarray(UNEVEN[:, :4])

  def loss(x, scale, bias, residual, where):
    y, stats = jaxdnn.batch_norm(x, scale, bias, residual=residual, where=where, activation="tanh")
    return jnp.sum(jnp.sin(y)), (y, stats)

  gradient = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
  want = gradient(x, scale, bias, residual, where)
  with jax.set_mesh(mesh):
    placed = jax.device_put(x, spec)
    args = (placed, scale, bias, jax.device_put(residual, spec), where)
    got = jax.jit(gradient)(*args)
    close(got, want)
    y, stats = got[0][1]
    assert jax.typeof(y).sharding.spec == jax.typeof(placed).sharding.spec
    assert jax.typeof(stats.mean).sharding.spec[0] == jax.typeof(placed).sharding.spec[2]
    forward = lambda x: jaxdnn.batch_norm(x, scale, bias)[0]  # noqa: E731
    assert set(collectives(forward, placed)) <= {"all-reduce"}
    assert set(collectives(lambda x: jax.vjp(forward, x)[1](x), placed)) <= {"all-reduce"}


@pytest.mark.mesh
def test_explicit_mesh_inference_needs_no_collective():
  mesh = jax.make_mesh((DEVICES,), ("a",), axis_types=(AxisType.Explicit,))
  x, scale, bias = operands()
  f = lambda x: jaxdnn.batch_norm_inference(x, bias, scale**2, scale, bias, activation="relu")  # noqa: E731
  with jax.set_mesh(mesh):
    placed = jax.device_put(x, P("a"))
    close(f(placed), f(x))
    close(jax.grad(lambda x: f(x).sum())(placed), jax.grad(lambda x: f(x).sum())(x))
    assert collectives(f, placed) == []
