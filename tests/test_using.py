"""The programs of docs/using.md: each runs as it stands there, and computes what the library's own layers do."""

import re
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

GUIDE = (Path(__file__).parents[1] / "docs/using.md").read_text()
PROGRAMS = {title: code for title, code in re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```$", GUIDE, re.M | re.S)}


@pytest.fixture(autouse=True)
def as_users_have_it():
  with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


@cache
def names_of(title):
  """What the program of that section leaves."""
  names = {}
  exec(compile(PROGRAMS[title], f"using.md, {title}", "exec"), names)
  return names


def running(title, names):
  """Mean and variance of the first normalization after the program's steps."""
  if title == "Plain JAX":
    return names["running"][0]
  if title == "Flax linen":
    stats = names["batch_stats"]["BatchNorm_0"]
  elif title == "Haiku":
    stats = names["state"]["batch_norm"]
  elif title == "Flax NNX":
    return names["network"].norm1.mean[...], names["network"].norm1.var[...]
  else:
    return names["state"].get(names["network"].norm1.running)
  return stats["mean"], stats["var"]


@pytest.mark.parametrize("title", PROGRAMS)
def test_program(title):
  names = names_of(title)
  assert 1 < names["value"] < 6
  leaves = jax.tree.leaves(names["params"] if title == "Plain JAX" else names["grads"])
  assert len(leaves) > 4 and all(np.isfinite(a).all() and np.any(a) for a in leaves if a.size > 32)
  mean, var = running(title, names)
  assert mean.shape == var.shape == (32,) and np.any(mean != 0) and np.any(var != 1)
  if title != "Plain JAX":
    assert names["logits"].shape == (8, 10)


def test_linen_layers_are_flax():
  import flax.linen as nn

  ours = names_of("Flax linen")["BatchNorm"]("relu")
  stock = nn.BatchNorm(momentum=0.9)
  x = jax.random.normal(jax.random.key(0), (4, 5, 5, 3)) * 3 + 1
  variables = stock.init(jax.random.key(1), x, use_running_average=False)
  want, stats = stock.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
  got, mine = ours.apply(variables, x, train=True, mutable=["batch_stats"])
  np.testing.assert_allclose(got, nn.relu(want), atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mine, stats)
  both = {**variables, **stats}
  want = nn.relu(stock.apply(both, x, use_running_average=True))
  np.testing.assert_allclose(ours.apply(both, x, train=False), want, atol=1e-5)


@pytest.mark.parametrize("mode", ["ZEROS", "REFLECT", "REPLICATE", "CIRCULAR"])
def test_convolution_of_equinox(mode):
  import equinox as eqx

  options = dict(stride=2, padding=((1, 2), (0, 1)), groups=2, padding_mode=mode, key=jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (4, 7, 6))
  ours, stock = (layer(4, 6, (3, 2), **options) for layer in (names_of("Equinox")["Conv2d"], eqx.nn.Conv2d))
  np.testing.assert_allclose(ours(x), stock(x), atol=1e-5)
  dilated = dict(dilation=2, padding="SAME", key=jax.random.key(2))
  ours, stock = (layer(4, 6, 3, **dilated) for layer in (names_of("Equinox")["Conv2d"], eqx.nn.Conv2d))
  np.testing.assert_allclose(ours(x), stock(x), atol=1e-5)


def test_every_library_is_there():
  assert list(PROGRAMS) == ["Plain JAX", "Flax linen", "Flax NNX", "Haiku", "Equinox"]
  assert GUIDE.count("```python") == len(PROGRAMS)
