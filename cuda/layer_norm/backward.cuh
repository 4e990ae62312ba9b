// The gradient of layer norm and RMS norm. With q = g (scale + offset) and h = (x - mean) rstd, over each row
//
//   dx = rstd (q - mean(q) - h mean(q h)) + g_sum        RMS norm lacks mean(q)
//   dscale = sum over rows of g h,  dbias = sum over rows of g
//
// Bound by memory: g and x are read once and dx is written. Blocks are persistent: a thread owns columns, whose scale
// and whose sums for dscale and dbias stay in its registers from row to row, while the rows to come are on their way
// into its part of shared memory. At the end every block leaves one row of sums, and a second kernel adds those up in
// order; a problem with one block needs no second kernel.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/held.cuh"
#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/rows.cuh"
#include "cuda/layer_norm/shifted.cuh"

namespace jaxdnn::layer_norm {
namespace {

// Adds up the columns' sums of the groups of a block, and writes them to a row of `out`.
template <bool kExact, int V, int L, bool kShifted, class A>
__device__ void StoreSums(const A (&sums)[V][L], A edge, A* out, const Place& p, const Columns<L, kShifted>& columns,
                          int groups, A* scratch) {
  if (groups == 1) {
    ForEachVector<V, kExact>(p, [&](int s, int k) { StoreParameters(out, columns, k, sums[s]); });
    if (columns.HasEdge()) out[columns.edge] = edge;
    return;
  }
  const int n = columns.n;
  __syncthreads();
  ForEachVector<V, kExact>(p, [&](int s, int k) {
#pragma unroll
    for (int i = 0; i < L; ++i) scratch[p.group * n + columns.At(k, i)] = sums[s][i];
  });
  if (columns.HasEdge()) scratch[p.group * n + columns.edge] = edge;
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < n; c += blockDim.x) {
    A sum = 0;
#pragma unroll 8
    for (int g = 0; g < groups; ++g) sum += scratch[g * n + c];
    out[c] = sum;
  }
}

// Where few clusters run at once, those of 16-bit floats may take shares of the rows: their period is the longest.
template <class T, bool kShifted, bool kCluster>
constexpr bool kHasShares = kShifted && kCluster && sizeof(T) == 2;

// Lean kernels have fewer instructions, which count where a spread leaves lanes without a vector, and of floats. Where
// memory alone bounds, the blocks' requests then come in bursts, which takes up to a tenth longer.
template <class T, int L, bool kShifted, bool kCluster>
constexpr bool kIsLean = sizeof(T) == 4 && L > 1 && !kShifted && !kCluster;

// V vectors of each of U rows at once. `parts` blocks (or clusters) share a problem; each leaves a row of sums, or one
// for each start: the numbers of the part and of the start add up to its index, and where a part begins with a start,
// nobody else has the index before.
template <class T, int L, int V, int U, bool kShifted, bool kExact, bool kCluster, bool kLean>
__global__ void __launch_bounds__(V* L > 16 ? 128 : 512)
    BackwardKernel(Backward b, Shape shape, Constants<Accumulator<T>> constants, Spread spread, int parts, int period) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  extern __shared__ uint4 shared[];
  __shared__ Exchange<A, 2 * U, kCluster> exchanges[2];
  Place p(spread, kCluster);
  const int problem = p.block / parts, part = p.block - problem * parts;
  const int64_t offset = problem * shape.rows;
  const bool shares = kHasShares<T, kShifted, kCluster> && period > 1;
  const int64_t begin = shares ? shape.rows * part / parts : 0, end = shares ? shape.rows * (part + 1) / parts : 1;
  // Of a thread's rows at once the distance: of those that start anywhere in a vector it is a multiple of their period.
  const int64_t apart = shares ? period : spread.groups * (kShifted ? parts : 1);
  const int64_t step = shares ? int64_t{period} * U : int64_t{parts} * spread.groups * U;

  // The thread's part of shared memory: [stage][g, x or g_sum][row][vector], strided over the threads, or of lean
  // kernels over those of its warp.
  const int inputs = b.g_sum == nullptr ? 2 : 3, threads = kLean ? 32 : static_cast<int>(blockDim.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  X* const ring = reinterpret_cast<X*>(shared) + (kLean ? warp * 2 * inputs * U * V * 32 + lane : threadIdx.x);
  const auto slot = [&](int stage, int input, int u, int s) -> X& {
    return ring[(((stage * inputs + input) * U + u) * V + s) * threads];
  };

  if constexpr (kCluster) OpenExchanges(exchanges);
  int turn = 0;
  // Rows c, c + period, ..., behind `before` others in that order: what Runs does, which takes this kernel's registers.
  int64_t before = 0;
  for (int c = 0; c < (kHasShares<T, kShifted, kCluster> ? period : 1) && before < end; ++c) {
    int64_t first = int64_t{part} * spread.groups * (kShifted ? 1 : U), last = shape.rows;
    bool is_first = false;
    if (shares) {
      const int64_t count = (shape.rows - c + period - 1) >> (__ffs(period) - 1);
      first = c + max(begin - before, int64_t{0}) * period;
      last = c + min(end - before, count) * period;
      is_first = begin == before && c > 0;
      before += count;
      if (first >= last) continue;
    } else {
      before = end;
    }
    int64_t row = first + p.group;
    const Columns<L, kShifted> columns(shape.n, offset + row, p.first);
    p.n = columns.vectors;
    const auto fetch = [&](int64_t first, int stage) {
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (const int64_t row = first + u * apart; row < last) {
          const int64_t at = columns.Base(offset + row);
          if constexpr (kLean) {
            X* const to = Kept(&slot(stage, 0, u, 0));
            const auto copy = [&](int input, const void* from) {
              const X* const in = Kept(static_cast<const X*>(from) + at + p.first);
              ForEachVector<V, kExact>(
                  p, [&](int s, int) { CopyAsync(to + (input * U * V + s) * 32, in + s * p.stride); });
            };
            copy(0, b.g);
            copy(1, b.x);
            if (b.g_sum != nullptr) copy(2, b.g_sum);
            continue;
          }
          ForEachVector<V, kExact>(p, [&](int s, int k) {
            CopyAsync(&slot(stage, 0, u, s), static_cast<const X*>(b.g) + at + k);
            CopyAsync(&slot(stage, 1, u, s), static_cast<const X*>(b.x) + at + k);
            if (b.g_sum != nullptr) CopyAsync(&slot(stage, 2, u, s), static_cast<const X*>(b.g_sum) + at + k);
          });
        }
      CommitAsync();
    };
    // The statistics of the rows to come, and the thread's elements in their edges: not converted before they are used.
    struct Edge {
      T g, x, g_sum;
    };
    StoredStatistics<A> next[U];
    Edge next_edge[U] = {};
    const auto fetch_singles = [&](int64_t first) {
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (const int64_t row = first + u * apart; row < last) {
          next[u] = LoadStatistics<A>(b.mean, b.rstd, offset + row);
          if (!columns.HasEdge()) continue;
          const int64_t at = (offset + row) * shape.n + columns.edge;
          next_edge[u].g = static_cast<const T*>(b.g)[at];
          next_edge[u].x = static_cast<const T*>(b.x)[at];
          if (b.g_sum != nullptr) next_edge[u].g_sum = static_cast<const T*>(b.g_sum)[at];
        }
    };

    fetch(row, 0);
    fetch_singles(row);
    A scale[V][L], dscale[V][L] = {}, dbias[V][L] = {};
    ForEachVector<V, kExact>(
        p, [&](int s, int k) { LoadScale(scale[s], b.scale, constants.offset, columns, int64_t{problem}, k); });
    A edge_scale[1], edge_dscale = 0, edge_dbias = 0;
    LoadScale(edge_scale, columns.HasEdge() ? b.scale : nullptr, constants.offset, problem * shape.n + columns.edge);
    if (kCluster && turn == 0) ClusterWait();

    for (int stage = 0; first < last; first += step, row += step, stage ^= 1) {
      fetch(row + step, stage ^ 1);
      using RowStatistics = std::conditional_t<kLean, StoredStatistics<A>, Statistics<T>>;
      RowStatistics stats[U];
#pragma unroll
      for (int u = 0; u < U; ++u) stats[u] = RowStatistics(next[u]);
      Edge edges[U];
#pragma unroll
      for (int u = 0; u < U; ++u) edges[u] = next_edge[u];
      fetch_singles(row + step);
      WaitAsync<1>();

      // h, or of lean kernels x - mean, of which they also have the row's sum.
      const auto distance = [&](int u, A x) {
        if constexpr (kLean)
          return Centered<T>(x, stats[u]);
        else
          return stats[u].Normalize(x);
      };
      A sums[2 * U] = {};  // of q h, then of q
      const auto add = [&](int u, A g, A x, A scale, A* dscale, A* dbias) {
        const A gh = g * distance(u, x);
        sums[u] = fma(gh, scale, sums[u]);
        sums[U + u] = fma(g, scale, sums[U + u]);
        *dscale = kLean ? fma(gh, stats[u].rstd, *dscale) : *dscale + gh;
        *dbias += g;
      };
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (row + u * apart < last) {
          ForEachVector<V, kExact>(p, [&](int s, int) {
            A g[L], x[L];
            Widen(g, slot(stage, 0, u, s));
            Widen(x, slot(stage, 1, u, s));
#pragma unroll
            for (int i = 0; i < L; ++i) add(u, g[i], x[i], scale[s][i], &dscale[s][i], &dbias[s][i]);
          });
          if (columns.HasEdge())
            add(u, static_cast<A>(edges[u].g), static_cast<A>(edges[u].x), edge_scale[0], &edge_dscale, &edge_dbias);
        }
      GroupSum(sums, p, exchanges, kCluster ? turn++ : stage);
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (row + u * apart < last) {
          const A mean = sums[u] * constants.inverse, along = kLean ? mean * stats[u].rstd * stats[u].rstd : mean;
          const A mean_q = constants.center ? sums[U + u] * constants.inverse : A(0);
          X* const out = static_cast<X*>(b.dx) + columns.Base(offset + row + u * apart);
          const auto gradient = [&](A g, A x, A scale, A g_sum) {
            const A centered = fma(g, scale, -mean_q);
            return fma(stats[u].rstd, fma(-distance(u, x), along, centered), g_sum);
          };
          ForEachVector<V, kExact>(p, [&](int s, int k) {
            A g[L], x[L], g_sum[L] = {};
            Widen(g, slot(stage, 0, u, s));
            Widen(x, slot(stage, 1, u, s));
            if (b.g_sum != nullptr) Widen(g_sum, slot(stage, 2, u, s));
#pragma unroll
            for (int i = 0; i < L; ++i) g[i] = gradient(g[i], x[i], scale[s][i], g_sum[i]);
            out[k] = Narrow<T>(g);
          });
          if (!columns.HasEdge()) continue;
          const A g_sum = b.g_sum == nullptr ? A(0) : static_cast<A>(edges[u].g_sum);
          const A dx = gradient(static_cast<A>(edges[u].g), static_cast<A>(edges[u].x), edge_scale[0], g_sum);
          static_cast<T*>(b.dx)[(offset + row + u * apart) * shape.n + columns.edge] = static_cast<T>(dx);
        }
    }

    A* const scratch = reinterpret_cast<A*>(shared);
    WaitAsync<0>();
    const auto store = [&](const A(&sums)[V][L], A edge, void* to) {
      if (to == nullptr) return;
      A* const out =
          static_cast<A*>(to) +
          (shares ? problem * (parts + min(int64_t{period}, shape.rows) - 1) + part + c : int64_t{p.block}) * shape.n;
      StoreSums<kExact>(sums, edge, out, p, columns, spread.groups, scratch);
      if (is_first)
        for (int64_t i = p.first; i < shape.n; i += p.stride) out[i - shape.n] = 0;
    };
    store(dscale, edge_dscale, b.dscale);
    store(dbias, edge_dbias, b.dbias);
  }
}

// Bytes of a thread's part of shared memory.
constexpr size_t RingBytes(const Backward& b, int V, int U, size_t vector_bytes) {
  return size_t{2} * (b.g_sum == nullptr ? 2 : 3) * U * V * vector_bytes;
}

template <class T, int L, int V, int U, bool kExact, bool kCluster, bool kShifted = false,
          bool kLean = kIsLean<T, L, kShifted, kCluster>>
cudaError_t Launch(const Backward& b, const Shape& shape, const Options& options, Spread spread, void* workspace,
                   cudaStream_t stream) {
  using A = Accumulator<T>;
  while (spread.groups / 2 * U >= shape.rows && spread.Threads() > 32) spread.groups /= 2;
  const auto kernel = BackwardKernel<T, L, V, U, kShifted, kExact, kCluster, kLean>;
  const int rows = U * spread.groups;
  const size_t ring = RingBytes(b, V, U, sizeof(Vec<T, L>)) * spread.Threads();
  const size_t sums = spread.groups > 1 ? spread.groups * shape.n * sizeof(A) : 0;
  const Grid one = {1, spread.Threads(), std::max(ring, sums), spread.cluster};

  // As many blocks as run at once, and no more; nor more than there are rows, or than the workspace has rows for.
  int64_t resident = 0;
  if (const cudaError_t e = ResidentBlocks(kernel, one, &resident); e != cudaSuccess) return e;
  const int64_t wanted = resident / spread.cluster / shape.problems;
  const int64_t most =
      std::max<int64_t>(1, std::min({PartialRows(shape, kDType<T>), CeilDiv(shape.rows, rows), wanted}));
  int64_t period = Period(shape, kDType<T>), parts = kShifted ? SplitRows(most, shape, spread, period) : most,
          left = parts;
  // Shares leave a row of sums for each start that they have rows of.
  const int64_t others = std::min(period, shape.rows) - 1;
  const int64_t shares = std::min(most, PartialRows(shape, kDType<T>) - others);
  if (kHasShares<T, kShifted, kCluster> && TakesShares(parts, shares, shape, spread)) {
    parts = shares;
    left = parts + others;
  } else {
    period = 1;
  }
  return WithPartialRows<A>(b, shape, left, workspace, stream, [&](const Backward& partial) {
    const Grid grid = {shape.problems * parts * spread.cluster, one.threads, one.shared_bytes, one.cluster};
    return LaunchKernel(kernel, grid, stream, partial, shape, Constants<A>(options, shape.n), spread,
                        static_cast<int>(parts), static_cast<int>(period));
  });
}

}  // namespace
}  // namespace jaxdnn::layer_norm
