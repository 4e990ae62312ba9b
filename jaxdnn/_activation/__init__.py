"""Activations: elementwise nonlinear functions, alone, with a fused bias, or as gates.

`functions.py` has each as a row of a table, `elementwise.py`, `channelwise.py` and `gated.py` the primitives,
`piecewise.py`, `smooth.py` and `gated.py` the public functions.
"""

from jaxdnn._activation.apply import apply as apply
from jaxdnn._activation.functions import ACTIVATIONS as ACTIVATIONS
from jaxdnn._activation.gated import geglu as geglu
from jaxdnn._activation.gated import glu as glu
from jaxdnn._activation.gated import reglu as reglu
from jaxdnn._activation.gated import swiglu as swiglu
from jaxdnn._activation.piecewise import clipped_relu as clipped_relu
from jaxdnn._activation.piecewise import hard_sigmoid as hard_sigmoid
from jaxdnn._activation.piecewise import hard_silu as hard_silu
from jaxdnn._activation.piecewise import hard_swish as hard_swish
from jaxdnn._activation.piecewise import hard_tanh as hard_tanh
from jaxdnn._activation.piecewise import leaky_relu as leaky_relu
from jaxdnn._activation.piecewise import prelu as prelu
from jaxdnn._activation.piecewise import relu as relu
from jaxdnn._activation.piecewise import relu6 as relu6
from jaxdnn._activation.smooth import celu as celu
from jaxdnn._activation.smooth import elu as elu
from jaxdnn._activation.smooth import gelu as gelu
from jaxdnn._activation.smooth import log_sigmoid as log_sigmoid
from jaxdnn._activation.smooth import mish as mish
from jaxdnn._activation.smooth import selu as selu
from jaxdnn._activation.smooth import sigmoid as sigmoid
from jaxdnn._activation.smooth import silu as silu
from jaxdnn._activation.smooth import soft_sign as soft_sign
from jaxdnn._activation.smooth import softplus as softplus
from jaxdnn._activation.smooth import softsign as softsign
from jaxdnn._activation.smooth import squareplus as squareplus
from jaxdnn._activation.smooth import swish as swish
from jaxdnn._activation.smooth import tanh as tanh
