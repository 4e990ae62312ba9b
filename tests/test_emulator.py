"""The interpreter of PTX that runs kernels without a GPU: that it computes, and that it sees what kernels do wrong."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "emulator"
SUM = "2016"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """What self_test.cu prints: of each of its kernels, the results or why there are none."""
  if not shutil.which("nvcc") or not shutil.which("g++"):
    pytest.skip("needs nvcc and g++")
  folder = tmp_path_factory.mktemp("emulator")
  nvcc = pathlib.Path(shutil.which("nvcc")).resolve().parent.parent
  includes = [f"-I{d}" for d in (nvcc / "include", *nvcc.glob("cuda*/include")) if (d / "cuda_runtime_api.h").exists()]
  kernels = ["-gencode=arch=compute_90a,code=compute_90a", "--compress-mode=none", "-cudart=none", "-c"]
  command = ["nvcc", "-std=c++17", "-I.", *kernels, str(FOLDER / "self_test.cu"), "-o", str(folder / "kernels.o")]
  subprocess.run(command, cwd=ROOT, check=True)
  sources = [str(f) for f in FOLDER.glob("*.cc")]
  program = [str(folder / "kernels.o"), "-o", str(folder / "program")]
  subprocess.run(["g++", "-std=c++20", "-O1", *includes, *sources, *program], check=True)

  def run(seed=None):
    environment = os.environ if seed is None else {**os.environ, "EMULATOR_SEED": str(seed)}
    result = subprocess.run([str(folder / "program")], check=True, capture_output=True, text=True, env=environment)
    return dict(block.split(": ", 1) for block in result.stdout.strip().split("\n\n"))

  return run


FAULTS = {
  "beyond": "is beyond",
  "unaligned": "is not aligned",
  "null": "null address",
  "deadlock": "no thread can go on",
  "elsewhere": "a shuffle from a lane that is not there",
  "trap": "trap",
  "partial": "not of whole 16 bytes",
  "too many": "more arrive than the barrier expects",
  "forgotten": "nobody waited for a copy",
  "no cluster": "no block of this rank",
}


def test_kernels_with_and_without_faults(run):
  results = run()
  assert results["sum"] == results["bulk sum"] == SUM
  assert results["exchange"] == "11 10"
  assert results["product"].split() == [f"{8 * (lane // 4) + 2 * (lane % 4)}" for lane in range(32)]
  assert results["apart"].split() == [f"{lane + 1 + 100 if lane % 2 == 0 else lane - 1}" for lane in range(32)]
  for not_there_yet in ("unwaited", "early"):
    assert "nan" in results[not_there_yet]
  for fault, message in FAULTS.items():
    assert message in results[fault], fault
  assert "bar.sync" in results["deadlock"] and "Sum" in results["beyond"]


def test_shuffled_warps_show_races(run):
  shuffled = [run(seed) for seed in range(1, 9)]
  assert run(1) == shuffled[0]
  for name in ("sum", "bulk sum", "exchange", "product"):
    assert {results[name] for results in shuffled} == {run()[name]}
  assert len({results["race"] for results in shuffled}) > 1
