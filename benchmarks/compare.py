"""What a run says that the recorded ones do not: `python -m benchmarks.compare RUN.json ...`.

By family, dtype and direction the geometric mean of the new times over the newest recorded ones of the same device,
ours and lax's, whose own change is the machine's; then every case of ours that fails now, or changed by more than
`--beyond`, the slowest first. The exit status is 1 where one fails or has become slower.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import SHORT, Record, geometric_mean, microseconds, newest
from benchmarks.table import RESULTS

Pair = tuple[dict[str, Any], dict[str, Any]]
"""A case's recorded row and its new one."""


def pairs(recorded: list[Record], new: list[Record]) -> list[Pair]:
  """Of cases that both have, and in which ours did not fail before."""

  def rows(records: list[Record]) -> dict[tuple[str, ...], dict[str, Any]]:
    named = ("family", "case", "dtype", "direction")
    return {
      (device, *(row[key] for key in named)): row
      for device in {record["device"] for record in records}
      for row in newest([record for record in records if record["device"] == device])
    }

  before, after = rows(recorded), rows(new)
  return [(before[key], after[key]) for key in after if key in before and before[key]["us_ours"]]


def change(pair: Pair, who: str = "ours") -> float:
  """The new time over the recorded one; NaN where one of them failed."""
  before, after = (row[f"us_{who}"] or math.nan for row in pair)
  return after / before


def mean_change(every: list[Pair], who: str) -> str:
  return f"{who} {geometric_mean(filter(math.isfinite, (change(pair, who) for pair in every))):.3f}"


def is_worse(pair: Pair, beyond: float) -> bool:
  return not change(pair) <= beyond


def means(every: list[Pair]) -> list[str]:
  groups: dict[tuple[str, str, str], list[Pair]] = {}
  for pair in every:
    row = pair[1]
    groups.setdefault((row["family"], SHORT[row["dtype"]], row["direction"]), []).append(pair)
  return [
    f"{family:<14} {dtype:<5} {direction:<7} {mean_change(own, 'ours')} {mean_change(own, 'lax')} of {len(own)} cases"
    for (family, dtype, direction), own in groups.items()
  ]


def differences(every: list[Pair], beyond: float) -> list[str]:
  changed = [pair for pair in every if is_worse(pair, beyond) or change(pair) < 1 / beyond]
  lines = []
  for before, row in sorted(changed, key=lambda pair: -change(pair) if pair[1]["us_ours"] else -math.inf):
    name = f"{row['family']}.{row['case']} {SHORT[row['dtype']]} {row['direction']}"
    lines.append(
      f"{name:<56} {microseconds(before['us_ours'])} -> {microseconds(row['us_ours'])} us "
      f"({change((before, row)):.2f}), lax's {change((before, row), 'lax'):.2f}, floor {microseconds(row['us_floor'])}"
    )
  return lines


def read(paths: Iterable[Path]) -> list[Record]:
  """Records of families' cases; others are of whole networks, or of what the planner chose."""
  records = [json.loads(path.read_text()) for path in paths]
  return [record for record in records if record.get("rows") and "family" in record["rows"][0]]


def main(arguments: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Compares runs with recorded ones.")
  parser.add_argument("runs", nargs="+", type=Path, help="what `python -m benchmarks --out` wrote")
  parser.add_argument("--recorded", nargs="+", type=Path, help="by default all of benchmarks/results")
  parser.add_argument("--beyond", type=float, default=1.05, help="the factor that counts as a change (1.05)")
  args = parser.parse_args(arguments)
  given = {path.resolve() for path in args.runs}
  recorded = args.recorded or [path for path in sorted(RESULTS.glob("*.json")) if path.resolve() not in given]
  every = pairs(read(recorded), read(args.runs))
  if not every:
    print("no case of these runs is recorded", file=sys.stderr)
    return 2
  print(*means(every), "", *differences(every, args.beyond), sep="\n")
  return int(any(is_worse(pair, args.beyond) for pair in every))


if __name__ == "__main__":
  sys.exit(main())
