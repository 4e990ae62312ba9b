// Problem -> Config. Pure host code: no device is asked, nothing is timed.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/conv/bytes_plan.h"
#include "cuda/conv/depthwise_plan.h"
#include "cuda/conv/few_features_plan.h"
#include "cuda/conv/filled_plan.h"
#include "cuda/conv/frame.h"
#include "cuda/conv/pixel_map.h"
#include "cuda/conv/planes_plan.h"
#include "cuda/conv/step_cost.h"
#include "cuda/conv/strips.h"
#include "cuda/conv/unaligned_plan.h"
#include "cuda/conv/wgmma_plan.h"

namespace jaxdnn::conv {
namespace {

// A Hopper-sized device. A constant, not a query: the choice must be the same on every machine.
constexpr double kMultiprocessors = 132;
constexpr double kLaunchCycles = 4000;  // of one more kernel
constexpr double kBytesPerCycle = 18;   // of device memory, per multiprocessor
constexpr int64_t kMinSlice = 128;      // terms of the reduction that are worth a block
constexpr int64_t kIndexLimit = int64_t{1} << 30;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t FloorDiv(int64_t a, int64_t b) { return (a - (a % b + b) % b) / b; }

// Whether rows of channels are runs of so many elements, or of whole 16-byte chunks.
bool InRunsOf(const Problem& p, int64_t n) { return p.channels % n == 0 && p.features % n == 0; }
bool InChunks(const Problem& p) { return InRunsOf(p, 16 / SizeOf(p.in)); }
bool GathersChunks(const Problem& p, const Dense& dense) {
  return p.DepthChannels() * dense.groups % (16 / SizeOf(p.in)) == 0;
}

// The filter gradient's cotangent is copied as its input is.
bool CopiesChunks(const Problem& p, const Dense& dense) {
  const bool other = p.direction != Direction::kFilterGradient || p.features * dense.groups % (16 / SizeOf(p.in)) == 0;
  return other && GathersChunks(p, dense);
}

// Data of one group whose lines are not in whole chunks has kernels that shift them (ragged.cuh).
bool IsRagged(const Problem& p, const Dense& dense) {
  return p.direction != Direction::kFilterGradient && dense.groups == 1 && !dense.Folds() && !InChunks(p);
}

bool IsTripled(const Problem& p) { return p.in == DType::kF32 && p.products == 3; }

double ReductionCycles(const Problem& p, int64_t splits, int64_t result_bytes) {
  if (!UsesWorkspace(p, splits)) return 0;
  const double scattered = p.exchanged ? 10.0 * result_bytes : 0;  // their places are far apart
  return kLaunchCycles + (2.0 * splits * result_bytes + scattered) / (kMultiprocessors * kBytesPerCycle);
}

// The product that the mma.sync kernels compute.
Gemm DenseGemmOf(const Problem& p, const Dense& dense) {
  Gemm g = GemmOf(p);
  const int64_t depth = dense.Folds() ? dense.taps[0] * dense.taps[1] * dense.taps[2] * p.DepthChannels() : g.depth;
  g.problems /= dense.groups;
  g.columns *= dense.groups;
  if (p.direction == Direction::kFilterGradient) return {g.problems, g.rows * dense.groups, g.columns, g.depth};
  for (int d = 0; d < kRank; ++d) {
    const int64_t extent = p.direction == Direction::kForward ? p.y[d] : p.x[d];
    g.rows = g.rows / std::max<int64_t>(extent, 1) * CeilDiv(extent, dense.fold[d]);
    g.columns *= dense.fold[d];
  }
  return {g.problems, g.rows, g.columns, depth * dense.groups};
}

// Tiles of rows, the depth of the sums of the average phase, and of that which meets most taps.
struct Work {
  double tiles, depth, longest;
};

Work WorkOf(const Problem& p, const TileShape& t, int64_t splits) {
  const Dense dense = t.unit == Unit::kMma ? DenseOf(p) : Dense();
  const Gemm g = t.unit == Unit::kMma ? DenseGemmOf(p, dense) : GemmOf(p);
  double phases = 1, taps_per_tap = 1, share = 1;
  if (p.direction != Direction::kFilterGradient && !dense.Folds()) {
    const Phases f = PhasesOf(p);
    for (int d = 0; d < kRank; ++d) {
      phases *= f.period[d], taps_per_tap *= f.tap_period[d];
      share *= double(CeilDiv(p.window[d], f.tap_period[d])) / std::max<int64_t>(p.window[d], 1);
    }
  }
  const double row_tiles = phases * std::ceil(g.rows / phases / t.rows);
  const double tiles = double(g.problems) * row_tiles * CeilDiv(g.columns, t.columns) * splits;
  return {tiles, g.depth / taps_per_tap / splits, g.depth * share / splits};
}

Lines LinesOf(const Problem& p, const Dense& dense) {
  constexpr int64_t kWide = 64;
  if (IsRagged(p, dense)) return GathersChunks(p, dense) ? Lines::kSomeInPieces : Lines::kInPieces;
  if (p.direction == Direction::kFilterGradient) {
    const bool wide = p.channels >= kWide && !GathersChunks(p, dense);
    return CopiesChunks(p, dense) ? Lines::kWhole : wide ? Lines::kInPieces : Lines::kSomeInPieces;
  }
  return dense.groups > 1 || dense.Folds() ? Lines::kSpread : Lines::kWhole;
}

double Cycles(const Problem& p, const TileShape& t, int64_t splits) {
  const bool mma = t.unit == Unit::kMma;
  const Work work = WorkOf(p, t, splits);
  const Dense dense = mma ? DenseOf(p) : Dense();
  const Lines lines = mma ? LinesOf(p, dense) : Lines::kWhole;
  const StepCost cost = StepCostOf(t.tile, p.direction, p.in, lines);
  // Finding its place and storing its sums take a block as long as some steps.
  const int depth = mma ? MmaDepth(p.direction, SizeOf(p.in)) : SimtDepth(p.in), beside = mma ? 8 : 4;
  const double steps = std::ceil(work.depth / depth) + beside, longest = std::ceil(work.longest / depth) + beside;
  const double each = std::ceil(work.tiles / kMultiprocessors);
  // Groups that are merged may come in pieces too.
  const double pieces = lines != Lines::kSpread || CopiesChunks(p, dense) ? 1 : InRunsOf(p, 4 / SizeOf(p.in)) ? 1.6 : 2;
  const double latency = std::max(steps * std::ceil(each / cost.resident), longest) * cost.latency;
  return pieces * (mma && IsTripled(p) ? 2.5 : 1) * std::max(latency, steps * each * cost.busy);
}

// Whether depthwise_quads.cuh has a kernel that runs at the rate of memory: of a line of up to four taps side by side,
// or of a 3x3 whose results are twice as close as what it reads.
bool IsInQuads(const Problem& p) {
  if (p.features != 1 || p.groups % 4 != 0 || p.window[0] != 1) return false;
  const Problem f = AsForward(p);
  const auto is = [&](int d, int64_t taps, int64_t lhs_dilation) {
    return p.window[d] == taps && f.stride[d] == 1 && f.lhs_dilation[d] == lhs_dilation && f.rhs_dilation[d] == 1;
  };
  return is(2, 3, 2) ? is(1, 3, 2) : p.window[1] == 1 && p.Taps() > 1 && p.Taps() <= 4 && is(2, p.Taps(), 1);
}

// Of the depthwise kernels, by what an element of the larger of input and output takes a multiprocessor. Windows that
// are not compiled for cost more a line; 16-bit channels that cannot be had as pairs, more a tap. Fitted to an H200.
double DepthwiseCycles(const Problem& p, int64_t splits) {
  const bool filter = p.direction == Direction::kFilterGradient;
  const auto is = [&](int64_t d, int64_t h, int64_t w) {
    return p.window[0] == d && p.window[1] == h && p.window[2] == w;
  };
  const bool paired = p.features == 1 && p.groups % 2 == 0, quads = !filter && IsInQuads(p);
  const bool wide = TakesWide(p), compiled = wide || quads || is(1, 3, 3) || is(1, 5, 5) || is(1, 7, 7) ||
                                             (is(3, 3, 3) && (!filter || p.groups % 4 == 0));
  const double lines = p.window[0] * p.window[1], taps = p.Taps() * (paired ? 1 : 2);
  const double element = quads                ? 0.2
                         : wide               ? 0.6 + 0.003 * taps
                         : compiled && paired ? 0.25 + 0.015 * taps
                                              : 0.6 + 0.017 * taps + 0.1 * lines;
  // Compiled windows go over all lines, others over results alone.
  const bool results = !(compiled && paired) && p.direction == Direction::kForward;
  const double planes = double(p.batch) * p.images * p.groups * p.features;
  const double most = planes * std::max(p.XPixels(), p.YPixels()), elements = results ? planes * p.YPixels() : most;
  // Lanes run over channels, of which few leave loads scattered.
  const double scattered = std::max(1.0, 16.0 / p.groups);
  const double all = elements * element * scattered / kMultiprocessors, bytes = most * 2 * SizeOf(p.in);
  // Blocks have channels of their own, and in the filter gradient 32 taps where the window is not compiled for.
  const double pieces = compiled ? 1 : std::ceil(p.Taps() / 32.0);
  const double slab = wide ? 8 : 64, places = (wide ? 1 : 2) * kMultiprocessors;
  const double blocks = double(p.batch) * std::ceil(p.groups * p.features / slab) * splits * pieces;
  const double rounds = filter ? std::ceil(blocks / places) : 1, unused = filter ? rounds * places / blocks : 1;
  return 2000 + 3000 * rounds + std::max(all * unused, bytes / (kMultiprocessors * kBytesPerCycle));
}

// Of the kernels of few channels, of a problem as AsForward has it: a tile's products, and what it moves to and from
// memory. Fitted to an H200.
double FewChannelsCycles(const Problem& p, const Strips& s, int64_t splits) {
  const bool filter = p.direction == Direction::kFilterGradient;
  const double size = SizeOf(filter ? p.in : p.out), strips = s.lines * s.line_bytes;
  const double outputs = double(FewPixels(p)) * FewFeatures(p), columns = CeilDiv(p.features, FewFeatures(p));
  const double tiles = s.Tiles(p);
  const double bytes = outputs * size + strips, pieces = s.copy_bytes == 2 ? 0.3 * strips : 0;
  // Features that are no whole chunks are stored, or loaded, one by one.
  const double apart = p.features % (16 / SizeOf(p.in)) != 0 ? outputs : 0;
  constexpr double kStart = 8000;
  if (!filter) {
    const double tile = 0.0125 * outputs * s.Steps(p) + bytes / kBytesPerCycle + pieces + 1.9 * apart;
    return kStart + std::ceil(tiles * columns * p.batch / kMultiprocessors) * tile;
  }
  const double rows = s.Steps(p) * Strips::kStepWords * 4.0 / SizeOf(p.in);
  const double row_tiles = std::ceil(rows / kFewMostRows);
  const double taken = rows > 80 ? kFewMostRows : rows > 48 ? 80 : rows > 32 ? 48 : 32;
  const double tile =
      1.1 * (outputs * SizeOf(p.in) / 2 * taken * 0.8e-3 + bytes / kBytesPerCycle + pieces) + 2.7 * apart;
  const double each = std::ceil(splits * row_tiles * columns * p.batch / kMultiprocessors);
  const double resident = taken > 32 ? 2 : 3;
  return kStart * std::ceil(each / resident) + std::ceil(tiles / splits) * std::max(500 + 1.25 * tile, each * tile);
}

// Of the kernels of small groups: what they move to and from memory, or the instructions of a warp's lines, which are
// 16 columns of the result by 64 bytes of channels. In the filter gradient, of blocks of four warps that have a share
// of the lines. Fitted to an H200.
double GroupedCycles(const Problem& p, int64_t splits) {
  constexpr double kStart = 5000, kLine = 0.75, kShare = 0.8;  // of the memory's rate
  const int64_t channels = p.groups * p.channels;
  const double images = double(p.batch) * p.images, size = SizeOf(p.in), of_warp = p.channels == 16 ? 16 : 64 / size;
  const double bytes = images * channels * size * (p.XPixels() + p.YPixels());
  const double parts = std::ceil(channels / of_warp), lines = std::ceil(images * p.y[2] / 16) * p.y[1] * parts;
  if (p.direction == Direction::kFilterGradient) {
    // Cycles of a block, of a line where too few are on their way, and of beginning with other columns.
    constexpr double kBlock = 1500, kLatency = 500, kBegin = 1500;
    const double places = size == 4 && p.channels == 16 ? 2 : 3;  // of a multiprocessor
    const double blocks = parts * p.batch * splits, rounds = std::ceil(blocks / (places * kMultiprocessors));
    const double resident = std::min(places, std::ceil(blocks / kMultiprocessors));
    const double line = 16 * (size == 2 && p.channels == 16 ? 32 : 64) * (1 + p.stride[1] * p.stride[2]);
    const double each = std::ceil(lines / (4 * blocks));
    const double begins = std::ceil(each / p.y[1]) + (p.y[1] % int64_t(each) != 0);
    const double of_line = std::max(kLatency, 4 * resident * line / (kShare * kBytesPerCycle));
    return 3000 + rounds * (kBlock * resident + begins * (kBegin + (3 - p.stride[1]) * kLatency) + each * of_line);
  }
  return kStart + std::max(bytes / (kShare * kBytesPerCycle), kLine * 190 * p.stride[2] * lines) / kMultiprocessors;
}

bool TakesGrouped(const Problem& p) {
  const auto are = [](const int64_t (&v)[kRank], int64_t first, int64_t second, int64_t third) {
    return v[0] == first && v[1] == second && v[2] == third;
  };
  const int64_t stride = p.stride[2], channels = p.groups * p.channels, size = SizeOf(p.in);
  const bool plane = p.x[0] == 1 && p.y[0] == 1 && p.pad[0] == 0;
  const bool small = p.channels == 2 || p.channels == 4 || p.channels == 8 || p.channels == 16;
  const double pixels = double(p.batch) * p.images * std::max(p.XPixels(), p.YPixels());
  return size <= 4 && (size == 2 || p.products == 1) && plane && are(p.window, 1, 3, 3) &&
         are(p.lhs_dilation, 1, 1, 1) && are(p.rhs_dilation, 1, 1, 1) && p.stride[1] == stride &&
         (stride == 1 || stride == 2) && small && p.features == p.channels && p.groups > 1 && channels % 16 == 0 &&
         p.XPixels() > 0 && p.YPixels() > 0 &&
         // The kernels count pixels with 31 bits, and fours of channels with 32.
         pixels > 0 && pixels * 3 < INT32_MAX && pixels * channels / 4 < UINT32_MAX;
}

bool Indexable(const Problem& p) {
  // Coordinates and positions within one image are 32-bit in the kernels; offsets into arrays are 64-bit. Where
  // one dimension is empty the others may be so large that their product has more than 64.
  double x = 1, y = 1, taps = 1;
  for (int d = 0; d < kRank; ++d) {
    if (p.pad[d] <= -kIndexLimit || std::max({p.x[d], p.y[d], p.window[d], p.stride[d], p.pad[d], p.lhs_dilation[d],
                                              p.rhs_dilation[d]}) >= kIndexLimit)
      return false;
    const int64_t reach = p.y[d] * p.stride[d] + std::abs(p.pad[d]) + p.window[d] * p.rhs_dilation[d];
    if (std::max(reach, p.x[d] * p.lhs_dilation[d]) >= kIndexLimit) return false;
    x *= p.x[d], y *= p.y[d], taps *= p.window[d];
  }
  return std::max({x, y, taps * std::max(p.channels, p.features)}) < kIndexLimit;
}

// Whether the filter gradient is stored by SumSlices, also with x and y exchanged.
bool StoresExchanged(Unit unit) {
  return unit == Unit::kSimt || unit == Unit::kMma || unit == Unit::kWgmma || unit == Unit::kFewChannels ||
         unit == Unit::kGrouped;
}

// The tensor-core kernels take 16-bit floats, and floats that may be rounded to TF32. Hopper's take what the TMA unit
// can read: one problem and group, lines of whole 16-byte chunks. Those with mma.sync take all but the longest windows;
// what is not dense, or not in whole chunks, in some of the tiles (VisitMmaKernel). Three products a term are too many
// registers for the largest, and the one of few columns is not built for them.
//
// The depthwise kernels have one input channel to a group, and count work and the bytes between columns with 32 bits.
bool Takes(const TileShape& t, const Problem& p, bool hopper) {
  if (IsByte(p.in)) return TakesBytes(t, p, hopper);
  if (p.exchanged && !StoresExchanged(t.unit)) return false;
  if (t.unit == Unit::kSimt) return true;
  if (t.tile == Tile::kFewChannelsWgmma) return hopper && TakesFilled(p) && TakesFewChannels(p);
  if (t.unit == Unit::kFewChannels) return TakesFewChannels(p);
  if (t.unit == Unit::kGrouped) return TakesGrouped(p);
  if (t.unit == Unit::kFewFeatures) return TakesFewFeatures(p);
  if (t.unit == Unit::kUnaligned) return hopper && TakesUnaligned(p);
  if (t.unit == Unit::kPlanes) return hopper && TakesPlanes(p);
  if (t.unit == Unit::kWgmma) return hopper && TakesWgmma(p, t);
  if (t.unit == Unit::kDepthwise) {
    const bool holes = *std::max_element(p.lhs_dilation, p.lhs_dilation + kRank) > 1;
    double apart = 0;
    for (int d = 0; d < kRank; ++d)
      apart = std::max(apart, double(p.stride[d]) * p.lhs_dilation[d] * p.rhs_dilation[d]);
    return p.channels == 1 && p.features > 0 && p.in != DType::kF64 &&
           !(holes && p.direction == Direction::kFilterGradient) && apart * p.groups * p.features * 8 < INT32_MAX &&
           p.batch * p.images * std::max(p.XPixels(), p.YPixels()) < INT32_MAX;
  }
  if (p.in == DType::kF64 || (p.in == DType::kF32 && p.products == 0)) return false;
  if (*std::max_element(p.window, p.window + kRank) > kMmaMaxWindow) return false;
  const Dense dense = DenseOf(p);
  if (IsTripled(p) && (t.tile == Tile::kMma128x128 || t.tile == Tile::kMma128x32)) return false;
  if (InChunks(p) && dense.groups == 1 && !dense.Folds()) return true;
  return t.tile == Tile::kMma128x64 || (t.tile == Tile::kMma128x32 && (IsRagged(p, dense) || GathersChunks(p, dense)));
}

}  // namespace

Dense DenseOf(const Problem& p) {
  constexpr int64_t kColumns = 32, kMostChannels = 128, kMostFolded = 64;
  const int64_t chunk = 16 / SizeOf(p.in), widest = std::max(p.channels, p.features);
  Dense dense;
  // Single channels are the depthwise kernels', which take no bytes.
  for (int64_t twice = 2; (p.channels > 1 || IsByte(p.in)) && p.groups % twice == 0; twice *= 2) {
    const bool chunks = InRunsOf(p, chunk / std::gcd(chunk, dense.groups));
    if (twice * widest > (chunks ? kColumns : kMostChannels) || p.Taps() * twice * widest >= kIndexLimit) break;
    dense.groups = twice;
  }
  if (p.direction == Direction::kFilterGradient || p.groups > 1 || p.DepthChannels() % chunk != 0) return dense;

  const bool forward = p.direction == Direction::kForward;
  Dense folded = dense;
  int64_t columns = forward ? p.features : p.channels;
  for (int d = 0; d < kRank; ++d) {
    // As in axis.cuh, for whose terms index * step = position * stride + tap * tap_step + constant.
    const int64_t step = forward ? p.lhs_dilation[d] : p.stride[d], tap_step = forward ? 1 : -1;
    folded.taps[d] = p.window[d];
    if (step == 1) continue;
    if (p.rhs_dilation[d] != 1 || (forward ? p.stride[d] : p.lhs_dilation[d]) != 1) return dense;
    const int64_t constant = forward ? -p.pad[d] : p.pad[d], offset = -FloorDiv(-constant, step);
    const int64_t first = tap_step * (step * offset - constant), least = forward ? first - (step - 1) : first;
    folded.fold[d] = step;
    folded.offset[d] = offset;
    folded.first_tap[d] = first;
    folded.taps[d] = FloorDiv(p.window[d] - 1 - least, step) + 1;
    columns *= step;
  }
  return columns <= kMostFolded ? folded : dense;
}

namespace {

std::optional<Config> ChooseAsItIs(const Problem& p, bool hopper, std::string_view algorithm, int64_t workspace_limit) {
  const bool widened = p.out == DType::kF32 && (p.in == DType::kF16 || p.in == DType::kBF16);
  const bool floats = p.out == DType::kF32 || p.out == DType::kF16 || p.out == DType::kBF16;
  const bool known = IsByte(p.in) ? floats || (p.in == DType::kS8 && p.out == DType::kS32)
                                  : (p.in == p.out && p.in != DType::kS32) || widened;
  if (!known || !Indexable(p)) return std::nullopt;
  const Gemm g = GemmOf(p);
  const int64_t result_bytes = p.FilterSize() * (p.in == DType::kF64 ? 8 : 4);
  const bool splittable = p.direction == Direction::kFilterGradient;
  std::optional<Config> best;
  const auto consider = [&](const Config& config) {
    if (!best || config.cycles < best->cycles) best = config;
  };
  for (const TileShape& t : kTiles) {
    const bool wanted = algorithm.empty() || algorithm == kAlgorithms[static_cast<int>(t.unit)] || algorithm == t.name;
    if (!wanted || !Takes(t, p, hopper)) continue;
    if (t.unit == Unit::kWgmma && splittable) {
      if (std::optional<Config> config = PlanFilterWgmma(p, t, workspace_limit)) {
        config->cycles += ReductionCycles(p, 1, result_bytes);
        consider(*config);
      }
      continue;
    }
    Strips strips;
    if (t.tile == Tile::kFewChannels) strips.Fit(AsForward(p), FewPixels(AsForward(p)), 16);
    for (int64_t splits = 1; splits == 1 || (splittable && splits * kMinSlice <= g.depth);
         splits += std::max<int64_t>(1, splits / 8)) {
      // As few as give the longest slice no more of whole tiles.
      const int64_t tiles = !splittable                         ? 0
                            : t.tile == Tile::kFewChannels      ? strips.Tiles(p)
                            : t.tile == Tile::kFewChannelsWgmma ? FilledPieces(p)
                            : t.unit == Unit::kUnaligned        ? UnalignedTiles(p)
                            : t.unit == Unit::kPlanes           ? PlanesPieces(p)
                                                                : 0;
      const int64_t slices = tiles > 0 ? CeilDiv(tiles, CeilDiv(tiles, splits)) : splits;
      // Hopper's kernels of few and of unaligned channels and of planes have partial sums of a single slice too.
      const bool always = t.tile == Tile::kFewChannelsWgmma || t.unit == Unit::kUnaligned || t.unit == Unit::kPlanes;
      const bool partial = UsesWorkspace(p, slices) || (always && splittable);
      const int64_t transposed = t.unit == Unit::kUnaligned ? UnalignedWorkspace(p)
                                 : t.unit != Unit::kWgmma   ? 0
                                 : IsByte(p.in)             ? BytesWorkspace(p)
                                                            : TransposedBytes(p, t);
      const int64_t bytes = transposed + (partial ? slices * result_bytes : 0);
      if (bytes > workspace_limit) break;
      if (splittable && CeilDiv(g.depth, slices) >= kIndexLimit) continue;  // a slice is indexed with 32 bits
      for (const int64_t cluster : {1, 2, 3, 4, 8}) {
        if (cluster > 1 && (t.unit != Unit::kWgmma || IsByte(p.in) || !MayShare(p, t, cluster))) continue;
        const double product = t.unit == Unit::kDepthwise          ? DepthwiseCycles(p, slices)
                               : t.tile == Tile::kFewChannelsWgmma ? FilledCycles(p, slices)
                               : t.unit == Unit::kFewChannels      ? FewChannelsCycles(AsForward(p), strips, slices)
                               : t.unit == Unit::kGrouped          ? GroupedCycles(p, slices)
                               : t.unit == Unit::kFewFeatures      ? FewFeaturesCycles(p)
                               : t.unit == Unit::kUnaligned        ? UnalignedCycles(p, slices)
                               : t.unit == Unit::kPlanes           ? PlanesCycles(p, slices)
                               : t.unit == Unit::kWgmma
                                   ? (IsByte(p.in) ? BytesCycles(p, t) : WgmmaCycles(p, t, cluster))
                                   : Cycles(p, t, slices);
        const double cycles = product + ReductionCycles(p, slices, result_bytes);
        consider({t.tile, slices, cluster, 0, bytes, cycles});
      }
    }
  }
  return best;
}

// With x and y exchanged a dilated input has no holes, few features are few channels, and the smaller operand of a
// dense layer is what Hopper's kernels transpose for TF32, which counts where windows are 1x1.
bool IsWorthExchanging(const Problem& p) {
  const auto is_one = [](int64_t n) { return n == 1; };
  const bool transposes = p.in == DType::kF32 && p.products == 1 && p.groups == 1 && p.Taps() == 1 &&
                          std::min(p.channels, p.features) >= 64;
  return p.direction == Direction::kFilterGradient && std::all_of(p.stride, p.stride + kRank, is_one) &&
         (!std::all_of(p.lhs_dilation, p.lhs_dilation + kRank, is_one) ||
          (p.features <= kFewMostChannels && p.channels > kFewMostChannels) ||
          (transposes && p.features * p.YPixels() > p.channels * p.XPixels())) &&
         p.FilterSize() < INT32_MAX;
}

}  // namespace

std::optional<Config> Choose(const Problem& p, bool hopper, std::string_view algorithm, int64_t workspace_limit) {
  if (HasFrame(p)) return ChooseWithFrame(p, hopper, algorithm, workspace_limit);
  const std::optional<Config> best = ChooseAsItIs(p, hopper, algorithm, workspace_limit);
  if (!IsWorthExchanging(p)) return best;
  std::optional<Config> other = ChooseAsItIs(Exchanged(p), hopper, algorithm, workspace_limit);
  if (!other || (best && best->cycles <= other->cycles)) return best;
  other->exchanged = true;
  return other;
}

}  // namespace jaxdnn::conv
