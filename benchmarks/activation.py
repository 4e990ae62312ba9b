"""Activations, forward and backward, against jax.nn.

Alone, each is one pass over memory; inside a program XLA fuses its own into their neighbours.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn
from benchmarks.harness import Draw, Work, itemsize

SHAPE = (16384, 8192)
FUNCTIONS = {
  "relu": (jaxdnn.relu, jax.nn.relu),
  "sigmoid": (jaxdnn.sigmoid, jax.nn.sigmoid),
  "tanh": (jaxdnn.tanh, jnp.tanh),
}


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  shape = tuple(max(n // shrink, 2) for n in SHAPE)
  for name, (ours, xla) in FUNCTIONS.items():
    for dtype in dtypes:
      x, size = Draw(shape, dtype), math.prod(shape) * itemsize(dtype)
      ours_of_x, xla_of_x = only_first(ours), only_first(xla)
      yield Work("activation", name, dtype, "fwd", ours_of_x, xla_of_x, (x, x), 2 * size)
      yield Work("activation", name, dtype, "bwd", ours_of_x, xla_of_x, (x, x), 3 * size, backward=True)


def only_first(function):
  def of_x(x: Array, *unused: Array) -> Array:
    return function(x)

  return of_x
