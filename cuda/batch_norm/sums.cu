// The sums over each channel that the derivatives of batch normalization rest on, and the elementwise result of the
// same read: backward, D g; forward, a D t.
//
// Bound by memory. The blocks' partial sums are added up in a fixed order.
#include "cuda/batch_norm/elements.cuh"
#include "cuda/common/column_sum.cuh"

namespace jaxdnn::batch_norm {
namespace {

// Inputs g, x and, if kSource, the source: sums of D g and D g (x - mean), or, where any activation may be, of g and
// g (x - mean); out is D g or a D g.
template <class M, class G, bool kSource>
struct SumsOp {
  using T = typename M::T;
  using A = Accumulator<T>;
  static constexpr bool kSwitch = G::kSwitch;
  static constexpr int kInputs = kSource ? 3 : 2;
  struct Arguments {
    Parameters<A> affine;
    G group;
    bool scaled, before;  // before: D
    Source source;
  };

  Channels<M, A> channels;
  G group;
  bool scaled, before;
  Source source;

  __device__ SumsOp(const Tiling& t, const M& m, const Arguments& a)
      : channels(t, m, a.affine), group(a.group), scaled(a.scaled), before(G::kSwitch && a.before), source(a.source) {}
  __device__ A Out(int i, A h) const { return scaled ? channels.a[i % M::W] * h : h; }
  __device__ void operator()(A (&out)[M::V], const Vec<T, M::V> (&in)[kInputs], Pair<A> (&sums)[M::W], int lo,
                             int hi) const {
    A p[M::V];
#pragma unroll
    for (int i = 0; i < M::V; ++i) {
      out[i] = static_cast<A>(in[0].v[i]);
      p[i] = channels(i, static_cast<A>(in[1].v[i]));
      if constexpr (kSource) p[i] = PreActivation(source, p[i], static_cast<A>(in[2].v[i]));
    }
    const auto add = [&] {
#pragma unroll
      for (int i = 0; i < M::V; ++i)
        if (i >= lo && i < hi) {
          sums[i % M::W].first += out[i];
          sums[i % M::W].second += out[i] * channels.Centered(i, static_cast<A>(in[1].v[i]));
        }
    };
    if (before) add();
    group.Slope(out, p);
    if (!before) add();
  }
};

// Runs the kernel and adds up the blocks' sums; one block for each channel leaves nothing to add.
template <class Op, class M>
cudaError_t Sum(const Tiling& t, const Arrays<typename M::T>& arrays, const typename Op::Arguments& arguments,
                void* sums, Workspace workspace, cudaStream_t stream) {
  using A = Accumulator<typename M::T>;
  A* result = static_cast<A*>(sums);
  A* partial = t.Partials() == 1 ? result : static_cast<A*>(workspace.data);
  const cudaError_t e = LaunchKernel(SumKernel<M, Op>, t.Blocks(), kThreads, stream, t, arrays, arguments, partial);
  if (e != cudaSuccess || partial == result) return e;
  return SumRows(partial, 2 * t.outer, t.Partials(), t.c, result, stream);
}

// Rows of partial sums that there is room for; nothing to sum gives 0.
int64_t Limit(const Problem& p, Workspace workspace) {
  const int64_t row = 2 * p.outer * p.c * (p.dtype == DType::kF64 ? 8 : 4);
  return row == 0 ? 1 : static_cast<int64_t>(workspace.bytes) / row;
}

cudaError_t Zero(const Problem& p, void* sums, cudaStream_t stream) {
  return cudaMemsetAsync(sums, 0, 2 * p.outer * p.c * (p.dtype == DType::kF64 ? 8 : 4), stream);
}

}  // namespace

cudaError_t Sums(const Problem& p, const Affine& affine, activation::Activation f, Slot slot, const void* g,
                 const void* x, const void* source, void* sums, void* out, Workspace workspace, cudaStream_t stream) {
  if (p.n * p.s == 0) return Zero(p, sums, stream);
  const bool aligned = IsVectorAligned(g, x, source, out);
  const int64_t limit = Limit(p, workspace);
  return VisitAccess<false>(p, f, aligned, limit, kSumBlocks, [&](auto access, auto group, const Tiling& t) {
    using M = typename decltype(access)::type;
    using G = decltype(group);
    using T = typename M::T;
    const Arrays<T> arrays = {
        {static_cast<const T*>(g), static_cast<const T*>(x), static_cast<const T*>(source ? source : x)},
        static_cast<T*>(out)};
    const bool scaled = slot == Slot::kScaled;
    const Source kind = SourceOf(f, source);
    if constexpr (M::V > 1)
      if (!source)
        return Sum<SumsOp<M, G, false>, M>(t, arrays, {affine, group, scaled, false, kind}, sums, workspace, stream);
    return Sum<SumsOp<M, G, true>, M>(t, arrays, {affine, group, scaled, false, kind}, sums, workspace, stream);
  });
}

cudaError_t Moments(const Problem& p, const Affine& affine, activation::Activation f, const void* t, const void* x,
                    void* out, void* moments, Workspace workspace, cudaStream_t stream) {
  if (p.n * p.s == 0) return Zero(p, moments, stream);
  const bool aligned = IsVectorAligned(t, x, out);
  const int64_t limit = Limit(p, workspace);
  return VisitAccess<true>(p, f, aligned, limit, kSumBlocks, [&](auto access, auto group, const Tiling& tiling) {
    using M = typename decltype(access)::type;
    using T = typename M::T;
    const Arrays<T> arrays = {{static_cast<const T*>(t), static_cast<const T*>(x), static_cast<const T*>(x)},
                              static_cast<T*>(out)};
    using Op = SumsOp<M, decltype(group), M::V == 1>;
    return Sum<Op, M>(tiling, arrays, {affine, group, true, true, Source::kNone}, moments, workspace, stream);
  });
}

}  // namespace jaxdnn::batch_norm
