// Which forward kernel runs.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/band.cuh"
#include "cuda/pool/coop.cuh"
#include "cuda/pool/windows.cuh"

namespace jaxdnn::pool {

// Outputs to a strip: as many as leave a grid of several waves, since a strip loads K - S rows more than it owns.
inline int StripOf(const Geometry& g, int64_t outputs) {
  constexpr int64_t kThreadsWanted = int64_t{132} * 2048 * 2;
  const int64_t strips = std::clamp<int64_t>(kThreadsWanted * g.out[1] / std::max<int64_t>(outputs, 1), 1, g.out[1]);
  const int strip = static_cast<int>((g.out[1] + strips - 1) / strips);
  return std::clamp(strip, std::min(g.out[1], 4), 32);
}

// Launches a kernel for `task`, whose `walk` this fills in.
template <class Task>
cudaError_t LaunchWindows(Task task, Workspace workspace, cudaStream_t stream) {
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  if (WindowsAreFew(g, N)) return LaunchCoop<typename Task::Mergeable>(task, workspace.data, workspace.bytes, stream);
  const auto general = [&] {
    task.walk = Walk(g.batch, g.out, g.channels, N);
    return LaunchKernel(WindowKernel<Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task);
  };
  if constexpr (Task::kWidth < kVecLength<typename Task::Element> && Task::kUnrolls) {
    return LaunchBands(task, stream, general);
  } else if constexpr (Task::kUnrolls) {
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
