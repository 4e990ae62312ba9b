// The strips that march.cuh goes down with, and sums over their boxes: across a row, and down the last rows of it. `S`
// is a March, which says how a strip lies.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {

// A strip as it lies in memory.
template <int N, class T>
struct Strip {
  Packed<T, N> unit[2];
};

template <class T>
__device__ T* Shift(T* p, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(p) + bytes);
}

// Rows from 0 up to a unit's limit exist.
__device__ inline bool Within(int row, int limit) { return static_cast<unsigned>(row) < static_cast<unsigned>(limit); }

template <class S, class T>
__device__ Strip<S::N, T> LoadStrip(const T* p, int64_t step, int row, const int (&limit)[2]) {
  constexpr int N = S::N;
  Strip<N, T> strip = {};
  if constexpr (S::kAcross) {
    Packed<T, 2 * N> both = {};
    if (Within(row, limit[0])) both = *reinterpret_cast<const Packed<T, 2 * N>*>(p);
    constexpr int kWords = sizeof(both.v) / sizeof(both.v[0]) / 2;
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) strip.unit[i / kWords].v[i % kWords] = both.v[i];
  } else {
    if (Within(row, limit[0])) strip.unit[0] = *reinterpret_cast<const Packed<T, N>*>(p);
    if (Within(row, limit[1])) strip.unit[1] = *reinterpret_cast<const Packed<T, N>*>(Shift(p, step));
  }
  return strip;
}

// Stores the row's units that have results from there on.
template <class S, class T>
__device__ void StoreStrip(T* p, int64_t step, int row, const int (&from)[2], const Accumulator<T> (&wide)[S::E]) {
  constexpr int N = S::N;
  if constexpr (S::kAcross) {
    if (row >= from[0]) StorePacked<T, 2 * N>(p, Narrow<T, 2 * N>(wide));
  } else {
    Accumulator<T> unit[2][N];
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) unit[i / N][i % N] = wide[i];
    if (row >= from[0]) StorePacked<T, N>(p, Narrow<T, N>(unit[0]));
    if (row >= from[1]) StorePacked<T, N>(Shift(p, step), Narrow<T, N>(unit[1]));
  }
}

template <int N, class T, class A = Accumulator<T>>
__device__ void WidenStrip(const Strip<N, T>& strip, A (&wide)[2 * N]) {
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    A unit[N];
    Widen<T>(strip.unit[u], unit);
#pragma unroll
    for (int j = 0; j < N; ++j) wide[u * N + j] = unit[j];
  }
}

// What a strip's sums see: its own units, and its neighbours' from the exchange, where `lane` points at the thread's
// first; the second lies kPitch behind.
template <class S, class U, class F>
__device__ void Gather(const U* lane, int slices, const U (&own)[2], F&& widen) {
#pragma unroll
  for (int k = 0; k < 2 * S::kReach + 2; ++k) {
    const int from = k - S::kReach, strip = from >= 0 ? from / 2 : (from - 1) / 2;
    widen(k, strip == 0 ? own[from & 1] : lane[strip * slices + (from & 1) * S::kPitch]);
  }
}

template <class S, class A>
__device__ void SumAcross(const A (&e)[S::L], A (&sum)[S::E]) {
#pragma unroll
  for (int q = 0; q < S::N; ++q) {
    A both = e[S::Seen(q, 1)];
#pragma unroll
    for (int i = 2; i < S::W; ++i) both += e[S::Seen(q, i)];
    sum[S::Own(q, 0)] = e[S::Seen(q, 0)] + both;
    sum[S::Own(q, 1)] = both + e[S::Seen(q, S::W)];
  }
}

// Sums of the last W rows, without differences: of the rows since the last multiple of W, and of the last rows in front
// of it.
template <class S, class A>
struct Running {
  A since[S::E] = {}, before[S::W][S::E] = {};

  // Adds a row, the i-th since the multiple.
  __device__ void Add(int i, const A (&row)[S::E], A (&sum)[S::E]) {
#pragma unroll
    for (int j = 0; j < S::E; ++j) {
      since[j] = i == 0 ? row[j] : since[j] + row[j];
      sum[j] = i == S::W - 1 ? since[j] : since[j] + before[i + 1][j];
      before[i][j] = row[j];
    }
    if (i < S::W - 1) return;
#pragma unroll
    for (int k = S::W - 2; k > 0; --k)
#pragma unroll
      for (int j = 0; j < S::E; ++j) before[k][j] += before[k + 1][j];
  }
};

// Divisive sums of squares of numbers whose squares float does not hold: of every row about one of its own elements,
// which no window's sum can be much less than, and from there, for every window that the row belongs to, about its
// mean.
template <class S, class A>
struct Pivoted {
  A mean[S::W][S::E] = {}, cross[S::W][S::E] = {};  // of the windows whose centres are H rows back, ..., H ahead
  A inside[S::kAcross ? S::L : S::W + 1];           // 1 where there is a column, else 0

  __device__ Pivoted(int column, int width) {
#pragma unroll
    for (int q = 0; q < (S::kAcross ? S::N : 1); ++q)
#pragma unroll
      for (int i = 0; i <= S::W; ++i) inside[S::Seen(q, i) / Apart()] = Within(column + S::Column(q, i), width) ? 1 : 0;
  }
  // Elements of a column.
  static constexpr __device__ int Apart() { return S::kAcross ? 1 : S::N; }

  __device__ void Open(int slot, const A (&m)[S::E]) {
#pragma unroll
    for (int j = 0; j < S::E; ++j) mean[slot][j] = m[j], cross[slot][j] = 0;
  }

  // A row: its sums of squares about its pivots, and of values.
  __device__ void Add(const A (&e)[S::L], const A (&cells)[S::E], bool exists, A (&squares)[S::E], A (&values)[S::E]) {
    constexpr int W = S::W;
#pragma unroll
    for (int q = 0; q < S::N; ++q) {
      const A own = e[S::Seen(q, S::H)], pivot = fabsf(own) <= FLT_MAX ? own : 0;
      A d[W + 1];
#pragma unroll
      for (int i = 0; i <= W; ++i) {
        d[i] = e[S::Seen(q, i)] - pivot;
        if (i != S::H) d[i] *= inside[S::Seen(q, i) / Apart()];
      }
      A linear = d[1], square = d[1] * d[1];
#pragma unroll
      for (int i = 2; i < W; ++i) linear += d[i], square += d[i] * d[i];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int j = S::Own(q, side);
        const A end = d[side * W], sum = linear + end;
        squares[j] = square + end * end;
        values[j] = sum + cells[j] * pivot;
        if (!exists) continue;
#pragma unroll
        for (int o = 0; o < W; ++o) {
          const A apart = pivot - mean[o][j];
          cross[o][j] += apart * (cells[j] * apart + 2 * sum);
        }
      }
    }
  }
};

}  // namespace jaxdnn::lrn
