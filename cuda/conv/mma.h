// The tensor-core kernels with mma.sync, on every architecture since sm_80.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Forward (operand x) and data gradient (operand y).
cudaError_t LaunchDataMma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream);

// The same for one group at a time, where lines are no whole chunks of 16 bytes. Takes the tiles 128x64 and 128x32; any
// other stands for the first.
cudaError_t LaunchDataRagged(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                             const Epilogue& epilogue, cudaStream_t stream);

// Forward, of 8-bit operands. Takes the tiles 128x128 and 128x64.
cudaError_t LaunchDataBytes(const Problem& p, const Config& config, const void* x, const void* w, void* y,
                            const Epilogue& epilogue, cudaStream_t stream);

// Filter gradient; `workspace` holds config.workspace_bytes.
cudaError_t LaunchFilterMma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                            void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
