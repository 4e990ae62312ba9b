// The elementwise kernels: maps of vectors in the tilings of tiling.cuh, and such maps that leave two sums for each
// channel behind. An operator is a struct with `kInputs` arrays; built in each thread, it holds what that thread's
// channels need.
#pragma once

#include <type_traits>

#include "cuda/batch_norm/activations.cuh"
#include "cuda/batch_norm/plan.cuh"

namespace jaxdnn::batch_norm {

// Affine, as the kernels take it.
template <class A>
struct Parameters {
  const A *mean, *var, *scale, *bias;
  A epsilon;

  Parameters(const Affine& p)
      : mean(static_cast<const A*>(p.mean)),
        var(static_cast<const A*>(p.var)),
        scale(static_cast<const A*>(p.scale)),
        bias(static_cast<const A*>(p.bias)),
        epsilon(static_cast<A>(p.epsilon)) {}
};

__device__ __forceinline__ float InverseRoot(float x) { return rsqrtf(x); }
__device__ __forceinline__ double InverseRoot(double x) { return rsqrt(x); }

// The parameters of a thread's W channels. Forward and backward compute p by the same instructions, hence to the same
// bits: on which side of 0 it is, they agree.
template <class M, class A>
struct Channels {
  A mean[M::W], a[M::W], bias[M::W];

  __device__ Channels(const Tiling& t, const M& m, const Parameters<A>& p) {
    m.EachChannel(t, [&](int i, int64_t c) {
      mean[i] = p.mean[c];
      a[i] = p.scale[c] * InverseRoot(p.var[c] + p.epsilon);
      bias[i] = p.bias[c];
    });
  }
  __device__ A Centered(int i, A x) const { return x - mean[i % M::W]; }
  __device__ A operator()(int i, A x) const { return fma(Centered(i, x), a[i % M::W], bias[i % M::W]); }
};

// k0[channel] and k1[channel] of k[outer, 2, c].
template <class M, class A>
struct Pairs {
  A k0[M::W], k1[M::W];

  __device__ Pairs(const Tiling& t, const M& m, const A* k) {
    m.EachChannel(t, [&](int i, int64_t c) {
      k0[i] = k[c + m.block.outer * t.c];
      k1[i] = k[c + (m.block.outer + 1) * t.c];
    });
  }
  __device__ A operator()(int i, A centered) const { return fma(centered, k1[i % M::W], k0[i % M::W]); }
};

// What stands in place of p: the source itself, if it is the output of a relu, which is on where the output is;
// otherwise p plus the source, which is the residual.
enum class Source { kNone, kResidual, kOutput };

inline Source SourceOf(activation::Activation f, const void* source) {
  if (source == nullptr) return Source::kNone;
  return f.kind == activation::Kind::kRelu ? Source::kOutput : Source::kResidual;
}

template <class A>
__device__ A PreActivation(Source kind, A p, A source) {
  return kind == Source::kOutput ? source : kind == Source::kResidual ? p + source : p;
}

// Blocks on a multiprocessor, of kernels for the plain activations and of those for any.
struct Blocks {
  int plain, any;
};
constexpr Blocks kSumBlocks = {2, 2};
template <int kInputs>
constexpr Blocks kMapBlocks = {3, kInputs > 1 ? 2 : 3};

// How many vectors of each input a thread of a sum reads at once, where it does not branch among activations.
template <class Op>
constexpr int kInFlight = Op::kInputs == 2 ? 4 : 2;

template <class T>
struct Arrays {
  const T* in[3];
  T* out;
};

// Stores what this kernel will not look at again: what it has yet to read stays in the cache instead.
template <class V>
__device__ void StoreOnce(V* to, const V& v) {
  if constexpr (sizeof(V) == sizeof(uint4)) {
    uint4 words;
    memcpy(&words, &v, sizeof(V));
    __stcs(reinterpret_cast<uint4*>(to), words);
  } else {
    *to = v;
  }
}

template <class M, class Op>
using MapStream = Stream<M, Op::kInputs, true>;

// out = op(in...) for one thread, in reverse order; 0 where the mask is false.
template <class M, class Op>
__device__ void Map(const Tiling& t, const M& m, const Arrays<typename M::T>& arrays,
                    const typename Op::Arguments& arguments, typename MapStream<M, Op>::Ring& ring) {
  using T = typename M::T;
  constexpr int V = M::V;
  if (m.steps == 0) return;
  MapStream<M, Op> all(t, m, arrays.in, ring);
  const Op op(t, m, arguments);
  all.ForEach([&](const Span& span, const auto& v) {
    Vec<T, V> out;
    if constexpr (V == 1) out.v[0] = static_cast<T>(0.0f);
    if (Kept<M>(t, span)) op(out, v);
    if (V > 1 && span.lo == 0 && span.hi == V)
      StoreOnce(reinterpret_cast<Vec<T, V>*>(arrays.out + span.offset), out);
    else
      Store<M>(arrays.out, span, out);
  });
}

template <class M, class Op>
__global__ void __launch_bounds__(kThreads, Op::kSwitch ? kMapBlocks<Op::kInputs>.any : kMapBlocks<Op::kInputs>.plain)
    MapKernel(Tiling t, Arrays<typename M::T> arrays, typename Op::Arguments arguments) {
  __shared__ typename MapStream<M, Op>::Ring ring;
  Map<M, Op>(t, M(t, true), arrays, arguments, ring);
}

// y = f(p) or f(p + residual).
template <class M, class G, bool kResidual>
struct ApplyOp {
  using T = typename M::T;
  using A = Accumulator<T>;
  static constexpr bool kSwitch = G::kSwitch;
  static constexpr int kInputs = kResidual ? 2 : 1;
  struct Arguments {
    Parameters<A> affine;
    G group;
    Source source;
  };

  Channels<M, A> channels;
  G group;
  Source source;

  __device__ ApplyOp(const Tiling& t, const M& m, const Arguments& a)
      : channels(t, m, a.affine), group(a.group), source(a.source) {}
  __device__ void operator()(Vec<T, M::V>& y, const Vec<T, M::V> (&in)[kInputs]) const {
    A p[M::V];
#pragma unroll
    for (int i = 0; i < M::V; ++i) {
      p[i] = channels(i, static_cast<A>(in[0].v[i]));
      if constexpr (kResidual)
        if (source != Source::kNone) p[i] += static_cast<A>(in[1].v[i]);
    }
    group.Forward(p);
#pragma unroll
    for (int i = 0; i < M::V; ++i) y.v[i] = static_cast<T>(p[i]);
  }
};

// What op makes of its elementwise results, in the stored type.
template <class M, class Op, class A>
__device__ Vec<typename M::T, M::V> Rounded(const Op& op, const A (&values)[M::V]) {
  Vec<typename M::T, M::V> v;
#pragma unroll
  for (int i = 0; i < M::V; ++i) v.v[i] = static_cast<typename M::T>(op.Out(i, values[i]));
  return v;
}

// The sums that op leaves for each channel, partial[outer, 2, rows, c]; and, where there is an `out`, op's elementwise
// results, 0 where the mask is false.
template <class M, class Op>
__global__ void __launch_bounds__(kThreads, kSumBlocks.any)
    SumKernel(Tiling t, Arrays<typename M::T> arrays, typename Op::Arguments arguments,
              Accumulator<typename M::T>* partial) {
  using T = typename M::T;
  using A = Accumulator<T>;
  using Whole = Stream<M, Op::kInputs, false>;
  constexpr int V = M::V, W = M::W;
  __shared__ union {
    typename Whole::Ring ring;
    Pair<A> scratch[kThreads * W];
  } shared;
  const M m(t, false);
  Pair<A> sums[W] = {};
  if (m.steps > 0) {
    const Op op(t, m, arguments);
    const auto take = [&](const Span& span, const auto& v) {
      A out[V] = {};
      // A part of a vector of columns is the array's end: the rest are zeros, which no sum sees.
      if (Kept<M>(t, span)) op(out, v, sums, M::kRuns ? span.lo : 0, M::kRuns ? span.hi : V);
      if (arrays.out) Store<M>(arrays.out, span, Rounded<M>(op, out));
    };
    // A branch for each vector leaves no gain in having several at once.
    if constexpr (Op::kSwitch) {
      Whole(t, m, arrays.in, shared.ring).ForEach(take);
    } else {
      ForBatches<Op::kInputs, kInFlight<Op>>(t, m, arrays.in, take);
      // One at most.
      if (m.full < m.steps) {
        const Span span = m.At(t, m.full);
        Vec<T, V> v[Op::kInputs];
#pragma unroll
        for (int k = 0; k < Op::kInputs; ++k) v[k] = Load<M>(t, arrays.in[k], span);
        take(span, v);
      }
    }
  }
  __syncthreads();
  ReduceBlock(t, m, sums, AddPairs{}, shared.scratch, [&](int64_t channel, const Pair<A>& value) {
    A* out = partial + (m.block.outer * t.slabs * 2 + m.block.slab) * t.copies * t.c + channel;
    out[0] = value.first;
    out[t.Partials() * t.c] = value.second;
  });
}

// Calls f(AccessTag, group, Tiling). What seldom matters shares code: float64, masks and odd buffers go element by
// element and, like all of it if kSmall, with any activation; and float16 has vectors for the plain ones alone.
template <bool kSmall, class F>
cudaError_t VisitAccess(const Problem& p, activation::Activation a, bool aligned, int64_t limit, Blocks blocks, F&& f) {
  if (!IsFused(a.kind)) return cudaErrorNotSupported;
  if (limit < 1) return cudaErrorInvalidValue;
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr bool kFloat16 = std::is_same_v<T, __half>, kDouble = std::is_same_v<T, double>;
    const SwitchGroup<T> any = {a.kind, static_cast<Accumulator<T>>(a.parameter)};
    if constexpr (!kDouble && !kSmall)
      if (a.kind == activation::Kind::kIdentity || a.kind == activation::Kind::kRelu)
        return VisitTiling<T, true>(p, aligned, limit, blocks.plain * kMultiprocessors,
                                    [&](auto access, const Tiling& t) {
                                      if constexpr (decltype(access)::type::V > 1)
                                        return f(access, PlainGroup<T>{a.kind == activation::Kind::kRelu}, t);
                                      else
                                        return f(access, any, t);
                                    });
    return VisitTiling<T, (!kDouble && !kFloat16)>(p, aligned, limit, blocks.any * kMultiprocessors,
                                                   [&](auto access, const Tiling& t) { return f(access, any, t); });
  });
}

}  // namespace jaxdnn::batch_norm
