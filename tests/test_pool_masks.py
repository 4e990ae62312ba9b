"""Pooling with `where`: masks of every shape, against brute force, and in every derivative."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
import pool_oracle
from numerics import ACCUMULATOR, DTYPES, ROUNDOFF, assert_close, exact, sample
from pool_cases import PoolCase

INF, NAN = np.inf, np.nan
PROBLEMS = [
  (PoolCase("resnet", (2, 6, 5, 3), (3, 3), 2, 1), (2, 6, 5, 1)),
  (PoolCase("overlapping", (2, 5, 6, 3), (3, 2), (1, 2), "SAME"), (2, 5, 6, 3)),
  (PoolCase("dilated", (2, 7, 6, 2), (2, 3), 1, 2, (2, 2)), (6, 2)),
  (PoolCase("sequence", (2, 9, 4), (3,), 2), (9, 1)),
  (PoolCase("channels", (2, 5, 4), (3,)), (4,)),
  (PoolCase("by_example", (2, 5, 4), (3,), padding=1), (2, 1, 1)),
  (PoolCase("cropped", (1, 7, 6, 2), (2, 2), 2, ((-1, 2), (2, -1))), (7, 1, 2)),
  (PoolCase("volume", (1, 4, 3, 4, 2), (2, 2, 2), 2, 1), (4, 3, 4, 1)),
  (PoolCase("whole", (2, 4, 5, 2), (4, 5)), (2, 4, 5, 1)),
  (PoolCase("scalar", (2, 5, 2), (2,)), ()),
]
KINDS = {
  "max": jaxdnn.max_pool,
  "min": jaxdnn.min_pool,
  "avg": jaxdnn.avg_pool,
  "avg_inside": functools.partial(jaxdnn.avg_pool, count_include_pad=False),
  "avg_override": functools.partial(jaxdnn.avg_pool, divisor_override=3.0),
  "sum": jaxdnn.sum_pool,
  "lp": functools.partial(jaxdnn.lp_pool, power=3.0),
}


def mask_of(shape, seed=0):
  """Booleans, half of them true, and none of the first example's."""
  mask = np.random.default_rng(seed).random(shape) < 0.5
  if mask.ndim and len(mask) > 1:
    mask[0] = False
  return mask if mask.ndim else np.True_


def oracle(kind, case, x, g, where):
  """`(y, dx)` in float64."""
  x, g, where = exact(x), exact(g), np.broadcast_to(where, x.shape)
  geometry = case.spelled_out
  cells = np.prod(case.window)
  if kind == "max":
    return pool_oracle.max_pool(x, g, *geometry, where=where)
  if kind == "min":
    y, dx = pool_oracle.max_pool(-x, g, *geometry, where=where)
    return -y, dx
  kept = np.where(where, x, 0)
  if kind == "lp":
    return pool_oracle.lp_pool(kept, g, 3.0, *geometry)
  if kind.startswith("avg") and kind != "avg_override":
    return pool_oracle.avg_pool(x, g, *geometry, kind == "avg", where=where)
  scale = cells / 3 if kind == "avg_override" else cells
  y, dx = pool_oracle.avg_pool(kept, g, *geometry, True)
  return scale * y, np.where(where, scale * dx, 0)


# Values and derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_elements_change_nothing(dtype):
  """Values and derivatives are the oracle's, theirs are 0, and what the masked elements hold changes not a bit."""
  steps = {"max": 1, "avg": 2} if dtype == "float32" else {}
  problems = [(k, *p) for i, k in enumerate(KINDS) for p in PROBLEMS[i % steps.get(k, 7) :: steps.get(k, 7)]]
  data = []
  for i, (_, case, shape) in enumerate(problems):
    arrays = (sample(s, dtype, 3 * i + j) for j, s in enumerate((case.shape, case.out_shape, case.shape)))
    data.append((*arrays, mask_of(shape, i)))

  @jax.jit
  def everything(data):
    results = []
    for (kind, case, _), (x, g, t, where) in zip(problems, data, strict=True):
      f = functools.partial(KINDS[kind], window=case.window, where=where, **case.keywords)
      y, vjp = jax.vjp(f, x)
      results.append((y, vjp(g)[0], jax.jvp(f, (x,), (t,))[1]))
    return results

  clean = everything(data)
  for (kind, case, _), (x, g, t, where), (y, dx, dy) in zip(problems, data, clean, strict=True):
    want, want_dx = oracle(kind, case, x, g, where)
    terms = int(np.prod(case.window))
    assert_close(y, want, dtype, terms=terms, scale=8)
    # The Lp norm's gradient is a function of the norm as it is rounded.
    slack = ROUNDOFF[dtype] / ROUNDOFF[ACCUMULATOR[dtype]] if kind == "lp" else 1
    assert_close(dx, want_dx, dtype, terms=terms, scale=8 * slack)
    assert not exact(dx)[~np.broadcast_to(where, x.shape)].any()
    # Both modes are maps of one matrix.
    size = np.abs(exact(t)).sum() * (1 + np.abs(want_dx).max())
    assert abs(np.vdot(exact(dy), exact(g)) - np.vdot(want_dx, exact(t))) <= 4 * ROUNDOFF[dtype] * size

  for junk in (1e30, INF, -INF, NAN):
    with np.errstate(over="ignore"):
      spoiled = [
        (*(a if i in (1, 3) else np.where(d[3], a, np.asarray(junk).astype(a.dtype)) for i, a in enumerate(d)),)
        for d in data
      ]
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(everything(spoiled)), strict=True):
      np.testing.assert_array_equal(exact(a), exact(b))


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_derivatives_of_every_order_and_mode(kind):
  x, where = jnp.asarray(sample((2, 7, 2), "float64")), mask_of((2, 7, 1))
  where[0, :3] = True
  f = jax.jit(functools.partial(KINDS[kind], window=(3,), stride=2, padding=1, where=where))
  check_grads(f, (x,), order=2)
  second = np.asarray(jax.jit(jax.hessian(lambda x: jnp.sin(f(x)[1:]).sum()))(jnp.where(where, x, NAN)))
  masked = ~np.broadcast_to(where, x.shape)
  assert np.isfinite(second).all() and second.any()
  assert not second[masked].any() and not second[(..., *np.nonzero(masked))].any()


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_vmap_over_every_subset_of_operands(kind):
  args = [np.stack([make(i) for i in (3, 4)]) for make in (
    lambda i: sample((2, 5, 3), "float64", i), lambda i: mask_of((2, 5, 1), i)
  )]  # fmt: skip
  f = functools.partial(KINDS[kind], window=(3,), padding=1)

  def both(x, where):
    return f(x, where=where), jax.grad(lambda x: jnp.sin(f(x, where=where)[1:]).sum())(x)

  one = jax.jit(both)
  for mapped in ((True, False), (False, True), (True, True)):
    given = [a if m else a[0] for a, m in zip(args, mapped, strict=True)]
    got = jax.jit(jax.vmap(both, [0 if m else None for m in mapped]))(*given)
    each = [one(*(a[i if m else 0] for a, m in zip(args, mapped, strict=True))) for i in range(2)]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), rtol=1e-12, atol=1e-12), got, *each)


# Selections ----------------------------------------------------------------------------------------------------------


def pool_row(x, where, **options):
  """`max_pool` of a row by one window, unless there is another; the maxima, their positions, and the gradient."""
  window = options.pop("window", (len(x),))
  pool = options.pop("pool", jaxdnn.max_pool)
  x, where = jnp.asarray(x)[None, :, None], jnp.asarray(where)[None, :, None]
  f = functools.partial(pool, window=window, where=where, **options)
  y, index = f(x, return_indices=True)
  np.testing.assert_array_equal(y, f(x))
  gradients = [jax.grad(lambda x: f(x).sum())(x)] if x.dtype != jnp.int32 else []
  gradients += [jax.grad(lambda x: f(x, return_indices=True)[0].sum())(x)] if gradients else []
  for gradient in gradients[1:]:
    np.testing.assert_array_equal(gradient, gradients[0])
  return y.ravel().tolist(), index.ravel().tolist(), gradients[0].ravel().tolist() if gradients else None


def test_the_first_unmasked_maximum_wins():
  assert pool_row([7.0, 3.0, 3.0, 1.0], [False, True, True, True]) == ([3], [1], [0, 1, 0, 0])
  assert pool_row([7.0, 3.0, 3.0, 1.0], [False, False, True, True]) == ([3], [2], [0, 0, 1, 0])
  assert pool_row([1.0, 3.0, 3.0, 0.0], [True, False, False, True], pool=jaxdnn.min_pool) == ([0], [3], [0, 0, 0, 1])


def test_the_first_unmasked_nan_wins():
  y, index, gradient = pool_row([NAN, 9.0, NAN, NAN], [False, True, True, True])
  assert np.isnan(y[0]) and (index, gradient) == ([2], [0, 0, 1, 0])


@pytest.mark.parametrize("pool, least", [(jaxdnn.max_pool, -INF), (jaxdnn.min_pool, INF)])
def test_an_unmasked_infinity_wins_over_masked_elements(pool, least):
  """Masked elements become as small as it is, and come first."""
  assert pool_row([0.0, least, least], [False, True, True], pool=pool) == ([least], [1], [0, 1, 0])
  x, where = jnp.array([0.0, least, 0.0])[None, :, None], jnp.array([False, True, False])[:, None]
  value = lambda x: jax.jvp(lambda x: pool(x, (3,), where=where), (x,), (x * 0 + 2,))[0].sum()  # noqa: E731
  np.testing.assert_array_equal(jax.grad(value)(x).ravel(), [0, 1, 0])


def test_integers():
  """Zero is the least of the unsigned, so that masked elements tie with it."""
  x, where = jnp.array([[9], [0], [0]], jnp.uint8), jnp.array([[False], [True], [True]])
  y, index = jaxdnn.max_pool(x, (3,), where=where, return_indices=True)
  assert (y.item(), index.item(), y.dtype) == (0, 1, jnp.uint8)
  assert jaxdnn.max_pool(x, (3,), where=where[:1]).item() == 0
  assert jaxdnn.min_pool(x, (3,), where=where[:1]).item() == 255
  assert jaxdnn.sum_pool(x + 1, (3,), where=where).item() == 2
  assert pool_row(np.array([9, 4, 5], np.int32), [False, True, True]) == ([5], [2], None)


def test_windows_of_nothing_unmasked():
  """Are as windows of padding alone: -inf, position -1, average 0, and no gradient, not even with NaN in them."""
  x, where = [NAN, NAN, 5.0], [False, False, True]
  assert pool_row(x, where, window=(2,)) == ([-INF, 5], [-1, 2], [0, 0, 1])
  assert pool_row(x, where, window=(2,), padding=((2, 0),)) == ([-INF, -INF, -INF, 5], [-1, -1, -1, 2], [0, 0, 1])
  x, where = jnp.array(x)[:, None], jnp.array(where)[:, None]
  kinds = [functools.partial(KINDS[k], window=(2,), where=where) for k in KINDS if k not in ("max", "min")]
  with jax.debug_nans(True):
    results = jax.jit(lambda x: [(f(x), jax.grad(lambda x, f=f: f(x).sum())(x)) for f in kinds])(x)
  for y, gradient in results:
    assert y[0] == 0 and y[1] > 0 and not gradient[:2].any() and gradient[2] > 0


def test_wide_windows_in_passes():
  """Those that several passes take, of which each knows only the one before it."""
  x, where = sample((1, 20, 18, 1), "float32"), mask_of((20, 18, 1))
  where[:10] = False
  for kind in ("max", "avg"):
    case = PoolCase(kind, x.shape, (9, 9), 1, 4)
    f = functools.partial(KINDS[kind], window=(9, 9), padding=4, where=where)
    y, vjp = jax.vjp(jax.jit(f), np.where(where, x, np.float32(NAN)))
    g = sample(y.shape, "float32", 1)
    want, dx = oracle(kind, case, x, g, where)
    assert_close(y, want, "float32", terms=81, scale=4)
    assert_close(vjp(g)[0], dx, "float32", terms=81, scale=16)


# Averages ------------------------------------------------------------------------------------------------------------


def test_what_an_average_counts():
  """Without padding, the unmasked; with it, padding too, as without a mask."""
  x, where = jnp.array([1.0, NAN, 3.0])[:, None], jnp.array([True, False, True])[:, None]
  average = lambda **options: jaxdnn.avg_pool(x, (3,), padding=1, where=where, **options).ravel().tolist()  # noqa: E731
  assert average() == [0.5, 2, 1.5]
  assert average(count_include_pad=False) == [1, 2, 3]
  assert average(divisor_override=4) == [0.25, 1, 0.75]
  # What ceil_mode adds past the padding counts neither way.
  ceil = functools.partial(jaxdnn.avg_pool, window=(2,), stride=2, padding=((0, 0),), ceil_mode=True)
  assert ceil(x, where=where).ravel().tolist() == [1, 3]
  assert ceil(jnp.ones((3, 1)), where=jnp.ones((1, 1), bool)).ravel().tolist() == [1, 1]


def test_sixteen_bits_are_summed_in_float32():
  """Sums beyond float16's 65504 and counts beyond bfloat16's 256, half of either masked."""
  x = jnp.where(jnp.arange(1200) % 2 == 0, 200.0, NAN)[:, None]
  for dtype in ("float16", "bfloat16"):
    y = jaxdnn.avg_pool(x.astype(dtype), (1200,), where=~jnp.isnan(x))
    assert y.dtype == dtype and y.item() == 200


# Arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_everything_unmasked_is_no_mask(kind):
  x = sample((2, 6, 5, 3), "float32")
  for layout in (None, "HNWC"):
    f = functools.partial(KINDS[kind], window=(3, 2), stride=2, padding=1, ceil_mode=True, layout=layout)
    got = jax.jit(f)(x, where=np.ones((1, 1, 1, 1), bool))
    np.testing.assert_allclose(got, f(x), rtol=1e-6)


def test_layouts():
  """A mask is in the layout of x, with or without channels, whether or not batch and channels stand together."""
  x = sample((2, 6, 5, 3), "float32")
  masks = [mask_of(shape) for shape in ((2, 6, 5, 1), (1, 6, 1, 3), (2, 6, 5, 3))]
  calls = [(kind, i) for kind in ("max", "avg") for i in range(len(masks))]

  def pools(order, x, masks):
    layout = "".join("NHWC"[d] for d in order)
    x, masks = x.transpose(order), [mask.transpose(order) for mask in masks]
    ys = [KINDS[kind](x, (3, 2), where=masks[i], layout=layout) for kind, i in calls]
    return [y.transpose(np.argsort(order)) for y in ys]

  want, *others = (
    jax.jit(functools.partial(pools, tuple(map("NHWC".index, layout))))(x, masks)
    for layout in ("NHWC", "NCHW", "HWNC", "HNWC")
  )
  for got in others:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_masks_without_channels_are_pooled_without_them():
  x, where = jnp.ones((2, 6, 5, 7)), jnp.ones((6, 5, 1), bool)
  for pool in (jaxdnn.avg_pool, functools.partial(jaxdnn.max_pool, return_indices=True)):
    text = str(jax.make_jaxpr(lambda x, w, pool=pool: pool(x, (2, 2), where=w))(x, where))
    assert re.search(r"f(32|64)\[1,5,4,1\]\S* (\w+:u8\[1,5,4,1\] )?= jaxdnn_(sum|max)_pool", text)


@pytest.mark.parametrize("kind", KINDS)
def test_errors(kind):
  x, op = jnp.ones((2, 6, 5, 3)), f"{kind.split('_')[0]}_pool"
  with pytest.raises(TypeError, match=f"{op}: where must be boolean, got int32"):
    KINDS[kind](x, (2, 2), where=jnp.ones(x.shape, "int32"))
  with pytest.raises(TypeError, match=f"{op}: where must be an array, got 'mask'"):
    KINDS[kind](x, (2, 2), where="mask")
  for shape in ((6, 5), (2, 6, 4, 1), (1, 2, 6, 5, 3)):
    message = f"{op}: where of shape {shape} does not broadcast to x of shape {x.shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
      KINDS[kind](x, (2, 2), where=jnp.ones(shape, bool))


def test_nothing_to_pool():
  for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
    for pool in KINDS.values():
      x = jnp.ones(shape)
      assert pool(x, (2,), padding=1, where=jnp.ones(shape, bool)).shape == pool(x, (2,), padding=1).shape
