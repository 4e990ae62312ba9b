// Short rows of any length, a run of which begins on a vector and lies in shared memory, as in cuda/softmax/packed.cuh.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/loss/spread.cuh"
#include "cuda/softmax/packed.cuh"

namespace jaxdnn::loss {

using softmax::kMaxPackedRow;
using softmax::LoadRun;
using softmax::PackedRow;
using softmax::SpanOf;
using softmax::StoreRun;
using softmax::VisitPackedWords;
using softmax::WaitRun;

// With a mask a thread takes so many elements of a row, one by one.
constexpr int kMaskedSteps = 16;
constexpr int kMaxMaskedRow = 32 * kMaskedSteps;

struct PackedRows {
  int per_block;
  Grid grid;
};

// Blocks of about `most_bytes`, whose groups of 1 << span lanes share a row.
inline PackedRows PlanPackedRows(const softmax::Shape& shape, int span, int element_bytes, int most_bytes,
                                 int threads = kThreads) {
  const int bytes = static_cast<int>(shape.n) * element_bytes;
  // Every group takes as many rows, and so many are a multiple of a vector's elements. Some blocks to a
  // multiprocessor, if there is work for them.
  const int groups = threads >> span;
  const int64_t full = CeilDiv(most_bytes, bytes * groups), few = CeilDiv(shape.outer, 512 * groups);
  const int per_block = static_cast<int>(std::min(full, few)) * groups;
  return {per_block, {CeilDiv(shape.outer, per_block), threads, static_cast<size_t>(per_block) * bytes}};
}

// A block's rows, from number `first` on. They are in shared memory after WaitRun.
template <class T>
struct PackedBlock {
  T* held;
  int64_t first;
  int n, rows;

  __device__ PackedBlock(const softmax::Shape& shape, int per_block, const T* x)
      : first(int64_t{blockIdx.x} * per_block),
        n(static_cast<int>(shape.n)),
        rows(static_cast<int>(min(int64_t{per_block}, shape.outer - first))) {
    extern __shared__ __align__(16) unsigned char shared[];
    held = reinterpret_cast<T*>(shared);
    LoadRun(held, x + first * n, rows * n);
  }
};

inline int MaskedSpan(const softmax::Shape& shape) { return CeilLog2(CeilDiv(shape.n, kMaskedSteps)); }

}  // namespace jaxdnn::loss
