// Rows in registers, as they lie in memory: each pass over a row widens what it needs.
//
// A row is vectors of L elements, dealt out to a group of threads: a warp, a block, or a cluster of blocks (longer rows
// are read twice: shares.cuh). Rows may start anywhere: what comes before the first whole vector of the array, and
// after the last, goes one element to a lane.
#pragma once

#include <algorithm>
#include <cstring>

#include "cuda/common/cluster.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/device_code.h"
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
  int device = 0, shared = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = QueryMaxCluster(&d->max_cluster);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  d->shared_bytes = shared;
  return e;
}

struct HeldRows {
  int64_t rows;
  int n;
  int width;   // threads of a group in one block: a warp, or the whole block
  int shares;  // blocks of a group, which are a cluster
  uint32_t zero;
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
  if (threadIdx.x == 0) {
    exchange.mailbox.Open();
    exchange.mailbox.Expect(blockDim.x / 32 * cluster * sizeof(typename Op::Stats));
  }
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
    using Pair = TwoOf<T>;
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

// A thread's part of a row: V vectors, and maybe one element before or after all of them.
template <class Op, class T, int V>
struct HeldRow {
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  static constexpr int L = kVecLength<T>, kInputs = Op::kInputs;
  using P = Packed<T, L>;
  // Whether what takes an element's place has its type.
  static constexpr bool kInPlace = sizeof(T) == sizeof(A);
  static constexpr int kNone = INT32_MAX;

  T* out;
  int vectors, first, step;
  int edge_at;  // kNone: the thread has none
  P x[V][kInputs];
  A edge[kInputs][1];

  // Of the row of n elements at `start` the vectors first, first + step, ...; and its edges, if `lane` is one of a
  // warp. What lies in no more than the first `inputs` arrays is loaded.
  __device__ HeldRow(const T* in0, const T* in1, T* to, int64_t start, int n, int first, int step, int lane,
                     int inputs = kInputs)
      : first(first), step(step) {
    const int head = static_cast<int>(-start & (L - 1));
    vectors = (n - head) / L;
    in0 += start + head, in1 += start + head, out = to + start + head;
    const int edge = lane < head ? lane : vectors * L + lane;
    edge_at = lane < 32 && edge < n ? edge - head : kNone;
#pragma unroll
    for (int s = 0; s < V; ++s)
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        x[s][k] = Filled<Op, T, L>(k);
        const int at = first + s * step;
        if (at < vectors && k < inputs) x[s][k] = reinterpret_cast<const P*>(k == 0 ? in0 : in1)[at];
      }
    // Nothing is done with these before all loads are under way.
    T loaded[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      loaded[k] = static_cast<T>(Op::Fill(k));
      if (edge_at != kNone && k < inputs) loaded[k] = (k == 0 ? in0 : in1)[edge_at];
    }
#pragma unroll
    for (int k = 0; k < kInputs; ++k) this->edge[k][0] = static_cast<A>(loaded[k]);
  }

  // The thread's statistics; exponentials take the elements' place if they have their type.
  __device__ Stats Local(const Op& op) {
    Stats own[1] = {Op::Nothing()};
    if constexpr (Op::kHasMaximum) {
      own[0] = {Max{}(MaxOf<T, L>(x), kLowest<A>), A(0)};
      if (edge_at != kNone) own[0].m = Max{}(own[0].m, edge[0][0]);
    }
    const auto each = [&](auto&& visit) {
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
      if (edge_at != kNone) {
        A v[kInputs][1];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) v[k][0] = edge[k][0];
        visit(v);
        if constexpr (kInPlace)
#pragma unroll
          for (int k = 0; k < kInputs; ++k) edge[k][0] = v[k][0];
      }
    };
    op.Reducing([&](const auto& known) { known.Exponentiate(own, each); });
    return own[0];
  }

  // Writes the results of a row whose statistics are `stats`. With kAgain nothing is left of Local: exponentials are
  // computed again, relative to the row. `zero` as in Again.
  template <bool kAgain>
  __device__ void Store(const Op& op, Stats own, Stats stats, uint32_t zero) {
    op.Writing([&](const auto& known) { StoreKnown<kAgain>(known, own, stats, zero); });
  }

 private:
  template <bool kAgain, class Known>
  __device__ void StoreKnown(const Known& op, Stats own, Stats stats, uint32_t zero) {
    const auto final = op.Finish(kAgain ? stats : own, stats);
    const auto finish = [&](auto& v, auto& results) {
      if constexpr (kAgain) {
        const Stats rows[1] = {stats};
        op.Change(rows, v);
      }
      constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(results)>>;
#pragma unroll
      for (int i = 0; i < kCount; ++i) results[i] = op.Result(final, v, i);
    };
    if (edge_at != kNone) {
      A results[1];
      finish(edge, results);
      out[edge_at] = static_cast<T>(results[0]);
    }
#pragma unroll
    for (int s = 0; s < V; ++s) {
      const int at = first + s * step;
      if (at >= vectors) break;
      A v[kInputs][L], results[L];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) Widen<T, L>(Again(x[s][k], zero), v[k]);
      finish(v, results);
      StorePacked<T, L>(out + at * L, Narrow<T, L>(results));
    }
  }
};

template <class Op, class T, int V>
__global__ void __launch_bounds__(kHeldThreads, 2)
    HeldRowsKernel(const __grid_constant__ HeldRows r, Op op, const T* in0, const T* in1, T* out) {
  using Row = HeldRow<Op, T, V>;
  using Stats = typename Op::Stats;
  __shared__ Exchange<Op> exchange;
  const bool is_warp = r.width == 32;
  const int lane = is_warp ? threadIdx.x % 32 : threadIdx.x;
  const int rank = r.shares == 1 ? 0 : static_cast<int>(blockIdx.x % r.shares);
  const int64_t at = is_warp ? int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32
                             : blockIdx.x / static_cast<unsigned>(r.shares);
  if (r.shares > 1) OpenExchange(exchange, r.shares);
  if (at >= r.rows) return;

  Row row(in0, in1, out, at * r.n, r.n, rank * r.width + lane, r.width * r.shares, rank * r.width + lane);
  const Stats own = row.Local(op);
  Stats stats[1] = {own};
  if (r.shares > 1) ClusterWait();
  if (is_warp)
    Op::Combine(stats, ShuffleReduce{5});
  else
    stats[0] = CombineBlocks(own, exchange, r.shares, rank);
  row.template Store<!Row::kInPlace>(op, own, stats[0], r.zero);
}

// Vectors that a thread holds: 32 registers of elements.
template <class Op>
constexpr int kHeld = 8 / Op::kInputs;

// Of longer rows, a block's threads, so that several blocks on a multiprocessor hide each other's waits.
constexpr int kShareThreads = 256;

// How rows of `vectors` vectors are dealt out, `steps` to a thread; no shares: no cluster holds them.
inline HeldRows PlanHeldRows(int64_t rows, int64_t n, int64_t vectors, const Device& device, int steps) {
  HeldRows r = {rows, static_cast<int>(n), 32, 1, 0};
  const auto holds = [&](int threads) { return int64_t{r.shares} * threads * steps >= vectors; };
  while (r.shares < device.max_cluster && !holds(kShareThreads)) r.shares *= 2;
  if (!holds(kHeldThreads)) r.shares = 0;
  if (r.shares > 0) r.width = 32 * static_cast<int>(CeilDiv(vectors, int64_t{32} * steps * r.shares));
  return r;
}

template <class T, int V, class Op>
cudaError_t RunHeldRows(const Op& op, const HeldRows& r, const T* in0, const T* in1, T* out, cudaStream_t stream) {
  constexpr int kShared = 128;  // threads of a block of several rows
  const Grid grid =
      r.width == 32 ? Grid{CeilDiv(r.rows, kShared / 32), kShared} : Grid{r.rows * r.shares, r.width, 0, r.shares};
  return LaunchKernel(HeldRowsKernel<Op, T, V>, grid, stream, r, op, in0, in1, out);
}

}  // namespace jaxdnn::softmax
