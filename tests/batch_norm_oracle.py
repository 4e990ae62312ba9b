"""Batch normalization and its derivatives in NumPy and float64, and operands for it."""

import numpy as np

from numerics import ACCUMULATOR, exact, sample


def sigmoid(p):
  return 1 / (1 + np.exp(-p))


ACTIVATIONS = {
  None: (lambda p: p, np.ones_like),
  "relu": (lambda p: np.maximum(p, 0), lambda p: (p > 0) * 1.0),
  "sigmoid": (sigmoid, lambda p: sigmoid(p) * sigmoid(-p)),
  "tanh": (np.tanh, lambda p: 1 / np.cosh(p) ** 2),
}


class Oracle:
  """Value and derivatives in float64."""

  def __init__(self, case, x, scale, bias, *, epsilon=1e-5, activation=None, residual=None, where=True):
    self.case, self.where = case, np.broadcast_to(where, case.shape)
    self.f, self.df = ACTIVATIONS[activation]
    self.n = np.maximum(self.sum(np.ones(case.shape)), 1)
    self.scale, self.bias = (np.expand_dims(exact(v), case.reduced) for v in (scale, bias))
    x = np.where(self.where, exact(x), 0)
    self.mean = self.sum(x) / self.n
    self.centered = x - self.mean
    self.var = self.sum(self.centered**2) / self.n
    self.rstd = 1 / np.sqrt(self.var + epsilon)
    self.xhat = self.centered * self.rstd
    self.p = self.xhat * self.scale + self.bias + (0 if residual is None else exact(residual))

  def sum(self, v):
    return np.sum(np.where(self.where, v, 0), self.case.reduced, keepdims=True)

  def channels(self, v):
    return v.reshape(self.case.channels)

  def value(self):
    return np.where(self.where, self.f(self.p), 0)

  def vjp(self, dy, dmean=0.0, dvar=0.0):
    """Cotangents of x, scale, bias and the residual."""
    h = np.where(self.where, exact(dy), 0) * self.df(np.where(self.where, self.p, 0))
    dbias, dscale = self.sum(h), self.sum(h * self.xhat)
    dx = self.scale * self.rstd * (h - dbias / self.n - self.xhat * dscale / self.n)
    dx = dx + dmean / self.n + 2 * dvar * self.centered / self.n
    return np.where(self.where, dx, 0), self.channels(dscale), self.channels(dbias), h

  def jvp(self, t, tscale, tbias, tresidual=0.0):
    """Tangents of y, mean and var."""
    dmean, dvar = self.sum(t) / self.n, 2 * self.sum(t * self.centered) / self.n
    dxhat = (t - dmean) * self.rstd - self.xhat * dvar * self.rstd**2 / 2
    tscale, tbias = (np.expand_dims(v, self.case.reduced) for v in (tscale, tbias))
    dp = dxhat * self.scale + self.xhat * tscale + tbias + tresidual
    return np.where(self.where, self.df(self.p) * dp, 0), self.channels(dmean), self.channels(dvar)


def operands(case, dtype, seed=0):
  wide = ACCUMULATOR[dtype]
  x = 2 * sample(case.shape, dtype, seed) + np.ones((), np.float32).astype(sample((), dtype).dtype)
  return x, 1 + sample(case.channels, wide, seed + 1) / 4, sample(case.channels, wide, seed + 2)
