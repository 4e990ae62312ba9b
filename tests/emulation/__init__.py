"""Puts jaxdnn's kernels on the CPU platform, for tests without a GPU: see build.py."""

from typing import Any

import jax
from jax.interpreters import mlir


def install() -> None:
  """To be called before jaxdnn, as build.py makes it, is imported."""
  lower, register = mlir.register_lowering, jax.ffi.register_ffi_target

  def register_lowering(primitive: Any, rule: Any, platform: str | None = None, **options: Any) -> Any:
    return lower(primitive, rule, platform="cpu" if platform == "cuda" else platform, **options)

  def register_ffi_target(name: str, handler: Any, platform: str = "cpu", **options: Any) -> None:
    register(name, handler, platform="cpu" if platform == "CUDA" else platform, **options)

  mlir.register_lowering = register_lowering
  jax.ffi.register_ffi_target = register_ffi_target
