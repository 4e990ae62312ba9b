// Square boxes in two dimensions: local response normalization within a channel.
#include "cuda/lrn/march.cuh"
#include "cuda/lrn/paths.h"

namespace jaxdnn::lrn {
namespace {

template <class T>
cudaError_t LaunchType(Map map, const Problem& p, const void* t, const void* x, void* out, cudaStream_t stream) {
  MarchArrays<T> a = {};
  a.x = static_cast<const T*>(x), a.t = static_cast<const T*>(t), a.out = static_cast<T*>(out);
  return map == Map::kForward ? LaunchBoxes<Map::kForward, false>(p, a, stream)
                              : LaunchBoxes<Map::kCotangent, false>(p, a, stream);
}

}  // namespace

bool IsBox(Map map, const Problem& p, DType dtype) { return map != Map::kTangent && IsBoxes(p, dtype); }

cudaError_t LaunchBox(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                      cudaStream_t stream) {
  return dtype == DType::kF32 ? LaunchType<float>(map, p, t, x, out, stream)
                              : LaunchType<__nv_bfloat16>(map, p, t, x, out, stream);
}

}  // namespace jaxdnn::lrn
