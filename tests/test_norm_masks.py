"""Layer, RMS, group and instance norm with `where`: masks of every shape, and in every derivative."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from numerics import ACCUMULATOR, DTYPES, assert_close, exact, sample


class Case(NamedTuple):
  norm: Any
  """Of x, scale and bias, with `where=`."""
  shape: tuple[int, ...]
  parameters: tuple[int, ...]
  masks: tuple[tuple[int, ...], ...]
  axes: tuple[int, ...]
  """Over which statistics are taken, in `view`, to whose shape x is brought; parameters broadcast to it as `affine`."""
  affine: tuple[int, ...]
  view: tuple[int, ...] = ()
  center: bool = True
  epsilon: float = 1e-5


def norm_of_groups(x, scale, bias, *, where, num_groups, axis, activation=None):
  return jaxdnn.group_norm(x, num_groups, scale, bias, axis=axis, where=where, activation=activation)


def grouped(shape, view, axes, affine, axis, groups, masks):
  norm = functools.partial(norm_of_groups, num_groups=groups, axis=axis)
  return Case(norm, shape, (shape[axis],), masks, axes, affine, view)


X = (3, 4, 6)
CASES = {
  "layer": Case(jaxdnn.layer_norm, X, (6,), ((), (6,), (3, 1, 6), X, (4, 1)), (2,), (6,)),
  "layer_axes": Case(
    functools.partial(jaxdnn.layer_norm, axis=(0, 2)), X, (3, 6), ((3, 1, 1), (4, 1)), (0, 2), (3, 1, 6)
  ),
  "rms": Case(jaxdnn.rms_norm, X, (6,), (X, (4, 1)), (2,), (6,), center=False, epsilon=1e-6),
  "adaptive": Case(
    functools.partial(jaxdnn.adaptive_layer_norm, zero_centered=False),
    X, (3, 6), (X, (3, 4, 1)), (2,), (3, 1, 6), epsilon=1e-6,
  ),
  "group": grouped(
    (3, 5, 8), (3, 5, 2, 4), (1, 3), (2, 4), -1, 2, ((8,), (3, 5, 1), (3, 5, 8), (3, 1, 1)),
  ),
  "group_first": grouped((3, 8, 5), (3, 2, 4, 5), (2, 3), (2, 4, 1), 1, 2, ((3, 1, 5), (8, 1))),
  "group_between": grouped(
    (3, 2, 6, 5), (3, 2, 3, 2, 5), (1, 3, 4), (3, 2, 1), 2, 3, ((3, 2, 6, 5), (2, 1, 5))
  ),
  "instance": Case(jaxdnn.instance_norm, (3, 5, 4), (4,), ((3, 5, 1), (3, 1, 4)), (1,), (4,)),
}  # fmt: skip
PROBLEMS = [(name, shape) for name, case in CASES.items() for shape in case.masks]


def masks_of(shape, seed=0):
  """Booleans, about two thirds of them true, and none of the first index along the first axis."""
  mask = np.random.default_rng(seed).random(shape) < 0.65
  if mask.ndim and len(mask) > 1:
    mask[0] = False
  return mask if mask.ndim else np.True_


def operands(case, dtype, seed=0):
  wide = ACCUMULATOR[dtype]
  x = (2 * exact(sample(case.shape, dtype, seed)) + 1).astype(sample((), dtype).dtype)
  return x, sample(case.parameters, wide, seed + 1), sample(case.parameters, wide, seed + 2)


class Oracle:
  """By the formulas in float64, on the view in which `axes` are normalised."""

  def __init__(self, case, x, scale, bias, where):
    self.case, self.shape = case, case.view or case.shape
    self.keep = np.broadcast_to(where, case.shape).reshape(self.shape)
    self.scale, self.bias = exact(scale).reshape(case.affine), exact(bias).reshape(case.affine)
    d = self.masked(x)
    for _ in range(2 if case.center else 0):
      d = self.masked(d - self.mean(d))
    self.rstd = 1 / np.sqrt(self.mean(d * d) + case.epsilon)
    self.h = d * self.rstd

  def masked(self, a):
    return np.where(self.keep, exact(a).reshape(self.shape), 0)

  def mean(self, a):
    return a.sum(self.case.axes, keepdims=True) / np.maximum(self.keep.sum(self.case.axes, keepdims=True), 1)

  def project(self, q):
    """The derivative of h along q, which is its own transpose."""
    moved = q - self.mean(q) if self.case.center else q
    return self.masked(self.rstd * (moved - self.h * self.mean(q * self.h)))

  def value(self):
    return self.masked(self.h * self.scale + self.bias).reshape(self.case.shape)

  def jvp(self, t):
    return (self.project(self.masked(t)) * self.scale).reshape(self.case.shape)

  def vjp(self, g):
    g = self.masked(g)
    return self.project(g * self.scale).reshape(self.case.shape), self.sum(g * self.h), self.sum(g)

  def sum(self, a):
    affine = (1,) * (a.ndim - len(self.case.affine)) + self.case.affine
    kept = a.sum(tuple(d for d, n in enumerate(affine) if n == 1), keepdims=True)
    return kept.reshape(self.case.parameters)


# Values and derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_entries_change_nothing(dtype):
  """Values and derivatives are the oracle's, theirs are 0, and what the masked entries hold changes not a bit."""
  data, problems = [], PROBLEMS if dtype == "float32" else PROBLEMS[::3]
  for i, (name, shape) in enumerate(problems):
    case = CASES[name]
    g, t = (sample(case.shape, dtype, 5 * i + j) for j in (3, 4))
    data.append((*operands(case, dtype, 5 * i), masks_of(shape, i), g, t))

  @jax.jit
  def everything(data):
    results = []
    for (name, _), (x, scale, bias, where, g, t) in zip(problems, data, strict=True):
      f = functools.partial(CASES[name].norm, where=where)
      y, vjp = jax.vjp(f, x, scale, bias)
      results.append((y, vjp(g), jax.jvp(lambda x, f=f, s=scale, b=bias: f(x, s, b), (x,), (t,))[1]))
    return results

  clean = everything(data)
  wide = ACCUMULATOR[dtype]
  for (name, _), (x, scale, bias, where, g, t), (y, (dx, dscale, dbias), dy) in zip(problems, data, clean, strict=True):
    oracle = Oracle(CASES[name], x, scale, bias, where)
    size = 16 * np.broadcast_to(1 + oracle.rstd, oracle.shape).reshape(x.shape)
    assert_close(y, oracle.value(), dtype, scale=size)
    want, want_scale, want_bias = oracle.vjp(g)
    assert_close(dx, want, dtype, scale=size)
    assert_close(dscale, want_scale, wide, terms=x.size, scale=8)
    assert_close(dbias, want_bias, wide, terms=x.size, scale=8)
    assert_close(dy, oracle.jvp(t), dtype, scale=size)
    masked = ~np.broadcast_to(where, x.shape)
    for array in (y, dx, dy):
      assert not exact(array)[masked].any() and not np.signbit(exact(dx)[masked]).any()

  for junk in (1e30, -np.inf, np.nan):
    with np.errstate(over="ignore"):
      spoiled = [
        (*(np.where(m, a, np.asarray(junk).astype(a.dtype)) if i in (0, 4, 5) else a for i, a in enumerate(d)),)
        for d in data
        for m in [np.broadcast_to(d[3], d[0].shape)]
      ]
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(everything(spoiled)), strict=True):
      np.testing.assert_array_equal(exact(a), exact(b))


@pytest.mark.parametrize("name", ["layer", "group"])
def test_derivatives_of_every_order_and_mode(name):
  case = CASES[name]
  x, scale, bias = map(jnp.asarray, operands(case, "float64"))
  where = masks_of(case.shape, 1)
  f = jax.jit(functools.partial(case.norm, where=where))
  check_grads(f, (x, scale, bias), order=2)
  hessian = jax.jit(jax.hessian(lambda x: jnp.sin(case.norm(x, scale, bias, where=where)).sum()))
  second = np.asarray(hessian(np.where(where, x, np.nan)))
  assert np.isfinite(second).all() and second.any()
  assert not second[~where].any() and not second[(..., *np.nonzero(~where))].any()


def test_second_order_where_whole_rows_are_masked():
  """There the kernels run, between two selections."""
  x, scale, bias = map(jnp.asarray, operands(CASES["layer"], "float64"))
  where = jnp.array([True, False, True, True])[:, None]
  f = functools.partial(jaxdnn.layer_norm, where=where)
  spoiled = jnp.where(where, x, jnp.nan)
  second = np.asarray(jax.jit(jax.hessian(lambda x: jnp.sin(f(x, scale, bias)).sum()))(spoiled))
  assert np.isfinite(second).all() and not second[:, 1].any() and not second[:, :, :, :, 1].any()
  clean = jax.jit(jax.hessian(lambda x: jnp.sin(jaxdnn.layer_norm(x, scale, bias)).sum()))(x)
  kept = [0, 2, 3]
  np.testing.assert_allclose(second[:, kept][:, :, :, :, kept], clean[:, kept][:, :, :, :, kept], rtol=1e-10)


@pytest.mark.parametrize("name", ["layer", "group"])
def test_vmap_over_every_subset_of_operands(name):
  case = CASES[name]
  args = [np.stack(a) for a in zip(*(operands(case, "float64", 5 * i) for i in range(2)), strict=True)]
  args.append(np.stack([masks_of(case.shape, i) for i in range(2)]))

  def both(x, scale, bias, where):
    loss = lambda *a: jnp.sin(case.norm(*a, where=where)).sum()  # noqa: E731
    return case.norm(x, scale, bias, where=where), jax.grad(loss, (0, 1, 2))(x, scale, bias)

  subsets = [[bool(s >> i & 1) for i in range(4)] for s in range(1, 16)]

  @jax.jit
  def mapped(*args):
    return [
      jax.vmap(both, [0 if m else None for m in subset])(*(a if m else a[0] for a, m in zip(args, subset, strict=True)))
      for subset in subsets
    ]

  one = jax.jit(both)
  for subset, got in zip(subsets, mapped(*args), strict=True):
    each = [one(*(a[i if m else 0] for a, m in zip(args, subset, strict=True))) for i in range(2)]
    want = jax.tree.map(lambda *a: np.stack(a), *each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), got, want)


# Agreement -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, dtype", [*((name, "float32") for name in CASES), ("layer", "bfloat16")])
def test_everything_unmasked_is_no_mask(name, dtype):
  case = CASES[name]
  x, scale, bias = operands(case, dtype)

  @jax.jit
  def both(x, scale, bias, where):
    return (
      case.norm(x, scale, bias, where=where),
      case.norm(x, scale, bias, where=where[:1, :1]),
      case.norm(x, scale, bias, where=None),
    )

  element, whole, none = both(x, scale, bias, np.ones((1, 1, *case.shape[2:]), bool))
  assert_close(element, exact(none), dtype, scale=8)
  assert_close(whole, exact(none), dtype, scale=8)


def test_equality_with_flax():
  """At unmasked positions; flax normalises the masked ones too."""
  linen = pytest.importorskip("flax.linen")
  x, where = sample((3, 5, 8), "float64"), np.random.default_rng(0).random((3, 5, 8)) < 0.7
  types = dict(dtype="float64", param_dtype="float64", use_fast_variance=False)
  ours = [
    (linen.LayerNorm(**types), functools.partial(jaxdnn.layer_norm, epsilon=1e-6)),
    (linen.RMSNorm(**types), jaxdnn.rms_norm),
    (linen.GroupNorm(num_groups=2, **types), functools.partial(jaxdnn.group_norm, num_groups=2, epsilon=1e-6)),
    (linen.InstanceNorm(**types), functools.partial(jaxdnn.instance_norm, epsilon=1e-6)),
  ]
  for layer, f in ours:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      want = layer.apply(layer.init(jax.random.key(0), x), x, mask=jnp.asarray(where))
    np.testing.assert_allclose(np.asarray(f(x, where=where))[where], np.asarray(want)[where], rtol=1e-9, atol=1e-9)


def test_a_large_mean_costs_no_digits():
  """Rows around 1e4 with deviation 1e-2 in float32, and something larger yet where the mask is False."""
  x = (1e4 + 1e-2 * sample((4, 512), "float64")).astype(np.float32)
  where = np.random.default_rng(0).random(x.shape) < 0.7
  spoiled = np.where(where, x, np.float32(1e30))
  mean = lambda a: np.where(where, a, 0).sum(-1, keepdims=True) / where.sum(-1, keepdims=True)  # noqa: E731
  d = exact(x) - mean(exact(x))
  want = np.where(where, d / np.sqrt(mean(d * d) + 1e-5), 0)
  assert_close(jaxdnn.layer_norm(spoiled, where=where), want, "float32", scale=8)
  got = jaxdnn.group_norm(spoiled[:, None], 1, axis=1, where=where[:, None])
  assert_close(got[:, 0], want, "float32", scale=8)


# What stands where nothing is unmasked -------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 1e-50, 1e-5])
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 3, 4)])
def test_nothing_unmasked(shape, epsilon):
  """Not even with an epsilon that is 0, or so small that it is 0 in float32, is there a NaN."""
  where = np.zeros(shape, bool)
  where[1] = True
  x = np.where(where, sample((2, 3, 4), "float32"), np.float32(np.nan))
  norms = [lambda x, s, b: jaxdnn.group_norm(x, 2, s, b, epsilon=epsilon, where=where)]
  if epsilon:
    norms.append(lambda x, s, b: jaxdnn.layer_norm(x, s, b, epsilon=epsilon, where=where))
    norms.append(lambda x, s, b: jaxdnn.rms_norm(x, s, b, epsilon=epsilon, where=where))
  for f in norms:
    with jax.debug_nans(True):
      y, vjp = jax.vjp(jax.jit(f), x, jnp.ones(4, "float32"), jnp.ones(4, "float32"))
      gradients = vjp(jnp.ones_like(y))
    assert not y[0].any() and np.asarray(y[1]).any() and not gradients[0][0].any()
    assert all(np.isfinite(g).all() for g in gradients)


def test_an_activation_leaves_masked_entries_zero():
  """silu is fused, softplus applied after; neither is 0 at the bias."""
  x, where, ones = jnp.ones((2, 3, 4)), jnp.array([True, False, True])[:, None], jnp.ones(4)
  for name, value in (("silu", 1 / (1 + np.exp(-1.0))), ("softplus", np.log1p(np.e))):
    y = jaxdnn.group_norm(x, 2, ones, ones, activation=name, where=where)
    np.testing.assert_allclose(y, np.where(where, value, 0) * np.ones(x.shape), rtol=1e-6)


def test_special_values_among_the_unmasked():
  x = np.array([[1.0, np.nan, 2.0, np.nan], [1.0, np.inf, 2.0, np.nan], [1.0, 5.0, 5.0, np.nan]])
  where = np.array([True, True, True, False])
  np.testing.assert_array_equal(np.isnan(jaxdnn.layer_norm(x, where=where)), [[1, 1, 1, 0], [1, 1, 1, 0], [0] * 4])
  np.testing.assert_array_equal(jaxdnn.rms_norm(x, where=where)[1], [0, np.nan, 0, 0])
  np.testing.assert_array_equal(jax.grad(lambda x: jaxdnn.layer_norm(x, where=where).sum())(x)[:, 3], 0)


# Residuals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "add, norm, dtype",
  [(jaxdnn.add_layer_norm, jaxdnn.layer_norm, "bfloat16"), (jaxdnn.add_rms_norm, jaxdnn.rms_norm, "float32")],
)
def test_the_sum_knows_no_mask(add, norm, dtype):
  """It is x + residual everywhere, whatever it is there; the norm is the masked norm of it."""
  x, r, s = sample(X, dtype), sample(X, dtype, 1), sample((6,), "float32", 2)
  for shape in (X, (4, 1)):
    where = masks_of(shape)
    y, total = jax.jit(lambda x, r, w=where: add(x, r, s, where=w))(np.where(where, x, np.asarray(np.nan, x.dtype)), r)
    assert_close(total, np.where(where, exact(x) + exact(r), np.nan), dtype)
    want = jax.jit(lambda t, w=where: norm(t, s, where=w))(total)
    assert_close(y, exact(want), dtype, scale=8)
    gradient = jax.grad(lambda x, w=where: add(x, r, s, where=w)[0].astype("float32").sum())(x)
    assert not exact(gradient)[~np.broadcast_to(where, X)].any()


# What runs, and what does not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, shape, kernel", [
  ("layer", (4, 1), True), ("layer", (3, 1, 1), True), ("layer", (), True), ("layer", (6,), False),
  ("layer_axes", (4, 1), True), ("layer_axes", (3, 1, 1), False), ("adaptive", (3, 4, 1), True),
  ("group", (3, 1, 1), True), ("group", (8,), False), ("group", (5, 1), False), ("instance", (3, 1, 4), True),
  ("instance", (3, 5, 1), False),
])  # fmt: skip
def test_masks_of_whole_rows_keep_the_kernel(name, shape, kernel):
  case = CASES[name]
  text = str(jax.make_jaxpr(functools.partial(case.norm, where=masks_of(shape)))(*operands(case, "float32")))
  assert bool(re.search(r"jaxdnn_(layer|group)_norm", text)) == kernel


@pytest.mark.parametrize("name", CASES)
def test_errors(name):
  case = CASES[name]
  args = operands(case, "float32")
  op = {"layer_axes": "layer", "group_first": "group", "group_between": "group", "adaptive": "adaptive_layer"}
  op = f"{op.get(name, name)}_norm"
  for where, kind in ((np.ones(case.shape), "float64"), (np.ones(case.shape, int), "int64")):
    with pytest.raises(TypeError, match=f"{op}: where must be boolean, got {kind}"):
      case.norm(*args, where=where)
  with pytest.raises(TypeError, match=f"{op}: where must be an array, got 'mask'"):
    case.norm(*args, where="mask")
  for shape in ((7,), (1, *case.shape), (2, *case.shape[1:])):
    message = f"{op}: where of shape {shape} does not broadcast to x of shape {case.shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
      case.norm(*args, where=np.ones(shape, bool))


def test_nothing_to_normalize():
  for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
    x, where = jnp.ones(shape), jnp.ones(shape, bool)
    for y in (
      jaxdnn.layer_norm(x, where=where),
      jaxdnn.add_rms_norm(x, x, where=where)[0],
      jaxdnn.group_norm(x, 1, where=where),
      jaxdnn.instance_norm(x, axis=1, where=where[..., :1]),
    ):
      assert y.shape == shape
