"""Runs what is registered for CUDA on the CPU instead: for a module built with JAXDNN_CUDA=emulated.

Imported before jaxdnn, by conftest, where JAXDNN_EMULATED=1.
"""

import jax
from jax.interpreters import mlir

_target, _lowering = jax.ffi.register_ffi_target, mlir.register_lowering


def _register_target(name, capsule, platform="cpu", **kwargs):
  _target(name, capsule, platform="cpu" if platform == "CUDA" else platform, **kwargs)


def _register_lowering(primitive, rule, platform=None, **kwargs):
  return _lowering(primitive, rule, platform="cpu" if platform == "cuda" else platform, **kwargs)


jax.ffi.register_ffi_target = _register_target
mlir.register_lowering = _register_lowering
