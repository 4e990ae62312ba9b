"""Training steps of whole networks: `python -m benchmarks.models --out benchmarks/results/models.json`.

One step is forward, backward and SGD with momentum, with parameters in float32, all else in bfloat16, on random images.
Each network (`networks.py`) is trained in four ways, in one process:

- `convolution`: Flax's network with `jaxdnn.conv_general_dilated` in place of lax's
- `none`: with a stand-in for the convolutions that costs nearly nothing, compiled only: what the rest takes to compile
- `all`: normalisation, activations and pooling are jaxdnn's too
- `lax`: as Flax has it

They run in this order, each for all networks, so that what XLA's autotuner learns of the rest of a network is to the
advantage of those that jaxdnn is compared with. The wall time is that of the program as XLA compiles it by default,
with graphs of kernels; the kernels' own times are those of another without graphs, into which CUPTI need not see.
"""

import argparse
import itertools
import math
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array, lax

import jaxdnn
from benchmarks import harness
from benchmarks.networks import ConvNeXt, MobileNetV2, Network, ResNet

OPTIMIZER = optax.sgd(1e-3, momentum=0.9)
STEPS, PASSES, PROFILED = 10, 5, 3
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


class Model(NamedTuple):
  network: type[Network]
  batch: int
  small: dict[str, Any]
  """Fields of a network of the same kind for a trial without a GPU."""


MODELS = {
  "resnet50": Model(ResNet, 128, {"stages": (1, 1), "width": 8}),
  "convnext_t": Model(ConvNeXt, 128, {"stages": (1, 1), "width": 8}),
  "mobilenetv2": Model(MobileNetV2, 256, {"stages": ((1, 8, 1, 1), (6, 8, 2, 2)), "last": 16}),
}


def stand_in(x: Array, w: Array, *arguments: Any, **options: Any) -> Array:
  """Of a convolution's shape, and with gradients in both operands, but one multiplication an element."""
  _, *out, _ = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, *arguments, **options), x, w).shape
  every = (slice(None, None, -(-n // o)) for n, o in zip(x.shape[1:-1], out, strict=True))
  return x[:, *every, :1] * w.sum(range(w.ndim - 1))


VARIANTS: dict[str, dict[str, Any]] = {
  "convolution": {"conv_general_dilated": jaxdnn.conv_general_dilated},
  "none": {"conv_general_dilated": stand_in},
  "all": {"conv_general_dilated": jaxdnn.conv_general_dilated, "ours": True},
  "lax": {},
}


def loss_of(network: Network, params: Any, rest: Any, images: Array, labels: Array) -> tuple[Array, Any]:
  """The loss, and the running statistics after it."""
  logits, rest = network.apply({"params": params, **rest}, images, mutable=["batch_stats"])
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), rest


def train(network: Network, state: Any, images: Array, labels: Array) -> tuple[Any, Array]:
  """One step: the next (parameters, running statistics, momenta), and the loss."""
  params, rest, momenta = state
  (loss, rest), grads = jax.value_and_grad(partial(loss_of, network), has_aux=True)(params, rest, images, labels)
  updates, momenta = OPTIMIZER.update(grads, momenta)
  return (optax.apply_updates(params, updates), rest, momenta), loss


def shape_of_state(network: Network, images: Any) -> Any:
  variables = jax.eval_shape(network.init, jax.random.key(0), images)
  params = variables.pop("params")
  return params, variables, jax.eval_shape(OPTIMIZER.init, params)


def draw_state(shapes: Any) -> Any:
  """Random kernels, unit scales and variances, else zeros; on the host, since XLA would compile each shape."""
  rng = np.random.default_rng(0)

  def leaf(path: Any, shape: Any) -> np.ndarray:
    name = jax.tree_util.keystr(path, simple=True, separator="/").rsplit("/", 1)[-1]
    if name == "kernel":
      return rng.standard_normal(shape.shape, np.float32) / np.sqrt(np.prod(shape.shape[:-1]))
    return np.full(shape.shape, 1.0 if name.startswith(("scale", "var")) else 0.0, shape.dtype)

  *variables, momenta = shapes
  zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), momenta)
  return (*jax.tree_util.tree_map_with_path(leaf, variables), zeros)


# Where the time goes -------------------------------------------------------------------------------------------------

KINDS = {
  "our convolutions, filter gradient": r"jaxdnn.*conv.*(Filter|Slices|UnalignedSum)",
  "our convolutions, forward": r"jaxdnn.*conv",
  "our other kernels": r"jaxdnn",
  "cuDNN, forward": r"fprop|forward",
  "cuDNN, data gradient": r"dgrad|bprop_data|backward_data",
  "cuDNN, filter gradient": r"wgrad|backward_filter|bprop_filter",
  "layout": r"transpose|copy|nchw|nhwc|convertTensor|tensorTransform",
  "cuDNN, other": r"cudnn|conv2d|depthwise|xmma.*conv|implicit",
  "matrix products": r"gemm|nvjet|cutlass|cublas|splitK|gemv|xmma|dot",
}
"""Of kernels, the first whose expression is found in the name; others are XLA's fusions."""


def kind_of(kernel: str) -> str:
  return next((kind for kind, text in KINDS.items() if re.search(text, kernel)), "XLA's fusions")


def by_kind(kernels: list[tuple[str, float]], program: str) -> dict[str, float]:
  """Milliseconds of each kind of kernel, in one step of the compiled `program`.

  The kernels that compute forward also compute data gradients. Which did what is the order of the program's calls.
  """
  calls = iter(re.findall(r'custom_call_target="jaxdnn\.conv_(fwd|dgrad)\.', program) * PROFILED)
  totals: dict[str, float] = {}
  for name, milliseconds in kernels:
    kind = kind_of(name)
    if kind == "our convolutions, forward" and next(calls, "") == "dgrad":
      kind = "our convolutions, data gradient"
    totals[kind] = totals.get(kind, 0.0) + milliseconds / PROFILED
  return totals


# Measuring -----------------------------------------------------------------------------------------------------------


class Stopwatch:
  """Seconds since the last time it was asked."""

  def __init__(self) -> None:
    self.began = time.perf_counter()

  def __call__(self) -> float:
    began, self.began = self.began, time.perf_counter()
    return self.began - began


def measure(model: Model, variant: str, small: bool, profile: Callable[..., Any] | None) -> dict[str, Any]:
  batch, size = (2, 32) if small else (model.batch, 224)
  network = model.network(**VARIANTS[variant], **(model.small if small else {}))
  images, labels = jax.ShapeDtypeStruct((batch, size, size, 3), np.float32), jax.ShapeDtypeStruct((batch,), np.int32)
  shapes = shape_of_state(network, images)
  seconds = Stopwatch()
  lowered = jax.jit(partial(train, network), donate_argnums=0).lower(shapes, images, labels)
  row: dict[str, Any] = {"variant": variant, "batch": batch, "seconds_lower": seconds()}
  step = lowered.compile()
  row["seconds_compile"] = seconds()
  if variant == "none":
    return row
  memory = step.memory_analysis()
  row["peak_bytes"] = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
  row["peak_bytes"] -= memory.alias_size_in_bytes
  rng = np.random.default_rng(1)
  state = jax.device_put(draw_state(shapes))
  data = jax.device_put((rng.standard_normal(images.shape, np.float32), rng.integers(0, 1000, batch, np.int32)))

  def run(program: harness.Program, steps: int) -> None:
    nonlocal state
    for _ in range(steps):
      state, loss = program(state, *data)
    row["loss"] = float(loss)

  run(step, 2)
  passes = []
  for _ in range(PASSES):
    seconds()
    run(step, STEPS)
    passes.append(seconds() / STEPS * 1e3)
  row["ms_wall"] = float(np.median(passes))
  if profile is not None:
    step = lowered.compile(WITHOUT_GRAPHS)
    run(step, 1)
    kernels = profile(partial(run, step, PROFILED))
    row["ms_device"] = sum(milliseconds for _, milliseconds in kernels) / PROFILED
    row["ms_by_kind"] = by_kind(kernels, step.as_text())
    row["kernels"] = longest(kernels)
  return row


def longest(kernels: list[tuple[str, float]], count: int = 60) -> list[tuple[str, float]]:
  """The names that take most of a step, and how many milliseconds."""
  totals: dict[str, float] = {}
  for name, milliseconds in kernels:
    totals[name[:160]] = totals.get(name[:160], 0.0) + milliseconds / PROFILED
  return sorted(totals.items(), key=lambda item: -item[1])[:count]


def line(row: dict[str, Any]) -> str:
  text = f"{row['model']:<12} {row['variant']:<12} lower {row['seconds_lower']:6.2f} s"
  text += f", compile {row['seconds_compile']:6.2f} s"
  if "ms_wall" in row:
    text += f", step {row['ms_wall']:7.2f} ms, {row['peak_bytes'] / 2**30:5.2f} GiB, loss {row['loss']:.3f}"
  kinds = sorted(row.get("ms_by_kind", {}).items(), key=lambda item: -item[1])
  if kinds:
    text += f"\n  device {row['ms_device']:.2f} ms: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds)
  return text


def main(arguments: list[str] | None = None) -> dict[str, Any]:
  arguments = sys.argv[1:] if arguments is None else arguments
  parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description="Times training steps.")
  parser.add_argument("--out", type=Path, metavar="FILE", help="record to this JSON file, row by row")
  parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
  parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
  parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing more after this time")
  parser.add_argument("--shrink", type=int, default=1, metavar="N", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  began = time.perf_counter()
  _, record = harness.start(harness.command_line("benchmarks.models", arguments), args.shrink, graphs=True)
  profile = partial(harness.cupti_kernels, harness.cupti_extension()) if record["clock"] == "cupti" else None
  rows = record["rows"] = []
  for variant, name in itertools.product(args.variants, args.models):
    if record.get("seconds", 0.0) > args.seconds:
      break
    try:
      row = measure(MODELS[name], variant, args.shrink > 1, profile)
    except Exception as error:
      row = {"variant": variant, "error": harness.reason(error)}
    rows.append({"model": name, **row})
    print(line(rows[-1]) if "error" not in row else rows[-1], flush=True)
    record["seconds"] = time.perf_counter() - began
    harness.save(args.out, record)
    jax.clear_caches()
  return record


if __name__ == "__main__":
  main()
