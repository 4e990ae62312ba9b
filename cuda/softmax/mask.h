// A mask that broadcasts to [outer, n, inner], and the fold of its leading dimensions into few.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxdnn::softmax {

// Entry (o, k, i) is data[Row(o) + k * along_n + i * along_inner]; without data every entry is kept. The index o counts
// through `groups` dimensions, the last fastest; a stride of 0 is a dimension that the mask does not have.
struct Mask {
  static constexpr int kMaxGroups = 6;

  const bool* data = nullptr;
  int64_t along_n = 0, along_inner = 0;
  int groups = 0;
  int64_t size[kMaxGroups] = {}, stride[kMaxGroups] = {};

#ifdef __CUDACC__
  __device__ int64_t Row(int64_t o) const {
    int64_t offset = 0;
#pragma unroll 1
    for (int d = groups - 1; d >= 0; --d) {
      const int64_t above = o / size[d];
      offset += (o - above * size[d]) * stride[d];
      o = above;
    }
    return offset;
  }
#endif
};

}  // namespace jaxdnn::softmax
