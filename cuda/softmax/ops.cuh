// What the kernels compute, apart from where the elements are: a reduction of a
// row, then one result an element.
//
// An operator has kInputs arrays; `Stats`, what it knows of a row when all of
// it is reduced; `Local`, the statistics of a thread's own elements, which
// `each` hands out as often as asked; `Combine`, those of a group of threads;
// `Merge`, those of several blocks; and `Result`, an element of the output.
// Elements that a mask drops, and those past the end, arrive as Fill; `Absent`
// is what the mask's become.
#pragma once

#include "cuda/softmax/exp.cuh"
#include "cuda/softmax/softmax.h"

namespace jaxdnn::softmax {

// The maximum m of a row, and the sum s of exp(x - m). A row without entries
// has m = -inf, which no other has: the maximum of nothing but -inf is the
// least finite number. NaN and +inf make s NaN, which makes the row NaN; so
// does s = 0 in a row of -inf.
template <class A>
struct MaxSum {
  A m, s;
};

template <class T, bool kLog>
struct ForwardOp {
  using A = Accumulator<T>;
  using Stats = MaxSum<A>;
  static constexpr int kInputs = 1;

  A without_entries;

  static __device__ T Fill(int) { return static_cast<T>(-INFINITY); }

  template <int W, int L, class Each>
  static __device__ void Local(Stats (&stats)[W], Each each) {
    A m[W], s[W] = {};
    for (A& each_m : m) each_m = kLowest<A>;
    each([&](const Vec<T, L>(&v)[1]) { Maximum(m, v[0]); });
    each([&](const Vec<T, L>(&v)[1]) { AddExps(s, m, v[0]); });
    for (int w = 0; w < W; ++w) stats[w] = {m[w], s[w]};
  }

  // Statistics of no entries.
  static __device__ Stats Nothing() { return {-kInfinity<A>, A(0)}; }

  template <int W, class Reducer>
  static __device__ void Combine(Stats (&stats)[W], Reducer reduce) {
    A m[W], s[W];
    for (int w = 0; w < W; ++w) m[w] = stats[w].m;
    reduce(m, Max{});
    for (int w = 0; w < W; ++w) s[w] = stats[w].s * Exp<T>(Origin(stats[w].m) - Origin(m[w]));
    reduce(s, Add{});
    for (int w = 0; w < W; ++w) stats[w] = {m[w], s[w]};
  }

  static __device__ Stats Merge(Stats a, Stats b) {
    const A m = Max{}(a.m, b.m);
    return {m, a.s * Exp<T>(Origin(a.m) - Origin(m)) + b.s * Exp<T>(Origin(b.m) - Origin(m))};
  }

  // Of a row: what is subtracted, what multiplies or is subtracted next, and
  // what masked entries become.
  struct Final {
    A m, scale, absent;
  };
  __device__ Final Finish(Stats stats) const {
    const bool empty = stats.m == -kInfinity<A>;
    const A absent = empty ? without_entries : kLog ? -kInfinity<A> : A(0);
    return {Origin(stats.m), kLog ? log(stats.s) : A(1) / stats.s, absent};
  }
  static __device__ T Absent(const Final& f) { return static_cast<T>(f.absent); }
  // m goes first: x - (m + log(s)) would round log(s) away where m is large.
  static __device__ T Result(const Final& f, const T (&x)[1]) {
    const A d = static_cast<A>(x[0]) - f.m;
    return static_cast<T>(kLog ? d - f.scale : Exp<T>(d) * f.scale);
  }
};

template <class T, Map kMap>
struct BackwardOp {
  using A = Accumulator<T>;
  using Stats = A;
  using Final = A;
  static constexpr int kInputs = 2;  // g and y

  static __device__ T Fill(int input) { return static_cast<T>(kMap == Map::kSoftmax || input == 0 ? 0.0f : -INFINITY); }

  static __device__ A Term(A g, A y) {
    if constexpr (kMap == Map::kSoftmax) return y * g;
    if constexpr (kMap == Map::kLogSoftmaxJvp) return Exp<T>(y) * g;
    if constexpr (kMap == Map::kLogSoftmaxVjp) return g;
  }

  template <int W, int L, class Each>
  static __device__ void Local(Stats (&sum)[W], Each each) {
    for (A& s : sum) s = 0;
    each([&](const Vec<T, L>(&v)[2]) {
#pragma unroll
      for (int i = 0; i < L; ++i) sum[i % W] += Term(static_cast<A>(v[0].v[i]), static_cast<A>(v[1].v[i]));
    });
  }

  static __device__ Stats Nothing() { return A(0); }

  template <int W, class Reducer>
  static __device__ void Combine(Stats (&sum)[W], Reducer reduce) {
    reduce(sum, Add{});
  }

  static __device__ Stats Merge(Stats a, Stats b) { return a + b; }

  static __device__ Final Finish(Stats sum) { return sum; }
  static __device__ T Absent(const Final&) { return static_cast<T>(0.0f); }
  static __device__ T Result(const Final& sum, const T (&v)[2]) {
    const A g = static_cast<A>(v[0]), y = static_cast<A>(v[1]);
    if constexpr (kMap == Map::kSoftmax) return static_cast<T>(y * (g - sum));
    if constexpr (kMap == Map::kLogSoftmaxJvp) return static_cast<T>(g - sum);
    if constexpr (kMap == Map::kLogSoftmaxVjp) return static_cast<T>(g - Exp<T>(y) * sum);
  }
};

}  // namespace jaxdnn::softmax
