// Any window in any number of dimensions, one sum for each element: what no faster kernel takes.
#pragma once

#include "cuda/lrn/lrn.h"

namespace jaxdnn::lrn {

cudaError_t DirectForward(const Problem& p, DType dtype, const void* x, const void* means, void* y,
                          cudaStream_t stream);
cudaError_t DirectTangent(const Problem& p, DType dtype, const void* t, const void* x, const void* means, void* out,
                          cudaStream_t stream);
cudaError_t DirectCotangent(const Problem& p, DType dtype, const void* g, const void* x, const void* means, void* dx,
                            void* scratch, cudaStream_t stream);

}  // namespace jaxdnn::lrn
