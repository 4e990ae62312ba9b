// The pullback of small slabs (small.cuh): maps.cuh has the formulas.
//
// A block leaves one row of dscale and dbias.
#include "cuda/common/column_sum.cuh"
#include "cuda/group_norm/maps.cuh"
#include "cuda/group_norm/small.cuh"
#include "cuda/group_norm/small.h"

namespace jaxdnn::group_norm {
namespace {

template <class T, int V>
struct SmallMapOperands {
  using A = Accumulator<T>;
  const Vec<T, V>*in, *x;
  const A *scale, *bias;
  const Statistics<A>* statistics;
  Vec<T, V>* out;
  A *dscale, *dbias;  // [examples, blocks of a slab, channels]
  A inverse;          // of the elements of a group
};

template <class F, class T, int V>
__global__ void __launch_bounds__(kSmallThreads)
    SmallBackwardKernel(const __grid_constant__ SmallTiling t, const __grid_constant__ SmallMapOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* sums = reinterpret_cast<Sums<A>*>(shared);  // [V][threads], of their elements
  if (t.blocks > 1) ClusterArriveRelaxed();
  const SmallPlace place(t);
  Packed<T, V> in_held[kHeld], x_held[kHeld];
  place.Load(o.in, in_held);
  place.Load(o.x, x_held);
  const Statistics<A> statistics = o.statistics[place.unit];
  Linear<Map::kPullback, A> map[V];
  A scale[V];
  place.ForEachChannel<V>(t, [&](int j, int c) {
    scale[j] = o.scale[place.parameters + c];
    map[j] = Linear<Map::kPullback, A>(statistics, scale[j], o.bias[place.parameters + c]);
  });

  Sums<A> own[V] = {};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k >= place.rows) break;
    A in[V], x[V];
    Widen<T, V>(in_held[k], in);
    Widen<T, V>(x_held[k], x);
    AddVector<Map::kPullback>(f, in, x, [&](int j) -> auto& { return map[j]; }, [&](int j) -> auto& { return own[j]; });
  }
  Sums<A> weighted = {};
#pragma unroll
  for (int j = 0; j < V; ++j) {
    own[j] = Normalized(own[j], statistics);
    weighted = AddPairs{}(weighted, Times(own[j], scale[j]));
    sums[j * blockDim.x + threadIdx.x] = own[j];
  }
  const Sums<A> means = Times(SumSlab(t.blocks, place.rank, weighted), o.inverse);
#pragma unroll
  for (int j = 0; j < V; ++j) map[j].Finish(statistics, means, A(0), A(0));
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k >= place.rows) break;
    A in[V], x[V];
    Widen<T, V>(in_held[k], in);
    Widen<T, V>(x_held[k], x);
    MapVector<Map::kPullback>(f, in, x, [&](int j) -> auto& { return map[j]; });
    Write<T, V>(o.out + place.base + k * place.step, in);
  }

  // The channels, each by some neighbouring lanes; more than one element of a row may be of a channel.
  const int width = t.columns * V, terms = width / t.period * t.parallel;
  int span = 5;
  while (span > 0 && t.period << span > blockDim.x) --span;
  const int lane = threadIdx.x & ((1 << span) - 1);
  const int64_t row = (int64_t{place.example} * t.blocks + place.rank) * t.channels;
  const int first_channel = place.unit % t.groups * t.period;
  for (int first = 0; first < t.period; first += blockDim.x >> span) {
    const int channel = first + (threadIdx.x >> span);
    Sums<A> sum[1] = {};
    if (channel < t.period) {
#pragma unroll 4
      for (int i = lane; i < terms; i += 1 << span) {
        const int down = i % t.parallel, element = channel + i / t.parallel * t.period;
        sum[0] = AddPairs{}(sum[0], sums[element % V * blockDim.x + down * t.columns + element / V]);
      }
    }
    Reduce(sum, AddPairs{}, {0, span}, static_cast<Sums<A>*>(nullptr));
    if (channel < t.period && lane == 0) {
      o.dscale[row + first_channel + channel] = sum[0].second;
      o.dbias[row + first_channel + channel] = sum[0].first;
    }
  }
}

}  // namespace

int64_t SmallBackwardWorkspace(const Problem& p) {
  const auto t = PlanSmall(p, 2);
  return t ? 2 * p.batch * p.n * t->blocks * p.channels * static_cast<int64_t>(sizeof(float)) : 0;
}

std::optional<cudaError_t> SmallBackward(const Problem& p, const void* dy, const void* x, const void* scale,
                                         const void* bias, const void* statistics, void* dx, void* dscale, void* dbias,
                                         void* workspace, cudaStream_t stream) {
  const auto t = PlanSmall(p, 2);
  if (!t || !IsVectorAligned(dy, x, dx) || !HasRings()) return std::nullopt;
  return VisitSingleDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    constexpr int kLength = kVecLength<T>;
    using V = Vec<T, kLength>;
    const int64_t rows = p.n * t->blocks;
    SmallMapOperands<T, kLength> o = {};
    o.in = static_cast<const V*>(dy), o.x = static_cast<const V*>(x), o.out = static_cast<V*>(dx);
    o.scale = static_cast<const A*>(scale), o.bias = static_cast<const A*>(bias);
    o.statistics = static_cast<const Statistics<A>*>(statistics);
    o.dscale = static_cast<A*>(workspace);
    o.dbias = o.dscale + p.batch * rows * p.channels;
    o.inverse = A(1) / GroupSize<A>(p);
    const size_t shared = t->threads * kLength * sizeof(Sums<A>);
    const cudaError_t e = VisitActivation<T, false>(p.activation, [&](auto f) {
      return LaunchKernel(SmallBackwardKernel<decltype(f), T, kLength>, t->Blocks(shared), stream, *t, o, f);
    });
    if (e != cudaSuccess) return e;
    return SumRows(o.dscale, p.batch, rows, p.channels, static_cast<A*>(dscale), static_cast<A*>(dbias), stream);
  });
}

}  // namespace jaxdnn::group_norm
