"""Convolution with bias, residual and activation in one kernel."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxdnn
from activation_cases import BY_NAME, DEFAULTS
from conv_cases import SAME3, ConvCase
from conv_checks import FILTER_TILES, OF_PAIRS
from conv_oracle import conv as conv_oracle
from jaxdnn import _activation, _extension
from jaxdnn._conv.fused import FROM_OUTPUT, fused
from jaxdnn._conv.primitives import (
  ALGORITHMS,
  DEPTHWISE,
  DIRECT,
  FEW_CHANNELS,
  FEW_FEATURES,
  GROUPED,
  PLANES,
  UNALIGNED,
  plan,
)
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact, sample

X, W = (2, 6, 5, 4), (3, 3, 2, 6)  # in two groups
ACTIVATIONS = DEFAULTS | {"gelu": BY_NAME["gelu-approximate=False"], "gelu_tanh": DEFAULTS["gelu"]}
EXTRAS = [(b, r) for b in (False, True) for r in (False, True)]


def oracle(x, w, b, r, kind, *geometry, groups=1):
  z = conv_oracle(exact(x), exact(w), *geometry, groups)
  z = z + (0 if b is None else exact(b)) + (0 if r is None else exact(r))
  return z if kind is None else ACTIVATIONS[kind].forward(z)


def operands(dtype, bias, residual, x=X, w=W, y=(2, 6, 5, 6)):
  b, r = sample((w[-1],), dtype, 2) if bias else None, sample(y, dtype, 3) if residual else None
  return sample(x, dtype), sample(w, dtype, 1), b, r


@pytest.mark.parametrize("bias, residual", EXTRAS)
@pytest.mark.parametrize("kind", [None, *sorted(_activation.ACTIVATIONS)])
def test_every_activation(kind, bias, residual):
  for dtype in ("float32", "bfloat16", "float64"):
    x, w, b, r = operands(dtype, bias, residual)
    got = jax.jit(functools.partial(jaxdnn.conv, padding="SAME", groups=2, activation=kind))(x, w, b, residual=r)
    want = oracle(x, w, b, r, kind, (1, 1), SAME3, (1, 1), (1, 1), groups=2)
    assert_close(got, want, dtype, terms=20, scale=6)


@pytest.mark.parametrize("kind", [None, "relu", "sigmoid", "gelu", "leaky_relu"])
def test_derivatives_of_every_order_and_mode(kind):
  """Away from kinks, by a bias."""
  x, w, b, r = (jnp.asarray(a) for a in operands("float64", True, True))
  f = lambda x, w, b, r: jaxdnn.conv(x, w, b, padding="SAME", groups=2, activation=kind, residual=r)  # noqa: E731
  z = f(x, w, b, r) if kind is None else jaxdnn.conv(x, w, b, padding="SAME", groups=2, residual=r)
  r = r + jnp.where(jnp.abs(z) < 0.1, 0.3, 0)
  check_grads(jax.jit(f), (x, w, b, r), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("kind", FROM_OUTPUT)
def test_derivative_from_the_output_is_that_of_the_input(kind):
  x, w, b, r = (jnp.asarray(a) for a in operands("float64", True, True))
  layer = functools.partial(jaxdnn.conv, padding="SAME", groups=2)
  steps = lambda x, w, b, r: getattr(jaxdnn, kind)(layer(x, w, b, residual=r))  # noqa: E731
  y, vjp = jax.vjp(lambda x, w, b, r: layer(x, w, b, residual=r, activation=kind), x, w, b, r)
  want, want_vjp = jax.vjp(steps, x, w, b, r)
  for got, expected in zip((y, *vjp(y)), (want, *want_vjp(y)), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("mapped", [m for m in itertools.product((False, True), repeat=4) if any(m)])
def test_vmap_over_each_subset(mapped):
  shapes = [X, W, (6,), (2, 6, 5, 6)]
  shapes_and_axes = enumerate(zip(shapes, mapped, strict=True))
  args = [jnp.asarray(sample((3, *s) if m else s, "float64", i)) for i, (s, m) in shapes_and_axes]
  f = lambda x, w, b, r: jaxdnn.conv(x, w, b, padding="SAME", groups=2, activation="tanh", residual=r)  # noqa: E731
  got = jax.vmap(f, [0 if m else None for m in mapped])(*args)
  want = [f(*(a[i] if m else a for a, m in zip(args, mapped, strict=True))) for i in range(3)]
  np.testing.assert_allclose(got, np.stack(want), atol=1e-12)
  gradient = jax.vmap(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2, 3)), [0 if m else None for m in mapped])(*args)
  for i, g in enumerate(gradient):
    assert g.shape == (3, *shapes[i])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("shape", [(2, 0, 5, 4), (0, 6, 5, 4), (2, 6, 5, 0)])
def test_vmap_of_layers_of_nothing(shape, both):
  x, w = jnp.ones((3, *shape)), jnp.ones((*(3,) * both, 3, 2, shape[-1], 6))
  f = lambda x, w: jaxdnn.conv(x, w, jnp.ones(6), padding=1, activation="tanh")  # noqa: E731
  got = jax.vmap(f, (0, 0 if both else None))(x, w)
  np.testing.assert_allclose(got, np.full(got.shape, np.tanh(1)), rtol=1e-12)
  assert got.shape == (3, shape[0], shape[1], 6, 6)


@pytest.mark.skipif("jaxdnn.conv_fwd.v5" not in _extension.TARGETS, reason="the CUDA kernels were not built")
def test_layer_is_one_call():
  x, w, b, r = (jnp.asarray(a) for a in operands("bfloat16", True, True))
  f = lambda x, w, b, r: jaxdnn.conv(x, w, b, padding="SAME", groups=2, activation="gelu", residual=r)  # noqa: E731
  lowered = jax.jit(f).trace(x, w, b, r).lower(lowering_platforms=("cuda",)).as_text()
  assert lowered.count("custom_call") == 1 and "stablehlo.add" not in lowered and '"gelu"' in lowered


def test_wrong_arguments():
  x, w, b, r = operands("float32", True, True)
  with pytest.raises(ValueError, match=r"b must have shape \(6,\).*got \(5,\)"):
    jaxdnn.conv(x, w, b[:5], padding="SAME", groups=2)
  with pytest.raises(ValueError, match=r"residual must have the result's shape \(2, 6, 5, 6\), got \(2, 6, 5, 5\)"):
    jaxdnn.conv(x, w, padding="SAME", groups=2, residual=r[..., :5])


# The kernels, on a GPU ------------------------------------------------------------------------------------------------

CASES = [
  ConvCase("ragged", 3, (17, 19), 72, (3, 3), 136, padding=SAME3),
  ConvCase("phases", 2, (6, 7), 64, (3, 3), 72, padding=SAME3, lhs_dilation=(2, 2)),
  ConvCase("many_tiles", 20, (28, 28), 64, (1, 1), 200),
  ConvCase("halves", 2, (14, 14), 64, (1, 1), 480),
  ConvCase("deep", 1, (5, 7), 512, (3, 3), 136, padding=SAME3),
  ConvCase("odd", 2, (9, 9), 7, (3, 3), 13, padding=SAME3),
  ConvCase("grouped", 2, (9, 9), 32, (3, 3), 32, padding=SAME3, groups=4),
]  # fmt: skip


def check(case, tile, dtype, out_dtype, kind):
  spec = ConvSpec(*case.geometry, case.groups, case.spatial, case.window, None, tile)
  y_shape = (case.batch, *spec.y_spatial, case.k)
  # Floats are such that TF32 holds them.
  draw = lambda shape, seed: sample(shape, "bfloat16" if dtype == "float32" else dtype, seed)  # noqa: E731
  x, w = (jnp.asarray(draw(s, i).astype(jnp.dtype(dtype))) for i, s in enumerate((case.x_shape, case.w_shape)))
  b, r = (jnp.asarray(draw(s, 2 + i).astype(jnp.dtype(out_dtype))) for i, s in enumerate(((case.k,), y_shape)))
  if plan("y", x[None], w[None], spec, jnp.dtype(out_dtype), hopper=True) is None:
    return False
  terms = int(np.prod(case.w_shape[:-1]))
  for bias, residual in ((b, r), (b, None), (None, r)):
    extras = [None if a is None else a[None] for a in (bias, residual)]
    got = assert_repeatable(lambda x, w, e=extras: fused(x[None], w[None], *e, spec, out_dtype, kind), x, w, repeats=3)
    assert_close(got[0], oracle(x, w, bias, residual, kind, *case.geometry, groups=case.groups), out_dtype,
                 terms=terms, scale=np.sqrt(terms) * 3)  # fmt: skip
  return True


# Kernels of few shapes have such a test beside their others.
OF_FEW_SHAPES = {
  DEPTHWISE, DIRECT, FEW_CHANNELS, "few_channels wgmma", FEW_FEATURES, "few_features wgmma", GROUPED, PLANES, UNALIGNED,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "clipped_relu", "gelu"])
@pytest.mark.parametrize(
  "tile", sorted({*ALGORITHMS, *_extension.native.conv_tiles} - OF_FEW_SHAPES - FILTER_TILES - OF_PAIRS)
)
def test_kernels(tile, kind):
  types = [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32"), ("float32", "float32")]
  taken = [check(case, tile, *pair, kind) for case in CASES for pair in types]
  of_floats = ("simt 128x64", "simt 64x64", "simt 128x32", "simt 256x8", "simt 256x4", "simt runs", "simt patch")
  of_few_types = ("wgmma 128x128 copied", "wgmma 128x256", *of_floats)
  assert sum(taken) >= (3 if tile in of_few_types else 8)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_kernels_under_the_sanitizer():
  of_half = ("wgmma 64x64", "wgmma 256x160", "wgmma 96x128 across", "mma 128x64", "simt 64x32", "simt 128x8")
  for tile in ("wgmma 128x128", *of_half):
    assert check(CASES[0], tile, "bfloat16", "bfloat16", "silu")
  for tile in ("wgmma 128x128", "wgmma 256x64", "wgmma 128x128 copied"):
    assert check(CASES[0], tile, "float32", "float32", "silu")


@pytest.mark.gpu
def test_layer_is_one_kernel_when_trained():
  """A relu network's forward pass leaves nothing between its convolutions."""
  x, w, b, r = (jnp.asarray(a) for a in operands("bfloat16", True, True, (4, 8, 8, 64), (3, 3, 64, 64), (4, 8, 8, 64)))
  f = lambda x, w, b, r: jaxdnn.conv(x, w, b, padding="SAME", activation="relu", residual=r)  # noqa: E731
  loss = lambda w, b: f(f(x, w, b, r), w, b, r).astype(jnp.float32).sum()  # noqa: E731
  hlo = jax.jit(jax.grad(loss, (0, 1))).lower(w, b).compile().as_text()
  calls = [line for line in hlo.splitlines() if 'custom_call_target="jaxdnn.conv_fwd' in line]
  assert len(calls) == 2 and all("relu" in line for line in calls), "\n".join(calls)
