// Pooling over sliding windows, and its derivatives. Arrays are [batch, in or out..., channels], dense; channels-first
// is one channel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::pool {

// Output o of a dimension covers the input positions o * stride - low + k * dilation, 0 <= k < window; those outside
// [0, in) are padding. A stride of 0 stands for bins: output o covers [floor(o in / out), ceil((o + 1) in / out)), of
// at most `window` positions. Fewer than three spatial dimensions are padded in front with ones.
struct Geometry {
  int64_t batch = 1;
  int channels = 1;
  int in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, window[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, low[3] = {0, 0, 0},
      dilation[3] = {1, 1, 1};
};

// What a window's sum is divided by: `divisor`, or if that is 0 the number of its cells in [-low, in + high).
struct Division {
  double divisor = 1;
  int low[3] = {0, 0, 0}, high[3] = {0, 0, 0};
};

// How a window's winning cell is stored, by its row-major number in the window: one byte where 255 means that there
// is none, or four where -1 does.
enum class IndexType { kUint8, kInt32 };

// Scratch memory of the forward functions, which is not initialised; without it they are slower where
// windows are few and large.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// y[o] = the first maximum (minimum), or the first NaN, of window o; index[o] = its cell. `index` may be null.
cudaError_t MaxPool(const Geometry& g, DType dtype, IndexType index_type, bool minimum, const void* x, void* y,
                    void* index, Workspace workspace, cudaStream_t stream);

// y[o] = t at the cell that index[o] names.
cudaError_t Gather(const Geometry& g, DType dtype, IndexType index_type, const void* t, const void* index, void* y,
                   cudaStream_t stream);

// dx[i] = the sum of dy[o] over the windows o whose index names i.
cudaError_t Scatter(const Geometry& g, DType dtype, IndexType index_type, const void* dy, const void* index, void* dx,
                    cudaStream_t stream);

// y[o] = the sum of window o, divided.
cudaError_t SumPool(const Geometry& g, DType dtype, const Division& division, const void* x, void* y,
                    Workspace workspace, cudaStream_t stream);

// dx[i] = the sum of dy[o], divided, over the windows o that cover i.
cudaError_t SumPoolBwd(const Geometry& g, DType dtype, const Division& division, const void* dy, void* dx,
                       cudaStream_t stream);

// y[o] = the Lp norm of window o; `power` is positive.
cudaError_t LpPool(const Geometry& g, DType dtype, double power, const void* x, void* y, Workspace workspace,
                   cudaStream_t stream);

// Its gradient. Where a window's norm or an element is 0, the derivative is 0.
cudaError_t LpPoolBwd(const Geometry& g, DType dtype, double power, const void* dy, const void* x, const void* y,
                      void* dx, cudaStream_t stream);

}  // namespace jaxdnn::pool
