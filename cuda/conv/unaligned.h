// Forward convolution and data gradient, without stride, of any numbers of channels and features, on Hopper's tensor
// cores.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// `operand` is x forward, y in the data gradient.
cudaError_t LaunchUnaligned(const Problem& p, const void* operand, const void* filter, void* out,
                            const Epilogue& epilogue, cudaStream_t stream);

}  // namespace jaxdnn::conv
