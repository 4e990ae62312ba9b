// Local response and divisive normalization, and their derivatives as linear maps. Arrays are
// [outer, extent[0], extent[1], extent[2], inner], dense; a window couples the three in the middle.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::lrn {

// D = k + scale S(c²), where S sums over the `before` elements in front of each, itself, and the `after` behind it, in
// each dimension, as far as there are any. Fewer than three dimensions are padded in front with ones.
struct Problem {
  int64_t outer = 1, inner = 1;
  int extent[3] = {1, 1, 1}, before[3] = {0, 0, 0}, after[3] = {0, 0, 0};
  double scale = 0, beta = 0, k = 0;
};

// In all of these c = x - means, or x where `means` is null; q = 2 scale beta D^(-beta - 1).

// y = c D^-beta.
cudaError_t Forward(const Problem& p, DType dtype, const void* x, const void* means, void* y, cudaStream_t stream);

// out = D^-beta t - q c S(c t).
cudaError_t Tangent(const Problem& p, DType dtype, const void* t, const void* x, const void* means, void* out,
                    cudaStream_t stream);

// dx = D^-beta g - c S'(q c g), with S' over the mirrored window: the adjoint of Tangent. Windows that no kernel holds
// in registers need a scratch value of the accumulator's type for every element.
cudaError_t Cotangent(const Problem& p, DType dtype, const void* g, const void* x, const void* means, void* dx,
                      void* scratch, size_t scratch_bytes, cudaStream_t stream);

}  // namespace jaxdnn::lrn
