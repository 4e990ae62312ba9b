// The Hopper kernels (sm_90a): TMA loads, wgmma products.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Forward (operand x) and data gradient (operand y).
cudaError_t LaunchDataWgmma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                            void* workspace, const Epilogue& epilogue, cudaStream_t stream);

// The same of pairs of pixels (pairs.h).
cudaError_t LaunchDataPairsWgmma(const Problem& p, const Config& config, const void* operand, const void* filter,
                                 void* out, const Epilogue& epilogue, cudaStream_t stream);

// Forward, of 8-bit operands; `workspace` holds config.workspace_bytes. Takes the tiles 128x128 and 128x64.
cudaError_t LaunchDataBytesWgmma(const Problem& p, const Config& config, const void* x, const void* w, void* y,
                                 void* workspace, const Epilogue& epilogue, cudaStream_t stream);

// Filter gradient; `workspace` holds config.workspace_bytes.
cudaError_t LaunchFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                              void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
