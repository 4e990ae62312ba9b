"""Runs the benchmarks and records them: `python -m benchmarks --out benchmarks/results/FILE.json`."""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import jax

from benchmarks import (
  activation,
  batch_norm,
  conv,
  conv_quantized,
  dropout,
  group_norm,
  harness,
  layer_norm,
  lrn,
  pool,
  report,
  softmax,
  transform,
)

# A family is a module with `work(dtypes, quick, shrink)`, and maybe `sweep` of the same arguments: neighbouring and odd
# sizes that show whether there are cliffs.
FAMILIES = {
  "conv": conv,
  "conv_quantized": conv_quantized,
  "pool": pool,
  "softmax": softmax,
  "activation": activation,
  "dropout": dropout,
  "batch_norm": batch_norm,
  "layer_norm": layer_norm,
  "lrn": lrn,
  "transform": transform,
  "group_norm": group_norm,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times jaxdnn against lax/XLA.")
  parser.add_argument("--out", type=Path, metavar="FILE", help="record to this JSON file, row by row")
  parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
  parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
  parser.add_argument("--sweep", action="store_true", help="neighbouring and odd sizes instead of the listed cases")
  parser.add_argument("--quick", action="store_true", help="a handful of cases of each family")
  parser.add_argument("--filter", nargs="+", default=[""], metavar="TEXT", help="only cases whose name contains one")
  parser.add_argument("--shrink", type=int, default=1, metavar="N", help=argparse.SUPPRESS)
  return parser.parse_args(arguments)


def command_line(arguments: list[str]) -> str:
  """As typed, but for the folder of --out, which says nothing to others."""
  shown = list(arguments)
  for i, argument in enumerate(shown):
    if i and shown[i - 1] == "--out":
      shown[i] = f"benchmarks/results/{Path(argument).name}"
    elif argument.startswith("--out="):
      shown[i] = f"--out=benchmarks/results/{Path(argument).name}"
  return shlex.join(["python", "-m", "benchmarks", *shown])


def save(path: Path, record: dict) -> None:
  """Replaces the file at once: a run that is stopped leaves the rows it has."""
  partial = path.with_name(path.name + ".partial")
  partial.write_text(json.dumps(record, indent=1) + "\n")
  partial.replace(path)


def main(arguments: list[str] | None = None) -> dict:
  arguments = sys.argv[1:] if arguments is None else arguments
  args = parse(arguments)
  # XLA would put the kernels of a call into a graph, which CUPTI need not see one by one. Read when a backend starts.
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
  if args.out:
    args.out.parent.mkdir(parents=True, exist_ok=True)
  began = time.perf_counter()
  clock_name, clock = harness.find_clock()
  ceilings = harness.measure_ceilings(clock, args.shrink)
  record = harness.header(command_line(arguments), clock_name, ceilings, args.shrink, args.quick)
  rows = record["rows"] = []
  print(
    f"{record['device']}, jax {record['jax']}, jaxdnn {record['jaxdnn']}, clock {clock_name}; copy "
    f"{ceilings['copy'] / 1e12:.2f} TB/s, x + 1 {ceilings['elementwise'] / 1e12:.2f} TB/s, matmul "
    f"{ceilings['bfloat16'] / 1e12:.0f} TFLOP/s bf16, {ceilings['float32'] / 1e12:.0f} TFLOP/s f32"
  )
  kind = "sweep" if args.sweep else "work"
  for family in args.families:
    works = getattr(FAMILIES[family], kind, lambda *_: ())(args.dtypes, args.quick, args.shrink)
    wanted = [work for work in works if any(text in work.case for text in args.filter)]
    for row in harness.measure_all(wanted, ceilings, clock):
      rows.append({**row, "sweep": True} if args.sweep else row)
      print(report.line(rows[-1]), flush=True)
      record["seconds"] = time.perf_counter() - began
      if args.out:
        save(args.out, record)
    # Compiled programs hold device memory.
    jax.clear_caches()
  print("\nGeometric means, lax's time over ours:")
  for group in report.summarise(rows):
    print(report.summary_line(group))
  failed = sum(row["us_ours"] is None for row in rows)
  print(f"{len(rows)} rows in {time.perf_counter() - began:.0f} s, {failed} of ours failed")
  if args.out:
    print(f"wrote {args.out}")
  return record


if __name__ == "__main__":
  main()
