// How [outer, n, c, s] is spread over threads, for reductions to [outer, c] and for elementwise maps with parameters
// from there. Memory is read in vectors of V elements. Two ways:
//
// Columns (s small, s = 1 above all): a matrix with rows of c s elements. A thread keeps to one vector of columns and
// walks down the rows, so that it needs W = V parameters and has W = V results, which a tile of threads adds up where
// they belong to one channel. Where a row is no multiple of V, `copies` rows are taken for one: V rows of any length
// are a whole number of vectors, and the same channels come up at another place.
//
// Runs (s large): a channel has n runs of s elements. A block keeps to one channel, W = 1, and walks over its vectors.
// Where a run is no multiple of V, its first and last vector reach into its neighbours and are taken in part.
//
// The blocks that share a channel take turns, so that the grid, one wave of blocks or whole waves, goes through memory
// from one end to the other. Maps start from the other end: what the reduction before read last is still in the L2
// cache.
#pragma once

#include <cstdint>

#include "cuda/batch_norm/batch_norm.h"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::batch_norm {

constexpr int kThreads = 256;
constexpr int kSpan = 8;
constexpr int64_t kMultiprocessors = 132;
// Up to this s, channels-first goes by columns.
constexpr int64_t kLongestColumns = 256;
constexpr int kTileWidth = 32;
constexpr int64_t kNoLimit = int64_t{1} << 40;

struct Tiling {
  int64_t outer, n, c, s;
  int64_t tiles;  // of columns; for runs, channels
  int64_t slabs;  // blocks that share a channel
  int steps;      // the most that a thread takes
  FastDiv by_tiles, by_slabs;
  // Columns.
  int64_t copies, columns, rows;
  FastDiv width, height;
  int lanes;
  // Runs: vectors in one; and from a block's first to the next one's, and from one of a thread to its next.
  FastDiv length;
  int64_t start;
  int stride;
  bool ragged;
  const uint8_t* where;

  int64_t Blocks() const { return outer * tiles * slabs; }
  // Rows of partial results.
  __host__ __device__ int64_t Partials() const { return slabs * copies; }
};

// A vector of which the elements [lo, hi) exist.
struct Span {
  int64_t offset;
  int lo, hi;
  int64_t where;  // index into the mask, for V = 1
};

// The block's place in the grid.
struct BlockPlace {
  int64_t outer, slab, tile;

  __device__ BlockPlace(const Tiling& t, bool reverse) {
    int low;
    const int row = t.by_tiles.Div(static_cast<int>(reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x), &low);
    tile = low;
    outer = t.by_slabs.Div(row, &low);
    slab = low;
  }
};

template <class Type, int kV>
struct Columns {
  using T = Type;
  static constexpr int V = kV, W = kV;
  static constexpr bool kRuns = false;

  BlockPlace block;
  int64_t base, end, first, column, row, step;
  int steps;  // the rows of this thread; the last may be a part of a vector
  int full;   // those before it, which can be read as vectors; none of V = 1
  bool part;  // of the tile

  __device__ Columns(const Tiling& t, bool reverse) : block(t, reverse) {
    const int width = static_cast<int>(t.width.divisor), height = static_cast<int>(t.height.divisor);
    int tx;
    const int ty = t.width.Div(static_cast<int>(threadIdx.x), &tx);
    part = ty < height;
    column = (block.tile * width + tx) * V;
    base = block.outer * t.n * t.c * t.s;
    end = base + t.n * t.c * t.s;
    row = block.slab * height + ty;
    first = base + row * t.columns + column;
    step = t.slabs * height * t.columns;
    steps = part && column < t.columns ? t.steps : 0;
    if (steps > 0 && first + (steps - 1) * step >= end) --steps;
    full = V == 1 ? 0 : steps > 0 && first + (steps - 1) * step + V > end ? steps - 1 : steps;
    // Held, and not computed anew for each vector.
    asm volatile("" : "+l"(first), "+l"(step));
  }

  __device__ Span At(const Tiling& t, int i) const {
    Span span = {first + i * step, 0, V, 0};
    if (V > 1 && i >= full) span.hi = static_cast<int>(end - span.offset);
    if constexpr (V == 1)
      if (t.where) span.where = (block.outer * t.n + row + i * t.slabs * t.height.divisor) * t.s + column % t.s;
    return span;
  }

  // At(i) for i < full, all of whose elements exist.
  __device__ Span Full(const Tiling&, int i) const { return {first + i * step, 0, V, 0}; }

  // f(i, channel) for the channel of element i of the thread's vectors.
  template <class F>
  __device__ void EachChannel(const Tiling& t, F&& f) const {
    // Without copies and runs, as is usual, no division.
    const int64_t at = t.copies == 1 ? column : column % (t.c * t.s);
    int64_t channel = t.s == 1 ? at : at / t.s, rest = at - channel * t.s;
    if (column >= t.columns) channel = 0;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      f(i, block.outer * t.c + channel);
      if (++rest == t.s) rest = 0, channel = channel + 1 == t.c ? 0 : channel + 1;
    }
  }
};

template <class Type, int kV>
struct Runs {
  using T = Type;
  static constexpr int V = kV, W = 1;
  static constexpr bool kRuns = true;

  BlockPlace block;
  int64_t run, base, step;  // the first run; where the runs begin; from one to the next
  int at, steps;
  int full;  // the steps before a vector that reaches beyond the array; none of V = 1

  __device__ Runs(const Tiling& t, bool reverse) : block(t, reverse) {
    const int64_t length = t.length.divisor, start = block.slab * t.start;
    const int64_t left = t.n * length - start - threadIdx.x;
    run = start / length;
    base = (block.outer * t.n * t.c + block.tile) * t.s;
    step = t.c * t.s;
    at = static_cast<int>(start - run * length) + threadIdx.x;
    steps = left > 0 ? static_cast<int>(min(int64_t{t.steps}, (left - 1) / t.stride + 1)) : 0;
    full = V == 1 ? 0 : steps;
    if (t.ragged && full > 0 && At(t, steps - 1).offset + V > t.outer * t.n * t.c * t.s) --full;
  }

  __device__ Span At(const Tiling& t, int i) const {
    int v;
    const int64_t n = run + t.length.Div(at + i * t.stride, &v);
    const int64_t start = base + n * step;
    if (V == 1 || !t.ragged) return {start + v * V, 0, V, (block.outer * t.n + n) * t.s + v};
    const int64_t offset = (start & -V) + v * V;
    return {offset, static_cast<int>(max(start - offset, int64_t{0})),
            static_cast<int>(min(start + t.s - offset, int64_t{V})), 0};
  }
  __device__ Span Full(const Tiling& t, int i) const { return At(t, i); }

  template <class F>
  __device__ void EachChannel(const Tiling& t, F&& f) const {
    f(0, block.outer * t.c + block.tile);
  }
};

// Whether the mask, which only V = 1 knows, keeps the element.
template <class M>
__device__ bool Kept(const Tiling& t, const Span& span) {
  if constexpr (M::V == 1)
    return t.where == nullptr || t.where[span.where];
  else
    return true;
}

// A vector; zeros where it does not exist, or what is next to it.
template <class M>
__device__ Vec<typename M::T, M::V> Load(const Tiling& t, const typename M::T* in, const Span& span) {
  using T = typename M::T;
  constexpr int V = M::V;
  Vec<T, V> v;
  if (V == 1 || span.offset + V <= t.outer * t.n * t.c * t.s) {
    v = *reinterpret_cast<const Vec<T, V>*>(in + span.offset);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) v.v[i] = i >= span.lo && i < span.hi ? in[span.offset + i] : static_cast<T>(0.0f);
  }
  return v;
}

template <class M>
__device__ void Store(typename M::T* out, const Span& span, const Vec<typename M::T, M::V>& v) {
  using T = typename M::T;
  constexpr int V = M::V;
  if (V == 1 || (span.lo == 0 && span.hi == V)) {
    *reinterpret_cast<Vec<T, V>*>(out + span.offset) = v;
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i >= span.lo && i < span.hi) out[span.offset + i] = v.v[i];
  }
}

// Calls f(span, v) for the thread's full vectors of K arrays, from the first to the last. It reads U at once.
template <int K, int U, class M, class F>
__device__ void ForBatches(const Tiling& t, const M& m, const typename M::T* const* in, F&& f) {
  using Vector = Vec<typename M::T, M::V>;
  for (int i = 0; i < m.full; i += U) {
    Vector v[U][K];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t offset = m.Full(t, min(i + u, m.full - 1)).offset;
#pragma unroll
      for (int k = 0; k < K; ++k) v[u][k] = *reinterpret_cast<const Vector*>(in[k] + offset);
    }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u < m.full) f(m.Full(t, i + u), v[u]);
  }
}

// The thread's vectors of K arrays, from the first to the last or, if kReverse, the other way. They come through a ring
// in shared memory: so many are on their way as there would not be registers for.
template <class M, int K, bool kReverse>
class Stream {
 public:
  using T = typename M::T;
  using Vector = Vec<T, M::V>;
  static constexpr int kStages = K == 1 ? 8 : K == 2 ? 4 : 3;
  using Ring = Vector[kStages][K][kThreads];

  // Begins to read.
  __device__ Stream(const Tiling& t, const M& m, const T* const* in, Ring& ring) : t_(t), m_(m), in_(in), ring_(ring) {
#pragma unroll 1
    for (int k = 0; k < kStages - 1; ++k) Fetch(k);
  }

  // f(span, v)
  template <class F>
  __device__ void ForEach(F&& f) {
#pragma unroll 1
    for (int k = 0; k < m_.steps; ++k) {
      Fetch(k + kStages - 1);
      WaitAsync<kStages - 1>();
      Vector v[K];
#pragma unroll
      for (int j = 0; j < K; ++j) v[j] = ring_[k % kStages][j][threadIdx.x];
      f(m_.At(t_, Index(k)), v);
    }
  }

 private:
  // Of the k-th.
  __device__ int Index(int k) const { return kReverse ? m_.steps - 1 - k : k; }
  __device__ void Fetch(int k) {
    if (k < m_.steps) {
      const int i = Index(k);
      const Span span = m_.At(t_, i);
      if (M::V == 1 || i < m_.full) {
#pragma unroll
        for (int j = 0; j < K; ++j)
          CopyAsync(&ring_[k % kStages][j][threadIdx.x], reinterpret_cast<const Vector*>(in_[j] + span.offset));
      } else {
#pragma unroll
        for (int j = 0; j < K; ++j) ring_[k % kStages][j][threadIdx.x] = Load<M>(t_, in_[j], span);
      }
    }
    CommitAsync();
  }

  const Tiling& t_;
  const M& m_;
  const T* const* in_;
  Ring& ring_;
};

// Reduces the results of a block's threads to one for each channel, and hands them to write(i, value): i is the index
// of the channel in a row of partial results, which holds copies * c of them. `scratch`: W values for each thread.
template <class M, class V, class Op, class F>
__device__ void ReduceBlock(const Tiling& t, const M& m, V (&v)[M::W], Op op, V* scratch, F&& write) {
  if constexpr (M::kRuns) {
    Reduce(v, op, Group{0, kSpan}, scratch);
    if (threadIdx.x == 0) write(m.block.tile, v[0]);
  } else {
    constexpr int W = M::W;
    const int width = static_cast<int>(t.width.divisor), height = static_cast<int>(t.height.divisor);
    const int s = static_cast<int>(t.s), channels = width * W / s;
    // A thread's values are exchanged, differently from those of its neighbours, for the banks' sake.
    const auto place = [&](int y, int column) {
      const int x = column / W;
      return (y * width + x) * W + ((column ^ (x + y)) & (W - 1));
    };
    int x;
    const int y = t.width.Div(static_cast<int>(threadIdx.x), &x);
    if (m.part) {
#pragma unroll
      for (int i = 0; i < W; ++i) scratch[place(y, x * W + i)] = v[i];
    }
    __syncthreads();
    // `lanes` threads for a channel: down the tile's rows, or where a channel has several columns, along these.
    const int lane = threadIdx.x & (t.lanes - 1);
    for (int first = 0; first < channels; first += kThreads / t.lanes) {
      const int channel = first + threadIdx.x / t.lanes;
      V sum = {};
      if (channel < channels)
        for (int y = s == 1 ? lane : 0; y < height; y += s == 1 ? t.lanes : 1)
          for (int x = s == 1 ? 0 : lane; x < s; x += s == 1 ? 1 : t.lanes)
            sum = op(sum, scratch[place(y, channel * s + x)]);
      for (int mask = 1; mask < t.lanes; mask *= 2) sum = op(sum, ShuffleXor(sum, mask));
      const int64_t i = m.block.tile * channels + channel;
      if (lane == 0 && channel < channels && i < t.copies * t.c) write(i, sum);
    }
  }
}

}  // namespace jaxdnn::batch_norm
