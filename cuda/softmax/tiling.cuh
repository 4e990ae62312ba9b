// How [outer, n, inner] is spread over threads, for a reduction over n.
//
// Memory is seen as vectors of L elements. Along a row (inner = 1) a vector's elements are reduced together, to W = 1
// result; across columns (inner > 1) they belong to W = L results. Either way what remains is an array of vectors
// [outer, n, inner] to be reduced over its middle dimension, in tiles of 1 << stride columns that a group of
// 1 << span threads shares: neighbouring threads take neighbouring columns, and what threads are left split n.
// A thread keeps up to kSteps vectors in registers, so that memory is read once; a tile that does not fit (kSteps = 0)
// is read twice, the second time mostly from the L2 cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/softmax/softmax.h"

namespace jaxdnn::softmax {

constexpr int kMaxSpan = 9;
constexpr int kMaxThreads = 1 << kMaxSpan;
// Groups of less than a warp share blocks of this size.
constexpr int kSharedBlock = 256;
// Elements that a thread can hold without spilling: of a tile, and of one batch of loads when it streams.
template <class T>
constexpr int kHeld = sizeof(T) == 8 ? 16 : 32;
template <class T>
constexpr int kStreamed = sizeof(T) == 8 ? 4 : 16;
// Threads of a group that streams: less for columns, where every thread has W results to reduce.
template <int W>
constexpr int kStreamingThreads = W == 1 ? kMaxThreads : kMaxThreads / 2;

struct Tiling {
  Shape shape;    // counted in vectors
  int64_t tiles;  // of columns, per outer index
  Group group;

  int Threads() const { return group.span <= 5 ? kSharedBlock : 1 << group.span; }
  int64_t Blocks() const { return CeilDiv(shape.outer * tiles, Threads() >> group.span); }
};

// A thread's place: it reads vectors base + k * inner for k = part, part + parts, ..., at most `steps` of them.
struct Place {
  int64_t base, steps;
  int part, parts;
  bool active;

  __device__ explicit Place(const Tiling& t) {
    const int stride = t.group.stride, span = t.group.span;
    const int64_t index = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> span;
    const int64_t outer = t.tiles == 1 ? index : index / t.tiles;
    const int64_t column = ((index - outer * t.tiles) << stride) + (threadIdx.x & ((1 << stride) - 1));
    part = (threadIdx.x & ((1 << span) - 1)) >> stride;
    parts = 1 << (span - stride);
    steps = (t.shape.n + parts - 1) >> (span - stride);
    active = outer < t.shape.outer && column < t.shape.inner;
    base = outer * t.shape.n * t.shape.inner + column;
  }
};

// Loads v[s] = in[k] for k = start + s * parts, and `fill` past the end: all loads are in flight together.
template <int kSteps, class V, class T>
__device__ void LoadSteps(V (&v)[kSteps], const V* in, const Tiling& t, const Place& p, int64_t start, T fill) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t k = start + int64_t{s} * p.parts;
    if (p.active && k < t.shape.n) {
      v[s] = in[p.base + k * t.shape.inner];
    } else {
      for (T& x : v[s].v) x = fill;
    }
  }
}

// out[k] = v[s], for the k of LoadSteps that exist.
template <int kSteps, class V>
__device__ void StoreSteps(const V (&v)[kSteps], V* out, const Tiling& t, const Place& p, int64_t start) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t k = start + int64_t{s} * p.parts;
    if (p.active && k < t.shape.n) out[p.base + k * t.shape.inner] = v[s];
  }
}

inline int CeilLog2(int64_t n) {
  int log = 0;
  while (int64_t{1} << log < n) ++log;
  return log;
}

// The tiling in which a thread holds at most `steps` vectors; none if that takes more threads than a block has.
// Columns are given up for threads along n until a tile's rows are down to 64 bytes.
inline std::optional<Tiling> FitTiling(const Shape& shape, int steps, int vector_bytes) {
  const int along = CeilLog2(CeilDiv(shape.n, steps));
  const int all = std::min(5, CeilLog2(shape.inner));
  const int stride = std::clamp(kMaxSpan - along, std::min(all, CeilLog2(64 / vector_bytes)), all);
  if (stride + along > kMaxSpan) return std::nullopt;
  return Tiling{shape, CeilDiv(shape.inner, 1 << stride), {stride, stride + along}};
}

// The tiling for rows that no block can hold.
inline Tiling StreamingTiling(const Shape& shape, int threads) {
  const int stride = std::min(5, CeilLog2(shape.inner));
  return {shape, CeilDiv(shape.inner, 1 << stride), {stride, CeilLog2(threads)}};
}

// How a kernel reads: vectors of L elements with W results, kSteps of them held, or 0 to read them twice.
template <int kL, int kW, int kHeldSteps>
struct Access {
  static constexpr int L = kL, W = kW, kSteps = kHeldSteps;
};

template <int L, int W, int kShort, int kLong, class F>
cudaError_t VisitSteps(const Shape& shape, int vector_bytes, F&& f) {
  const auto few = FitTiling(shape, kShort, vector_bytes);
  if (few && few->group.span <= 5) return f(Access<L, W, kShort>{}, *few);
  if (const auto many = FitTiling(shape, kLong, vector_bytes)) return f(Access<L, W, kLong>{}, *many);
  return f(Access<L, W, 0>{}, StreamingTiling(shape, kStreamingThreads<W>));
}

// Calls f(Access, Tiling) for buffers of element type T; `aligned` says whether all allow 16-byte accesses.
template <class T, class F>
cudaError_t VisitTiling(const Shape& s, bool aligned, F&& f) {
  constexpr int L = kVecLength<T>;
  // Columns of four, since every one more is one more sum to hold; of doubles one by one, a warp still reads 256 bytes.
  constexpr int W = sizeof(T) == 8 ? 1 : 4;
  if (s.outer == 0 || s.n == 0 || s.inner == 0) return cudaSuccess;
  if (aligned && s.inner == 1 && s.n % L == 0) return VisitSteps<L, 1, 1, kHeld<T> / L>({s.outer, s.n / L, 1}, 16, f);
  if constexpr (W > 1)
    if (aligned && s.inner % W == 0)
      return VisitSteps<W, W, kHeld<T> / W, kHeld<T> / W>({s.outer, s.n, s.inner / W}, W * sizeof(T), f);
  return VisitSteps<1, 1, 4, kHeld<T> / 2>(s, sizeof(T), f);
}

}  // namespace jaxdnn::softmax
