"""The programs of docs/using.md: each runs as it stands there."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

GUIDE = (Path(__file__).parents[1] / "docs/using.md").read_text()
PROGRAMS = {title: code for title, code in re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```$", GUIDE, re.M | re.S)}

LIBRARIES = {"Plain JAX": "jax", "Flax linen": "flax", "Flax NNX": "flax", "Haiku": "haiku", "Equinox": "equinox"}


@pytest.fixture(autouse=True)
def as_users_have_it():
  with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


def running(title, names):
  """Mean and variance of the first normalization after the program's steps."""
  if title == "Plain JAX":
    return names["running"][0]
  if title == "Flax linen":
    stats = names["batch_stats"]["BatchNorm_0"]
  elif title == "Haiku":
    return tuple(names["state"][f"batch_norm/~/{which}_ema"]["average"].reshape(-1) for which in ("mean", "var"))
  elif title == "Flax NNX":
    return names["network"].norm1.mean[...], names["network"].norm1.var[...]
  else:
    return names["state"].get(names["network"].norm1.batch_state_index)
  return stats["mean"], stats["var"]


@pytest.mark.parametrize("title", PROGRAMS)
def test_program(title):
  pytest.importorskip(LIBRARIES[title])
  names = {}
  exec(compile(PROGRAMS[title], f"using.md, {title}", "exec"), names)
  assert 1 < names["value"] < 6
  leaves = jax.tree.leaves(names["params"] if title == "Plain JAX" else names["grads"])
  assert len(leaves) > 4 and all(np.isfinite(a).all() and np.any(a) for a in leaves if a.size > 32)
  mean, var = running(title, names)
  assert mean.shape == var.shape == (32,) and np.any(mean != 0) and np.any(var != 1)
  if title != "Plain JAX":
    assert names["logits"].shape == (8, 10)


def test_every_library_is_there():
  assert list(PROGRAMS) == list(LIBRARIES)
  assert GUIDE.count("```python") == len(PROGRAMS)
