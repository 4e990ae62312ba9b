// Rows of any length. They are read twice, in chunks: first for the moments or sums of each chunk, then for the result.
//
// The moments are merged in double precision (Chan, Golub and LeVeque 1979), whose rounding is far below what a float
// holds; the two numbers of the mean are one double. The backward pass becomes a pass over columns once it knows the
// two sums of every row: threads own columns, and add up dscale and dbias as they go down the rows.
#include <type_traits>

#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kThreads = static_cast<int>(kMaxChunks);
// Vectors that a thread reads before it uses them.
constexpr int kBatch = 4;
// Blocks that the pass over columns is split into, if it has the rows: two waves of a big device.
constexpr int64_t kColumnBlocks = 1024;

// Of `count` values: their mean and the sum of squared differences from it; or 0 and the sum of squares.
struct Moments {
  double count, mean, square;
};

struct Merge {
  __device__ Moments operator()(Moments a, Moments b) const {
    const double count = a.count + b.count, d = b.mean - a.mean;
    if (count == 0) return a;
    return {count, a.mean + d * (b.count / count), a.square + b.square + d * d * (a.count * b.count / count)};
  }
};

// v = op over all threads of the block, in each of them, in a fixed order.
template <class V, class Op>
__device__ V BlockReduce(V v, Op op) {
  __shared__ V scratch[kThreads];
  V one[1] = {v};
  Reduce(one, op, Group{0, 8}, scratch);
  return one[0];
}

// A block's row and its vectors of that row: first, first + kThreads, ... below end.
struct Chunk {
  int64_t row, index, first, end;

  __device__ Chunk(int64_t n, int64_t chunks) : row(blockIdx.x / chunks), index(blockIdx.x - row * chunks) {
    first = n * index / chunks + threadIdx.x;
    end = n * (index + 1) / chunks;
  }
};

template <class X>
__device__ void LoadBatch(X (&v)[kBatch], const X* in, int64_t k, int64_t end) {
#pragma unroll
  for (int s = 0; s < kBatch; ++s)
    if (k + s * kThreads < end) v[s] = in[k + s * kThreads];
}

template <class T, int L>
__global__ void __launch_bounds__(kThreads)
    MomentsKernel(Forward f, bool center, int64_t n, int64_t chunks, Vec<double, 2>* __restrict__ out) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  const Chunk chunk(n, chunks);
  const int64_t base = chunk.row * n;
  Moments total = {};
  for (int64_t k = chunk.first; k < chunk.end; k += kBatch * kThreads) {
    X v[kBatch], r[kBatch];
    LoadBatch(v, static_cast<const X*>(f.x) + base, k, chunk.end);
    if (f.residual != nullptr) LoadBatch(r, static_cast<const X*>(f.residual) + base, k, chunk.end);
    // Around the batch's own mean, as that is rounded; what it is off by is the mean of the rest.
    A origin = 0, rest = 0, square = 0;
    int count = 0;
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      if (k + s * kThreads >= chunk.end) continue;
      count += L;
#pragma unroll
      for (int i = 0; i < L; ++i) {
        if (f.residual != nullptr) v[s].v[i] = static_cast<T>(static_cast<A>(v[s].v[i]) + static_cast<A>(r[s].v[i]));
        origin += static_cast<A>(v[s].v[i]);
      }
      if (f.residual != nullptr) static_cast<X*>(f.sum)[base + k + s * kThreads] = v[s];
    }
    origin = center ? origin / static_cast<A>(count) : A(0);
#pragma unroll
    for (int s = 0; s < kBatch; ++s)
      if (k + s * kThreads < chunk.end)
        for (int i = 0; i < L; ++i) {
          const A d = static_cast<A>(v[s].v[i]) - origin;
          rest += d;
          square += d * d;
        }
    const double off = center ? static_cast<double>(rest) / count : 0;
    total = Merge{}(total, {static_cast<double>(count), origin + off, square - count * off * off});
  }
  total = BlockReduce(total, Merge{});
  if (threadIdx.x == 0) out[blockIdx.x] = {{total.mean, total.square}};
}

template <class T, int L>
__global__ void __launch_bounds__(kThreads)
    NormalizeKernel(Forward f, Shape shape, Options options, int64_t chunks, const Vec<double, 2>* __restrict__ in) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  const int64_t n = shape.n / L;
  const Chunk chunk(n, chunks);
  Moments m = {};
  if (threadIdx.x < chunks) {
    const Vec<double, 2> v = in[chunk.row * chunks + threadIdx.x];
    m = {static_cast<double>((n * (threadIdx.x + 1) / chunks - n * threadIdx.x / chunks) * L), v.v[0], v.v[1]};
  }
  m = BlockReduce(m, Merge{});
  const A mean = static_cast<A>(m.mean), rest = static_cast<A>(m.mean - mean);
  const A rstd = static_cast<A>(1 / sqrt(m.square / m.count + options.epsilon));
  const Statistics<T> stats({mean, rest, rstd});
  if (chunk.first == 0) {
    static_cast<A*>(f.rstd)[chunk.row] = rstd;
    if (f.mean != nullptr) static_cast<Vec<A, 2>*>(f.mean)[chunk.row] = {{mean, rest}};
  }

  const int64_t base = chunk.row * n, parameters = chunk.row / shape.rows * n;
  const X* from = static_cast<const X*>(f.residual != nullptr ? f.sum : f.x) + base;
  for (int64_t k = chunk.first; k < chunk.end; k += kBatch * kThreads) {
    X v[kBatch];
    LoadBatch(v, from, k, chunk.end);
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const int64_t at = k + s * kThreads;
      if (at >= chunk.end) continue;
      A scale[L], bias[L];
      LoadScale(scale, f.scale, static_cast<A>(options.offset), parameters + at);
      LoadBias(bias, f.bias, parameters + at);
#pragma unroll
      for (int i = 0; i < L; ++i)
        v[s].v[i] = static_cast<T>(fma(stats.Normalize(static_cast<A>(v[s].v[i])), scale[i], bias[i]));
      static_cast<X*>(f.y)[base + at] = v[s];
    }
  }
}

// Of each chunk, the sums of q and of q h.
template <class T, int L>
__global__ void __launch_bounds__(kThreads)
    SumsKernel(Backward b, Shape shape, Options options, int64_t chunks, Vec<double, 2>* __restrict__ out) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  const int64_t n = shape.n / L;
  const Chunk chunk(n, chunks);
  const int64_t base = chunk.row * n, parameters = chunk.row / shape.rows * n;
  const Statistics<T> stats(LoadStatistics<A>(b.mean, b.rstd, chunk.row));
  double q_sum = 0, qh_sum = 0;
  for (int64_t k = chunk.first; k < chunk.end; k += kBatch * kThreads) {
    X g[kBatch], x[kBatch];
    LoadBatch(g, static_cast<const X*>(b.g) + base, k, chunk.end);
    LoadBatch(x, static_cast<const X*>(b.x) + base, k, chunk.end);
    A batch_q = 0, batch_qh = 0;
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      if (k + s * kThreads >= chunk.end) continue;
      A scale[L];
      LoadScale(scale, b.scale, static_cast<A>(options.offset), parameters + k + s * kThreads);
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const A q = static_cast<A>(g[s].v[i]) * scale[i];
        batch_q += q;
        batch_qh += q * stats.Normalize(static_cast<A>(x[s].v[i]));
      }
    }
    q_sum += batch_q;
    qh_sum += batch_qh;
  }
  q_sum = BlockReduce(q_sum, Add{});
  qh_sum = BlockReduce(qh_sum, Add{});
  if (threadIdx.x == 0) out[blockIdx.x] = {{q_sum, qh_sum}};
}

// A thread owns the columns of one vector, and takes every `parts`-th row of a problem.
template <class T, int L>
__global__ void __launch_bounds__(kThreads)
    ColumnsKernel(Backward b, Shape shape, Options options, int64_t parts, const Vec<double, 2>* __restrict__ sums) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  const int64_t n = shape.n / L, slabs = (n + kThreads - 1) / kThreads;
  const int64_t outer = blockIdx.x / slabs, problem = outer / parts, part = outer - problem * parts;
  const int64_t k = (blockIdx.x - outer * slabs) * kThreads + threadIdx.x;
  if (k >= n) return;
  A scale[L], dscale[L] = {}, dbias[L] = {};
  LoadScale(scale, b.scale, static_cast<A>(options.offset), problem * n + k);
  for (int64_t first = part; first < shape.rows; first += kBatch * parts) {
    X g[kBatch], x[kBatch], extra[kBatch];
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const int64_t row = first + s * parts, at = (problem * shape.rows + row) * n + k;
      if (row >= shape.rows) continue;
      g[s] = static_cast<const X*>(b.g)[at];
      x[s] = static_cast<const X*>(b.x)[at];
      if (b.g_sum != nullptr) extra[s] = static_cast<const X*>(b.g_sum)[at];
    }
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const int64_t row = problem * shape.rows + first + s * parts;
      if (first + s * parts >= shape.rows) continue;
      const Statistics<T> stats(LoadStatistics<A>(b.mean, b.rstd, row));
      const Vec<double, 2> sum = sums[row];
      const A mean_q = options.center ? static_cast<A>(sum.v[0] / shape.n) : A(0);
      const A mean_qh = static_cast<A>(sum.v[1] / shape.n);
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const A each = static_cast<A>(g[s].v[i]), h = stats.Normalize(static_cast<A>(x[s].v[i]));
        const A dx = stats.rstd * (each * scale[i] - mean_q - h * mean_qh);
        dscale[i] += each * h;
        dbias[i] += each;
        g[s].v[i] = static_cast<T>(b.g_sum != nullptr ? dx + static_cast<A>(extra[s].v[i]) : dx);
      }
      static_cast<X*>(b.dx)[row * n + k] = g[s];
    }
  }
  const int64_t out = outer * n + k;
  if (b.dscale != nullptr) StoreParameters(static_cast<A*>(b.dscale), out, dscale);
  if (b.dbias != nullptr) StoreParameters(static_cast<A*>(b.dbias), out, dbias);
}

// Calls f(TypeTag of the element type, integral_constant of the elements in a vector).
template <class F>
cudaError_t VisitVector(DType dtype, bool aligned, int64_t n, F&& f) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>)
      if (aligned && n % kVecLength<T> == 0) return f(type, std::integral_constant<int, kVecLength<T>>{});
    return f(type, std::integral_constant<int, 1>{});
  });
}

}  // namespace

cudaError_t RunWideForward(const Forward& f, DType dtype, const Shape& shape, const Options& options, void* workspace,
                           cudaStream_t stream) {
  const bool aligned = IsVectorAligned(f.x, f.residual, f.scale, f.bias, f.y, f.sum);
  return VisitVector(dtype, aligned, shape.n, [&](auto type, auto length) {
    using T = typename decltype(type)::type;
    constexpr int L = decltype(length)::value;
    const int64_t chunks = Chunks(shape), blocks = shape.problems * shape.rows * chunks;
    auto* moments = static_cast<Vec<double, 2>*>(workspace);
    const cudaError_t e =
        LaunchKernel(MomentsKernel<T, L>, blocks, kThreads, stream, f, options.center, shape.n / L, chunks, moments);
    if (e != cudaSuccess) return e;
    return LaunchKernel(NormalizeKernel<T, L>, blocks, kThreads, stream, f, shape, options, chunks, moments);
  });
}

cudaError_t RunWideBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options, void* workspace,
                            cudaStream_t stream) {
  const bool aligned = IsVectorAligned(b.g, b.g_sum, b.x, b.scale, b.dx, b.dscale, b.dbias, workspace);
  return VisitVector(dtype, aligned, shape.n, [&](auto type, auto length) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    constexpr int L = decltype(length)::value;
    const int64_t rows = shape.problems * shape.rows, chunks = Chunks(shape);
    auto* sums = static_cast<double*>(workspace);
    double* partial_sums = sums + 2 * rows;
    cudaError_t e = LaunchKernel(SumsKernel<T, L>, rows * chunks, kThreads, stream, b, shape, options, chunks,
                                 reinterpret_cast<Vec<double, 2>*>(partial_sums));
    if (e == cudaSuccess) e = SumRows(partial_sums, rows, chunks, 2, sums, stream);
    if (e != cudaSuccess) return e;
    const int64_t slabs = CeilDiv(shape.n / L, kThreads) * shape.problems;
    const int64_t parts = std::min(PartialRows(shape), CeilDiv(kColumnBlocks, slabs));
    const auto kernel = ColumnsKernel<T, L>;
    return WithPartialRows<A>(b, shape, parts, partial_sums + 2 * rows * chunks, stream, [&](const Backward& partial) {
      return LaunchKernel(kernel, slabs * parts, kThreads, stream, partial, shape, options, parts,
                          reinterpret_cast<const Vec<double, 2>*>(sums));
    });
  });
}

}  // namespace jaxdnn::layer_norm
