// The backward kernels, over what a window passes back. Every input element gathers from the windows over it, which
// replaces atomics. A thread computes N neighbouring channels.
//
// ApartKernel takes windows that do not overlap: a thread loads what one window passes back and writes all elements of
// the S x S x S input tile that starts with it. FlatKernel does where channels fill no vectors: a thread writes 16
// bytes of dx, whatever rows and windows these belong to. The kernels of spread_bins.cuh take global and adaptive
// pooling. TileKernel takes overlapping K x K windows S apart: a thread owns a tile of inputs, loads each window that
// reaches into it once, and knows every cell's number at compile time. StripKernel does so for strips of tiles, down
// which a thread walks and keeps what windows pass back to the next: where channels fill no vectors, and of windows so
// large that many reach into a tile. SpreadKernel takes anything else: one input element a thread, which looks for the
// windows over it.
//
// A `Task` has a `Share`: what one window passes back, which Load(offset of the window, its position) reads,
// Load<true>(...) of windows without gaps that are no bins, and Add(sum, cell) adds to the element that is the window's
// cell of that number; kSame says that the number does not matter. Final(offset, sum) is what dx holds. kShortcuts:
// whether there are the other kernels for it, kWhole: and those of windows that are all there is.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"
#include "cuda/pool/spread_bins.cuh"

namespace jaxdnn::pool {

template <class Task>
__global__ void __launch_bounds__(kThreads, 3) SpreadKernel(const __grid_constant__ Task task) {
  constexpr int N = Task::kWidth;
  const Shape& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position i = task.walk.At(flat);
  const Windows w0 = task.cover.Of(g, 0, i.at[0]), w1 = task.cover.Of(g, 1, i.at[1]), w2 = task.cover.Of(g, 2, i.at[2]);
  // A bin's cells are counted from its own beginning.
  const auto number = [&](int d, int o, int cell) {
    return g.stride[d] ? cell : i.at[d] - RareBinOf(o, g.in[d], g.by_out[d]).begin;
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
#pragma unroll 1
      for (int o2 = w2.first; o2 <= w2.last; o2 += w2.step, offset += w2.step * task.out.dim[2], k2 -= w2.cell_step) {
        typename Task::Share share;
        share.Load(task, offset, o0, o1, o2);
        share.Add(sum, row + number(2, o2, k2));
      }
    }
  }
  Store(task.dx + flat * N, task.Final(flat * N, sum));
}

template <class Task>
__global__ void __launch_bounds__(kThreads) ApartKernel(const __grid_constant__ Task task, int3 base) {
  constexpr int N = Task::kWidth;
  const Shape& g = task.g;
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
        Store(task.dx + row + (i2 + r2) * task.in.dim[2], task.Final(row + (i2 + r2) * task.in.dim[2], sum));
      }
    }
  }
}

// Of a task of single elements, kept as they lie in memory: `task.walk` is over all of dx.
template <class Task>
__global__ void __launch_bounds__(kThreads) FlatKernel(const __grid_constant__ Task task) {
  using T = typename Task::Element;
  constexpr int V = kVecLength<T>;
  const Shape& g = task.g;
  const int64_t begin = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * V;
  if (begin >= task.walk.total) return;
  Position i = task.walk.At(begin);
  int o[3], r[3];
  const auto locate = [&](int d) {
    const int p = i.at[d] + g.low[d];
    o[d] = p < 0 ? -1 : task.cover.by_stride[d].Div(p, &r[d]);
  };
  const auto inside = [&](int d) { return o[d] >= 0 && o[d] < g.out[d] && r[d] < g.window[d]; };
  bool plane;
  int64_t row;
  int cell;
  const auto start_row = [&] {
    locate(0), locate(1), locate(2);
    plane = inside(0) && inside(1);
    row = i.batch * task.out.batch + o[0] * task.out.dim[0] + o[1] * task.out.dim[1];
    cell = (r[0] * g.window[1] + r[1]) * g.window[2];
  };
  start_row();
  Vec<T, V> result;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    typename Task::A sum[1] = {};
    const bool live = begin + j < task.walk.total;
    if (live && plane && inside(2)) {
      typename Task::Share share;
      share.Load(task, row + o[2] * g.channels + i.channel, o[0], o[1], o[2]);
      share.Add(sum, cell + r[2]);
    }
    result.v[j] = live ? task.Final(begin + j, sum).v[0] : static_cast<T>(0.0f);
    if (++i.channel < g.channels) continue;
    i.channel = 0;
    if (++i.at[2] < g.in[2]) {
      if (o[2] < 0 || ++r[2] == g.stride[2]) locate(2);
      continue;
    }
    i.at[2] = 0;
    if (++i.at[1] == g.in[1]) {
      i.at[1] = 0;
      if (++i.at[0] == g.in[0]) i.at[0] = 0, ++i.batch;
    }
    start_row();
  }
  if (begin + V <= task.walk.total) {
    Store(task.dx + begin, result);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (begin + j < task.walk.total) task.dx[begin + j] = result.v[j];
  }
}

template <int K, int S, class Task>
__global__ void __launch_bounds__(kThreads, 3) TileKernel(const __grid_constant__ Task task, int3 base) {
  constexpr int N = Task::kWidth;
  constexpr int kBefore = (K - 1) / S;  // windows that start before the tile and reach into it
  constexpr int kWindows = kBefore + 1;
  constexpr int kRows = S == 1 ? 1 : kWindows;  // of windows held at once, as registers allow
  const Shape& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position tile = task.walk.At(flat);
  const int top = tile.at[1] + base.y - kBefore, left = tile.at[2] + base.z - kBefore;
  const int64_t image = tile.batch * task.out.batch + tile.at[0] * task.out.dim[0] + tile.channel;
  const bool inside = top >= 0 && top + kWindows <= g.out[1] && left >= 0 && left + kWindows <= g.out[2];
  typename Task::A sum[S][S][N] = {};
#pragma unroll 1
  for (int first = 0; first < kWindows; first += kRows) {
    typename Task::Share share[kRows][kWindows];
    const auto load = [&](int a, int b) {
      const int o1 = top + first + a, o2 = left + b;
      share[a][b].template Load<true>(task, image + o1 * task.out.dim[1] + o2 * task.out.dim[2], tile.at[0], o1, o2);
    };
    if (inside) {  // Plain loads, so that all are in flight at once.
#pragma unroll
      for (int a = 0; a < kRows; ++a)
#pragma unroll
        for (int b = 0; b < kWindows; ++b) load(a, b);
    } else {
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
#pragma unroll
        for (int b = 0; b < kWindows; ++b) {
          const int o1 = top + first + a, o2 = left + b;
          share[a][b].Clear();
          if (o1 >= 0 && o1 < g.out[1] && o2 >= 0 && o2 < g.out[2]) load(a, b);
        }
      }
    }
#pragma unroll
    for (int r1 = 0; r1 < S; ++r1) {
#pragma unroll
      for (int r2 = 0; r2 < S; ++r2) {
#pragma unroll
        for (int a = 0; a < kRows; ++a) {
#pragma unroll
          for (int b = 0; b < kWindows; ++b) {
            const int k1 = r1 + (kBefore - first - a) * S, k2 = r2 + (kBefore - b) * S;
            if (k1 < K && k2 < K) share[a][b].Add(sum[r1][r2], k1 * K + k2);
          }
        }
      }
    }
  }
  const int i1 = (top + kBefore) * S - g.low[1], i2 = (left + kBefore) * S - g.low[2];
  const int64_t to = tile.batch * task.in.batch + tile.at[0] * task.in.dim[0] + i1 * task.in.dim[1] +
                     i2 * task.in.dim[2] + tile.channel;
#pragma unroll
  for (int r1 = 0; r1 < S; ++r1) {
#pragma unroll
    for (int r2 = 0; r2 < S; ++r2) {
      const int64_t at = to + r1 * task.in.dim[1] + r2 * task.in.dim[2];
      if (i1 + r1 >= 0 && i1 + r1 < g.in[1] && i2 + r2 >= 0 && i2 + r2 < g.in[2])
        Store(task.dx + at, task.Final(at, sum[r1][r2]));
    }
  }
}

// Blocks of StripKernel on a multiprocessor, as registers allow.
constexpr int StripBlocks(int k, int s, int width) { return width > 1 ? 2 : k == 5 || s == 1 ? 3 : 4; }

// `task.walk` is over [batch, depths, strips of tiles, tiles, channels / N].
template <int K, int S, class Task>
__global__ void __launch_bounds__(kThreads, StripBlocks(K, S, Task::kWidth))
    StripKernel(const __grid_constant__ Task task, int3 base, int strip, int tiles) {
  constexpr int N = Task::kWidth, kBefore = (K - 1) / S, kWindows = kBefore + 1;
  constexpr bool kAhead = N < 8;  // whether there are registers for the next row
  const Shape& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position at = task.walk.At(flat);
  const int first = at.at[1] * strip + base.y, end = min(first + strip, tiles + base.y);
  const int left = at.at[2] + base.z - kBefore, i2 = (left + kBefore) * S - g.low[2];
  const int pitch = g.in[2] * g.channels, out_pitch = g.out[2] * g.channels;
  const int64_t image = at.batch * task.out.batch + at.at[0] * task.out.dim[0] + at.channel;
  int64_t to = at.batch * task.in.batch + at.at[0] * task.in.dim[0] + at.channel +
               (first * S - g.low[1]) * task.in.dim[1] + i2 * task.in.dim[2];
  typename Task::Share share[kWindows][kWindows], next[kWindows];
  const auto load = [&](int o1) {  // instead of a window outside, another
    const int row = min(max(o1, 0), g.out[1] - 1);
#pragma unroll
    for (int b = 0; b < kWindows; ++b) {
      const int o2 = min(max(left + b, 0), g.out[2] - 1);
      next[b].template Load<true>(task, image + (row * out_pitch + o2 * g.channels), at.at[0], row, o2);
    }
  };
  if constexpr (kAhead) load(first - kBefore);
#pragma unroll 1
  for (int o1 = first - kBefore; o1 < end; ++o1) {
    if constexpr (!kAhead) load(o1);
#pragma unroll
    for (int b = 0; b < kWindows; ++b) {
#pragma unroll
      for (int a = 0; a < kBefore; ++a) share[a][b] = share[a + 1][b];
      share[kBefore][b] = next[b];
      if (o1 < 0 || o1 >= g.out[1] || left + b < 0 || left + b >= g.out[2]) share[kBefore][b].Clear();
    }
    if constexpr (kAhead) load(o1 + 1);
    if (o1 < first) continue;
    const int i1 = o1 * S - g.low[1];
    typename Task::A sum[S][S][N] = {};
#pragma unroll
    for (int a = 0; a < kWindows; ++a) {
#pragma unroll
      for (int b = 0; b < kWindows; ++b) {
#pragma unroll
        for (int r1 = 0; r1 < S; ++r1) {
#pragma unroll
          for (int r2 = 0; r2 < S; ++r2) {
            const int k1 = r1 + (kBefore - a) * S, k2 = r2 + (kBefore - b) * S;
            if (k1 < K && k2 < K) share[a][b].Add(sum[r1][r2], k1 * K + k2);
          }
        }
      }
    }
#pragma unroll
    for (int r1 = 0; r1 < S; ++r1) {
#pragma unroll
      for (int r2 = 0; r2 < S; ++r2) {
        const int64_t place = to + (r1 * pitch + r2 * g.channels);
        if (i1 + r1 >= 0 && i1 + r1 < g.in[1] && i2 + r2 >= 0 && i2 + r2 < g.in[2])
          Store(task.dx + place, task.Final(place, sum[r1][r2]));
      }
    }
    to += S * pitch;
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

// The same geometry where windows that are alone in their dimension are as far apart as it is long.
inline Geometry WithLoneWindowsApart(Geometry g) {
  for (int d = 0; d < 3; ++d)
    if (g.out[d] == 1 && g.stride[d] > 0) g.stride[d] = std::max({g.stride[d], g.window[d], g.in[d] + g.low[d], 1});
  return g;
}

inline bool WindowsAreApart(const Geometry& g) {
  for (int d = 0; d < 3; ++d)
    if (g.window[d] > g.stride[d] || g.dilation[d] != 1) return false;
  return true;
}

template <class Task, class... More>
cudaError_t LaunchThreads(void (*kernel)(Task, More...), int64_t threads, const Task& task, cudaStream_t stream,
                          More... more) {
  return LaunchKernel(kernel, CeilDiv(threads, kThreads), kThreads, stream, task, more...);
}

// Launches StripKernel or TileKernel, for windows that have them, or otherwise().
template <class Task, class Otherwise>
cudaError_t LaunchTiles(Task task, cudaStream_t stream, Otherwise&& otherwise) {
  using T = typename Task::Element;
  constexpr int N = Task::kWidth;
  const Geometry& g = task.g;
  // Single channels that are apart are left to FlatKernel.
  const bool left = WindowsAreApart(g) && (N > 1 || g.channels == 1);
  if (left || g.out[1] == 0 || g.out[2] == 0) return otherwise();
  // StripKernel's places in a plane are 32-bit.
  const int64_t plane = std::max(int64_t{g.in[1]} * g.in[2], int64_t{g.out[1]} * g.out[2]) * g.channels;
  const auto launch = [&](auto k, auto s) {
    constexpr int K = decltype(k)::value, S = decltype(s)::value;
    const int3 base = {0, FirstTile(g, 1, S), FirstTile(g, 2, S)};
    int extent[3] = {g.in[0], CountTiles(g, 1, S), CountTiles(g, 2, S)};
    if constexpr (N == 1 || K == 5) {
      if (plane > INT32_MAX / 2) return otherwise();
      // Measured: longer strips of wide rows write to too many places at once.
      const int64_t columns = g.batch * extent[0] * extent[2] * (g.channels / N);
      const int tiles = extent[1], most = sizeof(T) == 2 ? 16 : 4;
      const int strip = std::min(StripOf(tiles, columns, StripBlocks(K, S, N), S, 2 * (K - 1) / S + 2), most);
      extent[1] = static_cast<int>(CeilDiv(tiles, strip));
      task.walk = Walk(g.batch, extent, g.channels, N);
      return LaunchThreads(StripKernel<K, S, Task>, task.walk.total, task, stream, base, strip, tiles);
    } else {
      task.walk = Walk(g.batch, extent, g.channels, N);
      return LaunchThreads(TileKernel<K, S, Task>, task.walk.total, task, stream, base);
    }
  };
  return VisitSquare<N == 1, true>(g, launch, otherwise);
}

// Launches any other kernel. Fills in the `walk` of `task`.
template <class Task>
cudaError_t LaunchSpread(Task task, cudaStream_t stream) {
  using T = typename Task::Element;
  constexpr int N = Task::kWidth, V = kVecLength<T>;
  const Geometry& g = task.g;
  if constexpr (Task::kShortcuts) {
    // Dimensions in front that are not there have no bins.
    bool bins = g.stride[2] == 0;
    for (int d = 0; d < 3; ++d)
      bins = bins && g.in[d] >= g.out[d] && (g.stride[d] == 0 || (g.in[d] == 1 && g.window[d] == 1 && g.low[d] == 0));
    if (bins) {
      const int parts[3] = {g.in[0], g.in[1], g.out[2]};
      task.walk = Walk(g.batch, parts, g.channels, N);
      return LaunchThreads(BinsKernel<Task>, task.walk.total, task, stream);
    }
  }
  const int64_t cells = int64_t{g.in[0]} * g.in[1] * g.in[2];
  if constexpr (Task::kWhole && N < V) {
    if (WindowIsWhole(g) && g.channels == 1 && cells >= V && cells <= INT32_MAX && IsVectorAligned(task.dx)) {
      const int64_t total = g.batch * cells;
      return LaunchThreads(PlaneKernel<Task>, CeilDiv(total, V * kPlaneVectors), task, stream, total, FastDiv(cells));
    }
  } else if constexpr (Task::kWhole) {
    if (WindowIsWhole(g) && cells <= INT32_MAX) {
      const int parts[3] = {1, 1, static_cast<int>(CeilDiv(cells, kWholeCells))};
      task.walk = Walk(g.batch, parts, g.channels, N);
      return LaunchThreads(WholeKernel<Task>, task.walk.total, task, stream, static_cast<int>(cells));
    }
  }
  if constexpr (Task::kShortcuts && N < V) {
    if (WindowsAreApart(g) && IsVectorAligned(task.dx)) {
      task.walk = Walk(g.batch, g.in, g.channels, 1);
      return LaunchThreads(FlatKernel<Task>, CeilDiv(task.walk.total, V), task, stream);
    }
  }
  if constexpr (N == V) {
    if (WindowsAreApart(g)) {
      const int tiles[3] = {CountTiles(g, 0, g.stride[0]), CountTiles(g, 1, g.stride[1]),
                            CountTiles(g, 2, g.stride[2])};
      task.walk = Walk(g.batch, tiles, g.channels, N);
      const int3 base = {FirstTile(g, 0, g.stride[0]), FirstTile(g, 1, g.stride[1]), FirstTile(g, 2, g.stride[2])};
      return LaunchThreads(ApartKernel<Task>, task.walk.total, task, stream, base);
    }
  }
  task.walk = Walk(g.batch, g.in, g.channels, N);
  return LaunchThreads(SpreadKernel<Task>, task.walk.total, task, stream);
}

}  // namespace jaxdnn::pool
