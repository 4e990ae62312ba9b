// A channel's mean and sum of squared deviations, from the elements of a block's threads.
//
// A thread sums x - o and (x - o)^2, where its origin o is the first of its own elements: so close to the mean that
// nothing cancels, and if it is an outlier, what cancels is small against the variance that the outlier makes. The
// threads' counts, means and sums of squared deviations are merged exactly (Chan, Golub and LeVeque, 1979), with means
// relative to their origins, in a fixed order: within a block, then over the blocks that share a channel.
#pragma once

#include "cuda/batch_norm/plan.cuh"

namespace jaxdnn::batch_norm {

constexpr int kVectorsInFlight = 8;

// Of `count` elements: their mean, relative to the origin, and the sum of their squared deviations from it.
template <class A>
struct alignas(16) Summary {
  A count, origin, mean, m2;
};

// Within two roundings.
__device__ __forceinline__ float Quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double Quotient(double a, double b) { return a / b; }

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
  // The elements of a vector that exist.
  template <class T, int V>
  __device__ void Add(const Span& span, const Vec<T, V>& v) {
#pragma unroll
    for (int e = 0; e < V; ++e)
      if (e >= span.lo && e < span.hi) {
        const A x = static_cast<A>(v.v[e]);
        if (count[e % W] == A(0)) origin[e % W] = x;
        count[e % W] += A(1);
        Add(e % W, x);
      }
  }
  __device__ Summary<A> Of(int w) const {
    if (count[w] == A(0)) return {};
    const A mean = Quotient(sum[w], count[w]);
    return {count[w], origin[w], mean, max(squares[w] - sum[w] * mean, A(0))};
  }
};

// Hands write(channel, summary), as ReduceBlock does, what the block's elements of each of its channels amount to.
template <class M, class F>
__device__ void Summarize(const Tiling& t, const M& m, const typename M::T* x,
                          Summary<Accumulator<typename M::T>>* scratch, F&& write) {
  using T = typename M::T;
  using A = Accumulator<T>;
  constexpr int V = M::V, W = M::W, U = V > 1 ? 1 : 4;
  ThreadSums<A, W> sums;
  int i = 0;
  // V = 1 looks at the mask first.
  if constexpr (V > 1) {
    const auto load = [&](auto&& add) { ForBatches<1, kVectorsInFlight>(t, m, &x, add); };
    if (M::kRuns && t.ragged) {
      load([&](const Span& span, const auto& v) {
        if (span.lo > 0 || span.hi < V) return sums.Add(span, v[0]);
        if (sums.count[0] == A(0)) sums.origin[0] = static_cast<A>(v[0].v[0]);
        sums.count[0] += A(V);
#pragma unroll
        for (int e = 0; e < V; ++e) sums.Add(e % W, static_cast<A>(v[0].v[e]));
      });
    } else {
      load([&](const Span&, const auto& v) {
        if (i++ == 0)
#pragma unroll
          for (int w = 0; w < W; ++w) sums.origin[w] = static_cast<A>(v[0].v[w]);
#pragma unroll
        for (int e = 0; e < V; ++e) sums.Add(e % W, static_cast<A>(v[0].v[e]));
      });
#pragma unroll
      for (int w = 0; w < W; ++w) sums.count[w] = static_cast<A>(i) * A(V / W);
    }
    i = m.full;
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
      if (i + u < m.steps) sums.Add(span[u], v[u]);
  }
  Summary<A> summaries[W];
#pragma unroll
  for (int w = 0; w < W; ++w) summaries[w] = sums.Of(w);
  ReduceBlock(t, m, summaries, Merge{}, scratch, write);
}

// Where the statistics go.
template <class A>
struct Statistic {
  A *mean, *var;

  __device__ void Set(int64_t channel, const Summary<A>& s) const {
    mean[channel] = s.origin + s.mean;
    var[channel] = s.count > A(0) ? s.m2 / s.count : A(0);
  }
};

}  // namespace jaxdnn::batch_norm
