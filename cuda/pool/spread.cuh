// The backward kernels, over what a window passes back. Every input element gathers from the windows over it, which
// replaces atomics. A thread computes N neighbouring channels.
//
// ApartKernel takes windows that do not overlap: a thread loads what one window passes back and writes all elements of
// the S x S x S input tile that starts with it. TileKernel takes overlapping K x K windows S apart: a thread owns a
// tile of inputs, loads each window that reaches into it once, and knows every cell's number at compile time.
// SpreadKernel takes anything else: one input element a thread, which looks for the windows over it.
//
// A `Task` has a `Share`: what one window passes back, which Load(offset of the window, its position) reads and
// Add(sum, cell) adds to the element that is the window's cell of that number. Put(offset, sum) stores an element.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {

template <int N, class T>
__device__ void StoreRounded(T* p, const Accumulator<T> (&sum)[N]) {
  Vec<T, N> result;
#pragma unroll
  for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(sum[j]);
  Store(p, result);
}

template <class Task>
__global__ void __launch_bounds__(kThreads) SpreadKernel(const __grid_constant__ Task task) {
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position i = task.walk.At(flat);
  const Windows w0 = task.cover.Of(g, 0, i.at[0]), w1 = task.cover.Of(g, 1, i.at[1]), w2 = task.cover.Of(g, 2, i.at[2]);
  // A bin's cells are counted from its own beginning.
  const auto number = [&](int d, int o, int cell) {
    return g.stride[d] ? cell : i.at[d] - BinOf(o, g.out[d], g.in[d]).begin;
  };
  typename Task::A sum[N] = {};
  const int64_t image = i.batch * task.out.batch + i.channel;
  int k0 = w0.cell;
  for (int o0 = w0.first; o0 <= w0.last; o0 += w0.step, k0 -= w0.cell_step) {
    int k1 = w1.cell;
    for (int o1 = w1.first; o1 <= w1.last; o1 += w1.step, k1 -= w1.cell_step) {
      const int row = (number(0, o0, k0) * g.window[1] + number(1, o1, k1)) * g.window[2];
      int64_t offset = image + o0 * task.out.dim[0] + o1 * task.out.dim[1] + w2.first * task.out.dim[2];
      int k2 = w2.cell;
#pragma unroll 2
      for (int o2 = w2.first; o2 <= w2.last; o2 += w2.step, offset += w2.step * task.out.dim[2], k2 -= w2.cell_step) {
        typename Task::Share share;
        share.Load(task, offset, o0, o1, o2);
        share.Add(sum, row + number(2, o2, k2));
      }
    }
  }
  task.Put(flat * N, sum);
}

template <class Task>
__global__ void __launch_bounds__(kThreads) ApartKernel(const __grid_constant__ Task task, int3 base) {
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position tile = task.walk.At(flat);
  const int o0 = tile.at[0] + base.x, o1 = tile.at[1] + base.y, o2 = tile.at[2] + base.z;
  typename Task::Share share;
  if (o0 >= 0 && o0 < g.out[0] && o1 >= 0 && o1 < g.out[1] && o2 >= 0 && o2 < g.out[2]) {
    const int64_t offset =
        tile.batch * task.out.batch + o0 * task.out.dim[0] + o1 * task.out.dim[1] + o2 * task.out.dim[2] + tile.channel;
    share.Load(task, offset, o0, o1, o2);
  } else {
    share.Clear();
  }
  const int i0 = o0 * g.stride[0] - g.low[0], i1 = o1 * g.stride[1] - g.low[1], i2 = o2 * g.stride[2] - g.low[2];
  const int64_t image = tile.batch * task.in.batch + tile.channel;
  for (int r0 = max(0, -i0); r0 < min(g.stride[0], g.in[0] - i0); ++r0) {
    for (int r1 = max(0, -i1); r1 < min(g.stride[1], g.in[1] - i1); ++r1) {
      const int64_t row = image + (i0 + r0) * task.in.dim[0] + (i1 + r1) * task.in.dim[1];
      const bool inside = r0 < g.window[0] && r1 < g.window[1];
      const int cell = (r0 * g.window[1] + r1) * g.window[2];
#pragma unroll 2
      for (int r2 = max(0, -i2); r2 < min(g.stride[2], g.in[2] - i2); ++r2) {
        typename Task::A sum[N] = {};
        if (inside && r2 < g.window[2]) share.Add(sum, cell + r2);
        task.Put(row + (i2 + r2) * task.in.dim[2], sum);
      }
    }
  }
}

// A tile is S x W inputs, W a multiple of S, that start where a window starts.
template <int S>
constexpr int kTileWidth = S == 1 ? 2 : S;

template <int K, int S, class Task>
__global__ void __launch_bounds__(kThreads) TileKernel(const __grid_constant__ Task task, int3 base) {
  constexpr int N = Task::kWidth, W = kTileWidth<S>;
  constexpr int kBefore = (K - 1) / S;  // windows that start before the tile and reach into it
  constexpr int kRows = kBefore + 1, kColumns = kBefore + W / S;
  const Geometry& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position tile = task.walk.At(flat);
  const int top = tile.at[1] + base.y - kBefore, left = (tile.at[2] + base.z) * (W / S) - kBefore;
  typename Task::Share share[kRows][kColumns];
  const int64_t image = tile.batch * task.out.batch + tile.at[0] * task.out.dim[0] + tile.channel;
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      const int o1 = top + a, o2 = left + b;
      share[a][b].Clear();
      if (o1 >= 0 && o1 < g.out[1] && o2 >= 0 && o2 < g.out[2])
        share[a][b].Load(task, image + o1 * task.out.dim[1] + o2 * task.out.dim[2], tile.at[0], o1, o2);
    }
  }
  const int i1 = (top + kBefore) * S - g.low[1], i2 = (left + kBefore) * S - g.low[2];
  const int64_t to = tile.batch * task.in.batch + tile.at[0] * task.in.dim[0] + i1 * task.in.dim[1] +
                     i2 * task.in.dim[2] + tile.channel;
#pragma unroll
  for (int r1 = 0; r1 < S; ++r1) {
#pragma unroll
    for (int r2 = 0; r2 < W; ++r2) {
      typename Task::A sum[N] = {};
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
#pragma unroll
        for (int b = 0; b < kColumns; ++b) {
          const int k1 = r1 + (kBefore - a) * S, k2 = r2 + (kBefore - b) * S;
          if (k1 < K && k2 >= 0 && k2 < K) share[a][b].Add(sum, k1 * K + k2);
        }
      }
      if (i1 + r1 >= 0 && i1 + r1 < g.in[1] && i2 + r2 >= 0 && i2 + r2 < g.in[2])
        task.Put(to + r1 * task.in.dim[1] + r2 * task.in.dim[2], sum);
    }
  }
}

// Tiles of `size` inputs that start where windows start, so many as cover the input: the first one's number, and how
// many there are.
inline int FirstTile(const Geometry& g, int d, int size) {
  const int q = g.low[d] / size;
  return g.low[d] % size < 0 ? q - 1 : q;
}
inline int CountTiles(const Geometry& g, int d, int size) {
  return g.in[d] == 0 ? 0 : (g.in[d] - 1 + g.low[d] - FirstTile(g, d, size) * size) / size + 1;
}

inline bool WindowsAreApart(const Geometry& g) {
  for (int d = 0; d < 3; ++d)
    if (g.window[d] > g.stride[d] || g.dilation[d] != 1) return false;
  return true;
}

// Launches a kernel for `task`, whose `walk` this fills in.
template <class Task>
cudaError_t LaunchSpread(Task task, cudaStream_t stream) {
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  const auto general = [&] {
    if (WindowsAreApart(g)) {
      const int3 base = {FirstTile(g, 0, g.stride[0]), FirstTile(g, 1, g.stride[1]), FirstTile(g, 2, g.stride[2])};
      const int tiles[3] = {CountTiles(g, 0, g.stride[0]), CountTiles(g, 1, g.stride[1]),
                            CountTiles(g, 2, g.stride[2])};
      task.walk = Walk(g.batch, tiles, g.channels, N);
      return LaunchKernel(ApartKernel<Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task, base);
    }
    task.walk = Walk(g.batch, g.in, g.channels, N);
    return LaunchKernel(SpreadKernel<Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task);
  };
  if constexpr (Task::kTiles) {
    return VisitSquare(
        g,
        [&](auto k, auto s) {
          constexpr int K = decltype(k)::value, S = decltype(s)::value, W = kTileWidth<S>;
          const int3 base = {0, FirstTile(g, 1, S), FirstTile(g, 2, W)};
          const int tiles[3] = {g.in[0], CountTiles(g, 1, S), CountTiles(g, 2, W)};
          task.walk = Walk(g.batch, tiles, g.channels, N);
          return LaunchKernel(TileKernel<K, S, Task>, CeilDiv(task.walk.total, kThreads), kThreads, stream, task, base);
        },
        general);
  } else {
    return general();
  }
}

}  // namespace jaxdnn::pool
