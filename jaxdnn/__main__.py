"""`python -m jaxdnn`: what this installation is."""

import platform

import jax
import jaxlib

import jaxdnn
from jaxdnn import _extension


def report() -> str:
  native = _extension.native
  built = f"for {native.cuda_architectures}, with nvcc {native.cuda_version}" if native.cuda_version else "not built"
  try:
    devices = ", ".join(f"{d.device_kind} ({d.platform}:{d.id})" for d in jax.devices())
  except RuntimeError as e:
    devices = f"none usable: {e}"
  ffi_built, ffi_runtime = (".".join(map(str, v)) for v in (native.ffi_version, _extension.runtime_ffi_version()))
  rows = {
    "jaxdnn": jaxdnn.__version__,
    "jax, jaxlib": f"{jax.__version__}, {jaxlib.__version__}",
    "python": platform.python_version(),
    "CUDA kernels": built,
    "XLA FFI": f"{ffi_built} built against, {ffi_runtime} at run time",
    "devices": devices,
    "targets registered": ", ".join(sorted(_extension.TARGETS)) or "none: every operator runs its XLA reference",
  }
  return "\n".join(f"{name:20}{value}" for name, value in rows.items())


if __name__ == "__main__":
  print(report())
