// What the kernels of small groups (grouped.h) take, and how long they do. Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

bool TakesGrouped(const Problem& p);
double GroupedCycles(const Problem& p, int64_t splits);

}  // namespace jaxdnn::conv
