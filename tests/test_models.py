"""The networks of `benchmarks.models`: with our layers they compute what Flax's do. And whose time is whose."""

import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jaxdnn.linen  # noqa: E402
from benchmarks import models, networks  # noqa: E402

# The number of parameters that the papers' authors give for their networks.
PARAMETERS = {"resnet50": 25_557_032, "convnext_t": 28_589_128, "mobilenetv2": 3_504_872}
IMAGES = jax.ShapeDtypeStruct((4, 48, 48, 3), np.float32)


@pytest.fixture(autouse=True)
def as_users_have_it():
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.parametrize("name", models.MODELS)
def test_parameters(name):
  shapes = {}
  for variant, fields in models.VARIANTS.items():
    params, rest, momenta = models.shape_of_state(models.MODELS[name].network(**fields), IMAGES)
    assert sum(a.size for a in jax.tree.leaves(params)) == PARAMETERS[name]
    shapes[variant] = jax.tree.map(lambda a: (a.shape, a.dtype), (params, rest, momenta))
    assert {a.dtype for a in jax.tree.leaves((params, rest))} == {np.dtype(np.float32)}
  assert all(each == shapes["lax"] for each in shapes.values())


@cache
def evaluate(name, variant):
  network = models.MODELS[name].network(**models.VARIANTS[variant], **models.MODELS[name].small, dtype=jnp.float32)
  params, rest, _ = models.draw_state(models.shape_of_state(network, IMAGES))
  rng = np.random.default_rng(2)
  data = rng.standard_normal(IMAGES.shape, np.float32), rng.integers(0, 1000, IMAGES.shape[0], np.int32)
  return jax.jit(jax.value_and_grad(partial(models.loss_of, network), has_aux=True))(params, rest, *data)


@pytest.mark.parametrize("variant", ["convolution", "all"])
@pytest.mark.parametrize("name", models.MODELS)
def test_loss_and_gradients_are_flax(name, variant):
  (loss, rest), grads = evaluate(name, variant)
  (want_loss, want_rest), want_grads = evaluate(name, "lax")
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
  for got, want in ((rest, want_rest), (grads, want_grads)):
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
      own = dict(jax.tree_util.tree_leaves_with_path(got))[path]
      scale = np.abs(leaf).max()
      # The gradient of a bias that a normalisation takes away again is rounding alone.
      assert np.abs(own - leaf).max() <= 1e-3 * scale + 1e-6, (path, np.abs(own - leaf).max(), scale)


def test_stand_in_has_the_shape_and_gradients():
  x, w = jnp.ones((2, 9, 8, 6)), jnp.ones((3, 3, 3, 4))
  options = dict(padding=[(1, 1), (1, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2)
  want = jax.eval_shape(lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 2), **options), x, w)
  y, vjp = jax.vjp(lambda x, w: models.stand_in(x, w, (2, 2), **options), x, w)
  assert y.shape == want.shape
  assert all(np.abs(g).max() > 0 for g in vjp(y))


def test_kernels_are_accounted():
  program = "".join(f'custom_call_target="jaxdnn.conv_{d}.v4", ' for d in ("fwd", "fwd", "wgrad", "dgrad"))
  step = [
    ("void jaxdnn::conv::DataWgmmaKernel<A>", 1.0),
    ("loop_add_fusion_3", 2.0),
    ("_ZN6jaxdnn4conv12_GLOBAL__N_110RingKernelE", 3.0),
    ("void jaxdnn::conv::FilterWgmmaKernel<A>", 4.0),
    ("void jaxdnn::conv::SumSlicesKernel<A>", 5.0),
    ("void jaxdnn::conv::DataWgmmaKernel<A>", 6.0),
    ("nvjet_tst_128x64", 7.0),
    ("input_transpose_fusion", 8.0),
    ("sm90_xmma_wgrad_implicit_gemm", 9.0),
    ("void jaxdnn::batch_norm::ApplyKernel", 10.0),
  ]
  assert models.by_kind(step * models.PROFILED, program) == pytest.approx({
    "our convolutions, forward": 4.0, "our convolutions, filter gradient": 9.0, "our convolutions, data gradient": 6.0,
    "XLA's fusions": 2.0, "matrix products": 7.0, "layout": 8.0, "cuDNN, filter gradient": 9.0,
    "our other kernels": 10.0,
  })  # fmt: skip


def test_trial_run(tmp_path):
  out = tmp_path / "models.json"
  options = ["--models", "convnext_t", "--variants", "convolution", "none", "--shrink", "64"]
  command = [sys.executable, "-m", "benchmarks.models", "--out", str(out), *options]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert result.returncode == 0, result.stderr
  ours, none = json.loads(out.read_text())["rows"]
  assert ours["ms_wall"] > 0 and ours["peak_bytes"] > 0 and np.isfinite(ours["loss"])
  assert none["seconds_lower"] > 0 and none["seconds_compile"] > 0 and "ms_wall" not in none


def test_batch_norm_keeps_running_statistics():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 4, 5), np.float32))
  found = []
  for layer in (networks.BatchNorm, jaxdnn.linen.BatchNorm):
    norm = layer(use_running_average=False, momentum=0.9, activation="clipped_relu")
    variables = norm.init(jax.random.key(0), x)
    found.append(norm.apply(variables, 4 * x, residual=x, mutable=["batch_stats"]))
  (want, want_rest), (got, rest) = found
  np.testing.assert_allclose(got, want, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), rest, want_rest)
