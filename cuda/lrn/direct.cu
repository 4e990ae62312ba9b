// Local response normalization with any window in any number of dimensions: each element walks over its own window.
//
// One thread computes N neighbouring elements of the inner dimension. Neighbours' reads overlap in the L1 cache, so
// that memory sees each array about once; the arithmetic grows with the size of the window. The cotangent takes two
// passes, with r = q x g and u = D^-beta g between them in scratch memory, since the sum of r is over the windows that
// hold an element.
#include "cuda/lrn/direct.cuh"
#include "cuda/lrn/paths.h"

namespace jaxdnn::lrn {
namespace {

enum class Pass { kForward, kTangent, kSeed, kCotangent };

template <Pass kPass, int N, class T, class A = Accumulator<T>>
__global__ void __launch_bounds__(kDirectThreads, 3)
    DirectKernel(const __grid_constant__ Problem p, const __grid_constant__ Walk walk, Response<T> response,
                 const T* __restrict__ t, const T* __restrict__ x, A* scratch, T* __restrict__ out) {
  const int64_t flat = blockIdx.x * int64_t{kDirectThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  int at[3];
  int64_t vector;
  walk.At(flat, at, &vector);
  const int64_t here = flat * N;
  A* const saved = scratch + walk.total * N;  // u; r is in front of it
  A c[N], w[N] = {}, energy[N] = {}, product[N] = {}, result[N];
  if constexpr (kPass == Pass::kCotangent) {
    ForWindow(p, at, true, [&](int64_t offset) {
      A r[N];
      LoadWide(scratch + here + offset, r);
#pragma unroll
      for (int j = 0; j < N; ++j) product[j] += r[j];
    });
    LoadWide(x + here, c);
    LoadWide(saved + here, w);
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = w[j] - c[j] * product[j];
    StoreNarrow(out + here, result);
    return;
  }
  ForWindow(p, at, false, [&](int64_t offset) {
    LoadWide(x + here + offset, c);
    if constexpr (kPass == Pass::kTangent) LoadWide(t + here + offset, w);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      energy[j] += c[j] * c[j];
      product[j] += c[j] * w[j];
    }
  });
  LoadWide(x + here, c);
  if constexpr (kPass != Pass::kForward) LoadWide(t + here, w);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    A q;
    const A gain = response.Gain(response.Divisor(energy[j]), &q);
    result[j] = (kPass == Pass::kForward ? c[j] : w[j]) * gain;
    if constexpr (kPass == Pass::kTangent) result[j] -= q * c[j] * product[j];
    if constexpr (kPass == Pass::kSeed) product[j] = q * (c[j] * w[j]);
  }
  if constexpr (kPass == Pass::kSeed) {
    StoreNarrow(scratch + here, product);
    StoreNarrow(saved + here, result);
  } else {
    StoreNarrow(out + here, result);
  }
}

template <Pass kPass>
cudaError_t Launch(const Problem& p, DType dtype, const void* t, const void* x, void* scratch, void* out,
                   cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitDirectWidth<T>(
        p,
        [&](auto width) {
          const Walk walk(p, width);
          return LaunchKernel(DirectKernel<kPass, width(), T>, CeilDiv(walk.total, kDirectThreads), kDirectThreads,
                              stream, p, walk, Response<T>(p), static_cast<const T*>(t), static_cast<const T*>(x),
                              static_cast<Accumulator<T>*>(scratch), static_cast<T*>(out));
        },
        t, x, scratch, out);
  });
}

}  // namespace

cudaError_t LaunchDirect(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                         Scratch scratch, cudaStream_t stream) {
  if (map == Map::kForward) return Launch<Pass::kForward>(p, dtype, t, x, nullptr, out, stream);
  if (map == Map::kTangent) return Launch<Pass::kTangent>(p, dtype, t, x, nullptr, out, stream);
  if (!Fits(p, dtype, scratch)) return cudaErrorInvalidValue;
  const cudaError_t status = Launch<Pass::kSeed>(p, dtype, t, x, scratch.data, nullptr, stream);
  if (status != cudaSuccess) return status;
  return Launch<Pass::kCotangent>(p, dtype, t, x, scratch.data, out, stream);
}

}  // namespace jaxdnn::lrn
