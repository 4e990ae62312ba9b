// The gradient of a choice over windows of K x K cells, one apart, and channels that fill vectors.
//
// A block has a slice of the channels and a tile of the columns of a plane, and walks down a strip of rows of windows,
// which pass through a ring in shared memory: copies run rows ahead of their use and need no registers, and nearly
// every element is read once. A thread owns a vector of channels of a column, and looks, in what the K windows of a row
// pass back, for its elements.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {

constexpr int kRingStages = 3;  // of K rows each

struct Ring {
  int vectors, columns, inputs, rows;  // vectors of a slice; elements across a tile, and windows; rows of a strip
  int width, height, reach;            // of the input; vectors of a row of windows
  int64_t blocks;
  FastDiv by_slice, by_tile, by_strip, by_depth, by_vector;
  int threads;

  // For inputs of depth x height x width.
  Ring(int64_t planes, int depth, int height, int width, int all_vectors, int k, int resident)
      : width(width), height(height) {
    constexpr int kVectors = 8;  // neighbours, 128 bytes
    const int64_t slices = CeilDiv(all_vectors, kVectors);
    vectors = static_cast<int>(CeilDiv(all_vectors, slices));
    const int64_t tiles = CeilDiv(width, kThreads / vectors - (k - 1));
    columns = static_cast<int>(CeilDiv(width, tiles));
    inputs = columns + k - 1;
    reach = inputs * vectors;
    threads = static_cast<int>(CeilDiv(reach, 32)) * 32;
    // The cheapest product of waves and of rows until a strip is done.
    int64_t least = INT64_MAX, strips = 1;
    for (int n = 1; n <= height; ++n) {
      const int64_t each = CeilDiv(height, n),
                    waves = CeilDiv(planes * slices * tiles * CeilDiv(height, each), resident);
      const int64_t cost = waves * (each + k - 1 + k);
      if (cost < least) least = cost, rows = static_cast<int>(each), strips = CeilDiv(height, each);
    }
    blocks = planes * slices * tiles * strips;
    by_slice = FastDiv(slices), by_tile = FastDiv(tiles), by_strip = FastDiv(strips), by_depth = FastDiv(depth);
    by_vector = FastDiv(vectors);
  }
};

// Where a block and a thread of it are.
struct RingPlace {
  int o0, begin, end, left, column, vector;  // depth; rows; first column of the tile; the thread's, and of the slice
  int64_t image;
  int channel;  // in vectors

  __device__ explicit RingPlace(const Ring& ring) {
    int slice, tile, strip;
    image = ring.by_depth.Div(
        ring.by_strip.Div(ring.by_tile.Div(ring.by_slice.Div(static_cast<int>(blockIdx.x), &slice), &tile), &strip),
        &o0);
    column = ring.by_vector.Div(static_cast<int>(threadIdx.x), &vector);
    channel = slice * ring.vectors + vector;
    left = tile * ring.columns;
    begin = strip * ring.rows, end = min(begin + ring.rows, ring.height);
  }
};

// Blocks of so much shared memory on the device, and of `most` on a multiprocessor.
inline int RingResident(int64_t bytes, int most) {
  return 132 * static_cast<int>(std::min<int64_t>(most, (227 << 10) / (bytes + 1024)));
}

// sum += value, if byte `j` of `word` and `wanted` is the same: two instructions, where the compiler takes three.
__device__ inline void AddIfByte(unsigned word, unsigned wanted, int j, float value, float& sum) {
  constexpr int kXorAnd = (0xF0 ^ 0xCC) & 0xAA;
  asm("{ .reg .pred p; .reg .b32 t; lop3.or.b32 t|p, %1, %2, %3, %4, 0; @!p add.f32 %0, %0, %5; }"
      : "+f"(sum)
      : "r"(word), "r"(wanted), "r"(0xFFu << j * 8), "n"(kXorAnd), "f"(value));
}

// dx[i] = the sum of dy[o] over the windows o whose index, of a byte, names i.
template <int K, class T>
__global__ void __launch_bounds__(kThreads, 3)
    RingGradKernel(const __grid_constant__ Geometry g, const __grid_constant__ Ring ring, const T* __restrict__ dy,
                   const uint8_t* __restrict__ index, T* __restrict__ dx) {
  constexpr int N = kVecLength<T>;
  using Values = Words<T, N>;
  using Winners = Words<uint8_t, N>;
  extern __shared__ __align__(16) unsigned char memory[];
  Values* const values = reinterpret_cast<Values*>(memory) + threadIdx.x;
  Winners* const winners = reinterpret_cast<Winners*>(memory + kRingStages * K * ring.reach * 16) + threadIdx.x;
  const RingPlace at(ring);
  // The first window over the thread's column, whose data it copies too.
  const int i2 = at.left + at.column, o2 = i2 + g.low[2] - (K - 1), channel = at.channel * N;
  const bool exists = channel < g.channels, copies = exists && at.column < ring.inputs;
  const bool inside = o2 >= 0 && o2 < g.out[2];
  const bool computes = exists && at.column < ring.columns && i2 < g.in[2];
  const int64_t plane = at.image * g.in[0] + at.o0, pitch = int64_t{g.out[2]} * g.channels;
  const int64_t from = plane * g.out[1] * pitch + int64_t{o2} * g.channels + channel;
  const int begin = at.begin + g.low[1] - (K - 1), limit = min(g.out[1], at.end + g.low[1]);  // of window rows
  const auto copy = [&](int slot, int first) {
#pragma unroll
    for (int r = 0; r < K; ++r) {
      if (copies) {
        const int to = (slot * K + r) * ring.reach;
        if (inside && first + r >= 0 && first + r < limit) {
          const int64_t offset = from + (first + r) * pitch;
          CopyAsync(reinterpret_cast<uint4*>(values + to), reinterpret_cast<const uint4*>(dy + offset));
          CopyAsync(winners + to, reinterpret_cast<const Winners*>(index + offset));
        } else {
          memset(winners + to, -1, sizeof(Winners));
        }
      }
    }
    CommitAsync();
  };
  float sum[K][N] = {};  // of the rows that the current windows have their last, ..., first cells in
  T* to = dx + (plane * g.in[1] + at.begin) * (int64_t{g.in[2]} * g.channels) + int64_t{i2} * g.channels + channel;
  int slot = 0, next = kRingStages - 1;
#pragma unroll
  for (int s = 0; s < kRingStages - 1; ++s) copy(s, begin + s * K);
#pragma unroll 1
  for (int step = begin; step < at.end + g.low[1]; step += K) {
    WaitAsync<kRingStages - 2>();
    __syncthreads();
    copy(next, step + (kRingStages - 1) * K);
    next = next == kRingStages - 1 ? 0 : next + 1;
    if (computes) {
#pragma unroll
      for (int u = 0; u < K; ++u) {
        const int i1 = step + u - g.low[1];  // the row of these windows' first cells, which they complete
#pragma unroll
        for (int c = 0; c < K; ++c) {
          const int cell = (slot * K + u) * ring.reach + c * ring.vectors;
          float v[N];
          {
            const Packed<T, N> packed = BitCast<Packed<T, N>>(values[cell]);
            Widen<T>(packed, v);
          }
          const Winners w = winners[cell];
#pragma unroll
          for (int k1 = 0; k1 < K; ++k1) {
            const unsigned wanted = (k1 * K + K - 1 - c) * 0x01010101u;
#pragma unroll
            for (int j = 0; j < N; ++j) AddIfByte(w.v[j / 4], wanted, j % 4, v[j], sum[(u + k1) % K][j]);
          }
        }
        float (&done)[N] = sum[u];
        if (i1 >= at.begin && i1 < at.end) {
          StorePacked<T, N>(to, Narrow<T, N>(done));
          to += int64_t{g.in[2]} * g.channels;
        }
#pragma unroll
        for (int j = 0; j < N; ++j) done[j] = 0;
      }
    }
    slot = slot == kRingStages - 1 ? 0 : slot + 1;
  }
}

// Launches RingGradKernel for windows of K x K cells, or otherwise().
template <int K, class T, class Otherwise>
cudaError_t LaunchRingGrad(const Geometry& g, const T* dy, const uint8_t* index, T* dx, cudaStream_t stream,
                           Otherwise&& otherwise) {
  constexpr int N = kVecLength<T>, kBytes = kRingStages * K * (16 + N);
  bool takes = g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 && g.in[0] == g.out[0] && g.batch > 0 &&
               g.channels > 0 && g.in[0] > 0;
  for (int d = 1; d < 3; ++d)
    takes = takes && g.window[d] == K && g.stride[d] == 1 && g.dilation[d] == 1 && g.in[d] > 0 && g.out[d] > 0;
  if (!takes) return otherwise();
  const Ring ring(g.batch * g.in[0], g.in[0], g.in[1], g.in[2], g.channels / N, K, RingResident(kBytes * kThreads, 3));
  if (ring.blocks > INT32_MAX) return otherwise();
  const Grid grid = {ring.blocks, ring.threads, static_cast<size_t>(kBytes * ring.reach)};
  return LaunchKernel(RingGradKernel<K, T>, grid, stream, g, ring, dy, index, dx);
}

}  // namespace jaxdnn::pool
