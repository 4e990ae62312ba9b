// Short rows that are not aligned to 16 bytes: those of an odd number of elements, or of very few.
//
// A slab of several rows is aligned where its rows are not. A block moves slabs between global and shared memory in
// 16-byte accesses, and there lets groups of lanes take rows element by element: lane t of the group takes elements
// t, t + size, ..., V of them at most. Its columns are the same in every row, so that parameters, and sums for their
// gradients, stay in registers.
#include "cuda/common/async_copy.cuh"
#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kLongest = 1024;
// Elements that a lane takes: of the shortest rows, of others, and of the longest.
constexpr int kLeast = 4, kSome = 16, kMost = 32;
constexpr int kElements = 4096;

// Blocks for rows of many elements for each lane are small, for want of registers.
template <int V>
constexpr int kThreads = V < kMost ? 256 : 128;

struct Slabs {
  int n;             // elements of a row
  int rows;          // of a slab
  int width;         // lanes of a group, a power of two
  int buffer_bytes;  // of one slab in shared memory
};

template <class T, int V>
Slabs MakeSlabs(const Shape& shape) {
  const int n = static_cast<int>(shape.n), bytes = n * static_cast<int>(sizeof(T));
  int aligned = 1, width = 1;
  while (aligned * bytes % 16 != 0) aligned *= 2;
  while (width * V < n) width *= 2;
  const int rows = std::max(1, kElements / (n * aligned)) * aligned;
  return {n, rows, width, rows * bytes};
}

// Copies a slab of `count` elements. A thread copies the same ones in as out: it need not wait for others in between.
template <class T>
__device__ void LoadSlab(T* shared, const T* global, int count) {
  using X = Vec<T, kVecLength<T>>;
  const int vectors = count / kVecLength<T>;
  for (int k = threadIdx.x; k < vectors; k += blockDim.x)
    CopyAsync(reinterpret_cast<X*>(shared) + k, reinterpret_cast<const X*>(global) + k);
  if (vectors % blockDim.x == threadIdx.x)
    for (int k = vectors * kVecLength<T>; k < count; ++k) shared[k] = global[k];
}

template <class T>
__device__ void StoreSlab(T* global, const T* shared, int count) {
  using X = Vec<T, kVecLength<T>>;
  const int vectors = count / kVecLength<T>;
  for (int k = threadIdx.x; k < vectors; k += blockDim.x)
    reinterpret_cast<X*>(global)[k] = reinterpret_cast<const X*>(shared)[k];
  if (vectors % blockDim.x == threadIdx.x)
    for (int k = vectors * kVecLength<T>; k < count; ++k) global[k] = shared[k];
}

template <class A>
__device__ A LanesSum(A v, int width) {
  for (int mask = 1; mask < width; mask *= 2) v += ShuffleXor(v, mask);
  return v;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads<V>)
    SlabForwardKernel(Forward f, Shape shape, Constants<Accumulator<T>> constants, Slabs slabs) {
  using A = Accumulator<T>;
  extern __shared__ uint4 shared[];
  T* const data = reinterpret_cast<T*>(shared);
  T* const residual = data + slabs.buffer_bytes / sizeof(T);
  T* const result = f.residual == nullptr ? data : residual;
  const int n = slabs.n, width = slabs.width, lane = threadIdx.x & (width - 1);
  const int groups = blockDim.x / width, group = threadIdx.x / width;
  const int64_t first = int64_t{blockIdx.x} * slabs.rows, total = shape.problems * shape.rows;
  const int rows = static_cast<int>(min(int64_t{slabs.rows}, total - first)), count = rows * n;

  LoadSlab(data, static_cast<const T*>(f.x) + first * n, count);
  if (f.residual != nullptr) LoadSlab(residual, static_cast<const T*>(f.residual) + first * n, count);
  CommitAsync();
  int64_t problem = -1;
  A scale[V], bias[V];
  WaitAsync<0>();
  __syncthreads();

  // Every lane of a warp goes as many rounds: they add up together.
  for (int round = 0; round < rows; round += groups) {
    const int r = round + group;
    const int elements = r < rows ? n : 0, at = r * n;
    const int64_t row = first + r;
    if (r < rows && (round == 0 || shape.problems > 1))
      if (const int64_t own = ProblemOf(row, shape); own != problem) {
        problem = own;
#pragma unroll
        for (int i = 0; i < V; ++i)
          if (const int c = lane + i * width; c < n) {
            scale[i] = f.scale == nullptr ? A(1) : static_cast<const A*>(f.scale)[problem * n + c] + constants.offset;
            bias[i] = f.bias == nullptr ? A(0) : static_cast<const A*>(f.bias)[problem * n + c];
          }
      }
    A v[V], mean = 0, rest = 0, square = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      v[i] = 0;
      if (const int c = lane + i * width; c < elements) {
        if (f.residual != nullptr)
          data[at + c] = static_cast<T>(static_cast<A>(data[at + c]) + static_cast<A>(residual[at + c]));
        v[i] = static_cast<A>(data[at + c]);
      }
      mean += v[i];
    }
    mean = constants.center ? LanesSum(mean, width) * constants.inverse : A(0);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (lane + i * width < elements) v[i] -= mean;
      rest += v[i];
      square = fma(v[i], v[i], square);
    }
    rest = kWideMean<T> && constants.center ? LanesSum(rest, width) * constants.inverse : A(0);
    square = LanesSum(square, width) * constants.inverse;
    const A rstd = InverseRoot(square - rest * rest + constants.epsilon);
    if (lane == 0 && r < rows) {
      static_cast<A*>(f.rstd)[row] = rstd;
      if (f.mean != nullptr) static_cast<Vec<A, 2>*>(f.mean)[row] = {{mean, rest}};
    }
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (const int c = lane + i * width; c < elements)
        result[at + c] = static_cast<T>(fma((v[i] - rest) * rstd, scale[i], bias[i]));
  }
  __syncthreads();
  StoreSlab(static_cast<T*>(f.y) + first * n, result, count);
  if (f.residual != nullptr) StoreSlab(static_cast<T*>(f.sum) + first * n, data, count);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads<V>, 2)
    SlabBackwardKernel(Backward b, Shape shape, Constants<Accumulator<T>> constants, Slabs slabs, int parts) {
  using A = Accumulator<T>;
  extern __shared__ uint4 shared[];
  const int inputs = b.g_sum == nullptr ? 2 : 3, slab = slabs.buffer_bytes / static_cast<int>(sizeof(T));
  const int n = slabs.n, width = slabs.width, lane = threadIdx.x & (width - 1);
  const int groups = blockDim.x / width, group = threadIdx.x / width;
  const int problem = blockIdx.x / parts, part = blockIdx.x - problem * parts;
  const int64_t offset = problem * shape.rows, step = int64_t{parts} * slabs.rows;
  const auto buffer = [&](int stage, int input) {
    return reinterpret_cast<T*>(shared) + (stage * inputs + input) * slab;
  };
  const auto rows_from = [&](int64_t first) {
    return static_cast<int>(max(int64_t{0}, min(int64_t{slabs.rows}, shape.rows - first)));
  };
  const auto fetch = [&](int64_t first, int stage) {
    const int count = rows_from(first) * n;
    const int64_t at = (offset + first) * n;
    LoadSlab(buffer(stage, 0), static_cast<const T*>(b.g) + at, count);
    LoadSlab(buffer(stage, 1), static_cast<const T*>(b.x) + at, count);
    if (b.g_sum != nullptr) LoadSlab(buffer(stage, 2), static_cast<const T*>(b.g_sum) + at, count);
    CommitAsync();
  };

  int64_t first = int64_t{part} * slabs.rows;
  fetch(first, 0);
  A scale[V], dscale[V] = {}, dbias[V] = {};
#pragma unroll
  for (int i = 0; i < V; ++i) {
    scale[i] = 1;
    if (const int c = lane + i * width; c < n && b.scale != nullptr)
      scale[i] = static_cast<const A*>(b.scale)[int64_t{problem} * n + c] + constants.offset;
  }

  for (int stage = 0; first < shape.rows; first += step, stage ^= 1) {
    fetch(first + step, stage ^ 1);
    WaitAsync<1>();
    __syncthreads();
    const int rows = rows_from(first);
    const T* const g = buffer(stage, 0);
    T* const x = buffer(stage, 1);
    for (int round = 0; round < rows; round += groups) {
      const int r = round + group;
      const int elements = r < rows ? n : 0, at = r * n;
      StoredStatistics<A> stored = {};
      if (r < rows) stored = LoadStatistics<A>(b.mean, b.rstd, offset + first + r);
      const Statistics<T> stats(stored);
      A h[V], q[V], mean_q = 0, mean_qh = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        h[i] = q[i] = 0;
        if (const int c = lane + i * width; c < elements) {
          const A each = static_cast<A>(g[at + c]);
          h[i] = stats.Normalize(static_cast<A>(x[at + c]));
          q[i] = each * scale[i];
          dscale[i] = fma(each, h[i], dscale[i]);
          dbias[i] += each;
        }
        mean_q += q[i];
        mean_qh = fma(q[i], h[i], mean_qh);
      }
      mean_q = constants.center ? LanesSum(mean_q, width) * constants.inverse : A(0);
      mean_qh = LanesSum(mean_qh, width) * constants.inverse;
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (const int c = lane + i * width; c < elements) {
          A dx = stats.rstd * fma(-h[i], mean_qh, q[i] - mean_q);
          if (b.g_sum != nullptr) dx += static_cast<A>(buffer(stage, 2)[at + c]);
          x[at + c] = static_cast<T>(dx);
        }
    }
    __syncthreads();
    StoreSlab(static_cast<T*>(b.dx) + (offset + first) * n, x, rows * n);
  }

  // Of the groups' sums, in order.
  A* const scratch = reinterpret_cast<A*>(shared);
  const auto store = [&](const A(&sums)[V], void* out) {
    if (out == nullptr) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (const int c = lane + i * width; c < n) scratch[group * n + c] = sums[i];
    __syncthreads();
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
      A sum = 0;
      for (int each = 0; each < groups; ++each) sum += scratch[each * n + c];
      static_cast<A*>(out)[int64_t{blockIdx.x} * n + c] = sum;
    }
  };
  WaitAsync<0>();
  store(dscale, b.dscale);
  store(dbias, b.dbias);
}

template <class F>
cudaError_t VisitSlabs(DType dtype, const Shape& shape, F&& f) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto call = [&](auto elements) { return f(type, elements, MakeSlabs<T, decltype(elements)::value>(shape)); };
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>) {
      if (shape.n <= 4 * kLeast) return call(std::integral_constant<int, kLeast>{});
      if (shape.n <= 32 * kSome) return call(std::integral_constant<int, kSome>{});
      return call(std::integral_constant<int, kMost>{});
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace

bool TakesSlabs(DType dtype, const Shape& shape, bool backward) {
  const int64_t bytes = static_cast<int64_t>(SizeOf(dtype));
  // A problem's first slab must be aligned as well, unless slabs go across problems.
  const bool aligned = !backward || shape.problems == 1 || shape.rows * shape.n * bytes % 16 == 0;
  return (dtype == DType::kF32 || dtype == DType::kBF16) && shape.n <= kLongest && shape.n * bytes % 16 != 0 && aligned;
}

cudaError_t RunSlabForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                           cudaStream_t stream) {
  return VisitSlabs(dtype, shape, [&](auto type, auto elements, const Slabs& slabs) {
    using T = typename decltype(type)::type;
    constexpr int V = decltype(elements)::value;
    const size_t bytes = size_t{f.residual == nullptr ? 1u : 2u} * slabs.buffer_bytes;
    const Grid grid = {CeilDiv(shape.problems * shape.rows, slabs.rows), kThreads<V>, bytes};
    return LaunchKernel(SlabForwardKernel<T, V>, grid, stream, f, shape, Constants<Accumulator<T>>(options, shape.n),
                        slabs);
  });
}

cudaError_t RunSlabBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options, void* workspace,
                            cudaStream_t stream) {
  return VisitSlabs(dtype, shape, [&](auto type, auto elements, const Slabs& slabs) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    constexpr int V = decltype(elements)::value;
    const auto kernel = SlabBackwardKernel<T, V>;
    const size_t buffers = size_t{b.g_sum == nullptr ? 4u : 6u} * slabs.buffer_bytes;
    const size_t sums = size_t{kThreads<V>} / slabs.width * slabs.n * sizeof(A);
    Grid grid = {1, kThreads<V>, std::max(buffers, sums)};
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
