// Dense convolution of few channels without stride (the filter gradient also with one of two, of 32 channels), also of
// many problems at once, on Hopper's tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Forward (operand x) and data gradient (operand y).
cudaError_t LaunchPlanes(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                         cudaStream_t stream);

// Filter gradient; `workspace` holds config.workspace_bytes.
cudaError_t LaunchPlanesFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                               void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
