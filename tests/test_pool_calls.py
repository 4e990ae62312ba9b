"""What a call to a pooling function becomes, which calls are refused, and equality with flax.linen and lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from jaxdnn import _extension, linen
from numerics import DTYPES, sample

# Lowering ------------------------------------------------------------------------------------------------------------

needs_kernels = pytest.mark.skipif(
  "jaxdnn.max_pool.v2" not in _extension.TARGETS, reason="jaxdnn was built without its CUDA kernels"
)


@needs_kernels
def test_cuda_lowering():
  def text(f, dtype):
    x = jax.ShapeDtypeStruct((2, 8, 8, 4), dtype)
    return jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()

  pools = {
    "max": lambda x: jaxdnn.max_pool(x, (3, 2), stride=2, padding=((1, 0), (-1, 2)), dilation=(1, 2)),
    "avg": lambda x: jaxdnn.avg_pool(x, (3, 2), stride=2, count_include_pad=False),
    "min": lambda x: jaxdnn.min_pool(x, (2, 2), padding=1),
  }
  for dtype in DTYPES:
    forward = text(pools["max"], dtype)
    assert "@jaxdnn.max_pool.v2" in forward and "low = dense<[1, -1]> : tensor<2xi64>" in forward
    assert "window = dense<[3, 2]> : tensor<2xi64>" in forward and "dilation = dense<[1, 2]>" in forward
    assert "@jaxdnn.pool_scatter.v2" in text(jax.grad(lambda x: pools["max"](x).sum()), dtype)
    assert "@jaxdnn.pool_gather.v2" in text(lambda x: jax.jvp(pools["max"], (x,), (x,))[1], dtype)
    assert "@jaxdnn.sum_pool.v1" in text(pools["avg"], dtype) and "divisor = 6.000000e+00" in text(pools["avg"], dtype)
    assert "@jaxdnn.sum_pool_bwd.v1" in text(jax.grad(lambda x: pools["avg"](x).sum()), dtype)
  assert "jaxdnn.max_pool" not in text(pools["max"], "int32")


def test_channels_first_is_no_transpose():
  x = jnp.ones((2, 3, 8, 7))
  for layout in ("NCHW", "NHWC", "HWNC"):
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: jaxdnn.max_pool(x, (2, 2), layout=layout).sum()))(x))  # noqa: B023
    assert "transpose" not in jaxpr


# Drop-ins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 1))], ids=str)
@pytest.mark.parametrize("strides", [None, (2, 1)])
def test_equality_with_flax(padding, strides):
  flax = pytest.importorskip("flax.linen.pooling")
  batch = jnp.asarray(sample((2, 9, 8, 3), "float32"))
  for x in (batch, batch[0]):
    for name, more in (
      ("max_pool", {}),
      ("min_pool", {}),
      ("avg_pool", {}),
      ("avg_pool", {"count_include_pad": False}),
    ):
      if not hasattr(flax, name):
        continue
      got = getattr(linen, name)(x, (3, 2), strides, padding, **more)
      with jax.numpy_dtype_promotion("standard"):
        want = getattr(flax, name)(x, (3, 2), strides, padding, **more)
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    got = linen.pool(x, 0.0, lax.add, (3, 2), strides, padding)
    np.testing.assert_allclose(got, flax.pool(x, 0.0, lax.add, (3, 2), strides, padding), rtol=1e-5, atol=1e-5)


def test_linen_takes_any_rank():
  x = jnp.asarray(sample((2, 3, 4, 3, 4, 2), "float32"))
  y = linen.avg_pool(x, (2, 2, 2, 2), padding="SAME", count_include_pad=False)
  ones = lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, (1, 2, 2, 2, 2, 1), (1,) * 6, "SAME")
  total = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 2, 2, 1), (1,) * 6, "SAME")
  np.testing.assert_allclose(y, total / ones, rtol=1e-5, atol=1e-6)
  assert linen.max_pool(jnp.ones((4, 1), jnp.int32), (2,)).dtype == jnp.int32
  with pytest.raises(ValueError, match=r"window_shape \(2, 2\) needs inputs of 3 dimensions or more, got \(4, 4\)"):
    linen.max_pool(jnp.ones((4, 4)), (2, 2))


@pytest.mark.parametrize(
  "window, strides, padding, base, dilation",
  [
    ((1, 2, 1, 3, 1, 2), (1, 2, 1, 1, 1, 1), "SAME", None, None),
    ((2, 2, 2, 2, 2, 2), (1, 2, 1, 1, 2, 1), "SAME", None, (1, 1, 1, 2, 1, 1)),
    ((1, 1, 1, 1, 1, 2), (1, 1, 1, 1, 1, 1), "VALID", None, None),
    ((2, 1, 1, 1, 1, 2), (1, 1, 3, 1, 1, 1), "SAME_LOWER", None, None),
    (
      (1, 2, 1, 3, 1, 1),
      (1, 1, 1, 2, 1, 1),
      ((0, 0), (1, 0), (0, 2), (2, 1), (0, 0), (0, 0)),
      (1, 2, 1, 3, 1, 1),
      None,
    ),
    ((1,) * 6, (1,) * 6, "VALID", None, None),
  ],
)
def test_reduce_window(window, strides, padding, base, dilation):
  x = jnp.asarray(sample((2, 3, 4, 5, 3, 2), "float64"))
  args = window, strides, padding, base, dilation
  for reducer, init in ((lax.max, -np.inf), (lax.min, np.inf), (lax.add, 0.0), (jnp.maximum, 0.5)):
    want = lax.reduce_window(x, init, lax.max if reducer is jnp.maximum else reducer, *args)
    np.testing.assert_allclose(jaxdnn.reduce_window(x, init, reducer, *args), want, rtol=1e-12)
  if dilation is None:
    for reducer, init in ((lax.max, -np.inf), (lax.add, 0.0)):
      got, want = (
        jax.grad(lambda x, f=f: (f(x, init, reducer, *args) ** 2).sum())(x)  # noqa: B023
        for f in (jaxdnn.reduce_window, lax.reduce_window)
      )
      np.testing.assert_allclose(got, np.where(np.isnan(want), got, want), rtol=1e-10)


def test_reduce_window_of_integers():
  x = jnp.asarray(np.random.default_rng(0).integers(-50, 50, (4, 7)), jnp.int32)
  limits = np.iinfo(np.int32)
  for reducer, init in ((lax.max, limits.min), (lax.min, limits.max), (lax.add, 0)):
    args = x, np.int32(init), reducer, (2, 3), (1, 2), "SAME"
    np.testing.assert_array_equal(jaxdnn.reduce_window(*args), lax.reduce_window(*args))


@pytest.mark.parametrize(
  "change, error, message",
  [
    ({"computation": lax.mul}, ValueError, r"computation must be lax\.max, lax\.min or lax\.add, got .*mul"),
    ({"init_value": 1.0, "computation": lax.add}, ValueError, r"init_value of a sum must be 0, got 1\.0"),
    ({"init_value": np.zeros(2)}, TypeError, r"init_value must be a scalar of operand's type float32"),
    ({"window_dimensions": (2,)}, ValueError, r"window_dimensions must have one entry for each of the 2"),
    ({"window_strides": (0, 1)}, ValueError, r"window_strides must be positive, got \(0, 1\)"),
    ({"padding": "FULL"}, ValueError, r"padding must be 'VALID', 'SAME', 'SAME_LOWER' or explicit, got 'FULL'"),
    ({"operand": np.zeros((4, 4), bool)}, TypeError, r"operand must be floating-point or integer, got bool"),
  ],
)
def test_reduce_window_errors(change, error, message):
  call = {
    "operand": np.zeros((4, 4), np.float32),
    "init_value": -np.inf,
    "computation": lax.max,
    "window_dimensions": (2, 2),
    "window_strides": (1, 1),
    "padding": "VALID",
  }
  with pytest.raises(error, match=f"reduce_window: {message}"):
    jaxdnn.reduce_window(**{**call, **change})
  with pytest.raises(TypeError, match="reduce_window: init_value must be a constant"):
    jax.jit(lambda init: jaxdnn.reduce_window(**{**call, "init_value": init}))(0.0)


def test_reduce_window_defaults_and_same_are_lax():
  """Strides of 1, no padding; "SAME" pads as for the operand without the gaps of base_dilation."""
  x = sample((3, 2), "float32")
  for more in ({}, {"padding": "SAME", "window_strides": (2, 2), "base_dilation": (1, 2)}):
    want = lax.reduce_window(x, np.float32(-np.inf), lax.max, (2, 2), **more)
    np.testing.assert_array_equal(jaxdnn.reduce_window(x, -np.inf, lax.max, (2, 2), **more), want)


# Errors --------------------------------------------------------------------------------------------------------------

X = np.zeros((2, 8, 8, 3), np.float32)


@pytest.mark.parametrize("name", ["max_pool", "min_pool", "avg_pool", "sum_pool", "lp_pool"])
@pytest.mark.parametrize(
  "x, args, error, message",
  [
    (X, {"window": 2}, TypeError, r"window must be a sequence of 1 to 3 integers, got 2"),
    (X, {"window": "22"}, TypeError, r"window must be a sequence of 1 to 3 integers, got '22'"),
    (X, {"window": ()}, ValueError, r"window must have 1 to 3 entries.*got \(\)"),
    (X, {"window": (1, 1, 1, 1)}, ValueError, r"window must have 1 to 3 entries.*got \(1, 1, 1, 1\)"),
    (X, {"window": (2, 0)}, ValueError, r"window must be positive, got \(2, 0\)"),
    (X, {"window": (2, 1.5)}, TypeError, r"window must be an int or a sequence of 2 ints, got \(2, 1.5\)"),
    (X[0, 0, 0], {"window": (2,)}, ValueError, r"x must have shape \[\.\.\., 1 spatial, channels\], got \(3,\)"),
    (X, {"stride": 0}, ValueError, r"stride must be positive, got \(0, 0\)"),
    (X, {"stride": (1, -2)}, ValueError, r"stride must be positive, got \(1, -2\)"),
    (X, {"stride": (1, 1, 1)}, ValueError, r"stride must have one entry for each of the 2 spatial .*, got \(1, 1, 1\)"),
    (X, {"stride": 1.0}, TypeError, r"stride must be an int or a sequence of 2 ints, got 1\.0"),
    (X, {"dilation": (0, 1)}, ValueError, r"dilation must be positive, got \(0, 1\)"),
    (X, {"padding": "FULL"}, ValueError, r"padding must be 'VALID', 'SAME', 'SAME_LOWER' or explicit, got 'FULL'"),
    (X, {"padding": (1, 2)}, ValueError, r"padding must be a string, an int or \(low, high\) pairs, got \(1, 2\)"),
    (X, {"padding": ((1, 1),)}, ValueError, r"padding must be one \(low, high\) pair for each.*, got \(\(1, 1\),\)"),
    (X, {"padding": 1.5}, ValueError, r"padding must be a string, an int or \(low, high\) pairs, got 1\.5"),
    (X, {"padding": ((-9, 1), (0, 0))}, ValueError, r"padding \(-9, 1\) crops more than the 8 elements"),
    (X, {"padding": ((-4, -5), (0, 0))}, ValueError, r"padding \(-4, -5\) crops more than the 8 elements"),
    (X, {"padding": 2**30}, ValueError, r"a spatial dimension of 8 with padding \(1073741824, 1073741824\).*2\*\*30"),
    (X, {"layout": "NHCC"}, ValueError, r"layout must name N, C and the 2 spatial dimensions.*got 'NHCC'"),
    (X, {"layout": "NCL"}, ValueError, r"layout must name N, C and the 2 spatial dimensions.*got 'NCL'"),
    (X[0], {"layout": "NCHW"}, ValueError, r"layout 'NCHW' needs x of 4 dimensions, got shape \(8, 8, 3\)"),
    (X, {"layout": 3}, TypeError, r"layout must be a string or None, got 3"),
    (X > 0, {}, TypeError, r"x must be floating-point.*, got bool"),
    (X + 1j, {}, TypeError, r"x must be floating-point.*, got complex64"),
  ],
  ids=lambda v: None,
)
def test_errors(name, x, args, error, message):
  window = args.get("window", (2, 2))
  rest = {k: v for k, v in args.items() if k != "window"}
  with pytest.raises(error, match=rf"{name}: {message}"):
    jax.eval_shape(lambda x: getattr(jaxdnn, name)(x, window, **rest), x)


def test_numbers_that_must_be_positive():
  for value in (0, -1.0, float("inf"), float("nan")):
    with pytest.raises(ValueError, match=r"avg_pool: divisor_override must be positive and finite"):
      jaxdnn.avg_pool(X, (2, 2), divisor_override=value)
    with pytest.raises(ValueError, match=r"lp_pool: power must be positive and finite"):
      jaxdnn.lp_pool(X, (2, 2), power=value)
  with pytest.raises(TypeError, match=r"lp_pool: power must be a number, got 'two'"):
    jaxdnn.lp_pool(X, (2, 2), power="two")


def test_avg_pool_of_integers():
  with pytest.raises(TypeError, match=r"avg_pool: x must be floating-point, got int32"):
    jaxdnn.avg_pool(np.zeros((4, 1), np.int32), (2,))


@pytest.mark.parametrize(
  "call, error, message",
  [
    (lambda: jaxdnn.max_pool(None, (2, 2)), TypeError, "max_pool: x must be an array, got None"),
    (lambda: jaxdnn.max_pool(X, np.array(2)), TypeError, "max_pool: window must be a sequence"),
    (lambda: jaxdnn.max_pool(X, (2, 2), stride=((1, 2), (3,))), TypeError, "max_pool: stride must be an int or"),
    (lambda: jaxdnn.max_pool(X, (2, 2), ceil_mode="no"), TypeError, "ceil_mode must be True or False, got 'no'"),
    (lambda: jaxdnn.avg_pool(X, (2, 2), count_include_pad=np.ones(2)), TypeError, "count_include_pad must be True"),
    (lambda: jaxdnn.max_pool(X, (2, 2), padding=-1, ceil_mode=True), ValueError, "crops the end, where ceil_mode"),
    (lambda: linen.max_pool(X, 2), TypeError, "window_shape must be a sequence of integers, got 2"),
  ],
)
def test_errors_name_the_argument(call, error, message):
  with pytest.raises(error, match=message):
    call()
