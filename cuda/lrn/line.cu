// Windows along the contiguous dimension.
//
// Rows are seen as one flat array, of which a lane holds V neighbouring elements. What a window needs of its neighbours
// comes by shuffles: squares first, and for the cotangent r = q x g as well. A warp's outermost lanes have no neighbour
// on one side, so they only supply the others, and the next warp covers their elements again. So memory is read once,
// but for 2 or 4 of 32 lanes, and written once. Bound by memory, and for 16-bit types nearly by instructions as well.
//
// Where rows are whole vectors, a row's ends are a lane's ends; other rows begin anywhere, and every step of a sum asks
// whether it crosses one.
#include <algorithm>
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/lrn/paths.h"
#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {
namespace {

constexpr int kThreads = 256;
// The most cells on one side of an element.
constexpr int kMaxReach = 8;

struct Line {
  int64_t total;  // elements
  int n, before, after;
  int edge;              // lanes at either end of a warp that only supply
  int64_t padding;       // a multiple of n, at least a vector
  bool aligned, narrow;  // pointers allow vectors; offsets fit into 31 bits
  FastDiv by_row;        // in vectors where rows are whole vectors, else in elements
};

// How a lane holds elements: V of them, with rows of whole vectors and windows of kCells cells on either side, or with
// rows that begin anywhere and windows of up to kCells.
template <int kV, bool kWhole, int kCells>
struct Layout {
  static constexpr int V = kV, kReach = kCells;
  static constexpr bool kWholeVectors = kWhole;
};

// v with kReach neighbours on either side: e[i + kReach] = v[i].
template <int kReach, int V, class A>
__device__ void WithNeighbours(const A (&v)[V], A (&e)[V + 2 * kReach]) {
#pragma unroll
  for (int i = 0; i < kReach; ++i) e[i] = __shfl_up_sync(~0u, v[V - kReach + i], 1);
#pragma unroll
  for (int i = 0; i < V; ++i) e[kReach + i] = v[i];
#pragma unroll
  for (int i = 0; i < kReach; ++i) e[kReach + V + i] = __shfl_down_sync(~0u, v[i], 1);
}

// Sums over windows in rows of whole vectors.
template <class L>
struct WholeRows {
  bool first, last;  // vector of its row

  __device__ WholeRows(const Line& line, int64_t vector) {
    int at;
    if (line.narrow)
      line.by_row.Div(static_cast<int>(vector), &at);
    else
      at = static_cast<int>(vector % line.by_row.divisor);
    first = at == 0;
    last = at == static_cast<int>(line.by_row.divisor) - 1;
  }

  template <class A>
  __device__ void Sum(const Line&, bool, const A (&v)[L::V], A (&sum)[L::V]) const {
    constexpr int V = L::V, H = L::kReach;
    if constexpr (H == 0) {
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] = v[i];
      return;
    }
    A e[V + 2 * H], pair[V + 2 * H - 1];
    WithNeighbours<H>(v, e);
#pragma unroll
    for (int i = 0; i < H; ++i) {
      e[i] = first ? A(0) : e[i];
      e[V + H + i] = last ? A(0) : e[V + H + i];
    }
#pragma unroll
    for (int i = 0; i < V + 2 * H - 1; ++i) pair[i] = e[i] + e[i + 1];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      sum[i] = e[i];
#pragma unroll
      for (int d = 1; d < 2 * H; d += 2) sum[i] += pair[i + d];
    }
  }
};

// Sums over windows in rows that begin anywhere.
template <class L>
struct AnyRows {
  static constexpr int kSpan = L::V + 2 * L::kReach + 1;
  unsigned same_row[kSpan];  // as element i - 1 - kReach of the lane: all ones where i - kReach is, else zero

  __device__ AnyRows(const Line& line, int64_t vector) {
    const int64_t flat = vector * L::V - L::kReach + line.padding;
    int at;
    if (line.narrow)
      line.by_row.Div(static_cast<int>(flat), &at);
    else
      at = static_cast<int>(flat % line.n);
    unsigned starts = 0;
    for (int i = at == 0 ? 0 : line.n - at; i < kSpan; i += line.n) starts |= 1u << i;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) same_row[i] = (starts >> i & 1) - 1;
  }

  // value, or 0 where elements i - 1 and i are of different rows: also instead of a NaN.
  __device__ float Across(int i, float value) const { return __uint_as_float(__float_as_uint(value) & same_row[i]); }

  __device__ void Sum(const Line& line, bool mirrored, const float (&v)[L::V], float (&sum)[L::V]) const {
    constexpr int V = L::V, R = L::kReach;
    const int before = mirrored ? line.after : line.before, after = mirrored ? line.before : line.after;
    float e[V + 2 * R];
    WithNeighbours<R>(v, e);
    // left[i] and right[i]: the sums of up to so many neighbours of element i as levels are done.
    float left[R + V] = {}, right[R + V] = {};
#pragma unroll 1
    for (int level = 0; level < before; ++level)
#pragma unroll
      for (int i = R + V - 1; i > 0; --i) left[i] = Across(i, e[i - 1] + left[i - 1]);
#pragma unroll 1
    for (int level = 0; level < after; ++level)
#pragma unroll
      for (int i = 0; i < R + V - 1; ++i) right[i] = Across(i + R + 1, e[i + R + 1] + right[i + 1]);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = (left[R + i] + e[R + i]) + right[i];
  }
};

// Where rows are whole vectors, so is the array, and it is aligned. Accesses are of 16 bytes.
template <class L, class T>
__device__ Packed<T, L::V> Load(const Line& line, const T* p, int64_t vector) {
  constexpr int V = L::V, kWide = V < kVecLength<T> ? V : kVecLength<T>;
  using Access = Packed<T, kWide>;
  const int64_t flat = vector * V;
  Packed<T, V> packed = {};
  if (L::kWholeVectors ? flat >= 0 && flat < line.total : line.aligned && flat >= 0 && flat + V <= line.total) {
#pragma unroll
    for (int i = 0; i < V / kWide; ++i)
      reinterpret_cast<Access*>(&packed)[i] = reinterpret_cast<const Access*>(p + flat)[i];
  } else if (!L::kWholeVectors) {
    Accumulator<T> wide[V];
#pragma unroll
    for (int i = 0; i < V; ++i)
      wide[i] = flat + i >= 0 && flat + i < line.total ? static_cast<Accumulator<T>>(p[flat + i]) : 0;
    packed = Narrow<T, V>(wide);
  }
  return packed;
}

template <class L, class T>
__device__ void Store(const Line& line, T* p, int64_t vector, const Accumulator<T> (&wide)[L::V]) {
  constexpr int V = L::V, kWide = V < kVecLength<T> ? V : kVecLength<T>;
  using Access = Packed<T, kWide>;
  const int64_t flat = vector * V;
  const auto packed = Narrow<T, V>(wide);
  if (L::kWholeVectors || (line.aligned && flat + V <= line.total)) {
#pragma unroll
    for (int i = 0; i < V / kWide; ++i)
      reinterpret_cast<Access*>(p + flat)[i] = reinterpret_cast<const Access*>(&packed)[i];
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (flat + i < line.total) p[flat + i] = static_cast<T>(wide[i]);
  }
}

template <Map kMap, class L, int kTiles, class T>
__global__ void __launch_bounds__(kThreads, 2)
    LineKernel(const __grid_constant__ Line line, Response<T> response, const T* __restrict__ t,
               const T* __restrict__ x, T* __restrict__ out) {
  using A = Accumulator<T>;
  constexpr int V = L::V;
  using Rows = std::conditional_t<L::kWholeVectors, WholeRows<L>, AnyRows<L>>;
  const int lane = threadIdx.x % 32, useful = 32 - 2 * line.edge;
  const int64_t warp = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  const int64_t first = warp * kTiles * useful - line.edge + lane;
  // All loads are in flight before anything else happens.
  Packed<T, V> in[kTiles], with[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    in[tile] = Load<L>(line, x, first + tile * useful);
    if constexpr (kMap != Map::kForward) with[tile] = Load<L>(line, t, first + tile * useful);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t vector = first + tile * useful;
    const Rows rows(line, vector < 0 ? 0 : vector);
    A c[V], w[V], term[V], energy[V], gain[V], q[V], product[V], result[V];
    Widen<T>(in[tile], c);
    if constexpr (kMap != Map::kForward) Widen<T>(with[tile], w);
#pragma unroll
    for (int i = 0; i < V; ++i) term[i] = c[i] * c[i];
    rows.Sum(line, false, term, energy);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (kMap == Map::kForward)
        gain[i] = response.Gain(response.Divisor(energy[i]));
      else
        gain[i] = response.Gain(response.Divisor(energy[i]), &q[i]);
      if constexpr (kMap == Map::kCotangent) term[i] = q[i] * (c[i] * w[i]);
    }
    if constexpr (kMap != Map::kForward) rows.Sum(line, true, term, product);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (kMap == Map::kForward) result[i] = c[i] * gain[i];
      if constexpr (kMap == Map::kCotangent) result[i] = w[i] * gain[i] - c[i] * product[i];
    }
    if (lane >= line.edge && lane < 32 - line.edge && vector * V < line.total) Store<L>(line, out, vector, result);
  }
}

template <Map kMap, class L, class T>
cudaError_t Launch(const Problem& p, const T* t, const T* x, T* out, bool aligned, cudaStream_t stream) {
  constexpr int V = L::V;
  // Loads in flight, by the registers that they take.
  constexpr int kTiles = L::kWholeVectors ? 2 : 1;
  Line line = {};
  line.n = p.extent[2];
  line.total = p.outer * line.n;
  line.before = p.before[2];
  line.after = p.after[2];
  line.aligned = aligned;
  line.padding = CeilDiv(V, line.n) * line.n;
  line.narrow = line.total + line.padding < INT32_MAX - (1 << 20);
  line.by_row = FastDiv(L::kWholeVectors ? line.n / V : line.n);
  // The cotangent's sum is over sums: it sees as far as both windows together.
  const int reach = kMap == Map::kCotangent ? line.before + line.after : std::max(line.before, line.after);
  const bool rows_end_with_warps = 32 * V % line.n == 0;
  line.edge = rows_end_with_warps ? 0 : reach <= V ? 1 : 2;
  const int64_t warps = CeilDiv(CeilDiv(line.total, V), (32 - 2 * line.edge) * kTiles);
  return LaunchKernel(LineKernel<kMap, L, kTiles, T>, CeilDiv(warps, kThreads / 32), kThreads, stream, line,
                      Response<T>(p), t, x, out);
}

template <Map kMap, class T>
cudaError_t LaunchMap(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  constexpr int V = kVecLength<T>;
  const bool aligned = IsVectorAligned(t, x, out);
  const int reach = std::max(p.before[2], p.after[2]);
  if (reach == 0) {
    // Every element is by itself, wherever rows begin.
    Problem one = p;
    one.outer = p.outer * p.extent[2] / V;
    one.extent[2] = V;
    if (aligned && one.Elements() == p.Elements())
      return Launch<kMap, Layout<V, true, 0>>(one, t, x, out, aligned, stream);
  }
  if (aligned && p.extent[2] % V == 0 && p.before[2] == p.after[2]) {
    if (reach == 1) return Launch<kMap, Layout<V, true, 1>>(p, t, x, out, aligned, stream);
    if (reach == 2) return Launch<kMap, Layout<V, true, 2>>(p, t, x, out, aligned, stream);
    if (reach == 3) return Launch<kMap, Layout<V, true, 3>>(p, t, x, out, aligned, stream);
  }
  if (reach <= 3) return Launch<kMap, Layout<8, false, 3>>(p, t, x, out, aligned, stream);
  return Launch<kMap, Layout<8, false, kMaxReach>>(p, t, x, out, aligned, stream);
}

template <class T>
cudaError_t LaunchType(Map map, const Problem& p, const void* t, const void* x, void* out, cudaStream_t stream) {
  const T *with = static_cast<const T*>(t), *in = static_cast<const T*>(x);
  T* result = static_cast<T*>(out);
  return map == Map::kForward ? LaunchMap<Map::kForward>(p, with, in, result, stream)
                              : LaunchMap<Map::kCotangent>(p, with, in, result, stream);
}

}  // namespace

bool IsLine(Map map, const Problem& p, DType dtype) {
  return map != Map::kTangent && dtype != DType::kF64 && p.inner == 1 && p.extent[0] == 1 && p.extent[1] == 1 &&
         std::max(p.before[2], p.after[2]) <= kMaxReach;
}

cudaError_t LaunchLine(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                       cudaStream_t stream) {
  return VisitSingleDType(
      dtype, [&](auto type) { return LaunchType<typename decltype(type)::type>(map, p, t, x, out, stream); });
}

}  // namespace jaxdnn::lrn
