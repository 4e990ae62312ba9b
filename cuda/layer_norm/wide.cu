// Rows of any length. They are read twice, in chunks: first for the moments or sums of each chunk, then for the result.
//
// The moments are merged in double precision (Chan, Golub and LeVeque 1979), whose rounding is far below what a float
// holds; the two numbers of the mean are one double. The backward pass becomes a pass over columns once it knows the
// two sums of every row: threads own columns, and add up dscale and dbias as they go down the rows.
#include <algorithm>
#include <type_traits>

#include "cuda/common/column_sum.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kWideThreads = static_cast<int>(kMaxChunks);
// Vectors of L elements that a thread reads before it uses them.
template <int L>
constexpr int kVectors = L == 1 ? 8 : 4;
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
  __shared__ V scratch[kWideThreads];
  V one[1] = {v};
  Reduce(one, op, Group{0, 8}, scratch);
  return one[0];
}

// The moments of all `count` values, of which each thread has those of some.
__device__ Moments BlockMoments(const Moments& own, double count) {
  const double mean = BlockReduce(own.count * own.mean, Add{}) / count, d = own.mean - mean;
  return {count, mean, BlockReduce(own.square + own.count * d * d, Add{})};
}

// A block's row and its vectors of that row: first, first + kWideThreads, ... below end.
struct Chunk {
  int64_t row, index, first, end;

  __device__ Chunk(int64_t n, int chunks)
      : row(blockIdx.x / static_cast<unsigned>(chunks)), index(blockIdx.x - row * chunks) {
    first = n * index / chunks + threadIdx.x;
    end = n * (index + 1) / chunks;
  }
};

template <class X, int kBatch>
__device__ void LoadBatch(X (&v)[kBatch], const X* in, int64_t k, int64_t end) {
#pragma unroll
  for (int s = 0; s < kBatch; ++s)
    if (k + s * kWideThreads < end) v[s] = in[k + s * kWideThreads];
}

template <class T, int L>
__global__ void __launch_bounds__(kWideThreads)
    MomentsKernel(Forward f, bool center, int64_t n, int chunks, Vec<double, 2>* __restrict__ out) {
  constexpr int kBatch = kVectors<L>;
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  const Chunk chunk(n, chunks);
  const int64_t base = chunk.row * n;
  Moments total = {};
  for (int64_t k = chunk.first; k < chunk.end; k += kBatch * kWideThreads) {
    X v[kBatch], r[kBatch];
    LoadBatch(v, static_cast<const X*>(f.x) + base, k, chunk.end);
    if (f.residual != nullptr) LoadBatch(r, static_cast<const X*>(f.residual) + base, k, chunk.end);
    // Around the batch's own mean, as that is rounded; what it is off by is the mean of the rest.
    A origin = 0, rest = 0, square = 0;
    int count = 0;
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      if (k + s * kWideThreads >= chunk.end) continue;
      count += L;
#pragma unroll
      for (int i = 0; i < L; ++i) {
        if (f.residual != nullptr) v[s].v[i] = static_cast<T>(static_cast<A>(v[s].v[i]) + static_cast<A>(r[s].v[i]));
        origin += static_cast<A>(v[s].v[i]);
      }
      if (f.residual != nullptr) static_cast<X*>(f.sum)[base + k + s * kWideThreads] = v[s];
    }
    origin = center ? origin / static_cast<A>(count) : A(0);
#pragma unroll
    for (int s = 0; s < kBatch; ++s)
      if (k + s * kWideThreads < chunk.end)
        for (int i = 0; i < L; ++i) {
          const A d = static_cast<A>(v[s].v[i]) - origin;
          rest += d;
          square += d * d;
        }
    const double off = center ? static_cast<double>(rest) / count : 0;
    total = Merge{}(total, {static_cast<double>(count), origin + off, square - count * off * off});
  }
  total = BlockMoments(total, static_cast<double>((chunk.end - n * chunk.index / chunks) * L));
  if (threadIdx.x == 0) out[blockIdx.x] = {{total.mean, total.square}};
}

template <class T, int L>
__global__ void __launch_bounds__(kWideThreads)
    NormalizeKernel(Forward f, Shape shape, Options options, int chunks, const Vec<double, 2>* __restrict__ in) {
  constexpr int kBatch = kVectors<L>;
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  const int64_t n = shape.n / L;
  const Chunk chunk(n, chunks);
  Moments m = {};
  if (threadIdx.x < chunks) {
    const Vec<double, 2> v = in[chunk.row * chunks + threadIdx.x];
    m = {static_cast<double>((n * (threadIdx.x + 1) / chunks - n * threadIdx.x / chunks) * L), v.v[0], v.v[1]};
  }
  m = BlockMoments(m, static_cast<double>(shape.n));
  const A mean = static_cast<A>(m.mean), rest = static_cast<A>(m.mean - mean);
  const A rstd = static_cast<A>(1 / sqrt(m.square / m.count + options.epsilon));
  const Statistics<T> stats({mean, rest, rstd});
  if (chunk.first == 0) StoreStatistics(f, chunk.row, mean, rest, rstd);

  const int64_t base = chunk.row * n, parameters = chunk.row / shape.rows * n;
  const X* from = static_cast<const X*>(f.residual != nullptr ? f.sum : f.x) + base;
  for (int64_t k = chunk.first; k < chunk.end; k += kBatch * kWideThreads) {
    X v[kBatch];
    LoadBatch(v, from, k, chunk.end);
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const int64_t at = k + s * kWideThreads;
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

// The sums of q and of q h.
struct alignas(16) Sums {
  double q, qh;
};

struct AddSums {
  __device__ Sums operator()(const Sums& a, const Sums& b) const { return {a.q + b.q, a.qh + b.qh}; }
};

// Of each chunk, the sums of q and of q h.
template <class T, int L>
__global__ void __launch_bounds__(kWideThreads)
    SumsKernel(Backward b, Shape shape, Options options, int chunks, Sums* __restrict__ out) {
  constexpr int kBatch = kVectors<L>;
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  const int64_t n = shape.n / L;
  const Chunk chunk(n, chunks);
  const int64_t base = chunk.row * n, parameters = chunk.row / shape.rows * n;
  const Statistics<T> stats(LoadStatistics<A>(b.mean, b.rstd, chunk.row));
  Sums total = {};
  for (int64_t k = chunk.first; k < chunk.end; k += kBatch * kWideThreads) {
    X g[kBatch], x[kBatch];
    LoadBatch(g, static_cast<const X*>(b.g) + base, k, chunk.end);
    LoadBatch(x, static_cast<const X*>(b.x) + base, k, chunk.end);
    A batch_q = 0, batch_qh = 0;
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      if (k + s * kWideThreads >= chunk.end) continue;
      A scale[L];
      LoadScale(scale, b.scale, static_cast<A>(options.offset), parameters + k + s * kWideThreads);
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const A q = static_cast<A>(g[s].v[i]) * scale[i];
        batch_q += q;
        batch_qh += q * stats.Normalize(static_cast<A>(x[s].v[i]));
      }
    }
    total = AddSums{}(total, {batch_q, batch_qh});
  }
  total = BlockReduce(total, AddSums{});
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

// `width` threads side by side own the columns of one vector each; the block's other threads take other rows. Every
// `parts`-th row of a problem is a block's.
template <class T, int L>
__global__ void __launch_bounds__(kWideThreads) ColumnsKernel(Backward b, Shape shape, Options options, int width,
                                                              int parts, int chunks, const Sums* __restrict__ sums) {
  constexpr int kBatch = 4;
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  __shared__ alignas(16) A scratch[2][kWideThreads * L];
  const int64_t n = shape.n / L;
  const int slabs = static_cast<int>((n + width - 1) / width), outer = static_cast<int>(blockIdx.x) / slabs;
  const int problem = outer / parts, part = outer - problem * parts;
  const int across = threadIdx.x & (width - 1), down = threadIdx.x / width, groups = kWideThreads / width;
  const int64_t k = (static_cast<int>(blockIdx.x) - outer * slabs) * int64_t{width} + across;
  const bool exists = k < n;
  A scale[L], both[2][L] = {};  // of dscale, and of dbias
  if (exists) LoadScale(scale, b.scale, static_cast<A>(options.offset), problem * n + k);
  const int64_t step = int64_t{parts} * groups, offset = problem * shape.rows;
  const double inverse = 1.0 / static_cast<double>(shape.n);
  X g[kBatch], x[kBatch], extra[kBatch];
  StoredStatistics<A> stored[kBatch];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const int64_t row = offset + first + s * step;
      if (!exists || first + s * step >= shape.rows) continue;
      g[s] = static_cast<const X*>(b.g)[row * n + k];
      x[s] = static_cast<const X*>(b.x)[row * n + k];
      if (b.g_sum != nullptr) extra[s] = static_cast<const X*>(b.g_sum)[row * n + k];
      stored[s] = LoadStatistics<A>(b.mean, b.rstd, row);
    }
  };
  // Of a few rows every block adds up the chunks' sums itself, while its first rows are on their way.
  __shared__ A mean_q[kFewRows], mean_qh[kFewRows];
  const auto add_chunks = [&] {
    const int lanes = min(32, 1 << (32 - __clz(chunks - 1)));
#pragma unroll 1
    for (int base = 0; base < shape.rows; base += kWideThreads / lanes) {
      const int row = base + threadIdx.x / lanes;
      Sums sum = {};
      if (row < shape.rows)
#pragma unroll 4
        for (int c = threadIdx.x % lanes; c < chunks; c += lanes)
          sum = AddSums{}(sum, sums[(offset + row) * chunks + c]);
#pragma unroll 1
      for (int mask = 1; mask < lanes; mask *= 2) sum = AddSums{}(sum, ShuffleXor(sum, mask));
      if (threadIdx.x % lanes != 0 || row >= shape.rows) continue;
      mean_q[row] = static_cast<A>(sum.q * inverse);
      mean_qh[row] = static_cast<A>(sum.qh * inverse);
    }
    __syncthreads();
  };
  // All threads as many times.
  const int64_t first_of_block = int64_t{part} * groups;
#pragma unroll 1
  for (int64_t base = first_of_block; base == first_of_block || base < shape.rows; base += kBatch * step) {
    const int64_t first = base + down;
    load(first);
    if (chunks > 0 && base == first_of_block) add_chunks();
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const int64_t in_problem = first + s * step, row = offset + in_problem;
      if (!exists || in_problem >= shape.rows) continue;
      const Statistics<T> stats(stored[s]);
      A q = 0, qh = 0;
      if (chunks > 0) {
        q = mean_q[in_problem];
        qh = mean_qh[in_problem];
      } else {
        const Sums sum = sums[row];
        q = static_cast<A>(sum.q * inverse);
        qh = static_cast<A>(sum.qh * inverse);
      }
      if (!options.center) q = 0;
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const A each = static_cast<A>(g[s].v[i]), h = stats.Normalize(static_cast<A>(x[s].v[i]));
        const A dx = stats.rstd * (each * scale[i] - q - h * qh);
        both[0][i] += each * h;
        both[1][i] += each;
        g[s].v[i] = static_cast<T>(b.g_sum != nullptr ? dx + static_cast<A>(extra[s].v[i]) : dx);
      }
      static_cast<X*>(b.dx)[row * n + k] = g[s];
    }
  }
  const auto out_of = [&](int j) { return static_cast<A*>(j == 0 ? b.dscale : b.dbias); };
  if (groups == 1) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (exists && out_of(j) != nullptr) StoreParameters(out_of(j), int64_t{outer} * n + k, both[j]);
    return;
  }
  // The groups' sums, a column of each in a thread's turn.
  const int columns = width * L;
#pragma unroll
  for (int j = 0; j < 2; ++j) StoreParameters(scratch[j], threadIdx.x, both[j]);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * columns; i += kWideThreads) {
    const int j = i >= columns, c = i - j * columns;
    const int64_t column = (k - across) * L + c;
    if (column >= shape.n || out_of(j) == nullptr) continue;
    A sum = 0;
#pragma unroll 2
    for (int g = 0; g < groups; ++g) sum += scratch[j][g * columns + c];
    out_of(j)[int64_t{outer} * shape.n + column] = sum;
  }
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
    const int chunks = static_cast<int>(Chunks(shape));
    const int64_t blocks = shape.problems * shape.rows * chunks;
    auto* moments = static_cast<Vec<double, 2>*>(workspace);
    const cudaError_t e = LaunchKernel(MomentsKernel<T, L>, blocks, kWideThreads, stream, f, options.center,
                                       shape.n / L, chunks, moments);
    if (e != cudaSuccess) return e;
    return LaunchKernel(NormalizeKernel<T, L>, blocks, kWideThreads, stream, f, shape, options, chunks, moments);
  });
}

cudaError_t RunWideBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options, void* workspace,
                            cudaStream_t stream) {
  const bool aligned = IsVectorAligned(b.g, b.g_sum, b.x, b.scale, b.dx, b.dscale, b.dbias, workspace);
  return VisitVector(dtype, aligned, shape.n, [&](auto type, auto length) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    constexpr int L = decltype(length)::value;
    const int64_t rows = shape.problems * shape.rows;
    const int chunks = static_cast<int>(Chunks(shape));
    auto* sums = static_cast<Sums*>(workspace);
    Sums* partial_sums = sums + rows;
    cudaError_t e =
        LaunchKernel(SumsKernel<T, L>, rows * chunks, kWideThreads, stream, b, shape, options, chunks, partial_sums);
    const bool few = HasFewRows(shape, sizeof(T));
    if (!few && e == cudaSuccess)
      e = SumRows(reinterpret_cast<const double*>(partial_sums), rows, chunks, 2, reinterpret_cast<double*>(sums),
                  stream);
    if (e != cudaSuccess) return e;
    int width = kWideThreads;
    while (few && width > 16 && kWideThreads / width < shape.rows) width /= 2;
    const int64_t slabs = CeilDiv(shape.n / L, width) * shape.problems;
    const int64_t parts = few ? 1 : std::min(PartialRows(shape, dtype), CeilDiv(kColumnBlocks, slabs));
    const auto kernel = ColumnsKernel<T, L>;
    return WithPartialRows<A>(b, shape, parts, partial_sums + rows * chunks, stream, [&](const Backward& partial) {
      return LaunchKernel(kernel, slabs * parts, kWideThreads, stream, partial, shape, options, width,
                          static_cast<int>(parts), few ? chunks : 0, few ? partial_sums : sums);
    });
  });
}

}  // namespace jaxdnn::layer_norm
