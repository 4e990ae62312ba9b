"""Public functions outside of `jit`: one compiled program each, and another for what is another call."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from numerics import sample

X, W = jnp.asarray(sample((2, 7, 6, 4), "float32")), jnp.asarray(sample((3, 2, 4, 6), "float32"))
C, FIRST = jnp.ones(4), jnp.asarray(sample((2, 4, 7, 6), "float32"))
OIHW, LABELS, MASK = jnp.asarray(sample((6, 4, 3, 2), "float32")), jnp.zeros((2, 7, 6), int), X > 0
NCHW = ("NCHW", "OIHW", "NCHW")
CALLS = {
  "conv": (functools.partial(jaxdnn.conv, padding=[(1, 0), (0, 2)], activation="relu"), [X, W]),
  "conv_bias": (functools.partial(jaxdnn.conv, dimension_numbers=NCHW), [FIRST, OIHW, jnp.ones(6)]),
  "conv_general_dilated": (
    lambda x, w: jaxdnn.conv_general_dilated(x, w, [1, 2], "SAME", precision=jax.lax.Precision.HIGHEST),
    [FIRST, OIHW],
  ),
  "conv_transpose": (lambda x, w: jaxdnn.conv_transpose(x, w, (2, 2), "SAME"), [X, W]),
  "conv_wgrad": (lambda x, g: jaxdnn.conv_wgrad(x, g, (1, 1)), [X, X]),
  "causal_conv1d": (functools.partial(jaxdnn.causal_conv1d, return_final_state=True), [X[0], W[0, 0][:, :4]]),
  "max_pool": (lambda x: jaxdnn.max_pool(x, (2, 2), stride=2, return_indices=True), [X]),
  "adaptive_avg_pool": (lambda x: jaxdnn.adaptive_avg_pool(x, [3, None]), [X]),
  "reduce_window": (lambda x: jaxdnn.reduce_window(x, -np.inf, jax.lax.max, (1, 2, 2, 1)), [X]),
  "softmax": (lambda x, where: jaxdnn.softmax(x, (1, 2), where=where), [X, MASK]),
  "cross_entropy": (functools.partial(jaxdnn.cross_entropy, label_smoothing=0.1), [X, LABELS]),
  "batch_norm": (functools.partial(jaxdnn.batch_norm, activation="relu"), [X, C, C]),
  "layer_norm": (jaxdnn.layer_norm, [X, C, C]),
  "group_norm": (lambda x: jaxdnn.group_norm(x, 2, axis=1), [FIRST]),
  "local_response_norm": (jaxdnn.local_response_norm, [X]),
  "dropout": (lambda x, key: jaxdnn.dropout(x, 0.5, key), [X, jax.random.key(0)]),
  "gelu": (lambda x, b: jaxdnn.gelu(x, bias=b), [X, C]),
  "prelu": (jaxdnn.prelu, [X, 0.5]),
  "swiglu": (jaxdnn.swiglu, [X]),
  "transform": (functools.partial(jaxdnn.transform, permutation=(0, 3, 1, 2), dtype=jnp.bfloat16), [X]),
  "im2col": (lambda x: jaxdnn.im2col(x, (2, 2)), [X]),
}


@pytest.fixture
def programs():
  """A function that says how many have been compiled."""
  events = []

  def listen(event, *_, **__):
    if "backend_compile" in event:
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield lambda: len(events)
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_program(name, programs):
  f, operands = CALLS[name]
  jax.clear_caches()
  first = f(*operands)
  assert programs() == 1
  again, inlined = f(*operands), jax.jit(f)(*operands)
  assert programs() == 2
  for other in (again, inlined):
    jax.tree.map(np.testing.assert_array_equal, other, first)


def test_options_that_are_equal_but_not_the_same():
  padded = [jaxdnn.transform(X, padding=((1, 0),) * 4, pad_value=zero) for zero in (0.0, -0.0)]
  assert [bool(np.signbit(y[0, 0, 0, 0])) for y in padded] == [False, True]
  jaxdnn.gelu(X, True)
  with pytest.raises(TypeError, match="approximate must be True or False, got 1"):
    jaxdnn.gelu(X, 1)
  sizes = [3, 2]
  assert jaxdnn.adaptive_avg_pool(X, sizes).shape == (2, 3, 2, 4)
  sizes[0] = 4
  assert jaxdnn.adaptive_avg_pool(X, sizes).shape == (2, 4, 2, 4)


def test_configuration_of_jax_is_minded():
  f = lambda: jaxdnn.conv(X, W)  # noqa: E731
  for precision, name in (("highest", "HIGHEST"), ("high", "HIGH")):
    with jax.default_matmul_precision(precision):
      assert f"Precision.{name}," in str(jax.make_jaxpr(f)())


def test_what_can_be_no_option_is_as_it_was():
  want = jaxdnn.conv(X, W, padding=((1, 0), (0, 2)))
  np.testing.assert_array_equal(jaxdnn.conv(X, W, padding=np.array([(1, 0), (0, 2)])), want)
  with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
    jaxdnn.conv(X)
  with pytest.raises(TypeError, match="unexpected keyword argument 'strides'"):
    jaxdnn.conv(X, W, strides=2)
  with pytest.raises(TypeError, match="multiple values for argument 'w'"):
    jaxdnn.conv(X, W, w=W)
  with pytest.raises(TypeError, match="positional argument"):
    jaxdnn.conv(X, W, C, 1)
  with pytest.raises(TypeError, match="relu: x must be an array, got 'x'"):
    jaxdnn.relu("x")


def test_signatures_and_documentation_are_the_functions_own():
  assert list(inspect.signature(jaxdnn.relu).parameters) == ["x", "bias", "axis"]
  assert jaxdnn.relu.__name__ == "relu" and "Rectified linear unit" in jaxdnn.relu.__doc__
