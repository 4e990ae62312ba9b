"""Padding of depthwise convolutions with elements of the input, which kernels with a ring of lines read themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_padding_checks import check_all_three, oracle
from jaxdnn._conv.padding import MODES
from numerics import assert_close, exact, sample

# x's shape, the window, and the stride: of one strip and several, side by side and at an image's end, of windows that
# reach as far as they may, and of lines that are several segments.
DEPTHWISE = {
  "3x3": ((2, 16, 23, 72), 3, 1),
  "3x3, few columns": ((3, 5, 6, 64), 3, 1),
  "3x3, smallest": ((2, 2, 2, 8), 3, 1),
  "3x3, long": ((1, 150, 15, 40), 3, 1),
  "3x3 of stride 2": ((2, 17, 14, 24), 3, 2),
  "5x5": ((2, 9, 20, 40), 5, 1),
  "5x5 of stride 2": ((2, 9, 12, 8), 5, 2),
  "7x7": ((2, 11, 30, 24), 7, 1),
  "7x7, smallest": ((2, 4, 4, 16), 7, 1),
  "no whole chunks": ((2, 9, 10, 6), 3, 1),
}


def check_depthwise(name, mode, dtype):
  (*x_shape, c), window, stride = DEPTHWISE[name]
  arguments = dict(
    stride=(stride,) * 2, padding=((window // 2,) * 2,) * 2, dilation=(1, 1), groups=c, padding_mode=(mode,) * 2
  )
  check_all_three((*x_shape, c), (window, window, 1, c), arguments, dtype, 0, 1000, repeat=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_kernels(name, dtype, mode):
  check_depthwise(name, mode, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name, mode, dtype", [("3x3", "circular", "bfloat16"), ("7x7", "reflect", "float32")])
def test_depthwise_kernels_under_the_sanitizer(name, mode, dtype):
  check_depthwise(name, mode, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_depthwise_epilogues(mode, dtype):
  """A bias is added by the kernel that has the edges; a residual and an activation go over a frame."""
  x, w, b, r = (sample(s, dtype, i) for i, s in enumerate(((2, 9, 16, 16), (3, 3, 1, 16), (16,), (2, 9, 16, 16))))
  arguments = dict(stride=(1, 1), padding=((1, 1),) * 2, dilation=(1, 1), groups=16, padding_mode=(mode,) * 2)
  want = oracle(x, w, None, **arguments) + exact(b)
  call = functools.partial(jaxdnn.conv, x, w, b, padding=1, padding_mode=mode, groups=16)
  assert_close(call(), want, dtype, terms=10, scale=4)
  assert_close(call(activation="relu", residual=r), np.maximum(want + exact(r), 0), dtype, terms=11, scale=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_depthwise_kernels_have_edges(dtype):
  """Rings of lines are filled with what is beyond edges for nothing, where they are one convolution of an operand."""

  def times(channels, direction, mode, **more):
    shapes = ((8, 28, 28, channels), (3, 3, 1, channels))
    x, w = (jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes)
    arguments = dict(padding=1, groups=channels, direction=direction, padding_mode=mode) | more
    return {a.name: a.microseconds for a in jaxdnn.conv_algorithms(x, w, **arguments)}["depthwise"]

  for direction in ("forward", "data_gradient", "filter_gradient"):
    for mode in MODES[1:]:
      free = mode == "circular" or direction != "data_gradient"
      assert (times(64, direction, mode) == times(64, direction, "zeros")) == free
      assert times(6, direction, mode) > times(6, direction, "zeros")
  assert times(64, "data_gradient", "circular", stride=2) > times(64, "data_gradient", "zeros", stride=2)
  assert times(64, "forward", "circular", dilation=2, padding=2) > times(64, "forward", "zeros", dilation=2, padding=2)
