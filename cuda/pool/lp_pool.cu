// Lp norms of windows, and their gradient.
//
// y[o] = (sum of |x[i]|^p)^(1/p), dx[i] = sign(x[i]) |x[i]|^(p-1) * sum over windows of dy[o] y[o]^(1-p), with 0 where
// a base is 0. Bytes that must move: x + y forward; dy + y + x + dx backward.
#include "cuda/pool/forward.cuh"
#include "cuda/pool/spread.cuh"

namespace jaxdnn::pool {
namespace {

// |v|^exponent, but 0 at 0 whatever the exponent.
template <class A>
static __device__ __noinline__ A AnyPower(A v, A exponent) {
  return v == A(0) ? A(0) : pow(v < A(0) ? -v : v, exponent);
}

// The same of N values. The usual exponents are chosen once, not value by value.
template <int N, class A>
__device__ void RaiseTo(A exponent, A (&v)[N]) {
  if (exponent == A(2)) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] *= v[j];
  } else if (exponent == A(1)) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = v[j] < A(0) ? -v[j] : v[j];
  } else if (exponent == A(0.5)) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = sqrt(v[j] < A(0) ? -v[j] : v[j]);
  } else if (exponent == A(-1)) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = v[j] == A(0) ? A(0) : A(1) / (v[j] < A(0) ? -v[j] : v[j]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = AnyPower(v[j], exponent);
  }
}

// With an exponent that the compiler does not know, in one place instead of wherever a window's cells are taken.
template <int N, class A>
static __device__ __noinline__ Vec<A, N> Raised(A exponent, Vec<A, N> v) {
  RaiseTo(exponent, v.v);
  return v;
}
template <int N, class A>
__device__ void Raise(A exponent, A (&v)[N]) {
  const auto raised = Raised(exponent, BitCast<Vec<A, N>>(v));
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = raised.v[j];
}

// kSquares: p = 2, known to the compiler: an element has no time for more.
template <int N, class T, bool kSquares>
struct Norm {
  using A = Accumulator<T>;
  using Element = T;
  using Loaded = Words<T, N>;
  using State = Sum<T, N>;
  using Mergeable = State;
  static constexpr int kWidth = N;
  static constexpr int kResident = kSquares ? 4 : 3;
  static constexpr bool kUnrolls = false, kShares = false;

  Shape g;
  Walk walk;
  Pitch in;
  const T* __restrict__ x;
  T* __restrict__ y;
  A power;

  __device__ Loaded Identity() const { return Splat<T, N>(0.0f); }
  __device__ Loaded Get(const T* p) const {
    Loaded words = LoadWords<N>(p);
    if constexpr (!kSquares) KeepLoaded(words);  // before the calls of Raised
    return words;
  }
  __device__ Vec<A, N> Prepare(const Loaded& words) const {
    const auto v = BitCast<Vec<T, N>>(words);
    Vec<A, N> powers;
#pragma unroll
    for (int j = 0; j < N; ++j) powers.v[j] = static_cast<A>(v.v[j]);
    if constexpr (kSquares)
      RaiseTo(A(2), powers.v);
    else
      Raise(power, powers.v);
    return powers;
  }
  __device__ void Finish(const State& state, int64_t to, int, int, int) const {
    A root[N];
#pragma unroll
    for (int j = 0; j < N; ++j) root[j] = state.value[j];
    if constexpr (kSquares && sizeof(T) == 2) {
      // An error of 2^-23 or so, far below the rounding of the result.
#pragma unroll
      for (A& each : root) asm("sqrt.approx.f32 %0, %0;" : "+f"(each));
    } else if constexpr (kSquares) {
      RaiseTo(A(0.5), root);
    } else {
      Raise(A(1) / power, root);
    }
    Store(y + to, Rounded<T>(root));
  }
};

template <int N, class T, bool kSquares>
struct NormShares {
  using A = Accumulator<T>;
  using Element = T;
  static constexpr int kWidth = N;
  static constexpr bool kShortcuts = false, kWhole = false;

  struct Share {
    A value[N];

    __device__ void Clear() {
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] = A(0);
    }
    __device__ void Load(const NormShares& task, int64_t offset, int, int, int) {
      const Vec<T, N> dy = pool::Load<N>(task.dy + offset), y = pool::Load<N>(task.y + offset);
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] = static_cast<A>(y.v[j]);
      if constexpr (kSquares) {
#pragma unroll
        for (int j = 0; j < N; ++j) value[j] = value[j] == 0 ? 0 : __fdividef(1, value[j]);
      } else if (task.Power() != A(1)) {
        // At p = 1 the factor is 1, and 0 only where every element is 0 and has the factor 0 itself.
        RaiseTo(A(1) - task.Power(), value);
      }
#pragma unroll
      for (int j = 0; j < N; ++j)
        value[j] = task.Power() == A(1) ? static_cast<A>(dy.v[j]) : value[j] * static_cast<A>(dy.v[j]);
    }
    __device__ void Add(A (&sum)[N], int) const {
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += value[j];
    }
  };

  Shape g;
  Walk walk;
  Pitch in, out;
  Cover cover;
  const T* __restrict__ dy;
  const T* __restrict__ x;
  const T* __restrict__ y;
  T* __restrict__ dx;
  A any_power;

  __device__ A Power() const { return kSquares ? A(2) : any_power; }
  __device__ Vec<T, N> Final(int64_t to, const A (&sum)[N]) const {
    const Vec<T, N> v = Load<N>(x + to);
    A result[N];
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = static_cast<A>(v.v[j]);
    if (Power() != A(1)) RaiseTo(Power() - A(1), result);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A base = static_cast<A>(v.v[j]);
      // At p = 1 the factor is the sign alone.
      const A factor = Power() == A(1) ? A(base != A(0)) : result[j];
      result[j] = sum[j] * (base < A(0) ? -factor : factor);
    }
    return Rounded<T>(result);
  }
};

}  // namespace

cudaError_t LpPool(const Geometry& g, DType dtype, double power, const void* x, void* y, Workspace workspace,
                   cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const auto launch = [&](auto squares) {
      return VisitWidth<T>(
          g.channels,
          [&](auto width) {
            constexpr int N = decltype(width)::value;
            const Norm<N, T, squares()> task = {
                Shape(g), Walk(0, g.out, g.channels, N),     Pitch(g.in, g.channels), in,
                out,      static_cast<Accumulator<T>>(power)};
            return LaunchWindows(task, workspace, stream);
          },
          in, out);
    };
    if constexpr (sizeof(T) < 8) {
      if (power == 2) return launch(std::true_type{});
    }
    return launch(std::false_type{});
  });
}

cudaError_t LpPoolBwd(const Geometry& g, DType dtype, double power, const void* dy, const void* x, const void* y,
                      void* dx, cudaStream_t stream) {
  const Geometry apart = WithLoneWindowsApart(g);
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *up = static_cast<const T*>(dy), *in = static_cast<const T*>(x), *norm = static_cast<const T*>(y);
    T* out = static_cast<T*>(dx);
    const auto launch = [&](auto squares) {
      return VisitWidth<T>(
          g.channels,
          [&](auto width) {
            constexpr int N = decltype(width)::value;
            const NormShares<N, T, squares()> task = {Shape(apart),
                                                      Walk(0, g.in, g.channels, N),
                                                      Pitch(g.in, g.channels),
                                                      Pitch(g.out, g.channels),
                                                      Cover(apart),
                                                      up,
                                                      in,
                                                      norm,
                                                      out,
                                                      static_cast<Accumulator<T>>(power)};
            return LaunchSpread(task, stream);
          },
          up, in, norm, out);
    };
    if constexpr (sizeof(T) == 2) {
      if (power == 2) return launch(std::true_type{});
    }
    return launch(std::false_type{});
  });
}

}  // namespace jaxdnn::pool
