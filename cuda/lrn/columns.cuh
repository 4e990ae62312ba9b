// Windows along a dimension that is not contiguous: local response normalization across the channels of channels-first
// data, or along the one spatial dimension of channels-last data.
#pragma once

#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {

// Whether LaunchColumns takes the problem: tangents and rare types are left to the general kernel.
bool IsColumns(Map map, const Problem& p, DType dtype);

// `t` is the cotangent; null for Map::kForward.
cudaError_t LaunchColumns(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                          cudaStream_t stream);

}  // namespace jaxdnn::lrn
