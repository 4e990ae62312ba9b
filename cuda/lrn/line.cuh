// Windows along the contiguous dimension: local response normalization across the channels of channels-last data.
#pragma once

#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {

// Whether LaunchLine takes the problem: tangents and rare types are left to the general kernel.
bool IsLine(Map map, const Problem& p, DType dtype);

// `t` is the cotangent; null for Map::kForward.
cudaError_t LaunchLine(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                       cudaStream_t stream);

}  // namespace jaxdnn::lrn
