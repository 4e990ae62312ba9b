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
  models: int = 0
  """If not 0, x and w carry that many models in front, and the convolution is vmapped over both."""
  padding_mode: str = "zeros"

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
  _("empty_channels_of_8", 2, (5, 5), 0, (3, 3), 8),
  _("empty_features_of_8", 2, (5, 5), 8, (3, 3), 0),
  _("empty_spatial", 2, (0, 5), 3, (3, 3), 4, padding=((2, 2), (0, 0))),
  _("empty_lines", 2, (5, 0), 3, (3, 3), 8, padding=((0, 0), (2, 2))),
]

SAME7 = ((3, 3), (3, 3))
# Layers of known networks, at a batch that a slow kernel also takes in milliseconds: the dense ones of 64 channels and
# more, which other libraries too are made for, and all the others.
DENSE = [
  _("rn50.1x1.64-64@56", 32, (56, 56), 64, (1, 1), 64),
  _("rn50.3x3.64@56", 32, (56, 56), 64, (3, 3), 64, padding=SAME3),
  _("rn50.1x1.64-256@56", 32, (56, 56), 64, (1, 1), 256),
  _("rn50.1x1.256-64@56", 32, (56, 56), 256, (1, 1), 64),
  _("rn50.1x1.256-128@56", 32, (56, 56), 256, (1, 1), 128),
  _("rn50.3x3s2.128@56", 32, (56, 56), 128, (3, 3), 128, (2, 2), SAME3),
  _("rn50.3x3s2.same.128@56", 32, (56, 56), 128, (3, 3), 128, (2, 2), ((0, 1), (0, 1))),
  _("rn50.1x1.128-512@28", 32, (28, 28), 128, (1, 1), 512),
  _("rn50.1x1s2.256-512@56", 32, (56, 56), 256, (1, 1), 512, (2, 2)),
  _("rn50.1x1.512-128@28", 32, (28, 28), 512, (1, 1), 128),
  _("rn50.3x3.128@28", 32, (28, 28), 128, (3, 3), 128, padding=SAME3),
  _("rn50.1x1.512-256@28", 32, (28, 28), 512, (1, 1), 256),
  _("rn50.3x3s2.256@28", 32, (28, 28), 256, (3, 3), 256, (2, 2), SAME3),
  _("rn50.1x1.256-1024@14", 32, (14, 14), 256, (1, 1), 1024),
  _("rn50.1x1s2.512-1024@28", 32, (28, 28), 512, (1, 1), 1024, (2, 2)),
  _("rn50.1x1.1024-256@14", 32, (14, 14), 1024, (1, 1), 256),
  _("rn50.3x3.256@14", 32, (14, 14), 256, (3, 3), 256, padding=SAME3),
  _("rn50.1x1.1024-512@14", 32, (14, 14), 1024, (1, 1), 512),
  _("rn50.3x3s2.512@14", 32, (14, 14), 512, (3, 3), 512, (2, 2), SAME3),
  _("rn50.1x1.512-2048@7", 32, (7, 7), 512, (1, 1), 2048),
  _("rn50.1x1s2.1024-2048@14", 32, (14, 14), 1024, (1, 1), 2048, (2, 2)),
  _("rn50.1x1.2048-512@7", 32, (7, 7), 2048, (1, 1), 512),
  _("rn50.3x3.512@7", 32, (7, 7), 512, (3, 3), 512, padding=SAME3),
  _("rn50.b256.3x3.256@14", 256, (14, 14), 256, (3, 3), 256, padding=SAME3),
  _("rn50.b1.3x3.64@56", 1, (56, 56), 64, (3, 3), 64, padding=SAME3),
  _("rn50.b1.1x1.1024-256@14", 1, (14, 14), 1024, (1, 1), 256),
  _("rn50.b1.3x3.512@7", 1, (7, 7), 512, (3, 3), 512, padding=SAME3),
  _("vgg.3x3.64@224", 8, (224, 224), 64, (3, 3), 64, padding=SAME3),
  _("vgg.3x3.128@112", 8, (112, 112), 128, (3, 3), 128, padding=SAME3),
  _("vgg.3x3.256@56", 32, (56, 56), 256, (3, 3), 256, padding=SAME3),
  _("vgg.3x3.512@28", 32, (28, 28), 512, (3, 3), 512, padding=SAME3),
  _("sd.3x3.320@64", 4, (64, 64), 320, (3, 3), 320, padding=SAME3),
  _("sd.3x3.640@32", 4, (32, 32), 640, (3, 3), 640, padding=SAME3),
  _("sd.3x3.1280@16", 4, (16, 16), 1280, (3, 3), 1280, padding=SAME3),
  _("sd.1x1.640@32", 4, (32, 32), 640, (1, 1), 640),
  _("unet3d.3x3x3.64@48", 2, (48, 48, 48), 64, (3, 3, 3), 64, padding=((1, 1),) * 3),
  _("unet3d.3x3x3.128@24", 2, (24, 24, 24), 128, (3, 3, 3), 128, padding=((1, 1),) * 3),
]
OTHERS = [
  # Few channels or features.
  _("rn50.stem7x7s2", 32, (224, 224), 3, (7, 7), 64, (2, 2), SAME7),
  _("inception.3x3.3-32@224", 32, (224, 224), 3, (3, 3), 32, (2, 2)),
  _("vit.patch16", 32, (224, 224), 3, (16, 16), 768, (16, 16)),
  _("convnext.stem4x4s4", 32, (224, 224), 3, (4, 4), 96, (4, 4)),
  _("gray.7x7s2.1-64@224", 32, (224, 224), 1, (7, 7), 64, (2, 2), SAME7),
  _("rgba.3x3s2.4-32@224", 32, (224, 224), 4, (3, 3), 32, (2, 2), SAME3),
  _("wav2vec.k10s5.1-512", 4, (80000,), 1, (10,), 512, (5,)),
  _("r3d.stem3x7x7s2.3-64", 4, (16, 112, 112), 3, (3, 7, 7), 64, (1, 2, 2), ((1, 1), *SAME7)),
  _("rgb.3x3.64-3@256", 4, (256, 256), 64, (3, 3), 3, padding=SAME3),
  _("dcgan.up4x4s2.64-3@32", 128, (32, 32), 64, (4, 4), 3, padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)),
  _("mnist.conv1", 128, (28, 28), 1, (5, 5), 32),
  _("mnist.conv2", 128, (12, 12), 32, (5, 5), 64),
  _("mnist.conv3", 128, (4, 4), 64, (3, 3), 128),
  # A stride over 32 channels.
  _("darknet.3x3s2.32-64@208", 16, (208, 208), 32, (3, 3), 64, (2, 2), SAME3),
  # Odd numbers of channels.
  _("odd.3x3.65@56", 32, (56, 56), 65, (3, 3), 65, padding=SAME3),
  _("odd.3x3.64-65@56", 32, (56, 56), 64, (3, 3), 65, padding=SAME3),
  # Depthwise.
  _("mbv2.dw3x3.144@56", 32, (56, 56), 144, (3, 3), 144, padding=SAME3, groups=144),
  _("mbv2.dw3x3s2.96@112", 32, (112, 112), 96, (3, 3), 96, (2, 2), SAME3, groups=96),
  _("effnet.dw5x5.240@28", 32, (28, 28), 240, (5, 5), 240, padding=((2, 2),) * 2, groups=240),
  _("effnet.dw5x5s2.same.144@56", 32, (56, 56), 144, (5, 5), 144, (2, 2), ((1, 2),) * 2, groups=144),
  _("multiplier2.dw3x3.64-128@56", 32, (56, 56), 64, (3, 3), 128, padding=SAME3, groups=64),
  _("xception.dw3x3d2.728@33", 8, (33, 33), 728, (3, 3), 728, padding=((2, 2),) * 2, rhs_dilation=(2, 2), groups=728),
  _("convnext.dw7x7.96@56", 32, (56, 56), 96, (7, 7), 96, padding=SAME7, groups=96),
  _("dw9x9.96@56", 32, (56, 56), 96, (9, 9), 96, padding=((4, 4),) * 2, groups=96),
  _("replk.dw13x13.1024@7", 32, (7, 7), 1024, (13, 13), 1024, padding=((6, 6),) * 2, groups=1024),
  _("replk.dw27x27.512@14", 8, (14, 14), 512, (27, 27), 512, padding=((13, 13),) * 2, groups=512),
  _("replk.dw29x29.256@28", 4, (28, 28), 256, (29, 29), 256, padding=((14, 14),) * 2, groups=256),
  _("replk.dw31x31.128@56", 4, (56, 56), 128, (31, 31), 128, padding=((15, 15),) * 2, groups=128),
  _("x3d.dw3x3x3.108@16x28", 4, (16, 28, 28), 108, (3, 3, 3), 108, padding=((1, 1),) * 3, groups=108),
  _("mamba.dw4.4096", 4, (2048,), 4096, (4,), 4096, padding=((3, 0),), groups=4096),
  _("conformer.dw31.512", 16, (1000,), 512, (31,), 512, padding=((15, 15),), groups=512),
  _("causal.dw64.1024", 4, (2048,), 1024, (64,), 1024, padding=((63, 0),), groups=1024),
  # Groups of 4 to 56 channels.
  _("resnext.g32.128@56", 32, (56, 56), 128, (3, 3), 128, padding=SAME3, groups=32),
  _("resnext.g32s2.256@56", 32, (56, 56), 256, (3, 3), 256, (2, 2), SAME3, groups=32),
  _("regnet.w8.152@14", 32, (14, 14), 152, (3, 3), 152, padding=SAME3, groups=19),
  _("regnet.w16.448@14", 32, (14, 14), 448, (3, 3), 448, padding=SAME3, groups=28),
  _("regnet.w24.408@14", 32, (14, 14), 408, (3, 3), 408, padding=SAME3, groups=17),
  _("regnet.w48.432@14", 32, (14, 14), 432, (3, 3), 432, padding=SAME3, groups=9),
  _("regnet.w56.784@14", 32, (14, 14), 784, (3, 3), 784, padding=SAME3, groups=14),
  _("wav2vec.pos128.g16.768", 8, (400,), 768, (128,), 768, padding=((64, 63),), groups=16),
  _("resnext3d.g32.128@8x28", 4, (8, 28, 28), 128, (3, 3, 3), 128, padding=((1, 1),) * 3, groups=32),
  # vmapped over filters; of one example each, whose filter gradients are what differential privacy clips.
  _("ensemble.e64.3x3.32@32", 16, (32, 32), 32, (3, 3), 32, padding=SAME3, models=64),
  _("per_example.e64.3x3.64@32", 1, (32, 32), 64, (3, 3), 64, padding=SAME3, models=64),
  # 1-D and 3-D.
  _("wav2vec.k3s2.512", 4, (8000,), 512, (3,), 512, (2,)),
  _("whisper.k3s2.384", 16, (3000,), 384, (3,), 384, (2,), ((1, 1),)),
  _("wavenet.k2d512.64-128", 4, (16000,), 64, (2,), 128, padding=((512, 0),), rhs_dilation=(512,)),
  _("unet3d.3x3x3.16@96", 1, (96, 96, 96), 16, (3, 3, 3), 16, padding=((1, 1),) * 3),
  _("unet3d.3x3x3.32@96", 1, (96, 96, 96), 32, (3, 3, 3), 32, padding=((1, 1),) * 3),
  _("nnunet.3x3x3s2.32-64@96", 1, (96, 96, 96), 32, (3, 3, 3), 64, (2, 2, 2), ((1, 1),) * 3),
  _("r2plus1d.1x3x3.64-144@16x56", 2, (16, 56, 56), 64, (1, 3, 3), 144, padding=((0, 0), *SAME3)),
  _("r2plus1d.3x1x1.144-64@16x56", 2, (16, 56, 56), 144, (3, 1, 1), 64, padding=((1, 1), (0, 0), (0, 0))),
  # Dilated.
  _("context.3x3d8.32@128", 8, (128, 128), 32, (3, 3), 32, padding=((8, 8),) * 2, rhs_dilation=(8, 8)),
  _("deeplab.3x3d4.512@33", 8, (33, 33), 512, (3, 3), 512, padding=((4, 4),) * 2, rhs_dilation=(4, 4)),
  _("aspp.3x3d12.2048-256@33", 8, (33, 33), 2048, (3, 3), 256, padding=((12, 12),) * 2, rhs_dilation=(12, 12)),
  # Transposed.
  _("hifigan.up16s8.512-256", 4, (800,), 512, (16,), 256, padding=((11, 11),), lhs_dilation=(8,)),
  _("hifigan.up4s2.64-32", 4, (51200,), 64, (4,), 32, padding=((2, 2),), lhs_dilation=(2,)),
  _("unet.up2x2s2.128-64@64", 8, (64, 64), 128, (2, 2), 64, padding=SAME3, lhs_dilation=(2, 2)),
  _("unet3d.up2x2x2s2.64-32@48", 1, (48, 48, 48), 64, (2, 2, 2), 32, padding=((1, 1),) * 3, lhs_dilation=(2, 2, 2)),
  # Padded otherwise than with zeros.
  _("circular.3x3.128@28", 32, (28, 28), 128, (3, 3), 128, padding=SAME3, padding_mode="circular"),
  _("reflect.3x3.256@56", 32, (56, 56), 256, (3, 3), 256, padding=SAME3, padding_mode="reflect"),
  _("replicate.3x3x3.64@48", 2, (48, 48, 48), 64, (3, 3, 3), 64, padding=((1, 1),) * 3, padding_mode="replicate"),
  _("circular.dw3x3.144@56", 32, (56, 56), 144, (3, 3), 144, padding=SAME3, groups=144, padding_mode="circular"),
]

BATCHES = {
  "rn50.1x1.64-64@56": 256, "rn50.3x3.64@56": 256, "rn50.1x1.64-256@56": 256, "rn50.1x1.256-64@56": 256,
  "rn50.3x3s2.128@56": 256, "rn50.3x3s2.same.128@56": 256, "rn50.1x1s2.256-512@56": 256, "rn50.3x3.128@28": 256,
  "rn50.1x1.256-1024@14": 256, "rn50.1x1.1024-256@14": 256, "rn50.3x3.512@7": 256, "rn50.1x1.512-2048@7": 256,
  "rn50.1x1.2048-512@7": 256, "sd.3x3.320@64": 16, "sd.3x3.640@32": 16, "sd.3x3.1280@16": 16, "sd.1x1.640@32": 16,
  "unet3d.3x3x3.64@48": 8, "unet3d.3x3x3.128@24": 8, "rn50.stem7x7s2": 256, "vit.patch16": 256,
  "convnext.stem4x4s4": 256, "rgb.3x3.64-3@256": 32, "odd.3x3.65@56": 256, "mbv2.dw3x3.144@56": 256,
  "mbv2.dw3x3s2.96@112": 256, "effnet.dw5x5.240@28": 256, "effnet.dw5x5s2.same.144@56": 256,
  "convnext.dw7x7.96@56": 128, "replk.dw31x31.128@56": 32, "x3d.dw3x3x3.108@16x28": 16, "mamba.dw4.4096": 16,
  "resnext.g32.128@56": 256, "regnet.w16.448@14": 256, "regnet.w24.408@14": 256, "regnet.w48.432@14": 256,
  "wav2vec.k3s2.512": 16, "unet3d.3x3x3.16@96": 4, "unet3d.3x3x3.32@96": 4, "nnunet.3x3x3s2.32-64@96": 4,
  "deeplab.3x3d4.512@33": 32, "aspp.3x3d12.2048-256@33": 32, "hifigan.up4s2.64-32": 16,
  "unet.up2x2s2.128-64@64": 32,
}  # fmt: skip
"""Images of a training step on one device, of layers that the cases have fewer images of."""
LARGE = [
  dataclasses.replace(case, name=f"{case.name} b{BATCHES[case.name]}", batch=BATCHES[case.name])
  for case in DENSE + OTHERS
  if case.name in BATCHES
]


def neighbours(case):
  """One more and one less of each: channels (of a group, if it has several), window, size and batch. Features and
  groups that equal the channels follow them."""
  per_group = case.c // case.groups
  for step in (-1, 1):
    c = case.c + step * (case.groups if per_group > 1 else 1)
    groups = c if per_group == 1 and case.groups > 1 else case.groups
    k = c if case.k == case.c else case.k // case.groups * groups
    window, spatial = (tuple(n + step for n in lengths) for lengths in (case.window, case.spatial))
    changes = {
      "channels": {"c": c, "k": k, "groups": groups}, "window": {"window": window}, "size": {"spatial": spatial},
      "batch": {"batch": case.batch + step},
    }  # fmt: skip
    for name, change in changes.items():
      neighbour = dataclasses.replace(case, name=f"{case.name} {name}{step:+}", **change)
      if c > 0 and neighbour.batch > 0:
        yield neighbour
