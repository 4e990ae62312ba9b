// Layer norm and RMS norm, forward, of rows that start anywhere in a vector, and of many long ones of whole vectors;
// forward.cu has the formulas.
//
// A thread takes rows a period apart, whose parameters stay in its registers, while the next is on its way into its
// part of shared memory: more of them at once only get in each other's way.
//
// Blocks, or clusters, take turns with the rows, or with a period above 1, shares of all rows in the order of where in
// a vector they start: so few of the largest clusters run at once that a multiple of the period leaves many without
// work.
#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/held.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/shifted.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kStages = 2;

template <class T, int L, int V, bool kCluster>
__global__ void __launch_bounds__(256, 2)
    ShiftedForwardKernel(Forward f, Shape shape, Constants<Accumulator<T>> constants, Spread spread, int parts,
                         int period) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  extern __shared__ uint4 shared[];
  __shared__ Exchange<A, 2, kCluster> exchanges[2];
  Place p(spread, kCluster);
  const int problem = p.block / parts, part = p.block - problem * parts;
  const int64_t offset = problem * shape.rows;
  Runs run(shape.rows, part, parts, period, int64_t{part} * spread.groups);
  const int64_t apart = run.HasShares() ? period : int64_t{parts} * spread.groups;

  // The warp's part of shared memory: [stage][x or residual][vector][lane].
  const int inputs = f.residual == nullptr ? 1 : 2, warp = threadIdx.x / 32;
  X* const ring = reinterpret_cast<X*>(shared) + warp * kStages * inputs * V * 32 + threadIdx.x % 32;
  const auto slots = [&](int stage, int input) { return ring + (stage * inputs + input) * V * 32; };
  // From row to row all that the thread moves is as many vectors further on.
  const int64_t step = apart * shape.n / L;
  // Of a row, its first element and the thread's in its edges. They are not converted before they are used: that would
  // wait for them.
  struct Singles {
    T first, edge;
  };

  if constexpr (kCluster) OpenExchanges(exchanges);
  int turn = 0;
  while (run.Next()) {
    const int64_t last = run.last;
    int64_t first = run.first;
    int64_t row = first + p.group;
    const Columns<L, true> columns(shape.n, offset + row, p.first);
    p.n = columns.vectors;
    int64_t at = columns.Base(offset + row) + p.first, at_fetched = at;
    const auto fetch = [&](bool exists, int stage) {
      const auto copy = [&](const void* from, int input) {
        const X* const in = Kept(static_cast<const X*>(from) + at_fetched);
        X* const to = Kept(slots(stage, input));
        ForEachVector<V, false>(p, [&](int s, int) { CopyAsync(to + s * 32, in + s * p.stride); });
      };
      if (exists) {
        copy(f.x, 0);
        if (f.residual != nullptr) copy(f.residual, 1);
      }
      CommitAsync();
      at_fetched += step;
    };
    const int column = max(columns.edge, 0);
    int64_t at_singles = (offset + min(row, shape.rows - 1)) * shape.n;
    const auto load_singles = [&](const void* from) {
      const T* const in = static_cast<const T*>(from) + at_singles;
      return Singles{in[0], in[column]};
    };

#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) fetch(row + stage * apart < last, stage);
    Singles next = load_singles(f.x), next_residual = {};
    if (f.residual != nullptr) next_residual = load_singles(f.residual);
    A scale[V][L], bias[V][L], edge_scale[1], edge_bias[1];
    ForEachVector<V, false>(p, [&](int s, int k) {
      LoadScale(scale[s], f.scale, constants.offset, columns, int64_t{problem}, k);
      LoadBias(bias[s], f.bias, columns, int64_t{problem}, k);
    });
    LoadScale(edge_scale, f.scale, constants.offset, problem * shape.n + column);
    LoadBias(edge_bias, f.bias, problem * shape.n + column);
    if (kCluster && turn == 0) ClusterWait();

    for (int stage = 0; first < last; first += apart, row += apart, at += step, stage = (stage + 1) % kStages) {
      fetch(row + (kStages - 1) * apart < last, (stage + kStages - 1) % kStages);
      Vec<T, 1> edge = {{next.edge}};
      A pivot[1] = {static_cast<A>(next.first)}, edges[1], mean[1], rest[1], rstd[1];
      if (f.residual != nullptr) {
        pivot[0] += static_cast<A>(next_residual.first);
        edge = AddRounded<T>(edge, Vec<T, 1>{{next_residual.edge}});
      }
      Widen(edges, edge);
      WaitAsync<kStages - 1>();

      // Behind the wait, across which the compiler moves none: it would wait for them too.
      const int64_t at_edge = at_singles + column;
      if (row + apart < last) at_singles += apart * shape.n;
      next = load_singles(f.x);
      if (f.residual != nullptr) next_residual = load_singles(f.residual);

      X x[1][V] = {};
      const bool exists = row < shape.rows;
      if (exists) {
        const X* const own = slots(stage, 0);
        ForEachVector<V, false>(p, [&](int s, int) { x[0][s] = own[s * 32]; });
        if (f.residual != nullptr) {
          const X* const other = slots(stage, 1);
          X* const sum = static_cast<X*>(f.sum) + at;
          ForEachVector<V, false>(p, [&](int s, int) {
            x[0][s] = AddRounded<T>(x[0][s], other[s * 32]);
            sum[s * p.stride] = x[0][s];
          });
        }
      }
      RowMoments<T>(mean, rest, rstd, x, pivot, edges, p, columns, constants, exchanges, turn);
      if (!exists) continue;
      if (p.IsLeader()) StoreStatistics(f, offset + row, mean[0], rest[0], rstd[0]);
      const Statistics<T> stats({mean[0], rest[0], rstd[0]});
      X* const y = static_cast<X*>(f.y) + at;
      ForEachVector<V, false>(p, [&](int s, int) { y[s * p.stride] = Apply<T>(x[0][s], stats, scale[s], bias[s]); });
      if (!columns.HasEdge()) continue;
      if (f.residual != nullptr) static_cast<T*>(f.sum)[at_edge] = edge.v[0];
      static_cast<T*>(f.y)[at_edge] = Apply<T>(edge, stats, edge_scale, edge_bias).v[0];
    }
  }
}

// Bytes of a thread's part of shared memory, of V vectors of 16 bytes.
constexpr size_t RingBytes(const Forward& f, int V) {
  return size_t{kStages} * (f.residual == nullptr ? 1 : 2) * V * 16;
}

template <class T, int L, int V, bool kCluster>
cudaError_t LaunchShifted(const Forward& f, const Shape& shape, const Options& options, const Spread& spread,
                          cudaStream_t stream) {
  const auto kernel = ShiftedForwardKernel<T, L, V, kCluster>;
  Grid grid = {1, spread.Threads(), RingBytes(f, V) * spread.Threads(), spread.cluster};
  int64_t resident = 0;
  if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  const int64_t wanted = std::max<int64_t>(1, resident / spread.cluster / shape.problems);
  const int64_t most = std::min(CeilDiv(shape.rows, int64_t{spread.groups}), wanted);
  int64_t period = Period(shape, kDType<T>), parts = SplitRows(most, shape, spread, period);
  if (TakesShares(parts, most, shape, spread)) {
    parts = most;
  } else {
    period = 1;
  }
  grid.blocks = shape.problems * parts * spread.cluster;
  return LaunchKernel(kernel, grid, stream, f, shape, Constants<Accumulator<T>>(options, shape.n), spread,
                      static_cast<int>(parts), static_cast<int>(period));
}

template <class T>
cudaError_t Run(const Forward& f, const Shape& shape, const Options& options, const Device& device, cudaStream_t stream,
                bool* done) {
  constexpr int L = kVecLength<T>, kKeep = 16 / L, kMore = 24 / L, kMost = kHasPairs<T> ? 32 / L : kMore;
  // A warp for each, rather than two warps that have half of what they can take.
  if (const int64_t n = shape.n / L; n > 32 * kKeep && n <= 32 * kMost) {
    const int keep = n <= 32 * kMore ? kMore : kMost;
    const Spread spread = SpreadRows(n, keep, device.Threads(256, RingBytes(f, keep)), 0, 0);
    return n <= 32 * kMore ? LaunchShifted<T, L, kMore, false>(f, shape, options, spread, stream)
                           : LaunchShifted<T, L, kMost, false>(f, shape, options, spread, stream);
  }
  // Of 16-bit floats what a thread does for a row, however much it has of it, takes longer than its bytes. Of others
  // more vectors are better where they save half of the blocks.
  const auto spread_over = [&](int keep) {
    const Spread spread = SpreadShifted(shape.n, L, keep, device.Threads(256, RingBytes(f, keep)), device.max_cluster);
    // A multiprocessor has the registers for two and two thirds of such blocks: rather five of half the size.
    const bool is_odd = spread.width == 192 && spread.cluster < device.max_cluster;
    return is_odd ? SpreadShifted(shape.n, L, keep, 128, device.max_cluster) : spread;
  };
  const Spread few = spread_over(kKeep), many = spread_over(kMost);
  const bool takes_many = kHasPairs<T> ? shape.n / L > 32 * kMost : few.steps == 0 || many.cluster < few.cluster;
  if (many.steps == 0) return RunLongForward(f, kDType<T>, shape, options, device, stream, done);
  if (takes_many)
    return many.cluster == 1 ? LaunchShifted<T, L, kMost, false>(f, shape, options, many, stream)
                             : LaunchShifted<T, L, kMost, true>(f, shape, options, many, stream);
  if constexpr (!kHasPairs<T>)
    if (few.cluster > 1) return LaunchShifted<T, L, kKeep, true>(f, shape, options, few, stream);
  return LaunchShifted<T, L, kKeep, false>(f, shape, options, few, stream);
}

}  // namespace

cudaError_t RunShiftedForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                              const Device& device, cudaStream_t stream, bool* done) {
  return VisitSingleDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, __half>)
      return cudaErrorInvalidValue;
    else
      return Run<T>(f, shape, options, device, stream, done);
  });
}

}  // namespace jaxdnn::layer_norm
