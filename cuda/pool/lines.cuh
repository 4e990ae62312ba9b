// The forward kernel where channels do not fill vectors and windows are K x K cells, S apart: threads take neighbouring
// elements of a line of outputs, [columns, channels], and walk down a strip of rows.
//
// Elements of a window that are neighbours in memory are loaded by neighbouring threads, and again from the cache.
// Loads are under no condition, with a step of several rows of them in flight: one outside the input goes to its border
// instead.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/windows.cuh"

namespace jaxdnn::pool {

// As measured, and as registers allow: blocks on a multiprocessor, rows of windows to a step, and to a strip at most.
// Longer strips read from too many places at once. A task is light if its states leave registers for loads.
template <int K, int S, class Task>
struct LinePlan {
  static constexpr bool kLight = Task::kIsLight, kOverlap = K > S;
  static constexpr bool kShort = kLight && S > 1 && (!kOverlap || sizeof(typename Task::Element) > 2);
  static constexpr int kBlocks = kLight ? 5 : 4, kMost = kShort ? 8 : 32;
  static constexpr int kRows = !kLight ? 2 : kOverlap && S > 1 ? 3 : 4;
};

template <int K, int S, class Task>
__global__ void __launch_bounds__(kThreads, (LinePlan<K, S, Task>::kBlocks))
    LinesKernel(const __grid_constant__ Task task, int strip) {
  using State = typename Task::State;
  constexpr int R = (K + S - 1) / S, G = LinePlan<K, S, Task>::kRows;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Shape& g = task.g;
  const Position o = task.walk.At(flat);
  const int begin = o.at[1] * strip, end = min(begin + strip, g.out[1]), o2 = o.at[2];
  const int left = o2 * S - g.low[2], pitch = g.in[2] * g.channels;
  int offset[K];
#pragma unroll
  for (int k = 0; k < K; ++k) offset[k] = min(max(left + k, 0), g.in[2] - 1) * g.channels + o.channel;
  const bool columns_inside = left >= 0 && left + K <= g.in[2];
  const bool any_column = left < g.in[2] && left + K > 0;
  const int first_column = max(0, -left);
  const auto* plane = task.x + o.batch * task.in.batch + o.at[0] * task.in.dim[0];
  int64_t to = (((o.batch * g.out[0] + o.at[0]) * g.out[1] + begin) * g.out[2] + o2) * g.channels + o.channel;
  State open[R];  // the windows that the current rows belong to, the newest first
#pragma unroll 1
  for (int step = begin; step < end + R - 1; step += G) {
    typename Task::Loaded v[G * S][K];
    const int first_row = step * S - g.low[1];
#pragma unroll
    for (int r = 0; r < G * S; ++r) {
      const int row = min(max(first_row + r, 0), g.in[1] - 1) * pitch;
#pragma unroll
      for (int k = 0; k < K; ++k) v[r][k] = task.Get(plane + (row + offset[k]));
    }
    if (!columns_inside || first_row < 0 || first_row + G * S > g.in[1]) {
#pragma unroll
      for (int r = 0; r < G * S; ++r) {
        const bool row = first_row + r >= 0 && first_row + r < g.in[1];
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (!row || left + k < 0 || left + k >= g.in[2]) v[r][k] = task.Identity();
      }
    }
#pragma unroll
    for (int u = 0; u < G; ++u) {
      const int q = step + u, top = q * S - g.low[1], o1 = q - (R - 1);
#pragma unroll
      for (int j = R - 1; j > 0; --j) open[j] = open[j - 1];
      const bool none = !any_column || top >= g.in[1] || top + K <= 0;
      open[0] = State(none ? -1 : max(0, -top) * K + first_column);
#pragma unroll
      for (int r = 0; r < S; ++r) {
        State row(first_column);
        row.Start(task.Prepare(v[u * S + r][0]));
#pragma unroll
        for (int k = 1; k < K; ++k) row.Take(task.Prepare(v[u * S + r][k]), k);
        GiveRow<K, S>(row, r, open);
      }
      if (o1 >= begin && o1 < end) {
        task.template Finish<true>(open[R - 1], to, o.at[0], o1, o2);
        to += int64_t{g.out[2]} * g.channels;
      }
    }
  }
}

// Launches LinesKernel, or otherwise().
template <class Task, class Otherwise>
cudaError_t LaunchLines(Task task, cudaStream_t stream, Otherwise&& otherwise) {
  const Geometry& g = task.g;
  // Places in a plane are 32-bit there.
  if (int64_t{g.in[1]} * g.in[2] * g.channels > INT32_MAX) return otherwise();
  const auto launch = [&](auto k, auto s) {
    const int64_t columns = g.batch * g.out[0] * g.out[2] * g.channels;
    using Plan = LinePlan<k(), s(), Task>;
    const int strip = std::min(StripOf(g.out[1], columns, Plan::kBlocks, s, k - s + 3), Plan::kMost);
    const int extent[3] = {g.out[0], static_cast<int>(CeilDiv(g.out[1], strip)), g.out[2]};
    task.walk = Walk(g.batch, extent, g.channels, 1);
    return LaunchKernel(LinesKernel<k(), s(), Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task, strip);
  };
  return VisitSquare<true>(g, launch, otherwise);
}

}  // namespace jaxdnn::pool
