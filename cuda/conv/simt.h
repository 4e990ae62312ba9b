// The CUDA-core kernels: the floor that takes every problem.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Forward (operand x) and data gradient (operand y).
cudaError_t LaunchDataSimt(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                           const Epilogue& epilogue, cudaStream_t stream);

// Filter gradient; `workspace` holds config.workspace_bytes.
cudaError_t LaunchFilterSimt(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                             void* workspace, cudaStream_t stream);

// The same of float32 (float_tile.cuh); sums of slices go to `out`.
cudaError_t LaunchDataFloats(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                             const Epilogue& epilogue, cudaStream_t stream);
// Columns [first, end), in a tile whose steps several blocks or their parts may share (data_floats_shared.cu).
cudaError_t LaunchDataFloatsShared(const Problem& p, const Config& config, Tile tile, int64_t first, int64_t end,
                                   const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                                   cudaStream_t stream);
// Of float32 and few columns, from the first one on (runs_plan.h); `operand` is aligned to 16 bytes.
cudaError_t LaunchDataRuns(const Problem& p, int64_t first_column, const void* operand, const void* filter, void* out,
                           const Epilogue& epilogue, cudaStream_t stream);
cudaError_t LaunchFilterRuns(const Problem& p, int64_t splits, const void* x, const void* y, float* out,
                             cudaStream_t stream);
// Of float32 and sums of few terms (patch_plan.h).
cudaError_t LaunchDataPatch(const Problem& p, const void* operand, const void* filter, void* out,
                            const Epilogue& epilogue, cudaStream_t stream);
cudaError_t LaunchFilterPatch(const Problem& p, int64_t splits, const void* x, const void* y, float* out,
                              cudaStream_t stream);
cudaError_t LaunchFilterFloats(const Problem& p, const Config& config, const void* x, const void* y, float* out,
                               cudaStream_t stream);

}  // namespace jaxdnn::conv
