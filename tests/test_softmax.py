"""Softmax and log-softmax against NumPy in float64: lengths, axes, special values, derivatives, compositions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from jaxdnn import _extension
from numerics import DEVICES, DTYPES, ROUNDOFF, assert_close, assert_repeatable, exact, sample
from softmax_cases import AXES, EMPTY, LENGTHS, Case
from softmax_oracle import BOTH, FUNCTIONS, oracle, oracle_jvp, oracle_vjp


def check_cases(op, cases, dtype):
  """Value, cotangent map and tangent map of every case, all in one compilation."""
  xs = [2 * sample(c.shape, dtype, seed) for seed, c in enumerate(cases)]
  gs = [sample(c.shape, dtype, seed + 1) for seed, c in enumerate(cases)]

  def maps(case, x, g):
    f = functools.partial(FUNCTIONS[op], axis=case.axis)
    y, vjp = jax.vjp(f, x)
    return y, vjp(g)[0], jax.jvp(f, (x,), (g,))[1]

  results = jax.jit(lambda xs, gs: list(map(maps, cases, xs, gs)))(xs, gs)

  for case, x, g, (y, dx, dy) in zip(cases, xs, gs, results, strict=True):
    axes = case.axis if isinstance(case.axis, tuple) else (case.axis,)
    n = max(1, math.prod(case.shape[a] for a in axes))
    want = oracle(op, x, case.axis)
    # The argument of exp carries a rounding of x - m, and log_softmax is a difference of terms of its own magnitude.
    assert_close(y, want, dtype, terms=n, scale=np.abs(want).max(initial=1))
    # The derivatives are functions of the rounded output, so that is what the oracle takes.
    scale = np.abs(exact(g)).max(initial=1) * (1 + np.sqrt(n) / 8)
    assert_close(dx, oracle_vjp(op, y, g, case.axis), dtype, terms=n, scale=scale)
    assert_close(dy, oracle_jvp(op, y, g, case.axis), dtype, terms=n, scale=scale)


# Values and first derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BOTH)
def test_lengths(op, dtype):
  lengths = LENGTHS if jax.default_backend() == "gpu" else LENGTHS[::5]
  check_cases(op, [Case((1 + n % 3, n)) for n in lengths], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BOTH)
def test_axes_and_empty_arrays(op, dtype):
  few = jax.default_backend() != "gpu" and dtype != "float32"
  check_cases(op, AXES[4::4] if few else AXES + EMPTY, dtype)


@pytest.mark.parametrize("op", BOTH)
def test_unaligned_slice(op):
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(sample((3, 1001, 8), "bfloat16"))
  for axis in (0, 1):
    sliced = jax.jit(lambda x, axis=axis: FUNCTIONS[op](x[1], axis))(x)
    np.testing.assert_array_equal(exact(sliced), exact(FUNCTIONS[op](x, axis + 1))[1])


def test_large_offset_keeps_the_log_of_the_sum():
  x = jnp.full((2, 8), 1e7, jnp.float32)
  np.testing.assert_allclose(exact(jaxdnn.log_softmax(x)), -np.log(8), rtol=1e-6)
  np.testing.assert_allclose(exact(jaxdnn.log_softmax(-x, 0)), -np.log(2), rtol=1e-6)
  np.testing.assert_array_equal(exact(jaxdnn.softmax(x)), 1 / 8)


# Special values ------------------------------------------------------------------------------------------------------

# Rows, and the class of each: what the docstrings promise.
INF, NAN = np.inf, np.nan
SPECIAL = [[-INF, 1, 2], [1, -INF, -INF], [-INF, -INF, -INF], [INF, 1, 2], [1, -INF, INF], [NAN, 1, 2], [1, 2, NAN]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 40, 41, 1100, 70000, pytest.param(600000, marks=pytest.mark.gpu)])
def test_special_values(dtype, length):
  """-inf is a class of probability 0; nothing but -inf, or any +inf or NaN, makes the whole row NaN."""
  rows = np.full((len(SPECIAL), length), -INF)
  rows[:, [0, length // 2, length - 1]] = SPECIAL
  x = jnp.asarray(rows, dtype)
  for op, f in FUNCTIONS.items():
    want = oracle(op, x)
    assert np.isnan(want[2:]).all() and not np.isnan(want[:2]).any()
    assert_close(f(x), want, dtype, terms=4, scale=4)
    assert_close(f(x.T, 0), want.T, dtype, terms=4, scale=4)
    want = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}[op](x.astype(jnp.float32))
    np.testing.assert_allclose(exact(f(x)), exact(want), rtol=2 * ROUNDOFF[dtype] + 1e-6, atol=ROUNDOFF[dtype])


@pytest.mark.parametrize("op", BOTH)
def test_gradient_at_minus_infinity_is_finite(op):
  x, w = jnp.array([[-INF, 1.0, 2.0]]), jnp.array([[3.0, 4.0, 5.0]])

  def loss(x):
    y = FUNCTIONS[op](x)
    return jnp.where(jnp.isfinite(y), w * y, 0).sum()

  assert np.isfinite(jax.grad(loss)(x)).all()
  assert np.isfinite(jax.hessian(loss)(x)).all()


@pytest.mark.parametrize("dtype, least", [("float32", -3.4028235e38), ("bfloat16", -3.3895e38), ("float16", -65504)])
def test_rows_filled_with_the_least_number(dtype, least):
  """What additive masks leave: a row of nothing but the least finite number is uniform, next to others it is 0."""
  x = jnp.asarray([[least] * 4, [least, 1, least, 1], [-least] * 4], dtype)
  want = [[0.25] * 4, [0, 0.5, 0, 0.5], [0.25] * 4]
  np.testing.assert_array_equal(exact(jaxdnn.softmax(x)), want)
  np.testing.assert_array_equal(
    exact(jaxdnn.softmax(jnp.tile(x, (1, 500)))), exact(jnp.asarray(np.tile(want, (1, 500)) / 500, dtype))
  )


# Derivatives and compositions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, axis, order", [("softmax", -1, 3), ("softmax", (0, 2), 2), ("log_softmax", 1, 2)])
def test_derivatives_of_every_order_and_mode(op, axis, order):
  x = jnp.asarray(sample((2, 3, 2), "float64"))
  check_grads(jax.jit(functools.partial(FUNCTIONS[op], axis=axis)), (x,), order=order, modes=("fwd", "rev"))


@pytest.mark.parametrize("op", BOTH)
def test_derivative_maps_are_differentiable_in_both_operands(op):
  f, x, t = FUNCTIONS[op], jnp.asarray(sample((3, 4), "float64")), jnp.asarray(sample((3, 4), "float64", 1))
  check_grads(jax.jit(lambda x, t: jax.jvp(f, (x,), (t,))[1]), (x, t), order=1, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda x, g: jax.vjp(f, x)[1](g)[0]), (x, t), order=1, modes=("fwd", "rev"))


@pytest.mark.parametrize("op", BOTH)
def test_vmap_of_value_and_of_gradient(op):
  f, x = FUNCTIONS[op], jnp.asarray(sample((2, 3, 4), "float64"))
  w = jnp.asarray(sample((2, 3, 4), "float64", 1))
  grad = jax.jit(jax.grad(lambda x, w: (w * f(x, 0)).sum()))
  for d in range(3):
    np.testing.assert_allclose(jax.vmap(f, d, d)(x), jnp.moveaxis(f(jnp.moveaxis(x, d, 0)), 0, d), rtol=1e-12)
    for dw in (0, 1, 2, None):
      wd = w.take(0, d) if dw is None else jnp.moveaxis(w, d, dw)
      each = [grad(x.take(i, d), wd if dw is None else w.take(i, d)) for i in range(x.shape[d])]
      np.testing.assert_allclose(jax.vmap(grad, (d, dw))(x, wd), jnp.stack(each), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("op", BOTH)
def test_hessian(op):
  x, w = jnp.asarray(sample((5,), "float64")), jnp.asarray(sample((5,), "float64", 1))
  y = oracle("softmax", x)
  jacobian = np.diag(y) - np.outer(y, y)
  # d²y_i = y_i (d_ij - y_j)(d_ik - y_k) - y_i J_jk, and d² log(y_i) = -J_jk.
  spread = np.eye(5) - y
  tensor = y[:, None, None] * (spread[:, :, None] * spread[:, None, :] - jacobian)
  want = np.tensordot(w, tensor if op == "softmax" else np.broadcast_to(-jacobian, (5, 5, 5)), 1)
  np.testing.assert_allclose(jax.hessian(lambda x: (w * FUNCTIONS[op](x)).sum())(x), want, atol=1e-12)


@pytest.mark.parametrize("op", BOTH)
def test_matches_jax_nn(op):
  x = jnp.asarray(sample((3, 4, 5), "float64"))
  mask = jnp.asarray(np.random.default_rng(0).random((3, 4, 5)) < 0.8)
  stock = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}[op]
  for axis in (-1, 1, (0, 2)):
    np.testing.assert_allclose(FUNCTIONS[op](x, axis), stock(x, axis), rtol=1e-12)
    np.testing.assert_allclose(FUNCTIONS[op](x, axis, where=mask), stock(x, axis, where=mask), rtol=1e-12)


@pytest.mark.parametrize("op", BOTH)
def test_scan_and_remat(op):
  f, x = FUNCTIONS[op], jnp.asarray(sample((3, 4), "float64"))
  step = jax.checkpoint(lambda c, _: (f(c), None))
  scanned = jax.grad(lambda x: jax.lax.scan(step, x, None, length=2)[0][:, 0].sum())(x)
  np.testing.assert_allclose(scanned, jax.grad(lambda x: f(f(x))[:, 0].sum())(x), rtol=1e-12)


@pytest.mark.mesh
@pytest.mark.parametrize("op", BOTH)
def test_explicit_mesh_keeps_every_other_axis_sharded(op):
  f, mesh = FUNCTIONS[op], jax.make_mesh((DEVICES // 2, 2), ("a", "b"))
  x, mask = jnp.asarray(sample((8, 3, 4), "float64")), jnp.asarray(np.arange(4) != 2)
  w = jnp.asarray(sample((8, 3, 4), "float64", 1))
  loss = lambda x, w, **k: jnp.where(mask, w * f(x, 1, **k), 0).sum()  # noqa: E731
  want = f(x, 1), jax.grad(loss)(x, w), jax.grad(functools.partial(loss, where=mask))(x, w)
  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, P("a", None, "b")), jax.device_put(w, P("a", None, "b"))
    got = f(sharded[0], 1), jax.grad(loss)(*sharded), jax.grad(functools.partial(loss, where=mask))(*sharded)
    assert jax.typeof(got[0]).sharding.spec == P("a", None, "b")
    for g, e in zip(got, want, strict=True):
      np.testing.assert_allclose(g, e, rtol=1e-12)
    text = jax.jit(jax.grad(loss)).lower(*sharded).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    with pytest.raises(ValueError, match="sharded over mesh axis 'b' along dimension 2"):
      f(sharded[0], -1)


@pytest.mark.parametrize("op", BOTH)
def test_only_the_output_is_kept(op):
  x = jnp.zeros((3, 4), jnp.bfloat16)
  kept = jax.tree.leaves(jax.vjp(FUNCTIONS[op], x)[1])
  assert [(k.shape, k.dtype) for k in kept] == [((3, 4, 1), jnp.bfloat16)]


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("jaxdnn.softmax.v2" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_cuda_lowering_names_target_and_attributes():
  def text(f):
    x = jax.ShapeDtypeStruct((2, 3, 4), jnp.bfloat16)
    return jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()

  gradient = text(jax.grad(lambda x: jaxdnn.softmax(x, 1)[0, 0, 0]))
  assert "@jaxdnn.softmax.v2" in gradient and "log = false" in gradient and 'map = "softmax"' in gradient
  assert "transpose" not in gradient, "channels-first softmax must move nothing"
  log = lambda x: jaxdnn.log_softmax(x)[0, 0, 0]  # noqa: E731
  assert "log = true" in text(log) and 'map = "log_softmax_vjp"' in text(jax.grad(log))
  assert 'map = "log_softmax_jvp"' in text(lambda x: jax.jvp(jaxdnn.log_softmax, (x,), (x,))[1])


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
def test_errors(op):
  f, x = FUNCTIONS[op], jnp.zeros((2, 3))
  with pytest.raises(TypeError, match=rf"{op}: x must be floating-point, got int32"):
    f(jnp.arange(3, dtype=jnp.int32))
  for axis in (2, -3, (0, 2), ()):
    with pytest.raises(ValueError, match=rf"{op}: axis must name axes of an array of rank 2, got "):
      f(x, axis)
  with pytest.raises(ValueError, match=r"rank 0, got -1"):
    f(jnp.float32(1))
  with pytest.raises(ValueError, match=r"names the same axis of an array of rank 2 twice, got \(1, -1\)"):
    f(x, (1, -1))
  for axis in (1.0, None, (0, "1")):
    with pytest.raises(TypeError, match="axis must be an integer or a tuple of integers, got"):
      f(x, axis)
  with pytest.raises(TypeError, match="where must be boolean, got float"):
    f(x, where=jnp.ones((2, 3)))
  for shape in [(2,), (3, 2), (1, 2, 3)]:
    with pytest.raises(ValueError, match=r"where of shape \(.*\) does not broadcast to x of shape \(2, 3\)"):
      f(x, where=jnp.ones(shape, bool))


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(1, 4097, 128))
@pytest.mark.parametrize("op", BOTH)
def test_every_length(op, first):
  for dtype in DTYPES:
    check_cases(op, [Case((1 + n % 3, n)) for n in range(first, first + 128)], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [1, 3, 32, 100])
@pytest.mark.parametrize("op", BOTH)
def test_every_short_column(op, inner):
  for dtype in DTYPES:
    check_cases(op, [Case((2, n, inner), 1) for n in (*range(1, 70), 255, 513, 1025, 4097)], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [2, 7, 10, 600, 3000, 4101])
@pytest.mark.parametrize("op", BOTH)
def test_few_elements_in_many_columns(op, inner):
  for dtype in DTYPES:
    check_cases(op, [Case((2 if inner > 20 else 501, n, inner), 1) for n in (*range(1, 18), 24, 33)], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BOTH)
def test_rows_and_columns_that_no_cluster_holds(op, dtype):
  """Few and long, of whole vectors and odd."""
  rows = [Case((1, 1 << 20)), Case((2, 600001)), Case((3, 270000))]
  columns = [Case((2, 20000, 64), 1), Case((3, 9001, 100), 1), Case((2, 10000, 13), 1), Case((1, 30000, 7), 1)]
  check_cases(op, rows + columns, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BOTH)
def test_kernels_write_everything_and_repeat(op, dtype):
  for shape in [(5001, 33), (3, 1001), (2, 4096), (2, 100000), (2, 99999), (2, 600001)]:
    check_repeatable(op, shape, -1, dtype)
  for shape in [(3, 19, 4096), (3, 200, 48), (2, 20000, 64)]:
    check_repeatable(op, shape, 1, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("op", BOTH)
def test_kernels_under_the_sanitizer(op):
  for shape, axis in [((3, 77), -1), ((3, 1000), -1), ((1, 33000), -1), ((2, 21, 35), 1), ((2, 300, 40), 1)]:
    check_repeatable(op, shape, axis, "float32", repeats=2)


def check_repeatable(op, shape, axis, dtype, repeats=10):
  x, g = jnp.asarray(sample(shape, dtype)), jnp.asarray(sample(shape, dtype, 1))
  f = functools.partial(FUNCTIONS[op], axis=axis)
  y = assert_repeatable(f, x, repeats=repeats)
  assert_close(y, oracle(op, x, axis), dtype, terms=shape[axis], scale=max(1, np.abs(exact(y)).max()))
  assert np.isfinite(exact(assert_repeatable(lambda x, g: jax.vjp(f, x)[1](g)[0], x, g, repeats=repeats))).all()
  assert np.isfinite(exact(assert_repeatable(lambda x, t: jax.jvp(f, (x,), (t,))[1], x, g, repeats=repeats))).all()


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """Both in one row and in many: 64-bit offsets. The last row differs, so that a wrapped offset shows."""
  for shape in [(3, 2**30 - 8), (2**22 + 1, 520)]:
    x = jnp.zeros(shape, jnp.bfloat16).at[-1, -1].set(20.0)
    y, vjp = jax.vjp(jaxdnn.softmax, x)
    last, others = 1 / (1 + (shape[1] - 1) * np.exp(-20.0)), 1 / shape[1]
    np.testing.assert_allclose(exact(y[-1, -1]), last, rtol=1e-2)
    np.testing.assert_allclose(exact(y[0, :9]), others, rtol=1e-2)
    np.testing.assert_allclose(exact(y[-2, -9:]), others, rtol=1e-2)
    (dx,) = vjp(jnp.zeros_like(y).at[-1, -1].set(1).at[-2, -1].set(1))
    np.testing.assert_allclose(exact(dx[-2, -1]), others * (1 - others), rtol=2e-2)
    np.testing.assert_allclose(exact(dx[-1, -1]), last * (1 - last), rtol=2e-2, atol=1e-5)
    assert (exact(dx[0, :9]) == 0).all()
    del x, y, dx, vjp
