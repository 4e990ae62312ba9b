"""Does the cost model pick the right kernel? `python -m benchmarks.planner --out benchmarks/results/planner.json`.

Draws random convolutions of all kinds, times every kernel and tile of ours that the model does not rule out by far, and
compares the fastest with the one that the model chooses. The same seed draws the same problems. `--cases` names layers
of the convolutions' benchmark instead, of which every time is printed.

The algorithm `gemm`, whose workspace is larger than its operands, is never chosen, and not among the best; it is timed
where the model has it near them.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

import conv_cases
import jaxdnn
from benchmarks import conv, harness
from conv_cases import ConvCase
from jaxdnn._conv import aligned, gemm, primitives
from jaxdnn._conv.spec import make_spec

RESULTS = {"fwd": "y", "dgrad": "x", "wgrad": "w"}
CONV_DIRECTIONS = {"fwd": "forward", "dgrad": "data_gradient", "wgrad": "filter_gradient"}
TILES = (*primitives.tile_names(), aligned.NAME)
LEAST_US, MOST_US, MOST_BYTES = 8.0, 800.0, 1 << 29
TILES_WITHIN, ALGORITHMS_WITHIN = 2.5, 6.0
"""Timed are tiles, and the best tile of each algorithm, whose modelled time is within this factor of the least."""
PASSES = 5
CLOSE = 1.1

# Random problems -----------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
  kind: str
  case: ConvCase
  direction: str
  dtype: str


def between(rng: np.random.Generator, low: float, high: float, multiple: int = 1) -> int:
  """Uniform on a logarithmic scale, rounded to a multiple."""
  return max(1, round(math.exp(rng.uniform(math.log(low), math.log(high))) / multiple)) * multiple


def odd(rng: np.random.Generator) -> int:
  n = between(rng, 9, 400)
  return n if n % 8 else n + 1


Channels = Callable[[np.random.Generator], tuple[int, int, int]]
KINDS: dict[str, Channels] = {
  "dense": lambda r: (between(r, 16, 1500, 8), between(r, 16, 1500, 8), 1),
  "grouped": lambda r: grouped(between(r, 2, 64), int(r.choice((2, 4, 8, 8, 16, 24, 32, 64)))),
  "depthwise": lambda r: grouped(between(r, 16, 1500, int(r.choice((1, 2, 8, 8)))), 1, int(r.choice((1, 1, 1, 1, 2)))),
  "few channels": lambda r: (int(r.integers(1, 8)), between(r, 8, 256, 8), 1),
  "few features": lambda r: (between(r, 16, 512, 8), int(r.integers(1, 9)), 1),
  "odd channels": lambda r: ((odd(r), odd(r)), (between(r, 16, 512, 8), odd(r)), (odd(r), between(r, 16, 512, 8)))[
    r.integers(3)
  ]
  + (1,),
  "transposed": lambda r: (between(r, 16, 512, 8), between(r, 8, 512, 8), 1),
}
"""Input channels, output channels and groups of each kind."""
WINDOWS = {1: (1, 3, 4, 5, 7, 9, 15, 31), 2: (1, 1, 3, 3, 3, 3, 5, 7), 3: (1, 2, 3, 3)}
EXTENTS = {1: (64, 16384), 2: (6, 256), 3: (6, 64)}


def grouped(groups: int, channels: int, times: int = 1) -> tuple[int, int, int]:
  return groups * channels, groups * channels * times, groups


def draw_case(rng: np.random.Generator, kind: str) -> ConvCase:
  rank = int(rng.choice((1, 2, 2, 2, 3)))
  c, k, groups = KINDS[kind](rng)

  def each(draw: Callable[[], int]) -> tuple[int, ...]:
    """The same in all dimensions, or now and then not."""
    return tuple(draw() for _ in range(rank)) if rng.random() < 0.15 else (draw(),) * rank

  window = each(lambda: int(rng.choice(WINDOWS[rank])))
  spatial = each(lambda: between(rng, *EXTENTS[rank]))
  stride = dilation = holes = (1,) * rank
  if kind == "transposed":
    holes = (int(rng.choice((2, 2, 2, 3))),) * rank
    window = tuple(max(w, h) for w, h in zip(window, holes, strict=True))
  elif rng.random() < 0.3:
    stride = (int(rng.choice((2, 2, 2, 3, 4))),) * rank
  elif rng.random() < 0.15:
    dilation = (int(rng.choice((2, 2, 4))),) * rank
  same = rng.random() < 0.85
  padding = tuple(((w - 1) * d // 2,) * 2 if same else (0, 0) for w, d in zip(window, dilation, strict=True))
  return ConvCase("", between(rng, 1, 256), spatial, c, window, k, stride, padding, holes, dilation, groups)


def draw_problems(count: int, seed: int, shrink: int = 1) -> Iterator[Problem]:
  """As many of each kind, direction and element type."""
  rng = np.random.default_rng(seed)
  sorts = itertools.cycle(itertools.product(("bfloat16", "float32"), RESULTS, KINDS))
  for dtype, direction, kind in itertools.islice(sorts, count):
    while True:
      problem = Problem(kind, draw_case(rng, kind), direction, dtype)
      if (chosen := model(problem, None)) is None or moved(problem) > MOST_BYTES / shrink**2:
        continue
      if shrink > 1 or LEAST_US <= chosen["us"] <= MOST_US:
        yield problem
        break


def named_problems(names: Sequence[str], dtypes: Sequence[str]) -> Iterator[Problem]:
  """Cases of the convolutions' benchmark and their neighbours, by their whole names."""
  listed = conv_cases.DENSE + conv_cases.OTHERS + conv_cases.LARGE
  every = {case.name: case for each in listed for case in (each, *conv_cases.neighbours(each))}
  for name, dtype, direction in itertools.product(names, dtypes, RESULTS):
    if name not in every:
      raise ValueError(f"no case of the benchmark is called {name!r}")
    yield Problem("named", every[name], direction, dtype)


def moved(problem: Problem) -> int:
  """Bytes of input, filter and output."""
  case, spec = problem.case, spec_of(problem.case, None)
  output = case.batch * math.prod(spec.y_spatial) * case.k
  elements = math.prod(case.x_shape) + math.prod(case.w_shape) + output
  return elements * harness.itemsize(problem.dtype) if output else MOST_BYTES + 1


# The model -----------------------------------------------------------------------------------------------------------


def spec_of(case: ConvCase, algorithm: str | None) -> Any:
  return make_spec(
    "planner", case.spatial, case.window, stride=case.stride, padding=case.padding, lhs_dilation=case.lhs_dilation,
    rhs_dilation=case.rhs_dilation, groups=case.groups, precision="default", algorithm=algorithm,
  )  # fmt: skip


def model(problem: Problem, algorithm: str | None) -> dict[str, Any] | None:
  """What the planner says of a kernel, of kernels and copies, or of what it chooses."""
  case, result = problem.case, RESULTS[problem.direction]
  spec = spec_of(case, algorithm)
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  a, b = (jax.ShapeDtypeStruct((1, *shapes[name]), problem.dtype) for name in primitives.OPERANDS[result])
  dtype = np.dtype(problem.dtype)
  found = []
  if algorithm != aligned.NAME and (plan := primitives.plan(result, a, b, spec, dtype, hopper=True)):
    found.append({**plan, "us": plan["cycles"] / aligned.CLOCK_HZ * 1e6})
  if algorithm in (None, aligned.NAME) and aligned.takes(a) and (larger := aligned.choose(result, a, b, spec, dtype)):
    found.append({**larger.plan, "algorithm": aligned.NAME, "tile": aligned.NAME, "us": larger.seconds * 1e6})
  return min(found, key=lambda plan: plan["us"], default=None)


def candidates(problem: Problem) -> dict[str, dict[str, Any]]:
  """Kernels by tile, with what the model says of each; the chosen one first."""
  found = [plan for tile in TILES if (plan := model(problem, tile)) is not None]
  found.sort(key=lambda plan: plan["us"])
  best: dict[str, float] = {}
  kept = {}
  for plan in found:
    first = best.setdefault(plan["algorithm"], plan["us"]) == plan["us"]
    if plan["us"] <= (ALGORITHMS_WITHIN if first else TILES_WITHIN) * found[0]["us"]:
      kept[plan["tile"]] = {key: plan[key] for key in ("tile", "splits", "us")}
  for each in by_patches(problem):
    if each.microseconds <= TILES_WITHIN * found[0]["us"]:
      kept[each.name] = {"tile": each.name, "splits": each.splits, "us": each.microseconds}
  return kept


def by_patches(problem: Problem) -> list[jaxdnn.ConvAlgorithm]:
  case = problem.case
  if not gemm.takes(spec_of(case, None)):
    return []
  x, w = (jax.ShapeDtypeStruct(shape, problem.dtype) for shape in (case.x_shape, case.w_shape))
  listed = jaxdnn.conv_algorithms(
    x, w, direction=CONV_DIRECTIONS[problem.direction], stride=case.stride, padding=case.padding,
    dilation=case.rhs_dilation, precision="default",
  )  # fmt: skip
  return [each for each in listed if each.name == gemm.NAME]


# Measuring -----------------------------------------------------------------------------------------------------------


def compute(problem: Problem, algorithm: str, x: Array, w: Array, y: Array) -> Array:
  arrays = {"x": x[None], "w": w[None], "y": y[None]}
  return gemm.convolve(RESULTS[problem.direction], arrays, spec_of(problem.case, algorithm), problem.dtype)[0]


def prepare(problem: Problem, pool: ThreadPoolExecutor) -> tuple[Any, dict[str, Any], dict[str, Any]]:
  """Futures of the operands and of a compiled program for each candidate."""
  work = work_of(problem)
  avals = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in work.operands]
  kept = candidates(problem)
  programs = {
    name: pool.submit(lambda f: jax.jit(f).lower(*avals).compile(), partial(compute, problem, name)) for name in kept
  }
  return pool.submit(harness.input_sets, work), programs, kept


def work_of(problem: Problem) -> harness.Work:
  return next(w for w in conv.directions("planner", problem.case, problem.dtype) if w.direction == problem.direction)


def describe(case: ConvCase) -> str:
  def by(values: Sequence[int]) -> str:
    return "×".join(map(str, values if len(set(values)) > 1 else values[:1]))

  spatial = "×".join(map(str, case.spatial))
  text = f"{case.batch}×{spatial}×{case.c} → {case.k}, window {by(case.window)}"
  for name, values in (("stride", case.stride), ("holes", case.lhs_dilation), ("dilation", case.rhs_dilation)):
    text += f", {name} {by(values)}" if max(values) > 1 else ""
  low = [lo for lo, _ in case.padding]
  return text + (f", padding {by(low)}" if max(low) else "") + (f", {case.groups} groups" if case.groups > 1 else "")


def measure(
  problem: Problem, sets: Any, programs: dict[str, Any], kept: dict[str, Any], clock: harness.Clock, ceilings: Any
) -> dict[str, Any]:
  work = work_of(problem)
  row: dict[str, Any] = {
    "kind": problem.kind, "direction": problem.direction, "dtype": problem.dtype, "case": describe(problem.case),
    "geometry": [problem.case.batch, problem.case.spatial, problem.case.c, problem.case.window, problem.case.k,
                 *problem.case.geometry, problem.case.groups],
    "us_floor": harness.floor_us(work.bytes, work.flops, work.unit, ceilings),
  }  # fmt: skip
  samples: dict[str, list[float]] = {name: [] for name in programs}
  sets = sets.result()
  for program in programs.values():
    harness.run_all(program.result(), sets)
  for i in range(PASSES):
    for name, program in programs.items():
      seconds = clock(program.result(), sets)
      if i:
        samples[name].append(seconds)
  timed = [
    {"tile": name, "splits": kept[name]["splits"], "us_model": kept[name]["us"], "us": float(np.median(s)) * 1e6}
    for name, s in samples.items()
  ]
  chosen, best = timed[0], min((each for each in timed if each["tile"] != gemm.NAME), key=lambda each: each["us"])
  return {**row, "chosen": chosen["tile"], "best": best["tile"], "ratio": chosen["us"] / best["us"], "timed": timed}


def measure_all(
  problems: Sequence[Problem], clock: harness.Clock, ceilings: dict[str, float]
) -> Iterator[dict[str, Any]]:
  """A row for each problem. Programs compile side by side, in batches between which nothing is timed."""
  workers = max(1, (os.cpu_count() or 1) // 2)
  with ThreadPoolExecutor(workers) as pool:
    for batch in (problems[i : i + 2 * workers] for i in range(0, len(problems), 2 * workers)):
      ready = [prepare(problem, pool) for problem in batch]
      for sets, programs, _ in ready:
        for future in (sets, *programs.values()):
          future.exception()
      for problem, (sets, programs, kept) in zip(batch, ready, strict=True):
        try:
          yield measure(problem, sets, programs, kept, clock, ceilings)
        except Exception as error:
          yield {"kind": problem.kind, "direction": problem.direction, "dtype": problem.dtype,
                 "case": describe(problem.case), "error": harness.reason(error)}  # fmt: skip
      # Compiled programs hold device memory.
      jax.clear_caches()


# Choosing again ------------------------------------------------------------------------------------------------------


def choose_again(row: dict[str, Any]) -> dict[str, Any]:
  """The row with what the model, as it is now, chooses of the kernels that were timed.

  `slices` says that it would sum a filter gradient in other slices than were timed; `untimed`, that its choice
  was not timed: there is no ratio then.
  """
  if "timed" not in row:
    return row
  batch, spatial, c, window, k, stride, padding, holes, dilation, groups = row["geometry"]
  case = ConvCase(
    "", batch, tuple(spatial), c, tuple(window), k, tuple(stride), tuple(map(tuple, padding)), tuple(holes),
    tuple(dilation), groups,
  )  # fmt: skip
  problem = Problem(row["kind"], case, row["direction"], row["dtype"])
  models = {each["tile"]: model(problem, each["tile"]) for each in row["timed"] if each["tile"] != gemm.NAME}
  timed = [{**t, "us_model": plan["us"]} if (plan := models.get(t["tile"])) else t for t in row["timed"]]
  kept = {key: value for key, value in row.items() if key not in ("ratio", "slices", "untimed")}
  then = row.get("ratio_then", row.get("ratio"))
  chosen = model(problem, None)
  us = {t["tile"]: t["us"] for t in timed}
  row = {**kept, "ratio_then": then, "chosen": chosen["tile"], "timed": timed}
  if chosen["tile"] not in us:
    return {**row, "untimed": chosen}
  was = next(t["splits"] for t in timed if t["tile"] == chosen["tile"])
  row["ratio"] = us[chosen["tile"]] / us[row["best"]]
  return row if chosen["splits"] == was else {**row, "slices": chosen["splits"]}


# The command ---------------------------------------------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
  text = f"{row['kind']:<13} {row['dtype']:<8} {row['direction']:<5} {row['case']:<70}"
  if "error" in row:
    return f"{text} {row['error']}"
  times = ", ".join(f"{t['tile']}/{t['splits']} {t['us']:.1f} (model {t['us_model']:.1f})" for t in row["timed"])
  ratio = f"{row['ratio']:.2f}" if "ratio" in row else f"chosen {row['untimed']['tile']}"
  return f"{text} {ratio} floor {row['us_floor']:.1f}: {times}"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
  arguments = sys.argv[1:] if arguments is None else arguments
  parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=(__doc__ or "").partition("?")[0])
  parser.add_argument("--out", type=Path, metavar="FILE", help="record to this JSON file, row by row")
  parser.add_argument("--problems", type=int, default=300, metavar="N", help="how many random ones")
  parser.add_argument("--cases", nargs="+", metavar="NAME", help="these of the convolutions' benchmark instead")
  parser.add_argument("--dtypes", nargs="+", choices=harness.DTYPES, default=["bfloat16"], help="of the cases")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--seconds", type=float, default=math.inf, help="measure no more after this time")
  parser.add_argument("--choose", type=Path, metavar="FILE", help="measure nothing: choose again in this record")
  parser.add_argument("--shrink", type=int, default=1, metavar="N", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  if args.choose:
    record = json.loads(args.choose.read_text())
    record |= {"rows": [choose_again(row) for row in record["rows"]], "chosen_by": jaxdnn.__version__}
    harness.save(args.out, record)
    return summarise(record)
  began = time.perf_counter()
  clock, record = harness.start(harness.command_line("benchmarks.planner", arguments), args.shrink)
  rows = record["rows"] = []
  problems = list(
    named_problems(args.cases, args.dtypes) if args.cases else draw_problems(args.problems, args.seed, args.shrink)
  )
  for row in measure_all(problems, clock, record["ceilings"]):
    rows.append(row)
    if args.cases:
      print(line(row), flush=True)
    record["seconds"] = time.perf_counter() - began
    if len(rows) % 20 == 0 or len(rows) == len(problems):
      harness.save(args.out, record)
    if record["seconds"] > args.seconds:
      break
  harness.save(args.out, record)
  return summarise(record)


def summarise(record: dict[str, Any]) -> dict[str, Any]:
  """Prints the misses, and how many there are."""
  ratios = [row["ratio"] for row in record["rows"] if "ratio" in row]
  for row in record["rows"]:
    if row.get("ratio", math.inf) > CLOSE:
      print(line(row))
  close = sum(ratio <= CLOSE for ratio in ratios)
  print(f"{len(ratios)} problems in {record['seconds']:.0f} s, {close} within 10 % of the best")
  return record


if __name__ == "__main__":
  main()
