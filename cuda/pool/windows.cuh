// The forward kernels, over any reducer. A thread computes N neighbouring channels of an output, or of a strip of them.
//
// ReduceWindow takes any window: one output, four cells in flight. WalkStrip takes K x K windows S apart: it walks down
// a strip of outputs, reduces each input row once and gives it to the R = ceil(K / S) windows that it belongs to, so
// that an input element is loaded K / S times by neighbours at the same moment, instead of (K / S)^2.
//
// Where channels fill 16-byte vectors, both read global memory (WindowKernel, WalkKernel). Else BandKernel (band.cuh)
// brings whole bands of the input to shared memory first.
//
// A `Task` says what surrounds the reduction: Get(...) a load, Finish(...) what is stored.
#pragma once

#include "cuda/pool/reducers.cuh"

namespace jaxdnn::pool {

constexpr int kCellsInFlight = 4;

// Reduces window (o0, o1, o2) and stores it at offset `to`. `plane` is the input at the window's first depth in it,
// position (0, 0); windows' depths are `step0` apart, positions `pitch1` and `pitch2`.
template <class Task, class P>
__device__ void ReduceWindow(const Task& task, const typename Task::Element* plane, P step0, P pitch1, P pitch2, int o0,
                             int o1, int o2, int64_t to) {
  using State = typename Task::State;
  const Geometry& g = task.g;
  const Cells c0 = CellsOf(g, 0, o0), c1 = CellsOf(g, 1, o1), c2 = CellsOf(g, 2, o2);
  const int cells = c1.count * c2.count;
  const bool none = c0.count == 0 || cells == 0;
  const int first = (c0.begin * g.window[1] + c1.begin) * g.window[2] + c2.begin;
  State state(none ? -1 : first);
  if (!none) {
    const auto* begin = plane + c1.first * pitch1 + c2.first * pitch2;
    const P step1 = g.dilation[1] * pitch1, step2 = g.dilation[2] * pitch2, back2 = (c2.count - 1) * step2;
    for (int k0 = 0; k0 < c0.count; ++k0) {
      const auto* next = begin + k0 * step0;
      int number = first + k0 * g.window[1] * g.window[2], k2 = 0;
      for (int done = 0; done < cells; done += kCellsInFlight) {
        typename Task::Loaded v[kCellsInFlight];
        int numbers[kCellsInFlight];
#pragma unroll
        for (int u = 0; u < kCellsInFlight; ++u) {
          numbers[u] = number;
          if (done + u < cells) v[u] = task.Get(next);
          const bool end = ++k2 == c2.count;
          next += end ? step1 - back2 : step2;
          number += end ? g.window[2] - c2.count + 1 : 1;
          if (end) k2 = 0;
        }
#pragma unroll
        for (int u = 0; u < kCellsInFlight; ++u)
          if (done + u < cells) state.Take(v[u], numbers[u]);
      }
    }
  }
  task.Finish(state, to, o0, o1, o2);
}

// Reduces windows (o0, begin to end, o2) and stores them from offset `to`. `plane` is the input at (o0, 0, 0).
template <int K, int S, class Task, class P>
__device__ void WalkStrip(const Task& task, const typename Task::Element* plane, P pitch1, P pitch2, int o0, int begin,
                          int end, int o2, int64_t to) {
  using State = typename Task::State;
  constexpr int R = (K + S - 1) / S;
  const Geometry& g = task.g;
  const int left = o2 * S - g.low[2];
  bool column[K];
#pragma unroll
  for (int k = 0; k < K; ++k) column[k] = left + k >= 0 && left + k < g.in[2];
  const int first_column = max(0, -left);
  const bool any_column = left < g.in[2] && left + K > 0;
  plane += left * pitch2;

  State open[R];  // The windows that the current rows belong to, the newest first.
#pragma unroll 2
  for (int q = begin; q < end + R - 1; ++q) {
    const int top = q * S - g.low[1];
    typename Task::Loaded v[S][K];
#pragma unroll
    for (int r = 0; r < S; ++r) {
      // Past the last window's start, only the rows that older windows still want.
      const bool row = top + r >= 0 && top + r < g.in[1] && (q < end || r + S < K);
      const auto* p = plane + (top + r) * pitch1;
#pragma unroll
      for (int k = 0; k < K; ++k) v[r][k] = row && column[k] ? task.Get(p + k * pitch2) : Task::Identity();
    }
#pragma unroll
    for (int j = R - 1; j > 0; --j) open[j] = open[j - 1];
    const bool none = !any_column || top >= g.in[1] || top + K <= 0;
    open[0] = State(none ? -1 : max(0, -top) * K + first_column);
#pragma unroll
    for (int r = 0; r < S; ++r) {
      State row(first_column);
#pragma unroll
      for (int k = 0; k < K; ++k) row.Take(v[r][k], k);
#pragma unroll
      for (int j = 0; j < R; ++j)
        if (j * S + r < K) open[j].Take(row, (j * S + r) * K);
    }
    if (q - (R - 1) >= begin) {
      task.Finish(open[R - 1], to, o0, q - (R - 1), o2);
      to += int64_t{g.out[2]} * g.channels;
    }
  }
}

template <class Task>
__global__ void __launch_bounds__(kThreads) WindowKernel(const __grid_constant__ Task task) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position o = task.walk.At(flat);
  const int64_t pitch0 = task.in.dim[0];
  const auto* plane = task.x + o.batch * task.in.batch + CellsOf(task.g, 0, o.at[0]).first * pitch0 + o.channel;
  ReduceWindow(task, plane, task.g.dilation[0] * pitch0, task.in.dim[1], task.in.dim[2], o.at[0], o.at[1], o.at[2],
               flat * Task::kWidth);
}

template <int K, int S, class Task>
__global__ void __launch_bounds__(kThreads) WalkKernel(const __grid_constant__ Task task, int strip) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Geometry& g = task.g;
  const Position o = task.walk.At(flat);
  const int begin = o.at[1] * strip, end = min(begin + strip, g.out[1]);
  const auto* plane = task.x + o.batch * task.in.batch + o.at[0] * task.in.dim[0] + o.channel;
  const int64_t to =
      (((o.batch * g.out[0] + o.at[0]) * g.out[1] + begin) * g.out[2] + o.at[2]) * g.channels + o.channel;
  WalkStrip<K, S>(task, plane, task.in.dim[1], task.in.dim[2], o.at[0], begin, end, o.at[2], to);
}

}  // namespace jaxdnn::pool
