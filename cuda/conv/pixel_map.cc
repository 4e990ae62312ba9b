#include "cuda/conv/pixel_map.h"

#include <algorithm>
#include <cstdlib>

#include "cuda/common/int_div.h"

namespace jaxdnn::conv {
namespace {

constexpr int64_t kMaxStep = 8;
// Of corners (the least; the greatest is one less than its negative) and of offsets, by the number of dimensions.
constexpr int64_t kCorner[] = {0, 32768, 128, 16};
constexpr int64_t kOffset[] = {0, 65535, 255, 31};

bool HasCorners(const PixelMap& m, int d) {
  const auto [least, greatest] = std::minmax(m.lower[d], m.upper[d]);
  return least >= -kCorner[m.dimensions] && greatest < kCorner[m.dimensions];
}

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
  return step <= kMaxStep && reach <= kOffset[n] && HasCorners(m->map, d);
}

// A phase's positions [begin, end) of a dimension, with those taps that one of them finds in the operand.
MappedPhase PartOf(const MappedPhase& whole, int d, int64_t extent, int begin, int end) {
  MappedPhase m = whole;
  const int step = m.map.step[d], distance = std::max(1, m.distance[d]), first = m.map.lower[d] + begin * step;
  const int last = first + (end - begin - 1) * step;
  // Taps in the order of what they meet.
  const int from = last < 0 ? int(CeilDiv(-last, distance)) : 0;
  const int to = int(std::min<int64_t>(m.taps[d], first < extent ? (extent - 1 - first) / distance + 1 : 0));
  const int taps = std::max(0, to - from);
  m.first_tap[d] += m.tap_period[d] * (m.reversed[d] ? m.taps[d] - to : from);
  m.taps[d] = taps;
  m.first[d] += begin * m.period[d];
  m.positions[d] = end - begin;
  m.map.lower[d] = taps > 0 ? first + from * distance : 0;
  m.map.upper[d] = m.map.lower[d] + (end - begin - 1) * step - int(extent - 1);
  return m;
}

// Splits phases in a dimension where windows begin, or end, to leave the operand. Returns how many they are then, or 0
// if that is too many.
int SplitEdges(const Problem& p, int d, int count, MappedPhase (&phases)[kMaxMaps]) {
  const int64_t extent = p.direction == Direction::kDataGradient ? p.y[d] : p.x[d];
  MappedPhase split[kMaxMaps];
  int parts = 0;
  for (int i = 0; i < count; ++i) {
    const MappedPhase& m = phases[i];
    const int step = m.map.step[d], positions = m.positions[d], reach = std::max(0, m.taps[d] - 1) * m.distance[d];
    const int64_t room = extent - 1 - reach - m.map.lower[d];  // from the first position's last tap to the end
    const int enter = int(std::clamp<int64_t>(CeilDiv(-m.map.lower[d], step), 0, positions));
    const int leave = int(room < 0 ? 0 : std::min<int64_t>(room / step + 1, positions));
    const int cuts[] = {0, std::min(enter, leave), std::max(enter, leave), positions};
    for (int k = 0; k < 3; ++k) {
      if (cuts[k] == cuts[k + 1]) continue;
      if (parts == kMaxMaps) return 0;
      split[parts] = PartOf(m, d, extent, cuts[k], cuts[k + 1]);
      if (!HasCorners(split[parts++].map, d)) return 0;
    }
  }
  std::copy(split, split + parts, phases);
  return parts;
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
      }
  return true;
}

}  // namespace

int MapPhases(const Problem& problem, MappedPhase (&phases)[kMaxMaps], int edges) {
  Problem p = problem;
  // The filter gradient reads x as the forward convolution does, where every tap has its place at every pixel.
  if (p.direction == Direction::kFilterGradient) {
    p.direction = Direction::kForward;
    if (std::any_of(p.lhs_dilation, p.lhs_dilation + kRank, [](int64_t n) { return n != 1; })) return 0;
  }
  const Phases f = PhasesOf(p);
  int alike[kRank];
  int count = 1;
  for (int d = 0; d < kRank; ++d) {
    alike[d] = AreAlike(p, d) ? int(f.period[d]) : 1;
    count *= int(std::min<int64_t>(f.period[d] / alike[d], kMaxMaps + 1));
  }
  if (count > kMaxMaps || p.images == 0 || p.XPixels() == 0 || p.YPixels() == 0 || p.Taps() == 0) return 0;
  // Fewer dimensions have wider limits.
  int n = 1;
  while (n <= kRank && !MapAll(p, f, alike, n, phases)) ++n;
  if (n > kRank) return 0;
  for (int d = 0; d < kRank; ++d)
    if (edges >> d & 1) count = SplitEdges(p, d, count, phases);
  for (int i = 0; i < count; ++i) {
    MappedPhase& m = phases[i];
    m.tap_count = m.taps[0] * m.taps[1] * m.taps[2];
    m.rows = p.images * m.positions[0] * m.positions[1] * m.positions[2];
  }
  return count;
}

int MapTaps(const Problem& p, TapSet (&sets)[kMaxMaps], int edges) {
  MappedPhase phases[kMaxMaps];
  if (MapPhases(p, phases) != 1) return 0;
  const MappedPhase& all = phases[0];
  int count = 1;
  sets[0] = {all.map, all.map, {}, {}, {}};
  for (int d = 0; d < kRank; ++d) {
    const int taps = int(p.window[d]), positions = all.positions[d];
    // The positions of y where a tap meets x.
    const auto begin = [&](int tap) {
      return int(std::clamp<int64_t>(CeilDiv(p.pad[d] - tap * p.rhs_dilation[d], p.stride[d]), 0, positions));
    };
    const auto end = [&](int tap) {
      const int64_t last = FloorDiv(p.x[d] - 1 + p.pad[d] - tap * p.rhs_dilation[d], p.stride[d]);
      return int(std::clamp<int64_t>(last + 1, 0, positions));
    };
    int enter = 0, leave = 0;
    while (enter < taps && begin(enter) > 0) ++enter;
    while (leave < taps && end(leave) == positions) ++leave;
    const bool split = edges >> d & 1;
    const int cuts[] = {0, split ? std::min(enter, leave) : 0, split ? std::max(enter, leave) : taps, taps};
    TapSet made[kMaxMaps];
    int parts = 0;
    for (int i = 0; i < count; ++i)
      for (int k = 0; k < 3; ++k) {
        if (cuts[k] == cuts[k + 1]) continue;
        if (parts == kMaxMaps) return 0;
        TapSet& s = made[parts++] = sets[i];
        const int from = split ? begin(cuts[k + 1] - 1) : 0, to = split ? end(cuts[k]) : positions;
        if (from >= to) return 0;
        s.first[d] = cuts[k];
        s.taps[d] = cuts[k + 1] - cuts[k];
        s.positions[d] = to - from;
        s.x.lower[d] = int(from * p.stride[d] + cuts[k] * p.rhs_dilation[d] - p.pad[d]);
        s.x.upper[d] = s.x.lower[d] + (to - from - 1) * s.x.step[d] - int(p.x[d] - 1);
        s.y.lower[d] = from;
        s.y.upper[d] = to - positions;
        s.y.step[d] = 1;
        if (split && !(HasCorners(s.x, d) && HasCorners(s.y, d))) return 0;
      }
    std::copy(made, made + parts, sets);
    count = parts;
  }
  return count;
}

}  // namespace jaxdnn::conv
