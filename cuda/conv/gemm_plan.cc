#include "cuda/conv/gemm_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"
#include "cuda/conv/patch_plan.h"
#include "cuda/conv/runs_plan.h"
#include "cuda/conv/step_cost.h"

namespace jaxdnn::conv {
namespace {

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

// Without `but` of the columns.
Work WorkOf(const Problem& p, const TileShape& t, int64_t splits, int64_t but) {
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
  // Ragged lines are filled up to whole chunks, and all of floats on the CUDA cores.
  const bool filter = p.direction == Direction::kFilterGradient;
  const double chunk = 16 / SizeOf(p.in), channels = double(filter ? p.channels : p.DepthChannels());
  const bool filled = t.unit == Unit::kMma ? IsRagged(p, dense) : p.in == DType::kF32;
  const double fill = filled && channels > 0 ? std::ceil(channels / chunk) * chunk / channels : 1;
  const double depth = g.depth * (filter ? 1 : fill), rows = g.rows * (filter ? fill : 1);
  const double row_tiles = phases * std::ceil(rows / phases / t.rows);
  const double tiles = double(g.problems) * row_tiles * CeilDiv(g.columns - but, t.columns) * splits;
  return {tiles, depth / taps_per_tap / splits, depth * share / splits};
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

// How much longer the mma.sync kernels take where results come in phases, and where a data gradient gathers whole
// chunks that are apart (in wide tiles); floats hardly do in gradients. Fitted to an H100 and an H200.
double ApartCost(const Problem& p, const TileShape& t) {
  constexpr double kApart = 1.25;
  const auto steps = [](const int64_t (&a)[kRank]) {
    return std::any_of(a, a + kRank, [](int64_t n) { return n > 1; });
  };
  if (p.direction == Direction::kForward) return steps(p.lhs_dilation) ? kApart : 1;
  if (p.direction == Direction::kFilterGradient || SizeOf(p.in) > 2) return 1;
  return steps(p.stride) || (steps(p.lhs_dilation) && t.columns >= 64 && InChunks(p)) ? kApart : 1;
}

}  // namespace

bool InFours(const Problem& p) { return InRunsOf(p, 4); }

int64_t NarrowRest(const Problem& p, const TileShape& t) {
  const int64_t columns = GemmOf(p).columns, rest = columns % t.columns;
  const bool of_floats = t.unit == Unit::kSimt && p.in == DType::kF32 && p.direction != Direction::kFilterGradient;
  if (!of_floats || columns <= t.columns || t.columns <= 8 || rest > 8) return 0;
  // One more column of tiles costs nothing where multiprocessors are left.
  return WorkOf(p, t, 1, 0).tiles <= kMultiprocessors ? 0 : rest;
}

MetShare MetByPosition(const Problem& p, const TileShape& t) {
  // Images of more bytes are too far apart for what translates addresses.
  constexpr int64_t kFewestImages = 8, kMostPositions = 4096, kMostImageBytes = 1 << 20;
  constexpr double kPays = .9;
  const bool forward = p.direction == Direction::kForward;
  const int64_t* const out = forward ? p.y : p.x;
  const int64_t* const in = forward ? p.x : p.y;
  const int64_t positions = forward ? p.YPixels() : p.XPixels(), read = forward ? p.XPixels() : p.YPixels();
  if (p.direction == Direction::kFilterGradient || p.images < kFewestImages || positions == 0 ||
      positions > kMostPositions || read * p.groups * p.DepthChannels() * SizeOf(p.in) > kMostImageBytes ||
      p.images * positions > INT32_MAX / 2)
    return {};
  for (int d = 0; d < kRank; ++d)
    if ((forward ? p.lhs_dilation : p.stride)[d] != 1 || p.window[d] > kMmaMaxWindow) return {};
  // What single positions find is left at least. Launches ask too, so that what mostly has no padding must be told
  // soon.
  double least = 1;
  for (int d = 0; d < kRank; ++d) {
    const int64_t step = forward ? p.stride[d] : p.lhs_dilation[d];
    int64_t met = 0;
    for (int64_t tap = 0; tap < p.window[d]; ++tap) {
      const int64_t moved = (tap * p.rhs_dilation[d] - p.pad[d]) * (forward ? 1 : -1);
      const int64_t first = std::max<int64_t>(0, FloorDiv(step - 1 - moved, step));
      met += std::max<int64_t>(0, std::min(out[d] - 1, FloorDiv(in[d] - 1 - moved, step)) - first + 1);
    }
    least *= double(met) / double(std::max<int64_t>(1, out[d] * p.window[d]));
  }
  if (least > kPays) return {};
  // As DataBlock::LeavePadding.
  const auto taps = [&](int d, int64_t first, int64_t last) {
    int64_t met = 0;
    for (int64_t tap = 0; tap < p.window[d]; ++tap) {
      const int64_t moved = tap * p.rhs_dilation[d] - p.pad[d], step = forward ? p.stride[d] : p.lhs_dilation[d];
      const int64_t low = first * step + (forward ? moved : -moved), high = low + (last - first) * step;
      met += high >= 0 && low < in[d];
    }
    return met;
  };
  // Of a tile from position `first` to `last`.
  const auto met_by = [&](int64_t first, int64_t last) {
    double met = 1;
    int64_t plane = positions;
    bool all = false;
    for (int d = 0; d < kRank; ++d) {
      plane /= out[d];
      const int64_t from = first / plane, to = last / plane;
      first %= plane, last %= plane;
      met *= double(all ? taps(d, 0, out[d] - 1) : taps(d, from, to));
      all |= from != to;
    }
    return met;
  };
  double sum = 0, most = 0, tiles = 0, met = 0;
  int64_t first = -1, last = -1;
  for (int64_t row = 0; row < p.images * positions; row += t.rows, ++tiles) {
    const int64_t begin = row / p.images, end = (std::min(row + t.rows, p.images * positions) - 1) / p.images;
    if (begin != first || end != last) met = met_by(first = begin, last = end);  // else as the tile before
    sum += met;
    most = std::max(most, met);
  }
  const double all_taps = double(std::max<int64_t>(p.Taps(), 1)), average = sum / tiles / all_taps;
  // Where blocks are few, the time is that of the longest. Else they are of uneven length, so that half of what is left
  // out shows.
  most /= all_taps;
  const double blocks = tiles * double(p.batch * p.groups * CeilDiv(GemmOf(p).columns, t.columns));
  return average <= kPays && (blocks > 2 * kMultiprocessors || most <= kPays) ? MetShare{(1 + average) / 2, most}
                                                                              : MetShare{};
}

bool InFloatParts(const Problem& p, const TileShape& t) {
  if (t.tile != Tile::kSimt64x32 || p.in != DType::kF32 || p.direction == Direction::kFilterGradient) return false;
  const Work work = WorkOf(p, t, 1, 0);
  return work.tiles <= kMultiprocessors && work.depth >= 4 * kFloatParts * SimtDepth(DType::kF32);
}

// The CUDA cores take every problem; floats (float_tile.cuh) and others each have tiles of their own.
bool TakesSimt(const Problem& p, const TileShape& t) {
  if (t.tile == Tile::kSimtRuns) return TakesRuns(p);
  if (t.tile == Tile::kSimtPatch) return TakesPatch(p) || TakesFilterPatch(p);
  if (t.tile == Tile::kSimt128x64 || t.tile == Tile::kSimt64x32) return true;
  if (t.columns < 32 && t.tile != Tile::kSimt128x8 && p.direction == Direction::kFilterGradient) return false;
  return (t.tile == Tile::kSimt128x8) == (p.in != DType::kF32);
}

// The tensor-core kernels take 16-bit floats, and floats that may be rounded to TF32; all but the longest windows; and
// what is not dense, or not in whole chunks, in some of the tiles (VisitMmaKernel). Three products a term are too many
// registers for the largest, and the one of few columns is not built for them.
bool TakesMma(const Problem& p, const TileShape& t) {
  if (p.in == DType::kF64 || (p.in == DType::kF32 && p.products == 0)) return false;
  if (*std::max_element(p.window, p.window + kRank) > kMmaMaxWindow) return false;
  const Dense dense = DenseOf(p);
  if (p.Tripled() && (t.tile == Tile::kMma128x128 || t.tile == Tile::kMma128x32)) return false;
  if (InChunks(p) && dense.groups == 1 && !dense.Folds()) return true;
  return t.tile == Tile::kMma128x64 || (t.tile == Tile::kMma128x32 && (IsRagged(p, dense) || GathersChunks(p, dense)));
}

namespace {

double Cycles(const Problem& p, const TileShape& t, int64_t splits, int64_t but) {
  const bool mma = t.unit == Unit::kMma;
  Work work = WorkOf(p, t, splits, but);
  if (!mma && p.in == DType::kF32) {
    const MetShare met = MetByPosition(p, t);
    work.depth *= met.average, work.longest *= met.most;
  }
  const Dense dense = mma ? DenseOf(p) : Dense();
  const Lines lines = mma ? LinesOf(p, dense) : InFours(p) ? Lines::kWhole : Lines::kInPieces;
  const StepCost cost = StepCostOf(t.tile, p.direction, p.in, lines);
  // Finding its place and storing its sums take a block as long as some steps.
  const int depth = mma ? MmaDepth(p.direction, SizeOf(p.in)) : SimtDepth(p.in), beside = mma ? 8 : 4;
  const double steps = std::ceil(work.depth / depth) + beside, longest = std::ceil(work.longest / depth) + beside;
  const double each = std::ceil(work.tiles / kMultiprocessors);
  // Groups that are merged may come in pieces too; and pieces may be single elements.
  const bool filter = p.direction == Direction::kFilterGradient;
  const bool runs = InRunsOf(p, std::max<int64_t>(1, 4 / SizeOf(p.in)));
  const double pieces = lines == Lines::kSomeInPieces && filter             ? (runs ? 1 : 1.6)
                        : lines != Lines::kSpread || CopiesChunks(p, dense) ? 1
                        : runs                                              ? 1.6
                                                                            : 2;
  if (!mma && p.in == DType::kF32) {
    if (InFloatParts(p, t)) return (std::ceil((longest - beside) / kFloatParts) + beside) * cost.busy * kFloatParts;
    // Blocks that share a multiprocessor take the longer the more they are, from one alone to all that fit.
    const double last = std::fmod(each, cost.resident), all = cost.resident * cost.busy;
    const double more = std::max(0.0, all - cost.latency) / (cost.resident - 1);
    const double round = last > 0 ? cost.latency + (last - 1) * more : 0;
    return std::max(longest * cost.latency, steps * ((each - last) * cost.busy + round));
  }
  const double latency = std::max(steps * std::ceil(each / cost.resident), longest) * cost.latency;
  return pieces * (mma ? ApartCost(p, t) * (p.Tripled() ? 2.5 : 1) : 1) * std::max(latency, steps * each * cost.busy);
}

}  // namespace

double GemmCycles(const Problem& p, const TileShape& t, int64_t splits) {
  constexpr double kLaunch = 3000;
  if (t.tile == Tile::kSimtRuns) return RunsCycles(p, splits);
  if (t.tile == Tile::kSimtPatch)
    return p.direction == Direction::kFilterGradient ? FilterPatchCycles(p, splits) : PatchCycles(p);
  const int64_t rest = NarrowRest(p, t);
  const double cycles = Cycles(p, t, splits, rest);
  if (rest == 0) return cycles;
  return cycles + kLaunch + Cycles(p, kTiles[static_cast<int>(NarrowTile(rest))], splits, GemmOf(p).columns - rest);
}

}  // namespace jaxdnn::conv
