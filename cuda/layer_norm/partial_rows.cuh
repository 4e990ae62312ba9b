// The two stages of dscale and dbias: each of a problem's `parts` blocks leaves a row, and a second kernel adds them
// up.
#pragma once

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/layer_norm/layer_norm.h"

namespace jaxdnn::layer_norm {

constexpr int kSumThreads = 512;

// The sums over tables [parts, n] of columns, of vectors of L side by side `width` to a block, a power of two; its
// other threads take other rows. Those of tables from `split` on go to `second`. Few rows to a thread, and all blocks
// at once: the time is that of a wait for memory, not of the bytes.
template <class A, int L>
__global__ void __launch_bounds__(kSumThreads)
    SumPartsKernel(const A* __restrict__ partial, int parts, int64_t n, int width, int tiles, int split,
                   A* __restrict__ first, A* __restrict__ second) {
  using X = Vec<A, L>;
  __shared__ alignas(16) A scratch[kSumThreads * L];
  const int across = threadIdx.x & (width - 1), down = threadIdx.x / width, groups = kSumThreads / width;
  const int table = blockIdx.x / tiles, tile = blockIdx.x - table * tiles;
  const int64_t vectors = n / L, k = int64_t{tile} * width + across;
  A sums[L] = {};
  if (k < vectors) {
    const X* const in = reinterpret_cast<const X*>(partial) + int64_t{table} * parts * vectors + k;
#pragma unroll 4
    for (int row = down; row < parts; row += groups) {
      const X v = in[row * vectors];
#pragma unroll
      for (int i = 0; i < L; ++i) sums[i] += v.v[i];
    }
  }
  // Over the lanes of a warp that have the same columns, and then over the warps, or groups, that do.
  for (int mask = width; mask < 32; mask *= 2)
#pragma unroll
    for (A& each : sums) each += ShuffleXor(each, mask);
  const int sources = min(groups, kSumThreads / 32), source = width < 32 ? threadIdx.x / 32 : down, columns = width * L;
  if (width >= 32 || threadIdx.x % 32 < width)
#pragma unroll
    for (int i = 0; i < L; ++i) scratch[source * columns + across * L + i] = sums[i];
  __syncthreads();
  A* const out = table < split ? first + table * n : second + (table - split) * n;
  for (int c = threadIdx.x; c < columns; c += kSumThreads) {
    const int64_t column = int64_t{tile} * columns + c;
    if (column >= n) return;
    A sum = 0;
#pragma unroll 8
    for (int i = 0; i < sources; ++i) sum += scratch[i * columns + c];
    out[column] = sum;
  }
}

template <class A, int L>
cudaError_t SumParts(const A* partial, const Shape& shape, int64_t parts, int64_t tables, A* first, A* second,
                     cudaStream_t stream) {
  // Blocks that are resident at once, and threads side by side that read 64 bytes at least.
  constexpr int64_t kBlocks = 512, kLeast = 64 / (L * sizeof(A));
  const int64_t vectors = shape.n / L;
  int64_t width = kLeast;
  while (width < kSumThreads && (kSumThreads / width > parts || tables * CeilDiv(vectors, width) > kBlocks)) width *= 2;
  const int64_t tiles = CeilDiv(vectors, width);
  return LaunchKernel(SumPartsKernel<A, L>, tables * tiles, kSumThreads, stream, partial, static_cast<int>(parts),
                      shape.n, static_cast<int>(width), static_cast<int>(tiles), static_cast<int>(shape.problems),
                      first, second);
}

// Calls first(b), with dscale and dbias pointing to [problems, parts, n], and sums what that leaves. One part needs no
// second stage.
template <class A, class F>
cudaError_t WithPartialRows(const Backward& b, const Shape& shape, int64_t parts, void* workspace, cudaStream_t stream,
                            F&& first) {
  if (parts == 1 || (b.dscale == nullptr && b.dbias == nullptr)) return first(b);
  // [dscale or dbias, problem, part, n], or one of the two alone.
  A* const partial = static_cast<A*>(workspace);
  Backward to_partial = b;
  if (b.dscale != nullptr) to_partial.dscale = partial;
  if (b.dbias != nullptr) to_partial.dbias = b.dscale == nullptr ? partial : partial + shape.problems * parts * shape.n;
  if (const cudaError_t e = first(to_partial); e != cudaSuccess) return e;
  A *const dscale = static_cast<A*>(b.dscale), *const dbias = static_cast<A*>(b.dbias);
  A *const first_out = dscale == nullptr ? dbias : dscale, *const second = dscale == nullptr ? nullptr : dbias;
  const int64_t tables = shape.problems * (second == nullptr ? 1 : 2);
  const auto sum = [&](auto length) {
    return SumParts<A, decltype(length)::value>(partial, shape, parts, tables, first_out, second, stream);
  };
  constexpr int L = kVecLength<A>;
  return shape.n % L == 0 && IsVectorAligned(partial) ? sum(std::integral_constant<int, L>{})
                                                      : sum(std::integral_constant<int, 1>{});
}

}  // namespace jaxdnn::layer_norm
