"""docs/conventions.md, row by row: the argument that a row names gives what the other library gives."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn
from numerics import exact, sample

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "conventions.md"
# Rows about libraries that no test can call: cuDNN's, TensorFlow's and layers' conventions, settled elsewhere.
WITHOUT_A_TEST = {"batch-epsilon", "batch-saved", "lrn-alpha", "lrn-radius", "lrn-divisive", "loss-z", "norm-variance"}
ROWS = {}


def row(name, needs=None):
  """Registers the test of a row, skipped where the package it needs is not installed."""

  def register(test):
    ROWS[name] = test if needs is None else lambda: test(pytest.importorskip(needs))
    return test

  return register


def close(got, want, tolerance=1e-10):
  got, want = (np.asarray(v.detach() if hasattr(v, "detach") else v, np.float64) for v in (got, want))
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def image(shape=(2, 7, 6, 4), seed=0):
  return sample(shape, "float64", seed)


def first(x):
  """Channels-last to channels-first."""
  return np.moveaxis(np.asarray(x), -1, 1)


def grad(f, x):
  return jax.grad(lambda x: f(x).sum())(jnp.asarray(x))


def flax_layer(layer, x, **arguments):
  """What a layer of flax with its initial parameters gives, and the collections that it updates."""
  with jax.numpy_dtype_promotion("standard"):
    return layer.apply(layer.init(jax.random.key(0), x), x, mutable=["batch_stats"], **arguments)


def torch_grad(torch, f, x):
  x = torch.tensor(np.asarray(x), requires_grad=True)
  f(x).sum().backward()
  return x.grad


# Pooling -------------------------------------------------------------------------------------------------------------


@row("pool-layout", "torch")
def pool_layout(torch):
  x = image()
  want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), 2, 1)
  close(jaxdnn.max_pool(first(x), (2, 2), layout="NCHW"), want)
  close(first(jaxdnn.max_pool(x, (2, 2))), want)


@row("pool-stride", "torch")
def pool_stride(torch):
  x = image()
  want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), (2, 3))
  close(first(jaxdnn.max_pool(x, (2, 3), stride=(2, 3))), want)
  np.testing.assert_array_equal(
    jaxdnn.max_pool(x, (2, 3)), lax.reduce_window(x, -np.inf, lax.max, (1, 2, 3, 1), (1, 1, 1, 1), "VALID")
  )


@row("pool-same", "torch")
def pool_same(torch):
  x = image()
  for padding in ("SAME", "SAME_LOWER"):
    want = lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), padding)
    np.testing.assert_array_equal(jaxdnn.max_pool(x, (2, 2), stride=2, padding=padding), want)
  want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), 3, 2, padding=1)
  close(first(jaxdnn.max_pool(x, (3, 3), stride=2, padding=1)), want)


@row("pool-average-padding", "torch")
def pool_average_padding(torch):
  x = image()
  for counts in (True, False):
    want = torch.nn.functional.avg_pool2d(torch.tensor(first(x)), 3, 2, padding=1, count_include_pad=counts)
    close(first(jaxdnn.avg_pool(x, (3, 3), stride=2, padding=1, count_include_pad=counts)), want)


@row("pool-average-nothing", "flax.linen")
def pool_average_nothing(linen):
  x, arguments = jnp.ones((1, 3, 1)), dict(padding=((2, 0),), count_include_pad=False)
  assert np.isnan(linen.avg_pool(x, (2,), **arguments)[0, 0, 0])
  np.testing.assert_array_equal(jaxdnn.avg_pool(x, (2,), **arguments).ravel(), [0, 1, 1, 1])


@row("pool-max-padding", "flax.linen")
def pool_max_padding(linen):
  x = -np.abs(image()) - 1
  np.testing.assert_array_equal(jaxdnn.max_pool(x, (3, 3), padding="SAME"), linen.max_pool(x, (3, 3), padding="SAME"))


@row("pool-ceil", "torch")
def pool_ceil(torch):
  x = image((2, 8, 7, 3))
  for window, stride, padding in ((3, 2, 0), (2, 3, 1), (3, 4, 1)):
    want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), window, stride, padding, ceil_mode=True)
    close(first(jaxdnn.max_pool(x, (window,) * 2, stride=stride, padding=padding, ceil_mode=True)), want)
    want = torch.nn.functional.avg_pool2d(torch.tensor(first(x)), window, stride, padding, ceil_mode=True)
    close(first(jaxdnn.avg_pool(x, (window,) * 2, stride=stride, padding=padding, ceil_mode=True)), want)


@row("pool-tie", "torch")
def pool_tie(torch):
  x = np.ones((1, 4, 1))
  np.testing.assert_array_equal(grad(lambda x: jaxdnn.max_pool(x, (4,)), x).ravel(), [1, 0, 0, 0])
  close(torch_grad(torch, lambda x: torch.nn.functional.max_pool1d(x, 4), first(x)).ravel(), [1, 0, 0, 0])
  np.testing.assert_array_equal(grad(jnp.max, x).ravel(), [0.25] * 4)


@row("pool-nan", "torch")
def pool_nan(torch):
  x = np.array([1.0, np.nan, 2.0]).reshape(1, 3, 1)
  assert np.isnan(jaxdnn.max_pool(x, (3,))).all()
  np.testing.assert_array_equal(grad(lambda x: jaxdnn.max_pool(x, (3,)), x).ravel(), [0, 1, 0])
  close(torch_grad(torch, lambda x: torch.nn.functional.max_pool1d(x, 3), first(x)).ravel(), [0, 1, 0])


@row("pool-dilation", "torch")
def pool_dilation(torch):
  x = image()
  want = torch_grad(torch, lambda x: torch.nn.functional.max_pool2d(x, 3, 1, dilation=2), first(x))
  close(first(grad(lambda x: jaxdnn.max_pool(x, (3, 3), dilation=2), x)), want)


@row("pool-indices", "torch")
def pool_indices(torch):
  x = image()
  _, want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), 3, 2, padding=1, return_indices=True)
  _, got = jaxdnn.max_pool(x, (3, 3), stride=2, padding=1, return_indices=True)
  np.testing.assert_array_equal(first(got), want)


@row("pool-unpool", "torch")
def pool_unpool(torch):
  x = image()
  y, indices = jaxdnn.max_pool(x, (2, 2), stride=2, return_indices=True)
  got = jaxdnn.max_unpool(y, indices, (2, 2), stride=2, extent=(7, 6))
  want = torch.nn.functional.max_unpool2d(
    torch.tensor(first(y)), torch.tensor(first(indices).astype(np.int64)), 2, 2, output_size=(7, 6)
  )
  close(first(got), want)


@row("pool-adaptive", "torch")
def pool_adaptive(torch):
  x = image()
  for size in ((3, 4), (1, 1), (7, 5)):
    for kind in ("avg", "max"):
      want = getattr(torch.nn.functional, f"adaptive_{kind}_pool2d")(torch.tensor(first(x)), size)
      close(first(getattr(jaxdnn, f"adaptive_{kind}_pool")(x, size)), want)


@row("pool-divisor", "torch")
def pool_divisor(torch):
  x = image()
  want = torch.nn.functional.avg_pool2d(torch.tensor(first(x)), 3, 1, padding=1, divisor_override=5)
  close(first(jaxdnn.avg_pool(x, (3, 3), padding=1, divisor_override=5)), want)


@row("pool-power", "torch")
def pool_power(torch):
  x = image()
  for power, data in ((2, x), (4, x), (3, np.abs(x))):
    want = torch.nn.functional.lp_pool2d(torch.tensor(first(data)), power, 2, 1)
    close(first(jaxdnn.lp_pool(data, (2, 2), power=power)), want)


# Softmax and losses --------------------------------------------------------------------------------------------------


@row("softmax-axis")
def softmax_axis():
  x = image((2, 3, 4, 5))
  for axis in (1, (1, 2, 3)):
    close(jaxdnn.softmax(x, axis), jax.nn.softmax(jnp.asarray(x), axis))


@row("softmax-masked-row", "torch")
def softmax_masked_row(torch):
  x, nothing = jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
  np.testing.assert_array_equal(jaxdnn.softmax(x, where=nothing), 0)
  assert np.isnan(torch.full((2, 3), -np.inf).softmax(-1)).all()
  assert np.isnan(jaxdnn.softmax(x, where=nothing, fully_masked="nan")).all()
  close(jaxdnn.softmax(x, where=nothing, fully_masked="uniform"), jax.nn.softmax(jnp.where(nothing, x, -1e30)))


@row("softmax-infinite-row", "torch")
def softmax_infinite_row(torch):
  x = np.array([[-np.inf, -np.inf], [np.inf, 1.0], [-np.inf, 1.0]])
  np.testing.assert_array_equal(jaxdnn.softmax(x), jax.nn.softmax(jnp.asarray(x)))
  np.testing.assert_array_equal(jaxdnn.softmax(x), torch.tensor(x).softmax(-1))


@row("logsumexp-axis")
def logsumexp_axis():
  x = jnp.asarray(image((3, 4)))
  close(jaxdnn.logsumexp(x, tuple(range(x.ndim))), jax.nn.logsumexp(x))
  close(jaxdnn.logsumexp(x), jax.nn.logsumexp(x, axis=-1))


def losses():
  return sample((6, 5, 3), "float64"), np.random.default_rng(0).integers(0, 5, (6, 3))


@row("loss-axis", "torch")
def loss_axis(torch):
  x, labels = losses()
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels))
  close(jaxdnn.cross_entropy(x, labels, axis=1), want)


@row("loss-reduction", "torch")
def loss_reduction(torch):
  x, labels = losses()
  for reduction in ("mean", "sum", "none"):
    want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), reduction=reduction)
    close(jaxdnn.cross_entropy(x, labels, axis=1, reduction=reduction), want)


@row("loss-ignore", "torch")
def loss_ignore(torch):
  x, labels = losses()
  labels[::2] = -100
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels))
  close(jaxdnn.cross_entropy(x, labels, axis=1, ignore_index=-100), want)
  assert np.isnan(jaxdnn.cross_entropy(x, labels, axis=1))


@row("loss-weight", "torch")
def loss_weight(torch):
  (x, labels), weight = losses(), np.array([1.0, 2.0, 0.5, 0.0, 3.0])
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), weight=torch.tensor(weight))
  close(jaxdnn.cross_entropy(x, labels, axis=1, weight=weight), want)


@row("loss-smoothing", "torch")
def loss_smoothing(torch):
  x, labels = losses()
  want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), label_smoothing=0.1)
  close(jaxdnn.cross_entropy(x, labels, axis=1, label_smoothing=0.1), want)


# Normalization -------------------------------------------------------------------------------------------------------


@row("batch-momentum", "torch")
def batch_momentum(torch):
  x = image((8, 5, 5, 3))
  layer = torch.nn.BatchNorm2d(3, dtype=torch.float64)
  y = layer(torch.tensor(first(x)))
  got, stats = jaxdnn.batch_norm(x)
  mean, var = jaxdnn.update_running_stats((np.zeros(3), np.ones(3)), stats, momentum=0.1, convention="torch")
  close(first(got), y)
  close(mean, layer.running_mean)
  close(var, layer.running_var)


@row("batch-variance", "flax.linen")
def batch_variance(linen):
  x = image((8, 5, 5, 3))
  layer = linen.BatchNorm(use_running_average=False, momentum=0.99, dtype="float64", param_dtype="float64")
  y, updated = flax_layer(layer, x)
  got, stats = jaxdnn.batch_norm(x)
  mean, var = jaxdnn.update_running_stats((np.zeros(3), np.ones(3)), stats, momentum=0.99, convention="flax")
  close(got, y, 1e-6)
  close(mean, updated["batch_stats"]["mean"], 1e-6)
  close(var, updated["batch_stats"]["var"], 1e-6)


@row("batch-one-value", "torch")
def batch_one_value(torch):
  y, stats = jaxdnn.batch_norm(jnp.array([[5.0, 7.0]]), bias=jnp.array([1.0, 2.0]))
  np.testing.assert_array_equal(y, [[1, 2]])
  np.testing.assert_array_equal(stats.var, 0)
  with pytest.raises(ValueError):
    torch.nn.BatchNorm1d(2)(torch.ones(1, 2))


@row("batch-mask", "flax.linen")
def batch_mask(linen):
  x, mask = image((8, 3)), np.arange(8)[:, None] % 3 != 0
  layer = linen.BatchNorm(use_running_average=False, dtype="float64", param_dtype="float64")
  want, _ = flax_layer(layer, x, mask=jnp.asarray(mask))
  got, stats = jaxdnn.batch_norm(x, where=jnp.asarray(mask))
  close(np.asarray(got)[mask[:, 0]], np.asarray(want)[mask[:, 0]], 1e-6)
  close(stats.mean, x[mask[:, 0]].mean(0))


@row("batch-per-activation")
def batch_per_activation():
  x = image((8, 2, 3, 4))
  got, _ = jaxdnn.batch_norm(x, axis=(1, 2, 3))
  close(got, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))


@row("layer-epsilon", "torch")
def layer_epsilon(torch):
  x = 1e-3 * image((3, 6))
  close(jaxdnn.layer_norm(x), torch.nn.functional.layer_norm(torch.tensor(x), (6,)))
  linen = pytest.importorskip("flax.linen")
  layer = linen.LayerNorm(dtype="float64", param_dtype="float64")
  close(jaxdnn.layer_norm(x, epsilon=1e-6), flax_layer(layer, x)[0], 1e-6)


@row("layer-zero-centred")
def layer_zero_centred():
  x, scale = image((3, 6)), image((6,), 1)
  close(jaxdnn.layer_norm(x, scale, zero_centered=True), jaxdnn.layer_norm(x, 1 + scale))


@row("rms-epsilon", "torch")
def rms_epsilon(torch):
  x = 1e-3 * image((3, 6))
  close(jaxdnn.rms_norm(x, epsilon=jnp.finfo(x.dtype).eps), torch.nn.functional.rms_norm(torch.tensor(x), (6,)))
  linen = pytest.importorskip("flax.linen")
  layer = linen.RMSNorm(dtype="float64", param_dtype="float64")
  close(jaxdnn.rms_norm(x), flax_layer(layer, x)[0], 1e-6)


@row("group-epsilon", "flax.linen")
def group_epsilon(linen):
  x = 1e-3 * image((3, 5, 6))
  layer = linen.GroupNorm(num_groups=3, dtype="float64", param_dtype="float64")
  close(jaxdnn.group_norm(x, 3, epsilon=1e-6), flax_layer(layer, x)[0], 1e-6)


@row("group-count", "flax.linen")
def group_count(linen):
  x = image((3, 5, 64))
  layer = linen.GroupNorm(dtype="float64", param_dtype="float64")
  close(jaxdnn.group_norm(x, 32, epsilon=1e-6), flax_layer(layer, x)[0], 1e-6)


@row("group-axis", "torch")
def group_axis(torch):
  x = image((3, 6, 5))
  close(jaxdnn.group_norm(x, 3, axis=1), torch.nn.functional.group_norm(torch.tensor(x), 3))


@row("instance", "torch")
def instance(torch):
  x = image((3, 6, 5))
  close(jaxdnn.instance_norm(x, axis=1), torch.nn.functional.instance_norm(torch.tensor(x)))
  close(jaxdnn.instance_norm(x, axis=1), jaxdnn.group_norm(x, 6, axis=1))


# Local response normalization ----------------------------------------------------------------------------------------


@row("lrn-defaults", "torch")
def lrn_defaults(torch):
  x = 10 * image()
  want = torch.nn.functional.local_response_norm(torch.tensor(first(x)), 5)
  close(first(jaxdnn.local_response_norm(x, 5, k=1.0)), want)


@row("lrn-even", "torch")
def lrn_even(torch):
  x = 10 * image()
  got = jaxdnn.local_response_norm(x, 4, k=1.0, padding="SAME_LOWER")
  close(first(got), torch.nn.functional.local_response_norm(torch.tensor(first(x)), 4))


@row("lrn-borders", "torch")
def lrn_borders(torch):
  x = 10 * image((2, 3, 3, 2))
  want = torch.nn.functional.local_response_norm(torch.tensor(first(x)), 5)
  close(first(jaxdnn.local_response_norm(x, 5, k=1.0)), want)


# Activations ---------------------------------------------------------------------------------------------------------

EDGES = np.array([-7.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 7.0])


@row("gelu", "torch")
def gelu(torch):
  close(jaxdnn.gelu(EDGES), jax.nn.gelu(EDGES))
  close(jaxdnn.gelu(EDGES, approximate=False), torch.nn.functional.gelu(torch.tensor(EDGES)))


@row("relu-zero", "torch")
def relu_zero(torch):
  close(grad(jaxdnn.relu, EDGES), torch_grad(torch, torch.relu, EDGES))
  assert np.isnan(jaxdnn.relu(jnp.nan)) and torch.relu(torch.tensor(torch.nan)).isnan()


@row("clipped-relu", "torch")
def clipped_relu(torch):
  close(grad(jaxdnn.relu6, EDGES), grad(jax.nn.relu6, EDGES))
  close(grad(jaxdnn.relu6, EDGES), torch_grad(torch, torch.nn.functional.relu6, EDGES))


@row("leaky-relu-zero", "torch")
def leaky_relu_zero(torch):
  close(grad(jaxdnn.leaky_relu, EDGES), grad(jax.nn.leaky_relu, EDGES))
  want = torch_grad(torch, torch.nn.functional.leaky_relu, EDGES)
  assert want[4] == 0.01
  close(np.delete(grad(jaxdnn.leaky_relu, EDGES), 4), np.delete(want, 4))


@row("elu-zero", "torch")
def elu_zero(torch):
  ours = grad(lambda x: jaxdnn.elu(x, 2.0), EDGES)
  close(ours, grad(lambda x: jax.nn.elu(x, 2.0), EDGES))
  close(ours, torch_grad(torch, lambda x: torch.nn.functional.elu(x, 2.0), EDGES))


@row("softplus", "torch")
def softplus(torch):
  close(jaxdnn.softplus(EDGES), jax.nn.softplus(EDGES))
  close(jaxdnn.softplus(EDGES, 0.5), torch.nn.functional.softplus(torch.tensor(EDGES), 0.5))


@row("silu-beta")
def silu_beta():
  close(jaxdnn.silu(EDGES), jax.nn.silu(EDGES))
  close(jaxdnn.silu(EDGES, 2.0), EDGES * exact(jax.nn.sigmoid(2 * EDGES)))


@row("hard-sigmoid", "torch")
def hard_sigmoid(torch):
  close(jaxdnn.hard_sigmoid(EDGES), jax.nn.hard_sigmoid(EDGES))
  close(jaxdnn.hard_sigmoid(EDGES), torch.nn.functional.hardsigmoid(torch.tensor(EDGES)))


@row("hard-tanh", "torch")
def hard_tanh(torch):
  close(grad(jaxdnn.hard_tanh, EDGES), grad(jax.nn.hard_tanh, EDGES))
  want = torch_grad(torch, torch.nn.functional.hardtanh, EDGES)
  np.testing.assert_array_equal(want[[2, 6]], 0)


@row("glu-gate", "torch")
def glu_gate(torch):
  x = image((3, 8))
  close(jaxdnn.glu(x), jax.nn.glu(jnp.asarray(x)))
  close(jaxdnn.glu(x), torch.nn.functional.glu(torch.tensor(x)))
  a, b = jnp.split(jnp.asarray(x), 2, axis=-1)
  close(jaxdnn.swiglu(x), jax.nn.silu(a) * b)
  close(jaxdnn.glu(x, activation="silu"), a * jax.nn.silu(b))


# Transforms ----------------------------------------------------------------------------------------------------------


@row("transform-padding", "torch")
def transform_padding(torch):
  x = image((3, 4, 5))
  close(jaxdnn.transform(x, padding=((1, 2), (0, 0), (3, 0))), jnp.pad(x, ((1, 2), (0, 0), (3, 0))))
  want = torch.nn.functional.pad(torch.tensor(x), (3, -1, 0, 0, 1, 2))
  close(jaxdnn.transform(x, padding=((1, 2), (0, 0), (3, -1))), want)


@row("transform-rounding", "torch")
def transform_rounding(torch):
  x = np.array([0.5, 1.5, 2.7, -0.5, -1.5, -2.7])
  np.testing.assert_array_equal(jaxdnn.transform(x, dtype="int32"), [0, 2, 3, 0, -2, -3])
  np.testing.assert_array_equal(jaxdnn.transform(jnp.trunc(x), dtype="int32"), jnp.asarray(x).astype("int32"))
  np.testing.assert_array_equal(jaxdnn.transform(jnp.trunc(x), dtype="int32"), torch.tensor(x).to(torch.int32))


@row("transform-accumulate")
def transform_accumulate():
  x, y = image((3, 4)), image((4, 3), 1)
  close(jaxdnn.transform(x, y, permutation=(1, 0), alpha=2, beta=3), 2 * x.T + 3 * y)
  close(jaxdnn.transform(x, np.full((4, 3), np.nan), permutation=(1, 0), alpha=2), 2 * x.T)


@row("im2col-order", "torch")
def im2col_order(torch):
  x, f = image(), image((3, 2, 4, 5), 1)
  want = lax.conv_general_dilated(x, f, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
  close(jaxdnn.im2col(x, (3, 2)) @ f.reshape(-1, 5), want)
  cols = jaxdnn.im2col(x, (3, 2), order="channels_window")
  want = torch.nn.functional.unfold(torch.tensor(first(x)), (3, 2))
  close(cols.reshape(2, -1, cols.shape[-1]).swapaxes(1, 2), want)


@row("col2im-sum", "torch")
def col2im_sum(torch):
  cols = image((2, 5, 5, 4 * 6))
  want = torch.nn.functional.fold(torch.tensor(cols.reshape(2, 25, -1).swapaxes(1, 2)), (7, 6), (3, 2))
  close(first(jaxdnn.col2im(cols, (7, 6), (3, 2), order="channels_window")), want)


# Convolution ---------------------------------------------------------------------------------------------------------


@row("conv-flip", "torch")
def conv_flip(torch):
  x, f = image(), image((3, 2, 4, 5), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)))
  close(first(jaxdnn.conv(x, f)), want)
  close(jaxdnn.conv(x, f), lax.conv_general_dilated(x, f, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")))


@row("conv-layout", "torch")
def conv_layout(torch):
  x, f = image(), image((5, 4, 3, 2), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f))
  close(jaxdnn.conv(first(x), f, dimension_numbers=("NCHW", "OIHW", "NCHW")), want)
  close(jaxdnn.conv_general_dilated(first(x), f, (1, 1), "VALID"), want)


@row("conv-same", "torch")
def conv_same(torch):
  x, f = image(), image((3, 2, 4, 5), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), padding="same")
  close(first(jaxdnn.conv(x, f, padding="SAME")), want)
  for padding in ("SAME", "SAME_LOWER"):
    want = lax.conv_general_dilated(x, f, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    close(jaxdnn.conv(x, f, stride=2, padding=padding), want)


@row("conv-transpose-kernel", "torch")
def conv_transpose_kernel(torch):
  # PyTorch's filter is [in, out, ...]: that of the convolution which maps `out` channels to `in`.
  x, f = image(), image((3, 3, 5, 4), 1)
  want = torch.nn.functional.conv_transpose2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), stride=2)
  close(first(jaxdnn.conv_transpose(x, f, (2, 2), "VALID", transpose_kernel=True)), want)
  f = image((3, 3, 4, 5), 1)
  close(jaxdnn.conv_transpose(x, f, (2, 2), "SAME"), lax.conv_transpose(x, f, (2, 2), "SAME"))


@row("conv-transpose-padding", "torch")
def conv_transpose_padding(torch):
  x, f = image(), image((3, 3, 5, 4), 1)
  want = torch.nn.functional.conv_transpose2d(
    torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), stride=2, padding=1
  )
  got = jaxdnn.conv_transpose(x, f, (2, 2), [(1, 1)] * 2, transpose_kernel=True, use_consistent_padding=True)
  close(first(got), want)


@row("conv-groups", "torch")
def conv_groups(torch):
  x, f = image(), image((3, 3, 1, 8), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), groups=4)
  close(first(jaxdnn.conv(x, f, groups=4)), want)


@row("conv-precision")
def conv_precision():
  x, f = image().astype("float32"), image((3, 2, 4, 5), 1).astype("float32")
  want = lax.conv_general_dilated(
    x.astype("float64"), f.astype("float64"), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  close(jaxdnn.conv(x, f, precision="highest"), want, 1e-5)


# The rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
  ROWS[name]()


def test_every_row_has_a_test():
  names = re.findall(r"^\| ([a-z0-9-]+) \|", DOCUMENT.read_text(), re.MULTILINE)
  documented = sorted(name for name in names if name not in ("point", "---"))
  assert documented == sorted([*ROWS, *WITHOUT_A_TEST])
