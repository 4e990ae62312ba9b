"""Every operator under every transformation of JAX, from one table. Values are the families' own tests' business."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from numerics import sample

LABELS = jnp.array([0, 3, 1])
WHERE = jnp.arange(6) != 2

# name -> (function, shapes of its differentiable arguments); all map a leading axis of 3 to independent results.
OPERATORS = {
  "conv": (lambda x, w: jaxdnn.conv(x, w, stride=2, padding="SAME"), [(3, 6, 5, 4), (3, 2, 4, 6)]),
  "conv_layer": (
    lambda x, w, b, r: jaxdnn.conv(x, w, b, groups=2, activation="tanh", residual=r),
    [(3, 6, 4), (2, 2, 4), (4,), (3, 5, 4)],
  ),
  "conv_circular": (
    lambda x, w: jaxdnn.conv(x, w, stride=2, padding=2, padding_mode=("circular", "reflect")),
    [(3, 4, 5, 2), (3, 2, 2, 4)],
  ),
  "conv_transpose": (
    lambda x, w: jaxdnn.conv_transpose(x, w, (2,), "SAME", transpose_kernel=True),
    [(3, 5, 4), (3, 2, 4)],
  ),
  "causal_conv1d": (lambda x, w: jaxdnn.causal_conv1d(x, w, activation="silu"), [(3, 6, 4), (3, 4)]),
  "causal_conv1d_layer": (lambda x, w, b: jaxdnn.causal_conv1d(x, w, b, activation="tanh"), [(3, 6, 4), (4, 4), (4,)]),
  "conv_dgrad": (lambda g, w: jaxdnn.conv_dgrad(g, w, (6, 5), stride=2, padding="SAME"), [(3, 3, 3, 6), (3, 2, 4, 6)]),
  "conv_3d": (lambda x, w: jaxdnn.conv(x, w, dilation=(1, 2, 1)), [(3, 3, 4, 3, 2), (2, 2, 2, 2, 3)]),
  "conv_local": (
    lambda x, w, b: jaxdnn.conv_local(x, w, b, padding=((1, 0),), activation="tanh"),
    [(3, 4, 2), (3, 3, 2, 3), (3, 3)],
  ),
  "conv_0d": (lambda x, w: jaxdnn.conv(x, w), [(3, 4), (4, 6)]),
  "batch_norm": (
    lambda x, s, b, r: jaxdnn.batch_norm(x, s, b, axis=(0, 2), activation="tanh", residual=r)[0],
    [(3, 5, 4), (3, 4), (3, 4), (3, 5, 4)],
  ),
  "batch_norm_inference": (
    lambda x, m, v, s, b: jaxdnn.batch_norm_inference(x, m, v * v + 1, s, b),
    [(3, 5, 4), (4,), (4,), (4,), (4,)],
  ),
  "layer_norm": (lambda x, s, b: jaxdnn.layer_norm(x, s, b, axis=(1, 2)), [(3, 2, 4), (2, 4), (2, 4)]),
  "rms_norm": (lambda x, s: jaxdnn.rms_norm(x, s, zero_centered=True), [(3, 2, 4), (4,)]),
  "add_layer_norm": (lambda *a: jnp.concatenate(jaxdnn.add_layer_norm(*a), -1), [(3, 2, 4), (3, 2, 4), (4,), (4,)]),
  "adaptive_layer_norm": (jaxdnn.adaptive_layer_norm, [(3, 2, 4), (3, 4), (3, 4)]),
  "max_pool": (lambda x: jaxdnn.max_pool(x, (3, 2), stride=(2, 1), dilation=(1, 2), padding="SAME"), [(3, 6, 5, 4)]),
  "avg_pool": (lambda x: jaxdnn.avg_pool(x, (3,), stride=2, padding="SAME", count_include_pad=False), [(3, 7, 4)]),
  "lp_pool": (lambda x: jaxdnn.lp_pool(x, (2,), power=3.0), [(3, 5, 2)]),
  "adaptive_max_pool": (lambda x: jaxdnn.adaptive_max_pool(x, (3,)), [(3, 5, 2)]),
  "adaptive_avg_pool": (lambda x: jaxdnn.adaptive_avg_pool(x, (3,)), [(3, 5, 2)]),
  "group_norm": (lambda x, s, b: jaxdnn.group_norm(x, 2, s, b, activation="silu"), [(3, 2, 5, 4), (4,), (4,)]),
  "layer_norm_where": (lambda x, s, b: jaxdnn.layer_norm(x, s, b, where=WHERE), [(3, 2, 6), (6,), (6,)]),
  "group_norm_where": (
    lambda x, s, b: jaxdnn.group_norm(x, 2, s, b, activation="silu", where=WHERE[:, None]),
    [(3, 6, 4), (4,), (4,)],
  ),
  "max_pool_where": (lambda x: jaxdnn.max_pool(x, (3,), padding=1, where=WHERE[:, None]), [(3, 6, 2)]),
  "avg_pool_where": (lambda x: jaxdnn.avg_pool(x, (3,), padding=1, where=WHERE[:, None]), [(3, 6, 2)]),
  "instance_norm": (lambda x, s, b: jaxdnn.instance_norm(x, s, b, axis=1), [(3, 4, 5), (4,), (4,)]),
  "lrn": (lambda x: jaxdnn.local_response_norm(x, 4, alpha=2.0), [(3, 2, 6)]),
  "lrn_within": (lambda x: jaxdnn.local_response_norm(x, (3, 2), alpha=2.0, mode="within_channel"), [(3, 4, 3, 2)]),
  "divisive_norm": (lambda x, m: jaxdnn.divisive_norm(x, m, size=(3,), alpha=2.0), [(3, 5, 2), (3, 5, 2)]),
  "local_contrast_norm": (lambda x: jaxdnn.local_contrast_norm(x, (3,)), [(3, 5, 2)]),
  "softmax": (jaxdnn.softmax, [(3, 6)]),
  "softmax_where": (lambda x: jaxdnn.softmax(x, where=jnp.broadcast_to(WHERE, x.shape)), [(3, 6)]),
  "softmax_axes": (lambda x: jaxdnn.softmax(x, axis=(1, 2)), [(3, 2, 6, 4)]),
  "log_softmax": (jaxdnn.log_softmax, [(3, 6)]),
  "logsumexp": (lambda x: jaxdnn.logsumexp(x, (1, 3)), [(3, 2, 4, 3)]),
  "logsumexp_where": (lambda x: jaxdnn.logsumexp(x, where=jnp.broadcast_to(WHERE, x.shape)), [(3, 6)]),
  "cross_entropy": (lambda x: jaxdnn.cross_entropy(x, LABELS[: x.shape[0]], reduction="none"), [(3, 6)]),
  "cross_entropy_soft": (
    lambda x, q: jaxdnn.cross_entropy(x, q, label_smoothing=0.1, z_loss=1e-2, reduction="none"),
    [(3, 6), (3, 6)],
  ),
  "relu": (jaxdnn.relu, [(3, 6)]),
  "sigmoid": (jaxdnn.sigmoid, [(3, 6)]),
  "tanh": (jaxdnn.tanh, [(3, 6)]),
  "gelu": (jaxdnn.gelu, [(3, 6)]),
  "relu_bias": (lambda x, b: jaxdnn.relu(x, bias=b), [(3, 6), (6,)]),
  "silu_bias": (lambda x, b: jaxdnn.silu(x, bias=b, axis=1), [(3, 2, 5), (2,)]),
  "prelu": (jaxdnn.prelu, [(3, 6), (6,)]),
  "swiglu": (jaxdnn.swiglu, [(3, 6)]),
  "dropout": (lambda x: jaxdnn.dropout(x, 0.4, jax.random.key(1)), [(3, 6)]),
  "transform": (
    lambda x, y: jaxdnn.transform(x, y, permutation=(0, 2, 1), padding=((0, 0), (1, -2), (2, 0)), alpha=2, beta=3),
    [(3, 4, 5), (3, 4, 6)],
  ),
  "im2col": (lambda x: jaxdnn.im2col(x, (3, 2), stride=(2, 1), dilation=(1, 2), padding="SAME"), [(3, 5, 4, 2)]),
  "col2im": (lambda x: jaxdnn.col2im(x, (4, 4), (2, 2), padding=((1, 0), (0, -1))), [(3, 4, 2, 8)]),
}
NAMES = list(OPERATORS)


def operator(name):
  f, shapes = OPERATORS[name]
  return f, [jnp.asarray(sample(s, "float64", seed=i)) for i, s in enumerate(shapes)]


def loss(f):
  """A scalar that is neither linear nor symmetric in the result."""

  def scalar(*args):
    y = f(*args)
    return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.size).reshape(y.shape) / y.size))

  return scalar


def close(a, b):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10, rtol=1e-10), a, b)


def argnums(args):
  return tuple(range(len(args)))


@cache
def gradient_of(name):
  """The compiled gradient that several transformations are compared with."""
  f, args = operator(name)
  return jax.jit(jax.grad(loss(f), argnums(args)))


@pytest.mark.parametrize("name", NAMES)
def test_jit_of_grad(name):
  f, args = operator(name)
  close(gradient_of(name)(*args), jax.grad(loss(f), argnums(args))(*args))


# The rest under jit, which compiles each side of an equation at once instead of step by step.


@pytest.mark.parametrize("name", NAMES)
def test_jvp_is_vjp(name):
  f, args = operator(name)
  tangents = [jnp.asarray(sample(a.shape, "float64", seed=9 + i)) for i, a in enumerate(args)]

  @jax.jit
  def both(args, tangents):
    _, forward = jax.jvp(loss(f), args, tangents)
    gradients = jax.grad(loss(f), argnums(args))(*args)
    return forward, sum(jnp.vdot(g, t) for g, t in zip(gradients, tangents, strict=True))

  close(*both(args, tangents))


@pytest.mark.parametrize("name", NAMES)
def test_jvp_of_grad_is_grad_of_jvp(name):
  f, args = operator(name)
  tangents = [jnp.asarray(sample(a.shape, "float64", seed=9 + i)) for i, a in enumerate(args)]

  @jax.jit
  def both(args, tangents):
    forward_over_reverse = jax.jvp(jax.grad(loss(f), argnums(args)), args, tangents)[1]
    reverse_over_forward = jax.grad(lambda *a: jax.jvp(loss(f), a, tuple(tangents))[1], argnums(args))(*args)
    return forward_over_reverse, reverse_over_forward

  close(*both(args, tangents))


@pytest.mark.parametrize("name", NAMES)
def test_hessian_is_symmetric(name):
  f, args = operator(name)
  small = args[0]
  h = jax.jit(jax.hessian(lambda x: loss(f)(x, *args[1:])))(small).reshape(small.size, small.size)
  close(h, h.T)


@pytest.mark.parametrize("name", NAMES)
def test_vmap_of_grad_and_grad_of_vmap(name):
  f, args = operator(name)
  stacked = [jnp.stack([a, 0.5 * a, -a]) for a in args]
  gradient = gradient_of(name)
  each = [gradient(*(s[i] for s in stacked)) for i in range(3)]
  each = jax.tree.map(lambda *a: jnp.stack(a), *each)
  close(jax.jit(jax.vmap(gradient))(*stacked), each)
  close(jax.jit(jax.grad(lambda *s: jax.vmap(loss(f))(*s).sum(), argnums(args)))(*stacked), each)


@pytest.mark.parametrize("name", NAMES)
def test_vmap_of_no_examples(name):
  f, args = operator(name)
  gradient = jax.grad(loss(f), argnums(args))
  for i in range(len(args)):
    axes = [0 if i == j else None for j in range(len(args))]
    none = [jnp.zeros((0, *a.shape)) if i == j else a for j, a in enumerate(args)]
    y, *gradients = jax.eval_shape(lambda *a: (f(*a), *gradient(*a)), *args)
    mapped = jax.eval_shape(jax.vmap(lambda *a: (f(*a), *gradient(*a)), axes), *none)
    assert [a.shape for a in mapped] == [(0, *a.shape) for a in (y, *gradients)]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint(name):
  f, args = operator(name)
  close(jax.jit(jax.grad(loss(jax.checkpoint(f)), argnums(args)))(*args), gradient_of(name)(*args))


@pytest.mark.parametrize("name", NAMES)
def test_scan(name):
  f, args = operator(name)
  stacked = [jnp.stack([a, 0.5 * a]) for a in args]
  total = lambda *s: jax.lax.scan(lambda c, xs: (c + loss(f)(*xs), None), 0.0, s)[0]  # noqa: E731
  want = [gradient_of(name)(*(s[i] for s in stacked)) for i in range(2)]
  close(jax.jit(jax.grad(total, argnums(args)))(*stacked), jax.tree.map(lambda *a: jnp.stack(a), *want))


@pytest.mark.parametrize("name", NAMES)
def test_without_jit(name):
  f, args = operator(name)
  with jax.disable_jit():
    got = f(*args)
  close(got, f(*args))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_keep_the_dtype(name):
  f, args = operator(name)

  def with_gradients(*args):
    y, vjp = jax.vjp(f, *args)
    return y, *vjp(y)

  for dtype in ("float32", "float16", "bfloat16"):
    lowered = jax.jit(with_gradients).lower(*(a.astype(dtype) for a in args))
    assert {a.dtype for a in lowered.out_info} == {jnp.dtype(dtype)}
