"""Group normalization in NumPy float64, and the check of the maps against it."""

import functools

import jax
import numpy as np

import jaxdnn
from numerics import assert_close, exact, sample

ON_GPU = jax.default_backend() == "gpu"


def sigmoid(p):
  return 1 / (1 + np.exp(-p))


ACTIVATIONS = {
  None: (lambda p: p, lambda p: np.ones_like(p)),
  "relu": (lambda p: np.maximum(p, 0), lambda p: (p > 0) * 1.0),
  "silu": (lambda p: p * sigmoid(p), lambda p: sigmoid(p) * (1 + p * sigmoid(-p))),
}


class Oracle:
  """Value and derivatives in float64, on a channels-last copy with the groups apart."""

  def __init__(self, case, x, scale, bias, epsilon=1e-5, activation=None):
    self.case, self.scale, self.bias = case, exact(scale), exact(bias)
    self.f, self.df = ACTIVATIONS[activation]
    x = self.split(exact(x))
    mean = x.mean((1, 3), keepdims=True)
    self.rstd = 1 / np.sqrt(np.square(x - mean).mean((1, 3), keepdims=True) + epsilon)
    self.xhat = (x - mean) * self.rstd
    self.p = self.affine(self.xhat)

  def split(self, x):
    x = np.moveaxis(x, self.case.axis, -1)
    g, c = self.case.groups, self.case.channels
    return x.reshape(x.shape[0], int(np.prod(x.shape[1:-1])), g, c // g)

  def join(self, y):
    moved = np.moveaxis(np.empty(self.case.shape), self.case.axis, -1).shape
    return np.moveaxis(y.reshape(moved), -1, self.case.axis)

  def per_channel(self, a):
    return a.reshape(self.case.groups, self.case.channels // self.case.groups)

  def affine(self, xhat):
    return xhat * self.per_channel(self.scale) + self.per_channel(self.bias)

  def value(self):
    return self.join(self.f(self.p))

  def project(self, q):
    """The derivative of xhat along q, which is its own transpose."""
    mean = functools.partial(np.mean, axis=(1, 3), keepdims=True)
    return self.rstd * (q - mean(q) - self.xhat * mean(q * self.xhat))

  def vjp(self, dy):
    dp = self.split(exact(dy)) * self.df(self.p)
    dx = self.project(dp * self.per_channel(self.scale))
    return self.join(dx), (dp * self.xhat).sum((0, 1)).reshape(-1), dp.sum((0, 1)).reshape(-1)

  def jvp(self, t, tscale, tbias):
    direction = self.project(self.split(exact(t))) * self.per_channel(self.scale)
    return self.join(self.df(self.p) * (direction + self.xhat * self.per_channel(tscale) + self.per_channel(tbias)))


def operands(case, dtype, seed=0):
  wide = "float64" if dtype == "float64" else "float32"
  x = 2 * sample(case.shape, dtype, seed) + np.ones((), np.float32).astype(sample((), dtype).dtype)
  return x, 1 + sample((case.channels,), wide, seed + 1) / 4, sample((case.channels,), wide, seed + 2)


def apply(case, x, scale, bias, **options):
  return jaxdnn.group_norm(x, case.groups, scale, bias, axis=case.axis, **options)


def check_cases(cases, dtype, activation=None, forward_mode=True):
  """Value, cotangent map and tangent map of every case, all in one compilation."""
  args = [operands(c, dtype, 3 * i) for i, c in enumerate(cases)]
  dys = [sample(c.shape, dtype, i + 1) for i, c in enumerate(cases)]

  def maps(case, args, dy):
    f = functools.partial(apply, case, activation=activation)
    y, vjp = jax.vjp(f, *args)
    return y, vjp(dy), jax.jvp(f, args, (dy, *args[1:]))[1] if forward_mode else None

  results = jax.jit(lambda args, dys: list(map(maps, cases, args, dys)))(args, dys)
  wide = "float64" if dtype == "float64" else "float32"
  for case, (x, scale, bias), dy, (y, (dx, dscale, dbias), ty) in zip(cases, args, dys, results, strict=True):
    oracle = Oracle(case, x, scale, bias, activation=activation)
    # xhat carries the error of the inverse deviation and is about as large as its largest value.
    scale_of = 4 * np.abs(oracle.p).max(initial=1)
    assert_close(y, oracle.value(), dtype, scale=scale_of)
    want = oracle.vjp(dy)
    size = np.abs(oracle.rstd).max(initial=1) * np.abs(exact(dy)).max(initial=1) * scale_of
    assert_close(dx, want[0], dtype, scale=size)
    count = max(1, int(np.prod(case.shape)) // case.channels) if case.channels else 1
    assert_close(dscale, want[1], wide, terms=count, scale=2 * scale_of)
    assert_close(dbias, want[2], wide, terms=count, scale=2)
    if forward_mode:
      assert_close(ty, oracle.jvp(dy, scale, bias), dtype, scale=2 * size)
