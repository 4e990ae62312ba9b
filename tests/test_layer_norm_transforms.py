"""Layer norm, RMS norm and their kin under JAX's transformations: every order and mode, vmap, scan, remat, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from numerics import DEVICES, equations, exact, sample

X, R, SCALE, BIAS = (jnp.asarray(sample(s, "float64", i)) for i, s in enumerate([(2, 3, 4), (2, 3, 4), (4,), (4,)]))
PER_EXAMPLE = jnp.asarray(sample((2, 4), "float64", 5)), jnp.asarray(sample((2, 4), "float64", 6))
OPERATORS = {
  "layer": (jaxdnn.layer_norm, (X, SCALE, BIAS)),
  "layer_plain": (jaxdnn.layer_norm, (X,)),
  "rms": (functools.partial(jaxdnn.rms_norm, zero_centered=True), (X, SCALE)),
  "add_layer": (jaxdnn.add_layer_norm, (X, R, SCALE, BIAS)),
  "add_rms": (jaxdnn.add_rms_norm, (X, R, SCALE)),
  "adaptive": (jaxdnn.adaptive_layer_norm, (X, *PER_EXAMPLE)),
}


def scalar(f):
  """A function of the results that is neither linear nor symmetric, and couples them."""

  def loss(*args):
    leaves = jax.tree.leaves(f(*args))
    weights = [1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) for y in leaves]
    return sum(jnp.sum(jnp.sin(y + i) * w) for i, (y, w) in enumerate(zip(leaves, weights, strict=True)))

  return loss


@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_of_every_order_and_mode(name):
  f, args = OPERATORS[name]
  check_grads(jax.jit(f), args, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", ["layer", "add_rms"])
def test_derivative_maps_are_differentiable_in_every_operand(name):
  f, args = OPERATORS[name]
  ts = tuple(jnp.asarray(sample(a.shape, "float64", 20 + i)) for i, a in enumerate(args))
  check_grads(jax.jit(lambda a, t: jax.jvp(f, a, t)[1]), (args, ts), order=1, modes=("fwd", "rev"))
  g = f(*ts)
  check_grads(jax.jit(lambda a, g: jax.vjp(f, *a)[1](g)), (args, g), order=1, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", ["layer", "layer_plain", "add_rms", "adaptive"])
def test_vmap_over_every_subset_of_operands(name):
  f, args = OPERATORS[name]
  stacked = [jnp.stack([a, 0.5 * a, a + 1]) for a in args]
  gradient = jax.grad(scalar(f), tuple(range(len(args))))
  both = jax.jit(lambda *a: (f(*a), gradient(*a)))
  for subset in range(1, 1 << len(args)):
    mapped = [bool(subset >> i & 1) for i in range(len(args))]
    each = [both(*(s[i] if m else a for s, a, m in zip(stacked, args, mapped, strict=True))) for i in range(3)]
    want = jax.tree.map(lambda *a: jnp.stack(a), *each)
    # Mapped axes first, last and in the middle.
    ins = [(0, -1, 1)[i % 3] if m else None for i, m in enumerate(mapped)]
    given = [jnp.moveaxis(s, 0, d) if m else a for s, a, m, d in zip(stacked, args, mapped, ins, strict=True)]
    got = jax.jit(jax.vmap(lambda *a: (f(*a), gradient(*a)), ins))(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, want)


def test_vmap_over_rows_is_the_same_kernel_and_per_example_gradients_are_problems():
  x = X.reshape(6, 4)
  whole, mapped = (
    jax.make_jaxpr(jaxdnn.layer_norm)(x, SCALE, BIAS),
    jax.make_jaxpr(jax.vmap(jaxdnn.layer_norm, (0, None, None)))(x, SCALE, BIAS),
  )
  shapes = [[v.aval.shape for e in equations(j, "jaxdnn_layer_norm") for v in e.invars] for j in (whole, mapped)]
  assert shapes[0] == shapes[1] == [(1, 6, 4), (1, 4), (1, 4)]
  per_example = jax.vmap(jax.grad(lambda x, s, b: jaxdnn.layer_norm(x, s, b).sum(), (1, 2)), (0, None, None))
  (backward,) = equations(jax.make_jaxpr(per_example)(x, SCALE, BIAS), "jaxdnn_layer_norm_bwd")
  assert [v.aval.shape for v in backward.outvars] == [(6, 1, 4), (6, 4), (6, 4)]


@pytest.mark.parametrize("name", ["layer", "add_rms", "adaptive"])
def test_scan_remat_and_hessian(name):
  f, args = OPERATORS[name]
  want = jax.grad(scalar(f), tuple(range(len(args))))(*args)
  got = jax.grad(scalar(jax.checkpoint(f)), tuple(range(len(args))))(*args)
  total = lambda *s: jax.lax.scan(lambda c, xs: (c + scalar(f)(*xs), None), 0.0, s)[0]  # noqa: E731
  scanned = jax.grad(total, tuple(range(len(args))))(*(a[None] for a in args))
  for a, b, c in zip(want, got, scanned, strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-10)
    np.testing.assert_allclose(c[0], a, rtol=1e-10)
  h = jax.hessian(lambda x: scalar(f)(x, *args[1:]))(args[0]).reshape(args[0].size, -1)
  np.testing.assert_allclose(h, h.T, atol=1e-9)


def test_residuals_are_the_input_and_two_statistics():
  x, p = jnp.zeros((8, 16), jnp.bfloat16), jnp.ones(16, jnp.float32)
  kept = jax.tree.leaves(jax.vjp(jaxdnn.layer_norm, x, p, p)[1])
  assert sum(k.size * k.dtype.itemsize for k in kept) == 8 * 16 * 2 + 16 * 4 + 8 * 3 * 4
  kept = jax.tree.leaves(jax.vjp(jaxdnn.rms_norm, x, p)[1])
  assert sum(k.size * k.dtype.itemsize for k in kept) == 8 * 16 * 2 + 16 * 4 + 8 * 4


def test_statistics_are_made_for_a_gradient_alone():
  x, p = jnp.zeros((8, 16), jnp.bfloat16), jnp.ones(16, jnp.float32)

  def made(f):
    return [[v.aval.shape for v in e.outvars[1:]] for e in equations(jax.make_jaxpr(f)(x, p), "jaxdnn_layer_norm")]

  norm = jaxdnn.layer_norm
  assert made(norm) == [[]]
  assert made(jax.vmap(norm, (0, None))) == [[]]
  assert made(jax.grad(lambda x, p: norm(x, p).sum().astype(jnp.float32))) == [[(1, 8, 2), (1, 8)]]
  assert made(lambda x, p: jax.jvp(lambda x: norm(x, p), (x,), (x,))) == [[(1, 8, 2), (1, 8)]]


def test_sum_of_the_residual_is_what_is_normalised():
  x, r = jnp.asarray(sample((5, 24), "bfloat16")), jnp.asarray(sample((5, 24), "bfloat16", 1))
  y, s = jax.jit(jaxdnn.add_rms_norm)(x, r)
  np.testing.assert_array_equal(exact(s), exact(x + r))
  np.testing.assert_array_equal(exact(y), exact(jax.jit(jaxdnn.rms_norm)(s)))


@pytest.mark.mesh
@pytest.mark.parametrize("name", ["layer", "add_rms", "adaptive"])
def test_explicit_mesh_gathers_nothing(name):
  f, args = OPERATORS[name]
  args = [jnp.concatenate([a] * 4) if a.ndim > 1 else a for a in args]
  mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"))
  gradient = jax.grad(scalar(f), tuple(range(len(args))))
  want = f(*args), gradient(*args)
  with jax.set_mesh(mesh):
    placed = [jax.device_put(a, P(("a", "b"))) if a.ndim > 1 else jax.device_put(a, P()) for a in args]
    got = jax.jit(lambda *a: (f(*a), gradient(*a)))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, want)
    assert all(jax.typeof(y).sharding.spec[0] == ("a", "b") for y in jax.tree.leaves(f(*placed)))
    text = jax.jit(lambda *a: f(*a)).lower(*placed).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    with pytest.raises(ValueError, match="is sharded over mesh axis 'a' along dimension 2"):
      jaxdnn.layer_norm(jax.device_put(jnp.ones((2, 3, 4)), P(None, None, "a")))
