// The gradient of a choice over windows one apart and lanes of channels.
//
// A warp has 32 channels of a tile of columns, and walks down the rows of windows: it adds what each passes back to
// sums in shared memory, of as many rows as a window has. A row that no further window reaches is stored, and its place
// taken by the next. A lane adds to its own channel alone, and takes windows in order, but for a few a window's width
// apart, which have no cell in common and whose additions overlap.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {

constexpr int kMarchWindows = 4;  // whose additions overlap

struct March {
  int columns, windows, slots, rows;  // of a tile; windows over them, and with what is no window; rows of a strip
  int64_t blocks;
  FastDiv by_slice, by_tile, by_strip, by_depth, by_window;
  int shared;

  template <class T>
  bool Plan(const Geometry& g, int64_t most) {
    constexpr int kLanes = 32;
    const int64_t slices = CeilDiv(g.channels, kLanes);
    const int64_t tiles = CeilDiv(g.in[2], std::max(32, 4 * g.window[2]));
    columns = static_cast<int>(CeilDiv(g.in[2], tiles)), windows = columns + g.window[2] - 1;
    slots = windows + kMarchWindows * g.window[2];
    shared = ((g.window[1] + 1) * columns * 4 + slots * 2 * static_cast<int>(sizeof(T) + 1)) * kLanes + 1024;
    if (shared > most) return false;
    const int64_t resident = 132 * std::min<int64_t>(32, (227 << 10) / (shared + 1024));
    int64_t least = INT64_MAX, strips = 1;
    for (int n = 1; n <= g.in[1]; ++n) {
      const int64_t each = CeilDiv(g.in[1], n);
      const int64_t waves = CeilDiv(g.batch * g.in[0] * slices * tiles * CeilDiv(g.in[1], each), resident);
      const int64_t cost = waves * (each + g.window[1] - 1 + 2);
      if (cost < least) least = cost, rows = static_cast<int>(each), strips = CeilDiv(g.in[1], each);
    }
    blocks = g.batch * g.in[0] * slices * tiles * strips;
    by_slice = FastDiv(slices), by_tile = FastDiv(tiles), by_strip = FastDiv(strips), by_depth = FastDiv(g.in[0]);
    by_window = FastDiv(g.window[2]);
    return blocks <= INT32_MAX;
  }
};

template <class T>
__global__ void __launch_bounds__(32)
    MarchGradKernel(const __grid_constant__ Geometry g, const __grid_constant__ March m, const T* __restrict__ dy,
                    const uint8_t* __restrict__ index, T* __restrict__ dx) {
  constexpr int U = kMarchWindows, V = kVecLength<T>, kChunks = 32 / V;
  extern __shared__ __align__(16) unsigned char memory[];
  const int lane = threadIdx.x;
  float* const sums = reinterpret_cast<float*>(memory);  // [window rows][columns][32]
  const int size = g.window[1] * m.columns * 32;
  unsigned* const table = reinterpret_cast<unsigned*>(
      sums + size + m.columns * 32);                    // column << 24 | bytes from a window's first column to a cell
  T* const values = reinterpret_cast<T*>(table + 256);  // [2][slots][32]
  uint8_t* const winners = reinterpret_cast<uint8_t*>(values + 2 * m.slots * 32);
  int slice, tile, strip, o0;
  const int64_t image = m.by_depth.Div(
      m.by_strip.Div(m.by_tile.Div(m.by_slice.Div(static_cast<int>(blockIdx.x), &slice), &tile), &strip), &o0);
  const int64_t plane = image * g.in[0] + o0;
  const int left = tile * m.columns, right = min(left + m.columns, g.in[2]);
  const int first_row = strip * m.rows, end_row = min(first_row + m.rows, g.in[1]);
  const int first = max(left + g.low[2] - g.window[2] + 1, 0), end = min(right + g.low[2], g.out[2]);
  const int count = max(end - first, 0);  // windows of a row

  const int chunk = lane % kChunks, start = lane / kChunks;
  const int64_t from = (plane * g.out[1] * g.out[2] + first) * g.channels + slice * 32 + chunk * V;
  const auto copy = [&](int o1, int half) {
    if (o1 >= 0 && o1 < g.out[1] && slice * 32 + chunk * V < g.channels) {
      const int64_t row = from + int64_t{o1} * g.out[2] * g.channels;
      for (int w = start; w < count; w += V) {
        const int to = (half * m.slots + w) * 32 + chunk * V;
        const int64_t offset = row + int64_t{w} * g.channels;
        CopyAsync(reinterpret_cast<uint4*>(values + to), reinterpret_cast<const uint4*>(dy + offset));
        CopyAsync(reinterpret_cast<Words<uint8_t, V>*>(winners + to),
                  reinterpret_cast<const Words<uint8_t, V>*>(index + offset));
      }
    }
    CommitAsync();
  };
  const int begin = first_row + g.low[1] - g.window[1] + 1, last = end_row - 1 + g.low[1];
  copy(begin, 0);
  for (int i = lane * 4; i < size; i += 128) *reinterpret_cast<float4*>(sums + i) = float4{};
  for (int k = lane; k < 256; k += 32) table[k] = size * 4;  // no cell: a row that nobody reads
  for (int i = count * 32 + lane; i < m.slots * 32; i += 32) winners[i] = winners[m.slots * 32 + i] = 255;
  const int cells = g.window[1] * g.window[2];
  T* to = dx + ((plane * g.in[1] + first_row) * g.in[2] + left) * g.channels + slice * 32 + lane;
  const bool exists = slice * 32 + lane < g.channels;
  const int shift = first - g.low[2] - left;  // of the first window's first column

  const unsigned end_cell = static_cast<unsigned>(m.columns) << 24;
  const int stride = g.window[2] * 32;
  int slot = 0, half = 0;
#pragma unroll 1
  for (int o1 = begin; o1 <= last; ++o1) {
    __syncwarp();
    copy(o1 + 1, 1 - half);
    for (int k = lane; k < cells; k += 32) {
      int k2;
      const int row = m.by_window.Div(k, &k2) + slot;
      table[k] = ((row >= g.window[1] ? row - g.window[1] : row) * m.columns + k2) * 128 | k2 << 24;
    }
    WaitAsync<1>();
    __syncwarp();
    if (o1 >= 0 && o1 < g.out[1]) {
      const T* const value = values + half * m.slots * 32 + lane;
      const uint8_t* const winner = winners + half * m.slots * 32 + lane;
#pragma unroll 1
      for (int a = 0; a < g.window[2]; ++a) {
#pragma unroll 1
        for (int b = a; b < count; b += U * g.window[2]) {
          const T* const v = value + b * 32;
          const uint8_t* const w = winner + b * 32;
          const int column = b + shift;
          unsigned cell[U];
          float old[U];
#pragma unroll
          for (int u = 0; u < U; ++u) cell[u] = table[w[u * stride]];
#pragma unroll
          for (int u = 0; u < U; ++u) cell[u] += static_cast<unsigned>(column + u * g.window[2]) << 24;
          char* const at = reinterpret_cast<char*>(sums + lane + column * 32);
          const auto sum = [&](int u) { return reinterpret_cast<float*>(at + (cell[u] & 0xFFFFFF) + u * stride * 4); };
#pragma unroll
          for (int u = 0; u < U; ++u)
            if (cell[u] < end_cell) old[u] = *sum(u);
#pragma unroll
          for (int u = 0; u < U; ++u)
            if (cell[u] < end_cell) *sum(u) = old[u] + static_cast<float>(v[u * stride]);
        }
      }
    }
    // The row that these windows were the last over.
    const int row = o1 - g.low[1];
    float* const done = sums + slot * m.columns * 32 + lane;
    const bool stores = exists && row >= first_row;
    T* here = to;
#pragma unroll 4
    for (int c = 0; c < right - left; ++c, here += g.channels) {
      const float v = done[c * 32];
      done[c * 32] = 0;
      if (stores) *here = static_cast<T>(v);
    }
    if (row >= first_row) to += int64_t{g.in[2]} * g.channels;
    slot = slot + 1 == g.window[1] ? 0 : slot + 1;
    half = 1 - half;
  }
}

inline bool IsMarch(const Geometry& g) {
  constexpr int kMost = 32;  // so that columns, and those beside a tile, are a byte's numbers
  bool is = g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 && g.in[0] == g.out[0] && g.batch > 0 &&
            g.window[1] * g.window[2] <= 255;
  for (int d = 1; d < 3; ++d)
    is = is && g.stride[d] == 1 && g.dilation[d] == 1 && g.window[d] > 1 && g.window[d] <= kMost && g.in[d] > 0 &&
         g.out[d] > 0;
  return is;
}

template <class T, class Otherwise>
cudaError_t LaunchMarchGrad(const Geometry& g, const T* dy, const uint8_t* index, T* dx, cudaStream_t stream,
                            Otherwise&& otherwise) {
  March m = {};
  if (!IsMarch(g) || !m.Plan<T>(g, std::min<int64_t>(SharedBytes().one, 110 << 10))) return otherwise();
  const Grid grid = {m.blocks, 32, static_cast<size_t>(m.shared)};
  return LaunchKernel(MarchGradKernel<T>, grid, stream, g, m, dy, index, dx);
}

}  // namespace jaxdnn::pool
