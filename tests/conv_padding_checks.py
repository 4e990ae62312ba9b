"""What convolutions that are padded with elements of the input are checked against: NumPy's padding, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from numerics import assert_close, assert_repeatable, exact, sample

NUMPY = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def indices(spatial, padding, modes):
  """For each dimension the element that each position of the padded input is; and what is left, padding with zeros."""
  maps, left = [], []
  for n, (lo, hi), mode in zip(spatial, padding, modes, strict=True):
    added = (0, 0) if mode == "zeros" else (max(lo, 0), max(hi, 0))
    maps.append(np.arange(n) if added == (0, 0) else np.pad(np.arange(n), added, mode=NUMPY[mode]))
    left.append((lo - added[0], hi - added[1]))
  return maps, left


def oracle(x, w, g, *, stride, padding, dilation, groups, padding_mode):
  """y and, for the cotangent g of y (or None), the gradients of x and w."""
  x, w = exact(x), exact(w)
  maps, left = indices(x.shape[1:-1], padding, padding_mode)
  where = np.ix_(np.arange(x.shape[0]), *maps, np.arange(x.shape[-1]))
  geometry = (stride, left, (1,) * len(stride), dilation)
  y = conv_oracle(x[where], w, *geometry, groups)
  if g is None:
    return y
  dpadded, dw = conv_gradients(x[where], w, exact(g), *geometry, groups)
  dx = np.zeros_like(x)
  np.add.at(dx, where, dpadded)
  return y, dx, dw


def check_all_three(x_shape, w_shape, arguments, dtype, seed, terms, repeat=False, **more):
  # Exact in TF32.
  drawn_as = "bfloat16" if dtype == "float32" else dtype
  draw = lambda shape, i: sample(shape, drawn_as, seed + i).astype(jnp.dtype(dtype))  # noqa: E731
  x, w = draw(x_shape, 0), draw(w_shape, 1)
  f = functools.partial(jaxdnn.conv, **arguments, **more)
  g = draw(jax.eval_shape(f, x, w).shape, 2)

  def all_three(x, w, g):
    y, vjp = jax.vjp(f, x, w)
    return y, *vjp(g)

  run = assert_repeatable if repeat else lambda f, *a: jax.jit(f)(*a)
  got = run(all_three, *map(jnp.asarray, (x, w, g)))
  want = oracle(x, w, g, **arguments)
  for a, b in zip(got, want, strict=True):
    assert_close(a, b, dtype, terms=terms, scale=4)
  direct = (
    jaxdnn.conv_dgrad(g, w, x_shape[1:-1], **arguments, **more),
    jaxdnn.conv_wgrad(x, g, w_shape[:-2], **arguments, **more),
  )
  for a, b in zip(direct, got[1:], strict=True):
    np.testing.assert_array_equal(exact(a), exact(b))
