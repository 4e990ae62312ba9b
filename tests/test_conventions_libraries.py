"""docs/conventions.md row by row, here the layers for Flax, Haiku and Equinox."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

eqx, hk = pytest.importorskip("equinox"), pytest.importorskip("haiku")

import jaxdnn  # noqa: E402
from conventions import close  # noqa: E402
from jaxdnn import equinox as jeqx  # noqa: E402
from jaxdnn import haiku as jhk  # noqa: E402
from jaxdnn import linen as jnn  # noqa: E402
from layer_checks import as_users_have_it, random  # noqa: E402

assert as_users_have_it  # A fixture.


def apply(layer, *args, **options):
  return layer.apply(layer.init(jax.random.key(0), args[0]), *args, mutable=["batch_stats"], **options)


def test_layer_statistics():
  def exact(x):
    x = np.asarray(x, np.float64)
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)

  far = random((50, 3)) + 3000
  close(apply(jnn.BatchNorm(False), far)[0], exact(far), 1e-3)
  assert np.abs(apply(nn.BatchNorm(False), far)[0] - exact(far)).max() > 0.01
  near = random((50, 3), dtype=jnp.bfloat16)
  norms = (hk.transform(lambda x, m=m: m.LayerNorm(0, False, False)(x)) for m in (jhk, hk))
  ours, stock = (np.asarray(f.apply({}, None, near), np.float64) for f in norms)
  assert np.abs(ours - exact(near)).max() <= np.abs(stock - exact(near)).max()


def test_layer_shards():
  x, mask = random((2, 6, 3)), jnp.arange(12).reshape(2, 6, 1) < 8
  for module, same in ((jnn, True), (nn, False)):
    layer = module.BatchNorm(False, momentum=0.0, axis_name="i")
    variables = module.BatchNorm(False).init(jax.random.key(0), x)
    call = jax.vmap(lambda x, m, f=layer, v=variables: f.apply(v, x, mask=m, mutable=["batch_stats"])[1], axis_name="i")
    mean = call(x, mask)["batch_stats"]["mean"][0]
    assert np.allclose(mean, x.reshape(12, 3)[:8].mean(0), atol=1e-5) == same


def test_layer_mask():
  x, mask = random((6, 3)), jnp.arange(6)[:, None] < 4
  ours, stock = (apply(layer(False), x, mask=mask)[0] for layer in (jnn.BatchNorm, nn.BatchNorm))
  close(ours, stock, 1e-4)
  assert np.all(ours[4:] != 0) and not np.any(jaxdnn.batch_norm(x, where=mask)[0][4:])


def test_layer_adaptive():
  x = jnp.arange(5.0)[None]
  ours, stock = (layer(2)(x) for layer in (jeqx.AdaptiveAvgPool1d, eqx.nn.AdaptiveAvgPool1d))
  close(ours, stock, 1e-6)
  close(ours, [[1.0, 3.5]], 1e-6)
  close(jaxdnn.adaptive_avg_pool(x[..., None], (2,))[..., 0], [[1.0, 3.0]], 1e-6)


def test_gelu_name():
  x, one = random((1, 5, 1)), jnp.ones((1, 1, 1))
  close(jaxdnn.conv(x, one, activation="gelu"), jax.nn.gelu(x, approximate=False), 1e-6)
  close(jaxdnn.conv(x, one, activation="gelu_tanh"), jaxdnn.gelu(x), 1e-6)
