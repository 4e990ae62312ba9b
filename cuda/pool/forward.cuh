// Which forward kernel runs.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/band.cuh"
#include "cuda/pool/coop.cuh"
#include "cuda/pool/lines.cuh"
#include "cuda/pool/wide.cuh"
#include "cuda/pool/windows.cuh"

namespace jaxdnn::pool {

// Launches a kernel for `task`, whose `walk` this fills in.
template <class Task>
cudaError_t LaunchWindows(Task task, Workspace workspace, cudaStream_t stream) {
  using T = typename Task::Element;
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  const auto general = [&] {
    task.walk = Walk(g.batch, g.out, g.channels, N);
    const CellTable table(g, g.dilation[0] * task.in.dim[0], task.in.dim[1], task.in.dim[2]);
    return LaunchKernel(WindowKernel<Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task,
                        Starts(g, task.in), table);
  };
  const bool empty = g.batch == 0 || g.channels == 0 || g.in[0] == 0 || g.in[1] == 0 || g.in[2] == 0 || g.out[0] == 0 ||
                     g.out[1] == 0 || g.out[2] == 0;
  if (empty) return general();
  if constexpr (Task::kShares && sizeof(T) < 8) {
    if (WindowsAreFew(g, N)) return LaunchCoop<typename Task::Mergeable>(task, workspace, stream);
  }
  if constexpr (Task::kUnrolls && kIsTuned<T>) {
    if (const Squares squares(g, N); squares.total > 0)
      return LaunchKernel(SquareKernel<Task>, CeilDiv(squares.total, kThreads * kSquareOutputs<Task>), kThreads, stream,
                          squares, task);
  }
  if constexpr (!Task::kUnrolls || !kIsTuned<T>) {
    return general();
  } else if constexpr (N < kVecLength<T>) {
    return LaunchLines(task, stream, [&] { return LaunchBands(task, stream, general); });
  } else {
    if constexpr (Task::kIdempotent) {
      if (IsWide(g)) return LaunchWide(task, stream, general);
    }
    const auto walk = [&](auto k, auto s) {
      const int64_t columns = g.batch * g.out[0] * g.out[2] * (g.channels / N);
      const int strip = StripOf(g.out[1], columns, kWalkBlocks<k(), Task>, s, k - s + 1);
      const int extent[3] = {g.out[0], static_cast<int>(CeilDiv(g.out[1], strip)), g.out[2]};
      task.walk = Walk(g.batch, extent, g.channels, N);
      return LaunchKernel(WalkKernel<k(), s(), Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task,
                          strip);
    };
    return VisitSquare<false, Task::kIdempotent>(g, walk, general);
  }
}

}  // namespace jaxdnn::pool
