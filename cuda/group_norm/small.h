// Group normalization of small arrays with channels last, on Hopper (small.cuh).
#pragma once

#include <optional>

#include "cuda/group_norm/group_norm.h"

namespace jaxdnn::group_norm {

// Bytes of workspace, 0 for a problem that is none of these.
int64_t SmallBackwardWorkspace(const Problem& p);

// As Forward, which needs no workspace, and Backward; nothing is done, and nothing returned, if the problem or the
// device is none of these.
std::optional<cudaError_t> SmallForward(const Problem& p, const void* x, const void* scale, const void* bias, void* y,
                                        void* statistics, cudaStream_t stream);
std::optional<cudaError_t> SmallBackward(const Problem& p, const void* dy, const void* x, const void* scale,
                                         const void* bias, const void* statistics, void* dx, void* dscale, void* dbias,
                                         void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::group_norm
