// The gradient of group normalization (maps.cuh). Every block leaves its part
// of dscale and dbias in a row of the workspace, and the rows are added up in a
// fixed order.
#include <algorithm>

#include "cuda/common/column_sum.cuh"
#include "cuda/group_norm/maps.cuh"
#include "cuda/group_norm/ring.h"
#include "cuda/group_norm/small.h"

namespace jaxdnn::group_norm {

std::optional<int64_t> BackwardWorkspace(const Problem& p) {
  const auto bytes = MostBytes<2>(p, [&](const auto& t, auto a) {
    using A = decltype(a);
    return ExchangeBytes<Sums<A>>(t.team, t.SlabGroups()) +
           2 * p.batch * p.n * t.team.size * p.channels * static_cast<int64_t>(sizeof(A));
  });
  return bytes ? std::optional(std::max({*bytes, RingBackwardWorkspace(p), SmallBackwardWorkspace(p)})) : bytes;
}

cudaError_t Backward(const Problem& p, const void* dy, const void* x, const void* scale, const void* bias,
                     const void* statistics, void* dx, void* dscale, void* dbias, void* workspace,
                     cudaStream_t stream) {
  if (p.Empty()) {
    // Sums over nothing.
    const size_t bytes = p.batch * p.channels * (p.dtype == DType::kF64 ? sizeof(double) : sizeof(float));
    if (bytes == 0) return cudaSuccess;
    if (cudaError_t e = cudaMemsetAsync(dscale, 0, bytes, stream)) return e;
    return cudaMemsetAsync(dbias, 0, bytes, stream);
  }
  if (const auto e = SmallBackward(p, dy, x, scale, bias, statistics, dx, dscale, dbias, workspace, stream)) return *e;
  if (const auto e = RingBackward(p, dy, x, scale, bias, statistics, dx, dscale, dbias, workspace, stream)) return *e;
  return VisitTiling<2>(p, IsVectorAligned(dy, x, dx), [&](auto access, auto t) {
    using C = decltype(access);
    using A = Accumulator<typename C::Type>;
    using V = Vec<typename C::Type, C::V>;
    const int64_t rows = p.n * t.team.size;
    MapOperands<typename C::Type, C::V> o = {};
    o.in = static_cast<const V*>(dy), o.x = static_cast<const V*>(x), o.out = static_cast<V*>(dx);
    o.scale = static_cast<const A*>(scale), o.bias = static_cast<const A*>(bias);
    o.statistics = static_cast<const Statistics<A>*>(statistics);
    o.partial = static_cast<Letter<Sums<A>>*>(workspace);
    o.dscale = reinterpret_cast<A*>(o.partial + (t.team.size == 1 ? 0 : t.team.ExchangedRows() * t.SlabGroups()));
    o.dbias = o.dscale + p.batch * rows * p.channels;
    o.count = GroupSize<A>(p);
    if (cudaError_t e = t.team.Reset(o.partial, t.SlabGroups(), stream)) return e;
    if (cudaError_t e = LaunchMap<Map::kPullback, C>(p, t, o, stream)) return e;
    return SumRows(o.dscale, p.batch, rows, p.channels, static_cast<A*>(dscale), static_cast<A*>(dbias), stream);
  });
}

}  // namespace jaxdnn::group_norm
