"""Forms in which arguments may come, and those that are refused: each error names the function, argument and value."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from numerics import sample

X, W, G = (sample(shape, "float32") for shape in ((2, 5, 6, 4), (3, 2, 4, 6), (2, 3, 5, 6)))
LOCAL = sample((24, 3, 5, 6), "float32")
FORMS = [tuple, list, np.array, lambda pair: tuple(map(np.int32, pair))]
PAIRS = {
  "conv": lambda form: jaxdnn.conv(X, W, stride=form((2, 1)), padding=form([(1, 0), (0, 2)]), dilation=form((1, 2))),
  "conv_dgrad": lambda form: jaxdnn.conv_dgrad(G, W, form((5, 6))),
  "conv_wgrad": lambda form: jaxdnn.conv_wgrad(X, G, form((3, 2))),
  "conv_general_dilated_local": lambda form: jaxdnn.conv_general_dilated_local(
    X, LOCAL, form((1, 1)), "VALID", form((3, 2)), dimension_numbers=("NHWC", "IHWO", "NHWC")
  ),
  "max_pool": lambda form: jaxdnn.max_pool(X, form((3, 2)), stride=form((2, 1)), dilation=form((2, 1))),
  "max_unpool": lambda form: jaxdnn.max_unpool(X, jnp.zeros(X.shape, int), form((1, 1)), extent=form((5, 6))),
  "adaptive_avg_pool": lambda form: jaxdnn.adaptive_avg_pool(X, form((3, 2))),
  "im2col": lambda form: jaxdnn.im2col(X, form((3, 2)), padding=form([(1, 0), (0, 2)])),
  "col2im": lambda form: jaxdnn.col2im(X, form((5, 6)), form((1, 1))),
  "transform": lambda form: jaxdnn.transform(X[0, 0], permutation=form((1, -2)), padding=form([(1, -1), (0, 2)])),
  "dropout": lambda form: jaxdnn.dropout(X, 0.5, jax.random.key(0), broadcast_dims=form((1, -2))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_integers(name):
  first, *others = (PAIRS[name](form) for form in FORMS[:-1])
  for other in others:
    np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("name", [n for n in PAIRS if n not in ("conv", "im2col", "transform")])
def test_numpy_integers(name):
  np.testing.assert_array_equal(PAIRS[name](FORMS[-1]), PAIRS[name](tuple))


@pytest.mark.parametrize(
  "call, error, message",
  [
    (lambda: jaxdnn.conv_dgrad(G, W, 5), TypeError, "conv_dgrad: x_spatial must be a sequence of 2 integers, got 5"),
    (lambda: jaxdnn.conv_dgrad(G, W, (5.0, 6)), TypeError, "x_spatial must be a sequence of 2 integers, got (5.0, 6)"),
    (lambda: jaxdnn.conv_dgrad(G, W, (-5, 6)), ValueError, "x_spatial must not be negative, got (-5, 6)"),
    (lambda: jaxdnn.conv_wgrad(X, G, 3), TypeError, "conv_wgrad: window must be a sequence of 2 integers, got 3"),
    (lambda: jaxdnn.conv_wgrad(X, G, (-3, 2)), ValueError, "conv_wgrad: window must not be negative, got (-3, 2)"),
    (lambda: jaxdnn.conv(X, W, padding_mode=3), ValueError, "conv: padding_mode must be one of"),
    (
      lambda: jaxdnn.conv_general_dilated_local(X, LOCAL, (1, 1), "VALID", (3.0, 2)), TypeError,
      "conv_general_dilated_local: filter_shape must be an int or a sequence of 2 ints, got (3.0, 2)",
    ),
    (lambda: jaxdnn.causal_conv1d(X, X[0, 0], np.ones(3)), ValueError, "causal_conv1d: b must have shape (4,), got"),
    (
      lambda: jaxdnn.causal_conv1d(X, X[0, 0], activation="swash"), ValueError,
      "causal_conv1d: activation must be None or one of",
    ),
    (
      lambda: jaxdnn.causal_conv1d(X, X[0, 0], segment_ids=X[..., 0]), TypeError,
      "causal_conv1d: segment_ids must be integers, got float32",
    ),
    (lambda: jaxdnn.dropout(X, 0.1, None), TypeError, "dropout: key must be an array, got None"),
    (
      lambda: jaxdnn.update_running_stats(
        (jnp.zeros(4), jnp.ones(4)), jaxdnn.batch_norm(X)[1], momentum="most", convention="flax"
      ),
      TypeError, "update_running_stats: momentum must be an array, got 'most'",
    ),
  ],
)  # fmt: skip
def test_errors(call, error, message):
  with pytest.raises(error, match=re.escape(message)):
    call()


def test_dropout_for_inference_needs_no_key():
  np.testing.assert_array_equal(jaxdnn.dropout(X, 0.1, None, deterministic=True), X)


@pytest.mark.parametrize("segments", [False, True])
def test_causal_convolution_of_no_channels(segments):
  ids = np.zeros((2, 5), int) if segments else None
  y, state = jaxdnn.causal_conv1d(np.ones((2, 5, 0)), np.ones((3, 0)), segment_ids=ids, return_final_state=True)
  assert y.shape == (2, 5, 0) and state.shape == (2, 2, 0)
