// Slabs that a few threads hold in registers, of small arrays with channels last, on Hopper: a pass over them takes
// about as long as its latencies, those of a launch, of memory, of the sums over a block's threads and of those over
// blocks.
//
// A slab is one group of one example, whose channels are whole vectors, or which are all. Blocks that share one are a
// cluster, and send their sums to each other's shared memory.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>

#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/ring_plan.cuh"

namespace jaxdnn::group_norm {

constexpr int kSmallThreads = 512, kSmallTeam = 8;
// Vectors of a thread.
constexpr int kHeld = 4;
// Channels of a slab, for each of which the block keeps the parameters.
constexpr int kMostParameters = 1024;
// Above so many bytes of an array, of one and of two that are read, memory and not latency decides.
constexpr int64_t kMostSmallBytes[] = {4 << 20, 2 << 20};

struct SmallTiling {
  int64_t example;        // vectors of an example
  int64_t units;          // slabs
  int rows, row;          // of a slab, and vectors from one to the next
  int columns, parallel;  // vectors of a slab's row, and rows that a block's threads take side by side
  int block_rows, blocks, threads;
  int period;  // channels of a slab: an element of its row is of channel e % period
  int n, groups, channels;

  Grid Blocks(size_t shared_bytes) const { return {units * blocks, threads, shared_bytes, blocks}; }
};

inline std::optional<SmallTiling> PlanSmall(const Problem& given, int arrays) {
  const Problem p = Canonical(given);
  if (p.Empty() || p.dtype == DType::kF64 || !p.channels_last) return std::nullopt;
  const int64_t vector = p.dtype == DType::kF32 ? 4 : 8, size = p.batch * p.n * p.spatial * p.channels;
  const int64_t group = p.channels / p.groups, common = std::gcd(group, vector);
  if (size / vector * 16 > kMostSmallBytes[arrays - 1] || p.spatial * p.channels % vector != 0 ||
      group > kMostParameters || (p.groups > 1 && common != vector))
    return std::nullopt;
  SmallTiling t = {};
  t.example = p.spatial * p.channels / vector;
  t.units = p.batch * p.n * p.groups;
  t.columns = static_cast<int>(group / common);
  t.row = static_cast<int>(p.channels / common);
  t.rows = static_cast<int>(p.spatial * common / vector);
  t.period = static_cast<int>(group);
  t.n = static_cast<int>(p.n), t.groups = static_cast<int>(p.groups), t.channels = static_cast<int>(p.channels);
  if (t.columns > kSmallThreads) return std::nullopt;
  t.blocks = static_cast<int>(CeilDiv(t.rows, kSmallThreads / t.columns * kHeld));
  if (t.blocks > kSmallTeam) return std::nullopt;
  t.block_rows = static_cast<int>(CeilDiv(t.rows, t.blocks));
  t.parallel = std::min(t.block_rows, kSmallThreads / t.columns);
  t.threads = static_cast<int>(CeilDiv(t.parallel * t.columns, 32) * 32);
  return t;
}

// A thread's place in its block's slab.
struct SmallPlace {
  int unit, rank, example;
  int across;      // its column
  int rows;        // that it has, from `base` on
  int parameters;  // those of the slab's first channel
  int64_t slab, base, step;

  __device__ explicit SmallPlace(const SmallTiling& t) {
    unit = blockIdx.x / t.blocks, rank = blockIdx.x - unit * t.blocks;
    example = unit / t.groups;
    const int group = unit - example * t.groups, down = threadIdx.x / t.columns;
    across = threadIdx.x - down * t.columns;
    const int first = rank * t.block_rows + down, end = min(t.rows, (rank + 1) * t.block_rows);
    rows = down < t.parallel && first < end ? (end - first - 1) / t.parallel + 1 : 0;
    parameters = example / t.n * t.channels + group * t.period;
    slab = example * t.example + group * t.columns;
    base = slab + int64_t{first} * t.row + across;
    step = int64_t{t.parallel} * t.row;
  }

  // What the thread has of an array; all loads are under way at once.
  template <class T, int V>
  __device__ void Load(const Vec<T, V>* from, Packed<T, V> (&held)[kHeld]) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      held[k] = LoadConstant(reinterpret_cast<const Packed<T, V>*>(from + (k < rows ? base + k * step : slab)));
  }
  // Calls f(j, channel of the slab) for the elements of a vector.
  template <int V, class F>
  __device__ void ForEachChannel(const SmallTiling& t, F&& f) const {
    int channel = across * V % t.period;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      f(j, channel);
      channel = channel + 1 == t.period ? 0 : channel + 1;
    }
  }
};

// The sum over all threads of the slab's blocks, in each of them, in a fixed order. The cluster's blocks have arrived
// once before, if there are several. What was written to shared memory before is visible after.
template <class A>
__device__ Pair<A> SumSlab(int blocks, int rank, const Pair<A>& own) {
  __shared__ Pair<A> of_warps[kSmallThreads / 32], of_blocks[kSmallTeam];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  Pair<A> sum[1] = {own}, *none = nullptr;
  Reduce(sum, AddPairs{}, {0, 5}, none);
  if (lane == 0) of_warps[threadIdx.x / 32] = sum[0];
  __syncthreads();
  sum[0] = lane < warps ? of_warps[lane] : Pair<A>{};
  Reduce(sum, AddPairs{}, {0, 5}, none);
  if (blocks == 1) return sum[0];
  ClusterWait();  // The others run.
  if (threadIdx.x < blocks) {
    StoreRemote(&of_blocks[rank].first, threadIdx.x, sum[0].first);
    StoreRemote(&of_blocks[rank].second, threadIdx.x, sum[0].second);
  }
  ClusterArrive();
  ClusterWait();
  const int of = lane % kSmallTeam;
  sum[0] = of < blocks ? of_blocks[of] : Pair<A>{};
  Reduce(sum, AddPairs{}, {0, 3}, none);
  return sum[0];
}

}  // namespace jaxdnn::group_norm
