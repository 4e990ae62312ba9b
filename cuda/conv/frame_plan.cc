// Which problems have a frame, and how it is shared out.
#include <algorithm>
#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/depthwise_plan.h"
#include "cuda/conv/frame.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

int64_t Size(const Range& r) { return std::max<int64_t>(0, r.last - r.first + 1); }

// Results of an image that are not the frame's.
int64_t Interior(const Problem& p) {
  int64_t pixels = 1;
  for (int d = 0; d < kRank; ++d) {
    const Reach reach = ReachOf(p, d);
    int64_t inside = p.y[d] - CeilDiv(reach.low, p.stride[d]) - CeilDiv(reach.high, p.stride[d]);
    if (p.direction == Direction::kDataGradient) {
      const AliasedElements of = AliasedBy(p, d);
      const Range both = {std::max(of.low.first, of.high.first), std::min(of.low.last, of.high.last)};
      inside = p.x[d] - Size(of.low) - Size(of.high) + Size(both);
    }
    pixels *= std::max<int64_t>(0, inside);
  }
  return pixels;
}

// Whether the kernels take the frame: floats of 16 bits and more, no dilated input, and no reach further than there are
// elements.
bool TakesFrame(const Problem& p) {
  if (IsByte(p.in)) return false;
  // The kernels have the frame's pixels of an image, in tiles, in an int.
  constexpr int64_t kMost = int64_t{1} << 30;
  for (int d = 0; d < kRank; ++d) {
    const Reach reach = ReachOf(p, d);
    const int64_t most = p.mode[d] == PadMode::kReflect    ? p.x[d] - 1
                         : p.mode[d] == PadMode::kCircular ? p.x[d]
                         : p.x[d] > 0                      ? kMost
                                                           : 0;
    if (std::max(reach.low, reach.high) > most || p.lhs_dilation[d] != 1) return false;
  }
  return p.images * std::max(p.XPixels(), p.YPixels()) < kMost;
}

// Whether the kernel can do all of the problem: of depthwise convolution, and Hopper's; but those that have no
// registers left for it, or, in the filter gradient of floats, no warps; and with the edges apart taps are missing
// there.
bool TakesPatches(const Problem& p, const Config& config) {
  const Tile tile = config.tile;
  const bool floats = p.in == DType::kF32, forward = p.direction == Direction::kForward;
  if (tile == Tile::kDepthwise) return RingsHaveEdges(p) && FindsElements(p);
  if (kTiles[static_cast<int>(tile)].unit != Unit::kWgmma || p.batch > 1 || config.edges != 0) return false;
  if (p.direction == Direction::kFilterGradient) {
    if (floats || config.exchanged) return false;
  } else if (IsOfPairs(tile) || tile == Tile::kWgmma256x160 || tile == Tile::kWgmma128x256 ||
             (forward && tile == (floats ? Tile::kWgmma128x128 : Tile::kWgmma128x160))) {
    return false;
  }
  return FindsElements(p);
}

// What patches cost in all: of those that a multiprocessor makes, each. Fitted to an H200, as the next. Where lines are
// brought pixel by pixel anyway they are free.
double PatchCycles(const Problem& p, const Config& config) {
  if (config.tile == Tile::kDepthwise) return 0;
  constexpr double kBegin = 1000, kEach = 70, kLookup = 1300;
  const bool filter = p.direction == Direction::kFilterGradient;
  const Gemm g = GemmOf(p);
  const TileShape& t = kTiles[static_cast<int>(config.tile)];
  // The share of windows' taps that meet an element as they are: in the last dimension, and in the others, beyond whose
  // edges pixels side by side are loaded together.
  double within = 1, within_others = 1;
  for (int d = 0; d < kRank; ++d) {
    const auto beyond = [&](int64_t reach) {
      const int64_t windows = CeilDiv(reach, p.stride[d]);
      return windows * (reach + p.stride[d]) / (2.0 * p.rhs_dilation[d]);
    };
    const Reach reach = ReachOf(p, d);
    const double taps = double(p.window[d]) * p.y[d];
    (d == kRank - 1 ? within : within_others) *=
        1 - std::min(1.0, (beyond(reach.low) + beyond(reach.high)) / std::max(1.0, taps));
  }
  const int64_t width = std::max<int64_t>(1, p.y[2]);
  const double together = double(width / kRun + width % kRun) / width;
  const double share = 1 - within + within * (1 - within_others) * together;
  const double lines = CeilDiv((filter ? p.channels : p.DepthChannels()) * SizeOf(p.in), 128),
               columns = CeilDiv(g.columns, t.columns);
  const double pixels = filter ? g.depth : g.rows;
  const double loads = kEach * share * pixels * p.Taps() * lines * columns / kMultiprocessors;
  if (filter) {
    // Each step, rows are looked up for all taps of a tile. Two warps share all that, while others multiply.
    constexpr double kStep = 150, kTap = 600;
    const double units = t.rows / WgmmaDepth(p.in), taps = std::ceil(units / lines);
    const double steps = CeilDiv(g.depth, WgmmaDepth(p.in)) * std::ceil(p.Taps() * lines / units) * columns;
    const double busy = steps * (kStep + kTap * taps) / kMultiprocessors + loads / 2;
    return kBegin + std::max(loads, busy - config.cycles);
  }
  // Once a tap rows are looked up, which takes longer than the products where channels are few.
  const double taps = std::ceil(CeilDiv(g.rows, t.rows) * columns / kMultiprocessors) * p.Taps();
  return kBegin + loads + taps * std::max(0.0, kLookup - lines * t.rows * t.columns / 32);
}

// What the frame's kernel adds to `cycles`. On the tensor cores it is products of the filter gradient's tiles; else all
// blocks take as long as one, in steps of 128 bytes. Channels that are no whole chunks come element by element.
double FrameCycles(const Problem& p, bool hopper, double cycles) {
  constexpr double kStep = 1900, kProductsPerCycle = 190;  // of 16-bit floats
  if (!OnTensorCores(p)) return kLaunchCycles + FrameShare(p) * cycles;
  const int64_t chunk = 16 / SizeOf(p.in);
  const double loads = p.channels % chunk != 0 || p.features % chunk != 0 ? double(chunk) : 1;
  const Gemm g = GemmOf(p);
  if (p.direction == Direction::kFilterGradient) {
    const double tiles = double(g.problems) * CeilDiv(g.rows, 128) * CeilDiv(g.columns, 64);
    const double products = tiles * 128 * 64 * FrameShare(p) * g.depth * SizeOf(p.in) / 2;
    return kLaunchCycles + std::max(1.0, loads / 2) * products / (kMultiprocessors * kProductsPerCycle);
  }
  const double steps = CeilDiv(g.depth * SizeOf(p.in), 128);
  const auto rounds = [&](int64_t columns) {
    return std::max(
        1.0, std::ceil(FrameShare(p) * g.rows / 128) * g.problems * CeilDiv(g.columns, columns) / kMultiprocessors);
  };
  if (hopper && TakesFrameWgmma(p)) {
    // With those of further positions; and what comes before the first and after the last.
    constexpr double kOfSmall = 500, kOfLarge = 800, kFurther = 1.33, kBegin = 10000;
    const int columns = FrameColumns(p);
    return kLaunchCycles + rounds(columns) * (kBegin + kFurther * steps * (columns > 64 ? kOfLarge : kOfSmall));
  }
  return kLaunchCycles + loads * kStep * steps * rounds(64);
}

}  // namespace

Reach ReachOf(const Problem& p, int d) {
  if (p.mode[d] == PadMode::kZeros || p.y[d] == 0) return {0, 0};
  const int64_t last = (p.y[d] - 1) * p.stride[d] + (p.window[d] - 1) * p.rhs_dilation[d] - p.pad[d];
  return {std::max<int64_t>(0, p.pad[d]), std::max<int64_t>(0, last - (p.x[d] - 1))};
}

AliasedElements AliasedBy(const Problem& p, int d) {
  const Reach reach = ReachOf(p, d);
  const int64_t n = p.x[d];
  switch (p.mode[d]) {
    case PadMode::kReflect:
      return {{1, reach.low}, {n - 1 - reach.high, n - 2}};
    case PadMode::kReplicate:
      return {{0, reach.low > 0 ? 0 : -1}, {n - 1, reach.high > 0 ? n - 1 : n - 2}};
    case PadMode::kCircular:
      return {{n - reach.low, n - 1}, {0, reach.high - 1}};
    default:
      return {{0, -1}, {0, -1}};
  }
}

bool HasFrame(const Problem& p) {
  for (int d = 0; d < kRank; ++d)
    if (const Reach reach = ReachOf(p, d); reach.low > 0 || reach.high > 0) return true;
  return false;
}

bool FindsElements(const Problem& p) {
  if (!TakesFrame(p)) return false;
  for (int d = 0; d < kRank; ++d) {
    if (const Reach reach = ReachOf(p, d); reach.low == 0 && reach.high == 0) continue;
    // In the data gradient, where positions an extent apart do not both meet a window's tap.
    if (p.direction == Direction::kDataGradient &&
        (p.mode[d] != PadMode::kCircular || p.stride[d] != 1 || p.y[d] > p.x[d]))
      return false;
  }
  return true;
}

Problem WithZeros(const Problem& p) {
  Problem z = p;
  for (PadMode& mode : z.mode) mode = PadMode::kZeros;
  if (p.direction == Direction::kFilterGradient && p.in != DType::kF64) z.out = DType::kF32;
  return z;
}

double FrameShare(const Problem& p) {
  const int64_t pixels = p.direction == Direction::kDataGradient ? p.XPixels() : p.YPixels();
  return HasFrame(p) ? 1 - double(Interior(p)) / std::max<int64_t>(1, pixels) : 0;
}

bool OnTensorCores(const Problem& p) {
  if (p.in == DType::kF64 || (p.in == DType::kF32 && p.products == 0)) return false;
  return p.groups == 1 || p.DepthChannels() * SizeOf(p.in) >= 16;
}

bool TakesFrameWgmma(const Problem& p) {
  const int64_t chunk = 16 / SizeOf(p.in);
  const bool floats = p.in == DType::kF32;
  if (p.direction == Direction::kFilterGradient || p.in == DType::kF64 || p.batch != 1 || p.groups != 1) return false;
  if (floats && (p.direction == Direction::kForward || p.products != 1)) return false;
  int64_t readings = 1;
  for (int d = 0; d < kRank && p.direction == Direction::kDataGradient; ++d) {
    const Reach reach = ReachOf(p, d);
    const bool replicates = p.mode[d] == PadMode::kReplicate;
    readings *= 1 + (replicates ? reach.low + reach.high : (reach.low > 0) + (reach.high > 0));
  }
  if (readings > kFrameMostReadings) return false;
  return p.channels % chunk == 0 && p.features % chunk == 0;
}

int FrameColumns(const Problem& p) {
  const Gemm g = GemmOf(p);
  const double large = FrameShare(p) * g.rows / 128 * CeilDiv(g.columns, 128);
  return g.columns > 64 && large >= 0.75 * kMultiprocessors ? 128 : 64;
}

int64_t FrameSlices(const Problem& p) {
  if (p.direction != Direction::kFilterGradient || !HasFrame(p)) return 0;
  // Blocks that fill the device, and pixels that are worth one.
  const int64_t blocks = OnTensorCores(p) ? 528 : 2112, least = 256;
  const int64_t tiles =
      p.batch * (OnTensorCores(p) ? p.groups * CeilDiv(p.Taps() * p.channels, 128) * CeilDiv(p.features, 64)
                                  : p.Taps() * CeilDiv(p.channels * p.groups * p.features, 128));
  const int64_t pixels = p.images * (p.YPixels() - Interior(p));
  return std::max<int64_t>(1, std::min(blocks / std::max<int64_t>(1, tiles), CeilDiv(pixels, least)));
}

int64_t FrameBytes(const Problem& p) {
  constexpr int64_t kAlignment = 256;
  const int64_t slices = FrameSlices(p), bytes = (1 + slices) * p.FilterSize() * (p.in == DType::kF64 ? 8 : 4);
  return slices == 0 ? 0 : CeilDiv(bytes, kAlignment) * kAlignment;
}

std::optional<Config> ChooseWithFrame(const Problem& p, bool hopper, std::string_view algorithm,
                                      int64_t workspace_limit) {
  const int64_t bytes = FrameBytes(p);
  if (!TakesFrame(p) || bytes > workspace_limit) return std::nullopt;
  return ChooseCompleted(WithZeros(p), hopper, algorithm, workspace_limit - bytes, [&](Config config) {
    const double patches = TakesPatches(p, config) ? PatchCycles(p, config) : HUGE_VAL;
    const double frame = FrameCycles(p, hopper, config.cycles);
    config.patched = patches < frame;
    config.cycles += std::min(patches, frame);
    // Depthwise kernels may leave what is not aligned to a frame after all.
    if (config.patched && config.tile != Tile::kDepthwise) return config;
    config.workspace_bytes += bytes;
    config.frame_slices = FrameSlices(p);
    return config;
  });
}

}  // namespace jaxdnn::conv
