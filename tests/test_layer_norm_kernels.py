"""The CUDA kernels of layer norm and RMS norm, by what decides between them: lengths, alignment, numbers of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from layer_norm_cases import WIDE, Case
from layer_norm_oracle import ADD, BOTH, EPSILON, NORMS, check_cases, oracle, project, statistics
from numerics import ACCUMULATOR, DTYPES, assert_close, assert_repeatable, exact, sample


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(1, 2049, 256))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(first, dtype):
  step = 1 if dtype in ("float32", "bfloat16") else 7
  check_cases("layer", [Case(1 + n % 5, n) for n in range(first, first + 256, step)], dtype, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_many_short_rows(kind, residual):
  """So many that the kernels take them which fill the device."""
  cases = [Case(70001, 40), Case(69999, 64), Case(90000, 24), Case(20001, 200)]
  check_cases(kind, cases, "bfloat16", residual=residual, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BOTH)
def test_more_rows_than_one_kernel_takes(kind, dtype):
  """Rows of whole vectors, so many that blocks leave partial sums of the parameters' gradients."""
  lengths = (24, 64, 136, 200, 264, 520, 640, 776, 1032, 1152, 1288, 2056, 4104, 8200)
  check_cases(kind, [Case(1031, n) for n in lengths], dtype, tangent=False)
  check_cases(kind, [Case(4501, 776), Case(4501, 1032), Case(66, 40968)], dtype, residual=True, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", BOTH)
def test_rows_that_all_run_at_once(kind, dtype):
  """By blocks, and by clusters of blocks that have 32, 64 or 128 bytes to a thread; and some rows too many."""
  rows_of_bytes = {
    528: (131,), 2048: (133, 1057), 4096: (133, 1057), 16384: (3, 265), 16400: (119,), 32768: (60, 133, 265),
    49152: (119,), 65536: (15, 133), 131072: (7, 30, 60), 262144: (7, 30), 524288: (3,), 1048576: (3,),
  }  # fmt: skip
  cases = [Case(r, b // jnp.dtype(dtype).itemsize) for b, rows in rows_of_bytes.items() for r in rows]
  for i, case in enumerate(cases):
    x, scale, bias = sample(case, dtype, i), sample((case.n,), "float32", i + 1), sample((case.n,), "float32", i + 2)
    h, _ = statistics(kind, x, EPSILON[kind])
    want = h * exact(scale) + exact(bias)
    assert_close(jax.jit(NORMS[kind])(x, scale, bias), want, dtype, terms=case.n, scale=2 * np.abs(want).max())
  check_cases(kind, [Case(9, 8192), Case(31, 24576), Case(65, 4096)], dtype, residual=True, tangent=False)
  check_cases(kind, [Case(9, 16384)], dtype, affine=False, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_a_block_to_each_row(kind, dtype):
  """One vector to a thread and two, in whole blocks and not; with all that a row may have beside it, and with less."""
  norm, add = NORMS[kind], ADD[kind]

  def results(x, r, scale, bias):
    parameters = (scale, bias) if kind == "layer" else (scale,)
    return (
      (norm(x, *parameters), norm(x, *parameters, zero_centered=True), norm(x, scale), norm(x, bias=bias)),
      add(x, r, *parameters),
    )

  length = 16 // jnp.dtype(dtype).itemsize
  sizes = [(1, 33), (7, 64), (700, 65), (132, 200), (264, 511), (3, 512), (132, 513), (9, 1000), (265, 1024)]
  for rows, vectors in sizes:
    shape, wide = (rows, vectors * length), ACCUMULATOR[dtype]
    x, r = np.array(sample(shape, dtype)), sample(shape, dtype, 1)
    x[::5, 0] += 100  # so far from the mean that the moments are found again
    scale, bias = sample(shape[1:], wide, 2), sample(shape[1:], wide, 3)
    of_x, (of_sum, s) = jax.jit(results)(x, r, scale, bias)
    both = exact(bias) if kind == "layer" else 0.0
    h, hs = (statistics(kind, each, EPSILON[kind])[0] for each in (x, s))
    wants = (h * scale + both, h * (1 + exact(scale)) + both, h * scale, h + bias)
    for got, want in [*zip(of_x, wants, strict=True), (of_sum, hs * scale + both)]:
      assert_close(got, want, dtype, terms=shape[1], scale=2 * np.abs(want).max())
    assert_close(s, exact(x) + exact(r), dtype)
  check_cases(kind, [Case(5, 40 * length), Case(131, 1000 * length)], dtype, residual=True, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_many_rows_of_odd_lengths(kind, dtype):
  """So many that every block takes several slabs of the short ones, and every thread several of the long ones."""
  cases = [Case(900001, 1), Case(400001, 3), Case(100001, 12), Case(50001, 17), Case(20001, 127), Case(3001, 1001)]
  check_cases(kind, cases, dtype, tangent=False)
  cases = [Case(700003, 2), Case(400001, 4), Case(100003, 5), Case(100002, 6), Case(100001, 7), Case(200001, 8)]
  check_cases(kind, [*cases, Case(9001, 577), Case(9001, 1020)], dtype, tangent=False)
  check_cases(kind, [Case(901, 16383), Case(301, 20480), Case(301, 70000)], dtype, tangent=False)
  check_cases(kind, [Case(30001, 33), Case(901, 4097)], dtype, residual=True, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_many_long_rows_of_odd_lengths(kind, dtype):
  """So many that the ring of rows of every cluster goes around, and its parameters change."""
  check_cases(kind, [Case(401, 8193), Case(151, 65537), Case(67, 131071)], dtype, tangent=False)
  check_cases(kind, [Case(71, 70003)], dtype, affine=False, tangent=False)
  check_cases(kind, [Case(201, 10243), Case(67, 70001)], dtype, residual=True, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_many_long_rows(kind, dtype):
  """Whole vectors: of every size of clusters, more rows than the ring has stages, and fewer; odd numbers of rows."""
  cases = [Case(601, 8200), Case(301, 16384), Case(91, 40968), Case(35, 131072), Case(17, 262144)]
  check_cases(kind, cases, dtype, tangent=False)
  check_cases(kind, [Case(151, 20480)], dtype, affine=False, tangent=False)
  check_cases(kind, [Case(201, 12296), Case(17, 131072)], dtype, residual=True, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", BOTH)
def test_few_rows_in_shares(kind, dtype):
  """Threads with one vector, two or four, and blocks that share rows; every third row's sums are made once more."""
  lengths = {1: 8192, 3: 4104, 8: 16384, 17: 5128, 33: 12288, 64: 8200, 130: 5120, 250: 4096, 520: 2048, 1030: 1024}
  for i, (rows, n) in enumerate(lengths.items()):
    x, r = sample((rows, n), dtype, i), sample((rows, n), dtype, i + 1)
    parameters = [sample((n,), "float32", i + j) for j in range(2 if kind == "layer" else 1)]
    x[1::3, 0] = 60
    want = oracle(kind, x, *parameters)
    assert_close(jax.jit(NORMS[kind])(x, *parameters), want, dtype, terms=n, scale=2 * np.abs(want).max())
    y, s = jax.jit(ADD[kind])(x, r, *parameters)
    np.testing.assert_array_equal(exact(s), exact(x + r))
    want = oracle(kind, s, *parameters)
    assert_close(y, want, dtype, terms=n, scale=2 * np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(37, 256, 1152), (33, 512, 264), (33, 256, 3072), (70, 129, 1024), (3, 4096, 512)])
def test_problems_in_turns(shape, dtype):
  """So many rows that blocks take turns with their scales and shifts; and rows that do not fill the blocks."""
  problems, _, n = shape
  x, scale, shift = sample(shape, dtype), sample((problems, n), "float32", 1), sample((problems, n), "float32", 2)
  h, _ = statistics("layer", x, 1e-6)
  want = h * (1 + exact(scale))[:, None] + exact(shift)[:, None]
  got = jax.jit(lambda *a: jaxdnn.adaptive_layer_norm(*a, zero_centered=True))(x, scale, shift)
  assert_close(got, want, dtype, terms=n, scale=2 * np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_few_long_rows_without_clusters(kind, dtype):
  """More than half as many as there are multiprocessors: of vectors of 16 bytes, and of bf16 of 8."""
  cases = [Case(72, 8200), Case(70, 16384), *([Case(68, 8196)] if dtype == "bfloat16" else [])]
  check_cases(kind, cases, dtype, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_parameter_of_long_rows(dtype):
  """Blocks leave the sums of the one alone."""
  for rows, n in [(301, 12288), (151, 65537)]:
    x, g = jnp.asarray(sample((rows, n), dtype)), jnp.asarray(sample((rows, n), dtype, 1))
    h = statistics("layer", x, 1e-5)[0]
    size = np.abs(exact(g)).max() * (1 + np.abs(h).max())
    dscale = jax.grad(lambda p, x=x, g=g: jnp.vdot(jaxdnn.layer_norm(x, p), g))(jnp.ones(n, "float32"))
    dbias = jax.grad(lambda p, x=x, g=g: jnp.vdot(jaxdnn.layer_norm(x, bias=p), g))(jnp.ones(n, "float32"))
    assert_close(dscale, (exact(g) * h).sum(0), "float32", terms=rows + n, scale=size)
    assert_close(dbias, exact(g).sum(0), "float32", terms=rows, scale=size)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n"), [(301, 8200), (301, 16383), (99, 40001), (65, 65537), (33, 131072)])
def test_many_long_rows_with_a_mean_far_larger_than_the_deviation(rows, n):
  """As of few rows, which other kernels take."""
  x = (1e4 + 1e-2 * sample((rows, n), "float64")).astype(np.float32)
  g = sample((rows, n), "float32", 1)
  y, vjp = jax.vjp(lambda x: jaxdnn.layer_norm(x, epsilon=1e-12), x)
  h, rstd = statistics("layer", x, 1e-12)
  np.testing.assert_allclose(y, h, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(exact(vjp(g)[0]) / rstd, project("layer", exact(g), h, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [12288, 16383, 65537])
def test_gradient_of_nan_stays_in_its_row(n, dtype):
  """A thread that reads the ends of two rows at once keeps them apart."""
  x, g = sample((301, n), dtype), sample((301, n), dtype, 1)
  clean = np.asarray(jax.vjp(jaxdnn.rms_norm, x)[1](g)[0])
  x[7, 0], x[100, n - 1], g[200, 0], g[290, n - 1] = np.nan, np.inf, np.nan, np.inf
  dx = np.asarray(jax.vjp(jaxdnn.rms_norm, x)[1](g)[0])
  dirty = [7, 100, 200, 290]
  assert all(np.isnan(exact(dx[row])).any() for row in dirty)
  np.testing.assert_array_equal(exact(np.delete(dx, dirty, 0)), exact(np.delete(clean, dirty, 0)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_first_elements_far_from_the_mean(kind, dtype):
  """Kernels take a row's first element for its mean at first: of every third row its sums are made once more."""
  shapes = [(50001, 17), (3001, 1001), (901, 4097), (201, 10241), (151, 65537), (67, 131071)]
  rows = [sample(shape, dtype) for shape in shapes]
  for x in rows:
    x[1::3, 0] = 60
  results = jax.jit(lambda rows: [NORMS[kind](x) for x in rows])(rows)
  for x, y in zip(rows, results, strict=True):
    want = oracle(kind, x)
    assert_close(y, want, dtype, terms=x.shape[1], scale=2 * np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BOTH)
def test_wide_rows(kind, dtype):
  check_cases(kind, [Case(3, n) for n in WIDE], dtype, tangent=False)
  check_cases(kind, [Case(2, n) for n in WIDE[::4]], dtype, residual=True, tangent=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BOTH)
def test_kernels_write_everything_and_repeat(kind, dtype):
  for rows, n in [(700, 24), (300, 768), (1500, 768), (40, 4096), (300, 8192), (7, 1001), (70, 20480), (301, 16383)]:
    check_repeatable(kind, rows, n, dtype)
  for rows, n in [(3, 300000), (3, 131071), (67, 65537), (67, 131072)]:
    check_repeatable(kind, rows, n, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("kind", BOTH)
def test_kernels_under_the_sanitizer(kind):
  for rows, n in [(70, 24), (9, 77), (30, 768), (5, 4100), (3, 4096), (5, 16400), (70, 8193), (301, 8200), (2, 300001)]:
    check_repeatable(kind, rows, n, "float32", repeats=2)
    check_repeatable(kind, rows, n, "bfloat16", repeats=2)


def check_repeatable(kind, rows, n, dtype, repeats=5):
  x, r, g, g_sum = (jnp.asarray(sample((rows, n), dtype, i)) for i in range(4))
  p = jnp.asarray(sample((n,), ACCUMULATOR[dtype], 4))
  y, s = assert_repeatable(ADD[kind], x, r, p, p, repeats=repeats)
  want = oracle(kind, s, p, p)
  assert_close(y, want, dtype, terms=n, scale=2 * np.abs(want).max())
  want = oracle(kind, x, p)
  assert_close(assert_repeatable(NORMS[kind], x, p, repeats=repeats), want, dtype, terms=n, scale=np.abs(want).max())
  gradients = assert_repeatable(lambda g, *a: jax.vjp(ADD[kind], *a)[1](g), (g, g_sum), x, r, p, p, repeats=repeats)
  assert all(np.isfinite(exact(each)).all() for each in gradients)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
@pytest.mark.parametrize("shape", [(3, 2**30 - 8), (2**22 + 1, 520), (2**15 + 1, 2**16)])
def test_more_than_2_to_the_31_elements(shape):
  """Long rows, short rows, clusters. The last row differs, so that a wrapped offset shows."""
  rows, n = shape

  @jax.jit
  def both(offset):
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in (0, 1))
    x = (column % 2).astype(jnp.bfloat16) + jnp.where(row == rows - 1, offset, 0.0).astype(jnp.bfloat16)
    y, vjp = jax.vjp(lambda x, b: jaxdnn.layer_norm(x, bias=b), x, jnp.zeros(n, jnp.float32))
    dx, dbias = vjp(y)
    return [(y[i, ends], dx[i, ends]) for i in (0, -2, -1) for ends in (slice(0, 8), slice(n - 8, n))], dbias

  picked, dbias = both(jnp.float32(8.0))
  sign = np.where(np.arange(8) % 2, 1.0, -1.0)
  for y, dx in picked:
    np.testing.assert_allclose(exact(y), sign, rtol=1e-2)
    np.testing.assert_allclose(exact(dx), 0, atol=1e-2)
  for ends in (dbias[:8], dbias[-8:]):
    np.testing.assert_allclose(exact(ends), rows * sign, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_a_row_of_2_to_the_31_elements():
  n = 2**31 + 8
  x = (jnp.arange(n, dtype=jnp.int64) % 2).astype(jnp.bfloat16)

  @jax.jit
  def both(x):
    y, vjp = jax.vjp(jaxdnn.layer_norm, x)
    return y[-8:], vjp(y)[0][-8:]

  y, dx = both(x)
  np.testing.assert_allclose(exact(y), np.where(np.arange(8) % 2, 1.0, -1.0), rtol=1e-2)
  np.testing.assert_allclose(exact(dx), 0, atol=1e-2)
