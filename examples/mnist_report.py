"""What a training run leaves: a line per epoch, a table, and two pictures."""

import math
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter


class Run(NamedTuple):
  """One seed: a record per epoch, and the last epoch's log-probabilities of the test images."""

  seed: int
  epochs: list[dict[str, float]]
  log_probs: np.ndarray


def epoch_line(r: dict[str, float]) -> str:
  return (
    f"epoch {r['epoch']:3d}  loss {r['loss']:.4f}  accuracy {r['train_accuracy']:7.2%}"
    f"  test loss {r['test_loss']:.4f}  test accuracy {r['test_accuracy']:7.2%}"
    f"  {r['seconds']:.2f} s  {r['images_per_second']:,.0f} images/s"
  )


def best(runs: list[Run]) -> Run:
  """The run with the highest test accuracy after its last epoch."""
  return max(runs, key=lambda run: run.epochs[-1]["test_accuracy"])


def table(runs: list[Run]) -> str:
  """One row per seed: test accuracy after the epochs that the reference implementation reported, and after the last."""
  count = len(runs[0].epochs)
  marks = sorted({1, 10, 30, count} & set(range(1, count + 1)))
  header = ["seed", *(f"epoch {m}" for m in marks), "highest (epoch)", "loss", "s/epoch", "images/s"]
  rows = []
  for run in runs:
    top = max(run.epochs, key=lambda r: r["test_accuracy"])
    last = run.epochs[-1]
    rows.append(
      [
        f"{run.seed}{' *' if len(runs) > 1 and run is best(runs) else ''}",
        *(f"{run.epochs[m - 1]['test_accuracy']:.2%}" for m in marks),
        f"{top['test_accuracy']:.2%} ({top['epoch']})",
        f"{last['loss']:.4f}",
        f"{np.median([r['seconds'] for r in run.epochs]):.2f}",
        f"{np.median([r['images_per_second'] for r in run.epochs]):,.0f}",
      ]
    )
  widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
  lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
  lines.insert(1, "  ".join("-" * width for width in widths))
  notes = ["Test accuracy; loss of the last training epoch; medians of time and rate, without compilation."]
  if len(runs) > 1:
    notes.append("* the best seed, by the accuracy after the last epoch.")
  return "\n".join([*lines, *notes])


def plot_curves(runs: list[Run], title: str, path: Path) -> None:
  """Loss, and accuracy, over the epochs: training dashed, test solid, a colour for each seed."""
  figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
  for panel, quantity in zip(panels, ["loss", "accuracy"], strict=True):
    for i, run in enumerate(runs):
      epochs = [r["epoch"] for r in run.epochs]
      train = [r["loss" if quantity == "loss" else "train_accuracy"] for r in run.epochs]
      test = [r[f"test_{quantity}"] for r in run.epochs]
      panel.plot(epochs, train, "--", color=f"C{i}", marker=".", alpha=0.6, label=f"seed {run.seed}, training")
      panel.plot(epochs, test, "-", color=f"C{i}", marker=".", label=f"seed {run.seed}, test")
    panel.set(xlabel="epoch", ylabel=quantity)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)
  panels[0].set_yscale("log")
  panels[1].yaxis.set_major_formatter(PercentFormatter(1.0))
  panels[1].legend(fontsize="small")
  figure.suptitle(title)
  figure.savefig(path, dpi=120)
  plt.close(figure)


def plot_misclassified(run: Run, images: np.ndarray, labels: np.ndarray, path: Path) -> None:
  """The test images that the network got wrong, the most confident mistakes first, at most 40."""
  predicted = run.log_probs.argmax(-1)
  wrong = np.flatnonzero(predicted != labels)
  shown = wrong[np.argsort(-run.log_probs[wrong].max(-1), kind="stable")][:40]
  columns = 8
  rows = max(1, math.ceil(len(shown) / columns))
  figure, axes = plt.subplots(rows, columns, figsize=(1.4 * columns, 1.8 * rows + 0.7), layout="constrained")
  for axis in axes.flat:
    axis.axis("off")
  for axis, i in zip(axes.flat, shown, strict=False):
    axis.imshow(images[i], cmap="gray_r", vmin=0, vmax=255)
    confidence = np.exp(run.log_probs[i].max())
    axis.set_title(f"predicted {predicted[i]}, true {labels[i]}\n({confidence:.0%} sure)", fontsize=8)
  figure.suptitle(f"{len(wrong)} of {len(labels)} test images misclassified (seed {run.seed}); {len(shown)} shown")
  figure.savefig(path, dpi=120)
  plt.close(figure)
