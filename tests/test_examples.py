"""The example program as a user runs it, in a process of its own; and its reader of IDX files."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import mnist_data  # noqa: E402


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, str(EXAMPLES / "mnist.py"), *map(str, arguments)]
  return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def write_idx(path: Path, array: np.ndarray) -> None:
  header = [0x800 + array.ndim, *array.shape]
  data = b"".join(n.to_bytes(4, "big") for n in header) + array.astype(np.uint8).tobytes()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def mnist(tmp_path):
  """A folder of small IDX files, raw for training and gzipped for testing, that hold scikit-learn's digits."""
  digits = mnist_data.load_digits()
  write_idx(tmp_path / "train-images-idx3-ubyte", digits.train_images[:300])
  write_idx(tmp_path / "train-labels-idx1-ubyte", digits.train_labels[:300])
  write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", digits.test_images[:101])
  write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", digits.test_labels[:101])
  return tmp_path


# The program ---------------------------------------------------------------------------------------------------------


def test_cnn_reaches_98_percent_on_digits(tmp_path):
  done = run("--seeds", 0, 1, 2, "--json", "record.json", "--output", "pictures", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  record = json.loads((tmp_path / "record.json").read_text())
  assert (record["model"], record["dataset"], record["batch_size"]) == ("cnn", "digits", 32)
  assert (record["train_images"], record["test_images"]) == (1437, 360)
  assert record["compile_seconds"] > 0
  assert (record["schedule"], record["shift"]) == ("cosine", 2)
  assert min(r["epochs"][-1]["test_accuracy"] for r in record["runs"]) >= 0.98
  history = next(r["epochs"] for r in record["runs"] if r["seed"] == record["best_seed"])
  assert [r["epoch"] for r in history] == list(range(1, 21))
  assert history[-1]["loss"] < 0.1 * history[0]["loss"]
  for r in history:
    assert r["images_per_second"] == pytest.approx(44 * 32 / r["seconds"])
    assert f"epoch {r['epoch']:3d}  loss {r['loss']:.4f}" in done.stdout
  assert picture_colours(tmp_path / "pictures" / "curves.png") > 10
  assert picture_colours(tmp_path / "pictures" / "misclassified.png") > 10


def picture_colours(path: Path) -> int:
  from matplotlib import image

  pixels = image.imread(path)
  assert min(pixels.shape[:2]) > 100
  return len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0))


def test_images_move_by_every_step_up_to_the_most():
  import jax

  from mnist import shifted

  images = np.zeros((400, 28, 28, 1), np.float32)
  images[:, 12, 15] = np.arange(1, 401)[:, None]
  moved = np.asarray(shifted(jax.random.key(0), images, 2))
  assert (moved.max((1, 2, 3)) == np.arange(1, 401)).all() and np.count_nonzero(moved) == 400
  _, row, column, _ = np.nonzero(moved)
  steps = {(r - 12, c - 15) for r, c in zip(row.tolist(), column.tolist(), strict=True)}
  assert steps == {(r, c) for r in range(-2, 3) for c in range(-2, 3)}


def test_lenet_on_idx_files_and_the_best_of_two_seeds(mnist):
  arguments = ["--data", mnist, "--model", "lenet", "--learning-rate", 0.01, "--epochs", 6, "--seeds", 3, 4]
  done = run(*arguments, "--json", "record.json", "--no-plots", cwd=mnist)
  assert done.returncode == 0, done.stderr
  record = json.loads((mnist / "record.json").read_text())
  assert (record["dataset"], record["train_images"], record["test_images"]) == ("MNIST", 300, 101)
  last = {r["seed"]: r["epochs"][-1]["test_accuracy"] for r in record["runs"]}
  assert list(last) == [3, 4]
  assert min(last.values()) > 0.5
  assert last[record["best_seed"]] == max(last.values())
  assert f"{record['best_seed']} *" in done.stdout
  assert not (mnist / "mnist-output").exists()


def test_lenet_learns_and_repeats(tmp_path):
  losses = []
  for _ in range(2):
    arguments = ["--model", "lenet", "--epochs", 2, "--limit", 200, "--no-plots", "--json", "record.json"]
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    losses.append([r["loss"] for r in record["runs"][0]["epochs"]])
  assert losses[0] == losses[1]
  assert losses[0][1] < losses[0][0]


def test_bfloat16(tmp_path):
  arguments = ["--model", "lenet", "--dtype", "bfloat16", "--learning-rate", 0.01, "--epochs", 3]
  done = run(*arguments, "--no-plots", "--json", "record.json", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert json.loads((tmp_path / "record.json").read_text())["runs"][0]["epochs"][-1]["test_accuracy"] > 0.5


# Bad input -----------------------------------------------------------------------------------------------------------


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.startswith("mnist.py: ")
  assert done.stderr.count("\n") == 1
  for part in parts:
    assert part in done.stderr


def test_program_refuses_bad_input_in_one_line(mnist):
  assert_one_line(run("--data", mnist / "nowhere", cwd=mnist), "nowhere: no such directory")
  assert_one_line(run("--data", mnist, "--batch-size", 301, cwd=mnist), "--batch-size 301", "300 training images")
  assert_one_line(run("--data", mnist, "--json", "no/record.json", cwd=mnist), "no/record.json", "No such file")
  train_images = mnist / "train-images-idx3-ubyte"
  train_images.write_bytes(train_images.read_bytes()[:1000])
  assert_one_line(run("--data", mnist, cwd=mnist), "train-images-idx3-ubyte: truncated")


def test_program_names_a_missing_module(tmp_path):
  program = str(EXAMPLES / "mnist.py")
  for module in ["optax", "sklearn", "matplotlib", "tqdm"]:
    code = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.modules[{module!r}] = None
runpy.run_path({program!r}, run_name="__main__")"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert_one_line(done, repr(module), "pip install '.[examples]'")


TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = (
  "train-images-idx3-ubyte",
  "train-labels-idx1-ubyte",
  "t10k-images-idx3-ubyte.gz",
  "t10k-labels-idx1-ubyte.gz",
)


def cut(data: bytes) -> bytes:
  return data[:-7]


@pytest.mark.parametrize(
  ("name", "change", "message"),
  [
    (TRAIN_IMAGES, None, "neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz is there"),
    (TEST_LABELS, None, "neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz is there"),
    (TRAIN_IMAGES, cut, r"truncated: 235193 bytes of data where the header promises 235200"),
    (TRAIN_IMAGES, lambda data: data[:9], r"truncated: 9 bytes, the header alone takes 16"),
    (TRAIN_IMAGES, lambda data: b"", r"0 bytes, too short for an IDX file"),
    (TRAIN_IMAGES, lambda data: data + b"x", r"too long: 235201 bytes of data where the header promises 235200"),
    (TRAIN_IMAGES, lambda data: b"<html>" + data, r"magic number \d+, not an IDX file of this kind; expected 2051"),
    (TRAIN_LABELS, lambda data: data[:3] + b"\x03" + data[4:], r"magic number 2051, which means images; expected 2049"),
    (TRAIN_LABELS, lambda data: data[:4] + bytes(4), r"empty: the header says 0 labels"),
    (TRAIN_LABELS, lambda data: data[:18] + b"\x0a" + data[19:], r"label 10 at position 10, expected 0 to 9"),
    (TEST_IMAGES, cut, r"truncated gzip file"),
    (TEST_IMAGES, lambda data: data[:40] + b"\xff" * 20 + data[60:], r"corrupt gzip file"),
    (TEST_LABELS, lambda data: data[:2] + data[3:], r"corrupt gzip file"),
  ],
)
def test_reader_names_the_file_and_the_fault(mnist, name, change, message):
  path = mnist / name
  if change is None:
    path.unlink()
  else:
    path.write_bytes(change(path.read_bytes()))
  with pytest.raises(mnist_data.DataError, match=message) as error:
    mnist_data.load(str(mnist))
  assert "\n" not in str(error.value)
  assert str(path if change else mnist) in str(error.value)


def test_reader_compares_the_files(mnist):
  write_idx(mnist / TRAIN_LABELS, np.zeros(299))
  with pytest.raises(mnist_data.DataError, match=r"299 labels, but train-images-idx3-ubyte holds 300 images"):
    mnist_data.load(str(mnist))
  write_idx(mnist / TRAIN_IMAGES, np.zeros((299, 32, 30)))
  with pytest.raises(mnist_data.DataError, match=r"images are 32x30, expected 28x28"):
    mnist_data.load(str(mnist))
  with pytest.raises(mnist_data.DataError, match=r"not a directory"):
    mnist_data.load(str(mnist / TRAIN_IMAGES))


def test_reader_returns_what_was_written(mnist):
  digits, read = mnist_data.load(None), mnist_data.load(str(mnist))
  np.testing.assert_array_equal(read.train_images, digits.train_images[:300])
  np.testing.assert_array_equal(read.train_labels, digits.train_labels[:300])
  np.testing.assert_array_equal(read.test_images, digits.test_images[:101])
  np.testing.assert_array_equal(read.test_labels, digits.test_labels[:101])
  # Decompressed, under the name of the compressed file: content decides. And the other spelling of the names.
  (mnist / TEST_IMAGES).write_bytes(gzip.decompress((mnist / TEST_IMAGES).read_bytes()))
  (mnist / TRAIN_LABELS).rename(mnist / "train-labels.idx1-ubyte")
  assert mnist_data.load(str(mnist)).train_labels.tobytes() == read.train_labels.tobytes()


def test_digits_are_split_the_same_way_each_time():
  digits, again = mnist_data.load(None), mnist_data.load(None)
  assert digits.train_images.shape == (1437, 28, 28) and digits.test_images.shape == (360, 28, 28)
  np.testing.assert_array_equal(digits.test_images, again.test_images)
  assert set(np.bincount(digits.test_labels)) <= {35, 36, 37}
  assert digits.train_images.max() == 255 and digits.train_images[:, :4].max() == 0
