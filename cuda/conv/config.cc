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

// Terms of the reduction that are worth a block; of runs, which keep every sum in a register, fewer are.
constexpr int64_t kMinSlice = 128, kMinSliceOfRuns = 32;

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

// What might compute a problem: a filter gradient in so many slices, others with so many blocks to a tile.
struct Candidate {
  const Problem& p;
  const TileShape& tile;
  bool hopper;
  int64_t slices = 1, cluster = 1;
  int edges = 0;
};

// Kernels that are planned alike.
struct Kernels {
  bool of_hopper;  // only
  bool exchange;   // whether SumSlices stores their filter gradients, also with x and y exchanged
  bool leave;      // sums of a single slice in the workspace too
  bool (*take)(const Candidate&);
  double (*cycles)(const Candidate&);
  // Of a filter gradient, those that slices share; without a function they share the terms of its sums.
  int64_t (*pieces)(const Problem&) = nullptr;
  // Bytes beside the slices'.
  int64_t (*workspace)(const Candidate&) = nullptr;
};

Strips StripsOf(const Problem& p) {
  Strips strips;
  strips.Fit(AsForward(p), FewPixels(AsForward(p)), 16);
  return strips;
}

double ProductCycles(const Candidate& c) { return GemmCycles(c.p, c.tile, c.slices, c.cluster); }

// By Unit.
constexpr Kernels kKernels[] = {
    {false, true, false, [](const Candidate& c) { return TakesSimt(c.p, c.tile); }, ProductCycles},
    {false, true, false, [](const Candidate& c) { return TakesMma(c.p, c.tile); }, ProductCycles},
    {true, true, false, [](const Candidate& c) { return TakesWgmma(c.p, c.tile); },
     [](const Candidate& c) { return WgmmaCycles(c.p, c.tile, c.cluster, c.edges); }, nullptr,
     [](const Candidate& c) { return TransposedBytes(c.p, c.tile); }},
    {false, false, false, [](const Candidate& c) { return TakesDepthwise(c.p); },
     [](const Candidate& c) { return DepthwiseCycles(c.p, c.slices, c.hopper); }},
    {false, true, false, [](const Candidate& c) { return TakesFewChannels(c.p, c.hopper); },
     [](const Candidate& c) { return FewChannelsCycles(AsForward(c.p), StripsOf(c.p), c.slices); },
     [](const Problem& p) { return StripsOf(p).Tiles(p); }},
    {false, true, false, [](const Candidate& c) { return TakesGrouped(c.p); },
     [](const Candidate& c) { return GroupedCycles(c.p, c.slices); }},
    {false, false, false, [](const Candidate& c) { return TakesFewFeatures(c.p); },
     [](const Candidate& c) { return FewFeaturesCycles(c.p); }},
    {true, false, true, [](const Candidate& c) { return TakesUnaligned(c.p); },
     [](const Candidate& c) { return UnalignedCycles(c.p, c.slices); }, UnalignedTiles,
     [](const Candidate& c) { return UnalignedWorkspace(c.p); }},
    {true, false, true, [](const Candidate& c) { return TakesPlanes(c.p); },
     [](const Candidate& c) { return PlanesCycles(c.p, c.slices); }, PlanesPieces},
    {true, false, true, [](const Candidate& c) { return TakesDirect(c.p); },
     [](const Candidate& c) { return DirectCycles(c.p, c.slices); }, DirectPieces},
};

// Few channels on Hopper. What addresses or an epilogue rule out is left to the kernels of any device, which must take
// the problem too.
constexpr Kernels kFilled = {true,
                             true,
                             true,
                             [](const Candidate& c) { return TakesFilled(c.p) && TakesFewChannels(c.p, c.hopper); },
                             [](const Candidate& c) { return FilledCycles(c.p, c.slices); },
                             FilledPieces};

// Few features on Hopper, likewise.
constexpr Kernels kFewOpen = {true, false, false, [](const Candidate& c) { return TakesFewOpen(c.p); },
                              [](const Candidate& c) { return FewOpenCycles(c.p); }};

constexpr Kernels kBytes = {
    false,
    false,
    false,
    [](const Candidate& c) { return TakesBytes(c.tile, c.p, c.hopper); },
    [](const Candidate& c) { return c.tile.unit == Unit::kWgmma ? BytesCycles(c.p, c.tile) : ProductCycles(c); },
    nullptr,
    [](const Candidate& c) { return c.tile.unit == Unit::kWgmma ? BytesWorkspace(c.p) : 0; }};

const Kernels& KernelsOf(const TileShape& t, const Problem& p) {
  if (IsByte(p.in)) return kBytes;
  return t.tile == Tile::kFewChannelsWgmma   ? kFilled
         : t.tile == Tile::kFewFeaturesWgmma ? kFewOpen
                                             : kKernels[static_cast<int>(t.unit)];
}

bool Takes(const TileShape& t, const Problem& p, bool hopper) {
  if (HasFrame(p) && (t.unit != Unit::kUnaligned || !FindsElements(p))) return false;
  const Kernels& kernels = KernelsOf(t, p);
  return (hopper || !kernels.of_hopper) && (kernels.exchange || !p.exchanged) && kernels.take({p, t, hopper});
}

constexpr int64_t kMostCluster = 8;

bool MayCluster(const Candidate& c) {
  if (!c.hopper) return false;
  if (c.tile.unit == Unit::kSimt) return MayShareFloats(c.p, c.tile, c.cluster);
  return c.tile.unit == Unit::kWgmma && !IsByte(c.p.in) && (c.cluster <= 4 || c.cluster == kMostCluster) &&
         MayShare(c.p, c.tile, c.cluster);
}

std::optional<Config> ChooseAsItIs(const Problem& p, bool hopper, std::string_view algorithm, int64_t workspace_limit,
                                   const Completion& complete) {
  // A tile that is named has its edges apart or not, as its name says.
  const size_t name = algorithm.size() - std::min(algorithm.size(), kEdgesSuffix.size());
  const bool apart = algorithm.substr(name) == kEdgesSuffix;
  if (apart) algorithm.remove_suffix(kEdgesSuffix.size());
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
    if (!wanted || !Takes(t, p, hopper) || (apart && t.unit != Unit::kWgmma)) continue;
    const int most_edges = t.unit == Unit::kWgmma && !IsByte(p.in) && (apart || algorithm != t.name) ? 1 << kRank : 1;
    if (t.unit == Unit::kWgmma && splittable) {
      for (int edges = apart; edges < most_edges; ++edges) {
        if (!MaySplitEdges(p, t, edges)) continue;
        if (std::optional<Config> config = PlanFilterWgmma(p, t, workspace_limit, edges)) {
          config->cycles += ReductionCycles(p, 1, result_bytes);
          consider(*config);
        }
      }
      continue;
    }
    const Kernels& kernels = KernelsOf(t, p);
    const int64_t beside = kernels.workspace != nullptr ? kernels.workspace({p, t, hopper}) : 0;
    const int64_t pieces = splittable && kernels.pieces != nullptr ? kernels.pieces(p) : 0;
    const int64_t least = t.tile == Tile::kSimtRuns ? kMinSliceOfRuns : kMinSlice;
    for (int64_t splits = 1; splits == 1 || (splittable && splits * least <= g.depth);
         splits += std::max<int64_t>(1, splits / 8)) {
      // As few as give the longest slice no more of whole pieces.
      const int64_t slices = pieces > 0 ? CeilDiv(pieces, CeilDiv(pieces, splits)) : splits;
      const bool partial = UsesWorkspace(p, slices) || (kernels.leave && splittable);
      const int64_t bytes = beside + (partial ? slices * result_bytes : 0);
      if (bytes > workspace_limit) break;
      if (splittable && CeilDiv(g.depth, slices) >= kIndexLimit) continue;  // a slice is indexed with 32 bits
      for (int64_t cluster = 1; cluster <= kMostCluster; ++cluster) {
        if (cluster > 1 && !MayCluster({p, t, hopper, slices, cluster})) continue;
        for (int edges = apart; edges < (cluster == 1 ? most_edges : 1); ++edges) {
          if (!MaySplitEdges(p, t, edges)) continue;
          const double product = kernels.cycles({p, t, hopper, slices, cluster, edges});
          Config config = {t.tile, slices, cluster, 0, bytes, product + ReductionCycles(p, slices, result_bytes)};
          config.edges = edges;
          config.unaligned = hopper && t.unit == Unit::kDepthwise && TakesUnalignedDepthwise(p);
          consider(config);
        }
      }
    }
  }
  if (!best || p.in != DType::kF32) return best;
  const TileShape& tile = kTiles[static_cast<int>(best->tile)];
  if (tile.unit == Unit::kSimt) best->floats = FloatBlocksOf(p, tile, best->splits, best->cluster);
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
