"""Pooling against brute force in NumPy: values, winners, derivatives, vmap, layouts, sharding, lowering, errors."""

import functools
import itertools
import math
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
import pool_oracle
from jaxdnn import _extension
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample
from pool_cases import POOL

CASES = pytest.mark.parametrize("case", POOL, ids=lambda case: case.name)
POOLS = pytest.mark.parametrize("pool", [jaxdnn.max_pool, jaxdnn.avg_pool], ids=["max", "avg"])
COUNT_MODES = pytest.mark.parametrize("count_include_pad", [True, False], ids=["include_pad", "exclude_pad"])


def keywords(case):
  return {"stride": case.stride, "padding": case.padding, "dilation": case.dilation}


def spelled_out(case):
  """The case's window, stride, padding and dilation with an entry per dimension, by other code than the library's."""
  rank = len(case.window)

  def each(v):
    return (v,) * rank if isinstance(v, int) else tuple(v)

  stride, dilation, padding = each(case.stride or 1), each(case.dilation), case.padding
  if padding == "VALID":
    padding = ((0, 0),) * rank
  elif isinstance(padding, int):
    padding = ((padding, padding),) * rank
  elif isinstance(padding, str):
    extent = case.shape[-rank - 1 : -1]
    lower = padding.upper() == "SAME_LOWER"
    padding = pool_oracle.same_padding(extent, case.window, stride, dilation, lower=lower)
  return case.window, stride, padding, dilation


def out_shape(case):
  rank = len(case.window)
  extent = pool_oracle.out_extent(case.shape[-rank - 1 : -1], *spelled_out(case))
  return (*case.shape[: -rank - 1], *extent, case.shape[-1])


def max_pool(case):
  return lambda x: jaxdnn.max_pool(x, case.window, **keywords(case))


def avg_pool(case, count_include_pad=True):
  return lambda x: jaxdnn.avg_pool(x, case.window, count_include_pad=count_include_pad, **keywords(case))


def check_max(case, x, *, run=jax.jit):
  """Values, pull-back and push-forward of max pooling at `x`, against the oracle."""
  f, dtype = max_pool(case), str(x.dtype)
  g, t = sample(out_shape(case), dtype, seed=1), sample(case.shape, dtype, seed=2)

  def everything(x, g, t):
    return f(x), *jax.vjp(f, x)[1](g), *jax.jvp(f, (x,), (t,))

  y, dx, y_again, dy = run(everything)(jnp.asarray(x), jnp.asarray(g), jnp.asarray(t))
  want_y, want_dx = pool_oracle.max_pool(exact(x), exact(g), *spelled_out(case))
  assert y.shape == out_shape(case) and y.dtype == dtype
  np.testing.assert_array_equal(exact(y), want_y)
  np.testing.assert_array_equal(exact(y_again), want_y)
  assert_close(dx, want_dx, dtype, terms=math.prod(case.window), scale=4)
  # dy = J t, so that <dy, dy> = <Jᵀ dy, t>, with the oracle's Jᵀ.
  pulled_back = pool_oracle.max_pool(exact(x), exact(dy), *spelled_out(case))[1]
  np.testing.assert_allclose((exact(dy) ** 2).sum(), (pulled_back * exact(t)).sum(), rtol=1e-9)


def check_avg(case, dtype, count_include_pad, *, run=jax.jit):
  f = avg_pool(case, count_include_pad)
  x, g = sample(case.shape, dtype), sample(out_shape(case), dtype, seed=1)
  y, dx = run(lambda x, g: (f(x), *jax.vjp(f, x)[1](g)))(jnp.asarray(x), jnp.asarray(g))
  want_y, want_dx = pool_oracle.avg_pool(exact(x), exact(g), *spelled_out(case), count_include_pad)
  terms = math.prod(case.window)
  assert_close(y, want_y, dtype, terms=terms)
  assert_close(dx, want_dx, dtype, terms=terms, scale=4)


# Values and gradients ------------------------------------------------------------------------------------------------


@CASES
def test_max_pool(case):
  check_max(case, sample(case.shape, "float32"))


@CASES
@COUNT_MODES
def test_avg_pool(case, count_include_pad):
  check_avg(case, "float32", count_include_pad)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float32"])
@pytest.mark.parametrize("name", ["asymmetric", "dilation_meets_stride"])
def test_other_dtypes(name, dtype):
  case = next(c for c in POOL if c.name == name)
  check_max(case, sample(case.shape, dtype))
  check_avg(case, dtype, True)
  check_avg(case, dtype, False)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_integers(dtype):
  x = np.random.default_rng(0).integers(0, 100, (2, 5, 4, 3)).astype(dtype)
  y = jaxdnn.max_pool(x, (2, 2), padding=((0, 0), (3, 0)))
  want = pool_oracle.max_pool(exact(x), np.zeros(y.shape), (2, 2), (1, 1), ((0, 0), (3, 0)), (1, 1))[0]
  assert y.dtype == dtype
  np.testing.assert_array_equal(exact(y), np.where(want == -np.inf, np.iinfo(dtype).min, want))


@pytest.mark.parametrize("low, high", list(itertools.product((0, 1, 2), repeat=2)))
def test_equality_with_lax(low, high):
  """Where lax has the operation and is not wrong: no negative padding, no dilated gradient, no NaN."""
  x = jnp.asarray(sample((2, 9, 8, 3), "float32"))
  padding = ((0, 0), (low, high), (high, low), (0, 0))

  def stock(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), padding)

  def ours(x):
    return jaxdnn.max_pool(x, (3, 2), stride=(2, 1), padding=padding[1:3])

  np.testing.assert_array_equal(ours(x), stock(x))
  gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (ours, stock)]
  np.testing.assert_allclose(*gradients, rtol=1e-6)


def test_sums_of_16_bit_types_are_float32():
  """300 ones, of which bfloat16 would stop counting at 256."""
  x = jnp.ones((300, 1), jnp.bfloat16)
  assert jaxdnn.avg_pool(x, (300,))[0, 0] == 1
  _, vjp = jax.vjp(lambda x: jaxdnn.max_pool(x, (300,), padding=((299, 299),)), x)
  assert vjp(jnp.ones((599, 1), jnp.bfloat16))[0][0, 0] == 300


# Who wins ------------------------------------------------------------------------------------------------------------

OVERLAPPING = next(c for c in POOL if c.name == "channels5")
DILATED = next(c for c in POOL if c.name == "dilation_meets_stride")
MANY_CELLS = next(c for c in POOL if c.name == "more_than_255_cells")


@pytest.mark.parametrize("case", [OVERLAPPING, DILATED, MANY_CELLS], ids=lambda case: case.name)
@pytest.mark.parametrize("fill", ["equal", "negative", "minus_infinity", "zeros_of_both_signs", "few_values", "nan"])
def test_ties_and_special_values(case, fill):
  """First maximum in value, pull-back and push-forward; the same winner in all three."""
  x = sample(case.shape, "float32")
  x = {
    "equal": np.ones_like(x),
    "negative": -1 - np.abs(x),
    "minus_infinity": np.where(x < 1, -np.inf, x).astype(x.dtype),
    "zeros_of_both_signs": np.where(x < 0, -0.0, 0.0).astype(x.dtype),
    "few_values": np.round(x),
    "nan": np.where(x > 1, np.nan, x).astype(x.dtype),
  }[fill]
  rank = len(case.window)
  g, t = sample(out_shape(case), "float32", seed=1), sample(case.shape, "float32", seed=2)
  y, vjp = jax.vjp(max_pool(case), x)
  want_y, want_dx = pool_oracle.max_pool(exact(x), exact(g), *spelled_out(case))
  np.testing.assert_array_equal(exact(y), want_y)
  if fill == "zeros_of_both_signs":
    # The zeros are equal, and y is a copy of the first.
    np.testing.assert_array_equal(np.signbit(y), np.signbit(want_y))
  assert_close(vjp(jnp.asarray(g))[0], want_dx, "float32", terms=9, scale=4)
  _, dy = jax.jvp(max_pool(case), (x,), (t,))
  by_basis = np.zeros_like(y)
  for o, cells in pool_oracle.windows(case.shape[-rank - 1 : -1], *spelled_out(case)):
    one = np.zeros(y.shape)
    one[(slice(None), *o)] = 1
    if cells:
      chosen = pool_oracle.max_pool(exact(x), one, *spelled_out(case))[1]
      by_basis[(slice(None), *o)] = (chosen * t).sum(axis=tuple(range(1, rank + 1)))
  np.testing.assert_array_equal(dy, by_basis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", range(6))
def test_nan_wins_from_every_position(position, dtype):
  x = sample((2, 2, 3, 17), dtype)
  x[:, position // 3, position % 3] = np.nan
  y, vjp = jax.vjp(lambda x: jaxdnn.max_pool(x, (2, 3)), x)
  assert np.isnan(exact(y)).all()
  want = np.zeros(x.shape)
  want[:, position // 3, position % 3] = 1
  np.testing.assert_array_equal(exact(vjp(jnp.ones_like(y))[0]), want)


def test_first_of_two_nans_wins():
  x = jnp.array([[1.0], [jnp.nan], [jnp.inf], [jnp.nan]])
  dx = jax.grad(lambda x: jaxdnn.max_pool(x, (4,)).sum())(x)
  np.testing.assert_array_equal(dx[:, 0], [0, 1, 0, 0])


def test_all_padding():
  """-inf, or 0 on average, and nothing for the gradient; a window of -inf data still has a winner."""
  x = jnp.full((1, 1), -jnp.inf)
  y, vjp = jax.vjp(lambda x: jaxdnn.max_pool(x, (2,), padding=((3, 3),)), x)
  np.testing.assert_array_equal(y[:, 0], [-np.inf] * 6)
  np.testing.assert_array_equal(vjp(jnp.array([[1.0], [2], [4], [8], [16], [32]]))[0], [[4 + 8]])
  for include in (True, False):
    y, vjp = jax.vjp(lambda x: jaxdnn.avg_pool(x, (2,), padding=3, count_include_pad=include), jnp.ones((1, 1)))  # noqa: B023
    np.testing.assert_array_equal(y[:, 0], [0, 0, *[0.5 if include else 1] * 2, 0, 0])
    np.testing.assert_array_equal(vjp(jnp.ones((6, 1)))[0], [[1.0 if include else 2.0]])


# Derivatives of every order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, order", [("negative", 2), ("dilation_meets_stride", 2), ("dilation_coprime_to_stride", 3), ("all_padding", 3)]
)
def test_derivatives_of_every_order_and_mode(name, order):
  case = next(c for c in POOL if c.name == name)
  # Distinct values, more than a finite-difference step apart, and nothing of the padding's -inf.
  shape = (*case.shape[:-1], 2)
  x = jnp.asarray(np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape) / 10)
  check_grads(jax.jit(lambda x: jnp.maximum(max_pool(case)(x), -1)), (x,), order, modes=("fwd", "rev"), eps=1e-3)
  check_grads(jax.jit(avg_pool(case, False)), (x,), order, modes=("fwd", "rev"))


@POOLS
def test_hessian(pool):
  x = jnp.asarray(sample((6, 2), "float64"))
  f = functools.partial(pool, window=(3,))
  got = jax.hessian(lambda x: (f(x) ** 3).sum())(x).reshape(12, 12)
  jacobian = jax.jacfwd(f)(x).reshape(8, 12)
  np.testing.assert_array_equal(jacobian, jax.jacrev(f)(x).reshape(8, 12))
  np.testing.assert_allclose(got, jacobian.T @ np.diag(6 * f(x).ravel()) @ jacobian, atol=1e-12)


def test_gradient_keeps_only_the_index():
  """The residual of max pooling is one byte an output element, and inference does not even write it."""
  x = jnp.asarray(sample((2, 8, 8, 4), "float32"))

  def f(x):
    return jaxdnn.max_pool(x, (2, 2), stride=2)

  _, vjp = jax.vjp(f, x)
  kept = [r for r in jax.tree.leaves(vjp) if hasattr(r, "dtype")]
  assert [(r.shape, r.dtype) for r in kept] == [((2, 4, 4, 4), jnp.uint8)]
  assert "u8" not in str(jax.make_jaxpr(f)(x))


def scanned(f):
  return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]


@POOLS
@pytest.mark.parametrize("wrap", [jax.checkpoint, scanned])
def test_inside_other_transformations(pool, wrap):
  x = jnp.asarray(sample((6, 5, 3), "float64"))
  f = jax.jit(wrap(lambda x: pool(x, (3, 3), padding="SAME")))
  check_grads(f, (x,), order=2, modes=("fwd", "rev"), eps=1e-4)


# vmap ----------------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize(
  "f",
  [
    lambda x: jaxdnn.max_pool(x, (3, 2), stride=2, padding=1, dilation=(1, 2)),
    lambda x: jaxdnn.avg_pool(x, (3, 2), stride=2, padding=1, dilation=(1, 2), count_include_pad=False),
  ],
  ids=["max", "avg"],
)


@BOTH
@pytest.mark.parametrize("axis", [0, 1, 3, -1])
def test_vmap(f, axis):
  x = jnp.asarray(sample((2, 3, 7, 6, 4), "float64"))
  each = [jnp.take(x, i, axis) for i in range(x.shape[axis])]
  gradient = jax.grad(lambda x: (f(x) ** 3).sum())

  def hvp(x):
    return jax.jvp(gradient, (x,), (jnp.cos(x),))[1]

  for g in (f, gradient, hvp):
    np.testing.assert_allclose(jax.vmap(g, axis)(x), jnp.stack([g(v) for v in each]), rtol=1e-12)
  whole = jax.grad(lambda x: (jax.vmap(f, axis)(x) ** 3).sum())(x)
  np.testing.assert_allclose(whole, jnp.stack([gradient(v) for v in each], axis), rtol=1e-12)


@BOTH
def test_vmap_of_the_cotangent_alone(f):
  """The index stays unmapped while the cotangent or the tangent is mapped, at any axis."""
  x = jnp.asarray(sample((2, 7, 6, 4), "float64"))
  y, vjp = jax.vjp(f, x)
  g = jnp.asarray(sample((*y.shape, 3), "float64", seed=1))
  want = jnp.stack([vjp(g[..., i])[0] for i in range(3)])
  np.testing.assert_array_equal(jax.vmap(lambda g: vjp(g)[0], -1)(g), want)
  t = jnp.asarray(sample((3, *x.shape), "float64", seed=2))

  def push(t):
    return jax.jvp(f, (x,), (t,))[1]

  np.testing.assert_array_equal(jax.vmap(push)(t), jnp.stack([push(v) for v in t]))


# Layout, sharding, lowering ------------------------------------------------------------------------------------------


@POOLS
@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "CHWN", "HWNC", "NCXY"])
def test_layout(pool, layout):
  x = jnp.asarray(sample((2, 7, 6, 5), "float32"))
  order = [{"N": 0, "C": 3, "H": 1, "W": 2, "X": 1, "Y": 2}[letter] for letter in layout]

  def f(x, layout=None):
    return pool(x, (3, 2), stride=(2, 1), padding=((1, 0), (0, 2)), layout=layout)

  np.testing.assert_array_equal(f(x.transpose(order), layout), f(x).transpose(order))
  dx = jax.grad(lambda x: (f(x, layout) ** 2).sum())(x.transpose(order))
  np.testing.assert_array_equal(dx, jax.grad(lambda x: (f(x) ** 2).sum())(x).transpose(order))
  sequence = x[0]
  np.testing.assert_array_equal(
    pool(sequence.transpose(0, 2, 1), (2,), layout="NCL"), pool(sequence, (2,)).transpose(0, 2, 1)
  )


@pytest.mark.mesh
@BOTH
@pytest.mark.parametrize("spec", [P("a", None, None, "b"), P(("a", "b")), P(None, None, None, "a")], ids=str)
def test_explicit_mesh(f, spec):
  x = jnp.asarray(sample((8, 7, 6, 4), "float32"))
  gradient = jax.grad(lambda x: (f(x) ** 2).sum())
  want = f(x), gradient(x)
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
    for g, w in zip((f, gradient), want, strict=True):
      got = jax.jit(g)(sharded)
      np.testing.assert_array_equal(got, w)
      assert jax.typeof(got).sharding.spec[0] == jax.typeof(sharded).sharding.spec[0]
      assert jax.typeof(got).sharding.spec[3] == jax.typeof(sharded).sharding.spec[3]
    text = jax.jit(f).lower(sharded).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    spatial = jax.device_put(x[:, :6], jax.NamedSharding(mesh, P(None, None, "b")))
    with pytest.raises(ValueError, match=r"sharded over mesh axis 'b' along dimension 2"):
      f(spatial)


@pytest.mark.mesh
@BOTH
def test_inside_shard_map(f):
  x = jnp.asarray(sample((8, 7, 6, 4), "float32"))
  mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
  mapped = jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
  np.testing.assert_array_equal(jax.jit(mapped)(x), f(x))
  gradient = jax.grad(lambda x: (mapped(x) ** 2).sum())
  np.testing.assert_array_equal(jax.jit(gradient)(x), jax.grad(lambda x: (f(x) ** 2).sum())(x))


@POOLS
def test_symbolic_batch(pool):
  (b,) = jax.export.symbolic_shape("b")
  f = jax.jit(jax.grad(lambda x: (pool(x, (2, 2)) ** 2).sum()))
  x = sample((3, 5, 4, 2), "float32")
  exported = jax.export.export(f)(jax.ShapeDtypeStruct((b, 5, 4, 2), x.dtype))
  np.testing.assert_allclose(exported.call(x), f(x), rtol=1e-5)


needs_kernels = pytest.mark.skipif(
  "jaxdnn.max_pool.v1" not in _extension.TARGETS, reason="jaxdnn was built without its CUDA kernels"
)


@needs_kernels
def test_cuda_lowering():
  def text(f, dtype):
    x = jax.ShapeDtypeStruct((2, 8, 8, 4), dtype)
    return jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()

  pools = {
    "max": lambda x: jaxdnn.max_pool(x, (3, 2), stride=2, padding=((1, 0), (-1, 2)), dilation=(1, 2)),
    "avg": lambda x: jaxdnn.avg_pool(x, (3, 2), stride=2, count_include_pad=False),
  }
  for dtype in DTYPES:
    forward = text(pools["max"], dtype)
    assert "@jaxdnn.max_pool.v1" in forward and "low = dense<[1, -1]> : tensor<2xi64>" in forward
    assert "window = dense<[3, 2]> : tensor<2xi64>" in forward and "dilation = dense<[1, 2]>" in forward
    assert "@jaxdnn.pool_scatter.v1" in text(jax.grad(lambda x: pools["max"](x).sum()), dtype)
    assert "@jaxdnn.pool_gather.v1" in text(lambda x: jax.jvp(pools["max"], (x,), (x,))[1], dtype)
    assert "@jaxdnn.avg_pool.v1" in text(pools["avg"], dtype) and "include_pad = false" in text(pools["avg"], dtype)
    assert "@jaxdnn.avg_pool_bwd.v1" in text(jax.grad(lambda x: pools["avg"](x).sum()), dtype)
  assert "jaxdnn.max_pool" not in text(pools["max"], "int32")


@needs_kernels
def test_binding_signatures():
  """The handlers decode what Python sends: registered for the CPU, they miss nothing but the CUDA stream."""
  script = """
    import jax, numpy as np
    import jaxdnn
    from jaxdnn import _extension
    attributes = {k: np.asarray(v, np.int64) for k, v in dict(window=[2], stride=[1], low=[0], dilation=[1]).items()}
    x, y = jax.ShapeDtypeStruct((2, 5, 3), np.float32), jax.ShapeDtypeStruct((2, 4, 3), np.float32)
    index = jax.ShapeDtypeStruct((2, 4, 3), np.uint8)
    for name, handler in _extension.native.handlers().items():
      jax.ffi.register_ffi_target(name, handler, platform="cpu")
    for name, ins, outs, more in (
      ("max_pool", [x], [y], {}),
      ("max_pool", [x], [y, index], {}),
      ("pool_gather", [x, index], [y], {}),
      ("pool_scatter", [y, index], [x], {}),
      ("avg_pool", [x], [y], {"include_pad": True}),
      ("avg_pool_bwd", [y], [x], {"include_pad": False}),
    ):
      try:
        operands = [np.zeros(a.shape, a.dtype) for a in ins]
        jax.ffi.ffi_call(f"jaxdnn.{name}.v1", outs)(*operands, **attributes, **more)
      except jax.errors.JaxRuntimeError as e:
        print(name, str(e).replace(chr(10), " "))
  """
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
  out = subprocess.run(command, capture_output=True, text=True, env=environment)
  lines = out.stdout.splitlines()
  assert len(lines) == 6, out.stdout + out.stderr
  for line in lines:
    # The stream is operand 0; a wrong attribute, or a wrong number of anything, would be named too.
    assert "(bad operands at: 0) " in line and "Failed to get platform stream" in line, line


# Errors --------------------------------------------------------------------------------------------------------------

X = np.zeros((2, 8, 8, 3), np.float32)


@pytest.mark.parametrize("name", ["max_pool", "avg_pool"])
@pytest.mark.parametrize(
  "x, args, error, message",
  [
    (X, {"window": 2}, TypeError, r"window must be a sequence of 1 to 3 integers, got 2"),
    (X, {"window": "22"}, TypeError, r"window must be a sequence of 1 to 3 integers, got '22'"),
    (X, {"window": ()}, ValueError, r"window must have 1 to 3 entries.*got \(\)"),
    (X, {"window": (1, 1, 1, 1)}, ValueError, r"window must have 1 to 3 entries.*got \(1, 1, 1, 1\)"),
    (X, {"window": (2, 0)}, ValueError, r"window must be positive, got \(2, 0\)"),
    (X, {"window": (2, 1.5)}, TypeError, r"window must be an int or a sequence of 2 ints, got \(2, 1.5\)"),
    (X[0, 0, 0], {"window": (2,)}, ValueError, r"window \(2,\) needs x of shape .* 1 spatial, channels\], got \(3,\)"),
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


def test_avg_pool_of_integers():
  with pytest.raises(TypeError, match=r"avg_pool: x must be floating-point, got int32"):
    jaxdnn.avg_pool(np.zeros((4, 1), np.int32), (2,))


# On the GPU ----------------------------------------------------------------------------------------------------------


def repeated(times):
  """Into poisoned memory, with bitwise equal results."""
  return lambda f: functools.partial(assert_repeatable, f, repeats=times)


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels(case, dtype):
  check_max(case, sample(case.shape, dtype), run=repeated(2))
  check_avg(case, dtype, True, run=repeated(2))
  check_avg(case, dtype, False, run=repeated(2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet", "dilation_meets_stride", "more_than_255_cells"])
def test_kernels_repeat(name):
  case = next(c for c in POOL if c.name == name)
  check_max(case, sample(case.shape, "bfloat16"), run=repeated(10))
  check_avg(case, "bfloat16", False, run=repeated(10))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
  "name", ["channels5", "channels6", "dilation_meets_stride", "negative", "all_padding", "more_than_255_cells"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_stay_in_bounds(name, dtype):
  case = next(c for c in POOL if c.name == name)
  x = jnp.asarray(sample(case.shape, dtype))
  for f in (max_pool(case), avg_pool(case), avg_pool(case, False)):
    y, vjp = jax.vjp(f, x)
    jax.block_until_ready((vjp(y), jax.jvp(f, (x,), (x,))))


@pytest.mark.gpu
def test_more_than_2_31_elements():
  """Offsets past 32 bits, in the forward pass and in the gradient."""
  x = jnp.zeros((5, 2**29, 1), jnp.bfloat16).at[-1, -1].set(1)
  y, vjp = jax.vjp(lambda x: jaxdnn.max_pool(x, (2,), stride=2), x)
  assert y[-1, -1, 0] == 1 and y.astype(jnp.float32).sum() == 1
  dx = vjp(y)[0]
  assert dx[-1, -1, 0] == 1 and dx.astype(jnp.float32).sum() == 1
