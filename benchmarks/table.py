"""Turns recorded runs into tables: `python -m benchmarks.table [--check] [RECORD.json ...]`.

A table, made of the records that `SECTIONS` says, replaces what stands between `<!-- name:begin -->` and
`<!-- name:end -->`. With `--check` nothing is written; the exit status is 1 if a page differs.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.report import (
  SHORT,
  Record,
  by_device,
  every_case,
  geometric_mean,
  headline,
  markdown,
  microseconds,
  overview,
  provenance,
  times,
)

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
EPOCHS = (1, 10, 30)


# Whole networks ------------------------------------------------------------------------------------------------------


def steps(records: list[Record]) -> str:
  """Training steps: what they take, and what they take to compile."""
  lines = []
  for model, own in by_model(records).items():
    ours, lax, none, whole = (own.get(variant, {}) for variant in ("convolution", "lax", "none", "all"))

    def both(show: Callable[[dict[str, Any]], str], ours: Any = ours, lax: Any = lax) -> str:
      return f"{show(ours)} / {show(lax)}"

    def convolutions(row: dict[str, Any], none: Any = none) -> str:
      return number(compiling(row) - compiling(none), 1) if row and none else "-"

    name = f"{model}, {ours.get('batch', '?')} images"
    ratio = f" ({lax['ms_wall'] / ours['ms_wall']:.2f}×)" if {"ms_wall"} <= ours.keys() & lax.keys() else ""
    lines.append([
      name, both(lambda row: number(row.get("ms_wall"), 1)) + ratio, number(whole.get("ms_wall"), 1),
      both(lambda row: number(compiling(row), 1)), both(convolutions),
      both(lambda row: number(row.get("peak_bytes", math.nan) / 2**30, 1)),
    ])  # fmt: skip
  head = ["ours / lax", "ms a step", "all layers ours", "s to compile", "of it the convolutions", "GiB"]
  return "\n\n".join([provenance(records), markdown(head, lines)])


def whereabouts(records: list[Record]) -> str:
  """The steps, and where the device's time goes in each."""
  parts = [steps(records)]
  for model, own in by_model(records).items():
    profiles = {variant: row["ms_by_kind"] for variant, row in own.items() if "ms_by_kind" in row}
    most: dict[str, float] = {}
    for profile in profiles.values():
      most |= {kind: max(ms, most.get(kind, 0)) for kind, ms in profile.items()}
    kinds = sorted(most, key=lambda kind: -most[kind])
    lines = [[kind, *(number(p[kind], 2) if kind in p else "" for p in profiles.values())] for kind in kinds]
    lines.append(["all kernels", *(number(own[variant]["ms_device"], 2) for variant in profiles)])
    lines.append(["a step, by the wall clock", *(number(own[variant]["ms_wall"], 2) for variant in profiles)])
    parts.append(markdown([f"{model}: ms", *(f"`{variant}`" for variant in profiles)], lines))
  failures = [
    f"- {model}, `{variant}`: `{row['error']}`"
    for model, own in by_model(records).items()
    for variant, row in own.items()
    if "error" in row
  ]
  return "\n\n".join([*parts, *(["\n".join(["Failures:", "", *failures])] if failures else [])])


def by_model(records: list[Record]) -> dict[str, dict[str, dict[str, Any]]]:
  """The last row of each network and variant."""
  models: dict[str, dict[str, dict[str, Any]]] = {}
  for record in sorted(records, key=lambda r: r["date"]):
    for row in record["rows"]:
      models.setdefault(row["model"], {})[row["variant"]] = row
  return models


def compiling(row: dict[str, Any]) -> float:
  """Seconds to trace, lower and compile."""
  return row.get("seconds_lower", math.nan) + row.get("seconds_compile", math.nan)


def number(value: float | None, digits: int) -> str:
  return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


# The planner ---------------------------------------------------------------------------------------------------------

CLOSE = 1.1


def choices(records: list[Record]) -> str:
  """How often the planner's kernel is within 10 % of the best, by kind."""
  rows = timed_problems(records)
  groups = {kind: [r for r in rows if r["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}
  lines = []
  for kind, own in {**groups, "all": rows}.items():
    ratios = [row["ratio"] for row in own]
    close = sum(ratio <= CLOSE for ratio in ratios)
    share = f"{close} ({close / len(own):.0%})"
    at = [{each["tile"]: each["us"] for each in row["timed"]} for row in own]
    patches = sum(us[row["chosen"]] > CLOSE * us.get("gemm", math.inf) for us, row in zip(at, own, strict=True))
    lines.append([kind, str(len(own)), share, times(geometric_mean(ratios)), times(max(ratios)), str(patches)])
  head = ["random problems", "", "within 10 % of the best", "chosen / best, mean", "worst", "`gemm` 10 % faster"]
  return "\n\n".join([provenance(records), *anew(records), markdown(head, lines)])


def anew(records: list[Record]) -> list[str]:
  """Whose choices are not those of the module that was timed."""
  rows = [row for record in records if "chosen_by" in record for row in record["rows"]]
  if not rows:
    return []
  then = sum(row.get("ratio_then", math.inf) <= CLOSE for row in rows)
  slices, untimed = (sum(key in row for row in rows) for key in ("slices", "untimed"))
  return [
    f"{len(rows)} of these were chosen anew among the recorded times (`--choose`), by a model that was fitted to them; "
    f"the model of the time was within 10 % in {then}. {slices} now have their sum in other slices than were timed, "
    f"{untimed} a kernel that was not timed."
  ]


def misses(records: list[Record]) -> str:
  """The same, and each problem where another kernel is more than 10 % faster."""
  lines = []
  for row in sorted(timed_problems(records), key=lambda row: -row["ratio"]):
    if row["ratio"] > CLOSE:
      at = {each["tile"]: f"{each['tile']}, {microseconds(each['us'])}" for each in row["timed"]}
      chosen, best = at[row["chosen"]], at[row["best"]]
      case = f"{row['kind']}: {row['case']}"
      lines.append([case, SHORT[row["dtype"]], row["direction"], chosen, best, times(row["ratio"])])
  head = ["missed", "dtype", "", "chosen, µs", "best, µs", "chosen / best"]
  return "\n\n".join([choices(records), markdown(head, lines)])


def timed_problems(records: list[Record]) -> list[dict[str, Any]]:
  return [row for record in records for row in record["rows"] if "ratio" in row]


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


# Products ------------------------------------------------------------------------------------------------------------


def products(records: list[Record]) -> str:
  """Dense layers beside the matrix products of their sizes, as shares of the rate of a large one."""
  lines: dict[tuple[str, str, str], list[str]] = {}
  for record in sorted(records, key=lambda r: r["date"]):
    for row in record["rows"]:
      full = row["flops"] / record["ceilings"][row["dtype"]] * 1e6
      both = [row["us_ours"], row["us_product"]]
      cells = ["×".join(map(str, row["size"])), " / ".join(map(microseconds, both))]
      lines[row["case"], row["dtype"], row["direction"]] = [*cells, " / ".join(f"{full / us:.0%}" for us in both)]
  head = ["layer", "dtype", "", "rows × columns × terms", "µs: ours / product", "of the rate: ours / product"]
  rows = [[f"`{case}`", SHORT[dtype], direction, *cells] for (case, dtype, direction), cells in lines.items()]
  return "\n\n".join([provenance(records), markdown(head, rows)])


# Pages ---------------------------------------------------------------------------------------------------------------


def replace(text: str, name: str, content: str) -> str:
  """`text` with `content` between the markers `name`; as it is where it has none."""
  begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
  before, found, rest = text.partition(begin)
  _, closed, after = rest.partition(end)
  return f"{before}{begin}\n{content}\n{end}{after}" if found and closed else text


def render(text: str, paths: list[Path]) -> str:
  """A page's text with what the records of `paths` give."""
  records: dict[str, list[Record]] = {}
  for path in paths:
    kind = re.split(r"[-.]", path.name)[0]
    records.setdefault(kind if kind in SECTIONS else "", []).append(json.loads(path.read_text()))
  for kind, own in records.items():
    for name, section in SECTIONS[kind].items():
      text = replace(text, name, section(own))
  return text


SECTIONS: dict[str, dict[str, Callable[[list[Record]], str]]] = {
  "": {
    "summary": headline,
    "overview": partial(by_device, section=overview),
    "cases": partial(by_device, section=every_case),
  },
  "models": {"models": partial(by_device, section=steps), "kernels": partial(by_device, section=whereabouts)},
  "planner": {"planner": partial(by_device, section=choices), "misses": partial(by_device, section=misses)},
  "product": {"products": partial(by_device, section=products)},
  "mnist": {"mnist": mnist},
}
"""By the first word of a record's name, the tables that are made of them."""


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
