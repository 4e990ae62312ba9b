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
// The maxima of rows take the rows' place once nobody needs these: what is saved makes room for more channels, and
// stores of 16 bytes, half a sector, are what bounds a slice of a single vector.

struct Slices {
  int vectors, groups1, groups2;  // of a slice; groups of windows to a column and to a row
  int rows, pitch;                // rows that the block takes at a time; positions from one to the next, odd
  FastDiv by_vector, by_row, by_width, by_column, by_slice, by_depth;
};

// Columns as bytes, and back as places in `row`.
__device__ inline Words<uint8_t, 8> ColumnsOf(const unsigned (&pairs)[4]) {
  return {__byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[2], pairs[3], 0x6420)};
}
__device__ inline Words<uint8_t, 4> ColumnsOf(const int (&places)[4]) {
  return {__byte_perm(__byte_perm(places[0], places[1], 0x40), __byte_perm(places[2], places[3], 0x40), 0x5410)};
}
__device__ inline void PlacesOf(const Words<uint8_t, 8>& columns, int row, unsigned (&pairs)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = __byte_perm(columns.v[j / 2], row, j % 2 == 0 ? 0x4140 : 0x4342);
}
__device__ inline void PlacesOf(const Words<uint8_t, 4>& columns, int row, int (&places)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) places[j] = __byte_perm(columns.v[0], row, 0x5540 + j);
}

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
  using Columns = Words<uint8_t, N>;
  Vector* const in = reinterpret_cast<Vector*>(memory);  // [rows][pitch][vectors], then the maxima of rows
  Columns* const columns = reinterpret_cast<Columns*>(in + g.in[1] * slices.pitch * slices.vectors);
  int slice, o0;
  const int image = slices.by_depth.Div(slices.by_slice.Div(static_cast<int>(blockIdx.x), &slice), &o0);
  const int channel = slice * slices.vectors * N;
  const T* from = task.x + image * task.in.batch + o0 * task.in.dim[0] + channel;
  for (int i = threadIdx.x; i < g.in[1] * g.in[2] * slices.vectors; i += kThreads) {
    int vector, column;
    const int position = slices.by_vector.Div(i, &vector), row = slices.by_width.Div(position, &column);
    CopyAsync(reinterpret_cast<uint4*>(in + (row * slices.pitch + column) * slices.vectors + vector),
              reinterpret_cast<const uint4*>(from + int64_t{position} * g.channels + vector * N));
  }
  CommitAsync();
  WaitAsync<0>();
  __syncthreads();
  // Neighbouring threads have neighbouring rows, which an odd number of positions puts into different banks.
  int own_vector, own_row;
  const int own_group = slices.by_row.Div(slices.by_vector.Div(static_cast<int>(threadIdx.x), &own_vector), &own_row);
  for (int first_row = 0; first_row < g.in[1]; first_row += slices.rows) {
    const int row = (first_row + own_row) * slices.pitch;
    const bool computes = own_group < slices.groups2 && first_row + own_row < g.in[1];
    State windows[B];
    if (computes) {
      const auto at = [&](int p) {
        State state(p);
        const Vector v = task.Prepare(in[(row + p) * slices.vectors + own_vector]);
        memcpy(&state.value, &v, sizeof(v));
        return state;
      };
      Neighbours<B>(own_group * B - g.low[2], g.window[2], g.in[2], at, windows);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < B; ++j) {
      const int o2 = own_group * B + j, to = (row + o2) * slices.vectors + own_vector;
      if (!computes || o2 >= g.out[2]) continue;
      memcpy(&in[to], &windows[j].value, sizeof(Vector));
      if constexpr (State::kIndexed) columns[to] = ColumnsOf(windows[j].index);
    }
  }
  __syncthreads();
  for (int item = threadIdx.x; item < slices.groups1 * g.out[2] * slices.vectors; item += kThreads) {
    int vector, o2;
    const int group = slices.by_column.Div(slices.by_vector.Div(item, &vector), &o2);
    State windows[B];
    const auto at = [&](int p) {
      const int from = (p * slices.pitch + o2) * slices.vectors + vector;
      State state(0);
      memcpy(&state.value, &in[from], sizeof(Vector));
      if constexpr (State::kIndexed) PlacesOf(columns[from], p, state.index);
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
  Slices s = {};
  s.pitch = std::max(g.in[2], g.out[2]) | 1;
  const int64_t bytes = int64_t{s.pitch} * g.in[1] * (16 + (State::kIndexed ? Task::kWidth : 0));
  s.vectors = 1;
  for (int v : {2, 4})
    if (vectors % v == 0 && bytes * v <= most.two && v * CeilDiv(g.out[2], 4) <= kThreads) s.vectors = v;
  const int64_t blocks = g.batch * g.in[0] * (vectors / s.vectors);
  // Two blocks, of which one loads while the other computes.
  if (bytes > most.two || blocks > INT32_MAX) return otherwise();
  const auto launch = [&](auto b) {
    s.groups1 = static_cast<int>(CeilDiv(g.out[1], b())), s.groups2 = static_cast<int>(CeilDiv(g.out[2], b()));
    s.rows = std::min(kThreads / (s.groups2 * s.vectors), g.in[1]);
    s.by_vector = FastDiv(s.vectors), s.by_row = FastDiv(s.rows), s.by_width = FastDiv(g.in[2]);
    s.by_column = FastDiv(g.out[2]);
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
