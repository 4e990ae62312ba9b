// Of the kernels of 8-bit operands: what they take, what workspace they need, and how long they run. Plain host code.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

bool TakesBytes(const TileShape& t, const Problem& p, bool hopper);

// Of the Hopper kernel: the filter, K-major, and x if its pixels are no whole 16 bytes.
int64_t BytesWorkspace(const Problem& p);

// Modelled, of the Hopper kernel.
double BytesCycles(const Problem& p, const TileShape& t);

}  // namespace jaxdnn::conv
