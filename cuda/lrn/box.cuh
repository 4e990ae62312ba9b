// Square boxes in two dimensions: local response normalization within a channel.
#pragma once

#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {

// Whether LaunchBox takes the problem: tangents and rare types are left to the general kernel.
bool IsBox(Map map, const Problem& p, DType dtype);

// `t` is the cotangent; null for Map::kForward.
cudaError_t LaunchBox(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                      cudaStream_t stream);

}  // namespace jaxdnn::lrn
