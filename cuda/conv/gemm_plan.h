// What the implicit matrix products on the CUDA cores and with mma.sync (simt.h, mma.h) take, and how long they do.
// Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Whether the CUDA cores' wide tiles have kernels of their own (float_tile.cuh).
bool TakesFloatTiles(const Problem& p);
bool TakesSimt(const Problem& p, const TileShape& t);
bool TakesMma(const Problem& p, const TileShape& t);
double GemmCycles(const Problem& p, const TileShape& t, int64_t splits);

}  // namespace jaxdnn::conv
