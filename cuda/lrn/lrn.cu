// Which kernel takes which problem.
#include "cuda/lrn/paths.h"

namespace jaxdnn::lrn {
namespace {

cudaError_t Launch(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out, Scratch scratch,
                   cudaStream_t stream) {
  if (p.Elements() == 0) return cudaSuccess;
  if (IsLine(map, p, dtype)) return LaunchLine(map, p, dtype, t, x, out, stream);
  if (IsColumns(map, p, dtype)) return LaunchColumns(map, p, dtype, t, x, out, stream);
  if (IsBox(map, p, dtype)) return LaunchBox(map, p, dtype, t, x, out, stream);
  if (IsCube(map, p, dtype, t, x, out)) return LaunchCube(map, p, dtype, t, x, out, stream);
  return LaunchDirect(map, p, dtype, t, x, out, scratch, stream);
}

}  // namespace

cudaError_t Forward(const Problem& p, DType dtype, const void* x, void* y, cudaStream_t stream) {
  return Launch(Map::kForward, p, dtype, nullptr, x, y, {}, stream);
}

cudaError_t Tangent(const Problem& p, DType dtype, const void* t, const void* x, void* out, cudaStream_t stream) {
  return Launch(Map::kTangent, p, dtype, t, x, out, {}, stream);
}

cudaError_t Cotangent(const Problem& p, DType dtype, const void* g, const void* x, void* dx, Scratch scratch,
                      cudaStream_t stream) {
  return Launch(Map::kCotangent, p, dtype, g, x, dx, scratch, stream);
}

}  // namespace jaxdnn::lrn
