// The tangent map of group normalization (maps.cuh).
#include "cuda/group_norm/maps.cuh"

namespace jaxdnn::group_norm {

std::optional<int64_t> TangentWorkspace(const Problem& p) {
  return MostBytes<2>(p,
                      [](const auto& t, auto a) { return ExchangeBytes<Sums<decltype(a)>>(t.team, t.SlabGroups()); });
}

cudaError_t Tangent(const Problem& p, const void* t_in, const void* tscale, const void* tbias, const void* x,
                    const void* scale, const void* bias, const void* statistics, void* ty, void* workspace,
                    cudaStream_t stream) {
  return VisitTiling<2>(p, IsVectorAligned(t_in, x, ty), [&](auto access, auto t) {
    using C = decltype(access);
    using A = Accumulator<typename C::Type>;
    using V = Vec<typename C::Type, C::V>;
    MapOperands<typename C::Type, C::V> o = {};
    o.in = static_cast<const V*>(t_in), o.x = static_cast<const V*>(x), o.out = static_cast<V*>(ty);
    o.scale = static_cast<const A*>(scale), o.bias = static_cast<const A*>(bias);
    o.tscale = static_cast<const A*>(tscale), o.tbias = static_cast<const A*>(tbias);
    o.statistics = static_cast<const Statistics<A>*>(statistics);
    o.partial = static_cast<Letter<Sums<A>>*>(workspace);
    o.count = GroupSize<A>(p);
    if (cudaError_t e = t.team.Reset(o.partial, t.SlabGroups(), stream)) return e;
    return LaunchMap<Map::kTangent, C>(p, t, o, stream);
  });
}

}  // namespace jaxdnn::group_norm
