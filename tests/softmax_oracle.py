"""Softmax, log-softmax and their derivatives in NumPy float64."""

import numpy as np

import jaxdnn
from numerics import exact

FUNCTIONS = {"softmax": jaxdnn.softmax, "log_softmax": jaxdnn.log_softmax}
BOTH = sorted(FUNCTIONS)


def oracle(op, x, axis=-1):
  x = exact(x)
  with np.errstate(invalid="ignore", divide="ignore"):
    d = x - np.max(x, axis, keepdims=True, initial=-np.inf)
    s = np.sum(np.exp(d), axis, keepdims=True)
    return np.exp(d) / s if op == "softmax" else d - np.log(s)


def oracle_vjp(op, y, g, axis=-1):
  y, g = exact(y), exact(g)
  if op == "softmax":
    return y * (g - np.sum(y * g, axis, keepdims=True))
  return g - np.exp(y) * np.sum(g, axis, keepdims=True)


def oracle_jvp(op, y, t, axis=-1):
  if op == "softmax":
    return oracle_vjp(op, y, t, axis)
  y, t = exact(y), exact(t)
  return t - np.sum(np.exp(y) * t, axis, keepdims=True)
