"""The benchmarks' arithmetic and tables, and a trial run of every family at sizes that a CPU takes."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import conv_cases  # noqa: E402
from benchmarks import __main__ as run  # noqa: E402
from benchmarks import compare, conv, harness, launch, pool, product, report, table  # noqa: E402

CEILINGS = {"copy": 4e12, "bfloat16": 700e12, "float32": 350e12, "fma": 60e12, "elementwise": 3e12}


def case(name):
  return next(c for c in conv_cases.DENSE + conv_cases.OTHERS if c.name == name)


def test_floor_is_the_larger_of_bytes_and_flops():
  assert harness.floor_us(4e6, 0, "", CEILINGS) == pytest.approx(1.0)
  assert harness.floor_us(4e6, 7e8, "bfloat16", CEILINGS) == pytest.approx(1.0)
  assert harness.floor_us(4e6, 1.4e9, "bfloat16", CEILINGS) == pytest.approx(2.0)
  assert harness.floor_us(4e6, 1.2e9, "fma", CEILINGS) == pytest.approx(20.0)


@pytest.mark.parametrize(
  ("name", "outputs", "pairs", "touched"),
  [
    ("mnist.conv1", (24, 24), 24 * 24 * 25, 28 * 28),
    # A stride that skips three elements in four reads one in four.
    ("rn50.1x1s2.256-512@56", (28, 28), 28 * 28, 28 * 28),
    # Padding costs nothing: of 3 taps at 28 positions, two fall outside.
    ("rn50.3x3.128@28", (28, 28), (3 * 28 - 2) ** 2, 28 * 28),
    # Nor do the zeros of a dilated input: one tap an output in each dimension.
    ("unet.up2x2s2.128-64@64", (128, 128), 128 * 128, 64 * 64),
    ("mamba.dw4.4096", (2048,), 4 * 2048 - 6, 2048),
  ],
)
def test_convolution_counts(name, outputs, pairs, touched):
  assert conv.count(case(name)) == (outputs, pairs, touched)


def test_convolution_work_counts_bytes_and_flops():
  work = {w.direction: w for w in conv.directions("conv_other", case("mnist.conv1"), "bfloat16")}
  x, w, y = 128 * 28 * 28, 5 * 5 * 32, 128 * 24 * 24 * 32
  assert {w.bytes for w in work.values()} == {2 * (x + w + y)}
  assert {w.flops for w in work.values()} == {2 * 128 * 24 * 24 * 25 * 32}
  assert {w.unit for w in conv.directions("conv_other", case("mamba.dw4.4096"), "float32")} == {"fma"}
  ensemble = next(conv.directions("conv_other", case("ensemble.e64.3x3.32@32"), "float32"))
  assert ensemble.operands[1].shape == (64, 3, 3, 32, 32)


def test_every_case_traces_to_the_shapes_of_lax():
  import jax

  generators = [g for f in run.FAMILIES.values() for g in (f.work, getattr(f, "sweep", None)) if g is not None]
  for generator in generators:
    works = list(generator(["bfloat16"]))
    for work in works:
      # The last operand of a pullback is the cotangent.
      drawn = work.operands[:-1] if work.backward else work.operands
      operands = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in drawn]
      with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        ours, lax = (jax.eval_shape(f, *operands) for f in (work.ours, work.lax))
      ours, lax = (jax.tree.map(lambda a: (a.shape, a.dtype), side) for side in (ours, lax))
      assert ours == lax, (work.family, work.case, work.direction)
    names = [(w.family, w.case, w.direction) for w in works]
    assert len(names) == len(set(names))


def test_only_laxs_side_writes_padding_out():
  import jax

  works = [w for w in conv.work(["bfloat16"]) if w.case.startswith(("reflect.", "replicate.", "circular."))]
  assert len(works) == 12
  for work in works:
    operands = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in work.operands]
    ours, lax = (str(jax.make_jaxpr(side)(*operands)) for side in (work.ours, work.lax))
    copies = ("concatenate", "gather", "pad[")
    assert not any(name in ours for name in copies), (work.case, work.direction)
    assert any(name in lax for name in copies), (work.case, work.direction)


def test_backward_times_the_pullback():
  import jax
  import numpy as np

  work = next(w for w in pool.work(["float32"], quick=True, shrink=32) if w.backward)
  sets = harness.input_sets(work)
  for function in (work.ours, work.lax):
    side = harness.compile_side(function, work)
    assert side.memory["peak_bytes"] >= sets[0][0].nbytes + sets[0][1].nbytes
    for (x, g), timed in zip(sets, side.operands(sets), strict=True):
      want = jax.vjp(function, x)[1](g)[0]
      np.testing.assert_array_equal(side.program(*timed)[0], want)


def test_a_failure_is_recorded_and_does_not_end_the_run():
  def fails(*operands):
    raise NotImplementedError("no valid config\nsecond line")

  x = harness.Draw((8,), "float32")
  work = harness.Work("conv", "a", "float32", "fwd", lambda x: x + 1, fails, (x,), 64)
  (row,) = harness.measure_all([work], CEILINGS, harness.wall_clock)
  assert row["us_ours"] > 0 and row["us_lax"] is None and row["ratio"] is None
  assert row["temp_bytes_ours"] == 0 and "temp_bytes_lax" not in row
  assert row["error_lax"] == "NotImplementedError: no valid config"
  assert "fails us lax" in report.line(row) and "no valid config" in report.line(row)


def test_a_clock_that_sees_no_kernel_is_an_error():
  class Extension:
    def _cupti_init(self):
      pass

    def _cupti_get_timings(self, finalize):
      return []

  with pytest.raises(RuntimeError, match="no kernel"):
    harness.cupti_clock(Extension(), lambda x: x, [(1.0,)])


def test_cupti_clock_sums_kernels_and_divides_by_calls():
  class Extension:
    def _cupti_init(self):
      pass

    def _cupti_get_timings(self, finalize):
      assert finalize is False
      return [("a", 1.0), ("b", 2.0)] * 2

  assert harness.cupti_clock(Extension(), lambda x: x, [(1.0,)] * 2) == pytest.approx(3e-3)


def row(case, direction, ours, lax, **more):
  ratio = lax / ours if ours and lax else None
  floor = {"us_floor": 10.0, "bytes": 10, "flops": 0}
  keys = {"family": "conv", "case": case, "dtype": "float32", "direction": direction}
  return {**keys, "us_ours": ours, "us_lax": lax, "ratio": ratio, **floor, **more}


RECORD = {
  "date": "2030-01-02T03:04:05+00:00", "command": "python -m benchmarks --out benchmarks/results/a.json",
  "device": "A GPU", "platform": "gpu", "clock": "cupti", "ceilings": CEILINGS, "jaxdnn": "0.1.0", "jax": "0.11.2",
  "jaxlib": "0.11.2", "runtime": "", "cudnn": "9", "driver": None, "quick": False, "shrink": 1,
  "rows": [
    row("a", "fwd", 20.0, 40.0), row("b", "fwd", 40.0, 20.0), row("c", "fwd", 10.0, None, error_lax="E: no config"),
    row("a", "dgrad", 20.0, 400.0, peak_bytes_ours=2**20, peak_bytes_lax=2**22),
    row("d", "fwd", 30.0, 15.0, sweep=True),
  ],
}  # fmt: skip
MNIST = {
  "model": "cnn", "dataset": "MNIST", "train_images": 60000, "test_images": 10000, "batch_size": 128,
  "learning_rate": 0.003, "dtype": "float32", "precision": "default", "whole_epoch": True, "platform": "gpu",
  "device": "A GPU", "jax": "0.11.2", "jaxdnn": "0.1.0", "compile_seconds": 3.0, "best_seed": 1,
  "runs": [
    {"seed": s, "epochs": [{"epoch": e, "test_accuracy": 0.9 + e / 1e3 + s / 1e4, "seconds": 0.5} for e in (1, 10, 30)]}
    for s in (0, 1)
  ],
}  # fmt: skip
README = """# Title
<!-- summary:begin -->
old
<!-- summary:end -->
between
<!-- overview:begin -->
<!-- overview:end -->
<!-- cases:begin -->
<!-- cases:end -->
<!-- mnist:begin -->
<!-- mnist:end -->
after
"""


@pytest.fixture
def files(tmp_path):
  paths = [tmp_path / "a.json", tmp_path / "mnist-a.json", tmp_path / "README.md"]
  for path, text in zip(paths, [json.dumps(RECORD), json.dumps(MNIST), README], strict=True):
    path.write_text(text)
  return paths


def test_geometric_means():
  fwd, dgrad = report.summarise(RECORD["rows"][:-1])
  assert fwd["ratio"] == pytest.approx(1.0) and (fwd["cases"], fwd["compared"], fwd["faster"]) == (3, 2, 1)
  assert fwd["share"] == pytest.approx((1 / 2 * 1 / 4 * 1) ** (1 / 3))
  assert dgrad["ratio"] == pytest.approx(20.0) and dgrad["memory"] == pytest.approx(1 / 4)
  assert math.isnan(report.geometric_mean([]))


def test_tables(files):
  text = table.render(README, files[:2])
  for line in (
    "| `a` | f32 | 20.0 / 40.0 / 10.0 (2.00×) | 20.0 / 400 / 10.0 (20.00×) | 1.0 / 4.0 |",
    "| `c` | f32 | 10.0 / fails / 10.0 |  |  |",
    "- `c` f32 fwd, lax: `E: no config`",
    "| conv fwd | 1.00×, 1 of 2, 50% |",
    "| conv fwd | 0.50×, 0 of 1, 33% |",
    "| conv dgrad | 20.00×, 1 of 1, 50%, memory 0.25× |",
    "Behind lax by more than a twentieth: 1 of 3.",
    "- conv: `b` f32 fwd 0.50×",
    "- conv: `d` f32 fwd 0.50×",
    "| `cnn`, MNIST, f32 default, A GPU | 1 | 90.11% | 91.01% | 93.01% | 0.5 |",
  ):
    assert line in text.splitlines()
  assert "old" not in text and text.startswith("# Title\n<!-- summary:begin -->\n") and text.endswith("\nafter\n")


def test_the_newest_recording_of_a_case_counts():
  later = {**copy.deepcopy(RECORD), "date": "2031-01-01T00:00:00+00:00", "rows": [row("a", "fwd", 5.0, 40.0)]}
  text = report.every_case([later, RECORD])
  assert "| `a` | f32 | 5.0 / 40.0 / 10.0 (8.00×) |" in text and "20.0 / 40.0" not in text


def test_arithmetic_and_temporaries():
  alone = {"us_arithmetic": 8.0, "temp_bytes_ours": 0, "temp_bytes_lax": 3 << 19}
  failed = {"us_arithmetic": 8.0, "temp_bytes_ours": 1 << 21}
  text = report.details([row("a", "fwd", 10.0, 20.0, **alone), row("a", "wgrad", 40.0, None, **failed)])
  assert "| 10.0 / 20.0 / 10.0 (2.00×) | 40.0 / fails / 10.0 | 80%, 20% | 0, 2 / 1.5, fails |" in text


def test_a_sweep_does_not_take_a_listed_cases_place():
  swept = {**copy.deepcopy(RECORD), "date": "2031-01-01T00:00:00+00:00"}
  swept["rows"] = [{**row(case, "fwd", 5.0, 40.0), "sweep": True} for case in ("a", "z")]
  text = report.every_case([RECORD, swept])
  assert "| `z` | f32 | 5.0 / 40.0 / 10.0 (8.00×) |" in text and "| `a` | f32 | 5.0" not in text


def test_compare(tmp_path, capsys):
  before, after, model = tmp_path / "before.json", tmp_path / "after.json", tmp_path / "models.json"
  before.write_text(json.dumps(RECORD))
  model.write_text(json.dumps({**RECORD, "rows": [{"model": "resnet50"}]}))
  rows = [row("a", "fwd", 22.0, 44.0), row("b", "fwd", 36.0, 20.0), row("new", "fwd", 1.0, 1.0)]
  rows.append(row("c", "fwd", None, 1.0))
  after.write_text(json.dumps({**RECORD, "rows": rows}))
  against = ["--recorded", str(before), str(model)]
  assert compare.main([str(after), *against]) == 1
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split()[2:] == ["fwd", "ours", "0.995", "lax", "1.049", "of", "3", "cases"]
  assert lines[1] == "" and len(lines) == 5
  assert lines[2].startswith("conv.c f32 fwd") and "10.0 -> fails us (nan)" in lines[2]
  assert lines[3].startswith("conv.a f32 fwd") and "20.0 -> 22.0 us (1.10), lax's 1.10, floor 10.0" in lines[3]
  assert lines[4].startswith("conv.b f32 fwd") and "(0.90)" in lines[4]
  assert compare.main([str(after), *against, "--beyond", "1.2"]) == 1  # one fails
  after.write_text(json.dumps({**RECORD, "rows": rows[:-1]}))
  assert compare.main([str(after), *against, "--beyond", "1.2"]) == 0
  other = tmp_path / "other.json"
  other.write_text(json.dumps({**RECORD, "device": "Another GPU"}))
  assert compare.main([str(other), *against]) == 2


def test_the_device_of_most_rows_comes_first():
  other = {**copy.deepcopy(RECORD), "device": "Another GPU", "rows": RECORD["rows"][:2]}
  assert report.headline([other, RECORD]).startswith("**A GPU**")
  pages = report.by_device([other, RECORD], report.overview)
  assert pages.startswith("**A GPU**") and "**Another GPU**" in pages


def test_a_trial_run_is_refused():
  with pytest.raises(ValueError, match="--shrink 16"):
    report.by_device([{**RECORD, "shrink": 16}], report.overview)


def test_check_detects_a_difference(files):
  *records, readme = map(str, files)
  assert table.main([*records, "--pages", readme, "--check"]) == 1
  assert files[2].read_text() == README
  assert table.main([*records, "--pages", readme]) == 0
  assert table.main([*records, "--pages", readme, "--check"]) == 0
  files[2].write_text(files[2].read_text().replace("20.0 /", "19.0 /", 1))
  assert table.main([*records, "--pages", readme, "--check"]) == 1


def test_a_page_without_markers_stays(files):
  files[2].write_text("# Title\n")
  assert table.main([*map(str, files[:2]), "--pages", str(files[2])]) == 0
  assert files[2].read_text() == "# Title\n"


def test_chosen_cases():
  works = [harness.Work("f", case, "float32", "fwd", None, None, (), 0) for case in ("a1", "a2", "b1", "a3", "b2")]

  def names(*options):
    return [work.case for work in run.chosen(works, run.parse(list(options)))]

  assert names() == ["a1", "a2", "b1", "a3", "b2"]
  assert names("--filter", "a", "b2", "--skip", "2") == ["a1", "a3"]
  assert names("--part", "1/2") + names("--part", "2/2") == ["a1", "b1", "b2", "a2", "a3"]


@pytest.mark.parametrize(
  ("family", "text"),
  [
    ("conv", "mnist.conv2"), ("conv", "ensemble"), ("conv_fused", "mbv2"), ("conv_precise", "conv2"),
    ("pool", "rn50"), ("softmax", "axis"), ("activation", "tanh"),
  ],
)
def test_trial_run(family, text, tmp_path):
  out = tmp_path / "a.json"
  options = ["--families", family, "--quick", "--shrink", "64", "--filter", text, "--dtypes", "float32"]
  command = [sys.executable, "-m", "benchmarks", "--out", str(out), *options]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert result.returncode == 0, result.stderr
  record = json.loads(out.read_text())
  assert record["rows"] and record["command"].startswith("python -m benchmarks --out benchmarks/results/a.json")
  for r in record["rows"]:
    assert r["us_ours"] and r["us_lax"] and r["us_floor"], r
    assert r["ratio"] == pytest.approx(r["us_lax"] / r["us_ours"])


def test_trial_run_of_products(tmp_path, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which it changes
  names = ("vgg.3x3.256@56", "sd.1x1.640@32")  # of which the second is too small
  monkeypatch.setattr(conv_cases, "DENSE", [case for case in conv_cases.DENSE if case.name in names])
  out = tmp_path / "product.json"
  record = product.main(["--shrink", "16", "--out", str(out), "--dtypes", "float32"])
  assert [(row["case"], row["direction"]) for row in record["rows"]] == [
    ("vgg.3x3.256@56", direction) for direction in ("fwd", "dgrad", "wgrad")
  ]
  for row in json.loads(out.read_text())["rows"]:
    assert row["us_ours"] and row["us_product"], row
    assert math.prod(row["size"]) == 2 * 9 * 3 * 3 * 16 * 16
  shown = table.products([{**RECORD, "rows": record["rows"]}])
  assert shown.count("| `vgg.3x3.256@56` |") == 3 and "18×16×144" in shown


def test_trial_run_of_launches(capsys, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which it changes
  times = launch.main(calls=2)
  assert len(times) == 4 * len(launch.LAYERS) + 1 + 6
  assert all(t > 0 for t in times.values())
  assert capsys.readouterr().out.count(" us a ") == len(times)
