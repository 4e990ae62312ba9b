// Layer norm and RMS norm:  y = (s - mean) rstd (scale + offset) + bias,  rstd
// = 1 / sqrt(mean((s - mean)^2) + epsilon), with s = x + residual, rounded to
// the type in which it is returned; RMS norm has mean 0.
//
// Bound by memory: one read and one write. Groups of threads hold rows in registers (rows.cuh says which threads those
// are), several rows at once where they are short, so that enough loads are in flight. The mean is found first, then
// the moments of what differs from it: the first corrects the mean, whose rounding may exceed the deviation.
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

// Threads of a block at most: many for those that do little, or that have too little to do to be worth more kernels.
template <class T, int L, int V, int U>
constexpr int kThreads = L < kVecLength<T> || V * U == 1 ? 512 : 256;

// V vectors of each of U rows.
template <class T, int L, int V, int U, bool kExact, bool kCluster>
__global__ void __launch_bounds__(kThreads<T, L, V, U>, kThreads<T, L, V, U> == 256 && V * U == 4 ? 3 : 1)
    ForwardKernel(Forward f, Shape shape, Constants<Accumulator<T>> constants, Spread spread) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  __shared__ Exchange<A, U, kCluster> first_exchange;
  __shared__ Exchange<A, kWideMean<T> ? 2 * U : U, kCluster> second_exchange;
  const Place p(spread, kCluster);
  if constexpr (kCluster) ClusterArrive();

  // Past the end the last row is done again, and not stored.
  const int64_t last = shape.problems * shape.rows - 1;
  int64_t row[U];
  bool exists[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    row[u] = (int64_t{p.block} * U + u) * spread.groups + p.group;
    exists[u] = row[u] <= last;
    row[u] = min(row[u], last);
  }
  X x[U][V];
#pragma unroll
  for (int u = 0; u < U; ++u)
    ForEachVector<V, kExact>(p, [&](int s, int k) { x[u][s] = static_cast<const X*>(f.x)[row[u] * p.n + k]; });
  // The parameters too, where the little that a thread does leaves registers for them, and nothing else hides the wait.
  constexpr bool kEarly = V == 1 && U == 1;
  A scale[L], bias[L];
  const auto load_parameters = [&](int64_t r, int k) {
    const int64_t at = ProblemOf(r, shape) * p.n + k;
    LoadScale(scale, f.scale, constants.offset, at);
    LoadBias(bias, f.bias, at);
  };
  if constexpr (kEarly) ForEachVector<V, kExact>(p, [&](int, int k) { load_parameters(row[0], k); });
  if (f.residual != nullptr)
#pragma unroll
    for (int u = 0; u < U; ++u)
      ForEachVector<V, kExact>(p, [&](int s, int k) {
        const int64_t at = row[u] * p.n + k;
        const X r = static_cast<const X*>(f.residual)[at];
        A one[L], other[L];
        Widen(one, x[u][s]);
        Widen(other, r);
#pragma unroll
        for (int i = 0; i < L; ++i) x[u][s].v[i] = static_cast<T>(one[i] + other[i]);
        if (exists[u]) static_cast<X*>(f.sum)[at] = x[u][s];
      });
  if constexpr (kCluster) ClusterWait();

  // The sums of squares, and those of what the mean left over.
  constexpr int kMoments = kWideMean<T> ? 2 * U : U;
  A v[U][V][L], mean[U] = {}, moments[kMoments] = {};
#pragma unroll
  for (int u = 0; u < U; ++u)
    ForEachVector<V, kExact>(p, [&](int s, int) {
      Widen(v[u][s], x[u][s]);
      mean[u] += SumOf(v[u][s]);
    });
  if (constants.center) {
    GroupSum<kCluster>(mean, p, first_exchange);
#pragma unroll
    for (A& each : mean) each *= constants.inverse;
  } else {
#pragma unroll
    for (A& each : mean) each = 0;
  }
#pragma unroll
  for (int u = 0; u < U; ++u)
    ForEachVector<V, kExact>(p, [&](int s, int) {
#pragma unroll
      for (int i = 0; i < L; ++i) {
        v[u][s][i] -= mean[u];
        moments[u] = fma(v[u][s][i], v[u][s][i], moments[u]);
      }
      if constexpr (kWideMean<T>) moments[U + u] += SumOf(v[u][s]);
    });
  GroupSum<kCluster>(moments, p, second_exchange);

  A rstd[U], rest[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    rest[u] = 0;
    if constexpr (kWideMean<T>)
      if (constants.center) rest[u] = moments[U + u] * constants.inverse;
    rstd[u] = InverseRoot(moments[u] * constants.inverse - rest[u] * rest[u] + constants.epsilon);
    if (!p.IsLeader() || !exists[u]) continue;
    static_cast<A*>(f.rstd)[row[u]] = rstd[u];
    if (f.mean != nullptr) static_cast<Vec<A, 2>*>(f.mean)[row[u]] = {{mean[u], rest[u]}};
  }

  ForEachVector<V, kExact>(p, [&](int s, int k) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      // Rows of one problem share the parameters' registers.
      if ((!kEarly && u == 0) || (u > 0 && shape.problems > 1)) load_parameters(row[u], k);
      X y;
#pragma unroll
      for (int i = 0; i < L; ++i) y.v[i] = static_cast<T>(fma((v[u][s][i] - rest[u]) * rstd[u], scale[i], bias[i]));
      if (exists[u]) static_cast<X*>(f.y)[row[u] * p.n + k] = y;
    }
  });
}

template <class T, int L, int V, int U, bool kExact, bool kCluster>
cudaError_t Launch(const Forward& f, const Shape& shape, const Options& options, const Spread& spread,
                   cudaStream_t stream) {
  const int64_t clusters = CeilDiv(shape.problems * shape.rows, int64_t{spread.groups} * U);
  const Grid grid = {clusters * spread.cluster, spread.Threads(), 0, spread.cluster};
  return LaunchKernel(ForwardKernel<T, L, V, U, kExact, kCluster>, grid, stream, f, shape,
                      Constants<Accumulator<T>>(options, shape.n), spread);
}

// Rows as vectors of 16 bytes.
template <class T>
cudaError_t RunAligned(const Forward& f, const Shape& shape, const Options& options, const Device& device,
                       cudaStream_t stream, bool* done) {
  constexpr int L = kVecLength<T>, kKeep = 4;
  const int64_t n = shape.n / L;
  if (AreFew(shape, n, device)) {
    const Spread thin = SpreadRows(n, 1, 256, 512, device.max_cluster);
    if (thin.cluster == 1) return Launch<T, L, 1, 1, true, false>(f, shape, options, thin, stream);
    if (thin.steps > 0) return Launch<T, L, 1, 1, true, true>(f, shape, options, thin, stream);
  } else if (n <= 256 * kKeep) {
    // Several rows at once halve what is read of the parameters; larger blocks lack the registers.
    return VisitSteps<kKeep>(SpreadRows(n, kKeep, 256, 256, 1).steps, [&](auto steps) {
      constexpr int V = decltype(steps)::value, U = 2;
      return Launch<T, L, V, U, true, false>(f, shape, options, SpreadRows(n, V, 256, 256, 1), stream);
    });
  }
  // Several small blocks on a multiprocessor hide each other's waits better than a large one does.
  const Spread spread = SpreadRows(n, kKeep, 256, 256, device.max_cluster);
  *done = spread.steps > 0;
  if (!*done) return cudaSuccess;
  return spread.cluster == 1 ? Launch<T, L, kKeep, 1, false, false>(f, shape, options, spread, stream)
                             : Launch<T, L, kKeep, 1, false, true>(f, shape, options, spread, stream);
}

// Rows as vectors of L elements, where rows or buffers are not aligned to 16 bytes.
template <class T, int L>
cudaError_t RunNarrow(const Forward& f, const Shape& shape, const Options& options, const Device& device,
                      cudaStream_t stream, bool* done) {
  constexpr int kKeep = sizeof(T) == 8 ? 4 : 8;
  const Spread spread = SpreadRows(shape.n / L, kKeep, 256, 512, MaxCluster<T>(device));
  *done = spread.steps > 0;
  if (!*done) return cudaSuccess;
  if constexpr (sizeof(T) < 8)
    if (spread.cluster > 1) return Launch<T, L, kKeep, 1, false, true>(f, shape, options, spread, stream);
  return Launch<T, L, kKeep, 1, false, false>(f, shape, options, spread, stream);
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
    const bool aligned = IsVectorAligned(f.x, f.residual, f.scale, f.bias, f.y, f.sum);
    if constexpr (sizeof(T) < 8) {
      if (aligned && shape.n % kVecLength<T> == 0) return RunAligned<T>(f, shape, options, device, stream, &done);
      if (aligned && TakesSlabs(dtype, shape, false)) return RunSlabForward(f, dtype, shape, options, stream);
    }
    if constexpr (kHasPairs<T>)
      if (aligned && shape.n % 2 == 0) return RunNarrow<T, 2>(f, shape, options, device, stream, &done);
    return RunNarrow<T, 1>(f, shape, options, device, stream, &done);
  });
  return done || e != cudaSuccess ? e : RunWideForward(f, dtype, shape, options, workspace, stream);
}

}  // namespace jaxdnn::layer_norm
