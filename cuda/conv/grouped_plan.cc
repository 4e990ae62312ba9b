#include "cuda/conv/grouped_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {

bool TakesGrouped(const Problem& p) {
  const auto are = [](const int64_t (&v)[kRank], int64_t first, int64_t second, int64_t third) {
    return v[0] == first && v[1] == second && v[2] == third;
  };
  const int64_t stride = p.stride[2], channels = p.groups * p.channels, size = SizeOf(p.in);
  const bool plane = p.x[0] == 1 && p.y[0] == 1 && p.pad[0] == 0 && p.window[0] == 1;
  // Of volumes there are registers for the filter but of groups of 16 floats. Its gradient is one of planes.
  const bool volume = p.stride[0] == 1 && p.x[0] > 0 && p.y[0] > 0 &&
                      (p.direction == Direction::kFilterGradient ||
                       (p.window[0] == 3 && stride == 1 && !(size == 4 && p.channels == 16)));
  const bool small = p.channels == 2 || p.channels == 4 || p.channels == 8 || p.channels == 16 ||
                     (p.channels == 24 && plane && size == 2 && p.direction != Direction::kFilterGradient);
  const double pixels = double(p.batch) * p.images * std::max(p.XPixels(), p.YPixels());
  return size <= 4 && (size == 2 || p.products == 1) && (plane || volume) && p.window[1] == 3 && p.window[2] == 3 &&
         are(p.lhs_dilation, 1, 1, 1) && are(p.rhs_dilation, 1, 1, 1) && p.stride[1] == stride &&
         (stride == 1 || stride == 2) && small && p.features == p.channels && p.groups > 1 && channels % 8 == 0 &&
         p.XPixels() > 0 && p.YPixels() > 0 &&
         // The kernels count pixels with 31 bits, and fours of channels with 32.
         pixels > 0 && pixels * 3 < INT32_MAX && pixels * channels / 4 < UINT32_MAX;
}

// What they move to and from memory, or the instructions of a warp's lines, which are 16 columns of the result by 32 to
// 64 bytes of channels, in each plane of the window. In the filter gradient, of blocks of four warps that have a share
// of the lines. Fitted to an H200.
double GroupedCycles(const Problem& p, int64_t splits) {
  constexpr double kStart = 5000, kLine = 0.75, kShare = 0.8;  // of the memory's rate
  const int64_t channels = p.groups * p.channels;
  const double images = double(p.batch) * p.images, size = SizeOf(p.in),
               of_warp = p.channels >= 16 ? p.channels : 64 / size;
  const double bytes = images * channels * size * (p.XPixels() + p.YPixels());
  const double parts = std::ceil(channels / of_warp), lines = std::ceil(images * p.y[0] * p.y[2] / 16) * p.y[1] * parts;
  if (p.direction == Direction::kFilterGradient) {
    // Cycles of a block, of a line where too few are on their way, and of beginning with other columns.
    constexpr double kBlock = 1500, kLatency = 500, kBegin = 1500;
    const double places = size == 4 && p.channels == 16 ? 2 : 3;  // of a multiprocessor
    const double blocks = parts * p.batch * p.window[0] * splits,
                 rounds = std::ceil(blocks / (places * kMultiprocessors));
    const double resident = std::min(places, std::ceil(blocks / kMultiprocessors));
    const double line = 16 * (size == 2 && p.channels == 16 ? 32 : 64) * (1 + p.stride[1] * p.stride[2]);
    const double each = std::ceil(lines * p.window[0] / (4 * blocks));
    const double begins = std::ceil(each / p.y[1]) + (p.y[1] % int64_t(each) != 0);
    const double of_line = std::max(kLatency, 4 * resident * line / (kShare * kBytesPerCycle));
    return 3000 + rounds * (kBlock * resident + begins * (kBegin + (3 - p.stride[1]) * kLatency) + each * of_line);
  }
  const double products = p.channels == 24 ? 1.6 : 1;  // which then take longer than what surrounds them
  const double line = kLine * 190 * p.window[0] * p.stride[2] * (of_warp * size / 64) * products;
  return kStart + std::max(bytes / (kShare * kBytesPerCycle), line * lines) / kMultiprocessors;
}

}  // namespace jaxdnn::conv
