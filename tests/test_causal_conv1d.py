"""causal_conv1d against NumPy in float64: states, segments, streaming, derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from activation_cases import BY_NAME, DEFAULTS
from jaxdnn import _activation
from numerics import assert_close, assert_repeatable, exact, sample

C = 6
ACTIVATIONS = DEFAULTS | {"gelu": BY_NAME["gelu-approximate=False"], "gelu_tanh": DEFAULTS["gelu"]}


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


# Gradients in one kernel ----------------------------------------------------------------------------------------------


def gradient_oracle(x, w, b, g, kind):
  z, (x, w, g) = oracle(x, w, b), map(exact, (x, w, g))
  length, before = x.shape[1], len(w) - 1
  dz = g if kind is None else g * ACTIVATIONS[kind].derivative(z)
  earlier, later = np.pad(x, ((0, 0), (before, 0), (0, 0))), np.pad(dz, ((0, 0), (0, before), (0, 0)))
  dx = sum(w[j] * later[:, before - j : before - j + length] for j in range(before + 1))
  dw = np.stack([np.sum(dz * earlier[:, j : j + length], (0, 1)) for j in range(before + 1)])
  return dx, dw, dz.sum((0, 1))


def layer_gradients(kind):
  def gradients(g, *operands):
    return jax.vjp(lambda *a: jaxdnn.causal_conv1d(*a, activation=kind), *operands)[1](g)

  return gradients


def layer_operands(n, length, c, k, dtype, bias=True):
  shapes = ((n, length, c), (n, length, c), (k, c), (c,))[: 4 if bias else 3]
  return [jnp.asarray(sample(shape, dtype, i)) for i, shape in enumerate(shapes)]


def check_gradients(n, length, c, k, kind, dtype, bias=True, repeats=2):
  g, x, w, *b = layer_operands(n, length, c, k, dtype, bias)
  got = assert_repeatable(layer_gradients(kind), g, x, w, *b, repeats=repeats)
  # Functions of 16-bit floats are exact to 2^-14.
  scale = 8 if dtype in ("float32", "float64") else 500
  for a, want, terms in zip(got, gradient_oracle(x, w, *(b or [None]), g, kind), (k, n * length, n * length)):  # noqa: B905
    assert_close(a, want, dtype, terms=terms, scale=scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", [None, "silu", "relu", "tanh", "gelu", "hard_swish"])
@pytest.mark.parametrize("k, c", [(2, 4), (3, 6), (4, 8), (1, 4), (5, 4)])
def test_gradients(k, c, kind, dtype):
  if dtype == "bfloat16" and (k in (1, 5) or c % 4):  # in steps, each of which rounds
    return
  check_gradients(2, 19, c, k, kind, dtype, bias=k != 3, repeats=1)


def test_gradients_of_empty_sequences():
  for n, length in ((0, 5), (2, 0)):
    dx, dw, db = layer_gradients("silu")(*layer_operands(n, length, 8, 4, "float32"))
    assert dx.size == 0 and not dw.any() and not db.any()


@pytest.mark.parametrize("kind", [None, "silu", "sigmoid"])
def test_gradients_of_every_order_and_mode(kind):
  g, *operands = layer_operands(2, 6, 4, 4, "float64")
  f = lambda *a: jaxdnn.causal_conv1d(*a, activation=kind)  # noqa: E731
  check_grads(jax.jit(f), operands, order=2, modes=("fwd", "rev"))
  check_grads(jax.jit(layer_gradients(kind)), (g, *operands), order=1, modes=("fwd", "rev"))
  for i in range(3):  # with the others fixed
    of_one = lambda a, i=i: f(*operands[:i], a, *operands[i + 1 :])  # noqa: E731
    check_grads(jax.jit(of_one), operands[i : i + 1], order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (0, 0, None), (0, None, 0), (None, 0, 0), (1, 1, 1)])
def test_gradients_under_vmap(axes):
  """Of the mapped layer, and mapped: filters that are shared, and one for each example."""
  operands = [
    jnp.asarray(sample(shape if axis is None else (*shape[:axis], 3, *shape[axis:]), "float64", i))
    for i, (shape, axis) in enumerate(zip(((2, 7, 4), (4, 4), (4,)), axes, strict=True))
  ]
  f = lambda *a: jnp.sin(jaxdnn.causal_conv1d(*a, activation="silu"))  # noqa: E731
  pairs = list(zip(operands, axes, strict=True))
  one = [[a if axis is None else jnp.take(a, i, axis) for a, axis in pairs] for i in range(3)]
  each = lambda f: jax.tree.map(lambda *a: jnp.stack(a), *[f(*a) for a in one])  # noqa: E731
  gradient = jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))
  close = functools.partial(np.testing.assert_allclose, atol=1e-12)
  jax.tree.map(close, jax.jit(jax.vmap(gradient, axes))(*operands), each(gradient))
  got = jax.jit(jax.grad(lambda *a: jax.vmap(f, axes)(*a).sum(), (0, 1, 2)))(*operands)
  for a, want, axis in zip(got, each(gradient), axes, strict=True):
    close(a, want.sum(0) if axis is None else jnp.moveaxis(want, 0, axis))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [None, "silu", "relu"])
def test_gradients_that_are_not_finite_stay_local(kind, value):
  k, length, dtype = 4, 40, "float32"
  operands = layer_operands(2, length, 8, k, dtype)
  f = jax.jit(layer_gradients(kind))
  clean = f(*operands)
  # Positions of dx that see z, or g, of the spoiled one.
  for which, before, after in ((0, k - 1, 0), (1, k - 1, k - 1)):
    for at in (0, 15, 16, 17, length - 1):
      spoiled = list(operands)
      spoiled[which] = spoiled[which].at[0, at, 1].set(value)
      got = f(*spoiled)
      near = (slice(0, 1), slice(max(at - before, 0), at + after + 1), slice(1, 2))
      for a, want, place in zip(got, clean, (near, np.s_[:, 1:2], np.s_[1:2]), strict=True):
        rest = np.ones(a.shape, bool)
        rest[place] = False
        np.testing.assert_array_equal(np.asarray(a)[rest], np.asarray(want)[rest])
      if kind != "relu":  # which may be off there
        assert not np.isfinite(got[1][:, 1]).all()
      if which == 1 and kind is None:
        np.testing.assert_array_equal(got[0], clean[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", [None, "silu", "relu", "gelu", "softplus", "sigmoid"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_kernel(k, kind, dtype):
  """Lengths beside those of batches and segments; few channels; blocks side by side, and several of a channel."""
  for length in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 18, 19, 31, 33, 47, 49):
    check_gradients(1 + length % 5, length, 4 if length % 2 else 12, k, kind, dtype, bias=length % 3 > 0)
  check_gradients(2, 37, 132, k, kind, dtype)
  check_gradients(3, 100, 128, k, kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(_activation.ACTIVATIONS))
def test_kernel_of_every_activation(kind):
  for dtype in ("bfloat16", "float16", "float32"):
    check_gradients(2, 21, 12, 4, kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["silu", "hard_tanh"])
def test_kernel_on_large_problems(kind, dtype):
  """Segments of every length, several to a sequence."""
  for n, length, c in ((5, 2049, 512), (3, 700, 1536), (40, 300, 640)):
    check_gradients(n, length, c, 4, kind, dtype, repeats=5)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("kind", [None, "silu", "relu"])
def test_kernel_under_the_sanitizer(kind):
  for k, length, dtype in ((4, 35, "bfloat16"), (3, 20, "float16"), (2, 17, "float32")):
    check_gradients(3, length, 12, k, kind, dtype)
    check_gradients(1, length, 136, k, kind, dtype, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "silu", "relu"])
def test_kernel_for_each_of_several_problems(kind):
  """Filters and biases of their own, and gradients of a shared one for each example."""
  g, x, w, b = (jnp.stack([a, -2 * a, a + 1]) for a in layer_operands(2, 21, 12, 4, "float32"))
  for axes, filters in (((0, 0, 0, 0), (w, b)), ((0, 0, None, None), (w[0], b[0]))):
    got = jax.jit(jax.vmap(layer_gradients(kind), axes))(g, x, *filters)
    for i in range(3):
      mine = [a if axis is None else a[i] for a, axis in zip(filters, axes[2:], strict=True)]
      for a, want in zip(got, gradient_oracle(x[i], *mine, g[i], kind), strict=True):
        assert_close(a[i], want, "float32", terms=42, scale=40)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 3, 4])
def test_kernel_on_arrays_that_are_not_aligned(offset):
  """XLA may pass a kernel a slice as it lies in memory."""
  g, x, w, b = layer_operands(2, 21, 8, 4, "bfloat16")
  flat = jnp.concatenate([jnp.zeros(offset, x.dtype), x.reshape(-1), x.reshape(-1)])

  @jax.jit
  def f(flat, g, w, b):
    return layer_gradients("silu")(g, jax.lax.slice(flat, (offset,), (offset + x.size,)).reshape(x.shape), w, b)

  for a, want, terms in zip(f(flat, g, w, b), gradient_oracle(x, w, b, g, "silu"), (4, 42, 42), strict=True):
    assert_close(a, want, "bfloat16", terms=terms, scale=500)


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
