#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/common/column_sum.cuh"

namespace jaxdnn {
namespace {

constexpr int kColumnSumThreads = 256;  // of a block, at most

// A block owns vectors of L columns of one outer index, `width` of them side by side; its other threads take other
// rows. Both numbers are powers of two. Outer indices from `split` on go to `second`. The time is that of a wait for
// memory, rather than of the bytes.
template <class A, class Out, int L>
__global__ void __launch_bounds__(kColumnSumThreads)
    SumRowsKernel(const A* __restrict__ partial, int rows, int64_t columns, int tiles, int width, int64_t split,
                  Out* __restrict__ first, Out* __restrict__ second) {
  using X = Vec<A, L>;
  __shared__ alignas(16) A scratch[kColumnSumThreads * L];
  const int threads = static_cast<int>(blockDim.x), groups = threads / width;
  const int across = threadIdx.x & (width - 1), down = threadIdx.x / width;
  const int outer = blockIdx.x / tiles, tile = blockIdx.x - outer * tiles;
  const int64_t vectors = columns / L, k = int64_t{tile} * width + across;
  A sums[L] = {};
  if (k < vectors) {
    const X* const in = reinterpret_cast<const X*>(partial) + int64_t{outer} * rows * vectors + k;
#pragma unroll 4
    for (int row = down; row < rows; row += groups) {
      const X v = in[row * vectors];
#pragma unroll
      for (int i = 0; i < L; ++i) sums[i] += v.v[i];
    }
  }
  // Over the lanes of a warp that have the same columns, and then over the warps, or groups, that do.
  for (int mask = width; mask < 32; mask *= 2)
#pragma unroll
    for (A& each : sums) each += ShuffleXor(each, mask);
  const int sources = min(groups, threads / 32), source = width < 32 ? threadIdx.x / 32 : down, held = width * L;
  if (width >= 32 || threadIdx.x % 32 < width)
#pragma unroll
    for (int i = 0; i < L; ++i) scratch[source * held + across * L + i] = sums[i];
  __syncthreads();
  Out* const out = outer < split ? first + outer * columns : second + (outer - split) * columns;
  for (int c = threadIdx.x; c < held; c += threads) {
    const int64_t column = int64_t{tile} * held + c;
    if (column >= columns) return;
    A sum = 0;
#pragma unroll 8
    for (int i = 0; i < sources; ++i) sum += scratch[i * held + c];
    out[column] = static_cast<Out>(sum);
  }
}

template <int L, class A, class Out>
cudaError_t SumRowsInVectors(const A* partial, int64_t outer, int64_t split, int64_t rows, int64_t columns, Out* first,
                             Out* second, cudaStream_t stream) {
  // Four rows to a thread, which reads them at once; then blocks for half of a big device, if there are the rows, and
  // no more than run at once.
  constexpr int64_t kThreads = kColumnSumThreads, kRows = 4, kLeast = 8, kFewBlocks = 60, kManyBlocks = 640;
  if (rows > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t vectors = columns / L;
  int64_t width = kThreads, threads = kThreads;
  const auto blocks = [&] { return outer * CeilDiv(vectors, width); };
  while (width > kLeast && width * rows > kThreads * kRows) width /= 2;
  while (width / 2 >= std::max<int64_t>(1, vectors)) width /= 2;
  while (width > 1 && 2 * kThreads / width <= rows && blocks() < kFewBlocks) width /= 2;
  while (width < kThreads && width < vectors && blocks() > kManyBlocks) width *= 2;
  while (threads > std::max<int64_t>(32, width) && threads / width >= 2 * rows) threads /= 2;
  const int64_t tiles = CeilDiv(vectors, width);
  return LaunchKernel(SumRowsKernel<A, Out, L>, blocks(), static_cast<int>(threads), stream, partial,
                      static_cast<int>(rows), columns, static_cast<int>(tiles), static_cast<int>(width), split, first,
                      second);
}

}  // namespace

template <class A, class Out>
cudaError_t SumRowsOfTwo(const A* partial, int64_t outer, int64_t others, int64_t rows, int64_t columns, Out* first,
                         Out* second, cudaStream_t stream) {
  constexpr int L = kVecLength<A>;
  const auto run =
      columns % L == 0 && IsVectorAligned(partial) ? SumRowsInVectors<L, A, Out> : SumRowsInVectors<1, A, Out>;
  return run(partial, outer + others, outer, rows, columns, first, second, stream);
}

#define INSTANTIATE(A, OUT) \
  template cudaError_t SumRowsOfTwo(const A*, int64_t, int64_t, int64_t, int64_t, OUT*, OUT*, cudaStream_t);
INSTANTIATE(float, float)
INSTANTIATE(float, __half)
INSTANTIATE(float, __nv_bfloat16)
INSTANTIATE(double, double)
#undef INSTANTIATE

}  // namespace jaxdnn
