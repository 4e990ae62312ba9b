"""Patches and their sum against brute force in NumPy: geometry, adjointness, derivatives, compositions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxdnn
from numerics import DEVICES, DTYPES, assert_close, assert_repeatable, exact, sample
from pool_oracle import out_extent, same_padding
from transform_cases import WINDOWS, Window


def geometry(w):
  """Window, stride, padding and dilation, spelled out."""
  rank = len(w.window)
  stride, dilation = ((v,) * rank if isinstance(v, int) else v for v in (w.stride, w.dilation))
  padding = same_padding(w.spatial, w.window, stride, dilation) if w.padding == "SAME" else w.padding
  return w.window, stride, ((0, 0),) * rank if padding == "VALID" else padding, dilation


def arguments(w):
  return {"window": w.window, "stride": w.stride, "padding": w.padding, "dilation": w.dilation}


def taps(w):
  """For each patch and cell inside the image: (o, number of the cell, i)."""
  window, stride, padding, dilation = geometry(w)
  for o in np.ndindex(*out_extent(w.spatial, *geometry(w))):
    for n, k in enumerate(np.ndindex(*window)):
      i = tuple(a * s - lo + b * d for a, s, (lo, _), b, d in zip(o, stride, padding, k, dilation, strict=True))
      if all(0 <= a < e for a, e in zip(i, w.spatial, strict=True)):
        yield o, n, i


def oracle_im2col(x, w):
  cols = np.zeros((*w.lead, *out_extent(w.spatial, *geometry(w)), int(np.prod(w.window)), w.channels), x.dtype)
  for o, n, i in taps(w):
    cols[(slice(None),) * len(w.lead) + (*o, n)] = x[(slice(None),) * len(w.lead) + i]
  return cols.reshape(*cols.shape[:-2], cols.shape[-2] * w.channels)


def oracle_col2im(cols, w):
  x = np.zeros((*w.lead, *w.spatial, w.channels))
  cols = exact(cols).reshape(*cols.shape[:-1], int(np.prod(w.window)), w.channels)
  for o, n, i in taps(w):
    x[(slice(None),) * len(w.lead) + i] += cols[(slice(None),) * len(w.lead) + (*o, n)]
  return x


def image(w, dtype, seed=0):
  return sample((*w.lead, *w.spatial, w.channels), dtype, seed)


def patches(w, dtype, seed=1):
  return sample(oracle_im2col(image(w, "float32"), w).shape, dtype, seed)


def check(windows, dtype):
  """Both directions of every case, in one compilation."""
  xs, cols = [image(w, dtype) for w in windows], [patches(w, dtype) for w in windows]

  @jax.jit
  def both(xs, cols):
    return [
      (jaxdnn.im2col(x, **arguments(w)), jaxdnn.col2im(c, w.spatial, **arguments(w)))
      for x, c, w in zip(xs, cols, windows, strict=True)
    ]

  for w, x, c, (out, back) in zip(windows, xs, cols, both(xs, cols), strict=True):
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(exact(out), exact(oracle_im2col(x, w)), err_msg=str(w))
    assert_close(back, oracle_col2im(c, w), dtype, terms=int(np.prod(w.window)), scale=4)


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(dtype):
  few = jax.default_backend() != "gpu" and dtype != "float32"
  check(WINDOWS[::3] if few else WINDOWS, dtype)


def test_integers_have_patches():
  for dtype in ("int8", "int32", "uint8", "bool"):
    x = np.arange(40).reshape(2, 5, 4).astype(dtype)
    got = jaxdnn.im2col(jnp.asarray(x), (2,), padding=1)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, oracle_im2col(x, Window((5,), (2,), 1, ((1, 1),))))


@pytest.mark.parametrize("w", [w for w in WINDOWS if 0 not in (*w.lead, *w.spatial) and len(w.lead) == 1])
def test_matches_lax_patches(w):
  """The order "channels_window" is that of lax, which has the batch first and the features last or second."""
  window, stride, padding, dilation = geometry(w)
  if min(min(p) for p in padding) < 0 or 0 in out_extent(w.spatial, *geometry(w)):
    pytest.skip("lax on CPUs is wrong there")
  x = jnp.asarray(image(w, "float32"))
  spatial = "DHW"[-len(window) :]
  numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
  want = lax.conv_general_dilated_patches(
    x, window, stride, padding, rhs_dilation=dilation, dimension_numbers=numbers, precision=lax.Precision.HIGHEST
  )
  got = jaxdnn.im2col(x, **arguments(w), order="channels_window")
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_array_equal(
    jaxdnn.col2im(got, w.spatial, **arguments(w), order="channels_window"),
    jaxdnn.col2im(jaxdnn.im2col(x, **arguments(w)), w.spatial, **arguments(w)),
  )


@pytest.mark.parametrize("w", [w for w in WINDOWS if len(w.window) == 2 and len(w.lead) == 1])
def test_matches_torch_unfold_and_fold(w):
  torch = pytest.importorskip("torch")
  window, stride, padding, dilation = geometry(w)
  if any(lo != hi or lo < 0 for lo, hi in padding) or 0 in out_extent(w.spatial, *geometry(w)) or 0 in w.lead:
    pytest.skip("torch takes symmetric padding and needs a patch")
  x = image(w, "float32")
  options = dict(kernel_size=window, dilation=dilation, padding=[lo for lo, _ in padding], stride=stride)
  unfolded = torch.nn.functional.unfold(torch.tensor(np.moveaxis(x, -1, 1)), **options)
  cols = jaxdnn.im2col(jnp.asarray(x), **arguments(w), order="channels_window")
  np.testing.assert_array_equal(cols.reshape(x.shape[0], -1, cols.shape[-1]).swapaxes(1, 2), unfolded)
  folded = torch.nn.functional.fold(unfolded, w.spatial, **options)
  back = jaxdnn.col2im(cols, w.spatial, **arguments(w), order="channels_window")
  np.testing.assert_allclose(np.moveaxis(np.asarray(back), -1, 1), folded, rtol=1e-6)


def test_convolution_is_a_matrix_product():
  x, f = jnp.asarray(sample((2, 7, 8, 3), "float64")), jnp.asarray(sample((3, 2, 3, 5), "float64", 1))
  cols = jaxdnn.im2col(x, (3, 2), stride=2, padding="SAME")
  want = lax.conv_general_dilated(x, f, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
  np.testing.assert_allclose(cols @ f.reshape(-1, 5), want, rtol=1e-10, atol=1e-10)


# Derivatives and compositions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("w", WINDOWS[2::4])
def test_each_is_the_others_adjoint(w):
  x, c = jnp.asarray(image(w, "float64")), jnp.asarray(patches(w, "float64"))
  up, down = functools.partial(jaxdnn.im2col, **arguments(w)), lambda c: jaxdnn.col2im(c, w.spatial, **arguments(w))
  np.testing.assert_allclose(jnp.vdot(up(x), c), jnp.vdot(x, down(c)), rtol=1e-10, atol=1e-10)
  np.testing.assert_array_equal(jax.vjp(up, x)[1](c)[0], down(c))
  np.testing.assert_array_equal(jax.vjp(down, c)[1](x)[0], up(x))


def test_derivatives_of_every_order_and_mode():
  w = Window((5, 4), (3, 2), (2, 1), ((1, 1), (0, -1)), (1, 2), channels=2, lead=(1,))
  up, down = functools.partial(jaxdnn.im2col, **arguments(w)), lambda c: jaxdnn.col2im(c, w.spatial, **arguments(w))
  check_grads(jax.jit(lambda x: jnp.sin(up(x))), (jnp.asarray(image(w, "float64")),), order=2, modes=("fwd", "rev"))
  check_grads(jax.jit(lambda c: jnp.sin(down(c))), (jnp.asarray(patches(w, "float64")),), order=2, modes=("fwd", "rev"))


def test_vmap():
  w = Window((5, 4), (3, 2), 1, "SAME", channels=3)
  up, down = functools.partial(jaxdnn.im2col, **arguments(w)), lambda c: jaxdnn.col2im(c, w.spatial, **arguments(w))
  for f, value in ((up, image(w, "float64")), (down, patches(w, "float64"))):
    stacked = jnp.stack([value, 2 * value, -value])
    each = jnp.stack([f(v) for v in stacked])
    grads = jnp.stack([jax.grad(lambda v, f=f: jnp.sin(f(v)).sum())(v) for v in stacked])
    for d in range(value.ndim + 1):
      moved = jnp.moveaxis(stacked, 0, d)
      np.testing.assert_array_equal(jax.vmap(f, d)(moved), each)
      got = jax.vmap(jax.grad(lambda v, f=f: jnp.sin(f(v)).sum()), d)(moved)
      np.testing.assert_allclose(got, grads, rtol=1e-12, atol=1e-14)


@pytest.mark.mesh
def test_explicit_mesh():
  mesh = jax.make_mesh((DEVICES,), ("data",))
  w = Window((5, 4), (3, 2), 1, "SAME", channels=3, lead=(8,))
  x = jnp.asarray(image(w, "float64"))

  def round_trip(x):
    return jaxdnn.col2im(jnp.sin(jaxdnn.im2col(x, **arguments(w))), w.spatial, **arguments(w))

  with jax.set_mesh(mesh):
    placed = jax.device_put(x, P("data"))
    got = round_trip(placed)
    assert jax.typeof(got).sharding.spec[0] == "data"
    np.testing.assert_allclose(got, round_trip(x), rtol=1e-12)
    assert "all-gather" not in jax.jit(round_trip).lower(placed).compile().as_text()
    with pytest.raises(ValueError, match="sharded over mesh axis 'data' along dimension 1"):
      jaxdnn.im2col(jax.device_put(jnp.ones((2, 8, 8, 3)), P(None, "data")), (2, 2))


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors():
  x, c = jnp.zeros((2, 5, 5, 3)), jnp.zeros((2, 4, 4, 12))
  for f in (lambda **k: jaxdnn.im2col(x, **k), lambda **k: jaxdnn.col2im(c, (5, 5), **k)):
    with pytest.raises(TypeError, match="window must be a sequence of 1 to 3 integers, got 2"):
      f(window=2)
    with pytest.raises(ValueError, match="window must have 1 to 3 entries"):
      f(window=(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"window must be positive, got \(2, 0\)"):
      f(window=(2, 0))
    with pytest.raises(ValueError, match="order must be 'window_channels' or 'channels_window', got 'last'"):
      f(window=(2, 2), order="last")
    with pytest.raises(ValueError, match="stride must have one entry for each of the 2 spatial dimensions"):
      f(window=(2, 2), stride=(1, 1, 1))
    with pytest.raises(ValueError, match=r"padding \(-6, 0\) crops more than the 5 elements"):
      f(window=(2, 2), padding=((-6, 0), (0, 0)))
  with pytest.raises(ValueError, match=r"needs x of shape \[..., 3 spatial, channels\], got \(5, 5, 3\)"):
    jaxdnn.im2col(x[0], (1, 1, 1))
  with pytest.raises(TypeError, match="cols must be floating-point, got int32"):
    jaxdnn.col2im(c.astype("int32"), (5, 5), (2, 2))
  with pytest.raises(ValueError, match="spatial must have 2 entries, got"):
    jaxdnn.col2im(c, (5,), (2, 2))
  for wrong in ((2, 3, 4, 12), (2, 4, 4, 11), (4, 12)):
    with pytest.raises(ValueError, match=r"cols must have shape \[..., 4, 4, 4 \* channels\] for the spatial extents"):
      jaxdnn.col2im(jnp.zeros(wrong), (5, 5), (2, 2))


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_geometry(dtype):
  """Strides, dilations and paddings against each other, at channels of every alignment."""
  for channels in (1, 3, 4, 8):
    check(
      [
        Window((11,), (k,), s, ((lo, hi),), d, channels)
        for k, s, d, (lo, hi) in itertools.product((1, 2, 5), (1, 2, 3, 6), (1, 2, 4), ((0, 0), (3, 1), (-1, 6)))
      ],
      dtype,
    )


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_everything_and_repeat(dtype):
  for w in WINDOWS[1::5]:
    x, c = jnp.asarray(image(w, dtype)), jnp.asarray(patches(w, dtype))
    np.testing.assert_array_equal(
      exact(assert_repeatable(lambda x, w=w: jaxdnn.im2col(x, **arguments(w)), x, repeats=3)),
      exact(oracle_im2col(np.asarray(x), w)),
    )
    back = assert_repeatable(lambda c, w=w: jaxdnn.col2im(c, w.spatial, **arguments(w)), c, repeats=3)
    assert_close(back, oracle_col2im(c, w), dtype, terms=int(np.prod(w.window)), scale=4)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one at a time
def test_more_than_2_to_the_31_elements():
  """Patches of many images, and of one: the last cell differs, so that a wrapped offset shows."""
  for shape in [(130, 256, 256, 32), (1, 1 << 14, 1 << 9, 32)]:
    x = jnp.zeros(shape, jnp.bfloat16).at[-1, -1, -1, -1].set(5)
    cols = jaxdnn.im2col(x, (3, 3), padding=1)
    assert cols.size > 2**31 and int(jnp.count_nonzero(cols)) == 4 and cols[-1, -1, -1, 4 * 32 + 31] == 5
    back = jaxdnn.col2im(cols, shape[1:3], (3, 3), padding=1)
    assert int(jnp.count_nonzero(back)) == 1 and back[-1, -1, -1, -1] == 20
    del x, cols, back
