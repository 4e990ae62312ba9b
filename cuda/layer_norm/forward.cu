// Layer norm and RMS norm:  y = (s - mean) rstd (scale + offset) + bias,  rstd = 1 / sqrt(mean((s - mean)^2) +
// epsilon), with s = x + residual, rounded to the type in which it is returned; RMS norm has mean 0.
//
// Bound by memory: one read and one write. Groups of threads hold rows in registers as they lie in memory (rows.cuh
// says which threads those are), several rows at once where they are short. Several blocks on a multiprocessor hide
// each other's waits.
//
// One exchange among the threads gives both moments: about the row's first element, and rarely once more about the
// mean.
#include "cuda/layer_norm/few_rows.cuh"
#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

// Where problems have parameters of their own, blocks take turns with `problems` of them, of `blocks` each. With one
// after the other, all multiprocessors would come to the next one's parameters at once, and wait for the same lines.
struct Turns {
  int problems, blocks;

  // The block whose rows are those of number `index`, of a grid with `all` problems.
  __device__ int64_t BlockAt(int index, int64_t all) const {
    if (problems == 1) return index;
    const int first = index / (problems * blocks) * problems, rest = index - first * blocks;
    const int among = min(problems, static_cast<int>(all) - first), turn = rest / among;
    return int64_t{first + rest - turn * among} * blocks + turn;
  }
};

// Of floats, whose bytes take longer, there is nothing to gain; and few rows, which have the largest blocks, are bound
// by what a block does before it reads.
template <class T, bool kCluster, int kThreads>
constexpr bool kTakesTurns = sizeof(T) == 2 && !kCluster && kThreads < 512;

// V vectors of each of U rows.
template <class T, int L, int V, int U, bool kCluster, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ForwardKernel(Forward f, Shape shape, Constants<Accumulator<T>> constants, Spread spread, Turns turns) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  __shared__ Exchange<A, 2 * U, kCluster> exchanges[2];
  const Place p(spread, kCluster);
  if constexpr (kCluster) OpenExchanges(exchanges);

  // Past the end the last row is done again, and not stored.
  const int64_t last = shape.problems * shape.rows - 1;
  int64_t block = p.block;
  if constexpr (kTakesTurns<T, kCluster, kThreads>) block = turns.BlockAt(p.block, shape.problems);
  int64_t row[U];
  bool exists[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    row[u] = (block * U + u) * spread.groups + p.group;
    exists[u] = row[u] <= last;
    row[u] = min(row[u], last);
  }
  X x[U][V];
  A pivot[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    ForEachVector<V, false>(p, [&](int s, int k) { x[u][s] = static_cast<const X*>(f.x)[row[u] * p.n + k]; });
    pivot[u] = p.n > 0 ? static_cast<A>(static_cast<const T*>(f.x)[row[u] * p.n * L]) : A(0);
  }
  // The parameters too, where nothing else hides the wait, and registers are left for them. They are not used before
  // the moments are there, which otherwise would wait for them.
  constexpr bool kEarly = U == 1 && V * L <= 8;
  A scale[kEarly ? V : 1][L], bias[kEarly ? V : 1][L];
  const auto load_parameters = [&](int64_t problem, int s, int k) {
    const int64_t at = problem * p.n + k;
    if constexpr (kEarly)
      LoadBias(scale[s], f.scale, at);
    else
      LoadScale(scale[0], f.scale, constants.offset, at);
    LoadBias(bias[kEarly ? s : 0], f.bias, at);
  };
  if constexpr (kEarly)
    ForEachVector<V, false>(p, [&](int s, int k) { load_parameters(ProblemOf(row[0], shape), s, k); });
  if (f.residual != nullptr)
#pragma unroll
    for (int u = 0; u < U; ++u) {
      ForEachVector<V, false>(p, [&](int s, int k) {
        const int64_t at = row[u] * p.n + k;
        const X residual = static_cast<const X*>(f.residual)[at];  // by reference it would be read byte by byte
        x[u][s] = AddRounded<T>(x[u][s], residual);
        if (exists[u]) static_cast<X*>(f.sum)[at] = x[u][s];
      });
      if (p.n > 0) pivot[u] += static_cast<A>(static_cast<const T*>(f.residual)[row[u] * p.n * L]);
    }
  if constexpr (kCluster) ClusterWait();

  A mean[U], rest[U], rstd[U];
  int turn = 0;
  RowMoments<T>(mean, rest, rstd, x, pivot, pivot, p, Columns<L, false>(shape.n, 0, 0), constants, exchanges, turn);
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (p.IsLeader() && exists[u]) StoreStatistics(f, row[u], mean[u], rest[u], rstd[u]);
#pragma unroll
  for (int u = 0; u < U; ++u) ForEachVector<V, false>(p, [&](int s, int) { ForgetWide(x[u][s]); });

  if (p.n == 0) return;
  if constexpr (kEarly)
#pragma unroll
    for (auto& each : scale) AddOffset(each, f.scale, constants.offset);
  int64_t problem[U] = {};
  if (shape.problems > 1)
#pragma unroll
    for (int u = 0; u < U; ++u) problem[u] = ProblemOf(row[u], shape);
  // Without branches the vectors' waits for the parameters overlap, where registers are left for that: what the
  // compiler makes of it for architectures without clusters takes more.
  constexpr int kRegisters = (1 << 16) / (kThreads * kBlocks);
  constexpr bool kStraight = kHasClusters && ((U * V * L <= 48 && kRegisters > 56) || (U == 1 && kRegisters > 96));
  if (kStraight && problem[0] == problem[U - 1]) {
#pragma unroll
    for (int s = 0; s < V; ++s) {
      const int k = p.first + s * p.stride;
      if constexpr (!kEarly) load_parameters(problem[0], s, min(k, p.n - 1));
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const Statistics<T> stats({mean[u], rest[u], rstd[u]});
        const X y = Apply<T>(x[u][s], stats, scale[kEarly ? s : 0], bias[kEarly ? s : 0]);
        if (exists[u] && k < p.n) static_cast<X*>(f.y)[row[u] * p.n + k] = y;
      }
    }
    return;
  }
  ForEachVector<V, false>(p, [&](int s, int k) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      // Rows of one problem share the parameters' registers.
      if (u == 0 ? !kEarly : problem[u] != problem[u - 1]) load_parameters(problem[u], s, k);
      const Statistics<T> stats({mean[u], rest[u], rstd[u]});
      if (exists[u])
        static_cast<X*>(f.y)[row[u] * p.n + k] = Apply<T>(x[u][s], stats, scale[kEarly ? s : 0], bias[kEarly ? s : 0]);
    }
  });
}

template <class T, int L, int V, int U, bool kCluster, int kThreads, int kBlocks = 1>
cudaError_t Launch(const Forward& f, const Shape& shape, const Options& options, const Spread& spread,
                   cudaStream_t stream) {
  const int64_t rows = int64_t{spread.groups} * U, clusters = CeilDiv(shape.problems * shape.rows, rows);
  const Grid grid = {clusters * spread.cluster, spread.Threads(), 0, spread.cluster};
  Turns turns = {1, 1};
  if (kTakesTurns<T, kCluster, kThreads> && clusters >= 4096 && shape.rows % rows == 0)
    turns = {static_cast<int>(std::min<int64_t>(32, shape.problems)), static_cast<int>(shape.rows / rows)};
  return LaunchKernel(ForwardKernel<T, L, V, U, kCluster, kThreads, kBlocks>, grid, stream, f, shape,
                      Constants<Accumulator<T>>(options, shape.n), spread, turns);
}

// Rows as vectors of L elements, of 16 bytes or 8.
template <class T, int L>
cudaError_t RunAligned(const Forward& f, const Shape& shape, const Options& options, const Device& device,
                       cudaStream_t stream, bool* done) {
  constexpr int kKeep = 4;
  // Blocks of a multiprocessor: what the compiler makes of f16 takes more registers.
  constexpr int kBlocks = std::is_same_v<T, __half> ? 2 : 3;
  // Kernels for many kinds of rows: f16, and several vectors of 8 bytes, do with the plainest.
  constexpr bool kMany = !std::is_same_v<T, __half> && L == kVecLength<T>;
  const int64_t n = shape.n / L;
  if constexpr (kMany) {
    cudaError_t e = cudaSuccess;
    const bool few = SpreadFew<T, L>(shape, n, device, [&](auto keep, const Spread& spread) {
      constexpr int V = decltype(keep)::value, kAtOnce = kFewBlocks<T, L, V>;
      if constexpr (V <= 2 * kFew<T, L>)
        if (spread.cluster == 1) e = Launch<T, L, V, 1, false, 512, kAtOnce>(f, shape, options, spread, stream);
      if constexpr (V > 1)
        if (spread.cluster > 1) e = Launch<T, L, V, 1, true, 512, kAtOnce>(f, shape, options, spread, stream);
    });
    if (few) return e;
  }
  // Of short rows several vectors to a lane: fewer steps of a sum over the lanes. Of bf16 in small blocks.
  if constexpr (std::is_same_v<T, float>)
    if (n >= 4 && n <= 64)
      return Launch<T, L, 2, 2, false, 256, 4>(f, shape, options, SpreadShortRows(n, 2, 256), stream);
  if constexpr (kHasPairs<T> && L == kVecLength<T>) {
    if (n >= 4 && n <= 8)
      return Launch<T, L, 2, 2, false, 64, 12>(f, shape, options, SpreadShortRows(n, 2, 64), stream);
    if (n > 8 && n <= 160) {
      const Spread four = SpreadShortRows(n, 4, 64), five = SpreadShortRows(n, 5, 64);
      if (five.width * five.steps < four.width * four.steps)
        return Launch<T, L, 5, 1, false, 64, 14>(f, shape, options, five, stream);
      if (four.steps == 4 && n <= 128) return Launch<T, L, 4, 1, false, 64, 16>(f, shape, options, four, stream);
    }
  }
  if (n <= 256 * kKeep) {
    // Several rows at once halve what is read of the parameters.
    const bool is_short = n > 8 && n <= 32 * kKeep;
    const Spread spread = is_short ? SpreadShortRows(n, kKeep, 256) : SpreadRows(n, kKeep, 256, 256, 1);
    if constexpr (!std::is_same_v<T, __half>)
      if (spread.steps == 1) return Launch<T, L, 1, 2, false, 256, kBlocks>(f, shape, options, spread, stream);
    if constexpr (kMany)
      if (spread.steps < kKeep) return Launch<T, L, 3, 2, false, 256, kBlocks>(f, shape, options, spread, stream);
    return Launch<T, L, kKeep, 2, false, 256, kBlocks>(f, shape, options, spread, stream);
  }
  // Rather more warps than more vectors for each thread.
  if constexpr (kHasPairs<T> && L == kVecLength<T>)
    if (n <= 384 * 6)
      return Launch<T, L, 6, 1, false, 384, 3>(f, shape, options, SpreadRows(n, 6, 256, 384, 1), stream);
  if constexpr (std::is_same_v<T, float>) {
    if (n <= 384 * 2 * kKeep)
      return Launch<T, L, 2 * kKeep, 1, false, 384, 2>(
          f, shape, options, SpreadRows(n, 2 * kKeep, 256, n <= 256 * 2 * kKeep ? 256 : 384, 1), stream);
    if (const Spread spread = SpreadRows(n, 4 * kKeep, 256, 256, 1); spread.steps > 0)
      return Launch<T, L, 4 * kKeep, 1, false, 256, 2>(f, shape, options, spread, stream);
  } else {
    if (const Spread spread = SpreadRows(n, 2 * kKeep, 256, 256, 1); spread.steps > 0)
      return Launch<T, L, 2 * kKeep, 1, false, 256, kBlocks>(f, shape, options, spread, stream);
  }
  return RunLongestForward(f, kDType<T>, shape, options, device, stream, done);
}

// Rows element by element: of doubles, of f16 that are not aligned to 16 bytes, and where buffers are not. Those that a
// block does not hold are not `done`.
template <class T>
cudaError_t RunNarrow(const Forward& f, const Shape& shape, const Options& options, cudaStream_t stream, bool* done) {
  constexpr int L = 1, kKeep = sizeof(T) == 8 ? 4 : 8;
  const Spread spread = SpreadRows(shape.n, kKeep, 256, 512, 1);
  *done = spread.steps > 0;
  if (!*done) return cudaSuccess;
  return Launch<T, L, kKeep, 1, false, 512>(f, shape, options, spread, stream);
}

}  // namespace

cudaError_t RunForward(const Forward& f, DType dtype, Shape shape, Options options, void* workspace,
                       cudaStream_t stream) {
  if (shape.problems == 0 || shape.rows == 0) return cudaSuccess;
  Device device;
  if (const cudaError_t e = Query(&device); e != cudaSuccess) return e;
  bool done = true;
  const cudaError_t e = VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool aligned = IsVectorAligned(f.x, f.residual, f.scale, f.bias, f.y, f.sum, f.mean, f.rstd);
    if constexpr (sizeof(T) < 8) {
      if (aligned && f.rstd == nullptr) {
        if (TakesPacked(dtype, shape)) return RunPackedForward(f, dtype, shape, options, stream);
        if (TakesRuns(f, dtype, shape)) return RunRuns(f, dtype, shape, options, stream);
      }
      if (aligned && TakesFewRows(f, dtype, shape, options, device))
        return RunFewRows(f, dtype, shape, options, device, stream);
      if (aligned && shape.n % kVecLength<T> == 0) {
        // Many long rows in a ring too, which has room for those of 256 KB.
        const int64_t n = shape.n / kVecLength<T>, longest_without = sizeof(T) == 2 ? 2048 : 4096;
        if constexpr (!std::is_same_v<T, __half>)
          if (n > longest_without && n <= 16384 && device.max_cluster == kMaxCluster &&
              !SpreadFew<T, kVecLength<T>>(shape, n, device, [](auto, const Spread&) {}))
            return RunShiftedForward(f, dtype, shape, options, device, stream, &done);
        return RunAligned<T, kVecLength<T>>(f, shape, options, device, stream, &done);
      }
      // Of bf16 vectors of 8 bytes are as good, but where they leave many lanes without one, or need a cluster.
      if constexpr (kHasPairs<T>)
        if (aligned && shape.n % 4 == 0 && (shape.n == 4 || (shape.n > 32 && shape.n <= 8192)))
          return RunAligned<T, 4>(f, shape, options, device, stream, &done);
      if (aligned && TakesSlabs(dtype, shape)) return RunSlabForward(f, dtype, shape, options, stream);
      if constexpr (!std::is_same_v<T, __half>)
        if (aligned) return RunShiftedForward(f, dtype, shape, options, device, stream, &done);
    }
    return RunNarrow<T>(f, shape, options, stream, &done);
  });
  return done || e != cudaSuccess ? e : RunWideForward(f, dtype, shape, options, workspace, stream);
}

}  // namespace jaxdnn::layer_norm
