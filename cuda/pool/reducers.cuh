// What a window is reduced by: the states that kernels keep for N neighbouring channels.
//
// A state takes a cell at a time, in row-major order, or a whole row that another state has taken: Take(values, cell)
// and Take(row, cell number of its first). Start(values) takes the first cell, number 0, of a new state. Merge(other)
// joins two that took cells in any order.
#pragma once

#include <cmath>

#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {

template <class T, int N>
constexpr bool kInPairs = sizeof(T) == 2 && N % 2 == 0;

template <class T, int N>
__device__ Words<T, N> Splat(float value) {
  Vec<T, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v.v[j] = static_cast<T>(value);
  return BitCast<Words<T, N>>(v);
}

// -v for every element, NaNs too, if `mask` is that of SignMask; v if it is 0.
template <class T, int N>
__device__ Words<T, N> Flip(Words<T, N> v, unsigned mask) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(v) / sizeof(v.v[0])); ++i)
    if (sizeof(T) < 8 || i % 2 == 1) v.v[i] ^= mask;
  return v;
}

// The bits by which minima become maxima.
template <class T>
unsigned SignMask(bool minimum) {
  return !minimum ? 0u : sizeof(T) == 2 ? 0x80008000u : 0x80000000u;
}

// The larger, or NaN if either is.
__device__ inline float MaxOrNan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline double MaxOrNan(double a, double b) { return a > b || a != a ? a : b; }
__device__ inline __half MaxOrNan(__half a, __half b) { return __hmax_nan(a, b); }
__device__ inline __nv_bfloat16 MaxOrNan(__nv_bfloat16 a, __nv_bfloat16 b) { return __hmax_nan(a, b); }

// The maxima alone.
template <class T, int N>
struct Max {
  static constexpr bool kIndexed = false, kQuick = false;
  Words<T, N> value = Splat<T, N>(-INFINITY);

  Max() = default;
  __device__ explicit Max(int) {}

  __device__ void Start(const Words<T, N>& v, int = 0) { value = v; }
  __device__ void Move(int) {}
  __device__ void Take(const Words<T, N>& v, int) {
    if constexpr (kInPairs<T, N>) {
#pragma unroll
      for (int j = 0; j < N / 2; ++j)
        value.v[j] = BitCast<unsigned>(__hmax2_nan(BitCast<TwoOf<T>>(value.v[j]), BitCast<TwoOf<T>>(v.v[j])));
    } else {
      auto a = BitCast<Vec<T, N>>(value);
      const auto b = BitCast<Vec<T, N>>(v);
#pragma unroll
      for (int j = 0; j < N; ++j) a.v[j] = MaxOrNan(a.v[j], b.v[j]);
      value = BitCast<Words<T, N>>(a);
    }
  }
  __device__ void Take(const Max& row, int cell) { Take(row.value, cell); }
  __device__ void Merge(const Max& other) { Take(other.value, 0); }
};

// The winners, and the numbers of their cells. A cell wins over all before it when it is larger, or the first NaN. The
// search starts at -inf with the window's first cell inside the input, which therefore wins when nothing is larger.
template <class T, int N>
struct IndexedMax {
  static constexpr bool kIndexed = true, kQuick = false;
  Vec<T, N> value = BitCast<Vec<T, N>>(Splat<T, N>(-INFINITY));
  int index[N];

  IndexedMax() = default;
  __device__ explicit IndexedMax(int first) {
#pragma unroll
    for (int j = 0; j < N; ++j) index[j] = first;
  }

  __device__ void Start(const Words<T, N>& v) { Take(v, 0); }
  __device__ bool Wins(T candidate, int j) const {
    const auto c = static_cast<Accumulator<T>>(candidate), best = static_cast<Accumulator<T>>(value.v[j]);
    return !(c <= best) && best == best;
  }
  __device__ void Take(const Words<T, N>& words, int cell) {
    const auto v = BitCast<Vec<T, N>>(words);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const bool wins = Wins(v.v[j], j);
      value.v[j] = wins ? v.v[j] : value.v[j];
      index[j] = wins ? cell : index[j];
    }
  }
  __device__ void Take(const IndexedMax& row, int cell) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const bool wins = Wins(row.value.v[j], j);
      value.v[j] = wins ? row.value.v[j] : value.v[j];
      index[j] = wins ? cell + row.index[j] : index[j];
    }
  }
  __device__ void Merge(const IndexedMax& other) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const T theirs = other.value.v[j];
      const auto a = static_cast<Accumulator<T>>(theirs), b = static_cast<Accumulator<T>>(value.v[j]);
      const bool ties = a == b || (a != a && b != b);
      if (Wins(theirs, j) || (ties && other.index[j] < index[j])) {
        value.v[j] = theirs;
        index[j] = other.index[j];
      }
    }
  }
  __device__ int Index(int j) const { return index[j]; }
  // Of places, row << 8 | column: moves them to the cells of a window that starts at (top, left).
  __device__ void Number(int top, int left, int columns) {
#pragma unroll
    for (int j = 0; j < N; ++j) index[j] = ((index[j] >> 8) - top) * columns + (index[j] & 255) - left;
  }
};

// The same with two 16-bit channels an instruction, cell numbers too: comparisons that give masks, and selections by
// them. That takes half the instructions, of which a 3x3 window already has more than its memory traffic hides.
template <class T, int N>
struct IndexedPairMax {
  static constexpr bool kIndexed = true, kQuick = false;
  using Pair = TwoOf<T>;
  Words<T, N> value = Splat<T, N>(-INFINITY);
  unsigned index[N / 2];

  IndexedPairMax() = default;
  __device__ explicit IndexedPairMax(int first) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) index[j] = Twice(first);
  }

  __device__ void Start(const Words<T, N>& v) { Take(v, 0); }
  __device__ void Choose(int j, unsigned candidate, unsigned cell) {
    const Pair c = BitCast<Pair>(candidate), best = BitCast<Pair>(value.v[j]);
    const unsigned wins = __hgtu2_mask(c, best) & __heq2_mask(best, best);
    value.v[j] = (candidate & wins) | (value.v[j] & ~wins);
    index[j] = (cell & wins) | (index[j] & ~wins);
  }
  __device__ void Take(const Words<T, N>& v, int cell) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) Choose(j, v.v[j], Twice(cell));
  }
  __device__ void Take(const IndexedPairMax& row, int cell) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) Choose(j, row.value.v[j], row.index[j] + Twice(cell));
  }
  __device__ int Index(int j) const { return static_cast<int16_t>(index[j / 2] >> (j % 2 * 16)); }
  __device__ void Number(int top, int left, int columns) {
    const unsigned first =
        (top * columns + left) * 0x10001;  // both halves' differences are cells, so that none borrows
#pragma unroll
    for (int j = 0; j < N / 2; ++j) index[j] = (index[j] >> 8 & 0xFF00FF) * columns + (index[j] & 0xFF00FF) - first;
  }

  static __device__ unsigned Twice(int k) { return (k & 0xFFFF) * 0x10001u; }
};

// The winners where no cell is NaN, for three instructions a cell. With a NaN its value is NaN and its index is not to
// be used.
template <class T, int N>
struct QuickMax {
  static constexpr bool kIndexed = true, kQuick = true, kPairs = kInPairs<T, N>;
  static constexpr int kValues = kPairs ? N / 2 : N;
  unsigned value[kValues];
  unsigned index[kValues];

  // `first` is the number of the cell that wins if all are -inf.
  __device__ void Start(const Words<T, N>& v, int first) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) value[j] = v.v[j], index[j] = Number(first);
  }
  __device__ void Choose(int j, unsigned candidate, unsigned cell) {
    if constexpr (kPairs) {
      using Pair = TwoOf<T>;
      const Pair c = BitCast<Pair>(candidate), best = BitCast<Pair>(value[j]);
      const unsigned wins = __hgt2_mask(c, best);
      value[j] = BitCast<unsigned>(__hmax2_nan(best, c));
      index[j] = (cell & wins) | (index[j] & ~wins);
    } else {
      const float c = __uint_as_float(candidate), best = __uint_as_float(value[j]);
      index[j] = c > best ? cell : index[j];
      value[j] = __float_as_uint(MaxOrNan(best, c));
    }
  }
  __device__ void Take(const Words<T, N>& v, int cell) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) Choose(j, v.v[j], Number(cell));
  }
  __device__ void Take(const QuickMax& row, int cell) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) Choose(j, row.value[j], row.index[j] + Number(cell));
  }
  __device__ void Move(int cells) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) index[j] += Number(cells);
  }
  __device__ void SetIndex(int cell) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) index[j] = Number(cell);
  }
  // Makes `most` NaN for good if a value is.
  __device__ void Watch(unsigned& most) const {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if constexpr (kPairs)
        most = BitCast<unsigned>(__hmax2_nan(BitCast<TwoOf<T>>(most), BitCast<TwoOf<T>>(value[j])));
      else
        most = __float_as_uint(MaxOrNan(__uint_as_float(most), __uint_as_float(value[j])));
    }
  }
  static __device__ bool SawNan(unsigned most) {
    if constexpr (kPairs) {
      const auto pair = BitCast<TwoOf<T>>(most);
      return __hneu2_mask(pair, pair) != 0;
    } else {
      return __uint_as_float(most) != __uint_as_float(most);
    }
  }
  __device__ int Index(int j) const {
    return kPairs ? static_cast<int16_t>(index[j / 2] >> (j % 2 * 16)) : static_cast<int>(index[j]);
  }

  static __device__ unsigned Number(int k) { return kPairs ? (k & 0xFFFF) * 0x10001u : static_cast<unsigned>(k); }
};

template <class T, int N>
struct Sum {
  static constexpr bool kIndexed = false, kQuick = false;
  Accumulator<T> value[N] = {};

  Sum() = default;
  __device__ explicit Sum(int) {}

  __device__ void Move(int) {}
  template <class V>
  __device__ void Start(const Vec<V, N>& v, int = 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = static_cast<Accumulator<T>>(v.v[j]);
  }
  template <class V>
  __device__ void Take(const Vec<V, N>& v, int) {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] += static_cast<Accumulator<T>>(v.v[j]);
  }
  __device__ void Take(const Sum& row, int) {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] += row.value[j];
  }
  __device__ void Merge(const Sum& other) { Take(other, 0); }
};

}  // namespace jaxdnn::pool
