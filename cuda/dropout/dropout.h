// Dropout: y = x / (1 - rate) where a bit of a counter-based generator says so, else 0.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::dropout {

// Element (r, c) of a problem [rows, columns] has the number start + r * pitch + c, of which its fate is a function.
struct Shape {
  int64_t problems, rows, columns, pitch;
  int64_t start_multiple;  // `start` is a multiple of this.
};

// Words of a problem's seed: four of the key, and the two of `start`, the lower one first.
constexpr int kSeedWords = 6;

// An element is dropped with probability threshold / 2^32, else multiplied by scale. `seeds` [problems, kSeedWords].
cudaError_t Run(DType dtype, const Shape& shape, const void* x, const uint32_t* seeds, void* y, uint32_t threshold,
                double scale, cudaStream_t stream);

}  // namespace jaxdnn::dropout
