// Problem -> Config. Pure host code: no device is asked, nothing is timed.
#include <algorithm>
#include <cstdlib>

#include "cuda/common/int_div.h"
#include "cuda/conv/bytes_plan.h"
#include "cuda/conv/depthwise_plan.h"
#include "cuda/conv/direct_plan.h"
#include "cuda/conv/few_features_plan.h"
#include "cuda/conv/filled_plan.h"
#include "cuda/conv/frame.h"
#include "cuda/conv/gemm_plan.h"
#include "cuda/conv/grouped_plan.h"
#include "cuda/conv/nominal.h"
#include "cuda/conv/planes_plan.h"
#include "cuda/conv/strips.h"
#include "cuda/conv/unaligned_plan.h"
#include "cuda/conv/wgmma_plan.h"

namespace jaxdnn::conv {
namespace {

constexpr int64_t kMinSlice = 128;  // terms of the reduction that are worth a block

double ReductionCycles(const Problem& p, int64_t splits, int64_t result_bytes) {
  if (!UsesWorkspace(p, splits)) return 0;
  const double scattered = p.exchanged ? 10.0 * result_bytes : 0;  // their places are far apart
  return kLaunchCycles + (2.0 * splits * result_bytes + scattered) / (kMultiprocessors * kBytesPerCycle);
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

// The kernels on the CUDA cores take anything.
bool Takes(const TileShape& t, const Problem& p, bool hopper) {
  if (HasFrame(p) && (t.unit != Unit::kUnaligned || !FindsElements(p))) return false;
  if (IsByte(p.in)) return TakesBytes(t, p, hopper);
  if (p.exchanged && !StoresExchanged(t.unit)) return false;
  if (t.unit == Unit::kSimt) return true;
  if (t.tile == Tile::kFewChannelsWgmma) return hopper && TakesFilled(p) && TakesFewChannels(p, hopper);
  if (t.unit == Unit::kFewChannels) return TakesFewChannels(p, hopper);
  if (t.unit == Unit::kGrouped) return TakesGrouped(p);
  if (t.unit == Unit::kFewFeatures) return TakesFewFeatures(p);
  if (t.unit == Unit::kUnaligned) return hopper && TakesUnaligned(p);
  if (t.unit == Unit::kPlanes) return hopper && TakesPlanes(p);
  if (t.unit == Unit::kDirect) return hopper && TakesDirect(p);
  if (t.unit == Unit::kWgmma) return hopper && TakesWgmma(p, t);
  if (t.unit == Unit::kDepthwise) return TakesDepthwise(p);
  return TakesMma(p, t);
}

std::optional<Config> ChooseAsItIs(const Problem& p, bool hopper, std::string_view algorithm, int64_t workspace_limit,
                                   const Completion& complete) {
  const bool widened = p.out == DType::kF32 && (p.in == DType::kF16 || p.in == DType::kBF16);
  const bool floats = p.out == DType::kF32 || p.out == DType::kF16 || p.out == DType::kBF16;
  const bool known = IsByte(p.in) ? floats || (p.in == DType::kS8 && p.out == DType::kS32)
                                  : (p.in == p.out && p.in != DType::kS32) || widened;
  if (!known || !Indexable(p)) return std::nullopt;
  const Gemm g = GemmOf(p);
  const int64_t result_bytes = p.FilterSize() * (p.in == DType::kF64 ? 8 : 4);
  const bool splittable = p.direction == Direction::kFilterGradient;
  std::optional<Config> best;
  const auto consider = [&](const Config& product) {
    const Config config = complete(product);
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
                            : t.unit == Unit::kDirect           ? DirectPieces(p)
                                                                : 0;
      const int64_t slices = tiles > 0 ? CeilDiv(tiles, CeilDiv(tiles, splits)) : splits;
      // Hopper's kernels of their own have partial sums of a single slice too.
      const bool always = t.tile == Tile::kFewChannelsWgmma || t.unit == Unit::kUnaligned || t.unit == Unit::kPlanes ||
                          t.unit == Unit::kDirect;
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
        const double product = t.unit == Unit::kDepthwise          ? DepthwiseCycles(p, slices, hopper)
                               : t.tile == Tile::kFewChannelsWgmma ? FilledCycles(p, slices)
                               : t.unit == Unit::kFewChannels      ? FewChannelsCycles(AsForward(p), strips, slices)
                               : t.unit == Unit::kGrouped          ? GroupedCycles(p, slices)
                               : t.unit == Unit::kFewFeatures      ? FewFeaturesCycles(p)
                               : t.unit == Unit::kUnaligned        ? UnalignedCycles(p, slices)
                               : t.unit == Unit::kPlanes           ? PlanesCycles(p, slices)
                               : t.unit == Unit::kDirect           ? DirectCycles(p, slices)
                               : t.unit == Unit::kWgmma
                                   ? (IsByte(p.in) ? BytesCycles(p, t) : WgmmaCycles(p, t, cluster))
                                   : GemmCycles(p, t, slices);
        const double cycles = product + ReductionCycles(p, slices, result_bytes);
        Config config = {t.tile, slices, cluster, 0, bytes, cycles};
        config.unaligned = hopper && t.unit == Unit::kDepthwise && TakesUnalignedDepthwise(p);
        consider(config);
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

std::optional<Config> ChooseCompleted(const Problem& p, bool hopper, std::string_view algorithm,
                                      int64_t workspace_limit, const Completion& complete) {
  const std::optional<Config> best = ChooseAsItIs(p, hopper, algorithm, workspace_limit, complete);
  if (!IsWorthExchanging(p)) return best;
  const auto exchange = [&](Config config) {
    config.exchanged = true;
    return complete(config);
  };
  const std::optional<Config> other = ChooseAsItIs(Exchanged(p), hopper, algorithm, workspace_limit, exchange);
  return !other || (best && best->cycles <= other->cycles) ? best : other;
}

std::optional<Config> Choose(const Problem& p, bool hopper, std::string_view algorithm, int64_t workspace_limit) {
  const auto as_it_is = [](const Config& config) { return config; };
  if (!HasFrame(p)) return ChooseCompleted(p, hopper, algorithm, workspace_limit, as_it_is);
  std::optional<Config> best = ChooseAsItIs(p, hopper, algorithm, workspace_limit, as_it_is);
  const std::optional<Config> framed = ChooseWithFrame(p, hopper, algorithm, workspace_limit);
  if (best) best->patched = true;
  return best && (!framed || best->cycles <= framed->cycles) ? best : framed;
}

}  // namespace jaxdnn::conv
