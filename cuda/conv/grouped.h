// Forward convolution and data gradient of small groups with 3x3 windows on the tensor cores (mma.sync, since sm_80).
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// `operand` is x forward, y in the data gradient. Arrays that are not on 16 bytes go to the kernels of mma.h.
cudaError_t LaunchGrouped(const Problem& p, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream);

}  // namespace jaxdnn::conv
