// Which kernel takes which problem.
#include "cuda/lrn/columns.cuh"
#include "cuda/lrn/direct.cuh"
#include "cuda/lrn/line.cuh"
#include "cuda/lrn/lrn.h"

namespace jaxdnn::lrn {

cudaError_t Forward(const Problem& p, DType dtype, const void* x, const void* means, void* y, cudaStream_t stream) {
  if (means == nullptr && IsLine(p)) return LaunchLine(Map::kForward, p, dtype, nullptr, x, y, stream);
  if (means == nullptr && IsColumns(p)) return LaunchColumns(Map::kForward, p, dtype, nullptr, x, y, stream);
  return DirectForward(p, dtype, x, means, y, stream);
}

cudaError_t Tangent(const Problem& p, DType dtype, const void* t, const void* x, const void* means, void* out,
                    cudaStream_t stream) {
  if (means == nullptr && IsLine(p)) return LaunchLine(Map::kTangent, p, dtype, t, x, out, stream);
  if (means == nullptr && IsColumns(p)) return LaunchColumns(Map::kTangent, p, dtype, t, x, out, stream);
  return DirectTangent(p, dtype, t, x, means, out, stream);
}

cudaError_t Cotangent(const Problem& p, DType dtype, const void* g, const void* x, const void* means, void* dx,
                      void* scratch, size_t scratch_bytes, cudaStream_t stream) {
  if (means == nullptr && IsLine(p)) return LaunchLine(Map::kCotangent, p, dtype, g, x, dx, stream);
  if (means == nullptr && IsColumns(p)) return LaunchColumns(Map::kCotangent, p, dtype, g, x, dx, stream);
  const size_t elements = p.outer * p.extent[0] * p.extent[1] * p.extent[2] * p.inner;
  if (scratch_bytes < elements * (dtype == DType::kF64 ? 8 : 4)) return cudaErrorInvalidValue;
  return DirectCotangent(p, dtype, g, x, means, dx, scratch, stream);
}

}  // namespace jaxdnn::lrn
