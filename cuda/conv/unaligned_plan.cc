#include "cuda/conv/unaligned_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

constexpr int kMostSharedBytes = 227 << 10;

// How far apart lines (or planes) are, so that what a window reads past one is zeros of the next, or there anyway.
int64_t Pitch(const Problem& p, int d) {
  const int64_t needed = p.y[d] + (p.window[d] - 1) * p.rhs_dilation[d];
  if (p.mode[d] != PadMode::kZeros) return needed;
  return std::max({p.y[d], needed - std::max<int64_t>(p.pad[d], 0), std::min(p.pad[d] + p.x[d], needed)});
}

double AllRows(const Problem& p) { return double(p.images) * std::max(p.x[0], p.y[0]) * Pitch(p, 1) * Pitch(p, 2); }

}  // namespace

UnalignedRows::UnalignedRows(const Problem& p) : line(int(Pitch(p, 2))), lines(int(Pitch(p, 1))) {}

Problem UnalignedPart(const Problem& p) {
  constexpr int64_t kMostBytes = int64_t{128} << 20;
  const UnalignedFilterPlan plan(p);
  const double image =
      (double(p.x[0]) * plan.ChunksOf(p.channels) + double(p.y[0]) * plan.ChunksOf(p.features)) * plan.Rows(1) * 16;
  Problem part = p;
  if (p.images * image > kMostBytes)
    part.images = std::min(p.images, std::max<int64_t>(1, int64_t(kMostBytes / image)));
  return part;
}

int UnalignedPlan::SharedBytes() const {
  constexpr int kBarriers = (2 + kMostSlabs) * 16;
  return 2 * StripBytes() + slabs * SlabBytes() + 2 * pixels * 4 + kBarriers;
}

bool UnalignedPlan::Fit(const Problem& p) {
  const int size = SizeOf(p.in);
  const int64_t pitch = Pitch(p, 2), plane = Pitch(p, 1), most = INT32_MAX / 4;
  const int64_t reach = (p.window[2] - 1) * p.rhs_dilation[2], line_step = p.rhs_dilation[1] * pitch;
  if (AllRows(p) > most || double(p.window[1]) * line_step + reach > most) return false;
  line = int(pitch);
  lines = int(plane);
  all_rows = p.images * p.y[0] * plane * pitch;
  const int64_t all_steps = CeilDiv(p.channels * size, kStepBytes);
  column_tiles = int(CeilDiv(p.features, kColumns));
  columns = int(CeilDiv(p.features, column_tiles));
  const auto take = [&](int64_t of_lines, int64_t of_steps, int64_t of_slabs) {
    const int64_t all = (kRows + reach + (of_lines - 1) * line_step) | 1;
    if (all > (1 << 14)) return false;
    tap_lines = int(of_lines);
    groups = int(p.window[0] * p.window[1] / of_lines);
    steps = int(of_steps);
    slices = int(CeilDiv(all_steps, of_steps));
    pixels = int(all);
    slabs = int(of_slabs);
    return SharedBytes() <= kMostSharedBytes;
  };
  constexpr int kLeastSlabs = 3;
  // All of the window's lines in a strip are loaded once, but with as many lines more.
  const bool together = kRows + reach > line_step;
  const auto fits = [&](int64_t of_lines) {
    // Slices are equally long. Those of the fewest steps in all, or of a little more.
    double best = 0;
    int64_t of_steps = 0;
    for (int64_t n = 1; n <= std::min<int64_t>(kMostSteps, all_steps); ++n) {
      const double cost = CeilDiv(all_steps, n) * (n + 0.3);
      if (take(of_lines, n, kLeastSlabs) && (best == 0 || cost < best)) best = cost, of_steps = n;
    }
    if (best == 0) return false;
    int of_slabs = kMostSlabs;
    while (!take(of_lines, of_steps, of_slabs)) --of_slabs;
    return true;
  };
  return (together && fits(p.window[1])) || fits(1);
}

bool UnalignedStreamPlan::Fit(const Problem& p) {
  if (UnalignedPlan general; !general.Fit(p)) return false;
  const UnalignedRows rows(p);
  const int64_t bytes = p.channels * SizeOf(p.in), most = UnalignedPlan::kMostSteps * UnalignedPlan::kStepBytes;
  const int64_t beyond = (p.window[1] - 1) * p.rhs_dilation[1] * rows.line + (p.window[2] - 1) * p.rhs_dilation[2];
  if (p.window[0] != 1 || bytes > most || p.features > UnalignedPlan::kColumns || p.Taps() >= 1024) return false;
  if (beyond > kMostSlots * kUnit) return false;
  // Neighbouring rows must be neighbouring pixels, with nothing cut off between them.
  if (p.x[0] != p.y[0] || p.pad[0] != 0) return false;
  for (int d = 1; d < kRank; ++d)
    if (p.pad[d] < 0 || p.pad[d] + p.x[d] > Pitch(p, d)) return false;
  all_rows = rows.Rows(p.images * p.y[0]);
  row_bytes = int(bytes);
  steps = int(CeilDiv(bytes, int64_t{UnalignedPlan::kStepBytes}));
  taps = int(p.Taps());
  ahead = int(CeilDiv(kUnit + beyond, kUnit));
  // So many units at once read one piece more each; others are on their way meanwhile.
  constexpr int kLeast = kWarpgroups, kMost = kWarpgroups + 2;
  for (slots = std::min(ahead + kMost, kMostSlots); slots >= ahead + kLeast; --slots)
    if (SharedBytes() <= kMostSharedBytes) return true;
  return false;
}

UnalignedFilterPlan::UnalignedFilterPlan(const Problem& p) : UnalignedRows(p) {
  constexpr int kColumns = UnalignedPlan::kColumns, kMostAppended = 2;
  all_rows = Rows(p.images * p.y[0]);
  column_tiles = int(CeilDiv(p.features, kColumns));
  columns = int(CeilDiv(CeilDiv(p.features, column_tiles), 8) * 8);
  const int64_t eights = CeilDiv(p.channels, 8), width = p.window[2];
  whole_groups = int(eights / 8);
  left = int(eights % 8);
  left_units = int(left * CeilDiv(width, 8));
  appended = whole_groups > 0 && left > 0 && left <= kMostAppended && left_units < width;
  channel_groups = whole_groups + (left > 0 && !appended);
  const int64_t most = whole_groups > 0 ? width + (appended ? left_units : 0) : std::min<int64_t>(width, left_units);
  unit_groups = int(CeilDiv(most, kUnits));
  pixels = int(kRows + (width - 1) * p.rhs_dilation[2]);
  stages = std::min(kMostStages, (kMostSharedBytes - kBarrierBytes) / StageBytes(pixels));
}

int UnalignedFloatsPlan::SharedBytes() const {
  constexpr int kBarriers = 64;  // and what a block knows is not among these bytes
  // At the end the sums of all parts but the first.
  const int sums = (kWarps - kWarps / parts) * kWarpRows * UnalignedPlan::kColumns * 4;
  return std::max(2 * StageBytes(), sums) + 2 * (pixels + tile_rows) * 8 + kBarriers;
}

bool UnalignedFloatsPlan::Fit(const Problem& p) {
  constexpr int kColumns = UnalignedPlan::kColumns, kMostTileRows = 2 * kUnit;
  const int64_t reach = (p.window[2] - 1) * p.rhs_dilation[2], line_step = p.rhs_dilation[1] * line;
  if (AllRows(p) > INT32_MAX / 4 || double(p.window[1]) * line_step + reach > INT32_MAX / 4) return false;
  cycles = 0;
  UnalignedFloatsPlan best = *this;
  all_rows = Rows(p.images * p.y[0]);
  column_tiles = int(CeilDiv(p.features, kColumns - Shifts(p.features)));
  columns = int(CeilDiv(p.features, column_tiles));
  if (Shifts(p.features) == 0) columns = (columns + 3) / 4 * 4;
  for (const int64_t of_lines : {p.window[1], int64_t{1}}) {
    const int64_t taps = of_lines * p.window[2], beyond = (of_lines - 1) * line_step + reach;
    const int64_t most = kWarps * kWarpRows / taps;
    if (most == 0 || beyond > 4096) continue;
    const int64_t fewest = CeilDiv(p.channels, most);
    for (int64_t n = fewest; n <= std::min(fewest + 8, p.channels); ++n) {
      tap_lines = int(of_lines);
      channels = int(CeilDiv(p.channels, n));
      if (Shifts(p.channels) == 0) channels = (channels + 3) / 4 * 4;
      if (taps * channels > kWarps * kWarpRows) continue;
      slices = int(CeilDiv(p.channels, channels));
      parts = 1;
      while (parts < kWarps && taps * channels * 2 * parts <= kWarps * kWarpRows) parts *= 2;
      pitch = (channels + Shifts(p.channels) + 7) / 16 * 16 + 8;
      for (tile_rows = kMostTileRows; tile_rows > 0; tile_rows -= kUnit) {
        pixels = int(tile_rows + beyond);
        if (SharedBytes() + 512 <= kMostSharedBytes) break;
      }
      if (tile_rows == 0) continue;
      // Products of a row's terms, and copies of elements, which hardly overlap. Fitted to an H200.
      constexpr double kProducts = 80, kCopy = 0.45;
      const double copies = double(pixels) / tile_rows * channels + columns;
      cycles = double(BlocksOfSlice(p)) * (kProducts / parts + kCopy * copies);
      if (best.cycles == 0 || cycles < best.cycles) best = *this;
    }
  }
  *this = best;
  return cycles > 0;
}

int64_t UnalignedFilterPlan::XPackedBytes(const Problem& p) const {
  return PackedBytes(p.images * p.x[0], ChunksOf(p.channels), pixels);
}

int64_t UnalignedFilterPlan::YPackedBytes(const Problem& p) const {
  return PackedBytes(p.images * p.y[0], ChunksOf(p.features), kRows);
}

int64_t UnalignedTiles(const Problem& p) {
  if (p.in != DType::kF32) return UnalignedFilterPlan(p).Tiles();
  UnalignedFloatsPlan plan(p);
  return plan.Fit(p) ? plan.Tiles() : 0;
}

int64_t UnalignedWorkspace(const Problem& problem) {
  if (problem.direction == Direction::kFilterGradient) {
    const Problem p = UnalignedPart(problem);
    const UnalignedFilterPlan plan(p);
    return p.in == DType::kF32 ? 0 : plan.XPackedBytes(p) + plan.YPackedBytes(p) + 12;  // behind sums, on 16 bytes
  }
  const Problem p = AsForward(problem);
  if (UnalignedStreamPlan stream; stream.Fit(p)) return stream.FilterBytes(p);
  UnalignedPlan plan;
  return plan.Fit(p) ? plan.FilterBytes(p) : 0;
}

bool TakesUnaligned(const Problem& problem) {
  const Problem p = AsForward(problem);
  const bool filter = p.direction == Direction::kFilterGradient;
  if (p.groups != 1 || p.batch != 1) return false;
  if (p.in == DType::kF64 || (p.in == DType::kF32 && p.products != 1)) return false;
  for (int d = 0; d < kRank; ++d)
    if (p.stride[d] != 1 || p.lhs_dilation[d] != 1) return false;
  // What is aligned, the kernels that read through the TMA unit take, and faster.
  const int64_t chunk = 16 / SizeOf(p.in);
  if (p.channels % chunk == 0 && p.features % chunk == 0) return false;
  if (std::min({p.images, p.channels, p.features, p.XPixels(), p.YPixels(), p.Taps()}) == 0) return false;
  if (p.images * std::max(p.XPixels(), p.YPixels()) >= INT32_MAX / 4) return false;
  UnalignedPlan plan;
  if (!filter) return plan.Fit(p);
  UnalignedFloatsPlan floats(p);
  if (p.in == DType::kF32) return floats.Fit(p);
  constexpr int64_t kMostReach = 300;  // for shared memory
  return AllRows(p) < INT32_MAX / 4 && (p.window[2] - 1) * p.rhs_dilation[2] < kMostReach;
}

// Fitted to an H200. A kernel that packs its operands comes first; a tile takes as long as its products, or as what it
// brings and stores; and the filter gradient's, as what it brings.
double UnalignedCycles(const Problem& problem, int64_t splits) {
  constexpr double kStart = 10000, kLeastShared = 8500;
  constexpr double kPair = 7, kFilterStart = 6000, kFilterTile = 2400;
  const Problem p = AsForward(problem);
  if (p.direction == Direction::kFilterGradient && p.in == DType::kF32) {
    constexpr double kFloatsStart = 12000;
    UnalignedFloatsPlan plan(p);
    if (!plan.Fit(p)) return HUGE_VAL;
    const double blocks = double(plan.BlocksOfSlice(p)), rows = CeilDiv(plan.Tiles(), splits) * plan.kUnit;
    return std::ceil(blocks * splits / kMultiprocessors) * (kFloatsStart + rows * plan.cycles / blocks);
  }
  if (p.direction == Direction::kFilterGradient) {
    constexpr double kLaunch = 5000;  // of the kernel that packs
    // Parts follow one another, with slices of their own.
    const Problem part = UnalignedPart(p);
    const int64_t parts = CeilDiv(p.images, part.images), of_part = splits / parts;
    if (of_part == 0) return HUGE_VAL;
    const UnalignedFilterPlan plan(p), each(part);
    const double blocks = double(plan.BlocksOfSlice(p)) * of_part;
    const double elements = p.images * (double(p.XPixels()) * p.channels + double(p.YPixels()) * p.features);
    const double bytes = elements * SizeOf(p.in) + double(plan.XPackedBytes(p)) + double(plan.YPackedBytes(p));
    return bytes / (kMultiprocessors * kBytesPerCycle) +
           parts * (kLaunch + std::ceil(blocks / kMultiprocessors) *
                                  (kFilterStart + CeilDiv(each.Tiles(), of_part) * kFilterTile));
  }
  UnalignedPlan plan;
  if (!plan.Fit(p)) return HUGE_VAL;
  if (UnalignedStreamPlan stream; stream.Fit(p)) {
    constexpr double kStreamStart = 10400, kUnitProduct = 67, kLeastUnit = 1480;  // fitted to an H100
    const double units = double(CeilDiv(stream.Units(), kMultiprocessors));
    return kStreamStart + units * std::max(kLeastUnit, double(stream.taps) * stream.steps * kUnitProduct);
  }
  // A slab of few steps is waited for.
  constexpr double kLeastSlab = 745;
  const double slab_step = p.in == DType::kF32 ? 340 : 300, slabs = double(p.Taps()) * plan.slices;
  const double pairs = double(plan.groups) * plan.slices * plan.steps * plan.pixels;
  const double tile = std::max({kLeastShared, slabs * std::max(kLeastSlab, plan.steps * slab_step), pairs * kPair});
  return kStart + double(CeilDiv(plan.Tiles(), kMultiprocessors)) * tile;
}

}  // namespace jaxdnn::conv
