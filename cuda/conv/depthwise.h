// Depthwise convolution: every input channel by itself, into one feature or several. On the CUDA cores, or, of 16-bit
// floats in larger windows, the tensor cores, at what memory or arithmetic allow.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Where windows reach beyond edges (frame.h), these are cudaErrorInvalidValue if no kernel that reads what is there
// takes the arrays' alignment or the epilogue.

// Forward (operand x) and data gradient (operand y).
cudaError_t LaunchDepthwiseData(const Problem& p, const void* operand, const void* filter, void* out,
                                const Epilogue& epilogue, cudaStream_t stream);

// Filter gradient; `workspace` holds config.workspace_bytes.
cudaError_t LaunchDepthwiseFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                  void* workspace, cudaStream_t stream);

// As these, of what TakesUnalignedDepthwise and an epilogue that is a bias at most, on Hopper; of other epilogues
// cudaErrorInvalidValue.
cudaError_t LaunchUnalignedDepthwiseData(const Problem& p, const void* operand, const void* filter, void* out,
                                         const Epilogue& epilogue, cudaStream_t stream);
cudaError_t LaunchUnalignedDepthwiseFilter(const Problem& p, const Config& config, const void* x, const void* y,
                                           void* out, void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
