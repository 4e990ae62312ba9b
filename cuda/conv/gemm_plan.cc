#include "cuda/conv/gemm_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>

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

namespace {

// How many of the last columns of float32 a second launch computes, where all multiprocessors are busy.
int64_t RestOf(const Problem& p, const TileShape& t) {
  const int64_t columns = GemmOf(p).columns, rest = columns % t.columns;
  const bool of_floats = t.unit == Unit::kSimt && p.in == DType::kF32 && p.direction != Direction::kFilterGradient;
  if (!of_floats || columns <= t.columns || t.columns <= 8 || rest > 8) return 0;
  // One more column of tiles costs nothing where multiprocessors are left.
  return WorkOf(p, t, 1, 0).tiles <= kMultiprocessors ? 0 : rest;
}

// The share of all products that are left where rows are by position, on average and in the largest tile; all where
// that does not pay, and rows stay image by image.
struct MetShare {
  double average = 1, most = 1;
};
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
  // Where blocks are few, the time is that of the longest.
  most /= all_taps;
  const double blocks = tiles * double(p.batch * p.groups * CeilDiv(GemmOf(p).columns, t.columns));
  return average <= kPays && (blocks > 2 * kMultiprocessors || most <= kPays) ? MetShare{average, most} : MetShare{};
}

// Kernels of float32 on the CUDA cores that are no products of tiles.
struct OfFloats {
  Tile tile;
  bool (*take)(const Problem&);
  double (*cycles)(const Problem&, int64_t splits);
};
constexpr OfFloats kOfFloats[] = {
    {Tile::kSimtRuns, TakesRuns,
     [](const Problem& p, int64_t splits) { return RunsCycles(p, splits, GemmOf(p).columns); }},
    {Tile::kSimtPatch, [](const Problem& p) { return TakesPatch(p) || TakesFilterPatch(p); },
     [](const Problem& p, int64_t splits) {
       return p.direction == Direction::kFilterGradient ? FilterPatchCycles(p, splits) : PatchCycles(p);
     }}};

const OfFloats* Find(Tile tile) {
  const auto* const found =
      std::find_if(std::begin(kOfFloats), std::end(kOfFloats), [&](const OfFloats& k) { return k.tile == tile; });
  return found == std::end(kOfFloats) ? nullptr : found;
}

}  // namespace

// The CUDA cores take every problem; floats (float_tile.cuh) in tiles of many sizes, others (tile.cuh) in one, and
// 16-bit floats' results also in one for small groups.
bool TakesSimt(const Problem& p, const TileShape& t) {
  if (const OfFloats* const kernel = Find(t.tile)) return kernel->take(p);
  if (t.tile == Tile::kSimt64x32) return true;
  if (t.columns < 32 && p.direction == Direction::kFilterGradient) return false;
  return t.tile == Tile::kSimt128x8 ? SizeOf(p.in) == 2 : p.in == DType::kF32;
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

// Clusters that run at once, by their size: a block of each on a multiprocessor, and three. Multiprocessors come in
// groups of unequal size, which clusters do not leave.
constexpr int kClustersAlone[] = {132, 66, 39, 30, 22, 17, 15, 15};
constexpr int kClustersOfThree[] = {396, 198, 124, 92, 69, 62, 47, 45};

struct Costed {
  FloatBlocks blocks;
  double cycles;
};

// Of blocks of float32 on the CUDA cores, without the `rest` of the columns.
Costed BlocksOf(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster, int64_t rest) {
  const bool filter = p.direction == Direction::kFilterGradient;
  // What finding its place and storing its sums take a block, in steps; where sums are exchanged, as long as those of
  // all that a multiprocessor has.
  const double beside = filter ? 2.5 : 4;
  const MetShare met = MetByPosition(p, t);
  const Work work = WorkOf(p, t, splits, rest);
  StepCost cost = StepCostOf(t.tile, p.direction, p.in, InFours(p) ? Lines::kWhole : Lines::kInPieces);
  // Steps that follow no other of their tap find where their fours lie; narrow tiles' costs have a fourth of that.
  const double in_tap = double(p.DepthChannels()) / SimtDepth(DType::kF32);
  const double finds = in_tap < 2 ? 1 : (1 + in_tap - std::floor(in_tap)) / in_tap;
  if (!filter && t.columns >= 32) {
    const double found = finds * (t.rows + t.columns) / double(128 + 64);
    cost.latency += 300 * found, cost.busy += 60 * found;
  } else if (!filter) {
    cost.latency += 650 * std::max(0., finds - .25), cost.busy += 650 * std::max(0., finds - .25);
  }
  const auto steps = [&](double depth) { return std::ceil(depth / double(cluster * SimtDepth(DType::kF32))); };
  const double alone = kClustersAlone[cluster - 1];
  // Blocks that share a multiprocessor take the longer the more they are, from one alone to all that fit. They are of
  // uneven length where they leave out padding, so that half of that shows.
  const double resident = cluster > 1 ? kClustersOfThree[cluster - 1] : alone * cost.resident;
  const double full = std::floor(work.tiles / resident), last = std::ceil((work.tiles - full * resident) / alone);
  const double all = cost.resident * cost.busy, more = std::max(0.0, all - cost.latency) / (cost.resident - 1);
  const double rounds = full * all + (last > 0 ? std::min(all, cost.latency + (last - 1) * more) : 0);
  const double ends = beside * (cluster > 1 ? (full + (last > 0)) * all : rounds);
  Costed best = {{1, met.average < 1}};
  best.cycles = std::max((steps(work.longest * met.most) + beside) * cost.latency,
                         steps(work.depth * (1 + met.average) / 2) * rounds + ends);
  if (t.tile != Tile::kSimt64x32 || filter) return best;
  // A block in parts has a multiprocessor to itself.
  const double step = InFours(p) ? 2480 : 3400;
  const auto in_parts = [&](double depth) { return (std::ceil(steps(depth) / kFloatParts) + 4) * step; };
  const double longest = in_parts(work.longest * met.most), tiles = work.tiles / alone;
  const double cycles = std::max(longest, met.average < 1 ? tiles * in_parts(work.depth * met.average) + longest / 4
                                                          : std::ceil(tiles) * in_parts(work.depth));
  if (cluster > 1 || (work.depth >= kFloatParts * SimtDepth(DType::kF32) && cycles < best.cycles))
    best.blocks.parts = kFloatParts, best.cycles = cycles;
  return best;
}

// And with them.
Costed BlocksOf(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster) {
  constexpr double kLaunch = 3000;
  const int64_t rest = RestOf(p, t);
  Costed blocks = BlocksOf(p, t, splits, cluster, rest);
  if (rest == 0) return blocks;
  const Tile narrow = rest > 4 ? Tile::kSimt256x8 : Tile::kSimt256x4;
  const double in_tile = BlocksOf(p, kTiles[static_cast<int>(narrow)], 1, 1, GemmOf(p).columns - rest).cycles;
  const double in_runs = TakesRuns(p) ? RunsCycles(p, 1, rest) : in_tile;
  blocks.blocks.rest = rest;
  blocks.blocks.rest_tile = in_runs < in_tile ? Tile::kSimtRuns : narrow;
  blocks.cycles += kLaunch + std::min(in_runs, in_tile);
  return blocks;
}

double Cycles(const Problem& p, const TileShape& t, int64_t splits) {
  const bool mma = t.unit == Unit::kMma;
  const Work work = WorkOf(p, t, splits, 0);
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
  const double latency = std::max(steps * std::ceil(each / cost.resident), longest) * cost.latency;
  return pieces * (mma ? ApartCost(p, t) * (p.Tripled() ? 2.5 : 1) : 1) * std::max(latency, steps * each * cost.busy);
}

}  // namespace

FloatBlocks FloatBlocksOf(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster) {
  return Find(t.tile) != nullptr ? FloatBlocks{} : BlocksOf(p, t, splits, cluster).blocks;
}

bool MayShareFloats(const Problem& p, const TileShape& t, int64_t cluster) {
  // Tiles beyond which every multiprocessor has enough of them, and steps that are worth a block.
  constexpr int64_t kMostTiles = 2 * kMultiprocessors, kLeastSteps = 8;
  if (p.in != DType::kF32 || p.direction == Direction::kFilterGradient) return false;
  if (p.products == 1) return false;  // TF32's kernels take no longer
  if (t.tile != Tile::kSimt128x64 && t.tile != Tile::kSimt64x32) return false;
  if (t.tile == Tile::kSimt128x64 && cluster > 6) return false;  // which more seldom run at once than the model has it
  const Work work = WorkOf(p, t, 1, 0);
  return work.tiles <= kMostTiles && work.depth >= cluster * kLeastSteps * SimtDepth(DType::kF32);
}

double GemmCycles(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster) {
  if (const OfFloats* const kernel = Find(t.tile)) return kernel->cycles(p, splits);
  return t.unit == Unit::kSimt && p.in == DType::kF32 ? BlocksOf(p, t, splits, cluster).cycles : Cycles(p, t, splits);
}

}  // namespace jaxdnn::conv
