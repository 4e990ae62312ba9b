"""How a jaxdnn primitive is made: definition, differentiation, batching, lowering.

This is the only module that imports `jax.extend` and `jax.interpreters`, whose names move between JAX releases. It
knows no operator. An operator module calls `define` for each of its primitives, one of the differentiation helpers,
a batching rule, and `lower_to_cuda`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jaxdnn import _extension, _partition

KERNEL_DTYPES = frozenset(np.dtype(d) for d in (jnp.float32, jnp.float64, jnp.float16, jnp.bfloat16))
"""The element types that every kernel family is built for."""


def accumulator_dtype(dtype: Any) -> np.dtype[Any]:
  """The type in which sums over elements of `dtype` are held: float32 for the 16-bit floats, else `dtype`."""
  dtype = np.dtype(dtype)
  return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


# Definition ----------------------------------------------------------------------------------------------------------


def define(
  name: str,
  *,
  abstract_eval: Callable[..., Any],
  reference: Callable[..., Any],
  params: Sequence[str],
  multiple_results: bool = False,
  optional: bool = False,
) -> Primitive:
  """Makes a primitive whose default lowering, on every platform, is `reference`: a function in plain lax and jnp.

  Args:
    optional: whether operands and results may be absent, see below; of a primitive with several results.
  """
  p = Primitive(f"jaxdnn_{name}")
  p.multiple_results = multiple_results
  if optional:
    _optional[p] = abstract_eval
    params = [*params, "absent"]
    abstract_eval, reference = _abstract_of_present(p), _reference_of_present(reference)
  p.def_abstract_eval(abstract_eval)
  compiled = jax.jit(p.bind, static_argnames=tuple(params))

  def impl(*operands: Any, **params: Any) -> Any:
    # As lax's own, a primitive is compiled under `jax.disable_jit` too, where `compiled` would come back here.
    with jax.disable_jit(False):
      return compiled(*operands, **params)

  p.def_impl(impl)
  mlir.register_lowering(p, mlir.lower_fun(reference, multiple_results=multiple_results))
  return p


def out_aval(like: Any, shape: Sequence[int], dtype: Any = None) -> Any:
  """An output's abstract value, derived from the operand `like`.

  A fresh ShapedArray would drop the mesh axes over which the operand varies inside `shard_map`, and a wrong
  `out_specs` would then silently return one shard's data.
  """
  return like.update(
    shape=tuple(shape),
    dtype=np.dtype(dtype or like.dtype),
    weak_type=False,
    sharding=like.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
  )


def bind(p: Primitive, *operands: Any, **params: Any) -> Any:
  """Binds `p` after making the operands vary over the same manual mesh axes.

  Inside `shard_map` a replicated filter meets a varying input; the cast's transpose is the sum over shards that the
  filter's gradient needs.
  """
  if p in _optional:
    avals = _optional[p](*map(jax.typeof, operands), **params)
    absent = tuple((i, x.ndim, np.dtype(x.dtype)) for i, x in enumerate(operands) if is_absent(x))
    outs = iter(_bind(p, *[x for x in operands if not is_absent(x)], absent=absent, **params))
    return [jnp.zeros(a.shape, a.dtype) if is_absent(a) else next(outs) for a in avals]
  return _bind(p, *operands, **params)


def _bind(p: Primitive, *operands: Any, **params: Any) -> Any:
  axes = [jax.typeof(x).manual_axis_type.varying for x in operands]
  union = frozenset().union(*axes)
  operands = tuple(
    jax.lax.pcast(x, tuple(sorted(union - a)), to="varying") if union - a else x
    for x, a in zip(operands, axes, strict=True)
  )
  return p.bind(*operands, **params)


# Absent operands and results -----------------------------------------------------------------------------------------
#
# In rules, references and kernels an operand or result that is absent is an array all of whose dimensions are 0. But no
# program holds such arrays: on a mesh XLA crashes where one passes from one `shard_map` to the next, as what
# differentiation keeps does. So `bind` leaves them out, and says in the parameter `absent` which: (index, ndim, dtype)
# of each. Here they are put in again for the rules.

_optional: dict[Primitive, Callable[..., Any]] = {}

Absent = tuple[tuple[int, int, np.dtype[Any]], ...]


def is_absent(a: Any) -> bool:
  return a.ndim > 0 and not any(a.shape)


def _with_absent(present: Sequence[Any], absent: Absent, make: Callable[[tuple[int, ...], Any], Any]) -> list[Any]:
  full = list(present)
  for i, ndim, dtype in absent:
    full.insert(i, make((0,) * ndim, dtype))
  return full


def _present(outs: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
  return [out for out, a in zip(outs, avals, strict=True) if not is_absent(a)]


def _all_avals(p: Primitive, avals: Sequence[Any], absent: Absent, params: Any) -> tuple[list[Any], list[Any]]:
  """Of all operands, given those that are there, and of all results."""
  full = _with_absent(avals, absent, partial(out_aval, avals[0]))
  return full, _optional[p](*full, **params)


def _abstract_of_present(p: Primitive) -> Callable[..., list[Any]]:
  def of_present(*avals: Any, absent: Absent, **params: Any) -> list[Any]:
    outs = _all_avals(p, avals, absent, params)[1]
    return _present(outs, outs)

  return of_present


def _reference_of_present(reference: Callable[..., Any]) -> Callable[..., list[Any]]:
  def of_present(*operands: Any, absent: Absent, **params: Any) -> list[Any]:
    outs = reference(*_with_absent(operands, absent, jnp.zeros), **params)
    return _present(outs, outs)

  return of_present


# Differentiation -----------------------------------------------------------------------------------------------------


def is_zero(tangent: Any) -> bool:
  return type(tangent) is ad.Zero


def zero_tangent(primal: Any) -> Any:
  return ad.Zero(jax.typeof(primal).to_tangent_aval())


def instantiate(tangent: Any) -> Any:
  """The tangent as an array: zeros where it is a symbolic zero."""
  return ad.instantiate_zeros(tangent)


def set_jvp(p: Primitive, rule: Callable[..., Any]) -> None:
  def of_present(primals: Any, tangents: Any, *, absent: Absent, **params: Any) -> Any:
    full = _with_absent(primals, absent, jnp.zeros)
    all_tangents = list(tangents)
    for i, _, _ in absent:
      all_tangents.insert(i, zero_tangent(full[i]))
    outs, douts = rule(full, all_tangents, **params)
    return _present(outs, outs), _present(douts, outs)

  ad.primitive_jvps[p] = of_present if p in _optional else rule


def bilinear(p: Primitive, transpose_lhs: Callable[..., Any], transpose_rhs: Callable[..., Any]) -> None:
  """`p` is linear in each of its two operands; the rules return the cotangent of one, given the other."""
  ad.defbilinear(p, transpose_lhs, transpose_rhs)


def linear_in_first(p: Primitive, reference: Callable[..., Any], transpose: Callable[..., Any]) -> None:
  """`p(t, *residuals)` is linear in `t`, and `transpose(ct, *residuals)` is its adjoint in `t`.

  The derivative in the residuals is needed at second order only, and is taken through `reference`.
  """
  assert not p.multiple_results
  linear(
    p, 1, lambda *a, **k: (reference(*a, **k),), lambda cts, *residuals, **k: (transpose(*cts, *residuals, **k),)
  )


def linear(
  p: Primitive, count: int | Callable[..., int], reference: Callable[..., Any], transpose: Callable[..., Any]
) -> None:
  """`p(*ts, *residuals)` is linear in its first operands `ts` together, with one result or several.

  Args:
    count: how many operands `ts` are, or a function of the parameters that says so.
    reference: `(*ts, *residuals, **params)` to a sequence of results. The derivative in the residuals, needed at second
      order only, is taken through it.
    transpose: `(cts, *residuals, **params)` to the cotangents of all `ts`, where `cts` are those of all results.
  """

  def split(operands: Any, params: Any) -> tuple[list[Any], list[Any]]:
    n = count(**params) if callable(count) else count
    return list(operands[:n]), list(operands[n:])

  def apply(operands: Any, params: Any) -> list[Any]:
    out = bind(p, *operands, **params)
    return list(out) if p.multiple_results else [out]

  def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    ts, residuals = split(primals, params)
    dts, dresiduals = split(tangents, params)
    outs = apply(primals, params)
    terms = []
    if not all(is_zero(d) for d in dts):
      terms.append(apply([*map(instantiate, dts), *residuals], params))
    moving = [i for i, d in enumerate(dresiduals) if not is_zero(d)]
    if moving:

      def of_residuals(*values: Any) -> list[Any]:
        full = list(residuals)
        for i, value in zip(moving, values, strict=True):
          full[i] = value
        return list(reference(*ts, *full, **params))

      terms.append(jax.jvp(of_residuals, [residuals[i] for i in moving], [dresiduals[i] for i in moving])[1])
    douts = [sum(ds[1:], ds[0]) for ds in zip(*terms, strict=True)] if terms else [zero_tangent(out) for out in outs]
    return (outs, douts) if p.multiple_results else (outs[0], douts[0])

  def transposed(cts: Any, *operands: Any, **params: Any) -> Any:
    cts = list(cts) if p.multiple_results else [cts]
    ts, residuals = split(operands, params)
    if all(is_zero(ct) for ct in cts):
      dts = [ad.Zero(t.aval) if ad.is_undefined_primal(t) else None for t in ts]
    else:
      dts = list(transpose(list(map(instantiate, cts)), *residuals, **params))
      # An operand that is known, as the zero tangent of a constant is, takes no cotangent.
      dts = [dt if ad.is_undefined_primal(t) else None for t, dt in zip(ts, dts, strict=True)]
    return (*dts, *[None] * len(residuals))

  def transposed_of_present(cts: Any, *operands: Any, absent: Absent, **params: Any) -> Any:
    present = iter(cts)
    avals = _all_avals(p, [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in operands], absent, params)[1]
    cts = [ad.Zero(a) if is_absent(a) else next(present) for a in avals]
    cotangents = transposed(cts, *_with_absent(operands, absent, jnp.zeros), **params)
    gone = {i for i, _, _ in absent}
    return [ct for i, ct in enumerate(cotangents) if i not in gone]

  set_jvp(p, jvp)
  ad.primitive_transposes[p] = transposed_of_present if p in _optional else transposed


# Batching ------------------------------------------------------------------------------------------------------------


def batch_leading(p: Primitive, *, broadcast: Callable[..., Sequence[int]] = lambda *operands, **params: ()) -> None:
  """For a primitive that takes any number of leading dimensions: the mapped axis becomes one more of them.

  Args:
    broadcast: `(*operands, **params)` to the indices of operands whose dimensions may be 1 where others' are larger.
      Those that are not mapped are not repeated.
  """

  def rule(operands: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    unit = frozenset(broadcast(*operands, **params))
    moved = [
      jnp.broadcast_to(x, (1 if i in unit else size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
      for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]
    out = bind(p, *moved, **params)
    return out, (0,) * len(out) if p.multiple_results else 0

  batching.primitive_batchers[p] = rule


def set_batching(p: Primitive, rule: Callable[..., Any]) -> None:
  """Of no examples `rule` is not asked: a shape that has 0 of them does not say what one is."""

  def of_present(operands: Any, dims: Any, *, absent: Absent, **params: Any) -> Any:
    all_dims = _with_absent(dims, absent, lambda *_: None)
    outs, out_dims = rule(_with_absent(operands, absent, jnp.zeros), all_dims, **params)
    return _present(outs, outs), _present(out_dims, outs)

  def of_any(operands: Any, dims: Any, **params: Any) -> Any:
    if all(d is None or x.shape[d] != 0 for x, d in zip(operands, dims, strict=True)):
      return (of_present if p in _optional else rule)(operands, dims, **params)
    one = [
      jax.ShapeDtypeStruct([n for i, n in enumerate(x.shape) if i != d], x.dtype)
      for x, d in zip(operands, dims, strict=True)
    ]
    out = [jnp.zeros((0, *s.shape), s.dtype) for s in jax.tree.leaves(jax.eval_shape(partial(p.bind, **params), *one))]
    return (out, [0] * len(out)) if p.multiple_results else (out[0], 0)

  batching.primitive_batchers[p] = of_any


# CUDA lowering -------------------------------------------------------------------------------------------------------


def lower_to_cuda(
  p: Primitive,
  target: str,
  reference: Callable[..., Any],
  *,
  attributes: Callable[..., dict[str, Any]],
  supported: Callable[..., bool] = lambda *avals, **params: True,
  workspace: Callable[..., int] | None = None,
  integers: frozenset[np.dtype[Any]] = frozenset(),
  more_floats: frozenset[np.dtype[Any]] = frozenset(),
) -> None:
  """Lowers `p` on CUDA to the FFI call `target`, or to `reference` where no kernel covers the operands.

  Args:
    attributes: `(*avals_in, **params)` to the call's attributes: Python scalars, strings and int64 arrays.
    supported: `(*avals_in, **params)` to whether the kernels take this call. Floating-point types outside
      `KERNEL_DTYPES` and symbolic shapes never reach it.
    workspace: `(*avals_in, **params)` to bytes of scratch memory, which becomes one more result of the call: XLA
      plans it like any other buffer, so that the kernels allocate nothing and can be captured in a CUDA graph.
    integers: element types of which all operands may be; without any, at least one operand is floating-point.
    more_floats: floating-point types beside `KERNEL_DTYPES` that reach `supported`.
  """
  if target not in _extension.TARGETS:
    return
  fallback = mlir.lower_fun(reference, multiple_results=p.multiple_results)

  def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
    avals = ctx.avals_in
    static = all(isinstance(d, int) for a in avals for d in a.shape)
    floats = [a.dtype for a in avals if jnp.issubdtype(a.dtype, jnp.inexact)]
    known = all(np.dtype(d) in KERNEL_DTYPES | more_floats for d in floats)
    known &= bool(floats) or all(np.dtype(a.dtype) in integers for a in avals)
    if not (static and known and supported(*avals, **params)):
      return fallback(ctx, *operands, **params)
    if (divided := _by_shards(p, ctx, *operands, **params)) is not None:
      return divided
    if p in _rewrites and (other := _rewrites[p](*avals, **params)) is not None:
      return mlir.lower_fun(other, multiple_results=p.multiple_results)(ctx, *operands)
    results = list(ctx.avals_out)
    if workspace is not None:
      results.append(out_aval(results[0], (workspace(*avals, **params),), np.uint8))
    call = jax.ffi.ffi_lowering(target)
    return call(ctx.replace(avals_out=results), *operands, **attributes(*avals, **params))[: len(ctx.avals_out)]

  mlir.register_lowering(p, _lowering(p, rule), platform="cuda")


def _lowering(p: Primitive, rule: Callable[..., Any]) -> Callable[..., Any]:
  """`rule`, with what is absent where `p` may be called without."""

  def of_present(ctx: Any, *operands: Any, absent: Absent, **params: Any) -> Any:
    avals, outs = _all_avals(p, ctx.avals_in, absent, params)
    full = _with_absent(operands, absent, lambda shape, dtype: mlir.ir_constant(np.zeros(shape, dtype)))
    found = rule(ctx.replace(avals_in=avals, avals_out=outs), *full, **params)
    return None if found is None else _present(found, outs)

  return of_present if p in _optional else rule


_shards: dict[Primitive, tuple[str | Callable[..., str], Callable[..., Any] | None]] = {}


def set_shards(
  p: Primitive, rule: str | Callable[..., str], on_shards: Callable[..., Sequence[Any]] | None = None
) -> None:
  """Says how XLA may divide `p` among devices on meshes with automatic axes. Without it, XLA gathers the operands.

  Args:
    rule: which dimensions are independent, as in `_partition`, or `(*avals_in, **params)` to that.
    on_shards: `(axes, *operands, **params)` to the results on one shard, where these are not `p` of the shard, added up
      over shards where they lack a dimension. `axes` are the mesh axes of each dimension that is sharded.
  """
  _shards[p] = rule, on_shards


def by_shards(p: Primitive, ctx: Any, *operands: Any, **params: Any) -> Any:
  """The lowering of `p` that XLA can divide, or None where there is nothing for it to divide."""
  return _lowering(p, partial(_by_shards, p))(ctx, *operands, **params)


def _by_shards(p: Primitive, ctx: Any, *operands: Any, **params: Any) -> Any:
  if p not in _shards or (automatic := _partition.automatic(ctx)) is None:
    return None
  rule, on_shards = _shards[p]

  def whole(*operands: Any) -> tuple[Any, ...]:
    out = bind(p, *operands, **params)
    return tuple(out) if p.multiple_results else (out,)

  divisible = _partition.partitioned(
    automatic,
    whole,
    rule if isinstance(rule, str) else rule(*ctx.avals_in, **params),
    None if on_shards is None else lambda axes, *operands: on_shards(axes, *operands, **params),
  )
  return None if divisible is None else mlir.lower_fun(divisible, multiple_results=True)(automatic, *operands)


_rewrites: dict[Primitive, Callable[..., Callable[..., Any] | None]] = {}


def rewrite_on_cuda(p: Primitive, rewrite: Callable[..., Callable[..., Any] | None]) -> None:
  """Before a call of `p` is lowered to its kernels, `rewrite(*avals_in, **params)` may give a function of the operands
  to lower in its place, or None."""
  _rewrites[p] = rewrite
