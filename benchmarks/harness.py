"""How benchmarks are timed and what is recorded of them.

Ours and lax run in one process, pass by pass in turn, on random data. A pass calls one of them once on each of several
input sets: as many as exceed the L2 cache several times, but at most `MAX_SETS`, so that the smallest cases stay in the
cache, as they would in use. The clock is CUPTI's: the sum of the durations of a pass's kernels over its calls, so that
neither launch gaps nor memsets and memory copies count. Without CUPTI it is the wall clock over many asynchronous
calls. A row holds the median over the passes.

Peak memory is that of forward and backward in one program: its results and temporaries. Of what is timed alone,
temporaries are recorded: workspaces, and operands or results in another layout.

The floor is the time that the work cannot beat: max(bytes that must move once / memory rate, FLOP / arithmetic rate),
with the rates that the same run measured (`measure_ceilings`).
"""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn

DTYPES = ("bfloat16", "float16", "float32")
ROTATED_BYTES = 192 << 20
MAX_SETS = 64
SECONDS_PER_CASE = 0.12
MIN_PASSES, MAX_PASSES = 3, 15
# Depthwise convolutions have no matrix product to give to matrix units: their ceiling is the FP32 FMA rate.
FMA_FLOPS = 60e12


class Draw(NamedTuple):
  """A random operand: standard normal, or for integers uniform in [0, high)."""

  shape: tuple[int, ...]
  dtype: str
  high: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
  """One thing to time, as two functions of the same operands."""

  family: str
  case: str
  dtype: str
  direction: str
  ours: Callable[..., Any]
  lax: Callable[..., Any]
  operands: tuple[Draw, ...]
  bytes: int
  """Those that must move, each once."""
  flops: int = 0
  unit: str = ""
  """What does the FLOPs: a dtype's matrix product, "bytes" or "fma"."""
  backward: bool = False
  """Times the pullback alone of the function, in its first operand; the last operand is the cotangent."""
  inputs: int = 1
  """How many operands, from the first, the pullback is in: more than one where parameters have gradients too."""
  tuned: bool = False
  """XLA times candidates on the device while it compiles lax's side, which therefore nothing else disturbs."""


def itemsize(dtype: str) -> int:
  return jnp.dtype(dtype).itemsize


def floor_us(moved: float, flops: float, unit: str, ceilings: dict[str, float]) -> float:
  """The least microseconds that `moved` bytes and `flops` operations take."""
  seconds = moved / max(ceilings["copy"], ceilings["elementwise"])
  if flops:
    seconds = max(seconds, flops / ceilings[unit])
  return seconds * 1e6


# Clocks --------------------------------------------------------------------------------------------------------------

Program = Callable[..., Any]
Clock = Callable[[Program, list[tuple[Any, ...]]], float]
"""Seconds per call of a program that is called once on each set of operands."""


def run_all(program: Program, sets: list[tuple[Any, ...]]) -> None:
  jax.block_until_ready([program(*operands) for operands in sets])


def wall_clock(program: Program, sets: list[tuple[Any, ...]]) -> float:
  """Host time of a pass, repeated within until it takes 10 ms."""
  calls, seconds = 0, 0.0
  while seconds < 0.01:
    began = time.perf_counter()
    run_all(program, sets)
    seconds += time.perf_counter() - began
    calls += len(sets)
  return seconds / calls


def cupti_extension() -> Any:
  """What comes with JAX and speaks to CUPTI."""
  from jax.experimental.mosaic.gpu import profiler

  return profiler.mosaic_gpu_lib._mosaic_gpu_ext


def cupti_kernels(extension: Any, run: Callable[[], None]) -> list[tuple[str, float]]:
  """Name and milliseconds of every kernel that `run`, which waits for the device, launches, in order.

  `jax.experimental.mosaic.gpu.profiler.Cupti.measure` does the same, but it warms up on the operands that it times,
  which leaves them in the cache.
  """
  extension._cupti_init()
  try:
    run()
  finally:
    timings = extension._cupti_get_timings(False)
  if not timings:
    raise RuntimeError("CUPTI saw no kernel")
  return timings


def cupti_clock(extension: Any, program: Program, sets: list[tuple[Any, ...]]) -> float:
  """Device time: the durations of all kernels of a pass."""
  timings = cupti_kernels(extension, partial(run_all, program, sets))
  return sum(milliseconds for _, milliseconds in timings) / len(sets) / 1e3


def find_clock() -> tuple[str, Clock]:
  """CUPTI where it works, else the wall clock; its name, and why not the other."""
  if jax.default_backend() != "gpu":
    return "wall", wall_clock
  try:
    clock = partial(cupti_clock, cupti_extension())
    clock(jax.jit(lambda x: x + 1), [(jnp.ones(1 << 20),)])
    return "cupti", clock
  except Exception as error:  # Private interfaces: anything may be missing.
    return f"wall (no CUPTI: {reason(error)})", wall_clock


# Timing --------------------------------------------------------------------------------------------------------------


def draw(key: jax.Array, operands: tuple[Draw, ...]) -> tuple[jax.Array, ...]:
  keys = jax.random.split(key, len(operands))
  return tuple(
    jax.random.randint(k, o.shape, 0, o.high, o.dtype) if o.high else jax.random.normal(k, o.shape, o.dtype)
    for k, o in zip(keys, operands, strict=True)
  )


@cache
def drawing(operands: tuple[Draw, ...]) -> Program:
  """`draw` of these operands, compiled: a function of a seed."""
  # "rbg" generates at memory speed and compiles fast; nothing here rests on its quality.
  return jax.jit(lambda seed: draw(jax.random.key(seed, impl="rbg"), operands)).lower(0).compile()


def input_sets(work: Work) -> list[tuple[jax.Array, ...]]:
  count = min(MAX_SETS, max(2, math.ceil(ROTATED_BYTES / max(work.bytes, 1))))
  if jax.default_backend() != "gpu":
    count = 2
  return [drawing(work.operands)(i) for i in range(count)]


def residuals(function: Callable[..., Any], inputs: int, *operands: jax.Array) -> Any:
  """The pullback in the first `inputs` operands, which is a pytree that holds what differentiation keeps."""
  return jax.vjp(lambda *a: function(*a, *operands[inputs:]), *operands[:inputs])[1]


def forward_and_backward(function: Callable[..., Any], inputs: int, *operands: jax.Array) -> Any:
  """The value and the gradients in the first `inputs` operands, for the cotangent that is the last."""
  *operands, g = operands
  y, pullback = jax.vjp(lambda *a: function(*a, *operands[inputs:]), *operands[:inputs])
  return y, pullback(g)


class Compiled(NamedTuple):
  """One side of a comparison, ready to run."""

  program: Program
  prepare: Program | None
  """Of a pullback: the forward pass, whose result is the program's first operand."""
  memory: dict[str, int]
  """As XLA has planned it. Of a pullback `peak_bytes`, the results and temporaries of forward and backward together;
  else `temp_bytes`, the temporaries."""

  def operands(self, sets: list[tuple[jax.Array, ...]]) -> list[tuple[Any, ...]]:
    return sets if self.prepare is None else [(self.prepare(*s[:-1]), s[-1]) for s in sets]


def compile_side(function: Callable[..., Any], work: Work) -> Compiled:
  avals = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in work.operands]
  if not work.backward:
    program = jax.jit(function).lower(*avals).compile()
    planned = program.memory_analysis()
    return Compiled(program, None, {} if planned is None else {"temp_bytes": planned.temp_size_in_bytes})
  forward = jax.jit(partial(residuals, function, work.inputs)).trace(*avals[:-1])
  backward = jax.jit(lambda pullback, g: pullback(g)).lower(forward.out_info, avals[-1])
  both = jax.jit(partial(forward_and_backward, function, work.inputs)).lower(*avals).compile().memory_analysis()
  memory = {} if both is None else {"peak_bytes": both.temp_size_in_bytes + both.output_size_in_bytes}
  return Compiled(backward.compile(), forward.lower().compile(), memory)


def attempt(function: Callable[..., Any], work: Work) -> Compiled | str:
  """The compiled side, or why there is none."""
  try:
    return compile_side(function, work)
  except Exception as error:
    return reason(error)


def reason(error: Exception) -> str:
  """An exception as one line."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return f"{type(error).__name__}: {lines[0] if lines else ''}"[:240]


def measure_all(works: Sequence[Work], ceilings: dict[str, float], clock: Clock) -> Iterator[dict[str, Any]]:
  """A row for each work. Programs compile side by side, in batches between which nothing is timed."""
  workers = max(1, (os.cpu_count() or 1) // 2)
  with ThreadPoolExecutor(workers) as pool:
    for batch in (works[i : i + 2 * workers] for i in range(0, len(works), 2 * workers)):
      drawn = [pool.submit(drawing, operands) for operands in {w.operands: None for w in batch}]
      ours = [pool.submit(attempt, w.ours, w) for w in batch]
      lax = [pool.submit(attempt, w.lax, w) for w in batch if not w.tuned]
      wait([*drawn, *ours, *lax])
      beside = iter(lax)
      for work, side in zip(batch, ours, strict=True):
        other = attempt(work.lax, work) if work.tuned else next(beside).result()
        yield measure(work, {"ours": side.result(), "lax": other}, ceilings, clock)


def measure(
  work: Work, sides: dict[str, Compiled | str], ceilings: dict[str, float], clock: Clock
) -> dict[str, Any]:
  """A row of the record; what fails is None there, and says why."""
  row: dict[str, Any] = {
    "family": work.family,
    "case": work.case,
    "dtype": work.dtype,
    "direction": work.direction,
    "us_ours": None,
    "us_lax": None,
    "us_floor": floor_us(work.bytes, work.flops, work.unit, ceilings),
    "us_arithmetic": floor_us(0, work.flops, work.unit, ceilings),
    "bytes": work.bytes,
    "flops": work.flops,
    "ratio": None,
  }
  ready, samples = {}, {"ours": [], "lax": []}
  try:
    sets = input_sets(work)
  except Exception as error:
    return {**row, "error_ours": reason(error), "error_lax": reason(error)}
  for name, side in sides.items():
    if isinstance(side, str):
      row[f"error_{name}"] = side
      continue
    try:
      operands = side.operands(sets)
      run_all(side.program, operands)
      # The first pass pays for what is lazy in the clock and the runtime; its time sets how many follow.
      clock(side.program, operands)
      ready[name] = side.program, operands, clock(side.program, operands)
    except Exception as error:
      row[f"error_{name}"] = reason(error)
    row |= {f"{kind}_{name}": size for kind, size in side.memory.items()}
  slowest = max((seconds * len(operands) for _, operands, seconds in ready.values()), default=1.0)
  passes = min(MAX_PASSES, max(MIN_PASSES, math.ceil(SECONDS_PER_CASE / max(slowest, 1e-9))))
  for _ in range(passes):
    for name, (program, operands, _) in ready.items():
      if f"error_{name}" in row:
        continue
      try:
        samples[name].append(clock(program, operands))
      except Exception as error:
        row[f"error_{name}"] = reason(error)
  for name, seconds in samples.items():
    if seconds and f"error_{name}" not in row:
      row[f"us_{name}"] = float(np.median(seconds)) * 1e6
  if row["us_ours"] and row["us_lax"]:
    row["ratio"] = row["us_lax"] / row["us_ours"]
  return {**row, "sets": len(sets), "passes": passes}


def measure_ceilings(clock: Clock, shrink: int = 1) -> dict[str, float]:
  """The device's own rates: bytes/s of a copy (read plus written), FLOP/s of a large matrix product by dtype."""
  ceilings = {"fma": FMA_FLOPS}

  def fastest(program: Program, operands: tuple[jax.Array, ...], clock: Clock, calls: int) -> float:
    return min(clock(program, [operands] * calls) for _ in range(6))

  n = max(1 << 14, (1 << 27) // shrink**2)
  operands = drawing((Draw((n,), "float32"),))(0)
  # CUPTI's kernel records leave out a copy. By the wall clock, with a dispatch much shorter than a call's 0.25 ms.
  ceilings["copy"] = 2 * 4 * n / fastest(jax.jit(jnp.copy), operands, wall_clock, 20)
  ceilings["elementwise"] = 2 * 4 * n / fastest(jax.jit(lambda x: x + 1), operands, clock, 5)
  n = max(64, 8192 // shrink)
  for dtype in DTYPES:
    operands = drawing((Draw((n, n), dtype),) * 2)(0)
    ceilings[dtype] = 2 * n**3 / fastest(jax.jit(jnp.matmul), operands, clock, 5)
  ceilings["bytes"] = 2 * ceilings["bfloat16"]  # what tensor cores do of 8-bit products
  return ceilings


# Record --------------------------------------------------------------------------------------------------------------


def launch_one_by_one() -> None:
  """Keeps XLA from putting the kernels of a call into a graph. Read when a backend starts."""
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()


def start(command: str, shrink: int = 1, quick: bool = False, graphs: bool = False) -> tuple[Clock, dict[str, Any]]:
  """The clock, and the head of a record. CUPTI need not see the kernels of a graph: without `graphs` there are none."""
  if not graphs:
    launch_one_by_one()
  clock_name, clock = find_clock()
  ceilings = measure_ceilings(clock, shrink)
  record = header(command, clock_name, ceilings, shrink, quick)
  print(
    f"{record['device']}, jax {record['jax']}, jaxdnn {record['jaxdnn']}, clock {clock_name}; copy "
    f"{ceilings['copy'] / 1e12:.2f} TB/s, x + 1 {ceilings['elementwise'] / 1e12:.2f} TB/s, matmul "
    f"{ceilings['bfloat16'] / 1e12:.0f} TFLOP/s bf16, {ceilings['float32'] / 1e12:.0f} TFLOP/s f32",
    flush=True,
  )
  return clock, record


def command_line(module: str, arguments: list[str]) -> str:
  """As typed, but for the folder of --out, which says nothing to others."""
  shown = list(arguments)
  for i, argument in enumerate(shown):
    if i and shown[i - 1] == "--out":
      shown[i] = f"benchmarks/results/{Path(argument).name}"
    elif argument.startswith("--out="):
      shown[i] = f"--out=benchmarks/results/{Path(argument).name}"
  return shlex.join(["python", "-m", module, *shown])


def save(path: Path | None, record: dict[str, Any]) -> None:
  """Replaces the file at once, if there is one: a run that is stopped leaves the rows it has."""
  if path is None:
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(path.name + ".partial")
  unfinished.write_text(json.dumps(record, indent=1) + "\n")
  unfinished.replace(path)


def header(command: str, clock: str, ceilings: dict[str, float], shrink: int, quick: bool) -> dict[str, Any]:
  """Where and with what a record was made."""
  device = jax.devices()[0]
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "command": command,
    "device": device.device_kind,
    "platform": device.platform,
    "clock": clock,
    "ceilings": ceilings,
    "jaxdnn": jaxdnn.__version__,
    "jax": jax.__version__,
    "jaxlib": importlib.metadata.version("jaxlib"),
    "runtime": device.client.platform_version,
    "cudnn": cudnn_version(),
    "driver": driver_version(),
    "quick": quick,
    "shrink": shrink,
  }


def cudnn_version() -> str | None:
  for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
    try:
      return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return None


def driver_version() -> str | None:
  command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
  try:
    lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
  except (OSError, subprocess.SubprocessError):
    return None
  return lines[0] if lines else None
