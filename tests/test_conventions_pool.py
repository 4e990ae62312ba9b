"""Rows of docs/conventions.md: pooling and local response normalization."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdnn
from conventions import close, first, grad, image, needs, torch_grad

# Pooling --------------------------------------------------------------------------------------------------------------


@needs("torch")
def test_pool_layout(torch):
  x = image()
  want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), 2, 1)
  close(jaxdnn.max_pool(first(x), (2, 2), layout="NCHW"), want)
  close(first(jaxdnn.max_pool(x, (2, 2))), want)


@needs("torch")
def test_pool_stride(torch):
  x = image()
  want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), (2, 3))
  close(first(jaxdnn.max_pool(x, (2, 3), stride=(2, 3))), want)
  np.testing.assert_array_equal(
    jaxdnn.max_pool(x, (2, 3)), lax.reduce_window(x, -np.inf, lax.max, (1, 2, 3, 1), (1, 1, 1, 1), "VALID")
  )


@needs("torch")
def test_pool_same(torch):
  x = image()
  for padding in ("SAME", "SAME_LOWER"):
    want = lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), padding)
    np.testing.assert_array_equal(jaxdnn.max_pool(x, (2, 2), stride=2, padding=padding), want)
  want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), 3, 2, padding=1)
  close(first(jaxdnn.max_pool(x, (3, 3), stride=2, padding=1)), want)


@needs("torch")
def test_pool_average_padding(torch):
  x = image()
  for counts in (True, False):
    want = torch.nn.functional.avg_pool2d(torch.tensor(first(x)), 3, 2, padding=1, count_include_pad=counts)
    close(first(jaxdnn.avg_pool(x, (3, 3), stride=2, padding=1, count_include_pad=counts)), want)


@needs("flax.linen")
def test_pool_average_nothing(linen):
  x, arguments = jnp.ones((1, 3, 1)), dict(padding=((2, 0),), count_include_pad=False)
  assert np.isnan(linen.avg_pool(x, (2,), **arguments)[0, 0, 0])
  np.testing.assert_array_equal(jaxdnn.avg_pool(x, (2,), **arguments).ravel(), [0, 1, 1, 1])


@needs("flax.linen")
def test_pool_max_padding(linen):
  x = -np.abs(image()) - 1
  np.testing.assert_array_equal(jaxdnn.max_pool(x, (3, 3), padding="SAME"), linen.max_pool(x, (3, 3), padding="SAME"))


@needs("torch")
def test_pool_ceil(torch):
  x = image((2, 8, 7, 3))
  for window, stride, padding in ((3, 2, 0), (2, 3, 1), (3, 4, 1)):
    want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), window, stride, padding, ceil_mode=True)
    close(first(jaxdnn.max_pool(x, (window,) * 2, stride=stride, padding=padding, ceil_mode=True)), want)
    want = torch.nn.functional.avg_pool2d(torch.tensor(first(x)), window, stride, padding, ceil_mode=True)
    close(first(jaxdnn.avg_pool(x, (window,) * 2, stride=stride, padding=padding, ceil_mode=True)), want)


@needs("torch")
def test_pool_tie(torch):
  x = np.ones((1, 4, 1))
  np.testing.assert_array_equal(grad(lambda x: jaxdnn.max_pool(x, (4,)), x).ravel(), [1, 0, 0, 0])
  close(torch_grad(torch, lambda x: torch.nn.functional.max_pool1d(x, 4), first(x)).ravel(), [1, 0, 0, 0])
  np.testing.assert_array_equal(grad(jnp.max, x).ravel(), [0.25] * 4)


@needs("torch")
def test_pool_nan(torch):
  x = np.array([1.0, np.nan, 2.0]).reshape(1, 3, 1)
  assert np.isnan(jaxdnn.max_pool(x, (3,))).all()
  np.testing.assert_array_equal(grad(lambda x: jaxdnn.max_pool(x, (3,)), x).ravel(), [0, 1, 0])
  close(torch_grad(torch, lambda x: torch.nn.functional.max_pool1d(x, 3), first(x)).ravel(), [0, 1, 0])


@needs("torch")
def test_pool_dilation(torch):
  x = image()
  want = torch_grad(torch, lambda x: torch.nn.functional.max_pool2d(x, 3, 1, dilation=2), first(x))
  close(first(grad(lambda x: jaxdnn.max_pool(x, (3, 3), dilation=2), x)), want)


@needs("torch")
def test_pool_indices(torch):
  x = image()
  _, want = torch.nn.functional.max_pool2d(torch.tensor(first(x)), 3, 2, padding=1, return_indices=True)
  _, got = jaxdnn.max_pool(x, (3, 3), stride=2, padding=1, return_indices=True)
  np.testing.assert_array_equal(first(got), want)


@needs("torch")
def test_pool_unpool(torch):
  x = image()
  y, indices = jaxdnn.max_pool(x, (2, 2), stride=2, return_indices=True)
  got = jaxdnn.max_unpool(y, indices, (2, 2), stride=2, extent=(7, 6))
  want = torch.nn.functional.max_unpool2d(
    torch.tensor(first(y)), torch.tensor(first(indices).astype(np.int64)), 2, 2, output_size=(7, 6)
  )
  close(first(got), want)


@needs("torch")
def test_pool_adaptive(torch):
  x = image()
  for size in ((3, 4), (1, 1), (7, 5)):
    for kind in ("avg", "max"):
      want = getattr(torch.nn.functional, f"adaptive_{kind}_pool2d")(torch.tensor(first(x)), size)
      close(first(getattr(jaxdnn, f"adaptive_{kind}_pool")(x, size)), want)


@needs("torch")
def test_pool_divisor(torch):
  x = image()
  want = torch.nn.functional.avg_pool2d(torch.tensor(first(x)), 3, 1, padding=1, divisor_override=5)
  close(first(jaxdnn.avg_pool(x, (3, 3), padding=1, divisor_override=5)), want)


@needs("torch")
def test_pool_power(torch):
  x = image()
  for power, data in ((2, x), (4, x), (3, np.abs(x))):
    want = torch.nn.functional.lp_pool2d(torch.tensor(first(data)), power, 2, 1)
    close(first(jaxdnn.lp_pool(data, (2, 2), power=power)), want)


@needs("torch")
def test_pool_power_ceil(torch):
  """Of seven lines two at a time, the last window has half of its four cells: torch doubles its sum."""
  x = image((2, 7, 6, 4))
  want = torch.nn.functional.lp_pool2d(torch.tensor(first(x)), 2, 2, ceil_mode=True)
  ours = first(jaxdnn.lp_pool(x, (2, 2), stride=2, power=2, ceil_mode=True))
  inside = np.where(np.arange(4) < 3, 1.0, 2**0.5)[:, None]
  close(ours * inside, want)


def test_pool_mask():
  x, where = image(), np.random.default_rng(0).random((2, 7, 6, 1)) < 0.7
  window = functools.partial(
    lax.reduce_window, window_dimensions=(1, 3, 3, 1), window_strides=(1, 2, 2, 1), padding="SAME"
  )
  total, count = (window(np.where(where, a, 0.0), 0.0, lax.add) for a in (x, np.ones_like(x)))
  options = dict(stride=2, padding="SAME", where=where)
  close(jaxdnn.avg_pool(x, (3, 3), count_include_pad=False, **options), total / np.maximum(count, 1))
  largest = window(np.where(where, x, -np.inf), -np.inf, lax.max)
  np.testing.assert_array_equal(jaxdnn.max_pool(x, (3, 3), **options), largest)


# Local response normalization -----------------------------------------------------------------------------------------


@needs("torch")
def test_lrn_defaults(torch):
  x = 10 * image()
  want = torch.nn.functional.local_response_norm(torch.tensor(first(x)), 5)
  close(first(jaxdnn.local_response_norm(x, 5, k=1.0)), want)


@needs("torch")
def test_lrn_even(torch):
  x = 10 * image()
  got = jaxdnn.local_response_norm(x, 4, k=1.0, padding="SAME_LOWER")
  close(first(got), torch.nn.functional.local_response_norm(torch.tensor(first(x)), 4))


@needs("torch")
def test_lrn_borders(torch):
  x = 10 * image((2, 3, 3, 2))
  want = torch.nn.functional.local_response_norm(torch.tensor(first(x)), 5)
  close(first(jaxdnn.local_response_norm(x, 5, k=1.0)), want)
