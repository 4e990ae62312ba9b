"""Local contrast normalization against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from numerics import assert_close, exact, sample


def contrast_oracle(x, size, epsilon, across):
  """Channels last, two spatial dimensions, one element after the other."""

  def box_mean(v):
    out = np.empty_like(v)
    low, high = (size - 1) // 2, size // 2 + 1
    for i, j in np.ndindex(*v.shape[1:3]):
      box = v[:, max(0, i - low) : i + high, max(0, j - low) : j + high]
      out[:, i, j] = box.mean((1, 2, 3))[:, None] if across else box.mean((1, 2))
    return out

  v = exact(x) - box_mean(exact(x))
  sigma = np.sqrt(box_mean(v * v))
  return v / np.maximum(np.maximum(sigma, sigma.mean((1, 2), keepdims=True)), epsilon)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("across", [True, False])
def test_local_contrast(across, dtype):
  x = sample((2, 9, 8, 3), dtype)
  for size in (3, 4, 9):
    want = contrast_oracle(x, size, 1e-4, across)
    f = jax.jit(functools.partial(jaxdnn.local_contrast_norm, size=size, across_channels=across))
    assert_close(f(x), want, dtype, terms=size * size, scale=np.abs(want).max())
    first = jax.jit(functools.partial(jaxdnn.local_contrast_norm, size=size, across_channels=across, axis=1))
    np.testing.assert_allclose(exact(first(np.moveaxis(x, -1, 1))), np.moveaxis(exact(f(x)), -1, 1), atol=1e-5)


def test_an_image_without_contrast_gives_zeros_and_finite_gradients():
  x = jnp.full((1, 6, 5, 2), 7.0)
  y, vjp = jax.vjp(jaxdnn.local_contrast_norm, x)
  np.testing.assert_array_equal(y, 0)
  assert np.isfinite(vjp(jnp.ones_like(y))[0]).all()
  assert np.isfinite(jax.jvp(jaxdnn.local_contrast_norm, (x,), (x,))[1]).all()


def test_local_contrast_forgets_brightness_and_scale():
  x = jnp.asarray(sample((1, 12, 12, 2), "float64"))
  y = jaxdnn.local_contrast_norm(x, 5)
  np.testing.assert_allclose(jaxdnn.local_contrast_norm(40 + 3 * x, 5), y, rtol=1e-9, atol=1e-12)
