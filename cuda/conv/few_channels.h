// Forward convolution and filter gradient of few input channels on the tensor cores (mma.sync, since sm_80): the first
// layers of networks.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

cudaError_t LaunchFewChannelsData(const Problem& p, const void* x, const void* w, void* y, const Epilogue& epilogue,
                                  cudaStream_t stream);

// `workspace` holds config.workspace_bytes.
cudaError_t LaunchFewChannelsFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                    void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
