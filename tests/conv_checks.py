"""Every direction of a convolution by a kernel that is named, against the float64 oracle."""

import jax.numpy as jnp
import numpy as np

from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from jaxdnn._conv.primitives import OPERANDS, convolve, plan
from jaxdnn._conv.spec import ConvSpec
from numerics import assert_close, assert_repeatable, exact, sample


def coarse(shape, dtype, seed=0):
  """Samples whose products are exact in float32 and, of float32, in TF32."""
  return sample(shape, "bfloat16" if dtype == "float32" else dtype, seed).astype(jnp.dtype(dtype))


def check(case, algorithm, dtype, out_dtype, precision=None, draw=coarse):
  spec = ConvSpec(*case.geometry, case.groups, case.spatial, case.window, precision, algorithm)
  shapes = {"x": case.x_shape, "w": case.w_shape, "y": (case.batch, *spec.y_spatial, case.k)}
  arrays = {name: draw(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
  oracle = [exact(arrays[name]) for name in "xwy"]
  wants = {"y": conv_oracle(*oracle[:2], *case.geometry, case.groups)}
  wants["x"], wants["w"] = conv_gradients(*oracle, *case.geometry, case.groups)
  sums = {"y": case.w_shape, "x": (*case.window, case.k // case.groups), "w": shapes["y"][:-1]}
  for result, want in wants.items():
    operands = {name: jnp.asarray(arrays[name])[None] for name in OPERANDS[result]}
    # Floats are for tiles of 128 rows in the filter gradient; there are too many phases in the patches' data gradient.
    refused = {"w": dtype == "float32" and not algorithm.startswith("wgmma 128"), "x": case.name == "patches"}
    if algorithm.startswith("wgmma") and refused.get(result):
      continue
    assert plan(result, *operands.values(), spec, np.dtype(out_dtype), hopper=True), case.name
    f = lambda a, b, r=result: convolve(r, dict(zip(OPERANDS[r], (a, b), strict=True)), spec, out_dtype)  # noqa: E731
    got = assert_repeatable(f, *operands.values(), repeats=3)
    terms = int(np.prod(sums[result])) // (case.k if result == "y" else 1)
    assert_close(got[0], want, out_dtype, terms=terms, scale=np.sqrt(terms) * 3)
