"""Batch normalization against NumPy in float64: layouts, values, first derivatives, special values, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from batch_norm_cases import EMPTY, FIRST, LAST, Case
from batch_norm_oracle import ACTIVATIONS, Oracle, operands
from jaxdnn import _extension
from numerics import ACCUMULATOR, DTYPES, ROUNDOFF, assert_close, assert_repeatable, exact, sample

ON_GPU = jax.default_backend() == "gpu"
BUILT = "jaxdnn.batch_norm_apply.v1" in _extension.TARGETS


def check_cases(cases, dtype, **options):
  """Value, statistics, cotangents and tangents of every case, all in one compilation."""
  wide = ACCUMULATOR[dtype]
  given = [operands(c, dtype, seed) for seed, c in enumerate(cases)]
  tangents = [
    (sample(c.shape, dtype, seed + 7), sample(c.channels, wide, seed + 8), sample(c.channels, wide, seed + 9))
    for seed, c in enumerate(cases)
  ]

  def maps(case, primals, tangents):
    def f(*primals):
      y, stats = jaxdnn.batch_norm(*primals, axis=case.axis, **options)
      return y, stats.mean, stats.var

    out, vjp = jax.vjp(f, *primals)
    return out, vjp((tangents[0], *map(jnp.zeros_like, out[1:]))), jax.jvp(f, primals, tangents)[1]

  results = jax.jit(lambda given, tangents: list(map(maps, cases, given, tangents)))(given, tangents)

  for case, primals, (t, *tparameters), (values, cotangents, forward) in zip(
    cases, given, tangents, results, strict=True
  ):
    oracle, n = Oracle(case, *primals, activation=options.get("activation")), max(1, case.terms)
    # Errors of the mean, of the deviations, and of what cancels where few entries make a channel.
    size = np.abs(oracle.scale * oracle.rstd).max(initial=0)
    spread = np.abs(oracle.xhat).max(initial=1)
    assert_close(values[0], oracle.value(), dtype, terms=n, scale=8 * (1 + size + spread))
    assert_close(values[1], oracle.channels(oracle.mean), wide, terms=n, scale=4)
    assert_close(values[2], oracle.channels(oracle.var), wide, terms=n, scale=8)
    scale = 4 * (1 + size) * spread**2 * np.abs(exact(t)).max(initial=1)
    dx, dscale, dbias, _ = oracle.vjp(t)
    assert_close(cotangents[0], dx, dtype, terms=n, scale=scale)
    assert_close(cotangents[1], dscale, wide, terms=n, scale=scale * np.sqrt(n))
    assert_close(cotangents[2], dbias, wide, terms=n, scale=scale * np.sqrt(n))
    dy, dmean, dvar = oracle.jvp(exact(t), *map(exact, tparameters))
    # Forward, an intermediate result is rounded to the data's type.
    rounding = ROUNDOFF[dtype] / ROUNDOFF[wide]
    assert_close(forward[0], dy, dtype, terms=n, scale=scale * rounding)
    assert_close(forward[1], dmean, wide, terms=n, scale=4)
    assert_close(forward[2], dvar, wide, terms=n, scale=8 * spread)


# Values and first derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", [LAST, FIRST], ids=["channels_last", "channels_first"])
def test_values_and_derivatives(cases, dtype):
  few = not ON_GPU and dtype != "float32"
  check_cases(cases[2::8] if few else cases[::2] if not ON_GPU else cases, dtype)


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a])
def test_activations(activation):
  cases = (LAST[4], LAST[16], FIRST[1], FIRST[8])
  for dtype in DTYPES if ON_GPU else ("float32",):
    check_cases(cases, dtype, activation=activation)


def test_empty_arrays():
  for case in EMPTY:
    x, scale, bias = operands(case, "float32")
    (y, stats), vjp = jax.vjp(lambda *a, case=case: jaxdnn.batch_norm(*a, axis=case.axis), x, scale, bias)
    assert y.shape == case.shape and stats.mean.shape == case.channels and stats.entries == case.terms
    assert not np.any(stats.mean) and not np.any(stats.var)
    for cotangent in vjp(jax.tree.map(jnp.ones_like, (y, stats))):
      np.testing.assert_array_equal(cotangent, np.zeros(cotangent.shape))


def test_unaligned_slice():
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(sample((3, 1001, 9), "bfloat16"))
  for axis in (0, 1):
    f = lambda x, axis=axis: jaxdnn.batch_norm(x, axis=axis)[0]  # noqa: E731
    np.testing.assert_allclose(exact(jax.jit(lambda x, f=f: f(x[1]))(x)), exact(f(x[1])), atol=0.05)


@pytest.mark.parametrize("activation", [None, "relu", "tanh"])
def test_residual(activation):
  """Forward, and backward with the residual's own cotangent."""
  for case in (LAST[3], LAST[18], FIRST[1], FIRST[8]):
    for dtype in ("float32", "bfloat16"):
      x, scale, bias = operands(case, dtype)
      z, g = sample(case.shape, dtype, 5), sample(case.shape, dtype, 6)

      def f(x, scale, bias, z, case=case):
        return jaxdnn.batch_norm(x, scale, bias, axis=case.axis, activation=activation, residual=z)[0]

      y, vjp = jax.vjp(jax.jit(f), x, scale, bias, z)
      oracle = Oracle(case, x, scale, bias, activation=activation, residual=z)
      assert_close(y, oracle.value(), dtype, terms=case.terms, scale=32)
      slack = 32 * ROUNDOFF[dtype] / ROUNDOFF["float32"]
      got = dict(zip(("dx", "dscale", "dbias", "dz"), vjp(jnp.asarray(g)), strict=True))
      for (name, value), want in zip(got.items(), oracle.vjp(g), strict=True):
        kind, terms = (dtype, 1) if name in ("dx", "dz") else ("float32", case.terms**2)
        assert_close(value, want, kind, terms=terms, scale=slack)


def test_mean_is_far_from_zero():
  """A mean of 1e4 with a deviation of 1e-2: nothing cancels, and y errs by no more than what the mean is rounded by."""
  small = Case((100, 64)), Case((20, 6, 7, 7), 1)
  for case in (*small, Case((5000, 64)), Case((3000, 7)), Case((30, 5, 20, 20), 1), Case((40, 6, 7, 7), 1)):
    x = (1e4 + 1e-2 * sample(case.shape, "float64")).astype(np.float32)
    y, stats = jax.jit(functools.partial(jaxdnn.batch_norm, axis=case.axis, epsilon=0.0))(x)
    oracle = Oracle(case, x, np.ones(case.channels), np.zeros(case.channels), epsilon=0.0)
    np.testing.assert_allclose(stats.mean, oracle.channels(oracle.mean), rtol=2 * ROUNDOFF["float32"])
    np.testing.assert_allclose(stats.var, oracle.channels(oracle.var), rtol=1e-4)
    error = np.abs(exact(y) - oracle.value()).max()
    assert error < 1.2e4 * ROUNDOFF["float32"] / 0.9e-2


# Special values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_entry_for_each_channel(dtype):
  """The variance is 0 and the bias comes out, without NaN in any derivative; a running variance keeps its value."""
  x, bias = sample((1, 5), dtype), sample((5,), ACCUMULATOR[dtype])
  f = lambda x: jaxdnn.batch_norm(x, bias=bias)  # noqa: E731
  y, stats = f(x)
  np.testing.assert_array_equal(exact(y[0]), exact(bias.astype(x.dtype)))
  np.testing.assert_array_equal(exact(stats.mean), exact(x[0]))
  assert not np.any(stats.var) and stats.entries == 1
  np.testing.assert_allclose(exact(jax.grad(lambda x: f(x)[0].sum())(jnp.asarray(x))), 0, atol=1e-3)
  for convention in ("flax", "torch"):
    mean, var = jaxdnn.update_running_stats((jnp.zeros(5), jnp.ones(5)), stats, momentum=0.5, convention=convention)
    assert np.isfinite(mean).all()
    np.testing.assert_allclose(var, 0.5)


def test_constant_input_has_finite_derivatives():
  x = jnp.full((6, 3), 2.0)
  loss = lambda x: jnp.sum(jnp.sin(jaxdnn.batch_norm(x, activation="relu")[0]))  # noqa: E731
  assert np.isfinite(jax.grad(loss)(x)).all() and np.isfinite(jax.hessian(loss)(x)).all()


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_value_spoils_its_channel_only(axis, value):
  for shape in ((5, 24, 24), (5, 20, 300), (5, 20, 301)):
    x = sample(shape, "float32")
    x[2, 11, 7] = value
    y = exact(jaxdnn.batch_norm(x, axis=axis)[0])
    bad = np.zeros(shape, bool)
    bad[(..., 7) if axis == -1 else (slice(None), 11)] = True
    assert np.isnan(y[bad]).all() and np.isfinite(y[~bad]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_is_off_where_its_output_is_zero(dtype):
  """The backward pass computes on which side of 0 the pre-activation is once more, and must find the same."""
  for case in (Case((500, 24)), Case((100, 24)), Case((3, 5, 20, 20), 1), Case((3, 5, 8, 9), 1)):
    x, scale, _ = operands(case, dtype)
    x = np.round(x.astype(np.float32)).astype(x.dtype)
    relu = dict(axis=case.axis, activation="relu")
    y, stats = jaxdnn.batch_norm(x, scale, **relu)
    f = functools.partial(jaxdnn.batch_norm_inference, mean=stats.mean, var=stats.var, scale=scale, **relu)
    (dx,) = jax.vjp(f, jnp.asarray(x))[1](jnp.ones_like(y))
    np.testing.assert_array_equal(exact(dx) != 0, exact(y) > 0)


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not BUILT, reason="built without the CUDA kernels")
@pytest.mark.parametrize("axis", [-1, 1])
def test_cuda_program(axis):
  def text(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  shape = (4, 6, 6, 8) if axis == -1 else (4, 8, 6, 6)
  f = lambda x: jaxdnn.batch_norm(x, axis=axis, activation="relu")[0]  # noqa: E731
  gradient = text(lambda x: jax.vjp(f, x)[1](x), shape)
  for target in ("train", "train_gradient"):
    assert gradient.count(f"@jaxdnn.batch_norm_{target}.v1") == 1
  # Of a large x, the derivative alone asks for the statistics alone.
  large = text(lambda x: jax.vjp(f, x)[1](x), (4 << 14, *shape[1:]))
  for target, count in {"statistics": 1, "train": 0, "apply": 0, "sums": 1, "gradient": 1}.items():
    assert large.count(f"@jaxdnn.batch_norm_{target}.v1") == count
  assert 'activation = "relu"' in gradient and 'slot = "outer"' in large
  assert "transpose" not in gradient, "neither layout may move"
  tangent = text(lambda x: jax.jvp(f, (x,), (x,)), shape)
  assert "@jaxdnn.batch_norm_moments.v1" in tangent and "@jaxdnn.batch_norm_tangent.v1" in tangent


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors():
  x = jnp.zeros((2, 3, 4), jnp.float32)
  f = jaxdnn.batch_norm
  with pytest.raises(TypeError, match="batch_norm: x must be floating-point, got int32"):
    f(jnp.zeros((2, 3), jnp.int32))
  with pytest.raises(ValueError, match="axis must name axes of an array of rank 3, got 3"):
    f(x, axis=3)
  with pytest.raises(ValueError, match=r"names the same axis of an array of rank 3 twice, got \(1, -2\)"):
    f(x, axis=(1, -2))
  with pytest.raises(ValueError, match=r"scale must have shape \(4,\), x \(2, 3, 4\) along axis \(2,\), got \(3,\)"):
    f(x, jnp.zeros(3, jnp.float32))
  with pytest.raises(TypeError, match="bias must be floating-point, got int32"):
    f(x, None, jnp.zeros(4, jnp.int32))
  with pytest.raises(ValueError, match=r"residual must have the shape of x, \(2, 3, 4\); got \(2, 3\)"):
    f(x, residual=jnp.zeros((2, 3), jnp.float32))
  with pytest.raises(TypeError, match="residual must have the type of x, float32; got bfloat16"):
    f(x, residual=x.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match=r"activation must be None or one of .*, got 'rleu'"):
    f(x, activation="rleu")
  with pytest.raises(ValueError, match="epsilon must not be negative, got -1"):
    f(x, epsilon=-1.0)
  with pytest.raises(TypeError, match="where must be boolean, got float32"):
    f(x, where=x)
  with pytest.raises(ValueError, match=r"where must have size 1 along axis -1, got shape \(2, 3, 4\) for x"):
    f(x, where=x == 0)
  with pytest.raises(ValueError, match=r"batch_norm_inference: var must have shape \(4,\)"):
    jaxdnn.batch_norm_inference(x, jnp.zeros(4, jnp.float32), jnp.zeros((4, 1), jnp.float32))
  with pytest.raises(ValueError, match="convention must be 'flax' or 'torch', got 'cudnn'"):
    jaxdnn.update_running_stats((x, x), f(x)[1], momentum=0.1, convention="cudnn")


# On a GPU ------------------------------------------------------------------------------------------------------------


def check_repeatable(case, dtype, repeats=10, **options):
  x, scale, bias = (jnp.asarray(a) for a in operands(case, dtype))
  g = jnp.asarray(sample(case.shape, dtype, 3))
  f = lambda *a: jaxdnn.batch_norm(*a, axis=case.axis, **options)  # noqa: E731
  y, _ = assert_repeatable(f, x, scale, bias, repeats=repeats)
  assert np.isfinite(exact(y)).all()
  vjp = lambda *a: jax.vjp(lambda *a: f(*a)[0], *a[:-1])[1](a[-1])  # noqa: E731
  jvp = lambda *a: jax.jvp(lambda x: f(x, *a[1:-1])[0], a[:1], a[-1:])[1]  # noqa: E731
  for linear in (vjp, jvp):
    for result in jax.tree.leaves(assert_repeatable(linear, x, scale, bias, g, repeats=repeats)):
      assert np.isfinite(exact(result)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_everything_and_repeat(dtype):
  for case in (Case((5000, 64)), Case((3001, 7)), Case((300, 2050)), Case((9, 33, 17, 17), 1), Case((9, 33, 7, 7), 1)):
    check_repeatable(case, dtype, activation="relu")
  check_repeatable(Case((3001, 24)), dtype, where=jnp.asarray(np.arange(3001) % 3 != 0)[:, None], activation="silu")


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_under_the_sanitizer(dtype):
  last = Case((77, 7)), Case((40, 72)), Case((300, 72))
  for case in (*last, Case((3, 5, 17, 17), 1), Case((3, 6, 7, 7), 1), Case((2, 3, 16, 20), 1), Case((9, 3, 16, 20), 1)):
    check_repeatable(case, dtype, repeats=2, activation="relu")
  check_repeatable(Case((77, 7)), dtype, repeats=2, where=jnp.asarray(np.arange(77) % 3 != 0)[:, None])


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(1, 520, 40))
def test_every_width(first):
  for dtype in ("float32", "bfloat16"):
    check_cases([Case((3 + c % 50, c)) for c in range(first, first + 40)], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_that_see_to_their_channels_alone(dtype):
  """Of one vector a thread and more, in both layouts, whole and ragged, with a rest of the tile and without."""
  last = [Case((rows, c)) for rows in (1, 8, 16, 17, 65, 129, 600) for c in (8, 40, 1000)]
  first = [Case((n, 5, s), 1) for n in (1, 33) for s in (2, 9, 49, 64, 289)]
  check_cases([*last, *first, Case((3, 12, 24), (0, 2))], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clusters_that_see_to_their_channels_alone(dtype):
  """Of two blocks and more, the last with fewer rows, with a tile that is not whole; of several problems at once."""
  check_cases([Case((300, 40)), Case((1030, 24)), Case((2500, 8)), Case((3, 700, 24), (0, 2))], dtype)
  check_cases([Case((5000, 16))], dtype, activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_than_is_on_its_way_at_a_time(dtype):
  check_cases([Case((150_000, 64)), Case((48, 16, 112, 112), 1)], dtype)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """64-bit offsets, in both layouts: the last channel differs, so that a wrapped offset shows."""

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def alternating(shape, axis):
    row, channel = (jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in (0 if axis == -1 else 2, axis % len(shape)))
    last = (channel == shape[axis] - 1) & (shape[axis] > 1)
    return jnp.where(last, 3, 1 - 2 * (row % 2)).astype(jnp.bfloat16)

  for shape, axis in (((2**25 + 3, 65), -1), ((5, 3, 2**27 + 2**20), 1), ((2**31 + 11, 1), -1)):
    x = alternating(shape, axis)
    (y, stats), vjp = jax.vjp(jax.jit(functools.partial(jaxdnn.batch_norm, axis=axis)), x)
    assert stats.entries == np.float32(np.prod(shape) // shape[axis])
    np.testing.assert_allclose(exact(stats.mean[0]), 0, atol=1e-6)
    np.testing.assert_allclose(exact(stats.var[0]), 1, rtol=1e-5)
    if shape[axis] > 1:
      assert stats.mean[-1] == 3 and stats.var[-1] == 0
    assert jax.jit(lambda x, y: jnp.where(x == 3, y == 0, jnp.abs(y - x) < 0.01).all())(x, y)
    del x
    (dx,) = vjp((y, jax.tree.map(jnp.zeros_like, stats)))
    # y is constant in directions along x, but for epsilon.
    assert jnp.abs(dx).max() < 0.01
    del y, dx, vjp


def test_running_stats_errors():
  _, stats = jaxdnn.batch_norm(jnp.ones((2, 3)))
  update = functools.partial(jaxdnn.update_running_stats, batch=stats, momentum=0.9, convention="flax")
  with pytest.raises(TypeError, match="running mean must be floating-point, got int"):
    update((jnp.zeros(3, int), jnp.ones(3)))
  with pytest.raises(ValueError, match=r"running variance must have the batch's shape \(3,\), got \(1,\)"):
    update((jnp.zeros(3), jnp.ones(1)))
  for pair in (jnp.zeros(3), None, (jnp.zeros(3),)):
    with pytest.raises(TypeError, match="running must be a pair of arrays"):
      update(pair)
  with pytest.raises(TypeError, match="batch must be the statistics that batch_norm returns, got tuple"):
    update((jnp.zeros(3), jnp.ones(3)), batch=tuple(stats))


def test_arguments_of_the_wrong_type():
  x = jnp.ones((2, 3))
  with pytest.raises(TypeError, match="batch_norm: epsilon must be a number, got 'a'"):
    jaxdnn.batch_norm(x, epsilon="a")
  with pytest.raises(ValueError, match="batch_norm: activation must be None or one of"):
    jaxdnn.batch_norm(x, activation=["relu"])
  one = jax.vmap(lambda x: jaxdnn.batch_norm(x, axis_name=["i"])[0], axis_name="i")(x[None])
  np.testing.assert_array_equal(one[0], jaxdnn.batch_norm(x)[0])
