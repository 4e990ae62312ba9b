#include "cuda/conv/runs_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>

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

// Of the filter gradient: pixels that a warp goes along at once, terms of its sums, and what a piece of a line takes
// beside its pixels, in their time.
constexpr int64_t kLongest = 64, kShortest = 8, kMostTerms = 512, kBeside = 4;
constexpr FilterRunsTile kFilterRunsTiles[] = {
    {3, 3, 2, 280, 400, 470}, {1, 8, 2, 245, 335, 335}, {1, 4, 3, 165, 300, 380}};

// From one tap of a line to the next.
int64_t ColumnDilation(const Problem& p) { return p.window[2] > 1 ? p.rhs_dilation[2] : 1; }

// Pixels that a warp could go along in the time that a piece of so many takes.
int64_t FilterRunsSteps(const Problem& p, const FilterRunsTile& t, int64_t length) {
  return length + (t.columns - 1) / p.stride[2] + kBeside;
}

}  // namespace

RunsShape RunsShapeOf(const Problem& p, int64_t columns) {
  const Largest l = LargestOf(p);
  const int64_t channels = p.DepthChannels(), taps = l.taps[0] * l.taps[1] * l.taps[2];
  RunsShape s = {};
  for (s.group_lanes = 1; s.group_lanes < kLanes && s.group_lanes * 4 < channels;) s.group_lanes *= 2;
  s.chunks = int(CeilDiv(channels, 32));
  s.sets = CeilDiv(p.groups, kLanes / s.group_lanes);
  s.filter_bytes = s.chunks * taps * 4 * kLanes * 16;
  const int64_t tiles = CeilDiv(p.images * l.positions[0] * l.positions[1] * CeilDiv(l.positions[2], kRun), kRuns);
  const int64_t others = p.batch * s.sets * CeilDiv(columns, 4) * l.phases;
  // A block loads its filter once; but there should be several blocks for every multiprocessor.
  s.tiles = std::clamp<int64_t>(tiles * others / (16 * kMultiprocessors), 1, 8);
  s.row_tiles = CeilDiv(tiles, s.tiles);
  return s;
}

int64_t FilterRunsTile::Parts(const Problem& p) const {
  return p.window[0] * CeilDiv(p.window[1], lines) * CeilDiv(p.window[2], columns);
}

// With so many blocks on a multiprocessor.
double FilterRunsTile::Cycles(const Problem& p, int64_t blocks) const {
  const double most = p.stride[2] > 1 ? strided : all, least = alone * most / all;
  return least + (most - least) * (blocks - 1) / (at_once - 1);
}

FilterRunsShape FilterRunsShapeOf(const Problem& p, int64_t splits) {
  FilterRunsShape s = {};
  const auto cycles = [&](const FilterRunsTile& t) { return t.Parts(p) * t.Cycles(p, t.at_once) / t.at_once; };
  s.tile = *std::min_element(std::begin(kFilterRunsTiles), std::end(kFilterRunsTiles),
                             [&](const auto& a, const auto& b) { return cycles(a) < cycles(b); });
  s.parts = s.tile.Parts(p);
  s.units = p.groups * CeilDiv(p.channels, 4) * CeilDiv(p.features, 4);
  for (s.lanes = 1; s.lanes < std::min<int64_t>(s.units, 32);) s.lanes *= 2;
  s.sets = CeilDiv(s.units, s.lanes);
  // Pieces of lines are as long as lets slices have equally much to do.
  const int64_t dilation = ColumnDilation(p), phases = std::min(dilation, p.y[2]), columns = CeilDiv(p.y[2], dilation);
  const int64_t bands = CeilDiv(p.images * p.y[0] * p.y[1], kFilterRunsWarps * (32 / s.lanes));
  int64_t least = INT64_MAX;
  for (int64_t longest = kLongest; longest >= kShortest; --longest) {
    const int64_t length = CeilDiv(columns, CeilDiv(columns, longest));
    const int64_t sequences = phases * CeilDiv(columns, length);
    const int64_t steps = CeilDiv(bands * sequences, splits) * FilterRunsSteps(p, s.tile, length);
    if (steps < least) least = steps, s.length = length, s.sequences = sequences;
  }
  s.bands = bands * s.sequences;
  return s;
}

namespace {

bool TakesFilterRuns(const Problem& p) {
  const auto is_one = [](int64_t n) { return n == 1; };
  if (p.FilterSize() == 0 || p.images * p.XPixels() * p.YPixels() == 0) return false;
  if (!std::all_of(p.lhs_dilation, p.lhs_dilation + kRank, is_one)) return false;
  if (p.stride[2] > 2 || (p.stride[2] == 2 && ColumnDilation(p) > 1)) return false;
  const FilterRunsShape s = FilterRunsShapeOf(p, 1);
  return std::max({s.bands, s.units, p.images * p.y[0] * p.y[1]}) < kIndexLimit;
}

// What a pixel takes longer where fours are no chunks of 16 bytes: each is four copies, of as many lanes as have others
// than their neighbours.
double RaggedCycles(const Problem& p, const FilterRunsTile& t) {
  const auto of = [](int64_t lanes) { return 22.0 * std::min<int64_t>(lanes - 1, 5); };
  const int64_t channels = CeilDiv(p.channels, 4), features = CeilDiv(p.features, 4);
  const double x = p.channels % 4 == 0 ? 0 : t.lines * p.stride[2] * of(CeilDiv(32, std::min<int64_t>(features, 32)));
  return x + (p.features % 4 == 0 ? 0 : of(std::max(features, 32 / std::min<int64_t>(channels, 32))));
}

double FilterRunsCycles(const Problem& p, int64_t splits) {
  const FilterRunsShape s = FilterRunsShapeOf(p, splits);
  const int64_t bands = CeilDiv(s.bands, splits), blocks = CeilDiv(s.Blocks(p) * splits, kMultiprocessors);
  const double ragged = RaggedCycles(p, s.tile) / s.tile.at_once;
  const auto pixel = [&](int64_t n) { return n > 0 ? s.tile.Cycles(p, n) + n * ragged : 0; };
  const double products = double(bands) * FilterRunsSteps(p, s.tile, s.length) *
                          (blocks / s.tile.at_once * pixel(s.tile.at_once) + pixel(blocks % s.tile.at_once));
  const double x = double(p.channels) * p.XPixels(), y = double(p.features) * p.YPixels();
  const double memory = 4.0 * p.batch * p.images * p.groups * (x + y) / (kMultiprocessors * kBytesPerCycle);
  // Rounding errors grow with the square root of a sum's terms: longer ones only where there are no more slices.
  const double long_sums = bands > 1 && bands * s.length > kMostTerms ? 8 : 1;
  constexpr double kLaunch = 3500, kBlock = 5000, kMeanwhile = 0.2;
  return kLaunch + CeilDiv(blocks, s.tile.at_once) * kBlock + long_sums * std::max(products, memory) +
         kMeanwhile * std::min(products, memory);
}

}  // namespace

bool TakesRuns(const Problem& p) {
  if (p.in != DType::kF32) return false;
  if (p.direction == Direction::kFilterGradient) return TakesFilterRuns(p);
  if (p.DepthChannels() % 4 != 0) return false;
  const Phases f = PhasesOf(p);
  // From one position of a phase to the next, and from one tap to the next, the operand's index changes by one.
  const bool forward = p.direction == Direction::kForward;
  const int64_t step = forward ? p.lhs_dilation[2] : p.stride[2], stride = forward ? p.stride[2] : p.lhs_dilation[2];
  const bool neighbours =
      stride * f.period[2] == step && (p.window[2] <= f.tap_period[2] || p.rhs_dilation[2] * f.tap_period[2] == step);
  const RunsShape s = RunsShapeOf(p, GemmOf(p).columns);
  return neighbours && s.filter_bytes <= kMostFilterBytes && s.row_tiles * s.tiles * kRuns <= INT32_MAX;
}

double RunsCycles(const Problem& p, int64_t splits, int64_t columns) {
  if (p.direction == Direction::kFilterGradient) return FilterRunsCycles(p, splits);
  const Largest l = LargestOf(p);
  const RunsShape s = RunsShapeOf(p, columns);
  const double taps = double(p.Taps()) / l.phases;
  const double blocks = double(p.batch) * s.sets * CeilDiv(columns, 4) * l.phases * s.row_tiles;
  // Of a block: its filter, and for every tile each tap's products and what else a line of taps and a run need.
  const double lines = taps / std::max<int64_t>(1, l.taps[2]);
  const double tile = s.chunks * (taps * 220 + lines * 150) + 900, block = 1500 + s.chunks * taps * 60 + s.tiles * tile;
  constexpr double kResident = 4;
  return std::max(std::ceil(blocks / kMultiprocessors) * block,
                  std::ceil(blocks / kMultiprocessors / kResident) * block * 2.5);
}

}  // namespace jaxdnn::conv
