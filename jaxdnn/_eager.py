"""Public functions outside of `jit`: one compiled program each. Knows no operator.

An operator is a kernel between reshapes and transposes. Inside of `jit` these cost nothing; called eagerly, each would
be a program of its own, and a copy of the array.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_args

import jax
from jax import Array

P = ParamSpec("P")
R = TypeVar("R")


class _Options:
  """Arguments that are no operands. Those of one program are equal, and of the same types, since 1 is no flag though it
  equals True; and zeros have the same sign."""

  def __init__(self, given: dict[str, Any]):
    self.given = given
    self.key = tuple((name, _key(value)) for name, value in given.items())

  def __hash__(self) -> int:
    return hash(self.key)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Options) and self.key == other.key


def _key(value: Any) -> Any:
  if isinstance(value, list | tuple):
    return type(value), *map(_key, value)
  return type(value), repr(value) if isinstance(value, float) else value


def compiled(fn: Callable[P, R]) -> Callable[P, R]:
  """`fn` as a program that is compiled once for each set of shapes and options, and inlined where it is traced.

  Parameters that are annotated as arrays are operands, all others options. Where that cannot be, for an option that has
  no hash, as an array, or an operand that is no array, `fn` runs as it is, and raises what there is to raise.
  """
  parameters = inspect.signature(fn).parameters.values()
  positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
  operands = {p.name for p in parameters if Array in (p.annotation, *get_args(p.annotation))}

  def with_options(options: _Options, arrays: dict[str, Any]) -> Any:
    return fn(**options.given, **arrays)  # type: ignore[call-arg]

  with_options.__name__ = fn.__name__  # What profiles call it.
  program = jax.jit(with_options, static_argnums=0, inline=True)

  @functools.wraps(fn)
  def call(*args: P.args, **kwargs: P.kwargs) -> R:
    given = dict(zip(positional, args, strict=False))
    if len(given) == len(args) and given.keys().isdisjoint(kwargs):
      given.update(kwargs)
      arrays = {name: given.pop(name) for name in operands & given.keys()}
      try:
        return program(_Options(given), arrays)
      except (TypeError, ValueError):
        pass
    return fn(*args, **kwargs)

  return call
