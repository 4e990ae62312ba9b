// Problem -> Config. Pure host code: no device is asked, nothing is timed.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {
namespace {

// A Hopper-sized device. A constant, not a query: the choice must be the same on every machine.
constexpr double kMultiprocessors = 132;
constexpr double kLaunchCycles = 4000;  // of one more kernel
constexpr double kBytesPerCycle = 18;   // of device memory, per multiprocessor
constexpr int64_t kMaxWorkspace = int64_t{256} << 20;
constexpr int64_t kMinSlice = 128;  // terms of the reduction that are worth a block
constexpr int64_t kIndexLimit = int64_t{1} << 30;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a step of a tile's main loop takes, in cycles: `latency` when nothing else hides its loads, `busy` when other
// blocks do; and how many blocks share a multiprocessor. Fitted to an H200, where the model's times then have a root
// mean square error of 10 %. The CUDA-core rates are shares of 128 multiply-adds a cycle.
struct StepCost {
  double latency, busy, resident;
};

StepCost CostOf(const TileShape& t, Direction direction, int depth) {
  const bool filter = direction == Direction::kFilterGradient;
  const double simt_step = t.rows * t.columns * depth / 128.0;
  switch (t.tile) {
    case Tile::kSimt128x64:
      return {700, simt_step / 0.6, 4};
    case Tile::kSimt64x32:
      return {700, simt_step / 0.45, 8};
    case Tile::kSimt128x8:
      return {700, simt_step / 0.3, 8};
    case Tile::kMma128x128:
      return filter ? StepCost{1350, 980, 2} : StepCost{900, 700, 2};
    case Tile::kMma128x64:
      return filter ? StepCost{1350, 820, 3} : StepCost{600, 420, 2};
    case Tile::kMma64x64:
      return filter ? StepCost{1100, 440, 4} : StepCost{650, 260, 3};
    case Tile::kMma128x32:
      return filter ? StepCost{1350, 580, 3} : StepCost{700, 300, 3};
    default:
      return {};
  }
}

// Of the Hopper kernels: the cycles of a step, and those of beginning and storing a tile, which the other warpgroup
// hides unless tiles are short. Fitted to an H200, where the choice is then on average 2 % slower than the best.
struct WgmmaCost {
  double step, tile;
};

WgmmaCost WgmmaCostOf(const TileShape& t, Direction direction) {
  const bool filter = direction == Direction::kFilterGradient;
  switch (t.tile) {
    case Tile::kWgmma128x128:
      return filter ? WgmmaCost{660, 1200} : WgmmaCost{600, 4400};
    case Tile::kWgmma256x64:
      return filter ? WgmmaCost{800, 1600} : WgmmaCost{750, 4400};
    case Tile::kWgmma128x64:
      return filter ? WgmmaCost{480, 500} : WgmmaCost{410, 4100};
    case Tile::kWgmma64x128:
      return filter ? WgmmaCost{480, 0} : WgmmaCost{465, 3400};
    case Tile::kWgmma64x64:
      return filter ? WgmmaCost{335, 0} : WgmmaCost{355, 3500};
    default:
      return {};
  }
}

// Elements that the mma.sync kernels copy at once.
int VectorLength(const Problem& p) {
  const auto divides = [&](int n) { return p.channels % n == 0 && p.features % n == 0; };
  return divides(8) ? 8 : divides(2) ? 2 : 1;
}

double ReductionCycles(int64_t splits, int64_t result_bytes) {
  return splits > 1 ? kLaunchCycles + 2.0 * splits * result_bytes / (kMultiprocessors * kBytesPerCycle) : 0;
}

// Tiles of rows, and of them those of the average phase and its steps' depth.
struct Work {
  double tiles, depth;
};

Work WorkOf(const Problem& p, const TileShape& t, int64_t splits) {
  const Gemm g = GemmOf(p);
  double phases = 1, taps_per_tap = 1;
  if (p.direction != Direction::kFilterGradient) {
    const Phases f = PhasesOf(p);
    for (int d = 0; d < kRank; ++d) phases *= f.period[d], taps_per_tap *= f.tap_period[d];
  }
  const double row_tiles = phases * std::ceil(g.rows / phases / t.rows);
  return {double(g.problems) * row_tiles * CeilDiv(g.columns, t.columns) * splits, g.depth / taps_per_tap / splits};
}

double Cycles(const Problem& p, const TileShape& t, int64_t splits) {
  const Work work = WorkOf(p, t, splits);
  const int depth = t.unit == Unit::kMma ? MmaDepth(p.direction) : SimtDepth(p.in);
  const StepCost cost = CostOf(t, p.direction, depth);
  // Finding its place and storing its sums take a block as long as some steps.
  const double steps = std::ceil(work.depth / depth) + (t.unit == Unit::kMma ? 8 : 4);
  const double each = std::ceil(work.tiles / kMultiprocessors);
  const double pieces = t.unit == Unit::kSimt || VectorLength(p) == 8 ? 1 : VectorLength(p) == 2 ? 1.6 : 2;
  return steps * pieces * std::max(std::ceil(each / cost.resident) * cost.latency, each * cost.busy);
}

double WgmmaCycles(const Problem& p, const TileShape& t, int64_t splits) {
  const WgmmaCost cost = WgmmaCostOf(t, p.direction);
  Work work = WorkOf(p, t, splits);
  double steps;
  if (p.direction == Direction::kFilterGradient) {
    // Rows come in units of a line of channels.
    const double units = double(p.Taps()) * CeilDiv(p.channels, kWgmmaDepth);
    work.tiles = std::ceil(units / (t.rows / kWgmmaDepth)) * CeilDiv(p.features, t.columns) * splits;
    steps = std::ceil(work.depth / kWgmmaDepth);
  } else {
    const int64_t channels = p.direction == Direction::kForward ? p.channels : p.features;
    steps = std::max(1.0, work.depth / channels * CeilDiv(channels, kWgmmaDepth));
  }
  const double each = std::ceil(work.tiles / kMultiprocessors), busy = steps * cost.step;
  return each * std::max(busy, (busy + cost.tile) / 2) + cost.tile;
}

bool Indexable(const Problem& p) {
  // Coordinates and positions within one image are 32-bit in the kernels; offsets into arrays are 64-bit.
  for (int d = 0; d < kRank; ++d) {
    const int64_t reach = p.y[d] * p.stride[d] + std::abs(p.pad[d]) + p.window[d] * p.rhs_dilation[d];
    if (std::max(reach, p.x[d] * p.lhs_dilation[d]) >= kIndexLimit) return false;
    // By themselves too: with an empty dimension the products above are 0.
    if (std::max({p.stride[d], p.lhs_dilation[d], p.rhs_dilation[d]}) >= kIndexLimit) return false;
  }
  return p.XPixels() < kIndexLimit && p.YPixels() < kIndexLimit &&
         p.Taps() * std::max(p.channels, p.features) < kIndexLimit;
}

// The tensor-core kernels take 16-bit floats. Hopper's take what the TMA unit can read: one problem and group, lines of
// whole 16-byte chunks. Those with mma.sync take all but the longest windows. Rows of channels that are no whole
// 16-byte chunks have one tile only (VisitMmaKernel).
bool Takes(const TileShape& t, const Problem& p, bool hopper) {
  if (t.unit == Unit::kSimt) return true;
  const bool half = p.in == DType::kF16 || p.in == DType::kBF16;
  if (t.unit == Unit::kWgmma) {
    MappedPhase phases[kMaxMaps];
    return half && hopper && p.batch == 1 && p.groups == 1 && VectorLength(p) == 8 &&
           p.images * std::max(p.XPixels(), p.YPixels()) < INT32_MAX && MapPhases(p, phases) > 0;
  }
  return half && *std::max_element(p.window, p.window + kRank) <= kMmaMaxWindow &&
         (VectorLength(p) == 8 || t.tile == Tile::kMma128x64);
}

}  // namespace

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

std::optional<Config> Choose(const Problem& p, bool hopper, std::string_view algorithm) {
  const bool widened = p.out == DType::kF32 && (p.in == DType::kF16 || p.in == DType::kBF16);
  if (!(p.in == p.out || widened) || !Indexable(p)) return std::nullopt;
  const Gemm g = GemmOf(p);
  const int64_t result_bytes = p.FilterSize() * (p.in == DType::kF64 ? 8 : 4);
  const bool splittable = p.direction == Direction::kFilterGradient;
  std::optional<Config> best;
  for (const TileShape& t : kTiles) {
    const bool wanted = algorithm.empty() || algorithm == kAlgorithms[static_cast<int>(t.unit)] || algorithm == t.name;
    if (!wanted || !Takes(t, p, hopper)) continue;
    for (int64_t splits = 1; splits == 1 || (splittable && splits * kMinSlice <= g.depth);
         splits += std::max<int64_t>(1, splits / 8)) {
      const int64_t bytes = splits > 1 ? splits * result_bytes : 0;
      if (bytes > kMaxWorkspace) break;
      if (splittable && CeilDiv(g.depth, splits) >= kIndexLimit) continue;  // a slice is indexed with 32 bits
      const double cycles =
          (t.unit == Unit::kWgmma ? WgmmaCycles : Cycles)(p, t, splits) + ReductionCycles(splits, result_bytes);
      if (!best || cycles < best->cycles) best = Config{t.tile, splits, bytes, cycles};
    }
  }
  return best;
}

}  // namespace jaxdnn::conv
