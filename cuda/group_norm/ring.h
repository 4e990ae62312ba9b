// Group normalization of large arrays on Hopper (ring.cuh).
#pragma once

#include <optional>

#include "cuda/group_norm/group_norm.h"

namespace jaxdnn::group_norm {

// Bytes of workspace, 0 for a problem that rings do not take.
int64_t RingForwardWorkspace(const Problem& p);
int64_t RingBackwardWorkspace(const Problem& p);

// As Forward and Backward; nothing is done, and nothing returned, if rings do not take the problem on this device.
std::optional<cudaError_t> RingForward(const Problem& p, const void* x, const void* scale, const void* bias, void* y,
                                       void* statistics, void* workspace, cudaStream_t stream);
std::optional<cudaError_t> RingBackward(const Problem& p, const void* dy, const void* x, const void* scale,
                                        const void* bias, const void* statistics, void* dx, void* dscale, void* dbias,
                                        void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::group_norm
