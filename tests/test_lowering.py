"""What an operator becomes on each platform, without needing the platform."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn
from conv_cases import CASES
from jaxdnn import _extension

built = pytest.mark.skipif(not _extension.TARGETS, reason="the CUDA kernels were not built")

F32, I8, I16 = jnp.float32, jnp.int8, jnp.int16
X, W = ((2, 9, 8, 4), F32), ((3, 3, 2, 6), F32)
# name -> (function, operands, calls in the CUDA program of its gradient)
LOWERED = {
  "conv": (
    functools.partial(jaxdnn.conv, stride=(2, 1), padding=((1, 0), (-1, 2)), dilation=(1, 2), groups=2),
    [X, W],
    ["jaxdnn.conv_fwd.v5", "jaxdnn.conv_dgrad.v5", "jaxdnn.conv_wgrad.v4"],
  ),
  "causal_conv1d": (
    lambda x, w, b: jaxdnn.causal_conv1d(x, w, b, activation="silu"),
    [((2, 9, 8), F32), ((4, 8), F32), ((8,), F32)],
    ["jaxdnn.conv_fwd.v5", "jaxdnn.causal_backward.v1"],
  ),
  "causal_conv1d_plain": (
    lambda x, w: jaxdnn.causal_conv1d(x, w),
    [((2, 9, 8), F32), ((2, 8), F32)],
    ["jaxdnn.conv_fwd.v5", "jaxdnn.causal_backward.v1"],
  ),
  "causal_conv1d_of_five": (
    lambda x, w: jaxdnn.causal_conv1d(x, w),
    [((2, 9, 8), F32), ((5, 8), F32)],
    ["jaxdnn.conv_fwd.v5", "jaxdnn.conv_dgrad.v5", "jaxdnn.conv_wgrad.v4"],
  ),
  "layer_norm": (
    jaxdnn.layer_norm,
    [X, ((4,), F32), ((4,), F32)],
    ["jaxdnn.layer_norm.v1", "jaxdnn.layer_norm_bwd.v1"],
  ),
  "layer_norm_of_rows": (
    lambda x, s: jaxdnn.layer_norm(x, s, where=x[..., :1] > 0),
    [X, ((4,), F32)],
    ["jaxdnn.layer_norm.v1", "jaxdnn.layer_norm_bwd.v1"],
  ),
  "max_pool_where": (
    lambda x: jaxdnn.max_pool(x, (2, 2), stride=2, where=x[..., :1] > 0),
    [X],
    ["jaxdnn.max_pool.v2", "jaxdnn.max_pool.v2", "jaxdnn.pool_scatter.v2"],
  ),
  "max_pool": (
    lambda x: jaxdnn.max_pool(x, (2, 2), stride=2),
    [X],
    ["jaxdnn.max_pool.v2", "jaxdnn.pool_scatter.v2"],
  ),
  "avg_pool": (
    lambda x: jaxdnn.avg_pool(x, (2, 2), stride=2),
    [X],
    ["jaxdnn.sum_pool.v1", "jaxdnn.sum_pool_bwd.v1"],
  ),
  "lrn": (jaxdnn.local_response_norm, [X], ["jaxdnn.lrn.v1", "jaxdnn.lrn_vjp.v1"]),
  "divisive_norm": (
    lambda x, m: jaxdnn.divisive_norm(x, m, size=3),
    [X, X],
    ["jaxdnn.divisive.v1", "jaxdnn.divisive_vjp.v1"],
  ),
  "group_norm": (
    lambda x, s, b: jaxdnn.group_norm(x, 2, s, b, activation="silu"),
    [X, ((4,), F32), ((4,), F32)],
    ["jaxdnn.group_norm.v1", "jaxdnn.group_norm_bwd.v1"],
  ),
  "instance_norm_channels_first": (
    lambda x: jaxdnn.instance_norm(x, axis=1),
    [X],
    ["jaxdnn.group_norm.v1", "jaxdnn.group_norm_bwd.v1"],
  ),
  "batch_norm": (
    lambda x: jaxdnn.batch_norm(x, activation="relu")[0],
    [X],
    [f"jaxdnn.batch_norm_{name}.v1" for name in ("train", "train_gradient")],
  ),
  "batch_norm_residual": (
    lambda x: jaxdnn.batch_norm(x, residual=x)[0],
    [X],
    [f"jaxdnn.batch_norm_{name}.v1" for name in ("train", "sums", "gradient")],
  ),
  "softmax": (jaxdnn.softmax, [X], ["jaxdnn.softmax.v2", "jaxdnn.softmax_bwd.v2"]),
  "log_softmax": (jaxdnn.log_softmax, [X], ["jaxdnn.softmax.v2", "jaxdnn.softmax_bwd.v2"]),
  "softmax_where": (
    lambda x: jaxdnn.softmax(x, 1, where=x[:1] > 0),
    [X],
    ["jaxdnn.softmax.v2", "jaxdnn.softmax_bwd.v2"],
  ),
  "logsumexp": (jaxdnn.logsumexp, [X], ["jaxdnn.log_partition.v2", "jaxdnn.log_partition_bwd.v2"]),
  "logsumexp_where": (
    lambda x: jaxdnn.logsumexp(x, 1, where=x[:1] > 0),
    [X],
    ["jaxdnn.log_partition.v2", "jaxdnn.log_partition_bwd.v2"],
  ),
  "cross_entropy": (
    lambda x: jaxdnn.cross_entropy(
      x, jnp.zeros(x.shape[:-1], jnp.int32), weight=jnp.ones(4), label_smoothing=0.1, z_loss=0.1
    ),
    [X],
    ["jaxdnn.log_partition.v2", "jaxdnn.log_partition_bwd.v2"],
  ),
  "relu": (jaxdnn.relu, [X], ["jaxdnn.activation.v2", "jaxdnn.activation_bwd.v2"]),
  "gelu": (jaxdnn.gelu, [X], ["jaxdnn.activation.v2", "jaxdnn.activation_bwd.v2"]),
  "relu_bias": (
    lambda x, b: jaxdnn.relu(x, bias=b),
    [X, ((4,), F32)],
    ["jaxdnn.channel_activation.v1", "jaxdnn.channel_activation_bwd.v1"],
  ),
  "prelu": (
    jaxdnn.prelu,
    [X, ((4,), F32)],
    ["jaxdnn.channel_activation.v1", "jaxdnn.channel_activation_bwd.v1"],
  ),
  "swiglu": (jaxdnn.swiglu, [X], ["jaxdnn.gate.v1", "jaxdnn.gate_bwd.v1"]),
  "dropout": (lambda x: jaxdnn.dropout(x, 0.5, jax.random.key(0)), [X], ["jaxdnn.dropout.v1"] * 2),
  "transform": (
    lambda x: jaxdnn.transform(x, permutation=(0, 3, 1, 2), dtype="bfloat16"),
    [X],
    ["jaxdnn.transform.v1", "jaxdnn.transform.v1"],
  ),
  "transform_add": (
    lambda x, y: jaxdnn.transform(x, y, alpha=2.0, beta=1.0),
    [X, X],
    ["jaxdnn.transform.v1", "jaxdnn.transform.v1"],
  ),
  "im2col": (lambda x: jaxdnn.im2col(x, (2, 2)), [X], ["jaxdnn.im2col.v1", "jaxdnn.col2im.v1"]),
}


def zeros(operands):
  return [jnp.zeros(shape, dtype) for shape, dtype in operands]


def text(f, args, platform):
  return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def gradient(f):
  def both(*args):
    y, vjp = jax.vjp(f, *args)
    return y, vjp(jnp.ones_like(y))

  return both


@built
@pytest.mark.parametrize("name", LOWERED)
def test_cuda_program_of_the_gradient_is_our_kernels(name):
  f, operands, targets = LOWERED[name]
  calls = re.findall(r"custom_call @(jaxdnn\.\S+?)\(", text(gradient(f), zeros(operands), "cuda"))
  assert sorted(calls) == sorted(targets)


@pytest.mark.parametrize("name", LOWERED)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms_have_no_custom_call(name, platform):
  f, operands, _ = LOWERED[name]
  assert "jaxdnn." not in text(gradient(f), zeros(operands), platform)


@built
def test_convolution_attributes():
  f, operands, _ = LOWERED["conv"]
  program = text(f, zeros(operands), "cuda")
  for attribute in (
    "groups = 2 : i64",
    "stride = dense<[2, 1]> : tensor<2xi64>",
    "padding_low = dense<[1, -1]> : tensor<2xi64>",
    "lhs_dilation = dense<1> : tensor<2xi64>",
    "rhs_dilation = dense<[1, 2]> : tensor<2xi64>",
    "products = 0 : i64",
  ):
    assert attribute in program
  for precision, products in (("default", 1), ("high", 3), ("highest", 0)):
    lowered = text(functools.partial(jaxdnn.conv, groups=2, precision=precision), zeros(operands), "cuda")
    assert f"products = {products} : i64" in lowered


@built
def test_filter_gradient_workspace_is_a_result():
  x, g = jnp.zeros((64, 32, 32, 4)), jnp.zeros((64, 32, 32, 8))
  program = text(lambda x, g: jaxdnn.conv_wgrad(x, g, (3, 3), padding="SAME"), [x, g], "cuda")
  (workspace,) = re.findall(r"-> \(tensor<1x3x3x4x8xf64>, tensor<(\d+)xui8>\)", program)
  assert int(workspace) > 0 and int(workspace) % (3 * 3 * 4 * 8 * 8) == 0


@built
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "data_gradient", "filter_gradient"])
def test_every_direction_is_given_its_workspace(direction, dtype):
  """Odd channels, whose kernels lay the filter out first, or add up parts of it."""
  x, w = (jnp.zeros(shape, dtype) for shape in ((8, 28, 28, 65), (3, 3, 65, 65)))
  layer = {"padding": "SAME", "precision": "default"}
  planned = {each.name: each for each in jaxdnn.conv_algorithms(x, w, direction=direction, **layer)}["unaligned"]
  assert planned.workspace_bytes > 0
  layer["algorithm"] = "unaligned"
  forward = functools.partial(jaxdnn.conv, **layer)
  calls = {
    "forward": lambda: forward(x, w),
    "data_gradient": lambda: jaxdnn.conv_dgrad(x, w, (28, 28), **layer),
    "filter_gradient": lambda: jaxdnn.conv_wgrad(x, x, (3, 3), **layer),
  }
  program = text(calls[direction], [], "cuda")
  assert max(map(int, re.findall(r"tensor<(\d+)xui8>\)", program))) >= planned.workspace_bytes


@built
@pytest.mark.parametrize("size, scratch", [(3, 0), (7, 0), (4, 2), (9, 2), ((3, 5), 2)])
def test_boxes_in_registers_take_no_workspace(size, scratch):
  """The derivative of divisive normalization takes one pass over odd square boxes of up to seven cells, else two."""
  x = jnp.zeros((2, 16, 18, 4), F32)
  program = text(jax.grad(lambda x, m: jaxdnn.divisive_norm(x, m, size=size).sum()), [x, x], "cuda")
  (workspace,) = re.findall(r"jaxdnn.divisive_vjp.*tensor<(\d+)xui8>\)", program)
  assert int(workspace) == scratch * x.size * 4


@built
def test_what_no_kernel_takes_falls_back():
  four = text(lambda x, w: jaxdnn.conv(x, w), [jnp.zeros((1, 3, 3, 3, 3, 2)), jnp.zeros((2, 2, 2, 2, 2, 2))], "cuda")
  integers = text(
    lambda x, w: jaxdnn.conv(x, w, preferred_element_type="int32"), zeros([((1, 5, 2), I16), ((3, 2, 2), I16)]), "cuda"
  )
  pooled = text(lambda x: jaxdnn.max_pool(x, (2,)), zeros([((1, 5, 2), I8)]), "cuda")
  for program in (four, integers, pooled):
    assert "jaxdnn." not in program


@built
@pytest.mark.parametrize(
  "f, shape, largest",
  [
    (functools.partial(jaxdnn.glu, axis=1), (16, 2, 2**28), (16, 2, 2**28 - 1)),
    (lambda x: jaxdnn.batch_norm(x, axis=1)[0], (1, 2, 2**31), (1, 2, 2**31 - 17)),
    (lambda x: jaxdnn.group_norm(x, 2), (2**29 - 1, 1, 4), (2**29 - 33, 1, 4)),
  ],
)
def test_what_32_bits_do_not_count_falls_back(f, shape, largest):
  program, last = (text(f, [jax.ShapeDtypeStruct(s, jnp.bfloat16)], "cuda") for s in (shape, largest))
  assert "jaxdnn." not in program and "jaxdnn." in last


@built
def test_export_for_both_platforms():
  f, operands, targets = LOWERED["conv"]
  checks = [jax.export.DisabledSafetyCheck.custom_call(t) for t in targets]
  args = zeros(operands)
  exported = jax.export.export(jax.jit(f), platforms=("cpu", "cuda"), disabled_checks=checks)(*args)
  if jax.default_backend() == "cpu":
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(*args), f(*args))


def test_planner_is_a_pure_function_of_the_problem():
  """Equal problems have equal plans, data and forward need no workspace, and the workspace is bounded."""
  from jaxdnn._conv.primitives import NAMES, OPERANDS, plan
  from jaxdnn._conv.spec import ConvSpec

  for case in CASES:
    spec = ConvSpec(*case.geometry[:2], *case.geometry[2:], case.groups, case.spatial, case.window, None)
    shapes = {
      "x": (1, *case.x_shape), "w": (1, *case.w_shape), "y": (1, case.batch, *spec.y_spatial, case.k)
    }  # fmt: skip
    avals = {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}
    for result in NAMES:
      a, b = (avals[name] for name in OPERANDS[result])
      first = plan(result, a, b, spec, F32, hopper=False)
      assert first is not None and first == plan(result, a, b, spec, F32, hopper=False), case.name
      if result != "w":
        assert first["splits"] == 1 and first["workspace_bytes"] == 0
      elif first["splits"] > 1:
        assert first["workspace_bytes"] == first["splits"] * 4 * int(np.prod(case.w_shape)) <= 256 << 20


def test_planner_prefers_big_tiles_for_big_problems_and_splits_long_sums():
  common = dict(
    in_dtype="float32", out_dtype="float32", stride=(1, 1), padding_low=(1, 1), lhs_dilation=(1, 1),
    rhs_dilation=(1, 1), padding_mode=(0, 0), products=0, hopper=False, algorithm="", workspace_limit=1 << 28,
  )  # fmt: skip
  plan = _extension.native.plan_conv
  x, y = (1, 64, 56, 56, 64), (1, 64, 56, 56, 64)
  dense = plan(direction="conv_fwd", x=x, w=(1, 3, 3, 64, 64), y=y, groups=1, **common)
  depthwise = plan(direction="conv_fwd", x=x, w=(1, 3, 3, 1, 64), y=y, groups=64, **common)
  small = plan(direction="conv_fwd", x=(1, 1, 7, 7, 64), w=(1, 3, 3, 64, 64), y=(1, 1, 7, 7, 64), groups=1, **common)
  filter_gradient = plan(direction="conv_wgrad", x=x, w=(1, 3, 3, 64, 64), y=y, groups=1, **common)
  assert dense["tile"] == "simt 128x64" and depthwise["tile"] == "depthwise" and small["tile"] == "simt runs"
  assert filter_gradient["splits"] > 8
  half = {**common, "in_dtype": "bfloat16", "out_dtype": "bfloat16"}
  shapes = {"direction": "conv_fwd", "x": x, "y": y}
  assert plan(w=(1, 3, 3, 64, 64), groups=1, **shapes, **half)["tile"] == "mma 128x64"
  assert plan(w=(1, 3, 3, 1, 64), groups=64, **shapes, **half)["tile"] == "depthwise"
  half["hopper"] = True
  # Of 64 channels, plane by plane takes less: 98 µs of 256 images, where the dense kernel takes 20 of 32.
  assert plan(w=(1, 3, 3, 64, 64), groups=1, **shapes, **half)["tile"] == "planes"
  wide = {"direction": "conv_fwd", "x": (1, 64, 28, 28, 256), "y": (1, 64, 28, 28, 256)}
  assert plan(w=(1, 3, 3, 256, 256), groups=1, **wide, **half)["tile"].startswith("wgmma")
  assert plan(w=(1, 3, 3, 1, 64), groups=64, **shapes, **half)["tile"] == "depthwise"


@built
@pytest.mark.parametrize("activation, residual", [("relu", False), ("silu", False), ("relu", True), (None, True)])
@pytest.mark.parametrize("window, finish", [((3, 3), "clamp"), ((5, 5), "clamp"), ((6, 6), "bias"), ((2, 3), "any")])
def test_kernels_without_an_epilogue_are_followed_by_xla(window, finish, activation, residual):
  """Depthwise ones that are compiled for a window: of sums in float32, which those of 6x6 have not, or of results that
  are clamped."""
  clamp = activation == "relu" and not residual
  apart = finish == ("bias" if clamp else "clamp")

  def layer(x, w, b):
    added = x if residual else None
    return jaxdnn.conv(x, w, b, padding="SAME", groups=32, activation=activation, residual=added)

  operands = [((2, 16, 16, 32), jnp.bfloat16), ((*window, 1, 32), jnp.bfloat16), ((32,), jnp.bfloat16)]
  program = text(layer, zeros(operands), "cuda")
  (call,) = (line for line in program.splitlines() if "custom_call @jaxdnn.conv_fwd" in line)
  assert "bias = true" in call
  assert ('activation = "identity"' in call) == (apart or activation is None)
  assert ("residual = true" in call) == (residual and not apart)
  assert ("xf32>" in call.rsplit("->", 1)[-1]) == (apart and not clamp)
