"""The pooling primitives, their derivatives, and what they become on CUDA."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn import _primitive
from jaxdnn._pool import reference
from jaxdnn._pool.geometry import Geometry, Pairs

# Primitives ----------------------------------------------------------------------------------------------------------


def _max_pool_abstract(x: Any, *, geometry: Geometry, minimum: bool, indexed: bool) -> Any:
  y = _primitive.out_aval(x, reference.out_shape(x, geometry))
  return [y, _primitive.out_aval(x, y.shape, geometry.index_dtype)] if indexed else [y]


def _down(x: Any, *_: Any, geometry: Geometry, **__: Any) -> Any:
  return _primitive.out_aval(x, reference.out_shape(x, geometry))


def _up(g: Any, *_: Any, geometry: Geometry, **__: Any) -> Any:
  return _primitive.out_aval(g, (*g.shape[: -geometry.rank - 1], *geometry.extent, g.shape[-1]))


max_pool_p = _primitive.define(
  "max_pool",
  abstract_eval=_max_pool_abstract,
  reference=reference.max_pool,
  params=["geometry", "minimum", "indexed"],
  multiple_results=True,
)
pool_gather_p = _primitive.define(
  "pool_gather", abstract_eval=_down, reference=reference.gather, params=["geometry"]
)
pool_scatter_p = _primitive.define(
  "pool_scatter", abstract_eval=_up, reference=reference.scatter, params=["geometry"]
)
sum_pool_p = _primitive.define(
  "sum_pool", abstract_eval=_down, reference=reference.sum_pool, params=["geometry", "divisor"]
)
sum_pool_bwd_p = _primitive.define(
  "sum_pool_bwd", abstract_eval=_up, reference=reference.sum_pool_bwd, params=["geometry", "divisor"]
)


def max_pool(x: Array, *, geometry: Geometry, minimum: bool = False) -> Any:
  for part in [geometry] if _is_wide(x, geometry) else geometry.passes():
    (x,) = _primitive.bind(max_pool_p, x, geometry=part, minimum=minimum, indexed=False)
  return x


def _is_wide(x: Array, g: Geometry) -> bool:
  """Whether cuda/pool/wide.cuh takes the window in one pass: planes of 16-byte vectors that fit into shared memory."""
  if g.bins or g.rank != 2 or {*g.stride, *g.dilation} != {1} or not 25 <= math.prod(g.window) <= 255:
    return False
  vectors = x.dtype in (jnp.float32, jnp.bfloat16) and x.shape[-1] * x.dtype.itemsize % 16 == 0
  bounds = zip(g.window, g.extent, g.out_extent, g.padding, strict=True)
  reaches = all(w >= 4 and i <= 255 and o > 1 and 0 <= lo < w and o - 1 - lo < i for w, i, o, (lo, _) in bounds)
  return vectors and reaches and 16 * g.extent[0] * (g.extent[1] + g.out_extent[1]) <= 96 << 10


def indexed_max_pool(x: Array, *, geometry: Geometry, minimum: bool = False) -> tuple[Array, Array]:
  y, index = _primitive.bind(max_pool_p, x, geometry=geometry, minimum=minimum, indexed=True)
  return y, index


def gather(t: Array, index: Array, *, geometry: Geometry) -> Any:
  return _primitive.bind(pool_gather_p, t, index, geometry=geometry)


def scatter(g: Array, index: Array, *, geometry: Geometry) -> Any:
  return _primitive.bind(pool_scatter_p, g, index, geometry=geometry)


def sum_pool(x: Array, *, geometry: Geometry, divisor: float | Pairs) -> Any:
  return _primitive.bind(sum_pool_p, x, geometry=geometry, divisor=divisor)


def sum_pool_in_passes(x: Array, *, geometry: Geometry, divisor: float | Pairs) -> Any:
  """`sum_pool`; a large window in several passes, between which the 16-bit types are float32."""
  passes = geometry.passes()
  if len(passes) == 1:
    return sum_pool(x, geometry=geometry, divisor=divisor)
  y = x.astype(_primitive.accumulator_dtype(x.dtype))
  for part in passes:
    y = sum_pool(y, geometry=part, divisor=1.0)
  return reference.divided(y, geometry, divisor).astype(x.dtype)


def sum_pool_bwd(g: Array, *, geometry: Geometry, divisor: float | Pairs) -> Any:
  return _primitive.bind(sum_pool_bwd_p, g, geometry=geometry, divisor=divisor)


# The Lp norm ---------------------------------------------------------------------------------------------------------
#
# dy[o] = y[o]^(1-p) Σ_i sign(x[i]) |x[i]|^(p-1) dx[i], so the tangent and its adjoint are those of a sum between two
# elementwise factors.


def _lp_pool_reference(x: Array, *, geometry: Geometry, power: float) -> Array:
  wide = x.astype(_primitive.accumulator_dtype(x.dtype))
  total = sum_pool(jnp.abs(wide) ** power, geometry=geometry, divisor=1.0)
  return (total ** (1 / power)).astype(x.dtype)


def _lp_factors(x: Array, y: Array, power: float) -> tuple[Array, Array]:
  """`sign(x) |x|^(p-1)` and `y^(1-p)`, both 0 where their base is 0, which makes derivatives 0 there."""
  x, y = (a.astype(_primitive.accumulator_dtype(a.dtype)) for a in (x, y))

  def safe(base: Array, exponent: float) -> Array:
    zero = base == 0
    return jnp.where(zero, jnp.zeros_like(base), jnp.where(zero, jnp.ones_like(base), base) ** exponent)

  # x itself has the derivative 1 at 0 that the general formula loses.
  return x if power == 2 else jnp.sign(x) * safe(jnp.abs(x), power - 1), safe(y, 1 - power)


def _lp_tangent_reference(t: Array, x: Array, y: Array, *, geometry: Geometry, power: float) -> Array:
  at_x, at_y = _lp_factors(x, y, power)
  return (sum_pool(t.astype(at_x.dtype) * at_x, geometry=geometry, divisor=1.0) * at_y).astype(t.dtype)


def _lp_bwd_reference(g: Array, x: Array, y: Array, *, geometry: Geometry, power: float) -> Array:
  at_x, at_y = _lp_factors(x, y, power)
  return (sum_pool_bwd(g.astype(at_y.dtype) * at_y, geometry=geometry, divisor=1.0) * at_x).astype(g.dtype)


lp_pool_p = _primitive.define(
  "lp_pool", abstract_eval=_down, reference=_lp_pool_reference, params=["geometry", "power"]
)
lp_pool_tangent_p = _primitive.define(
  "lp_pool_tangent", abstract_eval=_down, reference=_lp_tangent_reference, params=["geometry", "power"]
)
lp_pool_bwd_p = _primitive.define(
  "lp_pool_bwd", abstract_eval=_up, reference=_lp_bwd_reference, params=["geometry", "power"]
)


def lp_pool(x: Array, *, geometry: Geometry, power: float) -> Any:
  return _primitive.bind(lp_pool_p, x, geometry=geometry, power=power)


def _lp_tangent(t: Array, x: Array, y: Array, **params: Any) -> Any:
  return _primitive.bind(lp_pool_tangent_p, t, x, y, **params)


def _lp_bwd(g: Array, x: Array, y: Array, **params: Any) -> Any:
  return _primitive.bind(lp_pool_bwd_p, g, x, y, **params)


# Differentiation -----------------------------------------------------------------------------------------------------
#
# max_pool         x        -> y, index   index: the row-major number of each window's winning cell
# pool_gather      t, index -> y          the tangent of the element that won
# pool_scatter     g, index -> x          the sum over the windows that an element won
# sum_pool         x        -> y          linear
# sum_pool_bwd     g        -> x
# lp_pool          x        -> y
# lp_pool_tangent  t, x, y  -> y
# lp_pool_bwd      g, x, y  -> x
#
# With the index fixed, max pooling is linear: pool_gather and pool_scatter are each other's adjoint, and so are the
# two of each other family. Nothing is kept for the backward pass of a maximum but the index, a byte an element;
# without differentiation it is not even written, since the rule below is what asks for it.


def _max_pool_jvp(primals: Any, tangents: Any, *, geometry: Geometry, minimum: bool, indexed: bool) -> Any:
  y, index = indexed_max_pool(*primals, geometry=geometry, minimum=minimum)
  (t,) = tangents
  dy = _primitive.zero_tangent(y) if _primitive.is_zero(t) else gather(t, index, geometry=geometry)
  results = 2 if indexed else 1
  return [y, index][:results], [dy, _primitive.zero_tangent(index)][:results]


def _lp_pool_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
  (x,), (t,) = primals, tangents
  y = lp_pool(x, **params)
  return y, _primitive.zero_tangent(y) if _primitive.is_zero(t) else _lp_tangent(t, x, y, **params)


_primitive.set_jvp(max_pool_p, _max_pool_jvp)
_primitive.linear_in_first(pool_gather_p, reference.gather, transpose=scatter)
_primitive.linear_in_first(pool_scatter_p, reference.scatter, transpose=gather)
_primitive.linear_in_first(sum_pool_p, reference.sum_pool, transpose=sum_pool_bwd)
_primitive.linear_in_first(sum_pool_bwd_p, reference.sum_pool_bwd, transpose=sum_pool)
_primitive.set_jvp(lp_pool_p, _lp_pool_jvp)
_primitive.linear_in_first(lp_pool_tangent_p, _lp_tangent_reference, transpose=_lp_bwd)
_primitive.linear_in_first(lp_pool_bwd_p, _lp_bwd_reference, transpose=_lp_tangent)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _attributes(*_: Any, geometry: Geometry, divisor: float | Pairs = 1.0, **flags: Any) -> dict[str, Any]:
  """The same for every call. High padding is left out: it only says where the output ends.

  A divisor of 0 stands for the number of the window's cells in the input and in the `counted` padding.
  """
  counted = divisor if isinstance(divisor, tuple) else ((0, 0),) * geometry.rank
  spec = {
    "window": geometry.window,
    "stride": geometry.stride,
    "low": [lo for lo, _ in geometry.padding],
    "dilation": geometry.dilation,
    "counted_low": [lo for lo, _ in counted],
    "counted_high": [hi for _, hi in counted],
  }
  return {k: np.asarray(v, np.int64) for k, v in spec.items()} | {
    "divisor": np.float64(0 if isinstance(divisor, tuple) else divisor),
    "power": np.float64(flags.get("power", 0)),
    "minimum": flags.get("minimum", False),
    "indexed": flags.get("indexed", False),
  }


def _workspace(*_: Any, geometry: Geometry, **__: Any) -> int:
  """Where one large window is all there is, blocks share it."""
  return 1 << 20 if geometry.is_whole and math.prod(geometry.window) >= 1024 else 0


def _rule(*_: Any, geometry: Geometry, **__: Any) -> str:
  return "... " + ". " * geometry.rank + "c"


for _p, _target, _reference, _scratch in (
  (max_pool_p, "jaxdnn.max_pool.v2", reference.max_pool, _workspace),
  (sum_pool_p, "jaxdnn.sum_pool.v1", reference.sum_pool, _workspace),
  (lp_pool_p, "jaxdnn.lp_pool.v1", _lp_pool_reference, _workspace),
  (pool_gather_p, "jaxdnn.pool_gather.v2", reference.gather, None),
  (pool_scatter_p, "jaxdnn.pool_scatter.v2", reference.scatter, None),
  (sum_pool_bwd_p, "jaxdnn.sum_pool_bwd.v1", reference.sum_pool_bwd, None),
  (lp_pool_bwd_p, "jaxdnn.lp_pool_bwd.v1", _lp_bwd_reference, None),
):
  _primitive.batch_leading(_p)
  _primitive.set_shards(_p, _rule)
  _primitive.lower_to_cuda(_p, _target, _reference, attributes=_attributes, workspace=_scratch)
_primitive.batch_leading(lp_pool_tangent_p)
