"""The random problems of `benchmarks.planner`, and a trial run."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import planner, table  # noqa: E402

COUNT = 2 * len(planner.RESULTS) * len(planner.KINDS)


def test_problems_are_of_all_kinds_and_the_same_each_time():
  problems = list(planner.draw_problems(2 * COUNT, seed=3))
  assert set(Counter((p.kind, p.direction, p.dtype) for p in problems).values()) == {2}
  assert problems == list(planner.draw_problems(2 * COUNT, seed=3)) != list(planner.draw_problems(2 * COUNT, seed=4))
  assert {len(p.case.window) for p in problems} == {1, 2, 3}
  for p in problems:
    c, k, groups = p.case.c, p.case.k, p.case.groups
    assert {
      "dense": c % 8 == k % 8 == 0,
      "grouped": groups > 1 and c == k > groups,
      "depthwise": c == groups and k % c == 0,
      "few channels": c < 8,
      "few features": k <= 8,
      "odd channels": c % 8 + k % 8 > 0,
      "transposed": max(p.case.lhs_dilation) > 1,
    }[p.kind], p
    assert planner.LEAST_US <= planner.model(p, None)["us"] <= planner.MOST_US
    assert planner.moved(p) <= planner.MOST_BYTES


def test_named_problems_are_layers_and_their_neighbours():
  problems = list(planner.named_problems(["rn50.3x3.128@28", "mnist.conv2 channels+1"], ["float32"]))
  assert [(p.case.name, p.direction) for p in problems] == [
    (name, direction) for name in ("rn50.3x3.128@28", "mnist.conv2 channels+1") for direction in planner.RESULTS
  ]
  assert {p.dtype for p in problems} == {"float32"}
  with pytest.raises(ValueError, match="'vgg'"):
    list(planner.named_problems(["vgg"], ["float32"]))


def test_the_chosen_kernel_is_the_first_candidate():
  for p in planner.draw_problems(COUNT, seed=5):
    kept = planner.candidates(p)
    first, *others = kept.values()
    assert first["tile"] == planner.model(p, None)["tile"]
    assert all(first["us"] <= other["us"] for other in others if other["tile"] != "gemm")
    assert all(other["us"] <= planner.ALGORITHMS_WITHIN * first["us"] for other in others)


def test_trial_run(tmp_path):
  out = tmp_path / "planner.json"
  command = [sys.executable, "-m", "benchmarks.planner", "--out", str(out), "--problems", "3", "--shrink", "256"]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert result.returncode == 0, result.stderr
  record = json.loads(out.read_text())
  assert len(record["rows"]) == 3
  for row in record["rows"]:
    times = {each["tile"]: each["us"] for each in row["timed"] if each["tile"] != "gemm"}
    assert row["ratio"] == pytest.approx(times[row["chosen"]] / min(times.values()))


def test_misses_are_listed():
  def row(kind, chosen, best, **more):
    timed = [{"tile": "a 1", "us": chosen}, {"tile": "b 2", "us": best}]
    tiles = {"chosen": "a 1", "best": "b 2"}
    return {"kind": kind, "case": "8×8", "dtype": "float32", "direction": "fwd", "timed": timed, **tiles,
            "ratio": chosen / best, **more}  # fmt: skip

  rows = [row("dense", 30.0, 20.0), row("dense", 10.5, 10.0), row("grouped", 12.0, 10.0)]
  rows[0]["timed"].append({"tile": "gemm", "us": 15.0})
  rows.append({"kind": "dense", "error": "E: out of memory"})
  record = {
    "date": "2030", "command": "c", "device": "d", "jax": "1", "jaxdnn": "2", "clock": "cupti", "shrink": 1,
    "rows": rows, "ceilings": dict.fromkeys(("copy", "elementwise", "bfloat16", "float32"), 1e12),
  }  # fmt: skip
  lines = table.misses([record]).splitlines()
  for line in (
    "| dense | 2 | 1 (50%) | 1.25× | 1.50× | 1 |",
    "| grouped | 1 | 0 (0%) | 1.20× | 1.20× | 0 |",
    "| dense: 8×8 | f32 | fwd | a 1, 30.0 | b 2, 20.0 | 1.50× |",
  ):
    assert line in lines
  assert sum("8×8" in line for line in lines) == 2


def test_choosing_anew():
  (problem,) = planner.draw_problems(1, seed=7)
  case, kept = problem.case, planner.candidates(problem)
  timed = [
    {"tile": tile, "splits": plan["splits"], "us_model": 0.0, "us": 10.0 + i}
    for i, (tile, plan) in enumerate(kept.items())
  ]
  timed[0]["us"] = 30.0
  geometry = [case.batch, case.spatial, case.c, case.window, case.k, *case.geometry, case.groups]
  row = {"kind": problem.kind, "direction": problem.direction, "dtype": problem.dtype, "case": "", "timed": timed,
         "geometry": json.loads(json.dumps(geometry)), "chosen": "other", "best": timed[1]["tile"],
         "ratio": 1.5}  # fmt: skip
  again = planner.choose_again(row)
  assert again["chosen"] == timed[0]["tile"] and again["ratio"] == pytest.approx(30 / 11)
  assert again["timed"][0]["us_model"] == pytest.approx(kept[again["chosen"]]["us"])
  timed[0]["splits"] += 1
  assert planner.choose_again(row)["slices"] == timed[0]["splits"] - 1
  del timed[0]
  without = planner.choose_again(row)
  assert "ratio" not in without and without["untimed"]["tile"] == again["chosen"]
  assert "untimed" not in again and "slices" not in again and again["ratio_then"] == 1.5
  assert planner.choose_again(again) == again


def test_recorded_problems():
  """The model still chooses well among what was measured."""
  record = json.loads((table.RESULTS / "planner.json").read_text())
  ratios = [again["ratio"] for row in record["rows"] if "ratio" in (again := planner.choose_again(row))]
  assert len(ratios) > 0.8 * len(record["rows"])
  assert sum(ratio <= planner.CLOSE for ratio in ratios) > 0.85 * len(ratios)
