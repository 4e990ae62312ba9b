// Any window in any number of dimensions: each element walks over its own window.
//
// One thread computes N neighbouring elements of the inner dimension. Neighbours' reads overlap in the L1 cache, so
// that memory sees each array about once; the arithmetic grows with the size of the window. The cotangent takes two
// passes, with r = q c g between them in scratch memory, since its sum is over the windows that hold an element.
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/lrn/direct.cuh"
#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {
namespace {

constexpr int kThreads = 256;

// What a pass leaves behind.
enum class Pass { kForward, kTangent, kSeed, kCotangent };

struct Walk {
  int64_t vectors, total;  // of an inner row, and in all
  FastDiv by_vectors, by_extent[3];
};

// The part of a window that lies inside, around position `at` of dimension d.
struct Range {
  int first, last;
};

__device__ inline Range Inside(const Problem& p, int d, int at, bool mirrored) {
  const int before = mirrored ? p.after[d] : p.before[d], after = mirrored ? p.before[d] : p.after[d];
  return {-min(before, at), min(after, p.extent[d] - 1 - at)};
}

template <int N, class T>
__device__ Vec<T, N> Load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

// sum[j] += f(offset)[j] over the window of the element at `at`.
template <int N, class A, class F>
__device__ void ForWindow(const Problem& p, const int (&at)[3], bool mirrored, F&& f) {
  const Range r0 = Inside(p, 0, at[0], mirrored), r1 = Inside(p, 1, at[1], mirrored),
              r2 = Inside(p, 2, at[2], mirrored);
  for (int i0 = r0.first; i0 <= r0.last; ++i0)
    for (int i1 = r1.first; i1 <= r1.last; ++i1)
      for (int i2 = r2.first; i2 <= r2.last; ++i2) f(((int64_t{i0} * p.extent[1] + i1) * p.extent[2] + i2) * p.inner);
}

template <Pass kPass, int N, class T, class A = Accumulator<T>>
__global__ void __launch_bounds__(kThreads)
    DirectKernel(const __grid_constant__ Problem p, const __grid_constant__ Walk walk, Response<T> response,
                 const T* __restrict__ t, const T* __restrict__ x, const T* __restrict__ means, A* scratch,
                 T* __restrict__ out) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  int at[3];
  if (walk.total <= INT32_MAX) {
    int rest = walk.by_vectors.Div(static_cast<int>(flat));
#pragma unroll
    for (int d = 2; d >= 0; --d) rest = walk.by_extent[d].Div(rest, &at[d]);
  } else {
    int64_t rest = flat / walk.vectors;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      at[d] = static_cast<int>(rest % p.extent[d]);
      rest /= p.extent[d];
    }
  }
  const int64_t here = flat * N;
  const auto centred = [&](int64_t i, A(&c)[N]) {
    const Vec<T, N> v = Load<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; ++j) c[j] = static_cast<A>(v.v[j]);
    if (means != nullptr) {
      const Vec<T, N> m = Load<N>(means + i);
#pragma unroll
      for (int j = 0; j < N; ++j) c[j] -= static_cast<A>(m.v[j]);
    }
  };

  A energy[N] = {}, product[N] = {}, c[N];
  ForWindow<N, A>(p, at, false, [&](int64_t offset) {
    centred(here + offset, c);
#pragma unroll
    for (int j = 0; j < N; ++j) energy[j] += c[j] * c[j];
    if constexpr (kPass == Pass::kTangent) {
      const Vec<T, N> v = Load<N>(t + here + offset);
#pragma unroll
      for (int j = 0; j < N; ++j) product[j] += c[j] * static_cast<A>(v.v[j]);
    }
  });
  if constexpr (kPass == Pass::kCotangent) {
    ForWindow<N, A>(p, at, true, [&](int64_t offset) {
      const Vec<A, N> r = Load<N>(scratch + here + offset);
#pragma unroll
      for (int j = 0; j < N; ++j) product[j] += r.v[j];
    });
  }
  centred(here, c);
  Vec<T, N> v = {}, result;
  Vec<A, N> seed;
  if constexpr (kPass != Pass::kForward) v = Load<N>(t + here);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    A q;
    const A gain = response.Gain(response.Divisor(energy[j]), &q), w = static_cast<A>(v.v[j]);
    if constexpr (kPass == Pass::kForward) result.v[j] = static_cast<T>(c[j] * gain);
    if constexpr (kPass == Pass::kTangent) result.v[j] = static_cast<T>(w * gain - q * c[j] * product[j]);
    if constexpr (kPass == Pass::kSeed) seed.v[j] = q * c[j] * w;
    if constexpr (kPass == Pass::kCotangent) result.v[j] = static_cast<T>(w * gain - c[j] * product[j]);
  }
  if constexpr (kPass == Pass::kSeed)
    *reinterpret_cast<Vec<A, N>*>(scratch + here) = seed;
  else
    *reinterpret_cast<Vec<T, N>*>(out + here) = result;
}

template <Pass kPass>
cudaError_t Launch(const Problem& p, DType dtype, const void* t, const void* x, const void* means, void* scratch,
                   void* out, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t vectors = p.inner / N;
      const Walk walk = {vectors,
                         p.outer * p.extent[0] * p.extent[1] * p.extent[2] * vectors,
                         FastDiv(vectors),
                         {FastDiv(p.extent[0]), FastDiv(p.extent[1]), FastDiv(p.extent[2])}};
      return LaunchKernel(DirectKernel<kPass, N, T>, CeilDiv(walk.total, kThreads), kThreads, stream, p, walk,
                          Response<T>(p), static_cast<const T*>(t), static_cast<const T*>(x),
                          static_cast<const T*>(means), static_cast<A*>(scratch), static_cast<T*>(out));
    };
    constexpr int kWide = sizeof(T) == 8 ? 2 : 4;
    if (p.inner % kWide == 0 && IsVectorAligned(t, x, means, scratch, out))
      return run(std::integral_constant<int, kWide>{});
    return run(std::integral_constant<int, 1>{});
  });
}

}  // namespace

cudaError_t DirectForward(const Problem& p, DType dtype, const void* x, const void* means, void* y,
                          cudaStream_t stream) {
  return Launch<Pass::kForward>(p, dtype, nullptr, x, means, nullptr, y, stream);
}

cudaError_t DirectTangent(const Problem& p, DType dtype, const void* t, const void* x, const void* means, void* out,
                          cudaStream_t stream) {
  return Launch<Pass::kTangent>(p, dtype, t, x, means, nullptr, out, stream);
}

cudaError_t DirectCotangent(const Problem& p, DType dtype, const void* g, const void* x, const void* means, void* dx,
                            void* scratch, cudaStream_t stream) {
  const cudaError_t status = Launch<Pass::kSeed>(p, dtype, g, x, means, scratch, nullptr, stream);
  return status != cudaSuccess ? status : Launch<Pass::kCotangent>(p, dtype, g, x, means, scratch, dx, stream);
}

}  // namespace jaxdnn::lrn
