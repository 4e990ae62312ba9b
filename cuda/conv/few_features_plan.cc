#include "cuda/conv/few_features_plan.h"

#include <algorithm>
#include <cmath>

namespace jaxdnn::conv {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t FloorDiv(int64_t a, int64_t b) { return (a - (a % b + b) % b) / b; }

FewAxis AxisOf(const Problem& p, int d) {
  FewAxis axis = {p.lhs_dilation[d], CeilDiv(p.window[d], p.lhs_dilation[d]), p.window[d] - 1 - p.pad[d]};
  axis.first_cell = FloorDiv(axis.before, axis.stride);
  axis.cells = FloorDiv(axis.before + p.y[d] - 1, axis.stride) - axis.first_cell + 1;
  return axis;
}

}  // namespace

FewFeaturesPlan::FewFeaturesPlan(const Problem& p) : lines(AxisOf(p, 1)), columns(AxisOf(p, 2)) {
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
  tiles = CeilDiv(p.images * Places() - columns.reach + 1, std::max<int64_t>(cells, 1));
}

bool TakesFewFeatures(const Problem& problem) {
  const Problem p = AsForward(problem);
  if (p.direction != Direction::kForward || p.groups != 1 || (p.in == DType::kF32 && p.products != 1)) return false;
  const int64_t size = SizeOf(p.in);
  for (int d = 0; d < kRank; ++d)
    if (p.stride[d] != 1 || (p.rhs_dilation[d] != 1 && p.window[d] > 1)) return false;
  const double pixels = double(p.batch) * p.images * std::max(p.XPixels(), p.YPixels());
  if (size > 4 || p.x[0] != 1 || p.y[0] != 1 || p.window[0] != 1 || p.pad[0] != 0 || p.window[1] > kFewMostLines ||
      p.features < 1 || p.features > kFewMostFeatures || p.window[2] * p.features > 8 * kFewMostParts ||
      p.channels < 8 || p.channels * size % 16 != 0 || p.Taps() < 1 || pixels < 1)
    return false;
  const FewFeaturesPlan plan(p);
  return plan.SharedBytes(p) <= kFewMostBytes &&
         // The kernels count results, places of columns, lines of all tiles, and 16 bytes of the operand with 31 bits.
         pixels * kFewMostFeatures < INT32_MAX && double(p.images) * plan.Places() < INT32_MAX - 4 * kFewPixels &&
         double(plan.tiles) * plan.lines.cells < INT32_MAX && pixels * p.channels / 4 < INT32_MAX;
}

double FewFeaturesCycles(const Problem& problem) {
  constexpr double kMultiprocessors = 132, kBytesPerCycle = 18, kStart = 6000, kShare = 0.8, kLine = 120;
  const Problem p = AsForward(problem);
  const double images = double(p.batch) * p.images, size = SizeOf(p.in);
  const double bytes = images * (p.XPixels() * p.channels * size + p.YPixels() * p.features * SizeOf(p.out));
  return kStart + bytes / (kShare * kBytesPerCycle) / kMultiprocessors + 0 * kLine;
}

}  // namespace jaxdnn::conv
