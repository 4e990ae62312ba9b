// What a problem amounts to: a forward convolution, a matrix product, phases.
#include <algorithm>
#include <numeric>
#include <utility>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

Problem AsForward(const Problem& p) {
  Problem f = p;
  if (p.direction != Direction::kDataGradient) return f;
  f.direction = Direction::kForward;
  std::swap(f.channels, f.features);
  std::swap(f.x, f.y);
  std::swap(f.stride, f.lhs_dilation);
  for (int d = 0; d < kRank; ++d) f.pad[d] = (p.window[d] - 1) * p.rhs_dilation[d] - p.pad[d];
  return f;
}

Phases PhasesOf(const Problem& p) {
  // index * step = position * stride + tap * tap_step + constant, as in axis.cuh.
  const bool forward = p.direction == Direction::kForward;
  Phases f;
  for (int d = 0; d < kRank; ++d) {
    const int64_t step = forward ? p.lhs_dilation[d] : p.stride[d];
    const int64_t stride = forward ? p.stride[d] : p.lhs_dilation[d];
    const int64_t extent = forward ? p.y[d] : p.x[d];
    // More phases than positions would be empty.
    f.period[d] = std::min(step / std::gcd(stride, step), std::max<int64_t>(extent, 1));
    f.tap_period[d] = step / std::gcd(p.rhs_dilation[d], step);
  }
  return f;
}

Gemm GemmOf(const Problem& p) {
  const int64_t problems = p.batch * p.groups;
  switch (p.direction) {
    case Direction::kForward:
      return {problems, p.images * p.YPixels(), p.features, p.Taps() * p.channels};
    case Direction::kDataGradient:
      return {problems, p.images * p.XPixels(), p.channels, p.Taps() * p.features};
    case Direction::kFilterGradient:
      return {problems, p.Taps() * p.channels, p.features, p.images * p.YPixels()};
  }
  return {};
}

}  // namespace jaxdnn::conv
