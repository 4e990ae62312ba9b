// Rows in registers, as they lie in memory: each pass over a row widens what it needs.
//
// A row is vectors of L elements, dealt out to a group of threads: a warp, a block, a cluster of blocks, or, where that
// cannot hold it, the blocks of two launches, of which the first leaves statistics in the workspace and the second
// reads the row again. Rows may start anywhere: what comes before the first whole vector of the array, and after the
// last, goes one element to a lane.
#pragma once

#include <algorithm>
#include <cstring>

#include "cuda/common/cluster.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/softmax/rows.cuh"

namespace jaxdnn::softmax {

// Of a block, at most. So many threads have 64 registers each if two blocks are to share a multiprocessor.
constexpr int kHeldThreads = 512;
constexpr int kMaxCluster = 16;
// Longer rows are counted in 64 bits, elsewhere.
constexpr int64_t kMaxHeldRow = int64_t{1} << 30;

struct Device {
  int multiprocessors, max_cluster;
  int64_t shared_bytes;  // of a block
};

inline cudaError_t CurrentDevice(Device* d) {
  int device = 0, major = 0, shared = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  d->max_cluster = major < 9 ? 1 : major < 12 ? kMaxCluster : 8;
  d->shared_bytes = shared;
  return e;
}

struct HeldRows {
  int64_t rows;
  int n;
  int width;   // threads of a group in one block: a warp, or the whole block
  int shares;  // blocks of a group; a cluster if the phase is kWhole
  Phase phase;
  uint32_t zero;

  __host__ __device__ bool IsCluster() const { return shares > 1 && phase == Phase::kWhole; }
};

// Statistics that the warps of a group hand to each other.
template <class Op>
struct Exchange {
  typename Op::Stats slots[kHeldThreads / 32 * kMaxCluster];
  Mailbox mailbox;
};

// The statistics of `count` that lie in memory, in every lane of the warp.
template <class Op>
__device__ typename Op::Stats CombineSlots(const typename Op::Stats* slots, int count) {
  const int lane = threadIdx.x % 32;
  typename Op::Stats stats[1] = {lane < count ? slots[lane] : Op::Nothing()};
  for (int i = lane + 32; i < count; i += 32) stats[0] = Op::Merge(stats[0], slots[i]);
  Op::Combine(stats, ShuffleReduce{5});
  return stats[0];
}

// A block of a cluster begins with this, and waits for the cluster before it combines.
template <class Op>
__device__ void OpenExchange(Exchange<Op>& exchange, int cluster) {
  if (threadIdx.x == 0) exchange.mailbox.Expect(blockDim.x / 32 * cluster * sizeof(typename Op::Stats));
  ClusterArriveRelaxed();
}

// The statistics of a block or a cluster, from those of its threads. Once in a kernel.
template <class Op>
__device__ typename Op::Stats CombineBlocks(typename Op::Stats own, Exchange<Op>& exchange, int cluster, int rank) {
  using Stats = typename Op::Stats;
  Stats stats[1] = {own};
  Op::Combine(stats, ShuffleReduce{5});
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  Stats* slot = &exchange.slots[rank * warps + threadIdx.x / 32];
  if (cluster == 1) {
    if (lane == 0) *slot = stats[0];
    __syncthreads();
  } else {
    if (lane < cluster)
      for (int i = 0; i < static_cast<int>(sizeof(Stats) / sizeof(float)); ++i)
        exchange.mailbox.Send(reinterpret_cast<float*>(slot) + i, lane, reinterpret_cast<const float*>(stats)[i]);
    exchange.mailbox.Wait();
  }
  return CombineSlots<Op>(exchange.slots, warps * cluster);
}

// The same vector, though the compiler does not know: it would keep what it has derived from it, and widened a row does
// not fit into registers. `zero` is one that it does not know either.
template <class P>
__device__ P Again(P packed, uint32_t zero) {
  if constexpr (std::is_same_v<decltype(packed.v[0] + 0), uint32_t>)
#pragma unroll
    for (uint32_t& word : packed.v) word ^= zero;
  return packed;
}

// The maximum of vectors that has no NaN; of 16-bit floats a pair at a time.
template <class T, int N, int V>
__device__ Accumulator<T> MaxOf(const Packed<T, N> (&x)[V][1]) {
  using A = Accumulator<T>;
  if constexpr (kIsPairs<T, N>) {
    using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
    Pair m[N / 2];
    memcpy(m, &x[0][0], sizeof(m));
#pragma unroll
    for (int s = 1; s < V; ++s) {
      Pair each[N / 2];
      memcpy(each, &x[s][0], sizeof(each));
#pragma unroll
      for (int i = 0; i < N / 2; ++i) m[i] = __hmax2(m[i], each[i]);
    }
#pragma unroll
    for (int width = N / 4; width > 0; width /= 2)
#pragma unroll
      for (int i = 0; i < width; ++i) m[i] = __hmax2(m[i], m[i + width]);
    return Max{}(static_cast<A>(m[0].x), static_cast<A>(m[0].y));
  } else {
    A m[1] = {kLowest<A>};
#pragma unroll
    for (int s = 0; s < V; ++s) Fold(m, x[s][0].v, Max{});
    return m[0];
  }
}

// N elements of Fill.
template <class Op, class T, int N>
__device__ Packed<T, N> Filled(int input) {
  typename Op::A fill[N];
#pragma unroll
  for (auto& each : fill) each = Op::Fill(input);
  return Narrow<T, N>(fill);
}

template <class Op, class T, int V, bool kEdges>
__global__ void __launch_bounds__(kHeldThreads, 2)
    HeldRowsKernel(const __grid_constant__ HeldRows r, Op op, const T* in0, const T* in1, T* out,
                   typename Op::Stats* workspace) {
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  constexpr int L = kVecLength<T>, kInputs = Op::kInputs;
  using P = Packed<T, L>;
  // Whether what takes an element's place has its type.
  constexpr bool kInPlace = sizeof(T) == sizeof(A);
  __shared__ Exchange<Op> exchange;
  const bool is_warp = r.width == 32;
  const int lane = is_warp ? threadIdx.x % 32 : threadIdx.x;
  // What was read last by the first launch, the second finds in the cache.
  const unsigned block = r.phase == Phase::kApply ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int rank = r.shares == 1 ? 0 : static_cast<int>(block % r.shares);
  const int64_t row =
      is_warp ? int64_t{block} * (blockDim.x / 32) + threadIdx.x / 32 : block / static_cast<unsigned>(r.shares);
  if (r.IsCluster()) OpenExchange(exchange, r.shares);
  if (row >= r.rows) return;

  const int64_t start = row * r.n;
  const int head = kEdges ? static_cast<int>(-start & (L - 1)) : 0;
  const int vectors = (r.n - head) / L;
  const int first = rank * r.width + lane, step = r.width * r.shares;
  const bool has_edge = kEdges && rank == 0 && (is_warp || threadIdx.x < 32);
  const int edge_at = lane < head ? lane : vectors * L + lane;
  in0 += start + head, in1 += start + head, out += start + head;

  P x[V][kInputs];
  A edge[kInputs][1];
#pragma unroll
  for (int s = 0; s < V; ++s)
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      x[s][k] = Filled<Op, T, L>(k);
      const int at = first + s * step;
      if (at < vectors) x[s][k] = reinterpret_cast<const P*>(k == 0 ? in0 : in1)[at];
    }
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    edge[k][0] = Op::Fill(k);
    if (has_edge && edge_at < r.n) edge[k][0] = static_cast<A>((k == 0 ? in0 : in1)[edge_at - head]);
  }

  Stats own[1], stats[1];
  if (r.phase == Phase::kApply) {
    own[0] = stats[0] = CombineSlots<Op>(workspace + row * r.shares, r.shares);
  } else {
    if constexpr (Op::kHasMaximum) {
      own[0] = {Max{}(MaxOf<T, L>(x), kLowest<A>), A(0)};
      if (has_edge) own[0].m = Max{}(own[0].m, edge[0][0]);
    } else {
      own[0] = Op::Nothing();
    }
    Op::Exponentiate(own, [&](auto&& visit) {
#pragma unroll
      for (int s = 0; s < V; ++s) {
        // With two inputs the test takes longer than what it saves.
        if (kInputs == 1 && s > 0 && (first & ~31) + s * step >= vectors) break;
        A v[kInputs][L];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) Widen<T, L>(x[s][k], v[k]);
        visit(v);
        if constexpr (kInPlace)
#pragma unroll
          for (int k = 0; k < kInputs; ++k) x[s][k] = Narrow<T, L>(v[k]);
      }
      if (has_edge) {
        A v[kInputs][1];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) v[k][0] = edge[k][0];
        visit(v);
        if constexpr (kInPlace)
#pragma unroll
          for (int k = 0; k < kInputs; ++k) edge[k][0] = v[k][0];
      }
    });
    if (r.IsCluster()) ClusterWait();
    stats[0] = own[0];
    if (is_warp)
      Op::Combine(stats, ShuffleReduce{5});
    else
      stats[0] = CombineBlocks(own[0], exchange, r.IsCluster() ? r.shares : 1, r.IsCluster() ? rank : 0);
    if (r.phase == Phase::kReduce) {
      if (threadIdx.x == 0) workspace[row * r.shares + rank] = stats[0];
      return;
    }
  }

  // Exponentials that were not kept are computed again, relative to the row.
  const bool again = !kInPlace || r.phase == Phase::kApply;
  const typename Op::Final final = op.Finish(again ? stats[0] : own[0], stats[0]);
  const auto finish = [&](auto& v, auto& results) {
    if (again) {
      Stats unused[1] = {stats[0]};
      Op::Exponentiate(unused, [&](auto&& visit) { visit(v); });
    }
    constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(results)>>;
#pragma unroll
    for (int i = 0; i < kCount; ++i) results[i] = Op::Result(final, v, i);
  };
#pragma unroll
  for (int s = 0; s < V; ++s) {
    const int at = first + s * step;
    if (at >= vectors) continue;
    A v[kInputs][L], results[L];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) Widen<T, L>(Again(x[s][k], r.zero), v[k]);
    finish(v, results);
    StorePacked<T, L>(out + at * L, Narrow<T, L>(results));
  }
  if (has_edge && edge_at < r.n) {
    A results[1];
    finish(edge, results);
    out[edge_at - head] = static_cast<T>(results[0]);
  }
}

// Vectors that a thread holds: 32 registers of elements.
template <class Op>
constexpr int kHeld = 8 / Op::kInputs;

// Of longer rows, a block's threads, so that several blocks on a multiprocessor hide each other's waits.
constexpr int kShareThreads = 256;

// How rows of `vectors` vectors are dealt out, `steps` to a thread.
inline HeldRows PlanHeldRows(int64_t rows, int64_t n, int64_t vectors, const Device& device, int steps) {
  HeldRows r = {rows, static_cast<int>(n), 32, 1, Phase::kWhole, 0};
  const auto holds = [&](int threads) { return int64_t{r.shares} * threads * steps >= vectors; };
  while (r.shares < device.max_cluster && !holds(kShareThreads)) r.shares *= 2;
  if (!holds(kHeldThreads)) {
    r.phase = Phase::kReduce;
    r.shares = static_cast<int>(CeilDiv(vectors, kShareThreads * steps));
  }
  r.width = 32 * static_cast<int>(CeilDiv(vectors, int64_t{32} * steps * r.shares));
  return r;
}

template <class T, int V, bool kEdges, class Op>
cudaError_t RunHeldRows(const Op& op, HeldRows r, void* workspace, const T* in0, const T* in1, T* out,
                        cudaStream_t stream) {
  constexpr int kShared = 128;  // threads of a block of several rows
  const Grid grid = r.width == 32 ? Grid{CeilDiv(r.rows, kShared / 32), kShared}
                                  : Grid{r.rows * r.shares, r.width, 0, r.IsCluster() ? r.shares : 1};
  const auto launch = [&] {
    return LaunchKernel(HeldRowsKernel<Op, T, V, kEdges>, grid, stream, r, op, in0, in1, out,
                        static_cast<typename Op::Stats*>(workspace));
  };
  const cudaError_t e = launch();
  if (e != cudaSuccess || r.phase == Phase::kWhole) return e;
  r.phase = Phase::kApply;
  return launch();
}

}  // namespace jaxdnn::softmax
