// The block-level matrix product of the CUDA-core kernels that are not of float32: two tiles in shared memory, a small
// block of sums in each thread's registers. They are for what nothing else takes or where groups are smaller than a
// tensor core's operands, and so there are no more than two.
//
// A step holds kDepth terms of the reduction. While a block multiplies one step, the next is on its way from global
// memory into registers; two shared-memory buffers leave one barrier a step.
#pragma once

#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// A block computes kRows x kColumns sums, each thread kThreadRows x kThreadColumns of them.
template <class In, int kRows_, int kColumns_, int kThreadRows_, int kThreadColumns_>
struct BlockTile {
  using Sum = Accumulator<In>;
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kThreadRows = kThreadRows_, kThreadColumns = kThreadColumns_;
  static constexpr int kDepth = sizeof(In) == 8 ? 8 : 16;
  static constexpr int kThreadsAcross = kColumns / kThreadColumns;
  static constexpr int kThreads = kRows / kThreadRows * kThreadsAcross;
  // Elements of each operand that a thread carries into shared memory every step; of B some threads may have none.
  static constexpr int kLoadsA = kRows * kDepth / kThreads;
  static constexpr int kLoadsB = (kColumns * kDepth + kThreads - 1) / kThreads;
  static_assert(kLoadsA * kThreads == kRows * kDepth);

  // Padded by 4 elements, so that stores along the depth spread over the banks and rows stay 16-byte aligned.
  struct Shared {
    Sum a[2][kDepth][kRows + 4];
    Sum b[2][kDepth][kColumns + 4];
  };

  // First row and column of this thread's sums.
  static __device__ int Row() { return threadIdx.x / kThreadsAcross * kThreadRows; }
  static __device__ int Column() { return threadIdx.x % kThreadsAcross * kThreadColumns; }
};

template <class In>
using WideTile = BlockTile<In, 64, 32, 4, 4>;
template <class In>
using NarrowTile = BlockTile<In, 128, 8, 4, 2>;

// Calls f with the TypeTag of the operands' type.
template <class F>
cudaError_t VisitKernelType(DType in, F&& f) {
  if (in == DType::kF64) return f(TypeTag<double>());
  return in == DType::kBF16 ? f(TypeTag<__nv_bfloat16>()) : f(TypeTag<__half>());
}

// Where element number `i` of this thread's loads goes: lanes run along the depth, or along the rows (columns) of a
// tile that is `kExtent` wide, whichever is contiguous in memory.
template <class T, int kExtent>
struct Share {
  bool deep;

  __device__ int Element(int i) const { return threadIdx.x + i * T::kThreads; }
  __device__ int Depth(int i) const { return deep ? threadIdx.x % T::kDepth : Element(i) / kExtent; }
  __device__ int Position(int i) const {
    return deep ? threadIdx.x / T::kDepth + i * (T::kThreads / T::kDepth) : Element(i) % kExtent;
  }
};

// sums += A B over `steps` steps, each of which is summed by itself first: rounding errors then grow with the square
// root of the steps, not of the terms. element_a(k, i) is where the operand's element of depth k and row (column) i of
// the tile lies, or null for zeros; element_a.Deep() whether its neighbours are those along the depth.
template <class T, class ElementA, class ElementB>
__device__ void MultiplyTiles(typename T::Shared& shared, int steps, const ElementA& element_a,
                              const ElementB& element_b, typename T::Sum (&sums)[T::kThreadRows][T::kThreadColumns]) {
  using Sum = typename T::Sum;
  Sum a[T::kLoadsA], b[T::kLoadsB];
  const Share<T, T::kRows> share_a{element_a.Deep()};
  const Share<T, T::kColumns> share_b{element_b.Deep()};
  const auto value = [](const auto* from) { return from == nullptr ? Sum(0) : static_cast<Sum>(*from); };
  const auto load = [&](int step) {
#pragma unroll
    for (int i = 0; i < T::kLoadsA; ++i)
      a[i] = value(element_a(step * T::kDepth + share_a.Depth(i), share_a.Position(i)));
#pragma unroll
    for (int i = 0; i < T::kLoadsB; ++i)
      b[i] = value(element_b(step * T::kDepth + share_b.Depth(i), share_b.Position(i)));
  };
  const auto store = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < T::kLoadsA; ++i) shared.a[buffer][share_a.Depth(i)][share_a.Position(i)] = a[i];
#pragma unroll
    for (int i = 0; i < T::kLoadsB; ++i)
      if (threadIdx.x + i * T::kThreads < T::kColumns * T::kDepth)
        shared.b[buffer][share_b.Depth(i)][share_b.Position(i)] = b[i];
    __syncthreads();
  };
  // The first step is none, and only loads.
#pragma unroll 1
  for (int step = -1; step < steps; ++step) {
    const int buffer = step & 1;
    if (step + 1 < steps) load(step + 1);
    if (step >= 0) {
      Sum part[T::kThreadRows][T::kThreadColumns] = {};
#pragma unroll
      for (int k = 0; k < T::kDepth; ++k) {
        Sum row[T::kThreadRows], column[T::kThreadColumns];
#pragma unroll
        for (int i = 0; i < T::kThreadRows; ++i) row[i] = shared.a[buffer][k][T::Row() + i];
#pragma unroll
        for (int j = 0; j < T::kThreadColumns; ++j) column[j] = shared.b[buffer][k][T::Column() + j];
#pragma unroll
        for (int i = 0; i < T::kThreadRows; ++i)
#pragma unroll
          for (int j = 0; j < T::kThreadColumns; ++j) part[i][j] += row[i] * column[j];
      }
#pragma unroll
      for (int i = 0; i < T::kThreadRows; ++i)
#pragma unroll
        for (int j = 0; j < T::kThreadColumns; ++j) sums[i][j] += part[i][j];
    }
    // The other buffer was last read before the previous barrier, so it is free.
    if (step + 1 < steps) store(buffer ^ 1);
  }
}

}  // namespace jaxdnn::conv
