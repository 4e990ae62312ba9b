"""Activations against NumPy in float64: values, derivatives, special values, unaligned buffers, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample

ORACLE = {
  "relu": (lambda x: np.where(x <= 0, 0.0, x), lambda x: (x > 0).astype(np.float64)),
  "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: 1 / (2 + np.exp(-x) + np.exp(x))),
  "tanh": (np.tanh, lambda x: 1 / np.cosh(x) ** 2),
}
KINDS = sorted(ORACLE)
# Ends that are not a multiple of the vector length, less than one vector, empty, scalar.
SHAPES = [(), (0,), (1,), (7,), (2, 3, 5), (1025,), (64, 1000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradient(kind, dtype):
  forward, derivative = ORACLE[kind]
  f = getattr(jaxdnn, kind)
  for shape in SHAPES:
    x, g = 3 * sample(shape, dtype), sample(shape, dtype, seed=1)
    y, vjp = jax.vjp(f, jnp.asarray(x))
    assert_close(y, forward(exact(x)), dtype)
    # The derivative is a function of the rounded output, whose rounding error it inherits.
    want = exact(g) * derivative(exact(x))
    slack = 8 * jnp.finfo(y.dtype).eps * (1 + np.abs(exact(g)))
    np.testing.assert_array_less(np.abs(exact(vjp(jnp.asarray(g))[0]) - want), slack)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_every_order_and_mode(kind):
  x = jnp.asarray(sample((4, 5), "float64")) + 0.01
  check_grads(getattr(jaxdnn, kind), (x,), order=3, modes=("fwd", "rev"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
  x = jnp.array([np.nan, np.inf, -np.inf, 0.0, -0.0], dtype)
  np.testing.assert_array_equal(exact(jaxdnn.relu(x)), [np.nan, np.inf, 0, 0, 0])
  np.testing.assert_array_equal(exact(jaxdnn.sigmoid(x)), [np.nan, 1, 0, 0.5, 0.5])
  np.testing.assert_array_equal(exact(jaxdnn.tanh(x)), [np.nan, 1, -1, 0, 0])
  # An infinite or NaN cotangent of a switched-off unit is dropped, not multiplied by zero.
  dx = jax.vjp(jaxdnn.relu, jnp.array([-1.0, 0.0, np.nan, 1.0], dtype))[1](jnp.array([np.inf, np.nan, 1, 2], dtype))[0]
  np.testing.assert_array_equal(exact(dx), [0, 0, 0, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_slice(kind):
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(sample((3, 1001), "bfloat16"))
  sliced = jax.jit(lambda x: getattr(jaxdnn, kind)(x[1]))(x)
  np.testing.assert_array_equal(exact(sliced), exact(getattr(jaxdnn, kind)(x))[1])


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_dtype(kind):
  with pytest.raises(TypeError, match=rf"{kind}: x must be floating-point, got int32"):
    getattr(jaxdnn, kind)(jnp.arange(3, dtype=jnp.int32))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_writes_everything_and_repeats(kind, dtype):
  x = jnp.asarray(sample((3, 1001), dtype))
  y = assert_repeatable(getattr(jaxdnn, kind), x)
  assert_close(y, ORACLE[kind][0](exact(x)), dtype)
  assert not np.isnan(exact(assert_repeatable(jax.grad(lambda x: getattr(jaxdnn, kind)(x).sum()), x))).any()


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  x = (jnp.arange((1 << 31) + 13, dtype=jnp.uint32) % 1000).astype(jnp.float16) - 3
  assert jax.jit(lambda x: (jaxdnn.relu(x) == jnp.maximum(x, 0)).all())(x)
