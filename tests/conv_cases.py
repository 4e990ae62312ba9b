"""Convolution shapes for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ConvCase:
  """A channels-last convolution; sequences are per spatial dimension, and their length is the rank."""

  name: str
  batch: int
  spatial: tuple
  c: int
  window: tuple
  k: int
  stride: tuple = ()
  padding: tuple = ()
  lhs_dilation: tuple = ()
  rhs_dilation: tuple = ()
  groups: int = 1

  def __post_init__(self):
    rank = len(self.window)
    for field, value in (("stride", 1), ("padding", (0, 0)), ("lhs_dilation", 1), ("rhs_dilation", 1)):
      if getattr(self, field) == ():
        object.__setattr__(self, field, (value,) * rank)

  @property
  def geometry(self):
    return self.stride, self.padding, self.lhs_dilation, self.rhs_dilation

  @property
  def x_shape(self):
    return (self.batch, *self.spatial, self.c)

  @property
  def w_shape(self):
    return (*self.window, self.c // self.groups, self.k)


_ = ConvCase
SAME3 = ((1, 1), (1, 1))
# Small enough for the float64 oracle; together they meet every limit of the kernels.
CASES = [
  _("0d", 65, (), 17, (), 33),
  _("1x1", 2, (5, 7), 64, (1, 1), 65),
  _("3x3", 2, (9, 8), 16, (3, 3), 24, padding=SAME3),
  _("3x3s2", 2, (9, 8), 16, (3, 3), 24, (2, 2), SAME3),
  _("stem7x7s2", 1, (21, 22), 3, (7, 7), 64, (2, 2), ((3, 3), (3, 3))),
  _("patch4x4s4", 2, (16, 12), 3, (4, 4), 40, (4, 4)),
  _("mnist1", 3, (28, 28), 1, (5, 5), 32),
  _("tile_edge", 1, (13, 10), 15, (3, 3), 63, padding=SAME3),
  _("tile_edge+1", 1, (43, 3), 17, (1, 3), 129),
  _("one_channel", 63, (3, 3), 1, (2, 2), 1),
  _("c2k5", 2, (6, 5), 2, (3, 2), 5, padding=((2, 0), (0, 1))),
  _("c44", 1, (6, 6), 44, (3, 3), 44, padding=SAME3),
  _("depthwise", 2, (9, 9), 33, (3, 3), 33, padding=SAME3, groups=33),
  _("depthwise_x2_s2", 2, (9, 10), 12, (3, 3), 24, (2, 2), SAME3, groups=12),
  _("grouped", 2, (7, 6), 24, (3, 3), 40, padding=SAME3, groups=4),
  _("dilated", 2, (15, 14), 5, (3, 3), 7, (1, 2), ((2, 2), (3, 3)), rhs_dilation=(2, 3)),
  _("transposed", 2, (6, 5), 6, (3, 3), 8, padding=((2, 1), (1, 2)), lhs_dilation=(2, 3)),
  _("both_dilations", 1, (6, 5), 3, (3, 2), 4, (2, 3), ((3, 1), (0, 4)), (3, 2), (2, 3)),
  _("negative_padding", 2, (9, 9), 4, (3, 3), 6, (2, 1), ((-2, 1), (3, -3))),
  _("asymmetric_wide", 2, (4, 4), 4, (3, 3), 6, padding=((7, 0), (0, 9))),
  _("window_exceeds_input", 2, (3, 4), 5, (5, 3), 6),
  _("stride_exceeds_window", 2, (11, 11), 4, (2, 2), 6, (4, 5)),
  _("1d", 4, (50,), 12, (5,), 20, (2,), ((2, 3),)),
  _("1d_causal_depthwise", 2, (40,), 16, (4,), 16, padding=((3, 0),), groups=16),
  _("1d_wavenet", 1, (70,), 8, (2,), 16, padding=((16, 0),), rhs_dilation=(16,)),
  _("3d", 2, (5, 6, 4), 6, (3, 3, 3), 10, padding=((1, 1),) * 3),
  _("3d_s2_groups", 1, (7, 6, 5), 8, (3, 1, 2), 12, (2, 1, 2), ((1, 0), (0, 0), (1, 1)), groups=2),
  _("empty_batch", 0, (5, 5), 3, (3, 3), 4),
  _("empty_channels", 2, (5, 5), 0, (3, 3), 4),
  _("empty_features", 2, (5, 5), 3, (3, 3), 0),
  _("empty_spatial", 2, (0, 5), 3, (3, 3), 4, padding=((2, 2), (0, 0))),
]
