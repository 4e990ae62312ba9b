"""What the tests of docs/conventions.md share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numerics import sample


def needs(package):
  """Passes a package to the test, which is skipped where it is not installed."""

  def wrap(test):
    def run():
      test(pytest.importorskip(package))

    run.__name__ = test.__name__
    return run

  return wrap


def close(got, want, tolerance=1e-10):
  got, want = (np.asarray(v.detach() if hasattr(v, "detach") else v, np.float64) for v in (got, want))
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def image(shape=(2, 7, 6, 4), seed=0):
  return sample(shape, "float64", seed)


def first(x):
  """Channels-last to channels-first."""
  return np.moveaxis(np.asarray(x), -1, 1)


def grad(f, x):
  return jax.grad(lambda x: f(x).sum())(jnp.asarray(x))


def flax_layer(layer, x, **arguments):
  """What a layer of flax with its initial parameters gives, and the collections that it updates."""
  with jax.numpy_dtype_promotion("standard"):
    return layer.apply(layer.init(jax.random.key(0), x), x, mutable=["batch_stats"], **arguments)


def torch_grad(torch, f, x):
  x = torch.tensor(np.asarray(x), requires_grad=True)
  f(x).sum().backward()
  return x.grad
