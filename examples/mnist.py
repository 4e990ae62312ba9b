"""Handwritten digits with jaxdnn: a convolutional network trained from scratch.

  pip install '.[examples]'
  python examples/mnist.py                                 # the digits that scikit-learn ships: offline, CPU or GPU
  python examples/mnist.py --data DIR --epochs 30          # MNIST: its four IDX files, raw or .gz, lie in DIR
  python examples/mnist.py --data DIR --seeds 0 1 2        # three runs, the best one marked
  python examples/mnist.py --model lenet

`cnn` is the network of a well-known hand-written CUDA implementation, with its recipe: three convolutions (5x5 to 32
channels, 5x5 to 64, 3x3 to 128, no padding), each with a relu, the first two with 2x2 max pooling; two dense layers,
512-128-10; log-softmax and negative log-likelihood; batches of 128, RMSProp with beta 0.99, learning rate 0.003, L2
1e-4 on every parameter. That implementation reported 93 % on MNIST's test images after 1 epoch, 99.12 % after 10 and
99.23 % after 30, at 10 s an epoch on a GTX 1070. `lenet` is the other classic: 5x5 to 6 channels, 5x5 to 16, dense
400-120-84-10, on images padded to 32x32, with relu and max pooling; batches of 16, SGD with learning rate 0.001 and
momentum 0.9.

The data stay on the device, and an epoch is one compiled program: shuffle, then scan over the batches. Images that do
not fill a last batch are left out of that epoch; the next shuffle leaves out others. MNIST comes as it is, at one
learning rate; the digits, 40 times fewer, in batches of 32 and moved by up to 2 pixels in every epoch, while the
learning rate falls to zero along a cosine.

It prints one line per epoch and a table at the end, and writes two pictures: curves.png, the loss and accuracy, and
misclassified.png, the test images that the best run got wrong. `--json FILE` records everything for later.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


def fail(message: str) -> None:
  """Ends the program with one line."""
  print(f"mnist.py: {message}", file=sys.stderr)
  raise SystemExit(2)


try:
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  import sklearn as sklearn
  from jax import Array
  from tqdm import tqdm

  import jaxdnn
  import mnist_data
  from mnist_report import Run, best, epoch_line, plot_curves, plot_misclassified, table
except ModuleNotFoundError as missing:
  fail(f"the module {missing.name!r} is missing; in jaxdnn's source folder: pip install '.[examples]'")

Params = dict[str, dict[str, Array]]

# Networks ------------------------------------------------------------------------------------------------------------


def init(key: Array, shapes: dict[str, tuple[int, ...]]) -> Params:
  """Glorot initialisation, biases of zero. The last axis of a shape is the outputs."""
  weights = jax.nn.initializers.glorot_normal()
  keys = jax.random.split(key, len(shapes))
  return {
    name: {"w": weights(k, shape), "b": jnp.zeros(shape[-1])}
    for k, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


CNN = {
  "conv1": (5, 5, 1, 32),
  "conv2": (5, 5, 32, 64),
  "conv3": (3, 3, 64, 128),
  "dense1": (2 * 2 * 128, 128),
  "dense2": (128, 10),
}
LENET = {
  "conv1": (5, 5, 1, 6),
  "conv2": (5, 5, 6, 16),
  "dense1": (5 * 5 * 16, 120),
  "dense2": (120, 84),
  "dense3": (84, 10),
}


# A dense layer is a convolution without spatial dimensions, so all of the arithmetic runs in jaxdnn's kernels, which
# give the same bits on every run.


def cnn(params: Params, x: Array) -> Array:
  """Logits of images `x`, (N, 28, 28, 1)."""
  x = jaxdnn.conv(x, **params["conv1"], activation="relu")
  x = jaxdnn.max_pool(x, (2, 2), stride=2)
  x = jaxdnn.conv(x, **params["conv2"], activation="relu")
  x = jaxdnn.max_pool(x, (2, 2), stride=2)
  x = jaxdnn.conv(x, **params["conv3"], activation="relu")
  x = jaxdnn.conv(x.reshape(len(x), -1), **params["dense1"], activation="relu")
  return jaxdnn.conv(x, **params["dense2"])


def lenet(params: Params, x: Array) -> Array:
  """Logits of images `x`, (N, 32, 32, 1)."""
  x = jaxdnn.conv(x, **params["conv1"], activation="relu")
  x = jaxdnn.max_pool(x, (2, 2), stride=2)
  x = jaxdnn.conv(x, **params["conv2"], activation="relu")
  x = jaxdnn.max_pool(x, (2, 2), stride=2)
  x = jaxdnn.conv(x.reshape(len(x), -1), **params["dense1"], activation="relu")
  x = jaxdnn.conv(x, **params["dense2"], activation="relu")
  return jaxdnn.conv(x, **params["dense3"])


def rmsprop(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  """RMSProp; the L2 term enters the gradient, of biases too.

  Two choices keep it steady at this learning rate, where the recipe is silent. The second moment, which starts at
  zero, is corrected for that: else the first step would move every weight by 10 learning rates. And epsilon stands
  under the root and is not tiny: once the gradients have shrunk, the steps shrink with them.
  """
  rms = optax.rmsprop(learning_rate, decay=0.99, eps=1e-5, bias_correction=True)
  return optax.chain(optax.add_decayed_weights(1e-4), rms)


class Model(NamedTuple):
  logits: Callable[[Params, Array], Array]
  shapes: dict[str, tuple[int, ...]]
  image_size: int
  optimizer: Callable[[optax.ScalarOrSchedule], optax.GradientTransformation]
  learning_rate: float
  batch_size: int


MODELS = {
  "cnn": Model(cnn, CNN, 28, rmsprop, 0.003, 128),
  "lenet": Model(lenet, LENET, 32, partial(optax.sgd, momentum=0.9), 0.001, 16),
}

# Training ------------------------------------------------------------------------------------------------------------


class State(NamedTuple):
  params: Params
  moments: optax.OptState
  key: Array


class Data(NamedTuple):
  """What is on the device."""

  train_images: Array
  train_labels: Array
  test_images: Array
  test_labels: Array


def to_device(dataset: mnist_data.Dataset, image_size: int, dtype: str) -> Data:
  """Images from 0, the background, to 1, with as much of it around them as `image_size` asks for."""
  margin = (image_size - mnist_data.SIZE) // 2

  def images(pixels: np.ndarray) -> Array:
    pixels = np.pad(pixels, [(0, 0), (margin, margin), (margin, margin)])
    return jnp.asarray(pixels[..., None] / np.float32(255), dtype)

  return Data(
    images(dataset.train_images),
    jnp.asarray(dataset.train_labels, jnp.int32),
    images(dataset.test_images),
    jnp.asarray(dataset.test_labels, jnp.int32),
  )


def start(model: Model, optimizer: optax.GradientTransformation, seed: int) -> State:
  key, k = jax.random.split(jax.random.key(seed))
  params = init(k, model.shapes)
  return State(params, optimizer.init(params), key)


def log_probabilities(model: Model, params: Params, images: Array) -> Array:
  """The network in the images' type, its parameters and the softmax in float32."""
  logits = model.logits(jax.tree.map(lambda p: p.astype(images.dtype), params), images)
  return jaxdnn.log_softmax(logits.astype(jnp.float32))


def step(
  model: Model, optimizer: optax.GradientTransformation, state: State, images: Array, labels: Array
) -> tuple[State, tuple[Array, Array]]:
  """One update; the loss and the accuracy are those before it."""

  def loss_and_accuracy(params: Params) -> tuple[Array, Array]:
    log_probs = log_probabilities(model, params, images)
    return jaxdnn.nll_loss(log_probs, labels), accuracy(log_probs, labels)

  (loss, right), gradient = jax.value_and_grad(loss_and_accuracy, has_aux=True)(state.params)
  updates, moments = optimizer.update(gradient, state.moments, state.params)
  return State(optax.apply_updates(state.params, updates), moments, state.key), (loss, right)


def shifted(key: Array, images: Array, most: int) -> Array:
  """Each image moved by up to `most` pixels in either direction; the margin that leaves on one side enters opposite."""
  shifts = jax.random.randint(key, (len(images), 2), -most, most + 1)
  return jax.vmap(partial(jnp.roll, axis=(0, 1)))(images, shifts)


def accuracy(log_probs: Array, labels: Array) -> Array:
  return jnp.mean((log_probs.argmax(-1) == labels).astype(jnp.float32))


def epoch(
  model: Model,
  optimizer: optax.GradientTransformation,
  batch_size: int,
  shift: int,
  state: State,
  images: Array,
  labels: Array,
) -> tuple[State, tuple[Array, Array]]:
  """All batches of one shuffle; the mean loss and accuracy over them."""
  key, k = jax.random.split(state.key)
  if shift:
    k, k_shift = jax.random.split(k)
    images = shifted(k_shift, images, shift)
  batches = len(labels) // batch_size
  order = jax.random.permutation(k, len(labels))[: batches * batch_size].reshape(batches, batch_size)
  state, history = jax.lax.scan(
    lambda state, i: step(model, optimizer, state, images[i], labels[i]), state._replace(key=key), order
  )
  return state, jax.tree.map(jnp.mean, history)


def evaluate(model: Model, batch_size: int, params: Params, images: Array, labels: Array) -> tuple[Array, Array, Array]:
  """Loss, accuracy and the log-probabilities of every image, batch by batch and then what is left over."""
  batches = len(images) // batch_size
  full, rest = images[: batches * batch_size], images[batches * batch_size :]
  network = partial(log_probabilities, model, params)
  parts = []
  if batches:
    parts.append(jax.lax.map(network, full.reshape(batches, batch_size, *full.shape[1:])).reshape(len(full), -1))
  if len(rest):
    parts.append(network(rest))
  log_probs = jnp.concatenate(parts)
  return jaxdnn.nll_loss(log_probs, labels), accuracy(log_probs, labels), log_probs


class Programs(NamedTuple):
  epoch: Callable[..., Any]
  evaluate: Callable[..., Any]
  compile_seconds: float


def compile_programs(
  model: Model, optimizer: optax.GradientTransformation, batch_size: int, shift: int, data: Data
) -> Programs:
  """Traces and compiles the training and the evaluation, ahead of the first run and for all seeds."""
  began = time.perf_counter()
  state = jax.eval_shape(partial(start, model, optimizer), 0)
  train = jax.jit(partial(epoch, model, optimizer, batch_size, shift), donate_argnums=0)
  train_program = train.lower(state, data.train_images, data.train_labels).compile()
  test = jax.jit(partial(evaluate, model, 500))
  test_program = test.lower(state.params, data.test_images, data.test_labels).compile()
  return Programs(train_program, test_program, time.perf_counter() - began)


def train(
  model: Model, optimizer: optax.GradientTransformation, programs: Programs, data: Data, seed: int, args: Any
) -> Run:
  """Runs all epochs of one seed, with a line for each."""
  state = start(model, optimizer, seed)
  trained = len(data.train_labels) // args.batch_size * args.batch_size
  records = []
  with tqdm(total=args.epochs, desc=f"seed {seed}", unit="epoch", leave=False, disable=None) as bar:
    for number in range(1, args.epochs + 1):
      began = time.perf_counter()
      state, (loss, train_accuracy) = jax.block_until_ready(programs.epoch(state, data.train_images, data.train_labels))
      seconds = time.perf_counter() - began
      test_loss, test_accuracy, log_probs = programs.evaluate(state.params, data.test_images, data.test_labels)
      record = {
        "epoch": number,
        "loss": float(loss),
        "train_accuracy": float(train_accuracy),
        "test_loss": float(test_loss),
        "test_accuracy": float(test_accuracy),
        "seconds": seconds,
        "images_per_second": trained / seconds,
      }
      records.append(record)
      tqdm.write(f"seed {seed}  " + epoch_line(record), file=sys.stdout)
      bar.update()
  return Run(seed, records, np.asarray(log_probs))


def report(
  runs: list[Run], programs: Programs, dataset: mnist_data.Dataset, args: argparse.Namespace
) -> dict[str, Any]:
  """What `--json` records."""
  device = jax.devices()[0]
  return {
    "model": args.model,
    "dataset": dataset.name,
    "train_images": len(dataset.train_labels),
    "test_images": len(dataset.test_labels),
    "batch_size": args.batch_size,
    "learning_rate": args.learning_rate,
    "schedule": args.schedule,
    "shift": args.shift,
    "dtype": args.dtype,
    "precision": jax.config.jax_default_matmul_precision or "default",
    "platform": device.platform,
    "device": device.device_kind,
    "jax": jax.__version__,
    "jaxdnn": jaxdnn.__version__,
    "compile_seconds": programs.compile_seconds,
    "best_seed": best(runs).seed,
    "runs": [{"seed": run.seed, "epochs": run.epochs} for run in runs],
  }


# Command line --------------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
  def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
      value = kind(text)
      if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
      return value

    convert.__name__ = kind.__name__
    return convert

  parser = argparse.ArgumentParser(
    description="Trains a convolutional network on handwritten digits with jaxdnn.",
  )
  parser.add_argument("--data", metavar="DIR", help="folder of MNIST's IDX files, raw or .gz; without it, digits")
  parser.add_argument("--model", choices=sorted(MODELS), default="cnn")
  parser.add_argument("--epochs", type=positive(int), help="20 on the digits, 10 on MNIST")
  parser.add_argument("--batch-size", type=positive(int), help="128 for cnn (32 on the digits), 16 for lenet")
  parser.add_argument("--learning-rate", type=positive(float), help="0.003 for cnn, 0.001 for lenet")
  parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each")
  parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the activations")
  parser.add_argument("--schedule", choices=["constant", "cosine"], help="of the learning rate; cosine on the digits")
  shifts = range(mnist_data.MARGIN + 1)
  parser.add_argument("--shift", type=int, choices=shifts, help="moves training images so far; 2 on the digits")
  parser.add_argument("--limit", type=positive(int), metavar="N", help="train on the first N images alone")
  parser.add_argument("--output", type=Path, default=Path("mnist-output"), metavar="DIR", help="folder of the pictures")
  parser.add_argument("--no-plots", action="store_true", help="write no pictures")
  parser.add_argument("--json", type=Path, metavar="FILE", help="record settings and every epoch there")
  args = parser.parse_args(arguments)
  args.epochs = args.epochs or (10 if args.data else 20)
  # The digits are 40 times fewer than MNIST's, so they come in smaller batches.
  args.batch_size = args.batch_size or min(MODELS[args.model].batch_size, 128 if args.data else 32)
  # A network learns so few by heart unless they move, and comes to rest only where its steps shrink.
  args.shift = (0 if args.data else 2) if args.shift is None else args.shift
  args.schedule = args.schedule or ("constant" if args.data else "cosine")
  args.learning_rate = args.learning_rate or MODELS[args.model].learning_rate
  return args


def main(arguments: list[str] | None = None) -> None:
  args = parse(arguments)
  model = MODELS[args.model]
  try:
    dataset = mnist_data.load(args.data)
    if args.limit:
      dataset = dataset._replace(
        train_images=dataset.train_images[: args.limit], train_labels=dataset.train_labels[: args.limit]
      )
    if args.batch_size > len(dataset.train_labels):
      fail(f"--batch-size {args.batch_size} is more than the {len(dataset.train_labels)} training images")
    # Before training, not after: a run must not be lost to a name that cannot be written.
    if not args.no_plots:
      args.output.mkdir(parents=True, exist_ok=True)
    if args.json:
      args.json.open("a").close()
  except mnist_data.DataError as error:
    fail(str(error))
  except OSError as error:
    fail(f"{error.filename}: {error.strerror}")

  device = jax.devices()[0]
  learning_rate = args.learning_rate
  if args.schedule == "cosine":
    steps = args.epochs * (len(dataset.train_labels) // args.batch_size)
    learning_rate = optax.cosine_decay_schedule(args.learning_rate, steps)
  optimizer = model.optimizer(learning_rate)
  data = to_device(dataset, model.image_size, args.dtype)
  print(
    f"{args.model} on {dataset.name}: {len(dataset.train_labels)} training and {len(dataset.test_labels)} test images, "
    f"batches of {args.batch_size}, {args.dtype}, on {device.device_kind}"
  )
  programs = compile_programs(model, optimizer, args.batch_size, args.shift, data)
  print(f"compiled in {programs.compile_seconds:.1f} s")
  runs = [train(model, optimizer, programs, data, seed, args) for seed in args.seeds]
  print(f"\n{table(runs)}")

  if args.json:
    args.json.write_text(json.dumps(report(runs, programs, dataset, args), indent=1) + "\n")
    print(f"wrote {args.json}")
  if not args.no_plots:
    curves, sheet = args.output / "curves.png", args.output / "misclassified.png"
    plot_curves(runs, f"{args.model} on {dataset.name}, {device.device_kind}", curves)
    plot_misclassified(best(runs), dataset.test_images, dataset.test_labels, sheet)
    print(f"wrote {curves} and {sheet}")


if __name__ == "__main__":
  main()
