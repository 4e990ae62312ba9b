// What a problem amounts to: a forward convolution, a matrix product, phases.
#include <algorithm>
#include <numeric>
#include <utility>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

Problem Exchanged(const Problem& p) {
  Problem e = p;
  e.exchanged = !p.exchanged;
  std::swap(e.channels, e.features);
  std::swap(e.x, e.y);
  std::swap(e.stride, e.lhs_dilation);
  for (int d = 0; d < kRank; ++d) e.pad[d] = (p.window[d] - 1) * p.rhs_dilation[d] - p.pad[d];
  return e;
}

Problem AsForward(const Problem& p) {
  if (p.direction != Direction::kDataGradient) return p;
  Problem f = Exchanged(p);
  f.direction = Direction::kForward;
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
