"""Rows of a record as text, and their geometric means. Needs no JAX."""

import math
from collections.abc import Iterable
from typing import Any

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
