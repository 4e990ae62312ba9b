"""Group and instance normalization against NumPy in float64: layouts, activations, special values, errors, kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from group_norm_cases import CASES, EMPTY, LARGE, RING, Case, first
from group_norm_oracle import ON_GPU, Oracle, apply, check_cases, operands
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample

# Values and first derivatives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_derivatives(dtype):
  cases = CASES if ON_GPU or dtype == "float32" else CASES[::4]
  check_cases(cases, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_fused_activations(activation, dtype):
  check_cases(CASES if ON_GPU else CASES[2::6], dtype, activation)


@pytest.mark.parametrize("case", EMPTY)
def test_empty_arrays(case):
  x, scale, bias = operands(case, "float32")
  y, vjp = jax.vjp(functools.partial(apply, case), x, scale, bias)
  dx, dscale, dbias = vjp(y)
  assert y.shape == dx.shape == case.shape
  np.testing.assert_array_equal(dscale, np.zeros(case.channels))
  np.testing.assert_array_equal(dbias, np.zeros(case.channels))


def test_instance_norm_is_a_group_for_each_channel():
  x, scale, bias = operands(Case((2, 5, 6), 6), "float32")
  for axis in (1, 2):
    s, b = scale[: x.shape[axis]], bias[: x.shape[axis]]
    got = jaxdnn.instance_norm(x, s, b, axis=axis, activation="silu")
    want = jaxdnn.group_norm(x, x.shape[axis], s, b, axis=axis, activation="silu")
    np.testing.assert_array_equal(got, want)


def test_parameters_are_optional_and_of_any_float_type():
  x, scale, bias = operands(Case((2, 5, 6), 3), "bfloat16")
  one, zero = np.ones(6, np.float32), np.zeros(6, np.float32)
  norm = functools.partial(jaxdnn.group_norm, x, 3)
  np.testing.assert_array_equal(exact(norm()), exact(norm(one, zero)))
  np.testing.assert_array_equal(exact(norm(scale)), exact(norm(scale, zero)))
  np.testing.assert_array_equal(exact(norm(bias=bias)), exact(norm(one, bias)))
  half = jnp.asarray(scale, jnp.bfloat16)
  np.testing.assert_array_equal(exact(norm(half)), exact(norm(half.astype(jnp.float32))))
  gradient = jax.grad(lambda s: jaxdnn.group_norm(x, 3, s).astype(jnp.float32).sum())(half)
  assert gradient.dtype == jnp.bfloat16
  assert norm(scale, bias).dtype == jnp.bfloat16


def test_an_activation_that_is_not_fused_follows():
  x, scale, bias = operands(Case((2, 5, 6), 3), "float32")
  got = jaxdnn.group_norm(x, 3, scale, bias, activation="tanh")
  np.testing.assert_allclose(got, jnp.tanh(jaxdnn.group_norm(x, 3, scale, bias)), rtol=1e-6)


def test_unaligned_slice():
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(sample((3, 2, 7, 5, 9), "bfloat16"))
  for axis in (-1, 1):
    norm = functools.partial(jaxdnn.instance_norm, axis=axis)
    sliced, gradient = jax.jit(lambda x, norm=norm: (norm(x[1]), jax.vjp(norm, x[1])[1](x[2])[0]))(x)
    np.testing.assert_allclose(exact(sliced), exact(norm(jnp.array(x[1]))), rtol=2**-7, atol=1e-6)
    whole = jax.vjp(norm, jnp.array(x[1]))[1](jnp.array(x[2]))[0]
    np.testing.assert_allclose(exact(gradient), exact(whole), rtol=2**-6, atol=2**-7)


# Numerics ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "case", [Case((2, 32, 33, 32), 4), Case((2, 32, 33, 32), 4, 1), Case((2, 32, 33, 31), 4, 1), Case((2, 64, 65, 3), 1)]
)
@pytest.mark.parametrize("mean", [1e4, -1e4])
def test_a_large_mean_costs_no_digits(mean, case):
  """Deviation 1e-2 at 1e4 is ten steps of float32: the normalized values must still be those of the data given."""
  x = (mean + 1e-2 * sample(case.shape, "float64")).astype(np.float32)
  _, scale, bias = operands(case, "float32")
  dy = sample(case.shape, "float32", 7)
  oracle = Oracle(case, x, scale, bias, epsilon=0.0)
  y, vjp = jax.vjp(functools.partial(apply, case, epsilon=0.0), x, scale, bias)
  np.testing.assert_allclose(y, oracle.value(), atol=1e-4)
  dx, dscale, dbias = vjp(dy)
  np.testing.assert_allclose(dx, oracle.vjp(dy)[0], atol=1e-4 * np.abs(oracle.rstd).max())
  np.testing.assert_allclose(dscale, oracle.vjp(dy)[1], atol=1e-2)
  np.testing.assert_allclose(dbias, oracle.vjp(dy)[2], atol=1e-2)


@pytest.mark.parametrize("axis", [1, -1])
def test_an_outlier_costs_no_digits(axis):
  """The first value of a group, about which the kernels take the others, may be far from them."""
  case = Case((1, 16, 16, 16), 2, axis)
  x = sample(case.shape, "float32")
  x[0, 0, 0, 0] = 1e5
  y = apply(case, x, *operands(case, "float32")[1:])
  assert_close(y, Oracle(case, x, *operands(case, "float32")[1:]).value(), "float32", scale=64)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_group_gives_the_bias(dtype, axis):
  case = Case((2, 8, 5, 8), 4, axis)
  x, scale, bias = operands(case, dtype)
  x = np.full_like(x, 3.0)
  y, vjp = jax.vjp(functools.partial(apply, case), x, scale, bias)
  want = Oracle(case, x, scale, bias)
  assert_close(y, want.value(), dtype)
  assert all(np.isfinite(exact(d)).all() for d in vjp(np.ones_like(x)))


@pytest.mark.parametrize("case", [Case((2, 8, 6, 8), 4, 1), Case((2, 8, 6, 8), 4), Case((2, 8, 5, 7), 4, 1)])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_stay_in_their_group(special, case):
  """NaN or an infinity, anywhere in a group, makes that group of that example NaN and nothing else."""
  for where in [(1, 0, 0, 0), (1, 2, 0, 0), (1, 3, -1, 3), (1, 3, -1, -1), (1, 7, -1, -1)]:
    x, scale, bias = operands(case, "float32")
    x[where] = special
    group = where[case.axis] % case.channels // 2
    index = [slice(None)] * 4
    index[0], index[case.axis] = 1, slice(2 * group, 2 * group + 2)
    hit = np.zeros(case.shape, bool)
    hit[tuple(index)] = True
    for activation in (None, "silu"):
      y, vjp = jax.vjp(functools.partial(apply, case, activation=activation), x, scale, bias)
      for result in (exact(y), exact(vjp(np.ones_like(x))[0])):
        assert np.isnan(result[hit]).all() and np.isfinite(result[~hit]).all()


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors():
  x = jnp.zeros((2, 3, 6))
  norm = jaxdnn.group_norm
  with pytest.raises(TypeError, match="group_norm: x must be floating-point, got int32"):
    norm(jnp.zeros((2, 6), jnp.int32), 2)
  with pytest.raises(TypeError, match="instance_norm: x must be floating-point, got int32"):
    jaxdnn.instance_norm(jnp.zeros((2, 6), jnp.int32))
  for groups in (4, 0, -2):
    with pytest.raises(ValueError, match=rf"num_groups must divide the 6 channels, got {groups}"):
      norm(x, groups)
  with pytest.raises(TypeError, match=r"num_groups must be an integer, got 2\.0"):
    norm(x, 2.0)
  for axis in (0, -3, 3, -4):
    with pytest.raises(ValueError, match=rf"axis must name an axis but the first of an array of rank 3, got {axis}"):
      norm(x, 2, axis=axis)
  with pytest.raises(TypeError, match="axis must be an integer, got None"):
    norm(x, 2, axis=None)
  with pytest.raises(ValueError, match="x must have an axis of examples and one of channels, got rank 1"):
    norm(jnp.zeros(6), 2)
  with pytest.raises(ValueError, match=r"scale must have shape \(6,\), one for each channel, got \(3,\)"):
    norm(x, 2, jnp.ones(3))
  with pytest.raises(ValueError, match=r"bias must have shape \(3,\), one for each channel, got \(3, 1\)"):
    norm(x, 3, bias=jnp.ones((3, 1)), axis=1)
  with pytest.raises(TypeError, match="bias must be floating-point, got int32"):
    norm(x, 2, bias=jnp.ones(6, jnp.int32))
  for epsilon in (-1e-5, float("nan")):
    with pytest.raises(ValueError, match=rf"epsilon must be 0 or more, got {epsilon}"):
      norm(x, 2, epsilon=epsilon)
  with pytest.raises(ValueError, match=r"activation must be None or one of .*silu.*, got 'sillu'"):
    norm(x, 2, activation="sillu")


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_slabs(dtype):
  check_cases(LARGE if dtype in ("float32", "bfloat16") else LARGE[::3], dtype, forward_mode=False)
  check_cases(LARGE[1::4], dtype, "silu", forward_mode=False)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [1, -1])
def test_every_number_of_channels(axis):
  for dtype in ("float32", "bfloat16"):
    sizes = [*range(1, 40), 63, 64, 65, 96, 127, 128, 130, 255, 257, 320, 511, 640, 1000, 1024, 1025]
    shapes = [((2, 6, 4, c) if axis == -1 else (2, c, 6, 4), c) for c in sizes]
    check_cases([Case(s, next(g for g in (32, 8, 5, 3, 2, 1) if c % g == 0), axis) for s, c in shapes], dtype,
                forward_mode=False)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("channels, groups", [(6, 2), (15, 3), (7, 7), (40, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_planes_of_every_size(dtype, channels, groups):
  """Channels first, a plane may begin anywhere in a vector, and a vector may have elements of several planes."""
  sizes = [*range(2, 20), 25, 33, 49, 121, 127, 130, 196, 225, 961, 2401]
  check_cases([Case((3, channels, s), groups, 1) for s in sizes], dtype)
  check_cases([Case((3, channels, s), groups, 1) for s in sizes[::5]], dtype, "silu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_a_channel_take_in_all_of_it_and_no_other(dtype):
  """Whole numbers have exact sums, in whichever order."""
  for shape in [(3, 15, 7), (2, 12, 31, 31), (2, 8, 4), (5, 6, 9, 7)]:
    case = Case(shape, 3 if shape[1] % 3 == 0 else 4, 1)
    x, scale, bias = operands(case, dtype)
    dy = np.random.default_rng(0).integers(-3, 4, shape)
    dbias = jax.vjp(functools.partial(apply, case), x, scale, bias)[1](dy.astype(x.dtype))[2]
    np.testing.assert_array_equal(dbias, dy.reshape(*shape[:2], -1).sum((0, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_small_arrays_with_channels_last(dtype):
  """Groups of whole vectors, and of all channels of any number; slabs of one block and of several, of part of one."""
  widths = [1, 2, 3, 5, 8, 17, 24, 65, 250]
  cases = [Case((3, s, c), 1) for c in widths for s in (8, 16, 64, 1000)]
  cases += [Case((2, s, 16 * g), g) for g in (2, 5) for s in (1, 2, 4, 63, 2049)]
  check_cases(cases, dtype, forward_mode=False)
  check_cases(cases[::7], dtype, "silu", forward_mode=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_write_everything_and_repeat(dtype):
  cases = [Case((2, 9, 65), 5), Case((2, 16, 16, 40), 4), Case((2, 64, 64, 96), 8), Case((1, 300, 301, 24), 3)]
  rounds = Case((130, 50, 50, 32), 8)  # more slabs than teams, of which some blocks more leave no round short
  ragged = [Case((2, 24, 11, 11), 3, 1), Case((16, 256, 31, 31), 32, 1), Case((1, 6, 511, 601), 2, 1)]
  small = [Case((8, 64, 64, 2), 1), Case((8, 64, 64, 17), 1), Case((16, 4, 4, 256), 32)]
  for case in (*cases, rounds, *ragged, *small, Case((1, 8, 512, 512), 2, 1), RING, first(RING)):
    check_repeatable(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [RING, first(RING)])
def test_special_values_stay_in_their_group_of_a_large_array(case):
  """Whichever block of a team has them: the first, whose values others are taken about, or the last."""
  x, scale, bias = operands(case, "bfloat16")
  per_group = case.channels // case.groups
  for example, group, value in ((1, 0, np.inf), (3, 7, np.nan), (4, 14, -np.inf)):
    place = 0 if group == 0 else -1
    where = [example, place, place, place]
    where[case.axis] = per_group * group
    x[tuple(where)] = value
  y, vjp = jax.vjp(functools.partial(apply, case), x, scale, bias)
  dx = vjp(np.ones_like(y))[0]
  hit = np.zeros(case.shape, bool)
  for example, group in ((1, 0), (3, 7), (4, 14)):
    index = [slice(None)] * 4
    index[0], index[case.axis] = example, slice(per_group * group, per_group * (group + 1))
    hit[tuple(index)] = True
  for result in (exact(y), exact(dx)):
    assert np.isnan(result[hit]).all() and np.isfinite(result[~hit]).all()


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  cases = [Case((2, 9, 65), 5), Case((2, 16, 16, 40), 4), Case((1, 64, 64, 96), 8), Case((2, 24, 11, 11), 3, 1)]
  small = [Case((2, 64, 64, 17), 1), Case((2, 4, 4, 32), 4)]
  for case in (*cases, *small, Case((1, 8, 100, 100), 2, 1), Case((2, 6, 9, 7), 2, 1)):
    check_repeatable(case, "float32", repeats=2)
  check_repeatable(Case((2, 24, 11, 11), 3, 1), "bfloat16", repeats=2)


def check_repeatable(case, dtype, repeats=10):
  args, dy = [jnp.asarray(a) for a in operands(case, dtype)], jnp.asarray(sample(case.shape, dtype, 7))
  f = functools.partial(apply, case, activation="silu")
  y = assert_repeatable(f, *args, repeats=repeats)
  oracle = Oracle(case, *args, activation="silu")
  assert_close(y, oracle.value(), dtype, scale=4 * np.abs(oracle.p).max())
  out = assert_repeatable(lambda dy, *args: jax.vjp(f, *args)[1](dy), dy, *args, repeats=repeats)
  assert all(np.isfinite(exact(a)).all() for a in out)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """In one group and in many, in both layouts: 64-bit offsets. The last position differs, so that a wrap shows."""
  for shape, axis in [((1, 2**26 + 8, 33), -1), ((1, 33, 2**26 + 8), 1), ((2**20 + 1, 32, 65), -1)]:
    groups = 11 if shape[axis] == 33 else 5
    x = jnp.zeros(shape, jnp.bfloat16).at[-1, -1, -1].set(20.0)
    y, vjp = jax.vjp(lambda x, a=axis, g=groups: jaxdnn.group_norm(x, g, axis=a), x)
    count = int(np.prod(shape[1:])) // groups
    deviation = 20 * np.sqrt(1 / count - 1 / count**2)
    want = (20 - 20 / count) / np.sqrt(deviation**2 + 1e-5)
    np.testing.assert_allclose(exact(y[-1, -1, -1]), want, rtol=1e-2)
    np.testing.assert_allclose(exact(y[0, 0, :9]), exact(y[0, 0, 0]), rtol=1e-2)
    assert abs(exact(vjp(y)[0][0, 0, 0])) < 1
    del x, y, vjp


def test_no_channels_and_arguments_of_the_wrong_type():
  assert jaxdnn.instance_norm(jnp.zeros((2, 4, 0))).shape == (2, 4, 0)
  x = jnp.ones((2, 4))
  with pytest.raises(TypeError, match="group_norm: num_groups must be an integer, got None"):
    jaxdnn.group_norm(x, None)
  with pytest.raises(TypeError, match="group_norm: epsilon must be a number, got None"):
    jaxdnn.group_norm(x, 2, epsilon=None)
  with pytest.raises(ValueError, match="group_norm: activation must be None or one of"):
    jaxdnn.group_norm(x, 2, activation=["relu"])
