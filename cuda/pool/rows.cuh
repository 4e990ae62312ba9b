// Channels-first windows of K x K cells, S apart, whose rows are vectors: the forward kernel over any reducer, and the
// gradient of a choice.
//
// A thread takes L neighbouring outputs and the L S inputs above them, and walks down a strip of rows: every input
// comes once, in one access, ahead of its use. What a window needs of the vector beside comes by a shuffle, or where
// that is another warp's, by a load. States keep neighbouring outputs as they do channels.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/forward.cuh"
#include "cuda/pool/spread.cuh"
#include "cuda/pool/windows.cuh"

namespace jaxdnn::pool {

constexpr int kRowOutputs = 4;  // L, at most
constexpr int kRowStrip = 4;    // what strips load twice costs less than a last wave of few

// A thread's vector of a row, and the element on either side. Of 16-bit types these are the upper half of `left` and
// the lower of `right`.
template <class T, int V>
struct RowVector {
  static constexpr int kWords = sizeof(T) * V / 4;
  unsigned left, own[kWords], right;

  __device__ unsigned Word(int i) const { return i < 0 ? left : i < kWords ? own[i] : right; }

  // Elements begin, begin + S, ...
  template <int S, int L>
  __device__ Words<T, L> Pick(int begin) const {
    Words<T, L> picked;
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < L / 2; ++j) {
        const int a = begin + 2 * j * S + 2, b = a + S;  // from the word `left` on
        const unsigned halves = (a % 2 ? 0x32 : 0x10) | (b % 2 ? 0x7600 : 0x5400);
        picked.v[j] = a % 2 == 0 && S == 1 ? Word(a / 2 - 1) : __byte_perm(Word(a / 2 - 1), Word(b / 2 - 1), halves);
      }
    } else {
#pragma unroll
      for (int j = 0; j < L; ++j) picked.v[j] = Word(begin + j * S);
    }
    return picked;
  }
  template <int S, int L>
  __device__ Vec<float, L> PickWide(int begin) const {
    Vec<float, L> picked;
#pragma unroll
    for (int j = 0; j < L; ++j) picked.v[j] = Wide(begin + j * S);
    return picked;
  }
  __device__ float Wide(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(Word(i));
    } else {
      const float2 pair = WidenPair<T>(Word((i + 2) / 2 - 1));
      return i % 2 == 0 ? pair.x : pair.y;
    }
  }
};

// The place of a thread's vectors among those of their rows.
struct RowPlace {
  bool first, last;    // of its row
  bool before, after;  // whether the vector on that side is another warp's

  __device__ RowPlace(int at, int count)
      : first(at == 0),
        last(at == count - 1),
        before(threadIdx.x % 32 == 0 && !first),
        after(threadIdx.x % 32 == 31 && !last) {}
};

// A vector of a row as it is loaded, with the element beside it that no lane has.
template <class T, int V, bool kLeft, bool kRight>
struct RowLoad {
  static constexpr int kWords = sizeof(T) * V / 4;
  unsigned own[kWords];
  unsigned beside = 0;

  __device__ void Load(const T* p, const RowPlace& place) {
    constexpr int kAccess = sizeof(T) * V < 16 ? V : kVecLength<T>;
#pragma unroll
    for (int i = 0; i < V / kAccess; ++i) {
      const auto words = LoadWords<kAccess>(p + i * kAccess);
      memcpy(own + i * static_cast<int>(sizeof(words) / 4), &words, sizeof(words));
    }
    if ((kLeft && place.before) || (kRight && place.after)) {
      using Bits = std::conditional_t<sizeof(T) == 4, unsigned, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;
      beside = *reinterpret_cast<const Bits*>(p + (kLeft && (!kRight || place.before) ? -1 : V));
    }
  }

  // With the elements on either side. Where there are none, and where there is no such row, all are `outside`.
  __device__ RowVector<T, V> Joined(const RowPlace& place, bool row, unsigned outside) const {
    RowVector<T, V> joined;
#pragma unroll
    for (int i = 0; i < kWords; ++i) joined.own[i] = row ? own[i] : outside;
    joined.left = joined.right = outside;
    if constexpr (kLeft) {
      const unsigned up = __shfl_up_sync(~0u, own[kWords - 1], 1);
      if (row && !place.first) joined.left = place.before ? beside << (32 - 8 * sizeof(T)) : up;
    }
    if constexpr (kRight) {
      const unsigned down = __shfl_down_sync(~0u, own[0], 1);
      if (row && !place.last) joined.right = place.after ? beside : down;
    }
    return joined;
  }
};

template <int K, int S, int kLow, class Task>
__global__ void __launch_bounds__(kThreads, S > 1 && sizeof(typename Task::Element) == 2 ? 5 : 4)
    RowsKernel(const __grid_constant__ Task task) {
  using T = typename Task::Element;
  using State = typename Task::State;
  constexpr int L = Task::kWidth, V = L * S, R = (K + S - 1) / S;
  constexpr int G = S == 1 ? 2 : 1, kRows = G * S;  // rows of inputs to a step
  const Shape& g = task.g;
  // A thread too many does the last one's work, since its lane takes part in shuffles.
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const bool stores = thread < task.walk.total;
  const Position o = task.walk.At(stores ? thread : task.walk.total - 1);
  const RowPlace place(o.at[2], g.out[2] / L);
  const int begin = o.at[1] * kRowStrip, end = stores ? min(begin + kRowStrip, g.out[1]) : 0, o2 = o.at[2] * L;
  const T* column = task.x + o.batch * task.in.batch + o.at[0] * task.in.dim[0] + o.at[2] * V;
  int64_t to = ((o.batch * g.out[0] + o.at[0]) * g.out[1] + begin) * g.out[2] + o2;

  RowLoad<T, V, (kLow > 0), (K - S - kLow > 0)> rows[kRows];
  const auto load = [&](int step) {  // Instead of a row outside, which is not looked at, another.
    const int first = step * S - g.low[1];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      rows[r].Load(column + int64_t{min(max(first + r, 0), g.in[1] - 1)} * g.in[2], place);
  };
  const unsigned outside = task.Identity().v[0];
  State open[R];  // the windows that the current rows belong to, the newest first
  load(begin);
#pragma unroll 1
  for (int step = begin; step < begin + kRowStrip + R - 1; step += G) {
    RowVector<T, V> joined[kRows];
    const int first_row = step * S - g.low[1];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      joined[r] = rows[r].Joined(place, first_row + r >= 0 && first_row + r < g.in[1], outside);
    load(step + G);
#pragma unroll
    for (int u = 0; u < G; ++u) {
      const int top = (step + u) * S - g.low[1], o1 = step + u - (R - 1);
#pragma unroll
      for (int j = R - 1; j > 0; --j) open[j] = open[j - 1];
      const bool none = top >= g.in[1] || top + K <= 0;
      open[0] = State(none ? -1 : max(0, -top) * K);
      if constexpr (State::kIndexed && kLow > 0) open[0].index[0] += place.first && !none ? kLow : 0;
#pragma unroll
      for (int r = 0; r < S; ++r) {
        const auto pick = [&](int k) {
          if constexpr (Task::kWidens)
            return joined[u * S + r].template PickWide<S, L>(k - kLow);
          else
            return task.Prepare(joined[u * S + r].template Pick<S, L>(k - kLow));
        };
        State row(0);
        row.Start(pick(0));
#pragma unroll
        for (int k = 1; k < K; ++k) row.Take(pick(k), k);
        GiveRow<K, S>(row, r, open);
      }
      if (o1 >= begin && o1 < end) {
        task.template Finish<true>(open[R - 1], to, o.at[0], o1, o2);
        to += g.out[2];
      }
    }
  }
}

// dx[i] = the sum of dy[o] over the windows o whose index, of a byte, names i. `walk` is over [planes, strips,
// vectors].
template <int K, int S, int kLow, class T>
__global__ void __launch_bounds__(kThreads, 4)
    RowsGradKernel(const __grid_constant__ Shape g, const __grid_constant__ Walk walk, int first_tile, int tiles,
                   const T* __restrict__ dy, const uint8_t* __restrict__ index, T* __restrict__ dx) {
  constexpr int L = kRowOutputs, V = L * S, kBefore = (K - 1) / S, kNone = 255;
  constexpr bool kLeft = (K - 1 - kLow) / S > 0, kRight = (S - 1 + kLow) / S > 0;
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const bool stores = thread < walk.total;
  const Position o = walk.At(stores ? thread : walk.total - 1);
  const RowPlace place(o.at[2], g.out[2] / L);
  const int begin = first_tile + o.at[1] * kRowStrip, end = stores ? min(begin + kRowStrip, first_tile + tiles) : begin;
  const int64_t plane = o.batch * g.in[0] + o.at[0], windows = plane * g.out[1] * g.out[2] + o.at[2] * L;
  T* const to = dx + plane * g.in[1] * g.in[2] + o.at[2] * V;

  RowLoad<T, L, kLeft, kRight> values;
  RowLoad<uint8_t, L, kLeft, kRight> winners;
  const auto load = [&](int o1) {
    const int64_t row = windows + int64_t{min(max(o1, 0), g.out[1] - 1)} * g.out[2];
    values.Load(dy + row, place);
    winners.Load(index + row, place);
  };
  // What the windows of a row and those beside them pass back, and to which cells: the row's, and those before.
  float value[kBefore + 1][L + 2];
  int winner[kBefore + 1][L + 2];
  load(begin - kBefore);
#pragma unroll 1
  for (int o1 = begin - kBefore; o1 < begin + kRowStrip; ++o1) {
#pragma unroll
    for (int a = kBefore; a > 0; --a) {
#pragma unroll
      for (int j = 0; j < L + 2; ++j) value[a][j] = value[a - 1][j], winner[a][j] = winner[a - 1][j];
    }
    const auto v = values.Joined(place, true, 0);
    const auto w = winners.Joined(place, o1 >= 0 && o1 < g.out[1], ~0u);
    load(o1 + 1);
#pragma unroll
    for (int j = -1; j <= L; ++j) {
      value[0][1 + j] = v.Wide(j);
      winner[0][1 + j] = j < 0 ? w.left >> 24 : j < L ? w.own[0] >> (8 * j) & kNone : w.right & kNone;
    }
    const bool live = o1 >= begin && o1 < end;
#pragma unroll
    for (int r = 0; r < S; ++r) {
      const int i1 = o1 * S - g.low[1] + r;
      float sum[V] = {};
#pragma unroll
      for (int a = kBefore; a >= 0; --a) {
#pragma unroll
        for (int c = 0; c < V; ++c) {
#pragma unroll
          for (int j = -1; j <= L; ++j) {
            const int k1 = r + a * S, k2 = c + kLow - j * S;
            if (k1 < K && k2 >= 0 && k2 < K && winner[a][1 + j] == k1 * K + k2) sum[c] += value[a][1 + j];
          }
        }
      }
      if (!live || i1 < 0 || i1 >= g.in[1]) continue;
      Vec<T, V> result;
#pragma unroll
      for (int c = 0; c < V; ++c) result.v[c] = static_cast<T>(sum[c]);
      Store(to + int64_t{i1} * g.in[2], result);
    }
  }
}

// Calls f(K, S, low) with what these kernels are for as integral constants, or otherwise().
template <class F, class Otherwise>
cudaError_t VisitRows(const Geometry& g, bool aligned, F&& f, Otherwise&& otherwise) {
  const bool rows = g.channels == 1 && g.out[2] % kRowOutputs == 0 && g.in[2] == g.out[2] * g.stride[2] &&
                    g.batch > 0 && g.in[1] > 0 && g.out[1] > 0 && aligned;
  if (!rows) return otherwise();
  constexpr std::integral_constant<int, 0> kZero;
  constexpr std::integral_constant<int, 1> kOne;
  const auto visit = [&](auto k, auto s) {
    if constexpr (k() > s()) {
      if (g.low[2] == 1) return f(k, s, kOne);
    }
    if constexpr (s() > 1) {
      if (g.low[2] == 0) return f(k, s, kZero);
    }
    return otherwise();
  };
  return VisitSquare<true>(g, visit, otherwise);
}

// Launches RowsKernel for task(width), or otherwise().
template <class T, class Otherwise, class MakeTask>
cudaError_t LaunchRows(const Geometry& g, bool aligned, Otherwise&& otherwise, cudaStream_t stream, MakeTask&& make) {
  const auto launch = [&](auto k, auto s, auto low) {
    // As many outputs as have 16 bytes above them in a row, but no fewer than two.
    constexpr int L = sizeof(T) == 4 && s() == 2 ? 2 : kRowOutputs;
    auto task = make(std::integral_constant<int, L>{});
    const int extent[3] = {g.out[0], static_cast<int>(CeilDiv(g.out[1], kRowStrip)), g.out[2] / L};
    task.walk = Walk(g.batch, extent, 1, 1);
    return LaunchKernel(RowsKernel<k(), s(), low(), decltype(task)>, CeilDiv(task.walk.total, kThreads), kThreads,
                        stream, task);
  };
  return VisitRows(g, aligned, launch, otherwise);
}

template <class T, class Otherwise>
cudaError_t LaunchRowsGrad(const Geometry& g, const T* dy, const uint8_t* index, T* dx, cudaStream_t stream,
                           Otherwise&& otherwise) {
  const auto launch = [&](auto k, auto s, auto low) {
    const int tiles = CountTiles(g, 1, s);
    const int extent[3] = {g.in[0], static_cast<int>(CeilDiv(tiles, kRowStrip)), g.out[2] / kRowOutputs};
    const Walk walk(g.batch, extent, 1, 1);
    return LaunchKernel(RowsGradKernel<k(), s(), low(), T>, CeilDiv(walk.total, kThreads), kThreads, stream, Shape(g),
                        walk, FirstTile(g, 1, s), tiles, dy, index, dx);
  };
  return VisitRows(g, IsVectorAligned(dy, index, dx), launch, otherwise);
}

}  // namespace jaxdnn::pool
