// What the kernels compute, apart from where the elements are: a reduction of a row, then one result an element.
//
// An operator has kInputs arrays, whose elements a thread holds in the accumulator's type; `Stats`, what it knows of a
// row when all of it is reduced; `Local`, the statistics of a thread's own elements, which `each` hands out as often as
// asked, to be changed in place; `Combine`, those of a group of threads; `Merge`, those of several blocks; `Finish`,
// what results take from them; and `Result`. Elements that a mask drops, and those past the end, arrive as Fill;
// `absent` is what the mask's become. What is rare is not kTuned, and left to the most general kernel.
#pragma once

#include "cuda/softmax/exp.cuh"
#include "cuda/softmax/softmax.h"

namespace jaxdnn::softmax {

// Of blocks that share a row.
enum class Phase {
  kWhole,   // reduce and write, alone or in a cluster
  kReduce,  // write the statistics of a share to the workspace
  kApply,   // read those, and write the share
};

// What a visitor of `each` returns that has changed the elements.
struct Changed {};

// to[i % W] = op over it and the v[i], by halves where W is 1: short chains of operations.
template <int W, int L, class A, class F>
__device__ void Fold(A (&to)[W], const A (&v)[L], F op) {
  A half[L];
#pragma unroll
  for (int i = 0; i < L; ++i) half[i] = v[i];
#pragma unroll
  for (int width = L / 2; width >= W; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) half[i] = op(half[i], half[i + width]);
#pragma unroll
  for (int w = 0; w < W; ++w) to[w] = op(to[w], half[w]);
}

// The maximum m of a row, and the sum s of exponentials relative to it. A row without entries has m = -inf, which no
// other has: the maximum of nothing but -inf is the least finite number. NaN and +inf make s NaN, which makes the whole
// row NaN; so does s = 0 in a row of -inf.
template <class A>
struct MaxSum {
  A m, s;
};

// Softmax leaves exponentials relative to the thread's own maximum in place of the elements.
template <class T, bool kLog>
struct ForwardOp {
  using A = Accumulator<T>;
  using Stats = MaxSum<A>;
  static constexpr int kInputs = 1;
  static constexpr bool kHasMaximum = true;
  static constexpr bool kTuned = sizeof(T) < 8;

  A without_entries;

  static __device__ A Fill(int) { return -kInfinity<A>; }
  static __device__ Stats Nothing() { return {-kInfinity<A>, A(0)}; }

  template <int W, class Each>
  static __device__ void Local(Stats (&stats)[W], Each each) {
    A m[W];
    for (A& each_m : m) each_m = kLowest<A>;
    each([&](auto& v) { Fold(m, v[0], Max{}); });
    for (int w = 0; w < W; ++w) stats[w].m = m[w];
    Exponentiate(stats, each);
  }

  // The second half of Local, for maxima that are known.
  template <int W, class Each>
  static __device__ void Exponentiate(Stats (&stats)[W], Each each) {
    A s[W] = {};
    each([&](auto& v) {
      constexpr int L = std::extent_v<std::remove_reference_t<decltype(v)>, 1>;
      A e[L];
#pragma unroll
      for (int i = 0; i < L; ++i) e[i] = Origin<T>(stats[i % W].m).Exp(v[0][i]);
      Fold(s, e, Add{});
      if constexpr (!kLog) {
#pragma unroll
        for (int i = 0; i < L; ++i) v[0][i] = e[i];
        return Changed();
      }
    });
    for (int w = 0; w < W; ++w) stats[w].s = s[w];
  }

  template <int W, class Reducer>
  static __device__ void Combine(Stats (&stats)[W], Reducer reduce) {
    A m[W], s[W];
    for (int w = 0; w < W; ++w) m[w] = stats[w].m;
    reduce(m, Max{});
    for (int w = 0; w < W; ++w) s[w] = stats[w].s * Origin<T>(m[w]).From(Origin<T>(stats[w].m));
    reduce(s, Add{});
    for (int w = 0; w < W; ++w) stats[w] = {m[w], s[w]};
  }

  static __device__ Stats Merge(Stats a, Stats b) {
    const A m = Max{}(a.m, b.m);
    const Origin<T> origin(m);
    return {m, a.s * origin.From(Origin<T>(a.m)) + b.s * origin.From(Origin<T>(b.m))};
  }
  // Of get(0), get(1), ....
  template <class Get>
  static __device__ Stats Total(int count, Get get) {
    A m = -kInfinity<A>, s = 0;
#pragma unroll 4
    for (int j = 0; j < count; ++j) m = Max{}(m, get(j).m);
    const Origin<T> origin(m);
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const Stats each = get(j);
      s += each.s * origin.From(Origin<T>(each.m));
    }
    return {m, s};
  }

  // What is subtracted, what multiplies or is subtracted next, and what masked entries become.
  struct Final {
    A m, scale, absent;
  };
  // Of a row, for a thread whose own elements are relative to own.m.
  __device__ Final Finish(Stats own, Stats row) const {
    const Origin<T> origin(row.m);
    const A absent = row.m == -kInfinity<A> ? without_entries : kLog ? -kInfinity<A> : A(0);
    const A scale = kLog ? origin.Log(row.s, row.m) : Divide<T>(origin.From(Origin<T>(own.m)), row.s);
    return {Max{}(row.m, kLowest<A>), scale, absent};
  }
  // m goes first: x - (m + log(s)) would round log(s) away where m is large.
  static __device__ A Result(const Final& f, A x) { return kLog ? (x - f.m) - f.scale : x * f.scale; }
  template <int L>
  static __device__ A Result(const Final& f, const A (&v)[1][L], int i) {
    return Result(f, v[0][i]);
  }
};

template <class T, Map kMap>
struct BackwardOp {
  using A = Accumulator<T>;
  using Stats = A;
  static constexpr int kInputs = 2;  // g and y
  static constexpr bool kHasMaximum = false;
  static constexpr bool kTuned = sizeof(T) < 8 && kMap != Map::kLogSoftmaxJvp;

  static __device__ A Fill(int input) { return kMap == Map::kSoftmax || input == 0 ? A(0) : -kInfinity<A>; }
  static __device__ Stats Nothing() { return A(0); }

  // Log-softmax leaves exp(y) in place of y.
  template <int W, class Each>
  static __device__ void Local(Stats (&sum)[W], Each each) {
    for (A& s : sum) s = 0;
    Exponentiate(sum, each);
  }
  template <int W, class Each>
  static __device__ void Exponentiate(Stats (&sum)[W], Each each) {
    each([&](auto& v) {
      constexpr int L = std::extent_v<std::remove_reference_t<decltype(v)>, 1>;
      A term[L];
#pragma unroll
      for (int i = 0; i < L; ++i) {
        if constexpr (kMap != Map::kSoftmax) v[1][i] = Exp<T>(v[1][i]);
        term[i] = kMap == Map::kLogSoftmaxVjp ? v[0][i] : v[0][i] * v[1][i];
      }
      Fold(sum, term, Add{});
      if constexpr (kMap != Map::kSoftmax) return Changed();
    });
  }

  template <int W, class Reducer>
  static __device__ void Combine(Stats (&sum)[W], Reducer reduce) {
    reduce(sum, Add{});
  }
  static __device__ Stats Merge(Stats a, Stats b) { return a + b; }
  template <class Get>
  static __device__ Stats Total(int count, Get get) {
    Stats sum = 0;
#pragma unroll 4
    for (int j = 0; j < count; ++j) sum += get(j);
    return sum;
  }

  struct Final {
    A sum, absent;
  };
  static __device__ Final Finish(Stats, Stats row) { return {row, A(0)}; }
  template <int L>
  static __device__ A Result(const Final& f, const A (&v)[2][L], int i) {
    const A g = v[0][i], y = v[1][i];
    if constexpr (kMap == Map::kSoftmax) return y * (g - f.sum);
    if constexpr (kMap == Map::kLogSoftmaxJvp) return g - f.sum;
    if constexpr (kMap == Map::kLogSoftmaxVjp) return g - y * f.sum;
  }
};

}  // namespace jaxdnn::softmax
