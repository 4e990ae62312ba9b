"""Every direction of a convolution by a kernel that is named, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn import _extension
from jaxdnn._conv.primitives import EDGES, OPERANDS, convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact, sample


def coarse(shape, dtype, seed=0):
  """Samples whose products are exact in float32 and, of float32, in TF32."""
  return sample(shape, "bfloat16" if dtype == "float32" else dtype, seed).astype(jnp.dtype(dtype))


OF_PAIRS = {"wgmma 128x128 pairs", "wgmma 256x64 pairs"}
"""Hopper's tiles of few shapes (test_conv_pairs.py)."""
WGMMA_TILES = [tile for tile in _extension.native.conv_tiles if tile.startswith("wgmma") and tile not in OF_PAIRS]
"""The others."""
FILTER_TILES = {"wgmma 192x128", "wgmma 192x160", "wgmma 256x128"}
"""Those that are for filter gradients alone, of 16-bit floats."""


def parameters(tiles):
  """For a test of each, of which two are enough for the sanitizers."""
  marks = {tile: [pytest.mark.sanitize] for tile in ("wgmma 64x64", "wgmma 96x128 across")}
  return [pytest.param(tile, marks=marks.get(tile, [])) for tile in tiles]


def takes(tile, result, dtype, out_dtype):
  """Whether a tile of Hopper's kernels, or another algorithm, is for such a result."""
  if tile in OF_PAIRS:
    return result != "w" and dtype == out_dtype != "float32"
  if tile.endswith("across") and dtype == "float32":
    return result == "y" and tile == "wgmma 192x128 across"
  if tile.endswith("across"):
    return result != "w" and dtype == out_dtype
  if tile == "wgmma 256x160":
    return (result == "w" and dtype != "float32") or (result == "y" and dtype == out_dtype != "float32")
  if tile == "wgmma 128x160":
    return result != "w" or dtype == "float32"
  if tile == "wgmma 128x128 copied":
    return result == "y" and dtype == "float32"
  if tile in FILTER_TILES and result != "w":
    return False
  if tile == "wgmma 128x256" and result != "w":
    return dtype == "float32"
  floats = dtype != "float32" or not tile.startswith("wgmma") or tile.startswith("wgmma 128")
  return result != "w" or floats


def planned(case, result, dtype="bfloat16", algorithm=None, out_dtype=None, models=1):
  """What the planner says of so many problems at once, on Hopper."""
  spec = ConvSpec(*case.geometry, case.groups, case.spatial, case.window, None, algorithm)
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  operands = (jax.ShapeDtypeStruct((models, *shapes[name]), dtype) for name in OPERANDS[result])
  return plan(result, *operands, spec, jnp.dtype(out_dtype or dtype), hopper=True)


def check(case, algorithm, dtype, out_dtype, precision=None, draw=coarse, models=1, results="yxw"):
  """Of so many problems at once, each with a filter of its own."""
  spec = ConvSpec(*case.geometry, case.groups, case.spatial, case.window, precision, algorithm)
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  arrays = {name: np.stack([draw(shape, dtype, 3 * model + seed) for model in range(models)])
            for seed, (name, shape) in enumerate(shapes.items())}  # fmt: skip
  wants = {"y": [], "x": [], "w": []}
  for model in range(models):
    oracle = [exact(arrays[name][model]) for name in "xwy"]
    wants["y"].append(conv_oracle(*oracle[:2], *case.geometry, case.groups))
    for name, gradient in zip("xw", conv_gradients(*oracle, *case.geometry, case.groups), strict=True):
      wants[name].append(gradient)
  sums = {"y": case.w_shape, "x": (*case.window, case.k // case.groups), "w": shapes["y"][:-1]}
  for result in results:
    operands = {name: jnp.asarray(arrays[name]) for name in OPERANDS[result]}
    if not takes(algorithm.removesuffix(EDGES), result, dtype, out_dtype):
      continue
    assert plan(result, *operands.values(), spec, np.dtype(out_dtype), hopper=True), (case.name, result)
    f = lambda a, b, r=result: convolve(r, dict(zip(OPERANDS[r], (a, b), strict=True)), spec, out_dtype)  # noqa: E731
    got = assert_repeatable(f, *operands.values(), repeats=3)
    terms = int(np.prod(sums[result])) // (case.k if result == "y" else 1)
    assert_close(got, np.stack(wants[result]), out_dtype, terms=terms, scale=np.sqrt(terms) * 3)


def check_epilogue(algorithm, x_shape, w_shape, dtype, out_dtype, reference="implicit_gemm", **layer):
  """Bias, residual and activation in a layer by `algorithm`, against the same by the CUDA cores' kernels. The last
  activation is one that kernels call as a function."""
  x, w = (jnp.asarray(coarse(s, dtype, i)) for i, s in enumerate((x_shape, w_shape)))
  layer = {"precision": "default", "preferred_element_type": out_dtype, **layer}
  f = lambda *extras, **more: jaxdnn.conv(x, w, *extras, **(layer | more))  # noqa: E731
  y_shape, terms = jax.eval_shape(f).shape, int(np.prod(w_shape[:-1]))
  b, r = (jnp.asarray(sample(s, out_dtype or dtype, i)) for i, s in ((2, y_shape[-1:]), (3, y_shape)))
  for bias, residual, more in ((b, None, {}), (None, r, {}), (b, r, {}), (b, r, {"activation": "elu"})):
    got, want = (f(bias, residual=residual, algorithm=name, **more) for name in (algorithm, reference))
    assert_close(got, exact(want), out_dtype or dtype, terms=terms, scale=3 * np.sqrt(terms))


def check_vmap(algorithm):
  """Models and their gradients, and gradients of single examples, as by the kernels of the CUDA cores."""
  x, w = (jnp.asarray(coarse(shape, "bfloat16", i)) for i, shape in enumerate(((5, 4, 9, 11, 24), (5, 3, 3, 24, 32))))
  g = jnp.asarray(coarse((5, 4, 9, 11, 32), "bfloat16", 2))

  def results(name):
    layer = {"padding": SAME3, "algorithm": name}
    y = jax.vmap(lambda x, w: jaxdnn.conv(x, w, **layer))(x, w)
    dx = jax.vmap(lambda g, w: jaxdnn.conv_dgrad(g, w, (9, 11), **layer))(g, w)
    dw = jax.vmap(lambda x, g: jaxdnn.conv_wgrad(x, g, (3, 3), **layer))(x, g)
    each = jax.vmap(lambda x, g: jaxdnn.conv_wgrad(x[None], g[None], (3, 3), **layer))(x[0], g[0])
    return y, dx, dw, each

  for got, want, terms in zip(results(algorithm), results("implicit_gemm"), (216, 288, 396, 99), strict=True):
    assert_close(got, exact(want), "bfloat16", terms=terms, scale=3 * np.sqrt(terms))


def not_finite(shape, dtype, seed):
  """Infinities and a NaN among the gathered operands, not in the filter."""
  a = coarse(shape, dtype, seed)
  if seed % 3 != 1:
    middle = tuple(n // 2 for n in shape[1:-1])
    a[0, 0, 0, ..., 5], a[0, -1, -1, ..., 0], a[-1, *middle, -1] = np.inf, -np.inf, np.nan
  return a


def check_infinities_in_groups(algorithm, window, padding):
  """They stay in their group of four channels, and what follows a sum does to those that are computed again, too."""
  w_shape, geometry = (*window, 4, 64), ((1, 1), padding, (1, 1), (1, 1), 16)
  x, w = not_finite((2, 9, 8, 64), "bfloat16", 0), coarse(w_shape, "bfloat16", 1)
  bias, residual = sample((64,), "bfloat16", 2), sample((2, 9, 8, 64), "bfloat16", 3)
  layer = {"padding": padding, "groups": 16, "activation": "relu", "algorithm": algorithm}
  got = jaxdnn.conv(x, w, bias, residual=residual, **layer)
  with np.errstate(invalid="ignore"):
    want = conv_oracle(exact(x), exact(w), *geometry) + exact(bias) + exact(residual)
    terms = int(np.prod(w_shape[:-1]))
    assert_close(got, np.maximum(want, 0), "bfloat16", terms=terms, scale=2 * np.sqrt(terms))


def check_infinities(check, dtype):
  """Neither what fills up channels and columns nor lines that do not exist carry them anywhere."""
  with np.errstate(invalid="ignore"):
    for c, k in ((24, 40), (32, 32), (56, 8)):
      check(ConvCase("", 3, (9, 13), c, (3, 3), k, padding=SAME3), dtype, dtype, draw=not_finite)
      check(ConvCase("", 3, (9, 13), c, (3, 3), k, padding=((0, 2), (-1, 1))), dtype, dtype, 2, not_finite)
      check(ConvCase("", 3, (9, 13), 3 * c, (3, 3), 3 * k, padding=SAME3, groups=3), dtype, dtype, 1, not_finite)
