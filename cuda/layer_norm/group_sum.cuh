// Sums over the threads that share a row: lanes, warps, and the blocks of a cluster; and the moments of rows from them.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {

// Up to W values that each warp of a group hands to the others of its block; and in a cluster, its block to the other
// blocks. Consecutive sums take turns with two of them.
template <class A, int W, bool kCluster>
struct Exchange {
  A values[W][kMaxWarps];

  __device__ void Open() {}
};

template <class A, int W>
struct Exchange<A, W, true> {
  A values[W][kMaxWarps], blocks[W][kMaxCluster];
  Mailbox mailbox;

  __device__ void Open() { mailbox.Open(); }
};

// In a cluster: before the first sum, and followed by ClusterWait.
template <class E, int N>
__device__ void OpenExchanges(E (&exchanges)[N]) {
  if (threadIdx.x == 0)
    for (E& each : exchanges) each.Open();
  ClusterArriveRelaxed();
}

// v[i] = the sum of v[i] over `lanes` neighbouring lanes, a power of two of them; without a loop, which takes longer
// and fewer registers, where those are a whole warp and `kUnrolled` says so.
template <bool kUnrolled, int W, class A>
__device__ void LaneSum(A (&v)[W], int lanes) {
  const auto add = [&](int mask) {
#pragma unroll
    for (int i = 0; i < W; ++i) v[i] += ShuffleXor(v[i], mask);
  };
  if (kUnrolled && lanes == 32) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) add(mask);
  } else {
#pragma unroll 1
    for (int mask = 1; mask < lanes; mask *= 2) add(mask);
  }
}

// The sum over a warp's lanes of v[i], W of them, a power of two, in lane i: two lanes share out what is left of the
// values as long as there are several.
template <int W, class A>
__device__ A ScatteredSum(A (&v)[W]) {
  static_assert((W & (W - 1)) == 0 && W <= 32, "a power of two");
  const int lane = threadIdx.x % 32;
  int mask = 1;
#pragma unroll
  for (int half = W / 2; half > 0; half /= 2, mask *= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const bool odd = lane & mask;
      const A keeps = odd ? v[2 * i + 1] : v[2 * i], gives = odd ? v[2 * i] : v[2 * i + 1];
      v[i] = keeps + ShuffleXor(gives, mask);
    }
#pragma unroll
  for (; mask < 32; mask *= 2) v[0] += ShuffleXor(v[0], mask);
  return v[0];
}

// Every warp leaves its sums of v[i], and one warp has those of all of them, in a fixed order. To scatter them among
// the lanes first takes fewer instructions, and some more registers; else every lane has its warp's already.
template <bool kScattered, bool kCluster, int W, int M, class A>
__device__ void BlockSum(A (&v)[W], Exchange<A, M, kCluster>& exchange) {
  static_assert(W <= M, "has room");
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kScattered) {
    const A sum = ScatteredSum(v);
    if (lane < W) exchange.values[lane][warp] = sum;
  } else {
    if (lane == 0)
      for (int i = 0; i < W; ++i) exchange.values[i][warp] = v[i];
  }
  __syncthreads();
  // Every run of as many lanes as there are warps adds up their values; in a cluster one warp does, and sends the sums.
  if (kCluster && warp != 0) return;
  static_assert(kMaxWarps <= 32, "a lane for each");
  const int span = kScattered ? 1 << (32 - __clz(warps - 1)) : 32, w = lane & (span - 1);
#pragma unroll
  for (int i = 0; i < W; ++i) v[i] = w < warps ? exchange.values[i][w] : A(0);
  LaneSum<!kScattered && W <= 2>(v, span);
}

// The two halves of a sum over a cluster: its threads may do something else in between, and send what is next before
// they have received what was sent. `round`: how often the exchange was used before.
template <bool kScattered = true, int W, int M, class A>
__device__ void SendSum(A (&v)[W], const Place& p, Exchange<A, M, true>& exchange) {
  if (!kScattered) LaneSum<W <= 2>(v, 32);
  BlockSum<kScattered>(v, exchange);  // groups of a cluster are whole blocks
  if (threadIdx.x >= 32) return;
  if (threadIdx.x == 0) exchange.mailbox.Expect(W * p.cluster * static_cast<int>(sizeof(A)));
  if (threadIdx.x < p.cluster)
#pragma unroll
    for (int i = 0; i < W; ++i) exchange.mailbox.Send(&exchange.blocks[i][p.rank], threadIdx.x, v[i]);
}

template <int W, int M, class A>
__device__ void ReceiveSum(A (&v)[W], const Place& p, Exchange<A, M, true>& exchange, int round) {
  exchange.mailbox.Wait(round);
#pragma unroll
  for (int i = 0; i < W; ++i) v[i] = exchange.blocks[i][threadIdx.x & (p.cluster - 1)];
  LaneSum<false>(v, p.cluster);
}

// v[i] = the sum of v[i] over the threads of the group, in each of them, in a fixed order; for the
// `turn`-th time, from 0 on.
template <bool kScattered = true, bool kCluster, int W, int M, class A>
__device__ void GroupSum(A (&v)[W], const Place& p, Exchange<A, M, kCluster> (&exchanges)[2], int turn) {
  if constexpr (kCluster) {
    SendSum<kScattered>(v, p, exchanges[turn & 1]);
    ReceiveSum(v, p, exchanges[turn & 1], turn >> 1);
  } else {
    if (!kScattered || p.width <= 32) LaneSum<!kScattered && W <= 2>(v, min(32, p.width));
    if (p.width > 32) BlockSum<kScattered>(v, exchanges[turn & 1]);
  }
}

// The moments of U rows in each thread of their groups.
template <class T, int L, int V, int U, bool kShifted, class A, class E>
__device__ void RowMoments(A (&mean)[U], A (&rest)[U], A (&rstd)[U], const Vec<T, L> (&x)[U][V], const A (&pivots)[U],
                           const A (&edges)[U], const Place& p, const Columns<L, kShifted>& columns,
                           const Constants<A>& constants, E (&exchanges)[2], int& turn) {
  // Of RMS norm squares alone, where registers are left for code of its own.
  if constexpr (U == 1 && V * L <= 32 && !kShifted) {
    if (!constants.center) {
      A squares[1] = {};
      ForEachVector<V, false>(p, [&](int s, int) {
        A v[L];
        Widen(v, x[0][s]);
#pragma unroll
        for (const A each : v) squares[0] = fma(each, each, squares[0]);
      });
      GroupSum<false>(squares, p, exchanges, turn++);
      mean[0] = rest[0] = 0;
      rstd[0] = InverseRoot(squares[0] * constants.inverse + constants.epsilon);
      return;
    }
  }
  A pivot[U];
#pragma unroll
  for (int u = 0; u < U; ++u) pivot[u] = constants.center ? pivots[u] : A(0);
  // About these pivots, then those; whether any of them was far from the mean.
  const auto find = [&] {
    A sums[2 * U] = {};
#pragma unroll
    for (int u = 0; u < U; ++u)
      ForEachVector<V, false>(p, [&](int s, int) {
        A v[L];
        Widen(v, x[u][s]);
#pragma unroll
        for (A& each : v) {
          each -= pivot[u];
          sums[U + u] = fma(each, each, sums[U + u]);
        }
        sums[u] += SumOf(v);
      });
    if (columns.HasEdge())
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const A edge = edges[u] - pivot[u];
        sums[u] += edge;
        sums[U + u] = fma(edge, edge, sums[U + u]);
      }
    GroupSum<false>(sums, p, exchanges, turn++);
    bool far = false;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const Central<A> c(pivot[u], constants.center ? sums[u] : A(0), sums[U + u], constants.inverse);
      far |= c.far;
      pivot[u] = mean[u] = c.mean;
      rest[u] = kWideMean<T> ? c.rest : A(0);
      rstd[u] = InverseRoot(c.variance + constants.epsilon);
    }
    return __any_sync(~0u, far);  // a warp may have several groups
  };
  // Once for nearly every row, twice for others; a third time where the mean of equal numbers was rounded. The first
  // time not in the loop, where registers are left: before a loop, loads are waited for that are on their way.
  constexpr int kMost = 4;
  int round = 0;
  if constexpr (U == 1 && V * L <= 8) {
    if (__builtin_expect(!find(), true)) return;
    round = 1;
  }
  while (round < kMost && find()) ++round;
}

}  // namespace jaxdnn::layer_norm
