"""The layers of `flax.linen`, by jaxdnn's kernels: `from jaxdnn import linen as jnn`, and `jnn.Conv` for `nn.Conv`.

Each layer is a subclass of Flax's, with its arguments, defaults, parameters and statistics under the same names, so
that a model that trades one for the other keeps its checkpoints. Where the kernels can do what follows a layer as well,
it has `activation=` and takes a `residual=` in the call.

Pooling functions need no Flax. The layers do: `pip install flax`.
"""

from typing import TYPE_CHECKING, Any

from jaxdnn.linen.pool import avg_pool as avg_pool
from jaxdnn.linen.pool import max_pool as max_pool
from jaxdnn.linen.pool import min_pool as min_pool
from jaxdnn.linen.pool import pool as pool

if TYPE_CHECKING:
  from jaxdnn.linen.layers import BatchNorm as BatchNorm
  from jaxdnn.linen.layers import Conv as Conv
  from jaxdnn.linen.layers import ConvLocal as ConvLocal
  from jaxdnn.linen.layers import ConvTranspose as ConvTranspose
  from jaxdnn.linen.layers import Dropout as Dropout
  from jaxdnn.linen.layers import GroupNorm as GroupNorm
  from jaxdnn.linen.layers import InstanceNorm as InstanceNorm
  from jaxdnn.linen.layers import LayerNorm as LayerNorm
  from jaxdnn.linen.layers import LocalResponseNorm as LocalResponseNorm
  from jaxdnn.linen.layers import RMSNorm as RMSNorm

_LAYERS = (
  "BatchNorm", "Conv", "ConvLocal", "ConvTranspose", "Dropout", "GroupNorm", "InstanceNorm", "LayerNorm",
  "LocalResponseNorm", "RMSNorm",
)  # fmt: skip


def __getattr__(name: str) -> Any:
  """Layers are imported when the first of them is asked for, since Flax may not be there."""
  if name not in _LAYERS:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from jaxdnn.linen import layers

  return getattr(layers, name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_LAYERS])
