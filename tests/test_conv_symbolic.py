"""Convolution in exported programs, whose extents are only known when they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from numerics import sample


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", ["VALID", "SAME", "SAME_LOWER", 1])
def test_symbolic_extents(stride, padding):
  images, size = jax.export.symbolic_shape("n, size", constraints=["size >= 3"])
  w = jnp.asarray(sample((3, 3, 2, 4), "float32", 1))
  f = jax.jit(jax.grad(lambda x: (jaxdnn.conv(x, w, stride=stride, padding=padding) ** 2).sum()))
  exported = jax.export.export(f)(jax.ShapeDtypeStruct((images, size, size, 2), w.dtype))
  for n, s in ((2, 6), (1, 7)):
    x = jnp.asarray(sample((n, s, s, 2), "float32"))
    np.testing.assert_allclose(exported.call(x), f(x), rtol=1e-4, atol=1e-4)
