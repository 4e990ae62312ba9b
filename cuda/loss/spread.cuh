// How [outer, n, inner] is spread over groups of threads that go over memory once.
//
// As in cuda/softmax/tile.cuh, memory is vectors of L elements of which W = 1 (along a row) or W = L (across columns)
// results remain. A group of 1 << span threads, of a warp or a whole block, takes 1 << stride columns of vectors over a
// share of n.
#pragma once

#include <algorithm>

#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/softmax/softmax.h"

namespace jaxdnn::loss {

constexpr int kThreads = 256;

struct Spread {
  softmax::Shape shape;
  int64_t tiles;  // of columns, per outer index
  int shares;     // groups that share a tile
  int64_t share;  // vectors along n of each
  Group group;

  int64_t Blocks() const { return CeilDiv(shape.outer * tiles * shares << group.span, kThreads); }
};

// A thread's vectors: number `at` of them is base + at * pitch, for at = part, part + parts, ... below count.
template <int L, int W>
struct Place {
  int64_t outer, across, rank, first, base, pitch;
  int64_t n;
  int part, parts, count, skew;

  __device__ explicit Place(const Spread& s) : n(s.shape.n) {
    const int stride = s.group.stride, span = s.group.span;
    const int64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> span;
    const int64_t tile = group / s.shares;
    rank = group - tile * s.shares;
    outer = s.tiles == 1 ? tile : tile / s.tiles;
    across = ((tile - outer * s.tiles) << stride) + (threadIdx.x & ((1 << stride) - 1));
    part = (threadIdx.x & ((1 << span) - 1)) >> stride;
    parts = 1 << (span - stride);
    pitch = s.shape.inner / W;
    const int64_t row = outer * n * s.shape.inner;
    skew = W == 1 ? static_cast<int>(row % L) : 0;
    const int64_t vectors = W == 1 ? (skew + n + L - 1) / L : n;
    first = rank * s.share;
    const bool active = outer < s.shape.outer && across < pitch;
    count = active ? static_cast<int>(max(int64_t{0}, min(s.share, vectors - first))) : 0;
    base = (row - skew) / L + first * pitch + across;
  }

  __device__ bool IsActive(const Spread& s) const { return outer < s.shape.outer && across < pitch; }
  // Index along n of vector `at`, or of its first element, which may be a row's before.
  __device__ int64_t Along(int at) const { return W == 1 ? (first + at) * L - skew : first + at; }
  // Of the vector's elements, those from begin to end are the row's.
  struct Part {
    int begin, end;
    __device__ bool Has(int i) const { return i >= begin && i < end; }
    __device__ bool IsWhole() const { return begin == 0 && end == L; }
  };
  __device__ Part PartOf(int at) const {
    if (W > 1 || L == 1) return {0, L};
    const int64_t along = Along(at);
    return {along < 0 ? static_cast<int>(-along) : 0, static_cast<int>(min(int64_t{L}, n - along))};
  }

  // Vector `at`, with `fill` for what is not this row's.
  template <class T>
  __device__ Vec<T, L> Load(const T* in, int at, T fill) const {
    const int64_t index = base + at * pitch;
    const Part part = PartOf(at);
    if (part.IsWhole()) return reinterpret_cast<const Vec<T, L>*>(in)[index];
    Vec<T, L> v;
#pragma unroll
    for (int i = 0; i < L; ++i) v.v[i] = part.Has(i) ? in[index * L + i] : fill;
    return v;
  }
  template <class T>
  __device__ Words<T, L> LoadWords(const T* in, int at, T fill) const {
    if (PartOf(at).IsWhole()) return reinterpret_cast<const Words<T, L>*>(in)[base + at * pitch];
    return BitCast<Words<T, L>>(Load(in, at, fill));
  }
  template <class T>
  __device__ void Store(T* out, int at, const Vec<T, L>& v) const {
    const int64_t index = base + at * pitch;
    const Part part = PartOf(at);
    if (part.IsWhole()) {
      reinterpret_cast<Vec<T, L>*>(out)[index] = v;
    } else {
#pragma unroll
      for (int i = 0; i < L; ++i)
        if (part.Has(i)) out[index * L + i] = v.v[i];
    }
  }
  // Whether the mask, of which `keep` is the row's, keeps element i of vector `at`, which exists.
  __device__ bool IsKept(const bool* keep, const softmax::Mask& mask, int at, int i) const {
    return W > 1 ? keep[Along(at) * mask.along_n + i * mask.along_inner] : keep[(Along(at) + i) * mask.along_n];
  }
};

// Groups that give every thread about `steps` vectors, of less columns where there would be too few of them; a row is
// cut into shares where `max_shares` allows, for enough threads.
template <int L, int W>
Spread PlanSpread(const softmax::Shape& shape, int element_bytes, int steps, int64_t max_shares) {
  constexpr int64_t kEnough = 132 * 8 * kThreads;
  const int64_t vectors = W == 1 && L > 1 ? (shape.n + L - 2) / L + 1 : shape.n, pitch = shape.inner / W;
  const int bytes = L * element_bytes;
  const int widest = std::min(CeilLog2(pitch), std::max(0, CeilLog2(512 / bytes)));
  const int narrowest = std::min(widest, std::max(0, CeilLog2(64 / bytes)));
  const int most = CeilLog2(kThreads);
  int stride = widest, span;
  for (;; --stride) {
    // A group is of one warp or of the whole block.
    span = stride + CeilLog2(CeilDiv(vectors, steps));
    if (span > 5) span = most;
    if (stride == narrowest || shape.outer * CeilDiv(pitch, 1 << stride) << span >= kEnough) break;
  }
  const int64_t tiles = CeilDiv(pitch, 1 << stride), parts = int64_t{1} << (span - stride);
  const int64_t wanted = CeilDiv(kEnough, std::max<int64_t>(shape.outer * tiles << span, 1));
  const int64_t shares = std::clamp<int64_t>(std::min(wanted, vectors / (parts * steps)), 1, max_shares);
  return {shape, tiles, static_cast<int>(shares), CeilDiv(vectors, shares), {stride, span}};
}

}  // namespace jaxdnn::loss
