// The forward kernels, over any reducer. A thread computes N neighbouring channels of an output, or of a strip of them.
//
// ReduceWindow takes any window. WalkStrip takes K x K windows S apart: it walks down
// a strip of outputs, reduces each input row once and gives it to the R = ceil(K / S) windows that it belongs to, so
// that an input element is loaded K / S times by neighbours at the same moment, instead of (K / S)^2.
//
// Where channels fill 16-byte vectors, both read global memory (WindowKernel, WalkKernel); away from the borders
// WindowKernel looks its cells up, since a few instructions a load are what keeps enough of them in flight.
// SquareKernel has the commonest windows that do not overlap, whose arrays may be small. Else LinesKernel (lines.cuh)
// walks down element by element, and of windows that it does not take BandKernel (band.cuh) brings whole bands of the
// input to shared memory first.
//
// A `Task` says what surrounds the reduction: Get(...) a load, Prepare(...) what the state takes of it, Finish(...)
// what is stored, Finish<true>(...) of windows without gaps that are no bins.
#pragma once

#include "cuda/pool/reducers.cuh"

namespace jaxdnn::pool {

// Where the cells of a window are, in elements from its first, if they are few.
struct CellTable {
  static constexpr int kMost = 64;
  int count = 0;  // 0 for no table
  int offset[kMost];

  // Of cells `step0` apart in depth, and positions `pitch1` and `pitch2`.
  CellTable(const Geometry& g, int64_t step0, int64_t pitch1, int64_t pitch2) {
    const int64_t steps[3] = {step0, g.dilation[1] * pitch1, g.dilation[2] * pitch2};
    int64_t cells = 1, span = 0;
    for (int d = 0; d < 3; ++d) cells *= g.window[d], span += (g.window[d] - 1) * steps[d];
    if (g.stride[2] == 0 || cells > kMost || span > INT32_MAX) return;
    for (int k0 = 0; k0 < g.window[0]; ++k0)
      for (int k1 = 0; k1 < g.window[1]; ++k1)
        for (int k2 = 0; k2 < g.window[2]; ++k2)
          offset[count++] = static_cast<int>(k0 * steps[0] + k1 * steps[1] + k2 * steps[2]);
  }
};

// Where windows start in the input, in elements, and whether all of them lie inside it.
struct Starts {
  bool inside = true;
  int64_t first = 0, batch, step[3];

  Starts(const Geometry& g, const Pitch& in) : batch(in.batch) {
    for (int d = 0; d < 3; ++d) {
      const int64_t last = int64_t{g.out[d] - 1} * g.stride[d] - g.low[d] + int64_t{g.window[d] - 1} * g.dilation[d];
      inside &= g.low[d] <= 0 && last < g.in[d];
      step[d] = g.stride[d] * in.dim[d];
      first -= g.low[d] * in.dim[d];
    }
  }

  __device__ int64_t Of(const Position& o) const {
    return o.batch * batch + o.at[0] * step[0] + o.at[1] * step[1] + o.at[2] * step[2] + first + o.channel;
  }
};

// Takes Count cells of a window whose cells are numbered one after the other; `at(k)` is where the k-th is.
template <int Count, class Task, class At>
__device__ void TakeCells(const Task& task, typename Task::State& state, int first, const At& at) {
  typename Task::Loaded v[Count];
#pragma unroll
  for (int u = 0; u < Count; ++u) v[u] = task.Get(at(first + u));
#pragma unroll
  for (int u = 0; u < Count; ++u) state.Take(task.Prepare(v[u]), first + u);
}

// Reduces window (o0, o1, o2). `plane` is the input at the window's first depth in it, position (0, 0); the window's
// depths are `step0` apart, positions `pitch1` and `pitch2`.
template <class Task, class P>
__device__ typename Task::State ReduceWindow(const Task& task, const typename Task::Element* plane, P step0, P pitch1,
                                             P pitch2, int o0, int o1, int o2) {
  using State = typename Task::State;
  constexpr int kCellsInFlight = 4;
  const Shape& g = task.g;
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
          if (done + u < cells) state.Take(task.Prepare(v[u]), numbers[u]);
      }
    }
  }
  return state;
}

// Reduces a window inside the input from its first cell on.
template <class Task>
__device__ typename Task::State ReduceInside(const Task& task, const CellTable& table,
                                             const typename Task::Element* first) {
  const auto at = [&](int k) { return first + table.offset[k]; };
  typename Task::State state(0);
  int k = 0;
  for (; k + 4 <= table.count; k += 4) TakeCells<4>(task, state, k, at);
  if (k + 2 <= table.count) TakeCells<2>(task, state, k, at), k += 2;
  if (k < table.count) TakeCells<1>(task, state, k, at);
  return state;
}

__device__ inline bool IsInside(const Shape& g, int o0, int o1, int o2) {
  const auto inside = [&](int d, int o) {
    const int start = o * g.stride[d] - g.low[d];
    return start >= 0 && start + (g.window[d] - 1) * g.dilation[d] < g.in[d];
  };
  return inside(0, o0) && inside(1, o1) && inside(2, o2);
}

// Gives row number r of the newest window to all the windows that it belongs to.
template <int K, int S, class State, int R>
__device__ void GiveRow(const State& row, int r, State (&open)[R]) {
#pragma unroll
  for (int j = 0; j < R; ++j) {
    if (j == 0 && r == 0 && !State::kIndexed)
      open[j] = row;
    else if (j * S + r < K)
      open[j].Take(row, (j * S + r) * K);
  }
}

// Reduces windows (o0, begin to end, o2) and stores them from offset `to`. `plane` is the input at (o0, 0, 0).
template <int K, int S, class Task, class P>
__device__ void WalkStrip(const Task& task, const typename Task::Element* plane, P pitch1, P pitch2, int o0, int begin,
                          int end, int o2, int64_t to) {
  using State = typename Task::State;
  constexpr int R = (K + S - 1) / S;
  const Shape& g = task.g;
  const int left = o2 * S - g.low[2];
  bool column[K];
#pragma unroll
  for (int k = 0; k < K; ++k) column[k] = left + k >= 0 && left + k < g.in[2];
  const int first_column = max(0, -left);
  const bool any_column = left < g.in[2] && left + K > 0;
  plane += left * pitch2;

  // Two rows a step, so that a step has 2 K loads in flight. In the interior they are plain loads: a condition on each
  // would make the compiler wait for one before it starts the next.
  constexpr int G = S == 1 ? 2 : 1;
  const bool columns_inside = left >= 0 && left + K <= g.in[2];
  State open[R];  // The windows that the current rows belong to, the newest first.
  for (int step = begin; step < end + R - 1; step += G) {
    typename Task::Loaded v[G * S][K];
    const int first_row = step * S - g.low[1];
    if (columns_inside && first_row >= 0 && first_row + G * S <= g.in[1]) {
#pragma unroll
      for (int r = 0; r < G * S; ++r)
#pragma unroll
        for (int k = 0; k < K; ++k) v[r][k] = task.Get(plane + (first_row + r) * pitch1 + k * pitch2);
    } else {
#pragma unroll
      for (int r = 0; r < G * S; ++r) {
        const bool row = first_row + r >= 0 && first_row + r < g.in[1];
#pragma unroll
        for (int k = 0; k < K; ++k) {
          v[r][k] = task.Identity();
          if (row && column[k]) v[r][k] = task.Get(plane + (first_row + r) * pitch1 + k * pitch2);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < G; ++u) {
      const int q = step + u, top = q * S - g.low[1];
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
      const int o1 = q - (R - 1);
      if (o1 >= begin && o1 < end) {
        task.template Finish<true>(open[R - 1], to, o0, o1, o2);
        to += int64_t{g.out[2]} * g.channels;
      }
    }
  }
}

template <class Task>
__global__ void __launch_bounds__(kThreads, Task::kResident)
    WindowKernel(const __grid_constant__ Task task, const __grid_constant__ Starts starts,
                 const __grid_constant__ CellTable table) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position o = task.walk.At(flat);
  const auto state = [&] {
    if (table.count > 0 && (starts.inside || IsInside(task.g, o.at[0], o.at[1], o.at[2])))
      return ReduceInside(task, table, task.x + starts.Of(o));
    const int64_t pitch0 = task.in.dim[0];
    const auto* plane = task.x + o.batch * task.in.batch + CellsOf(task.g, 0, o.at[0]).first * pitch0 + o.channel;
    return ReduceWindow(task, plane, task.g.dilation[0] * pitch0, task.in.dim[1], task.in.dim[2], o.at[0], o.at[1],
                        o.at[2]);
  }();
  task.Finish(state, flat * Task::kWidth, o.at[0], o.at[1], o.at[2]);
}

// Windows of K x K cells, K apart, inside the input. All a thread needs is in few words: of a small array, loading the
// arguments would take much of the time.
struct Squares {
  static constexpr int K = 2;
  int total = 0;  // vectors of outputs, or 0 for other windows
  int pitch, channels;
  int64_t plane;
  FastDiv by_vector, by_column, by_row;

  Squares(const Geometry& g, int width)
      : pitch(static_cast<int>(int64_t{g.in[2]} * g.channels)),
        channels(g.channels),
        plane(int64_t{g.in[1]} * g.in[2] * g.channels),
        by_vector(g.channels / width),
        by_column(g.out[2]),
        by_row(g.out[1]) {
    bool fits = g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 && g.in[0] == g.out[0] && plane <= INT32_MAX;
    for (int d = 1; d < 3; ++d)
      fits = fits && g.window[d] == K && g.stride[d] == K && g.low[d] == 0 && g.dilation[d] == 1 &&
             int64_t{g.out[d]} * K <= g.in[d];
    const int64_t vectors = g.batch * g.out[0] * g.out[1] * g.out[2] * (g.channels / width);
    if (fits && vectors <= INT32_MAX - 4 * kThreads) total = static_cast<int>(vectors);
  }
};

// Outputs of a thread there, a block's length apart: of single elements, several have their loads in flight together.
template <class Task>
constexpr int kSquareOutputs = Task::kWidth < kVecLength<typename Task::Element> ? 4 : 1;

template <class Task>
__global__ void __launch_bounds__(kThreads)
    SquareKernel(const __grid_constant__ Squares squares, const __grid_constant__ Task task) {
  constexpr int K = Squares::K, N = Task::kWidth, U = kSquareOutputs<Task>;
  const int begin = static_cast<int>(blockIdx.x) * (kThreads * U) + static_cast<int>(threadIdx.x);
  int o1[U], o2[U];
  typename Task::Loaded v[U][K * K];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    int vector;
    const int flat = min(begin + u * kThreads, squares.total - 1);
    const int plane = squares.by_row.Div(squares.by_column.Div(squares.by_vector.Div(flat, &vector), &o2[u]), &o1[u]);
    const int first = o1[u] * K * squares.pitch + o2[u] * K * squares.channels + vector * N;
    const auto* cell = task.x + (plane * squares.plane + first);
#pragma unroll
    for (int k = 0; k < K * K; ++k) v[u][k] = task.Get(cell + (k / K * squares.pitch + k % K * squares.channels));
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int flat = begin + u * kThreads;
    if (flat >= squares.total) return;
    typename Task::State state(0);
#pragma unroll
    for (int k = 0; k < K * K; ++k) state.Take(task.Prepare(v[u][k]), k);
    task.template Finish<true>(state, int64_t{flat} * N, 0, o1[u], o2[u]);
  }
}

// Blocks of WalkKernel on a multiprocessor, as registers allow.
template <int K, class Task>
constexpr int kWalkBlocks = K == 5 && Task::State::kIndexed ? 2 : 3;

template <int K, int S, class Task>
__global__ void __launch_bounds__(kThreads, (kWalkBlocks<K, Task>))
    WalkKernel(const __grid_constant__ Task task, int strip) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Shape& g = task.g;
  const Position o = task.walk.At(flat);
  const int begin = o.at[1] * strip, end = min(begin + strip, g.out[1]);
  const auto* plane = task.x + o.batch * task.in.batch + o.at[0] * task.in.dim[0] + o.channel;
  const int64_t to =
      (((o.batch * g.out[0] + o.at[0]) * g.out[1] + begin) * g.out[2] + o.at[2]) * g.channels + o.channel;
  WalkStrip<K, S>(task, plane, task.in.dim[1], task.in.dim[2], o.at[0], begin, end, o.at[2], to);
}

}  // namespace jaxdnn::pool
