"""Transposed convolution: lax's values and gradients, groups, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from numerics import sample, with_gradients


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 3)), ((-1, 1), (2, 0))])
@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("strides,dilation", [((1, 1), None), ((2, 3), None), ((2, 2), (2, 1)), ((4, 3), None)])
def test_conv_transpose_is_lax(transpose_kernel, padding, consistent, strides, dilation):
  x = sample((2, 5, 4, 3), "float64")
  w = sample((3, 2, 6, 3) if transpose_kernel else (3, 2, 3, 6), "float64", seed=1)
  kwargs = dict(rhs_dilation=dilation, transpose_kernel=transpose_kernel, use_consistent_padding=consistent)
  reference = lambda x, w: lax.conv_transpose(x, w, strides, padding, **kwargs)  # noqa: E731
  ours = lambda x, w: jaxdnn.conv_transpose(x, w, strides, padding, **kwargs)  # noqa: E731
  g = sample(jax.eval_shape(reference, x, w).shape, "float64", seed=2)
  for got, want in zip(with_gradients(ours, x, w, g), with_gradients(reference, x, w, g), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-11)


@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_grouped_conv_transpose(transpose_kernel):
  """A grouped transposed convolution is the concatenation of its groups."""
  x, groups = sample((2, 5, 4, 6), "float64"), 3
  w = sample((3, 3, 4, 6) if transpose_kernel else (3, 3, 2, 12), "float64", seed=1)
  got = jaxdnn.conv_transpose(x, w, (2, 2), "SAME", transpose_kernel=transpose_kernel, groups=groups)
  want = [
    lax.conv_transpose(a, b, (2, 2), "SAME", transpose_kernel=transpose_kernel)
    for a, b in zip(np.split(x, groups, -1), np.split(w, groups, -1), strict=True)
  ]
  np.testing.assert_allclose(got, np.concatenate(want, -1), atol=1e-12)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(padding="FULL"), r"padding must be 'SAME', 'VALID' or \(low, high\) pairs, got 'FULL'"),
    (dict(padding=((-20, 0), (0, 0))), r"padding=.* removes more than there is"),
    (dict(groups=3), "groups=3 does not divide the input's 4 channels"),
    (dict(groups=1.5), "groups must be an int, got 1.5"),
    (dict(groups=3, transpose_kernel=True), "output channels are not a multiple of groups=3"),
    (dict(rhs=jnp.zeros((3, 3, 4, 2)), transpose_kernel=True), "output channels are those of lhs, 4, but rhs has 2"),
    (dict(precision="great"), "precision must be None"),
    (dict(preferred_element_type=jnp.int32, transpose_kernel=True), "preferred_element_type=int32 cannot hold"),
  ],
)
def test_errors_of_conv_transpose_are_its_own(options, message):
  given = dict(lhs=jnp.zeros((2, 5, 5, 4)), rhs=jnp.zeros((3, 3, 4, 4)), strides=(2, 2), padding="SAME")
  with pytest.raises((ValueError, TypeError), match=f"^conv_transpose: .*{message}"):
    jaxdnn.conv_transpose(**(given | options))
