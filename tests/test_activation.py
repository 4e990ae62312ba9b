"""Activations against NumPy in float64: values, derivatives of every order, special values, both tails, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from activation_cases import BY_NAME, CASES, DEFAULTS, SHAPES
from jaxdnn._activation import ACTIVATIONS
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_kind = pytest.mark.parametrize("case", DEFAULTS.values(), ids=DEFAULTS)


def function(case):
  return lambda x: getattr(jaxdnn, case.name)(x, **case.arguments)


def jax_nn(case):
  """The function of this name in jax.nn, where it has one."""
  names = {"hard_swish": "hard_silu"}
  f = getattr(jax.nn, names.get(case.name, case.name), None)
  absent = case.name in ("clipped_relu",) or "beta" in case.arguments
  return None if f is None or absent else lambda x: f(x, **case.arguments)


@every_case
def test_values_and_gradient(case):
  xs = [3 * sample(shape, dtype) for dtype in DTYPES for shape in SHAPES]
  gs = [sample(x.shape, x.dtype.name, seed=1) for x in xs]

  @jax.jit
  def both(xs, gs):
    ys, vjp = jax.vjp(lambda xs: [function(case)(x) for x in xs], xs)
    return ys, vjp(gs)[0]

  for x, g, y, dx in zip(xs, gs, *both(xs, gs), strict=True):
    assert_close(y, case.forward(exact(x)), x.dtype.name)
    eps, want = float(jnp.finfo(x.dtype).eps), exact(g) * case.derivative(exact(x))
    # Of a few roundings at the magnitude of the terms, about 1; a derivative from the output inherits that of y.
    bound = 8 * eps * np.abs(exact(g)) + 2 * eps * np.abs(want)
    np.testing.assert_array_less(np.abs(exact(dx) - want), bound + 1e-30)
    assert dx.dtype == x.dtype


def test_scalars_and_empty_arrays():
  for case in DEFAULTS.values():
    y, vjp = jax.vjp(function(case), jnp.float32(0.7))
    np.testing.assert_allclose(y, case.forward(0.7), rtol=1e-6)
    np.testing.assert_allclose(vjp(jnp.float32(2))[0], 2 * case.derivative(np.float32(0.7)), rtol=1e-6)
  for shape in ((0,), (3, 0), (0, 8)):
    for name in ("relu", "sigmoid", "gelu"):
      y, vjp = jax.vjp(getattr(jaxdnn, name), jnp.zeros(shape))
      assert y.shape == vjp(y)[0].shape == shape


@every_case
def test_derivatives_of_every_order_and_mode(case):
  x = 2 * sample((4, 5), "float64")
  for kink in case.kinks:
    x = np.where(np.abs(x - kink) < 1e-2, kink + 0.1, x)
  check_grads(jax.jit(function(case)), (jnp.asarray(x),), order=2, modes=("fwd", "rev"), atol=1e-3, rtol=1e-3)


@every_case
def test_second_derivative_at_zero(case):
  """Where formulas switch branches is where their derivatives go wrong."""
  f = function(case)
  if 0 in case.kinks or case.name in ("elu", "celu", "soft_sign"):
    pytest.skip("jumps there")
  step = 1e-4
  want = (case.derivative(np.float64(step)) - case.derivative(np.float64(-step))) / (2 * step)
  np.testing.assert_allclose(jax.grad(jax.grad(f))(jnp.float64(0)), want, atol=1e-3)
  np.testing.assert_allclose(jax.jacfwd(jax.jacfwd(f))(jnp.float64(0)), want, atol=1e-3)


@every_case
def test_equals_jax_nn_at_kinks_too(case):
  f = jax_nn(case)
  if f is None:
    pytest.skip("not in jax.nn")
  x = jnp.asarray([*case.kinks, -7.0, -2.0, -0.5, 0.25, 2.0, 7.0])
  for ours, theirs in zip(jax.vjp(function(case), x), jax.vjp(f, x), strict=True):
    if callable(ours):
      ours, theirs = (vjp(jnp.ones_like(x))[0] for vjp in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@every_kind
def test_equals_torch(case):
  torch = pytest.importorskip("torch")
  names = {"clipped_relu": "relu6", "soft_sign": "softsign", "log_sigmoid": "logsigmoid", "hard_sigmoid": "hardsigmoid"}
  names |= {"hard_tanh": "hardtanh", "hard_swish": "hardswish"}
  f = getattr(torch.nn.functional, names.get(case.name, case.name), None)
  if f is None or case.name == "squareplus":
    pytest.skip("not in torch")
  ours = {"gelu": {"approximate": False}, "celu": {}}.get(case.name, {})
  x = sample((50,), "float64")
  t = torch.tensor(x, requires_grad=True)
  y = f(t)
  y.sum().backward()
  of_x = lambda x: getattr(jaxdnn, case.name)(x, **ours)  # noqa: E731
  np.testing.assert_allclose(of_x(jnp.asarray(x)), y.detach().numpy(), rtol=1e-7, atol=1e-9)
  np.testing.assert_allclose(jax.grad(lambda x: of_x(x).sum())(x), t.grad.numpy(), rtol=1e-7, atol=1e-9)


# Special values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(dtype):
  x = jnp.array([1.0, jnp.nan, -1.0], dtype)
  values = jax.jit(lambda x: [function(case)(x) for case in DEFAULTS.values()])(x)
  for case, y in zip(DEFAULTS.values(), values, strict=True):
    np.testing.assert_array_equal(np.isnan(exact(y)), [False, True, False], case.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_and_zero(dtype):
  x = jnp.array([np.inf, -np.inf, 0.0, -0.0], dtype)
  limits = {
    "relu": [np.inf, 0, 0, 0],
    "relu6": [6, 0, 0, 0],
    "leaky_relu": [np.inf, -np.inf, 0, -0.0],
    "hard_sigmoid": [1, 0, 0.5, 0.5],
    "hard_tanh": [1, -1, 0, -0.0],
    "sigmoid": [1, 0, 0.5, 0.5],
    "tanh": [1, -1, 0, -0.0],
    "elu": [np.inf, -1, 0, -0.0],
    "celu": [np.inf, -1, 0, -0.0],
    "softplus": [np.inf, 0, np.log(2), np.log(2)],
    "log_sigmoid": [0, -np.inf, -np.log(2), -np.log(2)],
  }
  values = jax.jit(lambda x: {name: getattr(jaxdnn, name)(x) for name in limits})(x)
  for name, want in limits.items():
    np.testing.assert_allclose(exact(values[name]), want, rtol=float(jnp.finfo(dtype).eps), err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cotangents_of_units_that_are_off_vanish(dtype):
  """An infinite or NaN cotangent of a switched-off unit is dropped, not multiplied by zero."""
  g = jnp.array([np.inf, np.nan, 1, 2], dtype)
  for name in ("relu", "relu6"):
    _, vjp = jax.vjp(getattr(jaxdnn, name), jnp.array([-1.0, 0.0, np.nan, 1.0], dtype))
    np.testing.assert_array_equal(exact(vjp(g)[0]), [0, 0, 0, 2])
  _, vjp = jax.vjp(jaxdnn.hard_sigmoid, jnp.array([-3.0, 3.0, -4.0, 9.0], dtype))
  np.testing.assert_array_equal(exact(vjp(g)[0]), [0, 0, 0, 0])


# Where values, and where slopes, are small beside the terms that naive formulas add, or large beside what they hold.
TAILS = {
  "sigmoid": ([-80.0, -30.0], []),
  "elu": ([-1e-6, 1e-6], [-80.0, -40.0]),
  "celu-alpha=2.0": ([-1e-6], [-80.0]),
  "selu": ([-1e-6], [-80.0]),
  "softplus": ([-80.0, -20.0, 90.0], [-80.0, 40.0]),
  "log_sigmoid": ([80.0, 20.0, -90.0], [80.0, -40.0]),
  "silu": ([-80.0, -20.0, 1e30], [-80.0, -40.0, 1e20]),
  "gelu": ([-2.0, -5.0, 1e10], [-3.0, -5.0, 1e10]),
  "gelu-approximate=False": ([-3.0, -9.0, 1e30], [-3.0, -9.0, 1e10]),
  "mish": ([-80.0, -20.0, 1e30], [-80.0, -40.0, 1e10, 3e38]),
  "soft_sign": ([1e-20, 1e30], [1e-20, 1e10]),
  "squareplus": ([-1e4, -1e8, 1e18, 1e30], [-1e4, -1e6, 1e18, 1e30]),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails_are_not_lost(name):
  case = BY_NAME[name]
  values, slopes = (jnp.asarray(points, jnp.float32) for points in TAILS[name])
  np.testing.assert_allclose(exact(function(case)(values)), case.forward(exact(values)), rtol=2e-5)
  np.testing.assert_allclose(
    exact(jax.vmap(jax.grad(function(case)))(slopes)), case.derivative(exact(slopes)), rtol=2e-5
  )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@every_case
def test_up_to_the_largest_numbers(case, dtype):
  sizes = np.geomspace(100, float(jnp.finfo(dtype).max), 41)
  x = jnp.asarray([*-sizes, *sizes], dtype)

  @jax.jit
  def all_three(x, g):
    y, tangent = jax.jvp(function(case), (x,), (g,))
    return y, tangent, jax.vjp(function(case), x)[1](g)[0]

  y, tangent, gradient = all_three(x, jnp.ones_like(x))
  with np.errstate(over="ignore"):  # selu is larger than x
    want = case.forward(exact(x)).astype(x.dtype)
  assert_close(y, want, dtype)
  assert_close(tangent, case.derivative(exact(x)), dtype)
  assert_close(gradient, case.derivative(exact(x)), dtype)


# What is kept --------------------------------------------------------------------------------------------------------


@every_kind
def test_residuals_are_the_least(case):
  x = jnp.asarray(sample((40, 50), "float32"))
  kept = [r for r in jax.tree.leaves(jax.vjp(function(case), x)[1]) if hasattr(r, "dtype")]
  (residual,) = kept
  if case.kept == "mask":
    assert residual.dtype == np.uint8 and residual.size == 250
    bits = np.unpackbits(np.asarray(residual), bitorder="little").astype(bool)
    kind = "clipped_relu" if case.name == "relu6" else case.name
    slope_inside = ACTIVATIONS[kind].slopes(0.01)[0]
    np.testing.assert_array_equal(bits, case.derivative(exact(x)).ravel() == slope_inside)
  else:
    np.testing.assert_array_equal(residual, x if case.kept == "input" else function(case)(x))


@pytest.mark.parametrize("shape", [(3, 8), (3, 5), (4, 3, 3)])
def test_vmap_of_masks_that_end_within_a_byte(shape):
  x, g = jnp.asarray(sample(shape, "float32")), jnp.asarray(sample(shape, "float32", seed=1))
  each = lambda x, g: jax.vjp(jaxdnn.relu, x)[1](g)[0]  # noqa: E731
  want = exact(g) * (exact(x) > 0)
  np.testing.assert_array_equal(jax.vmap(each)(x, g), want)
  np.testing.assert_array_equal(jax.vmap(each, in_axes=1, out_axes=1)(x, g), want)
  np.testing.assert_array_equal(jax.vmap(jax.vmap(each))(x, g), want)
  np.testing.assert_array_equal(jax.jit(jax.vmap(each))(x, g), want)
  shared = jax.vmap(each, in_axes=(None, 0))(x[0], g)
  np.testing.assert_array_equal(shared, exact(g) * (exact(x[0]) > 0))


@pytest.mark.parametrize("name", ["relu", "sigmoid", "gelu"])
def test_unaligned_slice(name):
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(sample((3, 1001), "bfloat16"))
  f = lambda x: jax.value_and_grad(lambda x: getattr(jaxdnn, name)(x).astype(jnp.float32).sum())(x)  # noqa: E731
  sliced = jax.jit(lambda x: f(x[1]))(x)[1]
  np.testing.assert_array_equal(exact(sliced), exact(f(x)[1])[1])


# Errors --------------------------------------------------------------------------------------------------------------


@every_kind
def test_wrong_dtype(case):
  name = "clipped_relu" if case.name == "relu6" else case.name
  with pytest.raises(TypeError, match=rf"{name}\w*: x must be floating-point, got int32"):
    function(case)(jnp.arange(3, dtype=jnp.int32))


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda x: jaxdnn.clipped_relu(x, 0.0), "clipped_relu: ceiling must be positive, got 0.0"),
    (lambda x: jaxdnn.celu(x, 0.0), "celu: alpha must be positive, got 0.0"),
    (lambda x: jaxdnn.softplus(x, 0), "softplus: beta must be positive, got 0.0"),
    (lambda x: jaxdnn.squareplus(x, -1.0), "squareplus: b must be positive, got -1.0"),
  ],
)
def test_wrong_parameters(call, message):
  with pytest.raises(ValueError, match=message):
    call(jnp.ones(3))


def test_names_of_torch_are_no_flags():
  """Of which "none" would count as true."""
  with pytest.raises(TypeError, match="gelu: approximate must be True or False, got 'none'"):
    jaxdnn.gelu(jnp.ones(3), approximate="none")


def test_parameters_are_static():
  with pytest.raises(TypeError, match="leaky_relu: negative_slope must be a number known when the function is traced"):
    jax.jit(jaxdnn.leaky_relu)(jnp.ones(3), 0.1)


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["relu", "hard_tanh", "sigmoid", "gelu"])
def test_kernel_writes_everything_and_repeats(name, dtype):
  case = DEFAULTS[name]
  x = jnp.asarray(sample((3, 1001), dtype))
  y = assert_repeatable(function(case), x)
  assert_close(y, case.forward(exact(x)), dtype)
  assert not np.isnan(exact(assert_repeatable(jax.grad(lambda x: function(case)(x).sum()), x))).any()


@pytest.mark.gpu
@every_case
def test_kernel_in_half_precision_is_within_a_rounding(case):
  """Every number of bfloat16 and float16 that does not overflow, against the oracle."""
  for dtype, largest in (("bfloat16", 60.0), ("float16", 60.0)):
    numbers = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(dtype))
    x = jnp.asarray(numbers[np.abs(exact(numbers)) <= largest])
    assert_close(jax.jit(function(case))(x), case.forward(exact(x)), dtype)
    if case.kept != "output":
      got = exact(jax.jit(jax.vmap(jax.grad(function(case))))(x))
      want = case.derivative(exact(x))
      # Where the derivative crosses 0 its terms cancel.
      eps = float(jnp.finfo(dtype).eps)
      np.testing.assert_array_less(np.abs(got - want), eps * np.abs(want) + 1e-2 * eps + 1e-7)


@pytest.mark.gpu
def test_subnormal_results_are_not_flushed():
  x = jnp.asarray([-88.0, -95.0, -100.0], jnp.float32)
  for name in ("sigmoid", "silu"):
    got = exact(jax.jit(getattr(jaxdnn, name))(x))
    np.testing.assert_allclose(got, DEFAULTS[name].forward(exact(x)), rtol=0.1)
  got = jax.jit(jax.vmap(jax.grad(jaxdnn.silu)))(x)
  np.testing.assert_allclose(exact(got), DEFAULTS["silu"].derivative(exact(x)), rtol=0.1)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  x = (jnp.arange((1 << 31) + 13, dtype=jnp.uint32) % 1000).astype(jnp.float16) - 3

  def right(x):
    y, vjp = jax.vjp(jaxdnn.relu, x)
    return (y == jnp.maximum(x, 0)).all() & (vjp(x)[0] == jnp.maximum(x, 0)).all()

  assert jax.jit(right)(x)
