// Windows along the contiguous dimension.
//
// Rows are seen as one flat array, of which a lane holds V neighbouring elements. What a window needs of its neighbours
// comes by shuffles: squares first, and for the cotangent r = q x g as well. A warp's outermost lanes have no neighbour
// on one side, so they only supply the others, and the next warp covers their elements again. So memory is read once,
// but for 2 or 4 of 32 lanes, and written once. Bound by memory, and for 16-bit types nearly by instructions as well.
//
// A window's sum is one of sums of 1, 2, 4 and 8 elements, by the binary digits of its length. Where rows are whole
// vectors, a row's ends are a lane's ends, beyond which are zeros. Other rows begin anywhere: there sums grow to either
// side of an element, and an addition is left out where it would cross the end of a row. Neither subtracts, so a NaN or
// an infinity shows in the windows that hold it, and in no other.
#include <algorithm>
#include <cstdlib>
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
  int n;
  int reach, longer;   // cells of a window on either side, and how many more behind its element than in front
  int edge;            // lanes at either end of a warp that only supply
  int tiles;           // of a warp
  int64_t padding;     // whole rows, longer than what the first warp's lanes see in front of the array
  int64_t in_vectors;  // elements that may be accessed as vectors
  int step;            // what a warp's next tile begins further, in its row: in vectors or elements, as by_row
  unsigned starts;     // the bits of a row's first elements, if bit 0 is one
  bool narrow;         // offsets fit into 31 bits
  FastDiv by_row;      // in vectors where rows are whole vectors, else in elements
};

// How a lane holds elements: V of them, with rows of whole vectors or rows that begin anywhere, and windows of kCells
// cells on either side; or of up to kMost, and perhaps one more on one side, which only the launch knows.
template <int kV, bool kWhole, int kCells, int kMost = kCells>
struct Layout {
  static constexpr int V = kV, kLeastReach = kCells, kMostReach = kMost;
  static constexpr bool kWholeVectors = kWhole, kKnown = kCells == kMost;
  // What windows of H cells on either side may reach.
  template <int H>
  static constexpr int kSight = kKnown || H == kMost ? H : H + 1;
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

// Sums over windows in rows of whole vectors: beyond a row's ends are zeros.
template <class L>
struct WholeRows {
  static constexpr int V = L::V;
  int at;  // the lane's vector in its row

  __device__ WholeRows(const Line& line, int64_t flat) {
    const int64_t vector = (flat + line.padding) / V;
    if (line.narrow)
      line.by_row.Div(static_cast<int>(vector), &at);
    else
      at = static_cast<int>(vector % line.by_row.divisor);
  }

  __device__ void Advance(const Line& line) {
    const int length = static_cast<int>(line.by_row.divisor);
    at += line.step;
    if (at >= length) at -= length;
  }

  // Adds to each sum[i] what it has not got of kLength elements from i on: it has as many as the digits up to that of
  // kWidth say. e[i] are sums of kWidth elements.
  template <int kLength, int kWidth, int N>
  static __device__ void AddPowers(float (&e)[N], float (&sum)[V]) {
    if constexpr (2 * kWidth <= kLength) {
#pragma unroll
      for (int i = 0; i + kWidth < N; ++i) e[i] += e[i + kWidth];
      if constexpr ((kLength & 2 * kWidth) != 0) {
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += e[i + kLength % (2 * kWidth)];
      }
      AddPowers<kLength, 2 * kWidth>(e, sum);
    }
  }

  template <int H>
  __device__ void SumReach(const Line& line, int longer, const float (&v)[V], float (&sum)[V]) const {
    constexpr int kSight = L::template kSight<H>;
    const bool first = at == 0, last = at == static_cast<int>(line.by_row.divisor) - 1;
    float seen[V + 2 * kSight], e[V + 2 * H];
    WithNeighbours<kSight>(v, seen);
#pragma unroll
    for (int i = 0; i < kSight; ++i) {
      seen[i] = first ? 0 : seen[i];
      seen[V + kSight + i] = last ? 0 : seen[V + kSight + i];
    }
#pragma unroll
    for (int i = 0; i < V + 2 * H; ++i) e[i] = seen[kSight - H + i];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = e[i];
    if (kSight > H && longer != 0) {
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += longer > 0 ? seen[i + 2 * kSight] : seen[i];
    }
    AddPowers<2 * H + 1, 1>(e, sum);
  }
};

// Sums over windows in rows that begin anywhere.
template <class L>
struct AnyRows {
  static constexpr int V = L::V, kHalo = L::kMostReach;
  int left;         // elements from the first that has a bit to the first that begins a row
  unsigned starts;  // bit i + kHalo: element i of the lane begins a row

  __device__ AnyRows(const Line& line, int64_t flat) {
    // The element in front of the first that has a bit: if it ends a row, nothing is left.
    flat += line.padding - kHalo - 1;
    int at;
    if (line.narrow)
      line.by_row.Div(static_cast<int>(flat), &at);
    else
      at = static_cast<int>(flat % line.n);
    left = line.n - 1 - at;
    Mark(line);
  }

  __device__ void Mark(const Line& line) { starts = left < 32 ? line.starts << left : 0; }

  __device__ void Advance(const Line& line) {
    left -= line.step;
    if (left < 0) left += line.n;
    Mark(line);
  }

  // Bits of elements that are of another row than the one kDistance before them.
  template <int kDistance>
  __device__ unsigned Apart() const {
    constexpr int kHalf = kDistance / 2;
    if constexpr (kDistance == 1)
      return starts;
    else
      return Apart<kHalf>() | Apart<kDistance - kHalf>() << kHalf;
  }

  // Adds what comes from another element of the same row. `apart` has a bit for the later of them, i, if it is not.
  static __device__ void Add(float& sum, float value, unsigned apart, int i) {
    const float more = sum + value;
    sum = apart & (1u << (i + kHalo)) ? sum : more;
  }

  // Adds to each sum[i] what it has not got of H neighbours on either side: it has as many as the digits below that of
  // kWidth say. left[i] and right[i] are sums of kWidth elements up to and from i - H, as far as its row goes.
  template <int H, int kWidth>
  __device__ void AddPowers(float (&left)[V + 2 * H], float (&right)[V + 2 * H], float (&sum)[V]) const {
    if constexpr ((H & kWidth) != 0) {
      constexpr int kNext = 1 + H % kWidth;
      const unsigned apart = Apart<kNext>();
#pragma unroll
      for (int i = 0; i < V; ++i) {
        Add(sum[i], left[i + H - kNext], apart, i);
        Add(sum[i], right[i + H + kNext], apart, i + kNext);
      }
    }
    if constexpr (2 * kWidth <= H) {
      const unsigned apart = Apart<kWidth>();
#pragma unroll
      for (int i = V + 2 * H - 1; i >= kWidth; --i) Add(left[i], left[i - kWidth], apart, i - H);
#pragma unroll
      for (int i = 0; i + kWidth < V + 2 * H; ++i) Add(right[i], right[i + kWidth], apart, i + kWidth - H);
      AddPowers<H, 2 * kWidth>(left, right, sum);
    }
  }

  template <int H>
  __device__ void SumReach(const Line&, int longer, const float (&v)[V], float (&sum)[V]) const {
    constexpr int kSight = L::template kSight<H>;
    float seen[V + 2 * kSight], left[V + 2 * H], right[V + 2 * H];
    WithNeighbours<kSight>(v, seen);
#pragma unroll
    for (int i = 0; i < V + 2 * H; ++i) left[i] = right[i] = seen[kSight - H + i];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = v[i];
    if (kSight > H && longer != 0) {
      const unsigned apart = Apart<kSight>() >> (longer > 0 ? kSight : 0);
#pragma unroll
      for (int i = 0; i < V; ++i) Add(sum[i], longer > 0 ? seen[i + 2 * kSight] : seen[i], apart, i);
    }
    if constexpr (H > 0) AddPowers<H, 1>(left, right, sum);
  }
};

// The sums over each element's window, or the mirrored one, which is known to have kLeast to kMost cells on either
// side.
template <class L, int kLeast, int kMost, class Rows>
__device__ void Sum(const Rows& rows, const Line& line, bool mirrored, const float (&v)[L::V], float (&sum)[L::V]) {
  if constexpr (kLeast == kMost) {
    rows.template SumReach<kLeast>(line, mirrored ? -line.longer : line.longer, v, sum);
  } else {
    constexpr int kMiddle = (kLeast + kMost) / 2;
    if (line.reach <= kMiddle)
      Sum<L, kLeast, kMiddle>(rows, line, mirrored, v, sum);
    else
      Sum<L, kMiddle + 1, kMost>(rows, line, mirrored, v, sum);
  }
}

// Where rows are whole vectors, so is the array, and it is aligned. Accesses are of 16 bytes.
template <class L, class T>
__device__ Packed<T, L::V> Load(const Line& line, const T* p, int64_t flat) {
  constexpr int V = L::V, kWide = V < kVecLength<T> ? V : kVecLength<T>;
  using Access = Packed<T, kWide>;
  Packed<T, V> packed = {};
  if (static_cast<uint64_t>(flat) < static_cast<uint64_t>(line.in_vectors)) {
#pragma unroll
    for (int i = 0; i < V / kWide; ++i)
      reinterpret_cast<Access*>(&packed)[i] = reinterpret_cast<const Access*>(p + flat)[i];
  } else if (!L::kWholeVectors && flat >= 0 && flat < line.total) {
    const int count = static_cast<int>(min(line.total - flat, int64_t{V}));
    Accumulator<T> wide[V];
#pragma unroll
    for (int i = 0; i < V; ++i) wide[i] = i < count ? static_cast<Accumulator<T>>(p[flat + i]) : 0;
    packed = Narrow<T, V>(wide);
  }
  return packed;
}

template <class L, class T>
__device__ void Store(const Line& line, T* p, int64_t flat, const Accumulator<T> (&wide)[L::V]) {
  constexpr int V = L::V, kWide = V < kVecLength<T> ? V : kVecLength<T>;
  using Access = Packed<T, kWide>;
  const auto packed = Narrow<T, V>(wide);
  if (flat < line.in_vectors) {
#pragma unroll
    for (int i = 0; i < V / kWide; ++i)
      reinterpret_cast<Access*>(p + flat)[i] = reinterpret_cast<const Access*>(&packed)[i];
  } else if (!L::kWholeVectors && flat < line.total) {
    const int count = static_cast<int>(min(line.total - flat, int64_t{V}));
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i < count) p[flat + i] = static_cast<T>(wide[i]);
  }
}

// Where a tile takes little code, each of a warp's has its own, and all loads come first. Else a warp has up to kTiles,
// if there are enough for all warps of the device.
template <class L>
constexpr bool kUnrolled = L::kWholeVectors && L::kKnown;
template <class L>
constexpr int kTiles = kUnrolled<L> ? 2 : 4;
constexpr int64_t kEnoughWarps = 132 * 32;

// Blocks on a multiprocessor, which the registers are bounded for.
template <Map kMap, class L>
constexpr int kResident = kUnrolled<L>                    ? (kMap == Map::kForward ? 6 : 4)
                          : kMap == Map::kForward         ? 4
                          : L::kWholeVectors || L::kKnown ? 3
                                                          : 2;

template <Map kMap, class L, class T>
__global__ void __launch_bounds__(kThreads, (kResident<kMap, L>))
    LineKernel(const __grid_constant__ Line line, Response<T> response, const T* __restrict__ t,
               const T* __restrict__ x, T* __restrict__ out) {
  using A = Accumulator<T>;
  constexpr int V = L::V, kTogether = kUnrolled<L> ? kTiles<L> : 1;  // tiles that are unrolled, and loaded first
  const int tiles = kUnrolled<L> ? kTiles<L> : line.tiles;
  using Rows = std::conditional_t<L::kWholeVectors, WholeRows<L>, AnyRows<L>>;
  const int lane = threadIdx.x % 32, useful = 32 - 2 * line.edge;
  const int64_t warp = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  int64_t flat = (warp * tiles * useful - line.edge + lane) * V;
  Packed<T, V> in[kTogether], with[kTogether];
  const auto load = [&](int i, int64_t from) {
    in[i] = Load<L>(line, x, from);
    if constexpr (kMap != Map::kForward) with[i] = Load<L>(line, t, from);
  };
#pragma unroll
  for (int i = 0; i < kTogether; ++i) load(i, flat + i * useful * V);
  Rows rows(line, flat);
#pragma unroll kTogether
  for (int tile = 0; tile < tiles; ++tile) {
    A c[V], w[V] = {}, term[V], sum[V], gain[V], result[V];
    const Packed<T, V> in_now = in[tile % kTogether], with_now = with[tile % kTogether];
    // Else the next tile's loads are in flight meanwhile.
    if (kTogether == 1 && tile + 1 < tiles) load(0, flat + useful * V);
    Widen<T>(in_now, c);
    if constexpr (kMap != Map::kForward) Widen<T>(with_now, w);
#pragma unroll
    for (int i = 0; i < V; ++i) term[i] = c[i] * c[i];
    // The sums of squares, and those of what these give. Where they take much code it is there once.
#pragma unroll(L::kKnown ? 2 : 1)
    for (int pass = 0; pass < (kMap == Map::kForward ? 1 : 2); ++pass) {
      Sum<L, L::kLeastReach, L::kMostReach>(rows, line, pass == 1, term, sum);
      if (pass == 1) break;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        A q;
        gain[i] = response.Gain(response.Divisor(sum[i]), &q);
        term[i] = q * (c[i] * w[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (kMap == Map::kForward) result[i] = c[i] * gain[i];
      if constexpr (kMap == Map::kCotangent) result[i] = w[i] * gain[i] - c[i] * sum[i];
    }
    if (lane >= line.edge && lane < 32 - line.edge) Store<L>(line, out, flat, result);
    flat += useful * V;
    rows.Advance(line);
  }
}

template <Map kMap, class L, class T>
cudaError_t Launch(const Problem& p, const T* t, const T* x, T* out, bool aligned, cudaStream_t stream) {
  constexpr int V = L::V;
  Line line = {};
  line.n = p.extent[2];
  line.total = p.outer * line.n;
  line.in_vectors = aligned ? line.total / V * V : 0;
  line.reach = std::min(p.before[2], p.after[2]);
  line.longer = p.after[2] - p.before[2];
  line.padding = CeilDiv(32, line.n) * line.n;
  line.narrow = line.total + line.padding < INT32_MAX - (1 << 20);
  line.by_row = FastDiv(L::kWholeVectors ? line.n / V : line.n);
  // The cotangent's sum is over sums: it sees as far as both windows together.
  const int reach = kMap == Map::kCotangent ? p.before[2] + p.after[2] : std::max(p.before[2], p.after[2]);
  const bool rows_end_with_warps = 32 * V % line.n == 0;
  line.edge = rows_end_with_warps ? 0 : reach <= V ? 1 : 2;
  const int useful = 32 - 2 * line.edge;
  line.step = (L::kWholeVectors ? useful : useful * V) % line.by_row.divisor;
  for (int i = 0; i < 32; i += line.n) line.starts |= 1u << i;
  const int64_t tiles = CeilDiv(CeilDiv(line.total, V), useful);
  line.tiles = kUnrolled<L> ? kTiles<L> : static_cast<int>(std::clamp<int64_t>(tiles / kEnoughWarps, 1, kTiles<L>));
  const int64_t warps = CeilDiv(tiles, line.tiles);
  return LaunchKernel(LineKernel<kMap, L, T>, CeilDiv(warps, kThreads / 32), kThreads, stream, line, Response<T>(p), t,
                      x, out);
}

template <Map kMap, class T>
cudaError_t LaunchMap(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  constexpr int V = kVecLength<T>;
  const bool aligned = IsVectorAligned(t, x, out);
  const int reach = p.after[2];
  if (p.before[2] == reach) {
    if (reach == 0) {
      // Every element is by itself, wherever rows begin.
      Problem one = p;
      one.outer = p.outer * p.extent[2] / V;
      one.extent[2] = V;
      if (aligned && one.Elements() == p.Elements())
        return Launch<kMap, Layout<V, true, 0>>(one, t, x, out, aligned, stream);
    }
    const bool whole = aligned && p.extent[2] % V == 0;
    if (reach == 1 && whole) return Launch<kMap, Layout<V, true, 1>>(p, t, x, out, aligned, stream);
    if (reach == 2 && whole) return Launch<kMap, Layout<V, true, 2>>(p, t, x, out, aligned, stream);
    if (reach == 3 && whole) return Launch<kMap, Layout<V, true, 3>>(p, t, x, out, aligned, stream);
    if (reach == 2) return Launch<kMap, Layout<8, false, 2>>(p, t, x, out, aligned, stream);
  }
  if (aligned && p.extent[2] % 8 == 0)
    return Launch<kMap, Layout<8, true, 0, kMaxReach>>(p, t, x, out, aligned, stream);
  return Launch<kMap, Layout<8, false, 0, kMaxReach>>(p, t, x, out, aligned, stream);
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
         std::abs(p.before[2] - p.after[2]) <= 1 && std::max(p.before[2], p.after[2]) <= kMaxReach;
}

cudaError_t LaunchLine(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                       cudaStream_t stream) {
  return VisitSingleDType(
      dtype, [&](auto type) { return LaunchType<typename decltype(type)::type>(map, p, t, x, out, stream); });
}

}  // namespace jaxdnn::lrn
