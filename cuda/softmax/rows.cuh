// Short rows, several to a warp: of whole vectors, or of any length through shared memory; there, columns too.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/softmax/packed.cuh"

namespace jaxdnn::softmax {

constexpr int kRowThreads = 256;

// Rows are shared by groups of 1 << span threads of a warp.
struct Rows {
  int64_t rows;
  int n;
  int span;
  int per_block;

  int64_t Blocks() const { return CeilDiv(rows, per_block); }
};

// Over the threads of a group: the same bits in each.
struct ShuffleReduce {
  int span;

  template <class A, int W, class F>
  __device__ void operator()(A (&values)[W], F operation) const {
    for (int lane = 1; lane < 1 << span; lane *= 2)
#pragma unroll
      for (int w = 0; w < W; ++w) values[w] = operation(values[w], ShuffleXor(values[w], lane));
  }
};

// Vectors of each input that a thread holds: 32 registers of elements, at most.
template <class Op, class T>
constexpr int kRowVectors = sizeof(T) == 2 ? 4 / Op::kInputs : 4;

// Rows of a multiple of L elements, without a mask. A group takes several rows at once, kSteps vectors of each a
// thread.
template <class Op, class T, int kSteps>
__global__ void __launch_bounds__(kRowThreads) VectorRowsKernel(Rows r, Op op, const T* in0, const T* in1, T* out) {
  using A = typename Op::A;
  constexpr int L = kVecLength<T>, kInputs = Op::kInputs, kRows = kRowVectors<Op, T> / kSteps;
  using P = Packed<T, L>;
  const int group = threadIdx.x >> r.span, groups = kRowThreads >> r.span, lane = threadIdx.x & ((1 << r.span) - 1);
  const int vectors = r.n / L;
  const int64_t first = int64_t{blockIdx.x} * r.per_block + group;
  const auto row = [&](int j) { return first + j * groups; };
  const auto exists = [&](int j, int s) { return row(j) < r.rows && lane + (s << r.span) < vectors; };
  const auto index = [&](int j, int s) { return row(j) * vectors + lane + (s << r.span); };

  P loaded[kRows][kSteps][kInputs];
#pragma unroll
  for (int j = 0; j < kRows; ++j)
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        loaded[j][s][k] = Filled<Op, T, L>(k);
        if (exists(j, s)) loaded[j][s][k] = reinterpret_cast<const P*>(k == 0 ? in0 : in1)[index(j, s)];
      }
  A v[kRows][kSteps][kInputs][L];
#pragma unroll
  for (int j = 0; j < kRows; ++j)
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int k = 0; k < kInputs; ++k) Widen<T, L>(loaded[j][s][k], v[j][s][k]);

  typename Op::Stats own[kRows], stats[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    typename Op::Stats of_row[1];
    op.Local(of_row, [&](auto&& visit) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) visit(v[j][s]);
    });
    own[j] = of_row[0];
    stats[j] = own[j];
  }
  Op::Combine(stats, ShuffleReduce{r.span});

#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const typename Op::Final final = op.Finish(own[j], stats[j]);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      A results[L];
#pragma unroll
      for (int i = 0; i < L; ++i) results[i] = Op::Result(final, v[j][s], i);
      if (exists(j, s)) StorePacked<T, L>(out + index(j, s) * L, Narrow<T, L>(results));
    }
  }
}

// Rows of so few elements, kN, that a vector is several whole rows. Without a mask.
template <class Op, class T, int kN>
__global__ void __launch_bounds__(kRowThreads)
    RowsOfVectorKernel(int64_t vectors, Op op, const T* in0, const T* in1, T* out) {
  constexpr int L = kVecLength<T>, kInputs = Op::kInputs;
  using V = Vec<T, L>;
  const int64_t at = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  if (at >= vectors) return;
  V loaded[kInputs], result;
#pragma unroll
  for (int k = 0; k < kInputs; ++k) loaded[k] = reinterpret_cast<const V*>(k == 0 ? in0 : in1)[at];
  op.Writing([&](const auto& known) {
#pragma unroll
    for (int row = 0; row < L / kN; ++row) {
      typename Op::A v[kInputs][kN];
#pragma unroll
      for (int k = 0; k < kInputs; ++k)
#pragma unroll
        for (int i = 0; i < kN; ++i) v[k][i] = static_cast<typename Op::A>(loaded[k].v[row * kN + i]);
      typename Op::Stats stats[1];
      known.Local(stats, [&](auto&& visit) { visit(v); });
      const auto final = known.Finish(stats[0], stats[0]);
#pragma unroll
      for (int i = 0; i < kN; ++i) result.v[row * kN + i] = static_cast<T>(known.Result(final, v, i));
    }
  });
  reinterpret_cast<V*>(out)[at] = result;
}

// Rows of any length, per_block of which are a run of memory that begins on a vector. Groups take one at a time, in
// words (packed.cuh).
template <class Op, class T, int kWhole>
__global__ void __launch_bounds__(kRowThreads) PackedRowsKernel(Rows r, Op op, const T* in0, const T* in1, T* out) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* const held = reinterpret_cast<T*>(shared);
  const int64_t first = int64_t{blockIdx.x} * r.per_block;
  const int rows = static_cast<int>(min(int64_t{r.per_block}, r.rows - first)), pitch = r.per_block * r.n;
#pragma unroll
  for (int k = 0; k < Op::kInputs; ++k) LoadRun(held + k * pitch, (k == 0 ? in0 : in1) + first * r.n, rows * r.n);
  WaitRun();
  const int group = threadIdx.x >> r.span, groups = kRowThreads >> r.span;
  // All lanes of a warp take part, those without a row with the warp's last one. A warp without any stays away: what it
  // would read, another one writes. Of a vote the compiler knows that the warp stays together, which spares registers.
  for (int wanted = group; __any_sync(~0u, wanted < rows); wanted += groups) {
    PackedRow<Op, T, kWhole> row(held, pitch, min(wanted, rows - 1), r.n, {r.span, kWhole});
    typename Op::Stats own[1], stats[1];
    // To these rows an instruction an element matters.
    op.Writing([&](const auto& known) { known.Local(own, [&](auto&& visit) { row.Each(visit); }); });
    stats[0] = own[0];
    Op::Combine(stats, ShuffleReduce{r.span});
    __syncwarp();
    op.Writing([&](const auto& known) {
      const auto final = known.Finish(own[0], stats[0]);
      if (wanted < rows) row.Store([&](auto& word, int i) { return known.Result(final, word, i); });
    });
  }
  StoreRun(out + first * r.n, held, rows * r.n);
}

// Elements of a packed line that a lane holds, and the longest.
constexpr int kMaxPackedSteps = 16;
constexpr int kMaxPackedLine = 32 * kMaxPackedSteps;

// Rows, with a mask or without, or columns, `inner` of them side by side, in runs like these; element by element.
template <class Op, class T>
__global__ void __launch_bounds__(kRowThreads, 4)
    PackedLinesKernel(Rows r, FastDiv inner, Op op, const __grid_constant__ Mask mask, const T* in0, const T* in1,
                      T* out) {
  using A = typename Op::A;
  constexpr int kInputs = Op::kInputs, kBatch = 4;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const held = reinterpret_cast<T*>(shared);
  const int64_t first = int64_t{blockIdx.x} * r.per_block;
  const int rows = static_cast<int>(min(int64_t{r.per_block}, r.rows - first)), size = r.per_block * r.n;
#pragma unroll
  for (int k = 0; k < kInputs; ++k) LoadRun(held + k * size, (k == 0 ? in0 : in1) + first * r.n, rows * r.n);
  WaitRun();

  const int lane = threadIdx.x & ((1 << r.span) - 1), groups = kRowThreads >> r.span;
  const int step = static_cast<int>(inner.divisor) << r.span;  // between a thread's elements
  // Calls visit(s) for the steps that any lane has, a batch at a time.
  const auto each_step = [&](auto&& visit) {
#pragma unroll
    for (int s = 0; s < kMaxPackedSteps; ++s) {
      if (s % kBatch == 0 && s << r.span >= r.n) break;
      visit(s);
    }
  };
  for (int top = 0; top < rows; top += groups) {
    const int row = top + (threadIdx.x >> r.span);
    // Of this thread's elements, lane, lane + (1 << span), ..., those below `left` past the first are the row's.
    const int left = row < rows ? r.n - lane : 0;
    int across;
    inner.Div(row < rows ? row : 0, &across);
    T* mine = held + ((row < rows ? row : 0) - across) * r.n + across + lane * static_cast<int>(inner.divisor);
    unsigned kept = ~0u;
    if (mask.data != nullptr) {
      kept = 0;
      const bool* keep = row < rows ? mask.data + mask.Row(first + row) : nullptr;
      each_step([&](int s) {
        if (s << r.span < left) kept |= unsigned{keep[(lane + (s << r.span)) * mask.along_n]} << s;
      });
    }
    A v[kMaxPackedSteps][kInputs][1];
    each_step([&](int s) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        v[s][k][0] = Op::Fill(k);
        if (s << r.span < left && (kept >> s & 1)) v[s][k][0] = static_cast<A>(mine[k * size + s * step]);
      }
    });
    typename Op::Stats own[1], stats[1];
    op.Local(own, [&](auto&& visit) { each_step([&](int s) { visit(v[s]); }); });
    stats[0] = kept == 0 ? Op::Nothing() : own[0];
    Op::Combine(stats, ShuffleReduce{r.span});
    const typename Op::Final final = op.Finish(own[0], stats[0]);
    each_step([&](int s) {
      if (s << r.span < left) {
        const A value = Op::Result(final, v[s], 0);
        mine[s * step] = static_cast<T>(kept >> s & 1 ? value : final.absent);
      }
    });
  }
  StoreRun(out + first * r.n, held, rows * r.n);
}

// How packed rows are dealt out, or columns that are few: slices of `inner`, so that a block's begin on a vector; none
// to a block: they are not.
template <int L>
Rows PlanPackedRows(const Shape& s, int span, int64_t element_bytes) {
  constexpr int64_t kBytes = 16 << 10, kMost = 48 << 10;
  const int64_t groups = kRowThreads >> span, lines = s.outer * s.inner, slice = s.n * s.inner;
  // A whole number of slices, that ends on a vector too.
  const int64_t unit = s.inner * (L / std::gcd<int64_t>(L, slice));
  // Some blocks to a multiprocessor, if there is work for them.
  const int64_t full = CeilDiv(kBytes, s.n * element_bytes * groups), few = CeilDiv(lines, 512 * groups);
  const int64_t per_block = CeilDiv(std::min(full, few) * groups, unit) * unit;
  const bool fits = per_block * s.n * element_bytes <= kMost;
  return {lines, static_cast<int>(s.n), span, fits ? static_cast<int>(per_block) : 0};
}

inline int LineSpan(int64_t n) { return CeilLog2(CeilDiv(n, kMaxPackedSteps)); }

}  // namespace jaxdnn::softmax
