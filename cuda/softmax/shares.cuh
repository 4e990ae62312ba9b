// Rows, or tiles of columns, that no cluster holds. Blocks of a first launch leave the statistics of their shares in
// the workspace; those of a second read their shares again, and write.
#pragma once

#include "cuda/softmax/columns.cuh"
#include "cuda/softmax/tile.cuh"

namespace jaxdnn::softmax {

// The block of a launch of these kernels. What was read last by the first launch, the second finds in the cache.
template <bool kApply>
__device__ unsigned ShareBlock() {
  return kApply ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

template <class Op, class T, int V, bool kApply>
__global__ void __launch_bounds__(kShareThreads, 4)
    SharedRowsKernel(int n, int shares, uint32_t zero, Op op, const T* in0, const T* in1, T* out,
                     typename Op::Stats* workspace) {
  using Stats = typename Op::Stats;
  __shared__ Exchange<Op> exchange;
  const unsigned block = ShareBlock<kApply>(), index = block / shares, share = block - index * shares;
  HeldRow<Op, T, V> row(in0, in1, out, int64_t{index} * n, n, share * V * kShareThreads + threadIdx.x, kShareThreads,
                        share * kShareThreads + threadIdx.x, kApply ? Op::kInputs : op.Reduced());
  if constexpr (kApply) {
    const Stats* slots = workspace + int64_t{index} * shares + threadIdx.x;
    const int count = (shares - static_cast<int>(threadIdx.x) + kShareThreads - 1) / kShareThreads;
    const Stats own = Op::Total(count, [&](int j) { return slots[j * kShareThreads]; });
    const Stats total = CombineBlocks<Op>(own, exchange, 1, 0);
    row.template Store<true>(op, total, total, zero);
  } else {
    const Stats stats = CombineBlocks<Op>(row.Local(op), exchange, 1, 0);
    if (threadIdx.x == 0) workspace[block] = stats;
  }
}

// Of columns that are dealt out to clusters of any size: to blocks without a cluster. The workspace is
// [outer, shares, inner], and then [outer, inner] for all shares together.
template <class Op, class T, int V, bool kApply>
__global__ void __launch_bounds__(kColumnThreads, 4)
    SharedColumnsKernel(const __grid_constant__ HeldColumns c, Op op, const T* in0, const T* in1, T* out,
                        typename Op::Stats* workspace) {
  using Stats = typename Op::Stats;
  extern __shared__ __align__(16) unsigned char shared[];
  Stats* const slots = reinterpret_cast<Stats*>(shared);
  const unsigned block = ShareBlock<kApply>(), index = block / c.cluster, share = block - index * c.cluster;
  HeldColumn<Op, T, V> column(c, in0, in1, out, index, share, kApply ? Op::kInputs : op.Reduced());
  if constexpr (!kApply) column.Local(op, slots);
  const int64_t inner = c.shape.inner, outer = index / c.tiles, first = (index - outer * c.tiles) * c.columns;
  Stats* const saved =
      workspace + (kApply ? c.shape.outer * c.cluster + outer : outer * c.cluster + share) * inner + first;
  for (int at = threadIdx.x; at < min(int64_t{c.columns}, inner - first); at += blockDim.x) {
    if constexpr (kApply)
      slots[at] = saved[at];
    else
      saved[at] = column.Total(slots, at);
  }
  if constexpr (kApply) {
    __syncthreads();
    column.template Store<true>(op, slots, c.zero);
  }
}

// The most blocks that may share a tile of columns.
constexpr int kMaxColumnShares = 1 << 14;

// Shares of a row or column, at most: the backward map's blocks hold least, and of columns a quarter less than all
// threads may take part, and a power of 2 of blocks. One where a cluster of 8 blocks holds columns.
inline int64_t MostShares(const Shape& s, int64_t element_bytes) {
  if (s.inner == 1) return CeilDiv(s.n * element_bytes, 16 << 10);
  const int64_t bytes = s.n * std::min<int64_t>(s.inner, kTileColumns) * element_bytes;
  const int64_t held = s.inner > kTileColumns ? 192 << 10 : 96 << 10;  // wide arrays have narrower tiles too
  return bytes <= held ? 1 : CeilDiv(bytes, 6 << 10);
}

}  // namespace jaxdnn::softmax
