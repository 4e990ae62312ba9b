// What is known of a row while it is read: its maximum and the sums that are taken from it.
#pragma once

#include "cuda/loss/log_partition.h"
#include "cuda/softmax/exp.cuh"
#include "cuda/softmax/ops.cuh"

namespace jaxdnn::loss {

using softmax::Exp;
using softmax::kLowest;
using softmax::Origin;

// Targets with their element types.
template <class T>
struct TypedTargets {
  softmax::Mask mask;
  const int32_t* labels;
  const T* q;
  bool smooth;
  const Accumulator<T>* weights;
  // The maximum is cut off here: below +inf for log-sum-exp, which is +inf then; a loss becomes NaN instead.
  Accumulator<T> largest;
  int sums;

  explicit TypedTargets(const Targets& t)
      : mask(t.mask),
        labels(t.labels),
        q(static_cast<const T*>(t.q)),
        smooth(t.smooth),
        weights(static_cast<const Accumulator<T>*>(t.weights)),
        largest(t.labels || t.q ? softmax::kInfinity<Accumulator<T>> : -kLowest<Accumulator<T>>),
        sums(t.Sums()) {}

  // The weight of a class when scores are smoothed; 0 when they are not.
  __device__ Accumulator<T> Weight(int64_t k) const {
    return !smooth ? Accumulator<T>(0) : weights != nullptr ? weights[k] : Accumulator<T>(1);
  }
};

// What becomes of rows.
template <class T>
struct Results {
  Accumulator<T>*m, *sums;
  T* total;  // or null
};

// Of W rows at once. The scores are relative to m, which the row's first elements set and others raise.
template <class T, int W, bool kScores>
struct State {
  using A = Accumulator<T>;
  static constexpr int kFields = kScores ? 6 : 2;

  A m[W], s[W] = {};
  A score[kScores ? W : 1] = {}, mass[kScores ? W : 1] = {};    // of q
  A total[kScores ? W : 1] = {}, weight[kScores ? W : 1] = {};  // of the weights

  __device__ State() {
    for (A& each : m) each = kLowest<A>;
  }

  // Moves the origin of row w to `to`, which is no less than m.
  __device__ void Raise(int w, A to) {
    const A shift = m[w] - to;
    s[w] *= Origin<T>(to).From(Origin<T>(m[w]));
    // Without elements there is nothing to move, and the shift may overflow.
    if constexpr (kScores) score[w] += mass[w] == A(0) ? A(0) : shift * mass[w];
    if constexpr (kScores) total[w] += weight[w] == A(0) ? A(0) : shift * weight[w];
    m[w] = to;
  }

  // Adds kCount vectors. q and the weights are 0 for elements that are not the row's; 0 times -inf is 0 here.
  template <int kCount, int L>
  __device__ void Add(const Vec<T, L> (&x)[kCount], const Vec<T, L> (&q)[kScores ? kCount : 1],
                      const A (&weights)[kScores ? kCount : 1][kScores ? L : 1], A largest) {
    A to[W];
    for (int w = 0; w < W; ++w) to[w] = m[w];
#pragma unroll
    for (int c = 0; c < kCount; ++c)
#pragma unroll
      for (int i = 0; i < L; ++i) to[i % W] = Max{}(to[i % W], static_cast<A>(x[c].v[i]));
    for (int w = 0; w < W; ++w) Raise(w, fmin(to[w], largest));
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
#pragma unroll
      for (int i = 0; i < L; ++i) {
        s[i % W] += Origin<T>(m[i % W]).Exp(static_cast<A>(x[c].v[i]));
        [[maybe_unused]] const A d = static_cast<A>(x[c].v[i]) - m[i % W];
        if constexpr (kScores) {
          const A factor = static_cast<A>(q[c].v[i]);
          score[i % W] += factor == A(0) ? A(0) : factor * d;
          mass[i % W] += factor;
        }
        if constexpr (kScores) {
          const A factor = weights[c][i];
          total[i % W] += factor == A(0) ? A(0) : factor * d;
          weight[i % W] += factor;
        }
      }
    }
  }

  // Over a group of threads; reduce(values, operation) leaves the result in each.
  template <class Reducer>
  __device__ void Combine(Reducer reduce) {
    A to[W];
    for (int w = 0; w < W; ++w) to[w] = m[w];
    reduce(to, Max{});
    for (int w = 0; w < W; ++w) Raise(w, to[w]);
    reduce(s, jaxdnn::Add{});
    if constexpr (kScores) reduce(score, jaxdnn::Add{}), reduce(mass, jaxdnn::Add{});
    if constexpr (kScores) reduce(total, jaxdnn::Add{}), reduce(weight, jaxdnn::Add{});
  }

  // Row w as kFields numbers `pitch` apart.
  __device__ void Save(int w, A* to, int64_t pitch) const {
    int field = 0;
    to[pitch * field++] = m[w], to[pitch * field++] = s[w];
    if constexpr (kScores) to[pitch * field++] = score[w], to[pitch * field++] = mass[w];
    if constexpr (kScores) to[pitch * field++] = total[w], to[pitch * field++] = weight[w];
  }
  // Merges what was saved into row 0: `fields` of kFields, or without scores.
  __device__ void MergeSaved(const A* from, int64_t pitch, int fields) {
    static_assert(kScores);
    State other;
    other.m[0] = from[0], other.s[0] = from[pitch];
    if (fields == kFields) {
      other.score[0] = from[pitch * 2], other.mass[0] = from[pitch * 3];
      other.total[0] = from[pitch * 4], other.weight[0] = from[pitch * 5];
    }
    const A to = Max{}(m[0], other.m[0]);
    Raise(0, to), other.Raise(0, to);
    s[0] += other.s[0];
    score[0] += other.score[0], mass[0] += other.mass[0];
    total[0] += other.total[0], weight[0] += other.weight[0];
  }

  // Writes the results of row w, which is [outer, :, column] of [outer, n, inner].
  __device__ void Write(int w, const TypedTargets<T>& t, const softmax::Shape& shape, int64_t outer, int64_t column,
                        const T* x, const Results<T>& results) const {
    const int64_t row = outer * shape.inner + column;
    const A l = Origin<T>(m[w]).Log(s[w], m[w]);
    results.m[row] = m[w];
    if (results.total != nullptr) results.total[row] = static_cast<T>(m[w] + l);
    A* to = results.sums + outer * t.sums * shape.inner + column;
    int field = 0;
    to[shape.inner * field++] = l;
    if (t.labels != nullptr) {
      const int64_t label = t.labels[row];
      const bool exists = label >= 0 && label < shape.n;
      to[shape.inner * field++] =
          exists ? static_cast<A>(x[(outer * shape.n + label) * shape.inner + column]) - m[w] : A(0);
    }
    if constexpr (kScores) {
      if (t.q != nullptr) to[shape.inner * field++] = score[w], to[shape.inner * field++] = mass[w];
      if (t.smooth) to[shape.inner * field++] = total[w];
    }
  }
};

// The statistics of a group's row, and its results, from a thread of the group.
template <class T>
__device__ void WriteRow(softmax::MaxSum<Accumulator<T>> stats, const TypedTargets<T>& t, const softmax::Shape& shape,
                         int64_t row, const T* x, const Results<T>& results) {
  State<T, 1, false> state;
  state.m[0] = stats.m, state.s[0] = stats.s;
  state.Write(0, t, shape, row, 0, x, results);
}

// Log-sum-exp and scores of labels of rows of vectors, x [outer, n] (log_partition_rows.cu); not `done` of masked ones,
// nor where others are faster.
template <class T>
cudaError_t RunLongRows(const softmax::Shape& shape, const TypedTargets<T>& t, const T* x, const Results<T>& results,
                        cudaStream_t stream, bool* done);

}  // namespace jaxdnn::loss
