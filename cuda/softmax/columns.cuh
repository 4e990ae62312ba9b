// Columns in registers, as they lie in memory.
//
// A tile is all of n by some neighbouring columns: of a wide array as many as a few lanes read, of a narrow one all of
// them, so that the tile is a run of memory. Its elements, in order, are dealt out as vectors of W to the threads of a
// block, or of a cluster whose blocks share n. A block takes whole rows at a time, so that all of a thread's vectors
// are of the same W columns.
#pragma once

#include <numeric>

#include "cuda/softmax/held.cuh"

namespace jaxdnn::softmax {

constexpr int kColumnThreads = 256;
// Columns of a tile of a wide array; one of no more is narrow. Of long columns fewer.
constexpr int kTileColumns = 64;
constexpr int kLongTileColumns = 32;
// Elements of a tile of short columns, which is wider.
constexpr int kTileElements = 4096;
// 8 bytes: of wider vectors a thread would have to hold too many statistics.
template <class T>
constexpr int kColumnVector = 8 / sizeof(T);
// Vectors that a thread holds: 32 registers of elements.
template <class Op>
constexpr int kHeldColumns = 16 / Op::kInputs;

struct HeldColumns {
  Shape shape;
  int64_t tiles;  // per outer index
  int columns;    // of a tile
  int cluster;    // blocks that share a tile
  int share;      // rows of each
  int threads;    // of a block
  uint32_t zero;
};

// The maxima of columns that have no NaN.
template <class T, int W, int V>
__device__ void MaxOfColumns(const Packed<T, W> (&x)[V][1], Accumulator<T> (&m)[W]) {
  using A = Accumulator<T>;
  if constexpr (kIsPairs<T, W>) {
    using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
#pragma unroll
    for (int i = 0; i < W / 2; ++i) {
      Pair most;
      memcpy(&most, &x[0][0].v[i], sizeof(most));
#pragma unroll
      for (int s = 1; s < V; ++s) {
        Pair each;
        memcpy(&each, &x[s][0].v[i], sizeof(each));
        most = __hmax2(most, each);
      }
      m[2 * i] = Max{}(static_cast<A>(most.x), kLowest<A>);
      m[2 * i + 1] = Max{}(static_cast<A>(most.y), kLowest<A>);
    }
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      m[i] = kLowest<A>;
#pragma unroll
      for (int s = 0; s < V; ++s) m[i] = Max{}(m[i], static_cast<A>(x[s][0].v[i]));
    }
  }
}

// Stores 8 bytes in one access, of which the compiler makes two.
template <class T, class P>
__device__ void StoreVector(T* to, const P& packed) {
  uint2 words;
  memcpy(&words, &packed, sizeof(packed));
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
}

template <class Op, class T, int V>
__global__ void __launch_bounds__(kColumnThreads, 1024 / kColumnThreads)
    HeldColumnsKernel(const __grid_constant__ HeldColumns c, Op op, const T* in0, const T* in1, T* out) {
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  constexpr int W = kColumnVector<T>, kInputs = Op::kInputs;
  using P = Packed<T, W>;
  constexpr bool kInPlace = sizeof(T) == sizeof(A);
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Mailbox mailbox;
  const int columns = c.columns, taken = blockDim.x * W;  // elements that the block takes at a time
  Stats* const slots = reinterpret_cast<Stats*>(shared);  // of threads' columns
  Stats* const totals = slots + taken;                    // of the tile's
  Stats* const ranks = totals + columns;                  // the same of the cluster's blocks
  const unsigned index = blockIdx.x / static_cast<unsigned>(c.cluster), rank = blockIdx.x - index * c.cluster;
  const unsigned outer = index / static_cast<unsigned>(c.tiles), tile = index - outer * static_cast<unsigned>(c.tiles);
  if (c.cluster > 1) {
    if (threadIdx.x == 0) mailbox.Expect(c.cluster * columns * sizeof(Stats));
    ClusterArriveRelaxed();
  }

  const int place = threadIdx.x * W, row = static_cast<unsigned>(place) / columns, column = place - row * columns;
  const int64_t inner = c.shape.inner, first_row = int64_t{rank} * c.share;
  const int64_t start = (outer * c.shape.n + first_row + row) * inner + int64_t{tile} * columns + column;
  in0 += start, in1 += start, out += start;
  const int step = static_cast<unsigned>(taken) / columns * static_cast<int>(inner);
  const int rows = static_cast<int>(max(int64_t{0}, min(int64_t{c.share}, c.shape.n - first_row)));
  const int left = int64_t{tile} * columns + column < inner ? rows * columns - place : 0;
  // Of the thread's vectors, and of those of any thread.
  const int count = (left + taken - 1) / taken, steps = (rows * columns + taken - 1) / taken;

  P x[V][kInputs];
#pragma unroll
  for (int s = 0; s < V; ++s)
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      x[s][k] = Filled<Op, T, W>(k);
      if (s < count) x[s][k] = *reinterpret_cast<const P*>((k == 0 ? in0 : in1) + s * step);
    }

  Stats own[W];
#pragma unroll
  for (Stats& each : own) each = Op::Nothing();
  if constexpr (Op::kHasMaximum) {
    A m[W];
    MaxOfColumns<T, W, V>(x, m);
#pragma unroll
    for (int w = 0; w < W; ++w) own[w].m = m[w];
  }
  Op::Exponentiate(own, [&](auto&& visit) {
#pragma unroll
    for (int s = 0; s < V; ++s) {
      // With one input the test takes longer than what it saves.
      if (kInputs > 1 && s >= steps) break;
      A v[kInputs][W];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) Widen<T, W>(x[s][k], v[k]);
      visit(v);
      if constexpr (kInPlace)
#pragma unroll
        for (int k = 0; k < kInputs; ++k) x[s][k] = Narrow<T, W>(v[k]);
    }
  });

  // First as many threads a column as there are, then one.
#pragma unroll
  for (int w = 0; w < W; ++w) slots[place + w] = count > 0 ? own[w] : Op::Nothing();
  __syncthreads();
  int parts = taken / columns;
  if (const int fewer = blockDim.x / columns; fewer > 1) {
    if (const int at = threadIdx.x; at < fewer * columns)
      slots[at] =
          Op::Total((parts - at / columns + fewer - 1) / fewer, [&](int j) { return slots[at + j * fewer * columns]; });
    parts = fewer;
    __syncthreads();
  }
  if (c.cluster > 1) ClusterWait();
  for (int at = threadIdx.x; at < columns; at += blockDim.x) {
    const Stats total = Op::Total(parts, [&](int j) { return slots[at + j * columns]; });
    if (c.cluster == 1) {
      totals[at] = total;
    } else {
      for (int to = 0; to < c.cluster; ++to)
        for (int i = 0; i < static_cast<int>(sizeof(Stats) / sizeof(A)); ++i)
          mailbox.Send(reinterpret_cast<A*>(ranks + rank * columns + at) + i, to,
                       reinterpret_cast<const A*>(&total)[i]);
    }
  }
  if (c.cluster > 1) {
    mailbox.Wait();
    for (int at = threadIdx.x; at < columns; at += blockDim.x)
      totals[at] = Op::Total(c.cluster, [&](int j) { return ranks[at + j * columns]; });
  }
  __syncthreads();
  Stats stats[W];
  typename Op::Final final[W];
#pragma unroll
  for (int w = 0; w < W; ++w) {
    int at = column + w;
    while (at >= columns) at -= columns;
    stats[w] = totals[at];
    final[w] = op.Finish(kInPlace ? own[w] : stats[w], stats[w]);
  }

#pragma unroll
  for (int s = 0; s < V; ++s) {
    if (s >= count) break;
    A v[kInputs][W], results[W];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) Widen<T, W>(Again(x[s][k], c.zero), v[k]);
    if constexpr (!kInPlace) {
      Stats unused[W];
#pragma unroll
      for (int w = 0; w < W; ++w) unused[w] = stats[w];
      Op::Exponentiate(unused, [&](auto&& visit) { visit(v); });
    }
#pragma unroll
    for (int w = 0; w < W; ++w) results[w] = Op::Result(final[w], v, w);
    StoreVector(out + s * step, Narrow<T, W>(results));
  }
}

// How columns are dealt out, up to `most` vectors of W elements to a thread, in clusters of up to `max_cluster` blocks
// and, where the array is wide, tiles of `columns`; no threads: they are not.
inline HeldColumns PlanHeldColumns(const Shape& s, int W, int most, int max_cluster, int columns,
                                   const Device& device) {
  HeldColumns c = {s, 1, columns, 1, 0, 0, 0};
  const bool narrow = s.inner <= kTileColumns;
  // Small tiles would make small blocks.
  if (narrow ? s.n * s.inner % W != 0 || s.n * s.inner < 256 * W : s.inner % W != 0) return c;
  if (s.n * std::max<int64_t>(s.inner, kTileColumns) > kMaxHeldRow) return c;
  if (narrow) c.columns = static_cast<int>(s.inner);
  while (s.n < 16 && c.columns < std::min<int64_t>(s.inner, kColumnThreads * W) && s.n * c.columns < kTileElements)
    c.columns *= 2;
  c.tiles = CeilDiv(s.inner, c.columns);
  // Threads come in multiples of `unit`, which take whole rows; shares begin on a vector.
  const int common = std::gcd(c.columns, W), unit = c.columns / common, multiple = W / common;
  const int widest = kColumnThreads / unit * unit;
  // Fewer vectors to a thread where there would be few threads, if one block can have more.
  int64_t steps = most;
  const int64_t vectors = CeilDiv(s.n * c.columns, W);
  while (steps > 2 && s.outer * c.tiles * vectors / steps < int64_t{1024} * device.multiprocessors &&
         vectors <= widest * steps / 2)
    steps /= 2;
  for (; c.cluster <= max_cluster; c.cluster *= 2) {
    c.share = static_cast<int>(CeilDiv(CeilDiv(s.n, c.cluster), multiple)) * multiple;
    const int64_t threads = CeilDiv(CeilDiv(int64_t{c.share} * c.columns, W * steps), unit) * unit;
    if (threads <= widest) {
      c.threads = static_cast<int>(threads);
      break;
    }
  }
  return c;
}

template <class T, class Op>
cudaError_t RunHeldColumns(const Op& op, const HeldColumns& c, const T* in0, const T* in1, T* out,
                           cudaStream_t stream) {
  const size_t statistics = c.threads * kColumnVector<T> + c.columns * (c.cluster > 1 ? 1 + c.cluster : 1);
  const Grid grid = {c.shape.outer * c.tiles * c.cluster, c.threads, statistics * sizeof(typename Op::Stats),
                     c.cluster};
  // What is past a thread's last vector costs as much as what is not, with one input.
  constexpr int kFew = 4;
  if (Op::kInputs == 1 && int64_t{c.share} * c.columns <= int64_t{kFew} * kColumnVector<T> * c.threads)
    return LaunchKernel(HeldColumnsKernel<Op, T, kFew>, grid, stream, c, op, in0, in1, out);
  return LaunchKernel(HeldColumnsKernel<Op, T, kHeldColumns<Op>>, grid, stream, c, op, in0, in1, out);
}

}  // namespace jaxdnn::softmax
