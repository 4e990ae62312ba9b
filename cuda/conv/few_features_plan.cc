#include "cuda/conv/few_features_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

FewAxis AxisOf(const Problem& p, int d) {
  FewAxis axis = {p.lhs_dilation[d], CeilDiv(p.window[d], p.lhs_dilation[d]), p.window[d] - 1 - p.pad[d]};
  axis.first_cell = FloorDiv(axis.before, axis.stride);
  axis.cells = FloorDiv(axis.before + p.y[d] - 1, axis.stride) - axis.first_cell + 1;
  return axis;
}

}  // namespace

FewFeaturesPieces::FewFeaturesPieces(int64_t tiles, const FewAxis& axis, int64_t resident, int64_t batch) {
  // A worker's lines should be some more than it reads besides.
  constexpr int kLeastLines = 2;
  const int64_t all = tiles * axis.cells, beside = axis.reach - 1;
  const int64_t most = std::min(std::max<int64_t>(1, resident / batch), CeilDiv(all, kLeastLines));
  // Equal shares of all lines are mostly of two tiles, and read beside each; those of a tile may be fewer.
  const int64_t of_tile = most / tiles;
  const bool apart = of_tile > 0 && CeilDiv(axis.cells, of_tile) <= CeilDiv(all, most) + beside;
  pieces = apart ? of_tile : most;
  workers = apart ? of_tile * tiles : most;
  share = apart ? axis.cells : all;
}

FewFeaturesPlan::FewFeaturesPlan(const Problem& p) : lines(AxisOf(p, 1)), columns(AxisOf(p, 2)) {
  planes = p.window[0];
  steps = CeilDiv(p.channels * SizeOf(p.in), 32);
  slices = CeilDiv(steps * 32, kFewSlotBytes);
  run = p.window[2] * p.features;
  parts = CeilDiv(run, 8);
  // Columns up to the last of a cell, and so many that neither storing nor adding values up meets in a bank.
  row = 8 * (std::max(parts, CeilDiv(columns.reach * columns.stride * p.features, 8)) | 1);
  filter_lines = (p.window[1] - 1) * run + 8 * parts;
  for (strips = parts <= 3 ? 2 : 1;; --strips) {
    cells = Pixels() - columns.reach + 1;
    if (strips == 1 || SharedBytes(p) <= kFewMostBytes) break;
  }
  tiles = CeilDiv(p.images * p.y[0] * Places() - columns.reach + 1, std::max<int64_t>(cells, 1));
}

bool TakesFewFeatures(const Problem& problem) {
  const Problem p = AsForward(problem);
  if (p.direction != Direction::kForward || p.groups != 1 || (p.in == DType::kF32 && p.products != 1)) return false;
  const int64_t size = SizeOf(p.in);
  for (int d = 0; d < kRank; ++d)
    if (p.stride[d] != 1 || (p.rhs_dilation[d] != 1 && p.window[d] > 1)) return false;
  const double pixels = double(p.batch) * p.images * std::max(p.XPixels(), p.YPixels());
  const bool strided = p.lhs_dilation[1] > 1 || p.lhs_dilation[2] > 1;
  if (size > 4 || p.lhs_dilation[0] != 1 || p.window[0] > kFewMostPlanes || p.window[1] > kFewMostLines ||
      p.features < 1 || p.features > kFewMostFeatures * (strided ? 2 : 1) ||
      p.window[2] * p.features > 8 * kFewMostParts || p.channels < 8 || p.channels * size % 16 != 0 ||
      std::min({pixels, double(p.XPixels()), double(p.YPixels()), double(p.Taps())}) == 0)
    return false;
  const FewFeaturesPlan plan(p);
  return plan.SharedBytes(p) <= kFewMostBytes &&
         // The kernels count results, places of columns, lines of all tiles, and 16 bytes of the operand with 31 bits.
         pixels * p.features < INT32_MAX && double(p.images) * p.y[0] * plan.Places() < INT32_MAX - 4 * kFewPixels &&
         double(plan.tiles) * plan.lines.cells < INT32_MAX && pixels * p.channels / 4 < INT32_MAX;
}

// A block's work on a line of its pixels, or what they move to and from memory. Fitted to an H200, which takes 1 to 1.6
// times as long, about as it does beside the models of the kernels that this is compared with.
double FewFeaturesCycles(const Problem& problem) {
  constexpr double kShare = 0.8, kBlocks = 3 * kMultiprocessors;
  const Problem p = AsForward(problem);
  const FewFeaturesPlan plan(p);
  const double images = double(p.batch) * p.images, pixels = plan.Pixels();
  const double bytes = images * (p.XPixels() * p.channels * SizeOf(p.in) + p.YPixels() * p.features * SizeOf(p.out));
  // A forward filter is brought into the order of the result's elements.
  const double start = 6000 + (problem.direction == Direction::kForward ? plan.FilterBytes() * 0.4 : 0);
  const double height = p.window[1] <= kFewFewLines ? kFewFewLines : kFewMostLines;
  const double products = pixels / 16 * height * plan.parts * plan.steps;
  const double results = plan.Elements(p) * plan.lines.stride;
  const double line =
      140 + 2 * plan.planes * (products + pixels * plan.slices) + (0.2 + 0.06 * plan.columns.reach) * results;
  // Beside its own, a block reads some of another's lines, of which it multiplies a part.
  const double all = double(p.batch) * plan.tiles * plan.lines.cells, blocks = std::min(kBlocks, std::ceil(all / 2));
  const double lines = all + 0.7 * blocks * (plan.lines.reach - 1);
  return start + std::max(bytes / (kShare * kBytesPerCycle) / kMultiprocessors,
                          lines / std::min<double>(kMultiprocessors, blocks) * line);
}

bool FewOpenPlan::Fit(const Problem& p) {
  if (SizeOf(p.in) != 2 || !TakesFewFeatures(p)) return false;
  lines = AxisOf(p, 1);
  columns = AxisOf(p, 2);
  cell = lines.stride * columns.stride * p.features;
  const int each = int(CeilDiv(cell, 4));
  int best = 0;
  for (int i = 0; i < int(std::size(kFewOpenShapes)); ++i) {
    const FewOpenShape& s = kFewOpenShapes[i];
    if (s.each != each || s.lines < lines.reach || (best > 0 && s.Columns() >= best)) continue;
    best = s.Columns();
    shape = i;
  }
  if (best == 0 || lines.first_cell < 0) return false;  // or results before all of the operand
  // Where a line's results begin with the second half of a word, cells may begin a column earlier.
  const int64_t left = columns.stride * columns.reach - p.window[2];
  after = columns.before * p.features % 2 != 0 && p.features % 2 != 0 && left > 0;
  if (after > 0) {
    columns.before += after;
    columns.first_cell = FloorDiv(columns.before, columns.stride);
    columns.cells = FloorDiv(columns.before + p.y[2] - 1, columns.stride) - columns.first_cell + 1;
  }
  pairs = CellColumns(p) % 2 == 0 && columns.before * p.features % 2 == 0 && p.y[2] * p.features % 2 == 0;
  planes = p.window[0];
  const int64_t bytes = p.channels * SizeOf(p.in);
  line_bytes = bytes <= 32 ? 32 : bytes <= 64 ? 64 : 128;
  slices = CeilDiv(bytes, line_bytes);
  const int64_t at_once = kAtOnce * 32 / line_bytes;
  pixels = CeilDiv(columns.reach, at_once) * at_once;
  // Limits of the TMA unit's columns of pixels (pixel_map.h).
  const bool volume = p.x[0] != 1 || p.y[0] != 1 || planes != 1;
  const int64_t least = volume ? -16 : -128, most = -least - 1;
  const int64_t first = columns.first_cell - (columns.reach - 1), last = first + Places() - p.x[2];
  const int64_t last_plane = p.y[0] - p.pad[0] - p.x[0];
  if (first < least || first > most || last < least || last > most || -p.pad[0] < least || -p.pad[0] > most ||
      last_plane < least || last_plane > most)
    return false;
  FewOpenPlan best_plan = *this;
  best_plan.cycles = HUGE_VAL;
  for (const FewOpenBlocks& each : kFewOpenBlocks)
    if (FitBlocks(p, each) && cycles < best_plan.cycles) best_plan = *this;
  *this = best_plan;
  return cycles < HUGE_VAL;
}

// What takes longest: shared memory, which wgmma reads for all of a product's rows and columns; a line's instructions,
// one after another; or what is moved. Fitted to an H200.
bool FewOpenPlan::FitBlocks(const Problem& p, const FewOpenBlocks& candidate) {
  constexpr double kStart = 6000, kBlock = 700, kLine = 1400, kStores = 60, kBusy = 1.15, kShare = 0.8;
  constexpr double kWait = 130;  // of two warpgroups, for each other's sums
  const FewOpenShape& s = kFewOpenShapes[shape];
  blocks = candidate;
  if (s.Columns() > kFewOpenMostColumns && blocks.warpgroups * blocks.blocks > 2) return false;
  tiles = CeilDiv(p.images * p.y[0] * Places() - columns.reach + 1, blocks.Pixels());
  const int64_t bytes = (blocks.blocks > 1 ? kHalfOfBytes : kMostBytes) - FilterBytes() - BesideBytes(p);
  stages = std::min<int64_t>(kMostStages, bytes / StageBytes());
  if (stages < kLeastStages) return false;

  const double stage = pixels * line_bytes / 32.0 * (16 + s.Columns() / 4) + line_bytes / 2.0;
  const double line = kBusy * (planes * slices * stage + kStores) + (blocks.warpgroups * blocks.blocks > 2 ? 0 : kWait);
  const FewFeaturesPieces pieces(tiles, lines, int64_t{blocks.blocks} * kMultiprocessors, p.batch);
  const double moved =
      double(p.batch) * p.images * (p.XPixels() * p.channels * SizeOf(p.in) + p.YPixels() * p.features * SizeOf(p.out));
  // Where a worker's lines are of two tiles, it reads lines beside both.
  const double most = pieces.Lines() + (pieces.Apart(tiles) ? 1 : 1.5) * (lines.reach - 1);
  const double together = CeilDiv(pieces.workers * p.batch, kMultiprocessors) * blocks.warpgroups;
  cycles = kStart + kBlock * blocks.blocks + FilterBytes() * 0.1 +
           std::max({moved / (kShare * kBytesPerCycle) / kMultiprocessors, most * together * line, most * kLine});
  return true;
}

bool TakesFewOpen(const Problem& problem) { return FewOpenPlan().Fit(AsForward(problem)); }

// Of 31 problems that were measured, large and small, these kernels took 0.39 to 0.82 of the portable ones' time, whose
// model is low where there is little to do.
double FewOpenCycles(const Problem& problem) {
  constexpr double kOfPortable = 0.9;
  FewOpenPlan plan;
  return plan.Fit(AsForward(problem)) ? std::min(plan.cycles, kOfPortable * FewFeaturesCycles(problem)) : HUGE_VAL;
}

}  // namespace jaxdnn::conv
