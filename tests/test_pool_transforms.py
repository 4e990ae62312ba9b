"""Pooling under JAX's transformations: derivatives of every order, vmap, layouts, meshes, export."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from numerics import DEVICES, sample
from pool_cases import POOL

POOLS = pytest.mark.parametrize("pool", [jaxdnn.max_pool, jaxdnn.avg_pool], ids=["max", "avg"])


def max_pool(case):
  return lambda x: jaxdnn.max_pool(x, case.window, **case.keywords)


def avg_pool(case):
  return lambda x: jaxdnn.avg_pool(x, case.window, count_include_pad=False, **case.keywords)


# Derivatives of every order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, order", [("negative", 2), ("dilation_meets_stride", 2), ("dilation_coprime_to_stride", 2), ("all_padding", 2)]
)
def test_derivatives_of_every_order_and_mode(name, order):
  case = next(c for c in POOL if c.name == name)
  # Distinct values, more than a finite-difference step apart, and nothing of the padding's -inf.
  shape = (*case.shape[:-1], 2)
  x = jnp.asarray(np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape) / 10)
  check_grads(jax.jit(lambda x: jnp.maximum(max_pool(case)(x), -1)), (x,), order, modes=("fwd", "rev"), eps=1e-3)
  check_grads(jax.jit(avg_pool(case)), (x,), order, modes=("fwd", "rev"))


@POOLS
def test_hessian(pool):
  x = jnp.asarray(sample((6, 2), "float64"))
  f = functools.partial(pool, window=(3,))
  got = jax.hessian(lambda x: (f(x) ** 3).sum())(x).reshape(12, 12)
  jacobian = jax.jacfwd(f)(x).reshape(8, 12)
  np.testing.assert_array_equal(jacobian, jax.jacrev(f)(x).reshape(8, 12))
  np.testing.assert_allclose(got, jacobian.T @ np.diag(6 * f(x).ravel()) @ jacobian, atol=1e-12)


def test_gradient_keeps_only_the_index():
  """The residual of max pooling is one byte an output element, and inference does not even write it."""
  x = jnp.asarray(sample((2, 8, 8, 4), "float32"))

  def f(x):
    return jaxdnn.max_pool(x, (2, 2), stride=2)

  _, vjp = jax.vjp(f, x)
  kept = [r for r in jax.tree.leaves(vjp) if hasattr(r, "dtype")]
  assert [(r.shape, r.dtype) for r in kept] == [((2, 4, 4, 4), jnp.uint8)]
  assert "u8" not in str(jax.make_jaxpr(f)(x))


def scanned(f):
  return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]


@POOLS
@pytest.mark.parametrize("wrap", [jax.checkpoint, scanned])
def test_inside_other_transformations(pool, wrap):
  x = jnp.asarray(sample((6, 5, 3), "float64"))
  f = jax.jit(wrap(lambda x: pool(x, (3, 3), padding="SAME")))
  check_grads(f, (x,), order=2, modes=("fwd", "rev"), eps=1e-4)


# vmap ----------------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize(
  "f",
  [
    lambda x: jaxdnn.max_pool(x, (3, 2), stride=2, padding=1, dilation=(1, 2)),
    lambda x: jaxdnn.avg_pool(x, (3, 2), stride=2, padding=1, dilation=(1, 2), count_include_pad=False),
  ],
  ids=["max", "avg"],
)


@BOTH
@pytest.mark.parametrize("axis", [0, 1, 3, -1])
def test_vmap(f, axis):
  x = jnp.asarray(sample((2, 3, 7, 6, 4), "float64"))
  each = [jnp.take(x, i, axis) for i in range(x.shape[axis])]
  gradient = jax.grad(lambda x: (f(x) ** 3).sum())

  def hvp(x):
    return jax.jvp(gradient, (x,), (jnp.cos(x),))[1]

  for g in (f, gradient, hvp):
    np.testing.assert_allclose(jax.vmap(g, axis)(x), jnp.stack([g(v) for v in each]), rtol=1e-12)
  whole = jax.grad(lambda x: (jax.vmap(f, axis)(x) ** 3).sum())(x)
  np.testing.assert_allclose(whole, jnp.stack([gradient(v) for v in each], axis), rtol=1e-12)


@BOTH
def test_vmap_of_the_cotangent_alone(f):
  """The index stays unmapped while the cotangent or the tangent is mapped, at any axis."""
  x = jnp.asarray(sample((2, 7, 6, 4), "float64"))
  y, vjp = jax.vjp(f, x)
  g = jnp.asarray(sample((*y.shape, 3), "float64", seed=1))
  want = jnp.stack([vjp(g[..., i])[0] for i in range(3)])
  np.testing.assert_array_equal(jax.vmap(lambda g: vjp(g)[0], -1)(g), want)
  t = jnp.asarray(sample((3, *x.shape), "float64", seed=2))

  def push(t):
    return jax.jvp(f, (x,), (t,))[1]

  np.testing.assert_array_equal(jax.vmap(push)(t), jnp.stack([push(v) for v in t]))


# Layout, sharding, lowering ------------------------------------------------------------------------------------------


@POOLS
@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "CHWN", "HWNC", "NCXY"])
def test_layout(pool, layout):
  x = jnp.asarray(sample((2, 7, 6, 5), "float32"))
  order = [{"N": 0, "C": 3, "H": 1, "W": 2, "X": 1, "Y": 2}[letter] for letter in layout]

  def f(x, layout=None):
    return pool(x, (3, 2), stride=(2, 1), padding=((1, 0), (0, 2)), layout=layout)

  np.testing.assert_array_equal(f(x.transpose(order), layout), f(x).transpose(order))
  dx = jax.grad(lambda x: (f(x, layout) ** 2).sum())(x.transpose(order))
  np.testing.assert_array_equal(dx, jax.grad(lambda x: (f(x) ** 2).sum())(x).transpose(order))
  sequence = x[0]
  np.testing.assert_array_equal(
    pool(sequence.transpose(0, 2, 1), (2,), layout="NCL"), pool(sequence, (2,)).transpose(0, 2, 1)
  )


@pytest.mark.mesh
@BOTH
@pytest.mark.parametrize("spec", [P("a", None, None, "b"), P(("a", "b")), P(None, None, None, "a")], ids=str)
def test_explicit_mesh(f, spec):
  x = jnp.asarray(sample((8, 7, 6, 4), "float32"))
  gradient = jax.grad(lambda x: (f(x) ** 2).sum())
  want = f(x), gradient(x)
  mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
    for g, w in zip((f, gradient), want, strict=True):
      got = jax.jit(g)(sharded)
      np.testing.assert_array_equal(got, w)
      assert jax.typeof(got).sharding.spec[0] == jax.typeof(sharded).sharding.spec[0]
      assert jax.typeof(got).sharding.spec[3] == jax.typeof(sharded).sharding.spec[3]
    text = jax.jit(f).lower(sharded).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    spatial = jax.device_put(x[:, :6], jax.NamedSharding(mesh, P(None, None, "b")))
    with pytest.raises(ValueError, match=r"sharded over mesh axis 'b' along dimension 2"):
      f(spatial)


@pytest.mark.mesh
@BOTH
def test_inside_shard_map(f):
  x = jnp.asarray(sample((8, 7, 6, 4), "float32"))
  mesh = jax.make_mesh((DEVICES,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
  mapped = jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
  np.testing.assert_array_equal(jax.jit(mapped)(x), f(x))
  gradient = jax.grad(lambda x: (mapped(x) ** 2).sum())
  np.testing.assert_array_equal(jax.jit(gradient)(x), jax.grad(lambda x: (f(x) ** 2).sum())(x))


@POOLS
def test_symbolic_batch(pool):
  (b,) = jax.export.symbolic_shape("b")
  f = jax.jit(jax.grad(lambda x: (pool(x, (2, 2)) ** 2).sum()))
  x = sample((3, 5, 4, 2), "float32")
  exported = jax.export.export(f)(jax.ShapeDtypeStruct((b, 5, 4, 2), x.dtype))
  np.testing.assert_allclose(exported.call(x), f(x), rtol=1e-5)
