"""docs/conventions.md row by row, here activations, dropout, transforms and convolution, against the other library."""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdnn
from conventions import close, first, grad, image, needs, torch_grad
from numerics import exact

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "conventions.md"
# Rows about libraries that no test can call: cuDNN's, TensorFlow's and layers' conventions, settled elsewhere.
WITHOUT_A_TEST = {"batch-epsilon", "batch-saved", "lrn-alpha", "lrn-radius", "lrn-divisive", "loss-z", "norm-variance"}


def test_every_row_has_a_test():
  names = re.findall(r"^\| ([a-z0-9-]+) \|", DOCUMENT.read_text(), re.MULTILINE)
  documented = sorted(name for name in names if name not in ("point", "---"))
  tested = set(WITHOUT_A_TEST)
  for path in pathlib.Path(__file__).parent.glob("test_conventions*.py"):
    tested |= {name.replace("_", "-") for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)}
  assert documented == sorted(tested - {"every-row-has-a-test"})


# Activations ----------------------------------------------------------------------------------------------------------


EDGES = np.array([-7.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 7.0])


@needs("torch")
def test_gelu(torch):
  close(jaxdnn.gelu(EDGES), jax.nn.gelu(EDGES))
  close(jaxdnn.gelu(EDGES, approximate=False), torch.nn.functional.gelu(torch.tensor(EDGES)))


@needs("torch")
def test_relu_zero(torch):
  close(grad(jaxdnn.relu, EDGES), torch_grad(torch, torch.relu, EDGES))
  assert np.isnan(jaxdnn.relu(jnp.nan)) and torch.relu(torch.tensor(torch.nan)).isnan()


@needs("torch")
def test_clipped_relu(torch):
  close(grad(jaxdnn.relu6, EDGES), grad(jax.nn.relu6, EDGES))
  close(grad(jaxdnn.relu6, EDGES), torch_grad(torch, torch.nn.functional.relu6, EDGES))


@needs("torch")
def test_leaky_relu_zero(torch):
  close(grad(jaxdnn.leaky_relu, EDGES), grad(jax.nn.leaky_relu, EDGES))
  want = torch_grad(torch, torch.nn.functional.leaky_relu, EDGES)
  assert want[4] == 0.01
  close(np.delete(grad(jaxdnn.leaky_relu, EDGES), 4), np.delete(want, 4))


@needs("torch")
def test_elu_zero(torch):
  ours = grad(lambda x: jaxdnn.elu(x, 2.0), EDGES)
  close(ours, grad(lambda x: jax.nn.elu(x, 2.0), EDGES))
  close(ours, torch_grad(torch, lambda x: torch.nn.functional.elu(x, 2.0), EDGES))


@needs("torch")
def test_softplus(torch):
  close(jaxdnn.softplus(EDGES), jax.nn.softplus(EDGES))
  close(jaxdnn.softplus(EDGES, 0.5), torch.nn.functional.softplus(torch.tensor(EDGES), 0.5))


def test_silu_beta():
  close(jaxdnn.silu(EDGES), jax.nn.silu(EDGES))
  close(jaxdnn.silu(EDGES, 2.0), EDGES * exact(jax.nn.sigmoid(2 * EDGES)))


@needs("torch")
def test_hard_sigmoid(torch):
  close(jaxdnn.hard_sigmoid(EDGES), jax.nn.hard_sigmoid(EDGES))
  close(jaxdnn.hard_sigmoid(EDGES), torch.nn.functional.hardsigmoid(torch.tensor(EDGES)))


@needs("torch")
def test_hard_tanh(torch):
  close(grad(jaxdnn.hard_tanh, EDGES), grad(jax.nn.hard_tanh, EDGES))
  want = torch_grad(torch, torch.nn.functional.hardtanh, EDGES)
  np.testing.assert_array_equal(want[[2, 6]], 0)


@needs("torch")
def test_glu_gate(torch):
  x = image((3, 8))
  close(jaxdnn.glu(x), jax.nn.glu(jnp.asarray(x)))
  close(jaxdnn.glu(x), torch.nn.functional.glu(torch.tensor(x)))
  a, b = jnp.split(jnp.asarray(x), 2, axis=-1)
  close(jaxdnn.swiglu(x), jax.nn.silu(a) * b)
  close(jaxdnn.glu(x, activation="silu"), a * jax.nn.silu(b))


# Dropout --------------------------------------------------------------------------------------------------------------


@needs("flax.linen")
def test_dropout_rate(linen):
  x, key = jnp.ones(100_000), jax.random.key(0)
  ours = jaxdnn.dropout(x, 0.25, key)
  theirs = linen.Dropout(0.25, deterministic=False).apply({}, x, rngs={"dropout": key})
  for y in (ours, theirs):
    assert abs(np.mean(np.asarray(y) == 0) - 0.25) < 0.01


@needs("torch")
def test_dropout_scale(torch):
  values = np.unique(jaxdnn.dropout(jnp.ones(1000), 0.2, jax.random.key(0)))
  close(values, [0, 1 / 0.8])
  close(torch.nn.functional.dropout(torch.ones(1000, dtype=torch.float64), 0.2).unique(), values)
  close(jaxdnn.dropout(jnp.ones(5), 0.2, jax.random.key(0), deterministic=True), np.ones(5))


@needs("torch")
def test_dropout_one(torch):
  x = np.array([1.0, np.nan])
  np.testing.assert_array_equal(jaxdnn.dropout(x, 1.0, jax.random.key(0)), [0, 0])
  assert torch.nn.functional.dropout(torch.tensor(x), 1.0).isnan().tolist() == [False, True]


def test_dropout_key():
  x, key = jnp.ones(1000), jax.random.key(3)
  np.testing.assert_array_equal(jaxdnn.dropout(x, 0.5, key), jaxdnn.dropout(x, 0.5, key))
  np.testing.assert_array_equal(
    jaxdnn.dropout(x, 0.5, key) > 0, jaxdnn.dropout(x.astype("bfloat16"), 0.5, key).reshape(10, 100).ravel() > 0
  )


def test_dropout_broadcast():
  y = np.asarray(jaxdnn.dropout(jnp.ones((4, 3, 3, 8)), 0.5, jax.random.key(0), broadcast_dims=(1, 2)))
  np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1, :1], y.shape))
  assert 0 < (y > 0).mean() < 1


# Transforms -----------------------------------------------------------------------------------------------------------


@needs("torch")
def test_transform_padding(torch):
  x = image((3, 4, 5))
  close(jaxdnn.transform(x, padding=((1, 2), (0, 0), (3, 0))), jnp.pad(x, ((1, 2), (0, 0), (3, 0))))
  want = torch.nn.functional.pad(torch.tensor(x), (3, -1, 0, 0, 1, 2))
  close(jaxdnn.transform(x, padding=((1, 2), (0, 0), (3, -1))), want)


@needs("torch")
def test_transform_rounding(torch):
  x = np.array([0.5, 1.5, 2.7, -0.5, -1.5, -2.7])
  np.testing.assert_array_equal(jaxdnn.transform(x, dtype="int32"), [0, 2, 3, 0, -2, -3])
  np.testing.assert_array_equal(jaxdnn.transform(jnp.trunc(x), dtype="int32"), jnp.asarray(x).astype("int32"))
  np.testing.assert_array_equal(jaxdnn.transform(jnp.trunc(x), dtype="int32"), torch.tensor(x).to(torch.int32))


def test_transform_accumulate():
  x, y = image((3, 4)), image((4, 3), 1)
  close(jaxdnn.transform(x, y, permutation=(1, 0), alpha=2, beta=3), 2 * x.T + 3 * y)
  close(jaxdnn.transform(x, np.full((4, 3), np.nan), permutation=(1, 0), alpha=2), 2 * x.T)


@needs("torch")
def test_im2col_order(torch):
  x, f = image(), image((3, 2, 4, 5), 1)
  want = lax.conv_general_dilated(x, f, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
  close(jaxdnn.im2col(x, (3, 2)) @ f.reshape(-1, 5), want)
  cols = jaxdnn.im2col(x, (3, 2), order="channels_window")
  want = torch.nn.functional.unfold(torch.tensor(first(x)), (3, 2))
  close(cols.reshape(2, -1, cols.shape[-1]).swapaxes(1, 2), want)


@needs("torch")
def test_col2im_sum(torch):
  cols = image((2, 5, 5, 4 * 6))
  want = torch.nn.functional.fold(torch.tensor(cols.reshape(2, 25, -1).swapaxes(1, 2)), (7, 6), (3, 2))
  close(first(jaxdnn.col2im(cols, (7, 6), (3, 2), order="channels_window")), want)


# Convolution ----------------------------------------------------------------------------------------------------------


@needs("torch")
def test_conv_flip(torch):
  x, f = image(), image((3, 2, 4, 5), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)))
  close(first(jaxdnn.conv(x, f)), want)
  close(jaxdnn.conv(x, f), lax.conv_general_dilated(x, f, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")))


@needs("torch")
def test_conv_layout(torch):
  x, f = image(), image((5, 4, 3, 2), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f))
  close(jaxdnn.conv(first(x), f, dimension_numbers=("NCHW", "OIHW", "NCHW")), want)
  close(jaxdnn.conv_general_dilated(first(x), f, (1, 1), "VALID"), want)


@needs("torch")
def test_conv_same(torch):
  x, f = image(), image((3, 2, 4, 5), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), padding="same")
  close(first(jaxdnn.conv(x, f, padding="SAME")), want)
  for padding in ("SAME", "SAME_LOWER"):
    want = lax.conv_general_dilated(x, f, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    close(jaxdnn.conv(x, f, stride=2, padding=padding), want)


@needs("torch")
def test_conv_padding_mode(torch):
  for rank, mode in itertools.product((1, 2, 3), ("zeros", "reflect", "replicate", "circular")):
    x, arguments = image((2, *(7, 6, 5)[:rank], 4)), dict(stride=2, padding=3, dilation=2, padding_mode=mode)
    layer = getattr(torch.nn, f"Conv{rank}d")(4, 6, 3, **arguments, dtype=torch.float64)
    f, b = (np.asarray(v.detach()) for v in (layer.weight, layer.bias))
    ours = lambda x, f=f, b=b, a=arguments: jaxdnn.conv(x, np.moveaxis(f, (1, 0), (-2, -1)), b, **a)  # noqa: E731
    theirs = lambda x, layer=layer: layer(x.movedim(-1, 1))  # noqa: E731
    close(first(ours(x)), theirs(torch.tensor(x)))
    close(grad(ours, x), torch_grad(torch, theirs, x))


@needs("flax.linen")
def test_conv_padding_strings(linen):
  for padding, dilation in itertools.product(("CIRCULAR", "REFLECT", "CAUSAL", "SAME"), (1, 2)):
    x = image((2, 8, 4)) if padding == "CAUSAL" else image((2, 8, 7, 4))
    window = (4, 3)[: x.ndim - 2]
    layer = linen.Conv(6, window, strides=2, padding=padding, kernel_dilation=dilation, dtype="float64")
    variables = layer.init(jax.random.key(0), x)
    f, b = (np.asarray(variables["params"][name], "float64") for name in ("kernel", "bias"))
    ours = jaxdnn.conv(x, f, b, stride=2, padding=padding, dilation=dilation)
    with jax.numpy_dtype_promotion("standard"):
      close(ours, layer.apply(variables, x))


@needs("torch")
def test_conv_transpose_kernel(torch):
  # PyTorch's filter is [in, out, ...]: that of the convolution which maps `out` channels to `in`.
  x, f = image(), image((3, 3, 5, 4), 1)
  want = torch.nn.functional.conv_transpose2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), stride=2)
  close(first(jaxdnn.conv_transpose(x, f, (2, 2), "VALID", transpose_kernel=True)), want)
  f = image((3, 3, 4, 5), 1)
  close(jaxdnn.conv_transpose(x, f, (2, 2), "SAME"), lax.conv_transpose(x, f, (2, 2), "SAME"))


@needs("torch")
def test_conv_transpose_padding(torch):
  x, f = image(), image((3, 3, 5, 4), 1)
  want = torch.nn.functional.conv_transpose2d(
    torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), stride=2, padding=1
  )
  got = jaxdnn.conv_transpose(x, f, (2, 2), [(1, 1)] * 2, transpose_kernel=True, use_consistent_padding=True)
  close(first(got), want)


@needs("torch")
def test_conv_groups(torch):
  x, f = image(), image((3, 3, 1, 8), 1)
  want = torch.nn.functional.conv2d(torch.tensor(first(x)), torch.tensor(f.transpose(3, 2, 0, 1)), groups=4)
  close(first(jaxdnn.conv(x, f, groups=4)), want)


def test_conv_precision():
  x, f = image().astype("float32"), image((3, 2, 4, 5), 1).astype("float32")
  want = lax.conv_general_dilated(
    x.astype("float64"), f.astype("float64"), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  close(jaxdnn.conv(x, f, precision="highest"), want, 1e-5)
