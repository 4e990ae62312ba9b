// Short rows of any length, a run of which begins on a vector and lies in shared memory.
#pragma once

#include <algorithm>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/loss/spread.cuh"

namespace jaxdnn::loss {

// Elements of a short row that a thread takes, and the longest such row.
constexpr int kPackedSteps = 16;
constexpr int kMaxPackedRow = 32 * kPackedSteps;

struct PackedRows {
  int per_block;
  int span;  // of the group that shares a row: 1 << span lanes
  Grid grid;
};

// Blocks of about `most_bytes`.
inline PackedRows PlanPackedRows(const softmax::Shape& shape, int element_bytes, int most_bytes) {
  const int bytes = static_cast<int>(shape.n) * element_bytes, span = CeilLog2(CeilDiv(shape.n, kPackedSteps));
  // Every group takes as many rows, and so many are a multiple of a vector's elements. Some blocks to a
  // multiprocessor, if there is work for them.
  const int groups = kThreads >> span;
  const int64_t full = CeilDiv(most_bytes, bytes * groups), few = CeilDiv(shape.outer, 512 * groups);
  const int per_block = static_cast<int>(std::min(full, few)) * groups;
  return {per_block, span, {CeilDiv(shape.outer, per_block), kThreads, static_cast<size_t>(per_block) * bytes}};
}

// Starts to copy `count` elements to shared memory, which are there after WaitRun.
template <class T>
__device__ void LoadRun(T* held, const T* from, int count) {
  constexpr int L = kVecLength<T>;
  const int whole = count / L;
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += kThreads)
    CopyAsync(reinterpret_cast<Vec<T, L>*>(held) + i, reinterpret_cast<const Vec<T, L>*>(from) + i);
  for (int i = whole * L + threadIdx.x; i < count; i += kThreads) held[i] = from[i];
  CommitAsync();
}
__device__ inline void WaitRun() {
  WaitAsync<0>();
  __syncthreads();
}

template <class T>
__device__ void StoreRun(T* to, const T* held, int count) {
  constexpr int L = kVecLength<T>;
  const int whole = count / L;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += kThreads)
    reinterpret_cast<Vec<T, L>*>(to)[i] = reinterpret_cast<const Vec<T, L>*>(held)[i];
  for (int i = whole * L + threadIdx.x; i < count; i += kThreads) to[i] = held[i];
}

}  // namespace jaxdnn::loss
