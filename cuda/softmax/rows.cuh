// Short rows, several to a warp: of whole vectors in registers, or of any
// length through shared memory.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/softmax/ops.cuh"

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

// Rows of a multiple of L elements. A group takes kRows rows at once, kSteps
// vectors of each a thread.
template <class Op, class T, int kSteps, int kRows>
__global__ void __launch_bounds__(kRowThreads)
    VectorRowsKernel(Rows r, Op op, const __grid_constant__ Mask mask, const T* in0, const T* in1, T* out) {
  constexpr int L = kVecLength<T>, kInputs = Op::kInputs;
  using V = Vec<T, L>;
  const int group = threadIdx.x >> r.span, groups = kRowThreads >> r.span, lane = threadIdx.x & ((1 << r.span) - 1);
  const int vectors = r.n / L;
  const V* in[2] = {reinterpret_cast<const V*>(in0), reinterpret_cast<const V*>(in1)};
  const auto row = [&](int j) { return int64_t{blockIdx.x} * r.per_block + j * groups + group; };
  const auto vector = [&](int s) { return lane + (s << r.span); };
  const auto exists = [&](int j, int s) { return row(j) < r.rows && vector(s) < vectors; };

  V v[kRows][kSteps][kInputs];
#pragma unroll
  for (int j = 0; j < kRows; ++j)
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        if (exists(j, s))
          v[j][s][i] = in[i][row(j) * vectors + vector(s)];
        else
          for (T& x : v[j][s][i].v) x = Op::Fill(i);
      }

  unsigned kept[kRows][kSteps];
  if (mask.data != nullptr) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const bool* keep = row(j) < r.rows ? mask.data + mask.Row(row(j)) : nullptr;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        kept[j][s] = 0;
        if (exists(j, s))
#pragma unroll
          for (int i = 0; i < L; ++i) kept[j][s] |= unsigned{keep[(vector(s) * L + i) * mask.along_n]} << i;
#pragma unroll
        for (int i = 0; i < L; ++i)
          if ((kept[j][s] >> i & 1) == 0)
            for (int k = 0; k < kInputs; ++k) v[j][s][k].v[i] = Op::Fill(k);
      }
    }
  }

  typename Op::Stats stats[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    typename Op::Stats own[1];
    Op::template Local<1, L>(own, [&](auto&& visit) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) visit(v[j][s]);
    });
    stats[j] = own[0];
    if (mask.data != nullptr) {
      unsigned some = 0;
      for (int s = 0; s < kSteps; ++s) some |= kept[j][s];
      if (some == 0) stats[j] = Op::Nothing();
    }
  }
  Op::Combine(stats, ShuffleReduce{r.span});

#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const typename Op::Final final = op.Finish(stats[j]);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      V result;
#pragma unroll
      for (int i = 0; i < L; ++i) {
        T x[kInputs];
        for (int k = 0; k < kInputs; ++k) x[k] = v[j][s][k].v[i];
        result.v[i] = Op::Result(final, x);
        if (mask.data != nullptr && (kept[j][s] >> i & 1) == 0) result.v[i] = Op::Absent(final);
      }
      if (exists(j, s)) reinterpret_cast<V*>(out)[row(j) * vectors + vector(s)] = result;
    }
  }
}

// Elements that a thread holds of a row in shared memory.
constexpr int kPackedSteps = 16;

// Rows of any length: per_block of them, a multiple of L, are a run of memory
// that begins on a vector. It is copied to shared memory as it is, the results
// take its place, and it is copied back.
template <class Op, class T>
__global__ void __launch_bounds__(kRowThreads)
    PackedRowsKernel(Rows r, Op op, const __grid_constant__ Mask mask, const T* in0, const T* in1, T* out) {
  constexpr int L = kVecLength<T>, kInputs = Op::kInputs;
  using V = Vec<T, L>;
  using Element = Vec<T, 1>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* held = reinterpret_cast<T*>(shared);
  const int64_t first = int64_t{blockIdx.x} * r.per_block;
  const int rows = static_cast<int>(min(int64_t{r.per_block}, r.rows - first));
  const int size = r.per_block * r.n, count = rows * r.n, whole = count / L;
  const T* in[2] = {in0 + first * r.n, in1 + first * r.n};
  out += first * r.n;
#pragma unroll
  for (int j = 0; j < kInputs; ++j) {
    V* to = reinterpret_cast<V*>(held + j * size);
#pragma unroll 4
    for (int i = threadIdx.x; i < whole; i += kRowThreads) CopyAsync(to + i, reinterpret_cast<const V*>(in[j]) + i);
    for (int i = whole * L + threadIdx.x; i < count; i += kRowThreads) held[j * size + i] = in[j][i];
  }
  CommitAsync();
  WaitAsync<0>();
  __syncthreads();

  const int lanes = 1 << r.span, lane = threadIdx.x & (lanes - 1), groups = kRowThreads >> r.span;
  const int steps = (r.n + lanes - 1) >> r.span;
  for (int top = 0; top < rows; top += groups) {
    const int row = top + (threadIdx.x >> r.span);
    const bool active = row < rows;
    T* mine = held + (active ? row : 0) * r.n + lane;
    const auto exists = [&](int s) { return active && lane + (s << r.span) < r.n; };
    Element v[kPackedSteps][kInputs];
    unsigned kept = ~0u;
    if (mask.data != nullptr) {
      kept = 0;
      if (active) {
        const bool* keep = mask.data + mask.Row(first + row);
        for (int s = 0; s < steps; ++s)
          if (exists(s)) kept |= unsigned{keep[(lane + (s << r.span)) * mask.along_n]} << s;
      }
    }
#pragma unroll
    for (int s = 0; s < kPackedSteps; ++s)
      if (s < steps)
#pragma unroll
        for (int j = 0; j < kInputs; ++j)
          v[s][j].v[0] = exists(s) && (kept >> s & 1) ? mine[j * size + (s << r.span)] : Op::Fill(j);
    typename Op::Stats stats[1];
    Op::template Local<1, 1>(stats, [&](auto&& visit) {
#pragma unroll
      for (int s = 0; s < kPackedSteps; ++s)
        if (s < steps) visit(v[s]);
    });
    if (kept == 0) stats[0] = Op::Nothing();
    Op::Combine(stats, ShuffleReduce{r.span});
    const typename Op::Final final = op.Finish(stats[0]);
#pragma unroll
    for (int s = 0; s < kPackedSteps; ++s)
      if (s < steps && exists(s)) {
        T x[kInputs];
        for (int j = 0; j < kInputs; ++j) x[j] = v[s][j].v[0];
        mine[s << r.span] = kept >> s & 1 ? Op::Result(final, x) : Op::Absent(final);
      }
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += kRowThreads) reinterpret_cast<V*>(out)[i] = reinterpret_cast<V*>(held)[i];
  for (int i = whole * L + threadIdx.x; i < count; i += kRowThreads) out[i] = held[i];
}

}  // namespace jaxdnn::softmax
