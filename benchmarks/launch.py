"""What a launch takes the host: `python -m benchmarks.launch`.

A program calls one small operator many times, and XLA is told not to record it in a graph. Where the device has less to
do than the host, the wall time of a call is what the host takes: XLA's share, the choice of a kernel and of its
parameters, and the driver's. Then the same of calls outside of `jit`, and of their gradients.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxdnn
from benchmarks import harness

CALLS, RUNS, PASSES = 64, 5, 5
NUMBERS = ("NHWC", "HWIO", "NHWC")
LAYERS = ((7, 64, 3), (7, 64, 1), (14, 256, 3))
"""Side, channels and window of the convolutions, of two images."""


def convolve(api: Any, x: Array, w: Array) -> Array:
  return api(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS)


def forwards(api: Any, x: Array, ws: Array) -> Array:
  for w in ws:
    x = convolve(api, x, w)
  return x


def filter_gradients(api: Any, x: Array, ws: Array) -> list[Array]:
  """Of inputs that differ, since XLA computes what is equal once."""
  return [jax.linear_transpose(partial(convolve, api, x * (1 + i)), w)(x)[0] for i, w in enumerate(ws)]


def softmaxes(x: Array, ws: Array) -> Array:
  for _ in range(len(ws)):
    x = jaxdnn.softmax(x)
  return x


def programs(calls: int) -> Iterator[tuple[str, Callable[..., Any], Array, Array]]:
  for side, channels, window in LAYERS:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (2, side, side, channels), jnp.bfloat16)
    ws = 0.01 * jax.random.normal(keys[1], (calls, window, window, channels, channels), jnp.bfloat16)
    for library, api in (("jaxdnn", jaxdnn.conv_general_dilated), ("lax", lax.conv_general_dilated)):
      name = f"{window}x{window} {channels}@{side} {library}"
      yield f"{name} forward", partial(forwards, api), x, ws
      yield f"{name} filter gradient", partial(filter_gradients, api), x, ws
  yield "softmax jaxdnn", softmaxes, x, ws


def microseconds(function: Callable[..., Any], x: Array, ws: Array) -> float:
  """Of a call of the operator, in the median over the passes."""
  program = jax.jit(function).lower(x, ws).compile()
  harness.run_all(program, [(x, ws)] * 2)
  passes = []
  for _ in range(PASSES):
    began = time.perf_counter()
    harness.run_all(program, [(x, ws)] * RUNS)
    passes.append(time.perf_counter() - began)
  return float(np.median(passes)) / RUNS / len(ws) * 1e6


def eager(x: Array, w: Array) -> Iterator[tuple[str, Callable[[], Any]]]:
  for library, api in (("jaxdnn", jaxdnn.conv_general_dilated), ("lax", lax.conv_general_dilated)):
    call = partial(convolve, api, x)
    yield f"conv {library} outside of jit", partial(call, w)
    yield f"conv {library} outside of jit, gradient", partial(jax.grad(lambda w, call=call: call(w).sum()), w)
  yield "softmax jaxdnn outside of jit", partial(jaxdnn.softmax, x)
  yield "softmax jax.nn outside of jit", partial(jax.nn.softmax, x)


def microseconds_of_calls(call: Callable[[], Any], calls: int) -> float:
  """Of a call, in the median over the passes, while the device works behind."""
  jax.block_until_ready(call())
  passes = []
  for _ in range(PASSES):
    began = time.perf_counter()
    for _ in range(calls):
      result = call()
    passes.append(time.perf_counter() - began)
    jax.block_until_ready(result)
  return float(np.median(passes)) / calls * 1e6


def main(calls: int = CALLS) -> dict[str, float]:
  harness.launch_one_by_one()
  times = {}
  for name, function, x, ws in programs(calls):
    times[name] = microseconds(function, x, ws)
    print(f"{name:<40} {times[name]:8.2f} us a launch", flush=True)
  for name, call in eager(x, ws[0]):
    times[name] = microseconds_of_calls(call, calls)
    print(f"{name:<40} {times[name]:8.2f} us a call", flush=True)
  return times


if __name__ == "__main__":
  main()
