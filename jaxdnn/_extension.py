"""Loads the native module and registers its FFI targets, once per process."""

import pathlib
import re
import warnings

import jax

try:
  from jaxdnn import _jaxdnn as native
except ImportError:
  folder = pathlib.Path(__file__).parent
  if any(folder.glob("_jaxdnn*")):
    raise
  raise ImportError(
    f"{folder} is jaxdnn's source and not an installation, but Python finds it first where it is started beside it. "
    "Install jaxdnn (pip install .), and start Python in another folder or as python -P."
  ) from None


def runtime_ffi_version() -> tuple[int, int]:
  """The (major, minor) version of the FFI that the installed jaxlib speaks, read from the headers it ships."""
  text = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
  major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
  return (int(major[1]), int(minor[1])) if major and minor else (0, 0)


def _register() -> frozenset[str]:
  handlers = native.handlers()
  if not handlers:
    if pathlib.Path("/dev/nvidiactl").exists():
      warnings.warn(
        "jaxdnn was installed without its CUDA kernels, so every operator runs its XLA reference. Reinstall with "
        "nvcc on PATH, or with JAXDNN_CUDA=pypi to fetch it from PyPI.",
        stacklevel=2,
      )
    return frozenset()
  # A handler newer than the runtime makes the whole backend fail to initialise, so it must not be registered.
  if tuple(native.ffi_version) > runtime_ffi_version():
    warnings.warn(
      f"jaxdnn's CUDA kernels were built for XLA FFI {native.ffi_version}, newer than the installed jaxlib's "
      f"{runtime_ffi_version()}; they stay off. Reinstall jaxdnn in this environment or upgrade jaxlib.",
      stacklevel=2,
    )
    return frozenset()
  for name, capsule in handlers.items():
    jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
  return frozenset(handlers)


TARGETS: frozenset[str] = _register()
"""Names of the registered FFI targets; empty when the kernels were not built or cannot be used."""
