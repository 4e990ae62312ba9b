"""The layers of `equinox.nn`, by jaxdnn's kernels: `from jaxdnn import equinox as jeqx`, and `jeqx.Conv2d` for that.

Each layer is a subclass of Equinox's with its constructor, and the same leaves in the same order, so that
`eqx.tree_deserialise_leaves` reads a file written with the other. As there, layers are of one example, channels first;
`jax.vmap` makes them of a batch, which is one kernel. Where the kernels can do what follows a layer as well, it has
`activation=` and takes a `residual=` in the call. Needs Equinox: `pip install equinox`.
"""

try:
  import equinox as equinox
except ModuleNotFoundError as e:
  raise ImportError("jaxdnn.equinox needs Equinox: pip install equinox") from e

from jaxdnn.equinox.conv import Conv as Conv
from jaxdnn.equinox.conv import Conv1d as Conv1d
from jaxdnn.equinox.conv import Conv2d as Conv2d
from jaxdnn.equinox.conv import Conv3d as Conv3d
from jaxdnn.equinox.conv import ConvTranspose as ConvTranspose
from jaxdnn.equinox.conv import ConvTranspose1d as ConvTranspose1d
from jaxdnn.equinox.conv import ConvTranspose2d as ConvTranspose2d
from jaxdnn.equinox.conv import ConvTranspose3d as ConvTranspose3d
from jaxdnn.equinox.norm import BatchNorm as BatchNorm
from jaxdnn.equinox.norm import Dropout as Dropout
from jaxdnn.equinox.norm import GroupNorm as GroupNorm
from jaxdnn.equinox.norm import LayerNorm as LayerNorm
from jaxdnn.equinox.norm import LocalResponseNorm as LocalResponseNorm
from jaxdnn.equinox.norm import RMSNorm as RMSNorm
from jaxdnn.equinox.pool import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from jaxdnn.equinox.pool import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from jaxdnn.equinox.pool import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from jaxdnn.equinox.pool import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from jaxdnn.equinox.pool import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from jaxdnn.equinox.pool import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from jaxdnn.equinox.pool import AvgPool1d as AvgPool1d
from jaxdnn.equinox.pool import AvgPool2d as AvgPool2d
from jaxdnn.equinox.pool import AvgPool3d as AvgPool3d
from jaxdnn.equinox.pool import MaxPool1d as MaxPool1d
from jaxdnn.equinox.pool import MaxPool2d as MaxPool2d
from jaxdnn.equinox.pool import MaxPool3d as MaxPool3d
