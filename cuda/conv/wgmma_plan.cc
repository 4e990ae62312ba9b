#include "cuda/conv/wgmma_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {
namespace {

constexpr double kMultiprocessors = 132, kBytesPerCycle = 18;  // of device memory, per multiprocessor

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The cycles of a step, and those of beginning and storing a tile, which the other warpgroup hides unless tiles are
// short. Fitted to an H200, where the choice is then on average 2 % slower than the best.
struct Cost {
  double step, tile;
};

Cost CostOf(const TileShape& t, const Problem& p) {
  // Of 16-bit floats and of TF32: forward and data gradient, then the filter gradient, which takes floats in tiles of
  // 128 rows only; and of TF32 forward, with the filter in registers.
  constexpr Cost k128x128[] = {{600, 4400}, {620, 8000}, {660, 1200}, {680, 1200}, {750, 7000}};
  constexpr Cost k256x64[] = {{750, 4200}, {830, 9700}, {800, 1600}, {}, {740, 9500}};
  constexpr Cost k128x64[] = {{420, 4100}, {475, 5100}, {480, 500}, {420, 500}, {450, 5600}};
  constexpr Cost k64x128[] = {{420, 3450}, {400, 5150}, {480, 0}, {}, {670, 4000}};
  constexpr Cost k64x64[] = {{355, 3500}, {360, 4100}, {335, 0}, {}, {390, 4150}};
  constexpr Cost k128x160[] = {{790, 5500}, {820, 9000}};
  constexpr Cost kCopied = {630, 8300};
  // Across, no other warpgroup hides what is between tiles.
  constexpr Cost k80Across = {440, 1400}, k96Across = {465, 1500}, k160Across = {670, 1800}, k192Across = {785, 1950},
                 k208Across = {940, 2000};
  const bool filter = p.direction == Direction::kFilterGradient, floats = p.in == DType::kF32;
  const int which = 2 * filter + floats, held = floats && p.direction == Direction::kForward ? 4 : which;
  switch (t.tile) {
    case Tile::kWgmma128x128:
      return k128x128[held];
    case Tile::kWgmma256x64:
      return k256x64[held];
    case Tile::kWgmma128x64:
      return k128x64[held];
    case Tile::kWgmma64x128:
      return k64x128[held];
    case Tile::kWgmma64x64:
      return k64x64[held];
    case Tile::kWgmma128x160:
      return k128x160[which];
    case Tile::kWgmma128x128Copied:
      return kCopied;
    case Tile::kWgmma80Across:
      return k80Across;
    case Tile::kWgmma96Across:
      return k96Across;
    case Tile::kWgmma160Across:
      return k160Across;
    case Tile::kWgmma192Across:
      return k192Across;
    case Tile::kWgmma208Across:
      return k208Across;
    default:
      return {};
  }
}

}  // namespace

bool TakesWgmma(const Problem& p, const TileShape& t) {
  const bool filter = p.direction == Direction::kFilterGradient, floats = p.in == DType::kF32;
  if (p.in == DType::kF64 || (floats && (p.products != 1 || (filter && t.rows != 128)))) return false;
  const bool forward = p.direction == Direction::kForward;
  if (t.columns == 160 && (filter || (forward && !floats))) return false;
  if (IsAcross(t.tile) && (filter || floats || p.out != p.in)) return false;
  if (t.tile == Tile::kWgmma128x128Copied && !(floats && forward)) return false;
  // One problem and group, lines of whole 16-byte chunks, and rows that 32 bits number.
  const int64_t chunk = 16 / SizeOf(p.in);
  MappedPhase phases[kMaxMaps];
  return p.batch == 1 && p.groups == 1 && p.channels % chunk == 0 && p.features % chunk == 0 &&
         p.images * std::max(p.XPixels(), p.YPixels()) < INT32_MAX - t.rows && MapPhases(p, phases) > 0;
}

int64_t MostBlocks(const Problem& p, const TileShape& t) {
  const bool copied = t.tile == Tile::kWgmma128x128Copied;
  if (p.direction == Direction::kFilterGradient || copied || IsAcross(t.tile) || t.rows > 128 || t.columns > 128)
    return 1;
  // In a phase, or of a dilated input, some blocks could be left without a tap.
  const Phases f = PhasesOf(p);
  for (int d = 0; d < kRank; ++d)
    if (f.period[d] > 1 || f.tap_period[d] > 1) return 1;
  constexpr int64_t kMost = 8;  // of a cluster on every device
  return std::min(kMost, p.Taps() * CeilDiv(p.DepthChannels(), WgmmaDepth(p.in)) / 2);
}

int64_t TransposedBytes(const Problem& p, const TileShape& t) {
  if (p.in != DType::kF32 || p.direction == Direction::kDataGradient) return 0;
  if (p.direction == Direction::kForward)
    return t.tile == Tile::kWgmma128x160 || t.tile == Tile::kWgmma128x128Copied ? p.FilterSize() * 4 : 0;
  const int64_t depth = WgmmaDepth(p.in);
  return CeilDiv(p.images * p.YPixels(), depth) * depth * p.features * 4;
}

double WgmmaCycles(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster) {
  const Cost cost = CostOf(t, p);
  const Gemm g = GemmOf(p);
  const int64_t channels = p.DepthChannels(), line = WgmmaDepth(p.in), transposed = TransposedBytes(p, t);
  // Whether pixels do not begin with the sectors that memory is read in.
  const auto apart = [&](int64_t n) { return n * SizeOf(p.in) % 32 != 0; };
  double tiles, steps, longest = 0, more = 0;  // steps of a tile, and of those that have most
  if (p.direction == Direction::kFilterGradient) {
    // Rows come in units of a line of channels.
    const double units = double(p.Taps()) * CeilDiv(p.channels, line);
    tiles = std::ceil(units / (t.rows / line)) * CeilDiv(p.features, t.columns) * splits;
    steps =
        std::ceil(double(g.depth) / splits / line) * (apart(p.channels) ? 1.45 : 1) * (apart(p.features) ? 1.45 : 1);
    // What dense layers move is not hidden where the warpgroups share their stages.
    const double x_pixels = std::min(p.XPixels(), p.YPixels() * p.Taps());
    if (p.in == DType::kF32 && std::min(p.channels, p.features) >= 64)
      more = p.images * (x_pixels * p.channels + double(p.YPixels()) * p.features) * 4 / 2 /
             (kMultiprocessors * kBytesPerCycle);
  } else {
    double phases = 1, taps_per_tap = 1, most_taps = 1;
    const Phases f = PhasesOf(p);
    for (int d = 0; d < kRank; ++d) {
      phases *= f.period[d], taps_per_tap *= f.tap_period[d];
      most_taps *= CeilDiv(p.window[d], f.tap_period[d]);
    }
    tiles = phases * std::ceil(g.rows / phases / t.rows) * CeilDiv(g.columns, t.columns);
    // What is left of a pixel's channels takes a load too, which is slower for what it brings.
    const int64_t left = channels % line;
    const double last = left == 0 ? 0 : apart(left) ? 2.7 : 1.6, lines = channels / line + last;
    steps = std::max(1.0, p.Taps() / taps_per_tap * lines);
    longest = most_taps * lines;
  }
  // Another kernel, and how often it moves its result's bytes.
  constexpr double kLaunch = 4000;
  const double moves = p.direction == Direction::kForward ? 3.3 : 2;
  if (transposed) more += kLaunch + moves * transposed / (kMultiprocessors * kBytesPerCycle);
  if (cluster > 1) {
    // Clusters have to fit into the device's groups of multiprocessors, and none has a second tile to hide the first.
    const double clusters = cluster == 2 ? 66 : cluster == 4 ? 30 : 15, exchange = 2000 + t.rows * t.columns / 4;
    return std::ceil(tiles / clusters) * (1.3 * std::ceil(steps / cluster) * cost.step + cost.tile + exchange);
  }
  const double each = std::ceil(tiles / kMultiprocessors), busy = steps * cost.step;
  constexpr double kBegin = 4400;  // until the first step
  if (IsAcross(t.tile)) return std::max(each * (busy + cost.tile), longest * cost.step + cost.tile) + kBegin;
  return std::max(each * std::max(busy, (busy + cost.tile) / 2), longest * cost.step) + cost.tile + more;
}

}  // namespace jaxdnn::conv
