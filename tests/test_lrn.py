"""Local response, divisive and local contrast normalization against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from jaxdnn import _extension
from lrn_cases import ACROSS, DIVISIVE, EMPTY, WITHIN, LrnCase
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample

# By default the window's energy matters as much as k.
DEFAULTS = {"alpha": 2.0, "beta": 0.75, "k": 2.0}


class Oracle:
  """The mathematics, window by window: `y`, the maps of tangents and cotangents, and the magnitudes of their terms.

  `cells` are the pairs of slices that pair each element i with a neighbour j, one for each cell of the window.
  """

  def __init__(self, case, x, means=None):
    options = {**DEFAULTS, "axis": -1, "padding": "SAME", "divide_by_size": True, **case.options}
    self.x = exact(x)
    self.m = np.zeros_like(self.x) if means is None else exact(means)
    channels = options["axis"] % self.x.ndim
    others = [d for d in range(self.x.ndim) if d != channels]
    if case.mode == "across_channels":
      axes = [channels]
    else:
      axes = others[1:] if isinstance(case.size, int) else others[-len(case.size) :]
    sizes = [case.size] * len(axes) if isinstance(case.size, int) else case.size
    before = [n // 2 if options["padding"] == "SAME_LOWER" else (n - 1) // 2 for n in sizes]
    self.terms = max(1, int(np.prod(sizes)))
    self.cells = []
    for shift in np.ndindex(*sizes):
      i, j = [slice(None)] * self.x.ndim, [slice(None)] * self.x.ndim
      for axis, s, b in zip(axes, shift, before, strict=True):
        n, d = self.x.shape[axis], s - b
        i[axis], j[axis] = slice(max(0, -d), max(0, n - max(0, d))), slice(min(n, max(0, d)), max(0, n + min(0, d)))
      if self.x[tuple(i)].size:
        self.cells.append((tuple(i), tuple(j)))
    scale = options["alpha"] / (self.terms if options["divide_by_size"] else 1)
    with np.errstate(all="ignore"):
      d = options["k"] + scale * self.gather(lambda i, j: (self.x[j] - self.m[i]) ** 2)
      self.p = d ** -options["beta"]
      self.q = 2 * scale * options["beta"] * self.p / d
      self.y = self.x * self.p

  def gather(self, term):
    """The sum of `term(i, j)` over the window of each i."""
    out = np.zeros_like(self.x)
    for i, j in self.cells:
      out[i] += term(i, j)
    return out

  def scatter(self, term):
    """The sum of `term(i, j)` over the windows that hold each j."""
    out = np.zeros_like(self.x)
    for i, j in self.cells:
      out[j] += term(i, j)
    return out

  def jvp(self, t):
    t = exact(t)
    return t * self.p - self.q * self.x * self.gather(lambda i, j: (self.x[j] - self.m[i]) * t[j])

  def vjp(self, g):
    g = exact(g)
    r = self.q * self.x * g
    return g * self.p - self.scatter(lambda i, j: r[i] * (self.x[j] - self.m[i]))

  def vjp_means(self, g):
    return self.q * self.x * exact(g) * self.gather(lambda i, j: self.x[j] - self.m[i])

  def jvp_scale(self, t):
    t, x, m = np.abs(exact(t)), np.abs(self.x), np.abs(self.m)
    return t * self.p + np.abs(self.q) * x * self.gather(lambda i, j: (x[j] + m[i]) * t[j])

  def vjp_scale(self, g):
    g, x, m = np.abs(exact(g)), np.abs(self.x), np.abs(self.m)
    r = np.abs(self.q) * x * g
    own = self.gather(lambda i, j: r[i] * (x[j] + m[i]))
    return g * self.p + self.scatter(lambda i, j: r[i] * (x[j] + m[i])) + own


def function(case):
  options = {**DEFAULTS, **case.options}
  if case.mode == "divisive":
    return functools.partial(jaxdnn.divisive_norm, size=case.size, **options)
  return functools.partial(jaxdnn.local_response_norm, size=case.size, mode=case.mode, **options)


def operands(case, dtype, seed=0):
  return [sample(case.shape, dtype, seed + i) for i in range(2 if case.mode == "divisive" else 1)]


def maps(case, x, g):
  """The value, the pull-back of `g`, and the push-forward of `g` in x alone."""
  f = function(case)
  y, vjp = jax.vjp(f, *x)
  return y, vjp(g), jax.jvp(f, tuple(x), (g, *(jnp.zeros_like(g) for _ in x[1:])))[1]


def check_cases(cases, dtype):
  """Value, cotangent map and tangent map of every case, all in one compilation."""
  xs = [operands(c, dtype, seed) for seed, c in enumerate(cases)]
  gs = [sample(c.shape, dtype, seed + 7) for seed, c in enumerate(cases)]

  results = jax.jit(lambda xs, gs: list(map(maps, cases, xs, gs)))(xs, gs)
  for case, x, g, (y, cotangents, dy) in zip(cases, xs, gs, results, strict=True):
    try:
      want = Oracle(case, *x)
      terms = want.terms
      assert_close(y, want.y, dtype, terms=terms, scale=np.abs(want.y))
      assert_close(dy, want.jvp(g), dtype, terms=terms, scale=want.jvp_scale(g))
      assert_close(cotangents[0], want.vjp(g), dtype, terms=terms, scale=want.vjp_scale(g))
      if len(x) == 2:
        assert_close(cotangents[1], want.vjp_means(g), dtype, terms=terms, scale=want.vjp_scale(g))
    except AssertionError as e:
      raise AssertionError(f"{case}: {e}") from e


# Values and first derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_across_channels(dtype):
  few = jax.default_backend() != "gpu" and dtype != "float32"
  check_cases(ACROSS[3::7] if few else ACROSS, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_boxes_means_and_empty_arrays(dtype):
  few = jax.default_backend() != "gpu" and dtype != "float32"
  check_cases((WITHIN + DIVISIVE)[1::6] if few else WITHIN + DIVISIVE + EMPTY, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_and_small_energies(dtype):
  """The curve holds over many binades, whatever the exponent."""
  x = sample((64, 24), dtype) * np.logspace(-10, 9, 64)[:, None].astype(dtype)
  for beta in (0.75, 0.5, 0.3):
    case = LrnCase(x.shape, options={"beta": beta, "k": 1e-5})
    y, want = jax.jit(function(case))(x), Oracle(case, x)
    assert_close(y, want.y, dtype, terms=5, scale=2 * np.abs(want.y))


def test_unaligned_slice():
  """A slice at an odd offset reaches the kernel through whatever buffer XLA chooses; values must not depend on it."""
  x = jnp.asarray(sample((3, 5, 7, 9), "bfloat16"))
  for f in (
    jaxdnn.local_response_norm,
    functools.partial(jaxdnn.local_response_norm, axis=1),
    functools.partial(jaxdnn.local_response_norm, mode="within_channel", size=(3, 3)),
  ):
    sliced = jax.jit(lambda x, f=f: f(x[1:2]))(x)
    np.testing.assert_array_equal(exact(sliced), exact(f(x))[1:2])


def test_even_windows_reach_where_their_padding_says():
  """One hot element: where it shows tells which elements' windows hold it."""
  x = jnp.ones((9,)).at[4].set(100.0)
  dimmed = {"SAME": [2, 3, 5], "SAME_LOWER": [3, 5, 6]}
  for padding, where in dimmed.items():
    y = jaxdnn.local_response_norm(x, 4, alpha=1.0, padding=padding)
    assert sorted(np.flatnonzero(np.asarray(y) < 0.1)) == where


def test_the_divisor_is_the_same_at_the_borders():
  x = jnp.ones((1, 4, 4, 1))
  y = exact(jaxdnn.divisive_norm(x, size=3, alpha=9.0, beta=1.0, k=1.0))[0, :, :, 0]
  np.testing.assert_allclose(y[1, 1], 1 / 10, rtol=1e-6)
  np.testing.assert_allclose(y[0, 1], 1 / 7, rtol=1e-6)
  np.testing.assert_allclose(y[0, 0], 1 / 5, rtol=1e-6)


# Special values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
  "case",
  [
    LrnCase((2, 24)),
    LrnCase((2, 24), 4),
    LrnCase((2, 21)),
    LrnCase((2, 9, 4), options={"axis": 1}),
    LrnCase((2, 9, 4), 4, options={"axis": 1}),
    LrnCase((2, 6, 7, 4), 3, "within_channel"),
    LrnCase((2, 2, 6, 7), 5, "within_channel", {"axis": 1}),
    LrnCase((2, 6, 7, 4), 3, "divisive"),
  ],
  ids=str,
)
def test_nan_and_infinity_reach_their_windows_and_no_further(case, dtype):
  for value in (np.nan, np.inf, -np.inf):
    xs, g = operands(case, dtype), sample(case.shape, dtype, 7)
    xs[0][(0, *(n // 2 for n in case.shape[1:]))] = value
    y, (dx, *_), dy = jax.jit(functools.partial(maps, case))(xs, g)
    with np.errstate(all="ignore"):
      want = Oracle(case, *xs)
      assert_close(y, want.y, dtype, terms=want.terms, scale=np.nan_to_num(np.abs(want.y)))
      np.testing.assert_array_equal(np.isnan(exact(dx)), np.isnan(want.vjp(g)))
      np.testing.assert_array_equal(np.isnan(exact(dy)), np.isnan(want.jvp(g)))
    assert not np.isnan(exact(y)[1]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_deviation_from_a_large_mean_keeps_its_digits(dtype):
  """Squares are of deviations: nothing is left of these where 1e8 is subtracted from 1e8."""
  case = LrnCase((2, 8, 8, 4), 3, "divisive", {"k": 0.0, "alpha": 1.0, "beta": 0.5})
  x = (1e4 + 1e-2 * sample(case.shape, "float64")).astype(np.float32).astype(sample((), dtype).dtype)
  m = exact(x).mean((1, 2), keepdims=True) + np.zeros(case.shape) + (0.125 if dtype == "float32" else 64)
  m = m.astype(x.dtype)
  want = Oracle(case, x, m)
  assert_close(function(case)(x, m), want.y, dtype, terms=want.terms, scale=np.abs(want.y))


def test_what_cudnn_computes():
  """Read from cuDNN 9.19 on a GPU: cudnnDivisiveNormalizationForward and Backward of a 1x1x1x3 tensor, n = 3."""
  x, m = jnp.array([1.0, 2.0, 4.0], jnp.float32), jnp.array([0.5, -1.0, 0.25], jnp.float32)

  def f(x, m):
    x, m = (v.reshape(1, 1, 1, 3) for v in (x, m))
    return jaxdnn.divisive_norm(x, m, size=3, alpha=1.0, beta=0.75, k=1.0, axis=1).ravel()

  y, vjp = jax.vjp(f, x, m)
  np.testing.assert_allclose(y, [0.8320674, 0.57894653, 1.7986622], rtol=1e-6)
  dx, dm = vjp(jnp.array([1.0, 0.0, 0.0], jnp.float32))
  np.testing.assert_allclose(dx, [0.7778021, -0.16279578, 0.0], rtol=1e-6)
  np.testing.assert_allclose(dm, [0.21706104, 0.0, 0.0], rtol=1e-6)


def test_zeros():
  x = jnp.zeros((3, 8))
  np.testing.assert_array_equal(jaxdnn.local_response_norm(x), 0)
  np.testing.assert_allclose(jax.grad(lambda x: jaxdnn.local_response_norm(x).sum())(x), 2.0**-0.75, rtol=1e-6)


# Derivatives and compositions ----------------------------------------------------------------------------------------

X = (2, 4, 5, 3)
FUNCTIONS = {
  "across": (functools.partial(jaxdnn.local_response_norm, size=4, **DEFAULTS), [X]),
  "across_first": (functools.partial(jaxdnn.local_response_norm, size=3, axis=1, **DEFAULTS), [X]),
  "within": (functools.partial(jaxdnn.local_response_norm, size=(2, 3), mode="within_channel", **DEFAULTS), [X]),
  "divisive": (functools.partial(jaxdnn.divisive_norm, size=3, **DEFAULTS), [X, X]),
  "divisive_shared_means": (functools.partial(jaxdnn.divisive_norm, size=3, **DEFAULTS), [X, (4, 5, 1)]),
  "contrast": (functools.partial(jaxdnn.local_contrast_norm, size=3), [X]),
  "contrast_by_channel": (functools.partial(jaxdnn.local_contrast_norm, size=3, axis=1, across_channels=False), [X]),
}
# Those that bring primitives of their own; the others are made of them and of pooling.
PRIMITIVES = ["across", "across_first", "within", "divisive"]


def arguments(name):
  f, shapes = FUNCTIONS[name]
  return f, [jnp.asarray(sample(s, "float64", i)) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_both_orders_and_modes(name):
  f, args = arguments(name)
  order = 2 if name in PRIMITIVES else 1
  check_grads(jax.jit(f), args, order=order, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", ["across", "divisive"])
def test_derivative_maps_are_differentiable_in_every_operand(name):
  f, args = arguments(name)
  t = jnp.asarray(sample(X, "float64", 5))
  tangents = (t, *(0.3 * t for a in args[1:]))
  check_grads(jax.jit(lambda t, *a: jax.jvp(f, a, (t, *tangents[1:]))[1]), (t, *args), order=1, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda g, *a: jax.vjp(f, *a)[1](g)[0]), (t, *args), order=1, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", [*PRIMITIVES, "divisive_shared_means"])
def test_vmap_over_every_subset_of_operands(name):
  f, args = arguments(name)
  stacked = [jnp.stack([a, -0.5 * a, a + 1]) for a in args]
  w = jnp.asarray(sample(X, "float64", 9))
  gradient = jax.jit(jax.grad(lambda *a: jnp.vdot(w, f(*a)), tuple(range(len(args)))))
  for mapped in range(1, 1 << len(args)):
    axes = [0 if mapped >> i & 1 else None for i in range(len(args))]
    some = [s if a == 0 else s[0] for s, a in zip(stacked, axes, strict=True)]
    each = [gradient(*(s[i] if a == 0 else s for s, a in zip(some, axes, strict=True))) for i in range(3)]
    for got, *want in zip(jax.vmap(gradient, axes)(*some), *each, strict=True):
      np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-10, atol=1e-12)
  last = jax.vmap(f, -1, -1)(*(jnp.moveaxis(s, 0, -1) for s in stacked))
  np.testing.assert_allclose(last[..., 1], f(*(s[1] for s in stacked)), rtol=1e-10, atol=1e-12)


def test_gradient_of_means_follows_through_them():
  """With means that depend on x, the net gradient is that of the composition."""
  x = jnp.asarray(sample(X, "float64"))
  blur = functools.partial(jaxdnn.avg_pool, window=(3, 3), padding="SAME")
  check_grads(jax.jit(lambda x: jaxdnn.divisive_norm(x, blur(x), size=3, **DEFAULTS)), (x,), order=1)


def test_only_x_is_kept():
  x = jnp.zeros((2, 3, 8), jnp.bfloat16)
  kept = jax.tree.leaves(jax.vjp(jaxdnn.local_response_norm, x)[1])
  assert [(k.size, k.dtype) for k in kept] == [(x.size, jnp.bfloat16)]


@pytest.mark.mesh
def test_explicit_mesh_keeps_every_other_axis_sharded():
  mesh = jax.make_mesh((4, 2), ("a", "b"))
  x, m = (jnp.asarray(sample((8, 3, 4, 6), "float64", i)) for i in range(2))
  across = functools.partial(jaxdnn.local_response_norm, axis=1, size=3)
  divisive = functools.partial(jaxdnn.divisive_norm, size=(3, 3))
  loss = lambda x, m: (across(x) * divisive(x, m)).sum()  # noqa: E731
  want = across(x), divisive(x, m), *jax.grad(loss, (0, 1))(x, m)
  with jax.set_mesh(mesh):
    xs, rows = jax.device_put(x, P("a", None, None, "b")), jax.device_put(x, P("a", None, "b"))
    got = across(rows), divisive(xs, m), *jax.grad(loss, (0, 1))(xs, m)
    assert jax.typeof(got[0]).sharding.spec == P("a", None, "b", None)
    assert jax.typeof(got[1]).sharding.spec == P("a", None, None, "b")
    for g, e in zip(got, want, strict=True):
      np.testing.assert_allclose(g, e, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="sharded over mesh axis 'b' along dimension 2"):
      divisive(rows)
    with pytest.raises(ValueError, match="sharded over mesh axis 'b' along dimension 3"):
      jaxdnn.local_response_norm(xs)


# Local contrast ------------------------------------------------------------------------------------------------------


def contrast_oracle(x, size, epsilon, across):
  """Channels last, two spatial dimensions, one element after the other."""

  def box_mean(v):
    out = np.empty_like(v)
    low, high = (size - 1) // 2, size // 2 + 1
    for i, j in np.ndindex(*v.shape[1:3]):
      box = v[:, max(0, i - low) : i + high, max(0, j - low) : j + high]
      out[:, i, j] = box.mean((1, 2, 3))[:, None] if across else box.mean((1, 2))
    return out

  v = exact(x) - box_mean(exact(x))
  sigma = np.sqrt(box_mean(v * v))
  return v / np.maximum(np.maximum(sigma, sigma.mean((1, 2), keepdims=True)), epsilon)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("across", [True, False])
def test_local_contrast(across, dtype):
  x = sample((2, 9, 8, 3), dtype)
  for size in (3, 4, 9):
    want = contrast_oracle(x, size, 1e-4, across)
    f = jax.jit(functools.partial(jaxdnn.local_contrast_norm, size=size, across_channels=across))
    assert_close(f(x), want, dtype, terms=size * size, scale=np.abs(want).max())
    first = jax.jit(functools.partial(jaxdnn.local_contrast_norm, size=size, across_channels=across, axis=1))
    np.testing.assert_allclose(exact(first(np.moveaxis(x, -1, 1))), np.moveaxis(exact(f(x)), -1, 1), atol=1e-5)


def test_an_image_without_contrast_gives_zeros_and_finite_gradients():
  x = jnp.full((1, 6, 5, 2), 7.0)
  y, vjp = jax.vjp(jaxdnn.local_contrast_norm, x)
  np.testing.assert_array_equal(y, 0)
  assert np.isfinite(vjp(jnp.ones_like(y))[0]).all()
  assert np.isfinite(jax.jvp(jaxdnn.local_contrast_norm, (x,), (x,))[1]).all()


def test_local_contrast_forgets_brightness_and_scale():
  x = jnp.asarray(sample((1, 12, 12, 2), "float64"))
  y = jaxdnn.local_contrast_norm(x, 5)
  np.testing.assert_allclose(jaxdnn.local_contrast_norm(40 + 3 * x, 5), y, rtol=1e-9, atol=1e-12)


# Equality with others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_matches_torch(size):
  torch = pytest.importorskip("torch")
  x = sample((2, 7, 5, 3), "float64")
  want = torch.nn.functional.local_response_norm(torch.from_numpy(x), size, alpha=0.5, beta=0.75, k=1.0).numpy()
  got = jaxdnn.local_response_norm(x, size, alpha=0.5, beta=0.75, k=1.0, axis=1, padding="SAME_LOWER")
  np.testing.assert_allclose(got, want, rtol=1e-12)


def test_matches_the_formulas_of_torch_and_tensorflow():
  x = sample((2, 3, 11), "float64")
  for size in (3, 4):
    padded = np.pad(x**2, ((0, 0), (0, 0), (size // 2, (size - 1) // 2)))
    mean = np.lib.stride_tricks.sliding_window_view(padded, size, -1).mean(-1)
    got = jaxdnn.local_response_norm(x, size, alpha=0.5, k=1.0, padding="SAME_LOWER")
    np.testing.assert_allclose(got, x / (1 + 0.5 * mean) ** 0.75, rtol=1e-12)
  radius, bias, alpha, beta = 2, 1.5, 0.3, 0.5
  energy = np.stack([(x[..., max(0, i - radius) : i + radius + 1] ** 2).sum(-1) for i in range(11)], -1)
  got = jaxdnn.local_response_norm(x, 2 * radius + 1, alpha=alpha, beta=beta, k=bias, divide_by_size=False)
  np.testing.assert_allclose(got, x / (bias + alpha * energy) ** beta, rtol=1e-12)


# Lowering ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("jaxdnn.lrn.v1" not in _extension.TARGETS, reason="built without the CUDA kernels")
def test_cuda_lowering_names_target_and_attributes():
  def text(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

  first = text(jax.value_and_grad(lambda x: jaxdnn.local_response_norm(x, 4, axis=1)[0, 0, 0, 0]), (2, 8, 3, 3))
  assert "@jaxdnn.lrn.v1" in first and "@jaxdnn.lrn_vjp.v1" in first
  assert "before = dense<1> : tensor<1xi64>" in first and "after = dense<2> : tensor<1xi64>" in first
  assert "beta = 7.500000e-01 : f64" in first and "scale = 2.500000e-05 : f64" in first
  assert "transpose" not in first, "channels-first data must not move"
  assert "tensor<0xui8>" in text(jax.grad(lambda x: jaxdnn.local_response_norm(x)[0, 0]), (2, 8))
  box = text(lambda x: jaxdnn.divisive_norm(x, x, size=(1, 3, 1)), (2, 8, 3, 3, 5))
  assert "before = dense<1> : tensor<1xi64>" in box, "dimensions of one cell are no part of a window"
  assert "jaxdnn." not in text(functools.partial(jaxdnn.local_response_norm, beta=0.0), (2, 8))


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors():
  lrn, div, lcn = jaxdnn.local_response_norm, jaxdnn.divisive_norm, jaxdnn.local_contrast_norm
  x = jnp.zeros((2, 3, 4, 5))
  for name, f in {"local_response_norm": lrn, "divisive_norm": div, "local_contrast_norm": lcn}.items():
    with pytest.raises(TypeError, match=f"{name}: x must be floating-point, got int32"):
      f(jnp.zeros((2, 3, 4), jnp.int32))
    with pytest.raises(ValueError, match=f"{name}: axis must name an axis of an array of rank 4, got 4"):
      f(x, axis=4)
    with pytest.raises(TypeError, match=f"{name}: axis must be an integer, got 1.5"):
      f(x, axis=1.5)
    with pytest.raises(ValueError, match=rf"{name}: size must be positive, got \(0"):
      f(x, size=0)
  with pytest.raises(TypeError, match=r"size must be an integer across channels, got \(3, 3\)"):
    lrn(x, (3, 3))
  with pytest.raises(ValueError, match="mode must be 'across_channels' or 'within_channel', got 'channels'"):
    lrn(x, mode="channels")
  with pytest.raises(ValueError, match="padding must be 'SAME' or 'SAME_LOWER', got 'VALID'"):
    lrn(x, padding="VALID")
  for name in ("alpha", "beta", "k"):
    with pytest.raises(TypeError, match=f"{name} must be a number, got 'a'"):
      div(x, **{name: "a"})
    with pytest.raises(ValueError, match=f"{name} must be finite, got nan"):
      lrn(x, **{name: float("nan")})
  with pytest.raises(ValueError, match=r"alpha and k must not be negative, got alpha=-1.0 and k=2.0"):
    lrn(x, alpha=-1)
  with pytest.raises(ValueError, match=r"size \(3, 3, 3, 3\) must name 1 to 3 spatial dimensions, got an array"):
    div(x, size=(3, 3, 3, 3))
  with pytest.raises(ValueError, match=r"size 3 for all dimensions but the first and the channels must name 1 to 3"):
    div(x[0, 0], size=3)
  with pytest.raises(TypeError, match="means must be of x's type float64, got float32"):
    div(x, jnp.zeros((5,), jnp.float32))
  with pytest.raises(ValueError, match=r"means of shape \(3, 5\) do not broadcast to x of shape \(2, 3, 4, 5\)"):
    div(x, jnp.zeros((3, 5)))
  for epsilon in (0, -1.0):
    with pytest.raises(ValueError, match=f"epsilon must be positive, got {epsilon}"):
      lcn(x, epsilon=epsilon)


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("first", range(1, 300, 60))
def test_every_number_of_channels(first, axis):
  def case(c, n):
    return LrnCase((2 + c % 3, c) if axis == -1 else (2, c, 3 + c % 2), n, options={"axis": axis})

  for dtype in ("float32", "bfloat16"):
    check_cases([case(c, (3, 5, 5, 7, 4)[c % 5]) for c in range(first, first + 60)], dtype)


def check_repeatable(case, dtype, repeats=10):
  xs, g = [jnp.asarray(x) for x in operands(case, dtype)], jnp.asarray(sample(case.shape, dtype, 7))
  f, want = function(case), Oracle(case, *map(exact, operands(case, dtype)))
  y = assert_repeatable(f, *xs, repeats=repeats)
  assert_close(y, want.y, dtype, terms=want.terms, scale=np.abs(want.y))
  dx = assert_repeatable(lambda g, *xs: jax.vjp(f, *xs)[1](g)[0], g, *xs, repeats=repeats)
  assert_close(dx, want.vjp(g), dtype, terms=want.terms, scale=want.vjp_scale(g))
  dy = assert_repeatable(lambda t, *xs: jax.jvp(lambda x: f(x, *xs[1:]), xs[:1], (t,))[1], g, *xs, repeats=repeats)
  assert_close(dy, want.jvp(g), dtype, terms=want.terms, scale=want.jvp_scale(g))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_everything_and_repeat(dtype):
  for case in (
    LrnCase((333, 96)), LrnCase((333, 37)), LrnCase((9, 64, 15), options={"axis": 1}),
    LrnCase((9, 64, 16), 3, options={"axis": 1}),
    LrnCase((3, 20, 21, 16), 3, "within_channel"), LrnCase((3, 5, 20, 21), 5, "within_channel", {"axis": 1}),
    LrnCase((3, 20, 21, 16), 5, "divisive"), LrnCase((3, 200), 40),
  ):  # fmt: skip
    check_repeatable(case, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  for case in (
    LrnCase((33, 24)), LrnCase((33, 21), 4), LrnCase((33, 30), 40), LrnCase((3, 17, 15), options={"axis": 1}),
    LrnCase((3, 40, 16), 3, options={"axis": 1}), LrnCase((2, 9, 11, 8), 3, "within_channel"),
    LrnCase((2, 3, 9, 11), 5, "within_channel", {"axis": 1}), LrnCase((2, 9, 11, 8), 5, "divisive"),
  ):  # fmt: skip
    check_repeatable(case, "float32", repeats=2)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """Offsets past 31 bits. The last elements differ, so that a wrapped offset shows."""
  for shape, axis in [((2**28 + 1, 8), -1), ((2**28 + 1, 9), -1), ((3, 2**10, 2**20), 1), ((3, 1025, 2**20 - 1), 1)]:
    f = functools.partial(jaxdnn.local_response_norm, size=3, alpha=3.0, beta=1.0, k=1.0, axis=axis)
    gradient = jax.jit(jax.grad(lambda x, f=f: f(x).astype(jnp.float32).sum()))
    x = jnp.ones(shape, jnp.bfloat16).at[(-1,) * len(shape)].set(3.0)
    for g in (f, gradient):
      tail = (-1, slice(None), slice(-8, None)) if axis == 1 else -1
      np.testing.assert_array_equal(exact(g(x)[tail]), exact(g(x[-1:])[tail]))
    del x


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_boxes_of_more_than_2_to_the_31_elements():
  f = functools.partial(jaxdnn.local_response_norm, size=3, mode="within_channel", alpha=9.0, beta=1.0, k=1.0)
  for shape, axis in [((2**11 + 1, 2**7, 2**7, 2**6), -1), ((2**11 + 1, 2**6, 2**7, 2**7), 1)]:
    x = jnp.ones(shape, jnp.bfloat16).at[-1, -1, -1, -1].set(3.0)
    np.testing.assert_array_equal(exact(f(x, axis=axis)[-1]), exact(f(x[-1:], axis=axis))[0])
    del x
