"""Runs the benchmarks and records them: `python -m benchmarks --out benchmarks/results/FILE.json`."""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax

from benchmarks import (
  activation,
  batch_norm,
  conv,
  conv_fused,
  conv_large,
  conv_precise,
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
  "conv_fused": conv_fused,
  "conv_precise": conv_precise,
  "conv_large": conv_large,
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
  parser.add_argument("--dtypes", nargs="+", choices=harness.DTYPES, default=["bfloat16", "float32"])
  parser.add_argument("--sweep", action="store_true", help="neighbouring and odd sizes instead of the listed cases")
  parser.add_argument("--quick", action="store_true", help="a handful of cases of each family")
  parser.add_argument("--filter", nargs="+", default=[""], metavar="TEXT", help="only cases whose name contains one")
  parser.add_argument("--skip", nargs="+", default=[], metavar="TEXT", help="of those, not the ones that contain one")
  parser.add_argument(
    "--part",
    default="1/1",
    metavar="K/N",
    help="only the K-th of N equal parts, of which each may have a GPU of its own",
  )
  parser.add_argument("--shrink", type=int, default=1, metavar="N", help=argparse.SUPPRESS)
  return parser.parse_args(arguments)


def chosen(works: Iterable[harness.Work], args: argparse.Namespace) -> list[harness.Work]:
  """Those that the filters let through, or this part of them."""
  part, parts = map(int, args.part.split("/"))
  through = (
    work
    for work in works
    if any(text in work.case for text in args.filter) and not any(text in work.case for text in args.skip)
  )
  return list(through)[part - 1 :: parts]


def main(arguments: list[str] | None = None) -> dict:
  arguments = sys.argv[1:] if arguments is None else arguments
  args = parse(arguments)
  began = time.perf_counter()
  clock, record = harness.start(harness.command_line("benchmarks", arguments), args.shrink, args.quick)
  rows = record["rows"] = []
  kind = "sweep" if args.sweep else "work"
  for family in args.families:
    works = getattr(FAMILIES[family], kind, lambda *_: ())(args.dtypes, args.quick, args.shrink)
    for row in harness.measure_all(chosen(works, args), record["ceilings"], clock):
      rows.append({**row, "sweep": True} if args.sweep else row)
      print(report.line(rows[-1]), flush=True)
      record["seconds"] = time.perf_counter() - began
      harness.save(args.out, record)
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
