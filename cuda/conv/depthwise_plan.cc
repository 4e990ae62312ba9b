#include "cuda/conv/depthwise_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

// Whether there is a kernel that runs at the rate of memory: of a line of up to four taps side by side
// (depthwise_quads.cuh), or of a 3x3 or 5x5 whose results are twice as close as what it reads (depthwise_spread.cuh).
bool IsStreaming(const Problem& p) {
  if (p.features != 1 || p.groups % 4 != 0 || p.window[0] != 1) return false;
  const Problem f = AsForward(p);
  const auto is = [&](int d, int64_t taps, int64_t lhs_dilation) {
    return p.window[d] == taps && f.stride[d] == 1 && f.lhs_dilation[d] == lhs_dilation && f.rhs_dilation[d] == 1;
  };
  if (is(2, 3, 2) || is(2, 5, 2)) return is(1, p.window[2], 2);
  return p.window[1] == 1 && p.Taps() > 1 && p.Taps() <= 4 && is(2, p.Taps(), 1);
}

// Of products of whole images: by the accesses to shared memory of a warp, which has one channel of 16 images. Fitted
// to an H200.
double ImageCycles(const Problem& p, int64_t splits) {
  const Problem f = AsForward(p);
  const auto across = [](int64_t columns) { return double(CeilDiv(columns, kImageEight)); };
  const double x_across = across(f.x[2]), y_across = across(f.y[2]);
  const int64_t images = p.images * f.y[0];
  const double warps = double(p.batch) * p.groups * CeilDiv(images, 16), places = kMultiprocessors;
  const double slabs = double(p.batch) * (p.groups / 8);
  double accesses, parts, units = 1;
  if (p.direction == Direction::kFilterGradient) {
    // A product of two lines of x, each with eight of its pixels.
    const double pairs = std::ceil(std::min(f.window[1], f.x[1] + f.y[1] - 1) / 2.0);
    const double products =
        f.y[1] * y_across * std::min(f.x[1], f.window[1]) / 2.0 * std::min(x_across, 1 + std::ceil(f.window[2] / 8.0));
    const double blocks = std::min(double(splits), std::max(1.0, 2 * places / slabs));
    accesses = 5 * products + 30 * pairs * (x_across + y_across - 1);
    parts = blocks * pairs;
    units = std::ceil(CeilDiv(images, 32) / blocks);
  } else {
    // Four eights of results, in some lines.
    const double sets = std::ceil(f.y[1] * y_across / 4), lines = std::ceil(4 / y_across) + f.window[1] - 1;
    const double seen = f.x[1] * f.y[1] > 1 ? x_across : std::min(x_across, 5 + std::ceil(f.window[2] / 8.0));
    accesses = sets * (6 * std::min(lines, double(f.x[1])) * seen + 40);
    parts = sets * CeilDiv(images, 16);
  }
  const double busy = std::min(1.0, slabs * parts / places);
  const double bytes = double(p.batch) * p.images * p.groups * (p.XPixels() + p.YPixels()) * SizeOf(p.in);
  return 6000 + 1000 * units + std::max(3.2 * warps * accesses / (places * busy), bytes / (places * kBytesPerCycle));
}

// 3x3, 5x5, 7x7 and 3x3x3.
bool IsCompiled(const Problem& p) {
  const int64_t n = p.window[2];
  return p.window[1] == n && (p.window[0] == 1 ? n == 3 || n == 5 || n == 7 : p.window[0] == 3 && n == 3);
}

}  // namespace

// They have one input channel to a group, and count work and the bytes between columns with 32 bits.
bool TakesDepthwise(const Problem& p) {
  const bool holes = *std::max_element(p.lhs_dilation, p.lhs_dilation + kRank) > 1;
  double apart = 0;
  for (int d = 0; d < kRank; ++d) apart = std::max(apart, double(p.stride[d]) * p.lhs_dilation[d] * p.rhs_dilation[d]);
  return p.channels == 1 && p.features > 0 && p.in != DType::kF64 &&
         !(holes && p.direction == Direction::kFilterGradient) && apart * p.groups * p.features * 8 < INT32_MAX &&
         p.batch * p.images * std::max(p.XPixels(), p.YPixels()) < INT32_MAX;
}

Finish FinishOf(const Problem& p) {
  if (IsCompiled(p)) return Finish::kClamp;
  return TakesBands(p) && p.out == p.in ? Finish::kBias : Finish::kAny;
}

// Of the depthwise kernels, by what an element of the larger of input and output takes a multiprocessor. Windows that
// are not compiled for cost more a line; 16-bit channels that cannot be had as pairs, more a tap. Fitted to an H200.
double DepthwiseCycles(const Problem& p, int64_t splits, bool hopper) {
  const bool bands = TakesBands(p) || TakesVolumeBands(p);
  if (!bands && TakesImages(p)) return ImageCycles(p, splits);
  const bool filter = p.direction == Direction::kFilterGradient;
  const bool unaligned = hopper && TakesUnalignedDepthwise(p);
  const bool paired = unaligned || (p.features == 1 && p.groups % 2 == 0) || TakesMultiplied(p),
             streaming = !filter && IsStreaming(p);
  const bool wide = !bands && TakesWide(p),
             compiled =
                 bands || wide || streaming || (IsCompiled(p) && (p.window[0] == 1 || !filter || p.groups % 4 == 0));
  const double lines = p.window[0] * p.window[1], taps = p.Taps() * (paired ? 1 : 2);
  const double element = streaming            ? 0.2
                         : bands              ? 0.3 + 0.025 * lines
                         : wide               ? 1.6 + 0.002 * taps
                         : compiled && paired ? 0.25 + 0.015 * taps
                                              : 0.6 + 0.017 * taps + 0.1 * lines;
  // Compiled windows go over all lines, others over results alone.
  const bool results = !(compiled && paired) && p.direction == Direction::kForward;
  const double planes = double(p.batch) * p.images * p.groups * p.features;
  const double most = planes * std::max(p.XPixels(), p.YPixels()), elements = results ? planes * p.YPixels() : most;
  // Lanes run over channels, of which few leave loads scattered, unless whole lines are copied.
  const double scattered = unaligned ? 1 : std::max(1.0, 16.0 / p.groups);
  const double all = elements * element * scattered / kMultiprocessors, bytes = most * 2 * SizeOf(p.in);
  // Blocks have channels of their own, and in the filter gradient 32 taps where the window is not compiled for.
  const double pieces = compiled ? 1 : std::ceil(p.Taps() / 32.0);
  const double slab = wide        ? 8
                      : bands     ? BandChannels(p.window[1])
                      : unaligned ? kUnalignedChannels
                                  : 64,
               resident = wide    ? 1
                          : bands ? BandBlocks(p.window[1], p.window[2])
                                  : 2,
               places = resident * kMultiprocessors;
  const double blocks = std::max(1.0, p.batch * std::ceil(p.groups * p.features / slab) * splits * pieces);
  const double rounds = filter ? std::ceil(blocks / places) : 1, unused = filter ? rounds * places / blocks : 1;
  // A thread of the data gradient sums up all features of a channel, one after the other.
  const bool sums = p.direction == Direction::kDataGradient && !paired;
  const double chain = sums ? 340.0 * p.features * p.Taps() : 0;
  return 2000 + 3000 * rounds + std::max({all * unused, bytes / (kMultiprocessors * kBytesPerCycle), chain});
}

}  // namespace jaxdnn::conv
