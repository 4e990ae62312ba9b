// The Hopper kernels (sm_90a) for 16-bit floats, and floats as TF32: TMA loads, wgmma products.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Forward (operand x) and data gradient (operand y).
cudaError_t LaunchDataWgmma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                            void* workspace, const Epilogue& epilogue, cudaStream_t stream);

// Filter gradient; `workspace` holds config.workspace_bytes.
cudaError_t LaunchFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                              void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
