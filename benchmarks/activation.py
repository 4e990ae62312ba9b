"""Activations, forward and backward, alone, with a bias and as gates, against jax.nn.

Alone, each is one pass over memory; inside a program XLA fuses its own into their neighbours. What must move backward
is the cotangent, its image, and the residual: a bit an element of a function with two slopes.
"""

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import Array

import activation_cases
import jaxdnn
from benchmarks.harness import Draw, Work, itemsize

FUNCTIONS = {
  "relu": (jaxdnn.relu, jax.nn.relu),
  "leaky_relu": (jaxdnn.leaky_relu, jax.nn.leaky_relu),
  "relu6": (jaxdnn.relu6, jax.nn.relu6),
  "sigmoid": (jaxdnn.sigmoid, jax.nn.sigmoid),
  "tanh": (jaxdnn.tanh, jnp.tanh),
  "elu": (jaxdnn.elu, jax.nn.elu),
  "softplus": (jaxdnn.softplus, jax.nn.softplus),
  "silu": (jaxdnn.silu, jax.nn.silu),
  "hard_swish": (jaxdnn.hard_swish, jax.nn.hard_swish),
  "gelu": (jaxdnn.gelu, jax.nn.gelu),
  "gelu_erf": (lambda x, **bias: jaxdnn.gelu(x, False, **bias), lambda x: jax.nn.gelu(x, False)),
  "mish": (jaxdnn.mish, jax.nn.mish),
}
QUICK = ("relu", "tanh", "gelu")
BIASED = ("relu", "silu", "gelu", "gelu_erf")
MASKED = ("relu", "leaky_relu", "relu6")
GATES = {
  "glu": (jaxdnn.glu, jax.nn.glu),
  "swiglu": (jaxdnn.swiglu, lambda x: jax.nn.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]),
  "geglu": (jaxdnn.geglu, lambda x: jax.nn.gelu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]),
}


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  shape, wide = (shrunk(s, shrink) for s in activation_cases.BENCHMARKS)
  for name in QUICK if quick else FUNCTIONS:
    for dtype in dtypes:
      yield from alone(name, shape, dtype)
  for name in ("gelu",) if quick else BIASED:
    for dtype in dtypes:
      yield from biased(name, shape, -1, dtype)
  for name in ("swiglu",) if quick else GATES:
    for dtype in dtypes:
      yield from gated(name, wide, dtype)
  for dtype in () if quick else dtypes:
    yield from prelu(shape, dtype)


def sweep(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  """Sizes from one element up, and channels of every kind: few, odd, many, first."""
  dtype = dtypes[0]
  for n in (1, 1000, 1 << 17, (1 << 20) + 1, 1 << 24, (1 << 28) + 3):
    yield from alone("gelu", shrunk((n,), shrink), dtype)
  yield from alone("relu", shrunk(((1 << 28) + 3,), shrink), dtype)
  for rows, channels in (
    (1 << 26, 1), (1 << 24, 3), (1 << 20, 64), (1 << 18, 257), (1 << 16, 1025), (1 << 14, 4096), (64, 1 << 20)
  ):  # fmt: skip
    yield from biased("gelu", shrunk((rows, channels), shrink), -1, dtype)
  for planes in ((256, 64, 56, 56), (256, 512, 7, 7), (1, 64, 1024, 1024), (64, 3, 512, 512)):
    yield from biased("gelu", shrunk(planes, shrink), 1, dtype)
  yield from gated("swiglu", shrunk((8192, 2 * 4095), shrink), dtype)


def alone(name: str, shape: tuple[int, ...], dtype: str) -> Iterator[Work]:
  ours, xla = (only_first(f) for f in FUNCTIONS[name])
  x, size = Draw(shape, dtype), math.prod(shape) * itemsize(dtype)
  residual = -(-math.prod(shape) // 8) if name in MASKED else size
  case = name if shape == activation_cases.BENCHMARKS[0] else f"{name} {describe(shape)}"
  yield Work("activation", case, dtype, "fwd", ours, xla, (x, x), 2 * size)
  yield Work("activation", case, dtype, "bwd", ours, xla, (x, x), 2 * size + residual, backward=True)


def biased(name: str, shape: tuple[int, ...], axis: int, dtype: str) -> Iterator[Work]:
  """The backward pass gives both gradients, as a layer needs them."""
  f, g = FUNCTIONS[name]
  size = math.prod(shape) * itemsize(dtype)
  residual = -(-math.prod(shape) // 8) if name in MASKED else size
  operands = Draw(shape, dtype), Draw((shape[axis],), dtype), Draw(shape, dtype)

  def ours(x: Array, b: Array, *unused: Array) -> Array:
    return f(x, bias=b, axis=axis)

  def xla(x: Array, b: Array, *unused: Array) -> Array:
    return g(x + b.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]))

  case = f"bias+{name} {describe(shape)}" + ("" if axis == -1 else f" axis {axis}")
  yield Work("activation", case, dtype, "fwd", ours, xla, operands, 2 * size)
  yield Work("activation", case, dtype, "bwd", ours, xla, operands, 2 * size + residual, backward=True, inputs=2)


def prelu(shape: tuple[int, ...], dtype: str) -> Iterator[Work]:
  size = math.prod(shape) * itemsize(dtype)
  operands = Draw(shape, dtype), Draw(shape[-1:], dtype), Draw(shape, dtype)

  def ours(x: Array, alpha: Array, *unused: Array) -> Array:
    return jaxdnn.prelu(x, alpha)

  def xla(x: Array, alpha: Array, *unused: Array) -> Array:
    return jnp.where(x >= 0, x, alpha * x)

  yield Work("activation", "prelu", dtype, "fwd", ours, xla, operands, 2 * size)
  yield Work("activation", "prelu", dtype, "bwd", ours, xla, operands, 3 * size, backward=True, inputs=2)


def gated(name: str, shape: tuple[int, ...], dtype: str) -> Iterator[Work]:
  ours, xla = (only_first(f) for f in GATES[name])
  shape = (*shape[:-1], shape[-1] // 2 * 2)
  x, g = Draw(shape, dtype), Draw((*shape[:-1], shape[-1] // 2), dtype)
  half = math.prod(g.shape) * itemsize(dtype)
  case = f"{name} {describe(shape)}"
  yield Work("activation", case, dtype, "fwd", ours, xla, (x, g), 3 * half)
  yield Work("activation", case, dtype, "bwd", ours, xla, (x, g), 5 * half, backward=True)


def only_first(function: Callable) -> Callable:
  def of_x(x: Array, *unused: Array) -> Array:
    return function(x)

  return of_x


def describe(shape: tuple[int, ...]) -> str:
  return "x".join(map(str, shape))


def shrunk(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
  """A shape small enough for a trial without a GPU."""
  return tuple(max(n // factor, 2) for n in shape) if factor > 1 else shape
