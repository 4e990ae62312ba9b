"""Handwritten digits for `mnist.py`: MNIST from its IDX files, or the small set that scikit-learn ships.

Whatever is wrong with a file ends in one `DataError`, whose message names the file and what was found in it.
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

IMAGES, LABELS = 2051, 2049  # the magic numbers: 0x08 for unsigned bytes, then the number of dimensions
SIZE = 28
MARGIN = 4  # around the box that the digits fill


class DataError(Exception):
  """The data cannot be used; the message says why in one line."""


class Dataset(NamedTuple):
  """Images are uint8 of shape (N, 28, 28), ink bright on dark; labels are uint8 of shape (N,), 0 to 9."""

  name: str
  train_images: np.ndarray
  train_labels: np.ndarray
  test_images: np.ndarray
  test_labels: np.ndarray


def load(directory: str | None) -> Dataset:
  """MNIST from `directory`, or scikit-learn's digits where that is None."""
  return load_digits() if directory is None else load_mnist(Path(directory))


def load_digits() -> Dataset:
  """The 1797 real handwritten digits of scikit-learn, the same fifth of every class held out each time.

  They are 8x8. MNIST's fill a box of 20x20 amid 28x28, and so do these, interpolated, so that one network takes both.
  """
  import jax
  from sklearn import datasets, model_selection

  digits = datasets.load_digits()
  box = SIZE - 2 * MARGIN
  boxes = np.asarray(jax.image.resize(digits.images.astype(np.float32), (len(digits.images), box, box), "linear"))
  images = np.pad(np.rint(boxes * (255 / 16)).astype(np.uint8), [(0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)])
  labels = digits.target.astype(np.uint8)
  split = model_selection.train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
  train_images, test_images, train_labels, test_labels = split
  return Dataset("digits", train_images, train_labels, test_images, test_labels)


def load_mnist(directory: Path) -> Dataset:
  """MNIST's four IDX files, raw or gzipped, under their usual names."""
  if not directory.is_dir():
    raise DataError(f"{directory}: {'not a directory' if directory.exists() else 'no such directory'}")
  train = load_pair(directory, "train")
  test = load_pair(directory, "t10k")
  return Dataset("MNIST", *train, *test)


def load_pair(directory: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
  """The images and labels of one split, checked against each other."""
  image_file = find(directory, f"{split}-images", "idx3-ubyte")
  label_file = find(directory, f"{split}-labels", "idx1-ubyte")
  images, labels = read_idx(image_file, IMAGES), read_idx(label_file, LABELS)
  if images.shape[1:] != (SIZE, SIZE):
    height, width = images.shape[1:]
    raise DataError(f"{image_file}: images are {height}x{width}, expected {SIZE}x{SIZE}")
  if len(images) != len(labels):
    raise DataError(f"{label_file}: {len(labels)} labels, but {image_file.name} holds {len(images)} images")
  if labels.max() > 9:
    where = int(np.argmax(labels > 9))
    raise DataError(f"{label_file}: label {labels[where]} at position {where}, expected 0 to 9")
  return images, labels


def find(directory: Path, stem: str, suffix: str) -> Path:
  """The file of that name: both spellings in circulation, with or without `.gz`."""
  names = [f"{stem}{separator}{suffix}{gz}" for separator in "-." for gz in ("", ".gz")]
  for name in names:
    if (directory / name).is_file():
      return directory / name
  raise DataError(f"{directory}: neither {names[0]} nor {names[1]} is there")


def read_idx(path: Path, magic: int) -> np.ndarray:
  """The array of an IDX file: a big-endian magic number and extents, then the bytes."""
  data = read_bytes(path)
  kinds = {IMAGES: "images", LABELS: "labels"}
  found = int.from_bytes(data[:4], "big")
  if len(data) < 4:
    raise DataError(f"{path}: {len(data)} bytes, too short for an IDX file")
  if found != magic:
    what = f", which means {kinds[found]}" if found in kinds else ", not an IDX file of this kind"
    raise DataError(f"{path}: magic number {found}{what}; expected {magic} for {kinds[magic]}")
  start = 4 + 4 * (magic & 0xFF)
  if len(data) < start:
    raise DataError(f"{path}: truncated: {len(data)} bytes, the header alone takes {start}")
  shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
  promised, held = math.prod(shape), len(data) - start
  if promised == 0:
    raise DataError(f"{path}: empty: the header says {'x'.join(map(str, shape))} {kinds[magic]}")
  if held != promised:
    fault = "truncated" if held < promised else "too long"
    raise DataError(f"{path}: {fault}: {held} bytes of data where the header promises {promised}")
  return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_bytes(path: Path) -> bytes:
  """A file's content, decompressed if it is gzip (by its first bytes: names do not always tell)."""
  try:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
  except EOFError:
    raise DataError(f"{path}: truncated gzip file") from None
  except (gzip.BadGzipFile, zlib.error) as error:
    raise DataError(f"{path}: corrupt gzip file: {error}") from None
  except OSError as error:
    raise DataError(f"{path}: {error.strerror}") from None
