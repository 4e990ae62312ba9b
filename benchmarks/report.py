"""Rows of records as text and as tables, and their geometric means. Needs no JAX."""

import math
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]

SHORT = {
  "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int8": "int8", "float8_e4m3fn": "e4m3",
}  # fmt: skip
DIRECTIONS = ("fwd", "dgrad", "wgrad", "bwd", "fwd+bwd")


def order(row: dict[str, Any]) -> tuple[str, int, str, int]:
  """By family, direction, case and dtype."""
  return row["family"], DIRECTIONS.index(row["direction"]), row["case"], list(SHORT).index(row["dtype"])


def line(row: dict[str, Any]) -> str:
  """A row for people: microseconds, rate, share of the floor, and lax's time over ours."""

  def us(value: float | None) -> str:
    return f"{value:10.1f}" if value else f"{'fails':>10}"

  ours = row["us_ours"]
  if not ours:
    rate, share = "-", "-"
  elif row["flops"]:
    rate, share = f"{row['flops'] / ours / 1e6:.2f} TFLOP/s", f"{row['us_floor'] / ours:.0%}"
  else:
    rate, share = f"{row['bytes'] / ours / 1e3:.0f} GB/s", f"{row['us_floor'] / ours:.0%}"
  ratio = f"{row['ratio']:.2f}x" if row["ratio"] else "-"
  name = f"{row['family']}.{row['case']}"
  text = f"{name:<44} {row['dtype']:<8} {row['direction']:<7} {us(ours)} us {us(row['us_lax'])} us lax"
  text += f" {row['us_floor']:9.1f} us floor {rate:>15} {share:>6} {ratio:>8}"
  if row.get("peak_bytes_ours") is not None and row.get("peak_bytes_lax"):
    text += f"  memory {row['peak_bytes_ours'] / row['peak_bytes_lax']:.2f} of lax's"
  errors = [f"  {name}: {row[key]}" for name in ("ours", "lax") if (key := f"error_{name}") in row]
  return "\n".join([text, *errors])


def geometric_mean(values: Iterable[float]) -> float:
  values = list(values)
  return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Geometric means by family, dtype and direction, in the order of the rows."""
  groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
  for row in rows:
    groups.setdefault((row["family"], row["dtype"], row["direction"]), []).append(row)
  return [
    {
      "family": family,
      "dtype": dtype,
      "direction": direction,
      "cases": len(group),
      "compared": sum(r["ratio"] is not None for r in group),
      "faster": sum((r["ratio"] or 0) > 1 for r in group),
      "ratio": geometric_mean(r["ratio"] for r in group if r["ratio"]),
      "memory": geometric_mean(
        r["peak_bytes_ours"] / r["peak_bytes_lax"] for r in group if {"peak_bytes_ours", "peak_bytes_lax"} <= r.keys()
      ),
      "share": geometric_mean(r["us_floor"] / r["us_ours"] for r in group if r["us_ours"]),
    }
    for (family, dtype, direction), group in groups.items()
  ]


def summary_line(group: dict[str, Any]) -> str:
  return (
    f"{group['family']:<12} {group['dtype']:<8} {group['direction']:<7} {group['ratio']:8.2f}x lax, "
    f"{group['share']:6.1%} of the floor ({group['compared']} of {group['cases']} cases compared, "
    f"{group['faster']} faster)"
  )


def behind(rows: list[dict[str, Any]]) -> str:
  """The cases that take longer than lax's by more than a twentieth, by family."""
  slower: dict[str, list[str]] = {}
  for row in sorted(rows, key=lambda row: row["ratio"] or math.inf):
    if row["ratio"] and row["ratio"] < 1 / 1.05:
      slower.setdefault(row["family"], []).append(
        f"`{row['case']}` {SHORT[row['dtype']]} {row['direction']} {row['ratio']:.2f}×"
      )
  count, compared = sum(map(len, slower.values())), sum(row["ratio"] is not None for row in rows)
  head = f"Behind lax by more than a twentieth: {count} of {compared}."
  return "\n".join([head, "", *(f"- {family}: {', '.join(cases)}" for family, cases in slower.items())]).strip()


# Tables --------------------------------------------------------------------------------------------------------------


def markdown(head: list[str], rows: list[list[str]]) -> str:
  """A table; all columns but the first are numbers, to the right."""
  lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def newest(records: list[Record]) -> list[dict[str, Any]]:
  """Every row of the records once: of several recordings of one case, the last by date; but a sweep, which may meet a
  listed case, does not take its place."""
  recorded = [row for record in sorted(records, key=lambda r: r["date"]) for row in record["rows"]]
  rows = {}
  for row in sorted(recorded, key=lambda r: not r.get("sweep", False)):
    rows[row["family"], row["case"], row["dtype"], row["direction"]] = row
  return sorted(rows.values(), key=order)


def by_device(records: list[Record], section: Callable[[list[Record]], str]) -> str:
  for record in records:
    if record["shrink"] != 1:
      raise ValueError(f"a trial run with --shrink {record['shrink']} measures nothing: {record['command']}")
  return "\n\n".join(map(section, devices(records)))


def devices(records: list[Record]) -> list[list[Record]]:
  """The records of each device, first those of the one that has most."""
  own: dict[str, list[Record]] = {}
  for record in records:
    own.setdefault(record["device"], []).append(record)
  return sorted(own.values(), key=lambda each: -sum(len(r["rows"]) for r in each if "rows" in r))


def headline(records: list[Record]) -> str:
  """Of the first device: geometric means of the listed cases by family, and what is behind."""
  first = devices(records)[0]
  listed = [row for row in newest(first) if not row.get("sweep", False)]
  return "\n\n".join([conditions(first), summary(listed), behind(listed)])


def overview(records: list[Record]) -> str:
  """Of every device: the same, and of the sweeps over neighbouring and odd sizes."""
  rows, parts = newest(records), [conditions(records)]
  for title, kind in (
    ("The listed cases:", False),
    ("Sweeps over neighbouring and odd sizes, small ones included:", True),
  ):
    if own := [row for row in rows if row.get("sweep", False) is kind]:
      parts += [title, summary(own), behind(own)]
  return "\n\n".join(parts)


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
      f"Measured in that run: copy {rates['copy'] / 1e12:.2f} TB/s, x + 1 {rates['elementwise'] / 1e12:.2f} TB/s, "
      "8192³ matrix product "
      f"{rates['bfloat16'] / 1e12:.0f} TFLOP/s bf16 and {rates['float32'] / 1e12:.0f} TFLOP/s f32."
    )
  return "\n".join(lines)


def conditions(records: list[Record]) -> str:
  """With what all of the records were made, and when."""

  def values(key: str) -> str:
    return " and ".join(dict.fromkeys(str(r[key]) for r in records if r.get(key)))

  dates = sorted(r["date"][:10] for r in records)
  days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
  versions = (("jax", "jax"), ("jaxdnn", "jaxdnn"), ("cuDNN", "cudnn"), ("driver", "driver"))
  named = [f"{name} {values(key)}" for name, key in versions if values(key)]
  return f"**{values('device')}**, {', '.join(named)}, {days}, {values('clock')} clock."


def summary(rows: list[dict[str, Any]]) -> str:
  """A line for each family and direction, a column for each dtype; those of equal dtypes are one table, and those of
  most come first."""
  lines: dict[str, dict[str, str]] = {}
  for group in summarise(rows):
    lines.setdefault(f"{group['family']} {group['direction']}", {})[group["dtype"]] = group_cell(group)
  tables: dict[tuple[str, ...], list[list[str]]] = {}
  for name, cells in lines.items():
    dtypes = tuple(filter(cells.__contains__, SHORT))
    tables.setdefault(dtypes, []).append([name, *map(cells.__getitem__, dtypes)])
  head = "lax / ours, cases faster, of the floor, memory"
  widest_first = sorted(tables.items(), key=lambda table: -len(table[0]))
  return "\n\n".join(markdown([head, *map(SHORT.__getitem__, dtypes)], own) for dtypes, own in widest_first)


def group_cell(group: dict[str, Any]) -> str:
  parts = [times(group["ratio"]), f"{group['faster']} of {group['compared']}"]
  parts += [] if math.isnan(group["share"]) else [f"{group['share']:.0%}"]
  parts += [] if math.isnan(group["memory"]) else [f"memory {times(group['memory'])}"]
  return ", ".join(parts)


def times(ratio: float) -> str:
  return "-" if math.isnan(ratio) else f"{ratio:.2f}×"


def details(rows: list[dict[str, Any]]) -> str:
  """A line for each case and dtype, a column for each direction, and what failed below."""
  directions = list(dict.fromkeys(row["direction"] for row in rows))
  cases = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
  at = {(row["case"], row["dtype"], row["direction"]): row for row in rows}
  remembered = any("peak_bytes_ours" in row for row in rows)
  convolved = any(row.get("us_arithmetic") for row in rows)
  head = ["µs: ours / lax / floor", "dtype", *directions, *(["MiB: ours / lax"] if remembered else [])]
  head += ["of the arithmetic rate", "MiB of temporaries: ours / lax"] if convolved else []
  lines = []
  for case, dtype in cases:
    own = [at.get((case, dtype, direction)) for direction in directions]
    lines.append([f"`{case}`", SHORT[dtype], *map(cell, own), *([memory(own)] if remembered else [])])
    lines[-1] += [rates(own), temporaries(own)] if convolved else []
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


def rates(rows: list[dict[str, Any] | None]) -> str:
  """The arithmetic of each direction, as a share of what the unit that does it, in a large matrix product, could do."""
  shares = [row["us_arithmetic"] / row["us_ours"] for row in rows if row and row["us_ours"] and "us_arithmetic" in row]
  return ", ".join(f"{share:.0%}" for share in shares)


def temporaries(rows: list[dict[str, Any] | None]) -> str:
  """Of each direction alone: ours are workspaces."""

  def sizes(key: str) -> str:
    return ", ".join(f"{round(row[key] / 2**20, 1):g}" if key in row else "fails" for row in rows if row)

  known = any(row and "temp_bytes_ours" in row for row in rows)
  return f"{sizes('temp_bytes_ours')} / {sizes('temp_bytes_lax')}" if known else ""


def microseconds(value: float | None) -> str:
  if value is None:
    return "fails"
  return f"{value:.1f}" if value < 100 else f"{value:.0f}"
