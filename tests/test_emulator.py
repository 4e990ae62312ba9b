"""The interpreter of PTX that runs kernels without a GPU: that it computes, and that it sees what kernels do wrong."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "emulator"


@pytest.mark.skipif(not shutil.which("nvcc") or not shutil.which("g++"), reason="needs nvcc and g++")
def test_kernels_with_and_without_faults(tmp_path):
  nvcc = pathlib.Path(shutil.which("nvcc")).resolve().parent.parent
  includes = [f"-I{d}" for d in (nvcc / "include", *nvcc.glob("cuda*/include")) if (d / "cuda_runtime_api.h").exists()]
  program = tmp_path / "program"
  ptx = ["-gencode=arch=compute_90a,code=compute_90a", "--compress-mode=none", "-cudart=none"]
  kernels = tmp_path / "self_test.o"
  subprocess.run(
    ["nvcc", "-std=c++17", "-I.", *ptx, "-c", str(FOLDER / "self_test.cu"), "-o", str(kernels)], cwd=ROOT, check=True
  )
  sources = [str(f) for f in FOLDER.glob("*.cc")]
  subprocess.run(["g++", "-std=c++20", "-O1", *includes, *sources, str(kernels), "-o", str(program)], check=True)
  lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
  assert lines[0] == "0: done 2016"
  assert lines[1].startswith("1: done ") and lines[1] != "1: done 2016"  # what had not arrived
  assert "is beyond" in lines[2] and "Sum" in lines[2]
  assert "is not aligned" in lines[3]
  deadlock = "\n".join(lines[4:-1])
  assert "no thread can go on" in deadlock and "barrier.sync" in deadlock
  product = [float(v) for v in lines[-1].split()]
  assert product == [8 * (lane // 4) + 2 * (lane % 4) for lane in range(32)]
