// Problem -> Config. Pure host code: no device is asked, nothing is timed.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/conv/conv.h"

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
  }
  return {};
}

// Elements that the tensor-core kernels copy at once.
int VectorLength(const Problem& p) {
  const auto divides = [&](int n) { return p.channels % n == 0 && p.features % n == 0; };
  return divides(8) ? 8 : divides(2) ? 2 : 1;
}

double Cycles(const Problem& p, const TileShape& t, int64_t splits, int64_t result_bytes) {
  const Gemm g = GemmOf(p);
  const int depth = t.tensor_cores ? MmaDepth(p.direction) : SimtDepth(p.in);
  const StepCost cost = CostOf(t, p.direction, depth);
  double phases = 1, taps_per_tap = 1;
  if (p.direction != Direction::kFilterGradient) {
    const Phases f = PhasesOf(p);
    for (int d = 0; d < kRank; ++d) phases *= f.period[d], taps_per_tap *= f.tap_period[d];
  }
  const double row_tiles = phases * std::ceil(g.rows / phases / t.rows);
  const double blocks = double(g.problems) * row_tiles * CeilDiv(g.columns, t.columns) * splits;
  // Finding its place and storing its sums take a block as long as some steps.
  const double steps = std::ceil(g.depth / taps_per_tap / splits / depth) + (t.tensor_cores ? 8 : 4);
  const double each = std::ceil(blocks / kMultiprocessors);
  const double pieces = !t.tensor_cores || VectorLength(p) == 8 ? 1 : VectorLength(p) == 2 ? 1.6 : 2;
  const double reduction =
      splits > 1 ? kLaunchCycles + 2.0 * splits * result_bytes / (kMultiprocessors * kBytesPerCycle) : 0;
  return steps * pieces * std::max(std::ceil(each / cost.resident) * cost.latency, each * cost.busy) + reduction;
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

// The tensor-core kernels take 16-bit floats and all but the longest windows. Rows of channels that are no whole
// 16-byte chunks have one tile only (VisitMmaKernel).
bool Takes(const TileShape& t, const Problem& p) {
  if (!t.tensor_cores) return true;
  const bool half = p.in == DType::kF16 || p.in == DType::kBF16;
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

std::optional<Config> Choose(const Problem& p) {
  const bool widened = p.out == DType::kF32 && (p.in == DType::kF16 || p.in == DType::kBF16);
  if (!(p.in == p.out || widened) || !Indexable(p)) return std::nullopt;
  const Gemm g = GemmOf(p);
  const int64_t sum_bytes = p.in == DType::kF64 ? 8 : 4;
  const bool splittable = p.direction == Direction::kFilterGradient;
  std::optional<Config> best;
  for (const TileShape& t : kTiles) {
    if (!Takes(t, p)) continue;
    for (int64_t splits = 1; splits == 1 || (splittable && splits * kMinSlice <= g.depth); splits *= 2) {
      const int64_t bytes = splits > 1 ? splits * p.FilterSize() * sum_bytes : 0;
      if (bytes > kMaxWorkspace) break;
      if (splittable && CeilDiv(g.depth, splits) >= kIndexLimit) continue;  // a slice is indexed with 32 bits
      const double cycles = Cycles(p, t, splits, p.FilterSize() * sum_bytes);
      if (!best || cycles < best->cycles) best = Config{t.tile, splits, bytes, cycles};
    }
  }
  return best;
}

}  // namespace jaxdnn::conv
