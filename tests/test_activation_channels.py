"""Activations with an operand per channel, and gated ones: values, both gradients in one pass, vmap, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from activation_cases import CHANNELS, DEFAULTS, GATED, gelu_tanh, gelu_tanh_derivative, sigmoid
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample

# One of each kind of residual, and those whose kernels a bias is meant for.
BIASED = ("relu", "leaky_relu", "tanh", "gelu", "silu", "elu")
KEY = jax.random.key(0)
every_shape = pytest.mark.parametrize(
  ("shape", "axis"), CHANNELS, ids=[f"{'x'.join(map(str, shape))}-axis{axis}" for shape, axis in CHANNELS]
)


def along(operand, x, axis):
  """The operand with the rank of x."""
  return operand.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)])


def sums(x, axis):
  return x.sum(tuple(d for d in range(x.ndim) if d != axis % x.ndim))


def assert_pass(dtype, got, y, dx, dp):
  """Values, dx and the operand's gradient; a derivative from the output inherits its rounding, eps of 1."""
  eps, terms = float(jnp.finfo(dtype).eps), max(dx.size / max(dp.size, 1), 1)
  assert_close(got[0], y, dtype)
  bound = eps * (2 * np.abs(dx) + 8 * np.abs(dx).max(initial=1))
  np.testing.assert_array_less(np.abs(exact(got[1]) - dx), bound)
  np.testing.assert_array_less(
    np.abs(exact(got[2]) - dp), eps * (np.abs(dp) + 8 * np.sqrt(terms) * np.abs(dx).max(initial=1))
  )
  assert got[1].dtype == got[2].dtype == jnp.dtype(dtype)


@every_shape
def test_bias(shape, axis):
  dtypes = DTYPES if len(shape) == 1 else ("float32", "bfloat16")
  names = tuple(DEFAULTS) if len(shape) == 1 else BIASED
  data = {d: [sample(s, d, seed=i) for i, s in enumerate((shape, (shape[axis],), shape))] for d in dtypes}

  @jax.jit
  def run(data):
    def one(name, x, b, g):
      y, vjp = jax.vjp(lambda x, b: getattr(jaxdnn, name)(x, bias=b, axis=axis), x, b)
      return y, *vjp(g)

    return {(dtype, name): one(name, *operands) for dtype, operands in data.items() for name in names}

  for (dtype, name), got in run(data).items():
    x, b, g = map(exact, data[dtype])
    z = x + along(b, x, axis)
    dx = g * DEFAULTS[name].derivative(z)
    assert_pass(dtype, got, DEFAULTS[name].forward(z), dx, sums(dx, axis))


@every_shape
def test_prelu(shape, axis):
  shapes = shape, (shape[axis],), shape
  data = {d: [sample(s, d, seed=i) for i, s in enumerate(shapes)] for d in ("float32", "float16")}

  @jax.jit
  def run(data):
    def one(x, alpha, g):
      y, vjp = jax.vjp(lambda x, alpha: jaxdnn.prelu(x, alpha, axis=axis), x, alpha)
      return y, *vjp(g)

    return {dtype: (one(*operands), one(operands[0], operands[1][0], operands[2])) for dtype, operands in data.items()}

  for dtype, (channels, scalar) in run(data).items():
    x, alpha, g = map(exact, data[dtype])
    for got, slope, total in ((channels, along(alpha, x, axis), lambda t: sums(t, axis)), (scalar, alpha[0], np.sum)):
      y, dx = np.where(x >= 0, x, slope * x), np.where(x >= 0, g, slope * g)
      assert_pass(dtype, got, y, dx, np.asarray(total(np.where(x >= 0, 0, g * x))))


def test_prelu_equals_flax():
  linen = pytest.importorskip("flax.linen")
  layer = linen.PReLU(negative_slope_init=0.2)
  x = jnp.asarray([-2.0, 0.0, 3.0, -0.5], jnp.float32)
  theirs, ours = jax.vjp(lambda x: layer.apply(layer.init(KEY, x), x), x), jax.vjp(lambda x: jaxdnn.prelu(x, 0.2), x)
  np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
  np.testing.assert_allclose(ours[1](x)[0], theirs[1](x)[0], rtol=1e-6)


def test_bias_gradients_equal_those_of_the_sum():
  """The derivative's choices at kinks are those of the function without a bias; NaN and infinity pass alike."""
  x = jnp.asarray([[-3.5, -0.5, 0.5, jnp.nan, 2.5, jnp.inf], [5.5, 0.0, -jnp.inf, 1.0, -1.5, 7.0]])
  b = jnp.full(6, 0.5)
  for name in ("relu", "relu6", "leaky_relu", "hard_sigmoid", "hard_tanh", "elu", "sigmoid"):
    f = getattr(jaxdnn, name)
    fused = jax.vjp(lambda x, f=f: f(x, bias=b), x)
    plain = jax.vjp(lambda x, f=f: f(x + b[None]), x)
    np.testing.assert_array_equal(fused[0], plain[0], name)
    np.testing.assert_array_equal(fused[1](jnp.ones_like(x))[0], plain[1](jnp.ones_like(x))[0], name)


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu", "prelu"])
def test_derivatives_of_every_order_and_mode(name):
  f = getattr(jaxdnn, name)
  x, b = sample((3, 2, 4), "float64"), sample((2,), "float64", seed=1)
  of = (lambda x, b: f(x, b, axis=1)) if name == "prelu" else (lambda x, b: f(x, bias=b, axis=1))
  check_grads(jax.jit(of), (jnp.asarray(x), jnp.asarray(b)), order=2, modes=("fwd", "rev"), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(5, 3), (4, 2, 8)])
@pytest.mark.parametrize("name", ["relu", "silu"])
def test_vmap_over_each_subset_of_operands(name, shape):
  f = getattr(jaxdnn, name)
  size = 3
  x, b = jnp.asarray(sample((size, *shape), "float64")), jnp.asarray(sample((size, shape[-1]), "float64", seed=1))

  def both(x, b):
    y, vjp = jax.vjp(lambda x, b: f(x, bias=b), x, b)
    return y, vjp(jnp.cos(y))

  for axes in ((0, 0), (0, None), (None, 0)):
    pick = lambda a, axis, i: a[0] if axis is None else a[i]  # noqa: E731
    each = [both(pick(x, axes[0], i), pick(b, axes[1], i)) for i in range(size)]
    want = jax.tree.map(lambda *a: jnp.stack(a), *each)
    operands = [a[0] if axis is None else a for a, axis in zip((x, b), axes, strict=True)]
    got = jax.jit(jax.vmap(both, in_axes=axes))(*operands)
    jax.tree.map(lambda a, c: np.testing.assert_allclose(a, c, atol=1e-12), got, want)
  last = jax.vmap(lambda x: f(x, bias=b[0]), in_axes=1, out_axes=1)(jnp.moveaxis(x, 0, 1))
  np.testing.assert_allclose(last, f(jnp.moveaxis(x, 0, 1), bias=b[0]), atol=1e-12)
  twice = jax.vmap(jax.vmap(lambda x, b: f(x, bias=b), (0, None)), (0, 0))(jnp.stack([x, -x]), b[:2])
  np.testing.assert_allclose(twice[1], f(-x, bias=b[1]), atol=1e-12)


def test_empty():
  for shape in ((0, 3), (4, 0), (0, 3, 2)):
    y, vjp = jax.vjp(lambda x, b: jaxdnn.relu(x, bias=b, axis=1), jnp.zeros(shape), jnp.zeros(shape[1]))
    dx, db = vjp(y)
    assert dx.shape == shape
    np.testing.assert_array_equal(db, np.zeros(shape[1]))


def test_residuals_are_the_least():
  x, b = jnp.asarray(sample((40, 50), "float32")), jnp.zeros(50, np.float32)
  for name, kept in (("relu", 250), ("tanh", 8000), ("gelu", 8000)):
    _, vjp = jax.vjp(lambda x, b, name=name: getattr(jaxdnn, name)(x, bias=b), x, b)
    residuals = jax.tree.leaves(vjp)
    assert sum(r.nbytes for r in residuals if hasattr(r, "nbytes")) == kept + b.nbytes


# Gated ---------------------------------------------------------------------------------------------------------------

GATES = {
  "glu": (jaxdnn.glu, lambda a, b: a * sigmoid(b), lambda a, b: (sigmoid(b), a * sigmoid(b) * sigmoid(-b))),
  "swiglu": (
    jaxdnn.swiglu,
    lambda a, b: a * sigmoid(a) * b,
    lambda a, b: (b * sigmoid(a) * (1 + a * sigmoid(-a)), a * sigmoid(a)),
  ),
  "geglu": (
    jaxdnn.geglu,
    lambda a, b: gelu_tanh(a) * b,
    lambda a, b: (gelu_tanh_derivative(a) * b, gelu_tanh(a)),
  ),
  "reglu": (jaxdnn.reglu, lambda a, b: np.maximum(a, 0) * b, lambda a, b: ((a > 0) * b, np.maximum(a, 0))),
  "bilinear": (lambda x, axis: jaxdnn.glu(x, axis, "identity"), lambda a, b: a * b, lambda a, b: (b, a)),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name):
  f, forward, derivatives = GATES[name]
  xs = [(sample(shape, dtype), axis) for dtype in DTYPES for shape, axis in GATED]
  axes = [axis for _, axis in xs]

  @jax.jit
  def run(xs):
    def one(x, axis):
      y, vjp = jax.vjp(lambda x: f(x, axis), x)
      return y, vjp(jnp.cos(y))[0]

    return [one(x, axis) for x, axis in zip(xs, axes, strict=True)]

  for (x, axis), (y, dx) in zip(xs, run([x for x, _ in xs]), strict=True):
    a, b = np.split(exact(x), 2, axis)
    assert_close(y, forward(a, b), x.dtype.name, scale=4)
    want = np.concatenate([np.cos(exact(y)) * d for d in derivatives(a, b)], axis)
    eps = float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(exact(dx), want, atol=8 * eps, rtol=8 * eps)


def test_other_names():
  assert jaxdnn.swish is jaxdnn.silu and jaxdnn.hard_silu is jaxdnn.hard_swish and jaxdnn.softsign is jaxdnn.soft_sign


def test_gates_of_other_half_and_jax_nn():
  x = jnp.asarray(sample((3, 8), "float64"))
  swapped = jnp.roll(x, 4, axis=1)
  np.testing.assert_allclose(jaxdnn.glu(x), jax.nn.glu(x), rtol=1e-12)
  np.testing.assert_allclose(jaxdnn.swiglu(x, gate="second"), jaxdnn.swiglu(swapped), rtol=1e-12)
  np.testing.assert_allclose(
    jaxdnn.geglu(x, approximate=False), jax.nn.gelu(x[:, :4], approximate=False) * x[:, 4:], rtol=1e-12
  )
  assert jaxdnn.glu(jnp.zeros((0, 4))).shape == (0, 2) and jaxdnn.glu(jnp.zeros((3, 0))).shape == (3, 0)


@pytest.mark.parametrize("activation", ["silu", "sigmoid", "relu"])
def test_gate_derivatives_of_every_order_and_mode(activation):
  x = jnp.asarray(sample((2, 6, 2), "float64"))
  check_grads(
    jax.jit(lambda x: jaxdnn.glu(x, 1, activation)), (x,), order=2, modes=("fwd", "rev"), atol=1e-3, rtol=1e-3
  )


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda x: jaxdnn.relu(x, bias=jnp.ones(3)), ValueError, r"relu: bias must have shape \(4,\), .* got \(3,\)"),
    (lambda x: jaxdnn.relu(x, bias=jnp.ones((1, 4))), ValueError, r"relu: bias must have shape \(4,\)"),
    (lambda x: jaxdnn.gelu(x, bias=jnp.ones(4), axis=2), ValueError, r"axis must be a dimension of x \(2, 4\), got 2"),
    (lambda x: jaxdnn.gelu(x, bias=jnp.arange(4)), TypeError, "bias must be floating-point, got int"),
    (lambda x: jaxdnn.prelu(x, jnp.ones(2)), ValueError, r"prelu: alpha must have shape \(4,\)"),
    (lambda x: jaxdnn.glu(x[:, :3]), ValueError, r"glu: x \(2, 3\) has an odd extent 3 along axis 1"),
    (lambda x: jaxdnn.glu(x, 5), ValueError, r"glu: axis must be a dimension of x \(2, 4\), got 5"),
    (lambda x: jaxdnn.glu(x, activation="elu"), ValueError, "glu: activation must be one of .* got 'elu'"),
    (lambda x: jaxdnn.glu(x, gate="left"), ValueError, "glu: gate must be 'first' or 'second', got 'left'"),
    (lambda x: jaxdnn.glu(x.astype(int)), TypeError, "glu: x must be floating-point, got int"),
  ],
)
def test_wrong_calls(call, error, message):
  with pytest.raises(error, match=message):
    call(jnp.ones((2, 4)))


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("shape", "axis"), [((300, 72), 1), ((65, 33), 1), ((3, 5, 700), 1), ((6, 5, 9), 1)])
@pytest.mark.parametrize("name", ["relu", "gelu", "prelu"])
def test_kernels_write_everything_and_repeat(name, shape, axis):
  x, b = jnp.asarray(sample(shape, "bfloat16")), jnp.asarray(sample((shape[axis],), "bfloat16"))

  def both(x, b):
    f = getattr(jaxdnn, name)
    y, vjp = jax.vjp(lambda x, b: f(x, b, axis=axis) if name == "prelu" else f(x, bias=b, axis=axis), x, b)
    return y, vjp(jnp.ones_like(y))

  for leaf in jax.tree.leaves(assert_repeatable(both, x, b)):
    assert not np.isnan(exact(leaf)).any()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(30, 128), (7, 10)])
def test_gate_kernels_write_everything_and_repeat(shape):
  x = jnp.asarray(sample(shape, "bfloat16"))
  for leaf in jax.tree.leaves(assert_repeatable(lambda x: jax.vjp(jaxdnn.swiglu, x)[1](x[:, : shape[1] // 2]), x)):
    assert not np.isnan(exact(leaf)).any()


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_bias_of_more_than_2_to_the_31_elements():
  rows, channels = (1 << 22) + 3, 515
  b = jnp.arange(channels, dtype=jnp.float16) % 3

  def right(b):
    x = (jnp.arange(rows, dtype=jnp.int32) % 5).astype(jnp.float16)[:, None] - b[None, :] - 2
    y, vjp = jax.vjp(lambda x, b: jaxdnn.relu(x, bias=b), x, b)
    dx, db = vjp(jnp.full_like(x, 2.0**-12))
    on = jnp.arange(rows) % 5 > 2
    total = (on.sum().astype(jnp.float32) * 2.0**-12).astype(jnp.float16)
    return (y == jnp.maximum((x + b[None, :]), 0)).all() & ((dx > 0) == on[:, None]).all() & (db == total).all()

  assert jax.jit(right)(b)
