// Tiles of [outer, n, inner] in registers, each reduced over n by the threads of a block or of several.
//
// Memory is seen as vectors of L elements. Along a row (inner = 1) a vector's elements are reduced together, to W = 1
// result; across columns they belong to W = L results. A tile is 1 << stride columns of vectors, over all of n or over
// a block's share of it: neighbouring threads take neighbouring columns, and what threads are left split n. A thread
// holds up to kSteps vectors of each input, all of whose loads are in flight together: memory is read once. Blocks that
// share a row exchange their statistics in a cluster, or through a workspace between two launches, the second of which
// reads its tile again.
//
// Rows may start anywhere. A row's vectors are those of the whole array that overlap it; only its first and last can
// hold elements of neighbours, and these are moved one by one.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/softmax/ops.cuh"

namespace jaxdnn::softmax {

constexpr int kMaxTileSpan = 10;
constexpr int kMaxTileThreads = 1 << kMaxTileSpan;

// Vectors of each input that a thread holds: 32 registers of elements, or 16 where a vector is only one.
template <class Op, int L>
constexpr int kTileSteps = (L == 1 ? 16 : 128 / sizeof(typename Op::A) / L) / Op::kInputs;

enum class Phase {
  kWhole,   // reduce and write, alone or in a cluster
  kReduce,  // write the statistics of a share to the workspace, where FoldKernel makes them those of a row
  kApply,   // read those, and write the share
};

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

// Bytes of shared memory: what a reduction needs, and the statistics of the cluster's blocks.
template <class Op, int W>
size_t TileBytes(const Tiling& t) {
  const size_t columns = W << t.group.stride;
  return W * t.Threads() * sizeof(typename Op::A) +
         (t.phase == Phase::kWhole && t.shares > 1 ? t.shares * columns * sizeof(typename Op::Stats) : 0);
}

template <class Op, class T, int L, int W, bool kMaskable>
__global__ void __launch_bounds__(kMaxTileThreads)
    TileKernel(const __grid_constant__ Tiling t, Op op, const __grid_constant__ Mask mask,
               typename Op::Stats* workspace, const T* in0, const T* in1, T* out) {
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  using V = Vec<T, L>;
  constexpr int kInputs = Op::kInputs, kSteps = kTileSteps<Op, L>;
  // Only vectors along a row can be shared with neighbours.
  constexpr bool kHasEdges = W == 1 && L > 1;
  extern __shared__ __align__(16) unsigned char shared[];
  A* scratch = reinterpret_cast<A*>(shared);
  Stats* slots = reinterpret_cast<Stats*>(scratch + W * blockDim.x);
  const int stride = t.group.stride, column = threadIdx.x & ((1 << stride) - 1);
  const int part = threadIdx.x >> stride, parts = blockDim.x >> stride;
  const unsigned index = blockIdx.x / static_cast<unsigned>(t.shares), rank = blockIdx.x - index * t.shares;
  const unsigned outer = index / static_cast<unsigned>(t.tiles), tile = index - outer * static_cast<unsigned>(t.tiles);

  // The block has vectors `first` and on of the row, `count` of them; the thread's are part, part + parts, ....
  const int64_t inner = t.shape.inner, pitch = inner / W, row = outer * t.shape.n * inner;
  const int64_t across = (int64_t{tile} << stride) + column;
  const int skew = kHasEdges ? static_cast<int>(row % L) : 0;
  const int64_t first = int64_t{rank} * t.share;
  const int64_t left = (kHasEdges ? (skew + t.shape.n + L - 1) / L : t.shape.n) - first;
  const bool active = across < pitch;
  const int count = active ? static_cast<int>(max(int64_t{0}, min(int64_t{t.share}, left))) : 0;
  const int steps = (t.share + parts - 1) / parts;
  const int64_t base = (row - skew) / L + (first + part) * pitch + across, step = parts * pitch;
  const auto at = [&](int s) { return part + s * parts; };

  // Of the elements of the block's vectors, in order, those from `begin` to `end` are the row's.
  const int begin = kHasEdges && rank == 0 ? skew : 0;
  const int end = kHasEdges ? static_cast<int>(min(int64_t{count} * L, skew + t.shape.n - first * L)) : count * L;
  const auto is_whole = [&](int s) { return !kHasEdges || (at(s) * L >= begin && at(s) * L + L <= end); };
  const auto is_inside = [&](int s, int i) { return !kHasEdges || (at(s) * L + i >= begin && at(s) * L + i < end); };

  // Whole vectors first, all loads together; then, one by one, the elements of those that are shared.
  V whole[kSteps][kInputs];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
#pragma unroll
      for (int i = 0; i < L; ++i) whole[s][j].v[i] = static_cast<T>(Op::Fill(j));
      if (at(s) < count && is_whole(s))
        whole[s][j] = *reinterpret_cast<const V*>((j == 0 ? in0 : in1) + (base + s * step) * L);
    }
  A v[kSteps][kInputs][L];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
#pragma unroll
      for (int i = 0; i < L; ++i) v[s][j][i] = static_cast<A>(whole[s][j].v[i]);
      if (kHasEdges && at(s) < count && !is_whole(s)) {
        const T* in = (j == 0 ? in0 : in1) + (base + s * step) * L;
#pragma unroll
        for (int i = 0; i < L; ++i)
          if (is_inside(s, i)) v[s][j][i] = static_cast<A>(in[i]);
      }
    }

  const bool* keep = nullptr;
  if (kMaskable && mask.data != nullptr && active)
    keep = mask.data + mask.Row(outer) + across * W * mask.along_inner +
           (W == 1 ? first * L - skew : first) * mask.along_n;
  // Of a vector that exists, a bit for each element that the mask keeps.
  const auto kept = [&](int s) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < L; ++i)
      if (is_inside(s, i)) {
        const int64_t place = W == 1 ? (at(s) * L + i) * mask.along_n : at(s) * mask.along_n + i * mask.along_inner;
        bits |= unsigned{keep[place]} << i;
      }
    return bits;
  };

  // A bit for each of the W rows that has entries, as far as this thread knows.
  unsigned some = kMaskable && mask.data != nullptr ? 0 : ~0u;
  const auto each = [&](auto&& visit) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (s < steps) visit(v[s]);
  };
  if (kMaskable && keep != nullptr) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (at(s) >= count) continue;
      const unsigned bits = kept(s);
      some |= bits;
#pragma unroll
      for (int j = 0; j < kInputs; ++j)
#pragma unroll
        for (int i = 0; i < L; ++i)
          if ((bits >> i & 1) == 0) v[s][j][i] = Op::Fill(j);
    }
  }
  // Of the thread's own elements, and of the row.
  Stats own[W], stats[W];
  if (t.phase == Phase::kApply) {
    // The workspace is [outer, shares, inner], the statistics of shares, and then [outer, inner], those of rows.
    for (int w = 0; w < W; ++w)
      stats[w] = active ? workspace[(t.shape.outer * t.shares + outer) * inner + across * W + w] : Op::Nothing();
    for (int w = 0; w < W; ++w) own[w] = stats[w];
    Op::template Exponentiate<W, L>(own, each);
  } else {
    Op::template Local<W, L>(own, each);
    for (int w = 0; w < W; ++w) stats[w] = (W == 1 ? some != 0 : (some >> w & 1) != 0) ? own[w] : Op::Nothing();
    Op::Combine(stats, [&](auto& values, auto operation) { Reduce(values, operation, t.group, scratch); });
  }
  if (t.phase == Phase::kWhole && t.shares > 1) {
    // The first barrier is for the others' shared memory to exist, the second for their statistics.
    ClusterArrive();
    ClusterWait();
    const int columns = W << stride;
    if (part == 0)
      for (int to = 0; to < t.shares; ++to)
        for (int w = 0; w < W; ++w)
          for (int i = 0; i < static_cast<int>(sizeof(Stats) / sizeof(A)); ++i)
            StoreRemote(reinterpret_cast<A*>(slots + rank * columns + column * W + w) + i, to,
                        reinterpret_cast<const A*>(&stats[w])[i]);
    ClusterArrive();
    ClusterWait();
    for (int w = 0; w < W; ++w) stats[w] = slots[column * W + w];
    for (int from = 1; from < t.shares; ++from)
      for (int w = 0; w < W; ++w) stats[w] = Op::Merge(stats[w], slots[from * columns + column * W + w]);
  }
  if (t.phase == Phase::kReduce) {
    if (part == 0 && active)
      for (int w = 0; w < W; ++w) workspace[(int64_t{outer} * t.shares + rank) * inner + across * W + w] = stats[w];
    return;
  }

  typename Op::Final final[W];
  for (int w = 0; w < W; ++w) final[w] = op.Finish(own[w], stats[w]);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (at(s) >= count) continue;
    const unsigned bits = kMaskable && keep != nullptr ? kept(s) : ~0u;
    V result;
#pragma unroll
    for (int i = 0; i < L; ++i) {
      const A value = Op::Result(final[i % W], v[s], i);
      result.v[i] = static_cast<T>(bits >> i & 1 ? value : final[i % W].absent);
    }
    T* to = out + (base + s * step) * L;
    if (is_whole(s)) {
      *reinterpret_cast<V*>(to) = result;
    } else if constexpr (kHasEdges) {
#pragma unroll
      for (int i = 0; i < L; ++i)
        if (is_inside(s, i)) to[i] = result.v[i];
    }
  }
}

// Statistics of the rows from those of their shares. A block takes a row.
template <class Op>
__global__ void __launch_bounds__(kMaxTileThreads) FoldKernel(Shape shape, int shares, typename Op::Stats* workspace) {
  using Stats = typename Op::Stats;
  __shared__ typename Op::A scratch[kMaxTileThreads];
  const int64_t row = blockIdx.x, outer = row / shape.inner, column = row - outer * shape.inner;
  Stats stats[1] = {Op::Nothing()};
  for (int64_t from = threadIdx.x; from < shares; from += kMaxTileThreads)
    stats[0] = Op::Merge(stats[0], workspace[(outer * shares + from) * shape.inner + column]);
  Op::Combine(stats, [&](auto& values, auto operation) { Reduce(values, operation, Group{0, kMaxTileSpan}, scratch); });
  if (threadIdx.x == 0) workspace[shape.outer * shares * shape.inner + row] = stats[0];
}

}  // namespace jaxdnn::softmax
