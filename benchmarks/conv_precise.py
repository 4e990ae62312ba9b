"""Convolution of float32 that is not rounded to TF32: `precision=HIGHEST` and HIGH beside lax's HIGHEST.

lax's HIGH rounds to TF32, as its default does. At HIGHEST it may transform windows of 3x3 (Winograd), which then are
fewer multiplications than the floor counts.
"""

from collections.abc import Iterator

import conv_cases
from benchmarks.conv import directions, shrunk
from benchmarks.harness import Work

CASES = (
  "rn50.stem7x7s2", "rn50.3x3.64@56", "rn50.1x1.64-256@56", "rn50.3x3s2.128@56", "rn50.3x3.256@14",
  "rn50.1x1.1024-256@14", "sd.3x3.320@64", "unet3d.3x3x3.32@96", "odd.3x3.65@56", "resnext.g32.128@56",
  "mbv2.dw3x3.144@56", "mnist.conv2", "rn50.3x3.512@7", "rn50.b1.3x3.64@56", "vit.patch16", "convnext.stem4x4s4",
  "rgb.3x3.64-3@256", "regnet.w8.152@14", "regnet.w24.408@14", "ensemble.e64.3x3.32@32", "wavenet.k2d512.64-128",
  "hifigan.up4s2.64-32", "mnist.conv1", "mnist.conv3", "rn50.b1.3x3.512@7",
)  # fmt: skip
QUICK = ("rn50.3x3.256@14", "mnist.conv2")


def work(dtypes: list[str], quick: bool = False, shrink: int = 1) -> Iterator[Work]:
  cases = {case.name: case for case in (*conv_cases.DENSE, *conv_cases.OTHERS)}
  for name in QUICK if quick else CASES:
    for precision in ("highest", "high") if "float32" in dtypes else ():
      yield from directions("conv_precise", shrunk(cases[name], shrink), "float32", precision=precision)
