// Columns in registers, as they lie in memory.
//
// A tile is all of n by some neighbouring columns: of a wide array as many as a few lanes read, of a narrow one all of
// them, so that the tile is a run of memory. Its elements, in order, are dealt out as vectors of W to the threads of a
// block, or of a cluster whose blocks share n (longer columns are read twice: shares.cuh). A block takes whole rows at
// a time, so that all of a thread's vectors are of the same W columns. Columns of few elements are simpler: a thread
// holds all of them.
#pragma once

#include <numeric>

#include "cuda/common/fast_div.cuh"
#include "cuda/softmax/held.cuh"

namespace jaxdnn::softmax {

constexpr int kColumnThreads = 256;
// Columns of a tile of a wide array; one of no more is narrow. Of long columns fewer.
constexpr int kTileColumns = 64;
constexpr int kLongTileColumns = 32;
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
    using Pair = TwoOf<T>;
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

// Of columns, elements that a thread holds: 32 registers.
template <class Op>
constexpr int kShortColumn = 32 / Op::kInputs;
// Bytes of neighbouring elements, at least, without which there is not enough to an access.
constexpr int kShortBytes = 64;

// Blocks of a multiprocessor, for columns of up to V elements: of float32 as many as registers allow.
template <class T, int V>
constexpr int kShortColumnBlocks = sizeof(T) == 4 ? (V <= 8 ? 8 : 4) : (V <= 8 ? 5 : 3);

// Columns of up to V elements. A thread takes a word of neighbouring ones.
template <class Op, class T, int V>
__global__ void __launch_bounds__(kColumnThreads, kShortColumnBlocks<T, V>)
    ShortColumnsKernel(Shape shape, FastDiv words, uint32_t zero, Op op, const T* in0, const T* in1, T* out) {
  using A = typename Op::A;
  constexpr int W = 4 / sizeof(T), kInputs = Op::kInputs, kBatch = 4;
  using P = Packed<T, W>;
  constexpr bool kInPlace = sizeof(T) == sizeof(A);
  const int64_t at = int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
  if (at >= shape.outer * words.divisor) return;
  int across;
  const int outer = words.Div(static_cast<int>(at), &across), n = static_cast<int>(shape.n);
  const int64_t start = outer * shape.n * shape.inner + across * W;

  P x[V][kInputs];
#pragma unroll
  for (int s = 0; s < V; ++s)
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      x[s][k] = Filled<Op, T, W>(k);
      if (s < n) x[s][k] = *reinterpret_cast<const P*>((k == 0 ? in0 : in1) + start + s * shape.inner);
    }
  typename Op::Stats stats[W];
  const auto each = [&](auto&& visit) {
#pragma unroll
    for (int s = 0; s < V; ++s) {
      if (s % kBatch == 0 && s >= n) break;
      A v[kInputs][W];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) Widen<T, W>(Again(x[s][k], zero), v[k]);
      visit(v);
      if constexpr (kInPlace)
#pragma unroll
        for (int k = 0; k < kInputs; ++k) x[s][k] = Narrow<T, W>(v[k]);
    }
  };
  op.Reducing([&](const auto& known) { known.Local(stats, each); });
  op.Writing([&](const auto& known) {
    typename std::decay_t<decltype(known)>::Final final[W];
#pragma unroll
    for (int w = 0; w < W; ++w) final[w] = known.Finish(stats[w], stats[w]);
#pragma unroll
    for (int s = 0; s < V; ++s) {
      if (s >= n) break;
      A v[kInputs][W], results[W];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) Widen<T, W>(Again(x[s][k], zero), v[k]);
      if constexpr (!kInPlace) known.Change(stats, v);
#pragma unroll
      for (int w = 0; w < W; ++w) results[w] = known.Result(final[w], v, w);
      *reinterpret_cast<P*>(out + start + s * shape.inner) = Narrow<T, W>(results);
    }
  });
}

// A thread's part of a tile: V vectors of the same W columns.
template <class Op, class T, int V>
struct HeldColumn {
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  static constexpr int W = kColumnVector<T>, kInputs = Op::kInputs;
  using P = Packed<T, W>;
  // Whether what takes an element's place has its type.
  static constexpr bool kInPlace = sizeof(T) == sizeof(A);

  const HeldColumns& c;
  T* out;
  int step;
  int count, steps;  // of the thread's vectors, and of those of any thread
  int parts;         // threads of a column whose statistics Total adds up
  P x[V][kInputs];
  Stats own[W];

  // Of a tile, the rows of the block `share`.
  __device__ HeldColumn(const HeldColumns& c, const T* in0, const T* in1, T* to, unsigned index, int share,
                        int inputs = kInputs)
      : c(c) {
    const int place = threadIdx.x * W, taken = blockDim.x * W;  // elements that the block takes at a time
    const int row = static_cast<unsigned>(place) / c.columns, column = place - row * c.columns;
    const unsigned tiles = static_cast<unsigned>(c.tiles), outer = index / tiles, tile = index - outer * tiles;
    const int64_t inner = c.shape.inner, first_row = int64_t{share} * c.share;
    const int64_t start = (outer * c.shape.n + first_row + row) * inner + int64_t{tile} * c.columns + column;
    in0 += start, in1 += start, out = to + start;
    step = static_cast<unsigned>(taken) / c.columns * static_cast<int>(inner);
    const int rows = static_cast<int>(max(int64_t{0}, min(int64_t{c.share}, c.shape.n - first_row)));
    const int left = int64_t{tile} * c.columns + column < inner ? rows * c.columns - place : 0;
    count = (left + taken - 1) / taken, steps = (rows * c.columns + taken - 1) / taken;
#pragma unroll
    for (int s = 0; s < V; ++s)
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        x[s][k] = Filled<Op, T, W>(k);
        if (s < count && k < inputs) x[s][k] = *reinterpret_cast<const P*>((k == 0 ? in0 : in1) + s * step);
      }
  }

  // Leaves the statistics of threads' columns in `slots`, for Total.
  __device__ void Local(const Op& op, Stats* slots) {
#pragma unroll
    for (Stats& each : own) each = Op::Nothing();
    if constexpr (Op::kHasMaximum) {
      A m[W];
      MaxOfColumns<T, W, V>(x, m);
#pragma unroll
      for (int w = 0; w < W; ++w) own[w].m = m[w];
    }
    const auto each = [&](auto&& visit) {
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
    };
    op.Reducing([&](const auto& known) { known.Exponentiate(own, each); });
    // First as many threads a column as there are, then one.
#pragma unroll
    for (int w = 0; w < W; ++w) slots[threadIdx.x * W + w] = count > 0 ? own[w] : Op::Nothing();
    __syncthreads();
    parts = blockDim.x * W / c.columns;
    if (const int fewer = blockDim.x / c.columns; fewer > 1) {
      if (const int at = threadIdx.x; at < fewer * c.columns)
        slots[at] = Op::Total((parts - at / c.columns + fewer - 1) / fewer,
                              [&](int j) { return slots[at + j * fewer * c.columns]; });
      parts = fewer;
      __syncthreads();
    }
  }
  // Of the block's rows of a column.
  __device__ Stats Total(const Stats* slots, int at) const {
    return Op::Total(parts, [&](int j) { return slots[at + j * c.columns]; });
  }

  // Writes the results of columns whose statistics are `totals`. With kAgain nothing is left of Local, as in HeldRow.
  template <bool kAgain>
  __device__ void Store(const Op& op, const Stats* totals, uint32_t zero) const {
    Stats stats[W];
#pragma unroll
    for (int w = 0; w < W; ++w) {
      int at = static_cast<int>(threadIdx.x * W % c.columns) + w;
      while (at >= c.columns) at -= c.columns;
      stats[w] = totals[at];
    }
    op.Writing([&](const auto& known) {
      typename std::decay_t<decltype(known)>::Final final[W];
#pragma unroll
      for (int w = 0; w < W; ++w) final[w] = known.Finish(kAgain ? stats[w] : own[w], stats[w]);
#pragma unroll
      for (int s = 0; s < V; ++s) {
        if (s >= count) break;
        A v[kInputs][W], results[W];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) Widen<T, W>(Again(x[s][k], zero), v[k]);
        if constexpr (kAgain) known.Change(stats, v);
#pragma unroll
        for (int w = 0; w < W; ++w) results[w] = known.Result(final[w], v, w);
        StoreUnsplit<T, W>(out + s * step, Narrow<T, W>(results));
      }
    });
  }
};

template <class Op, class T, int V>
__global__ void __launch_bounds__(kColumnThreads, 1024 / kColumnThreads)
    HeldColumnsKernel(const __grid_constant__ HeldColumns c, Op op, const T* in0, const T* in1, T* out) {
  using Column = HeldColumn<Op, T, V>;
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Mailbox mailbox;
  Stats* const slots = reinterpret_cast<Stats*>(shared);        // of threads' columns
  Stats* const totals = slots + blockDim.x * kColumnVector<T>;  // of the tile's
  Stats* const ranks = totals + c.columns;                      // the same of the cluster's blocks
  const unsigned index = blockIdx.x / static_cast<unsigned>(c.cluster), rank = blockIdx.x - index * c.cluster;
  if (c.cluster > 1) {
    if (threadIdx.x == 0) {
      mailbox.Open();
      mailbox.Expect(c.cluster * c.columns * sizeof(Stats));
    }
    ClusterArriveRelaxed();
  }

  Column column(c, in0, in1, out, index, rank);
  column.Local(op, slots);
  if (c.cluster > 1) ClusterWait();
  for (int at = threadIdx.x; at < c.columns; at += blockDim.x) {
    const Stats total = column.Total(slots, at);
    if (c.cluster == 1) {
      totals[at] = total;
    } else {
      for (int to = 0; to < c.cluster; ++to)
        for (int i = 0; i < static_cast<int>(sizeof(Stats) / sizeof(A)); ++i)
          mailbox.Send(reinterpret_cast<A*>(ranks + rank * c.columns + at) + i, to,
                       reinterpret_cast<const A*>(&total)[i]);
    }
  }
  if (c.cluster > 1) {
    mailbox.Wait();
    for (int at = threadIdx.x; at < c.columns; at += blockDim.x)
      totals[at] = Op::Total(c.cluster, [&](int j) { return ranks[at + j * c.columns]; });
  }
  __syncthreads();
  column.template Store<!Column::kInPlace>(op, totals, c.zero);
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
  if constexpr (Op::kInputs == 1)
    if (int64_t{c.share} * c.columns <= int64_t{kFew} * kColumnVector<T> * c.threads)
      return LaunchKernel(HeldColumnsKernel<Op, T, kFew>, grid, stream, c, op, in0, in1, out);
  return LaunchKernel(HeldColumnsKernel<Op, T, kHeldColumns<Op>>, grid, stream, c, op, in0, in1, out);
}

// Whether a thread's columns are words, of rows that are long enough, and 32 bits count them.
template <class T>
bool IsShortColumns(const Shape& s) {
  const int64_t bytes = s.inner * sizeof(T);
  return bytes % 4 == 0 && bytes >= kShortBytes && s.outer * bytes / 4 <= INT32_MAX;
}

}  // namespace jaxdnn::softmax
