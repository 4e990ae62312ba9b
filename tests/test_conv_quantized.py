"""Convolution of int8 and float8 operands: NumPy's int64 and float64 are the oracles, and lax says which dtypes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdnn
from conv_cases import CASES
from conv_oracle import conv as conv_oracle
from jaxdnn import _extension
from jaxdnn._conv.primitives import convolve
from numerics import DEVICES, assert_close, exact
from quantized_cases import (
  E4M3,
  E5M2,
  FLOAT8,
  floats8,
  integer_oracle,
  integers,
  layer,
  scaled_operands,
  scaled_oracle,
  spec_of,
  wrapping,
)

NHWC = ("NHWC", "HWIO", "NHWC")


# int8 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_integers_are_exact(case):
  for least in (-128, 127):
    x, w = integers(case.x_shape, 1, least), integers(case.w_shape, 2, least)
    got = convolve("y", {"x": jnp.asarray(x)[None], "w": jnp.asarray(w)[None]}, spec_of(case), np.int32)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got[0], integer_oracle(case, x, w))


@pytest.mark.parametrize(
  "out", [None, "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "uint8", "uint32"]
)
def test_result_dtypes_are_those_of_lax(out):
  x, w = integers((2, 6, 5, 8)), integers((3, 3, 8, 4), 1)
  f = functools.partial(lambda api: api(
    x, w, (1, 1), "VALID", dimension_numbers=NHWC, preferred_element_type=out and np.dtype(out)
  ))  # fmt: skip
  if out in ("uint8", "uint32"):
    for api in (lax.conv_general_dilated, jaxdnn.conv_general_dilated):
      with pytest.raises(TypeError, match="preferred_element_type"):
        f(api)
    return
  # On a GPU lax has most of these not, and saturates int8.
  with jax.default_device(jax.devices("cpu")[0]):
    want = f(lax.conv_general_dilated)
  got = f(jaxdnn.conv_general_dilated)
  assert got.dtype == want.dtype
  np.testing.assert_array_equal(got, want)
  # What is narrower than the sums keeps their lowest bits.
  if got.dtype.kind == "i":
    sums = conv_oracle(x, w, (1, 1), ((0, 0),) * 2, (1, 1), (1, 1)).astype(np.int64)
    np.testing.assert_array_equal(got, sums.astype(got.dtype))


@pytest.mark.parametrize("last", [131071, 131072])
def test_sums_wrap(last):
  x, w = wrapping(last)
  want = np.int64(last * 128 * 128).astype(np.int32)
  assert (want < 0) == (last == 131072)
  got = jaxdnn.conv(x, w, preferred_element_type=np.int32)
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(jaxdnn.conv(x, w, x_scale=1.0), np.float32(want))
  # Without a scale a float result is a sum of floats, as lax's is.
  np.testing.assert_array_equal(jaxdnn.conv(x, w, preferred_element_type=np.float32), np.float32(last * 128 * 128))


def test_integers_have_float0_tangents():
  x, w = jnp.asarray(integers((2, 6, 5, 8))), jnp.asarray(integers((3, 3, 8, 4), 1))
  zeros = [np.zeros(a.shape, jax.dtypes.float0) for a in (x, w)]
  for f, device in (
    (lambda x, w: layer(x, w, preferred_element_type=np.int32), jax.devices()[0]),
    (
      lambda x, w: lax.conv(jnp.moveaxis(x, -1, 1), w.transpose(3, 2, 0, 1), (1, 1), "SAME", None, np.int32),
      jax.devices("cpu")[0],  # lax has none on a GPU
    ),
  ):
    operands = jax.device_put((x, w), device)
    y, dy = jax.jvp(f, operands, tuple(zeros))
    assert y.dtype == np.int32 and dy.dtype == jax.dtypes.float0 and dy.shape == y.shape
    y, vjp = jax.vjp(f, *operands)
    assert all(g.dtype == jax.dtypes.float0 for g in vjp(np.zeros(y.shape, jax.dtypes.float0)))
  y, dy = jax.jvp(lambda x, s: layer(x, w, x_scale=s), (x, 2.0), (zeros[0], 1.0))
  np.testing.assert_allclose(dy, y / 2, rtol=1e-6)


# float8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", FLOAT8, ids="*".join)
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_float8(types, out):
  for case in CASES[2:5]:
    x, w = (floats8(s, t, i) for i, (s, t) in enumerate(zip((case.x_shape, case.w_shape), types, strict=True)))
    got = jaxdnn.conv_general_dilated(
      x, w, case.stride, case.padding, dimension_numbers=NHWC, preferred_element_type=jnp.dtype(out)
    )
    terms = int(np.prod(case.w_shape[:-1]))
    assert_close(got, conv_oracle(exact(x), exact(w), *case.geometry), out, terms=terms, scale=3 * np.sqrt(terms))


def test_float8_without_a_type_is_rounded_once():
  x, w = floats8((2, 6, 5, 8), E4M3), floats8((3, 3, 8, 4), E4M3, 1)
  got = layer(x, w)
  assert got.dtype == jnp.float8_e4m3fn
  want = layer(x, w, preferred_element_type=np.float32).astype(jnp.float8_e4m3fn)
  np.testing.assert_array_equal(exact(got), exact(want))
  with pytest.raises(TypeError, match=r"float8_e4m3fn and float8_e5m2.*give preferred_element_type"):
    layer(x, w.astype(jnp.float8_e5m2))


def test_float8_infinities_and_nan():
  x, w = floats8((1, 5, 5, 4), E5M2), floats8((1, 1, 2, 4), E5M2, 1)
  x[0, 1, 2, 0], x[0, 3, 3, 3] = np.inf, np.nan
  got = np.asarray(jaxdnn.conv(x, w, groups=2, preferred_element_type=np.float32))
  want = conv_oracle(exact(x), exact(w), (1, 1), ((0, 0),) * 2, (1, 1), (1, 1), 2)
  np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
  np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])


# Scales ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("out", [None, "float32", "bfloat16", "float16"])
def test_scales(kind, out):
  x, w, x_scale, w_scale, b, r = scaled_operands(kind)
  f = functools.partial(layer, x, w, groups=2, preferred_element_type=out and jnp.dtype(out))
  close = functools.partial(assert_close, dtype=out or "float32", terms=36, scale=10)
  close(f(x_scale=x_scale, w_scale=w_scale), want=scaled_oracle(x, w, x_scale, w_scale))
  close(f(x_scale=x_scale), want=scaled_oracle(x, w, x_scale, np.ones(6, np.float32)))
  close(f(w_scale=0.5), want=scaled_oracle(x, w, np.float32(0.5), np.ones(6, np.float32)))
  b, r = b.astype(jnp.dtype(out or "float32")), r.astype(jnp.dtype(out or "float32"))
  got = f(b, x_scale=x_scale, w_scale=w_scale, residual=r, activation="relu")
  close(got, want=np.maximum(scaled_oracle(x, w, x_scale, w_scale, b, r), 0))


def test_scales_in_any_layout():
  x, w, x_scale, w_scale, b, r = scaled_operands("int8")
  want = layer(x, w, b, x_scale=x_scale, w_scale=w_scale, residual=r, groups=2)
  first = lambda a: np.moveaxis(a, -1, 1)  # noqa: E731
  got = layer(
    first(x), np.transpose(w, (3, 2, 0, 1)), b, x_scale=x_scale, w_scale=w_scale, residual=first(r), groups=2,
    dimension_numbers=("NCHW", "OIHW", "NCHW"),
  )  # fmt: skip
  np.testing.assert_array_equal(first(want), got)


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_derivatives_in_what_is_not_quantized(kind, activation):
  x, w, x_scale, w_scale, b, r = scaled_operands(kind)
  act = {None: lambda v: v, "relu": jax.nn.relu, "gelu": lambda v: jax.nn.gelu(v, approximate=False)}[activation]
  sums = jnp.asarray(scaled_oracle(x, w, np.float32(1), np.ones(6, np.float32)))
  f = lambda s, t, b, r: layer(  # noqa: E731
    x, w, b, x_scale=s, w_scale=t, residual=r, activation=activation, groups=2
  ).sum()
  want_of = lambda s, t, b, r: act(sums * (s * t) + b.reshape(1, 1, 1, 6) + r).sum()  # noqa: E731
  wide = [jnp.asarray(a, np.float64) for a in (x_scale, w_scale, b, r)]
  want = jax.grad(lambda s, t, b, r: want_of(s, t.reshape(1, 1, 1, 6), b, r), (0, 1, 2, 3))(*wide)
  for g, e in zip(jax.grad(f, (0, 1, 2, 3))(x_scale, w_scale, b, r), want, strict=True):
    assert g.dtype == np.float32
    np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-4 * np.abs(e).max())
  # Forward over reverse.
  second = jax.hessian(lambda s: f(s, w_scale, b, r))(x_scale)
  np.testing.assert_allclose(second, jax.hessian(lambda s: want_of(s, wide[1].reshape(1, 1, 1, 6), *wide[2:]))(wide[0]),
                             rtol=1e-3, atol=1e-3)  # fmt: skip


def test_derivatives_in_float8_operands():
  x, w, x_scale, w_scale, *_ = scaled_operands("float8")
  for argument in (0, 1):
    with pytest.raises(TypeError, match=r"no derivative.*float8_e4m3fn.*custom_vjp.*conv_dgrad.*stop_gradient"):
      jax.grad(lambda x, w: layer(x, w, x_scale=x_scale, w_scale=w_scale, groups=2).sum(), argument)(x, w)
  held = jax.grad(lambda s: layer(lax.stop_gradient(jnp.asarray(x) * s.astype(x.dtype)), w, x_scale=s, groups=2).sum())
  assert np.isfinite(held(x_scale))
  # Without a scale, as lax has it: cotangents of the operands' own type.
  got = jax.grad(lambda x: layer(x, jnp.asarray(w, x.dtype), groups=2, preferred_element_type=np.float32).sum())(x)
  assert got.dtype == x.dtype


@pytest.mark.parametrize("mapped", [m for m in itertools.product((False, True), repeat=4) if any(m)])
def test_vmap_over_each_subset(mapped):
  x, w, _, w_scale, b, _ = scaled_operands("int8")
  args = [x, w, w_scale, b]
  many = [np.stack([np.roll(a, i, axis=-1) for i in range(3)]) if m else a for a, m in zip(args, mapped, strict=True)]
  f = lambda x, w, s, b: layer(x, w, b, w_scale=s, groups=2, activation="relu")  # noqa: E731
  got = jax.vmap(f, [0 if m else None for m in mapped])(*map(jnp.asarray, many))
  want = [f(*(a[i] if m else a for a, m in zip(many, mapped, strict=True))) for i in range(3)]
  np.testing.assert_allclose(got, np.stack(want), rtol=1e-6, atol=1e-6)
  plain = lambda x, w: layer(x, w, groups=2, preferred_element_type=np.int32)  # noqa: E731
  if any(mapped[:2]):
    got = jax.vmap(plain, [0 if m else None for m in mapped[:2]])(*map(jnp.asarray, many[:2]))
    want = [plain(*(a[i] if m else a for a, m in zip(many[:2], mapped[:2], strict=True))) for i in range(3)]
    np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.mesh
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_sharded(kind):
  x, w, x_scale, w_scale, b, r = scaled_operands(kind, (8, 6, 5, 8))
  f = lambda x, w, s, b, r: layer(x, w, b, x_scale=x_scale, w_scale=s, residual=r, groups=2)  # noqa: E731
  want = f(x, w, w_scale, b, r)
  mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  inside = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P(), P(), P("data")), out_specs=P("data"))
  with jax.set_mesh(mesh):
    put = [jax.device_put(a, P("data") if a.shape[0] == 8 and a.ndim == 4 else P()) for a in (x, w, w_scale, b, r)]
    for g in (inside, f):
      got = jax.jit(g)(*put)
      assert jax.typeof(got).sharding.spec[0] == "data"
      np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_wrong_arguments():
  x, w, x_scale, w_scale, *_ = scaled_operands("int8")
  wrong = functools.partial(layer, groups=2)
  with pytest.raises(ValueError, match=r"x_scale must have shape \(\), got \(6,\)"):
    wrong(x, w, x_scale=w_scale)
  with pytest.raises(ValueError, match=r"w_scale must have shape \(\) or \(6,\), got \(5,\)"):
    wrong(x, w, w_scale=w_scale[:5])
  with pytest.raises(TypeError, match=r"must be float32, bfloat16 or float16, got int32"):
    wrong(x, w, x_scale=x_scale, preferred_element_type=np.int32)
  for dtype in (np.float32, np.int16, np.uint8):
    with pytest.raises(TypeError, match=rf"go with int8.*got {np.dtype(dtype)}"):
      wrong(x.astype(dtype), w.astype(dtype), x_scale=x_scale)
  with pytest.raises(TypeError, match="same dtype, got int8 and float8_e5m2"):
    layer(x, floats8(w.shape, E5M2), preferred_element_type=np.float32, groups=2)


# The planner and the program ------------------------------------------------------------------------------------------


def algorithms(x, w, **options):
  x, w = (jax.ShapeDtypeStruct(*a) for a in (x, w))
  return jaxdnn.conv_algorithms(x, w, **{"padding": "SAME", "precision": "default", **options})


def test_planner():
  shapes = lambda t, u=None, c=256, k=256: (((32, 28, 28, c), t), ((3, 3, c, k), u or t))  # noqa: E731
  names = lambda *a, **k: [each.name for each in algorithms(*a, **k)]  # noqa: E731
  for types, out in ((("int8",), None), (("int8",), np.int32), (FLOAT8[1], np.float32), ((E5M2,), None)):
    found = {each.name: each for each in algorithms(*shapes(*types), preferred_element_type=out)}
    assert next(iter(found)) == "implicit_gemm_wgmma" and set(found) == {"implicit_gemm_wgmma", "implicit_gemm_mma"}
    integer = types[0] == "int8"
    assert found["implicit_gemm_mma"].exactness == ("int32" if integer else "float32")
    assert found["implicit_gemm_wgmma"].exactness == ("int32" if integer else "float32 of 13 bits")
    assert found["implicit_gemm_mma"].workspace_bytes == 0
    assert found["implicit_gemm_wgmma"].workspace_bytes == 9 * 256 * 256
  assert names(*shapes("int8"), workspace_limit=1000) == ["implicit_gemm_mma"]
  assert names(*shapes("int8"), hopper=False) == ["implicit_gemm_mma"]
  assert names(*shapes("int8"), precision="highest")[0] == "implicit_gemm_wgmma"
  for precision in ("high", "highest"):
    assert names(*shapes(E4M3), precision=precision) == ["implicit_gemm_mma"]
  for c, k in ((65, 256), (256, 65), (3, 16)):
    found = {each.name: each for each in algorithms(*shapes("int8", c=c, k=k))}
    assert set(found) == {"implicit_gemm_wgmma", "implicit_gemm_mma"}
    # Channels are filled up to whole 16 bytes, in a copy of x where it has others.
    filled = -(-c // 16) * 16
    copies = filled * (9 * k + (32 * 28 * 28 if c != filled else 0))
    assert found["implicit_gemm_wgmma"].workspace_bytes == copies
  assert names(((2, 9, 9, 64), "int8"), ((3, 3, 2, 64), "int8"), groups=32) == ["implicit_gemm_mma"]
  for dtype in ("uint8", "int16", "int32"):
    assert names(*shapes(dtype)) == []
  for direction in ("data_gradient", "filter_gradient"):
    assert names(*shapes("int8"), direction=direction) == []


@pytest.mark.skipif("jaxdnn.conv_fwd.v5" not in _extension.TARGETS, reason="the CUDA kernels were not built")
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_layer_is_one_call(kind):
  x, w, _, _, b, r = scaled_operands(kind)
  f = lambda x, w, b, r: layer(x, w, b, x_scale=1.0, residual=r, activation="gelu", groups=2)  # noqa: E731
  lowered = jax.jit(f).trace(x, w, b, r).lower(lowering_platforms=("cuda",)).as_text()
  assert lowered.count("custom_call") == 1 and "stablehlo.add" not in lowered and "scale = true" in lowered
  plain = lambda x, w: layer(x, w, groups=2, preferred_element_type=np.int32 if kind == "int8" else np.float32)  # noqa: E731
  lowered = jax.jit(plain).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
  assert lowered.count("custom_call") == 1 and "stablehlo.conv" not in lowered
