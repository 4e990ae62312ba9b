// The forward kernel for few and large windows, global pooling above all: the threads of a block share each window, and
// if even the blocks are few, several share one, whose results a second kernel joins in a fixed order.
//
// `lanes` neighbouring threads take neighbouring channel vectors, the groups of lanes take every groups-th cell.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/reducers.cuh"

namespace jaxdnn::pool {

constexpr int kNoCellYet = INT32_MAX / 2;
constexpr int kMostSplits = 128;
constexpr int kCoopBlocks = 4;  // of a multiprocessor

struct Coop {
  Walk walk;  // over [batch, outputs, vectors / lanes], a block each
  int lanes, vectors, splits;
  int cells, share;  // of a window, and of these a block's
  bool whole;        // whether a window is all there is, so that its cells are neighbours
  FastDiv by_cell, by_column;
};

// A window in which nothing was larger than -inf holds nothing else, and its first cell wins.
template <class State>
__device__ void SettleIndex(State& state, int first) {
  if constexpr (State::kIndexed) {
#pragma unroll
    for (int& i : state.index) i = i == kNoCellYet ? first : i;
  }
}

template <class Task, class State>
__global__ void __launch_bounds__(kThreads, kCoopBlocks)
    CoopKernel(const __grid_constant__ Task task, const __grid_constant__ Coop coop, State* partial) {
  constexpr int N = Task::kWidth;
  __shared__ __align__(16) unsigned char memory[kThreads * sizeof(State)];
  State* scratch = reinterpret_cast<State*>(memory);
  const Shape& g = task.g;
  const int64_t block = blockIdx.x / coop.splits;
  const int split = static_cast<int>(blockIdx.x - block * coop.splits);
  const Position o = coop.walk.At(block);
  const int lane = threadIdx.x & (coop.lanes - 1), group = threadIdx.x / coop.lanes, groups = kThreads / coop.lanes;
  const int vector = o.channel * coop.lanes + lane;
  const Cells c0 = CellsOf(g, 0, o.at[0]), c1 = CellsOf(g, 1, o.at[1]), c2 = CellsOf(g, 2, o.at[2]);
  const int cells = c0.count * c1.count * c2.count;
  const int first = (c0.begin * g.window[1] + c1.begin) * g.window[2] + c2.begin;
  State state(kNoCellYet);
  if (vector < coop.vectors && cells > 0) {
    const auto* begin = task.x + o.batch * task.in.batch + c0.first * task.in.dim[0] + c1.first * task.in.dim[1] +
                        c2.first * task.in.dim[2] + vector * N;
    const int end = min((split + 1) * coop.share, coop.cells);
    // Loads of several cells are in flight together, as registers allow; instead of one outside the input, the first.
    constexpr int kInFlight = sizeof(State) > 16 ? 4 : 8;
    int t = split * coop.share + group;
    if (Task::kWhole && coop.whole) {
      for (; t < end; t += kInFlight * groups) {
        typename Task::Loaded v[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) v[u] = task.Get(begin + int64_t{min(t + u * groups, end - 1)} * g.channels);
#pragma unroll
        for (auto& each : v) KeepLoaded(each);
#pragma unroll
        for (int u = 0; u < kInFlight; ++u)
          if (t + u * groups < end) state.Take(task.Prepare(v[u]), t + u * groups);
      }
    }
    for (; t < end; t += kInFlight * groups) {
      typename Task::Loaded v[kInFlight];
      bool inside[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        int64_t offset = 0;
        int k1, k2;
        const int k0 = coop.by_column.Div(coop.by_cell.Div(t + u * groups, &k2), &k1);
        inside[u] = t + u * groups < end;
        const auto go = [&](int d, int k, const Cells& c) {
          inside[u] = inside[u] && static_cast<unsigned>(k - c.begin) < static_cast<unsigned>(c.count);
          offset += (k - c.begin) * g.dilation[d] * task.in.dim[d];
        };
        go(0, k0, c0), go(1, k1, c1), go(2, k2, c2);
        v[u] = task.Get(begin + (inside[u] ? offset : 0));
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u)
        if (inside[u]) state.Take(task.Prepare(v[u]), t + u * groups);
    }
  }
  for (int half = groups / 2; half > 0; half /= 2) {
    if (group >= half && group < 2 * half) scratch[threadIdx.x] = state;
    __syncthreads();
    if (group < half) state.Merge(scratch[threadIdx.x + half * coop.lanes]);
    __syncthreads();
  }
  if (group > 0 || vector >= coop.vectors) return;
  const int64_t output = ((o.batch * g.out[0] + o.at[0]) * g.out[1] + o.at[1]) * g.out[2] + o.at[2];
  const int64_t to = output * coop.vectors + vector;
  if (coop.splits > 1) {
    partial[to * coop.splits + split] = state;
  } else {
    SettleIndex(state, cells > 0 ? first : -1);
    task.Finish(state, to * N, o.at[0], o.at[1], o.at[2]);
  }
}

// Joins what the blocks of a global pooling found; a block an output vector.
template <class Task, class State>
__global__ void __launch_bounds__(kMostSplits)
    JoinKernel(const __grid_constant__ Task task, const State* partial, int splits) {
  __shared__ __align__(16) unsigned char memory[kMostSplits * sizeof(State)];
  State* scratch = reinterpret_cast<State*>(memory);
  const int t = threadIdx.x;
  State state = partial[int64_t{blockIdx.x} * splits + min(t, splits - 1)];
  for (int half = kMostSplits / 2; half > 0; half /= 2) {
    if (t >= half && t < 2 * half) scratch[t] = state;
    __syncthreads();
    if (t < half && t + half < splits) state.Merge(scratch[t + half]);
    __syncthreads();
  }
  if (t > 0) return;
  SettleIndex(state, 0);
  task.Finish(state, int64_t{blockIdx.x} * Task::kWidth, 0, 0, 0);
}

// Whether a thread a window would leave most of the device idle, or a window has more cells than IndexedPairMax counts.
inline bool WindowsAreFew(const Geometry& g, int width) {
  constexpr int64_t kThreadsWanted = 132 * 512, kLeastCells = 64;
  const int64_t cells = int64_t{g.window[0]} * g.window[1] * g.window[2];
  const int64_t outputs = g.batch * g.out[0] * g.out[1] * g.out[2] * (g.channels / width);
  const bool counts = cells <= INT32_MAX - 32 * kThreads;  // in 32 bits
  return counts && (cells > INT16_MAX || (cells >= kLeastCells && outputs < kThreadsWanted));
}

template <class State, class Task>
cudaError_t LaunchCoop(const Task& task, Workspace workspace, cudaStream_t stream) {
  constexpr int64_t kBlocksWanted = 132 * kCoopBlocks, kLeastCellsOfASplit = 1024;
  const Shape& g = task.g;
  Coop coop = {Walk(0, g.out, 1, 1), 1, g.channels / Task::kWidth, 1};
  while (coop.lanes < 32 && coop.lanes < coop.vectors) coop.lanes *= 2;
  coop.walk = Walk(g.batch, g.out, static_cast<int>(CeilDiv(coop.vectors, coop.lanes)), 1);
  const int64_t blocks = coop.walk.total, outputs = g.batch * g.out[0] * g.out[1] * g.out[2] * coop.vectors;
  const int64_t cells = int64_t{g.window[0]} * g.window[1] * g.window[2];
  if (Task::kWhole && WindowIsWhole(g) && blocks > 0) {
    const int64_t fit = static_cast<int64_t>(workspace.bytes / sizeof(State)) / outputs;
    const int64_t wanted = std::min(kBlocksWanted / blocks, cells * coop.lanes / kLeastCellsOfASplit);
    coop.splits = static_cast<int>(std::clamp<int64_t>(std::min(fit, wanted), 1, kMostSplits));
  }
  coop.cells = static_cast<int>(cells), coop.share = static_cast<int>(CeilDiv(cells, coop.splits));
  coop.by_cell = FastDiv(g.window[2]), coop.by_column = FastDiv(g.window[1]);
  coop.whole = WindowIsWhole(g);
  State* partial = static_cast<State*>(workspace.data);
  const cudaError_t e =
      LaunchKernel(CoopKernel<Task, State>, blocks * coop.splits, kThreads, stream, task, coop, partial);
  if constexpr (Task::kWhole) {
    if (e == cudaSuccess && coop.splits > 1)
      return LaunchKernel(JoinKernel<Task, State>, outputs, kMostSplits, stream, task, partial, coop.splits);
  }
  return e;
}

}  // namespace jaxdnn::pool
