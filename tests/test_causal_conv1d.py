"""causal_conv1d against NumPy in float64: states, segments, streaming, derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from numerics import assert_close, exact, sample

C = 6


def oracle(x, w, b=None, state=None, ids=None):
  x, w = exact(x), exact(w)
  n, length, c = x.shape
  before = len(w) - 1
  full = np.concatenate([np.zeros((n, before, c)) if state is None else exact(state), x], 1)
  marks = np.zeros((n, length)) if ids is None else np.asarray(ids)
  marks = np.concatenate([np.repeat(marks[:, :1], before, 1), marks], 1)
  y = np.zeros_like(x)
  for i in range(n):
    for t in range(length):
      for j in range(before + 1):
        if marks[i, t + j] == marks[i, t + before]:
          y[i, t] += w[j] * full[i, t + j]
  return y if b is None else y + exact(b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("k, length", [(4, 11), (1, 5), (5, 3), (3, 1)])
def test_values(k, length, state, segments, dtype):
  x, w, b = sample((2, length, C), dtype), sample((k, C), dtype, 1), sample((C,), dtype, 2)
  s = sample((2, k - 1, C), dtype, 3) if state else None
  ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, length)), 1) if segments else None
  y, last = jaxdnn.causal_conv1d(x, w, b, initial_state=s, segment_ids=ids, return_final_state=True)
  assert_close(y, oracle(x, w, b, s, ids), dtype, terms=k, scale=4)
  assert y.shape == x.shape and last.shape == (2, k - 1, C) and last.dtype == x.dtype
  want = jax.nn.silu(exact(y))
  got = jaxdnn.causal_conv1d(x, w, b, initial_state=s, segment_ids=ids, activation="silu")
  np.testing.assert_allclose(exact(got), want, rtol=0.02 if dtype == "bfloat16" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("pieces", [(5, 8), (1, 1, 1, 10), (13,), (2, 0, 11)])
def test_streaming_is_the_whole(pieces, segments):
  x, w = jnp.asarray(sample((2, 13, C), "float64")), jnp.asarray(sample((4, C), "float64", 1))
  ids = jnp.asarray([[0] * 13, [1] * 6 + [1] * 7]) if segments else None
  want, want_state = jaxdnn.causal_conv1d(x, w, segment_ids=ids, return_final_state=True)
  state, start, got = None, 0, []
  for n in pieces:
    part = slice(start, start + n)
    y, state = jaxdnn.causal_conv1d(
      x[:, part], w, initial_state=state, segment_ids=None if ids is None else ids[:, part], return_final_state=True
    )
    got.append(y)
    start += n
  np.testing.assert_allclose(jnp.concatenate(got, 1), want, atol=1e-12)
  np.testing.assert_allclose(state, want_state, atol=1e-12)


def test_packed_sequences_do_not_meet():
  """Two sequences in one, NaN in the other, and the state after is the last one's."""
  a, b, w = (jnp.asarray(sample(s, "float32", i)) for i, s in enumerate(((1, 7, C), (1, 2, C), (4, C))))
  ids = jnp.asarray([[3] * 7 + [8] * 2])
  y, state = jaxdnn.causal_conv1d(jnp.concatenate([a, b], 1), w, segment_ids=ids, return_final_state=True)
  np.testing.assert_allclose(y[:, :7], jaxdnn.causal_conv1d(a, w), atol=1e-5)
  alone, alone_state = jaxdnn.causal_conv1d(b, w, return_final_state=True)
  np.testing.assert_allclose(y[:, 7:], alone, atol=1e-5)
  np.testing.assert_array_equal(state, alone_state)
  spoiled = jaxdnn.causal_conv1d(jnp.concatenate([a * jnp.nan, b], 1), w, segment_ids=ids)
  np.testing.assert_allclose(spoiled[:, 7:], alone, atol=1e-5)


@pytest.mark.parametrize("segments", [False, True])
def test_derivatives_vmap_and_leading_dimensions(segments):
  x, w, b, s = (
    jnp.asarray(sample(shape, "float64", i)) for i, shape in enumerate(((2, 3, 7, C), (3, C), (C,), (2, 3, 2, C)))
  )
  ids = jnp.asarray([0, 0, 1, 1, 1, 2, 2]) if segments else None

  def f(x, w, b, s):
    marks = None if ids is None else jnp.broadcast_to(ids, x.shape[:-1])
    y, last = jaxdnn.causal_conv1d(
      x, w, b, activation="tanh", initial_state=s, segment_ids=marks, return_final_state=True
    )
    return y, last

  check_grads(jax.jit(f), (x, w, b, s), order=2, modes=("fwd", "rev"))
  got = jax.jit(jax.vmap(f, (0, None, None, 0)))(x, w, b, s)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-12), got, jax.jit(f)(x, w, b, s))


def test_wrong_arguments():
  x, w = jnp.ones((2, 5, 4)), jnp.ones((3, 4))
  with pytest.raises(ValueError, match=r"do not fit, got \(2, 5, 4\) and \(3, 5\)"):
    jaxdnn.causal_conv1d(x, jnp.ones((3, 5)))
  with pytest.raises(TypeError, match="same dtype"):
    jaxdnn.causal_conv1d(x, w.astype("float16"))
  with pytest.raises(ValueError, match=r"initial_state must have shape \(2, 2, 4\), got \(2, 3, 4\)"):
    jaxdnn.causal_conv1d(x, w, initial_state=jnp.ones((2, 3, 4)))
  with pytest.raises(ValueError, match=r"segment_ids must have shape \(2, 5\), got \(5,\)"):
    jaxdnn.causal_conv1d(x, w, segment_ids=jnp.zeros(5, int))
