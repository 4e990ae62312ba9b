"""Group and instance normalization against NumPy in float64: layouts, derivatives, special values, compositions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from group_norm_cases import CASES, EMPTY, LARGE, Case
from jaxdnn import _extension
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample

ON_GPU = jax.default_backend() == "gpu"


def sigmoid(p):
  return 1 / (1 + np.exp(-p))


ACTIVATIONS = {
  None: (lambda p: p, lambda p: np.ones_like(p)),
  "relu": (lambda p: np.maximum(p, 0), lambda p: (p > 0) * 1.0),
  "silu": (lambda p: p * sigmoid(p), lambda p: sigmoid(p) * (1 + p * sigmoid(-p))),
}


class Oracle:
  """Value and derivatives in float64, on a channels-last copy with the groups apart."""

  def __init__(self, case, x, scale, bias, epsilon=1e-5, activation=None):
    self.case, self.scale, self.bias = case, exact(scale), exact(bias)
    self.f, self.df = ACTIVATIONS[activation]
    x = self.split(exact(x))
    mean = x.mean((1, 3), keepdims=True)
    self.rstd = 1 / np.sqrt(np.square(x - mean).mean((1, 3), keepdims=True) + epsilon)
    self.xhat = (x - mean) * self.rstd
    self.p = self.affine(self.xhat)

  def split(self, x):
    x = np.moveaxis(x, self.case.axis, -1)
    g, c = self.case.groups, self.case.channels
    return x.reshape(x.shape[0], int(np.prod(x.shape[1:-1])), g, c // g)

  def join(self, y):
    moved = np.moveaxis(np.empty(self.case.shape), self.case.axis, -1).shape
    return np.moveaxis(y.reshape(moved), -1, self.case.axis)

  def per_channel(self, a):
    return a.reshape(self.case.groups, self.case.channels // self.case.groups)

  def affine(self, xhat):
    return xhat * self.per_channel(self.scale) + self.per_channel(self.bias)

  def value(self):
    return self.join(self.f(self.p))

  def project(self, q):
    """The derivative of xhat along q, which is its own transpose."""
    mean = functools.partial(np.mean, axis=(1, 3), keepdims=True)
    return self.rstd * (q - mean(q) - self.xhat * mean(q * self.xhat))

  def vjp(self, dy):
    dp = self.split(exact(dy)) * self.df(self.p)
    dx = self.project(dp * self.per_channel(self.scale))
    return self.join(dx), (dp * self.xhat).sum((0, 1)).reshape(-1), dp.sum((0, 1)).reshape(-1)

  def jvp(self, t, tscale, tbias):
    direction = self.project(self.split(exact(t))) * self.per_channel(self.scale)
    return self.join(self.df(self.p) * (direction + self.xhat * self.per_channel(tscale) + self.per_channel(tbias)))


def operands(case, dtype, seed=0):
  wide = "float64" if dtype == "float64" else "float32"
  x = 2 * sample(case.shape, dtype, seed) + np.ones((), np.float32).astype(sample((), dtype).dtype)
  return x, 1 + sample((case.channels,), wide, seed + 1) / 4, sample((case.channels,), wide, seed + 2)


def apply(case, x, scale, bias, **options):
  return jaxdnn.group_norm(x, case.groups, scale, bias, axis=case.axis, **options)


def check_cases(cases, dtype, activation=None, forward_mode=True):
  """Value, cotangent map and tangent map of every case, all in one compilation."""
  args = [operands(c, dtype, 3 * i) for i, c in enumerate(cases)]
  dys = [sample(c.shape, dtype, i + 1) for i, c in enumerate(cases)]

  def maps(case, args, dy):
    f = functools.partial(apply, case, activation=activation)
    y, vjp = jax.vjp(f, *args)
    return y, vjp(dy), jax.jvp(f, args, (dy, *args[1:]))[1] if forward_mode else None

  results = jax.jit(lambda args, dys: list(map(maps, cases, args, dys)))(args, dys)
  wide = "float64" if dtype == "float64" else "float32"
  for case, (x, scale, bias), dy, (y, (dx, dscale, dbias), ty) in zip(cases, args, dys, results, strict=True):
    oracle = Oracle(case, x, scale, bias, activation=activation)
    # xhat carries the error of the inverse deviation and is about as large as its largest value.
    scale_of = 4 * np.abs(oracle.p).max(initial=1)
    assert_close(y, oracle.value(), dtype, scale=scale_of)
    want = oracle.vjp(dy)
    size = np.abs(oracle.rstd).max(initial=1) * np.abs(exact(dy)).max(initial=1) * scale_of
    assert_close(dx, want[0], dtype, scale=size)
    count = max(1, int(np.prod(case.shape)) // case.channels) if case.channels else 1
    assert_close(dscale, want[1], wide, terms=count, scale=2 * scale_of)
    assert_close(dbias, want[2], wide, terms=count, scale=2)
    if forward_mode:
      assert_close(ty, oracle.jvp(dy, scale, bias), dtype, scale=2 * size)


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


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("mean", [1e4, -1e4])
def test_a_large_mean_costs_no_digits(mean, axis):
  """Deviation 1e-2 at 1e4 is ten steps of float32: the normalized values must still be those of the data given."""
  case = Case((2, 32, 33, 32), 4, axis)
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


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_stay_in_their_group(special, axis):
  """NaN or an infinity, anywhere in a group, makes that group of that example NaN and nothing else."""
  case = Case((2, 8, 6, 8), 4, axis)
  for where in [(1, 0, 0, 0), (1, 3, 5, 3), (1, 7, 5, 7)]:
    x, scale, bias = operands(case, "float32")
    x[where] = special
    for activation in (None, "silu"):
      y = exact(apply(case, x, scale, bias, activation=activation))
      group = where[axis] // 2
      index = [slice(None)] * 4
      index[0], index[axis] = 1, slice(2 * group, 2 * group + 2)
      hit = np.zeros(case.shape, bool)
      hit[tuple(index)] = True
      assert np.isnan(y[hit]).all() and np.isfinite(y[~hit]).all()


# Derivatives and compositions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis, activation", [(-1, None), (1, "silu"), (2, "silu")])
def test_derivatives_of_every_order_and_mode(axis, activation):
  x, scale, bias = (jnp.asarray(a) for a in operands(Case((2, 4, 4, 3, 4), 2), "float64"))
  x = x[:, :, :, 0] if axis == 2 else x[:, :, 0, :2] if axis == 1 else x[:, 0]
  f = jax.jit(lambda x, s, b: jaxdnn.group_norm(x, 2, s, b, axis=axis, activation=activation))
  c = x.shape[axis]
  check_grads(f, (x, scale[:c], bias[:c]), order=2, modes=("fwd", "rev"))


def test_vmap_over_each_subset_of_operands():
  case = Case((2, 3, 4), 2)
  args = [np.stack([a, 2 * a, a - 1]) for a in operands(case, "float64")]
  dy = sample((3, *case.shape), "float64", 5)

  def both(x, scale, bias, dy):
    f = functools.partial(apply, case, activation="silu")
    y, vjp = jax.vjp(f, x, scale, bias)
    return y, vjp(dy), jax.jvp(f, (x, scale, bias), (dy, bias, scale))[1]

  for mask in range(1, 16):
    axes = [0 if mask >> i & 1 else None for i in range(4)]
    values = [a if axis == 0 else a[0] for a, axis in zip([*args, dy], axes, strict=True)]
    got = jax.vmap(both, axes)(*values)
    for i in range(3):
      want = both(*(v[i] if axis == 0 else v for v, axis in zip(values, axes, strict=True)))
      jax.tree.map(lambda g, w, i=i: np.testing.assert_allclose(g[i], w, rtol=1e-10, atol=1e-10), got, want)


def test_vmap_over_another_axis_and_twice():
  x = sample((2, 3, 4, 5, 6), "float64")
  norm = functools.partial(jaxdnn.group_norm, num_groups=2, axis=1)
  got = jax.vmap(jax.vmap(lambda x: norm(x), in_axes=3), in_axes=1, out_axes=2)(x)
  want = np.stack([[norm(x[:, i, :, :, j]) for j in range(6)] for i in range(3)], 0)
  np.testing.assert_allclose(got, np.moveaxis(want, 0, 2), rtol=1e-12)


def test_mapped_examples_share_one_call():
  """Only x is mapped: one call on all examples, with the parameters as they are."""
  x, scale, bias = operands(Case((3, 2, 5, 6), 3), "float32")
  f = jax.vmap(functools.partial(apply, Case((2, 5, 6), 3)), (0, None, None))
  (eqn,) = [e for e in jax.make_jaxpr(f)(x, scale, bias).eqns if e.primitive.name == "jaxdnn_group_norm"]
  assert [v.aval.shape for v in eqn.invars] == [(1, 6, 5, 6), (1, 6), (1, 6)]


def test_what_differentiation_keeps():
  """x, the parameters, and three numbers for each group; nothing of the size of x besides x."""
  x, scale, bias = operands(Case((2, 5, 6), 3), "bfloat16")
  f = functools.partial(apply, Case((2, 5, 6), 3), activation="silu")
  kept = sorted(k.size for k in jax.tree.leaves(jax.vjp(f, x, scale, bias)[1]))
  assert kept == sorted([x.size, 6, 6, 2 * 3 * 3])


# Other libraries -----------------------------------------------------------------------------------------------------


def test_matches_flax():
  linen = pytest.importorskip("flax.linen")
  x, scale, bias = operands(Case((2, 5, 6, 8), 4), "float32")
  variables = {"params": {"scale": scale, "bias": bias}}
  group = linen.GroupNorm(num_groups=4, epsilon=1e-5, use_fast_variance=False)
  np.testing.assert_allclose(jaxdnn.group_norm(x, 4, scale, bias), group.apply(variables, x), atol=2e-6, rtol=1e-5)
  instance = linen.InstanceNorm(epsilon=1e-5, use_fast_variance=False)
  np.testing.assert_allclose(jaxdnn.instance_norm(x, scale, bias), instance.apply(variables, x), atol=2e-6, rtol=1e-5)
  # flax's group size is channels over groups, and its epsilon 1e-6.
  by_size = linen.GroupNorm(num_groups=None, group_size=2, use_fast_variance=False)
  got = jaxdnn.group_norm(x, 4, scale, bias, epsilon=1e-6)
  np.testing.assert_allclose(got, by_size.apply(variables, x), atol=2e-6, rtol=1e-5)


def test_matches_torch():
  torch = pytest.importorskip("torch")
  x, scale, bias = operands(Case((2, 8, 5, 6), 4, 1), "float32")
  tx, ts, tb = (torch.tensor(np.array(a), requires_grad=True) for a in (x, scale, bias))
  for groups in (1, 4):
    want = torch.nn.functional.group_norm(tx, groups, ts, tb)
    got, vjp = jax.vjp(lambda *a, g=groups: jaxdnn.group_norm(a[0], g, *a[1:], axis=1), x, scale, bias)
    np.testing.assert_allclose(got, want.detach().numpy(), atol=2e-6, rtol=1e-5)
    for g, t in zip(vjp(got), torch.autograd.grad(want, (tx, ts, tb), want.detach()), strict=True):
      np.testing.assert_allclose(g, t.numpy(), atol=1e-4, rtol=1e-4)
  want = torch.nn.functional.instance_norm(tx, weight=ts, bias=tb).detach().numpy()
  np.testing.assert_allclose(jaxdnn.instance_norm(x, scale, bias, axis=1), want, atol=2e-6, rtol=1e-5)


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("jaxdnn.group_norm.v1" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_cuda_lowering_moves_nothing():
  def text(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16 if len(s) > 1 else jnp.float32) for s in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  def gradient(axis):
    return jax.grad(
      lambda *a: jaxdnn.group_norm(a[0], 4, *a[1:], axis=axis, activation="silu").astype(jnp.float32).sum(), (0, 1, 2)
    )

  for axis in (1, -1):
    shape = (2, 3, 5, 8) if axis == -1 else (2, 8, 3, 5)
    program = text(gradient(axis), shape, (8,), (8,))
    assert "@jaxdnn.group_norm.v1" in program and "@jaxdnn.group_norm_bwd.v1" in program
    assert "transpose" not in program and 'activation = "silu"' in program
    assert f"channels_last = {'true' if axis == -1 else 'false'}" in program and "groups = 4 : i64" in program


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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_write_everything_and_repeat(dtype):
  cases = [Case((2, 9, 65), 5), Case((2, 16, 16, 40), 4), Case((2, 64, 64, 96), 8), Case((1, 300, 301, 24), 3)]
  for case in (*cases, Case((2, 24, 11, 11), 3, 1), Case((1, 8, 512, 512), 2, 1)):
    check_repeatable(case, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  cases = [Case((2, 9, 65), 5), Case((2, 16, 16, 40), 4), Case((1, 64, 64, 96), 8), Case((2, 24, 11, 11), 3, 1)]
  for case in (*cases, Case((1, 8, 100, 100), 2, 1)):
    check_repeatable(case, "float32", repeats=2)


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
