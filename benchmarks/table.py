"""Turns recorded runs into tables: `python -m benchmarks.table [--check] [RECORD.json ...]`.

A table replaces what stands between `<!-- name:begin -->` and `<!-- name:end -->`: `summary` in the README, `cases` in
docs/benchmarks.md, and `mnist` in the README, from records that `examples/mnist.py --json` wrote as `mnist-*.json`.
With `--check` nothing is written; the exit status is 1 if a page differs.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.report import summarise

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
EPOCHS = (1, 10, 30)
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}

Record = dict[str, Any]


def markdown(head: list[str], rows: list[list[str]]) -> str:
  """A table; all columns but the first are numbers, to the right."""
  lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# Benchmarks ----------------------------------------------------------------------------------------------------------


def newest(records: list[Record]) -> list[dict[str, Any]]:
  """Every row of the records once: of several recordings of one case, the last by date; but a sweep, which may meet a
  listed case, does not take its place."""
  recorded = [row for record in sorted(records, key=lambda r: r["date"]) for row in record["rows"]]
  rows = {}
  for row in sorted(recorded, key=lambda r: not r.get("sweep", False)):
    rows[row["family"], row["case"], row["dtype"], row["direction"]] = row
  families = list(dict.fromkeys(row["family"] for row in recorded))
  return sorted(rows.values(), key=lambda row: families.index(row["family"]))


def by_device(records: list[Record], section: Callable[[list[Record]], str]) -> str:
  for record in records:
    if record["shrink"] != 1:
      raise ValueError(f"a trial run with --shrink {record['shrink']} measures nothing: {record['command']}")
  devices = list(dict.fromkeys(record["device"] for record in records))
  return "\n\n".join(section([r for r in records if r["device"] == d]) for d in devices)


def overview(records: list[Record]) -> str:
  """Geometric means by family: of the listed cases, and of the sweeps over neighbouring and odd sizes."""
  rows = newest(records)
  listed, swept = ([row for row in rows if row.get("sweep", False) is kind] for kind in (False, True))
  sweeps = ["Sweeps over neighbouring and odd sizes, small ones included:", summary(swept)] if swept else []
  return "\n\n".join([provenance(records), summary(listed), *sweeps])


def every_case(records: list[Record]) -> str:
  rows = newest(records)
  parts = [provenance(records)]
  for family in dict.fromkeys(row["family"] for row in rows):
    parts += [f"## {family}", details([row for row in rows if row["family"] == family])]
  return "\n\n".join(parts)


def provenance(records: list[Record]) -> str:
  lines = []
  for r in sorted(records, key=lambda r: r["date"]):
    rates = r["ceilings"]
    versions = [f"jax {r['jax']}", f"jaxdnn {r['jaxdnn']}"]
    versions += [f"{name} {r[key]}" for name, key in (("cuDNN", "cudnn"), ("driver", "driver")) if r.get(key)]
    lines.append(
      f"- **{r['device']}**, {', '.join(versions)}, {r['date'][:10]}, {r['clock']} clock: `{r['command']}`. "
      f"Measured in that run: copy {rates['copy'] / 1e12:.2f} TB/s, 8192³ matrix product "
      f"{rates['bfloat16'] / 1e12:.0f} TFLOP/s bf16 and {rates['float32'] / 1e12:.0f} TFLOP/s f32."
    )
  return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
  table = []
  for g in summarise(rows):
    compared = f"{g['faster']} of {g['compared']}"
    share = "-" if math.isnan(g["share"]) else f"{g['share']:.0%}"
    name = f"{g['family']} {g['direction']}"
    memory = times(g["memory"])
    table.append([name, SHORT[g["dtype"]], str(g["cases"]), times(g["ratio"]), compared, share, memory])
  head = ["", "dtype", "cases", "lax / ours", "faster than lax", "share of the floor", "memory, ours / lax"]
  return markdown(head, table)


def times(ratio: float) -> str:
  return "-" if math.isnan(ratio) else f"{ratio:.2f}×"


def details(rows: list[dict[str, Any]]) -> str:
  """A line for each case and dtype, a column for each direction, and what failed below."""
  directions = list(dict.fromkeys(row["direction"] for row in rows))
  cases = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
  at = {(row["case"], row["dtype"], row["direction"]): row for row in rows}
  remembered = any("peak_bytes_ours" in row for row in rows)
  head = ["µs: ours / lax / floor", "dtype", *directions, *(["MiB: ours / lax"] if remembered else [])]
  lines = []
  for case, dtype in cases:
    own = [at.get((case, dtype, direction)) for direction in directions]
    lines.append([f"`{case}`", SHORT[dtype], *map(cell, own), *([memory(own)] if remembered else [])])
  failures = [
    f"- `{row['case']}` {SHORT[row['dtype']]} {row['direction']}, {name}: `{row[key]}`"
    for row in rows
    for name in ("ours", "lax")
    if (key := f"error_{name}") in row
  ]
  return "\n\n".join([markdown(head, lines), *(["\n".join(["Failures:", "", *failures])] if failures else [])])


def cell(row: dict[str, Any] | None) -> str:
  if row is None:
    return ""
  ours, lax, floor = (microseconds(row[key]) for key in ("us_ours", "us_lax", "us_floor"))
  return f"{ours} / {lax} / {floor}" + (f" ({times(row['ratio'])})" if row["ratio"] else "")


def memory(rows: list[dict[str, Any] | None]) -> str:
  """Results and temporaries of forward and backward together."""
  for row in rows:
    if row is not None and "peak_bytes_ours" in row:
      return " / ".join(f"{row[k] / 2**20:.1f}" if k in row else "fails" for k in ("peak_bytes_ours", "peak_bytes_lax"))
  return ""


def microseconds(value: float | None) -> str:
  if value is None:
    return "fails"
  return f"{value:.1f}" if value < 100 else f"{value:.0f}"


# MNIST ---------------------------------------------------------------------------------------------------------------


def mnist(records: list[Record]) -> str:
  """Test accuracy of every seed; time without compilation."""
  last = {run["epochs"][-1]["epoch"] for record in records for run in record["runs"]}
  marks = sorted({*EPOCHS, *last})
  rows, notes = [], []
  for r in records:
    notes.append(
      f"- `{r['model']}` on {r['dataset']} ({r['train_images']} training and {r['test_images']} test images), "
      f"batches of {r['batch_size']}, learning rate {r['learning_rate']}, {r['dtype']} at {r['precision']} "
      f"precision, on {r['device']} with jax {r['jax']} and jaxdnn {r['jaxdnn']}; compiled in "
      f"{r['compile_seconds']:.1f} s."
    )
    for run in r["runs"]:
      epochs = {e["epoch"]: e for e in run["epochs"]}
      accuracies = [f"{epochs[mark]['test_accuracy']:.2%}" if mark in epochs else "" for mark in marks]
      seconds = statistics.median(e["seconds"] for e in run["epochs"])
      name = f"`{r['model']}`, {r['dataset']}, {SHORT[r['dtype']]} {r['precision']}, {r['device']}"
      rows.append([name, str(run["seed"]), *accuracies, f"{seconds:.3g}"])
  head = ["test accuracy", "seed", *(f"epoch {mark}" for mark in marks), "seconds an epoch"]
  return "\n\n".join(["\n".join(notes), markdown(head, rows)])


# Pages ---------------------------------------------------------------------------------------------------------------


def replace(text: str, name: str, content: str) -> str:
  """`text` with `content` between the markers `name`; as it is where it has none."""
  begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
  before, found, rest = text.partition(begin)
  _, closed, after = rest.partition(end)
  return f"{before}{begin}\n{content}\n{end}{after}" if found and closed else text


def render(text: str, paths: list[Path]) -> str:
  """A page's text with what the records of `paths` give."""
  records = {path: json.loads(path.read_text()) for path in paths}
  timings = [r for p, r in records.items() if not p.name.startswith("mnist-")]
  trainings = [r for p, r in records.items() if p.name.startswith("mnist-")]
  if timings:
    text = replace(text, "summary", by_device(timings, overview))
    text = replace(text, "cases", by_device(timings, every_case))
  return replace(text, "mnist", mnist(trainings)) if trainings else text


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description="Writes the tables of recorded runs.")
  parser.add_argument("records", nargs="*", type=Path, help="by default all of benchmarks/results")
  parser.add_argument("--pages", nargs="+", type=Path, default=PAGES)
  parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page differs")
  args = parser.parse_args(arguments)
  differ = []
  for page in args.pages:
    text = page.read_text()
    wanted = render(text, args.records or sorted(RESULTS.glob("*.json")))
    if text != wanted and args.check:
      differ.append(page.name)
    elif text != wanted:
      page.write_text(wanted)
  if differ:
    print(f"{', '.join(differ)} differ from the recorded runs; run python -m benchmarks.table", file=sys.stderr)
  return int(bool(differ))


if __name__ == "__main__":
  sys.exit(main())
