// The first stage of sums over each channel of x [groups, outer, channels, inner], beside an elementwise map.
//
// An Op maps elements and says what each adds to its channel. It has
//   A, N                            accumulator, elements in a vector
//   SelectGroup(group, shape)       from here on, vectors and elements count from the beginning of this group
//   Channel(c)                      the operand's value
//   Loaded, Load(i), Store(i, out)  vector i, before and after
//   kAsync, Fetch(slot, stride, i), Take(slot, stride)   whether both halves of what Load gives can go through shared
//                                   memory, `stride` vectors apart; the beginning and the end of that
//   kLong                           whether to keep the copies of Map few
//   Map(loaded, p[N], sum[N])       maps it, with the channels' values p, and adds to sum
//   Gather(i, size), Scatter(i, size, out)   the same as Load and Store for a vector that is not aligned, or of which
//                                   elements from `size` on are missing; they add nothing
//   Element(e, p)                   maps one element, and returns what it adds
//
// Two ways to cut the array, both without atomics, into partial rows that SumRows adds up in a fixed order:
//   columns  the array as rows of a period: the least whole number of rows of channels that fills whole vectors. A
//            thread owns a vector's columns, hence the same channels all the way down, and keeps their sums in
//            registers.
//   planes   where a channel has long runs of elements: a block takes one channel's, all of them or every so many.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/activation/channels.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/column_sum.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::activation {

constexpr int kLanes = 32;
constexpr int kSumWarps = 8;
constexpr int kSumThreads = kLanes * kSumWarps;
constexpr int kMultiprocessors = 132;  // Of an H200, which full waves are counted by.

// Columns -------------------------------------------------------------------------------------------------------------

// Vectors of a lane that are on their way: in registers, or in a ring in shared memory, for maps so long that the
// compiler would put loads off until it has registers for what follows from them.
constexpr int kColumnUnroll = 4;
constexpr int kColumnStages = 4;
// Blocks on a multiprocessor, and waves of those: multiprocessors, some faster than others, end at nearly one time.
template <class A>
constexpr int kColumnResident = sizeof(A) > 4 ? 2 : 3;
constexpr int kColumnWaves = 4;

struct ColumnPlan {
  int64_t columns;  // Channels times inner: what repeats.
  int64_t width;    // Vectors in a period, `repeats` times as many elements as columns.
  int64_t repeats;
  int64_t rows;        // Periods in a group, the last perhaps in part.
  int64_t whole_rows;  // Those of whole vectors,
  int64_t rest;        // and the whole vectors of the next one.
  int64_t tiles;       // Blocks side by side.
  int64_t chunks;      // Blocks one below the other.
  int64_t height;      // Rows of a chunk.
  FastDiv by_columns, by_inner, by_tiles, by_chunks;
  bool folded;  // A tile holds every column: a block leaves one row of `columns`, else a chunk leaves a period.

  int64_t PartialRows() const { return folded ? tiles * chunks : chunks * repeats; }
};

// Into how many chunks `side` blocks next to each other are cut, at most `most`: so many that `waves` full waves of
// blocks, or more, keep all multiprocessors busy to the end.
inline int64_t ChooseChunks(int64_t side, int64_t most, int64_t wave, int64_t waves) {
  const auto idle = [&](int64_t chunks) {
    const int64_t blocks = side * chunks;
    return static_cast<double>(CeilDiv(blocks, wave) * wave) / static_cast<double>(blocks);
  };
  const int64_t least = std::min(most, std::max<int64_t>(1, waves * wave / side));
  int64_t best = least;
  for (int64_t chunks = least + 1; chunks <= std::min(most, least + 8) && idle(best) > 1.15; ++chunks)
    if (idle(chunks) < idle(best)) best = chunks;
  return best;
}

inline ColumnPlan PlanColumns(const ChannelShape& shape, int vector_length) {
  ColumnPlan plan;
  plan.columns = shape.channels * shape.inner;
  plan.repeats = vector_length / std::gcd(plan.columns, int64_t{vector_length});
  plan.width = plan.columns * plan.repeats / vector_length;
  // Narrow periods are repeated until the last tile is nearly full.
  const auto waste = [&](int64_t times) {
    const int64_t vectors = plan.width * times;
    return static_cast<double>(CeilDiv(vectors, kLanes) * kLanes) / static_cast<double>(vectors);
  };
  int64_t best = 1;
  for (int64_t times = 2; times <= kLanes && plan.width * best < 16 * kLanes; ++times)
    if (waste(times) < waste(best) - 0.01) best = times;
  plan.repeats *= best;
  plan.width *= best;
  plan.rows = CeilDiv(GroupSize(shape), plan.width * vector_length);
  plan.tiles = CeilDiv(plan.width, kLanes);
  plan.folded = plan.columns < kLanes * vector_length;
  constexpr int kBatch = kSumWarps * kColumnUnroll;
  const int64_t batches = CeilDiv(plan.rows, kBatch);
  // Few columns leave the second stage few blocks: they must not get many rows.
  const int64_t side = plan.tiles * shape.groups;
  const int64_t waves = side < 4 * kColumnWaves * plan.repeats ? 1 : kColumnWaves;
  const int64_t chunks = ChooseChunks(side, batches, kMultiprocessors * kColumnResident<float>, waves);
  plan.height = CeilDiv(batches, chunks) * kBatch;
  plan.chunks = CeilDiv(plan.rows, plan.height);
  plan.whole_rows = GroupSize(shape) / vector_length / plan.width;
  plan.rest = GroupSize(shape) / vector_length % plan.width;
  plan.by_columns = FastDiv(plan.columns);
  plan.by_inner = FastDiv(shape.inner);
  plan.by_tiles = FastDiv(plan.tiles);
  plan.by_chunks = FastDiv(plan.chunks);
  return plan;
}

template <class Op>
__global__ __launch_bounds__(kSumThreads, kColumnResident<typename Op::A>) void ColumnKernel(Op op, ChannelShape shape,
                                                                                             ColumnPlan plan,
                                                                                             bool vectors,
                                                                                             typename Op::A* partial) {
  using A = typename Op::A;
  constexpr int N = Op::N;
  constexpr int kTile = kLanes * N;
  __shared__ A scratch[kSumWarps][kTile];
  int tile, chunk;
  const int rest = plan.by_tiles.Div(static_cast<int>(blockIdx.x), &tile);
  const int64_t group = plan.by_chunks.Div(rest, &chunk);
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  op.SelectGroup(group, shape);

  const int64_t column = int64_t{tile} * kLanes + lane;
  const int64_t size = GroupSize(shape);
  A p[N], sum[N];
  int place;
  plan.by_columns.Div(static_cast<int>(column * N), &place);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    p[j] = op.Channel(plan.by_inner.Div(place));
    sum[j] = A(0);
    if (++place == plan.columns) place = 0;
  }
  if (column < plan.width) {
    const int64_t step = kSumWarps * plan.width;
    int64_t i = (int64_t{chunk} * plan.height + warp) * plan.width + column;
    const int64_t rows = plan.whole_rows + (column < plan.rest) - int64_t{chunk} * plan.height;
    int left = vectors ? (static_cast<int>(min(rows, plan.height)) - warp + kSumWarps - 1) / kSumWarps : 0;
    const int64_t end = min((int64_t{chunk} + 1) * plan.height * plan.width, (size + N - 1) / N);
    // Whole vectors, of which `left` remain, and then what is not.
    if constexpr (Op::kAsync) {
      __shared__ typename Op::Vector ring[kColumnStages][2][kSumThreads];
      constexpr int kAhead = kColumnStages - 1;
      const auto slot = [&](int k) { return &ring[k % kColumnStages][0][threadIdx.x]; };
      const auto fetch = [&](int k, int64_t at) {
        if (k < left) op.Fetch(slot(k), kSumThreads, at);
        CommitAsync();
      };
      for (int k = 0; k < kAhead; ++k) fetch(k, i + k * step);
#pragma unroll 1
      for (int k = 0; k < left; ++k, i += step) {
        fetch(k + kAhead, i + kAhead * step);
        WaitAsync<kAhead>();
        op.Store(i, op.Map(op.Take(slot(k), kSumThreads), p, sum));
      }
      left = 0;
    } else {
#pragma unroll 1
      for (; left >= kColumnUnroll; left -= kColumnUnroll, i += kColumnUnroll * step) {
        typename Op::Loaded loaded[kColumnUnroll];
#pragma unroll
        for (int u = 0; u < kColumnUnroll; ++u) loaded[u] = op.Load(i + u * step);
#pragma unroll
        for (int u = 0; u < kColumnUnroll; ++u) op.Store(i + u * step, op.Map(loaded[u], p, sum));
      }
    }
#pragma unroll 1
    for (; i < end; --left, i += step) {
      const auto out = op.Map(left > 0 ? op.Load(i) : op.Gather(i, size), p, sum);
      if (left > 0)
        op.Store(i, out);
      else
        op.Scatter(i, size, out);
    }
  }

#pragma unroll
  for (int j = 0; j < N; ++j) scratch[warp][lane * N + j] = sum[j];
  __syncthreads();
#pragma unroll 1
  for (int x = threadIdx.x; x < kTile; x += kSumThreads) {
    A total = scratch[0][x];
#pragma unroll
    for (int w = 1; w < kSumWarps; ++w) total += scratch[w][x];
    scratch[0][x] = total;
    const int64_t place = int64_t{tile} * kTile + x;
    if (!plan.folded && place < plan.width * N) partial[(group * plan.chunks + chunk) * plan.width * N + place] = total;
  }
  if (!plan.folded) return;
  const int columns = static_cast<int>(plan.columns);
  int held = kTile;
#pragma unroll 1
  for (; held % 2 == 0 && held / 2 % columns == 0; held /= 2) {
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < held / 2; x += kSumThreads) scratch[0][x] += scratch[0][x + held / 2];
  }
  __syncthreads();
  const int shift = static_cast<int>(int64_t{tile} * kTile % columns);
#pragma unroll 1
  for (int c = threadIdx.x; c < columns; c += kSumThreads) {
    A total = A(0);
#pragma unroll 1
    for (int x = (c - shift + columns) % columns; x < held; x += columns) total += scratch[0][x];
    partial[((group * plan.chunks + chunk) * plan.tiles + tile) * columns + c] = total;
  }
}

// Planes --------------------------------------------------------------------------------------------------------------

constexpr int kPlaneUnroll = 4;
constexpr int kPlaneResident = 2;
constexpr int64_t kLeastPlane = 256;

struct PlanePlan {
  int64_t pieces;  // Of a plane, each of kPlaneUnroll vectors a lane.
  int64_t items;   // Pieces of a channel in a group.
  int64_t chunks;  // Blocks that share a channel's items.
  FastDiv by_pieces, by_channels, by_chunks;
};

inline PlanePlan PlanPlanes(const ChannelShape& shape, int vector_length) {
  PlanePlan plan;
  plan.pieces = std::max<int64_t>(1, CeilDiv(shape.inner / vector_length, kLanes * kPlaneUnroll));
  plan.items = shape.outer * plan.pieces;
  plan.chunks =
      ChooseChunks(shape.groups * shape.channels, CeilDiv(plan.items, kSumWarps), kMultiprocessors * kPlaneResident, 1);
  plan.by_pieces = FastDiv(plan.pieces);
  plan.by_channels = FastDiv(shape.channels);
  plan.by_chunks = FastDiv(plan.chunks);
  return plan;
}

// Channels first among the blocks: those that run at a time read what lies together.
template <class Op>
__global__ __launch_bounds__(kSumThreads, kPlaneResident) void PlaneKernel(Op op, ChannelShape shape, PlanePlan plan,
                                                                           bool vectors, typename Op::A* partial) {
  using A = typename Op::A;
  constexpr int N = Op::N;
  constexpr int64_t kStep = kLanes * kPlaneUnroll;
  __shared__ A scratch[kSumWarps];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  int channel, chunk;
  const int rest = plan.by_channels.Div(static_cast<int>(blockIdx.x), &channel);
  op.SelectGroup(plan.by_chunks.Div(rest, &chunk), shape);
  const A value = op.Channel(channel);

  A total = A(0);
  for (int item = chunk * kSumWarps + warp; item < plan.items; item += static_cast<int>(plan.chunks) * kSumWarps) {
    int piece;
    const int64_t row = plan.by_pieces.Div(item, &piece);
    const int64_t begin = (row * shape.channels + channel) * shape.inner, end = begin + shape.inner;
    // The plane's whole vectors, of which this piece has some; the first one has what lies around them as well.
    const int64_t first = vectors ? (begin + N - 1) / N : end, last = vectors ? end / N : end;
    const int64_t i = first + piece * kStep + lane;
    const auto exists = [&](int u) { return i + u * kLanes < last; };
    A p[N], sum[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      p[j] = value;
      sum[j] = A(0);
    }
    if constexpr (Op::kAsync && Op::kLong) {
      // What is loaded goes through shared memory, so that there is one copy of the map.
      __shared__ typename Op::Vector held[kPlaneUnroll][2][kSumThreads];
#pragma unroll
      for (int u = 0; u < kPlaneUnroll; ++u)
        if (exists(u)) op.Fetch(&held[u][0][threadIdx.x], kSumThreads, i + u * kLanes);
      CommitAsync();
      WaitAsync<0>();
#pragma unroll 1
      for (int u = 0; u < kPlaneUnroll && exists(u); ++u)
        op.Store(i + u * kLanes, op.Map(op.Take(&held[u][0][threadIdx.x], kSumThreads), p, sum));
    } else {
      typename Op::Loaded loaded[kPlaneUnroll];
#pragma unroll
      for (int u = 0; u < kPlaneUnroll; ++u)
        if (exists(u)) loaded[u] = op.Load(i + u * kLanes);
#pragma unroll
      for (int u = 0; u < kPlaneUnroll; ++u)
        if (exists(u)) op.Store(i + u * kLanes, op.Map(loaded[u], p, sum));
    }
#pragma unroll
    for (int j = 0; j < N; ++j) total += sum[j];
    // All elements, a piece after the other, or those before and behind the vectors.
    const int64_t before = vectors ? first * N - begin : end - begin, behind = vectors ? end - last * N : 0;
    const int64_t skipped = vectors ? (last - first) * N : 0;
    if (vectors && piece > 0) continue;
#pragma unroll 1
    for (int64_t e = (vectors ? 0 : int64_t{piece} * kLanes) + lane; e < before + behind; e += plan.pieces * kLanes)
      total += op.Element(begin + e + (e < before ? 0 : skipped), value);
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) total += ShuffleXor(total, mask);
  if (lane == 0) scratch[warp] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int w = 1; w < kSumWarps; ++w) total += scratch[w];
  partial[int64_t{rest} * shape.channels + channel] = total;
}

// Both stages ---------------------------------------------------------------------------------------------------------

inline bool HasPlanes(const ChannelShape& shape) { return shape.inner >= kLeastPlane; }

template <class T>
int64_t PartialLength(const ChannelShape& given) {
  const ChannelShape shape = MergedIfOne(given);
  if (HasPlanes(shape)) return shape.groups * PlanPlanes(shape, kVecLength<T>).chunks * shape.channels;
  const ColumnPlan plan = PlanColumns(shape, kVecLength<T>);
  const int64_t sums = shape.inner > 1 ? plan.columns : 0;
  return shape.groups * (plan.PartialRows() * plan.columns + sums);
}

// Maps x and leaves the channels' sums in `out` [groups, channels]. `vectors`: every buffer is aligned.
template <class Op, class T>
cudaError_t MapAndSum(Op op, const ChannelShape& given, bool vectors, void* workspace, T* out, cudaStream_t stream) {
  using A = Accumulator<T>;
  const ChannelShape shape = MergedIfOne(given);
  A* const partial = static_cast<A*>(workspace);
  if (Size(shape) == 0) return SumRows(partial, shape.groups, 0, shape.channels, out, stream);
  vectors = vectors && (shape.groups == 1 || GroupSize(shape) % Op::N == 0);
  if (HasPlanes(shape)) {
    const PlanePlan plan = PlanPlanes(shape, Op::N);
    const cudaError_t e = LaunchKernel(PlaneKernel<Op>, shape.groups * plan.chunks * shape.channels, kSumThreads,
                                       stream, op, shape, plan, vectors, partial);
    if (e != cudaSuccess) return e;
    return SumRows(partial, shape.groups, plan.chunks, shape.channels, out, stream);
  }
  const ColumnPlan plan = PlanColumns(shape, Op::N);
  const int64_t blocks = shape.groups * plan.chunks * plan.tiles;
  const cudaError_t e = LaunchKernel(ColumnKernel<Op>, blocks, kSumThreads, stream, op, shape, plan, vectors, partial);
  if (e != cudaSuccess) return e;
  if (shape.inner == 1) return SumRows(partial, shape.groups, plan.PartialRows(), plan.columns, out, stream);
  A* const sums = partial + shape.groups * plan.PartialRows() * plan.columns;
  const cudaError_t e2 = SumRows(partial, shape.groups, plan.PartialRows(), plan.columns, sums, stream);
  if (e2 != cudaSuccess) return e2;
  return SumRows(sums, shape.groups * shape.channels, shape.inner, 1, out, stream);
}

}  // namespace jaxdnn::activation
