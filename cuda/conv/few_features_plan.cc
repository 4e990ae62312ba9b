#include "cuda/conv/few_features_plan.h"

#include <algorithm>
#include <cmath>

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

}  // namespace jaxdnn::conv
