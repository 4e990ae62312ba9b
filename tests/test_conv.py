"""Convolution against the float64 oracle: values, gradients, layouts, transformations, errors, determinism."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import jaxdnn
from conv_cases import CASES
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn._conv.spec import canonical_precision, channels_last
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample, to_tf32, with_gradients

CASE_IDS = [case.name for case in CASES]


def operands(case, dtype):
  x, w = sample(case.x_shape, dtype), sample(case.w_shape, dtype, seed=1)
  shape = jax.eval_shape(functools.partial(apply, case), x, w).shape
  return x, w, sample(shape, dtype, seed=2)


def apply(case, x, w, **kwargs):
  stride, padding, lhs_dilation, rhs_dilation = case.geometry
  return jaxdnn.conv_general_dilated(
    x, w, stride, padding, lhs_dilation, rhs_dilation, channels_last(len(stride)), case.groups, **kwargs
  )


def check(case, y, dx, dw, x, w, g, dtype):
  want = conv_oracle(exact(x), exact(w), *case.geometry, case.groups)
  want_dx, want_dw = conv_gradients(exact(x), exact(w), exact(g), *case.geometry, case.groups)
  taps = int(np.prod(case.window))
  assert_close(y, want, dtype, terms=taps * max(case.c // case.groups, 1), scale=4)
  assert_close(dx, want_dx, dtype, terms=taps * max(case.k // case.groups, 1), scale=4)
  assert_close(dw, want_dw, dtype, terms=max(int(np.prod(want.shape[:-1])), 1), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_values_and_gradients(case, dtype):
  x, w, g = operands(case, dtype)
  check(case, *with_gradients(functools.partial(apply, case), x, w, g), x, w, g, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_kernels_write_everything_and_repeat(case, dtype):
  x, w, g = operands(case, dtype)

  def all_three(x, w, g):
    y, vjp = jax.vjp(functools.partial(apply, case), x, w)
    return y, *vjp(g)

  check(case, *assert_repeatable(all_three, *map(jnp.asarray, (x, w, g))), x, w, g, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["0d", "3x3s2", "grouped", "both_dilations", "negative_padding", "3d_s2_groups"])
def test_kernels_under_the_sanitizer(name):
  case = next(case for case in CASES if case.name == name)
  for dtype in ("float32", "bfloat16"):
    x, w, g = operands(case, dtype)
    check(case, *with_gradients(functools.partial(apply, case), x, w, g), x, w, g, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
  "dtype, precision",
  [("float32", "highest"), ("float32", "high"), ("float32", "default"), ("float16", None), ("bfloat16", None)],
)
@pytest.mark.parametrize("name", ["1x1", "3x3", "stem7x7s2", "c44", "grouped", "dilated", "3d"])
def test_errors_are_no_larger_than_those_of_lax(name, dtype, precision):
  """Against the oracle, in the root mean square, at the same precision.

  Where lax has no kernel in TF32 it computes in float32: there ours are held to what rounding the operands costs. HIGH
  is float32 to lax; tensor cores cut off what their sums lose, and do not round it.
  """
  case = next(case for case in CASES if case.name == name)
  x, w, g = operands(case, dtype)

  def oracle(x, w, g):
    y = conv_oracle(x, w, *case.geometry, case.groups)
    return y, *conv_gradients(x, w, g, *case.geometry, case.groups)

  wants = oracle(exact(x), exact(w), exact(g))
  rounded = oracle(*(exact(to_tf32(a)) for a in (x, w, g))) if precision == "default" else wants
  stride, padding, lhs_dilation, rhs_dilation = case.geometry

  def stock(x, w):
    return lax.conv_general_dilated(
      x, w, stride, padding, lhs_dilation, rhs_dilation, channels_last(len(stride)), case.groups,
      precision="highest" if precision == "high" else precision,
    )  # fmt: skip

  ours = with_gradients(functools.partial(apply, case, precision=precision), x, w, g)
  theirs = with_gradients(stock, x, w, g)
  for a, b, c, want in zip(ours, theirs, rounded, wants, strict=True):
    error, error_of_lax, of_rounding = (np.sqrt(np.mean((exact(v) - want) ** 2)) for v in (a, b, c))
    bound = (16 if precision == "high" else 1.5) * max(error_of_lax, of_rounding)
    assert error <= bound, f"{error:.3g} against {error_of_lax:.3g}, of rounding {of_rounding:.3g}"


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  x = jnp.broadcast_to((jnp.arange(1 << 29) % 7).astype(jnp.float16)[:, None], (5, 1 << 29, 1))
  w = jnp.full((1, 1, 1), 2, jnp.float16)
  same = jax.jit(lambda a, b: (a == 2 * b).all())
  assert same(jaxdnn.conv(x, w), x) and same(jaxdnn.conv_dgrad(x, w, (1 << 29,)), x)
  # Ones at the very end and beginning alone, so that the sum is exact.
  g = jnp.zeros(x.shape, x.dtype).at[0, :3].set(1).at[4, -3:].set(1)
  assert float(jaxdnn.conv_wgrad(x, g, (1,))[0, 0, 0]) == float(x[0, :3].sum() + x[4, -3:].sum())


def test_split_filter_gradient():
  """Enough pixels for the planner to split the sum, and not a multiple of any slice."""
  case = CASES[0].__class__("split", 7, (61, 59), 2, (3, 3), 5, padding=((1, 1), (1, 1)))
  for dtype in ("float32", "bfloat16", "float64"):
    x, w, g = operands(case, dtype)
    check(case, *with_gradients(functools.partial(apply, case), x, w, g), x, w, g, dtype)


# The whole of lax's signature -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["VALID", "SAME", "SAME_LOWER", "same"])
@pytest.mark.parametrize("stride,dilation", [(1, 1), (2, 1), (3, 1), (1, 2), (2, 3)])
def test_string_padding_is_lax(padding, stride, dilation):
  x, w = sample((2, 9, 8, 3), "float64"), sample((3, 2, 3, 4), "float64", seed=1)
  args = ((stride, stride), padding, None, (dilation, dilation), ("NHWC", "HWIO", "NHWC"))
  np.testing.assert_allclose(
    jaxdnn.conv_general_dilated(x, w, *args), lax.conv_general_dilated(x, w, *args), atol=1e-12
  )


@pytest.mark.parametrize("numbers", [None, ("NCHW", "OIHW", "NCHW"), ("HWNC", "IOWH", "CNHW")])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_by_themselves(numbers, groups):
  kwargs = dict(stride=(2, 1), padding=((1, 0), (0, 2)), dilation=(1, 2), groups=groups, dimension_numbers=numbers)
  dn = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, numbers or ("NHWC", "HWIO", "NHWC"))
  x_shape, w_shape = [0] * 4, [0] * 4
  for d, v in zip(dn.lhs_spec, (2, 4, 7, 6), strict=True):
    x_shape[d] = v
  for d, v in zip(dn.rhs_spec, (6, 4 // groups, 3, 2), strict=True):
    w_shape[d] = v
  x, w = sample(x_shape, "float64"), sample(w_shape, "float64", seed=1)
  f = lambda x, w: jaxdnn.conv(x, w, **kwargs)  # noqa: E731
  g = sample(jax.eval_shape(f, x, w).shape, "float64", seed=2)
  _, dx, dw = with_gradients(f, x, w, g)
  np.testing.assert_array_equal(jaxdnn.conv_dgrad(g, w, (7, 6), **kwargs), dx)
  np.testing.assert_array_equal(jaxdnn.conv_wgrad(x, g, (3, 2), **kwargs), dw)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_preferred_element_type(dtype):
  case = next(c for c in CASES if c.name == "3x3")
  x, w, g = operands(case, dtype)
  wide = functools.partial(apply, case, preferred_element_type="float32")
  y, dx, dw = with_gradients(wide, x, w, g.astype("float32"))
  assert_close(y, conv_oracle(exact(x), exact(w), *case.geometry), "float32", terms=9 * case.c, scale=4)
  want_dx, want_dw = conv_gradients(exact(x), exact(w), exact(g), *case.geometry)
  assert_close(dx, want_dx, dtype, terms=9 * case.k, scale=4)
  assert_close(dw, want_dw, dtype, terms=y.size // case.k, scale=4)


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8", "uint32"])
def test_integers_of_other_types(dtype):
  """For which lax has no convolution on GPUs."""
  rng = np.random.default_rng(0)
  x, w = (rng.integers(0, 99, shape).astype(dtype) for shape in ((2, 9, 8, 4), (3, 2, 2, 6)))
  geometry = ((2, 1), ((3, 1), (0, -1)), (1, 2), (2, 3), 2)
  got = jaxdnn.conv_general_dilated(
    x, w, *geometry[:4], ("NHWC", "HWIO", "NHWC"), feature_group_count=2, preferred_element_type="int32"
  )
  np.testing.assert_array_equal(got, conv_oracle(x.astype(float), w.astype(float), *geometry))


def test_integers_and_complex_follow_lax():
  rng = np.random.default_rng(0)
  x, w = rng.integers(-9, 9, (2, 5, 5, 3)).astype(np.int8), rng.integers(-9, 9, (3, 3, 3, 4)).astype(np.int8)
  got = jaxdnn.conv(x, w, padding="SAME", preferred_element_type="int32")
  np.testing.assert_array_equal(got, conv_oracle(x, w, (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1)))
  z, v = sample((2, 5, 3), "float64") * (1 + 2j), sample((3, 3, 4), "float64", seed=1) * (2 - 1j)
  args = ((1,), "SAME", None, None, ("NWC", "WIO", "NWC"))
  got = jaxdnn.conv_general_dilated(z, v, *args)
  np.testing.assert_allclose(got, lax.conv_general_dilated(z, v, *args), atol=1e-12)


def test_layer():
  x, w = sample((2, 3, 6, 5, 4), "float32"), sample((3, 3, 4, 8), "float32", seed=1)
  b, r = sample((8,), "float32", seed=2), sample((2, 3, 6, 5, 8), "float32", seed=3)
  y = jaxdnn.conv(x, w, b, padding="SAME", activation="relu", residual=r)
  plain = conv_oracle(exact(x).reshape(6, 6, 5, 4), exact(w), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1))
  assert_close(y, np.maximum(plain.reshape(r.shape) + b + r, 0), "float32", terms=36, scale=4)
  unbatched = jaxdnn.conv(x[0, 0], w, b, padding=1)
  assert_close(unbatched, plain[0] + b, "float32", terms=36, scale=4)
  nchw = jaxdnn.conv(
    x[0].transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), b, padding="SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
  )
  assert_close(nchw.transpose(0, 2, 3, 1), plain[:3] + b, "float32", terms=36, scale=4)
  nchw = jaxdnn.conv(
    x[0].transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), b, padding="SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"),
    residual=r[0].transpose(0, 3, 1, 2), activation="relu",
  )  # fmt: skip
  assert_close(nchw.transpose(0, 2, 3, 1), np.maximum(plain[:3] + b + r[0], 0), "float32", terms=36, scale=4)


def test_four_spatial_dimensions():
  """More than the kernels take goes through the reference on every platform."""
  x, w = sample((1, 3, 4, 3, 2, 3), "float64"), sample((2, 2, 2, 1, 3, 2), "float64", seed=1)
  geometry = ((1,) * 4, ((0, 1),) * 4, (1,) * 4, (1,) * 4)
  got = jaxdnn.conv_general_dilated(x, w, *geometry, channels_last(4))
  assert_close(got, conv_oracle(x, w, *geometry), "float64", terms=24, scale=4)


# Transformations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lhs_dilation", [(1, 1), (2, 1)])
def test_derivatives_of_every_order_and_mode(groups, lhs_dilation):
  x, w = jnp.asarray(sample((2, 5, 4, 4), "float64")), jnp.asarray(sample((3, 2, 4 // groups, 6), "float64", seed=1))

  def f(x, w):
    return jaxdnn.conv_general_dilated(
      x, w, (2, 1), ((1, 0), (-1, 2)), lhs_dilation, (1, 2), ("NHWC", "HWIO", "NHWC"), groups
    )

  check_grads(jax.jit(f), (x, w), order=3, modes=("fwd", "rev"))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("in_axes", [a for a in itertools.product((None, 0, 2), repeat=2) if a != (None, None)])
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
def test_vmap_over_each_subset(op, in_axes, groups):
  kwargs = dict(stride=(2, 1), padding=((1, 0), (0, 2)), dilation=(1, 2), groups=groups)
  x, w = sample((2, 7, 6, 4), "float64"), sample((3, 2, 4 // groups, 6), "float64", seed=1)
  g = sample(jaxdnn.conv(x, w, **kwargs).shape, "float64", seed=2)
  f, args = {
    "conv": (functools.partial(jaxdnn.conv, **kwargs), (x, w)),
    "conv_dgrad": (functools.partial(jaxdnn.conv_dgrad, x_spatial=(7, 6), **kwargs), (g, w)),
    "conv_wgrad": (functools.partial(jaxdnn.conv_wgrad, window=(3, 2), **kwargs), (x, g)),
  }[op]
  stacked = [a if d is None else np.stack([a, 2 * a + 1, -a], d) for a, d in zip(args, in_axes, strict=True)]
  want = [f(*(a if d is None else np.take(a, i, d) for a, d in zip(stacked, in_axes, strict=True))) for i in range(3)]
  np.testing.assert_allclose(jax.vmap(f, in_axes)(*stacked), np.stack(want), atol=1e-11)
  # A second vmap, over the other operand or over both, stacks problems on problems.
  twice = [np.stack([a, a - 1]) for a in stacked]
  inner = jax.vmap(f, in_axes)
  np.testing.assert_allclose(
    jax.vmap(inner)(*twice), np.stack([inner(*(a[i] for a in twice)) for i in range(2)]), atol=1e-11
  )


def test_vmap_of_nothing():
  w = jnp.zeros((3, 3, 4, 6))
  assert jax.vmap(lambda x: jaxdnn.conv(x, w))(jnp.zeros((0, 2, 5, 5, 4))).shape == (0, 2, 3, 3, 6)


def test_per_example_gradients_and_hessian():
  x, w = jnp.asarray(sample((3, 6, 5, 2), "float64")), jnp.asarray(sample((2, 2, 2, 3), "float64", seed=1))
  loss = lambda w, x: (jaxdnn.conv(x, w) ** 2).sum()  # noqa: E731
  per_example = jax.vmap(jax.grad(loss), (None, 0))(w, x)
  np.testing.assert_allclose(per_example, np.stack([jax.grad(loss)(w, x[i]) for i in range(3)]), atol=1e-10)
  total = jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, x).sum())(w)
  np.testing.assert_allclose(total, per_example.sum(0), atol=1e-10)
  hessian = jax.hessian(loss)(w, x).reshape(w.size, w.size)
  np.testing.assert_allclose(hessian, hessian.T, atol=1e-10)
  np.testing.assert_allclose(w.reshape(-1) @ hessian @ w.reshape(-1), 2 * loss(w, x), rtol=1e-10)


# Special values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_local(dtype):
  x, w = sample((1, 9, 9, 20), dtype), sample((3, 3, 20, 70), dtype, seed=1)
  for value in (np.nan, np.inf):
    x[0, 4, 4, 3] = value
    touched = np.zeros((7, 7), bool)
    touched[2:5, 2:5] = True
    y = exact(jaxdnn.conv(x, w))[0]
    assert not np.isfinite(y[touched]).any() and np.isfinite(y[~touched]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonnegative_in_nonnegative_out(dtype):
  x, w = np.abs(sample((2, 8, 8, 5), dtype)), np.abs(sample((3, 3, 5, 6), dtype, seed=1))
  assert (exact(jaxdnn.conv(x, w, padding="SAME")) >= 0).all()


# Wrong calls ----------------------------------------------------------------------------------------------------------

X, W = (2, 8, 8, 6), (3, 3, 6, 4)


@pytest.mark.parametrize(
  "x,w,kwargs,message",
  [
    ((2, 8, 8), W, {}, r"same rank.*\(2, 8, 8\).*\(3, 3, 6, 4\)"),
    (X, (3, 3, 5, 4), {}, r"takes 5 input channels per group.*6 channels"),
    (X, W, dict(feature_group_count=4), r"feature_group_count=4 does not divide the input's 6 channels"),
    (X, (3, 3, 3, 5), dict(feature_group_count=2), r"5 output channels are not a multiple of feature_group_count=2"),
    (X, W, dict(feature_group_count=0), r"feature_group_count must be positive, got 0"),
    (X, W, dict(batch_group_count=3), r"4 output channels are not a multiple of batch_group_count=3"),
    ((3, 8, 8, 6), W, dict(batch_group_count=2), r"batch_group_count=2 does not divide the batch size 3"),
    (X, (3, 3, 3, 4), dict(feature_group_count=2, batch_group_count=2), r"at most one of feature_group_count=2"),
    (X, W, dict(window_strides=(1,)), r"window_strides must have one entry.*the 2 spatial.*, got \(1,\)"),
    (X, W, dict(window_strides=(0, 1)), r"window_strides must be positive, got \(0, 1\)"),
    (X, W, dict(rhs_dilation=(1, -1)), r"rhs_dilation must be positive, got \(1, -1\)"),
    (X, W, dict(lhs_dilation=(1, 2, 3)), r"lhs_dilation must have one entry.*\(1, 2, 3\)"),
    (X, W, dict(padding="HALF"), r"padding must be 'VALID', 'SAME', 'SAME_LOWER' or explicit, got 'HALF'"),
    (X, W, dict(padding=((1, 1),)), r"padding must be one \(low, high\) pair for each of 2 dim.*, got \(\(1, 1\),\)"),
    (X, W, dict(padding=(1, 1)), r"padding must be a string, an int or \(low, high\) pairs, got \(1, 1\)"),
    (X, W, dict(padding=((-9, 0), (0, 0))), r"padding=.*removes more than there is"),
    (X, W, dict(padding="SAME", lhs_dilation=(2, 1)), r"padding='SAME' is ambiguous with lhs_dilation=\(2, 1\)"),
    (X, W, dict(precision="exact"), r"precision must be .* got 'exact'"),
    (X, W, dict(dimension_numbers=("NHWC", "HWIO", "NHWD")), r"NHWD"),
  ],
)
def test_wrong_shapes_raise_where_lax_raises(x, w, kwargs, message):
  kwargs = dict(window_strides=(1, 1), padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) | kwargs
  with pytest.raises((ValueError, TypeError), match=message):
    jax.eval_shape(functools.partial(jaxdnn.conv_general_dilated, **kwargs), jnp.zeros(x), jnp.zeros(w))
  # lax raises too, if not always so that a user would understand (a stride of 0 divides by zero).
  with pytest.raises(Exception):  # noqa: B017
    jax.jit(functools.partial(lax.conv_general_dilated, **kwargs)).lower(jnp.zeros(x), jnp.zeros(w)).compile()


@pytest.mark.parametrize(
  "kwargs,message",
  [
    (dict(lhs=None), r"lhs must be an array, got None"),
    (dict(feature_group_count=None), r"feature_group_count must be an int, got None"),
    (dict(feature_group_count=2.0), r"feature_group_count must be an int, got 2.0"),
    (dict(batch_group_count="1"), r"batch_group_count must be an int, got '1'"),
    (dict(dimension_numbers=lax.ConvDimensionNumbers((0, 1, 2, 9), *[(0, 1, 2, 3)] * 2)), r"dimension_numbers.*9"),
    (dict(preferred_element_type="nope"), r"preferred_element_type must be .* got 'nope'"),
    (dict(workspace_limit=1.5), r"workspace_limit must be an int, got 1.5"),
  ],
)
def test_wrong_values_name_the_argument(kwargs, message):
  given = dict(lhs=jnp.zeros(X), rhs=jnp.zeros(W), window_strides=(1, 1), padding="VALID") | kwargs
  with pytest.raises((ValueError, TypeError), match="conv_general_dilated: " + message):
    jaxdnn.conv_general_dilated(**{"dimension_numbers": ("NHWC", "HWIO", "NHWC")} | given)


def test_values_that_lax_takes():
  """Iterators, NumPy's integers and unsigned operands with signed sums; algorithms of dot products as a precision."""
  x, w = sample(X, "float64"), sample(W, "float64", seed=1)
  dn = ("NHWC", "HWIO", "NHWC")
  got = jaxdnn.conv_general_dilated(
    x, w, iter((1, 2)), zip((1, 0), (0, 1), strict=True), dimension_numbers=dn, feature_group_count=np.array(1),
    workspace_limit=np.int64(5),
  )  # fmt: skip
  want = lax.conv_general_dilated(x, w, (1, 2), ((1, 0), (0, 1)), dimension_numbers=dn)
  np.testing.assert_allclose(got, want, atol=1e-12)
  for given, wide in (("uint8", "int32"), ("bool", "int32")):
    a, b = np.ones(X, given), np.ones(W, given)
    assert (jaxdnn.conv(a, b, preferred_element_type=wide) == 54).all()


@pytest.mark.parametrize(
  "given,want",
  [
    ("BF16_BF16_F32", "default"),
    ("TF32_TF32_F32", "default"),
    (lax.DotAlgorithmPreset.TF32_TF32_F32_X3, "high"),
    ("F32_F32_F32", "highest"),
    (lax.DotAlgorithm(np.float32, np.float32, np.float32), "highest"),
  ],
)
def test_algorithms_of_dot_products_are_a_precision(given, want):
  """Also as `jax_default_matmul_precision`, which is one setting for products and convolutions."""
  assert canonical_precision("conv", given) == canonical_precision("conv", want)
  if isinstance(given, str):
    with jax.default_matmul_precision(given):
      assert canonical_precision("conv", None) == canonical_precision("conv", want)


@pytest.mark.parametrize(
  "x_type,w_type,preferred,message",
  [
    ("float32", "bfloat16", None, r"same dtype, got float32 and bfloat16"),
    ("float32", "float32", "bfloat16", r"preferred_element_type=bfloat16 cannot hold a sum of float32"),
    ("float32", "float32", "int32", r"preferred_element_type=int32 cannot hold a sum of float32"),
    ("int8", "int8", "uint32", r"preferred_element_type=uint32 cannot hold a sum of int8"),
  ],
)
def test_wrong_dtypes_raise_where_lax_raises(x_type, w_type, preferred, message):
  x, w = jnp.zeros((1, 4, 4), x_type), jnp.zeros((4, 4, 1), w_type)
  with pytest.raises(TypeError, match=message):
    jaxdnn.conv_general_dilated(x, w, (1,), "VALID", preferred_element_type=preferred)
  with pytest.raises(TypeError):
    lax.conv_general_dilated(x, w, (1,), "VALID", preferred_element_type=preferred)


def test_wrong_layer_arguments():
  x, w = jnp.zeros(X), jnp.zeros(W)
  with pytest.raises(ValueError, match=r"b must have shape \(4,\).*\(6,\)"):
    jaxdnn.conv(x, w, jnp.zeros(6))
  with pytest.raises(ValueError, match=r"residual must have the result's shape \(2, 6, 6, 4\), got \(2, 8, 8, 4\)"):
    jaxdnn.conv(x, w, residual=jnp.zeros((2, 8, 8, 4)))
  with pytest.raises(ValueError, match=r"activation must be None or one of .*'relu'.*got 'relux'"):
    jaxdnn.conv(x, w, activation="relux")
  with pytest.raises(ValueError, match=r"too few dimensions"):
    jaxdnn.conv(x[0, 0], w)
  with pytest.raises(ValueError, match=r"g of shape \(2, 8, 8, 4\) must have spatial extents \(6, 6\)"):
    jaxdnn.conv_dgrad(jnp.zeros((2, 8, 8, 4)), w, (8, 8))
  with pytest.raises(ValueError, match=r"x_spatial must have 2 entries, got \(8,\)"):
    jaxdnn.conv_dgrad(jnp.zeros((2, 6, 6, 4)), w, (8,))
  with pytest.raises(ValueError, match=r"window must have 2 entries, got \(3,\)"):
    jaxdnn.conv_wgrad(x, jnp.zeros((2, 6, 6, 4)), (3,))
  with pytest.raises(ValueError, match=r"x has 2 images but g has 3"):
    jaxdnn.conv_wgrad(x, jnp.zeros((3, 6, 6, 4)), (3, 3))
