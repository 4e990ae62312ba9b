#include "cuda/conv/few_features_plan.h"

#include <algorithm>
#include <cmath>

namespace jaxdnn::conv {

bool TakesFewFeatures(const Problem& problem) {
  const Problem p = AsForward(problem);
  if (p.direction != Direction::kForward || p.groups != 1 || (p.in == DType::kF32 && p.products != 1)) return false;
  const int64_t size = SizeOf(p.in);
  for (int d = 0; d < kRank; ++d)
    if (p.stride[d] != 1 || p.lhs_dilation[d] != 1 || (p.rhs_dilation[d] != 1 && p.window[d] > 1)) return false;
  const double pixels = double(p.batch) * p.images * std::max(p.XPixels(), p.YPixels());
  return size <= 4 && p.x[0] == 1 && p.y[0] == 1 && p.window[0] == 1 && p.pad[0] == 0 &&
         std::max(p.window[1], p.window[2]) <= kFewMostWindow && p.features > 0 && p.features <= kFewMostFeatures &&
         p.channels >= 8 && p.channels * size % 16 == 0 && FewFeaturesFilterBytes(p) <= kFewMostFilterBytes &&
         p.Taps() > 0 && p.XPixels() > 0 && p.YPixels() > 0 &&
         // The kernels count elements of the result with 31 bits, and fours of channels with 32.
         pixels > 0 && pixels * kFewMostFeatures < INT32_MAX && pixels * p.channels / 4 < UINT32_MAX;
}

// What they move to and from memory, or what a warp reads from shared memory for its lines, which are 32 columns of the
// result. An H200 takes 1.1 to 1.7 times as long.
double FewFeaturesCycles(const Problem& problem) {
  constexpr double kMultiprocessors = 132, kBytesPerCycle = 18, kStart = 6000, kShare = 0.8, kLine = 120;
  const Problem p = AsForward(problem);
  const double images = double(p.batch) * p.images, size = SizeOf(p.in);
  const double bytes = images * (p.XPixels() * p.channels * size + p.YPixels() * p.features * SizeOf(p.out));
  // As many lines more as the window is higher than one, of some eight that a warp has.
  const double lines = std::ceil(images * p.y[2] / 32) * (p.y[1] + std::ceil(p.y[1] / 8.0) * (p.window[1] - 1));
  const double step = (size == 4 ? 14 : 10) + 3 * p.window[1];
  const double line = kLine + p.window[2] * FewFeaturesSteps(p) * step;
  return kStart + std::max(bytes / (kShare * kBytesPerCycle), lines * line) / kMultiprocessors;
}

}  // namespace jaxdnn::conv
