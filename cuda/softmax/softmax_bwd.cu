// The derivatives of softmax and log-softmax as linear maps in g, from the output y:
//   softmax                 y (g - sum(y g))
//   log-softmax, tangent    g - sum(exp(y) g)
//   log-softmax, cotangent  g - exp(y) sum(g)
//
// Bound by memory: two reads and one write, in the tiles of tiling.cuh. What does not fit is streamed twice: for the
// sum, then for the result.
#include "cuda/common/dtype.cuh"
#include "cuda/softmax/tiling.cuh"

namespace jaxdnn::softmax {
namespace {

template <Map kMap, class A>
__device__ A Term(A g, A y) {
  if constexpr (kMap == Map::kSoftmax) return y * g;
  if constexpr (kMap == Map::kLogSoftmaxJvp) return exp(y) * g;
  if constexpr (kMap == Map::kLogSoftmaxVjp) return g;
}

template <Map kMap, class A>
__device__ A Result(A g, A y, A sum) {
  if constexpr (kMap == Map::kSoftmax) return y * (g - sum);
  if constexpr (kMap == Map::kLogSoftmaxJvp) return g - sum;
  if constexpr (kMap == Map::kLogSoftmaxVjp) return g - exp(y) * sum;
}

// Of one vector: its terms, added to the sums, and its results, in place of g.
template <Map kMap, int W, class A, class T, int L>
__device__ void AddTerms(A (&sum)[W], const Vec<T, L>& g, const Vec<T, L>& y) {
#pragma unroll
  for (int i = 0; i < L; ++i) sum[i % W] += Term<kMap>(static_cast<A>(g.v[i]), static_cast<A>(y.v[i]));
}

template <Map kMap, int W, class A, class T, int L>
__device__ void ToResults(Vec<T, L>& g, const Vec<T, L>& y, const A (&sum)[W]) {
#pragma unroll
  for (int i = 0; i < L; ++i)
    g.v[i] = static_cast<T>(Result<kMap>(static_cast<A>(g.v[i]), static_cast<A>(y.v[i]), sum[i % W]));
}

template <Map kMap, class C, class T>
__global__ void __launch_bounds__(kMaxThreads)
    HeldKernel(Tiling t, Vec<T, C::L>* __restrict__ out, const Vec<T, C::L>* __restrict__ g_in,
               const Vec<T, C::L>* __restrict__ y_in) {
  using A = Accumulator<T>;
  constexpr int W = C::W, kSteps = C::kSteps;
  __shared__ A scratch[W * kMaxThreads];
  const Place p(t);
  Vec<T, C::L> g[kSteps], y[kSteps];
  LoadSteps(g, g_in, t, p, p.part, static_cast<T>(0.0f));
  LoadSteps(y, y_in, t, p, p.part, static_cast<T>(0.0f));
  A sum[W] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (s < p.steps) AddTerms<kMap>(sum, g[s], y[s]);
  Reduce(sum, Add{}, t.group, scratch);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (s < p.steps) ToResults<kMap>(g[s], y[s], sum);
  StoreSteps(g, out, t, p, p.part);
}

template <Map kMap, class C, class T>
__global__ void __launch_bounds__(kStreamingThreads<C::W>)
    StreamingKernel(Tiling t, Vec<T, C::L>* __restrict__ out, const Vec<T, C::L>* __restrict__ g_in,
                    const Vec<T, C::L>* __restrict__ y_in) {
  using A = Accumulator<T>;
  constexpr int W = C::W, kBatch = kStreamed<T> / C::L;
  __shared__ A scratch[W * kStreamingThreads<W>];
  const Place p(t);
  Vec<T, C::L> g[kBatch], y[kBatch];
  A sum[W] = {};
  for (int64_t k = p.part; k < t.shape.n; k += int64_t{kBatch} * p.parts) {
    LoadSteps(g, g_in, t, p, k, static_cast<T>(0.0f));
    LoadSteps(y, y_in, t, p, k, static_cast<T>(0.0f));
#pragma unroll
    for (int s = 0; s < kBatch; ++s) AddTerms<kMap>(sum, g[s], y[s]);
  }
  Reduce(sum, Add{}, t.group, scratch);
  for (int64_t k = p.part; k < t.shape.n; k += int64_t{kBatch} * p.parts) {
    LoadSteps(g, g_in, t, p, k, static_cast<T>(0.0f));
    LoadSteps(y, y_in, t, p, k, static_cast<T>(0.0f));
#pragma unroll
    for (int s = 0; s < kBatch; ++s) ToResults<kMap>(g[s], y[s], sum);
    StoreSteps(g, out, t, p, k);
  }
}

template <Map kMap>
struct MapTag {
  static constexpr Map value = kMap;
};

template <class F>
cudaError_t VisitMap(Map map, F&& f) {
  switch (map) {
    case Map::kSoftmax:
      return f(MapTag<Map::kSoftmax>{});
    case Map::kLogSoftmaxJvp:
      return f(MapTag<Map::kLogSoftmaxJvp>{});
    case Map::kLogSoftmaxVjp:
      return f(MapTag<Map::kLogSoftmaxVjp>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t Backward(Map map, DType dtype, const void* g, const void* y, void* out, Shape shape, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitMap(map, [&](auto tag) {
      return VisitTiling<T>(shape, IsVectorAligned(g, y, out), [&](auto access, const Tiling& t) {
        using C = decltype(access);
        using V = Vec<T, C::L>;
        constexpr Map kMap = decltype(tag)::value;
        auto* kernel = [] {
          if constexpr (C::kSteps == 0)
            return StreamingKernel<kMap, C, T>;
          else
            return HeldKernel<kMap, C, T>;
        }();
        return LaunchKernel(kernel, t.Blocks(), t.Threads(), stream, t, static_cast<V*>(out), static_cast<const V*>(g),
                            static_cast<const V*>(y));
      });
    });
  });
}

}  // namespace jaxdnn::softmax
