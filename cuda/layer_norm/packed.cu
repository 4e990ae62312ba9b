// Rows so short that a vector of 16 bytes is several of them: a thread has whole rows in its registers, and makes their
// statistics itself, in the gradient once more, since they are more bytes than the row.
#include <numeric>
#include <type_traits>

#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kPackedThreads = 256;
// Vectors that a thread takes at once.
constexpr int kAtOnce = 4, kAtOnceBackward = 2;

// The array as vectors, of which the last may be a part of one.
template <class T>
struct Vectors {
  static constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;
  int64_t whole;
  int rest;  // elements behind the whole ones

  explicit Vectors(const Shape& s) : whole(s.rows * s.n / L), rest(static_cast<int>(s.rows * s.n % L)) {}
  __host__ __device__ int64_t Count() const { return whole + (rest > 0); }

  // Vectors first, first + kPackedThreads, ...; past the end whatever there is.
  template <int U>
  __device__ void Load(X (&v)[U], const void* from, int64_t first) const {
    const auto* in = static_cast<const X*>(from);
#pragma unroll
    for (int u = 0; u < U; ++u) v[u] = in[min(first + u * kPackedThreads, whole - 1)];
    if (rest == 0) return;
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (first + u * kPackedThreads == whole)
#pragma unroll
        for (int i = 0; i < L; ++i) v[u].v[i] = reinterpret_cast<const T*>(in + whole)[min(i, rest - 1)];
  }
  __device__ void Store(void* to, int64_t k, const X& v) const {
    if (k < whole) static_cast<X*>(to)[k] = v;
    if (k == whole)
#pragma unroll
      for (int i = 0; i < L; ++i)
        if (i < rest) reinterpret_cast<T*>(static_cast<X*>(to) + whole)[i] = v.v[i];
  }
};

// Of one row of N elements, which become their differences from the mean.
template <class T, int N>
struct PackedMoments {
  using A = Accumulator<T>;
  A mean = 0, rest = 0, rstd;

  __device__ PackedMoments(A (&v)[N], const Constants<A>& constants) {
    if (constants.center) {
      mean = SumOf(v) * constants.inverse;
#pragma unroll
      for (A& each : v) each -= mean;
      if constexpr (kWideMean<T>) {
        rest = SumOf(v) * constants.inverse;
#pragma unroll
        for (A& each : v) each -= rest;
      }
    }
    A square = 0;
#pragma unroll
    for (const A each : v) square = fma(each, each, square);
    rstd = InverseRoot(fma(square, constants.inverse, constants.epsilon));
  }
};

// Row r of those in a vector.
template <int N, int L, class A>
__device__ void TakeRow(A (&row)[N], const A (&v)[L], int r) {
#pragma unroll
  for (int i = 0; i < N; ++i) row[i] = v[r * N + i];
}

template <int N, class A>
__device__ void LoadParameters(A (&scale)[N], A (&bias)[N], const void* scales, const void* biases, A offset) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    scale[i] = scales == nullptr ? A(1) : static_cast<const A*>(scales)[i] + offset;
    bias[i] = biases == nullptr ? A(0) : static_cast<const A*>(biases)[i];
  }
}

// The results of the rows in v, in their place.
template <class T, int N, int M, class A>
__device__ void NormalizeRows(A (&v)[M], const A (&scale)[N], const A (&bias)[N], const Constants<A>& constants) {
#pragma unroll
  for (int r = 0; r < M / N; ++r) {
    A row[N];
    TakeRow(row, v, r);
    const PackedMoments<T, N> m(row, constants);
#pragma unroll
    for (int i = 0; i < N; ++i) v[r * N + i] = fma(row[i] * m.rstd, scale[i], bias[i]);
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kPackedThreads)
    PackedForwardKernel(Forward f, Vectors<T> vectors, Constants<Accumulator<T>> constants) {
  using A = Accumulator<T>;
  constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;
  const int64_t first = int64_t{blockIdx.x} * kAtOnce * kPackedThreads + threadIdx.x;
  X x[kAtOnce];
  vectors.Load(x, f.x, first);
  if (f.residual != nullptr) {
    X residual[kAtOnce];
    vectors.Load(residual, f.residual, first);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      x[u] = AddRounded<T>(x[u], residual[u]);
      vectors.Store(f.sum, first + u * kPackedThreads, x[u]);
    }
  }
  A scale[N], bias[N];
  LoadParameters(scale, bias, f.scale, f.bias, constants.offset);
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t k = first + u * kPackedThreads;
    A v[L];
    Widen(v, x[u]);
    NormalizeRows<T>(v, scale, bias, constants);
    vectors.Store(f.y, k, Narrow<T>(v));
  }
}

// The fewest vectors that are whole rows.
template <class T, int N>
constexpr int kRun = N / std::gcd(N, kVecLength<T>);

// The same of rows that end within a vector: a thread has as many as end with one, which are few vectors side by side.
// In shared memory threads pass them to those that load and store neighbouring vectors.
template <class T, int N>
__global__ void __launch_bounds__(kPackedThreads)
    PackedRunsKernel(Forward f, Vectors<T> vectors, Constants<Accumulator<T>> constants) {
  using A = Accumulator<T>;
  constexpr int L = kVecLength<T>, V = kRun<T, N>;
  using X = Vec<T, L>;
  __shared__ X held[kPackedThreads * V];
  const int64_t first = int64_t{blockIdx.x} * kPackedThreads * V + threadIdx.x;
#pragma unroll
  for (int s = 0; s < V; ++s) {
    const int64_t k = first + s * kPackedThreads;
    X* const to = held + s * kPackedThreads + threadIdx.x;
    if (k < vectors.whole) CopyAsync(to, static_cast<const X*>(f.x) + k);
    if (k == vectors.whole)
      for (int i = 0; i < vectors.rest; ++i) to->v[i] = static_cast<const T*>(f.x)[k * L + i];
  }
  CommitAsync();
  A scale[N], bias[N], v[V * L];
  LoadParameters(scale, bias, f.scale, f.bias, constants.offset);
  WaitAsync<0>();
  __syncthreads();
#pragma unroll
  for (int s = 0; s < V; ++s) {
    A part[L];
    Widen(part, held[threadIdx.x * V + s]);
#pragma unroll
    for (int i = 0; i < L; ++i) v[s * L + i] = part[i];
  }
  NormalizeRows<T>(v, scale, bias, constants);
#pragma unroll
  for (int s = 0; s < V; ++s) {
    A part[L];
    TakeRow(part, v, s);
    held[threadIdx.x * V + s] = Narrow<T>(part);
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < V; ++s) vectors.Store(f.y, first + s * kPackedThreads, held[s * kPackedThreads + threadIdx.x]);
}

// Every block leaves a row of dscale and of dbias.
template <class T, int N>
__global__ void __launch_bounds__(kPackedThreads)
    PackedBackwardKernel(Backward b, Shape shape, Vectors<T> vectors, Constants<Accumulator<T>> constants) {
  using A = Accumulator<T>;
  constexpr int L = kVecLength<T>, U = kAtOnceBackward;
  using X = Vec<T, L>;
  A scale[N], none[N], sums[2 * N] = {};  // of dscale, and of dbias
  LoadParameters(scale, none, b.scale, nullptr, constants.offset);
  const int64_t step = int64_t{gridDim.x} * U * kPackedThreads;
  for (int64_t first = int64_t{blockIdx.x} * U * kPackedThreads + threadIdx.x; first < vectors.Count(); first += step) {
    X gs[U], xs[U], extra[U] = {};
    vectors.Load(gs, b.g, first);
    vectors.Load(xs, b.x, first);
    if (b.g_sum != nullptr) vectors.Load(extra, b.g_sum, first);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t k = first + u * kPackedThreads;
      A g[L], x[L], g_sum[L];
      Widen(g, gs[u]);
      Widen(x, xs[u]);
      Widen(g_sum, extra[u]);
#pragma unroll
      for (int r = 0; r < L / N; ++r) {
        A h[N], q[N], qh[N];
        TakeRow(h, x, r);
        const PackedMoments<T, N> m(h, constants);
        const bool exists = k * (L / N) + r < shape.rows;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const A each = exists ? g[r * N + i] : A(0);
          h[i] *= m.rstd;
          sums[i] = fma(each, exists ? h[i] : A(0), sums[i]);
          sums[N + i] += each;
          q[i] = each * scale[i];
          qh[i] = q[i] * h[i];
        }
        const A mean_q = constants.center ? SumOf(q) * constants.inverse : A(0);
        const A mean_qh = SumOf(qh) * constants.inverse;
#pragma unroll
        for (int i = 0; i < N; ++i) g[r * N + i] = fma(m.rstd, fma(-h[i], mean_qh, q[i] - mean_q), g_sum[r * N + i]);
      }
      vectors.Store(b.dx, k, Narrow<T>(g));
    }
  }

  __shared__ A warps[kPackedThreads / 32][2 * N];
  LaneSum<true>(sums, 32);
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) warps[threadIdx.x / 32][i] = sums[i];
  __syncthreads();
  if (threadIdx.x >= 2 * N) return;
  A sum = 0;
  for (const auto& warp : warps) sum += warp[threadIdx.x];
  A* const out = static_cast<A*>(threadIdx.x < N ? b.dscale : b.dbias);
  if (out != nullptr) out[int64_t{blockIdx.x} * N + threadIdx.x % N] = sum;
}

// Calls f(TypeTag of the element type, integral_constant of a row's elements), which are a part of a vector.
template <class F>
cudaError_t VisitPacked(DType dtype, const Shape& shape, F&& f) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>) {
      if (shape.n == 1) return f(type, std::integral_constant<int, 1>{});
      if (shape.n == 2) return f(type, std::integral_constant<int, 2>{});
      if (shape.n == 4) return f(type, std::integral_constant<int, 4>{});
      if constexpr (sizeof(T) == 2)
        if (shape.n == 8) return f(type, std::integral_constant<int, 8>{});
    }
    return cudaErrorInvalidValue;
  });
}

// The same of those that are not.
template <class F>
cudaError_t VisitRuns(DType dtype, const Shape& shape, F&& f) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>) {
      if (shape.n == 3) return f(type, std::integral_constant<int, 3>{});
      if (shape.n == 5) return f(type, std::integral_constant<int, 5>{});
      if (shape.n == 6) return f(type, std::integral_constant<int, 6>{});
      if (shape.n == 7) return f(type, std::integral_constant<int, 7>{});
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace

bool TakesPacked(DType dtype, const Shape& shape) {
  const int64_t length = dtype == DType::kBF16 ? 8 : dtype == DType::kF32 ? 4 : 0;
  return shape.n > 0 && shape.n <= length && length % shape.n == 0 && shape.problems == 1 &&
         shape.rows * shape.n >= length;
}

bool TakesRuns(const Forward& f, DType dtype, const Shape& shape) {
  return (dtype == DType::kBF16 || dtype == DType::kF32) && f.residual == nullptr && shape.problems == 1 &&
         (shape.n == 3 || (shape.n >= 5 && shape.n <= 7));
}

cudaError_t RunRuns(const Forward& f, DType dtype, const Shape& shape, const Options& options, cudaStream_t stream) {
  return VisitRuns(dtype, shape, [&](auto type, auto elements) {
    using T = typename decltype(type)::type;
    constexpr int N = decltype(elements)::value, V = kRun<T, N>;
    const Vectors<T> vectors(shape);
    return LaunchKernel(PackedRunsKernel<T, N>, CeilDiv(vectors.Count(), int64_t{kPackedThreads} * V), kPackedThreads,
                        stream, f, vectors, Constants<Accumulator<T>>(options, shape.n));
  });
}

cudaError_t RunPackedForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                             cudaStream_t stream) {
  return VisitPacked(dtype, shape, [&](auto type, auto elements) {
    using T = typename decltype(type)::type;
    const Vectors<T> vectors(shape);
    return LaunchKernel(PackedForwardKernel<T, decltype(elements)::value>,
                        CeilDiv(vectors.Count(), int64_t{kAtOnce} * kPackedThreads), kPackedThreads, stream, f, vectors,
                        Constants<Accumulator<T>>(options, shape.n));
  });
}

cudaError_t RunPackedBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                              void* workspace, cudaStream_t stream) {
  return VisitPacked(dtype, shape, [&](auto type, auto elements) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const Vectors<T> vectors(shape);
    const int64_t parts =
        std::min(PartialRows(shape, dtype), CeilDiv(vectors.Count(), int64_t{kAtOnceBackward} * kPackedThreads));
    return WithPartialRows<A>(b, shape, parts, workspace, stream, [&](const Backward& partial) {
      return LaunchKernel(PackedBackwardKernel<T, decltype(elements)::value>, parts, kPackedThreads, stream, partial,
                          shape, vectors, Constants<A>(options, shape.n));
    });
  });
}

}  // namespace jaxdnn::layer_norm
