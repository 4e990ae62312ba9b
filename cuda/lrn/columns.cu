// Windows along a dimension that is not contiguous.
//
// A thread owns N columns and marches down their n elements with the last window of each in a ring of registers, so
// that every element is read once: the energy of element j is known when element j + H has come in, and, for the
// cotangent, the sum of r = q x g around element j when element j + 2 H has. A ring's slots are registers, so the loop
// over a whole window of steps is unrolled, and as many steps' loads are in flight. Where there are too few
// columns to fill the device, n is cut into chunks, which read what their windows overlap.
//
// What is rare makes do with fewer kernels, the general ones: even windows, which take the ring of one that has a cell
// more and leave that out of their sums, exponents other than 3/4, and float16, but for windows of five cells. It costs
// them a quarter to two fifths of their time where rows are not aligned, and nothing where they are.
//
// A thread's columns are neighbours, in one vector; or, where rows are not aligned, one of every 32, so that a warp
// still reads neighbours.
//
// Bound by memory: one read and one write, or two reads and one write.
#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/lrn/paths.h"
#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kEnoughThreads = 132 * 1024;
constexpr int kLeastChunk = 32;

struct Columns {
  int64_t threads;
  int inner;                  // columns of an outer index
  WideDiv by_tile, by_chunk;  // threads for them, and parts of a column
  int n, chunk;
  bool oldest, newest;  // whether a window has the cell that is H in front of its element, and the one H behind
};

// A thread's N elements of a row: neighbours in one access, or N accesses 32 elements apart.
template <int N, bool kVector, class T>
struct Row {
  using A = Accumulator<T>;
  // 16-bit elements that come one by one have a register each: converting them would wait for them, and so would
  // packing.
  using Element = std::conditional_t<sizeof(T) == 2, uint32_t, T>;
  using Held = std::conditional_t<kVector, Packed<T, N>, Vec<Element, N>>;

  // The first column. The last warp's are the last, some of which the one before has too, and stores: `others` is how
  // many columns further the first is that this one stores.
  static __device__ int First(const Columns& shape, int tile, int& others) {
    const int own = tile / 32 * (32 * N), first = min(own, shape.inner - 32 * N);
    others = own - first - tile % 32;
    return kVector ? tile * N : first + tile % 32;
  }
  static __device__ Held Load(const T* p) {
    Held held;
    if constexpr (kVector) {
      held = *reinterpret_cast<const Held*>(p);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) held.v[j] = LoadElement(p + 32 * j);
    }
    return held;
  }
  static __device__ void Unpack(const Held& held, A (&wide)[N]) {
    if constexpr (kVector) {
      Widen<T>(held, wide);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) wide[j] = ToAccumulator(held.v[j]);
    }
  }
  static __device__ Element LoadElement(const T* p) {
    if constexpr (sizeof(T) == 2)
      return *reinterpret_cast<const uint16_t*>(p);
    else
      return *p;
  }
  static __device__ A ToAccumulator(Element e) {
    if constexpr (sizeof(T) == 2)
      return WidenPair<T>(e).x;
    else
      return e;
  }
  static __device__ void Store(T* p, const A (&wide)[N], int others) {
    if constexpr (kVector) {
      StorePacked<T, N>(p, Narrow<T, N>(wide));
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (32 * j >= others) p[32 * j] = static_cast<T>(wide[j]);
    }
  }
};

// When a window's loads start, as measured: each in the step that takes the one in its place, or all together, a window
// ahead or when it begins.
enum class Loads { kEach, kAhead, kNow };

template <Map kMap, bool kVector, class T>
constexpr Loads kLoads = kMap == Map::kForward      ? (sizeof(T) == 2 ? Loads::kAhead : Loads::kEach)
                         : kVector && sizeof(T) > 2 ? Loads::kNow
                                                    : Loads::kEach;

// Blocks on a multiprocessor, which the registers are bounded for.
template <Map kMap, int H, bool kGeneral, bool kVector>
constexpr int kResident = H == 3                                            ? 2
                          : !kGeneral && (kVector || kMap == Map::kForward) ? 4
                                                                            : 3;

// The sum over a ring whose newest slot is i. Its ends are left out where an even window has no such cells.
template <int W, bool kGeneral, class F>
__device__ float SumRing(int i, bool oldest, bool newest, F&& term) {
  const auto has = [&](int k) { return !kGeneral || (k == i ? newest : k != (i + 1) % W || oldest); };
  float sum = has(0) ? term(0) : 0;
#pragma unroll
  for (int k = 1; k < W; ++k) {
    const float more = sum + term(k);
    sum = has(k) ? more : sum;
  }
  return sum;
}

template <Map kMap, int H, bool kGeneral, int N, bool kVector, class T>
__global__ void __launch_bounds__(kThreads, (kResident<kMap, H, kGeneral, kVector>))
    ColumnsKernel(const __grid_constant__ Columns shape, Response<T, !kGeneral> response, const T* __restrict__ t,
                  const T* __restrict__ x, T* __restrict__ out) {
  using A = Accumulator<T>;
  using Held = typename Row<N, kVector, T>::Held;
  constexpr int W = 2 * H + 1;
  constexpr bool kCotangent = kMap == Map::kCotangent;
  constexpr int kLag = kCotangent ? 2 * H : H;  // from an element's arrival to its result
  using R = Row<N, kVector, T>;
  const int64_t id = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (id >= shape.threads) return;
  int tile, part, others;
  const int64_t outer = shape.by_chunk.Div(shape.by_tile.Div(id, &tile), &part);
  const int column = R::First(shape, tile, others), first = part * shape.chunk;
  const int last = min(shape.n, first + shape.chunk);
  const int64_t base = outer * shape.n * shape.inner + column;
  const T *const x_base = x + base, *const t_base = kCotangent ? t + base : nullptr;
  T* const out_base = out + base;
  const auto exists = [&](int row) { return static_cast<unsigned>(row) < static_cast<unsigned>(shape.n); };
  const int row_bytes = shape.inner * static_cast<int>(sizeof(T));
  const auto at = [&](auto* p, int row) {  // one multiplication
    using P = decltype(p);
    using Byte = std::conditional_t<std::is_same_v<P, T*>, char, const char>;
    return reinterpret_cast<P>(reinterpret_cast<Byte*>(p) + int64_t{row} * row_bytes);
  };
  const auto load = [&](const T* p, int row) {
    Held held = {};
    if (exists(row)) held = R::Load(at(p, row));
    return held;
  };

  // Slot i holds what step i of a window brought: x as it came, and r and D^-beta g when their energy is known.
  A c[W][N] = {}, r[W][N] = {}, u[W][N] = {};
  constexpr Loads kWhen = kLoads<kMap, kVector, T>;
  Held in[W], with[W];
  const auto fetch = [&](int i, int begin) {
    in[i] = load(x_base, begin + i);
    if constexpr (kCotangent) with[i] = load(t_base, begin + i - H);
  };
  const auto fetch_all = [&](int begin) {
#pragma unroll
    for (int i = 0; i < W; ++i) fetch(i, begin);
  };
  if constexpr (kWhen != Loads::kNow) fetch_all(first - kLag);
#pragma unroll 1
  for (int begin = first - kLag; begin < last + kLag; begin += W) {
    if constexpr (kWhen == Loads::kNow) fetch_all(begin);
    Held x_now[W], t_now[W];
    if constexpr (kWhen == Loads::kAhead) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        x_now[i] = in[i];
        if constexpr (kCotangent) t_now[i] = with[i];
      }
      fetch_all(begin + W);
    }
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const int now = (i + W - H) % W, done = (i + W - kLag) % W, row = begin + i - kLag;
      A result[N], w[N];
      R::Unpack(kWhen == Loads::kAhead ? x_now[i] : in[i], c[i]);
      if constexpr (kCotangent) R::Unpack(kWhen == Loads::kAhead ? t_now[i] : with[i], w);
      if constexpr (kWhen == Loads::kEach) fetch(i, begin + W);
      // Beyond the ends the rate has to be finite, since what it is a factor of is 0.
      const A least = kCotangent && !exists(begin + i - H) ? A(1) : response.k;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A energy = SumRing<W, kGeneral>(i, shape.oldest, shape.newest, [&](int k) { return c[k][j] * c[k][j]; });
        const A d = least + response.scale * energy;
        if constexpr (kCotangent) {
          A rate;
          u[i][j] = w[j] * response.GainAndRate(d, &rate);
          r[i][j] = rate * (c[now][j] * u[i][j]);
          const A product = SumRing<W, kGeneral>(i, shape.newest, shape.oldest, [&](int k) { return r[k][j]; });
          result[j] = u[now][j] - c[done][j] * product;
        } else {
          result[j] = c[now][j] * response.Gain(d);
        }
      }
      if (row >= first && row < last) R::Store(at(out_base, row), result, others);
    }
  }
}

template <Map kMap, int H, bool kGeneral, int N, bool kVector, class T>
cudaError_t Launch(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  Columns shape = {};
  shape.n = p.extent[2];
  shape.oldest = p.before[2] == H;
  shape.newest = p.after[2] == H;
  shape.inner = static_cast<int>(p.inner);
  const int64_t tiles = kVector ? p.inner / N : CeilDiv(p.inner, 32 * N) * 32;
  const int64_t wanted = CeilDiv(kEnoughThreads, p.outer * tiles);
  shape.chunk = static_cast<int>(CeilDiv(shape.n, std::clamp<int64_t>(wanted, 1, CeilDiv(shape.n, kLeastChunk))));
  const int64_t chunks = CeilDiv(shape.n, shape.chunk);
  shape.by_tile = WideDiv(tiles), shape.by_chunk = WideDiv(chunks);
  shape.threads = p.outer * tiles * chunks;
  return LaunchKernel(ColumnsKernel<kMap, H, kGeneral, N, kVector, T>, CeilDiv(shape.threads, kThreads), kThreads,
                      stream, shape, Response<T, !kGeneral>(p), t, x, out);
}

template <Map kMap, class T>
cudaError_t LaunchMap(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  // Of 32-bit elements, two are as fast for general windows, and half the code.
  constexpr int kWide = 4, kGeneralWide = sizeof(T) == 4 ? 2 : 4;
  const bool aligned = IsVectorAligned(t, x, out);
  const auto launch = [&](auto half) {
    constexpr int H = decltype(half)::value;
    if constexpr (H == 2 || !std::is_same_v<T, __half>) {
      if (p.before[2] == p.after[2] && p.beta == 0.75) {
        if (aligned && p.inner % kWide == 0) return Launch<kMap, H, false, kWide, true>(p, t, x, out, stream);
        // Of fewer columns than that, too many lanes would have none.
        if (p.inner > 64 * kWide) return Launch<kMap, H, false, kWide, false>(p, t, x, out, stream);
        return Launch<kMap, H, false, 1, true>(p, t, x, out, stream);
      }
    }
    return aligned && p.inner % kGeneralWide == 0 ? Launch<kMap, H, true, kGeneralWide, true>(p, t, x, out, stream)
                                                  : Launch<kMap, H, true, 1, true>(p, t, x, out, stream);
  };
  switch (std::max(p.before[2], p.after[2])) {
    case 1:
      return launch(std::integral_constant<int, 1>{});
    case 2:
      return launch(std::integral_constant<int, 2>{});
    case 3:
      return launch(std::integral_constant<int, 3>{});
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t LaunchType(Map map, const Problem& p, const void* t, const void* x, void* out, cudaStream_t stream) {
  const T *with = static_cast<const T*>(t), *in = static_cast<const T*>(x);
  T* result = static_cast<T*>(out);
  return map == Map::kForward ? LaunchMap<Map::kForward>(p, with, in, result, stream)
                              : LaunchMap<Map::kCotangent>(p, with, in, result, stream);
}

}  // namespace

bool IsColumns(Map map, const Problem& p, DType dtype) {
  const int reach = std::max(p.before[2], p.after[2]);
  return map != Map::kTangent && dtype != DType::kF64 && p.inner > 1 && p.extent[0] == 1 && p.extent[1] == 1 &&
         std::abs(p.before[2] - p.after[2]) <= 1 && reach >= 1 && reach <= 3 &&
         p.inner <= INT32_MAX / 8;  // a row takes 31 bits of bytes
}

cudaError_t LaunchColumns(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                          cudaStream_t stream) {
  return VisitSingleDType(
      dtype, [&](auto type) { return LaunchType<typename decltype(type)::type>(map, p, t, x, out, stream); });
}

}  // namespace jaxdnn::lrn
