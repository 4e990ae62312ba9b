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

// [problems, each] words: four of the key, and the two of `start`, the lower one first. Where there are fewer than
// kSeedWords, but kLeastSeedWords there are, the others are 0.
constexpr int kSeedWords = 6, kLeastSeedWords = 2;
struct Seeds {
  const uint32_t* words;
  int each;
};

// An element is dropped with probability threshold / 2^32, else multiplied by scale.
cudaError_t Run(DType dtype, const Shape& shape, const void* x, const Seeds& seeds, void* y, uint32_t threshold,
                double scale, cudaStream_t stream);

}  // namespace jaxdnn::dropout
