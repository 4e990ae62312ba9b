// Tensor transforms: permute, pad or crop, convert, scale and accumulate in one pass; patches of an image, and their
// sum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::transform {

constexpr int kMaxRank = 12;

enum class ElementType { kF32, kF64, kF16, kBF16, kS8, kU8, kS32 };

constexpr int SizeOf(ElementType t) {
  switch (t) {
    case ElementType::kF64:
      return 8;
    case ElementType::kF32:
    case ElementType::kS32:
      return 4;
    case ElementType::kF16:
    case ElementType::kBF16:
      return 2;
    default:
      return 1;
  }
}

// A dimension of the result: what lies at begin <= o < end comes from the input, `stride` elements apart, and the rest
// is padding.
struct Dim {
  int64_t extent, begin, end, stride;
};

// out[o] = alpha * T(x)[o] + beta * y[o], with `out` and `y` dense of the extents in `dims`, outermost first. T(x)[o]
// is x[offset + sum of o * stride], or `pad` where a dimension says so; `x_elements` are allocated.
struct Problem {
  int rank;
  Dim dims[kMaxRank];
  int64_t offset, x_elements;
  ElementType in, out;
  double pad, alpha, beta;
};

cudaError_t Transform(const Problem& p, const void* x, const void* y, void* out, cudaStream_t stream);

// Output o of a spatial dimension has cell k at the input position o * stride - low + k * dilation; outside [0, in) it
// is padding. Fewer than three spatial dimensions are padded in front with ones.
struct Patches {
  int64_t batch = 1, channels = 1;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, window[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, low[3] = {0, 0, 0},
          dilation[3] = {1, 1, 1};
};

// cols[b, o, k, c] = x[b, o * stride - low + k * dilation, c], or 0 in the padding. Elements are `bytes` bytes of
// anything.
cudaError_t Im2col(const Patches& p, int bytes, const void* x, void* cols, cudaStream_t stream);

// x[b, i, c] = the sum of all cols[b, o, k, c] with i = o * stride - low + k * dilation.
cudaError_t Col2im(const Patches& p, DType dtype, const void* cols, void* x, cudaStream_t stream);

}  // namespace jaxdnn::transform
