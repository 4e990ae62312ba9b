// What the depthwise kernels of 3x3x3 windows share: blocks whose threads follow one another without gaps, over pairs
// of channels and strips side by side, and go down the lines of a plane of results. The lines that a step needs pass
// through a ring in shared memory, so that what strips and planes have in common comes once, and what is outside as
// zeros.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/common/shared_bytes.cuh"
#include "cuda/conv/depthwise.cuh"

namespace jaxdnn::conv {

struct VolumeTile {
  static constexpr int kTaps = 3, kStrip = 4, kStages = 4;
  static constexpr int kMostThreads = 384, kMostPairs = 64, kCopies = 3, kChunkPairs = 2;
  int width, strips, threads;  // pairs of channels, a whole number of chunks; strips side by side
  FastDiv pairs, strip, chunks;

  VolumeTile(int64_t channels, int64_t columns) {
    const int64_t all = CeilDiv(channels, 2), slabs = CeilDiv(all, kMostPairs);
    width = int(CeilDiv(CeilDiv(all, std::max<int64_t>(slabs, 1)), kChunkPairs)) * kChunkPairs;
    // As many in every tile of a line.
    const int64_t line = std::max<int64_t>(CeilDiv(columns, kStrip), 1);
    strips = int(CeilDiv(line, CeilDiv(line, kMostThreads / std::max(width, 1))));
    threads = int(CeilDiv(width * strips, 32)) * 32;
    pairs = FastDiv(width);
    strip = FastDiv(strips);
    chunks = FastDiv(width / kChunkPairs);
  }

  // Of a line of the operand that the windows gather.
  __host__ __device__ int Pixels() const { return strips * kStrip + kTaps - 1; }

  // Whether there is work for the lanes, and threads for the copies.
  bool Fits() const { return threads >= 64 && Pixels() * width <= kChunkPairs * kCopies * threads; }

  // Of a device.
  int Places() const { return kMultiprocessors * (kMostThreads / threads); }
};

// A block's copies of `pixels` neighbours of lines, in chunks of four channels.
template <class T>
struct VolumeCopy {
  static constexpr int kChunk = VolumeTile::kChunkPairs * sizeof(Pair<T>);
  int offset[VolumeTile::kCopies];
  int threads, count, bytes;  // chunks and bytes of a line
  unsigned there = 0;

  // Pixels from number `first` of a line of `extent` on; the block's channels begin at byte `at` of a pixel's bytes.
  __device__ VolumeCopy(const VolumeTile& tile, int pixels, int first, int extent, int at, int pixel_bytes)
      : threads(tile.threads), count(pixels * static_cast<int>(tile.chunks.divisor)), bytes(count * kChunk) {
#pragma unroll
    for (int k = 0; k < VolumeTile::kCopies; ++k) {
      int chunk;
      const int pixel = tile.chunks.Div(static_cast<int>(threadIdx.x) + threads * k, &chunk);
      offset[k] = pixel * pixel_bytes + chunk * kChunk;
      if (static_cast<unsigned>(first + pixel) < static_cast<unsigned>(extent) && at + chunk * kChunk < pixel_bytes)
        there |= 1u << k;
    }
  }

  // Starts the copies of a line of each of kPlanes planes, of those that are bits of `inside`, and of zeros otherwise.
  template <int kPlanes>
  __device__ void Start(uint32_t to, const char* from, int64_t plane_step, unsigned inside) const {
#pragma unroll
    for (int k = 0; k < VolumeTile::kCopies; ++k) {
      const int at = threadIdx.x + threads * k;
      if (at >= count) break;
      const char* chunk = from + offset[k];
      const unsigned valid = there >> k & 1 ? inside : 0;
#pragma unroll
      for (int d = 0; d < kPlanes; ++d) {
        CopyAsync<kChunk>(to + d * bytes + at * kChunk, chunk, valid >> d & 1);
        chunk += plane_step;
      }
    }
  }
};

// Which of kPlanes planes from number `first` on are inside.
template <int kPlanes>
__device__ unsigned PlanesInside(int first, int extent) {
  unsigned inside = 0;
#pragma unroll
  for (int d = 0; d < kPlanes; ++d)
    if (static_cast<unsigned>(first + d) < static_cast<unsigned>(extent)) inside |= 1u << d;
  return inside;
}

}  // namespace jaxdnn::conv
