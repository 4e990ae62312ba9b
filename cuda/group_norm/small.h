// Group normalization of small arrays with channels last, on Hopper.
#pragma once

#include <optional>

#include "cuda/group_norm/group_norm.h"

namespace jaxdnn::group_norm {

// As Forward, without a workspace; nothing is done, and nothing returned, if the problem is not one of these.
std::optional<cudaError_t> SmallForward(const Problem& p, const void* x, const void* scale, const void* bias, void* y,
                                        void* statistics, cudaStream_t stream);

}  // namespace jaxdnn::group_norm
