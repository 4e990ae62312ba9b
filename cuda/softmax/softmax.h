// Softmax and log-softmax over the middle dimension of [outer, n, inner], and their derivatives as linear maps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::softmax {

struct Shape {
  int64_t outer, n, inner;
};

// y = exp(x - m) / s, or y = x - m - log(s), with m = max(x) and s = sum(exp(x - m)).
cudaError_t Forward(bool log, DType dtype, const void* x, void* y, Shape shape, cudaStream_t stream);

// The linear maps that differentiation needs, each a function of the output y.
enum class Map {
  kSoftmax,        // y (g - sum(y g)), its own transpose
  kLogSoftmaxJvp,  // g - sum(exp(y) g)
  kLogSoftmaxVjp,  // g - exp(y) sum(g)
};

cudaError_t Backward(Map map, DType dtype, const void* g, const void* y, void* out, Shape shape, cudaStream_t stream);

}  // namespace jaxdnn::softmax
