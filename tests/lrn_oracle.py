"""Local response and divisive normalization in NumPy, and the comparison of all their maps with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn
from numerics import assert_close, exact, sample

# By default the window's energy matters as much as k.
DEFAULTS = {"alpha": 2.0, "beta": 0.75, "k": 2.0}


class Oracle:
  """The mathematics, window by window: `y`, the maps of tangents and cotangents, and the magnitudes of their terms.

  `cells` are the pairs of slices that pair each element i with a neighbour j, one for each cell of the window.
  """

  def __init__(self, case, x, means=None):
    options = {**DEFAULTS, "axis": -1, "padding": "SAME", "divide_by_size": True, **case.options}
    self.x = exact(x)
    self.m = np.zeros_like(self.x) if means is None else exact(means)
    channels = options["axis"] % self.x.ndim
    others = [d for d in range(self.x.ndim) if d != channels]
    if case.mode == "across_channels":
      axes = [channels]
    else:
      axes = others[1:] if isinstance(case.size, int) else others[-len(case.size) :]
    sizes = [case.size] * len(axes) if isinstance(case.size, int) else case.size
    before = [n // 2 if options["padding"] == "SAME_LOWER" else (n - 1) // 2 for n in sizes]
    self.terms = max(1, int(np.prod(sizes)))
    self.cells = []
    for shift in np.ndindex(*sizes):
      i, j = [slice(None)] * self.x.ndim, [slice(None)] * self.x.ndim
      for axis, s, b in zip(axes, shift, before, strict=True):
        n, d = self.x.shape[axis], s - b
        i[axis], j[axis] = slice(max(0, -d), max(0, n - max(0, d))), slice(min(n, max(0, d)), max(0, n + min(0, d)))
      if self.x[tuple(i)].size:
        self.cells.append((tuple(i), tuple(j)))
    scale = options["alpha"] / (self.terms if options["divide_by_size"] else 1)
    with np.errstate(all="ignore"):
      d = options["k"] + scale * self.gather(lambda i, j: (self.x[j] - self.m[i]) ** 2)
      self.p = d ** -options["beta"]
      self.q = 2 * scale * options["beta"] * self.p / d
      self.y = self.x * self.p

  def gather(self, term):
    """The sum of `term(i, j)` over the window of each i."""
    out = np.zeros_like(self.x)
    for i, j in self.cells:
      out[i] += term(i, j)
    return out

  def scatter(self, term):
    """The sum of `term(i, j)` over the windows that hold each j."""
    out = np.zeros_like(self.x)
    for i, j in self.cells:
      out[j] += term(i, j)
    return out

  def jvp(self, t):
    t = exact(t)
    return t * self.p - self.q * self.x * self.gather(lambda i, j: (self.x[j] - self.m[i]) * t[j])

  def vjp(self, g):
    g = exact(g)
    r = self.q * self.x * g
    return g * self.p - self.scatter(lambda i, j: r[i] * (self.x[j] - self.m[i]))

  def vjp_means(self, g):
    return self.q * self.x * exact(g) * self.gather(lambda i, j: self.x[j] - self.m[i])

  def jvp_scale(self, t):
    t, x, m = np.abs(exact(t)), np.abs(self.x), np.abs(self.m)
    return t * self.p + np.abs(self.q) * x * self.gather(lambda i, j: (x[j] + m[i]) * t[j])

  def vjp_scale(self, g):
    g, x, m = np.abs(exact(g)), np.abs(self.x), np.abs(self.m)
    r = np.abs(self.q) * x * g
    own = self.gather(lambda i, j: r[i] * (x[j] + m[i]))
    return g * self.p + self.scatter(lambda i, j: r[i] * (x[j] + m[i])) + own


def function(case):
  options = {**DEFAULTS, **case.options}
  if case.mode == "divisive":
    return functools.partial(jaxdnn.divisive_norm, size=case.size, **options)
  return functools.partial(jaxdnn.local_response_norm, size=case.size, mode=case.mode, **options)


def operands(case, dtype, seed=0):
  return [sample(case.shape, dtype, seed + i) for i in range(2 if case.mode == "divisive" else 1)]


def maps(case, x, g):
  """The value, the pull-back of `g`, and the push-forward of `g` in x alone."""
  f = function(case)
  y, vjp = jax.vjp(f, *x)
  return y, vjp(g), jax.jvp(f, tuple(x), (g, *(jnp.zeros_like(g) for _ in x[1:])))[1]


def check_cases(cases, dtype):
  """Value, cotangent map and tangent map of every case, all in one compilation."""
  xs = [operands(c, dtype, seed) for seed, c in enumerate(cases)]
  gs = [sample(c.shape, dtype, seed + 7) for seed, c in enumerate(cases)]

  results = jax.jit(lambda xs, gs: list(map(maps, cases, xs, gs)))(xs, gs)
  for case, x, g, (y, cotangents, dy) in zip(cases, xs, gs, results, strict=True):
    try:
      want = Oracle(case, *x)
      terms = want.terms
      assert_close(y, want.y, dtype, terms=terms, scale=np.abs(want.y))
      assert_close(dy, want.jvp(g), dtype, terms=terms, scale=want.jvp_scale(g))
      assert_close(cotangents[0], want.vjp(g), dtype, terms=terms, scale=want.vjp_scale(g))
      if len(x) == 2:
        assert_close(cotangents[1], want.vjp_means(g), dtype, terms=terms, scale=want.vjp_scale(g))
    except AssertionError as e:
      raise AssertionError(f"{case}: {e}") from e
