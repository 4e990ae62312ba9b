// Four numbers of float32, which the kernels on the CUDA cores move at once.
#pragma once

#include "cuda/common/vec.cuh"

namespace jaxdnn::conv {

using Four = Vec<float, 4>;

// Where a column's weight is in its four, or its sum: neighbours change places, so that what a product reads at once
// does not lie in one bank of registers (float_tile.cuh).
__host__ __device__ constexpr int Place(int column) { return column ^ 1; }

}  // namespace jaxdnn::conv
