"""Convolutions drawn from the whole of lax's signature, against the float64 oracle."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from numerics import assert_close, exact, with_gradients


def random_configuration(rng, multiple=1):
  """One call of conv_general_dilated, drawn over the whole signature; x and w are canonical, the rest is kwargs.

  The channels of a group, in and out, are a multiple of `multiple`.
  """
  rank = int(rng.integers(0, 4))
  small = lambda lo, hi, size=rank: tuple(int(v) for v in rng.integers(lo, hi + 1, size))  # noqa: E731
  groups, batch_groups = [(1, 1), (1, 1), (int(rng.integers(2, 5)), 1), (1, int(rng.integers(2, 4)))][rng.integers(4)]
  window, spatial = small(1, 3), small(1, 7)
  stride, lhs_dilation, rhs_dilation = small(1, 3), small(1, 3), small(1, 3)
  if rng.random() < 0.4:
    lhs_dilation = (1,) * rank
  padding = tuple((int(a), int(b)) for a, b in rng.integers(-2, 4, (rank, 2)))
  padding = tuple(
    (lo, hi) if (i - 1) * d + 1 + lo + hi >= 0 else (0, 0)
    for i, d, (lo, hi) in zip(spatial, lhs_dilation, padding, strict=True)
  )
  c = groups * multiple * int(rng.integers(1, 4))
  k = groups * batch_groups * multiple * int(rng.integers(1, 4))
  n = batch_groups * int(rng.integers(1, 4))
  letters = "DHW"[:rank]
  numbers = tuple("".join(rng.permutation(list(base + letters))) for base in ("NC", "IO", "NC"))
  return dict(
    x_shape=(n, *spatial, c), w_shape=(*window, c // groups, k), stride=stride, padding=padding,
    lhs_dilation=lhs_dilation, rhs_dilation=rhs_dilation, groups=groups, batch_groups=batch_groups, numbers=numbers,
  )  # fmt: skip


def oracle_with_batch_groups(f, x, w, g, batch_groups):
  """Applies `f(x, w, g)` to each group of the batch with its share of the output channels."""
  shares = zip(np.split(x, batch_groups, 0), np.split(w, batch_groups, -1), np.split(g, batch_groups, -1), strict=True)
  return [f(*share) for share in shares]


def check(seed, dtype, multiple, drawn=None, **kwargs):
  rng = np.random.default_rng(seed)
  cfg = random_configuration(rng, multiple)
  spatial_letters = [c for c in cfg["numbers"][1] if c not in "IO"]
  # The canonical order of spatial dimensions is that of the filter's letters.
  canonical = ("N" + "".join(spatial_letters) + "C", "".join(spatial_letters) + "IO")

  def layout(a, source, target):
    return np.transpose(a, [source.index(c) for c in target])

  def draw(shape):
    a = rng.standard_normal(shape)
    for name in (drawn or dtype, dtype):
      a = a.astype(np.dtype(getattr(ml_dtypes, name, name)))
    return a

  x, w = draw(cfg["x_shape"]), draw(cfg["w_shape"])
  geometry = cfg["stride"], cfg["padding"], cfg["lhs_dilation"], cfg["rhs_dilation"]
  call = functools.partial(
    jaxdnn.conv_general_dilated, window_strides=cfg["stride"], padding=cfg["padding"], lhs_dilation=cfg["lhs_dilation"],
    rhs_dilation=cfg["rhs_dilation"], dimension_numbers=cfg["numbers"], feature_group_count=cfg["groups"],
    batch_group_count=cfg["batch_groups"], **kwargs,
  )  # fmt: skip
  xt, wt = layout(x, canonical[0], cfg["numbers"][0]), layout(w, canonical[1], cfg["numbers"][1])
  y_shape = jax.eval_shape(functools.partial(lax.conv_general_dilated, **call.keywords), xt, wt).shape
  g = draw(y_shape)
  y, dx, dw = with_gradients(call, xt, wt, g)
  assert y.shape == y_shape
  got_y, g = (layout(np.asarray(a), cfg["numbers"][2], canonical[0]) for a in (y, g))
  got_dx = layout(np.asarray(dx), cfg["numbers"][0], canonical[0])
  got_dw = layout(np.asarray(dw), cfg["numbers"][1], canonical[1])
  x, w, g = exact(x), exact(w), exact(g)
  b = cfg["batch_groups"]
  want_y = np.concatenate(
    oracle_with_batch_groups(lambda x, w, g: conv_oracle(x, w, *geometry, cfg["groups"]), x, w, g, b), -1
  )
  pieces = oracle_with_batch_groups(lambda x, w, g: conv_gradients(x, w, g, *geometry, cfg["groups"]), x, w, g, b)
  assert_close(got_y, want_y, dtype, terms=100 * multiple, scale=4)
  assert_close(got_dx, np.concatenate([p[0] for p in pieces], 0), dtype, terms=100 * multiple, scale=4)
  assert_close(got_dw, np.concatenate([p[1] for p in pieces], -1), dtype, terms=1000, scale=4)


@pytest.mark.parametrize("seed", range(300))
def test_random_configurations(seed):
  check(seed, "float64", 1)


@pytest.mark.gpu
@pytest.mark.parametrize("multiple", [1, 2, 8], ids=["elements", "pairs", "chunks"])
@pytest.mark.parametrize("seed", range(100))
def test_random_configurations_on_the_tensor_cores(seed, multiple):
  """Every width of the copies that fill shared memory."""
  check(seed, "float16" if seed % 2 else "bfloat16", multiple)


@pytest.mark.gpu
@pytest.mark.parametrize("multiple", [1, 4], ids=["elements", "chunks"])
@pytest.mark.parametrize("precision", ["default", "high"])
@pytest.mark.parametrize("seed", range(50))
def test_random_configurations_in_tf32(seed, precision, multiple):
  check(seed, "float32", multiple, "bfloat16" if precision == "default" else "float32", precision=precision)
