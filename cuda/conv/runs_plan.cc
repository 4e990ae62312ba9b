#include "cuda/conv/runs_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

// Positions and taps of the largest phase, by dimension.
struct Largest {
  int64_t positions[kRank], taps[kRank], phases = 1;
};

Largest LargestOf(const Problem& p) {
  const Phases f = PhasesOf(p);
  Largest l;
  for (int d = 0; d < kRank; ++d) {
    l.positions[d] = CeilDiv(p.direction == Direction::kForward ? p.y[d] : p.x[d], f.period[d]);
    l.taps[d] = CeilDiv(p.window[d], f.tap_period[d]);
    l.phases *= f.period[d];
  }
  return l;
}

}  // namespace

RunsShape RunsShapeOf(const Problem& p) {
  const Largest l = LargestOf(p);
  const int64_t channels = p.DepthChannels(), taps = l.taps[0] * l.taps[1] * l.taps[2];
  RunsShape s = {};
  for (s.group_lanes = 1; s.group_lanes < kLanes && s.group_lanes * 4 < channels;) s.group_lanes *= 2;
  s.chunks = int(CeilDiv(channels, 32));
  s.sets = CeilDiv(p.groups, kLanes / s.group_lanes);
  s.filter_bytes = s.chunks * taps * 4 * kLanes * 16;
  const int64_t tiles = CeilDiv(p.images * l.positions[0] * l.positions[1] * CeilDiv(l.positions[2], kRun), kRuns);
  const int64_t others = p.batch * s.sets * CeilDiv(GemmOf(p).columns, 4) * l.phases;
  // A block loads its filter once; but there should be several blocks for every multiprocessor.
  s.tiles = std::clamp<int64_t>(tiles * others / (16 * kMultiprocessors), 1, 8);
  s.row_tiles = CeilDiv(tiles, s.tiles);
  return s;
}

bool TakesRuns(const Problem& p) {
  if (p.in != DType::kF32 || p.direction == Direction::kFilterGradient || p.DepthChannels() % 4 != 0) return false;
  const Phases f = PhasesOf(p);
  // From one position of a phase to the next, and from one tap to the next, the operand's index changes by one.
  const bool forward = p.direction == Direction::kForward;
  const int64_t step = forward ? p.lhs_dilation[2] : p.stride[2], stride = forward ? p.stride[2] : p.lhs_dilation[2];
  const bool neighbours =
      stride * f.period[2] == step && (p.window[2] <= f.tap_period[2] || p.rhs_dilation[2] * f.tap_period[2] == step);
  const RunsShape s = RunsShapeOf(p);
  return neighbours && s.filter_bytes <= kMostFilterBytes && s.row_tiles * s.tiles * kRuns <= INT32_MAX;
}

double RunsCycles(const Problem& p) {
  const Largest l = LargestOf(p);
  const RunsShape s = RunsShapeOf(p);
  const double taps = double(p.Taps()) / l.phases;
  const double blocks = double(p.batch) * s.sets * CeilDiv(GemmOf(p).columns, 4) * l.phases * s.row_tiles;
  // Of a block: its filter, and for every tile each tap's products and what else a line of taps and a run need.
  const double lines = taps / std::max<int64_t>(1, l.taps[2]);
  const double tile = s.chunks * (taps * 220 + lines * 150) + 900, block = 1500 + s.chunks * taps * 60 + s.tiles * tile;
  constexpr double kResident = 4;
  return std::max(std::ceil(blocks / kMultiprocessors) * block,
                  std::ceil(blocks / kMultiprocessors / kResident) * block * 2.5);
}

}  // namespace jaxdnn::conv
