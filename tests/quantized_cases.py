"""Operands of int8 and float8 convolutions, and what NumPy makes of them in int64 and float64."""

import itertools

import ml_dtypes
import numpy as np

import jaxdnn
from conv_cases import SAME3
from conv_oracle import conv as conv_oracle
from jaxdnn._conv.spec import ConvSpec
from numerics import exact

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOAT8 = list(itertools.product((E4M3, E5M2), repeat=2))


def integers(shape, seed=0, least=-128):
  """All of int8; with a `least` of 127 only the two ends."""
  draw = np.random.default_rng(seed)
  values = draw.choice([-128, 127], shape) if least == 127 else draw.integers(least, 128, shape)
  return values.astype(np.int8)


def floats8(shape, dtype, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(getattr(ml_dtypes, dtype))


def spec_of(case, algorithm=None, precision=None):
  return ConvSpec(*case.geometry, case.groups, case.spatial, case.window, precision, algorithm)


def integer_oracle(case, x, w):
  """Exact: float64 holds every sum of the cases."""
  return conv_oracle(x, w, *case.geometry, case.groups).astype(np.int64)


def layer(x, w, *args, **kwargs):
  return jaxdnn.conv(x, w, *args, **{"padding": "SAME", **kwargs})


def wrapping(last):
  """Whose sums are 2^31 for `last` of 131072, and a bit less or more for others."""
  depth = 131072
  x = np.full((1, depth), -128, np.int8)
  w = np.zeros((depth, 16), np.int8)
  w[:last] = -128
  return x, w


def scaled_operands(kind, x_shape=(2, 6, 5, 8), w_shape=(3, 3, 4, 6)):
  if kind == "int8":
    x, w = integers(x_shape), integers(w_shape, 1)
  else:
    x, w = floats8(x_shape, E4M3), floats8(w_shape, E5M2, 1)
  draw = np.random.default_rng(2)
  k = w_shape[-1]
  w_scale = (draw.uniform(0.5, 2, k) * (1e-3 if kind == "int8" else 1)).astype(np.float32)
  b, r = (draw.standard_normal(s).astype(np.float32) for s in ((k,), (*x_shape[:-1], k)))
  return x, w, np.float32(0.25), w_scale, b, r


def scaled_oracle(x, w, x_scale, w_scale, b=0.0, r=0.0):
  sums = conv_oracle(exact(x), exact(w), (1, 1), SAME3, (1, 1), (1, 1), x.shape[-1] // w.shape[-2])
  return sums * exact(x_scale * w_scale) + exact(b) + exact(r)
