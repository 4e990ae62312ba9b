"""Dropout: the generator's published answers, what is kept and how often, derivatives, vmap, meshes, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from jaxdnn._dropout import philox
from numerics import DEVICES, DTYPES, assert_repeatable, exact, run_poisoned, sample

KEY = jax.random.key(7)


def numpy_mask(n, rate, words):
  """Which of n elements are kept, by Philox4x32-7 in 64-bit NumPy integers."""
  words = [int(w) for w in words] + [0] * (4 - len(words))
  limit = min(round(rate * 2**32), 2**32 - 1)
  kept = []
  for call in range(-(-n // 8)):
    bits = []
    for stream in (0, 1):
      c = [call & 0xFFFFFFFF, call >> 32 | stream << 31, words[2], words[3]]
      k0, k1 = words[:2]
      for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
      bits.append([half for w in c for half in (w & 0xFFFF, w >> 16)])
    kept += [((a & 0x7FFF) << 17 | (a >> 15) << 16 | b) >= limit for a, b in zip(*bits, strict=True)]
  return np.array(kept[:n], bool)


@pytest.mark.parametrize(
  ("counter", "key", "want"),
  [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
      [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
      [0xA4093822, 0x299F31D0],
      [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
  ],
)
def test_generator_gives_the_published_answers(counter, key, want):
  words = philox([jnp.asarray(c, np.uint32) for c in counter], [jnp.asarray(k, np.uint32) for k in key], rounds=10)
  assert [int(w) for w in words] == want


def test_seven_rounds_give_the_published_answer():
  zeros = [jnp.zeros((), np.uint32)] * 4
  assert [int(w) for w in philox(zeros, zeros[:2])] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradient(dtype):
  """Equal to the generator in NumPy, bit for bit, on whatever platform this runs; backward has the same mask."""
  shapes = [(7,), (3, 5, 275)]

  @jax.jit
  def run(xs, gs, key):
    ys, vjp = jax.vjp(lambda xs: [jaxdnn.dropout(x, 0.3, key) for x in xs], xs)
    return ys, vjp(gs)[0]

  xs, gs = ([sample(s, dtype, seed=seed) for s in shapes] for seed in (0, 1))
  for x, g, y, dx in zip(xs, gs, *run(xs, gs, KEY), strict=True):
    kept = numpy_mask(x.size, 0.3, np.asarray(jax.random.key_data(KEY))).reshape(x.shape)
    wide = np.float64 if dtype == "float64" else np.float32
    for out, of in ((y, x), (dx, g)):
      want = np.where(kept, of.astype(wide) * wide(1 / 0.7), 0).astype(of.dtype)
      np.testing.assert_array_equal(exact(out), exact(want))


def test_low_bits_decide_ties():
  """A rate whose upper 15 bits are 0 drops an element only where the lower 17 bits say so."""
  n, rate = 1 << 22, 2.0**-17
  dropped = np.flatnonzero(np.asarray(jaxdnn.dropout(jnp.ones(n), rate, KEY)) == 0)
  assert 10 < len(dropped) < 60
  words = np.asarray(jax.random.key_data(KEY))
  first = int(dropped[0])
  np.testing.assert_array_equal(np.flatnonzero(~numpy_mask(first + 1, rate, words)), [first])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_independence(rate):
  n = 1 << 20
  masks = np.stack([np.asarray(jaxdnn.dropout(jnp.ones(n), rate, jax.random.key(i))) > 0 for i in range(2)])
  sigma = np.sqrt(rate * (1 - rate) / n)
  assert abs(masks[0].mean() - (1 - rate)) < 5 * sigma
  both = (masks[0] ^ masks[1]).mean()
  assert abs(both - 2 * rate * (1 - rate)) < 5 * np.sqrt(2 * rate * (1 - rate) / n)
  for lag in (1, 2, 4, 8, 64):
    agree = (masks[0][lag:] ^ masks[0][:-lag]).mean()
    assert abs(agree - 2 * rate * (1 - rate)) < 6 * np.sqrt(2 * rate * (1 - rate) / n)


def test_mask_does_not_depend_on_the_dtype_or_the_shape():
  flat = np.asarray(jaxdnn.dropout(jnp.ones(1000, np.float32), 0.4, KEY)) > 0
  for dtype in DTYPES:
    for shape in ((1000,), (10, 100), (250, 4), (8, 5, 25)):
      np.testing.assert_array_equal(exact(jaxdnn.dropout(jnp.ones(shape, dtype), 0.4, KEY)).ravel() > 0, flat)


def test_ends_of_the_rate():
  x = jnp.asarray([1.0, jnp.nan, jnp.inf, -2.0])
  for y in (jaxdnn.dropout(x, 0.0, KEY), jaxdnn.dropout(x, 0.5, KEY, deterministic=True)):
    np.testing.assert_array_equal(y, x)
  np.testing.assert_array_equal(jaxdnn.dropout(x, 1, KEY), np.zeros(4))
  np.testing.assert_array_equal(jax.grad(lambda x: jaxdnn.dropout(x, 1.0, KEY).sum())(x), np.zeros(4))
  y = exact(jaxdnn.dropout(jnp.full(4096, jnp.nan), 0.5, KEY))
  assert np.isin(y, [0]).sum() + np.isnan(y).sum() == 4096 and 1500 < np.isnan(y).sum() < 2500
  assert jaxdnn.dropout(jnp.zeros((0, 3)), 0.5, KEY).shape == (0, 3)


def test_broadcast_dims():
  x = jnp.ones((6, 5, 40), jnp.bfloat16)
  y = exact(jaxdnn.dropout(x, 0.3, KEY, broadcast_dims=(1,)))
  np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
  np.testing.assert_array_equal(y[:, 0].ravel() > 0, numpy_mask(240, 0.3, np.asarray(jax.random.key_data(KEY))))
  np.testing.assert_array_equal(np.unique(y), [0, exact(jnp.bfloat16(1 / 0.7))])


def test_every_kind_of_key():
  x = jnp.ones(64)
  raw = jax.random.PRNGKey(7)
  np.testing.assert_array_equal(jaxdnn.dropout(x, 0.5, raw), jaxdnn.dropout(x, 0.5, jax.random.wrap_key_data(raw)))
  rbg = [jaxdnn.dropout(x, 0.5, jax.random.key(i, impl="rbg")) for i in (0, 1)]
  assert (rbg[0] != rbg[1]).any()
  words = np.asarray(jax.random.key_data(jax.random.key(1, impl="rbg")))
  np.testing.assert_array_equal(np.asarray(rbg[1]) > 0, numpy_mask(64, 0.5, words))


def test_derivatives_of_every_order_and_mode():
  x = jnp.asarray(sample((4, 5), "float64"))
  check_grads(jax.jit(lambda x: jnp.sin(jaxdnn.dropout(x, 0.3, KEY))), (x,), order=2, modes=("fwd", "rev"))


def test_nothing_is_kept_but_the_key():
  _, vjp = jax.vjp(lambda x: jaxdnn.dropout(x, 0.5, KEY), jnp.ones(1 << 16))
  assert sum(r.nbytes for r in jax.tree.leaves(vjp) if hasattr(r, "nbytes")) <= 64


def test_symbolic_batch():
  (b,) = jax.export.symbolic_shape("b")
  f = jax.jit(jax.grad(lambda x: (jaxdnn.dropout(x, 0.5, KEY) ** 2).sum()))
  x = jnp.asarray(sample((5, 3), "float32"))
  exported = jax.export.export(f)(jax.ShapeDtypeStruct((b, 3), x.dtype))
  np.testing.assert_array_equal(exported.call(x), f(x))


def test_vmap_over_arrays_and_keys():
  x, keys = jnp.asarray(sample((3, 5, 7), "float32")), jax.random.split(KEY, 3)
  f = lambda x, key: jaxdnn.dropout(x, 0.5, key)  # noqa: E731
  one = lambda x, key: jax.value_and_grad(lambda x: (f(x, key) ** 2).sum())(x)  # noqa: E731
  for axes in ((0, 0), (0, None), (None, 0)):
    pick = lambda a, axis, i: a if axis is None else a[i]  # noqa: E731
    operands = x if axes[0] == 0 else x[0], keys if axes[1] == 0 else KEY
    want = [one(pick(operands[0], axes[0], i), pick(operands[1], axes[1], i)) for i in range(3)]
    got = jax.jit(jax.vmap(one, axes))(*operands)
    for a, b in zip(got, zip(*want, strict=True), strict=True):
      np.testing.assert_allclose(a, jnp.stack(b), rtol=1e-6)
  # As with jax.random, what shares a key shares the mask.
  same = jax.vmap(f, (0, None))(jnp.ones((3, 50)), KEY)
  np.testing.assert_array_equal(same, jnp.broadcast_to(f(jnp.ones(50), KEY), (3, 50)))


@pytest.mark.mesh
@pytest.mark.parametrize(
  ("shape", "spec"),
  [
    ((16, 6), P("a")),
    ((16, 8, 6), P(("a", "b"))),
    ((4, 16), P(None, "b")),
    ((4, 20, 3), P("a", "b")),
    ((8, 2, 12), P("a", None, "b")),
    ((1, 8, 5), P(None, "a", None)),
  ],
)
def test_explicit_mesh_has_the_mask_of_the_whole(shape, spec):
  mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
  x = jnp.asarray(sample(shape, "float32"))
  want = jaxdnn.dropout(x, 0.5, KEY)
  with jax.set_mesh(mesh):
    placed = jax.device_put(x, spec)
    got, vjp = jax.jit(lambda x: jax.vjp(lambda x: jaxdnn.dropout(x, 0.5, KEY), x))(placed)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jax.jit(vjp)(placed)[0], want)
    assert jax.typeof(got).sharding.spec == jax.typeof(placed).sharding.spec


@pytest.mark.mesh
def test_explicit_mesh_rejects_rows_that_are_not_evenly_spaced():
  mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((3, 4, 6)), P(None, "a", "b"))
    with pytest.raises(ValueError, match=r"dropout: x of shape \(3, 4, 6\) is sharded as .* Reshard it first"):
      jaxdnn.dropout(x, 0.5, KEY)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda x: jaxdnn.dropout(x, 1.5, KEY), ValueError, r"rate must be in \[0, 1\], got 1.5"),
    (lambda x: jaxdnn.dropout(x, float("nan"), KEY), ValueError, r"rate must be in \[0, 1\], got nan"),
    (lambda x: jaxdnn.dropout(x.astype(int), 0.5, KEY), TypeError, "x must be floating-point, got int"),
    (lambda x: jaxdnn.dropout(x, 0.5, jax.random.split(KEY)), ValueError, r"a single key, got .* shape \(2,\)"),
    (lambda x: jaxdnn.dropout(x, 0.5, jnp.ones(2)), TypeError, r"key must be a JAX key .* got float64 of shape \(2,\)"),
    (lambda x: jaxdnn.dropout(x, 0.5, KEY, broadcast_dims=(2,)), ValueError, r"dimensions of x \(3, 4\), got \(2,\)"),
    (lambda x: jax.jit(jaxdnn.dropout)(x, 0.5, KEY), TypeError, "rate must be a number known when"),
  ],
)
def test_wrong_calls(call, error, message):
  with pytest.raises(error, match=message):
    call(jnp.ones((3, 4)))


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_writes_everything_and_repeats(dtype):
  x = jnp.asarray(sample((3, 1001), dtype))
  y = assert_repeatable(lambda x: jaxdnn.dropout(x, 0.5, KEY), x)
  kept = numpy_mask(x.size, 0.5, np.asarray(jax.random.key_data(KEY))).reshape(x.shape)
  np.testing.assert_array_equal(exact(y), np.where(kept, 2 * exact(x), 0))
  each = run_poisoned(jax.vmap(lambda x: jaxdnn.dropout(x, 0.5, KEY)), x)
  np.testing.assert_array_equal(exact(each), np.where(kept.ravel()[:1001], 2 * exact(x), 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_small_arrays_have_the_mask_of_large_ones(dtype, impl):
  """A thread has one vector of a small array and two of a large one; keys are of two words or four."""
  key = jax.random.key(3, impl=impl)
  least = 132 * 256 * 2 * 16 // jnp.dtype(dtype).itemsize  # the most elements of a small one
  whole = exact(jaxdnn.dropout(jnp.ones(2 * least, dtype), 0.3, key))
  assert 0.69 < (whole > 0).mean() < 0.71
  for n in (1, 8, 1000, 4097, least - 1, least, least + 1, least + 4096):
    np.testing.assert_array_equal(exact(jaxdnn.dropout(jnp.ones(n, dtype), 0.3, key)), whole[:n])


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  n = (1 << 31) + 1000
  ones = jnp.ones(n, jnp.float16)
  y = jax.jit(lambda x: jaxdnn.dropout(x, 0.25, KEY))(ones)
  dropped = float(jax.jit(lambda y: (y == 0).astype(jnp.float32).reshape(-1, 8).sum(1).astype(jnp.float64).sum())(y))
  assert abs(dropped / n - 0.25) < 5e-5
  assert not bool((y[-1000:] == y[:1000]).all())
