"""Tensor transforms: layout, padding, type and scale in one pass (`transform.py`); patches and their sum (`im2col.py`).

Everything here is linear and moves data: derivatives are transforms again, and nothing is kept for them.
"""

from jaxdnn._transform.im2col import col2im as col2im
from jaxdnn._transform.im2col import im2col as im2col
from jaxdnn._transform.transform import transform as transform
