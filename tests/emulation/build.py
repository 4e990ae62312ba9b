"""Builds jaxdnn with kernels that run on the CPU: `python tests/emulation/build.py FOLDER` makes FOLDER/jaxdnn.

g++ compiles the sources with emulation.h in front. They are rewritten where a header cannot reach: inline assembly,
variables in shared memory and launches become calls. Needs x86-64 and CUDA's headers; takes ccache if there is one.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator

import jax.ffi
import nanobind

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent

LAUNCH = """
template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t, Args&&... args) {
  emulation::Launch(grid.blocks, grid.threads, grid.cluster, false, [&] { kernel(static_cast<Params>(args)...); });
  return cudaSuccess;
}
template <class... Params>
cudaError_t ResidentBlocks(void (*)(Params...), Grid grid, int64_t* blocks) {
  *blocks = 264 * grid.cluster;
  return cudaSuccess;
}
template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream, Args&&... args) {
  return LaunchKernel(kernel, Grid{blocks, threads}, stream, args...);
}
}  // namespace jaxdnn
"""

STREAM = """
namespace emulation { struct Stream {}; }
template <>
struct xla::ffi::CtxDecoding<emulation::Stream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return cudaStream_t{};
  }
};
"""


def split(text: str, separator: str) -> Iterator[str]:
  """The parts of `text` between separators that are in no string and no brackets."""
  depth, start = 0, 0
  for token in re.finditer(r'"(?:\\.|[^"\\])*"|.', text, re.DOTALL):
    depth += (token[0] in "([{") - (token[0] in ")]}")
    if token[0] == separator and depth == 0:
      yield text[start : token.start()]
      start = token.end()
  yield text[start:]


def assembly(text: str) -> str:
  """`asm("..." : "=f"(y) : "f"(x) : "memory")` to `emulation::Asm("...", {emulation::Out(y), emulation::In(x)})`."""
  done, at = [], 0
  for match in re.finditer(r"\basm(?: volatile)?\(", text):
    statement = next(split(text[match.end() - 1 :], ";"))
    template, outputs, inputs = (*split(statement[1:-1], ":"), "", "")[:3]
    operands = [
      f"emulation::{kind}({operand.split('(', 1)[1].rsplit(')', 1)[0]})"
      for kind, group in (("Out", outputs), ("In", inputs))
      for operand in split(group, ",")
      if operand.strip()
    ]
    done += [text[at : match.start()], f"emulation::Asm({template}, {{{', '.join(operands)}}})"]
    at = match.end() - 1 + len(statement)
  return "".join(done) + text[at:]


def shared_memory(text: str) -> str:
  align = r"(?:__align__\(\d+\) |alignas\(\d+\) )?"
  text = re.sub(
    rf"extern __shared__ {align}([^;\[]+?) (\w+)\[\];", r"auto* \2 = static_cast<\1*>(emulation::AtLaunch());", text
  )
  text = re.sub(r"__shared__ (\w+) ([\w\[\]]+), (\w+[\[\]\w]*);", r"__shared__ \1 \2; __shared__ \1 \3;", text)
  return re.sub(
    rf"__shared__ {align}([^;]+?) (\w+)((?:\[[^;]*?\])*);",
    r"typedef \1 \2_type\3; static char \2_key; auto& \2 = emulation::Declared<\2_type>(&\2_key);",
    text,
  )


def launches(text: str) -> str:
  cooperative = r"emulation::Launch(blocks, threads, 1, true, [&] { kernel(\1); }); return cudaSuccess;"
  text = re.sub(r"return cudaLaunchKernelEx\(&config, kernel, (.*)\);", cooperative, text)
  text = re.sub(r"\w+<<<.*?>>>\(", "emulation::NotEmulated(", text, flags=re.DOTALL)
  return re.sub(r" *\w+\.(?:grid|block)Dim = .*\n", "", text)


def rewritten(path: pathlib.Path) -> str:
  text = path.read_text()
  if path.parent.name == "bindings":
    text = text.replace("ffi::PlatformStream<cudaStream_t>", "emulation::Stream")
    text = text.replace(", {ffi::Traits::kCmdBufferCompatible}", "")
    return text.replace('#include "xla/ffi/api/ffi.h"\n', '#include "xla/ffi/api/ffi.h"\n' + STREAM)
  if path.name == "launch.cuh":
    return text[: text.index("// What the runtime wants to know of a grid.")] + LAUNCH
  if path.name == "hopper.cuh":  # in sources that are compiled but not run
    return text
  return launches(assembly(shared_memory(text)))


def write(path: pathlib.Path, text: str) -> None:
  """Leaves what is there already, and with it the time at which it was changed."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if not path.exists() or path.read_text() != text:
    path.write_text(text)


def build(folder: pathlib.Path) -> None:
  tree, objects = folder / "sources", folder / "objects"
  objects.mkdir(parents=True, exist_ok=True)
  for part in ("cuda", "bindings"):
    for path in (ROOT / part).rglob("*"):
      if path.is_file():
        write(tree / path.relative_to(ROOT), rewritten(path))

  nanobind_root = pathlib.Path(nanobind.include_dir()).parent
  toolkits = [pathlib.Path(shutil.which("nvcc") or "nvcc").resolve().parent.parent, pathlib.Path("/usr/local/cuda")]
  cuda = next(t / "include" for t in toolkits if (t / "include/cuda_runtime.h").exists())
  cache = ["ccache"] if shutil.which("ccache") else []
  compiler = [*cache, "g++", "-std=c++17", "-O1", "-fno-tree-sra", "-fPIC", "-w", "-I.", f"-isystem{cuda}"]
  kernels = [*compiler, "-fpermissive", "-include", str(HERE / "emulation.h"), "-xc++"]
  headers = [sysconfig.get_paths()["include"], nanobind.include_dir(), nanobind_root / "ext/robin_map/include"]
  headers.append(jax.ffi.include_dir())
  defines = ["-DJAXDNN_WITH_CUDA", '-DJAXDNN_CUDA_ARCHITECTURES="emulated"', '-DJAXDNN_CUDA_VERSION=""', "-DNDEBUG"]
  bindings = [*compiler, "-fvisibility=hidden", *(f"-isystem{h}" for h in headers), *defines]

  jobs = [(kernels, path.relative_to(tree)) for path in sorted((tree / "cuda").glob("*/*.c[cu]"))]
  jobs += [(bindings, path.relative_to(tree)) for path in sorted((tree / "bindings").glob("*.cc"))]
  jobs += [(bindings, nanobind_root / "src/nb_combined.cpp"), (compiler, HERE / "runtime.cc")]

  def compile_one(job: tuple[list[str], pathlib.Path]) -> str:
    command, source = job
    result = objects / ("_".join(source.parts[-2:]) + ".o")
    done = subprocess.run([*command, "-c", source, "-o", result], cwd=tree, capture_output=True, text=True)
    if done.returncode:
      raise SystemExit(f"{source}:\n{done.stderr}")
    return str(result)

  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    compiled = list(pool.map(compile_one, jobs))
  python_only = shutil.ignore_patterns("*.so", "__pycache__")
  shutil.copytree(ROOT / "jaxdnn", folder / "jaxdnn", dirs_exist_ok=True, ignore=python_only)
  subprocess.run(["g++", "-shared", *compiled, "-o", folder / "jaxdnn" / "_jaxdnn.abi3.so"], check=True)


if __name__ == "__main__":
  build(pathlib.Path(sys.argv[1]).resolve())
