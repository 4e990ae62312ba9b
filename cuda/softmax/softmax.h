// Softmax and log-softmax over the middle dimension of [outer, n, inner], and
// their derivatives as linear maps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"
#include "cuda/softmax/mask.h"

namespace jaxdnn::softmax {

struct Shape {
  int64_t outer, n, inner;
};

struct Problem {
  Shape shape;
  Mask mask;
  // Scratch memory of WorkspaceBytes, for rows that several blocks share.
  void* workspace;
};

int64_t WorkspaceBytes(DType dtype, Shape shape);

// y = exp(x - m) / s, or y = x - m - log(s), with m = max(x) and s = sum(exp(x - m)) over the entries that the mask
// keeps. Others become 0, or -inf; in rows without an entry they become `without_entries`, or its logarithm.
cudaError_t Forward(bool log, DType dtype, double without_entries, const void* x, void* y, const Problem& problem,
                    cudaStream_t stream);

// The linear maps that differentiation needs, each a function of the output y. A mask selects before and after.
enum class Map {
  kSoftmax,        // y (g - sum(y g)), its own transpose
  kLogSoftmaxJvp,  // g - sum(exp(y) g)
  kLogSoftmaxVjp,  // g - exp(y) sum(g)
};

cudaError_t Backward(Map map, DType dtype, const void* g, const void* y, void* out, const Problem& problem,
                     cudaStream_t stream);

}  // namespace jaxdnn::softmax
