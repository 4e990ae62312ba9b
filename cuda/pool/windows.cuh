// The two forward kernels, over any reducer. A thread computes N neighbouring channels.
//
// WindowKernel takes any window: one output a thread, four cells in flight. WalkKernel takes K x K windows S apart: a
// thread walks down a strip of outputs, reduces each input row once and gives it to the R = ceil(K / S) windows that it
// belongs to, so that an input element is loaded K / S times by neighbours at the same moment, instead of (K / S)^2.
//
// A `Task` says what surrounds the reduction: Row(...) the loads, Finish(...) what is stored.
#pragma once

#include "cuda/pool/reducers.cuh"

namespace jaxdnn::pool {

constexpr int kCellsInFlight = 4;

template <class Task>
__global__ void __launch_bounds__(kThreads) WindowKernel(const __grid_constant__ Task task) {
  using State = typename Task::State;
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position o = task.walk.At(flat);
  const Cells c0 = CellsOf(g, 0, o.at[0]), c1 = CellsOf(g, 1, o.at[1]), c2 = CellsOf(g, 2, o.at[2]);
  const int rows = c1.count * c2.count;
  const bool none = c0.count == 0 || rows == 0;
  int cell = (c0.begin * g.window[1] + c1.begin) * g.window[2] + c2.begin;
  State state(none ? -1 : cell);
  if (!none) {
    const auto* p = task.x + o.batch * task.in.batch + c0.first * task.in.dim[0] + c1.first * task.in.dim[1] +
                    c2.first * task.in.dim[2] + o.channel;
    const int64_t step0 = g.dilation[0] * task.in.dim[0], step1 = g.dilation[1] * task.in.dim[1];
    const int64_t step2 = g.dilation[2] * task.in.dim[2], back2 = (c2.count - 1) * step2;
    for (int k0 = 0; k0 < c0.count; ++k0) {
      const auto* next = p + k0 * step0;
      int number = cell + k0 * g.window[1] * g.window[2], k2 = 0;
      for (int done = 0; done < rows; done += kCellsInFlight) {
        Vec<typename Task::Element, N> v[kCellsInFlight];
        int numbers[kCellsInFlight];
#pragma unroll
        for (int u = 0; u < kCellsInFlight; ++u) {
          numbers[u] = number;
          if (done + u < rows) v[u] = task.Get(next);
          const bool end = ++k2 == c2.count;
          next += end ? step1 - back2 : step2;
          number += end ? g.window[2] - c2.count + 1 : 1;
          if (end) k2 = 0;
        }
#pragma unroll
        for (int u = 0; u < kCellsInFlight; ++u)
          if (done + u < rows) state.Take(v[u], numbers[u]);
      }
    }
  }
  task.Finish(state, flat * N, o.at[0], o.at[1], o.at[2]);
}

template <int K, int S, class Task>
__global__ void __launch_bounds__(kThreads) WalkKernel(const __grid_constant__ Task task, int strip) {
  using State = typename Task::State;
  constexpr int N = Task::kWidth, R = (K + S - 1) / S;
  const Geometry& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position o = task.walk.At(flat);
  const int begin = o.at[1] * strip, end = min(begin + strip, g.out[1]);
  const int left = o.at[2] * S - g.low[2];
  bool column[K];
#pragma unroll
  for (int k = 0; k < K; ++k) column[k] = left + k >= 0 && left + k < g.in[2];
  const int first_column = max(0, -left);
  const bool any_column = left < g.in[2] && left + K > 0;
  const auto* image = task.x + o.batch * task.in.batch + o.at[0] * task.in.dim[0] + left * task.in.dim[2] + o.channel;
  int64_t to = (((o.batch * g.out[0] + o.at[0]) * g.out[1] + begin) * g.out[2] + o.at[2]) * g.channels + o.channel;

  State open[R];  // The windows that the current rows belong to, the newest first.
#pragma unroll 2
  for (int q = begin; q < end + R - 1; ++q) {
    const int top = q * S - g.low[1];
    Vec<typename Task::Element, N> v[S][K];
#pragma unroll
    for (int r = 0; r < S; ++r) {
      // Past the last window's start, only the rows that older windows still want.
      const bool row = top + r >= 0 && top + r < g.in[1] && (q < end || r + S < K);
      const auto* p = image + (top + r) * task.in.dim[1];
#pragma unroll
      for (int k = 0; k < K; ++k) v[r][k] = row && column[k] ? task.Get(p + k * task.in.dim[2]) : State::Identity();
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
      task.Finish(open[R - 1], to, o.at[0], q - (R - 1), o.at[2]);
      to += int64_t{g.out[2]} * g.channels;
    }
  }
}

// Outputs to a strip: as many as leave a grid of several waves, since a strip loads K - S rows more than it owns.
inline int StripOf(const Geometry& g, int64_t outputs) {
  constexpr int64_t kThreadsWanted = int64_t{132} * 2048 * 2;
  const int64_t strips = std::clamp<int64_t>(kThreadsWanted * g.out[1] / std::max<int64_t>(outputs, 1), 1, g.out[1]);
  const int strip = static_cast<int>((g.out[1] + strips - 1) / strips);
  return std::clamp(strip, std::min(g.out[1], 4), 32);
}

// Launches a kernel for `task`, whose `walk` this fills in.
template <class Task>
cudaError_t LaunchWindows(Task task, cudaStream_t stream) {
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  const auto general = [&] {
    task.walk = Walk(g.batch, g.out, g.channels, N);
    return LaunchKernel(WindowKernel<Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task);
  };
  if constexpr (Task::kWalks) {
    if (g.out[1] == 0) return general();
    return VisitSquare(
        g,
        [&](auto k, auto s) {
          const int64_t outputs = Walk(g.batch, g.out, g.channels, N).total;
          const int strip = StripOf(g, outputs);
          const int extent[3] = {g.out[0], static_cast<int>(CeilDiv(g.out[1], strip)), g.out[2]};
          task.walk = Walk(g.batch, extent, g.channels, N);
          return LaunchKernel(WalkKernel<k(), s(), Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task,
                              strip);
        },
        general);
  } else {
    return general();
  }
}

}  // namespace jaxdnn::pool
