"""Local response, divisive and local contrast normalization: every value divided by the energy of its neighbourhood.

    local response  y_i = x_i D_i^-beta      D_i = k + a sum over j in the window of i of x_j²
    divisive        y_i = x_i D_i^-beta      D_i = k + a sum over j in the window of i of (x_j - m_i)²
    local contrast  y = v / max(c, sigma(v))      v = x - mean(x)

A window is cut off at the borders. It runs along the channels, or is a box in the spatial dimensions of one channel.

The primitives work on [..., *spatial, inner] with one to three spatial dimensions, so that the channels are one when
the window runs along them: neither layout moves any data. Differentiation keeps x and m alone: D costs less to compute
again than to read.

`window.py` turns arguments into that form; `response.py`, `divisive.py` and `contrast.py` hold an operator each.
"""

from jaxdnn._lrn.contrast import local_contrast_norm as local_contrast_norm
from jaxdnn._lrn.divisive import divisive_norm as divisive_norm
from jaxdnn._lrn.response import local_response_norm as local_response_norm
