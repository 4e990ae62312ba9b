"""Every activation as a NumPy function with its derivative, and the shapes they are tried on."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

erfc = np.vectorize(math.erfc, otypes=[np.float64])


class Case(NamedTuple):
  name: str
  arguments: dict[str, Any]
  forward: Callable
  derivative: Callable
  kept: str
  """What the backward pass keeps: "mask", "output" or "input"."""
  kinks: tuple[float, ...] = ()

  def __str__(self):
    return "-".join([self.name, *(f"{k}={v}" for k, v in self.arguments.items())])


def sigmoid(x):
  e = np.exp(-np.abs(x))
  return np.where(x >= 0, 1, e) / (1 + e)


def softplus(x):
  return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def elu(scale, alpha, width):
  low = lambda x: np.minimum(x, 0) / width  # noqa: E731
  return (
    lambda x: np.where(x > 0, scale * x, scale * alpha * np.expm1(low(x))),
    lambda x: np.where(x > 0, scale, scale * alpha / width * np.exp(low(x))),
  )


def gelu_tanh(x):
  u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  return x * sigmoid(2 * u)


def gelu_tanh_derivative(x):
  u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  s = sigmoid(2 * u)
  return s + 2 * x * s * sigmoid(-2 * u) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def mish_derivative(x):
  t = np.tanh(softplus(x))
  return t + x * (1 - t**2) * sigmoid(x)


def squareplus(b):
  root = lambda x: np.sqrt(x * x + b)  # noqa: E731
  return (
    lambda x: np.where(x > 0, (x + root(x)) / 2, b / 2 / (root(x) - np.minimum(x, 0))),
    lambda x: np.where(x > 0, 0.5 + x / root(x) / 2, b / 2 / root(x) / (root(x) - np.minimum(x, 0))),
  )


def inside(low, high, slope):
  return lambda x: np.where((x > low) & (x < high), slope, 0.0)


def leaky(slope):
  return lambda x: np.where(x >= 0, x, slope * x), lambda x: np.where(x >= 0, 1.0, slope)


CASES = (
  Case("relu", {}, lambda x: np.where(x <= 0, 0, x), inside(0, np.inf, 1), "mask", (0,)),
  Case("relu6", {}, lambda x: np.clip(x, 0, 6), inside(0, 6, 1), "mask", (0, 6)),
  Case("clipped_relu", {}, lambda x: np.clip(x, 0, 6), inside(0, 6, 1), "mask", (0, 6)),
  Case("clipped_relu", {"ceiling": 1.5}, lambda x: np.clip(x, 0, 1.5), inside(0, 1.5, 1), "mask", (0, 1.5)),
  Case("leaky_relu", {}, *leaky(0.01), "mask", (0,)),
  Case("leaky_relu", {"negative_slope": -0.25}, *leaky(-0.25), "mask", (0,)),
  Case("hard_sigmoid", {}, lambda x: np.clip(x / 6 + 0.5, 0, 1), inside(-3, 3, 1 / 6), "mask", (-3, 3)),
  Case("hard_tanh", {}, lambda x: np.clip(x, -1, 1), lambda x: np.where((x > 1) | (x < -1), 0.0, 1.0), "mask", (-1, 1)),
  Case(
    "hard_swish",
    {},
    lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    lambda x: np.where(x <= -3, 0, np.where(x >= 3, 1, x / 3 + 0.5)),
    "input",
    (-3, 3),
  ),
  Case("sigmoid", {}, sigmoid, lambda x: sigmoid(x) * sigmoid(-x), "output"),
  Case("tanh", {}, np.tanh, lambda x: 4 * sigmoid(2 * x) * sigmoid(-2 * x), "output"),
  Case("elu", {}, *elu(1, 1, 1), "input"),
  Case("elu", {"alpha": 0.5}, *elu(1, 0.5, 1), "input", (0,)),
  Case("celu", {}, *elu(1, 1, 1), "input"),
  Case("celu", {"alpha": 2.0}, *elu(1, 2.0, 2.0), "input"),
  Case("selu", {}, *elu(1.0507009873554805, 1.6732632423543772, 1), "input", (0,)),
  Case("softplus", {}, softplus, sigmoid, "input"),
  Case("softplus", {"beta": 3.0}, lambda x: softplus(3 * x) / 3, lambda x: sigmoid(3 * x), "input"),
  Case("log_sigmoid", {}, lambda x: -softplus(-x), lambda x: sigmoid(-x), "input"),
  Case("silu", {}, lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * sigmoid(-x)), "input"),
  Case(
    "silu",
    {"beta": 1.7},
    lambda x: x * sigmoid(1.7 * x),
    lambda x: sigmoid(1.7 * x) * (1 + 1.7 * x * sigmoid(-1.7 * x)),
    "input",
  ),
  Case("gelu", {}, gelu_tanh, gelu_tanh_derivative, "input"),
  Case(
    "gelu",
    {"approximate": False},
    lambda x: x / 2 * erfc(-x / math.sqrt(2)),
    lambda x: erfc(-x / math.sqrt(2)) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "input",
  ),
  Case("mish", {}, lambda x: x * np.tanh(softplus(x)), mish_derivative, "input"),
  Case("soft_sign", {}, lambda x: x / (1 + np.abs(x)), lambda x: 1 / (1 + np.abs(x)) ** 2, "input"),
  Case("squareplus", {}, *squareplus(4.0), "input"),
  Case("squareplus", {"b": 0.5}, *squareplus(0.5), "input"),
)
DEFAULTS = {case.name: case for case in CASES if not case.arguments}
BY_NAME = {str(case): case for case in CASES}

# Less than a vector; several blocks and an end that is not a multiple of a vector, nor of the bits in a byte.
SHAPES = ((7,), (3, 5, 275))

# x, and the axis of the operand: vectors of channels, rows of several, one, odd, many; planes of each kernel.
CHANNELS = (
  ((8,), 0),
  ((1000, 1), -1),
  ((300, 3), -1),
  ((257, 16), -1),
  ((2, 9, 64), -1),
  ((70, 130), -1),
  ((40, 1111), -1),
  ((3, 4096), 1),
  ((2, 3, 5, 4), 1),
  ((3, 40, 7), 1),
  ((3, 5, 300), 1),
  ((2, 3, 4100), -2),
  ((6, 35, 9), 0),
)

GATED = (((6,), 0), ((3, 64), -1), ((5, 2, 14), -1), ((3, 10, 4), 1), ((8, 3), 0))

BENCHMARKS = ((16384, 8192), (8192, 4096))
