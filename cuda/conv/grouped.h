// Convolution of small groups with 3x3 windows on the tensor cores (mma.sync, since sm_80). Arrays that are not on 16
// bytes go to the kernels of mma.h.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Forward (operand x) and data gradient (operand y).
cudaError_t LaunchGrouped(const Problem& p, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream);

// Filter gradient; `workspace` holds config.workspace_bytes.
cudaError_t LaunchGroupedFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
