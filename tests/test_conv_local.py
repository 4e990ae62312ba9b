"""Convolution with unshared weights against NumPy in float64 and against lax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxdnn
from numerics import DEVICES, assert_close, assert_repeatable, exact, sample


def oracle(x, w, b, stride, padding, dilation):
  """The sum over every window, output position by output position."""
  rank = len(stride)
  x, w = exact(x), exact(w)
  x = np.pad(x, [(0, 0), *padding, (0, 0)])
  out, window = w.shape[:rank], w.shape[rank : 2 * rank]
  y = np.zeros((x.shape[0], *out, w.shape[-1]))
  for position in itertools.product(*map(range, out)):
    for tap in itertools.product(*map(range, window)):
      at = tuple(p * s + t * d for p, s, t, d in zip(position, stride, tap, dilation, strict=True))
      y[:, *position] += x[:, *at] @ w[*position, *tap]
  return y if b is None else y + exact(b)


# spatial, window, stride, padding, dilation
CASES = {
  "1d": ((9,), (3,), (1,), ((0, 0),), (1,)),
  "1d_strided": ((11,), (4,), (2,), ((3, 0),), (1,)),
  "2d": ((6, 5), (3, 2), (1, 1), ((1, 1), (0, 1)), (1, 1)),
  "2d_dilated": ((7, 8), (2, 3), (2, 1), ((0, 1), (2, 0)), (2, 3)),
  "3d": ((4, 5, 4), (2, 3, 2), (1, 2, 1), ((0, 0), (1, 1), (0, 1)), (1, 1, 2)),
}


def operands(case, dtype, channels=4, features=6, images=3):
  spatial, window, stride, padding, dilation = CASES[case]
  out = [
    (i + lo + hi - (r - 1) * d - 1) // s + 1
    for i, r, s, (lo, hi), d in zip(spatial, window, stride, padding, dilation, strict=True)
  ]
  x = sample((images, *spatial, channels), dtype)
  w = sample((*out, *window, channels, features), dtype, 1)
  return x, w, sample((*out, features), dtype, 2), {"stride": stride, "padding": padding, "dilation": dilation}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_values(case, dtype):
  x, w, b, arguments = operands(case, dtype)
  terms = int(np.prod(CASES[case][1])) * 4
  plain, layer = jax.jit(
    lambda x, w, b: (
      jaxdnn.conv_local(x, w, **arguments),
      jaxdnn.conv_local(x, w, b, activation="relu", **arguments),
    )
  )(x, w, b)
  assert_close(plain, oracle(x, w, None, **arguments), dtype, terms=terms, scale=4)
  assert_close(layer, np.maximum(oracle(x, w, b, **arguments), 0), dtype, terms=terms, scale=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_repeat(case, dtype):
  x, w, b, arguments = operands(case, dtype)
  y = assert_repeatable(lambda x, w, b: jaxdnn.conv_local(x, w, b, **arguments), x, w, b)
  assert_close(y, oracle(x, w, b, **arguments), dtype, terms=int(np.prod(CASES[case][1])) * 4, scale=4)


@pytest.mark.parametrize("numbers", [None, ("NHWC", "HWIO", "NHWC"), ("HNWC", "OHWI", "NCHW")])
@pytest.mark.parametrize("padding, lhs_dilation", [("SAME", None), (((1, 0), (2, 1)), (2, 1)), ("VALID", (1, 1))])
def test_is_lax(numbers, padding, lhs_dilation):
  """Value and gradients, in any layout."""
  spec = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, numbers)
  shape = np.zeros(4, int)
  shape[list(spec.lhs_spec)] = (2, 3, 6, 7)
  x = sample(shape, "float64")
  arguments = ((2, 1), padding, (3, 2), lhs_dilation, (1, 2), numbers)
  out = jax.eval_shape(
    lambda x, w: lax.conv_general_dilated(x, w, (2, 1), padding, lhs_dilation, (1, 2)),
    *(jax.ShapeDtypeStruct(s, "float64") for s in ((1, 1, 6, 7), (1, 1, 3, 2))),
  ).shape
  shape[list(spec.rhs_spec)] = (5, 3 * 6, *out[2:])
  w = sample(shape, "float64", 1)
  ours, theirs = (
    jax.jit(lambda x, w, f=f: jax.vjp(lambda x, w: f(x, w, *arguments), x, w))(x, w)
    for f in (jaxdnn.conv_general_dilated_local, lax.conv_general_dilated_local)
  )
  np.testing.assert_allclose(ours[0], theirs[0], atol=1e-12)
  g = jnp.asarray(sample(ours[0].shape, "float64", 2))
  for a, b in zip(ours[1](g), theirs[1](g), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-12)


def test_leading_dimensions_and_vmap():
  x, w, b, arguments = operands("2d", "float64")
  f = jax.jit(lambda x, w: jaxdnn.conv_local(x, w, b, **arguments))
  want = f(x, w)
  np.testing.assert_allclose(f(x[None], w)[0], want, atol=1e-12)
  np.testing.assert_allclose(f(x[0], w), want[0], atol=1e-12)
  assert f(x[:0], w).shape == (0, *want.shape[1:])
  stacked_x, stacked_w = np.stack([x, -x], 1), np.stack([w, 2 * w], 2)
  for axes in ((1, None), (None, 2), (1, 2)):
    xs, ws = stacked_x if axes[0] else x, stacked_w if axes[1] else w
    got = jax.jit(jax.vmap(f, axes))(xs, ws)
    for i in range(2):
      one = f(xs[:, i] if axes[0] else xs, ws[:, :, i] if axes[1] else ws)
      np.testing.assert_allclose(got[i], one, atol=1e-12)


@pytest.mark.mesh
def test_batch_stays_sharded():
  x, w, b, arguments = operands("2d", "float32", images=8)
  mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Explicit,))
  want = jaxdnn.conv_local(x, w, b, **arguments)
  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    f = jax.jit(lambda x, w, b: jaxdnn.conv_local(x, w, b, **arguments))
    y = f(sharded, w, b)
    assert y.sharding.spec[0] == "d" and "all-gather" not in f.lower(sharded, w, b).compile().as_text()
  np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.parametrize(
  "x, w, kwargs, message",
  [
    ((2, 5, 4), (4, 3, 4, 6), {}, r"positions \(3,\), .* got 4 channels and positions \(4,\)"),
    ((2, 5, 4), (3, 3, 5, 6), {}, r"filters of 4 channels .* got 5 channels"),
    ((2, 5, 4), (3, 4, 6), {}, r"w must be \[\*out_spatial, \*window, C, K\] of rank 4, 6 or 8, got shape \(3, 4, 6\)"),
    ((4,), (3, 3, 4, 6), {}, r"x of shape \(4,\) has too few dimensions"),
    ((2, 5, 4), (3, 3, 4, 6), {"b": (6,)}, r"b must have shape \(3, 6\), got \(6,\)"),
    ((2, 5, 4), (3, 3, 4, 6), {"activation": "nope"}, r"activation must be None or one of .*, got 'nope'"),
  ],
)
def test_wrong_arguments(x, w, kwargs, message):
  kwargs = {k: jnp.ones(v) if k == "b" else v for k, v in kwargs.items()}
  with pytest.raises(ValueError, match=message):
    jaxdnn.conv_local(jnp.ones(x), jnp.ones(w), **kwargs)


def test_wrong_arguments_of_the_general_form():
  x, w = jnp.ones((2, 3, 5)), jnp.ones((4, 9, 3))
  f = jaxdnn.conv_general_dilated_local
  assert f(x, w, (1,), "VALID", (3,)).shape == (2, 4, 3)
  with pytest.raises(ValueError, match=r"rhs must have 3 \* 2 input channels for filter_shape=\(2,\), got 9"):
    f(x, w, (1,), "VALID", (2,))
  with pytest.raises(ValueError, match=r"filter_shape must have one entry for each"):
    f(x, w, (1,), "VALID", (3, 1))
  with pytest.raises(ValueError, match=r"padding='SAME' is ambiguous with lhs_dilation=\(2,\)"):
    f(x, w, (1,), "SAME", (3,), (2,))
  with pytest.raises(TypeError, match="same dtype"):
    f(x, w.astype("float16"), (1,), "VALID", (3,))
