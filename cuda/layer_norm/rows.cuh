// How rows are spread over threads, and what the forward and the backward kernels do with a row in the same way.
//
// A row is n vectors of L elements. A group of threads shares it: some lanes of a warp, a block, or a cluster of
// blocks; thread t of the group takes vectors t, t + size, t + 2 size, ..., V of them at most, and keeps them. Groups
// take several rows at once where rows are short.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/device_code.h"
#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/layer_norm/layer_norm.h"

namespace jaxdnn::layer_norm {

constexpr int kMaxCluster = 16;
constexpr int kMaxWarps = 16;

struct Spread {
  int n;        // vectors of a row
  int width;    // threads of a group in one block: a power of two up to 32, or the whole block
  int groups;   // of a block
  int cluster;  // blocks that share a row, a power of two
  int steps;    // vectors that a thread takes at most

  int Threads() const { return width * groups; }
};

// The spread for rows of n vectors, of which a thread keeps at most `keep`. Groups of up to a warp share blocks of
// `shared` threads; others are blocks of up to `most` threads, or clusters of those. No steps: there is no such spread.
inline Spread SpreadRows(int64_t n, int keep, int shared, int most, int max_cluster) {
  Spread s = {static_cast<int>(n), 1, 1, 1, 0};
  if (n <= int64_t{32} * keep) {
    while (s.width < std::min<int64_t>(n, 32)) s.width *= 2;
    s.groups = shared / s.width;
  } else {
    while (int64_t{s.cluster} * most * keep < n && s.cluster <= max_cluster) s.cluster *= 2;
    if (s.cluster > max_cluster) return s;
    s.width = 32 * static_cast<int>(CeilDiv(n, int64_t{32} * keep * s.cluster));
  }
  s.steps = static_cast<int>(CeilDiv(n, s.width * s.cluster));
  return s;
}

// The same with as few lanes as keep `keep` vectors each: fewer steps of a sum over the lanes. Blocks have `shared`
// threads at most.
inline Spread SpreadShortRows(int64_t n, int keep, int shared) {
  if (n > 32 * keep) return SpreadRows(n, keep, shared, shared, 1);
  Spread s = {static_cast<int>(n), 1, 1, 1, 0};
  while (int64_t{s.width} * keep < n) s.width *= 2;
  s.groups = shared / s.width;
  s.steps = static_cast<int>(CeilDiv(n, s.width));
  return s;
}

// A thread's place in its group.
struct Place {
  int n, first, stride;  // vectors first, first + stride, ... below n
  int width, cluster;    // as in Spread
  int block;             // index of the block, or cluster, in the grid
  int rank;              // of the block in its cluster
  int group;             // index of the group in the block

  __device__ Place(const Spread& s, bool clustered) : n(s.n), width(s.width), cluster(clustered ? s.cluster : 1) {
    block = clustered ? blockIdx.x / cluster : blockIdx.x;
    rank = clustered ? blockIdx.x % cluster : 0;
    // Of several groups in a block, the width is a power of two.
    group = s.groups == 1 ? 0 : threadIdx.x >> (31 - __clz(width));
    first = rank * width + threadIdx.x - group * width;
    stride = width * cluster;
  }
  __device__ bool IsLeader() const { return first == 0; }
};

// Calls f(s, k) for the vectors k that the thread takes. If exact, every thread takes V - 1 of them at least.
template <int V, bool kExact, class F>
__device__ void ForEachVector(const Place& p, F&& f) {
#pragma unroll
  for (int s = 0; s < V; ++s) {
    const int k = p.first + s * p.stride;
    if ((kExact && s < V - 1) || k < p.n) f(s, k);
  }
}

// The vectors of a row. Where rows are no multiple of a vector long they start anywhere in one: what lies before a
// row's first whole vector, and behind its last, are its edges, and threads take an element of those each. Rows a
// period apart start equally far into a vector: a thread that takes such rows alone has the same columns in each of
// them.
template <int L, bool kShifted>
struct Columns {
  int n, head, vectors;  // elements of a row, those before its vectors, and its vectors
  int edge;              // the thread's column in the edges, or none: -1

  // `thread`: its index in the group that shares the row.
  __device__ Columns(int64_t elements, int64_t row, int thread) : n(static_cast<int>(elements)), head(0), edge(-1) {
    if constexpr (kShifted) head = min(static_cast<int>(-(row * elements) & (L - 1)), n);
    vectors = (n - head) / L;
    if constexpr (kShifted) {
      const int column = thread < head ? thread : thread + vectors * L;
      if (column < n) edge = column;
    }
  }
  // The first of the vectors, in the array.
  __device__ int64_t Base(int64_t row) const { return (row * n + head) / L; }
  // The column of element i of vector k.
  __device__ int At(int k, int i) const { return head + k * L + i; }
  __device__ bool HasEdge() const { return kShifted && edge >= 0; }
};

__device__ inline float InverseRoot(float x) { return rsqrtf(x); }
__device__ inline double InverseRoot(double x) { return rsqrt(x); }

// The sum of L values, by halves: short chains of additions, and errors that do not grow with L.
template <class A, int L>
__device__ A SumOf(const A (&v)[L]) {
  if constexpr (L == 1) {
    return v[0];
  } else {
    constexpr int kHalf = (L + 1) / 2;
    A half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) half[i] = i + kHalf < L ? v[i] + v[i + kHalf] : v[i];
    return SumOf(half);
  }
}

// The elements in the accumulator's type, and back: of 16-bit floats a word of two at a time.
template <class T, int L, class A>
__device__ void Widen(A (&to)[L], const Vec<T, L>& from) {
  if constexpr (kIsPairs<T, L>) {
#pragma unroll
    for (int i = 0; i < L; i += 2) {
      uint32_t word;
      memcpy(&word, &from.v[i], sizeof(word));
      const float2 pair = WidenPair<T>(word);
      to[i] = pair.x;
      to[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < L; ++i) to[i] = static_cast<A>(from.v[i]);
  }
}

// Makes the compiler widen x again where it is used next: it would keep what takes twice the registers.
template <class T, int L>
__device__ void ForgetWide(Vec<T, L>& x) {
  if constexpr (kIsPairs<T, L>) {
#pragma unroll
    for (int i = 0; i < L; i += 2) {
      uint32_t word;
      memcpy(&word, &x.v[i], sizeof(word));
      asm("" : "+r"(word));
      memcpy(&x.v[i], &word, sizeof(word));
    }
  }
}

template <class T, int L, class A>
__device__ Vec<T, L> Narrow(const A (&from)[L]) {
  Vec<T, L> to;
  if constexpr (kIsPairs<T, L>) {
#pragma unroll
    for (int i = 0; i < L; i += 2) {
      const uint32_t word = NarrowPair<T>(from[i], from[i + 1]);
      memcpy(&to.v[i], &word, sizeof(word));
    }
  } else {
#pragma unroll
    for (int i = 0; i < L; ++i) to.v[i] = static_cast<T>(from[i]);
  }
  return to;
}

// The parameters of vector k, in accesses of at most 16 bytes.
template <int L, class A>
__device__ void LoadParameters(A (&to)[L], const A* from, int64_t k) {
  constexpr int P = L < kVecLength<A> ? L : kVecLength<A>;
  const auto* in = reinterpret_cast<const Vec<A, P>*>(from) + k * (L / P);
#pragma unroll
  for (int j = 0; j < L / P; ++j) {
    const Vec<A, P> v = LoadConstant(in + j);
#pragma unroll
    for (int i = 0; i < P; ++i) to[j * P + i] = v.v[i];
  }
}

template <int L, class A>
__device__ void StoreParameters(A* to, int64_t k, const A (&from)[L]) {
  constexpr int P = L < kVecLength<A> ? L : kVecLength<A>;
  auto* out = reinterpret_cast<Vec<A, P>*>(to) + k * (L / P);
#pragma unroll
  for (int j = 0; j < L / P; ++j) {
    Vec<A, P> v;
#pragma unroll
    for (int i = 0; i < P; ++i) v.v[i] = from[j * P + i];
    out[j] = v;
  }
}

// The same of the columns of vector k.
template <int L, bool kShifted, class A>
__device__ void LoadParameters(A (&to)[L], const A* from, const Columns<L, kShifted>& columns, int64_t problem, int k) {
  if constexpr (!kShifted) {
    LoadParameters(to, from, problem * columns.vectors + k);
  } else {
#pragma unroll
    for (int i = 0; i < L; ++i) to[i] = from[problem * columns.n + columns.At(k, i)];
  }
}

template <int L, bool kShifted, class A>
__device__ void StoreParameters(A* to, const Columns<L, kShifted>& columns, int k, const A (&from)[L]) {
  if constexpr (!kShifted) {
    StoreParameters(to, k, from);
  } else {
#pragma unroll
    for (int i = 0; i < L; ++i) to[columns.At(k, i)] = from[i];
  }
}

// The options in the accumulator's type, and what else a row's arithmetic needs.
template <class A>
struct Constants {
  bool center;
  A epsilon, offset, inverse;  // inverse: of the elements of a row

  Constants(const Options& o, int64_t n)
      : center(o.center),
        epsilon(static_cast<A>(o.epsilon)),
        offset(static_cast<A>(o.offset)),
        inverse(static_cast<A>(1.0 / static_cast<double>(n))) {}
};

// Parameters of a vector, as they lie in memory; 0 where there are none.
template <int L, class A, class... At>
__device__ void LoadBias(A (&bias)[L], const void* from, const At&... at) {
#pragma unroll
  for (A& each : bias) each = 0;
  if (from != nullptr) LoadParameters(bias, static_cast<const A*>(from), at...);
}

// Makes of a scale that is loaded so scale + offset; 1 where there is none.
template <int L, class A>
__device__ void AddOffset(A (&scale)[L], const void* from, A offset) {
#pragma unroll
  for (A& each : scale) each = from == nullptr ? A(1) : each + offset;
}

template <int L, class A, class... At>
__device__ void LoadScale(A (&scale)[L], const void* from, A offset, const At&... at) {
#pragma unroll
  for (A& each : scale) each = 1;
  if (from == nullptr) return;
  LoadParameters(scale, static_cast<const A*>(from), at...);
#pragma unroll
  for (A& each : scale) each += offset;
}

// A mean of 16-bit floats is exact enough as one number of the accumulator's type: if they differ at all, their
// deviation is far above its rounding. Of wider types the mean is the sum of two numbers.
template <class T>
constexpr bool kWideMean = sizeof(T) > 2;

// Of one row, as they lie in memory.
template <class A>
struct StoredStatistics {
  A mean, rest, rstd;
};

template <class A>
__device__ StoredStatistics<A> LoadStatistics(const void* mean, const void* rstd, int64_t row) {
  Vec<A, 2> m = {};
  if (mean != nullptr) m = static_cast<const Vec<A, 2>*>(mean)[row];
  return {m.v[0], m.v[1], static_cast<const A*>(rstd)[row]};
}

template <class A>
__device__ void StoreStatistics(const Forward& f, int64_t row, A mean, A rest, A rstd) {
  if (f.rstd != nullptr) static_cast<A*>(f.rstd)[row] = rstd;
  if (f.mean != nullptr) static_cast<Vec<A, 2>*>(f.mean)[row] = {{mean, rest}};
}

// The same, for h = (x - mean) rstd.
template <class T>
struct Statistics {
  using A = Accumulator<T>;
  A mean, rstd, shift;

  Statistics() = default;
  __device__ explicit Statistics(const StoredStatistics<A>& s) : mean(s.mean), rstd(s.rstd), shift(-s.rest * s.rstd) {}
  // The mean goes first: a constant row becomes exactly 0.
  __device__ A Normalize(A x) const { return fma(x - mean, rstd, shift); }
};

// x + y, rounded to their type.
template <class T, int L>
__device__ Vec<T, L> AddRounded(const Vec<T, L>& x, const Vec<T, L>& y) {
  Accumulator<T> a[L], b[L];
  Widen(a, x);
  Widen(b, y);
#pragma unroll
  for (int i = 0; i < L; ++i) a[i] += b[i];
  return Narrow<T>(a);
}

// The result of the norm for one vector.
template <class T, int L, class A>
__device__ Vec<T, L> Apply(const Vec<T, L>& x, const Statistics<T>& stats, const A (&scale)[L], const A (&bias)[L]) {
  A v[L];
  Widen(v, x);
#pragma unroll
  for (int i = 0; i < L; ++i) v[i] = fma(stats.Normalize(v[i]), scale[i], bias[i]);
  return Narrow<T>(v);
}

// The sums of x - pivot and of its square over a row, the mean and the variance that follow, and whether the pivot was
// so far from the mean that their difference swamps the variance: then the sums are made again, about that mean.
template <class A>
struct Central {
  A mean, rest, variance;
  bool far;

  __device__ Central(A pivot, A sum, A squares, A inverse) {
    constexpr A kFar = 16;
    const A d = sum * inverse, off = d * d;
    variance = squares * inverse - off;
    far = off > kFar * variance;
    mean = pivot + d;
    // What rounding took off: exact in this order, from the larger summand.
    rest = fabs(pivot) >= fabs(d) ? (pivot - mean) + d : (d - mean) + pivot;
  }
};

// The problem that a row belongs to. Division of 64-bit integers is slow, and rarely needed.
__device__ inline int64_t ProblemOf(int64_t row, const Shape& shape) {
  if (shape.problems == 1) return 0;
  if ((row | shape.rows) >> 32 == 0) return static_cast<uint32_t>(row) / static_cast<uint32_t>(shape.rows);
  return row / shape.rows;
}

struct Device {
  int multiprocessors = 1, max_cluster = 1, shared_bytes = 0;  // the last: of a block

  // A block's threads, `most` or half as many, where a thread has so many bytes of shared memory: more than 99 KB are
  // not on every device.
  int Threads(int most, size_t bytes) const {
    constexpr size_t kOwn = 3 << 10;  // of a kernel
    return most * bytes + kOwn <= static_cast<size_t>(shared_bytes) ? most : most / 2;
  }
};

inline cudaError_t Query(Device* device) {
  int index = 0;
  cudaError_t e = cudaGetDevice(&index);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, index);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  return e == cudaSuccess ? QueryMaxCluster(&device->max_cluster) : e;
}

template <class T>
constexpr DType kDType = sizeof(T) == 8              ? DType::kF64
                         : sizeof(T) == 4            ? DType::kF32
                         : std::is_same_v<T, __half> ? DType::kF16
                                                     : DType::kBF16;

// What each element type has kernels for. Doubles have only the plainest, and f16 has none for what is unaligned.
template <class T>
constexpr bool kHasPairs = std::is_same_v<T, __nv_bfloat16>;

// So few rows that a thread had better have little of each, and a row many threads.
inline bool AreFew(const Shape& shape, int64_t vectors, const Device& device) {
  return shape.problems * shape.rows * vectors <= int64_t{2048} * device.multiprocessors;
}

}  // namespace jaxdnn::layer_norm
