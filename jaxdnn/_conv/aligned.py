"""The algorithm `aligned`: zeros make the problem one that the fastest kernels take, and the result is cut out.

Those kernels move chunks of 16 bytes. Channels that are no whole chunks are padded with channels of zeros: all of them,
those of each group, or, of a depthwise convolution, the groups. Of windows side by side that leave elements at the end
the input is cut to whole windows. The copies cost a pass over memory for each operand that changes, which the planner's
model weighs against the problem as it is.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxdnn import _primitive
from jaxdnn._conv import primitives
from jaxdnn._conv.primitives import OPERANDS, plan
from jaxdnn._conv.spec import ConvSpec
from jaxdnn._transform.transform import resized

NAME = "aligned"
CLOCK_HZ = 1.755e9  # of the H200 that the model's cycles were fitted to
_CHUNK_BYTES = 16
# Fitted to an H200: of copies, which are slower where rows are a sector of 32 bytes or less; of one more kernel; and
# of the kernel between them.
_BYTES_PER_SECOND, _SECTOR_BYTES, _SLOWER = 3.0e12, 32, 3.0
_LAUNCH_SECONDS = 1.5e-6
_KERNEL = 1.15
_MOST_BYTES = 1 << 30  # of copies, where no `workspace_limit` says otherwise


class Extents(NamedTuple):
  """A problem's, with the groups of channels apart: those of one are c and k."""

  batch: int
  images: int
  x_spatial: tuple[int, ...]
  window: tuple[int, ...]
  y_spatial: tuple[int, ...]
  groups: int
  c: int
  k: int

  def of(self, name: str) -> tuple[int, ...]:
    """The shape of x, w or y, or of the bias, with the channels' groups as a dimension of their own."""
    return {
      "x": (self.batch, self.images, *self.x_spatial, self.groups, self.c),
      "y": (self.batch, self.images, *self.y_spatial, self.groups, self.k),
      "w": (self.batch, *self.window, self.c, self.groups, self.k),
      "bias": (self.batch, self.groups, self.k),
    }[name]

  def joined(self, name: str) -> tuple[int, ...]:
    *rest, groups, channels = self.of(name)
    return (*rest, groups * channels)


class Choice(NamedTuple):
  given: Extents
  wanted: Extents
  spec: ConvSpec
  plan: dict[str, Any]
  copies_bytes: int
  seconds: float


def choose(
  result: str, a: Any, b: Any, spec: ConvSpec, dtype: Any, *, residual: bool = False, hopper: bool = True
) -> Choice | None:
  """The fastest of the larger problems, copies included; or None if there is none within the workspace's limit, which
  is 1 GiB by default."""
  given = _extents(result, a, b, spec)
  found = []
  for wanted in _larger(given, spec, _CHUNK_BYTES // np.dtype(a.dtype).itemsize):
    larger_a, larger_b = (jax.ShapeDtypeStruct(wanted.joined(name), a.dtype) for name in OPERANDS[result])
    copying, held = 0.0, 0
    for name in [*OPERANDS[result], result, *(["y"] if residual else [])]:
      if given.of(name) != wanted.of(name):
        itemsize = np.dtype(dtype if name == result else a.dtype).itemsize
        before, after = (math.prod(extents.of(name)) * itemsize for extents in (given, wanted))
        row = wanted.joined(name)[-1] * itemsize
        slower = _SLOWER if row <= _SECTOR_BYTES else 1
        copying += (before + after) * slower / _BYTES_PER_SECOND + _LAUNCH_SECONDS
        held += after
    if held > (_MOST_BYTES if spec.workspace_limit is None else spec.workspace_limit):
      continue
    larger = _spec(wanted, spec, held)
    if (planned := plan(result, larger_a, larger_b, larger, dtype, hopper=hopper)) is not None:
      found.append(Choice(given, wanted, larger, planned, held, _KERNEL * planned["cycles"] / CLOCK_HZ + copying))
  return min(found, key=lambda choice: choice.seconds, default=None)


def convolve(result: str, arrays: Mapping[str, Array], spec: ConvSpec, dtype: Any) -> Array:
  """`primitives.convolve`, by this algorithm."""
  a, b = (arrays[name] for name in OPERANDS[result])
  choice = choose(result, a, b, spec, dtype) if takes(a) else None
  if choice is None:
    raise ValueError(
      f"{primitives.NAMES[result]}: algorithm={NAME!r} takes channels that are no whole chunks of {_CHUNK_BYTES} "
      "bytes, or windows side by side that leave elements at the end, within the workspace's limit; got "
      f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}, {spec}"
    )
  return _by(choice, result, arrays, dtype)


def _by(choice: Choice, result: str, arrays: Mapping[str, Array], dtype: Any) -> Array:
  larger = {name: enlarge(choice, name, arrays[name]) for name in OPERANDS[result]}
  return cut(choice, result, primitives.convolve(result, larger, choice.spec, dtype))


def enlarge(choice: Choice, name: str, array: Array) -> Array:
  return resized(array.reshape(choice.given.of(name)), choice.wanted.of(name)).reshape(choice.wanted.joined(name))


def cut(choice: Choice, name: str, array: Array) -> Array:
  return resized(array.reshape(choice.wanted.of(name)), choice.given.of(name)).reshape(choice.given.joined(name))


def takes(a: Any) -> bool:
  """Of bytes, whose kernels pack their operands themselves, and of float64 there is nothing to gain."""
  return np.dtype(a.dtype).itemsize in (2, 4)


def worthwhile(result: str, a: Any, b: Any, spec: ConvSpec, dtype: Any, *, residual: bool = False) -> Choice | None:
  """The choice, where it beats the problem as it is. No copy is made where an algorithm is asked for by name."""
  if spec.algorithm is not None or not takes(a):
    return None
  choice = choose(result, a, b, spec, dtype, residual=residual)
  direct = choice and plan(result, a, b, spec, dtype, hopper=True)
  return choice if choice and direct and choice.seconds < direct["cycles"] / CLOCK_HZ else None


def _extents(result: str, a: Any, b: Any, spec: ConvSpec) -> Extents:
  shapes = {name: aval.shape for name, aval in zip(OPERANDS[result], (a, b), strict=True)}
  c = shapes["w"][-2] if "w" in shapes else shapes["x"][-1] // spec.groups
  k = shapes["w" if "w" in shapes else "y"][-1] // spec.groups
  images = shapes["x" if "x" in shapes else "y"][1]
  return Extents(a.shape[0], images, spec.x_spatial, spec.window, spec.y_spatial, spec.groups, c, k)


def _larger(given: Extents, spec: ConvSpec, chunk: int) -> Iterator[Extents]:
  if math.prod(given.of("x")) * math.prod(given.of("w")) * math.prod(given.of("y")) == 0:
    return
  if given.groups == 1:
    # Whole chunks; or whole sectors of memory or lines, which are read and written faster.
    channels = dict.fromkeys(
      (1, c, k)
      for whole in (chunk, 2 * chunk, 8 * chunk)
      for c in _rounded(given.c, chunk, whole)
      for k in _rounded(given.k, chunk, whole)
    )
  elif given.c == 1:
    channels = dict.fromkeys((groups, 1, given.k) for groups in _rounded(given.groups, chunk, chunk))
  else:
    channels = dict.fromkeys((given.groups, c, k) for c in _powers(given.c) for k in _powers(given.k))
  extents = dict.fromkeys([given.x_spatial, _whole_windows(given, spec)])
  for (groups, c, k), x_spatial in itertools.product(channels, extents):
    wanted = given._replace(groups=groups, c=c, k=k, x_spatial=x_spatial)
    if wanted != given:
      yield wanted


def _rounded(n: int, chunk: int, whole: int) -> tuple[int, ...]:
  return (n,) if n % chunk == 0 else (n, -(-n // whole) * whole)


def _powers(n: int) -> tuple[int, ...]:
  """Widths of groups that kernels are made for."""
  return tuple(dict.fromkeys((n, 1 << (n - 1).bit_length())))


def _whole_windows(given: Extents, spec: ConvSpec) -> tuple[int, ...]:
  """What windows side by side read of the input, or all of it."""
  plain = not any(map(any, spec.padding)) and not spec.padding_mode and spec.window == spec.stride
  if plain and all(d == 1 for d in (*spec.lhs_dilation, *spec.rhs_dilation)):
    return tuple(p * u for p, u in zip(given.y_spatial, spec.stride, strict=True))
  return given.x_spatial


def _spec(wanted: Extents, spec: ConvSpec, held: int) -> ConvSpec:
  limit = None if spec.workspace_limit is None else spec.workspace_limit - held
  return dataclasses.replace(
    spec, x_spatial=wanted.x_spatial, groups=wanted.groups, algorithm=None, workspace_limit=limit
  )


def _rewrite(a: Any, b: Any, *, result: str, spec: ConvSpec, dtype: Any) -> Any:
  if (choice := worthwhile(result, a, b, spec, dtype)) is None:
    return None
  return lambda a, b: _by(choice, result, dict(zip(OPERANDS[result], (a, b), strict=True)), dtype)


for _result, _p in primitives.PRIMITIVES.items():
  _primitive.rewrite_on_cuda(_p, partial(_rewrite, result=_result))
