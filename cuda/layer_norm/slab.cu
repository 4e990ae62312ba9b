// Short rows that are not aligned to 16 bytes.
//
// A slab of several rows is aligned where its rows are not. A block moves slabs between global and shared memory in
// 16-byte accesses, the next one while it works on one, and there lets groups of lanes take rows element by element:
// lane t of the group takes elements t, t + size, ..., V of them at most. Its columns are the same in every row, so
// that parameters, and sums for their gradients, stay in registers.
#include "cuda/common/reduce.cuh"
#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kSlabThreads = 256;
// Elements of a lane; and of V of those, how many no row is too short for.
constexpr int kMostOfLane = 16;
template <int V>
constexpr int kSure = V > 4 ? V - 4 : 1;
constexpr int kLongest = 32 * kMostOfLane;
constexpr int kSlabBytes = 16 << 10;
// Blocks of a multiprocessor, for which registers are left by a lane's V elements.
template <int V>
constexpr int kForwardBlocks = V > 8 ? 3 : 4;
template <int V>
constexpr int kBackwardBlocks = V > 4 ? 2 : 4;

struct Slabs {
  int n;      // elements of a row
  int rows;   // of a slab
  int width;  // lanes of a group, a power of two
};

// A thread's place in its group, and its columns.
template <int V>
struct Lane {
  int n, lane, width, row;  // row: of those that the block takes at once

  template <class T>
  __device__ Lane(const Slabs& s, T) : n(s.n), lane(threadIdx.x & (s.width - 1)), width(s.width) {
    // The warp's groups take rows so far apart that they read different banks of shared memory, where n is odd. Of the
    // shortest, neighbours, whose statistics are neighbours too.
    const int apart = V <= 4 ? 1 : min(width * 4 / static_cast<int>(sizeof(T)), kSlabThreads / 32);
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / width;
    row = (warp / apart * 32 / width + group) * apart + warp % apart;
  }
  __device__ int Column(int i) const { return lane + i * width; }
  __device__ bool Has(int i) const { return i < kSure<V> || Column(i) < n; }

  // v = f(its element) for each of the lane's columns, and 0 past the end of the row, in whose place its first one is
  // read: other lanes write others.
  template <class A, class F>
  __device__ void Load(A (&v)[V], F&& f) const {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = f(Has(i) ? Column(i) : lane);
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (!Has(i)) v[i] = 0;
  }
  template <class F>
  __device__ void ForEach(F&& f) const {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (Has(i)) f(i, Column(i));
  }
  // The sum over the lanes of the group.
  template <class A>
  __device__ A Sum(A v) const {
    for (int mask = 1; mask < width; mask *= 2) v += ShuffleXor(v, mask);
    return v;
  }
};

// Copies a slab of `count` elements. A thread copies the same ones in as out: it need not wait for others in between.
template <class T>
__device__ void LoadSlab(T* shared, const T* global, int count) {
  using X = Vec<T, kVecLength<T>>;
  const int vectors = count / kVecLength<T>;
#pragma unroll 1
  for (int k = threadIdx.x; k < vectors; k += kSlabThreads)
    CopyAsync(reinterpret_cast<X*>(shared) + k, reinterpret_cast<const X*>(global) + k);
  if (vectors % kSlabThreads == threadIdx.x)
#pragma unroll 1
    for (int k = vectors * kVecLength<T>; k < count; ++k) shared[k] = global[k];
}

template <class T>
__device__ void StoreSlab(T* global, const T* shared, int count) {
  using X = Vec<T, kVecLength<T>>;
  const int vectors = count / kVecLength<T>;
#pragma unroll 2
  for (int k = threadIdx.x; k < vectors; k += kSlabThreads)
    reinterpret_cast<X*>(global)[k] = reinterpret_cast<const X*>(shared)[k];
  if (vectors % kSlabThreads == threadIdx.x)
#pragma unroll 1
    for (int k = vectors * kVecLength<T>; k < count; ++k) global[k] = shared[k];
}

// A block's slabs: every `parts`-th of one problem.
struct Share {
  int problem;
  int64_t offset, first, step, end;  // rows: before the problem; of the problem, those of the slabs

  __device__ Share(const Shape& shape, const Slabs& slabs, int parts)
      : problem(blockIdx.x / parts),
        offset(problem * shape.rows),
        first(int64_t{blockIdx.x - static_cast<unsigned>(problem * parts)} * slabs.rows),
        step(int64_t{parts} * slabs.rows),
        end(shape.rows) {}
  __device__ int Rows(const Slabs& slabs, int64_t from) const {
    return static_cast<int>(max(int64_t{0}, min(int64_t{slabs.rows}, end - from)));
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kSlabThreads, kForwardBlocks<V>)
    SlabForwardKernel(Forward f, Shape shape, Constants<Accumulator<T>> constants, Slabs slabs, int parts) {
  using A = Accumulator<T>;
  extern __shared__ uint4 shared[];
  const Lane<V> lane(slabs, T());
  Share share(shape, slabs, parts);
  const int n = slabs.n, slab = slabs.rows * n, inputs = f.residual == nullptr ? 1 : 2,
            groups = kSlabThreads / slabs.width;
  const auto buffer = [&](int stage, int input) {
    return reinterpret_cast<T*>(shared) + (stage * inputs + input) * slab;
  };
  const auto fetch = [&](int64_t first, int stage) {
    const int count = share.Rows(slabs, first) * n;
    const int64_t at = (share.offset + first) * n;
    LoadSlab(buffer(stage, 0), static_cast<const T*>(f.x) + at, count);
    if (f.residual != nullptr) LoadSlab(buffer(stage, 1), static_cast<const T*>(f.residual) + at, count);
    CommitAsync();
  };

  fetch(share.first, 0);
  A scale[V], bias[V];  // They come while the first slab does.
  const int64_t parameters = int64_t{share.problem} * n;
  lane.Load(scale, [&](int c) {
    return f.scale == nullptr ? A(1) : static_cast<const A*>(f.scale)[parameters + c] + constants.offset;
  });
  lane.Load(bias, [&](int c) { return f.bias == nullptr ? A(0) : static_cast<const A*>(f.bias)[parameters + c]; });

#pragma unroll 1
  for (int stage = 0; share.first < share.end; share.first += share.step, stage ^= 1) {
    fetch(share.first + share.step, stage ^ 1);
    WaitAsync<1>();
    __syncthreads();
    const int rows = share.Rows(slabs, share.first);
    T *const x = buffer(stage, 0), *const y = buffer(stage, inputs - 1);
    // Every lane of a warp goes as many rounds: they add up together.
#pragma unroll 1
    for (int round = 0; round < rows; round += groups) {
      const int r = round + lane.row, at = r * n;
      A v[V] = {}, sum = 0, rest = 0, square = 0;
      if (r < rows) {
        lane.Load(v, [&](int c) { return static_cast<A>(x[at + c]); });
        if (f.residual != nullptr) {
          A other[V];
          lane.Load(other, [&](int c) { return static_cast<A>(y[at + c]); });
          lane.ForEach([&](int i, int c) {
            x[at + c] = static_cast<T>(v[i] + other[i]);
            v[i] = static_cast<A>(x[at + c]);
          });
        }
      }
      if (constants.center) sum = SumOf(v);
      const A mean = lane.Sum(sum) * constants.inverse;
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = lane.Has(i) ? v[i] - mean : A(0);
      if (kWideMean<T> && constants.center) rest = lane.Sum(SumOf(v)) * constants.inverse;
#pragma unroll
      for (int i = 0; i < V; ++i) square = fma(v[i], v[i], square);
      square = lane.Sum(square) * constants.inverse;
      const A rstd = InverseRoot(square - rest * rest + constants.epsilon);
      if (r >= rows) continue;
      if (lane.lane == 0) StoreStatistics(f, share.offset + share.first + r, mean, rest, rstd);
      lane.ForEach([&](int i, int c) { y[at + c] = static_cast<T>(fma((v[i] - rest) * rstd, scale[i], bias[i])); });
    }
    __syncthreads();
    const int64_t at = (share.offset + share.first) * n;
    StoreSlab(static_cast<T*>(f.y) + at, y, rows * n);
    if (f.residual != nullptr) StoreSlab(static_cast<T*>(f.sum) + at, x, rows * n);
  }
}

// Statistics of a slab's rows in shared memory.
template <class A>
struct SlabStatistics {
  Vec<A, 2>* mean;  // and its rest
  A* rstd;

  // The `index`-th behind what starts at `shared`.
  __device__ SlabStatistics(void* shared, int index, int rows)
      : mean(static_cast<Vec<A, 2>*>(shared) + index * rows / 2 * 3), rstd(reinterpret_cast<A*>(mean + rows)) {}
};

template <class T, int V>
__global__ void __launch_bounds__(kSlabThreads, kBackwardBlocks<V>)
    SlabBackwardKernel(Backward b, Shape shape, Constants<Accumulator<T>> constants, Slabs slabs, int parts) {
  using A = Accumulator<T>;
  extern __shared__ uint4 shared[];
  const Lane<V> lane(slabs, T());
  Share share(shape, slabs, parts);
  const int n = slabs.n, slab = slabs.rows * n, inputs = b.g_sum == nullptr ? 2 : 3,
            groups = kSlabThreads / slabs.width;
  const auto buffer = [&](int stage, int input) {
    return reinterpret_cast<T*>(shared) + (stage * inputs + input) * slab;
  };
  const auto statistics = [&](int stage) { return SlabStatistics<A>(buffer(2, 0), stage, slabs.rows); };
  const auto fetch = [&](int64_t first, int stage) {
    const int rows = share.Rows(slabs, first), count = rows * n;
    const int64_t at = (share.offset + first) * n;
    LoadSlab(buffer(stage, 0), static_cast<const T*>(b.g) + at, count);
    LoadSlab(buffer(stage, 1), static_cast<const T*>(b.x) + at, count);
    if (b.g_sum != nullptr) LoadSlab(buffer(stage, 2), static_cast<const T*>(b.g_sum) + at, count);
    const int64_t row = share.offset + first;
    LoadSlab(statistics(stage).rstd, static_cast<const A*>(b.rstd) + row, rows);
    if (b.mean != nullptr) LoadSlab(statistics(stage).mean->v, static_cast<const A*>(b.mean) + 2 * row, 2 * rows);
    CommitAsync();
  };

  fetch(share.first, 0);
  A scale[V], dscale[V] = {}, dbias[V] = {};  // The scale comes while the first slab does.
  lane.Load(scale, [&](int c) {
    const int64_t at = int64_t{share.problem} * n + c;
    return b.scale == nullptr ? A(1) : static_cast<const A*>(b.scale)[at] + constants.offset;
  });

#pragma unroll 1
  for (int stage = 0; share.first < share.end; share.first += share.step, stage ^= 1) {
    fetch(share.first + share.step, stage ^ 1);
    WaitAsync<1>();
    __syncthreads();
    const int rows = share.Rows(slabs, share.first);
    const T *const g = buffer(stage, 0), *const g_sum = buffer(stage, 2);
    T* const x = buffer(stage, 1);
#pragma unroll 1
    for (int round = 0; round < rows; round += groups) {
      const int r = round + lane.row, at = r * n;
      A h[V], q[V], sum_q = 0, sum_qh = 0, rstd = 0;
      if (r < rows) {
        const SlabStatistics<A> stored = statistics(stage);
        const Vec<A, 2> mean = b.mean == nullptr ? Vec<A, 2>{} : stored.mean[r];
        rstd = stored.rstd[r];
        const Statistics<T> stats({mean.v[0], mean.v[1], rstd});
        lane.Load(q, [&](int c) { return static_cast<A>(g[at + c]); });
        lane.Load(h, [&](int c) { return stats.Normalize(static_cast<A>(x[at + c])); });
#pragma unroll
        for (int i = 0; i < V; ++i) {
          dscale[i] = fma(q[i], h[i], dscale[i]);
          dbias[i] += q[i];
          q[i] *= scale[i];
          sum_q += q[i];
          sum_qh = fma(q[i], h[i], sum_qh);
        }
      }
      const A mean_q = constants.center ? lane.Sum(sum_q) * constants.inverse : A(0);
      const A mean_qh = lane.Sum(sum_qh) * constants.inverse;
      if (r >= rows) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) q[i] = rstd * fma(-h[i], mean_qh, q[i] - mean_q);
      if (b.g_sum != nullptr) {
        A other[V];
        lane.Load(other, [&](int c) { return static_cast<A>(g_sum[at + c]); });
#pragma unroll
        for (int i = 0; i < V; ++i) q[i] += other[i];
      }
      lane.ForEach([&](int i, int c) { x[at + c] = static_cast<T>(q[i]); });
    }
    __syncthreads();
    StoreSlab(static_cast<T*>(b.dx) + (share.offset + share.first) * n, x, rows * n);
  }

  // Of the groups' sums, in order.
  A* const scratch = reinterpret_cast<A*>(shared);
  WaitAsync<0>();
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    A* const out = static_cast<A*>(which == 0 ? b.dscale : b.dbias);
    if (out == nullptr) continue;
    __syncthreads();
    lane.ForEach([&](int i, int c) { scratch[lane.row * n + c] = which == 0 ? dscale[i] : dbias[i]; });
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < n; c += kSlabThreads) {
      A sum = 0;
#pragma unroll 8
      for (int each = 0; each < groups; ++each) sum += scratch[each * n + c];
      out[int64_t{blockIdx.x} * n + c] = sum;
    }
  }
}

// Calls f(TypeTag of the element type, integral_constant of a lane's elements).
template <class F>
cudaError_t VisitSlabs(DType dtype, const Shape& shape, F&& f) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>) {
      // Of lengths above half of kMostOfLane the lanes' elements are halved until no more than kMostOfLane are left.
      int64_t n = shape.n;
      while (n > kMostOfLane) n = (n + 1) / 2;
      if (n <= 4) return f(type, std::integral_constant<int, 4>{});
      if (n <= 8) return f(type, std::integral_constant<int, 8>{});
      if (n <= 12) return f(type, std::integral_constant<int, 12>{});
      return f(type, std::integral_constant<int, kMostOfLane>{});
    }
    return cudaErrorInvalidValue;
  });
}

// Slabs of as many rows as the block takes at once, or several times as many; or fewer, to give every block some. They
// are multiples of kAligned: rows so far apart are aligned, and so are their statistics.
constexpr int kAligned = 8;

template <class T, int V>
Slabs MakeSlabs(const Shape& shape) {
  constexpr int64_t kBlocks = 512;
  const int n = static_cast<int>(shape.n);
  int width = 1;
  while (width * V < n) width *= 2;
  const int at_once = std::max(kSlabThreads / width, kAligned);
  // Of the shortest rows, statistics take more than they do.
  const int bytes = std::max(n * static_cast<int>(sizeof(T)), 12);
  const int most = std::max(1, kSlabBytes / (bytes * at_once)) * at_once;
  const int64_t fair = CeilDiv(shape.problems * shape.rows, kBlocks * kAligned) * kAligned;
  return {n, static_cast<int>(std::min<int64_t>(most, fair)), width};
}

}  // namespace

bool TakesSlabs(DType dtype, const Shape& shape) {
  // Rows of 8 bytes are a vector of those.
  if (dtype == DType::kBF16 && shape.n == 4) return false;
  const int64_t bytes = shape.n * static_cast<int64_t>(SizeOf(dtype));
  return (dtype == DType::kF32 || dtype == DType::kBF16) && shape.n <= kLongest && bytes % 16 != 0 &&
         (shape.problems == 1 || shape.rows % kAligned == 0);
}

cudaError_t RunSlabForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                           cudaStream_t stream) {
  return VisitSlabs(dtype, shape, [&](auto type, auto elements) {
    using T = typename decltype(type)::type;
    constexpr int V = decltype(elements)::value;
    const Slabs slabs = MakeSlabs<T, V>(shape);
    const auto kernel = SlabForwardKernel<T, V>;
    const size_t inputs = f.residual == nullptr ? 1 : 2;
    using A = Accumulator<T>;
    Grid grid = {1, kSlabThreads, 2 * inputs * slabs.rows * slabs.n * sizeof(T)};
    int64_t resident = 0;
    if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
    const int64_t wanted = std::max<int64_t>(1, resident / shape.problems);
    const int64_t parts = std::min(CeilDiv(shape.rows, slabs.rows), wanted);
    grid.blocks = shape.problems * parts;
    return LaunchKernel(kernel, grid, stream, f, shape, Constants<A>(options, shape.n), slabs, static_cast<int>(parts));
  });
}

cudaError_t RunSlabBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                            const Device& device, void* workspace, cudaStream_t stream) {
  return VisitSlabs(dtype, shape, [&](auto type, auto elements) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    constexpr int V = decltype(elements)::value;
    Slabs slabs = MakeSlabs<T, V>(shape);
    const auto kernel = SlabBackwardKernel<T, V>;
    const size_t inputs = b.g_sum == nullptr ? 2 : 3;
    const size_t row_bytes = 2 * (inputs * slabs.n * sizeof(T) + sizeof(StoredStatistics<A>));
    const int fit = device.shared_bytes / static_cast<int>(row_bytes) / kAligned * kAligned;
    slabs.rows = std::min(slabs.rows, fit);
    const size_t buffers = slabs.rows * row_bytes;
    const size_t sums = size_t{kSlabThreads} / slabs.width * slabs.n * sizeof(A);
    Grid grid = {1, kSlabThreads, std::max(buffers, sums)};
    int64_t resident = 0;
    if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
    const int64_t wanted = resident / shape.problems;
    const int64_t parts =
        std::max<int64_t>(1, std::min({PartialRows(shape, kDType<T>), CeilDiv(shape.rows, slabs.rows), wanted}));
    return WithPartialRows<A>(b, shape, parts, workspace, stream, [&](const Backward& partial) {
      grid.blocks = shape.problems * parts;
      return LaunchKernel(kernel, grid, stream, partial, shape, Constants<A>(options, shape.n), slabs,
                          static_cast<int>(parts));
    });
  });
}

}  // namespace jaxdnn::layer_norm
