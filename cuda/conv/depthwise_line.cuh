// How warps of the depthwise kernels bring lines of an operand into shared memory: what their strips of a line read, 16
// bytes at a time, lines ahead of where they are read. What is outside the operand is filled with zeros on the way,
// strips side by side share what they have in common, and reading takes no addresses: few instructions are left beside
// the products.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/conv/depthwise.cuh"
#include "cuda/conv/edges.cuh"

namespace jaxdnn::conv {

constexpr int kDepthwiseWarps = kDepthwiseThreads / 32;

// Lanes have kPairs pairs of neighbouring channels, of as many strips as there are lanes for.
template <class T, int kPairs_>
struct Lanes {
  static constexpr int kPairs = kPairs_, kStrips = 32 / kPairs;
  static constexpr int kPixelBytes = kPairs * sizeof(Pair<T>), kChunks = kPixelBytes / 16;
};

// Lines of a ring: as many as fit into a warp's part of shared memory.
constexpr int RingStages(int bytes) {
  constexpr int kRingBytes = 12 << 10;
  return std::clamp(kRingBytes / bytes, 3, 8);
}

// The part of a line that a warp copies: kPixels neighbours of which a lane copies some chunks.
template <class L, int kPixels>
struct LineCopy {
  static constexpr int kBytes = kPixels * L::kPixelBytes;
  static constexpr int kCopies = (kBytes / 16 + 31) / 32, kApart = 32 / L::kChunks;  // by a lane; pixels between them
  unsigned there = 0;                                                                // bit k: copy k is of the operand
  int lane, step, first;                                                             // the lane's first pixel
  bool mapped;  // whether pixels of the warp are beyond an edge, and not zeros

  // Pixels from number `first_pixel` of a line on; the warp's channels begin at byte `at` of a pixel's bytes.
  __device__ LineCopy(int first_pixel, const Edges& edges, int at, int pixel_bytes) : lane(threadIdx.x % 32) {
    step = kApart * pixel_bytes;
    first = first_pixel + lane / L::kChunks;
    mapped = edges.mapped && (first_pixel < 0 || first_pixel + kPixels > edges.extent);
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      int pixel = first + kApart * k;
      const bool exists = static_cast<unsigned>(pixel) < static_cast<unsigned>(edges.extent);
      if (at + lane % L::kChunks * 16 < pixel_bytes && (exists || (edges.mapped && edges.FindAny(&pixel))))
        there |= 1u << k;
    }
  }
  // Of the lane's first chunk, from the first pixel's first channel.
  __device__ int64_t Offset(int pixel_bytes) const {
    return int64_t{lane / L::kChunks} * pixel_bytes + lane % L::kChunks * 16;
  }
  // Starts the lane's copies from the line whose first chunk is at `from`; zeros if it is outside.
  __device__ void Start(uint32_t to, const char* from, bool inside) const {
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      Copy(k, to, from, inside);
      from += step;
      Keep(from);
    }
  }
  // As Start, of pixels of which some are `mapped`; in fewer instructions, which take longer.
  __device__ void StartMapped(uint32_t to, const char* from, bool inside, const Edges& edges) const {
#pragma unroll 1
    for (int k = 0; k < kCopies; ++k) {
      const int pixel = first + kApart * k;
      int at = pixel;
      edges.Find(&at);
      Copy(k, to, from + int64_t{at - pixel} * (step / kApart), inside);
      from += step;
    }
  }

 private:
  __device__ void Copy(int k, uint32_t to, const char* from, bool inside) const {
    if (k < kCopies - 1 || lane < kBytes / 16 - 32 * k)
      CopyAsync<16>(to + (32 * k + lane) * 16, from, inside && (there >> k & 1));
  }
};

// Calls f with the number of pairs that waste the fewest lanes on `channels` in `strips`.
template <class F>
auto VisitPairs(int64_t channels, int64_t strips, F&& f) {
  const int64_t pairs = CeilDiv(channels, 2);
  if (CeilDiv(pairs, 16) * CeilDiv(strips, 2) <= CeilDiv(pairs, 32) * strips)
    return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, 32>{});
}

}  // namespace jaxdnn::conv
