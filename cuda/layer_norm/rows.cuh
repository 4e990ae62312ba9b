// How rows are spread over threads, and what the forward and the backward
// kernels do with a row in the same way.
//
// A row is n vectors of L elements. A group of threads shares it: some lanes of
// a warp, a block, or a cluster of blocks; thread t of the group takes vectors
// t, t + size, t + 2 size, ..., at most V of them, which it keeps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/cluster.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/layer_norm/layer_norm.h"

namespace jaxdnn::layer_norm {

constexpr int kMaxCluster = 16;
constexpr int kMaxWarps = 32;

struct Spread {
  int64_t n;    // vectors of a row
  int width;    // threads of a group in one block: a power of two up to 32, or the
                // whole block
  int threads;  // of a block
  int cluster;  // blocks that share a row
  int steps;    // vectors that a thread takes at most

  __host__ __device__ int Groups() const { return threads / width; }
};

// The spread for rows of n vectors, of which a thread keeps at most `keep`.
// Groups of less than a warp share blocks of `shared` threads. Zero steps: no
// cluster of up to `max_cluster` blocks of `max_threads` can hold the row.
inline Spread SpreadRows(int64_t n, int keep, int shared, int max_threads, int max_cluster) {
  Spread s = {n, 1, shared, 1, 0};
  if (n <= int64_t{32} * keep) {
    while (s.width < std::min<int64_t>(n, 32)) s.width *= 2;
  } else {
    while (int64_t{s.cluster} * max_threads * keep < n) s.cluster *= 2;
    if (s.cluster > max_cluster) return s;
    s.width = s.threads = 32 * static_cast<int>(CeilDiv(n, int64_t{32} * keep * s.cluster));
  }
  s.steps = static_cast<int>(CeilDiv(n, int64_t{s.width} * s.cluster));
  return s;
}

// A thread's place in its group.
struct Place {
  int64_t n, first, stride;  // vectors first, first + stride, ... below n
  int64_t block;             // index of the cluster in the grid
  int rank;                  // of the block in its cluster
  int group;                 // index of the group in the block
  int width, cluster, steps;

  __device__ explicit Place(const Spread& s) : n(s.n), width(s.width), cluster(s.cluster), steps(s.steps) {
    const int threads = blockDim.x, thread = threadIdx.x;
    block = blockIdx.x / cluster;
    rank = blockIdx.x % cluster;
    // The width is a power of two where it is not the whole block.
    group = width == threads ? 0 : thread / width;
    first = rank * width + (width == threads ? thread : thread & (width - 1));
    stride = int64_t{width} * cluster;
  }
  __device__ bool IsLeader() const { return first == 0; }
};

// Calls f(s, k) for the vectors k that the thread takes.
template <int V, class F>
__device__ void ForEachVector(const Place& p, F&& f) {
#pragma unroll
  for (int s = 0; s < V; ++s)
    if (s < p.steps) {
      const int64_t k = p.first + s * p.stride;
      if (k < p.n) f(s, k);
    }
}

// Values that warps hand to each other. Consecutive sums need different
// exchanges.
template <class A, int W, bool kCluster>
struct Exchange {
  A values[kMaxWarps * (kCluster ? kMaxCluster : 1)][W];
};

// v[i] = the sum of v[i] over the threads of the group, in each of them, in a
// fixed order.
template <bool kCluster, int W, class A>
__device__ void GroupSum(A (&v)[W], const Place& p, Exchange<A, W, kCluster>& exchange) {
  for (int mask = 1; mask < min(32, p.width); mask *= 2)
#pragma unroll
    for (int i = 0; i < W; ++i) v[i] += ShuffleXor(v[i], mask);
  if (!kCluster && p.width <= 32) return;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kCluster) {
    if (lane < p.cluster)
      for (int i = 0; i < W; ++i) StoreRemote(&exchange.values[p.rank * warps + warp][i], lane, v[i]);
    ClusterArrive();
    ClusterWait();
  } else {
    if (lane == 0)
      for (int i = 0; i < W; ++i) exchange.values[warp][i] = v[i];
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < W; ++i) v[i] = 0;
  for (int w = 0; w < warps * p.cluster; ++w)
#pragma unroll
    for (int i = 0; i < W; ++i) v[i] += exchange.values[w][i];
}

// The parameters of vector k, in accesses of at most 16 bytes.
template <int L, class A>
__device__ void LoadParameters(A (&to)[L], const void* from, int64_t k) {
  constexpr int P = L < kVecLength<A> ? L : kVecLength<A>;
  const auto* in = static_cast<const Vec<A, P>*>(from) + k * (L / P);
#pragma unroll
  for (int j = 0; j < L / P; ++j) {
    const Vec<A, P> v = in[j];
#pragma unroll
    for (int i = 0; i < P; ++i) to[j * P + i] = v.v[i];
  }
}

template <int L, class A>
__device__ void StoreParameters(void* to, int64_t k, const A (&from)[L]) {
  constexpr int P = L < kVecLength<A> ? L : kVecLength<A>;
  auto* out = static_cast<Vec<A, P>*>(to) + k * (L / P);
#pragma unroll
  for (int j = 0; j < L / P; ++j) {
    Vec<A, P> v;
#pragma unroll
    for (int i = 0; i < P; ++i) v.v[i] = from[j * P + i];
    out[j] = v;
  }
}

// scale + offset and bias of vector k; 1 and 0 where they are absent.
template <int L, class A>
__device__ void LoadScale(A (&scale)[L], const void* from, const Options& options, int64_t k) {
#pragma unroll
  for (A& each : scale) each = 1;
  if (from == nullptr) return;
  LoadParameters(scale, from, k);
#pragma unroll
  for (A& each : scale) each += static_cast<A>(options.offset);
}

// Of one row, for (x - mean) rstd. The mean is the sum of two numbers, of which
// the second is in the shift.
template <class A>
struct Statistics {
  A mean, rstd, shift;

  __device__ A Normalize(A x) const { return fma(x - mean, rstd, shift); }
};

template <class A>
__device__ Statistics<A> LoadStatistics(const void* mean, const void* rstd, int64_t row) {
  const A r = static_cast<const A*>(rstd)[row];
  if (mean == nullptr) return {A(0), r, A(0)};
  const Vec<A, 2> m = static_cast<const Vec<A, 2>*>(mean)[row];
  return {m.v[0], r, -m.v[1] * r};
}

// Clusters came with compute capability 9.0.
inline bool HasClusters() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

}  // namespace jaxdnn::layer_norm
