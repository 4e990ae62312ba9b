// Pooling over sliding windows, and its derivatives. Arrays are [batch, in or out..., channels], dense.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::pool {

// Output o of a dimension covers the input positions o * stride - low + k * dilation, 0 <= k < window; those outside
// [0, in) are padding. Fewer than three spatial dimensions are padded in front with ones.
struct Geometry {
  int64_t batch = 1;
  int channels = 1;
  int in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, window[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, low[3] = {0, 0, 0},
      dilation[3] = {1, 1, 1};
};

// How a window's winning cell is stored, by its row-major number in the window: one byte where 255 means that there
// is none, or four where -1 does.
enum class IndexType { kUint8, kInt32 };

// y[o] = the first maximum, or the first NaN, of window o; index[o] = its cell. `index` may be null.
cudaError_t MaxPool(const Geometry& g, DType dtype, IndexType index_type, const void* x, void* y, void* index,
                    cudaStream_t stream);

// y[o] = t at the cell that index[o] names.
cudaError_t Gather(const Geometry& g, DType dtype, IndexType index_type, const void* t, const void* index, void* y,
                   cudaStream_t stream);

// dx[i] = the sum of dy[o] over the windows o whose index names i.
cudaError_t Scatter(const Geometry& g, DType dtype, IndexType index_type, const void* dy, const void* index, void* dx,
                    cudaStream_t stream);

// y[o] = the sum of window o, divided by the number of its cells: all of them, or those that are not padding.
cudaError_t AvgPool(const Geometry& g, DType dtype, bool include_pad, const void* x, void* y, cudaStream_t stream);

// dx[i] = the sum of dy[o] / count(o) over the windows o that cover i.
cudaError_t AvgPoolBwd(const Geometry& g, DType dtype, bool include_pad, const void* dy, void* dx, cudaStream_t stream);

}  // namespace jaxdnn::pool
