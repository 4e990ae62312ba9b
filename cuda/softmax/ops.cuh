// What the kernels compute, apart from where the elements are: a reduction of a row, then one result an element.
//
// An operator has kInputs arrays, whose elements a thread holds in the accumulator's type; `Stats`, what it knows of a
// row when all of it is reduced; `Local`, the statistics of a thread's own elements, which `each` hands out as often as
// asked, to be changed in place; `Combine`, those of a group of threads; `Merge`, those of several blocks; `Finish`,
// what results take from them; `Result`, of changed elements; and `Change`, which changes elements that were not kept.
// Elements that a mask drops, and those past the end, arrive as Fill; `absent` is what the mask's become.
//
// Which of softmax and log-softmax it is, an operator knows as a kernel runs. The tuned kernels, to which a few
// instructions an element matter, ask for one that the compiler knows too: `Reducing` and `Writing` call a function
// with it, for what reduces a row and for what writes its results, if there it makes a difference.
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

// Of an operator that knows as the kernel runs which of several it is.
constexpr int kAny = -1;

// a or b, whichever `first` says, in an instruction: of what is the same for all elements, the compiler would make a
// branch around every loop over them, and compile each twice.
__device__ inline float Either(bool first, float a, float b) {
  float result;
  asm("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\tselp.f32 %0, %1, %2, p;\n\t}"
      : "=f"(result)
      : "f"(a), "f"(b), "r"(static_cast<int>(first)));
  return result;
}
__device__ inline double Either(bool first, double a, double b) { return first ? a : b; }

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
template <class T, int kCase = kAny>
struct ForwardOp {
  using A = Accumulator<T>;
  using Stats = MaxSum<A>;
  using Folds = ForwardOp<A>;  // merges the same statistics
  static constexpr int kInputs = 1;
  static constexpr bool kHasMaximum = true;

  bool log;
  A without_entries;

  bool IsTuned() const { return sizeof(T) < 8; }
  __device__ int Reduced() const { return kInputs; }  // arrays that the reduction needs
  template <class F>
  __device__ void Reducing(F&& f) const {
    f(*this);
  }
#pragma nv_exec_check_disable
  template <class F>
  __host__ __device__ auto Writing(F&& f) const {
    if (log) return f(ForwardOp<T, true>{log, without_entries});
    return f(ForwardOp<T, false>{log, without_entries});
  }
  __device__ A IfLog(A a, A b) const {
    if constexpr (kCase == kAny) return Either(log, a, b);
    return kCase != 0 ? a : b;
  }

  static __device__ A Fill(int) { return -kInfinity<A>; }
  static __device__ Stats Nothing() { return {-kInfinity<A>, A(0)}; }

  template <int W, class Each>
  __device__ void Local(Stats (&stats)[W], Each each) const {
    A m[W];
    for (A& each_m : m) each_m = kLowest<A>;
    each([&](auto& v) { Fold(m, v[0], Max{}); });
    for (int w = 0; w < W; ++w) stats[w].m = m[w];
    Exponentiate(stats, each);
  }

  // The second half of Local, for maxima that are known.
  template <int W, class Each>
  __device__ void Exponentiate(Stats (&stats)[W], Each each) const {
    A s[W] = {};
    each([&](auto& v) {
      constexpr int L = std::extent_v<std::remove_reference_t<decltype(v)>, 1>;
      A e[L];
#pragma unroll
      for (int i = 0; i < L; ++i) e[i] = Origin<T>(stats[i % W].m).Exp(v[0][i]);
      Fold(s, e, Add{});
#pragma unroll
      for (int i = 0; i < L; ++i) v[0][i] = IfLog(v[0][i], e[i]);
      return Changed();
    });
    for (int w = 0; w < W; ++w) stats[w].s = s[w];
  }
  // Relative to the rows of these statistics.
  template <int W, int L>
  __device__ void Change(const Stats (&rows)[W], A (&v)[1][L]) const {
#pragma unroll
    for (int i = 0; i < L; ++i) {
      const A e = Origin<T>(rows[i % W].m).Exp(v[0][i]);
      v[0][i] = IfLog(v[0][i], e);
    }
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

  // A result is (x - m) scale - offset: m goes first, since x - (m + log(s)) would round log(s) away where m is large.
  struct Final {
    A m, scale, offset, absent;
  };
  // Of a row, for a thread whose own elements are relative to own.m.
  __device__ Final Finish(Stats own, Stats row) const {
    const Origin<T> origin(row.m);
    const bool empty = row.m == -kInfinity<A>;
    // Both at once take less time than a branch.
    const A of_log = origin.Log(row.s, row.m), factor = Divide<T>(origin.From(Origin<T>(own.m)), row.s);
    return {IfLog(Max{}(row.m, kLowest<A>), A(0)), IfLog(A(1), factor), IfLog(of_log, A(0)),
            empty ? without_entries : IfLog(-kInfinity<A>, A(0))};
  }
  template <int L>
  static __device__ A Result(const Final& f, const A (&v)[1][L], int i) {
    return (v[0][i] - f.m) * f.scale - f.offset;
  }
};

// A result is x - factor sum, of what takes the place of g and y:
//   softmax                 y g, y
//   log-softmax, tangent    g, 1
//   log-softmax, cotangent  g, exp(y)
template <class T, int kCase = kAny>
struct BackwardOp {
  using A = Accumulator<T>;
  using Stats = A;
  using Folds = BackwardOp<A>;       // merges the same statistics
  static constexpr int kInputs = 2;  // g and y
  static constexpr bool kHasMaximum = false;

  Map map;

  bool IsTuned() const { return sizeof(T) < 8 && map != Map::kLogSoftmaxJvp; }
  __device__ int Reduced() const { return map == Map::kLogSoftmaxVjp ? 1 : kInputs; }
  template <class F>
  __device__ void Reducing(F&& f) const {
    Writing(f);
  }
#pragma nv_exec_check_disable
  template <class F>
  __host__ __device__ auto Writing(F&& f) const {
    if (map == Map::kSoftmax) return f(BackwardOp<T, static_cast<int>(Map::kSoftmax)>{map});
    return f(BackwardOp<T, static_cast<int>(Map::kLogSoftmaxVjp)>{map});
  }
  __device__ A If(Map which, A a, A b) const {
    if constexpr (kCase == kAny) return Either(map == which, a, b);
    return static_cast<Map>(kCase) == which ? a : b;
  }

  static __device__ A Fill(int) { return A(0); }
  static __device__ Stats Nothing() { return A(0); }

  template <int W, class Each>
  __device__ void Local(Stats (&sum)[W], Each each) const {
    Exponentiate(sum, each);
  }
  template <int W, class Each>
  __device__ void Exponentiate(Stats (&sum)[W], Each each) const {
    for (A& s : sum) s = 0;
    each([&](auto& v) {
      constexpr int L = std::extent_v<std::remove_reference_t<decltype(v)>, 1>;
      A term[L];
      Change(v, term);
      Fold(sum, term, Add{});
      return Changed();
    });
  }
  template <int W, int L>
  __device__ void Change(const Stats (&)[W], A (&v)[2][L]) const {
    A term[L];
    Change(v, term);
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
    return v[0][i] - v[1][i] * f.sum;
  }

 private:
  // Changes the elements; `term` is what they add to the sum.
  template <int L>
  __device__ void Change(A (&v)[2][L], A (&term)[L]) const {
#pragma unroll
    for (int i = 0; i < L; ++i) {
      // A branch would take longer, except for doubles.
      const A e = sizeof(T) == 8 && map == Map::kSoftmax ? A(0) : Exp<T>(v[1][i]);
      v[1][i] = If(Map::kSoftmax, v[1][i], e);
      term[i] = If(Map::kLogSoftmaxVjp, v[0][i], v[0][i] * v[1][i]);
      v[0][i] = If(Map::kSoftmax, term[i], v[0][i]);
      v[1][i] = If(Map::kLogSoftmaxJvp, A(1), v[1][i]);
    }
  }
};

}  // namespace jaxdnn::softmax
