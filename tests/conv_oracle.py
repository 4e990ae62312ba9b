"""Convolution and its gradients in NumPy float64, by the definition: dilate, pad or crop, then one product per tap.

Arrays are channels-last: x [N, *S, C], w [*R, C/groups, K], y [N, *P, K].
"""

import itertools

import numpy as np


def _prepared_extents(spatial, padding, lhs_dilation):
  return [
    (0 if i == 0 else (i - 1) * d + 1) + lo + hi for i, d, (lo, hi) in zip(spatial, lhs_dilation, padding, strict=True)
  ]


def _prepare(x, padding, lhs_dilation):
  """x with its holes and its padding; and the map from prepared to original indices, for the adjoint."""
  spatial = x.shape[1:-1]
  prepared = np.zeros((x.shape[0], *_prepared_extents(spatial, padding, lhs_dilation), x.shape[-1]))
  kept, target = [], []
  for i, d, (lo, _), extent in zip(spatial, lhs_dilation, padding, prepared.shape[1:-1], strict=True):
    index = np.arange(i)
    position = index * d + lo
    inside = (position >= 0) & (position < extent)
    kept.append(index[inside])
    target.append(position[inside])
  everything = [np.arange(x.shape[0])], [np.arange(x.shape[-1])]
  source = np.ix_(*everything[0], *kept, *everything[1])
  destination = np.ix_(*everything[0], *target, *everything[1])
  prepared[destination] = x[source]
  return prepared, source, destination


def _taps(prepared, window, out, stride, rhs_dilation):
  """For every tap, the tap and the slices of the prepared input that it meets, one element per output."""
  for tap in itertools.product(*map(range, window)):
    yield (
      tap,
      (
        slice(None),
        *(
          slice(r * d, r * d + (p - 1) * u + 1 if p else r * d, u)
          for r, d, p, u in zip(tap, rhs_dilation, out, stride, strict=True)
        ),
        slice(None),
      ),
    )


def out_spatial(spatial, window, stride, padding, lhs_dilation, rhs_dilation):
  extents = [0 if r == 0 else (r - 1) * d + 1 for r, d in zip(window, rhs_dilation, strict=True)]
  prepared = _prepared_extents(spatial, padding, lhs_dilation)
  return tuple((i - e) // u + 1 if i >= e else 0 for i, e, u in zip(prepared, extents, stride, strict=True))


def conv(x, w, stride, padding, lhs_dilation, rhs_dilation, groups=1):
  x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
  window, (c, k) = w.shape[:-2], w.shape[-2:]
  out = out_spatial(x.shape[1:-1], window, stride, padding, lhs_dilation, rhs_dilation)
  prepared, _, _ = _prepare(x, padding, lhs_dilation)
  y = np.zeros((x.shape[0], *out, groups, k // groups))
  if y.size:
    for tap, where in _taps(prepared, window, out, stride, rhs_dilation):
      patch = prepared[where].reshape(*y.shape[:-2], groups, c)
      y += np.einsum("...gc,cgk->...gk", patch, w[tap].reshape(c, groups, k // groups))
  return y.reshape(*y.shape[:-2], k)


def conv_gradients(x, w, g, stride, padding, lhs_dilation, rhs_dilation, groups=1):
  """The cotangents of x and w for the cotangent g of y."""
  x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
  window, (c, k) = w.shape[:-2], w.shape[-2:]
  prepared, source, destination = _prepare(x, padding, lhs_dilation)
  dprepared, dw, dx = np.zeros_like(prepared), np.zeros_like(w), np.zeros_like(x)
  pixels = int(np.prod(g.shape[:-1]))
  gg = g.reshape(*g.shape[:-1], groups, k // groups)
  if x.size and g.size:
    for tap, where in _taps(prepared, window, g.shape[1:-1], stride, rhs_dilation):
      patch = prepared[where].reshape(*g.shape[:-1], groups, c)
      dw[tap] = np.einsum("ngc,ngk->cgk", *(a.reshape(pixels, groups, -1) for a in (patch, gg))).reshape(c, k)
      contribution = np.einsum("...gk,cgk->...gc", gg, w[tap].reshape(c, groups, k // groups))
      dprepared[where] += contribution.reshape(*g.shape[:-1], groups * c)
  dx[source] = dprepared[destination]
  return dx, dw
