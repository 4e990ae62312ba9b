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
// The reduced dimension is split into slabs, so that the grid is one wave of blocks, or whole waves. Maps go through
// the same slabs backwards: what the reduction before read last is still in the L2 cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cuda/batch_norm/batch_norm.h"
#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::batch_norm {

constexpr int kThreads = 256;
constexpr int kSpan = 8;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int64_t kWave = 132 * kBlocksPerMultiprocessor;
// Up to this s, channels-first goes by columns.
constexpr int64_t kLongestColumns = 256;

struct Tiling {
  int64_t outer, n, c, s;
  int64_t tiles;        // of columns; for runs, channels
  int64_t slabs, slab;  // their number, and the rows or vectors in one
  // Columns.
  int64_t copies, columns, rows;
  int width, height, lanes;
  // Runs: vectors in one.
  FastDiv length;
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
    const int64_t block = reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t row = block / t.tiles;
    tile = block - row * t.tiles;
    outer = row / t.slabs;
    slab = row - outer * t.slabs;
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
  int full;   // those before it
  bool part;  // of the tile

  __device__ Columns(const Tiling& t, bool reverse) : block(t, reverse) {
    const int ty = threadIdx.x / t.width, tx = threadIdx.x - ty * t.width;
    part = ty < t.height;
    column = (block.tile * t.width + tx) * V;
    base = block.outer * t.n * t.c * t.s;
    end = base + t.n * t.c * t.s;
    row = block.slab * t.slab + ty;
    const int64_t stop = min((block.slab + 1) * t.slab, t.rows);
    first = base + row * t.columns + column;
    step = t.height * t.columns;
    steps = part && column < t.columns && row < stop ? static_cast<int>((stop - row + t.height - 1) / t.height) : 0;
    full = steps;
    if (steps > 0) {
      const int64_t last = first + (steps - 1) * step;
      if (last >= end)
        steps = full = steps - 1;
      else if (last + V > end)
        full = steps - 1;
    }
  }

  __device__ Span At(const Tiling& t, int i) const {
    Span span = {first + i * step, 0, V, 0};
    if (i >= full) span.hi = static_cast<int>(end - span.offset);
    if constexpr (V == 1)
      if (t.where) span.where = (block.outer * t.n + row + int64_t{i} * t.height) * t.s + column % t.s;
    return span;
  }

  // f(i, channel) for the channel of element i of the thread's vectors.
  template <class F>
  __device__ void EachChannel(const Tiling& t, F&& f) const {
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
  int at, steps, full;

  __device__ Runs(const Tiling& t, bool reverse) : block(t, reverse) {
    const int64_t length = t.length.divisor, start = block.slab * t.slab;
    const int64_t stop = min(start + t.slab, t.n * length);
    run = start / length;
    base = (block.outer * t.n * t.c + block.tile) * t.s;
    step = t.c * t.s;
    at = static_cast<int>(start - run * length) + threadIdx.x;
    const int count = static_cast<int>(stop - start) - static_cast<int>(threadIdx.x);
    steps = count > 0 ? (count + kThreads - 1) / kThreads : 0;
    full = t.ragged ? 0 : steps;
  }

  __device__ Span At(const Tiling& t, int i) const {
    int v;
    const int64_t n = run + t.length.Div(at + i * kThreads, &v);
    const int64_t start = base + n * step;
    if (V == 1 || !t.ragged) return {start + v * V, 0, V, (block.outer * t.n + n) * t.s + v};
    const int64_t offset = (start & -V) + v * V;
    return {offset, static_cast<int>(max(start - offset, int64_t{0})),
            static_cast<int>(min(start + t.s - offset, int64_t{V})), 0};
  }

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

// A vector; zeros where it does not exist, or what is next to it. kWhole: all of it exists.
template <class M, bool kWhole = false>
__device__ Vec<typename M::T, M::V> Load(const Tiling& t, const typename M::T* in, const Span& span) {
  using T = typename M::T;
  constexpr int V = M::V;
  Vec<T, V> v;
  if (kWhole || V == 1 || span.offset + V <= t.outer * t.n * t.c * t.s) {
    v = *reinterpret_cast<const Vec<T, V>*>(in + span.offset);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) v.v[i] = i >= span.lo && i < span.hi ? in[span.offset + i] : static_cast<T>(0.0f);
  }
  return v;
}

template <class M, bool kWhole = false>
__device__ void Store(typename M::T* out, const Span& span, const Vec<typename M::T, M::V>& v) {
  using T = typename M::T;
  constexpr int V = M::V;
  if (kWhole || V == 1 || (span.lo == 0 && span.hi == V)) {
    *reinterpret_cast<Vec<T, V>*>(out + span.offset) = v;
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i >= span.lo && i < span.hi) out[span.offset + i] = v.v[i];
  }
}

// Reduces the results of a block's threads to one for each channel, and hands them to write(i, value): i is the index
// of the channel in a row of partial results, which holds copies * c of them. `scratch`: W values for each thread.
template <class M, class V, class Op, class F>
__device__ void ReduceBlock(const Tiling& t, const M& m, V (&v)[M::W], Op op, V* scratch, F&& write) {
  if constexpr (M::kRuns) {
    Reduce(v, op, Group{0, kSpan}, scratch);
    if (threadIdx.x == 0) write(m.block.tile, v[0]);
  } else {
    constexpr int W = M::W;
    const int columns = t.width * W, s = static_cast<int>(t.s), channels = columns / s;
    if (m.part) {
#pragma unroll
      for (int i = 0; i < W; ++i) scratch[threadIdx.x * W + i] = v[i];
    }
    __syncthreads();
    // `lanes` threads for a channel: down the tile's rows, or where a channel has several columns, along these.
    const int lane = threadIdx.x & (t.lanes - 1);
    for (int first = 0; first < channels; first += kThreads / t.lanes) {
      const int channel = first + threadIdx.x / t.lanes;
      V sum = {};
      if (channel < channels)
        for (int y = s == 1 ? lane : 0; y < t.height; y += s == 1 ? t.lanes : 1)
          for (int x = s == 1 ? 0 : lane; x < s; x += s == 1 ? 1 : t.lanes)
            sum = op(sum, scratch[y * columns + channel * s + x]);
      for (int mask = 1; mask < t.lanes; mask *= 2) sum = op(sum, ShuffleXor(sum, mask));
      const int64_t i = m.block.tile * channels + channel;
      if (lane == 0 && channel < channels && i < t.copies * t.c) write(i, sum);
    }
  }
}

// Host side -----------------------------------------------------------------------------------------------------------

// The slabs, at most `limit`, that leave the multiprocessors least idle at the end.
inline void Split(Tiling* t, int64_t extent, int64_t smallest, int64_t limit) {
  const int64_t blocks = t->outer * t->tiles;
  limit = std::max<int64_t>(1, std::min({limit, CeilDiv(extent, smallest), CeilDiv(4 * kWave, blocks)}));
  double best = 0;
  for (int64_t slabs = 1; slabs <= limit; ++slabs) {
    const int64_t slab = CeilDiv(extent, slabs), waves = CeilDiv(blocks * slabs, kWave);
    // A block begins with what it cannot do at full speed.
    const double cost = static_cast<double>(waves * (slab + smallest));
    if (slabs == 1 || cost < best) best = cost, t->slabs = slabs;
  }
  t->slab = CeilDiv(extent, t->slabs);
  t->slabs = CeilDiv(extent, t->slab);
}

// `limit` is how many rows of partial results, of c each, there may be.
inline Tiling ByRuns(const Problem& p, int vector, int64_t limit) {
  Tiling t = {p.outer, p.n, p.c, p.s};
  t.where = static_cast<const uint8_t*>(p.where);
  t.copies = 1;
  t.tiles = p.c;
  t.ragged = p.s % vector != 0;
  const int64_t length = p.s % vector ? (p.s + 2 * vector - 2) / vector : p.s / vector;
  t.length = FastDiv(length);
  Split(&t, p.n * length, 4 * kThreads, limit);
  return t;
}

inline Tiling ByColumns(const Problem& p, int vector, int64_t limit) {
  Tiling t = {p.outer, p.n, p.c, p.s};
  t.where = static_cast<const uint8_t*>(p.where);
  t.copies = vector / std::gcd(p.c * p.s, int64_t{vector});
  t.columns = t.copies * p.c * p.s;
  t.rows = CeilDiv(p.n, t.copies);
  // A tile holds whole channels. The widest of those that leave few threads idle.
  const int unit = static_cast<int>(p.s / std::gcd(p.s, int64_t{vector}));
  const int64_t units = CeilDiv(t.columns / vector, unit);
  double best = 0;
  for (int64_t tiles = CeilDiv(units * unit, kThreads), i = 0; i < 16 && tiles <= units; ++i, ++tiles) {
    const int width = static_cast<int>(CeilDiv(units, tiles)) * unit;
    if (width > kThreads) continue;
    const int height = kThreads / width;
    const double used = static_cast<double>(width * height) / kThreads * static_cast<double>(t.columns / vector) /
                        static_cast<double>(CeilDiv(t.columns / vector, width) * width);
    if (used > best * 1.05) best = used, t.width = width, t.height = height;
  }
  t.tiles = CeilDiv(t.columns / vector, t.width);
  const int channels = t.width * vector / static_cast<int>(p.s);
  t.lanes = 1;
  while (t.lanes < 32 && 2 * t.lanes * channels <= kThreads) t.lanes *= 2;
  Split(&t, t.rows, 4 * t.height, limit / t.copies);
  return t;
}

template <class M>
struct AccessTag {
  using type = M;
};

// Calls f(AccessTag, Tiling). `limit` as above, `aligned` says whether all buffers allow 16-byte accesses.
template <class T, class F>
cudaError_t VisitTiling(Problem p, bool aligned, int64_t limit, F&& f) {
  if (p.outer == 0 || p.n == 0 || p.c == 0 || p.s == 0) return cudaSuccess;
  // One channel is one column.
  if (p.c == 1) p.n *= p.s, p.s = 1;
  constexpr int kV = kVecLength<T>;
  const bool runs = p.s > kLongestColumns;
  if constexpr (kV > 1 && sizeof(T) < 8) {
    // Every outer index must begin at a vector.
    const bool whole = p.outer == 1 || p.n * p.c * p.s % kV == 0;
    const int64_t copies = kV / std::gcd(p.c * p.s, int64_t{kV});
    if (aligned && whole && !p.where && (runs || copies <= limit))
      return runs ? f(AccessTag<Runs<T, kV>>{}, ByRuns(p, kV, limit))
                  : f(AccessTag<Columns<T, kV>>{}, ByColumns(p, kV, limit));
  }
  return runs ? f(AccessTag<Runs<T, 1>>{}, ByRuns(p, 1, limit)) : f(AccessTag<Columns<T, 1>>{}, ByColumns(p, 1, limit));
}

}  // namespace jaxdnn::batch_norm
