"""Dense convolutions beside the plain matrix products that they amount to: `python -m benchmarks.product --out FILE`.

A layer's product has as many rows, columns and terms, which are the multiplications of a convolution that does not
leave out those by the zeros of padding; cuBLAS computes it of operands that are matrices in memory. What a product of
that size takes, rather than one of 8192³, says what the tensor cores can do for the layer.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jax import Array, lax

import conv_cases
from benchmarks import harness
from benchmarks.conv import count, directions, shrunk
from benchmarks.harness import Draw, Work
from conv_cases import ConvCase

LEAST_FLOPS = 12e9
"""Of the layers that are timed. In less than some 20 µs a kernel's beginning and end count most."""


def products(case: ConvCase, dtype: str) -> Iterator[tuple[Work, Work, tuple[int, int, int]]]:
  """A layer of stride 1 in each direction, its product, and how many rows, columns and terms that has."""
  outputs, taps = case.batch * math.prod(count(case).outputs), math.prod(case.window)
  inputs = case.batch * math.prod(case.spatial)
  sizes = {
    "fwd": (outputs, case.k, taps * case.c),
    "dgrad": (inputs, case.c, taps * case.k),
    "wgrad": (taps * case.c, case.k, outputs),
  }
  for work in directions("product", case, dtype):
    rows, columns, terms = sizes[work.direction]
    # As the convolution finds them: x and y lie by pixels, and the filter by (tap, channel) pairs.
    a = Draw((terms, rows) if work.direction == "wgrad" else (rows, terms), dtype)
    b = Draw((columns, terms) if work.direction == "dgrad" else (terms, columns), dtype)
    contracted = ((int(work.direction != "wgrad"),), (int(work.direction == "dgrad"),))

    def multiply(a: Array, b: Array, contracted: tuple = contracted) -> Array:
      return lax.dot_general(a, b, (contracted, ((), ())))

    product = Work(
      "product", case.name, dtype, work.direction, multiply, multiply, (a, b), work.bytes, work.flops, dtype, tuned=True
    )
    yield work, product, sizes[work.direction]


def main(arguments: list[str] | None = None) -> dict:
  arguments = sys.argv[1:] if arguments is None else arguments
  parser = argparse.ArgumentParser(prog="python -m benchmarks.product", description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, metavar="FILE", help="record to this JSON file, row by row")
  parser.add_argument("--dtypes", nargs="+", choices=harness.DTYPES, default=["bfloat16"])
  parser.add_argument("--shrink", type=int, default=1, metavar="N", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false".strip()  # cuBLAS
  clock, record = harness.start(harness.command_line("benchmarks.product", arguments), args.shrink)
  ceilings, rows = record["ceilings"], record.setdefault("rows", [])
  for case in conv_cases.DENSE:
    flops = 2 * case.batch * math.prod((*count(case).outputs, *case.window, case.c, case.k))
    if flops < LEAST_FLOPS or max(case.stride) > 1:
      continue
    for dtype in args.dtypes:
      for work, product, size in products(shrunk(case, args.shrink), dtype):
        ours = harness.measure(work, {"ours": harness.attempt(work.ours, work)}, ceilings, clock)
        plain = harness.measure(product, {"lax": harness.attempt(product.lax, product)}, ceilings, clock)
        rows.append({
          "case": case.name, "dtype": dtype, "direction": work.direction, "size": size, "flops": 2 * math.prod(size),
          "us_ours": ours["us_ours"], "us_product": plain["us_lax"],
        })  # fmt: skip
        print(rows[-1], flush=True)
        harness.save(args.out, record)
  return record


if __name__ == "__main__":
  main()
