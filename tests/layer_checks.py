"""What the tests of the layers for Flax, Haiku and Equinox share: comparing a layer with the library's own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06, "float16": 6e-3}


@pytest.fixture(autouse=True)
def as_users_have_it():
  with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


def random(shape, seed=0, dtype=np.float32):
  """Of mean 0.5, so that means and masks matter."""
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) + 0.5, dtype)


def random_like(tree, seed=1):
  """Parameters and statistics with which every one of them matters: positive, which variances must be."""
  leaves, structure = jax.tree.flatten(tree)
  rng = np.random.default_rng(seed)
  return structure.unflatten([jnp.asarray(rng.uniform(0.3, 1.3, a.shape), a.dtype) for a in leaves])


def assert_close(ours, stock, tolerance=None):
  """The same structure, shapes and types, and values up to the types' rounding, relative to the largest."""
  assert jax.tree.structure(ours) == jax.tree.structure(stock)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    atol = (tolerance or TOLERANCE[jax.tree.leaves(stock)[0].dtype.name]) * max(1, np.abs(b).max(initial=0))
    np.testing.assert_allclose(a, b, atol=atol, rtol=0)


def value_and_gradients(call, *operands):
  """`call(*operands)`, a pair of a result and anything else; and gradients of a sum in which each element counts."""

  def weighed(*operands):
    y, other = call(*operands)
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return (y.astype(jnp.float32) * weights).sum(), (y, other)

  gradients, (y, other) = jax.grad(weighed, tuple(range(len(operands))), has_aux=True)(*operands)
  return y, other, gradients


def primitives(f, *args):
  """Names of jaxdnn's primitives in the program of `f`, as often as they are called."""
  return re.findall(r"\bjaxdnn_(\w+)\[", str(jax.make_jaxpr(f)(*args)))
