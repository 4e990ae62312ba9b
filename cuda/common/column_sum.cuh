// The second stage of a two-stage sum over rows: blocks leave partial rows behind, and this adds them up in a fixed
// order, so that the result has the same bits on every run, without atomics.
#pragma once

#include "cuda/common/launch.cuh"

namespace jaxdnn {

constexpr int kColumnSumWidth = 32;
constexpr int kColumnSumHeight = 16;

// A block owns kColumnSumWidth columns of one outer index; its rows of threads each take every kColumnSumHeight-th row.
// Outer indices from `split` on go to `second`.
template <class A, class Out>
__global__ void SumRowsKernel(const A* __restrict__ partial, int64_t rows, int64_t columns, int64_t tiles,
                              int64_t split, Out* __restrict__ first, Out* __restrict__ second) {
  __shared__ A scratch[kColumnSumHeight][kColumnSumWidth];
  const int64_t outer = blockIdx.x / tiles;
  const int x = threadIdx.x % kColumnSumWidth, y = threadIdx.x / kColumnSumWidth;
  const int64_t column = (blockIdx.x - outer * tiles) * kColumnSumWidth + x;
  A sum = A(0);
  if (column < columns) {
    const A* p = partial + outer * rows * columns + column;
#pragma unroll 8
    for (int64_t r = y; r < rows; r += kColumnSumHeight) sum += p[r * columns];
  }
  scratch[y][x] = sum;
  __syncthreads();
  if (y != 0 || column >= columns) return;
#pragma unroll
  for (int i = 1; i < kColumnSumHeight; ++i) sum += scratch[i][x];
  Out* const out = outer < split ? first + outer * columns : second + (outer - split) * columns;
  out[column] = static_cast<Out>(sum);
}

// first[o, c] = the sum over r of partial[0, o, r, c], and second[o, c] that of partial[1, o, r, c].
template <class A, class Out>
cudaError_t SumRows(const A* partial, int64_t outer, int64_t rows, int64_t columns, Out* first, Out* second,
                    cudaStream_t stream) {
  const int64_t tiles = CeilDiv(columns, kColumnSumWidth), both = second == nullptr ? outer : 2 * outer;
  return LaunchKernel(SumRowsKernel<A, Out>, both * tiles, kColumnSumWidth * kColumnSumHeight, stream, partial, rows,
                      columns, tiles, outer, first, second);
}

// out[o, c] = the sum over r of partial[o, r, c].
template <class A, class Out>
cudaError_t SumRows(const A* partial, int64_t outer, int64_t rows, int64_t columns, Out* out, cudaStream_t stream) {
  return SumRows(partial, outer, rows, columns, out, static_cast<Out*>(nullptr), stream);
}

}  // namespace jaxdnn
