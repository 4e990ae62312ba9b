#include "cuda/conv/pixel_map.h"

#include <algorithm>
#include <cstdlib>

namespace jaxdnn::conv {
namespace {

constexpr int64_t kMaxStep = 8;
// Of corners (the least; the greatest is one less than its negative) and of offsets, by the number of dimensions.
constexpr int64_t kCorner[] = {0, 32768, 128, 16};
constexpr int64_t kOffset[] = {0, 65535, 255, 31};

// One dimension of a phase; false where it has no steps, taps or corners that the unit could take.
bool MapDimension(const Problem& p, int d, int which, const Phases& f, MappedPhase* m) {
  // index * divisor = position * stride + tap * tap_step + constant, as in axis.cuh.
  const bool data_gradient = p.direction == Direction::kDataGradient;
  const int64_t divisor = data_gradient ? p.stride[d] : p.lhs_dilation[d];
  const int64_t stride = data_gradient ? p.lhs_dilation[d] : p.stride[d];
  const int64_t tap_step = data_gradient ? -p.rhs_dilation[d] : p.rhs_dilation[d];
  const int64_t constant = data_gradient ? p.pad[d] : -p.pad[d];
  const int64_t extent = data_gradient ? p.y[d] : p.x[d], out = data_gradient ? p.x[d] : p.y[d];

  const int64_t candidates = std::min(f.tap_period[d], p.window[d]);
  int64_t tap = 0;
  while (tap < candidates && (which * stride + tap * tap_step + constant) % divisor != 0) ++tap;
  const int64_t taps = tap < candidates ? (p.window[d] - tap + f.tap_period[d] - 1) / f.tap_period[d] : 0;
  const int64_t positions = (out - which + f.period[d] - 1) / f.period[d];
  const int64_t distance = tap_step * f.tap_period[d] / divisor;
  const int64_t step = positions > 1 ? f.period[d] * stride / divisor : 1;
  const int64_t origin = taps > 0 ? (which * stride + tap * tap_step + constant) / divisor : 0;
  const int64_t lower = origin + std::min<int64_t>(0, distance * (taps - 1));
  const int64_t upper = lower + (positions - 1) * step - (extent - 1);
  const int64_t reach = std::max<int64_t>(0, taps - 1) * std::abs(distance);

  m->map.lower[d] = int(lower);
  m->map.upper[d] = int(upper);
  m->map.step[d] = int(step);
  m->positions[d] = int(positions);
  m->first[d] = which;
  m->period[d] = int(f.period[d]);
  m->taps[d] = int(taps);
  m->first_tap[d] = int(tap);
  m->tap_period[d] = int(f.tap_period[d]);
  m->distance[d] = int(std::abs(distance));
  m->reversed[d] = distance < 0;

  const int n = m->map.dimensions;
  if (d < kRank - n) return extent == 1 && positions == 1 && lower == 0 && taps == 1;
  return step <= kMaxStep && reach <= kOffset[n] && std::min(lower, upper) >= -kCorner[n] &&
         std::max(lower, upper) < kCorner[n];
}

// Whether all phases of a dimension have one tap each, at the same pixels.
bool AreAlike(const Problem& p, int d) {
  const bool data_gradient = p.direction == Direction::kDataGradient;
  const int64_t step = data_gradient ? p.stride[d] : p.lhs_dilation[d];
  return p.window[d] == step && p.rhs_dilation[d] == 1 && p.pad[d] == (data_gradient ? 0 : step - 1) &&
         (data_gradient ? p.lhs_dilation[d] == 1 && p.x[d] == step * p.y[d]
                        : p.stride[d] == 1 && p.y[d] == step * p.x[d]);
}

// All phases with the last n dimensions, of those that are alike the first.
bool MapAll(const Problem& p, const Phases& f, const int (&alike)[kRank], int n, MappedPhase (&phases)[kMaxMaps]) {
  MappedPhase* m = phases;
  for (int a = 0; a < f.period[0] / alike[0]; ++a)
    for (int b = 0; b < f.period[1] / alike[1]; ++b)
      for (int c = 0; c < f.period[2] / alike[2]; ++c, ++m) {
        *m = {};
        std::copy(alike, alike + kRank, m->alike);
        m->map.dimensions = n;
        if (!MapDimension(p, 0, a, f, m) || !MapDimension(p, 1, b, f, m) || !MapDimension(p, 2, c, f, m)) return false;
        m->tap_count = m->taps[0] * m->taps[1] * m->taps[2];
        m->rows = p.images * m->positions[0] * m->positions[1] * m->positions[2];
      }
  return true;
}

}  // namespace

int MapPhases(const Problem& problem, MappedPhase (&phases)[kMaxMaps]) {
  Problem p = problem;
  // The filter gradient reads x as the forward convolution does, where every tap has its place at every pixel.
  if (p.direction == Direction::kFilterGradient) {
    p.direction = Direction::kForward;
    if (std::any_of(p.lhs_dilation, p.lhs_dilation + kRank, [](int64_t n) { return n != 1; })) return 0;
  }
  const Phases f = PhasesOf(p);
  int alike[kRank];
  int64_t count = 1;
  for (int d = 0; d < kRank; ++d) {
    alike[d] = AreAlike(p, d) ? int(f.period[d]) : 1;
    count *= f.period[d] / alike[d];
  }
  if (count > kMaxMaps || p.images == 0 || p.XPixels() == 0 || p.YPixels() == 0 || p.Taps() == 0) return 0;
  // Fewer dimensions have wider limits.
  for (int n = 1; n <= kRank; ++n)
    if (MapAll(p, f, alike, n, phases)) return int(count);
  return 0;
}

}  // namespace jaxdnn::conv
