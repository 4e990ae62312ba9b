// Forward convolution and filter gradient of few input channels on the tensor cores (mma.sync, since sm_80): the first
// layers of networks; and the data gradient, without stride, of few features: the last layers of generators.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// `operand` is x forward, y in the data gradient.
cudaError_t LaunchFewChannelsData(const Problem& p, const void* operand, const void* filter, void* out,
                                  const Epilogue& epilogue, cudaStream_t stream);

// The same of what FilledPlan takes, on sm_90 with wgmma. What is not on 16 bytes, and epilogues but bias and ReLU, go
// to the kernels above.
cudaError_t LaunchFewChannelsWgmma(const Problem& p, const void* x, const void* filter, void* out,
                                   const Epilogue& epilogue, cudaStream_t stream);

// `workspace` holds config.workspace_bytes.
cudaError_t LaunchFewChannelsFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                    void* workspace, cudaStream_t stream);

cudaError_t LaunchFewChannelsFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y,
                                         void* out, void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
