"""Local normalization under differentiation of both orders and modes, vmap and explicit meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from lrn_oracle import DEFAULTS
from numerics import DEVICES, sample

X = (2, 4, 5, 3)
FUNCTIONS = {
  "across": (functools.partial(jaxdnn.local_response_norm, size=4, **DEFAULTS), [X]),
  "across_first": (functools.partial(jaxdnn.local_response_norm, size=3, axis=1, **DEFAULTS), [X]),
  "within": (functools.partial(jaxdnn.local_response_norm, size=(2, 3), mode="within_channel", **DEFAULTS), [X]),
  "divisive": (functools.partial(jaxdnn.divisive_norm, size=3, **DEFAULTS), [X, X]),
  "divisive_shared_means": (functools.partial(jaxdnn.divisive_norm, size=3, **DEFAULTS), [X, (4, 5, 1)]),
  "contrast": (functools.partial(jaxdnn.local_contrast_norm, size=3), [X]),
  "contrast_by_channel": (functools.partial(jaxdnn.local_contrast_norm, size=3, axis=1, across_channels=False), [X]),
}
# Those that bring primitives of their own; the others are made of them and of pooling.
PRIMITIVES = ["across", "across_first", "within", "divisive"]


def arguments(name):
  f, shapes = FUNCTIONS[name]
  return f, [jnp.asarray(sample(s, "float64", i)) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_both_orders_and_modes(name):
  f, args = arguments(name)
  order = 2 if name in PRIMITIVES else 1
  check_grads(jax.jit(f), args, order=order, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", ["across", "divisive"])
def test_derivative_maps_are_differentiable_in_every_operand(name):
  f, args = arguments(name)
  t = jnp.asarray(sample(X, "float64", 5))
  tangents = (t, *(0.3 * t for a in args[1:]))
  check_grads(jax.jit(lambda t, *a: jax.jvp(f, a, (t, *tangents[1:]))[1]), (t, *args), order=1, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda g, *a: jax.vjp(f, *a)[1](g)[0]), (t, *args), order=1, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", [*PRIMITIVES, "divisive_shared_means"])
def test_vmap_over_every_subset_of_operands(name):
  f, args = arguments(name)
  stacked = [jnp.stack([a, -0.5 * a, a + 1]) for a in args]
  w = jnp.asarray(sample(X, "float64", 9))
  gradient = jax.jit(jax.grad(lambda *a: jnp.vdot(w, f(*a)), tuple(range(len(args)))))
  for mapped in range(1, 1 << len(args)):
    axes = [0 if mapped >> i & 1 else None for i in range(len(args))]
    some = [s if a == 0 else s[0] for s, a in zip(stacked, axes, strict=True)]
    each = [gradient(*(s[i] if a == 0 else s for s, a in zip(some, axes, strict=True))) for i in range(3)]
    for got, *want in zip(jax.vmap(gradient, axes)(*some), *each, strict=True):
      np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-10, atol=1e-12)
  last = jax.vmap(f, -1, -1)(*(jnp.moveaxis(s, 0, -1) for s in stacked))
  np.testing.assert_allclose(last[..., 1], f(*(s[1] for s in stacked)), rtol=1e-10, atol=1e-12)


def test_gradient_of_means_follows_through_them():
  """With means that depend on x, the net gradient is that of the composition."""
  x = jnp.asarray(sample(X, "float64"))
  blur = functools.partial(jaxdnn.avg_pool, window=(3, 3), padding="SAME")
  check_grads(jax.jit(lambda x: jaxdnn.divisive_norm(x, blur(x), size=3, **DEFAULTS)), (x,), order=1)


def test_only_x_is_kept():
  x = jnp.zeros((2, 3, 8), jnp.bfloat16)
  kept = jax.tree.leaves(jax.vjp(jaxdnn.local_response_norm, x)[1])
  assert [(k.size, k.dtype) for k in kept] == [(x.size, jnp.bfloat16)]


@pytest.mark.mesh
def test_explicit_mesh_keeps_every_other_axis_sharded():
  mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"))
  x, m = (jnp.asarray(sample((8, 3, 4, 6), "float64", i)) for i in range(2))
  across = functools.partial(jaxdnn.local_response_norm, axis=1, size=3)
  divisive = functools.partial(jaxdnn.divisive_norm, size=(3, 3))
  loss = lambda x, m: (across(x) * divisive(x, m)).sum()  # noqa: E731
  want = across(x), divisive(x, m), *jax.grad(loss, (0, 1))(x, m)
  with jax.set_mesh(mesh):
    xs, rows = jax.device_put(x, P("a", None, None, "b")), jax.device_put(x, P("a", None, "b"))
    got = across(rows), divisive(xs, m), *jax.grad(loss, (0, 1))(xs, m)
    assert jax.typeof(got[0]).sharding.spec == P("a", None, "b", None)
    assert jax.typeof(got[1]).sharding.spec == P("a", None, None, "b")
    for g, e in zip(got, want, strict=True):
      np.testing.assert_allclose(g, e, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="sharded over mesh axis 'b' along dimension 2"):
      divisive(rows)
    with pytest.raises(ValueError, match="sharded over mesh axis 'b' along dimension 3"):
      jaxdnn.local_response_norm(xs)
