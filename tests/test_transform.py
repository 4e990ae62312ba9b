"""Tensor transforms against NumPy: layouts, padding, types, derivatives, compositions."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from jaxdnn import _extension
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample
from transform_cases import EMPTY, PADDED, PERMUTED, Case

INTEGERS = ("int8", "uint8", "int32")
ALL = (*DTYPES, *INTEGERS)


def numpy_dtype(name):
  return np.dtype(getattr(ml_dtypes, name, name))


def values(shape, dtype, seed=0):
  """Normal values, or integers over the whole range of the type."""
  if dtype not in INTEGERS:
    return sample(shape, dtype, seed)
  info = np.iinfo(dtype)
  return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True)


def move(x, case, pad_value=0):
  """T(x) by NumPy, of any type."""
  x = x.transpose(case.permutation or range(x.ndim))
  for axis, (lo, hi) in enumerate(case.padding or ()):
    index = np.arange(-lo, x.shape[axis] + hi)
    inside = (index >= 0) & (index < x.shape[axis])
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    taken = np.take(x, np.where(inside, index, 0), axis) if x.shape[axis] else np.zeros(
      [index.size if a == axis else n for a, n in enumerate(x.shape)], x.dtype
    )  # fmt: skip
    x = np.where(inside.reshape(shape), taken, np.asarray(pad_value, x.dtype))
  return x


def rounded(v, dtype):
  """float64 to the values that `dtype` can hold, as the docstring promises."""
  if dtype not in INTEGERS:
    with np.errstate(over="ignore"):
      return v.astype(numpy_dtype(dtype))
  info = np.iinfo(dtype)
  return np.clip(np.rint(np.where(np.isnan(v), 0, v)), info.min, info.max).astype(dtype)


def arguments(case):
  return {"permutation": case.permutation, "padding": case.padding}


def assert_same(got, want):
  got = np.asarray(got)
  assert got.dtype == want.dtype and got.shape == want.shape
  np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def check_moves(cases, dtype, pad_value=0):
  """Nothing but moves: exact, whatever the bits. All cases in one compilation."""
  xs = [values(c.shape, dtype, i) for i, c in enumerate(cases)]

  @jax.jit
  def all_cases(xs):
    return [jaxdnn.transform(x, pad_value=pad_value, **arguments(c)) for x, c in zip(xs, cases, strict=True)]

  for case, x, got in zip(cases, xs, all_cases(xs), strict=True):
    assert_same(got, move(x, case, pad_value))


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_permutations(dtype):
  check_moves(PERMUTED + EMPTY, dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_padding_and_crops(dtype):
  check_moves(PADDED + EMPTY, dtype, pad_value=3)


def test_pad_value_may_be_infinite():
  x = jnp.ones((2, 3), jnp.bfloat16)
  got = jaxdnn.transform(x, padding=((0, 1), (1, 0)), pad_value=-np.inf)
  np.testing.assert_array_equal(exact(got), [[-np.inf, 1, 1, 1], [-np.inf, 1, 1, 1], [-np.inf] * 4])


CONVERTED = (
  Case((1000,)),
  Case((3, 37)),
  Case((40, 70), (1, 0)),
  Case((2, 300, 3), (0, 2, 1), ((0, 0), (0, 1), (0, 0))),
  Case((2, 3, 300), (0, 2, 1), ((0, 0), (2, 0), (0, 1))),
)


@pytest.mark.parametrize("source", ALL)
def test_conversions(source):
  """Every pair of types, with values at the edges of the integer types, ties, and nothing scaled."""
  cases = list(itertools.product(ALL, CONVERTED))
  edges = [0.5, 1.5, -0.5, -2.5, 127.5, 126.5, -128.5, 255.5, 254.5, 300, -300, 2147483000, 3e9, -3e9, 1e30, -1e30]
  special = [np.nan, np.inf, -np.inf]

  def data(i, shape):
    x = values(shape, source, i)
    if source not in INTEGERS:
      x = (x.astype(np.float64) * 100).astype(x.dtype)
      with np.errstate(over="ignore"):
        x.reshape(-1)[: len(edges) + 3] = np.asarray(edges + special).astype(x.dtype)
    return x

  xs = [data(i, c.shape) for i, (_, c) in enumerate(cases)]

  @jax.jit
  def all_cases(xs):
    return [
      jaxdnn.transform(x, dtype=target, pad_value=7, **arguments(c)) for x, (target, c) in zip(xs, cases, strict=True)
    ]

  for (target, case), x, got in zip(cases, xs, all_cases(xs), strict=True):
    wide = x.astype(np.float64)
    narrows = source == "float64" and target not in ("float64", *INTEGERS)
    if narrows or (source == "int32" and target in ("float16", "bfloat16")):
      # Through float32 on the way, or not: both are within a rounding.
      want = move(wide, case, 7).astype(np.float32).astype(np.float64)
      np.testing.assert_allclose(exact(got), rounded(want, target).astype(np.float64), rtol=2.0**-8)
      assert got.dtype == numpy_dtype(target)
    else:
      assert_same(got, rounded(move(wide, case, 7), target))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_accumulate(dtype):
  cases = (*PERMUTED[::3], *PADDED[::2])
  xs = [values(c.shape, dtype, i) for i, c in enumerate(cases)]
  ys = [values(move(x, c).shape, dtype, i + 100) for i, (x, c) in enumerate(zip(xs, cases, strict=True))]

  @jax.jit
  def all_cases(xs, ys):
    return [
      jaxdnn.transform(x, y, pad_value=2, alpha=0.5, beta=-1.5, **arguments(c))
      for x, y, c in zip(xs, ys, cases, strict=True)
    ]

  for case, x, y, got in zip(cases, xs, ys, all_cases(xs, ys), strict=True):
    want = 0.5 * move(exact(x), case, 2) - 1.5 * exact(y)
    assert_close(got, want, dtype, scale=8)


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_images_become_activations(target):
  """Bytes, channels-last, to normalised floating-point numbers, channels-first, in one pass."""
  x = values((2, 17, 19, 3), "uint8")
  got = jaxdnn.transform(x, permutation=(0, 3, 1, 2), dtype=target, alpha=1 / 255)
  assert_close(got, exact(x).transpose(0, 3, 1, 2) / 255, target)
  back = jaxdnn.transform(got, permutation=(0, 2, 3, 1), dtype="uint8", alpha=255)
  assert np.abs(exact(back) - exact(x)).max() <= (1 if target == "bfloat16" else 0)


def test_beta_zero_does_not_read_y():
  x = jnp.ones((2, 3))
  y = jnp.full((2, 3), jnp.nan)
  np.testing.assert_array_equal(jaxdnn.transform(x, y, alpha=2.0), np.full((2, 3), 2.0))
  dx, dy = jax.grad(lambda x, y: jaxdnn.transform(x, y, alpha=2.0).sum(), (0, 1))(x, y)
  np.testing.assert_array_equal(dx, np.full((2, 3), 2.0))
  np.testing.assert_array_equal(dy, np.zeros((2, 3)))


def test_matches_jnp():
  x = jnp.asarray(sample((3, 4, 5), "float32"))
  np.testing.assert_array_equal(jaxdnn.transform(x, permutation=(2, -3, 1)), jnp.transpose(x, (2, 0, 1)))
  pads = ((1, 2), (0, 0), (3, 0))
  np.testing.assert_array_equal(
    jaxdnn.transform(x, padding=pads, pad_value=4), jnp.pad(x, pads, constant_values=4)
  )
  np.testing.assert_array_equal(
    jaxdnn.transform(x, padding=((-1, 0), (0, -2), (-3, 2))), jnp.pad(x[1:, :2, 3:], ((0, 0), (0, 0), (0, 2)))
  )
  np.testing.assert_array_equal(exact(jaxdnn.transform(x, dtype=jnp.bfloat16)), exact(x.astype(jnp.bfloat16)))
  assert jaxdnn.transform(jnp.float32(3), alpha=2.0) == 6


# Derivatives and compositions ----------------------------------------------------------------------------------------

SMALL = Case((2, 3, 4), (2, 0, 1), ((1, -2), (0, 0), (-1, 2)))


def apply(x, y):
  return jaxdnn.transform(x, y, pad_value=3, alpha=2, beta=-0.5, **arguments(SMALL))


def small(seed=0):
  return jnp.asarray(sample((2, 3, 4), "float64", seed)), jnp.asarray(sample((3, 2, 4), "float64", seed + 1))


def test_derivatives_of_every_order_and_mode():
  check_grads(jax.jit(lambda x, y: jnp.sin(apply(x, y))), small(), order=2, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda x: jnp.sin(apply(x, jnp.ones((3, 2, 4))))), small()[:1], order=2, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda y: jnp.sin(apply(jnp.ones((2, 3, 4)), y))), small()[1:], order=2, modes=("fwd", "rev"))


def test_adjoint_against_numpy():
  (x, y), g = small(), jnp.asarray(sample((3, 2, 4), "float64", 5))
  dx, dy = jax.vjp(apply, x, y)[1](g)
  t = np.asarray(sample((2, 3, 4), "float64", 6))
  np.testing.assert_allclose(np.vdot(dx, t), 2 * np.vdot(g, move(t, SMALL)), rtol=1e-12)
  np.testing.assert_allclose(dy, -0.5 * np.asarray(g), rtol=1e-12)


def test_tangent_of_one_operand_reads_one():
  """A constant operand costs nothing in the tangent, and neither does the padding's value."""
  x, y = small()
  cases = (
    (lambda x: apply(x, y), x, 1),
    (lambda y: apply(x, y), y, 1),
    (lambda y: apply(y.transpose(1, 0, 2).reshape(2, 3, 4), y), y, 2),
  )
  for f, value, operands in cases:
    jaxpr = jax.make_jaxpr(lambda v, f=f: jax.jvp(f, (v,), (v,))[1])(value)
    last = [e for e in jaxpr.eqns if e.primitive.name == "jaxdnn_transform"][-1]
    assert len(last.invars) == operands and last.params["spec"].pad_value == 0


@pytest.mark.parametrize("source, target", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float64")])
def test_gradients_have_the_type_of_their_operand(source, target):
  x, y = jnp.ones((2, 3), source), jnp.ones((3, 2), target)
  f = lambda x, y: jaxdnn.transform(x, y, permutation=(1, 0), alpha=3, beta=2)  # noqa: E731
  out, vjp = jax.vjp(f, x, y)
  dx, dy = vjp(out)
  assert (out.dtype, dx.dtype, dy.dtype) == (target, source, target)
  np.testing.assert_array_equal(exact(dx), 15)
  np.testing.assert_array_equal(exact(dy), 10)


def test_integers_have_no_derivative():
  f = lambda x: jaxdnn.transform(x, dtype="int8").sum().astype("float32")  # noqa: E731
  np.testing.assert_array_equal(jax.grad(f)(jnp.ones(3)), 0)
  g = lambda n, y: jaxdnn.transform(n, y, beta=2).sum()  # noqa: E731
  n, y = jnp.arange(3, dtype=jnp.int32), jnp.ones(3, jnp.float32)
  np.testing.assert_array_equal(jax.grad(g, 1)(n, y), 2)
  assert jax.jvp(lambda y: g(n, y), (y,), (y,))[1] == 6


def test_vmap_over_each_subset():
  x, y = (jnp.stack([a, 2 * a, -a, a + 1, 3 * a]) for a in small())
  loss = lambda x, y: jnp.sin(apply(x, y)).sum()  # noqa: E731
  for dx, dy in itertools.product((0, 2, None), (0, 3, None)):
    if dx is None and dy is None:
      continue
    xs = x[0] if dx is None else jnp.moveaxis(x, 0, dx)
    ys = y[0] if dy is None else jnp.moveaxis(y, 0, dy)
    each = [(x[0 if dx is None else i], y[0 if dy is None else i]) for i in range(5)]
    np.testing.assert_allclose(jax.vmap(apply, (dx, dy))(xs, ys), jnp.stack([apply(*e) for e in each]), rtol=1e-12)
    gradients = [jax.grad(loss, (0, 1))(*e) for e in each]
    got = jax.vmap(jax.grad(loss, (0, 1)), (dx, dy))(xs, ys)
    jax.tree.map(
      lambda a, *b: np.testing.assert_allclose(a, jnp.stack(b), rtol=1e-12, atol=1e-15), got, *gradients
    )


def test_vmap_folds_into_the_permutation():
  x = jnp.zeros((3, 5, 4))
  jaxpr = jax.make_jaxpr(jax.vmap(lambda x: jaxdnn.transform(x, permutation=(1, 0)), in_axes=1))(x)
  assert [e.primitive.name for e in jaxpr.eqns] == ["jaxdnn_transform"]
  assert jaxpr.eqns[0].params["spec"].permutation == (1, 2, 0)


def test_identity_costs_nothing():
  x = jnp.zeros((3, 4))
  assert not jax.make_jaxpr(lambda x: jaxdnn.transform(x, permutation=(0, 1), padding=((0, 0), (0, 0))))(x).eqns


@pytest.mark.mesh
def test_explicit_mesh():
  mesh = jax.make_mesh((4, 2), ("a", "b"))
  x, y = jnp.asarray(sample((8, 3, 4), "float64")), jnp.asarray(sample((4, 5, 8), "float64", 1))
  options = dict(permutation=(2, 1, 0), padding=((0, 0), (1, 1), (0, 0)), alpha=2, beta=3)
  f = lambda x, y: jaxdnn.transform(x, y, **options)  # noqa: E731
  want = f(x, y), jax.grad(lambda x, y: jnp.sin(f(x, y)).sum(), (0, 1))(x, y)
  with jax.set_mesh(mesh):
    placed = jax.device_put(x, P("a", None, "b")), jax.device_put(y, P("b", None, "a"))
    got = f(*placed), jax.grad(lambda x, y: jnp.sin(f(x, y)).sum(), (0, 1))(*placed)
    assert jax.typeof(got[0]).sharding.spec == P("b", None, "a")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)
    text = jax.jit(f).lower(*placed).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    with pytest.raises(ValueError, match=r"y is sharded as \('a', None, 'b'\), the transformed x as \('b', None, "):
      f(placed[0], jax.device_put(y, P("a", None, "b")))
    with pytest.raises(ValueError, match="sharded over mesh axis 'a' along dimension 0"):
      jaxdnn.transform(placed[0], padding=((1, 0), (0, 0), (0, 0)))


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("jaxdnn.transform.v1" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_cuda_lowering_names_target_and_attributes():
  def text(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  x = jax.ShapeDtypeStruct((2, 3, 4), jnp.uint8)
  options = dict(permutation=(2, 0, 1), padding=((1, 0), (-1, 0), (0, 0)), dtype="float16", alpha=0.5)
  program = text(lambda x: jaxdnn.transform(x, **options), x)
  assert "@jaxdnn.transform.v1" in program and "alpha = 5.000000e-01 : f64" in program
  assert "permutation = dense<[2, 0, 1]>" in program and "low = dense<[1, -1, 0]>" in program
  assert "jaxdnn." not in text(lambda x: jaxdnn.transform(x, dtype="float8_e4m3fn"), x)
  assert "jaxdnn." not in text(lambda x: jaxdnn.transform(x, alpha=2), jax.ShapeDtypeStruct((), jnp.float32))


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors():
  x = jnp.zeros((2, 3))
  for wrong in (jnp.zeros(3, bool), jnp.zeros(3, jnp.complex64), jnp.zeros(3, jnp.int64)):
    with pytest.raises(TypeError, match=f"x must be floating-point, int8, uint8 or int32, got {wrong.dtype}"):
      jaxdnn.transform(wrong)
  with pytest.raises(TypeError, match="dtype must be floating-point, int8, uint8 or int32, got int16"):
    jaxdnn.transform(x, dtype="int16")
  for wrong in ((0,), (0, 0), (0, 2), (0, 1, 2)):
    with pytest.raises(ValueError, match="permutation must name each of the 2 dimensions of x once, got"):
      jaxdnn.transform(x, permutation=wrong)
  with pytest.raises(TypeError, match="permutation must be a sequence of integers, got"):
    jaxdnn.transform(x, permutation=(0, 1.0))
  for wrong in (1, ((0, 0), 1), ((0, 0), (0, 0.5))):
    with pytest.raises(TypeError, match="padding must be a sequence of"):
      jaxdnn.transform(x, padding=wrong)
  with pytest.raises(ValueError, match=r"padding must have a pair for each of 2 dimensions, got \(\(0, 0\),\)"):
    jaxdnn.transform(x, padding=((0, 0),))
  with pytest.raises(ValueError, match=r"padding \(-2, -2\) crops more than the 3 elements"):
    jaxdnn.transform(x, padding=((0, 0), (-2, -2)))
  for name in ("alpha", "beta", "pad_value"):
    with pytest.raises(TypeError, match=f"{name} must be a Python number, got"):
      jaxdnn.transform(x, x, **{name: jnp.ones(2)})
  with pytest.raises(ValueError, match=r"beta = 2\.0 needs y"):
    jaxdnn.transform(x, beta=2)
  with pytest.raises(ValueError, match=r"y must be float64\[3, 2\], the result's, got float64\[2, 3\]"):
    jaxdnn.transform(x, x, permutation=(1, 0), beta=1)
  with pytest.raises(ValueError, match=r"y must be bfloat16\[2, 3\], the result's, got float64\[2, 3\]"):
    jaxdnn.transform(x, x, dtype="bfloat16", beta=1)


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float64"])
def test_every_channel_count(dtype):
  counts = (*range(1, 34), 47, 63, 64, 65, 96, 127, 128, 129)
  check_moves([Case((2, 3, 97, c), (0, 3, 1, 2)) for c in counts], dtype)
  check_moves([Case((2, c, 3, 97), (0, 2, 3, 1)) for c in counts], dtype)
  check_moves([Case((2, 32 * c, 3), (0, 2, 1)) for c in counts], dtype)
  check_moves([Case((c, 150), None, ((0, 0), (-1 - c % 3, c % 5 - 2))) for c in counts], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_unaligned_slices(dtype):
  """Slices at odd offsets reach the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(values((3, 1001, 37), dtype))
  shape = (1001, 37)
  for case in (Case(shape, (1, 0)), Case(shape, (1, 0), ((1, 0), (0, 3))), Case(shape, None, ((1, 1), (-1, 0)))):
    got = jax.jit(lambda x, case=case: jaxdnn.transform(x[1], **arguments(case)))(x)
    assert_same(got, move(np.asarray(x)[1], case))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_everything_and_repeat(dtype):
  for case in (Case((130, 67), (1, 0)), Case((5, 3000, 3), (0, 2, 1)), Case((9, 33), None, ((0, 5), (-1, 3)))):
    x = jnp.asarray(values(case.shape, dtype))
    moved = assert_repeatable(lambda x, case=case: jaxdnn.transform(x, **arguments(case)), x)
    assert_same(moved, move(np.asarray(x), case))
    half = assert_repeatable(lambda x, case=case: jaxdnn.transform(x, dtype="float16", alpha=0.5, **arguments(case)), x)
    assert_close(half, 0.5 * move(exact(x), case), "float16")


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  for dtype in ("bfloat16", "float32"):
    check_moves((*PERMUTED[::2], *PADDED[::2]), dtype)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """One huge dimension, many, and transposed: the last elements differ, so that a wrapped offset shows."""
  n = 2**31 + 2**20
  x = jnp.zeros((n,), jnp.int8).at[-1].set(7).at[5].set(3)
  y = jaxdnn.transform(x, padding=((1, 2),))
  assert y.shape == (n + 3,) and y[n] == 7 and y[6] == 3 and y[0] == 0 and int(jnp.count_nonzero(y)) == 2
  del y
  y = jaxdnn.transform(x.reshape(2**16 + 2**5, 2**15), permutation=(1, 0))
  assert y[-1, -1] == 7 and y[5, 0] == 3 and int(jnp.count_nonzero(y)) == 2
  del y
  y = jaxdnn.transform(x, dtype=jnp.bfloat16)
  assert y[-1] == 7 and y[5] == 3 and int(jnp.count_nonzero(y)) == 2
