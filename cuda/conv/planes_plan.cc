#include "cuda/conv/planes_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

constexpr int kMostSharedBytes = 227 << 10, kBarrierBytes = 256, kSwizzleBytes = 1024;
constexpr int kMostBox = 256;
constexpr double kStart = 8000, kStep = 300, kLeast = 1400;  // cycles
constexpr double kOfGroup = 1.2;                       // times the cycles, where a group's channels fill a line in part
constexpr double kMemoryBytes = 18, kCacheBytes = 36;  // a cycle, per multiprocessor

constexpr int kTaps = PlanesPlan::kTaps;

// Cycles of a product with three planes' features: of 16, reading the positions takes longer than multiplying.
constexpr double Product(int features) { return features == 32 ? 49 : 28; }
constexpr double kPairProducts = 33 + 26;  // with two planes' features, 32 each, and with one's

// Cycles of a filter gradient's block, and of a piece of floats; bytes a cycle; and times a piece's cycles, of 16-bit
// floats, where lines are filled in part.
constexpr double kFilterStart = 24000, kFloatsPiece = 4200, kFilterBytes = 25, kPartOfLine = 1.6;

// Whether the window is 3x3x3, or 3x3 in two dimensions, and undilated from plane to plane.
bool IsOfPlanes(const Problem& p, bool* volume) {
  const bool flat = p.x[0] == 1 && p.y[0] == 1 && p.window[0] == 1 && p.pad[0] == 0;
  *volume = !flat;
  return p.window[1] == kTaps && p.window[2] == kTaps && (flat || p.window[0] == kTaps) &&
         p.rhs_dilation[flat ? 1 : 0] == 1;
}

}  // namespace

int PlanesPlan::SharedBytes(int stages) const { return filter_bytes + stages * stage_bytes + kBarrierBytes; }

int PlanesPlan::Stages() const {
  int stages = kMostStages;
  while (stages > 1 && SharedBytes(stages) > kMostSharedBytes) --stages;
  return stages;
}

bool PlanesPlan::Fit(const Problem& p) {
  if (!IsOfPlanes(p, &volume)) return false;
  const int along = volume ? 0 : 1;
  const int64_t size = SizeOf(p.in), channels = p.channels, result = SizeOf(p.out);
  const int64_t reach = (p.window[2] - 1) * p.rhs_dilation[2];
  const int64_t other_reach = volume ? (p.window[1] - 1) * p.rhs_dilation[1] : 0;
  const int64_t other = volume ? p.y[1] : p.images, images = volume ? p.images : 1;
  const int64_t plane_taps = volume ? kTaps * kTaps : kTaps;
  if (reach >= kMostBox || other_reach >= kMostBox) return false;
  const bool few = std::max(p.channels, p.features) <= 16;
  line_bytes = few ? int(16 * size) : channels * size <= 64 ? 64 : 128;
  parts = int(CeilDiv(channels * size, line_bytes));
  tile_features = few || (volume && parts > 1) ? 16 : 32;
  const int steps = parts * line_bytes / 32;
  feature_tiles = int(CeilDiv(p.features, tile_features));
  planes = int(p.y[along]);
  slab_bytes = tile_features * line_bytes;
  filter_bytes = int(plane_taps) * kTaps * parts * slab_bytes;
  const double products = kBlocks * double(plane_taps) * steps * Product(tile_features);
  // Lines of a group that end within sectors of memory are read and written with their neighbours', unless the cache
  // holds them all.
  const double all_lines = double(p.batch) * p.images * p.groups * (p.XPixels() + p.YPixels());
  const bool with_others = p.groups > 1 && channels * size % 32 != 0 && all_lines * channels * size > kCachedBytes;
  const double line_moved = with_others ? 2.4 : 1;
  const double lines_cost = p.groups > 1 && channels * size < line_bytes ? kOfGroup : 1;
  cycles = HUGE_VAL;
  PlanesPlan best = *this;
  for (int shape = 0; shape < 6; ++shape) {
    lines = shape >= 3;
    const int across = 1 << shape % 3;
    columns = (lines ? 64 : 8) * across;
    others = (lines ? 1 : 8) * kBlocks / across;
    box_columns = int(columns + reach);
    box_others = int(others + other_reach);
    if (box_columns > kMostBox || box_others > kMostBox) continue;
    const int bytes = box_columns * box_others * line_bytes;
    stage_bytes = int(CeilDiv(bytes, kSwizzleBytes)) * kSwizzleBytes;
    if (SharedBytes(2) > kMostSharedBytes) continue;
    column_tiles = int(CeilDiv(p.y[2], columns));
    other_tiles = int(CeilDiv(other, others));
    chains = p.batch * p.groups * feature_tiles * images * other_tiles * column_tiles;
    const double used_columns = double(p.y[2]) / column_tiles, used_others = double(other) / other_tiles;
    const double rows = used_columns * used_others;
    const double box = (used_columns + reach) * (used_others + other_reach) * channels * size;
    const double features = double(p.features) / feature_tiles;
    const double moved = line_moved * rows * (channels * size / feature_tiles + features * result) / kMemoryBytes;
    const double step = (std::max({products, moved, box / kCacheBytes, kLeast}) + parts * kStep) * lines_cost;
    const int64_t all = chains * planes;
    const int most = int(std::min<int64_t>(kMultiprocessors, all));
    for (int n = most; 3 * n > most; --n) {
      const int64_t each = CeilDiv(all, n);
      // Each begins with two planes more, at the beginning of a tile and in the middle.
      const bool whole = all % n == 0 && (each % planes == 0 || planes % each == 0);
      const double begun = whole ? CeilDiv(each, planes) : CeilDiv(each - 1, planes) + 1;
      const double time = kStart + (each + (kTaps - 1) * begun) * step + begun * filter_bytes / kCacheBytes;
      if (time < best.cycles) {
        best = *this;
        best.blocks = n;
        best.cycles = time;
      }
      if (whole && each <= planes) break;
    }
  }
  *this = best;
  return cycles < HUGE_VAL;
}

bool PlanesFilterPlan::Fit(const Problem& p) {
  if (!IsOfPlanes(p, &volume)) return false;
  stride = int(p.stride[2]);
  const bool dilated = p.rhs_dilation[1] > 1 || p.rhs_dilation[2] > 1;
  if (stride > 1 && (dilated || p.channels != kPairChannels || p.x[2] % stride != 0)) return false;
  const int64_t reach = (kTaps - 1) * p.rhs_dilation[2], size = SizeOf(p.in);
  const int64_t all_planes = p.y[volume ? 0 : 1], other = volume ? p.y[1] : p.images, images = volume ? p.images : 1;
  const bool floats = p.in == DType::kF32;
  if (reach >= kMostBox / 2) return false;
  side = !floats && std::max(p.channels, p.features) <= 16 ? 16 : 32;
  lines_apart = floats && volume ? kTaps : 1;
  units = p.batch * lines_apart * CeilDiv(p.channels, side) * CeilDiv(p.features, side);
  const int64_t lines = volume && !floats ? kTaps : 1, line_reach = (lines - 1) * p.rhs_dilation[1];
  // Of a plane: of 32 channels one warpgroup has as many products as lines, and the other half of those; of pairs both
  // as many, with two planes of y and with one.
  const int64_t steps = kPixels / 16, halves = side == 16 ? 0 : CeilDiv(lines, 2);
  const double products = steps * (stride == 1 ? (lines + halves) * Product(side) : 2 * lines * kPairProducts);
  double least = HUGE_VAL;
  PlanesFilterPlan best = *this;
  for (columns = 8; columns <= kPixels / 2; columns *= 2) {
    others = kPixels / columns;
    x_others = volume ? int(stride * (others - 1) + 1 + line_reach) : others;
    x_columns = int(stride == 1 ? columns + reach : columns + 1);
    if (x_others > kMostBox) continue;
    column_tiles = int(CeilDiv(p.y[2], columns));
    other_tiles = int(CeilDiv(other, others));
    for (planes = floats ? kFloatPlanes : 1; planes <= (floats ? kFloatPlanes : kMostPlanes); ++planes) {
      x_planes = stride * planes + (floats ? kTaps - 1 : 0);
      y_planes = planes + (floats ? 0 : kTaps - stride);
      plane_tiles = int(floats ? CeilDiv(all_planes, planes) : CeilDiv(stride * (all_planes - 1) + kTaps, x_planes));
      pieces = images * other_tiles * column_tiles * plane_tiles;
      const int64_t box = x_columns * x_others * x_planes * stride;  // pixels
      y_bytes = int(y_planes * kPixels * side * size);
      x_bytes = int(CeilDiv(box * side * size, kSwizzleBytes)) * kSwizzleBytes;
      // Two pieces; of floats a copy of each one's y too, which itself is there once.
      if (2 * (x_bytes + y_bytes) + (floats ? y_bytes : 0) > kMostSharedBytes - kBarrierBytes) continue;
      const double bytes = (std::min<int64_t>(p.channels, side) * box + y_planes * kPixels * side) * size;
      piece = std::max(floats ? kFloatsPiece : planes * products, bytes / kFilterBytes);
      if (!floats && (p.channels % side != 0 || p.features % side != 0)) piece *= kPartOfLine;
      const double time = std::ceil(double(units) * pieces / kMultiprocessors) * piece;
      if (time < least) {
        least = time;
        best = *this;
      }
    }
  }
  *this = best;
  return least < HUGE_VAL;
}

Problem DealLines(const Problem& problem, int64_t* apart) {
  Problem p = problem;
  const int64_t d = p.rhs_dilation[1];
  *apart = 1;
  if (d == 1 || p.direction == Direction::kFilterGradient || p.batch * p.groups > 1 || p.window[0] > 1 || p.x[0] > 1 ||
      p.y[0] > 1 || p.x[1] % d != 0 || p.y[1] % d != 0 || p.pad[1] % d != 0)
    return p;
  *apart = d;
  p.batch = p.images;
  p.images = d;
  p.x[1] /= d;
  p.y[1] /= d;
  p.pad[1] /= d;
  p.rhs_dilation[1] = 1;
  return p;
}

bool TakesPlanes(const Problem& problem) {
  int64_t apart;
  const Problem p = DealLines(AsForward(problem), &apart);
  const bool filter = p.direction == Direction::kFilterGradient, floats = p.in == DType::kF32;
  // Groups, or problems of a batch, take the place of a volume's images.
  if (p.groups > 1 && (filter || p.batch > 1 || p.x[0] > 1 || p.y[0] > 1 || p.window[0] > 1)) return false;
  if (floats ? p.products != 1 : SizeOf(p.in) != 2) return false;
  if (std::any_of(p.lhs_dilation, p.lhs_dilation + kRank, [](int64_t n) { return n != 1; })) return false;
  const auto all_are = [&](int64_t stride) {  // but that of an image's one plane
    return p.stride[0] == (p.window[0] == 1 ? 1 : stride) && p.stride[1] == stride && p.stride[2] == stride;
  };
  if (!all_are(1) && !(filter && !floats && all_are(2))) return false;
  // The TMA unit reads lines of whole 16 bytes.
  constexpr int kMostChannels = 64, kMostFeatures = 128;
  const int64_t chunk = 16 / SizeOf(p.in);
  if (p.channels % chunk != 0 || p.features % chunk != 0 || p.channels > kMostChannels || p.features > kMostFeatures)
    return false;
  if (std::min({p.batch, p.images, p.channels, p.features, p.XPixels(), p.YPixels(), p.Taps()}) == 0) return false;
  if (double(p.batch) * p.images * std::max(p.XPixels(), p.YPixels()) * 4 >= INT32_MAX) return false;
  return filter ? PlanesFilterPlan().Fit(p) : PlanesPlan().Fit(p);
}

double PlanesCycles(const Problem& problem, int64_t splits) {
  int64_t apart;
  const Problem p = DealLines(AsForward(problem), &apart);
  if (p.direction == Direction::kFilterGradient) {
    PlanesFilterPlan plan;
    if (!plan.Fit(p)) return HUGE_VAL;
    const double blocks = std::ceil(double(plan.units) * splits / kMultiprocessors);
    return blocks * (kFilterStart + CeilDiv(plan.pieces, splits) * plan.piece);
  }
  PlanesPlan plan;
  return plan.Fit(p) ? plan.cycles : HUGE_VAL;
}

int64_t PlanesPieces(const Problem& p) {
  PlanesFilterPlan plan;
  return plan.Fit(p) ? plan.pieces : 0;
}

}  // namespace jaxdnn::conv
