// Elementwise activations and their derivatives.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/activation/kind.h"
#include "cuda/common/dtype.h"

namespace jaxdnn::activation {

// y[i] = f(x[i]) for n elements.
cudaError_t Forward(Kind kind, DType dtype, const void* x, void* y, int64_t n, cudaStream_t stream);

// dx[i] = g[i] f'(x[i]), with the derivative computed from y = f(x).
cudaError_t Backward(Kind kind, DType dtype, const void* g, const void* y, void* dx, int64_t n, cudaStream_t stream);

}  // namespace jaxdnn::activation
