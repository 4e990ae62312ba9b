// How a cluster of blocks shares long rows of whole vectors.
//
// Blocks are persistent, and each has a slice of every row: a thread takes the same vectors of each row, so that what
// belongs to their columns stays in its registers, while rows to come are on their way into a ring in shared memory.
// The cluster needs about as long to exchange a row's sums as to move the row: where the ring has room, a block sends
// those of the next rows before it waits for these.
#pragma once

#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {

constexpr int kLongThreads = 512, kMostStages = 6;
// Bulk copies of each warp's vectors, by stage.
using Arrivals = Mailbox[kMostStages][kLongThreads / 32];
// Sums of two steps are on their way, and another block may be one step ahead or behind.
constexpr int kExchanges = 4;

// A block's slice of its rows, of which it takes U in a step: V vectors to a thread, next to each other those of a
// warp.
template <class T, int V, int U>
struct Slice {
  static constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;

  Place p;
  int problem, part, size, begin, count;  // vectors of a slice, the first of this one, and how many it has
  int64_t row, last;                      // the first of the part's rows, and the last
  X* ring;                                // [stage][input][row][vector], of which a warp reads what it has copied
  Arrivals& arrivals;
  int stages, inputs;

  // Followed by a barrier of the block before the first Wait.
  __device__ Slice(const Shape& shape, const Spread& spread, int parts, void* shared, Arrivals& arrivals, int stages,
                   int inputs)
      : p(spread, true),
        problem(p.block / parts),
        part(p.block - problem * parts),
        size(spread.n),
        begin(p.rank * size),
        count(min(size, static_cast<int>(shape.n / L) - begin)),
        row(problem * shape.rows + shape.rows * part / parts),
        last(problem * shape.rows + shape.rows * (part + 1) / parts - 1),
        ring(static_cast<X*>(shared)),
        arrivals(arrivals),
        stages(stages),
        inputs(inputs) {
    if (threadIdx.x % 32 == 0)
      for (int stage = 0; stage < stages; ++stage) arrivals[stage][threadIdx.x / 32].Open();
  }

  // The thread's first vector, and the warp's.
  __device__ int First() const { return FirstOfWarp() + threadIdx.x % 32; }
  __device__ int FirstOfWarp() const { return threadIdx.x / 32 * 32 * V; }
  __device__ int Steps() const { return static_cast<int>((last - row + U) / U); }

  // Calls f(s, k) for the thread's vectors k of the slice.
  template <class F>
  __device__ void ForEach(F&& f) const {
#pragma unroll
    for (int s = 0; s < V; ++s)
      if (const int k = First() + 32 * s; k < count) {
        f(s, k);
        // One after the other: side by side they would need registers that the columns take.
        if constexpr (V * L > 16) asm volatile("" ::: "memory");
      }
  }
  // Calls f(u, row) for the rows of a step that exist.
  template <class F>
  __device__ void ForEachRow(int step, F&& f) const {
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (const int64_t at = row + int64_t{step} * U + u; u == 0 || at <= last) f(u, at);
  }

  __device__ X& Slot(int stage, int input, int u, int k) const {
    return ring[((stage * inputs + input) * U + u) * size + k];
  }
  __device__ int After(int stage) const { return stage + 1 == stages ? 0 : stage + 1; }

  // Begins to copy the warp's vectors of a step's rows to a stage that its lanes are done with.
  template <int N>
  __device__ void Fetch(int step, int stage, int64_t vectors, const void* const (&in)[N]) const {
    Mailbox::AfterLocal();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    const int first = FirstOfWarp(), bytes = max(0, min(32 * V, count - first)) * static_cast<int>(sizeof(X));
    Mailbox& arrival = arrivals[stage][threadIdx.x / 32];
    const int rows = static_cast<int>(min(last - row - int64_t{step} * U + 1, int64_t{U}));
    arrival.Expect(rows * inputs * bytes);
    if (bytes == 0) return;
    ForEachRow(step, [&](int u, int64_t row) {
#pragma unroll
      for (int input = 0; input < N; ++input)
        if (input < inputs)
          arrival.Copy(&Slot(stage, input, u, first), static_cast<const X*>(in[input]) + row * vectors + begin + first,
                       bytes);
    });
  }
  // Until they are there, of this round of the ring.
  __device__ void Wait(int stage, int round) const { arrivals[stage][threadIdx.x / 32].Wait(round); }
};

// How a row is spread, and how many stages the ring has: fewer than two where no cluster holds that.
struct LongPlan {
  Spread spread;
  int stages;
  size_t bytes;
};

// Rows of `vectors`, of which a thread takes `keep`. A stage has `rows` rows, of all inputs. `beside`: bytes for each
// vector that are not the ring's.
inline LongPlan PlanLong(int64_t vectors, int keep, int rows, int beside, const Device& device) {
  // Threads of a multiprocessor, if each takes 128 registers; and what a kernel has of its own of the shared memory.
  constexpr int kThreads = 512, kOwn = 5 << 10;
  LongPlan best = {};
  int index = 0, shared = 0;
  if (cudaGetDevice(&index) != cudaSuccess ||
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index) != cudaSuccess)
    return best;
  int64_t most = 0;
  // A block alone is no cluster, and cannot send itself its sums.
  for (int cluster = 2; cluster <= device.max_cluster; cluster *= 2) {
    const int64_t size = CeilDiv(vectors, int64_t{cluster}), warps = CeilDiv(size, int64_t{32} * keep);
    if (warps * 32 > kLongThreads) continue;
    const int64_t blocks = std::min<int64_t>(8, kThreads / (warps * 32));
    const int64_t room = shared / blocks - kOwn - size * beside, stage = size * rows * 16;
    const int stages = static_cast<int>(std::clamp<int64_t>(room / stage, 0, kMostStages));
    // As many vectors at once as possible, in small blocks, which do not wait for each other. For the largest clusters,
    // of which no whole number fills a group of multiprocessors, a little more does not pay.
    if (stages < 2 || (cluster <= 8 ? blocks * size < most : blocks * size * 8 <= most * 9)) continue;
    most = blocks * size;
    best.stages = stages;
    best.bytes = static_cast<size_t>(size * beside + best.stages * stage);
    best.spread = {static_cast<int>(size), static_cast<int>(warps * 32), 1, cluster, keep};
  }
  return best;
}

}  // namespace jaxdnn::layer_norm
