// What the Hopper kernels (wgmma.h) take, and how long that takes. Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Whether the tile's kernel can do the problem, on a device that has it.
bool TakesWgmma(const Problem& p, const TileShape& t);

// How many blocks may share a tile (wgmma_team.cuh).
int64_t MostBlocks(const Problem& p, const TileShape& t);

// Bytes of workspace for an operand that wgmma wants K-major, since TF32 has no MN-major operands: y in the filter
// gradient, and forward, of some tiles, the filter.
int64_t TransposedBytes(const Problem& p, const TileShape& t);

// The modelled time, but for adding up slices.
double WgmmaCycles(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster);

}  // namespace jaxdnn::conv
