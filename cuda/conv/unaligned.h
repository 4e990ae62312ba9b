// Convolution without stride of any numbers of channels and features, on Hopper's tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/unaligned_plan.h"

namespace jaxdnn::conv {

// Forward (operand x) and data gradient (operand y); `workspace` holds config.workspace_bytes.
cudaError_t LaunchUnaligned(const Problem& p, const void* operand, const void* filter, void* out, void* workspace,
                            const Epilogue& epilogue, cudaStream_t stream);

// What it launches where that fits.
cudaError_t LaunchUnalignedStream(const Problem& p, const UnalignedStreamPlan& plan, const void* operand,
                                  const void* filter, void* out, void* workspace, const Epilogue& epilogue,
                                  cudaStream_t stream);

// Filter gradient, and that of floats; likewise.
cudaError_t LaunchUnalignedFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                  void* workspace, cudaStream_t stream);
cudaError_t LaunchUnalignedFilterFloats(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                        void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
