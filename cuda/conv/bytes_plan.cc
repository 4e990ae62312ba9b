#include "cuda/conv/bytes_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"
#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {
namespace {

int64_t InChunks(int64_t channels) { return CeilDiv(channels, 16) * 16; }

}  // namespace

// Forward alone. Hopper's sums of 8-bit floats have fewer bits than HIGH and HIGHEST ask for.
bool TakesBytes(const TileShape& t, const Problem& p, bool hopper) {
  if (p.direction != Direction::kForward) return false;
  if (t.unit == Unit::kWgmma) {
    MappedPhase phases[kMaxMaps];
    const bool tile = t.tile == Tile::kWgmma128x128 || t.tile == Tile::kWgmma128x64;
    return hopper && tile && p.batch == 1 && p.groups == 1 && p.channels > 0 && p.features > 0 &&
           (p.in == DType::kS8 || p.products == 1) && p.Taps() * InChunks(p.channels) / 16 * p.features < INT32_MAX &&
           p.images * std::max(p.XPixels(), p.YPixels()) < INT32_MAX && MapPhases(p, phases) > 0;
  }
  if (*std::max_element(p.window, p.window + kRank) > kMmaMaxWindow) return false;
  const Dense dense = DenseOf(p);
  const bool whole = p.channels % 16 == 0 && p.features % 16 == 0 && dense.groups == 1 && !dense.Folds();
  return t.tile == Tile::kMma128x64 || (t.tile == Tile::kMma128x128 && whole);
}

int64_t BytesWorkspace(const Problem& p) {
  const int64_t channels = InChunks(p.channels);
  return channels * (p.Taps() * p.features + (channels == p.channels ? 0 : p.images * p.XPixels()));
}

// Waves of tiles, of which each is multiplied, then stored, all of which was fitted to an H200.
double BytesCycles(const Problem& p, const TileShape& t) {
  struct Cost {
    double step, tile;
  };
  constexpr Cost kIntegers[] = {{465, 8500}, {333, 5400}}, kFloats[] = {{640, 8700}, {410, 5400}};
  const Cost cost = (p.in == DType::kS8 ? kIntegers : kFloats)[t.columns == 64];
  double phases = 1, taps = p.Taps();
  const Phases f = PhasesOf(p);
  for (int d = 0; d < kRank; ++d) phases *= f.period[d], taps /= f.tap_period[d];
  const double rows = double(p.images) * p.YPixels();
  const double tiles = phases * std::ceil(rows / phases / t.rows) * CeilDiv(p.features, t.columns);
  const double steps = taps * CeilDiv(p.channels, WgmmaDepth(p.in));
  return std::ceil(tiles / kMultiprocessors) * (steps * cost.step + cost.tile) + 1500 + kLaunchCycles +
         2.0 * BytesWorkspace(p) / (kMultiprocessors * kBytesPerCycle);
}

}  // namespace jaxdnn::conv
