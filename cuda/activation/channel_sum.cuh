// The first stage of sums over each channel of x [groups, outer, channels, inner], beside an elementwise map.
//
// An Op maps elements and says what each adds to its channel. It has
//   A, N                            accumulator, elements in a vector
//   SelectGroup(group, shape)       from here on, vectors and elements count from the beginning of this group
//   Channel(c)                      the operand's value
//   Loaded, Load(i)                 vector i before everything in flight has been asked for
//   Store(i, loaded, p[N], sum[N])  maps it, with the channels' values p, and adds to sum
//   Element(e, p)                   maps one element, and returns what it adds
//
// Two ways to cut the array, both without atomics, into partial rows that SumRows adds up in a fixed order:
//   columns  the array as rows of a period: the least whole number of rows of channels that fills whole vectors. A
//   thread
//            owns a vector's columns, hence the same channels all the way down, and keeps their sums in registers.
//   planes   where a channel is a long run of elements: a warp sums a piece of one.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/activation/channels.cuh"
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
constexpr int kSumUnroll = 4;
constexpr int kSumResident = 2;
constexpr int kResidentBlocks = 132 * kSumResident;  // A full wave on an H200.
constexpr int64_t kLeastPlane = 256;
constexpr int64_t kPlanePiece = 2048;

// Columns -------------------------------------------------------------------------------------------------------------

struct ColumnPlan {
  int64_t columns;  // Channels times inner: what repeats.
  int64_t width;    // Vectors in a period, `repeats` times as many elements as columns.
  int64_t repeats;
  int64_t rows;    // Periods in a group, the last perhaps in part.
  int64_t tiles;   // Blocks side by side.
  int64_t chunks;  // Blocks one below the other.
  bool folded;     // A tile holds every column: a block leaves one row of `columns`, else a chunk leaves a period.

  int64_t PartialRows() const { return folded ? tiles * chunks : chunks * repeats; }
};

inline ColumnPlan PlanColumns(const ChannelShape& shape, int vector_length) {
  ColumnPlan plan = {};
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
  // One wave, or several that are full.
  const int64_t side = plan.tiles * shape.groups, most = std::max<int64_t>(1, CeilDiv(plan.rows, kSumWarps));
  const auto idle = [&](int64_t chunks) {
    const int64_t blocks = side * chunks;
    return static_cast<double>(CeilDiv(blocks, kResidentBlocks) * kResidentBlocks) / static_cast<double>(blocks);
  };
  plan.chunks = std::min(most, std::max<int64_t>(1, kResidentBlocks / side));
  for (int64_t chunks = plan.chunks + 1; chunks <= std::min(most, plan.chunks + 8) && idle(plan.chunks) > 1.15;
       ++chunks)
    if (idle(chunks) < idle(plan.chunks)) plan.chunks = chunks;
  return plan;
}

template <class Op>
__global__ __launch_bounds__(kSumThreads, kSumResident) void ColumnKernel(Op op, ChannelShape shape, ColumnPlan plan,
                                                                          bool vectors, typename Op::A* partial) {
  using A = typename Op::A;
  constexpr int N = Op::N;
  constexpr int kTile = kLanes * N;
  __shared__ A scratch[kSumWarps][kTile];
  const int64_t tile = blockIdx.x % plan.tiles, rest = blockIdx.x / plan.tiles;
  const int64_t chunk = rest % plan.chunks, group = rest / plan.chunks;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  op.SelectGroup(group, shape);

  const int64_t column = tile * kLanes + lane;
  const int64_t size = GroupSize(shape);
  A p[N], sum[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const uint32_t place = static_cast<uint32_t>(column * N + j) % static_cast<uint32_t>(plan.columns);
    p[j] = op.Channel(place / static_cast<uint32_t>(shape.inner));
    sum[j] = A(0);
  }
  if (column < plan.width) {
    const int64_t step = plan.chunks * kSumWarps * plan.width;
    int64_t i = (chunk * kSumWarps + warp) * plan.width + column;
    if (vectors) {
      for (const int64_t end = size / N; i < end; i += kSumUnroll * step) {
        typename Op::Loaded loaded[kSumUnroll];
#pragma unroll
        for (int u = 0; u < kSumUnroll; ++u)
          if (i + u * step < end) loaded[u] = op.Load(i + u * step);
#pragma unroll
        for (int u = 0; u < kSumUnroll; ++u)
          if (i + u * step < end) op.Store(i + u * step, loaded[u], p, sum);
      }
    }
    // What vectors do not reach: all, or the last and incomplete one.
    const int64_t last = size / N, row = last / plan.width;
    if (vectors) i = column == last - row * plan.width && chunk == 0 && warp == 0 ? last : size;
#pragma unroll 1
    for (; i * N < size; i += step) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (i * N + j < size) sum[j] += op.Element(i * N + j, p[j]);
    }
  }

#pragma unroll
  for (int j = 0; j < N; ++j) scratch[warp][lane * N + j] = sum[j];
  __syncthreads();
  for (int x = threadIdx.x; x < kTile; x += kSumThreads) {
    A total = scratch[0][x];
#pragma unroll
    for (int w = 1; w < kSumWarps; ++w) total += scratch[w][x];
    scratch[0][x] = total;
    const int64_t place = tile * kTile + x;
    if (!plan.folded && place < plan.width * N) partial[(group * plan.chunks + chunk) * plan.width * N + place] = total;
  }
  if (!plan.folded) return;
  const int columns = static_cast<int>(plan.columns);
  int held = kTile;
  for (; held % 2 == 0 && held / 2 % columns == 0; held /= 2) {
    __syncthreads();
    for (int x = threadIdx.x; x < held / 2; x += kSumThreads) scratch[0][x] += scratch[0][x + held / 2];
  }
  __syncthreads();
  const int shift = static_cast<int>(tile * kTile % columns);
  for (int c = threadIdx.x; c < columns; c += kSumThreads) {
    A total = A(0);
    for (int x = (c - shift + columns) % columns; x < held; x += columns) total += scratch[0][x];
    partial[((group * plan.chunks + chunk) * plan.tiles + tile) * columns + c] = total;
  }
}

__device__ __forceinline__ int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// Planes --------------------------------------------------------------------------------------------------------------

struct PlanePlan {
  FastDiv by_pieces, by_channels, by_outer;
  int work;  // Pieces of all planes.

  PlanePlan(const ChannelShape& s, int64_t pieces)
      : by_pieces(pieces),
        by_channels(s.channels),
        by_outer(s.outer),
        work(static_cast<int>(s.groups * s.outer * s.channels * pieces)) {}
};

template <class Op>
__global__ __launch_bounds__(kSumThreads, kSumResident) void PlaneKernel(Op op, ChannelShape shape, PlanePlan plan,
                                                                         bool vectors, typename Op::A* partial) {
  using A = typename Op::A;
  constexpr int N = Op::N;
  const int work = blockIdx.x * kSumWarps + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (work >= plan.work) return;
  int piece, channel, within;  // `within` is the row's number in its group.
  const int slab = plan.by_pieces.Div(work, &piece), row = plan.by_channels.Div(slab, &channel);
  const int group = plan.by_outer.Div(row, &within);
  op.SelectGroup(group, shape);
  const A value = op.Channel(channel);
  const int64_t start = (int64_t{within} * shape.channels + channel) * shape.inner;
  const int64_t begin = start + piece * kPlanePiece, end = start + Least(shape.inner, (piece + 1) * kPlanePiece);

  A p[N], sum[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    p[j] = value;
    sum[j] = A(0);
  }
  const int64_t first = vectors ? (begin + N - 1) / N : end, last = vectors ? end / N : end;
  for (int64_t i = first + lane; i < last; i += kSumUnroll * kLanes) {
    typename Op::Loaded loaded[kSumUnroll];
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u)
      if (i + u * kLanes < last) loaded[u] = op.Load(i + u * kLanes);
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u)
      if (i + u * kLanes < last) op.Store(i + u * kLanes, loaded[u], p, sum);
  }
  A total = A(0);
  const int64_t head = vectors ? Least(first * N, end) : end;
  for (int64_t e = begin + lane; e < head; e += kLanes) total += op.Element(e, value);
  if (vectors)
    for (int64_t e = (last * N > head ? last * N : head) + lane; e < end; e += kLanes) total += op.Element(e, value);
#pragma unroll
  for (int j = 0; j < N; ++j) total += sum[j];
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) total += ShuffleXor(total, mask);
  if (lane == 0) partial[(int64_t{row} * plan.by_pieces.divisor + piece) * shape.channels + channel] = total;
}

// Both stages ---------------------------------------------------------------------------------------------------------

// A piece is summed by a warp, so that more than one is worth while.
inline bool HasPlanes(const ChannelShape& shape) { return shape.inner >= kLeastPlane; }

template <class T>
int64_t PartialLength(const ChannelShape& shape) {
  if (HasPlanes(shape)) return shape.groups * shape.outer * CeilDiv(shape.inner, kPlanePiece) * shape.channels;
  const ColumnPlan plan = PlanColumns(shape, kVecLength<T>);
  const int64_t sums = shape.inner > 1 ? plan.columns : 0;
  return shape.groups * (plan.PartialRows() * plan.columns + sums);
}

// Maps x and leaves the channels' sums in `out` [groups, channels]. `vectors`: every buffer is aligned.
template <class Op, class T>
cudaError_t MapAndSum(Op op, const ChannelShape& shape, bool vectors, void* workspace, T* out, cudaStream_t stream) {
  using A = Accumulator<T>;
  A* const partial = static_cast<A*>(workspace);
  if (Size(shape) == 0) return SumRows(partial, shape.groups, 0, shape.channels, out, stream);
  vectors = vectors && (shape.groups == 1 || GroupSize(shape) % Op::N == 0);
  if (HasPlanes(shape)) {
    const int64_t pieces = CeilDiv(shape.inner, kPlanePiece);
    const PlanePlan plan(shape, pieces);
    const cudaError_t e = LaunchKernel(PlaneKernel<Op>, CeilDiv(plan.work, kSumWarps), kSumThreads, stream, op, shape,
                                       plan, vectors, partial);
    if (e != cudaSuccess) return e;
    return SumRows(partial, shape.groups, shape.outer * pieces, shape.channels, out, stream);
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
