// Tiles of [outer, n, inner] in shared memory, each reduced over n by the threads of a block or of several.
//
// Memory is seen as vectors of L elements: of rows (inner = 1), or of columns with L = 1. A tile is 1 << stride columns
// of vectors, over all of n or over a block's share of it: neighbouring threads take neighbouring columns, and what
// threads are left split n. A thread copies its vectors to shared memory, all copies in flight together, and goes over
// them there: memory is read once. Blocks that share a row exchange their statistics in a cluster, or through a
// workspace between two launches, the second of which reads its tile again.
//
// Rows may start anywhere. A row's vectors are those of the whole array that overlap it; only its first and last can
// hold elements of neighbours, and these are moved one by one.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/softmax/ops.cuh"

namespace jaxdnn::softmax {

constexpr int kMaxTileSpan = 9;
constexpr int kMaxTileThreads = 1 << kMaxTileSpan;

struct Tiling {
  Shape shape;
  int64_t tiles;  // of columns, per outer index
  int shares;     // blocks that share a tile
  int share;      // vectors along n of each
  Group group;    // of threads: stride columns
  Phase phase;

  int Threads() const { return 1 << group.span; }
  int64_t Blocks() const { return shape.outer * tiles * shares; }
};

// Bytes of shared memory: the tile's inputs, what a reduction needs, and the statistics of the cluster's blocks.
template <class Op, class T, int L>
size_t TileBytes(const Tiling& t) {
  const size_t columns = size_t{1} << t.group.stride;
  const size_t held = Op::kInputs * t.share * columns * L * sizeof(T);
  return (held + 15) / 16 * 16 + t.Threads() * sizeof(typename Op::A) +
         (t.phase == Phase::kWhole && t.shares > 1 ? t.shares * columns * sizeof(typename Op::Stats) : 0);
}

template <class Op, class T, int L>
__global__ void __launch_bounds__(kMaxTileThreads)
    TileKernel(const __grid_constant__ Tiling t, Op op, const __grid_constant__ Mask mask,
               typename Op::Stats* workspace, const T* in0, const T* in1, T* out) {
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  using V = Vec<T, L>;
  constexpr int kInputs = Op::kInputs;
  // Whether what takes an element's place has its type.
  constexpr bool kInPlace = sizeof(T) == sizeof(A);
  constexpr int kUnroll = L == 1 ? 4 : 1;
  extern __shared__ __align__(16) unsigned char shared[];
  const int stride = t.group.stride, column = threadIdx.x & ((1 << stride) - 1);
  const int part = threadIdx.x >> stride, parts = blockDim.x >> stride;
  const unsigned index = blockIdx.x / static_cast<unsigned>(t.shares), rank = blockIdx.x - index * t.shares;
  const unsigned outer = index / static_cast<unsigned>(t.tiles), tile = index - outer * static_cast<unsigned>(t.tiles);

  // The block has vectors `first` and on of the row, `count` of them; the thread's are part, part + parts, ....
  const int64_t inner = t.shape.inner, row = outer * t.shape.n * inner;
  const int64_t across = (int64_t{tile} << stride) + column;
  const int skew = L > 1 ? static_cast<int>(row % L) : 0;
  const int64_t first = int64_t{rank} * t.share;
  const int64_t left = (skew + t.shape.n + L - 1) / L - first;
  const bool active = across < inner;
  const int count = active ? static_cast<int>(max(int64_t{0}, min(int64_t{t.share}, left))) : 0;
  const int64_t base = ((row - skew) / L + first * inner + across) * L, step = inner * L;

  // Of the elements of the block's vectors, in order, those from `begin` to `end` are the row's.
  const int begin = L > 1 && rank == 0 ? skew : 0;
  const int end = L > 1 ? static_cast<int>(min(int64_t{count} * L, skew + t.shape.n - first * L)) : 0;
  const auto is_whole = [&](int at) { return L == 1 || (at * L >= begin && at * L + L <= end); };
  const auto is_inside = [&](int at, int i) { return L == 1 || (at * L + i >= begin && at * L + i < end); };

  V* held = reinterpret_cast<V*>(shared) + column;
  const int size = t.share << stride;
  const auto element = [&](int input, int at) -> V& { return held[input * size + (at << stride)]; };
  if constexpr (sizeof(V) < 4) {
    // Too little for an asynchronous copy: several loads, then as many stores.
    constexpr int kBatch = 8 / kInputs;
#pragma unroll 1
    for (int start = part; start < count; start += kBatch * parts) {
      T loaded[kBatch][kInputs];
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int j = 0; j < kInputs; ++j)
          if (start + b * parts < count) loaded[b][j] = (j == 0 ? in0 : in1)[base + (start + b * parts) * step];
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int j = 0; j < kInputs; ++j)
          if (start + b * parts < count) element(j, start + b * parts).v[0] = loaded[b][j];
    }
  } else {
#pragma unroll kUnroll
    for (int at = part; at < count; at += parts) {
#pragma unroll
      for (int j = 0; j < kInputs; ++j) {
        const T* in = (j == 0 ? in0 : in1) + base + at * step;
        if (is_whole(at)) {
          CopyAsync(&element(j, at), reinterpret_cast<const V*>(in));
        } else {
#pragma unroll 1
          for (int i = 0; i < L; ++i) element(j, at).v[i] = is_inside(at, i) ? in[i] : static_cast<T>(Op::Fill(j));
        }
      }
    }
  }
  CommitAsync();

  const bool* keep = nullptr;
  if (mask.data != nullptr && active)
    keep = mask.data + mask.Row(outer) + across * mask.along_inner + (first * L - skew) * mask.along_n;
  // Of a vector that exists, a bit for each element that the mask keeps.
  const auto kept = [&](int at) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < L; ++i)
      if (is_inside(at, i)) bits |= unsigned{keep[(at * L + i) * mask.along_n]} << i;
    return bits;
  };
  // Hands out the thread's vectors in the accumulator's type, and keeps what is changed if it has the elements' own.
  const auto load = [&](A(&v)[kInputs][L], int at) {
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      const V vector = element(j, at);
#pragma unroll
      for (int i = 0; i < L; ++i) v[j][i] = static_cast<A>(vector.v[i]);
    }
  };
  const auto each = [&](auto&& visit) {
#pragma unroll kUnroll
    for (int at = part; at < count; at += parts) {
      A v[kInputs][L];
      load(v, at);
      if constexpr (kInPlace && std::is_same_v<decltype(visit(v)), Changed>) {
        visit(v);
#pragma unroll
        for (int j = 0; j < kInputs; ++j) {
          V vector;
#pragma unroll
          for (int i = 0; i < L; ++i) vector.v[i] = static_cast<T>(v[j][i]);
          element(j, at) = vector;
        }
      } else {
        visit(v);
      }
    }
  };

  A* scratch = reinterpret_cast<A*>(shared + (kInputs * size * sizeof(V) + 15) / 16 * 16);
  Stats* slots = reinterpret_cast<Stats*>(scratch + blockDim.x);
  // Whether the row has entries, as far as this thread knows.
  bool some = mask.data == nullptr;
  WaitAsync<0>();
  if (keep != nullptr) {
#pragma unroll 1
    for (int at = part; at < count; at += parts) {
      const unsigned bits = kept(at);
      some |= bits != 0;
#pragma unroll
      for (int i = 0; i < L; ++i)
        if ((bits >> i & 1) == 0)
          for (int j = 0; j < kInputs; ++j) element(j, at).v[i] = static_cast<T>(Op::Fill(j));
    }
  }
  // Of the thread's own elements, and of the row.
  Stats own[1], stats[1];
  if (t.phase == Phase::kApply) {
    // The workspace is [outer, shares, inner], the statistics of shares, and then [outer, inner], those of rows.
    stats[0] = active ? workspace[(t.shape.outer * t.shares + outer) * inner + across] : Op::Nothing();
  } else {
    op.Local(own, each);
    stats[0] = some ? own[0] : Op::Nothing();
    Op::Combine(stats, [&](auto& values, auto operation) { Reduce(values, operation, t.group, scratch); });
  }
  if (t.phase == Phase::kWhole && t.shares > 1) {
    // The first barrier is for the others' shared memory to exist, the second for their statistics.
    ClusterArrive();
    ClusterWait();
    const int columns = 1 << stride;
    if (part == 0)
#pragma unroll 1
      for (int to = 0; to < t.shares; ++to)
        for (int i = 0; i < static_cast<int>(sizeof(Stats) / sizeof(A)); ++i)
          StoreRemote(reinterpret_cast<A*>(slots + rank * columns + column) + i, to,
                      reinterpret_cast<const A*>(stats)[i]);
    ClusterArrive();
    ClusterWait();
    stats[0] = Op::Total(t.shares, [&](int from) { return slots[from * columns + column]; });
  }
  if (t.phase == Phase::kReduce) {
    if (part == 0 && active) workspace[(int64_t{outer} * t.shares + rank) * inner + across] = stats[0];
    return;
  }

  // Exponentials that were not kept are computed again, relative to the row.
  const bool again = !kInPlace || t.phase == Phase::kApply;
  const typename Op::Final final = op.Finish(again ? stats[0] : own[0], stats[0]);
#pragma unroll 1
  for (int at = part; at < count; at += parts) {
    A v[kInputs][L];
    load(v, at);
    if (again) op.Change(stats, v);
    const unsigned bits = keep != nullptr ? kept(at) : ~0u;
    V result;
#pragma unroll
    for (int i = 0; i < L; ++i) result.v[i] = static_cast<T>(bits >> i & 1 ? Op::Result(final, v, i) : final.absent);
    T* to = out + base + at * step;
    if (is_whole(at)) {
      if constexpr (L > 1)
        StoreUnsplit<T, L>(to, BitCast<Packed<T, L>>(result));
      else
        *to = result.v[0];
    } else {
#pragma unroll
      for (int i = 0; i < L; ++i)
        if (is_inside(at, i)) to[i] = result.v[i];
    }
  }
}

// Statistics of the rows from those of their shares. A block takes a row.
template <class Op>
__global__ void __launch_bounds__(kMaxTileThreads) FoldKernel(Shape shape, int shares, typename Op::Stats* workspace) {
  using Stats = typename Op::Stats;
  __shared__ typename Op::A scratch[kMaxTileThreads];
  const int64_t row = blockIdx.x, outer = row / shape.inner, column = row - outer * shape.inner;
  const Stats* const of_row = workspace + outer * shares * shape.inner + column;
  Stats stats[1] = {Op::Total((shares - static_cast<int>(threadIdx.x) + kMaxTileThreads - 1) / kMaxTileThreads,
                              [&](int j) { return of_row[(threadIdx.x + j * kMaxTileThreads) * shape.inner]; })};
  Op::Combine(stats, [&](auto& values, auto operation) { Reduce(values, operation, Group{0, kMaxTileSpan}, scratch); });
  if (threadIdx.x == 0) workspace[shape.outer * shares * shape.inner + row] = stats[0];
}

// Launches it (softmax_unclustered.cu).
template <class Op>
cudaError_t FoldShares(const Shape& shape, int shares, typename Op::Stats* workspace, cudaStream_t stream);

}  // namespace jaxdnn::softmax
