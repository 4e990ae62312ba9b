"""Tensor transforms under JAX's transformations: derivatives, vmap, meshes, lowering, and wrong calls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from jaxdnn import _extension
from numerics import DEVICES, equations, exact, sample
from transform_cases import Case, arguments, move

# Derivatives and compositions ----------------------------------------------------------------------------------------

SMALL = Case((2, 3, 4), (2, 0, 1), ((1, -2), (0, 0), (-1, 2)))


def apply(x, y):
  return jaxdnn.transform(x, y, pad_value=3, alpha=2, beta=-0.5, **arguments(SMALL))


def small(seed=0):
  return jnp.asarray(sample((2, 3, 4), "float64", seed)), jnp.asarray(sample((3, 2, 4), "float64", seed + 1))


def test_derivatives_of_every_order_and_mode():
  check_grads(jax.jit(lambda x, y: jnp.sin(apply(x, y))), small(), order=2, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda x: jnp.sin(apply(x, jnp.ones((3, 2, 4))))), small()[:1], order=2, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda y: jnp.sin(apply(jnp.ones((2, 3, 4)), y))), small()[1:], order=2, modes=("fwd", "rev"))


def test_adjoint_against_numpy():
  (x, y), g = small(), jnp.asarray(sample((3, 2, 4), "float64", 5))
  dx, dy = jax.vjp(apply, x, y)[1](g)
  t = np.asarray(sample((2, 3, 4), "float64", 6))
  np.testing.assert_allclose(np.vdot(dx, t), 2 * np.vdot(g, move(t, SMALL)), rtol=1e-12)
  np.testing.assert_allclose(dy, -0.5 * np.asarray(g), rtol=1e-12)


def test_tangent_of_one_operand_reads_one():
  """A constant operand costs nothing in the tangent, and neither does the padding's value."""
  x, y = small()
  cases = (
    (lambda x: apply(x, y), x, 1),
    (lambda y: apply(x, y), y, 1),
    (lambda y: apply(y.transpose(1, 0, 2).reshape(2, 3, 4), y), y, 2),
  )
  for f, value, operands in cases:
    jaxpr = jax.make_jaxpr(lambda v, f=f: jax.jvp(f, (v,), (v,))[1])(value)
    last = list(equations(jaxpr, "jaxdnn_transform"))[-1]
    assert len(last.invars) == operands and last.params["spec"].pad_value == 0


@pytest.mark.parametrize("source, target", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float64")])
def test_gradients_have_the_type_of_their_operand(source, target):
  x, y = jnp.ones((2, 3), source), jnp.ones((3, 2), target)
  f = lambda x, y: jaxdnn.transform(x, y, permutation=(1, 0), alpha=3, beta=2)  # noqa: E731
  out, vjp = jax.vjp(f, x, y)
  dx, dy = vjp(out)
  assert (out.dtype, dx.dtype, dy.dtype) == (target, source, target)
  np.testing.assert_array_equal(exact(dx), 15)
  np.testing.assert_array_equal(exact(dy), 10)


def test_integers_have_no_derivative():
  f = lambda x: jaxdnn.transform(x, dtype="int8").sum().astype("float32")  # noqa: E731
  np.testing.assert_array_equal(jax.grad(f)(jnp.ones(3)), 0)
  g = lambda n, y: jaxdnn.transform(n, y, beta=2).sum()  # noqa: E731
  n, y = jnp.arange(3, dtype=jnp.int32), jnp.ones(3, jnp.float32)
  np.testing.assert_array_equal(jax.grad(g, 1)(n, y), 2)
  assert jax.jvp(lambda y: g(n, y), (y,), (y,))[1] == 6


def test_vmap_over_each_subset():
  x, y = (jnp.stack([a, 2 * a, -a, a + 1, 3 * a]) for a in small())
  loss = lambda x, y: jnp.sin(apply(x, y)).sum()  # noqa: E731
  for dx, dy in itertools.product((0, 2, None), (0, 3, None)):
    if dx is None and dy is None:
      continue
    xs = x[0] if dx is None else jnp.moveaxis(x, 0, dx)
    ys = y[0] if dy is None else jnp.moveaxis(y, 0, dy)
    each = [(x[0 if dx is None else i], y[0 if dy is None else i]) for i in range(5)]
    np.testing.assert_allclose(jax.vmap(apply, (dx, dy))(xs, ys), jnp.stack([apply(*e) for e in each]), rtol=1e-12)
    gradients = [jax.grad(loss, (0, 1))(*e) for e in each]
    got = jax.vmap(jax.grad(loss, (0, 1)), (dx, dy))(xs, ys)
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, jnp.stack(b), rtol=1e-12, atol=1e-15), got, *gradients)


def test_vmap_folds_into_the_permutation():
  x = jnp.zeros((3, 5, 4))
  jaxpr = jax.make_jaxpr(jax.vmap(lambda x: jaxdnn.transform(x, permutation=(1, 0)), in_axes=1))(x)
  (call,) = equations(jaxpr)
  assert call.primitive.name == "jaxdnn_transform" and call.params["spec"].permutation == (1, 2, 0)


def test_identity_costs_nothing():
  x, identity = jnp.zeros((3, 4)), functools.partial(jaxdnn.transform, permutation=(0, 1), padding=((0, 0), (0, 0)))
  assert not list(equations(jax.make_jaxpr(identity)(x)))


@pytest.mark.mesh
def test_explicit_mesh():
  mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"))
  x, y = jnp.asarray(sample((8, 3, 4), "float64")), jnp.asarray(sample((4, 5, 8), "float64", 1))
  options = dict(permutation=(2, 1, 0), padding=((0, 0), (1, 1), (0, 0)), alpha=2, beta=3)
  f = lambda x, y: jaxdnn.transform(x, y, **options)  # noqa: E731
  want = f(x, y), jax.grad(lambda x, y: jnp.sin(f(x, y)).sum(), (0, 1))(x, y)
  with jax.set_mesh(mesh):
    placed = jax.device_put(x, P("a", None, "b")), jax.device_put(y, P("b", None, "a"))
    got = f(*placed), jax.grad(lambda x, y: jnp.sin(f(x, y)).sum(), (0, 1))(*placed)
    assert jax.typeof(got[0]).sharding.spec == P("b", None, "a")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)
    text = jax.jit(f).lower(*placed).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    with pytest.raises(ValueError, match=r"y is sharded as \('a', None, 'b'\), the transformed x as \('b', None, "):
      f(placed[0], jax.device_put(y, P("a", None, "b")))
    with pytest.raises(ValueError, match="sharded over mesh axis 'a' along dimension 0"):
      jaxdnn.transform(placed[0], padding=((1, 0), (0, 0), (0, 0)))


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("jaxdnn.transform.v1" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_cuda_lowering_names_target_and_attributes():
  def text(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  x = jax.ShapeDtypeStruct((2, 3, 4), jnp.uint8)
  options = dict(permutation=(2, 0, 1), padding=((1, 0), (-1, 0), (0, 0)), dtype="float16", alpha=0.5)
  program = text(lambda x: jaxdnn.transform(x, **options), x)
  assert "@jaxdnn.transform.v1" in program and "alpha = 5.000000e-01 : f64" in program
  assert "permutation = dense<[2, 0, 1]>" in program and "low = dense<[1, -1, 0]>" in program
  assert "jaxdnn." not in text(lambda x: jaxdnn.transform(x, dtype="float8_e4m3fn"), x)
  assert "jaxdnn." not in text(lambda x: jaxdnn.transform(x, alpha=2), jax.ShapeDtypeStruct((), jnp.float32))


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors():
  x = jnp.zeros((2, 3))
  for wrong in (jnp.zeros(3, bool), jnp.zeros(3, jnp.complex64), jnp.zeros(3, jnp.int64)):
    with pytest.raises(TypeError, match=f"x must be floating-point, int8, uint8 or int32, got {wrong.dtype}"):
      jaxdnn.transform(wrong)
  with pytest.raises(TypeError, match="dtype must be floating-point, int8, uint8 or int32, got int16"):
    jaxdnn.transform(x, dtype="int16")
  for wrong in ((0,), (0, 0), (0, 2), (0, 1, 2)):
    with pytest.raises(ValueError, match="permutation must name each of the 2 dimensions of x once, got"):
      jaxdnn.transform(x, permutation=wrong)
  with pytest.raises(TypeError, match="permutation must be a sequence of integers, got"):
    jaxdnn.transform(x, permutation=(0, 1.0))
  for wrong in (1, ((0, 0), 1), ((0, 0), (0, 0.5))):
    with pytest.raises(TypeError, match="padding must be a sequence of"):
      jaxdnn.transform(x, padding=wrong)
  with pytest.raises(ValueError, match=r"padding must have a pair for each of 2 dimensions, got \(\(0, 0\),\)"):
    jaxdnn.transform(x, padding=((0, 0),))
  with pytest.raises(ValueError, match=r"padding \(-2, -2\) crops more than the 3 elements"):
    jaxdnn.transform(x, padding=((0, 0), (-2, -2)))
  for name in ("alpha", "beta", "pad_value"):
    with pytest.raises(TypeError, match=f"{name} must be a Python number, got"):
      jaxdnn.transform(x, x, **{name: jnp.ones(2)})
  with pytest.raises(ValueError, match=r"beta = 2\.0 needs y"):
    jaxdnn.transform(x, beta=2)
  with pytest.raises(ValueError, match=r"y must be float64\[3, 2\], the result's, got float64\[2, 3\]"):
    jaxdnn.transform(x, x, permutation=(1, 0), beta=1)
  with pytest.raises(ValueError, match=r"y must be bfloat16\[2, 3\], the result's, got float64\[2, 3\]"):
    jaxdnn.transform(x, x, dtype="bfloat16", beta=1)
