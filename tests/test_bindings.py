"""The native module without a GPU: it imports, needs no driver, and its handlers decode what Python sends them."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from jaxdnn import _extension

built = pytest.mark.skipif(not _extension.TARGETS, reason="the CUDA kernels were not built")

# As in the source folder, where an editable installation would help out.
IMPORT_HERE = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import jaxdnn
"""


def test_the_source_folder_says_that_it_is_no_installation(tmp_path):
  package = pathlib.Path(_extension.__file__).parent
  shutil.copytree(package, tmp_path / "jaxdnn", ignore=shutil.ignore_patterns("_jaxdnn*", "__pycache__"))
  run = subprocess.run([sys.executable, "-c", IMPORT_HERE], cwd=tmp_path, capture_output=True, text=True)
  assert run.returncode == 1
  assert f"ImportError: {tmp_path / 'jaxdnn'} is jaxdnn's source and not an installation" in run.stderr
  assert "python -P" in run.stderr.splitlines()[-1]


# Aims the CUDA lowering and the CUDA handlers at the CPU and calls every primitive once. Decoding must stop at the
# missing CUDA stream and complain about nothing else: attribute names, counts and types, numbers of operands and
# results are where Python and C++ can drift apart.
DECODE_ON_CPU = """
import json, sys
import jax
from jax.interpreters import mlir
jax.config.update("jax_platforms", "cpu")
register_lowering, register_target = mlir.register_lowering, jax.ffi.register_ffi_target
def on_cpu(p, rule, platform=None): register_lowering(p, rule, platform="cpu" if platform == "cuda" else platform)
mlir.register_lowering = on_cpu
jax.ffi.register_ffi_target = lambda name, capsule, platform: register_target(name, capsule, platform="cpu")
import jaxdnn
mlir.register_lowering = register_lowering
import jax.numpy as jnp
sys.path.insert(0, sys.argv[1])
from numerics import equations
from test_lowering import LOWERED, gradient, zeros

messages = {}
for f, operands, _ in LOWERED.values():
  args = zeros(operands)
  for program in (gradient(f), lambda *a, f=f: jax.jvp(f, a, a)):
    for eqn in equations(jax.make_jaxpr(program)(*args)):
      if not eqn.primitive.name.startswith("jaxdnn_"):
        continue
      inputs = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.invars]
      try:
        jax.block_until_ready(jax.jit(lambda *a, e=eqn: e.primitive.bind(*a, **e.params))(*inputs))
        messages[eqn.primitive.name] = "ran on a CPU"
      except Exception as e:
        messages[eqn.primitive.name] = str(e)
print(json.dumps(messages))
"""


# Tangent maps that are XLA's on every platform.
WITHOUT_KERNELS = {
  "jaxdnn_causal_tangent", "jaxdnn_channel_activation_jvp", "jaxdnn_gate_jvp", "jaxdnn_layer_norm_lin",
  "jaxdnn_log_partition_lin",
}  # fmt: skip


@built
def test_handlers_decode_what_python_sends():
  tests = str(pathlib.Path(__file__).parent)
  run = subprocess.run([sys.executable, "-P", "-c", DECODE_ON_CPU, tests], capture_output=True, text=True)
  assert run.returncode == 0, run.stderr
  messages = json.loads(run.stdout.splitlines()[-1])
  assert len(messages) >= 13, sorted(messages)
  for name, message in messages.items():
    if name in WITHOUT_KERNELS:
      continue
    complaints = [line for line in message.splitlines() if line.strip().startswith("[")]
    assert "platform stream" in message and len(complaints) <= 1, f"{name}: {message}"


def test_import_without_a_driver_and_without_libcuda():
  linked = subprocess.run(["ldd", _extension.native.__file__], capture_output=True, text=True, check=True).stdout
  assert "libcuda.so" not in linked and "libcudart" not in linked and "not found" not in linked


def test_ffi_version_is_not_newer_than_the_runtime():
  assert tuple(_extension.native.ffi_version) <= _extension.runtime_ffi_version()


def test_report():
  out = subprocess.run([sys.executable, "-P", "-m", "jaxdnn"], capture_output=True, text=True, check=True).stdout
  for name in ("jaxdnn", "jax, jaxlib", "CUDA kernels", "XLA FFI", "devices", "targets registered"):
    assert any(row.startswith(name) for row in out.splitlines()), out
