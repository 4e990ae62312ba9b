// The gradient of a choice over windows one apart and lanes of channels.
//
// A block has some channels of a tile of columns, and walks down the rows of windows: it adds what each passes back to
// sums in shared memory, of as many rows as a window has and one more. A row that no further window reaches is stored
// while the next windows are added, and its place taken by the next.
//
// Two warps add. A lane adds to its own channel alone, so that sums need no atomics and have their order. What bounds
// it is the time from the load of a sum to its store, and how few warps such sums leave room for; so half a warp has
// the left windows of a row and half the right ones, and a lane takes several neighbours at once: where they name the
// same cell, the later ones add to the earlier one's sum. The halves are so far apart that what they take at once has
// no cell in common, and meet before they go on: the left half comes to the right one's first cells at the end. A third
// warp copies rows of windows ahead of their use, and stores.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {

constexpr int kMarchStages = 3;  // rows of windows in shared memory
constexpr int kMarchLanes = 16;  // channels of a warp
constexpr int kMarchAdders = 2;  // warps that add
constexpr int kMarchThreads = kMarchAdders * 32 + 32;
constexpr int kMarchAtOnce = 4;               // windows that a lane takes
constexpr int kMarchBytes = kMarchLanes * 4;  // of a column's sums

struct March {
  int columns, rows;  // of a tile and of a strip
  int half;           // windows that half a warp takes of a row
  int inverse;        // of a window's width, in 1 / 65536
  int64_t blocks;
  FastDiv by_slice, by_tile, by_strip, by_depth;
  // In bytes: a row of sums; what that is longer than a window's row; what surrounds the sums, so that no index leads
  // out of them; a warp's sums; what it needs of a row of windows.
  int pitch, down, guard, sums, values, winners;
  int shared;
  bool tiled;

  template <class T>
  void Lay(const Geometry& g, int64_t tiles) {
    columns = static_cast<int>(CeilDiv(g.in[2], tiles)), tiled = tiles > 1;
    constexpr int R = kMarchAtOnce;
    const int windows = std::min(columns + g.window[2] - 1, g.out[2]);
    half = static_cast<int>(CeilDiv(std::max<int64_t>(CeilDiv(windows, 2), g.window[2] + R - 1), R)) * R;
    pitch = columns * kMarchBytes, down = pitch - g.window[2] * kMarchBytes;
    guard = (g.window[2] - 1) * kMarchBytes;
    // The warps' parts begin in other banks, as who copies and stores takes both at a time.
    const auto apart = [](int bytes, int by) { return static_cast<int>(CeilDiv(bytes, 128)) * 128 + by; };
    sums = apart((g.window[1] + 1) * pitch + 2 * guard, sizeof(T) == 2 ? 80 : 64);
    const int slots = 2 * half + 1 + R;  // and what is loaded ahead
    values = apart(slots * kMarchLanes * static_cast<int>(sizeof(T)), 64), winners = apart(slots * kMarchLanes, 64);
    shared = kMarchAdders * (sums + kMarchStages * (values + winners));
  }

  template <class T>
  bool Plan(const Geometry& g, int64_t most) {
    const int64_t slices = CeilDiv(g.channels, kMarchAdders * kMarchLanes);
    int64_t tiles = CeilDiv(g.in[2], std::max(64, 4 * g.window[2]));
    for (Lay<T>(g, tiles); shared > most; Lay<T>(g, ++tiles))
      if (columns <= 16) return false;
    const int64_t resident = 132 * std::min<int64_t>(16, (227 << 10) / (shared + 1024));
    int64_t least = INT64_MAX, strips = 1;
    for (int n = 1; n <= g.in[1]; ++n) {
      const int64_t each = CeilDiv(g.in[1], n);
      const int64_t waves = CeilDiv(g.batch * g.in[0] * slices * tiles * CeilDiv(g.in[1], each), resident);
      const int64_t cost = waves * (each + g.window[1] - 1 + 2);
      if (cost < least) least = cost, rows = static_cast<int>(each), strips = CeilDiv(g.in[1], each);
    }
    blocks = g.batch * g.in[0] * slices * tiles * strips;
    by_slice = FastDiv(slices), by_tile = FastDiv(tiles), by_strip = FastDiv(strips), by_depth = FastDiv(g.in[0]);
    inverse = static_cast<int>(CeilDiv(1 << 16, g.window[2]));
    return blocks <= INT32_MAX;
  }
};

// Bits of a byte or element, kept in a register of their own: the compiler would pack those of two, and take them
// apart.
template <class T>
__device__ unsigned LoadBits(const T* p) {
  using Bits = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, unsigned>>;
  unsigned bits = *reinterpret_cast<const Bits*>(p);
  asm("" : "+r"(bits));
  return bits;
}
template <class T>
__device__ float FromBits(unsigned bits) {
  if constexpr (sizeof(T) == 2)
    return static_cast<float>(BitCast<T>(static_cast<uint16_t>(bits)));
  else
    return __uint_as_float(bits);
}

// Where the cells of a row of windows have their sums, in bytes of shared memory: from `start`, the first of the row of
// their first cells, on. The rows are a ring of so many bytes, which cells from number `wraps` on begin again.
template <bool kTiled>
struct MarchCells {
  unsigned start, ring, wraps, cells, nowhere;

  // `first` is the place of the window's first cell, `wrapped` a ring's length before.
  __device__ unsigned Of(const March& m, unsigned cell, unsigned first, unsigned wrapped) const {
    const unsigned row = cell * m.inverse >> 16;
    const bool wrap = cell >= wraps;
    const unsigned place = row * m.down + (cell * kMarchBytes + (wrap ? wrapped : first));
    bool is = cell < cells;
    if constexpr (kTiled)
      is = is && place - (row * m.pitch + (wrap ? start - ring : start)) < static_cast<unsigned>(m.pitch);
    return is ? place : nowhere;
  }
};

// Adds what half a row of windows passes back. `first` is the first cell of the first.
template <bool kTiled, class T>
__device__ void AddWindows(const March& m, const MarchCells<kTiled>& cells, const T* value, const uint8_t* winner,
                           unsigned char* memory, unsigned first) {
  constexpr int C = kMarchLanes, R = kMarchAtOnce;
  unsigned wrapped = first - cells.ring;
  asm("" : "+r"(wrapped));  // else it is computed again for every window
  const auto find = [&](int r, unsigned cell) {
    return cells.Of(m, cell, first + r * kMarchBytes, wrapped + r * kMarchBytes);
  };
  // Of the present windows, and of the next.
  unsigned place[R], bits[R], next_place[R], next_bits[R];
  const auto look = [&](unsigned (&place)[R], unsigned (&bits)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      place[r] = find(r, LoadBits(winner + r * C));
      bits[r] = LoadBits(value + r * C);
    }
    first += R * kMarchBytes, wrapped += R * kMarchBytes, value += R * C, winner += R * C;
  };
  look(place, bits);
#pragma unroll 1
  for (int w = 0; w < m.half; w += R) {
    float sum[R];
#pragma unroll
    for (int r = 0; r < R; ++r) sum[r] = *reinterpret_cast<const float*>(memory + place[r]);
    look(next_place, next_bits);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int q = 0; q < r; ++q)
        if (place[q] == place[r]) sum[r] = sum[q];
      sum[r] += FromBits<T>(bits[r]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      *reinterpret_cast<float*>(memory + place[r]) = sum[r];
      place[r] = next_place[r], bits[r] = next_bits[r];
    }
    __syncwarp();  // the left half comes to cells that the right one has added to
  }
}

template <bool kTiled, class T>
__global__ void __launch_bounds__(kMarchThreads, 6)
    MarchGradKernel(const __grid_constant__ Geometry g, const __grid_constant__ March m, const T* __restrict__ dy,
                    const uint8_t* __restrict__ index, T* __restrict__ dx) {
  constexpr int A = kMarchAdders, C = kMarchLanes, V = kVecLength<T>, kChunks = A * C / V, kStep = 32 / kChunks;
  extern __shared__ __align__(16) unsigned char memory[];  // sums: [A][guard, window rows + 1, columns, guard]
  unsigned char* const values = memory + A * m.sums;       // [stages][A][windows][C]
  unsigned char* const winners = values + kMarchStages * A * m.values;
  int slice, tile, strip, o0;
  const int64_t image = m.by_depth.Div(
      m.by_strip.Div(m.by_tile.Div(m.by_slice.Div(static_cast<int>(blockIdx.x), &slice), &tile), &strip), &o0);
  const int64_t plane = image * g.in[0] + o0;
  const int left = tile * m.columns, right = min(left + m.columns, g.in[2]);
  const int first_row = strip * m.rows, end_row = min(first_row + m.rows, g.in[1]);
  const int first = max(left + g.low[2] - g.window[2] + 1, 0), end = min(right + g.low[2], g.out[2]);
  const int count = max(end - first, 0);  // windows of a row
  // Of rows of windows, from the first over the strip; rows of the strip before all windows have none.
  const int begin = min(max(first_row + g.low[1] - g.window[1] + 1, 0), first_row + g.low[1]);
  const int last = end_row - 1 + g.low[1];
  const auto is_row = [&](int o1) { return o1 >= 0 && o1 < g.out[1] && o1 <= last; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ring = g.window[1] + 1;
  for (int i = threadIdx.x * 16; i < A * m.sums; i += kMarchThreads * 16)
    *reinterpret_cast<float4*>(memory + i) = float4{};
#pragma unroll 1
  for (int i = threadIdx.x * 16; i < kMarchStages * A * m.winners; i += kMarchThreads * 16)
    *reinterpret_cast<uint4*>(winners + i) = {~0u, ~0u, ~0u, ~0u};  // no windows
  __syncthreads();

  // Of a lane that adds.
  const int part = lane / C, channel = lane % C;
  const unsigned sums = warp * m.sums + m.guard + channel * 4;
  // Before the first row or after the last, so that the halves do not meet there either.
  const unsigned nowhere = part == 0 ? sums - m.guard : sums + ring * m.pitch;
  const unsigned column = (first - g.low[2] - left + part * m.half) * kMarchBytes;  // of its first window
  const int window = part * (m.half + 1) * C + channel;  // the halves are an odd number apart, in other banks

  // Of a lane that copies and stores.
  const int chunk = lane % kChunks, start = lane / kChunks, adder = chunk * V / C, place = chunk * V % C;
  const int offset = slice * A * C + chunk * V;
  const bool exists = offset < g.channels;
  const int64_t from = (plane * g.out[1] * g.out[2] + first + start) * g.channels + offset;
  const auto copy = [&](int o1, int stage) {
    if (is_row(o1) && exists) {
      const int64_t row = from + int64_t{o1} * g.out[2] * g.channels;
      const T* value = dy + row;
      const uint8_t* winner = index + row;
      T* const to = reinterpret_cast<T*>(values + (stage * A + adder) * m.values) + place;
      uint8_t* const winner_to = winners + (stage * A + adder) * m.winners + place;
#pragma unroll 2
      for (int w = start; w < count; w += kStep, value += kStep * g.channels, winner += kStep * g.channels) {
        const int slot = (w >= m.half ? w + 1 : w) * C;
        CopyAsync(reinterpret_cast<uint4*>(to + slot), reinterpret_cast<const uint4*>(value));
        CopyAsync(reinterpret_cast<Words<uint8_t, V>*>(winner_to + slot),
                  reinterpret_cast<const Words<uint8_t, V>*>(winner));
      }
    }
    CommitAsync();
  };
  T* to = dx + ((plane * g.in[1] + first_row) * g.in[2] + left + start) * g.channels + offset;
  const auto store = [&](int row, int slot) {
    const bool stores = exists && row >= first_row;
    float* done = reinterpret_cast<float*>(memory + adder * m.sums + m.guard + slot * m.pitch) + start * C + place;
    T* here = to;
#pragma unroll 2
    for (int c = start; c < right - left; c += kStep, done += kStep * C, here += kStep * g.channels) {
      float v[V];
#pragma unroll
      for (int j = 0; j < V; j += 4) {
        const auto four = Load<4>(done + j);
        Store(done + j, Vec<float, 4>{});
#pragma unroll
        for (int k = 0; k < 4; ++k) v[j + k] = four.v[k];
      }
      if (stores) StorePacked<T, V>(here, Narrow<T, V>(v));
    }
    if (row >= first_row) to += int64_t{g.in[2]} * g.channels;
  };

  if (warp == A) {
#pragma unroll 1
    for (int s = 0; s < kMarchStages - 1; ++s) copy(begin + s, s);
  }
  int slot = 0, stage = 0;
#pragma unroll 1
  for (int o1 = begin; o1 <= last + 1; ++o1) {
    if (warp == A) WaitAsync<kMarchStages - 2>();
    __syncthreads();
    if (warp == A) {
      copy(o1 + kMarchStages - 1, stage == 0 ? kMarchStages - 1 : stage - 1);
      store(o1 - 1 - g.low[1], slot == 0 ? ring - 1 : slot - 1);  // the row that the windows before were the last over
    } else if (is_row(o1)) {
      const MarchCells<kTiled> cells = {sums + slot * m.pitch, static_cast<unsigned>(ring * m.pitch),
                                        static_cast<unsigned>((ring - slot) * g.window[2]),
                                        static_cast<unsigned>(g.window[1] * g.window[2]), nowhere};
      AddWindows(m, cells, reinterpret_cast<const T*>(values + (stage * A + warp) * m.values) + window,
                 winners + (stage * A + warp) * m.winners + window, memory, cells.start + column);
    }
    slot = slot + 1 == ring ? 0 : slot + 1;
    stage = stage + 1 == kMarchStages ? 0 : stage + 1;
  }
}

inline bool IsMarch(const Geometry& g) {
  bool is = g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 && g.in[0] == g.out[0] && g.batch > 0 &&
            g.channels > 0 && g.window[1] * g.window[2] <= 255;
  for (int d = 1; d < 3; ++d)
    is = is && g.stride[d] == 1 && g.dilation[d] == 1 && g.window[d] > 1 && g.in[d] > 0 && g.out[d] > 0;
  return is;
}

template <class T, class Otherwise>
cudaError_t LaunchMarchGrad(const Geometry& g, const T* dy, const uint8_t* index, T* dx, cudaStream_t stream,
                            Otherwise&& otherwise) {
  March m = {};
  // So that a multiprocessor has two blocks.
  if (!IsMarch(g) || !m.Plan<T>(g, std::min<int64_t>(SharedBytes().one, 113 << 10))) return otherwise();
  const Grid grid = {m.blocks, kMarchThreads, static_cast<size_t>(m.shared)};
  return LaunchKernel(m.tiled ? MarchGradKernel<true, T> : MarchGradKernel<false, T>, grid, stream, g, m, dy, index,
                      dx);
}

}  // namespace jaxdnn::pool
