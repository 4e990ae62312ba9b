"""Convolution of whole training batches: layers of `conv` with the images that one device has in a step.

With 32 images or 4, as in `conv`, many layers take ten microseconds, of which a kernel's beginning and end are half.
"""

from collections.abc import Iterator

import conv_cases
from benchmarks.conv import QUICK, directions, shrunk
from benchmarks.harness import Work


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  for case in conv_cases.LARGE:
    if quick and not case.name.startswith(QUICK):
      continue
    for dtype in dtypes:
      yield from directions("conv_large", shrunk(case, shrink), dtype)
