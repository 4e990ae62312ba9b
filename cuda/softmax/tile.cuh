// Tiles of [outer, n, inner] in shared memory, each reduced over n by the
// threads of a block or of several.
//
// Memory is seen as vectors of L elements. Along a row (inner = 1) a vector's
// elements are reduced together, to W = 1 result; across columns they belong to
// W = L results. A tile is 1 << stride columns of vectors, over all of n or
// over a block's share of it: neighbouring threads take neighbouring columns,
// and what threads are left split n. A thread copies its vectors to shared
// memory, all copies in flight together, and goes over them there: memory is
// read once. Blocks that share a row exchange their statistics in a cluster, or
// through a workspace between two launches, the second of which reads its tile
// again.
//
// Rows may start anywhere. A row's vectors are those of the whole array that
// overlap it; only its first and last can hold elements of neighbours, and
// these are moved one by one.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/softmax/ops.cuh"

namespace jaxdnn::softmax {

constexpr int kMaxTileThreads = 512;

enum class Phase {
  kWhole,   // reduce and write, alone or in a cluster
  kReduce,  // write the statistics of a share to the workspace, where FoldKernel makes them those of a row
  kApply,   // read those, and write the share
};

struct Tiling {
  Shape shape;
  int64_t tiles;  // of columns, per outer index
  int shares;     // blocks that share a tile
  int64_t share;  // vectors along n of each
  Group group;    // of threads: stride columns
  Phase phase;

  int Threads() const { return 1 << group.span; }
  int64_t Blocks() const { return shape.outer * tiles * shares; }
};

// Bytes of shared memory: the tile's inputs, what a reduction needs, and the
// statistics of the cluster's blocks.
template <class Op, class T, int L, int W>
size_t TileBytes(const Tiling& t) {
  const size_t columns = size_t{1} << t.group.stride;
  const size_t held = Op::kInputs * t.share * columns * L * sizeof(T);
  return (held + 15) / 16 * 16 + W * t.Threads() * sizeof(typename Op::A) +
         (t.phase == Phase::kWhole && t.shares > 1 ? t.shares * columns * W * sizeof(typename Op::Stats) : 0);
}

template <class Op, class T, int L, int W>
__global__ void __launch_bounds__(kMaxTileThreads)
    TileKernel(const __grid_constant__ Tiling t, Op op, const __grid_constant__ Mask mask,
               typename Op::Stats* workspace, const T* in0, const T* in1, T* out) {
  using A = typename Op::A;
  using Stats = typename Op::Stats;
  using V = Vec<T, L>;
  constexpr int kInputs = Op::kInputs;
  extern __shared__ __align__(16) unsigned char shared[];
  const int stride = t.group.stride, column = threadIdx.x & ((1 << stride) - 1);
  const int part = threadIdx.x >> stride, parts = blockDim.x >> stride;
  const unsigned index = blockIdx.x / static_cast<unsigned>(t.shares), rank = blockIdx.x - index * t.shares;
  const unsigned outer = index / static_cast<unsigned>(t.tiles), tile = index - outer * static_cast<unsigned>(t.tiles);

  // Vector k of this thread's column is in[base + k * pitch]; the block has
  // those from `first`, `count` of them.
  const int64_t pitch = t.shape.inner / W, row = outer * t.shape.n * t.shape.inner;
  const int64_t across = (int64_t{tile} << stride) + column;
  const int skew = W == 1 ? static_cast<int>(row % L) : 0;
  const int64_t vectors = W == 1 ? (skew + t.shape.n + L - 1) / L : t.shape.n;
  const int64_t first = rank * t.share;
  const int count = across < pitch ? static_cast<int>(max(int64_t{0}, min(t.share, vectors - first))) : 0;
  const int64_t base = (row - skew) / L + first * pitch + across;
  const V* in[2] = {reinterpret_cast<const V*>(in0) + base, reinterpret_cast<const V*>(in1) + base};
  out += base * L;

  // Place k of the row, of element i of vector `at`; and whether all of the
  // vector's elements are the row's.
  const auto place = [&](int at, int i) { return W == 1 ? (first + at) * L - skew + i : first + at; };
  const auto is_whole = [&](int at) { return W > 1 || L == 1 || (place(at, 0) >= 0 && place(at, L - 1) < t.shape.n); };
  const auto is_inside = [&](int at, int i) { return place(at, i) >= 0 && place(at, i) < t.shape.n; };

  V* held = reinterpret_cast<V*>(shared) + column;
  const int size = static_cast<int>(t.share) << stride;
  const auto at_input = [&](int input, int at) -> V& { return held[input * size + (at << stride)]; };
  for (int at = part; at < count; at += parts) {
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      if (is_whole(at)) {
        CopyAsync(&at_input(j, at), in[j] + at * pitch);
      } else {
        const T* from = reinterpret_cast<const T*>(in[j] + at);
        for (int i = 0; i < L; ++i) at_input(j, at).v[i] = is_inside(at, i) ? from[i] : Op::Fill(j);
      }
    }
  }
  CommitAsync();

  const bool* keep = mask.data == nullptr ? nullptr : mask.data + mask.Row(outer) + across * W * mask.along_inner;
  const auto kept = [&](int at) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < L; ++i)
      if (is_inside(at, i))
        bits |= unsigned{keep[place(at, i) * mask.along_n + (W > 1 ? i * mask.along_inner : 0)]} << i;
    return bits;
  };

  A* scratch = reinterpret_cast<A*>(shared + (kInputs * size * sizeof(V) + 15) / 16 * 16);
  Stats* slots = reinterpret_cast<Stats*>(scratch + W * blockDim.x);
  const auto reduce = [&](auto& values, auto operation) { Reduce(values, operation, t.group, scratch); };
  Stats stats[W];
  WaitAsync<0>();
  if (t.phase != Phase::kApply) {
    unsigned some = keep == nullptr ? ~0u : 0;
    if (keep != nullptr) {
      for (int at = part; at < count; at += parts) {
        const unsigned bits = kept(at);
        some |= bits;
        for (int j = 0; j < kInputs; ++j)
#pragma unroll
          for (int i = 0; i < L; ++i)
            if ((bits >> i & 1) == 0) at_input(j, at).v[i] = Op::Fill(j);
      }
    }
    Op::template Local<W, L>(stats, [&](auto&& visit) {
#pragma unroll 4
      for (int at = part; at < count; at += parts) {
        V v[kInputs];
        for (int j = 0; j < kInputs; ++j) v[j] = at_input(j, at);
        visit(v);
      }
    });
    for (int w = 0; w < W; ++w)
      if (W == 1 ? some == 0 : (some >> w & 1) == 0) stats[w] = Op::Nothing();
    Op::Combine(stats, reduce);
  }
  if (t.phase == Phase::kWhole && t.shares > 1) {
    // The first barrier is for the others' shared memory to exist, the second
    // for their statistics.
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
  // The workspace is [outer, shares, inner], the statistics of shares, and then [outer, inner], those of rows.
  const int64_t inner = t.shape.inner;
  if (t.phase == Phase::kReduce) {
    if (part == 0 && across < pitch)
      for (int w = 0; w < W; ++w) workspace[(int64_t{outer} * t.shares + rank) * inner + across * W + w] = stats[w];
    return;
  }
  if (t.phase == Phase::kApply && across < pitch)
    for (int w = 0; w < W; ++w) stats[w] = workspace[(t.shape.outer * t.shares + outer) * inner + across * W + w];

  typename Op::Final final[W];
  for (int w = 0; w < W; ++w) final[w] = op.Finish(stats[w]);
#pragma unroll 2
  for (int at = part; at < count; at += parts) {
    V v[kInputs], result;
    for (int j = 0; j < kInputs; ++j) v[j] = at_input(j, at);
#pragma unroll
    for (int i = 0; i < L; ++i) {
      T x[kInputs];
      for (int j = 0; j < kInputs; ++j) x[j] = v[j].v[i];
      result.v[i] = Op::Result(final[i % W], x);
    }
    if (keep != nullptr) {
      const unsigned bits = kept(at);
#pragma unroll
      for (int i = 0; i < L; ++i)
        if ((bits >> i & 1) == 0) result.v[i] = Op::Absent(final[i % W]);
    }
    if (is_whole(at))
      reinterpret_cast<V*>(out)[at * pitch] = result;
    else
      for (int i = 0; i < L; ++i)
        if (is_inside(at, i)) out[at * L + i] = result.v[i];
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
  Op::Combine(stats, [&](auto& values, auto operation) { Reduce(values, operation, Group{0, 9}, scratch); });
  if (threadIdx.x == 0) workspace[shape.outer * shares * shape.inner + row] = stats[0];
}

}  // namespace jaxdnn::softmax
