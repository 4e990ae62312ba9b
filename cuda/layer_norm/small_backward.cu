// The gradient of tensors so small that launching kernels takes longer than their bytes: one launch.
//
// With the statistics at hand, dx, a sum over each row, and dscale and dbias, sums over each column, do not need each
// other. Some blocks make the one and others the other: what both read comes from memory once, and then from the L2
// cache.
#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kSmallThreads = 512;
// Rows that a thread of columns reads before it uses them.
constexpr int kBatch = 2;

// What a thread keeps of a vector in shared memory: g, x, and the scale, 16 bytes at a time.
template <int L>
constexpr int kUnits = 2 + L / 4;

// The rows' part: a group of threads has a row.
template <class T, bool kCluster>
__device__ void MakeRows(const Backward& b, const Shape& shape, const Constants<float>& constants, const Spread& spread,
                         uint4* shared) {
  constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;
  using Four = Vec<float, 4>;
  __shared__ Exchange<float, 2, kCluster> exchanges[2];
  const Place p(spread, kCluster);
  if constexpr (kCluster) OpenExchanges(exchanges);
  // Past the end the last row is done again, and not stored.
  const int64_t wanted = int64_t{p.block} * spread.groups + p.group, last = shape.problems * shape.rows - 1;
  const int64_t row = min(wanted, last), at = row * p.n, parameters = ProblemOf(row, shape) * p.n;
  const int threads = static_cast<int>(blockDim.x);
  uint4* const own = shared + threadIdx.x;
  const auto unit = [&](int s, int i) { return own + (s * kUnits<L> + i) * threads; };
#pragma unroll 4
  for (int s = 0, k = p.first; k < p.n; ++s, k += p.stride) {
    CopyAsync(unit(s, 0), static_cast<const uint4*>(b.g) + at + k);
    CopyAsync(unit(s, 1), static_cast<const uint4*>(b.x) + at + k);
    if (b.scale == nullptr) continue;
#pragma unroll
    for (int i = 0; i < L / 4; ++i)
      CopyAsyncCached(unit(s, 2 + i), static_cast<const uint4*>(b.scale) + (parameters + k) * (L / 4) + i);
  }
  CommitAsync();
  const Statistics<T> stats(LoadStatistics<float>(b.mean, b.rstd, row));
  // q and h of the thread's s-th vector.
  const auto load = [&](float (&q)[L], float (&h)[L], int s) {
    Widen(q, *reinterpret_cast<const X*>(unit(s, 0)));
    Widen(h, *reinterpret_cast<const X*>(unit(s, 1)));
#pragma unroll
    for (int i = 0; i < L; ++i) h[i] = stats.Normalize(h[i]);
    if (b.scale == nullptr) return;
#pragma unroll
    for (int j = 0; j < L / 4; ++j) {
      const Four scale = *reinterpret_cast<const Four*>(unit(s, 2 + j));
#pragma unroll
      for (int i = 0; i < 4; ++i) q[4 * j + i] *= scale.v[i] + constants.offset;
    }
  };
  WaitAsync<0>();
  float sums[2] = {};  // of q h, then of q
#pragma unroll 2
  for (int s = 0, k = p.first; k < p.n; ++s, k += p.stride) {
    float q[L], h[L];
    load(q, h, s);
#pragma unroll
    for (int i = 0; i < L; ++i) sums[0] = fma(q[i], h[i], sums[0]);
    sums[1] += SumOf(q);
  }
  if constexpr (kCluster) ClusterWait();
  GroupSum(sums, p, exchanges, 0);
  if (wanted > last) return;
  const float mean_qh = sums[0] * constants.inverse, mean_q = constants.center ? sums[1] * constants.inverse : 0.0f;
#pragma unroll 2
  for (int s = 0, k = p.first; k < p.n; ++s, k += p.stride) {
    float q[L], h[L], g_sum[L] = {};
    load(q, h, s);
    if (b.g_sum != nullptr) {
      const X other = static_cast<const X*>(b.g_sum)[at + k];
      Widen(g_sum, other);
    }
#pragma unroll
    for (int i = 0; i < L; ++i) q[i] = fma(stats.rstd, fma(-h[i], mean_qh, q[i] - mean_q), g_sum[i]);
    static_cast<X*>(b.dx)[at + k] = Narrow<T>(q);
  }
}

// The columns' part: `width` threads, a power of two, have a vector of columns each, and the block's other threads
// other rows.
template <class T>
__device__ void MakeColumns(const Backward& b, const Shape& shape, int block, int width, uint4* shared) {
  constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;
  const int vectors = static_cast<int>(shape.n / L), tiles = (vectors + width - 1) / width;
  const int problem = block / tiles, tile = block - problem * tiles;
  if (problem >= shape.problems) return;  // fills the last cluster
  const int across = threadIdx.x & (width - 1), down = threadIdx.x / width, groups = blockDim.x / width;
  const int rows = static_cast<int>(shape.rows), k = min(tile * width + across, vectors - 1);
  const int64_t offset = int64_t{problem} * rows;
  float sums[2 * L] = {};  // of dscale, then of dbias
  for (int first = down < groups ? down : rows; first < rows; first += kBatch * groups) {
    X g[kBatch], x[kBatch];
    StoredStatistics<float> stored[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t row = offset + min(first + u * groups, rows - 1), at = row * vectors + k;
      g[u] = static_cast<const X*>(b.g)[at];
      x[u] = static_cast<const X*>(b.x)[at];
      stored[u] = LoadStatistics<float>(b.mean, b.rstd, row);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const bool exists = first + u * groups < rows;  // no branch, behind which the compiler would move the reads
      const Statistics<T> stats(stored[u]);
      float each[L], h[L];
      Widen(each, g[u]);
      Widen(h, x[u]);
#pragma unroll
      for (int i = 0; i < L; ++i) {
        each[i] = exists ? each[i] : 0.0f;
        sums[i] = fma(each[i], exists ? stats.Normalize(h[i]) : 0.0f, sums[i]);
        sums[L + i] += each[i];
      }
    }
  }
  // Over the lanes of a warp with the same columns, and then over the warps, or groups, that have them.
  for (int mask = width; mask < 32; mask *= 2)
#pragma unroll
    for (float& each : sums) each += ShuffleXor(each, mask);
  const int columns = width * L, parts = width < 32 ? static_cast<int>(blockDim.x) / 32 : groups;
  const int part = width < 32 ? static_cast<int>(threadIdx.x) / 32 : down;
  float* const scratch = reinterpret_cast<float*>(shared);  // [dscale or dbias][part][column]
  if (part < parts && (width >= 32 || threadIdx.x % 32 < width))
#pragma unroll
    for (int i = 0; i < 2 * L; ++i) scratch[(i / L * parts + part) * columns + across * L + i % L] = sums[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * columns; i += blockDim.x) {
    const int j = i >= columns, c = i - j * columns;
    const int64_t column = int64_t{tile} * columns + c;
    float* const out = static_cast<float*>(j == 0 ? b.dscale : b.dbias);
    if (column >= shape.n || out == nullptr) continue;
    float sum = 0;
    for (int r = 0; r < parts; ++r) sum += scratch[(j * parts + r) * columns + c];
    out[problem * shape.n + column] = sum;
  }
}

// The first `row_blocks` blocks have rows, and those behind them columns.
template <class T, bool kCluster>
__global__ void __launch_bounds__(kSmallThreads, 2)
    SmallBackwardKernel(Backward b, Shape shape, Constants<float> constants, Spread spread, int row_blocks, int width) {
  extern __shared__ uint4 shared[];
  const int block = static_cast<int>(blockIdx.x) - row_blocks;
  if (block < 0)
    MakeRows<T, kCluster>(b, shape, constants, spread, shared);
  else
    MakeColumns<T>(b, shape, block, width, shared);
}

// Rows of n vectors: as few of each for a thread as keep all threads of a big device, so that they wait once for their
// bytes, and clusters small, of which more run at once. Of many short rows, of `most` vectors to a lane, a warp has
// one.
Spread SpreadSmall(int64_t rows, int64_t n, int most, int shared, int max_cluster) {
  constexpr int64_t kEnough = 132 * kSmallThreads, kLeast = 256;
  const int64_t cluster = rows <= 4 ? kMaxCluster : 8;
  int keep = 1;
  if (rows > 256 && n <= 32 * most)
    while (n > 32 * keep) keep *= 2;
  else
    while (rows * n > keep * kEnough || n > keep * cluster * kSmallThreads) keep *= 2;
  Spread s = SpreadRows(n, keep, shared, kSmallThreads, max_cluster);
  // The columns want threads.
  if (s.groups == 1 && s.width < kLeast) {
    s.width = kLeast;
    s.steps = static_cast<int>(CeilDiv(n, kLeast));
  }
  return s;
}

}  // namespace

cudaError_t RunSmallBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                             const Device& device, cudaStream_t stream, bool* done) {
  return VisitSingleDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int L = kVecLength<T>;
    const int64_t n = shape.n / L, rows = shape.problems * shape.rows;
    Spread spread = {};
    size_t bytes = 0;
    *done = false;
    // Large blocks, if the device has the shared memory, of which the kernel has some of its own too.
    for (int threads = kSmallThreads; !*done && threads >= kSmallThreads / 2; threads /= 2) {
      spread = SpreadSmall(rows, n, 32 / L, threads, device.max_cluster);
      bytes = std::max(16 * kUnits<L> * spread.steps, 8 * L) * size_t(spread.Threads());
      *done = spread.steps > 0 && bytes + 1024 <= static_cast<size_t>(device.shared_bytes);
    }
    if (!*done) return cudaSuccess;
    const int64_t row_blocks = CeilDiv(rows, int64_t{spread.groups}) * spread.cluster;
    // About a block of columns to a multiprocessor, of 64 bytes of a row at least.
    int width = 4;
    while (width * 2 <= spread.Threads() && width * int64_t{128} < n * shape.problems) width *= 2;
    int64_t blocks = row_blocks;
    if (b.dscale != nullptr || b.dbias != nullptr)
      blocks += CeilDiv(CeilDiv(n, int64_t{width}) * shape.problems, int64_t{spread.cluster}) * spread.cluster;
    const Grid grid = {blocks, spread.Threads(), bytes, spread.cluster};
    const auto launch = [&](auto kernel) {
      return LaunchKernel(kernel, grid, stream, b, shape, Constants<float>(options, shape.n), spread,
                          static_cast<int>(row_blocks), width);
    };
    return spread.cluster == 1 ? launch(SmallBackwardKernel<T, false>) : launch(SmallBackwardKernel<T, true>);
  });
}

}  // namespace jaxdnn::layer_norm
