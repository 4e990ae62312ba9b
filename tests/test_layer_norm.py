"""Layer norm, RMS norm, adaptive layer norm and their sums with a residual against NumPy in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from jaxdnn import _extension
from layer_norm_cases import LENGTHS, ROWS, Case
from layer_norm_oracle import BOTH, EPSILON, NORMS, check_cases, oracle, project, statistics, with_gradients
from numerics import ACCUMULATOR, DTYPES, assert_close, exact, sample

# Values and first derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BOTH)
def test_lengths(kind, dtype):
  lengths = LENGTHS[DTYPES.index(dtype) :: 3 if jax.default_backend() == "gpu" else 6]
  check_cases(kind, [Case(1 + n % 3, n) for n in lengths], dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_and_without_parameters_and_residual(dtype, residual):
  cases = ROWS if jax.default_backend() == "gpu" else ROWS[:3]
  for kind in BOTH:
    for affine in (False, True):
      check_cases(kind, cases, dtype, residual=residual, affine=affine)


@pytest.mark.parametrize("kind", BOTH)
def test_one_parameter_without_the_other(kind):
  x, p, g = (sample(s, "float64", i) for i, s in enumerate([(6, 40), (40,), (6, 40)]))
  h, rstd = statistics(kind, x, EPSILON[kind])
  y, vjp = jax.vjp(lambda x, b: NORMS[kind](x, bias=b), x, p)
  assert_close(y, h + p, "float64", terms=40, scale=10)
  assert_close(vjp(g)[1], g.sum(0), "float64", terms=6, scale=10)
  y, vjp = jax.vjp(lambda x, s: NORMS[kind](x, s, zero_centered=True), x, p)
  assert_close(y, h * (1 + p), "float64", terms=40, scale=10)
  dx, dscale = vjp(g)
  assert_close(dx, project(kind, g * (1 + p), h, rstd), "float64", terms=40, scale=100)
  assert_close(dscale, (g * h).sum(0), "float64", terms=6, scale=20)


@pytest.mark.parametrize("kind", BOTH)
def test_axes(kind):
  x = jnp.asarray(sample((3, 4, 5, 2), "float64"))
  for axis in (-1, 1, 0, (2, 3), (-1, 1), (0, 3), (0, 1, 2, 3)):
    axes = tuple(a % 4 for a in (axis if isinstance(axis, tuple) else (axis,)))
    shape = tuple(x.shape[a] for a in sorted(axes))
    scale = jnp.asarray(sample(shape, "float64", 1))
    wide = [x.shape[a] if a in axes else 1 for a in range(4)]
    want = oracle(kind, x, scale.reshape(wide), axis=axes)
    f = lambda x, scale, axis=axis: NORMS[kind](x, scale, axis=axis)  # noqa: E731
    assert_close(f(x, scale), want, "float64", terms=math.prod(shape), scale=10)
    dx, dscale = jax.grad(lambda x, s, f=f: (f(x, s) ** 2).sum(), (0, 1))(x, scale)
    assert dx.shape == x.shape and dscale.shape == shape
    other = tuple(a for a in range(4) if a not in axes)
    h = statistics(kind, x, EPSILON[kind], axes)[0]
    np.testing.assert_allclose(dscale, (2 * want * h).sum(other), rtol=1e-10, atol=1e-10)


def test_parameters_and_gradients_keep_their_own_type():
  x = jnp.asarray(sample((4, 6), "bfloat16"))
  for dtype in ("float32", "bfloat16", "float16"):
    scale, bias = jnp.ones(6, dtype), jnp.zeros(6, dtype)
    y, vjp = jax.vjp(jaxdnn.layer_norm, x, scale, bias)
    assert y.dtype == x.dtype and [g.dtype for g in vjp(y)] == [x.dtype, scale.dtype, bias.dtype]


def test_gradients_of_16_bit_data_are_summed_in_float32():
  """4096 rows of cotangent 1: a bfloat16 sum would stop at 256."""
  x = jnp.asarray(sample((4096, 8), "bfloat16"))
  dbias = jax.grad(lambda b: jaxdnn.layer_norm(x, bias=b).astype(jnp.float32).sum())(jnp.zeros(8, jnp.float32))
  np.testing.assert_array_equal(dbias, 4096)


@pytest.mark.parametrize("op", [jaxdnn.layer_norm, jaxdnn.rms_norm])
def test_empty_arrays(op):
  for shape in [(0,), (0, 4), (4, 0), (2, 0, 3)]:
    x, p = jnp.zeros(shape), jnp.ones(shape[-1:])
    dx, dp = jax.grad(lambda x, p: op(x, p, p).sum(), (0, 1))(x, p)
    assert op(x, p).shape == dx.shape == shape and (dp == 0).all() and dp.shape == shape[-1:]


def test_unaligned_slice():
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x, w = jnp.asarray(sample((3, 1001, 24), "bfloat16")), jnp.asarray(sample((25,), "float32"))
  sliced = jax.jit(lambda x, w: jaxdnn.layer_norm(x[1, 1:], w[1:]))(x, w)
  np.testing.assert_array_equal(exact(sliced), exact(jaxdnn.layer_norm(x, w[1:]))[1, 1:])


# Adaptive ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_adaptive(dtype, zero_centered):
  shapes = [
    ((3,), (5,), 24),
    ((2, 3), (4,), 17),
    ((), (6,), 8),
    ((4,), (), 40),
    ((2,), (70, 2), 520),
    ((3,), (5,), 33),
    ((5,), (9,), 1001),
    ((3,), (2, 3), 1024),
    ((3,), (70,), 8195),
    ((2,), (40,), 65539),
  ]
  for batch, positions, n in shapes if dtype == "float32" or jax.default_backend() == "gpu" else shapes[:2]:
    shape, wide = (*batch, *positions, n), ACCUMULATOR[dtype]
    x, g = sample(shape, dtype), sample(shape, dtype, 1)
    scale, shift = sample((*batch, n), wide, 2), sample((*batch, n), wide, 3)
    f = functools.partial(jaxdnn.adaptive_layer_norm, zero_centered=zero_centered)
    y, gradients = jax.jit(functools.partial(with_gradients, f))(g, x, scale, shift)
    along = (*batch, *[1] * len(positions), n)
    by = scale.reshape(along).astype(np.float64) + zero_centered
    h, rstd = statistics("layer", x, 1e-6)
    size = np.abs(by).max() * np.abs(h).max() + np.abs(shift).max()
    assert_close(y, h * by + shift.reshape(along), dtype, terms=n, scale=size)
    dx = project("layer", exact(g) * by, h, rstd)
    size = np.abs(rstd).max() * np.abs(by).max() * np.abs(exact(g)).max() * (1 + np.abs(h).max() ** 2)
    assert_close(gradients[0], dx, dtype, terms=n, scale=size)
    over = tuple(range(len(batch), len(shape) - 1))
    size = np.abs(exact(g)).max() * (1 + np.abs(h).max())
    assert_close(gradients[1], (exact(g) * h).sum(over), wide, terms=n + math.prod(positions), scale=size)
    assert_close(gradients[2], exact(g).sum(over), wide, terms=math.prod(positions), scale=size)


# Special values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 100, 770, 5000, 8195, 70000, 70001])
def test_mean_far_larger_than_the_deviation(n):
  """Mean 1e4, deviation 1e-2: the float32 mean is off by up to a twentieth of the deviation, the result is not."""
  x = (1e4 + 1e-2 * sample((4, n), "float64")).astype(np.float32)
  g = sample((4, n), "float32", 1)
  y, vjp = jax.vjp(lambda x: jaxdnn.layer_norm(x, epsilon=1e-12), x)
  h, rstd = statistics("layer", x, 1e-12)
  np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(exact(vjp(g)[0]) / rstd, project("layer", exact(g), h, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_rows(dtype):
  """Variance 0: the normalised row is 0 and every derivative finite."""
  x = jnp.full((3, 40), 3.0, dtype)
  y, vjp = jax.vjp(jaxdnn.layer_norm, x)
  assert (y == 0).all() and np.isfinite(exact(vjp(x)[0])).all()
  y, vjp = jax.vjp(jaxdnn.rms_norm, 0 * x)
  assert (y == 0).all() and np.isfinite(exact(vjp(x)[0])).all()
  one = jnp.asarray(sample((5, 1), dtype))
  assert (jaxdnn.layer_norm(one) == 0).all()
  np.testing.assert_allclose(exact(jax.grad(lambda x: jaxdnn.layer_norm(x).sum())(one)), 0, atol=1e-6)


@pytest.mark.parametrize("n", [3, 40, 300, 1100, 8195, 70000])
def test_nan_and_infinity_stay_in_their_row(n):
  x = sample((4, n), "float32")
  x[1, n // 2], x[2, 0] = np.nan, np.inf
  with np.errstate(invalid="ignore"):
    want = oracle("layer", x)
  assert np.isnan(want[1:3]).all() and not np.isnan(want[[0, 3]]).any()
  assert_close(jaxdnn.layer_norm(x), want, "float32", terms=n, scale=10)
  y = np.asarray(jaxdnn.rms_norm(x))
  assert np.isnan(y[1]).all() and np.isnan(y[2, 0]) and (y[2, 1:] == 0).all()
  np.testing.assert_allclose(y[[0, 3]], oracle("rms", x[[0, 3]]), rtol=1e-5, atol=1e-5)


def test_large_and_small_values():
  for magnitude in (1e15, 1e-3):
    x = magnitude * sample((3, 50), "float32")
    np.testing.assert_allclose(jaxdnn.layer_norm(x), oracle("layer", x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jaxdnn.rms_norm(x), oracle("rms", x), rtol=1e-4, atol=1e-5)


# Other libraries -----------------------------------------------------------------------------------------------------


def test_matches_flax():
  linen = pytest.importorskip("flax.linen")
  x = jnp.asarray(sample((3, 4, 6), "float32"))
  scale, bias = jnp.asarray(sample((6,), "float32", 1)), jnp.asarray(sample((6,), "float32", 2))
  flax = linen.LayerNorm(use_fast_variance=False).apply({"params": {"scale": scale, "bias": bias}}, x)
  np.testing.assert_allclose(jaxdnn.layer_norm(x, scale, bias, epsilon=1e-6), flax, rtol=1e-5, atol=1e-6)
  flax = linen.RMSNorm().apply({"params": {"scale": scale}}, x)
  np.testing.assert_allclose(jaxdnn.rms_norm(x, scale), flax, rtol=1e-5, atol=1e-6)
  both = linen.LayerNorm(reduction_axes=(1, 2), feature_axes=(1, 2), use_fast_variance=False)
  scale = jnp.asarray(sample((4, 6), "float32", 3))
  flax = both.apply({"params": {"scale": scale, "bias": scale}}, x)
  got = jaxdnn.layer_norm(x, scale, scale, axis=(1, 2), epsilon=1e-6)
  np.testing.assert_allclose(got, flax, rtol=1e-5, atol=1e-6)


def test_matches_torch():
  torch = pytest.importorskip("torch")
  functional = torch.nn.functional
  x, scale, bias = sample((3, 4, 6), "float64"), sample((4, 6), "float64", 1), sample((4, 6), "float64", 2)
  want = functional.layer_norm(torch.tensor(x), (4, 6), torch.tensor(scale), torch.tensor(bias)).numpy()
  np.testing.assert_allclose(jaxdnn.layer_norm(x, scale, bias, axis=(1, 2)), want, rtol=1e-10, atol=1e-12)
  want = functional.rms_norm(torch.tensor(x), (4, 6), torch.tensor(scale)).numpy()
  got = jaxdnn.rms_norm(x, scale, axis=(1, 2), epsilon=np.finfo(np.float64).eps)
  np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("jaxdnn.layer_norm.v1" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_cuda_lowering_names_target_and_attributes():
  def text(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  x, p = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096,), jnp.float32)
  program = text(jax.grad(lambda x, p: jaxdnn.rms_norm(x, p, zero_centered=True)[0, 0], (0, 1)), x, p)
  assert program.count("@jaxdnn.layer_norm.v1") == 1 and program.count("@jaxdnn.layer_norm_bwd.v1") == 1
  assert "center = false" in program and "offset = 1.0" in program and "epsilon = 9.99" in program
  wide = text(jaxdnn.layer_norm, jax.ShapeDtypeStruct((4, 1 << 20), jnp.float32))
  assert "tensor<16384xui8>" in wide, "two moments of 256 chunks of four rows"
  x, p = jax.ShapeDtypeStruct((8, 65536), jnp.bfloat16), jax.ShapeDtypeStruct((65536,), jnp.float32)
  few = text(jax.grad(lambda x, p: jaxdnn.rms_norm(x, p)[0, 0], (0, 1)), x, p)
  assert "tensor<4224xui8>" in few, "two sums of 32 chunks and a total of eight rows, and none of columns"


@pytest.mark.skipif("jaxdnn.layer_norm.v1" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_workspace_of_a_gradient():
  """None where one kernel makes it: of few short rows, and not of what is larger."""
  size = functools.partial(_extension.native.layer_norm_workspace, gradients=2)
  assert size("float32", 1, 1024, 1024) == size("bfloat16", 4, 256, 1024) == 0
  assert size("bfloat16", 1, 256, 262144) == 256 * 33 * 16 + 2 * 8 * 262144 * 4, "a row for each of eight clusters"
  assert size("float32", 1, 1025, 1020) > 0 and size("float32", 1, 1024, 1028) > 0 and size("bfloat16", 1, 64, 1001) > 0


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_errors(op):
  x = jnp.zeros((2, 3))
  f = functools.partial(getattr(jaxdnn, op), *[x] * op.startswith("add"))
  with pytest.raises(TypeError, match=rf"{op}: x must be floating-point, got int32"):
    getattr(jaxdnn, op)(jnp.arange(3, dtype=jnp.int32), *[x] * op.startswith("add"))
  with pytest.raises(ValueError, match=rf"{op}: scale must have the shape of x along axis, \(3,\), got \(2,\)"):
    f(x, jnp.ones(2))
  with pytest.raises(ValueError, match=rf"{op}: bias must have the shape of x along axis, \(2, 3\), got \(3,\)"):
    f(x, bias=jnp.ones(3), axis=(0, 1))
  with pytest.raises(TypeError, match=rf"{op}: scale must be floating-point, got int"):
    f(x, jnp.arange(3))
  for axis in (2, (0, -3), ()):
    with pytest.raises(ValueError, match=rf"{op}: axis must name axes of an array of rank 2, got "):
      f(x, axis=axis)
  for epsilon in (0, -1.0, math.nan):
    with pytest.raises(ValueError, match=rf"{op}: epsilon must be positive, got {epsilon}"):
      f(x, epsilon=epsilon)


def test_errors_of_residual_and_adaptive():
  x = jnp.zeros((2, 3))
  with pytest.raises(TypeError, match="add_layer_norm: residual must be float64 as x is, got float32"):
    jaxdnn.add_layer_norm(x, x.astype(jnp.float32))
  with pytest.raises(ValueError, match=r"add_rms_norm: residual must have the shape of x, \(2, 3\), got \(3,\)"):
    jaxdnn.add_rms_norm(x, x[0])
  for scale, shift in [((3, 3), (2, 3)), ((2, 3), (3,)), ((2,), (2,)), ((), ())]:
    with pytest.raises(ValueError, match=r"adaptive_layer_norm: s.* must have leading dimensions of x"):
      jaxdnn.adaptive_layer_norm(x, jnp.ones(scale), jnp.ones(shift))


def test_operands_that_must_be_given():
  x = jnp.ones((2, 3))
  for f in (jaxdnn.add_layer_norm, jaxdnn.add_rms_norm):
    with pytest.raises(TypeError, match="residual must be an array, got None"):
      f(x, None)
  with pytest.raises(TypeError, match="adaptive_layer_norm: scale must be an array, got None"):
    jaxdnn.adaptive_layer_norm(x, None, x)
  with pytest.raises(ValueError, match=r"scale must have leading dimensions of x, and its last; got \(2, 3, 3\)"):
    jaxdnn.adaptive_layer_norm(x, jnp.ones((2, 3, 3)), jnp.ones((2, 3, 3)))
  with pytest.raises(TypeError, match="layer_norm: epsilon must be a number, got None"):
    jaxdnn.layer_norm(x, epsilon=None)
