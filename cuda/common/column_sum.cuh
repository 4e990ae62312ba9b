// The second stage of a two-stage sum over rows: blocks leave partial rows behind, and this adds them up in a fixed
// order, so that the result has the same bits on every run, without atomics.
#pragma once

#include "cuda/common/launch.cuh"

namespace jaxdnn {

constexpr int kColumnSumThreads = 512;

// A block owns `width` columns of one outer index, a power of two; its rows of threads take turns with the rows. Outer
// indices from `split` on go to `second`.
template <class A, class Out>
__global__ void SumRowsKernel(const A* __restrict__ partial, int64_t rows, int64_t columns, int64_t tiles, int width,
                              int64_t split, Out* __restrict__ first, Out* __restrict__ second) {
  __shared__ A scratch[kColumnSumThreads];
  const int64_t outer = blockIdx.x / tiles;
  const int x = threadIdx.x & (width - 1), height = kColumnSumThreads / width;
  const int64_t column = (blockIdx.x - outer * tiles) * width + x;
  A sum = A(0);
  if (column < columns) {
    const A* p = partial + outer * rows * columns + column;
#pragma unroll 8
    for (int64_t r = threadIdx.x / width; r < rows; r += height) sum += p[r * columns];
  }
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != x || column >= columns) return;
  for (int i = 1; i < height; ++i) sum += scratch[i * width + x];
  Out* const out = outer < split ? first + outer * columns : second + (outer - split) * columns;
  out[column] = static_cast<Out>(sum);
}

// The sums over the `rows` rows of `outer` tables of `columns` into first [outer, columns], and of as many as `others`
// that follow these in `partial` into second [others, columns].
template <class A, class Out>
cudaError_t SumRowsOfTwo(const A* partial, int64_t outer, int64_t others, int64_t rows, int64_t columns, Out* first,
                         Out* second, cudaStream_t stream) {
  // Few rows of many columns keep all threads without sharing a column.
  constexpr int64_t kBlocks = 512;
  const int64_t both = outer + others;
  int width = 32;
  while (width < kColumnSumThreads && both * CeilDiv(columns, int64_t{2} * width) >= kBlocks) width *= 2;
  const int64_t tiles = CeilDiv(columns, int64_t{width});
  return LaunchKernel(SumRowsKernel<A, Out>, both * tiles, kColumnSumThreads, stream, partial, rows, columns, tiles,
                      width, outer, first, second);
}

// first[o, c] = the sum over r of partial[0, o, r, c], and second[o, c] that of partial[1, o, r, c].
template <class A, class Out>
cudaError_t SumRows(const A* partial, int64_t outer, int64_t rows, int64_t columns, Out* first, Out* second,
                    cudaStream_t stream) {
  return SumRowsOfTwo(partial, outer, second == nullptr ? 0 : outer, rows, columns, first, second, stream);
}

// out[o, c] = the sum over r of partial[o, r, c].
template <class A, class Out>
cudaError_t SumRows(const A* partial, int64_t outer, int64_t rows, int64_t columns, Out* out, cudaStream_t stream) {
  return SumRows(partial, outer, rows, columns, out, static_cast<Out*>(nullptr), stream);
}

}  // namespace jaxdnn
