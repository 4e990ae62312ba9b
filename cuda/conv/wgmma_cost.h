// What steps and tiles of Hopper's dense kernels take, as fitted.
#pragma once

#include "cuda/conv/wgmma_plan.h"

namespace jaxdnn::conv {

// The tile of single pixels that one of pairs is, of their view.
const TileShape& SingleTile(const TileShape& t);

// The cycles of a step, and those of beginning and storing a tile, which the other warpgroup hides unless tiles are
// short. Fitted to an H200, where the choice is then on average 1 % slower than the best.
struct Cost {
  double step, tile;
};
Cost CostOf(const TileShape& t, const Problem& p);

// How much longer a step takes whose filter, or y, comes in parts of lines: zeros beyond the last feature take the TMA
// unit longer than features, which small tiles wait for.
double PartsOfLines(const TileShape& t);

}  // namespace jaxdnn::conv
