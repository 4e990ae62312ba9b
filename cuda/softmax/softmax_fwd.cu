// Softmax and log-softmax: y = exp(x - m) / s and y = x - m - log(s), with m = max(x) and s = sum(exp(x - m)).
//
// Bound by memory: one read and one write. A group of threads holds a tile in registers, finds m, then s, and writes
// (tiling.cuh says which threads those are). Tiles that do not fit are streamed twice: first for m and s together,
// rescaling s whenever m grows, then for the result.
//
// m ignores NaN, and s does not: NaN or +inf anywhere make s NaN, which makes the whole row NaN; in a row of -inf,
// x - m is NaN by itself.
#include <cmath>

#include "cuda/common/dtype.cuh"
#include "cuda/softmax/tiling.cuh"

namespace jaxdnn::softmax {
namespace {

template <bool kLog, class C, class T>
__global__ void __launch_bounds__(kMaxThreads)
    HeldKernel(Tiling t, Vec<T, C::L>* __restrict__ y, const Vec<T, C::L>* __restrict__ x) {
  using A = Accumulator<T>;
  constexpr int L = C::L, W = C::W, kSteps = C::kSteps;
  __shared__ A scratch[W * kMaxThreads];
  const Place p(t);
  Vec<T, L> v[kSteps];
  LoadSteps(v, x, t, p, p.part, static_cast<T>(-INFINITY));

  A m[W], sum[W];
  for (int i = 0; i < W; ++i) m[i] = -INFINITY, sum[i] = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (s < p.steps)
      for (int i = 0; i < L; ++i) m[i % W] = Max{}(m[i % W], static_cast<A>(v[s].v[i]));
  Reduce(m, Max{}, t.group, scratch);

  // Softmax keeps the exponentials; log-softmax keeps x.
  A e[kLog ? 1 : kSteps * L];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (s < p.steps)
      for (int i = 0; i < L; ++i) {
        const A value = exp(static_cast<A>(v[s].v[i]) - m[i % W]);
        sum[i % W] += value;
        if constexpr (!kLog) e[s * L + i] = value;
      }
  Reduce(sum, Add{}, t.group, scratch);

  A scale[W];
  for (int i = 0; i < W; ++i) scale[i] = kLog ? log(sum[i]) : A(1) / sum[i];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (s < p.steps)
      for (int i = 0; i < L; ++i) {
        // m goes first: x - (m + log(s)) would round log(s) away where m is large.
        if constexpr (kLog)
          v[s].v[i] = static_cast<T>(static_cast<A>(v[s].v[i]) - m[i % W] - scale[i % W]);
        else
          v[s].v[i] = static_cast<T>(e[s * L + i] * scale[i % W]);
      }
  StoreSteps(v, y, t, p, p.part);
}

// The maximum of some elements, and the sum of exp(x - m) over them. Without elements: -inf and 0.
template <class A>
struct MaxSum {
  A m, s;
};

// What is subtracted: m, or 0 where m is -inf still, since -inf - -inf is NaN.
template <class A>
__device__ A Origin(A m) {
  return m == -static_cast<A>(INFINITY) ? A(0) : m;
}

struct Merge {
  template <class A>
  __device__ MaxSum<A> operator()(MaxSum<A> a, MaxSum<A> b) const {
    const A m = Max{}(a.m, b.m), origin = Origin(m);
    return {m, a.s * exp(a.m - origin) + b.s * exp(b.m - origin)};
  }
};

template <bool kLog, class C, class T>
__global__ void __launch_bounds__(kStreamingThreads<C::W>)
    StreamingKernel(Tiling t, Vec<T, C::L>* __restrict__ y, const Vec<T, C::L>* __restrict__ x) {
  using A = Accumulator<T>;
  constexpr int L = C::L, W = C::W, kBatch = kStreamed<T> / C::L;
  __shared__ MaxSum<A> scratch[W * kStreamingThreads<W>];
  const Place p(t);
  MaxSum<A> total[W];
  for (auto& each : total) each = {-static_cast<A>(INFINITY), A(0)};
  Vec<T, L> v[kBatch];
  for (int64_t k = p.part; k < t.shape.n; k += int64_t{kBatch} * p.parts) {
    LoadSteps(v, x, t, p, k, static_cast<T>(-INFINITY));
    MaxSum<A> next[W];
    A origin[W];
    for (int i = 0; i < W; ++i) next[i].m = total[i].m;
#pragma unroll
    for (int s = 0; s < kBatch; ++s)
      for (int i = 0; i < L; ++i) next[i % W].m = Max{}(next[i % W].m, static_cast<A>(v[s].v[i]));
    for (int i = 0; i < W; ++i) {
      origin[i] = Origin(next[i].m);
      next[i].s = total[i].s * exp(total[i].m - origin[i]);
    }
#pragma unroll
    for (int s = 0; s < kBatch; ++s)
      for (int i = 0; i < L; ++i) next[i % W].s += exp(static_cast<A>(v[s].v[i]) - origin[i % W]);
    for (int i = 0; i < W; ++i) total[i] = next[i];
  }
  Reduce(total, Merge{}, t.group, scratch);

  A scale[W];
  for (int i = 0; i < W; ++i) scale[i] = kLog ? log(total[i].s) : A(1) / total[i].s;
  for (int64_t k = p.part; k < t.shape.n; k += int64_t{kBatch} * p.parts) {
    LoadSteps(v, x, t, p, k, static_cast<T>(-INFINITY));
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      for (int i = 0; i < L; ++i) {
        const A d = static_cast<A>(v[s].v[i]) - total[i % W].m;
        v[s].v[i] = static_cast<T>(kLog ? d - scale[i % W] : exp(d) * scale[i % W]);
      }
    }
    StoreSteps(v, y, t, p, k);
  }
}

}  // namespace

cudaError_t Forward(bool log, DType dtype, const void* x, void* y, Shape shape, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitTiling<T>(shape, IsVectorAligned(x, y), [&](auto access, const Tiling& t) {
      using C = decltype(access);
      using V = Vec<T, C::L>;
      auto* kernel = [&] {
        if constexpr (C::kSteps == 0)
          return log ? StreamingKernel<true, C, T> : StreamingKernel<false, C, T>;
        else
          return log ? HeldKernel<true, C, T> : HeldKernel<false, C, T>;
      }();
      return LaunchKernel(kernel, t.Blocks(), t.Threads(), stream, t, static_cast<V*>(y), static_cast<const V*>(x));
    });
  });
}

}  // namespace jaxdnn::softmax
