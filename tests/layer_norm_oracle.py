"""Layer norm and RMS norm by their formulas in NumPy float64, and the check of many cases against them."""

import jax
import numpy as np

import jaxdnn
from numerics import ACCUMULATOR, ROUNDOFF, assert_close, exact, sample

NORMS = {"layer": jaxdnn.layer_norm, "rms": jaxdnn.rms_norm}
ADD = {"layer": jaxdnn.add_layer_norm, "rms": jaxdnn.add_rms_norm}
BOTH = sorted(NORMS)
EPSILON = {"layer": 1e-5, "rms": 1e-6}


def statistics(kind, x, epsilon, axis=-1):
  """The normalised rows and the reciprocal deviation."""
  x = exact(x)
  d = x
  if kind == "layer":
    # The mean's own rounding counts where the elements of a row hardly differ.
    d = x - x.mean(axis, keepdims=True)
    d = d - d.mean(axis, keepdims=True)
  rstd = 1 / np.sqrt((d * d).mean(axis, keepdims=True) + epsilon)
  return d * rstd, rstd


def oracle(kind, x, scale=1.0, bias=0.0, epsilon=None, axis=-1):
  return statistics(kind, x, epsilon or EPSILON[kind], axis)[0] * exact(scale) + exact(bias)


def project(kind, t, h, rstd):
  """The Jacobian of the normalised rows, applied to t. It is symmetric."""
  t = t - t.mean(-1, keepdims=True) if kind == "layer" else t
  return rstd * (t - h * (t * h).mean(-1, keepdims=True))


def with_gradients(f, g, *args):
  y, vjp = jax.vjp(f, *args)
  return y, vjp(g)


def check_cases(kind, cases, dtype, *, residual=False, affine=True, tangent=True):
  """Value, alone and with cotangents, and maybe tangent of every case, all in one compilation."""
  wide = ACCUMULATOR[dtype]
  shapes = [(c.rows, c.n) for c in cases]
  data = [[sample(s, dtype, 5 * i + j) for j in range(4)] for i, s in enumerate(shapes)]
  parameters = [[sample((n,), wide, 7 * i + j) for j in range(4)] for i, (_, n) in enumerate(shapes)]

  def maps(data, parameters):
    (x, r, g, g_sum), (scale, bias, dscale, dbias) = data, parameters
    primals, tangents = [x], [g]
    if residual:
      primals, tangents = [*primals, r], [*tangents, g_sum]
    if affine:
      primals, tangents = [*primals, scale, bias], [*tangents, dscale, dbias]
    f = (ADD if residual else NORMS)[kind]
    y, vjp = jax.vjp(f, *primals)
    dy = jax.jvp(f, tuple(primals), tuple(tangents))[1] if tangent else y
    return f(*primals), y, vjp((g, g_sum) if residual else g), dy

  results = jax.jit(lambda data, parameters: list(map(maps, data, parameters)))(data, parameters)

  for (x, r, g, g_sum), (scale, bias, dscale, dbias), (alone, *of_rules) in zip(data, parameters, results, strict=True):
    y, gradients, dy = of_rules
    rows, n = x.shape
    s = x
    t = exact(g)
    if residual:
      (alone, _), (y, s), (dy, ds) = alone, y, dy
      assert_close(s, exact(x) + exact(r), dtype)
      if tangent:
        assert_close(ds, exact(g) + exact(g_sum), dtype)
      t = exact(ds)
    h, rstd = statistics(kind, s, EPSILON[kind])
    by = exact(scale) if affine else np.float64(1)
    want = h * by + (exact(bias) if affine else 0)
    for each in (alone, y):
      assert_close(each, want, dtype, terms=n, scale=np.abs(h * by).max() + np.abs(want).max())

    q = exact(g) * by
    dx = project(kind, q, h, rstd) + (exact(g_sum) if residual else 0)
    size = np.abs(rstd).max() * np.abs(q).max() * (1 + np.abs(h).max() ** 2) + 1
    assert_close(gradients[0], dx, dtype, terms=n, scale=size)
    if residual:
      assert np.array_equal(exact(gradients[1]), exact(gradients[0]))
    if affine:
      size = np.abs(exact(g)).max() * (1 + np.abs(h).max())
      got_scale, got_bias = gradients[-2:]
      assert_close(got_scale, (exact(g) * h).sum(0), wide, terms=rows + n, scale=size)
      assert_close(got_bias, exact(g).sum(0), wide, terms=rows, scale=size)
    if not tangent:
      continue
    want = project(kind, t, h, rstd) * by + ((h * exact(dscale) + exact(dbias)) if affine else 0)
    size = np.abs(rstd).max() * np.abs(t).max() * (1 + np.abs(h).max() ** 2) * np.abs(by).max() + np.abs(want).max()
    if residual:  # The sum of the tangents may or may not be rounded before it goes on.
      size *= 1 + ROUNDOFF[dtype] / ROUNDOFF[wide]
    assert_close(dy, want, dtype, terms=n, scale=size)
