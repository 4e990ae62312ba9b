// Divisive normalization over square boxes of W = 2 H + 1 cells.
//
// A thread has N neighbours of a row, and walks down a strip of rows: it loads the W columns of a row once, and gives
// them to the W windows that the row belongs to. Neighbours across are `inner` elements apart; or inner is 1, and a
// thread's N elements are neighbours across themselves (kAcross).
#pragma once

#include "cuda/lrn/direct.cuh"

namespace jaxdnn::lrn {

enum class Pass { kForward, kTangent, kSeed, kCotangent };

template <class T>
struct Operands {
  const T *t, *tm;  // of x and of the means; t is the cotangent too
  const T *x, *m;
  T *out, *dm;
  Accumulator<T>*scratch, *saved;  // r and D^-beta g
};

constexpr int kMarchThreads = 128, kMarchBlocks = 4;  // of a multiprocessor, which bounds the registers

template <Pass kPass, int H, int N, bool kAcross, class T>
__global__ void __launch_bounds__(kMarchThreads, kMarchBlocks)
    MarchKernel(const __grid_constant__ Problem p, const __grid_constant__ Walk walk, int strip, Response<T> response,
                Operands<T> in) {
  using A = Accumulator<T>;
  constexpr int W = 2 * H + 1, M = kAcross ? (H + N - 1) / N : H;  // vectors on either side
  constexpr bool kSums = kPass != Pass::kForward;
  const int64_t flat = blockIdx.x * int64_t{kMarchThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  int at[3];
  const int64_t outer = walk.At(p, flat, at);
  const int height = p.extent[1], width = p.extent[2];
  const int64_t row = int64_t{width} * p.inner;
  const int begin = at[1] * strip, end = min(begin + strip, height), column = at[2] * (kAcross ? N : 1);
  const int64_t base = outer * height * row + (kAcross ? column : column * p.inner + walk.Vector(flat) * N);

  // Of the windows whose centres are H rows back, ..., H rows ahead: the centre's mean (of the cotangent its x), the
  // sum of squared deviations (of the cotangent what neighbours take away), and that of deviations.
  A centre[W][N], sum[W][N], deviations[W][N];
  const auto column_of = [&](int c) { return column + (c - M) * (kAcross ? N : 1); };
  const auto inside = [&](int c) { return column_of(c) >= 0 && column_of(c) < width; };
  // From the thread's own column to a neighbour, or to the border instead of beyond it: so that all of a row's loads
  // are on their way at once, without a branch between them.
  int64_t apart[2 * M + 1];
#pragma unroll
  for (int c = 0; c <= 2 * M; ++c)
    apart[c] = (min(max(column_of(c), 0), width - (kAcross ? N : 1)) - column) * (kAcross ? 1 : p.inner);
  const auto take = [&](int j, A v, A weight) {
#pragma unroll
    for (int o = 0; o < W; ++o) {
      const A deviation = v - centre[o][j];
      if constexpr (kPass == Pass::kCotangent) {
        sum[o][j] -= weight * deviation;
      } else {
        sum[o][j] += deviation * deviation;
        if constexpr (kSums) deviations[o][j] += deviation;
      }
    }
  };
  const auto open = [&](int o, int i) {  // the window in row o
    LoadWide((kPass == Pass::kCotangent ? in.x : in.m) + base + min(max(o, begin), end - 1) * row, centre[i]);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[i][j] = deviations[i][j] = 0;
  };
#pragma unroll
  for (int i = 0; i < W - 1; ++i) open(begin - 2 * H + i, i);
  for (int first = begin - H; first < end + H; first += W) {
#pragma unroll
    for (int u = 0; u < W; ++u) {
      const int r = first + u;
      open(r + H, (u + W - 1) % W);
      if (r >= 0 && r < height && r < end + H) {
        const int64_t here = base + r * row;
        A v[2 * M + 1][N], weight[2 * M + 1][N] = {};
#pragma unroll
        for (int c = 0; c <= 2 * M; ++c) {
          LoadWide((kPass == Pass::kCotangent ? in.m : in.x) + here + apart[c], v[c]);
          if constexpr (kPass == Pass::kCotangent) LoadWide(in.scratch + here + apart[c], weight[c]);
        }
#pragma unroll
        for (int c = 0; c <= 2 * M; ++c) {
          if (c != M && !inside(c)) continue;
#pragma unroll
          for (int i = 0; i < N; ++i) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
              const int apart = kAcross ? (c - M) * N + i - j : i == j ? 0 : W;
              if (apart >= -H && apart <= H) take(j, v[c][i], weight[c][i]);
            }
          }
        }
      }
      // The oldest window has seen its last row.
      const int done = r - H;
      if (done >= begin && done < end) {
        const int64_t to = base + done * row;
        A result[N];
        if constexpr (kPass == Pass::kCotangent) {
          LoadWide(in.saved + to, result);
#pragma unroll
          for (int j = 0; j < N; ++j) result[j] -= sum[u][j];
          StoreNarrow(in.out + to, result);
        } else {
          A x[N], t[N] = {}, seed[N];
          LoadWide(in.x + to, x);
          if constexpr (kSums) LoadWide(in.t + to, t);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            A q;
            const A gain = response.Gain(response.Divisor(sum[u][j]), &q);
            result[j] = (kSums ? t[j] : x[j]) * gain;
            seed[j] = q * (x[j] * t[j]);
            deviations[u][j] *= seed[j];
          }
          if constexpr (kSums) {
            StoreNarrow(in.scratch + to, seed);
            StoreNarrow(in.saved + to, result);
            StoreNarrow(in.dm + to, deviations[u]);
          } else {
            StoreNarrow(in.out + to, result);
          }
        }
      }
    }
  }
}

// Calls f(H, N, across) as integral constants, or otherwise().
template <class T, class F, class Otherwise, class... P>
cudaError_t VisitMarch(const Problem& p, F&& f, Otherwise&& otherwise, const P*... arrays) {
  const int reach = p.after[2];
  const bool square = p.before[0] == 0 && p.after[0] == 0 && p.after[1] == reach && p.before[1] == reach &&
                      p.before[2] == reach && reach >= 1 && reach <= 3;
  if (!square) return otherwise();
  const auto visit = [&](auto h) {
    constexpr int kN = h() == 3 ? 2 : 4;
    using Yes = std::true_type;
    using No = std::false_type;
    if (IsVectorAligned(arrays...)) {
      if (p.inner % 2 == 0) return f(h, std::integral_constant<int, 2>{}, No{});
      if (p.inner == 1 && p.extent[2] % kN == 0) return f(h, std::integral_constant<int, kN>{}, Yes{});
    }
    return f(h, std::integral_constant<int, 1>{}, No{});
  };
  if (reach == 1) return visit(std::integral_constant<int, 1>{});
  if (reach == 2) return visit(std::integral_constant<int, 2>{});
  return visit(std::integral_constant<int, 3>{});
}

template <Pass kPass, int H, int N, bool kAcross, class T>
cudaError_t LaunchMarch(const Problem& p, const Operands<T>& in, cudaStream_t stream) {
  const int64_t columns = p.Elements() / p.extent[1] / N;
  // The cheapest product of waves and rows to load.
  constexpr int64_t kResident = 132 * kMarchBlocks * kMarchThreads;
  int strip = p.extent[1];
  int64_t least = INT64_MAX;
  for (int n = 1; n <= p.extent[1]; ++n) {
    const int64_t each = CeilDiv(p.extent[1], n), waves = CeilDiv(columns * CeilDiv(p.extent[1], each), kResident);
    const int64_t cost = waves * (each + 2 * H + 1);
    if (cost < least) least = cost, strip = static_cast<int>(each);
  }
  Problem tiles = p;
  tiles.extent[1] = static_cast<int>(CeilDiv(p.extent[1], strip));
  if (kAcross) tiles.extent[2] = p.extent[2] / N;
  const Walk walk(tiles, kAcross ? 1 : N);
  return LaunchKernel(MarchKernel<kPass, H, N, kAcross, T>, CeilDiv(walk.total, kMarchThreads), kMarchThreads, stream,
                      p, walk, strip, Response<T>(p), in);
}

}  // namespace jaxdnn::lrn
