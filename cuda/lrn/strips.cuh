// The strips that march.cuh goes down with, and sums over their boxes: across a row, and down the last rows of it. `S`
// is a March, which says how a strip lies.
#pragma once

#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {

// A strip as it lies in memory.
template <int N, class T>
struct alignas(2 * sizeof(Packed<T, N>)) Strip {
  Packed<T, N> unit[2];
};

// A strip of terms that are summed over windows.
template <int N, class A>
struct alignas(std::min<size_t>(2 * N * sizeof(A), 16)) Terms {
  Vec<A, N> unit[2];
};

template <class T>
__device__ T* Shift(T* p, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(p) + bytes);
}

// A strip in shared memory: whole, or with its units apart, for lanes beside each other to meet no bank twice.
template <class Whole, int kApart, class Unit>
__device__ Whole ReadStrip(const Unit* p) {
  if constexpr (kApart == 1) return *reinterpret_cast<const Whole*>(p);
  Whole strip;
  strip.unit[0] = p[0];
  strip.unit[1] = p[kApart];
  return strip;
}

template <class Whole, int kApart, class Unit>
__device__ void WriteStrip(Unit* p, const Whole& strip) {
  if constexpr (kApart == 1) {
    *reinterpret_cast<Whole*>(p) = strip;
  } else {
    p[0] = strip.unit[0];
    p[kApart] = strip.unit[1];
  }
}

// Rows from 0 up to a unit's limit exist.
__device__ inline bool Within(int row, int limit) { return static_cast<unsigned>(row) < static_cast<unsigned>(limit); }

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

// What a strip's sums see: its own units, and its neighbours', from their lanes or from where they lie around `strip`.
template <class S, int kApart, class U, class Unit, class F>
__device__ void Gather(const U& own, const Unit* strip, int slices, F&& widen) {
  constexpr int N = S::N, kSees = S::kReach * N - S::H;  // the first element that a sum sees
#pragma unroll
  for (int k = -S::kMargin; k <= S::kMargin; ++k) {
    U seen = own;
    if constexpr (S::kAcross) {
      constexpr int kWords = sizeof(own.unit[0].v) / sizeof(own.unit[0].v[0]), kEach = N / kWords;
      const int lane = static_cast<int>(threadIdx.x) + k;
#pragma unroll
      for (int i = 0; i < 2 * kWords; ++i) {
        const int at = (2 * k + S::kReach) * N + i * kEach;
        auto& word = seen.unit[i / kWords].v[i % kWords];
        if (k != 0 && at + kEach > kSees && at < S::L - kSees) word = __shfl_sync(0xFFFFFFFF, word, lane);
      }
    } else if (k != 0) {
      seen = ReadStrip<U, kApart>(strip + k * slices * (kApart == 1 ? 2 : 1));
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int at = 2 * k + u + S::kReach;
      if (at >= 0 && at < 2 * S::kReach + 2) widen(at, seen.unit[u]);
    }
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

// The same, with all but the rows since the last multiple in shared memory, where a thread has W - 1 places
// a block apart.
template <class S, class A>
struct SharedRunning {
  using Place = Terms<S::N, A>;
  Place* before;
  A since[S::E] = {};

  __device__ explicit SharedRunning(Place* own) : before(own) {
    if constexpr (S::kStash) {
#pragma unroll
      for (int k = 1; k < S::W; ++k) Before(k) = {};
    }
  }

  __device__ Place& Before(int k) { return before[(k - 1) * S::kThreads]; }

  // Adds a row, the i-th since the multiple.
  __device__ void Add(int i, const A (&row)[S::E], A (&sum)[S::E]) {
    Place earlier = {}, own;
    if (i < S::W - 1) earlier = Before(i + 1);
#pragma unroll
    for (int j = 0; j < S::E; ++j) {
      since[j] = i == 0 ? row[j] : since[j] + row[j];
      sum[j] = i == S::W - 1 ? since[j] : since[j] + earlier.unit[j / S::N].v[j % S::N];
      own.unit[j / S::N].v[j % S::N] = row[j];
    }
    if (i > 0) Before(i) = own;
    if (i < S::W - 1) return;
#pragma unroll
    for (int k = S::W - 2; k > 0; --k) {
      const Place further = Before(k);
#pragma unroll
      for (int j = 0; j < S::E; ++j) own.unit[j / S::N].v[j % S::N] += further.unit[j / S::N].v[j % S::N];
      Before(k) = own;
    }
  }
};

// Sums about a mean of numbers whose squares float does not hold: of every row about one of its own elements, which no
// window's sum can be much less than, and from there about the mean of each window that the row belongs to.
template <class S, class A>
struct Pivoted {
  A pivot[S::W][S::N] = {}, sum[S::W][S::E] = {};  // of the last rows, and their sums about it
  Running<S, A> squares;
  A inside[S::kAcross ? S::L : S::W + 1];  // 1 where there is a column, else 0

  __device__ Pivoted(int column, int width) {
#pragma unroll
    for (int q = 0; q < (S::kAcross ? S::N : 1); ++q)
#pragma unroll
      for (int i = 0; i <= S::W; ++i) inside[S::Seen(q, i) / Apart()] = Within(column + S::Column(q, i), width) ? 1 : 0;
  }
  // Elements of a column.
  static constexpr __device__ int Apart() { return S::kAcross ? 1 : S::N; }

  // Adds a row, the i-th since a multiple of W: the window's sum of squares, every row's about its own pivot.
  __device__ void Add(int i, const A (&e)[S::L], A (&energy)[S::E]) {
    constexpr int W = S::W;
    A row[S::E];
#pragma unroll
    for (int q = 0; q < S::N; ++q) {
      const A own = e[S::Seen(q, S::H)];
      pivot[i][q] = fabsf(own) <= FLT_MAX ? own : 0;
      A d[W + 1];
#pragma unroll
      for (int k = 0; k <= W; ++k) {
        d[k] = e[S::Seen(q, k)] - pivot[i][q];
        if (k != S::H) d[k] *= inside[S::Seen(q, k) / Apart()];
      }
      A linear = d[1], square = d[1] * d[1];
#pragma unroll
      for (int k = 2; k < W; ++k) linear += d[k], square += d[k] * d[k];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const A end = d[side * W];
        sum[i][S::Own(q, side)] = linear + end;
        row[S::Own(q, side)] = square + end * end;
      }
    }
    squares.Add(i, row, energy);
  }

  // About the means `m`, after that row: what the sum of squares is more, and the sum of deviations. `exists(o)`: the
  // row o back exists, and has `cells` cells of a window.
  template <class F>
  __device__ void Shift(int i, const A (&m)[S::E], const A (&cells)[S::E], F&& exists, A (&more)[S::E],
                        A (&drift)[S::E]) const {
#pragma unroll
    for (int j = 0; j < S::E; ++j) more[j] = drift[j] = 0;
#pragma unroll
    for (int o = 0; o < S::W; ++o) {
      const int slot = (i + S::W - o) % S::W;
      const bool counts = exists(o);
#pragma unroll
      for (int q = 0; q < S::N; ++q)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int j = S::Own(q, side);
          const A apart = pivot[slot][q] - m[j], deviations = sum[slot][j] + cells[j] * apart;
          more[j] = counts ? more[j] + apart * (sum[slot][j] + deviations) : more[j];
          drift[j] = counts ? drift[j] + deviations : drift[j];
        }
    }
  }
};

}  // namespace jaxdnn::lrn
