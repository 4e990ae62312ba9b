"""Group normalization under the transformations of JAX, beside other libraries, and as a CUDA program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from group_norm_cases import Case
from group_norm_oracle import apply, operands
from jaxdnn import _extension
from numerics import equations, sample

# Derivatives and compositions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis, activation", [(-1, None), (1, "silu"), (2, "silu")])
def test_derivatives_of_every_order_and_mode(axis, activation):
  x, scale, bias = (jnp.asarray(a) for a in operands(Case((2, 4, 4, 3, 4), 2), "float64"))
  x = x[:, :, :, 0] if axis == 2 else x[:, :, 0, :2] if axis == 1 else x[:, 0]
  f = jax.jit(lambda x, s, b: jaxdnn.group_norm(x, 2, s, b, axis=axis, activation=activation))
  c = x.shape[axis]
  check_grads(f, (x, scale[:c], bias[:c]), order=2, modes=("fwd", "rev"))


def test_vmap_over_each_subset_of_operands():
  case = Case((2, 3, 4), 2)
  args = [np.stack([a, 2 * a, a - 1]) for a in operands(case, "float64")]
  dy = sample((3, *case.shape), "float64", 5)

  def both(x, scale, bias, dy):
    f = functools.partial(apply, case, activation="silu")
    y, vjp = jax.vjp(f, x, scale, bias)
    return y, vjp(dy), jax.jvp(f, (x, scale, bias), (dy, bias, scale))[1]

  for mask in range(1, 16):
    axes = [0 if mask >> i & 1 else None for i in range(4)]
    values = [a if axis == 0 else a[0] for a, axis in zip([*args, dy], axes, strict=True)]
    got = jax.vmap(both, axes)(*values)
    for i in range(3):
      want = both(*(v[i] if axis == 0 else v for v, axis in zip(values, axes, strict=True)))
      jax.tree.map(lambda g, w, i=i: np.testing.assert_allclose(g[i], w, rtol=1e-10, atol=1e-10), got, want)


def test_vmap_over_another_axis_and_twice():
  x = sample((2, 3, 4, 5, 6), "float64")
  norm = functools.partial(jaxdnn.group_norm, num_groups=2, axis=1)
  got = jax.vmap(jax.vmap(lambda x: norm(x), in_axes=3), in_axes=1, out_axes=2)(x)
  want = np.stack([[norm(x[:, i, :, :, j]) for j in range(6)] for i in range(3)], 0)
  np.testing.assert_allclose(got, np.moveaxis(want, 0, 2), rtol=1e-12)


def test_mapped_examples_share_one_call():
  """Only x is mapped: one call on all examples, with the parameters as they are."""
  x, scale, bias = operands(Case((3, 2, 5, 6), 3), "float32")
  f = jax.vmap(functools.partial(apply, Case((2, 5, 6), 3)), (0, None, None))
  (eqn,) = equations(jax.make_jaxpr(f)(x, scale, bias), "jaxdnn_group_norm")
  assert [v.aval.shape for v in eqn.invars] == [(1, 6, 5, 6), (1, 6), (1, 6)]


def test_what_differentiation_keeps():
  """x, the parameters, and three numbers for each group; nothing of the size of x besides x."""
  x, scale, bias = operands(Case((2, 5, 6), 3), "bfloat16")
  f = functools.partial(apply, Case((2, 5, 6), 3), activation="silu")
  kept = sorted(k.size for k in jax.tree.leaves(jax.vjp(f, x, scale, bias)[1]))
  assert kept == sorted([x.size, 6, 6, 2 * 3 * 3])


# Other libraries -----------------------------------------------------------------------------------------------------


def test_matches_flax():
  linen = pytest.importorskip("flax.linen")
  x, scale, bias = operands(Case((2, 5, 6, 8), 4), "float32")
  variables = {"params": {"scale": scale, "bias": bias}}
  group = linen.GroupNorm(num_groups=4, epsilon=1e-5, use_fast_variance=False)
  np.testing.assert_allclose(jaxdnn.group_norm(x, 4, scale, bias), group.apply(variables, x), atol=2e-6, rtol=1e-5)
  instance = linen.InstanceNorm(epsilon=1e-5, use_fast_variance=False)
  np.testing.assert_allclose(jaxdnn.instance_norm(x, scale, bias), instance.apply(variables, x), atol=2e-6, rtol=1e-5)
  # flax's group size is channels over groups, and its epsilon 1e-6.
  by_size = linen.GroupNorm(num_groups=None, group_size=2, use_fast_variance=False)
  got = jaxdnn.group_norm(x, 4, scale, bias, epsilon=1e-6)
  np.testing.assert_allclose(got, by_size.apply(variables, x), atol=2e-6, rtol=1e-5)


def test_matches_torch():
  torch = pytest.importorskip("torch")
  x, scale, bias = operands(Case((2, 8, 5, 6), 4, 1), "float32")
  tx, ts, tb = (torch.tensor(np.array(a), requires_grad=True) for a in (x, scale, bias))
  for groups in (1, 4):
    want = torch.nn.functional.group_norm(tx, groups, ts, tb)
    got, vjp = jax.vjp(lambda *a, g=groups: jaxdnn.group_norm(a[0], g, *a[1:], axis=1), x, scale, bias)
    np.testing.assert_allclose(got, want.detach().numpy(), atol=2e-6, rtol=1e-5)
    for g, t in zip(vjp(got), torch.autograd.grad(want, (tx, ts, tb), want.detach()), strict=True):
      np.testing.assert_allclose(g, t.numpy(), atol=1e-4, rtol=1e-4)
  want = torch.nn.functional.instance_norm(tx, weight=ts, bias=tb).detach().numpy()
  np.testing.assert_allclose(jaxdnn.instance_norm(x, scale, bias, axis=1), want, atol=2e-6, rtol=1e-5)


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("jaxdnn.group_norm.v1" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_cuda_lowering_moves_nothing():
  def text(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16 if len(s) > 1 else jnp.float32) for s in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  def gradient(axis):
    return jax.grad(
      lambda *a: jaxdnn.group_norm(a[0], 4, *a[1:], axis=axis, activation="silu").astype(jnp.float32).sum(), (0, 1, 2)
    )

  for axis in (1, -1):
    shape = (2, 3, 5, 8) if axis == -1 else (2, 8, 3, 5)
    program = text(gradient(axis), shape, (8,), (8,))
    assert "@jaxdnn.group_norm.v1" in program and "@jaxdnn.group_norm_bwd.v1" in program
    assert "transpose" not in program and 'activation = "silu"' in program
    assert f"channels_last = {'true' if axis == -1 else 'false'}" in program and "groups = 4 : i64" in program
