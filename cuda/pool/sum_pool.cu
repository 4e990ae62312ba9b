// Sums and averages of windows.
//
// Bytes that must move: x + y. 16-bit elements are summed in float; the divisor is a multiplication there, whose error
// is far below the result's rounding.
#include "cuda/pool/forward.cuh"

namespace jaxdnn::pool {
namespace {

template <int N, class T>
struct Average {
  using A = Accumulator<T>;
  using Element = T;
  using Loaded = Words<T, N>;
  using State = Sum<T, N>;
  using Mergeable = State;
  static constexpr int kWidth = N;
  static constexpr bool kUnrolls = true, kShares = true;

  Shape g;
  Walk walk;
  Pitch in;
  const T* __restrict__ x;
  T* __restrict__ y;
  Division division;
  A divisor, factor;

  __device__ Loaded Identity() const { return Splat<T, N>(0.0f); }
  __device__ Loaded Get(const T* p) const { return LoadWords<N>(p); }
  __device__ Vec<T, N> Prepare(const Loaded& v) const { return BitCast<Vec<T, N>>(v); }
  __device__ void Finish(const State& state, int64_t to, int o0, int o1, int o2) const {
    Vec<T, N> result;
    if (divisor == A(0)) {
      const A factor = FactorOf<A>(g, division, o0, o1, o2);
#pragma unroll
      for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(state.value[j] * factor);
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(state.value[j] * factor);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(state.value[j] / divisor);
    }
    Store(y + to, result);
  }
};

}  // namespace

cudaError_t SumPool(const Geometry& g, DType dtype, const Division& division, const void* x, void* y,
                    Workspace workspace, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(x);
    using A = Accumulator<T>;
    T* out = static_cast<T*>(y);
    return VisitWidth<T>(
        g.channels,
        [&](auto width) {
          constexpr int N = decltype(width)::value;
          const Average<N, T> task = {Shape(g),
                                      Walk(0, g.out, g.channels, N),
                                      Pitch(g.in, g.channels),
                                      in,
                                      out,
                                      division,
                                      static_cast<A>(division.divisor),
                                      static_cast<A>(1 / division.divisor)};
          return LaunchWindows(task, workspace, stream);
        },
        in, out);
  });
}

}  // namespace jaxdnn::pool
