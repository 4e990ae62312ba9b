"""The poolings that tests and benchmarks run."""

from typing import NamedTuple

import pool_oracle


class PoolCase(NamedTuple):
  name: str
  shape: tuple[int, ...]
  """Of x, channels last unless there is a layout."""
  window: tuple[int, ...]
  stride: int | tuple[int, ...] | None = None
  padding: object = "VALID"
  dilation: int | tuple[int, ...] = 1
  layout: str | None = None

  @property
  def keywords(self):
    return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

  @property
  def extent(self):
    return self.shape[-len(self.window) - 1 : -1]

  @property
  def spelled_out(self):
    """Window, stride, padding and dilation with an entry per dimension, by other code than the library's."""
    rank = len(self.window)

    def each(v):
      return (v,) * rank if isinstance(v, int) else tuple(v)

    stride, dilation, padding = each(self.stride or 1), each(self.dilation), self.padding
    if padding == "VALID":
      padding = ((0, 0),) * rank
    elif isinstance(padding, int):
      padding = ((padding, padding),) * rank
    elif isinstance(padding, str):
      lower = padding.upper() == "SAME_LOWER"
      padding = pool_oracle.same_padding(self.extent, self.window, stride, dilation, lower=lower)
    return self.window, stride, padding, dilation

  @property
  def out_shape(self):
    extent = pool_oracle.out_extent(self.extent, *self.spelled_out)
    return (*self.shape[: -len(self.window) - 1], *extent, self.shape[-1])


POOL = [
  # The layers people use, scaled down.
  PoolCase("resnet", (2, 14, 14, 64), (3, 3), 2, 1),
  PoolCase("vgg", (2, 8, 8, 64), (2, 2), 2),
  PoolCase("inception", (2, 7, 7, 17), (3, 3), 1, "SAME"),
  PoolCase("global", (2, 7, 7, 64), (7, 7)),
  PoolCase("unet3d", (1, 6, 4, 6, 8), (2, 2, 2), 2),
  PoolCase("audio", (2, 50, 3), (4,), 4),
  # Each argument on its own.
  PoolCase("default_stride", (2, 9, 5), (3,)),
  PoolCase("stride_above_window", (2, 11, 10, 3), (2, 1), (5, 3)),
  PoolCase("identity", (2, 4, 5, 3), (1, 1)),
  PoolCase("same_even", (2, 6, 7, 4), (2, 3), 2, "SAME"),
  PoolCase("same_lower", (2, 6, 7, 4), (2, 3), 2, "same_lower"),
  PoolCase("same_dilated", (2, 9, 8, 3), (3, 2), (2, 3), "SAME", (2, 3)),
  PoolCase("asymmetric", (2, 6, 5, 3), (3, 2), (2, 1), ((2, 0), (0, 3))),
  PoolCase("negative", (2, 8, 9, 5), (3, 2), (2, 1), ((-1, -2), (-3, 2))),
  PoolCase("dilation", (2, 12, 11, 3), (3, 4), 1, 2, (2, 3)),
  PoolCase("dilation_meets_stride", (2, 13, 12, 3), (3, 3), (2, 4), 1, (4, 2)),
  PoolCase("dilation_coprime_to_stride", (2, 30, 5), (4,), 3, 4, 2),
  PoolCase("dilation3d", (1, 6, 7, 5, 3), (2, 3, 2), (1, 2, 2), ((1, 0), (2, 1), (0, 2)), (2, 1, 3)),
  # Windows that hold padding alone, or too much.
  PoolCase("all_padding", (2, 3, 5), (2,), 1, ((4, 3),)),
  PoolCase("window_above_input", (2, 3, 4, 3), (5, 2), 1, ((2, 2), (0, 0))),
  PoolCase("window_does_not_fit", (2, 3, 4, 3), (4, 2)),
  PoolCase("more_than_255_cells", (1, 20, 18, 5), (17, 16), 2, 1),
  PoolCase("255_cells", (1, 18, 16, 4), (17, 15), 1),
  # Channels, batches and extents at the ends.
  PoolCase("channels1", (3, 6, 5, 1), (2, 2), 1),
  PoolCase("channels5", (2, 6, 5, 5), (3, 3), 2, 1),
  PoolCase("3x3s1_vectors", (2, 9, 7, 16), (3, 3), 1, 1),
  PoolCase("3x3s2_vectors", (1, 10, 11, 16), (3, 3), 2, ((0, 1), (1, 0))),
  PoolCase("2x2s1_cropped_vectors", (2, 7, 6, 16), (2, 2), 1, ((-1, 2), (2, -1))),
  PoolCase("2x2s2_vectors", (2, 6, 8, 16), (2, 2), 2),
  PoolCase("2x2s2_remainder_vectors", (3, 7, 9, 24), (2, 2), 2),
  PoolCase("2x2s2_cropped_vectors", (2, 9, 8, 16), (2, 2), 2, ((-1, 0), (-2, 0))),
  PoolCase("2x2s2_odd_vectors", (1, 7, 9, 16), (2, 2), 2, ((1, 1), (-1, 0))),
  PoolCase("tall_vectors", (1, 70, 3, 8), (3, 3), 1, "SAME"),
  PoolCase("2x2x2_vectors", (1, 5, 6, 7, 8), (2, 2, 2), 2, 1),
  # Single channels, which is what channels-first is to the kernels: rows of vectors, and rows that begin anywhere.
  PoolCase("rows_3x3s2", (3, 9, 16, 1), (3, 3), 2, ((1, 1), (1, 0))),
  PoolCase("rows_3x3s1", (2, 7, 12, 1), (3, 3), 1, 1),
  PoolCase("rows_2x2s2", (2, 10, 8, 1), (2, 2), 2),
  PoolCase("rows_anywhere", (2, 21, 27, 1), (3, 3), 2, 1),
  PoolCase("global_planes", (5, 4, 5, 1), (4, 5)),
  PoolCase("wide_vectors", (1, 14, 11, 16), (9, 9), 1, 4),
  PoolCase("channels6", (2, 6, 5, 6), (3, 3), 2, 1),
  PoolCase("2x2s2_cropped", (2, 37, 9, 7), (2, 2), 2, ((-1, 0), (-2, 1))),
  PoolCase("5x5s2", (1, 41, 11, 5), (5, 5), 2, ((3, 1), (2, 4))),
  PoolCase("5x5s2_vectors", (1, 37, 10, 16), (5, 5), 2, 2),
  PoolCase("5x5s2_padded_vectors", (2, 9, 12, 8), (5, 5), 2, ((4, 3), (3, 4))),
  PoolCase("2x2s2_many_rows", (3, 39, 7, 5), (2, 2), 2),
  PoolCase("3x3s2_many_rows", (2, 43, 6, 3), (3, 3), 2, 1),
  PoolCase("plane_in_bands", (1, 57, 27, 3), (3, 3), 2),
  PoolCase("rows_in_bands", (1, 157, 35, 1), (3, 3), 2),
  PoolCase("no_batch_dimension", (7, 6, 3), (2, 2), 2),
  PoolCase("two_batch_dimensions", (2, 3, 7, 4), (3,), 2, 1),
  PoolCase("no_channels", (2, 6, 5, 0), (2, 2)),
  PoolCase("empty_batch", (0, 6, 5, 3), (2, 2)),
  PoolCase("empty_input", (2, 0, 5, 3), (1, 2)),
  PoolCase("empty_padded_input", (2, 0, 3), (2,), 1, 2),
]

# The layers themselves, by the kind of pooling. `layout` is channels-first where it is given.
BENCHMARKS = {
  "max": [
    PoolCase("rn50.3x3s2", (256, 112, 112, 64), (3, 3), 2, 1),
    PoolCase("vgg.2x2s2", (128, 112, 112, 128), (2, 2), 2),
    PoolCase("mnist.2x2s2", (128, 24, 24, 32), (2, 2), 2),
    PoolCase("audio.4s4", (64, 16000, 64), (4,), 4),
    PoolCase("unet3d.2x2x2s2", (4, 96, 96, 96, 32), (2, 2, 2), 2),
    PoolCase("rn50.3x3s2.nchw", (256, 64, 112, 112), (3, 3), 2, 1, layout="NCHW"),
    PoolCase("spp.13x13s1", (64, 40, 40, 256), (13, 13), 1, 6),
    PoolCase("sppf.5x5s1", (64, 20, 20, 256), (5, 5), 1, 2),
  ],
  "avg": [
    PoolCase("incep.3x3s1", (128, 28, 28, 256), (3, 3), 1, 1),
    PoolCase("densenet.2x2s2", (256, 56, 56, 128), (2, 2), 2),
    PoolCase("global.7x7", (512, 7, 7, 2048), (7, 7)),
    PoolCase("audio.4s4", (64, 16000, 64), (4,), 4),
    PoolCase("video.1x2x2s2", (16, 16, 56, 56, 64), (1, 2, 2), (1, 2, 2)),
    PoolCase("incep.3x3s1.nchw", (128, 256, 28, 28), (3, 3), 1, 1, layout="NCHW"),
    PoolCase("global.7x7.nchw", (512, 2048, 7, 7), (7, 7), layout="NCHW"),
  ],
  "lp": [PoolCase("2x2s2", (128, 112, 112, 64), (2, 2), 2)],
  "adaptive": [PoolCase("50to7", (64, 50, 50, 256), (7, 7))],
}

# Neighbours of the layers: channels that fill no vector, one channel, few outputs, odd extents, other windows.
SWEEP = {
  "max": [
    PoolCase("3x3s2.c3", (256, 224, 224, 3), (3, 3), 2, 1),
    PoolCase("3x3s2.c17", (256, 112, 112, 17), (3, 3), 2, 1),
    PoolCase("3x3s2.c44", (256, 112, 112, 44), (3, 3), 2, 1),
    PoolCase("3x3s2.c1000", (16, 111, 113, 1000), (3, 3), 2, 1),
    PoolCase("3x3s1.c4096", (8, 56, 55, 4096), (3, 3), 1, 1),
    PoolCase("5x5s2", (128, 112, 112, 64), (5, 5), 2, 2),
    PoolCase("2x2s2.nchw", (128, 128, 113, 111), (2, 2), 2, layout="NCHW"),
    PoolCase("global.few", (8, 224, 224, 64), (224, 224)),
  ],
  "avg": [
    PoolCase("global.few", (8, 224, 224, 64), (224, 224)),
    PoolCase("2x2s2.c129", (128, 56, 56, 129), (2, 2), 2),
  ],
}
