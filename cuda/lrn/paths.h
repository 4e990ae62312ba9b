// The kernels of local response normalization that lrn.cu chooses among.
#pragma once

#include "cuda/lrn/lrn.h"

namespace jaxdnn::lrn {

// `t` is the tangent or the cotangent; null for Map::kForward.
enum class Map { kForward, kTangent, kCotangent };

// Windows along the contiguous dimension: across the channels of channels-last data. Tangents and rare types are left
// to the last kernel, as with all others.
bool IsLine(Map map, const Problem& p, DType dtype);
cudaError_t LaunchLine(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                       cudaStream_t stream);

// Windows along a dimension that is not contiguous: across the channels of channels-first data, or along the one
// spatial dimension of channels-last data.
bool IsColumns(Map map, const Problem& p, DType dtype);
cudaError_t LaunchColumns(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                          cudaStream_t stream);

// Square boxes in two dimensions: within a channel.
bool IsBox(Map map, const Problem& p, DType dtype);
cudaError_t LaunchBox(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                      cudaStream_t stream);

// Cubes of three cells a side in three dimensions, of channels that fill 16 bytes and arrays that lie on such.
bool IsCube(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out);
cudaError_t LaunchCube(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                       cudaStream_t stream);

// Any window in any number of dimensions. Scratch is for Map::kCotangent.
cudaError_t LaunchDirect(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                         Scratch scratch, cudaStream_t stream);

}  // namespace jaxdnn::lrn
