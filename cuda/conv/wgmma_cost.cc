#include "cuda/conv/wgmma_cost.h"

#include <algorithm>
#include <iterator>

namespace jaxdnn::conv {
namespace {

// By what is computed, of what; nothing where no kernel does.
struct TileCosts {
  Tile tile;
  double parts_of_lines;
  Cost forward, data, filter;                 // of 16-bit floats
  Cost forward_tf32, data_tf32, filter_tf32;  // forward, small tiles have the filter in registers
};
// Forward half a line of features takes 128x160 longer for what it brings. To copy the filter takes some 585 on an
// H200, 700 on an H100, whose L2 cache delivers less. Across, no other warpgroup hides what is between tiles.
constexpr TileCosts kCosts[] = {
    {Tile::kWgmma128x128, 1.3, {580, 4500}, {580, 4500}, {610, 3500}, {675, 5750}, {640, 6800}, {630, 5600}},
    {Tile::kWgmma256x64, 1.13, {760, 5100}, {760, 5100}, {685, 4000}, {670, 6650}, {812, 5350}, {}},
    {Tile::kWgmma128x64, 1.4, {390, 2750}, {390, 2750}, {348, 3100}, {420, 4150}, {400, 4650}, {460, 3750}},
    {Tile::kWgmma64x128, 1.47, {390, 2600}, {390, 2600}, {352, 2500}, {505, 4000}, {400, 3850}, {}},
    {Tile::kWgmma64x64, 1.35, {300, 2100}, {300, 2100}, {310, 2450}, {320, 3500}, {300, 2750}, {}},
    {Tile::kWgmma128x160, 1, {780, 8000}, {740, 5800}, {}, {790, 8200}, {790, 8200}, {790, 8000}},
    {Tile::kWgmma128x256, 1, {}, {}, {1110, 4500}, {1175, 6000}, {1175, 6000}, {1060, 8500}},
    {Tile::kWgmma256x128, 1, {}, {}, {1130, 5000}, {}, {}, {}},
    {Tile::kWgmma192x128, 1, {}, {}, {870, 4500}, {}, {}, {}},
    {Tile::kWgmma192x160, 1, {}, {}, {1060, 5000}, {}, {}, {}},
    {Tile::kWgmma256x160, 1, {1370, 5000}, {}, {1400, 6000}, {}, {}, {}},
    {Tile::kWgmma128x128Copied, 1, {}, {}, {}, {620, 8300}, {}, {}},
    {Tile::kWgmma96Across, 1.3, {485, 1300}, {485, 1300}, {}, {}, {}, {}},
    {Tile::kWgmma160Across, 1, {705, 2600}, {705, 2600}, {}, {}, {}, {}},
    {Tile::kWgmma192Across, 1, {830, 2400}, {830, 2400}, {}, {940, 4600}, {}, {}},
    {Tile::kWgmma208Across, 1, {930, 2250}, {930, 2250}, {}, {}, {}, {}},
};

// Every tile of wgmma's but those of pairs is there.
const TileCosts& CostsOf(const TileShape& t) {
  return *std::find_if(std::begin(kCosts), std::end(kCosts), [&](const TileCosts& c) { return c.tile == t.tile; });
}

}  // namespace

const TileShape& SingleTile(const TileShape& t) {
  return kTiles[static_cast<int>(t.tile == Tile::kWgmma256x64Pairs ? Tile::kWgmma256x64 : Tile::kWgmma128x128)];
}

Cost CostOf(const TileShape& t, const Problem& p) {
  if (IsOfPairs(t.tile)) {
    constexpr double kApart = 1.5;  // each of a pair has products of its own
    const Cost single = CostOf(SingleTile(t), p);
    return {kApart * single.step, single.tile};
  }
  const bool filter = p.direction == Direction::kFilterGradient, forward = p.direction == Direction::kForward;
  if (p.Tripled()) {
    const bool wide = t.columns == 128;
    return filter ? Cost{wide ? 1850.0 : 1200.0, 6000} : Cost{wide ? 2000.0 : 1760.0, 5000};
  }
  const TileCosts& of = CostsOf(t);
  if (p.in == DType::kF32) return filter ? of.filter_tf32 : forward ? of.forward_tf32 : of.data_tf32;
  return filter ? of.filter : forward ? of.forward : of.data;
}

double PartsOfLines(const TileShape& t) { return IsOfPairs(t.tile) ? 1 : CostsOf(t).parts_of_lines; }

}  // namespace jaxdnn::conv
