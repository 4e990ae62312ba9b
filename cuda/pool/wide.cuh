// Maxima of wide windows, one apart, over planes that fit into shared memory.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/reducers.cuh"

namespace jaxdnn::pool {

inline bool IsWide(const Geometry& g) {
  const int cells = g.window[1] * g.window[2];
  bool wide = g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 && g.in[0] == g.out[0] && g.batch > 0 &&
              g.batch <= INT32_MAX && g.channels > 0 && cells >= 25 && cells <= 255;
  for (int d = 1; d < 3; ++d)
    wide = wide && g.stride[d] == 1 && g.dilation[d] == 1 && g.window[d] >= 4 && g.in[d] <= 255 && g.out[d] > 1 &&
           g.low[d] >= 0 && g.low[d] < g.window[d] && g.out[d] - 1 - g.low[d] < g.in[d];
  return wide;
}

// A block takes a slice of the channels of a plane: first the maxima of rows, then of columns of those. A thread takes
// B neighbouring windows of a line: they have most cells in common, so that B windows of k cells cost k + 2 B loads.

struct Slices {
  int vectors, groups1, groups2;  // of a slice; groups of windows to a column and to a row
  FastDiv by_vector, by_group, by_column, by_slice, by_depth;
};

// Windows of k cells from position `first`, where at(p) is the state of position p. A position outside stands for the
// outermost inside, which every window that reaches beyond has too.
template <int B, class State, class At>
__device__ void Neighbours(int first, int k, int extent, const At& at, State (&windows)[B]) {
  const auto nearest = [&](int p) { return at(min(max(p, 0), extent - 1)); };
  windows[B - 1] = nearest(first + B - 1);
#pragma unroll 2
  for (int p = first + B; p < first + k; ++p) windows[B - 1].Take(nearest(p), 0);
#pragma unroll
  for (int j = B - 2; j >= 0; --j) {
    windows[j] = nearest(first + j);
    windows[j].Take(windows[j + 1], 0);
  }
  State after = nearest(first + k);
#pragma unroll
  for (int j = 1; j < B; ++j) {
    windows[j].Take(after, 0);
    if (j < B - 1) after.Take(nearest(first + k + j), 0);
  }
}

// An index is a place, row << 8 | column, until the end.
template <int B, class Task>
__global__ void __launch_bounds__(kThreads)
    WideKernel(const __grid_constant__ Task task, const __grid_constant__ Slices slices) {
  using T = typename Task::Element;
  using State = typename Task::State;
  constexpr int N = Task::kWidth;
  extern __shared__ __align__(16) unsigned char memory[];
  const Shape& g = task.g;
  using Vector = Words<T, N>;
  Vector* const in = reinterpret_cast<Vector*>(memory);
  Vector* const maxima = in + g.in[1] * g.in[2] * slices.vectors;
  uint4* const places = reinterpret_cast<uint4*>(maxima + g.in[1] * g.out[2] * slices.vectors);
  int slice, o0;
  const int image = slices.by_depth.Div(slices.by_slice.Div(static_cast<int>(blockIdx.x), &slice), &o0);
  const int channel = slice * slices.vectors * N;
  const T* from = task.x + image * task.in.batch + o0 * task.in.dim[0] + channel;
  for (int i = threadIdx.x; i < g.in[1] * g.in[2] * slices.vectors; i += kThreads) {
    int vector;
    const int64_t position = slices.by_vector.Div(i, &vector);
    CopyAsync(reinterpret_cast<uint4*>(in + i),
              reinterpret_cast<const uint4*>(from + position * g.channels + vector * N));
  }
  CommitAsync();
  WaitAsync<0>();
  __syncthreads();
  for (int item = threadIdx.x; item < g.in[1] * slices.groups2 * slices.vectors; item += kThreads) {
    int vector, group;
    const int row = slices.by_group.Div(slices.by_vector.Div(item, &vector), &group);
    State windows[B];
    const auto at = [&](int p) {
      State state(p);
      const Vector v = task.Prepare(in[(row * g.in[2] + p) * slices.vectors + vector]);
      memcpy(&state.value, &v, sizeof(v));
      return state;
    };
    Neighbours<B>(group * B - g.low[2], g.window[2], g.in[2], at, windows);
#pragma unroll
    for (int j = 0; j < B; ++j) {
      const int o2 = group * B + j, to = (row * g.out[2] + o2) * slices.vectors + vector;
      if (o2 >= g.out[2]) continue;
      memcpy(&maxima[to], &windows[j].value, sizeof(Vector));
      if constexpr (State::kIndexed) memcpy(&places[to], &windows[j].index, sizeof(uint4));
    }
  }
  __syncthreads();
  for (int item = threadIdx.x; item < slices.groups1 * g.out[2] * slices.vectors; item += kThreads) {
    int vector, o2;
    const int group = slices.by_column.Div(slices.by_vector.Div(item, &vector), &o2);
    State windows[B];
    const auto at = [&](int p) {
      const int from = (p * g.out[2] + o2) * slices.vectors + vector;
      State state(0);
      memcpy(&state.value, &maxima[from], sizeof(Vector));
      if constexpr (State::kIndexed) {
        memcpy(&state.index, &places[from], sizeof(uint4));
        state.Shift(p << 8);
      }
      return state;
    };
    Neighbours<B>(group * B - g.low[1], g.window[1], g.in[1], at, windows);
#pragma unroll
    for (int j = 0; j < B; ++j) {
      const int o1 = group * B + j;
      if (o1 >= g.out[1]) continue;
      if constexpr (State::kIndexed) windows[j].Number(o1 - g.low[1], o2 - g.low[2], g.window[2]);
      const int64_t output = ((int64_t{image} * g.out[0] + o0) * g.out[1] + o1) * g.out[2] + o2;
      task.Finish(windows[j], output * g.channels + channel + vector * N, o0, o1, o2);
    }
  }
}

template <class Task, class Otherwise>
cudaError_t LaunchWide(const Task& task, cudaStream_t stream, Otherwise&& otherwise) {
  using State = typename Task::State;
  const SharedBytes most;
  const Geometry& g = task.g;
  const int vectors = g.channels / Task::kWidth;
  const int64_t bytes = (int64_t{g.in[2]} + (State::kIndexed ? 2 : 1) * g.out[2]) * g.in[1] * 16;
  Slices s = {};
  s.vectors = 1;
  for (int v : {2, 4})
    if (vectors % v == 0 && bytes * v <= most.two) s.vectors = v;
  const int64_t blocks = g.batch * g.in[0] * (vectors / s.vectors);
  if (bytes > most.one || blocks > INT32_MAX) return otherwise();
  const auto launch = [&](auto b) {
    s.groups1 = static_cast<int>(CeilDiv(g.out[1], b())), s.groups2 = static_cast<int>(CeilDiv(g.out[2], b()));
    s.by_vector = FastDiv(s.vectors), s.by_group = FastDiv(s.groups2), s.by_column = FastDiv(g.out[2]);
    s.by_slice = FastDiv(vectors / s.vectors), s.by_depth = FastDiv(g.in[0]);
    const Grid grid = {blocks, kThreads, static_cast<size_t>(bytes * s.vectors)};
    return LaunchKernel(WideKernel<b(), Task>, grid, stream, task, s);
  };
  if constexpr (!State::kIndexed) {
    if (std::min(g.window[1], g.window[2]) >= 8) return launch(std::integral_constant<int, 8>{});
  }
  return launch(std::integral_constant<int, 4>{});
}

}  // namespace jaxdnn::pool
