#include "cuda/conv/wgmma_cost.h"

namespace jaxdnn::conv {

const TileShape& SingleTile(const TileShape& t) {
  return kTiles[static_cast<int>(t.tile == Tile::kWgmma256x64Pairs ? Tile::kWgmma256x64 : Tile::kWgmma128x128)];
}

Cost CostOf(const TileShape& t, const Problem& p) {
  // Of 16-bit floats and of TF32: forward and data gradient, then the filter gradient, which takes floats in tiles of
  // 128 rows only; and of TF32 forward, with the filter in registers.
  constexpr Cost k128x128[] = {{580, 4500}, {640, 6800}, {610, 3500}, {630, 5600}, {675, 5750}};
  constexpr Cost k256x64[] = {{760, 5100}, {795, 5350}, {685, 4000}, {}, {670, 6650}};
  constexpr Cost k128x64[] = {{390, 2750}, {400, 4650}, {348, 3100}, {460, 3750}, {420, 4150}};
  constexpr Cost k64x128[] = {{390, 2600}, {400, 3850}, {352, 2500}, {}, {505, 4000}};
  constexpr Cost k64x64[] = {{300, 2100}, {300, 2750}, {310, 2450}, {}, {320, 3500}};
  // Forward half a line of features takes longer for what it brings.
  constexpr Cost k128x160Halved = {780, 8000};
  constexpr Cost k128x160[] = {{740, 5800}, {790, 8200}, {}, {790, 8000}};
  constexpr Cost k128x256[] = {{}, {1100, 6000}, {1110, 4500}, {1060, 8500}};
  constexpr Cost k256x128[] = {{}, {}, {1130, 5000}};
  constexpr Cost k192x128 = {870, 4500}, k192x160 = {1060, 5000};
  constexpr Cost k256x160[] = {{1370, 5000}, {}, {1400, 6000}};
  constexpr Cost kCopied = {620, 8300};  // some 585 on an H200, 700 on an H100, whose L2 cache delivers less
  // Across, no other warpgroup hides what is between tiles.
  constexpr Cost k96Across = {485, 1300}, k160Across = {705, 2600}, k208Across = {930, 2250};
  constexpr Cost k192Across[] = {{830, 2400}, {}, {}, {}, {940, 4600}};
  if (IsOfPairs(t.tile)) {
    constexpr double kApart = 1.5;  // each of a pair has products of its own
    const Cost single = CostOf(SingleTile(t), p);
    return {kApart * single.step, single.tile};
  }
  const bool filter = p.direction == Direction::kFilterGradient, floats = p.in == DType::kF32;
  if (p.Tripled()) {
    const bool wide = t.columns == 128;
    return filter ? Cost{wide ? 1850.0 : 1200.0, 6000} : Cost{wide ? 2000.0 : 1760.0, 5000};
  }
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
      return p.direction == Direction::kForward && !floats ? k128x160Halved : k128x160[which];
    case Tile::kWgmma128x128Copied:
      return kCopied;
    case Tile::kWgmma96Across:
      return k96Across;
    case Tile::kWgmma160Across:
      return k160Across;
    case Tile::kWgmma192Across:
      return k192Across[held];
    case Tile::kWgmma208Across:
      return k208Across;
    case Tile::kWgmma128x256:
      return k128x256[which];
    case Tile::kWgmma256x128:
      return k256x128[which];
    case Tile::kWgmma192x128:
      return k192x128;
    case Tile::kWgmma192x160:
      return k192x160;
    case Tile::kWgmma256x160:
      return k256x160[which];
    default:
      return {};
  }
}

double PartsOfLines(const TileShape& t) {
  switch (t.tile) {
    case Tile::kWgmma64x64:
      return 1.35;
    case Tile::kWgmma64x128:
      return 1.47;
    case Tile::kWgmma128x64:
      return 1.4;
    case Tile::kWgmma128x128:
      return 1.3;
    case Tile::kWgmma256x64:
      return 1.13;
    case Tile::kWgmma96Across:
      return 1.3;
    default:
      return 1;
  }
}

}  // namespace jaxdnn::conv
