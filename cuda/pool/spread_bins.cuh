// The backward kernels of bins, whose windows differ or are all there is: WholeKernel and, for single channels,
// PlaneKernel take global pooling, BinsKernel adaptive pooling. spread.cuh says what a `Task` is.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {

template <class T, int N>
__device__ Vec<T, N> Rounded(const Accumulator<T> (&sum)[N]) {
  Vec<T, N> result;
#pragma unroll
  for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(sum[j]);
  return result;
}

// Stores what is hardly read: where a kernel does nothing but write, its lines are in each other's way in the cache.
template <int N, class T>
__device__ void StoreStreaming(T* p, const Vec<T, N>& v) {
  if constexpr (sizeof(v) == 16)
    __stcs(reinterpret_cast<uint4*>(p), BitCast<uint4>(v));
  else
    Store(p, v);
}

// Of windows of `cells` cells. A thread writes kWholeCells of them.
constexpr int kWholeCells = 8;

template <class Task>
__global__ void __launch_bounds__(kThreads) WholeKernel(const __grid_constant__ Task task, int cells) {
  constexpr int N = Task::kWidth;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position i = task.walk.At(flat);
  typename Task::Share share;
  share.Load(task, i.batch * task.out.batch + i.channel, 0, 0, 0);
  const int begin = i.at[2] * kWholeCells, end = min(begin + kWholeCells, cells);
  int64_t to = i.batch * task.in.batch + begin * task.in.dim[2] + i.channel;
#pragma unroll 4
  for (int cell = begin; cell < end; ++cell, to += task.in.dim[2]) {
    typename Task::A sum[N] = {};
    share.Add(sum, cell);
    StoreStreaming(task.dx + to, task.Final(to, sum));
  }
}

// The same of single channels, and of windows of no fewer cells than a vector has elements: dx is one array of `total`
// elements, of which a vector has cells of one window or of two.
constexpr int kPlaneVectors = 2;  // of a thread

template <class Task>
__global__ void __launch_bounds__(kThreads)
    PlaneKernel(const __grid_constant__ Task task, int64_t total, FastDiv by_cells) {
  using T = typename Task::Element;
  using Share = typename Task::Share;
  constexpr int V = kVecLength<T>;
  const int cells = static_cast<int>(by_cells.divisor);
  const auto value = [&](const Share& share, int64_t at, int cell) {
    typename Task::A sum[1] = {};
    share.Add(sum, cell);
    return task.Final(at, sum).v[0];
  };
  int64_t begin[kPlaneVectors];
  int left[kPlaneVectors];  // cells of the first window
  Share first[kPlaneVectors], second[kPlaneVectors];
#pragma unroll
  for (int u = 0; u < kPlaneVectors; ++u) {
    begin[u] = ((blockIdx.x * int64_t{kPlaneVectors} + u) * kThreads + threadIdx.x) * V;
    const int64_t at = min(begin[u], total - 1);
    const int64_t plane = total <= INT32_MAX ? by_cells.Div(static_cast<int>(at)) : at / cells;
    left[u] = cells - static_cast<int>(at - plane * cells);
    first[u].Load(task, plane, 0, 0, 0);
    second[u].Load(task, min(plane + 1, task.g.batch - 1), 0, 0, 0);
  }
#pragma unroll
  for (int u = 0; u < kPlaneVectors; ++u) {
    const int64_t at = begin[u];
    Vec<T, V> result;
    if constexpr (Task::kSame) {
      const T a = value(first[u], at, 0), b = value(second[u], at, 0);
#pragma unroll
      for (int j = 0; j < V; ++j) result.v[j] = j < left[u] ? a : b;
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        result.v[j] =
            j < left[u] ? value(first[u], at + j, cells - left[u] + j) : value(second[u], at + j, j - left[u]);
    }
    if (at + V <= total) {
      StoreStreaming(task.dx + at, result);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (at + j < total) task.dx[at + j] = result.v[j];
    }
  }
}

// Of bins that overlap by one position at most, hence two over a position in each dimension. A thread writes the
// positions of a row from where a bin begins to where the next does; only the first may be the previous bin's as well.
template <class Task>
__global__ void __launch_bounds__(kThreads) BinsKernel(const __grid_constant__ Task task) {
  constexpr int N = Task::kWidth;
  using A = typename Task::A;
  const Shape& g = task.g;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= task.walk.total) return;
  const Position i = task.walk.At(flat);
  const int o2 = i.at[2];
  const auto bin = [&](int d, int o) { return BinOf(o, g.in[d], g.by_out[d]); };
  const auto over = [&](int d) { return BinOf(i.at[d], g.out[d], g.by_in[d]); };
  const auto length = [](const Bin& bin) { return bin.end - bin.begin; };
  const Bin own = bin(2, o2), before = o2 > 0 ? bin(2, o2 - 1) : Bin{0, 0}, over0 = over(0), over1 = over(1);
  const int begin = own.begin, end = o2 + 1 < g.out[2] ? bin(2, o2 + 1).begin : g.in[2];
  typename Task::Share share[2][2];
  A sum[N] = {};
  int cell[2][2];  // of each bin, the first in this row
  const auto exists = [&](int a, int b) { return over0.begin + a < over0.end && over1.begin + b < over1.end; };
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if (!exists(a, b)) continue;
      const int o0 = over0.begin + a, o1 = over1.begin + b;
      const Bin bin0 = bin(0, o0), bin1 = bin(1, o1);
      const int cells = length(bin0) * length(bin1);
      cell[a][b] = ((i.at[0] - bin0.begin) * g.window[1] + i.at[1] - bin1.begin) * g.window[2];
      const int64_t offset =
          i.batch * task.out.batch + o0 * task.out.dim[0] + o1 * task.out.dim[1] + o2 * task.out.dim[2] + i.channel;
      if (before.end > begin) {
        typename Task::Share other;
        other.LoadBin(task, offset - task.out.dim[2], cells * length(before));
        other.Add(sum, cell[a][b] + begin - before.begin);
      }
      share[a][b].LoadBin(task, offset, cells * length(own));
    }
  }
  int64_t to = i.batch * task.in.batch + i.at[0] * task.in.dim[0] + i.at[1] * task.in.dim[1] + begin * task.in.dim[2] +
               i.channel;
  const auto add = [&](A(&sum)[N], int position) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
#pragma unroll
      for (int b = 0; b < 2; ++b)
        if (exists(a, b)) share[a][b].Add(sum, cell[a][b] + position - begin);
    }
  };
  const auto store = [&](const A(&sum)[N]) {
    StoreStreaming(task.dx + to, task.Final(to, sum));
    to += task.in.dim[2];
  };
  if constexpr (Task::kSame) {
    A same[N] = {};
    add(same, begin), add(sum, begin);
    store(sum);
#pragma unroll 4
    for (int i2 = begin + 1; i2 < end; ++i2) store(same);
  } else {
#pragma unroll 1
    for (int i2 = begin; i2 < end; ++i2) {
      add(sum, i2);
      store(sum);
#pragma unroll
      for (A& each : sum) each = 0;
    }
  }
}

}  // namespace jaxdnn::pool
