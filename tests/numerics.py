"""Test data, error bounds, and the two ways to catch a kernel that leaves something to chance."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Of a mesh: eight CPUs, or the GPUs that there are.
DEVICES = min(8, jax.device_count())

DTYPES = ("float32", "float64", "float16", "bfloat16")

# Unit round-off of each storage type and of the type its sums are held in.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ACCUMULATOR = {"float64": "float64", "float32": "float32", "float16": "float32", "bfloat16": "float32"}


def sample(shape, dtype, seed=0):
  """Standard normal values, rounded to `dtype`, as a NumPy array."""
  return np.random.default_rng(seed).standard_normal(shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def exact(x):
  """The values of any array as NumPy float64."""
  return np.asarray(x).astype(np.float64)


def to_tf32(x):
  """float32 rounded to TF32's 11 bits of mantissa, to nearest, ties to even."""
  bits = np.asarray(x, np.float32).view(np.uint32)
  return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def assert_close(got, want, dtype, *, terms=1, scale=1.0):
  """Asserts that `got` is within the bound of the float64 oracle `want`.

  The bound is 2 roundings of the result to `dtype`, plus 16 sqrt(terms) roundings of the accumulator at the magnitude
  `scale` of one term. NaN and infinity must be where the oracle has them.
  """
  got, want = np.asarray(got), np.asarray(want, np.float64)
  assert got.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype)), f"got {got.dtype}, want {dtype}"
  assert got.shape == want.shape, f"got shape {got.shape}, want {want.shape}"
  got = exact(got)
  tiny = float(ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype))).smallest_subnormal)
  # In float64 the oracle's own plain summation errs as well, by up to a rounding a term.
  growth = 16 * (terms if dtype == "float64" else np.sqrt(terms))
  bound = 2 * ROUNDOFF[dtype] * np.abs(want) + growth * ROUNDOFF[ACCUMULATOR[dtype]] * scale + tiny
  np.testing.assert_array_equal(np.isnan(got), np.isnan(want), "NaN in the wrong places")
  finite = np.isfinite(want)
  np.testing.assert_array_equal(got[~finite], want[~finite])
  excess = np.abs(got[finite] - want[finite]) / bound[finite]
  assert excess.size == 0 or excess.max() <= 1, f"error is {excess.max():.3g} times the bound"


def equations(jaxpr, primitive=None):
  """Those of a primitive, or all; of a compiled function within the program its own."""
  for e in jaxpr.eqns:
    if e.primitive.name in ("jit", "pjit"):
      yield from equations(e.params["jaxpr"], primitive)
    elif primitive in (None, e.primitive.name):
      yield e


def with_gradients(f, x, w, g):
  """`f(x, w)` and the cotangents of x and w for the cotangent g, as one program."""

  def all_three(x, w, g):
    y, vjp = jax.vjp(f, x, w)
    return y, *vjp(g)

  return jax.jit(all_three)(x, w, g)


def run_poisoned(fn, *args):
  """`fn(*args)`, jitted, into output buffers and scratch memory that hold NaN (or all ones) beforehand.

  The outputs are donated buffers, which XLA reuses; scratch comes from freed memory of the same allocator.
  """

  def poison(s):
    return jnp.full(s.shape, np.nan if jnp.issubdtype(s.dtype, jnp.floating) else np.iinfo(s.dtype).max, s.dtype)

  shapes = jax.eval_shape(fn, *args)
  scratch = [jnp.full((n,), np.nan, np.float32) for n in (1 << 10, 1 << 14, 1 << 18, 1 << 22)]
  outputs = jax.block_until_ready(jax.tree.map(poison, shapes))
  jax.block_until_ready(scratch)
  for s in scratch:
    s.delete()
  return _into_donated(fn)(outputs, *args)


@functools.lru_cache(maxsize=8)
def _into_donated(fn):
  return jax.jit(lambda outputs, *args: fn(*args), donate_argnums=0, keep_unused=True)


def assert_repeatable(fn, *args, repeats=10):
  """Asserts that `repeats` runs, each into poisoned memory, agree bit for bit; returns the result."""
  first = jax.tree.map(np.asarray, run_poisoned(fn, *args))
  for _ in range(repeats - 1):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(run_poisoned(fn, *args)), strict=True):
      assert a.tobytes() == np.asarray(b).tobytes(), "two runs on the same input differ"
  return first
