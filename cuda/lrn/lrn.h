// Local response and divisive normalization, and their derivatives as linear maps. Arrays are
// [outer, extent[0], extent[1], extent[2], inner], dense; a window couples the three in the middle.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::lrn {

// A window holds the `before` elements in front of its own, itself, and the `after` behind it, in each dimension, as
// far as there are any. Fewer than three dimensions are padded in front with ones.
struct Problem {
  int64_t outer = 1, inner = 1;
  int extent[3] = {1, 1, 1}, before[3] = {0, 0, 0}, after[3] = {0, 0, 0};
  double scale = 0, beta = 0, k = 0;

  int64_t Elements() const { return outer * extent[0] * extent[1] * extent[2] * inner; }
};

// Memory for two values of the accumulator's type for every element; less is an error where a kernel needs it.
struct Scratch {
  void* data;
  size_t bytes;
};

// Local response normalization: D = k + scale S(x²), where S sums over the window, S' over the mirrored one, and
// q = 2 scale beta D^(-beta - 1). Scratch is for windows that no kernel holds in registers.

// y = x D^-beta.
cudaError_t Forward(const Problem& p, DType dtype, const void* x, void* y, cudaStream_t stream);

// out = D^-beta t - q x S(x t).
cudaError_t Tangent(const Problem& p, DType dtype, const void* t, const void* x, void* out, cudaStream_t stream);

// dx = D^-beta g - x S'(q x g): the adjoint of Tangent.
cudaError_t Cotangent(const Problem& p, DType dtype, const void* g, const void* x, void* dx, Scratch scratch,
                      cudaStream_t stream);

// Divisive normalization: D_i = k + scale * (the sum over j in the window of i of (x_j - m_i)²), and r = q x g.

// y = x D^-beta.
cudaError_t DivisiveForward(const Problem& p, DType dtype, const void* x, const void* m, void* y, cudaStream_t stream);

// out_i = D_i^-beta tx_i - q_i x_i * (the sum over j of (x_j - m_i) (tx_j - tm_i)).
cudaError_t DivisiveTangent(const Problem& p, DType dtype, const void* tx, const void* tm, const void* x, const void* m,
                            void* out, cudaStream_t stream);

// dx_j = D_j^-beta g_j - (the sum over the i whose windows hold j of r_i (x_j - m_i)), and
// dm_i = r_i * (the sum over j of (x_j - m_i)): the adjoint of DivisiveTangent.
cudaError_t DivisiveCotangent(const Problem& p, DType dtype, const void* g, const void* x, const void* m, void* dx,
                              void* dm, Scratch scratch, cudaStream_t stream);

}  // namespace jaxdnn::lrn
