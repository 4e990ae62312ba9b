#include "cuda/conv/direct_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

constexpr int kMostChannels = 16 * DirectPlan::kMostSteps, kMostBox = 256, kStageBytes = 12 << 10, kSwizzleBytes = 1024;
constexpr int kMostReach = 1 << 13;  // of a window: more does not fit into shared memory
constexpr int kReserved = 1024;      // of a multiprocessor's shared memory, for each block
constexpr int kEight = 8;            // rows of an operand of wgmma, which the swizzle's pattern repeats with
// Cycles of a block, of a unit beside its products, of a unit whose operand could not be loaded before, and of a tap
// that is multiplied by itself.
constexpr double kStart = 6300, kUnit = 1850, kLoad = 1000, kTap = 120;
// And of a unit whose lines end with pixels that are no whole row, and of a tap whose filter is merged.
constexpr double kEnds = 500, kMergedTap = 100;
constexpr double kCacheBytes = 36;  // a cycle, per multiprocessor

// Of the filter gradient: positions of a piece of several images, and cycles of a block, of a piece and of a run
// beside its products.
constexpr int kMostPositions = 256;
constexpr double kFilterStart = 8000, kPieceCycles = 400, kRunCycles = 100;

// Cycles of a product of 64 rows, where others' loads and stores go on at the same time: reading its operands takes as
// long as multiplying or longer.
constexpr double Product(int columns) { return columns == 64 ? 29.5 : columns == 48 ? 23 : 17; }

// Of the filter gradient's, whose operands are both transposed.
constexpr double FilterProduct(int columns) { return std::max(columns / 2.0, 16 + columns / 4.0); }

// Cycles for a position of the operand, or a row of the filter, whose channels fill a line of shared memory or do not:
// the TMA unit takes about twice as long for them.
constexpr double OperandLine(int64_t bytes, int line) { return bytes == line ? 1 : 1.95; }
constexpr double FilterLine(int64_t bytes, int line) { return bytes == line ? 0.75 : 1.45; }

// Of a block's tile of so many results or features.
int BestColumns(int64_t features) {
  const auto cost = [&](int n) { return CeilDiv(features, n) * Product(n); };
  int best = 64;
  for (const int n : {48, 32})
    if (cost(n) < cost(best)) best = n;
  return best;
}

bool TakesGroups(const DirectGroups& of) {
  return of.channels % kEight == 0 && of.features % kEight == 0 && of.channels <= kMostChannels;
}

}  // namespace

bool DirectView::Fit(const Problem& p) {
  const int64_t row = p.stride[2] * p.channels;
  const bool rows =
      p.stride[2] > 1 && p.groups == 1 && p.rhs_dilation[2] == 1 && p.channels % 16 == 0 && (row == 32 || row == 64);
  beside = rows ? p.stride[2] : 1;
  for (int d = 0; d < kRank; ++d) {
    // A tap and the next but one are as far apart as any such two. Planes are brought one by one.
    const bool strided = p.direction == Direction::kForward && p.x[d] >= p.stride[d] &&
                         (d == 0 || p.stride[d] <= (d == 2 && rows ? 4 : 2));
    if ((p.stride[d] != 1 && !strided) || p.lhs_dilation[d] != 1) return false;
  }
  volumes = p.window[0] != 1 || p.pad[0] != 0 || p.x[0] != p.y[0] || p.stride[0] != 1;
  if (volumes && p.direction == Direction::kFilterGradient) return false;
  images = p.images * (volumes ? 1 : p.x[0]);
  x_planes = volumes ? p.x[0] : 1;
  y_planes = volumes ? p.y[0] : 1;
  window_planes = p.window[0];
  plane_dilation = p.rhs_dilation[0];
  plane_pad = p.pad[0];
  plane_stride = p.stride[0];
  for (int d = 0; d < 2; ++d) {
    x[d] = p.x[d + 1];
    y[d] = p.y[d + 1];
    window[d] = p.window[d + 1];
    dilation[d] = p.rhs_dilation[d + 1];
    pad[d] = p.pad[d + 1];
    stride[d] = p.stride[d + 1];
    parts[d] = stride[d] / (d == 1 ? beside : 1);
    if (Reach(d) > kMostReach) return false;
  }
  return true;
}

void DirectView::TakeResidues() {
  const int64_t n = dilation[0];
  if (window[0] == 1 || stride[0] > 1 || x[0] % n != 0 || y[0] % n != 0 || pad[0] % n != 0) return;
  residues = n;
  for (int64_t* lines : {&x[0], &y[0], &pad[0], &dilation[0]}) *lines /= n;
}

int64_t DirectView::Before(int d) const { return -FloorDiv(-pad[d], stride[d]); }

DirectGroups::DirectGroups(const Problem& p, int merged)
    : merged(merged), groups(CeilDiv(p.groups, merged)), channels(p.channels * merged), features(p.features * merged) {
  if (merged > 1)
    for (log = 1; p.channels > 1 << log;) ++log;
}

int DirectGroups::Mergeable(const Problem& p) {
  const int64_t c = p.channels;
  const bool small = c == 2 || c == 4 || c == 8 || c == 16;
  return small && p.groups > 1 && p.features == c && p.groups * c % kEight == 0 ? int(kMergedChannels / c) : 1;
}

int DirectPlan::SharedBytes() const { return x_stages * x_bytes + stages * stage_taps * slab_bytes + kBarrierBytes; }

// Blocks of so wide results, and as many lines and images as have room.
void DirectPlan::FitShape(int64_t of_width) {
  const int64_t reach[] = {view.Reach(0), view.Reach(1)};
  width = int(of_width);
  boxes = int(CeilDiv(width + reach[1], kMostBox));
  box_columns = int(boxes == 1 ? width + reach[1] : CeilDiv(CeilDiv(width + reach[1], boxes), kEight) * kEight);
  pitch = boxes * box_columns;
  const auto even = [](int64_t all, int64_t most) { return int(CeilDiv(all, CeilDiv(all, std::min(all, most)))); };
  height = even(view.y[0], (kRows - width) / pitch + 1);
  const int64_t plane = (height + reach[0]) * pitch;
  images = height < view.y[0] ? 1 : even(view.images, (kRows - (height - 1) * pitch - width) / plane + 1);
  images = std::min(images, kMostBox);
  const int64_t rows = std::max(images * plane, kRows + reach[0] * pitch + reach[1]);
  part_bytes = int(CeilDiv(rows * x_line, kSwizzleBytes)) * kSwizzleBytes;
  x_bytes = int(view.Parts()) * part_bytes;
  column_tiles = int(CeilDiv(view.y[1], width));
  line_tiles = int(view.residues * view.y_planes * CeilDiv(view.y[0], height));
  image_tiles = int(CeilDiv(view.images, images));
}

bool DirectPlan::Fit(const Problem& p, bool forward) {
  if (!view.Fit(p)) return false;
  const int mergeable = DirectGroups::Mergeable(p);
  DirectPlan several = *this;
  const bool fits = FitGroups(p, forward, 1);
  if (mergeable == 1 || !several.FitGroups(p, forward, mergeable)) return fits;
  if (!fits || several.cycles < cycles) *this = several;
  return true;
}

bool DirectPlan::FitGroups(const Problem& p, bool forward, int merged) {
  of = DirectGroups(p, merged);
  if (!TakesGroups(of)) return false;
  // Planes and residues are in the place of groups.
  if (view.volumes && of.Apart()) return false;
  if (!view.volumes && !of.Apart()) view.TakeResidues();
  const int64_t size = SizeOf(p.in), taps = view.Taps();
  columns = BestColumns(of.features);
  feature_tiles = int(CeilDiv(of.features, columns));
  steps = int(CeilDiv(of.channels, 16));
  const int line = steps == 1 ? 32 : steps == 2 ? 64 : 128;
  x_line = view.beside == 1 ? line : int(view.beside * p.channels * size);
  // Forward the filter's rows are channels, and else results.
  filter_line = !forward ? line : columns == 32 ? 64 : 128;
  slab_bytes = (forward ? 16 * steps : columns) * filter_line;
  taps_at_once =
      view.parts[1] == 1 && view.window[1] % kAtOnce == 0 && steps <= kMostStepsAtOnce && columns <= kMostColumnsAtOnce
          ? kAtOnce
          : 1;
  // As many taps as have room in a stage, or fewer that make all stages even. Merged ones are all there.
  const int64_t all = taps / taps_at_once, least = merged > 1 ? CeilDiv(all, kMostStages) : 1;
  const int64_t most = std::max<int64_t>(least, kStageBytes / slab_bytes / taps_at_once);
  stage_taps = int(CeilDiv(all, CeilDiv(all, most))) * taps_at_once;
  const int all_stages = int(CeilDiv(taps, stage_taps));
  cycles = HUGE_VAL;
  DirectPlan best = *this;
  for (int64_t parts = 1; parts <= view.y[1]; ++parts) {
    const int64_t of_width = CeilDiv(view.y[1], parts);
    if (of_width > kRows) continue;
    if (parts > 1 && of_width < kEight) break;
    FitShape(of_width);
    if (boxes > 1 && (height > 1 || view.Reach(0) > 0)) continue;
    if (Lines() > kMostBox) continue;
    units = p.batch * of.groups * feature_tiles * image_tiles * line_tiles * column_tiles;
    if (units >= INT32_MAX) continue;
    const double tap = std::max(steps * (kRows / 64) * Product(columns), kTap / taps_at_once);
    const double x_cycles =
        view.Parts() * images * Lines() * pitch * OperandLine(view.beside * of.channels * size, x_line);
    const double filter_row =
        FilterLine((forward ? std::min<int64_t>(of.features, columns) : of.channels) * size, filter_line);
    const double filter_cycles =
        double(all_stages) * stage_taps * (merged > 1 ? kMergedTap : (slab_bytes / filter_line) * filter_row);
    const double unit = kUnit + (view.PixelsLeft() > 0 ? kEnds : 0);
    for (int together = merged > 1      ? kMergedTogether
                        : columns == 32 ? kTogether<32>
                                        : kTogether<64>;
         together > 0; --together) {
      blocks = std::min<int64_t>(units, kMultiprocessors * together);
      const double waves = std::ceil(double(units) / kMultiprocessors), rounds = std::ceil(double(units) / blocks);
      for (x_stages = kMostOperands; x_stages > 0; --x_stages) {
        const auto fits = [&] { return together * (SharedBytes() + kReserved) <= kMostSharedBytes + kReserved; };
        // All of the filter, or else as much as there is room for.
        stages = all_stages;
        resident = all_stages <= kMostStages && fits();
        if (!resident)
          for (stages = kMostStages; stages > 1 && !fits();) --stages;
        if ((!resident && (stages < 2 || merged > 1)) || (x_stages > 1 && rounds == 1)) continue;
        // The fuller a multiprocessor, the less its blocks wait.
        const double time = kStart + waves * (taps * tap + x_cycles + unit * (together == 1 ? 2 : 1)) +
                            (resident ? double(blocks) / kMultiprocessors : waves) * filter_cycles +
                            (x_stages == 1 ? (rounds - 1) * kLoad : 0);
        if (time < best.cycles) {
          best = *this;
          best.cycles = time;
        }
      }
    }
  }
  *this = best;
  return cycles < HUGE_VAL;
}

bool DirectFilterPlan::FitShape(const Problem& p, bool by_lines, int64_t of_width, int64_t of_height) {
  const int64_t reach[] = {view.Reach(0), ranges > 1 && view.window[0] == 1 ? RangeReach() : view.Reach(1)};
  width = int(of_width);
  height = int(of_height);
  pitch = int(width + reach[1]);
  x_lines = int(height + reach[0]);
  images = 1;
  y_columns = by_lines ? width : pitch;
  y_lines = height;
  if (std::max({pitch, x_lines, y_columns}) > kMostBox) return false;
  if (by_lines) {
    runs = height;
    run_chunks = width / kTerms;
    x_run = pitch;
    y_run = width;
  } else {
    run_chunks = int(CeilDiv(height * pitch, kTerms * kAtOnce)) * kAtOnce;
    runs = 1;
    if (height == view.y[0]) {
      // As many images as make a piece of some length, with a line of zeros after each of y.
      const int64_t most = std::max<int64_t>(1, kMostPositions / (run_chunks * kTerms));
      for (images = int(std::min<int64_t>(most, view.images)); p.batch > 1 && view.images % images != 0;) --images;
      runs = images;
      if (images > 1) y_lines += int(CeilDiv(run_chunks * kTerms - height * pitch, pitch));
    }
    x_run = x_lines * pitch;
    y_run = y_lines * pitch;
  }
  x_rows = images * x_lines * pitch;
  y_rows = images * y_lines * y_columns;
  const int64_t last_tap = reach[0] * pitch + reach[1] + (neighbours - 1) * view.dilation[1];
  const auto more = [&](int run, int rows, int64_t beyond) {
    return int(std::max<int64_t>(0, (runs - 1) * run + run_chunks * kTerms + beyond - rows));
  };
  x_more = more(x_run, x_rows, last_tap);
  y_more = more(y_run, y_rows, 0);
  const auto bytes = [](int rows, int line) { return int(CeilDiv(rows * line, kSwizzleBytes)) * kSwizzleBytes; };
  x_bytes = bytes(x_rows + x_more, x_line);
  y_bytes = bytes(y_rows + y_more, y_line);
  stages = std::min(kMostStages, (DirectPlan::kMostSharedBytes - DirectPlan::kBarrierBytes) / (x_bytes + y_bytes));
  image_tiles = int(CeilDiv(view.images, images));
  line_tiles = int(CeilDiv(view.y[0], height));
  column_tiles = int(CeilDiv(view.y[1], width));
  pieces = int64_t{image_tiles} * line_tiles * column_tiles;
  return stages >= 2;
}

int64_t DirectFilterPlan::RangeReach() const {
  return (int64_t{kWarpgroups} * products * neighbours - 1) * view.dilation[1];
}

double DirectFilterPlan::PieceCycles() const {
  const double multiplied = double(runs) * (run_chunks * kWarpgroups * products * FilterProduct(columns) + kRunCycles);
  return std::max(multiplied, (x_rows * x_line + y_rows * y_line) / kCacheBytes) + kPieceCycles;
}

bool DirectFilterPlan::Fit(const Problem& p) {
  if (!view.Fit(p)) return false;
  // Sums of small groups are as many whether they are merged or not, and the more pieces the fewer groups.
  of = DirectGroups(p, DirectGroups::Mergeable(p));
  if (!TakesGroups(of)) return false;
  columns = BestColumns(of.features);
  feature_tiles = int(CeilDiv(of.features, columns));
  x_line = of.channels <= 16 ? 32 : of.channels <= 32 ? 64 : 128;
  y_line = columns == 32 ? 64 : 128;
  neighbours = 128 / x_line;
  line_products = int(CeilDiv(view.window[1], neighbours));
  const int64_t all = view.window[0] * line_products;
  products = int(std::min<int64_t>(kMostProducts, CeilDiv(all, kWarpgroups)));
  ranges = int(CeilDiv(all, kWarpgroups * products));
  range_columns = view.window[0] == 1 ? int(kWarpgroups * products * neighbours * view.dilation[1]) : 0;
  units = p.batch * of.groups * feature_tiles * ranges;
  double least = HUGE_VAL;
  DirectFilterPlan best = *this;
  const auto consider = [&](bool by_lines, int64_t of_width, int64_t of_height) {
    if (!FitShape(p, by_lines, of_width, of_height)) return;
    const double time = pieces * PieceCycles() * (stages > 2 ? 1 : 1.1);
    if (time >= least) return;
    least = time;
    best = *this;
  };
  for (int64_t parts = 1; parts <= view.y[0]; ++parts) {
    const int64_t of_height = CeilDiv(view.y[0], parts);
    consider(false, view.y[1], of_height);
    for (int64_t of_width = kTerms * kAtOnce; of_width <= kMostBox; of_width += kTerms * kAtOnce) {
      if (of_height * of_width <= 2 * kMostPositions) consider(true, of_width, of_height);
      if (of_width >= view.y[1]) break;
    }
    if (of_height == 1) break;
    while (CeilDiv(view.y[0], parts + 1) == of_height) ++parts;
  }
  *this = best;
  return least < HUGE_VAL;
}

bool TakesDirect(const Problem& problem) {
  const Problem p = AsForward(problem);
  if (SizeOf(p.in) != 2) return false;
  if (std::min({p.batch, p.images, p.channels, p.features, p.XPixels(), p.YPixels(), p.Taps()}) == 0) return false;
  if (double(p.batch) * p.images * std::max(p.XPixels(), p.YPixels()) * 4 >= INT32_MAX) return false;
  if (p.direction == Direction::kFilterGradient) return DirectFilterPlan().Fit(p);
  return DirectPlan().Fit(p, problem.direction == Direction::kForward);
}

double DirectCycles(const Problem& problem, int64_t splits) {
  // What x and y are moved in, with what is not hidden; and where the filter gradient reads features in parts of lines.
  constexpr double kMoves = 1.08, kOfParts = 1.25;
  const Problem p = AsForward(problem);
  const double pixels = double(std::min(p.XPixels(), p.YPixels() * p.Taps())) * p.channels + p.YPixels() * p.features;
  const double memory =
      kMoves * p.batch * p.images * p.groups * pixels * SizeOf(p.in) / (kMultiprocessors * kBytesPerCycle);
  if (problem.direction == Direction::kFilterGradient) {
    DirectFilterPlan plan;
    if (!plan.Fit(problem)) return HUGE_VAL;
    const double blocks = std::ceil(double(plan.units) * splits / kMultiprocessors);
    return std::max(blocks * (kFilterStart + CeilDiv(plan.pieces, splits) * plan.PieceCycles()),
                    memory * (plan.feature_tiles > 1 ? kOfParts : 1));
  }
  DirectPlan plan;
  if (!plan.Fit(p, problem.direction == Direction::kForward)) return HUGE_VAL;
  return std::max(plan.cycles, memory);
}

int64_t DirectPieces(const Problem& p) {
  DirectFilterPlan plan;
  return plan.Fit(p) ? plan.pieces : 0;
}

}  // namespace jaxdnn::conv
