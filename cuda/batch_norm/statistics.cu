// Mean and biased variance of each channel.
//
// A thread sums x - o and (x - o)^2, where its origin o is the first of its own elements: so close to the mean that
// nothing cancels, and if it is an outlier, what cancels is small against the variance that the outlier makes. The
// threads' counts, means and sums of squared deviations are merged exactly (Chan, Golub and LeVeque, 1979), with means
// relative to their origins, in a fixed order: within a block, then over the blocks that share a channel.
//
// Bound by memory: one read.
#include "cuda/batch_norm/tiling.cuh"

namespace jaxdnn::batch_norm {
namespace {

constexpr int kBlocks = 2;  // on a multiprocessor
constexpr int kVectorsInFlight = 8;
constexpr int kFinalRows = 2;  // of partial results, which a thread loads at once

// Of `count` elements: their mean, relative to the origin, and the sum of their squared deviations from it.
template <class A>
struct alignas(16) Summary {
  A count, origin, mean, m2;
};

// Within two roundings.
__device__ float Quotient(float a, float b) { return __fdividef(a, b); }
__device__ double Quotient(double a, double b) { return a / b; }

struct Merge {
  template <class A>
  __device__ Summary<A> operator()(const Summary<A>& a, const Summary<A>& b) const {
    if (b.count == A(0)) return a;
    if (a.count == A(0)) return b;
    const A delta = (b.origin - a.origin) + (b.mean - a.mean);
    const A count = a.count + b.count, share = Quotient(b.count, count);
    return {count, a.origin, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
  }
};

// One thread's sums for W channels.
template <class A, int W>
struct ThreadSums {
  A count[W] = {}, origin[W] = {}, sum[W] = {}, squares[W] = {};

  __device__ void Add(int w, A x) {
    const A d = x - origin[w];
    sum[w] += d;
    squares[w] += d * d;
  }
  __device__ Summary<A> Of(int w) const {
    if (count[w] == A(0)) return {};
    const A mean = Quotient(sum[w], count[w]);
    return {count[w], origin[w], mean, max(squares[w] - sum[w] * mean, A(0))};
  }
};

template <class M>
__global__ void __launch_bounds__(kThreads, kBlocks)
    PartialKernel(Tiling t, const typename M::T* x, Summary<Accumulator<typename M::T>>* partial) {
  using T = typename M::T;
  using A = Accumulator<T>;
  constexpr int V = M::V, W = M::W, U = V > 1 && !M::kRuns ? 1 : 4;
  __shared__ Summary<A> scratch[kThreads * W];
  const M m(t, false);
  ThreadSums<A, W> sums;
  int i = 0;
  // V = 1 looks at the mask first.
  if constexpr (V > 1) {
    ForBatches<1, kVectorsInFlight>(t, m, &x, [&](int64_t, const auto& v) {
      if (i++ == 0)
#pragma unroll
        for (int w = 0; w < W; ++w) sums.origin[w] = static_cast<A>(v[0].v[w]);
#pragma unroll
      for (int e = 0; e < V; ++e) sums.Add(e % W, static_cast<A>(v[0].v[e]));
    });
#pragma unroll
    for (int w = 0; w < W; ++w) sums.count[w] = static_cast<A>(i) * A(V / W);
  }
  for (; i < m.steps; i += U) {
    Span span[U];
    Vec<T, V> v[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u < m.steps) {
        span[u] = m.At(t, i + u);
        if (!Kept<M>(t, span[u])) span[u].hi = 0;
        v[u] = Load<M>(t, x, span[u]);
      }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u < m.steps)
#pragma unroll
        for (int e = 0; e < V; ++e)
          if (e >= span[u].lo && e < span[u].hi) {
            if (sums.count[e % W] == A(0)) sums.origin[e % W] = static_cast<A>(v[u].v[e]);
            sums.count[e % W] += A(1);
            sums.Add(e % W, static_cast<A>(v[u].v[e]));
          }
  }
  Summary<A> summaries[W];
#pragma unroll
  for (int w = 0; w < W; ++w) summaries[w] = sums.Of(w);
  ReduceBlock(t, m, summaries, Merge{}, scratch, [&](int64_t channel, const Summary<A>& value) {
    partial[(m.block.outer * t.slabs + m.block.slab) * t.copies * t.c + channel] = value;
  });
}

// Merges partial[outer, rows, c]. Threads that agree modulo 1 << group.stride share a channel.
template <class A>
__global__ void __launch_bounds__(kThreads) FinalKernel(const Summary<A>* __restrict__ partial, int64_t rows, int64_t c,
                                                        int64_t tiles, Group group, A* mean, A* var) {
  __shared__ Summary<A> scratch[kThreads];
  const int64_t outer = blockIdx.x / tiles;
  const int width = 1 << group.stride, column = threadIdx.x & (width - 1), step = kThreads >> group.stride;
  const int64_t channel = (blockIdx.x - outer * tiles) * width + column;
  partial += outer * rows * c + min(channel, c - 1);
  Summary<A> m[1] = {};
  for (int64_t r = threadIdx.x >> group.stride; r < rows; r += kFinalRows * step) {
    Summary<A> loaded[kFinalRows];
#pragma unroll
    for (int i = 0; i < kFinalRows; ++i) {
      loaded[i] = partial[min(r + i * step, rows - 1) * c];
      if (r + i * step >= rows) loaded[i].count = A(0);
    }
#pragma unroll
    for (int i = 0; i < kFinalRows; ++i) m[0] = Merge{}(m[0], loaded[i]);
  }
  Reduce(m, Merge{}, group, scratch);
  if (threadIdx.x != column || channel >= c) return;
  mean[outer * c + channel] = m[0].origin + m[0].mean;
  var[outer * c + channel] = m[0].count > A(0) ? m[0].m2 / m[0].count : A(0);
}

template <class A>
cudaError_t Finish(const Tiling& t, const Summary<A>* partial, A* mean, A* var, cudaStream_t stream) {
  const int64_t rows = t.Partials();
  // As many channels side by side as leave a thread few rows, which it reads at once.
  Group group = {kSpan, kSpan};
  while (group.stride > 0 && rows > int64_t{kFinalRows} * (kThreads >> group.stride)) --group.stride;
  const int64_t tiles = CeilDiv(t.c, 1 << group.stride);
  return LaunchKernel(FinalKernel<A>, t.outer * tiles, kThreads, stream, partial, rows, t.c, tiles, group, mean, var);
}

}  // namespace

cudaError_t Statistics(const Problem& p, const void* x, void* mean, void* var, Workspace workspace,
                       cudaStream_t stream) {
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const size_t channels = static_cast<size_t>(p.outer * p.c);
    if (channels == 0) return cudaSuccess;
    if (p.n * p.s == 0) {
      const cudaError_t e = cudaMemsetAsync(mean, 0, channels * sizeof(A), stream);
      return e != cudaSuccess ? e : cudaMemsetAsync(var, 0, channels * sizeof(A), stream);
    }
    const int64_t limit = static_cast<int64_t>(workspace.bytes / (channels * sizeof(Summary<A>)));
    if (limit < 1) return cudaErrorInvalidValue;
    auto* partial = static_cast<Summary<A>*>(workspace.data);
    return VisitTiling<T, sizeof(T) < 8>(
        p, IsVectorAligned(x), limit, kBlocks * kMultiprocessors, [&](auto access, const Tiling& t) {
          using M = typename decltype(access)::type;
          const cudaError_t e =
              LaunchKernel(PartialKernel<M>, t.Blocks(), kThreads, stream, t, static_cast<const T*>(x), partial);
          return e != cudaSuccess ? e : Finish(t, partial, static_cast<A*>(mean), static_cast<A*>(var), stream);
        });
  });
}

}  // namespace jaxdnn::batch_norm
