// Sums and averages of windows.
//
// Bytes that must move: x + y. 16-bit elements are summed in float; the divisor is a multiplication there, whose error
// is far below the result's rounding.
#include "cuda/pool/forward.cuh"
#include "cuda/pool/planes.cuh"
#include "cuda/pool/rows.cuh"

namespace jaxdnn::pool {
namespace {

// kCounted: whether every window is divided by the number of its cells. kAlongRow: whether the N results are neighbours
// in a row, of windows without gaps, instead of channels.
template <int N, class T, bool kCounted, bool kAlongRow>
struct Average {
  using A = Accumulator<T>;
  using Element = T;
  using Loaded = Words<T, N>;
  using State = Sum<T, N>;
  using Mergeable = State;
  using Quick = State;
  static constexpr int kWidth = N, kResident = 4;
  static constexpr bool kUnrolls = true, kShares = true, kWidens = true, kIdempotent = false, kIsLight = !kCounted,
                        kWhole = !kCounted;

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
  template <bool kDense = false>
  __device__ void Finish(const State& state, int64_t to, int o0, int o1, int o2) const {
    Store(y + to, Result<kDense>(state, o0, o1, o2));
  }
  // Stores the first `count`, neighbours in a row, one by one.
  __device__ void FinishEach(const State& state, int to, int o1, int o2, int count) const {
    const Vec<T, N> result = Result<true>(state, 0, o1, o2);
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < count) y[to + j] = result.v[j];
  }
  template <bool kDense>
  __device__ Vec<T, N> Result(const State& state, int o0, int o1, int o2) const {
    Vec<T, N> result;
    A own = factor;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kCounted) {
        if (j == 0 || kAlongRow) own = FactorOf<A, kDense>(g, division, o0, o1, o2 + j);
        result.v[j] = static_cast<T>(state.value[j] * own);
      } else {
        result.v[j] = static_cast<T>(Divided(state.value[j]));
      }
    }
    return result;
  }
  // By the divisor, as division rounds, but without its branches.
  __device__ A Divided(A sum) const {
    if constexpr (sizeof(T) == 2) {
      return sum * factor;
    } else if constexpr (sizeof(T) == 4) {
      const float quotient = sum * factor, corrected = fmaf(fmaf(-quotient, divisor, sum), factor, quotient);
      return fabsf(quotient) < INFINITY ? corrected : quotient;
    } else {
      return sum / divisor;
    }
  }
};

}  // namespace

cudaError_t SumPool(const Geometry& g, DType dtype, const Division& division, const void* x, void* y,
                    Workspace workspace, cudaStream_t stream) {
  // The cells of a window that is all there is are counted here.
  const double cells = static_cast<double>(g.in[0]) * g.in[1] * g.in[2];
  const double divisor = division.divisor == 0 && WindowIsWhole(g) ? cells : division.divisor;
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(x);
    using A = Accumulator<T>;
    T* out = static_cast<T*>(y);
    const auto launch = [&](auto counted) {
      const auto task = [&](auto width, auto along_row) {
        return Average<width(), T, counted(), along_row()>{Shape(g),
                                                           Walk(0, g.out, g.channels, along_row() ? 1 : width()),
                                                           Pitch(g.in, g.channels),
                                                           in,
                                                           out,
                                                           division,
                                                           static_cast<A>(divisor),
                                                           static_cast<A>(1 / divisor)};
      };
      const auto general = [&] {
        return VisitWidth<T>(
            g.channels, [&](auto width) { return LaunchWindows(task(width, std::false_type{}), workspace, stream); },
            in, out);
      };
      if constexpr (kIsTuned<T>) {
        const auto planes = [&] {
          return LaunchPlanes(g, general, stream,
                              [&] { return task(std::integral_constant<int, kVecLength<T>>{}, std::true_type{}); });
        };
        return LaunchRows<T>(g, IsVectorAligned(in, out), planes, stream,
                             [&](auto width) { return task(width, std::true_type{}); });
      } else {
        return general();
      }
    };
    return divisor == 0 ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

}  // namespace jaxdnn::pool
