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

// The part of a line that a warp copies: kPixels neighbours of which a lane copies some chunks. kEdges: pixels beyond
// an edge may be others of the line.
template <class L, int kPixels, bool kEdges = false>
struct LineCopy {
  static constexpr int kBytes = kPixels * L::kPixelBytes;
  static constexpr int kCopies = (kBytes / 16 + 31) / 32, kApart = 32 / L::kChunks;  // by a lane; pixels between them
  unsigned there = 0;                                                                // bit k: copy k is of the operand
  int lane, pixel_bytes;
  int pixels[kEdges ? kCopies : 1];  // the lane's, or the first of them

  // Pixels from number `first_pixel` of a line on; the warp's channels begin at byte `at` of a pixel's bytes.
  __device__ LineCopy(int first_pixel, const Edges& edges, int at, int pixel_bytes)
      : lane(threadIdx.x % 32), pixel_bytes(pixel_bytes) {
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      int pixel = first_pixel + lane / L::kChunks + kApart * k;
      if (!kEdges && k == 0) pixels[0] = pixel;
      const bool exists =
          kEdges ? edges.FindAny(&pixel) : static_cast<unsigned>(pixel) < static_cast<unsigned>(edges.extent);
      if (kEdges) pixels[k] = pixel;
      if (at + lane % L::kChunks * 16 < pixel_bytes && exists) there |= 1u << k;
    }
  }
  // Of the lane's chunks in a pixel and, without edges, its first pixel, from the line's first chunk of the warp.
  __device__ int64_t Offset() const { return (kEdges ? 0 : int64_t{pixels[0]} * pixel_bytes) + lane % L::kChunks * 16; }
  // Starts the lane's copies of a line, whose first chunk is `Offset` before `from`; zeros if it is outside.
  __device__ void Start(uint32_t to, const char* from, bool inside) const {
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      Copy(k, to, kEdges ? from + int64_t{pixels[k]} * pixel_bytes : from, inside);
      if (kEdges) continue;
      from += kApart * pixel_bytes;
      Keep(from);
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
