// The gradient of layer norm and RMS norm. With q = g (scale + offset) and h =
// (x - mean) rstd, over each row
//
//   dx = rstd (q - mean(q) - h mean(q h)) + g_sum        RMS norm lacks mean(q)
//   dscale = sum over rows of g h,  dbias = sum over rows of g
//
// Bound by memory: g and x are read once and dx is written. Blocks are
// persistent: a thread owns columns, whose scale and whose sums for dscale and
// dbias stay in its registers from row to row, while the rows to come are on
// their way into its part of shared memory. At the end every block leaves one
// row of sums, and a second kernel adds those up in order; a problem with one
// block needs no second kernel.
#include "cuda/common/async_copy.cuh"
#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/rows.cuh"
#include "cuda/layer_norm/wide.h"

namespace jaxdnn::layer_norm {
namespace {

// Rows of which a thread has vectors: the one at work, and those on their way.
constexpr int kStages = 3;

// Adds up the columns' sums of the groups of a block, and writes them to a row
// of `out`.
template <int V, int L, class A>
__device__ void StoreSums(const A (&sums)[V][L], A* out, const Place& p, int groups, A* scratch) {
  if (groups == 1) {
    ForEachVector<V>(p, [&](int s, int64_t k) { StoreParameters(out, k, sums[s]); });
    return;
  }
  const int n = static_cast<int>(p.n) * L;
  __syncthreads();
  ForEachVector<V>(p, [&](int s, int64_t k) {
#pragma unroll
    for (int i = 0; i < L; ++i) scratch[p.group * n + k * L + i] = sums[s][i];
  });
  __syncthreads();
  for (int c = threadIdx.x; c < n; c += blockDim.x) {
    A sum = 0;
    for (int g = 0; g < groups; ++g) sum += scratch[g * n + c];
    out[c] = sum;
  }
}

// `parts` blocks (or clusters) share a problem; each leaves a row of dscale and
// of dbias.
template <class T, int L, int V, bool kCluster>
__global__ void __launch_bounds__(V* L > 16 ? 256 : 512)
    BackwardKernel(Backward b, Shape shape, Options options, Spread spread, int parts) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  extern __shared__ uint4 shared[];
  __shared__ Exchange<A, 2, kCluster> exchanges[kStages];
  const Place p(spread);
  const int groups = spread.Groups();
  const int64_t problem = p.block / parts;
  const int64_t part = p.block - problem * parts;
  const int64_t step = int64_t{parts} * groups;
  const X* g_in = static_cast<const X*>(b.g) + problem * shape.rows * p.n;
  const X* x_in = static_cast<const X*>(b.x) + problem * shape.rows * p.n;
  X* ring = reinterpret_cast<X*>(shared) + threadIdx.x;  // [stage][g or x][vector][thread]
  const auto slot = [&](int stage, int which, int s) -> X& {
    return ring[((stage * 2 + which) * V + s) * static_cast<int>(blockDim.x)];
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < shape.rows)
      ForEachVector<V>(p, [&](int s, int64_t k) {
        CopyAsync(&slot(stage, 0, s), &g_in[row * p.n + k]);
        CopyAsync(&slot(stage, 1, s), &x_in[row * p.n + k]);
      });
    CommitAsync();
  };
  const auto statistics = [&](int64_t row) {
    return row < shape.rows ? LoadStatistics<A>(b.mean, b.rstd, problem * shape.rows + row) : Statistics<A>{};
  };

  if constexpr (kCluster) ClusterArrive();
  int64_t row = part * groups + p.group;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(row + stage * step, stage);
  Statistics<A> next = statistics(row);
  A scale[V][L], dscale[V][L] = {}, dbias[V][L] = {};
  ForEachVector<V>(p, [&](int s, int64_t k) { LoadScale(scale[s], b.scale, options, problem * p.n + k); });
  if constexpr (kCluster) ClusterWait();

  const A inverse = A(1) / static_cast<A>(shape.n);
  int stage = 0;
  for (int64_t first = part * groups; first < shape.rows; first += step, row += step) {
    fetch(row + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
    const Statistics<A> stats = next;
    next = statistics(row + step);
    const bool active = row < shape.rows;
    const int64_t base = (problem * shape.rows + row) * p.n;
    WaitAsync<kStages - 1>();

    A sums[2] = {};
    if (active)
      ForEachVector<V>(p, [&](int s, int64_t) {
        const X g = slot(stage, 0, s), x = slot(stage, 1, s);
#pragma unroll
        for (int i = 0; i < L; ++i) {
          const A each = static_cast<A>(g.v[i]), h = stats.Normalize(static_cast<A>(x.v[i]));
          const A q = each * scale[s][i];
          sums[0] += q;
          sums[1] += q * h;
          dscale[s][i] += each * h;
          dbias[s][i] += each;
        }
      });
    GroupSum<kCluster>(sums, p, exchanges[stage]);
    const A mean_q = options.center ? sums[0] * inverse : A(0), mean_qh = sums[1] * inverse;
    if (active)
      ForEachVector<V>(p, [&](int s, int64_t k) {
        const X g = slot(stage, 0, s), x = slot(stage, 1, s);
        X dx;
        A extra[L] = {};
        if (b.g_sum != nullptr) {
          const X e = static_cast<const X*>(b.g_sum)[base + k];
#pragma unroll
          for (int i = 0; i < L; ++i) extra[i] = static_cast<A>(e.v[i]);
        }
#pragma unroll
        for (int i = 0; i < L; ++i) {
          const A h = stats.Normalize(static_cast<A>(x.v[i]));
          const A centered = fma(static_cast<A>(g.v[i]), scale[s][i], -mean_q);
          dx.v[i] = static_cast<T>(fma(stats.rstd, fma(-h, mean_qh, centered), extra[i]));
        }
        static_cast<X*>(b.dx)[base + k] = dx;
      });
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  const int64_t out = (problem * parts + part) * p.n * L;
  A* scratch = reinterpret_cast<A*>(shared);
  WaitAsync<0>();
  if (b.dscale != nullptr) StoreSums(dscale, static_cast<A*>(b.dscale) + out, p, groups, scratch);
  if (b.dbias != nullptr) StoreSums(dbias, static_cast<A*>(b.dbias) + out, p, groups, scratch);
}

template <class T, int L, int V, bool kCluster>
cudaError_t Launch(const Backward& b, const Shape& shape, const Options& options, const Spread& spread, void* workspace,
                   cudaStream_t stream) {
  using A = Accumulator<T>;
  const auto kernel = BackwardKernel<T, L, V, kCluster>;
  const size_t ring = size_t{2} * kStages * V * sizeof(Vec<T, L>) * spread.threads;
  const size_t sums = spread.Groups() > 1 ? spread.Groups() * shape.n * sizeof(A) : 0;
  const Grid one = {1, spread.threads, std::max(ring, sums), spread.cluster};

  // As many blocks as run at once, but with a few rows for each group, and no
  // more than the workspace has rows for.
  int64_t resident = 0;
  if (const cudaError_t e = ResidentBlocks(kernel, one, &resident); e != cudaSuccess) return e;
  const int64_t useful = CeilDiv(shape.rows, int64_t{4} * spread.Groups());
  const int64_t wanted = CeilDiv(resident / spread.cluster, shape.problems);
  const int parts = static_cast<int>(std::max<int64_t>(1, std::min({PartialRows(shape), useful, wanted})));

  return WithPartialRows<A>(b, shape, parts, workspace, stream, [&](const Backward& partial) {
    const Grid grid = {shape.problems * parts * spread.cluster, one.threads, one.shared_bytes, one.cluster};
    return LaunchKernel(kernel, grid, stream, partial, shape, options, spread, parts);
  });
}

// Rows as vectors of L elements; short ones get threads with more columns, so
// that a warp is a group.
template <class T, int L>
cudaError_t Dispatch(const Backward& b, DType dtype, const Shape& shape, const Options& options, void* workspace,
                     cudaStream_t stream) {
  constexpr int kHeld = sizeof(T) == 8 ? 8 : 16;
  const int64_t n = shape.n / L;
  const auto within = [&](int elements) { return shape.n <= 32 * elements; };
  if constexpr (16 / sizeof(T) == L && sizeof(T) < 8) {
    if (within(L)) return Launch<T, L, 1, false>(b, shape, options, SpreadRows(n, 1, 256, 0, 0), workspace, stream);
    if (within(24) && !within(16))
      return Launch<T, L, 24 / L, false>(b, shape, options, SpreadRows(n, 24 / L, 256, 0, 0), workspace, stream);
    if (within(32) && !within(16))
      return Launch<T, L, 32 / L, false>(b, shape, options, SpreadRows(n, 32 / L, 256, 0, 0), workspace, stream);
  }
  const Spread block = SpreadRows(n, kHeld / L, 256, 512, 1);
  if (block.steps > 0) return Launch<T, L, kHeld / L, false>(b, shape, options, block, workspace, stream);
  if constexpr (16 / sizeof(T) == L && sizeof(T) < 8)
    if (HasClusters()) {
      const Spread cluster = SpreadRows(n, kHeld / L, 256, 512, 8);
      if (cluster.steps > 0) return Launch<T, L, kHeld / L, true>(b, shape, options, cluster, workspace, stream);
    }
  return RunWideBackward(b, dtype, shape, options, workspace, stream);
}

}  // namespace

cudaError_t RunBackward(const Backward& b, DType dtype, Shape shape, Options options, void* workspace,
                        cudaStream_t stream) {
  if (shape.problems == 0 || shape.rows == 0 || shape.n == 0) return cudaSuccess;
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int L = kVecLength<T>;
    const bool aligned = IsVectorAligned(b.g, b.g_sum, b.x, b.scale, b.dx, b.dscale, b.dbias, workspace);
    if (aligned && shape.n % L == 0) return Dispatch<T, L>(b, dtype, shape, options, workspace, stream);
    if constexpr (sizeof(T) == 2)
      if (aligned && shape.n % 2 == 0) return Dispatch<T, 2>(b, dtype, shape, options, workspace, stream);
    return Dispatch<T, 1>(b, dtype, shape, options, workspace, stream);
  });
}

}  // namespace jaxdnn::layer_norm
