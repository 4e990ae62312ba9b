// What the implicit matrix products on the CUDA cores and with mma.sync (simt.h, mma.h) take, and how long they do.
// Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Of those with mma.sync; the others take every problem.
bool TakesMma(const Problem& p, const TileShape& t);
double GemmCycles(const Problem& p, const TileShape& t, int64_t splits);

}  // namespace jaxdnn::conv
