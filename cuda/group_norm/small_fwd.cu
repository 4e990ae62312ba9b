// The forward pass of small slabs (small.cuh).
#include "cuda/group_norm/small.cuh"
#include "cuda/group_norm/small.h"

namespace jaxdnn::group_norm {
namespace {

template <class T, int V>
struct SmallOperands {
  using A = Accumulator<T>;
  const Vec<T, V>* x;
  const A *scale, *bias;
  Vec<T, V>* y;
  Statistics<A>* statistics;
  A epsilon;
  double inverse;  // of the elements of a group
};

template <class F, class T, int V>
__global__ void __launch_bounds__(kSmallThreads)
    SmallForwardKernel(const __grid_constant__ SmallTiling t, const __grid_constant__ SmallOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  __shared__ A scales[kMostParameters], biases[kMostParameters];
  if (t.blocks > 1) ClusterArriveRelaxed();
  const SmallPlace place(t);
  Packed<T, V> held[kHeld];
  place.Load(o.x, held);
  const A pivot = static_cast<A>(reinterpret_cast<const T*>(o.x + place.slab)[0]);
  for (int c = threadIdx.x; c < t.period; c += blockDim.x)
    scales[c] = o.scale[place.parameters + c], biases[c] = o.bias[place.parameters + c];

  // Several sums, so that additions need not wait for each other.
  constexpr int kParts = 4;
  Shifted<A> part[kParts] = {};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    A x[V];
    Widen<T, V>(held[k], x);
    if (k == 0)
#pragma unroll
      for (int j = 0; j < kParts; ++j) part[j].first = x[0];
    if (k < place.rows)
#pragma unroll
      for (int j = 0; j < V; ++j) part[j % kParts].Add(x[j]);
  }
#pragma unroll
  for (int j = 1; j < kParts; ++j) part[0].sum += part[j].sum, part[0].squares += part[j].squares;
  const Moments own = place.rows > 0 ? part[0].About(pivot, V * place.rows) : Moments{};
  const Statistics<A> statistics(SumSlab(t.blocks, place.rank, own), o.inverse, pivot, o.epsilon);
  if (place.rank == 0 && threadIdx.x == 0) o.statistics[place.unit] = statistics;

  Affine<A> affine[V];
  place.ForEachChannel<V>(t, [&](int j, int c) { affine[j] = Affine<A>(statistics, scales[c], biases[c]); });
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k >= place.rows) break;
    A x[V];
    Widen<T, V>(held[k], x);
#pragma unroll
    for (int j = 0; j < V; ++j) x[j] = affine[j](x[j]);
    f.Forward(x);
    Write<T, V>(o.y + place.base + k * place.step, x);
  }
}

}  // namespace

std::optional<cudaError_t> SmallForward(const Problem& p, const void* x, const void* scale, const void* bias, void* y,
                                        void* statistics, cudaStream_t stream) {
  const auto t = PlanSmall(p, 1);
  if (!t || !IsVectorAligned(x, y) || !HasRings()) return std::nullopt;
  return VisitSingleDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    constexpr int kLength = kVecLength<T>;
    using V = Vec<T, kLength>;
    SmallOperands<T, kLength> o = {};
    o.x = static_cast<const V*>(x), o.y = static_cast<V*>(y);
    o.scale = static_cast<const A*>(scale), o.bias = static_cast<const A*>(bias);
    o.statistics = static_cast<Statistics<A>*>(statistics);
    o.epsilon = static_cast<A>(p.epsilon);
    o.inverse = 1.0 / static_cast<double>(p.channels / p.groups * p.spatial);
    return VisitActivation<T, false>(p.activation, [&](auto f) {
      return LaunchKernel(SmallForwardKernel<decltype(f), T, kLength>, t->Blocks(0), stream, *t, o, f);
    });
  });
}

}  // namespace jaxdnn::group_norm
