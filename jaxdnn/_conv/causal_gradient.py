"""The gradients of a causal depthwise convolution with bias and activation, of two to four taps, in one kernel.

    x, y, g  [..., N, L, C]      w  [..., k, 1, C]      bias  [..., C]

    z[t] = bias + Σ_j w[j] x[t - (k - 1) + j]      y = f(z)

State-space layers are trained through it, and memory bounds them: the kernel reads x and g, the cotangent of y, once,
computes z again, and leaves dx, dw and dbias. `fused.py` has the layer itself, whose rule asks `takes`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _extension, _primitive
from jaxdnn._activation import ACTIVATIONS, elementwise
from jaxdnn._conv.primitives import convolve
from jaxdnn._conv.spec import IDENTITY, ConvSpec, Precision


def takes(x: Any, w: Any, spec: ConvSpec, dtype: Any) -> bool:
  """Whether `spec` and the types are those of such a layer."""
  taps, channels = w.shape[1], x.shape[-1]
  if spec.rank != 1 or not isinstance(taps, int) or not 2 <= taps <= 4 or spec.workspace_limit is not None:
    return False
  geometry = (spec.stride, spec.padding, spec.lhs_dilation, spec.rhs_dilation, spec.padding_mode)
  if geometry != ((1,), ((taps - 1, 0),), (1,), (1,), ()) or spec.groups != channels:
    return False
  return w.shape[-2:] == (1, channels) and np.dtype(dtype) == x.dtype == w.dtype in _primitive.KERNEL_DTYPES


def tangent(primals: Sequence[Array], tangents: Sequence[Any], kind: str, parameter: float, spec: ConvSpec) -> Array:
  """That of y, where those of x, w and the bias, if there is one, are not all symbolic zeros."""
  wrt = tuple(i for i, t in enumerate(tangents) if not _primitive.is_zero(t))
  params = dict(kind=kind, parameter=parameter, precision=spec.precision)
  return _primitive.bind(causal_tangent_p, *(tangents[i] for i in wrt), *primals, wrt=wrt, **params)


# Reference -----------------------------------------------------------------------------------------------------------


def _moved(a: Array, by: int) -> Array:
  """The sequence whose element t is a[t + by], or zero."""
  low, high = max(-by, 0), max(by, 0)
  padded = lax.pad(a, jnp.zeros((), a.dtype), [*[(0, 0, 0)] * (a.ndim - 2), (low, high, 0), (0, 0, 0)])
  return lax.slice_in_dim(padded, high, high + a.shape[-2], axis=-2)


def _taps(w: Array) -> list[Array]:
  return [w[..., j, :, None, :] for j in range(w.shape[-3])]


def _sums(x: Array, w: Array) -> Array:
  last = w.shape[-3] - 1
  terms = [tap * _moved(x, j - last) for j, tap in enumerate(_taps(w))]
  return sum(terms[1:], terms[0])


def _spread(bias: Array) -> Array:
  return bias[..., None, None, :]


def _scaled(t: Array, z: Array, kind: str, parameter: float) -> Array:
  """t f'(z)"""
  if kind == IDENTITY:
    return t
  f = ACTIVATIONS[kind]
  if f.inside is not None:
    return f.scale(t, f.inside(z, parameter), parameter)
  return f.scale(t, f.forward(z, parameter) if f.residual == "output" else z, parameter)


def _widened(operands: Sequence[Array]) -> tuple[Array, Array, list[Array]]:
  wide = _primitive.accumulator_dtype(operands[0].dtype)
  x, w, *bias = (a.astype(wide) for a in operands)
  return x, w, bias


def _tangent_reference(
  *operands: Array, wrt: tuple[int, ...], kind: str, parameter: float, **_: Any
) -> Array:
  x, w, bias = _widened(operands[len(wrt) :])
  terms = []
  for i, t in zip(wrt, operands, strict=False):
    t = t.astype(x.dtype)
    terms.append(_sums(t, w) if i == 0 else _sums(x, t) if i == 1 else jnp.broadcast_to(_spread(t), x.shape))
  z = _sums(x, w)
  z = z + _spread(bias[0]) if bias else z
  return _scaled(sum(terms[1:], terms[0]), z, kind, parameter).astype(operands[-1].dtype)


def _backward_reference(g: Array, *operands: Array, kind: str, parameter: float, **_: Any) -> list[Array]:
  x, w, bias = _widened(operands)
  z = _sums(x, w)
  z = z + _spread(bias[0]) if bias else z
  dz, last = _scaled(g.astype(x.dtype), z, kind, parameter), w.shape[-3] - 1
  terms = [tap * _moved(dz, last - j) for j, tap in enumerate(_taps(w))]
  dw = [jnp.sum(dz * _moved(x, j - last), (-3, -2)) for j in range(last + 1)]
  results = [sum(terms[1:], terms[0]), jnp.stack(dw, -2)[..., None, :], *[jnp.sum(dz, (-3, -2)) for _ in bias]]
  return [a.astype(g.dtype) for a in results]


# Primitives ----------------------------------------------------------------------------------------------------------


def _tangent_abstract(*operands: Any, wrt: tuple[int, ...], **_: Any) -> Any:
  x = operands[len(wrt)]
  return _primitive.out_aval(x, x.shape)


def _backward_abstract(g: Any, *operands: Any, **_: Any) -> list[Any]:
  return [_primitive.out_aval(g, a.shape) for a in operands]


causal_tangent_p = _primitive.define(
  "causal_tangent",
  abstract_eval=_tangent_abstract,
  reference=_tangent_reference,
  params=["wrt", "kind", "parameter", "precision"],
)
causal_backward_p = _primitive.define(
  "causal_backward",
  abstract_eval=_backward_abstract,
  reference=_backward_reference,
  params=["kind", "parameter", "precision"],
  multiple_results=True,
)

# Differentiation -----------------------------------------------------------------------------------------------------
#
# causal_tangent   dx, dw, dbias | x, w, bias -> dy        of the three those that `wrt` names
# causal_backward  g             | x, w, bias -> dx, dw, dbias
#
# Linear before the bar, and each other's adjoints. The tangent map has no kernel: XLA makes it one.


def _tangent_transpose(cts: Sequence[Array], *residuals: Array, wrt: tuple[int, ...], **params: Any) -> list[Array]:
  gradients = _primitive.bind(causal_backward_p, *cts, *residuals, **params)
  return [gradients[i] for i in wrt]


def _backward_transpose(cts: Sequence[Array], *residuals: Array, **params: Any) -> list[Array]:
  return [_primitive.bind(causal_tangent_p, *cts, *residuals, wrt=tuple(range(len(cts))), **params)]


_primitive.linear(
  causal_tangent_p,
  lambda *, wrt, **_: len(wrt),
  lambda *operands, **params: [_tangent_reference(*operands, **params)],
  _tangent_transpose,
)
_primitive.linear(causal_backward_p, 1, _backward_reference, _backward_transpose)

# Batching and CUDA lowering ------------------------------------------------------------------------------------------


def _in_steps(
  g: Array, *operands: Array, kind: str, parameter: float, precision: Precision
) -> list[Array]:
  """The same by the convolutions' own gradients, where the kernel does not go."""
  x, w = operands[:2]
  *lead, _, length, channels = x.shape
  taps = w.shape[-3]
  spec = ConvSpec((1,), ((taps - 1, 0),), (1,), (1,), channels, (length,), (taps,), precision)

  def layer(x: Array, w: Array, *bias: Array) -> Array:
    z = convolve("y", {"x": x, "w": w}, spec, x.dtype)
    z = z + _spread(bias[0]) if bias else z
    return z if kind == IDENTITY else elementwise.activate(kind, z, parameter)

  g, *folded = (a.reshape(math.prod(lead), *a.shape[len(lead) :]) for a in (g, *operands))
  gradients = jax.vjp(layer, *folded)[1](g)
  return [d.reshape(a.shape) for d, a in zip(gradients, operands, strict=True)]


def _supported(_: Any, x: Any, *__: Any, **___: Any) -> bool:
  """Four channels at a time, of positions that are numbered with 32 bits."""
  return x.dtype != np.float64 and x.shape[-1] % 4 == 0 and math.prod(x.shape[:-1]) < 1 << 31


def _attributes(*_: Any, kind: str, parameter: float, **__: Any) -> dict[str, Any]:
  return {"activation": kind, "parameter": float(parameter)}


def _workspace(_: Any, x: Any, w: Any, *bias: Any, **__: Any) -> int:
  *lead, n, length, channels = x.shape
  return _extension.native.causal_workspace(math.prod(lead), n, length, channels, w.shape[-3], bool(bias))


def _rule(_: Any, *operands: Any, **__: Any) -> str:
  data, filters, bias = "... n . c", "... . . c", ["... c"] * (len(operands) - 2)
  return f"{', '.join([data, data, filters, *bias])} -> {', '.join([data, filters, *bias])}"


_primitive.batch_leading(causal_tangent_p)
_primitive.batch_leading(causal_backward_p)
_primitive.set_shards(causal_backward_p, _rule)
_primitive.lower_to_cuda(
  causal_backward_p,
  "jaxdnn.causal_backward.v1",
  _in_steps,
  attributes=_attributes,
  supported=_supported,
  workspace=_workspace,
)
