// y = f(p) or f(p + residual), p = (x - mean) scale / sqrt(var + epsilon) + bias; and what its derivatives need that no
// sum comes of: the gradient once the sums are known, and the tangent.
//
// Bound by memory: a read of each operand and a write.
#include "cuda/batch_norm/elements.cuh"

namespace jaxdnn::batch_norm {
namespace {

// Inputs g and x.
template <class M, class G>
struct GradientOp {
  using T = typename M::T;
  using A = Accumulator<T>;
  static constexpr bool kSwitch = G::kSwitch;
  static constexpr int kInputs = 2;
  struct Arguments {
    Parameters<A> affine;
    G group;
    const A* k;
  };

  Channels<M, A> channels;
  Pairs<M, A> pairs;
  G group;

  __device__ GradientOp(const Tiling& t, const M& m, const Arguments& a)
      : channels(t, m, a.affine), pairs(t, m, a.k), group(a.group) {}
  __device__ void operator()(Vec<T, M::V>& dx, const Vec<T, M::V> (&in)[kInputs]) const {
    A g[M::V], p[M::V];
#pragma unroll
    for (int i = 0; i < M::V; ++i) {
      g[i] = static_cast<A>(in[0].v[i]);
      p[i] = channels(i, static_cast<A>(in[1].v[i]));
    }
    group.Slope(g, p);
#pragma unroll
    for (int i = 0; i < M::V; ++i) {
      const A rest = pairs(i, channels.Centered(i, static_cast<A>(in[1].v[i])));
      dx.v[i] = static_cast<T>(fma(channels.a[i % M::W], g[i], rest));
    }
  }
};

// Inputs x, t and source, of which t and source may be absent: they are x again then. If `apart`, it is GradientOp's
// result, for what goes element by element.
template <class M, class G>
struct TangentOp {
  using T = typename M::T;
  using A = Accumulator<T>;
  static constexpr bool kSwitch = G::kSwitch;
  static constexpr int kInputs = 3;
  struct Arguments {
    Parameters<A> affine;
    G group;
    const A* k;
    Slot slot;
    Source source;
    bool apart = false;
  };

  Channels<M, A> channels;
  Pairs<M, A> pairs;
  G group;
  Slot slot;
  Source source;
  bool apart;

  __device__ TangentOp(const Tiling& t, const M& m, const Arguments& a)
      : channels(t, m, a.affine),
        pairs(t, m, a.k),
        group(a.group),
        slot(a.slot),
        source(a.source),
        apart(M::V == 1 && a.apart) {}
  __device__ void operator()(Vec<T, M::V>& out, const Vec<T, M::V> (&in)[kInputs]) const {
    A inner[M::V], p[M::V];
#pragma unroll
    for (int i = 0; i < M::V; ++i) {
      const A x = static_cast<A>(in[0].v[i]), t = static_cast<A>(in[1].v[i]);
      p[i] = PreActivation(source, channels(i, x), static_cast<A>(in[2].v[i]));
      inner[i] = apart ? A(0) : pairs(i, channels.Centered(i, x));
      if (slot == Slot::kInner) inner[i] += t;
      if (slot == Slot::kScaled) inner[i] = fma(channels.a[i % M::W], t, inner[i]);
    }
    group.Slope(inner, p);
#pragma unroll
    for (int i = 0; i < M::V; ++i) {
      if (slot == Slot::kOuter) inner[i] += static_cast<A>(in[1].v[i]);
      if (apart) inner[i] += pairs(i, channels.Centered(i, static_cast<A>(in[0].v[i])));
      out.v[i] = static_cast<T>(inner[i]);
    }
  }
};

template <class Op, class M>
cudaError_t LaunchMap(const Tiling& t, const Arrays<typename M::T>& arrays, const typename Op::Arguments& arguments,
                      cudaStream_t stream) {
  return LaunchKernel(MapKernel<M, Op>, t.Blocks(), kThreads, stream, t, arrays, arguments);
}

}  // namespace

cudaError_t Apply(const Problem& p, const Affine& affine, activation::Activation f, const void* x, const void* residual,
                  void* y, cudaStream_t stream) {
  const bool aligned = IsVectorAligned(x, residual, y);
  return VisitAccess<false>(
      p, f, aligned, kNoLimit, residual ? kMapBlocks<2> : kMapBlocks<1>, [&](auto access, auto g, const Tiling& t) {
        using M = typename decltype(access)::type;
        using G = decltype(g);
        using T = typename M::T;
        const Arrays<T> arrays = {{static_cast<const T*>(x), static_cast<const T*>(residual ? residual : x)},
                                  static_cast<T*>(y)};
        const Source source = residual ? Source::kResidual : Source::kNone;
        if constexpr (M::V > 1)
          if (!residual) return LaunchMap<ApplyOp<M, G, false>, M>(t, arrays, {affine, g, source}, stream);
        return LaunchMap<ApplyOp<M, G, true>, M>(t, arrays, {affine, g, source}, stream);
      });
}

cudaError_t Gradient(const Problem& p, const Affine& affine, activation::Activation f, const void* g, const void* k,
                     const void* x, void* dx, cudaStream_t stream) {
  const bool aligned = IsVectorAligned(g, x, dx);
  return VisitAccess<false>(p, f, aligned, kNoLimit, kMapBlocks<2>, [&](auto access, auto group, const Tiling& t) {
    using M = typename decltype(access)::type;
    using T = typename M::T;
    const auto* pairs = static_cast<const Accumulator<T>*>(k);
    if constexpr (M::V == 1) {
      const Arrays<T> arrays = {{static_cast<const T*>(x), static_cast<const T*>(g), static_cast<const T*>(x)},
                                static_cast<T*>(dx)};
      return LaunchMap<TangentOp<M, decltype(group)>, M>(
          t, arrays, {affine, group, pairs, Slot::kScaled, Source::kNone, true}, stream);
    } else {
      const Arrays<T> arrays = {{static_cast<const T*>(g), static_cast<const T*>(x)}, static_cast<T*>(dx)};
      return LaunchMap<GradientOp<M, decltype(group)>, M>(t, arrays, {affine, group, pairs}, stream);
    }
  });
}

cudaError_t Tangent(const Problem& p, const Affine& affine, activation::Activation f, Slot slot, const void* t,
                    const void* k, const void* x, const void* source, void* out, cudaStream_t stream) {
  const bool aligned = IsVectorAligned(x, t, source, out);
  return VisitAccess<true>(p, f, aligned, kNoLimit, kMapBlocks<3>, [&](auto access, auto group, const Tiling& tiling) {
    using M = typename decltype(access)::type;
    using T = typename M::T;
    const auto or_x = [x](const void* in) { return static_cast<const T*>(in ? in : x); };
    const Arrays<T> arrays = {{or_x(x), or_x(t), or_x(source)}, static_cast<T*>(out)};
    return LaunchMap<TangentOp<M, decltype(group)>, M>(
        tiling, arrays, {affine, group, static_cast<const Accumulator<T>*>(k), slot, SourceOf(f, source)}, stream);
  });
}

}  // namespace jaxdnn::batch_norm
