// The gradient of a choice over channels-first planes, wherever their rows begin. A block sums a band of rows, or some
// small planes, in shared memory, and copies that to dx in 16-byte accesses.
//
// A thread has a block of P x P neighbouring windows. Windows P >= K / S apart have no cell in common, so the threads
// add what the first of their windows pass back, then the second, and so on: no two add to one sum at a time, and every
// sum has its order.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {

constexpr int kScatterThreads = 128;

struct Bands {
  int images, rows, shared;  // planes of a block, or rows of dx of one; elements
  int64_t blocks;
  FastDiv by_band, by_across, by_down;  // bands to a plane, threads across one, and threads down one
  FastDiv by_window;

  // False if a row is too long.
  bool Plan(const Geometry& g, int p, int e) {
    constexpr int64_t kSums = 12 << 10;
    const int64_t plane = int64_t{g.in[1]} * g.in[2], across = CeilDiv(g.out[2], p);
    if (across > kScatterThreads || g.in[2] > kSums) return false;
    int64_t down = CeilDiv(g.out[1], p);
    images = 1, rows = g.in[1];
    if (across * down <= kScatterThreads && plane <= kSums / 2) {
      images = static_cast<int>(std::min(kScatterThreads / (across * down), kSums / 2 / plane));
    } else {
      down = kScatterThreads / across;
      const int64_t most = std::min(down * p * g.stride[1] - g.window[1] + 1, kSums / g.in[2]);
      if (most < 1) return false;
      rows = static_cast<int>(CeilDiv(g.in[1], CeilDiv(g.in[1], most)));
    }
    const int64_t bands = CeilDiv(g.in[1], rows);
    blocks = CeilDiv(g.batch * g.in[0], images) * bands;
    by_band = FastDiv(bands), by_across = FastDiv(across), by_down = FastDiv(down), by_window = FastDiv(g.window[2]);
    shared = images * rows * g.in[2] + 2 * e;
    return blocks <= INT32_MAX;
  }
};

template <int P, class T>
__global__ void __launch_bounds__(kScatterThreads)
    ScatterKernel(const __grid_constant__ Geometry g, const __grid_constant__ Bands bands, const T* __restrict__ dy,
                  const uint8_t* __restrict__ index, T* __restrict__ dx) {
  constexpr int E = kVecLength<T>, kNone = 255;
  extern __shared__ __align__(16) unsigned char memory[];
  int band, across, down;
  const int64_t image = int64_t{bands.by_band.Div(static_cast<int>(blockIdx.x), &band)} * bands.images;
  const int images = static_cast<int>(min(int64_t{bands.images}, g.batch * g.in[0] - image));
  const int top = band * bands.rows, rows = min(bands.rows, g.in[1] - top);
  const int n = bands.by_down.Div(bands.by_across.Div(static_cast<int>(threadIdx.x), &across), &down);

  // Of the windows that reach into the band.
  const int past = max(top + g.low[1] - g.window[1] + 1, 0);
  const int first = (past + g.stride[1] - 1) / g.stride[1] + down * P;
  const int last = min(g.out[1] - 1, (top + rows - 1 + g.low[1]) / g.stride[1]);
  float value[P][P];
  int cell[P][P];
#pragma unroll
  for (int a = 0; a < P; ++a) {
#pragma unroll
    for (int b = 0; b < P; ++b) {
      const int o1 = first + a, o2 = across * P + b;
      cell[a][b] = kNone;
      value[a][b] = 0;
      if (n < images && o1 <= last && o2 < g.out[2]) {
        const int64_t at = ((image + n) * g.out[1] + o1) * g.out[2] + o2;
        cell[a][b] = index[at];
        value[a][b] = static_cast<float>(dy[at]);
      }
    }
  }

  T* const to = dx + (image * g.in[1] + top) * g.in[2];
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(T));
  const int length = images * rows * g.in[2];
  float* const all = reinterpret_cast<float*>(memory);
  float* const sums = all + skew;  // aligned where dx is
  for (int i = threadIdx.x * 4; i < skew + length; i += kScatterThreads * 4)
    *reinterpret_cast<float4*>(all + i) = float4{};
  __syncthreads();
#pragma unroll
  for (int a = 0; a < P; ++a) {
#pragma unroll
    for (int b = 0; b < P; ++b) {
      int k2;
      const int k1 = bands.by_window.Div(cell[a][b], &k2);
      const int row = (first + a) * g.stride[1] - g.low[1] + k1 - top;
      const int column = (across * P + b) * g.stride[2] - g.low[2] + k2;
      if (cell[a][b] != kNone && static_cast<unsigned>(row) < static_cast<unsigned>(rows) &&
          static_cast<unsigned>(column) < static_cast<unsigned>(g.in[2]))
        sums[(n * rows + row) * g.in[2] + column] += value[a][b];
      __syncthreads();
    }
  }
  for (int i = static_cast<int>(threadIdx.x) * E - skew; i < length; i += kScatterThreads * E) {
    if (i >= 0 && i + E <= length) {
      Vec<T, E> v;
#pragma unroll
      for (int j = 0; j < E; j += 4) {
        const Vec<float, 4> part = Load<4>(sums + i + j);
#pragma unroll
        for (int k = 0; k < 4; ++k) v.v[j + k] = static_cast<T>(part.v[k]);
      }
      Store(to + i, v);
    } else {
      for (int j = max(i, 0); j < min(i + E, length); ++j) to[j] = static_cast<T>(sums[j]);
    }
  }
}

template <class T, class Otherwise>
cudaError_t LaunchScatter(const Geometry& g, const T* dy, const uint8_t* index, T* dx, cudaStream_t stream,
                          Otherwise&& otherwise) {
  bool fits = g.channels == 1 && g.batch > 0 && g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 &&
              g.in[0] == g.out[0] && !WindowIsWhole(g);
  int64_t p = 2;  // enough windows for a thread
  for (int d = 1; d < 3; ++d) {
    fits = fits && g.stride[d] > 0 && g.dilation[d] == 1 && g.low[d] >= 0 && g.in[d] > 0 && g.out[d] > 0;
    if (fits) p = std::max(p, CeilDiv(g.window[d], g.stride[d]));
  }
  Bands bands;
  if (!fits || p > 3 || !bands.Plan(g, static_cast<int>(p), kVecLength<T>)) return otherwise();
  const Grid grid = {bands.blocks, kScatterThreads, bands.shared * sizeof(float)};
  return LaunchKernel(p == 2 ? ScatterKernel<2, T> : ScatterKernel<3, T>, grid, stream, g, bands, dy, index, dx);
}

}  // namespace jaxdnn::pool
