// Layer norm and RMS norm:  y = (s - mean) rstd (scale + offset) + bias,  rstd
// = 1 / sqrt(mean((s - mean)^2) + epsilon), with s = x + residual, rounded to
// the type in which it is returned; RMS norm has mean 0.
//
// Bound by memory: one read and one write. Groups of threads hold rows in
// registers (rows.cuh says which threads those are), several rows at once where
// they are short, so that enough loads are in flight. The mean is found first,
// then the moments of what differs from it: the first corrects the mean, whose
// rounding may exceed the deviation.
#include "cuda/layer_norm/rows.cuh"
#include "cuda/layer_norm/wide.h"

namespace jaxdnn::layer_norm {
namespace {

// V vectors of each of U rows.
template <class T, int L, int V, int U, bool kCluster>
__global__ void __launch_bounds__(kCluster || V > 2 ? 1024 : 256)
    ForwardKernel(Forward f, Shape shape, Options options, Spread spread) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  __shared__ Exchange<A, U, kCluster> first_exchange;
  __shared__ Exchange<A, 2 * U, kCluster> second_exchange;
  const Place p(spread);
  if constexpr (kCluster) ClusterArrive();

  const int64_t rows = shape.problems * shape.rows;
  const int64_t row0 = (p.block * spread.Groups() + p.group) * U;
  X v[U][V];
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (row0 + u < rows)
      ForEachVector<V>(p, [&](int s, int64_t k) { v[u][s] = static_cast<const X*>(f.x)[(row0 + u) * p.n + k]; });
  if (f.residual != nullptr) {
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (row0 + u < rows)
        ForEachVector<V>(p, [&](int s, int64_t k) {
          const int64_t at = (row0 + u) * p.n + k;
          const X r = static_cast<const X*>(f.residual)[at];
#pragma unroll
          for (int i = 0; i < L; ++i)
            v[u][s].v[i] = static_cast<T>(static_cast<A>(v[u][s].v[i]) + static_cast<A>(r.v[i]));
          static_cast<X*>(f.sum)[at] = v[u][s];
        });
  }
  if constexpr (kCluster) ClusterWait();

  const A count = static_cast<A>(shape.n);
  A origin[U] = {}, moments[2 * U] = {};
  if (options.center) {
#pragma unroll
    for (int u = 0; u < U; ++u)
      ForEachVector<V>(p, [&](int s, int64_t) {
        for (int i = 0; i < L; ++i) origin[u] += static_cast<A>(v[u][s].v[i]);
      });
    GroupSum<kCluster>(origin, p, first_exchange);
    for (A& each : origin) each /= count;
  }
#pragma unroll
  for (int u = 0; u < U; ++u)
    ForEachVector<V>(p, [&](int s, int64_t) {
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const A d = static_cast<A>(v[u][s].v[i]) - origin[u];
        moments[2 * u] += d;
        moments[2 * u + 1] += d * d;
      }
    });
  GroupSum<kCluster>(moments, p, second_exchange);

  Statistics<A> stats[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const A rest = options.center ? moments[2 * u] / count : A(0);
    const A variance = moments[2 * u + 1] / count - rest * rest;
    const A rstd = A(1) / sqrt(variance + static_cast<A>(options.epsilon));
    stats[u] = {origin[u], rstd, -rest * rstd};
    if (!p.IsLeader() || row0 + u >= rows) continue;
    static_cast<A*>(f.rstd)[row0 + u] = rstd;
    if (f.mean != nullptr) static_cast<Vec<A, 2>*>(f.mean)[row0 + u] = {{origin[u], rest}};
  }

  // Rows of one problem share the parameters' registers.
  int64_t problem[U];
#pragma unroll
  for (int u = 0; u < U; ++u) problem[u] = shape.problems == 1 ? 0 : (row0 + u) / shape.rows;
  ForEachVector<V>(p, [&](int s, int64_t k) {
    A scale[L], bias[L];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row0 + u >= rows) break;
      if (u == 0 || shape.problems > 1) {
        LoadScale(scale, f.scale, options, problem[u] * p.n + k);
        for (A& each : bias) each = 0;
        if (f.bias != nullptr) LoadParameters(bias, f.bias, problem[u] * p.n + k);
      }
#pragma unroll
      for (int i = 0; i < L; ++i)
        v[u][s].v[i] = static_cast<T>(fma(stats[u].Normalize(static_cast<A>(v[u][s].v[i])), scale[i], bias[i]));
      static_cast<X*>(f.y)[(row0 + u) * p.n + k] = v[u][s];
    }
  });
}

template <class T, int L, int V, int U, bool kCluster>
cudaError_t Launch(const Forward& f, const Shape& shape, const Options& options, const Spread& spread,
                   cudaStream_t stream) {
  const int64_t clusters = CeilDiv(shape.problems * shape.rows, int64_t{spread.Groups()} * U);
  const Grid grid = {clusters * spread.cluster, spread.threads, 0, spread.cluster};
  return LaunchKernel(ForwardKernel<T, L, V, U, kCluster>, grid, stream, f, shape, options, spread);
}

// Rows as vectors of L elements, of which a thread holds up to kHeld.
template <class T, int L, int kHeld>
cudaError_t Dispatch(const Forward& f, DType dtype, const Shape& shape, const Options& options, void* workspace,
                     cudaStream_t stream) {
  const int64_t n = shape.n / L;
  if constexpr (L > 1) {
    if (n <= 32) return Launch<T, L, 1, 4, false>(f, shape, options, SpreadRows(n, 1, 256, 0, 0), stream);
    if (n <= 64) return Launch<T, L, 2, 2, false>(f, shape, options, SpreadRows(n, 2, 256, 0, 0), stream);
  }
  if constexpr (kHeld > 4) {
    const Spread half = SpreadRows(n, kHeld / 2, 256, 1024, 1);
    if (half.steps > 0) return Launch<T, L, kHeld / 2, 1, false>(f, shape, options, half, stream);
  }
  const Spread block = SpreadRows(n, kHeld, 256, 1024, 1);
  if (block.steps > 0) return Launch<T, L, kHeld, 1, false>(f, shape, options, block, stream);
  if constexpr (L > 1 && sizeof(T) < 8)
    if (HasClusters()) {
      const Spread cluster = SpreadRows(n, kHeld, 256, 1024, 8);
      if (cluster.steps > 0) return Launch<T, L, kHeld, 1, true>(f, shape, options, cluster, stream);
    }
  return RunWideForward(f, dtype, shape, options, workspace, stream);
}

}  // namespace

cudaError_t RunForward(const Forward& f, DType dtype, Shape shape, Options options, void* workspace,
                       cudaStream_t stream) {
  if (shape.problems == 0 || shape.rows == 0) return cudaSuccess;
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int L = kVecLength<T>;
    const bool aligned = IsVectorAligned(f.x, f.residual, f.scale, f.bias, f.y, f.sum);
    if (aligned && shape.n % L == 0)
      return Dispatch<T, L, (sizeof(T) > 2 ? 8 : 4)>(f, dtype, shape, options, workspace, stream);
    if constexpr (sizeof(T) == 2)
      if (aligned && shape.n % 2 == 0) return Dispatch<T, 2, 16>(f, dtype, shape, options, workspace, stream);
    return Dispatch<T, 1, 16>(f, dtype, shape, options, workspace, stream);
  });
}

}  // namespace jaxdnn::layer_norm
