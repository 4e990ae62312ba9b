// What the pooling kernels share: which element a thread owns, which input cells a window covers, which windows cover
// an input cell, and how many channels a thread takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/pool/pool.h"

namespace jaxdnn::pool {

constexpr int kThreads = 256;

// The geometry as kernels take it: with the divisions that bins need.
struct Shape : Geometry {
  WideDiv by_in[3], by_out[3];

  explicit Shape(const Geometry& g) : Geometry(g) {
    for (int d = 0; d < 3; ++d) by_in[d] = WideDiv(in[d]), by_out[d] = WideDiv(out[d]);
  }
};

// The element of a thread: batch, spatial coordinates, first channel.
struct Position {
  int64_t batch;
  int at[3];
  int channel;
};

// Threads in the row-major order of [batch, extent..., channels / width], so that neighbours touch neighbours.
struct Walk {
  int64_t total;
  int width;
  WideDiv by[4];

  Walk(int64_t batch, const int (&extent)[3], int channels, int vector_width) : width(vector_width) {
    const int vectors = channels / width;
    total = batch * extent[0] * extent[1] * extent[2] * vectors;
    by[0] = WideDiv(vectors);
    for (int d = 0; d < 3; ++d) by[1 + d] = WideDiv(extent[2 - d]);
  }

  __device__ Position At(int64_t flat) const {
    if (total > INT32_MAX) return FarAt(flat);
    int at[4], rest = static_cast<int>(flat);
#pragma unroll
    for (int i = 0; i < 4; ++i) rest = by[i].Div(rest, &at[i]);
    return {rest, {at[3], at[2], at[1]}, at[0] * width};
  }
  // What is rare takes little code.
  __device__ __noinline__ Position FarAt(int64_t flat) const {
    int at[4];
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      at[0] = at[1], at[1] = at[2], at[2] = at[3];
      flat = by[i].Div(flat, &at[3]);
    }
    return {flat, {at[3], at[2], at[1]}, at[0] * width};
  }
};

// Distances between neighbours in a dense [batch, extent..., channels] array.
struct Pitch {
  int64_t batch, dim[3];

  Pitch(const int (&extent)[3], int channels) {
    dim[2] = channels;
    dim[1] = dim[2] * extent[2];
    dim[0] = dim[1] * extent[1];
    batch = dim[0] * extent[0];
  }
};

// The positions [begin, end) of bin b, when `bins` bins share `extent` positions. The bins over one position are, the
// other way round, that position's bin among as many as there are positions.
struct Bin {
  int begin, end;
};

__device__ inline int Quotient(int64_t n, const WideDiv& by) {
  int rest;
  return n <= INT32_MAX ? by.Div(static_cast<int>(n)) : static_cast<int>(by.Div(n, &rest));
}

__device__ inline Bin BinOf(int b, int extent, const WideDiv& by_bins) {
  if (extent == 0) return {0, 0};
  const int64_t begin = int64_t{b} * extent;
  return {Quotient(begin, by_bins), Quotient(begin + extent - 1, by_bins) + 1};
}

// The same where it is rare.
static __device__ __noinline__ Bin RareBinOf(int b, int extent, const WideDiv& by_bins) {
  return BinOf(b, extent, by_bins);
}

// The cells of window `o` that lie inside the input: `count` of them from number `begin`, at input position `first`.
struct Cells {
  int begin, count, first;
};

// Those inside [-low, in + high), rather.
static __device__ __noinline__ Cells CellsWithin(const Shape& g, int d, int o, int low, int high) {
  if (g.stride[d] == 0) {
    const Bin bin = BinOf(o, g.in[d], g.by_out[d]);
    return {0, bin.end - bin.begin, bin.begin};
  }
  const int start = o * g.stride[d] - g.low[d] + low, step = g.dilation[d], limit = g.in[d] + low + high;
  int begin = 0, end = g.window[d];
  // Divisions at the border only.
  if (start < 0) begin = (-start + step - 1) / step;
  if (start >= limit) {
    end = 0;
  } else if (start + (end - 1) * step >= limit) {
    end = (limit - start + step - 1) / step;
  }
  return {begin, max(end - begin, 0), start + begin * step - low};
}

__device__ inline Cells CellsOf(const Shape& g, int d, int o) { return CellsWithin(g, d, o, 0, 0); }

// What window `o` contributes to the divisor along a dimension, where cells are counted. kDense: windows are known to
// be no bins and to have no gaps.
template <bool kDense>
__device__ int CountOf(const Shape& g, const Division& division, int d, int o) {
  if (!kDense && g.stride[d] == 0) {
    const Bin bin = BinOf(o, g.in[d], g.by_out[d]);
    return bin.end - bin.begin;
  }
  if (!kDense && g.dilation[d] != 1) return CellsWithin(g, d, o, division.low[d], division.high[d]).count;
  const int start = o * g.stride[d] - g.low[d];
  return max(min(start + g.window[d], g.in[d] + division.high[d]) - max(start, -division.low[d]), 0);
}

template <class A>
__device__ A Reciprocal(int cells) {
  const A divisor = static_cast<A>(max(cells, 1));
  if constexpr (std::is_same_v<A, float>) {
    // As division rounds, but without its branches.
    const float inverse = __fdividef(1, divisor);
    return fmaf(fmaf(-divisor, inverse, 1), inverse, inverse);
  } else {
    return A(1) / divisor;
  }
}

// The factor of any window's sum, which takes too much to be inlined.
template <class A>
static __device__ __noinline__ A AnyFactorOf(const Shape& g, const Division& division, int o0, int o1, int o2) {
  int cells = 1;
#pragma unroll 1
  for (int d = 0; d < 3; ++d) cells *= CountOf<false>(g, division, d, d == 0 ? o0 : d == 1 ? o1 : o2);
  return Reciprocal<A>(cells);
}

// The factor of window (o0, o1, o2)'s sum. kDense as above.
template <class A, bool kDense>
__device__ A FactorOf(const Shape& g, const Division& division, int o0, int o1, int o2) {
  if constexpr (!kDense) return AnyFactorOf<A>(g, division, o0, o1, o2);
  const auto count = [&](int d, int o) { return CountOf<true>(g, division, d, o); };
  return Reciprocal<A>(count(0, o0) * count(1, o1) * count(2, o2));
}

// The windows over one input position, in order: from `first` to `last`, `step` apart. The position is cell number
// `cell` of the first, and `cell_step` less of each that follows; of bins, each has its own number.
struct Windows {
  int first, last, step, cell, cell_step;
};

// How the windows over position i are found: they solve o * stride + k * dilation = i + low in integers.
struct Cover {
  FastDiv by_stride[3];
  int step[3], cell_step[3];

  explicit Cover(const Geometry& g) {
    for (int d = 0; d < 3; ++d) {
      const int common = std::gcd(g.stride[d], g.dilation[d]);
      by_stride[d] = FastDiv(g.stride[d]);
      step[d] = g.dilation[d] / common;
      cell_step[d] = g.stride[d] / common;
    }
  }

  __device__ Windows Of(const Shape& g, int d, int i) const {
    if (g.stride[d] == 0) {
      const Bin bin = RareBinOf(i, g.out[d], g.by_in[d]);
      return {bin.begin, bin.end - 1, 1, 0, 0};
    }
    const int p = i + g.low[d], stride = g.stride[d], dilation = g.dilation[d];
    if (p < 0) return {0, -1, 1, 0, 0};
    const int last = min(g.out[d] - 1, by_stride[d].Div(p));
    const int passed = p - (g.window[d] - 1) * dilation - 1;  // a window that starts here or before ends before p
    const int first = passed < 0 ? 0 : by_stride[d].Div(passed) + 1;
    if (dilation == 1) return {first, last, 1, p - first * stride, stride};
    return Dilated({first, last, step[d], p - first * stride, cell_step[d]}, stride, dilation);
  }

  // `all` with the position instead of the cell's number. Of `step` neighbouring windows one has a cell there, or none
  // has if stride and dilation have a common factor.
  static __device__ __noinline__ Windows Dilated(Windows all, int stride, int dilation) {
    for (int left = all.step; left > 0 && all.first <= all.last; --left, ++all.first, all.cell -= stride) {
      if (all.cell % dilation != 0) continue;
      all.cell /= dilation;
      return all;
    }
    return {0, -1, 1, 0, 0};
  }
};

template <int N, class T>
__device__ Vec<T, N> Load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

template <int N, class T>
__device__ Words<T, N> LoadWords(const T* p) {
  return *reinterpret_cast<const Words<T, N>*>(p);
}

template <int N, class T>
__device__ void Store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// Which element types have the kernels that are only there for speed; the others run the general ones.
template <class T>
constexpr bool kIsTuned = std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>;

// Calls f with the channels a thread takes, as an integral constant: 16 bytes of T or one, by what divides `channels`
// and by how the arrays are aligned.
template <class T, class F, class... P>
cudaError_t VisitWidth(int channels, F&& f, const P*... arrays) {
  constexpr int V = kVecLength<T>;
  if constexpr (sizeof(T) < 8) {
    if (channels % V == 0 && (... && (reinterpret_cast<uintptr_t>(arrays) % (V * sizeof(P)) == 0)))
      return f(std::integral_constant<int, V>{});
  }
  return f(std::integral_constant<int, 1>{});
}

// Whether the only window is the whole input.
inline bool WindowIsWhole(const Geometry& g) {
  for (int d = 0; d < 3; ++d)
    if (g.out[d] != 1 || g.window[d] != g.in[d] || g.low[d] != 0 || g.dilation[d] != 1) return false;
  return true;
}

// Windows of K x K cells, S apart, for which there are kernels with everything unrolled. `f(K, S)` takes the two as
// integral constants; `otherwise()` takes all other windows, and those
// that are apart unless kApartToo, and 5 x 5 cells unless kFiveToo.
template <bool kApartToo, bool kFiveToo = false, class F, class G>
cudaError_t VisitSquare(const Geometry& g, F&& f, G&& otherwise) {
  const bool plane = g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 && g.in[0] == g.out[0];
  const bool square =
      g.window[1] == g.window[2] && g.stride[1] == g.stride[2] && g.dilation[1] == 1 && g.dilation[2] == 1;
  const auto is = [&](int k, int s) { return plane && square && g.window[1] == k && g.stride[1] == s; };
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, 2> kTwo;
  constexpr std::integral_constant<int, 3> kThree;
  if constexpr (kApartToo) {
    if (is(2, 2)) return f(kTwo, kTwo);
  }
  if (is(3, 2)) return f(kThree, kTwo);
  if (is(3, 1)) return f(kThree, kOne);
  if constexpr (kFiveToo) {
    if (is(5, 2)) return f(std::integral_constant<int, 5>{}, kTwo);
  }
  return otherwise();
}

// Rows to a strip that a thread walks down, of `columns` threads' columns of so many rows. A strip costs the time of
// `extra` inputs beside the S of each row, but long strips are few blocks, and the last wave of them leaves the device
// idle: the cheapest product of waves and inputs. `resident` blocks are on a multiprocessor.
inline int StripOf(int rows, int64_t columns, int resident, int s, int extra) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int strip = 1; strip <= std::min(rows, 32); ++strip) {
    const int64_t blocks = CeilDiv(columns * CeilDiv(rows, strip), kThreads);
    const int64_t cost = CeilDiv(blocks, int64_t{132} * resident) * (strip * s + extra);
    if (cost < least) least = cost, best = strip;
  }
  return best;
}

// Shared memory that a block may have, and that leaves room for two.
struct SharedBytes {
  int64_t one = 48 << 10, two;

  SharedBytes() {
    int device = 0, most = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess)
      one = most;
    two = (one - 1024) / 2;
  }
};

}  // namespace jaxdnn::pool
