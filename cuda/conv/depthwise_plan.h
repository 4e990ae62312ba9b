// Which problems the kernels of depthwise convolution take, some of them by themselves, and how long they do.
#pragma once

#include <algorithm>

#include "cuda/common/int_div.h"
#include "cuda/conv/frame.h"

namespace jaxdnn::conv {

// Whether there is a kernel whose ring of lines is filled with what is read beyond edges, if the arrays and the
// epilogue allow it (depthwise_ring.cuh, depthwise_filter_ring.cuh): for windows of so many lines and columns, without
// stride.
constexpr int kEdgesTaps = 3;
inline bool RingsHaveEdges(const Problem& p) {
  const bool apart = std::max({p.stride[1], p.stride[2], p.rhs_dilation[1], p.rhs_dilation[2]}) > 1;
  const Reach planes = ReachOf(p, 0);
  return p.channels == 1 && p.features == 1 && p.groups * SizeOf(p.in) % 16 == 0 && !apart && p.window[0] == 1 &&
         planes.low == 0 && planes.high == 0 && p.window[1] == kEdgesTaps && p.window[2] == kEdgesTaps &&
         std::max(p.x[2], p.y[2]) * p.groups * SizeOf(p.in) < INT32_MAX;
}

// Whether rings of 3x3 windows take several features of a channel, if the arrays and the epilogue allow it: an even
// number, and in the data gradient a power of two, so that lanes that have them can be added up.
constexpr int kMostSummed = 32;
inline bool TakesMultiplied(const Problem& p) {
  const bool summed = p.direction == Direction::kDataGradient;
  const auto is_one = [](int64_t n) { return n == 1; };
  const bool addable = p.features <= kMostSummed && (p.features & (p.features - 1)) == 0;
  return p.channels == 1 && p.features > 0 && p.features % 2 == 0 && (addable || !summed) &&
         p.groups * (summed ? p.features : 1) * SizeOf(p.in) % 16 == 0 && p.window[0] == 1 && p.window[1] == 3 &&
         p.window[2] == 3 && std::all_of(p.lhs_dilation, p.lhs_dilation + kRank, is_one) &&
         p.stride[1] == p.stride[2] && p.stride[1] <= (summed ? 1 : 2);
}

// What the kernels on the tensor cores have in common: 16-bit floats in whole chunks of channels, and no stride or
// dilation; and of most, windows of one plane.
inline bool IsPlainOf16Bits(const Problem& p, int chunk = 8, int planes = 1) {
  const auto all_one = [](const int64_t (&a)[kRank]) {
    return std::all_of(a, a + kRank, [](int64_t n) { return n == 1; });
  };
  return SizeOf(p.in) == 2 && p.channels == 1 && p.features == 1 && p.groups % chunk == 0 && all_one(p.stride) &&
         all_one(p.lhs_dilation) && all_one(p.rhs_dilation) && p.window[0] == planes;
}

// For windows whose lines are band matrices (depthwise_band.cuh): as many columns as eight results see in 16 `steps`
// values.
constexpr int BandColumns(int steps) { return 16 * steps - 7; }
// Channels of a block, whose warps then bring 32 or 64 bytes of a pixel; and blocks that a multiprocessor has at once.
constexpr int BandChannels(int64_t lines) { return lines == 1 ? 32 : 16; }
constexpr int BandBlocks(int64_t lines, int64_t columns) {
  return lines > 7 || (lines == 1 && columns > BandColumns(3)) ? 1 : 2;
}

// Windows for which there are rings of lines too, which are ahead in lines of few results.
inline bool IsSquare5Or7(const Problem& p) {
  return p.window[1] == p.window[2] && (p.window[1] == 5 || p.window[1] == 7);
}

// The filter gradient of windows of 3x3x3, in chunks of four channels (depthwise_band_volume.cuh). It counts lines of
// up to seven planes that are not there.
constexpr int kVolumeTaps = 3, kVolumeChunk = 4;
inline bool TakesVolumeBands(const Problem& p) {
  return p.direction == Direction::kFilterGradient && IsPlainOf16Bits(p, kVolumeChunk, kVolumeTaps) &&
         p.window[1] == kVolumeTaps && p.window[2] == kVolumeTaps &&
         double(p.batch) * p.images * (p.y[0] + 7) * p.y[1] < INT32_MAX;
}

// Windows of some lines of up to nine columns, or of one line in one dimension; not those of few taps, which run at the
// rate of memory without.
inline bool TakesBands(const Problem& p) {
  constexpr int64_t kFewestTaps = 10, kMostLines = 9, kFewestColumns = 9, kFewestOfLine = 65;
  const bool any = p.direction == Direction::kFilterGradient && IsSquare5Or7(p);
  const auto& out = p.direction == Direction::kDataGradient ? p.x : p.y;
  const bool one_line = p.window[1] == 1;
  return IsPlainOf16Bits(p) && p.Taps() >= kFewestTaps && p.window[1] <= kMostLines &&
         p.window[2] <= BandColumns(one_line ? 5 : 1) &&
         out[2] >= (any        ? 0
                    : one_line ? kFewestOfLine
                               : kFewestColumns) &&
         (!one_line || out[1] == 1);
}

// For large windows (depthwise_wide.cuh): results in a line of a product's rows, and strips of them.
constexpr int kWideStrip = 16, kWideStrips = 8, kWideMostColumns = 41;

// Strips side by side, as a power of two, of lines of so many results.
inline int WideAcrossBits(int64_t columns) {
  int bits = 0;
  while ((1 << bits) < kWideStrips && (kWideStrip << bits) < columns) ++bits;
  return bits;
}

// Windows of many taps, on lines enough for some sets of strips.
inline bool TakesWide(const Problem& p) {
  constexpr int64_t kFewestTaps = 64, kFewestLines = 5, kFewestSets = 4;
  const auto& out = p.direction == Direction::kDataGradient ? p.x : p.y;
  const int64_t beside = kWideStrips >> WideAcrossBits(out[2]);
  return IsPlainOf16Bits(p) && std::min(p.window[1], p.window[2]) >= kFewestLines && p.window[2] <= kWideMostColumns &&
         p.Taps() >= kFewestTaps && out[1] > (kFewestSets - 1) * beside;
}

// For large windows on small images (depthwise_image.cuh): eights of pixels that an image's lines are filled up to.
constexpr int kImageEight = 8;
inline int64_t ImageEights(const int64_t (&extent)[kRank]) { return extent[1] * CeilDiv(extent[2], kImageEight); }

// Windows that no other kernel is compiled for, of images and taps enough for that.
inline bool TakesImages(const Problem& p) {
  constexpr int64_t kMostEights = 32, kMostApart = 160, kFewestTaps = 10, kMostTaps = 1600, kFewest = 256;
  // What the filter's table is as large as.
  const int64_t apart = (p.x[1] + p.y[1]) * (CeilDiv(p.x[2], kImageEight) + CeilDiv(p.y[2], kImageEight));
  return IsPlainOf16Bits(p) && !IsSquare5Or7(p) && !TakesWide(p) &&
         std::min({p.XPixels(), p.YPixels(), p.batch, p.groups}) > 0 &&
         std::max(ImageEights(p.x), ImageEights(p.y)) <= kMostEights && apart <= kMostApart &&
         p.Taps() >= kFewestTaps && p.Taps() <= kMostTaps && p.images * p.y[0] * p.Taps() >= kFewest;
}

// For channels that are no whole chunks of 16 bytes, on Hopper (unaligned_depthwise.cuh): 3x3 windows without dilation,
// and no stride, or, but in the data gradient, one of two. A block has so many channels of a pixel at most.
constexpr int kUnalignedChannels = 352;
inline bool TakesUnalignedDepthwise(const Problem& p) {
  const auto plain = [](int64_t n) { return n == 1; };
  const auto are = [&](const int64_t (&a)[kRank]) { return std::all_of(a, a + kRank, plain); };
  const int64_t row = p.groups * SizeOf(p.in);
  return p.channels == 1 && p.features == 1 && row % 16 != 0 && p.window[0] == 1 && p.window[1] == 3 &&
         p.window[2] == 3 && are(p.lhs_dilation) && are(p.rhs_dilation) &&
         (are(p.stride) ||
          (p.direction != Direction::kDataGradient && p.stride[1] == p.stride[2] && p.stride[1] <= 2)) &&
         std::max(p.x[2], p.y[2]) * row < INT32_MAX / 4;
}

// Whether there is any kernel.
bool TakesDepthwise(const Problem& p);
// What kernels have of an epilogue. Those compiled for a window have no residual and no activations, or at most clamps,
// as of ReLU, and leave problems that ask for more to the kernel of any window, which is several times slower.
enum class Finish { kBias, kClamp, kAny };
Finish FinishOf(const Problem& p);
double DepthwiseCycles(const Problem& p, int64_t splits, bool hopper);

}  // namespace jaxdnn::conv
