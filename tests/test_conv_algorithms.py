"""Every convolution kernel by name: what the planner lists, and each against the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, ConvCase
from conv_checks import WGMMA_TILES, check, check_epilogue, coarse, planned, takes
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn import _extension
from jaxdnn._conv.primitives import ALGORITHMS, OPERANDS, convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, equations, exact, sample

DIRECTIONS = {"forward": "y", "data_gradient": "x", "filter_gradient": "w"}


def struct(shape, dtype="bfloat16"):
  return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_list_is_sorted_and_complete(direction):
  x, w = struct((32, 56, 56, 128)), struct((5, 5, 128, 128))  # that no algorithm of few shapes takes
  found = jaxdnn.conv_algorithms(x, w, direction=direction, padding="SAME")
  found, patches = [a for a in found if a.name != "gemm"], [a for a in found if a.name == "gemm"]
  assert [a.name for a in found] == list(ALGORITHMS)
  (by_patches,) = patches
  assert by_patches.workspace_bytes >= 2 * 32 * 56 * 56 * 25 * 128 and by_patches.microseconds > found[0].microseconds
  times = [a.microseconds for a in found]
  assert times == sorted(times) and times[0] > 0
  assert all((a.workspace_bytes > 0) == (a.splits > 1) for a in found)
  if direction != "filter_gradient":
    assert all(a.workspace_bytes == 0 for a in found)
  names = [a.name for a in jaxdnn.conv_algorithms(x, w, direction=direction, padding="SAME", hopper=False)]
  assert [name for name in names if name != "gemm"] == list(ALGORITHMS[1:])


def test_list_names_what_can_do_the_problem():
  names = lambda *a, **k: {each.name for each in jaxdnn.conv_algorithms(*a, **k)} - {"gemm"}  # noqa: E731
  x, w = struct((2, 9, 9, 64)), struct((3, 3, 64, 64))
  floats = struct(x.shape, "float32"), struct(w.shape, "float32")
  assert names(*floats, precision="highest") == {"implicit_gemm"}
  assert names(*floats, precision="high") == set(ALGORITHMS)
  assert names(*floats, precision="high", direction="filter_gradient") == set(ALGORITHMS)
  assert names(*floats, precision="default") == {*ALGORITHMS, "planes"}
  assert names(*floats, precision="default", direction="filter_gradient") == {*ALGORITHMS, "planes"}
  assert "implicit_gemm_wgmma" not in names(x, struct((3, 3, 1, 64)), groups=64)
  assert "implicit_gemm_wgmma" not in names(struct((2, 9, 9, 63)), struct((3, 3, 63, 64)))
  # Sixteen phases; nine are the most that a launch takes.
  for stride in (3, 4):
    taken = names(x, struct((5, 5, 64, 64)), stride=stride, direction="data_gradient")
    assert ("implicit_gemm_wgmma" in taken) == (stride == 3)
  assert names(struct((2, 9, 9, 64), "uint8"), struct((3, 3, 64, 64), "uint8")) == set()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_of_nothing(direction):
  """Hopper's loads take no array without elements, and a result of no lines is cut into no tiles."""
  some = {"padding": 2, "direction": direction}
  for x, w in (((2, 8, 8, 0), (3, 3, 0, 8)), ((2, 8, 8, 8), (3, 3, 8, 0)), ((2, 8, 0, 8), (3, 3, 8, 8))):
    for dtype in ("bfloat16", "float32"):
      found = jaxdnn.conv_algorithms(struct(x, dtype), struct(w, dtype), precision="default", **some)
      assert {a.name for a in found} - {"gemm"} == {"implicit_gemm", "implicit_gemm_mma"}


def test_matrix_of_patches_of_nothing():
  y, vjp = jax.vjp(lambda x, w: jaxdnn.conv(x, w, algorithm="gemm"), jnp.ones((2, 4, 4, 0)), jnp.ones((3, 3, 0, 8)))
  np.testing.assert_array_equal(y, np.zeros((2, 2, 2, 8)))
  assert [g.shape for g in vjp(y)] == [(2, 4, 4, 0), (3, 3, 0, 8)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_of_an_empty_window(direction):
  for dtype in ("bfloat16", "float32"):
    x, w = struct((2, 5, 5, 4), dtype), struct((0, 3, 4, 8), dtype)
    found = jaxdnn.conv_algorithms(x, w, direction=direction, precision="default")
    assert "implicit_gemm" in {a.name for a in found}


def test_extents_beyond_32_bits():
  def plan_of(x, w, y, padding=0, tile=""):
    ones = [1] * (len(x) - 3)
    return _extension.native.plan_conv(
      direction="conv_fwd", in_dtype="float32", out_dtype="float32", x=x, w=w, y=y, stride=ones, lhs_dilation=ones,
      padding_low=[padding] * len(ones), rhs_dilation=ones, padding_mode=[0] * len(ones), groups=1, products=1,
      hopper=True, algorithm=tile, workspace_limit=1 << 40,
    )  # fmt: skip

  small = (1, 1, 8, 64), (1, 3, 64, 64), (1, 1, 6, 64)
  assert plan_of(*small) and plan_of(*small, padding=-1)
  for padding in (2**30, 2**63 - 1, -(2**30), -(2**63)):
    assert plan_of(*small, padding=padding) is None
  huge = (1, 0, 2**22, 2**21, 2**21, 8)  # 2^64 pixels of no image
  assert plan_of(huge, (1, 1, 1, 1, 8, 8), huge) is None
  # The filter is copied by a plane of blocks for each tap.
  line = (1, 1, 1 << 17, 64)
  for taps, fits in ((65535, True), (65536, False)):
    assert bool(plan_of(line, (1, taps, 64, 64), line, padding=taps // 2, tile="wgmma 128x128 copied")) == fits
    assert plan_of(line, (1, taps, 64, 64), line, padding=taps // 2, tile="wgmma 128x128")


def test_wrong_arguments():
  x, w = struct((2, 9, 9, 64)), struct((3, 3, 64, 64))
  with pytest.raises(ValueError, match=r"direction must be one of .*got 'sideways'"):
    jaxdnn.conv_algorithms(x, w, direction="sideways")
  with pytest.raises(ValueError, match="same rank"):
    jaxdnn.conv_algorithms(struct((2, 9, 64)), w)
  x, w = jnp.ones((1, 5, 5, 8), "float32"), jnp.ones((3, 3, 8, 8), "float32")
  with pytest.raises(ValueError, match=r"algorithm must be None or one of .*got 'winograd'"):
    jaxdnn.conv(x, w, algorithm="winograd")
  with pytest.raises(ValueError, match=r"'implicit_gemm_wgmma' cannot do this problem.*float32"):
    jaxdnn.conv(x, w, algorithm="implicit_gemm_wgmma")


def test_gradients_choose_their_own():
  x, w = (jnp.asarray(sample(s, "bfloat16")) for s in ((2, 9, 9, 64), (3, 3, 64, 64)))
  f = functools.partial(jaxdnn.conv, stride=3, algorithm="implicit_gemm_wgmma")
  y, vjp = jax.vjp(f, x, w)
  want, want_vjp = jax.vjp(functools.partial(jaxdnn.conv, stride=3), x, w)
  for got, expected in zip((y, *vjp(y)), (want, *want_vjp(y)), strict=True):
    assert_close(got, exact(expected), "bfloat16", terms=576, scale=30)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
  "case",
  [
    ConvCase("2d", 2, (7, 6), 5, (3, 2), 4, (2, 1), ((1, 0), (-1, 2)), rhs_dilation=(1, 2)),
    ConvCase("1d", 3, (11,), 4, (3,), 6, padding=((2, 1),)),
    ConvCase("3d", 1, (4, 3, 5), 2, (2, 2, 3), 3),
  ],
  ids=lambda c: c.name,
)
def test_matrix_of_patches(case, dtype):
  x, w = sample(case.x_shape, dtype), sample(case.w_shape, dtype, 1)
  layer = dict(stride=case.stride, padding=case.padding, dilation=case.rhs_dilation, algorithm="gemm")
  y = jaxdnn.conv(x, w, **layer)
  assert_close(y, conv_oracle(exact(x), exact(w), *case.geometry), dtype, terms=30, scale=4)
  g = sample(y.shape, dtype, 2)
  dx, dw = conv_gradients(exact(x), exact(w), exact(g), *case.geometry)
  assert_close(jaxdnn.conv_dgrad(g, w, case.spatial, **layer), dx, dtype, terms=30, scale=4)
  assert_close(jaxdnn.conv_wgrad(x, g, case.window, **layer), dw, dtype, terms=60, scale=4)
  b = sample((case.k,), dtype, 3)
  mapped = jax.vmap(lambda x: jaxdnn.conv(x, w, b, activation="tanh", **layer))(jnp.stack([x, x]))
  assert_close(mapped[1], np.tanh(exact(y) + exact(b)), dtype, terms=30, scale=4)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_workspace_limit(direction, dtype):
  operands = struct((32, 56, 56, 64), dtype), struct((3, 3, 64, 64), dtype)
  call = functools.partial(jaxdnn.conv_algorithms, *operands, direction=direction, padding="SAME", precision="default")
  assert any(each.workspace_bytes for each in call())
  for limit in (0, 1 << 18, 1 << 22, 1 << 30):
    found = call(workspace_limit=limit)
    assert found and all(each.workspace_bytes <= limit for each in found)
  # Without one the sum is one slice.
  assert all(each.splits == 1 for each in call(workspace_limit=0))


def test_workspace_limit_reaches_the_gradients():
  x, w = jnp.ones((4, 64, 64, 2), "float32"), jnp.ones((3, 3, 2, 8), "float32")
  for limit, split in ((None, True), (0, False)):
    gradient = jax.grad(lambda w: jaxdnn.conv(x, w, workspace_limit=limit).sum())  # noqa: B023
    calls = list(equations(jax.make_jaxpr(gradient)(w), "jaxdnn_conv_wgrad"))
    (spec,) = {e.params["spec"] for e in calls}
    (p,) = (plan("w", *(v.aval for v in e.invars), spec, jnp.float32, hopper=True) for e in calls)
    assert (p["splits"] > 1) == split and p["workspace_bytes"] <= (limit if limit is not None else 1 << 28)
  with pytest.raises(ValueError, match="workspace_limit must be None or a number of bytes, got -1"):
    jaxdnn.conv(x, w, workspace_limit=-1)


def test_matrix_of_patches_refuses():
  x, w = jnp.ones((2, 9, 9, 8)), jnp.ones((3, 3, 4, 8))
  with pytest.raises(ValueError, match=r"'gemm' takes one group.*got groups=2"):
    jaxdnn.conv(x, w, groups=2, algorithm="gemm")
  assert "gemm" not in {a.name for a in jaxdnn.conv_algorithms(x, w, groups=2)}
  with pytest.raises(ValueError, match=r"'gemm' needs 56448 bytes .*workspace_limit=1000"):
    jaxdnn.conv(x, jnp.ones((3, 3, 8, 8)), algorithm="gemm", workspace_limit=1000)


# The kernels, on a GPU ------------------------------------------------------------------------------------------------

# Ragged lines of channels, tiles and phases; phases without taps; offsets at the limit of what the TMA unit takes.
CASES = [
  ConvCase("ragged", 3, (17, 19), 72, (3, 3), 40, padding=SAME3),
  ConvCase("narrow", 2, (9, 9), 8, (3, 3), 8, padding=SAME3),
  ConvCase("wide", 1, (13, 11), 136, (1, 1), 264),
  ConvCase("phases", 2, (11, 12), 72, (3, 3), 136, (2, 2), SAME3),
  ConvCase("phases_without_taps", 3, (15, 14), 136, (1, 1), 72, (2, 2)),
  ConvCase("phases_3d", 2, (5, 6, 7), 72, (3, 2, 3), 64, (2, 2, 2), ((1, 1), (0, 1), (1, 0))),
  ConvCase("dilated", 2, (23, 21), 64, (3, 3), 72, padding=((4, 4), (6, 6)), rhs_dilation=(4, 6)),
  ConvCase("dilated_input", 2, (6, 7), 64, (3, 3), 72, padding=SAME3, lhs_dilation=(2, 2)),
  ConvCase("negative_padding", 2, (12, 13), 64, (3, 3), 64, padding=((-2, 1), (3, -3))),
  ConvCase("far_padding", 1, (4, 4), 64, (3, 3), 64, padding=((20, 0), (0, 30))),
  ConvCase("1d", 3, (301,), 72, (5,), 136, (2,), ((4, 3),), rhs_dilation=(3,)),
  ConvCase("1d_far", 1, (700,), 64, (2,), 64, padding=((600, 0),), rhs_dilation=(600,)),
  ConvCase("3d", 1, (9, 8, 7), 64, (3, 3, 3), 64, padding=((1, 1),) * 3),
  ConvCase("transposed", 2, (7, 6), 72, (2, 3), 40, padding=SAME3, lhs_dilation=(2, 3)),
  ConvCase("one_position", 5, (3, 3), 64, (3, 3), 128),
  ConvCase("long", 40, (14, 14), 64, (3, 3), 128, padding=SAME3),
]  # fmt: skip


@pytest.mark.parametrize(
  "dtype, precision, exactness",
  [
    ("float64", None, {"float64"}),
    ("bfloat16", None, {"float32"}),
    ("float32", "highest", {"float32"}),
    ("float32", "high", {"float32", "float32 of 3xtf32"}),
    ("float32", "default", {"float32", "float32 of tf32"}),
    ("int8", None, {"int32"}),
    ("float8_e5m2", "default", {"float32", "float32 of 13 bits"}),
    ("float8_e5m2", "highest", {"float32"}),
  ],
)
def test_exactness(dtype, precision, exactness):
  found = jaxdnn.conv_algorithms(struct((2, 9, 9, 64), dtype), struct((3, 3, 64, 64), dtype), precision=precision)
  assert {each.exactness for each in found} == exactness


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*ALGORITHMS[1:], *WGMMA_TILES])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels(case, tile):
  for dtype in ("bfloat16", "float16"):
    check(case, tile, dtype, dtype)
  check(case, tile, "bfloat16", "float32")
  check(case, tile, "float32", "float32")


HIGH = (lax.Precision.HIGH,) * 2
TRIPLED = ["wgmma 128x128", "wgmma 128x64"]
"""Hopper's tiles that add up three products of TF32."""


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["mma 128x64", "mma 64x64", *TRIPLED])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_three_products_are_nearly_float32(case, tile):
  check(case, tile, "float32", "float32", HIGH, sample)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("tile", TRIPLED)
def test_three_products_under_the_sanitizer(tile):
  check(CASES[0], tile, "float32", "float32", HIGH, sample)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TRIPLED)
def test_three_products_on_hopper(tile):
  """More tiles than multiprocessors, and an epilogue whose residual comes between tiles' stages."""
  check(ConvCase("", 12, (40, 40), 32, (1, 1), 132), tile, "float32", "float32", HIGH, sample)
  for features in (64, 136):
    check_epilogue(tile, (9, 40, 40, 64), (1, 1, 64, features), "float32", None, precision="high", activation="elu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_not_finite(precision):
  """Infinities and NaN come through the roundings, the largest mantissa and the canonical NaN of CUDA too."""
  x = np.ones((1, 8, 8, 64), np.float32)
  x[0, 0, 0, 0], x[0, 2, 2, 1], x[0, 4, 4, 2] = np.inf, -np.inf, np.nan
  x[0, 6, 6, 3] = np.uint32(0x7FFFFFFF).view(np.float32)
  w = np.ones((1, 1, 64, 64), np.float32)
  want = conv_oracle(x.astype(np.float64), w.astype(np.float64), (1, 1), ((0, 0),) * 2, (1, 1), (1, 1))
  for name in (a.name for a in jaxdnn.conv_algorithms(x, w, precision=precision)):
    assert_close(jaxdnn.conv(x, w, precision=precision, algorithm=name), want, "float32", terms=64)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", WGMMA_TILES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_tiles_for_every_block(tile, stride, dtype):
  """More tiles than multiprocessors, of many steps, so that warpgroups take turns; against the portable kernel."""
  x, w = coarse((32, 56, 56, 64), dtype), coarse((3, 3, 64, 128), dtype, 1)
  spec = ConvSpec((stride,) * 2, SAME3, (1, 1), (1, 1), 1, (56, 56), (3, 3), None)
  y = coarse((32, *spec.y_spatial, 128), dtype, 2)
  arrays = {name: jnp.asarray(a)[None] for name, a in {"x": x, "w": w, "y": y}.items()}
  for result in OPERANDS:
    if not takes(tile, result, dtype, dtype):
      continue
    f = lambda algorithm, r=result: convolve(  # noqa: E731
      r, {n: arrays[n] for n in OPERANDS[r]}, dataclasses.replace(spec, algorithm=algorithm), jnp.dtype(dtype)
    )
    want, got = exact(f("implicit_gemm_mma")), exact(f(tile))
    terms = np.prod(y.shape[:-1]) if result == "w" else 1152
    np.testing.assert_allclose(got, want, rtol=0.02, atol=2e-3 * np.sqrt(terms))


# Few tiles of long sums.
DEEP = ConvCase("deep", 1, (7, 9), 520, (3, 3), 264, padding=SAME3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("result", ["y", "x"])
def test_blocks_share_few_tiles(result, dtype):
  assert planned(DEEP, result, dtype, None)["cluster"] >= 4
  assert planned(ConvCase("many", 32, (28, 28), 256, (3, 3), 256), result, dtype, None)["cluster"] == 1
  # In a phase, or of a dilated input, blocks could find themselves without a tap.
  strided = ConvCase("strided", 1, (8, 8), 512, (3, 3), 512, (2, 2), SAME3, lhs_dilation=(2, 2))
  assert planned(strided, result, dtype, "implicit_gemm_wgmma")["cluster"] == 1
  # Every position meets the holes between the elements of the other operand.
  holes = ConvCase("holes", 1, (8, 8), 512, (3, 3), 512, (2, 2), ((1, 1), (1, 1)), (2, 2), (2, 2))
  assert planned(holes, result, dtype, "implicit_gemm_wgmma")["cluster"] == 1


def test_tiles_across_divide_layers_evenly():
  """6272 rows and 256 columns are 132 tiles of 96 rows, a multiprocessor each; of 16-bit floats stored as such."""
  case, across = ConvCase("", 32, (14, 14), 256, (3, 3), 256, padding=SAME3), "wgmma 96x128 across"
  for result in "yx":
    for dtype in ("bfloat16", "float16"):
      assert planned(case, result, dtype, None)["tile"] == across
    assert planned(case, result, "float32", across) is None
  # Of floats, forward alone, tiles of 192 rows: 131 of 25088 rows, or 66 of 6272, two multiprocessors each.
  wide = ConvCase("", 32, (28, 28), 128, (3, 3), 128, padding=SAME3)
  for each, cluster in ((wide, 1), (case, 2)):
    p = planned(each, "y", "float32", None)
    assert (p["tile"], p["cluster"], p["workspace_bytes"]) == ("wgmma 192x128 across", cluster, 0)
    assert planned(each, "x", "float32", "wgmma 192x128 across") is None
  assert planned(case, "w", "bfloat16", across) is None
  spec = ConvSpec(*case.geometry, 1, case.spatial, case.window, None, across)
  operands = [struct((1, *shape)) for shape in (case.x_shape, case.w_shape)]
  for out in ("bfloat16", "float32"):
    assert (plan("y", *operands, spec, jnp.dtype(out), hopper=True) is None) == (out == "float32")


def test_copies_of_floats():
  """Forward a copy of the filter is for long sums only; the filter gradient copies the smaller operand, if any."""
  long, short = (ConvCase("", 32, (size, size), 512, (3, 3), 512, padding=SAME3) for size in (28, 7))
  assert planned(long, "y", "float32", None)["workspace_bytes"] == 4 * 9 * 512 * 512
  assert planned(short, "y", "float32", None)["workspace_bytes"] == 0
  for c, k in ((128, 512), (512, 128), (1024, 2048), (2048, 1024)):
    p = planned(ConvCase("", 32, (28, 28), c, (1, 1), k), "w", "float32", "wgmma 128x128")
    tiles, copied = c * k // 128**2, c * k > 2**20
    # Whole tiles of exchanged operands are left there too.
    whole = p["blocks"] == tiles and c > k
    pieces = 0 if whole else p["blocks"] * (1 if p["blocks"] % tiles == 0 else 2)
    assert p["workspace_bytes"] == 4 * (copied * 32 * 28 * 28 * min(c, k) + pieces * 128**2)


def test_large_tiles_are_shared():
  """1024 rows and 1280 columns are 64 tiles of 128x160, of two multiprocessors each."""
  case = ConvCase("", 4, (16, 16), 1280, (3, 3), 1280, padding=SAME3)
  copy = 4 * 9 * 1280 * 1280
  for result, dtype, bytes_ in (
    ("y", "bfloat16", 0), ("x", "bfloat16", 0), ("x", "float32", 0), ("y", "float32", copy),
  ):  # fmt: skip
    p = planned(case, result, dtype, None)
    assert (p["tile"], p["cluster"], p["workspace_bytes"]) == ("wgmma 128x160", 2, bytes_)
  # Of 16-bit floats those across are not; three blocks share no others.
  assert planned(DEEP, "y", "bfloat16", "wgmma 192x128 across")["cluster"] == 1
  small = ConvCase("", 32, (7, 7), 512, (3, 3), 512, padding=SAME3)
  assert planned(small, "y", "float32", None)["tile"] == "wgmma 192x128 across"
  assert planned(small, "y", "float32", None)["cluster"] == 3


def test_160_columns():
  """320 columns are two tiles of 160: of 16-bit floats forward in tiles of 256 rows, 128 of them, and else of 128."""
  case = ConvCase("", 4, (64, 64), 320, (3, 3), 320, padding=SAME3)
  for dtype in ("bfloat16", "float16"):
    assert planned(case, "y", dtype, None)["tile"] == "wgmma 256x160"
    assert planned(case, "x", dtype, None)["tile"] == "wgmma 128x160"
    assert planned(case, "x", dtype, "wgmma 256x160") is None
  assert planned(case, "y", "float32", None)["tile"] == "wgmma 128x160"
  assert planned(case, "y", "float32", "wgmma 256x160") is None


@pytest.mark.gpu
@pytest.mark.parametrize("tile", WGMMA_TILES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shared_tiles(tile, dtype):
  check(DEEP, tile, dtype, dtype)


# 16 tiles of 192x128, and 40, which are more than clusters of three run at once.
@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("k, blocks", [(392, 3), (1160, 2)])
def test_parts_of_shared_tiles(k, blocks):
  """Blocks add the sums that others send, of rows and columns that end within a tile."""
  case = ConvCase("parts", 3, (17, 14), 136, (3, 3), k, padding=SAME3)
  assert planned(case, "y", "float32", "wgmma 192x128 across")["cluster"] == blocks
  assert planned(case, "x", "bfloat16", "wgmma 128x160")["cluster"] == 2
  for tile, dtype in (
    ("wgmma 192x128 across", "float32"), ("wgmma 128x160", "float32"), ("wgmma 128x160", "bfloat16"),
  ):  # fmt: skip
    check(case, tile, dtype, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("tile", ["wgmma 128x160", "wgmma 256x160"])
@pytest.mark.parametrize("k", [136, 264, 320, 328, 480])
def test_halves_of_lines(k, tile):
  """Tiles that begin and end with half a line of features, which are whole lines in all, or halves, or are not."""
  case = ConvCase("halves", 3, (17, 14), 136, (3, 3), k, padding=SAME3)
  for dtype in ("bfloat16", "float16"):
    check(case, tile, dtype, dtype)
  x, w, b = coarse(case.x_shape, "bfloat16"), coarse(case.w_shape, "bfloat16", 1), coarse((k,), "bfloat16", 2)
  want = np.maximum(conv_oracle(exact(x), exact(w), *case.geometry, 1) + exact(b), 0)
  got = jaxdnn.conv(x, w, b, padding="SAME", activation="relu", algorithm=tile)
  assert_close(got, want, "bfloat16", terms=9 * case.c, scale=3 * np.sqrt(9 * case.c))


@pytest.mark.gpu
@pytest.mark.parametrize("c", [1280, 1216])
def test_strips_of_shared_tiles(c):
  """Eight columns of tiles, the last of them a whole one or not, are gone over four at a time; four rows of them."""
  case = ConvCase("strips", 3, (11, 13), c, (3, 3), 136, padding=SAME3)
  for dtype in ("bfloat16", "float32"):
    assert planned(case, "x", dtype, "wgmma 128x160")["cluster"] == 2
    check(case, "wgmma 128x160", dtype, dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["ragged", "phases_without_taps", "dilated_input", "1d", "3d", "deep"])
def test_hopper_kernels_under_the_sanitizer(name):
  case = next(case for case in [*CASES, DEEP] if case.name == name)
  for tile in ("wgmma 64x64", "wgmma 128x128", "wgmma 128x160", "wgmma 256x160", "wgmma 96x128 across"):
    for dtype in ("bfloat16", "float32"):
      check(case, tile, dtype, dtype)
  check(case, "mma 128x64", "float32", "float32", HIGH, sample)
