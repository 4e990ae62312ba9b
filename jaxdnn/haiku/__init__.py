"""The modules of Haiku, by jaxdnn's kernels: `from jaxdnn import haiku as jhk`, and `jhk.Conv2D` for `hk.Conv2D`.

Each module is a subclass of Haiku's with its constructor, defaults, parameters and state under the same names, so that
a model that trades one for the other keeps its checkpoints. Where the kernels can do what follows a module as well, it
has `activation=` and takes a `residual=` in the call. Needs Haiku: `pip install dm-haiku`.
"""

try:
  import haiku as haiku
except ModuleNotFoundError as e:
  raise ImportError("jaxdnn.haiku needs Haiku: pip install dm-haiku") from e

from jaxdnn.haiku.conv import Conv1D as Conv1D
from jaxdnn.haiku.conv import Conv1DTranspose as Conv1DTranspose
from jaxdnn.haiku.conv import Conv2D as Conv2D
from jaxdnn.haiku.conv import Conv2DTranspose as Conv2DTranspose
from jaxdnn.haiku.conv import Conv3D as Conv3D
from jaxdnn.haiku.conv import Conv3DTranspose as Conv3DTranspose
from jaxdnn.haiku.conv import ConvND as ConvND
from jaxdnn.haiku.conv import ConvNDTranspose as ConvNDTranspose
from jaxdnn.haiku.conv import DepthwiseConv1D as DepthwiseConv1D
from jaxdnn.haiku.conv import DepthwiseConv2D as DepthwiseConv2D
from jaxdnn.haiku.conv import DepthwiseConv3D as DepthwiseConv3D
from jaxdnn.haiku.norm import BatchNorm as BatchNorm
from jaxdnn.haiku.norm import GroupNorm as GroupNorm
from jaxdnn.haiku.norm import InstanceNorm as InstanceNorm
from jaxdnn.haiku.norm import LayerNorm as LayerNorm
from jaxdnn.haiku.norm import LocalResponseNorm as LocalResponseNorm
from jaxdnn.haiku.norm import RMSNorm as RMSNorm
from jaxdnn.haiku.norm import dropout as dropout
from jaxdnn.haiku.pool import AvgPool as AvgPool
from jaxdnn.haiku.pool import MaxPool as MaxPool
from jaxdnn.haiku.pool import avg_pool as avg_pool
from jaxdnn.haiku.pool import max_pool as max_pool
