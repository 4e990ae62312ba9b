"""Padding with elements of the input: values, derivatives and errors, against NumPy's padding in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from conv_checks import WGMMA_TILES, coarse, takes
from conv_padding_checks import check_all_three, indices, oracle
from jaxdnn import _extension
from jaxdnn._conv.padding import MODES
from jaxdnn._conv.primitives import OPERANDS, plan, tile_names
from jaxdnn._conv.spec import ConvSpec
from numerics import DTYPES, assert_close, assert_repeatable, exact, sample, with_gradients


def drawn(rng, rank, groups, multiple):
  """x's and w's shapes, and the arguments of a convolution whose padding its modes allow."""
  small = lambda lo, hi: tuple(int(v) for v in rng.integers(lo, hi + 1, rank))  # noqa: E731
  spatial, window, stride, dilation = small(1, 8), small(1, 4), small(1, 3), small(1, 3)
  modes = tuple(MODES[i] for i in rng.integers(0, 4, rank))
  padding = []
  for n, r, d, mode in zip(spatial, window, dilation, modes, strict=True):
    most = {"reflect": n - 1, "circular": n}.get(mode, 5)
    pair = [int(v) for v in rng.integers(-1 if n > 2 else 0, most + 1, 2)]
    if rng.random() < 0.3 or n + sum(pair) < (r - 1) * d + 1:
      pair = [most, most]
    padding.append(tuple(pair))
  c, k = (groups * multiple * int(rng.integers(1, 4)) for _ in range(2))
  arguments = dict(stride=stride, padding=tuple(padding), dilation=dilation, groups=groups, padding_mode=modes)
  return (int(rng.integers(1, 4)), *spatial, c), (*window, c // groups, k), arguments


def check(seed, dtype, groups, multiple, repeat=False, **more):
  rng = np.random.default_rng(seed)
  x_shape, w_shape, arguments = drawn(rng, 1 + seed % 3, groups, multiple)
  check_all_three(x_shape, w_shape, arguments, dtype, seed, 1000 * multiple, repeat, **more)


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed):
  check(seed, "float64", 1 + seed % 2, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("multiple", [1, 4, 8], ids=["elements", "halves", "chunks"])
@pytest.mark.parametrize(
  "dtype, precision", [*((dtype, "highest") for dtype in DTYPES), ("float32", "default"), ("float32", "high")]
)
@pytest.mark.parametrize("seed", range(12))
def test_kernels_on_random_problems(seed, dtype, precision, multiple):
  check(seed, dtype, 1 + seed // 3 % 2, multiple, repeat=True, precision=precision)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed, groups, multiple", [(0, 1, 8), (1, 1, 3), (2, 2, 1), (4, 6, 1)])
def test_kernels_under_the_sanitizer(seed, groups, multiple, dtype):
  check(seed, dtype, groups, multiple)


HOPPER_TILES = [
  (tile, dtype)
  for tile in WGMMA_TILES
  for dtype in ("float32", "bfloat16")
  if any(takes(tile, result, dtype, dtype) for result in "yxw")
]
# x's shape, the window, features, and the other arguments. Of images smaller than a tile, so that a tile has rows of
# several, and larger; of lines and parts of lines of channels.
HOPPER = {
  "same": ((3, 9, 11, 64), (3, 3), 72, dict(padding=((1, 1), (1, 1)))),
  "small images": ((40, 4, 4, 136), (3, 3), 64, dict(padding=((1, 1), (1, 1)))),
  "asymmetric": ((2, 9, 12, 40), (3, 4), 64, dict(padding=((2, 1), (0, 3)), dilation=(1, 2))),
  "cropped": ((2, 9, 12, 64), (3, 3), 64, dict(padding=((2, 1), (-1, 1)))),
  "strided": ((2, 13, 10, 64), (3, 3), 64, dict(padding=((1, 2), (2, 1)), stride=(2, 1))),
  "as wide as the input": ((4, 21, 32), (4,), 64, dict(padding=((18, 15),), dilation=(2,))),
  "1d": ((2, 300, 32), (9,), 64, dict(padding=((16, 16),), dilation=(4,))),
  "3d": ((2, 5, 6, 7, 64), (3, 3, 3), 64, dict(padding=((1, 1),) * 3)),
  "no padding along one": (
    (2, 9, 12, 64),
    (3, 3),
    64,
    dict(padding=((1, 1), (0, 0)), padding_mode=("circular", "reflect")),
  ),
}


def check_on_hopper(name, tile, modes, dtype):
  """All that a tile takes. Of data gradients only circular ones without strides are one kernel."""
  x_shape, window, k, more = HOPPER[name]
  ones = (1,) * len(window)
  arguments = dict(stride=ones, dilation=ones, groups=1, padding_mode=modes[: len(window)]) | more
  x, w = coarse(x_shape, dtype), coarse((*window, x_shape[-1], k), dtype, 1)
  g = coarse(jax.eval_shape(functools.partial(jaxdnn.conv, **arguments), x, w).shape, dtype, 2)
  y, dx, dw = oracle(x, w, g, **arguments)
  x, w, g = (jnp.asarray(a) for a in (x, w, g))
  arguments |= {"algorithm": tile, "precision": "default"}
  forward = functools.partial(jaxdnn.conv, **arguments)
  data_gradient = functools.partial(jaxdnn.conv_dgrad, x_spatial=x_shape[1:-1], **arguments)
  # The gradients of all positions that an element stands for are added to it.
  maps, _ = indices(x_shape[1:-1], arguments["padding"], arguments["padding_mode"])
  stands_for = math.prod(int(np.bincount(positions).max()) for positions in maps)
  filter_gradient = functools.partial(jaxdnn.conv_wgrad, window=window, **arguments)
  taps = math.prod(window)
  for result, f, operands, want, terms in (
    ("y", forward, (x, w), y, taps * x_shape[-1]),
    ("x", data_gradient, (g, w), dx, taps * k * stands_for),
    ("w", filter_gradient, (x, g), dw, math.prod(g.shape[:-1])),
  ):
    if takes(tile, result, dtype, dtype):
      assert_close(assert_repeatable(f, *operands, repeats=3), want, dtype, terms=terms, scale=4 * np.sqrt(terms))


@pytest.mark.gpu
@pytest.mark.parametrize("index, name", list(enumerate(HOPPER)))
@pytest.mark.parametrize("tile, dtype", HOPPER_TILES)
def test_hopper_kernels(tile, dtype, index, name):
  turn = HOPPER_TILES.index((tile, dtype)) + index
  check_on_hopper(name, tile, (MODES[1 + turn % 3],) * 3 if turn % 4 else ("zeros", "circular", "reflect"), dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
  "tile, dtype",
  [
    ("wgmma 64x64", "float32"),
    ("wgmma 128x128 copied", "float32"),
    ("wgmma 256x64", "bfloat16"),
    ("wgmma 96x128 across", "bfloat16"),
    ("wgmma 192x128", "bfloat16"),
  ],
)
def test_hopper_kernels_under_the_sanitizer(tile, dtype):
  check_on_hopper("same", tile, ("circular",) * 3, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_tiles_that_blocks_share_and_many_of_a_block(mode, dtype):
  """Few tiles of long sums, and more tiles than multiprocessors; against the portable kernel."""
  for x_shape, k in (((1, 7, 9, 520), 264), ((32, 28, 28, 64), 256)):
    x, w, g = (
      jnp.asarray(coarse(shape, dtype, i))
      for i, shape in enumerate((x_shape, (3, 3, x_shape[-1], k), (*x_shape[:-1], k)))
    )
    for f, a in ((jaxdnn.conv, x), (functools.partial(jaxdnn.conv_dgrad, x_spatial=x_shape[1:-1]), g)):
      got, want = (
        exact(f(a, w, padding=1, padding_mode=mode, precision="default", algorithm=name))
        for name in ("implicit_gemm_wgmma", "implicit_gemm_mma")
      )
      np.testing.assert_allclose(got, want, rtol=0.02, atol=2e-3 * np.sqrt(9 * a.shape[-1]))


@pytest.mark.parametrize("dtype, groups", [("float64", 1), ("bfloat16", 4)])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize(
  "spatial, window, padding, stride, dilation",
  [
    ((5,), (3,), ((4, 4),), (1,), (1,)),
    ((5,), (4,), ((1, 2),), (3,), (1,)),
    ((6, 1), (3, 1), ((2, 0), (0, 0)), (1, 1), (1, 1)),
    ((4, 3), (2, 2), ((3, 3), (2, 2)), (1, 2), (5, 4)),
    ((7, 8), (3, 3), ((1, 1), (-1, 2)), (2, 2), (1, 1)),
    ((4, 5, 3), (3, 2, 3), ((1, 1), (1, 0), (2, 1)), (1, 2, 1), (1, 1, 1)),
    ((8, 5), (4, 3), ((0, 0), (2, 1)), (4, 1), (1, 1)),
    ((5, 8), (3, 4), ((2, 1), (0, 0)), (1, 4), (1, 1)),
  ],
  ids=["size-1", "rest of the stride", "size 1", "dilation over size", "strided and cropped", "3d", "down", "along"],
)
def test_edges(spatial, window, padding, stride, dilation, groups, mode, dtype):
  arguments = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=mode)
  x, w = sample((2, *spatial, 4), dtype), sample((*window, 4 // groups, 8), dtype, 1)
  f = functools.partial(jaxdnn.conv, **arguments)
  g = sample(jax.eval_shape(f, x, w).shape, dtype, 2)
  want = oracle(x, w, g, **{**arguments, "padding_mode": (mode,) * len(spatial)})
  for got, b in zip(with_gradients(f, x, w, g), want, strict=True):
    assert_close(got, b, dtype, terms=500, scale=4)


def test_replicated_single_element():
  x, w = sample((2, 1, 3), "float64"), sample((4, 3, 2), "float64", 1)
  y = jaxdnn.conv(x, w, padding=((3, 4),), padding_mode="replicate")
  np.testing.assert_allclose(y, np.broadcast_to(x @ w.sum(0), y.shape), atol=1e-12)


@pytest.mark.parametrize("dtype, groups", [("float32", 1), ("bfloat16", 1), ("bfloat16", 8)])
@pytest.mark.parametrize("mode", MODES[1:])
def test_epilogue_and_layout(mode, dtype, groups):
  x, w, b = sample((2, 6, 5, 8), dtype), sample((3, 3, 8 // groups, 8), dtype, 1), sample((8,), dtype, 2)
  r = sample((2, 6, 5, 8), dtype, 3)
  arguments = dict(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), groups=groups, padding_mode=(mode,) * 2)
  want = np.maximum(oracle(x, w, None, **arguments) + exact(b) + exact(r), 0)
  got = jaxdnn.conv(x, w, b, padding="SAME", padding_mode=mode, groups=groups, activation="relu", residual=r)
  assert_close(got, want, dtype, terms=72, scale=4)
  first = lambda a: a.transpose(0, 3, 1, 2)  # noqa: E731
  got = jaxdnn.conv(
    first(x), w.transpose(3, 2, 0, 1), b, padding=1, padding_mode=mode, groups=groups, activation="relu",
    residual=first(r), dimension_numbers=("NCHW", "OIHW", "NCHW"),
  )  # fmt: skip
  assert_close(got.transpose(0, 2, 3, 1), want, dtype, terms=72, scale=4)


# Derivatives and transformations --------------------------------------------------------------------------------------

CALL = dict(stride=(2, 1), padding=((1, 2), (2, 1)), dilation=(1, 2), padding_mode=("reflect", "circular"))


@pytest.mark.parametrize("mode", [*MODES[1:], ("reflect", "zeros")])
@pytest.mark.parametrize("groups", [1, 2])
def test_derivatives_of_every_order_and_mode(mode, groups):
  x, w = jnp.asarray(sample((2, 4, 3, 2), "float64")), jnp.asarray(sample((3, 2, 2 // groups, 4), "float64", 1))
  f = functools.partial(jaxdnn.conv, **{**CALL, "padding_mode": mode}, groups=groups)
  check_grads(jax.jit(f), (x, w), order=3, modes=("fwd", "rev"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_the_data_gradient_is_the_adjoint(mode, dtype):
  """<conv(x), y> = <x, dgrad(y)> for small integers, exactly."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.integers(-2, 3, shape).astype(jnp.dtype(dtype))  # noqa: E731
  x, w = draw(2, 6, 7, 8), draw(3, 3, 8, 8)
  call = dict(stride=(1, 2), padding=((3, 2), (2, 1)), padding_mode=mode)
  kwargs = dict(**call, preferred_element_type="float64" if dtype == "float64" else "float32")
  y = jaxdnn.conv(x, w, **kwargs)
  g = draw(*y.shape)
  dx, dw = jaxdnn.conv_dgrad(g, w, (6, 7), **kwargs), jaxdnn.conv_wgrad(x, g, (3, 3), **kwargs)
  forward = (exact(y) * exact(g)).sum()
  assert forward == (exact(dx) * exact(x)).sum() == (exact(dw) * exact(w)).sum()


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (2, 0)])
def test_vmap(in_axes):
  x, w = sample((2, 7, 6, 4), "float64"), sample((3, 2, 4, 6), "float64", 1)
  f = functools.partial(jaxdnn.conv, **CALL)
  g = sample(f(x, w).shape, "float64", 2)
  stacked = [a if d is None else np.stack([a, 2 * a + 1, -a], d) for a, d in zip((x, w), in_axes, strict=True)]
  each = lambda x, w: with_gradients(f, x, w, g)  # noqa: E731
  take = lambda a, d, i: a if d is None else np.take(a, i, d)  # noqa: E731
  want = [each(*(take(a, d, i) for a, d in zip(stacked, in_axes, strict=True))) for i in range(3)]
  for got, wanted in zip(jax.vmap(each, in_axes)(*stacked), zip(*want, strict=True), strict=True):
    np.testing.assert_allclose(got, np.stack(wanted), atol=1e-11)


@pytest.mark.skipif(not _extension.TARGETS, reason="the CUDA kernels were not built")
@pytest.mark.parametrize("mode", MODES[1:])
def test_kernels_take_the_input_as_it_is(mode):
  """The program for a GPU has the three calls, and neither a padded copy nor another convolution."""
  x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 9, 8, 16), (3, 3, 16, 8)))
  loss = lambda x, w: (jaxdnn.conv(x, w, padding=1, padding_mode=mode).astype(jnp.float32) ** 2).sum()  # noqa: E731
  text = jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
  for name in ("fwd", "dgrad", "wgrad"):
    assert f"jaxdnn.conv_{name}" in text
  for operation in ("pad", "concatenate", "gather", "reverse", "convolution", "slice"):
    assert f"stablehlo.{operation}" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES[1:])
def test_compiled_programs_copy_nothing(mode):
  x, w = jnp.ones((2, 9, 8, 16), jnp.bfloat16), jnp.ones((3, 3, 16, 8), jnp.bfloat16)
  compiled = jax.jit(functools.partial(jaxdnn.conv, padding=1, padding_mode=mode)).lower(x, w).compile()
  # Wider or higher than x: what padding would make.
  assert "[2,11," not in compiled.as_text() and "[2,9,10" not in compiled.as_text()
  assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes


# Arguments ------------------------------------------------------------------------------------------------------------


def test_zeros_are_the_default():
  x, w = sample((2, 6, 5, 4), "float64"), sample((3, 3, 4, 6), "float64", 1)
  want = jaxdnn.conv(x, w, padding=1)
  np.testing.assert_array_equal(jaxdnn.conv(x, w, padding=1, padding_mode="zeros"), want)
  np.testing.assert_array_equal(jaxdnn.conv(x, w, padding=((1, 1), (1, 1)), padding_mode=("zeros", "zeros")), want)
  # Nothing is read beyond edges without padding.
  np.testing.assert_array_equal(jaxdnn.conv(x, w, padding_mode="circular"), jaxdnn.conv(x, w))


def test_causal_padding():
  x, w = sample((2, 9, 4), "float64"), sample((3, 4, 6), "float64", 1)
  for stride, dilation in ((1, 1), (2, 2)):
    kwargs = dict(stride=stride, dilation=dilation)
    want = jaxdnn.conv(x, w, padding=((2 * dilation, 0),), **kwargs)
    np.testing.assert_array_equal(jaxdnn.conv(x, w, padding="CAUSAL", **kwargs), want)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (dict(padding=4, padding_mode="reflect"), r"padding_mode='reflect' takes padding at most 3 .* size 4.*\(\(4, 4\)"),
    (dict(padding=((0, 0), (0, 6)), padding_mode="circular"), r"'circular' takes padding at most 5 .* size 5"),
    (dict(padding=1, padding_mode="wrap"), r"padding_mode must be one of .*'circular'.*, got 'wrap'"),
    (dict(padding=1, padding_mode=("zeros",)), r"padding_mode .* each of 2 spatial dimensions, got \('zeros',\)"),
    (dict(padding="CIRCULAR", padding_mode="reflect"), "padding='CIRCULAR' and padding_mode='reflect' contradict"),
    (dict(padding="CAUSAL"), "padding='CAUSAL' is for one spatial dimension, got 2"),
    (dict(padding="AROUND"), "padding must be .* got 'AROUND'"),
    (dict(padding=1, padding_mode="circular", algorithm="gemm"), "padding with zeros, got .*circular"),
  ],
)
def test_errors(arguments, message):
  with pytest.raises(ValueError, match=message):
    jaxdnn.conv(jnp.ones((1, 4, 5, 3)), jnp.ones((3, 3, 3, 2)), **arguments)


def test_empty_input_has_no_elements_to_pad_with():
  for mode in MODES[1:]:
    with pytest.raises(ValueError, match=f"padding_mode='{mode}'.*size 0"):
      jaxdnn.conv(jnp.ones((1, 0, 3)), jnp.ones((1, 3, 2)), padding=1, padding_mode=mode)
  assert jaxdnn.conv(jnp.ones((1, 0, 3)), jnp.ones((1, 3, 2)), padding=1).shape == (1, 2, 2)


def test_planner():
  x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 28, 28, 64), (3, 3, 64, 64)))
  names = lambda **kwargs: {a.name for a in jaxdnn.conv_algorithms(x, w, padding=1, **kwargs)}  # noqa: E731
  assert names() - names(padding_mode="circular") == {"gemm"}
  for direction in ("forward", "data_gradient", "filter_gradient"):
    plain, framed = (
      {a.name: a for a in jaxdnn.conv_algorithms(x, w, padding=1, direction=direction, padding_mode=mode)}
      for mode in ("zeros", "reflect")
    )
    assert all(framed[name].microseconds > plain[name].microseconds for name in framed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("n, c", [(28, 128), (56, 256)])
def test_the_choice_counts_what_comes_on_top(n, c, mode, dtype):
  """Of all tiles that which is fastest together with its frame or patches, not with zeros."""
  shapes = {"x": (1, 32, n, n, c), "w": (1, 3, 3, c, c), "y": (1, 32, n, n, c)}
  default = (jax.lax.Precision.DEFAULT,) * 2
  spec = ConvSpec((1, 1), ((1, 1),) * 2, (1, 1), (1, 1), 1, (n, n), (3, 3), default, padding_mode=(mode,) * 2)
  for result, names in OPERANDS.items():
    a, b = (jax.ShapeDtypeStruct(shapes[name], dtype) for name in names)
    chosen, *others = (
      plan(result, a, b, dataclasses.replace(spec, algorithm=tile), np.dtype(dtype), hopper=True)
      for tile in (None, *tile_names())
    )
    assert chosen["cycles"] == min(p["cycles"] for p in others if p is not None)


def test_circular_data_gradients_need_no_frame_on_hopper():
  x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((32, 28, 28, 128), (3, 3, 128, 128)))
  times = {}
  for mode, stride in (("circular", 1), ("reflect", 1), ("circular", 2), ("reflect", 2)):
    found = jaxdnn.conv_algorithms(
      x, w, padding=1, stride=stride, direction="data_gradient", padding_mode=mode, hopper=True
    )
    times[mode, stride] = {a.name: a.microseconds for a in found}["implicit_gemm_wgmma"]
  assert times["circular", 1] < times["reflect", 1]
  assert times["circular", 2] == times["reflect", 2]


def test_operands_of_8_bits_have_no_kernel():
  x, w = (jax.ShapeDtypeStruct(s, jnp.int8) for s in ((8, 28, 28, 64), (3, 3, 64, 64)))
  assert jaxdnn.conv_algorithms(x, w, padding=1, padding_mode="circular", preferred_element_type="int32") == []
  x, w = np.arange(-8, 8, dtype=np.int8).reshape(1, 16, 1), np.array([[[1]], [[-2]], [[3]]], np.int8)
  if jax.default_backend() != "gpu":  # lax has no integer convolution on GPUs
    got = jaxdnn.conv(x, w, padding="CIRCULAR", preferred_element_type="int32")
    want = np.convolve(np.pad(x[0, :, 0], 1, mode="wrap").astype(np.int32), w[::-1, 0, 0], "valid")
    np.testing.assert_array_equal(got[0, :, 0], want)
