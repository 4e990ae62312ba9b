"""Configuration of every test: float64, strict promotion, eight CPU devices, and which tests need what hardware."""

import os

import jax
import pytest

# Of several GPUs, the processes of a parallel run take one each, in turn.
gpus, worker = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), os.environ.get("PYTEST_XDIST_WORKER")
if worker and len(gpus) > 1:
  os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[2:]) % len(gpus)]
EMULATED = os.environ.get("JAXDNN_EMULATED") == "1"
if EMULATED:
  import emulated  # noqa: F401

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)
# XLA's optimisations are not what is tested, and compiling is most of what the tests do without a GPU.
jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
# What is tested at less, TF32, says so.
jax.config.update("jax_default_matmul_precision", "highest")


def gpu_missing() -> str | None:
  """Why GPU tests cannot run here, or None where they can."""
  from jaxdnn import _extension

  if jax.default_backend() != "gpu" and not EMULATED:
    return f"the default backend is {jax.default_backend()!r}, not 'gpu'"
  if not _extension.TARGETS:
    return "jaxdnn was built without its CUDA kernels"
  return None


def pytest_sessionstart(session: pytest.Session) -> None:
  if os.environ.get("JAXDNN_REQUIRE_GPU") == "1" and (why := gpu_missing()):
    raise pytest.UsageError(f"JAXDNN_REQUIRE_GPU=1, but {why}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  missing = {"gpu": gpu_missing(), "mesh": None if jax.device_count() >= 2 else "needs several devices"}
  for item in items:
    for marker, why in missing.items():
      if why and item.get_closest_marker(marker):
        item.add_marker(pytest.mark.skip(reason=why))
