"""A channels-first network pays for its layout at its entry and its exit, and not between its convolutions."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxdnn
from numerics import sample

NCHW = ("NCHW", "OIHW", "NCHW")
SHAPE = (8, 64, 16, 16)


def network(x, filters, biases):
  conv = lambda x, w, b, **more: jaxdnn.conv(x, w, b, padding="SAME", dimension_numbers=NCHW, **more)  # noqa: E731
  h = conv(x, filters[0], biases[0], activation="relu")
  h = conv(h, filters[1], biases[1], activation="tanh")
  return conv(h, filters[2], biases[2], residual=x, activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_transposes_between_convolutions(dtype):
  filters = [jnp.asarray(sample((64, 64, 3, 3), dtype, i)) for i in range(3)]
  biases = [jnp.asarray(sample((64,), dtype, i)) for i in range(3)]
  x = jnp.asarray(sample(SHAPE, dtype))
  hlo = jax.jit(network).lower(x, filters, biases).compile().as_text()
  moved = [
    line
    for line in hlo.splitlines()
    if (m := re.search(r"= \w+\[([\d,]+)\]\S* (transpose|copy)\(", line))
    and math.prod(map(int, m[1].split(","))) == math.prod(SHAPE)
  ]
  # x is read by the first convolution and, as the residual, by the last sum.
  assert len(moved) <= 3, "\n".join(moved)
