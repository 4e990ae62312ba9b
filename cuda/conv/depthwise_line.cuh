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

// How channels of the operand and of the result belong together: one to one; results of a pair share a channel of the
// operand; or the operand's, of a pair or of several side by side, are summed in one result.
enum class Pairing { kPlain, kShared, kSummed };
template <Pairing kPairing>
using PairingTag = std::integral_constant<Pairing, kPairing>;

// Lanes have kPairs pairs of neighbouring channels, of as many strips as there are lanes for.
template <class T, int kPairs_, Pairing kPairing_ = Pairing::kPlain>
struct Lanes {
  using Type = T;
  static constexpr Pairing kPairing = kPairing_;
  static constexpr int kPairs = kPairs_, kStrips = 32 / kPairs;
  // What a pair reads of a pixel. Where more than two results share a channel, a slab reads less than it copies: half
  // of that or less, which may begin anywhere in its first chunk.
  using Value = std::conditional_t<kPairing == Pairing::kShared, T, Pair<T>>;
  static constexpr int kPixelBytes = kPairs * sizeof(Value), kChunks = kPixelBytes / 16;

  // The byte of a pixel that the chunks begin at that a slab copies, and that of these which a lane's pair begins at.
  __device__ static int FirstChunk(int slab, FastDiv features) {
    return kPairing == Pairing::kShared ? Shared(slab * kPairs, features) & ~15 : slab * kPixelBytes;
  }
  __device__ static int Within(int slab, int lane, FastDiv features) {
    if (kPairing != Pairing::kShared) return lane % kPairs * static_cast<int>(sizeof(Value));
    return Shared(slab * kPairs + lane % kPairs, features) - FirstChunk(slab, features);
  }

  __device__ static float2 Read(const char* from) {
    const Value value = *reinterpret_cast<const Value*>(from);
    if constexpr (kPairing == Pairing::kShared) {
      const float wide = static_cast<float>(value);
      return {wide, wide};
    } else {
      return ToFloats<T>(value);
    }
  }

 private:
  // Where the channel is that a pair of results shares.
  __device__ static int Shared(int pair, FastDiv features) {
    return features.Div(2 * pair) * static_cast<int>(sizeof(T));
  }
};

// Lines of a ring: as many as fit into a warp's part of shared memory.
constexpr int RingStages(int bytes) {
  constexpr int kRingBytes = 12 << 10;
  return std::clamp(kRingBytes / bytes, 3, 8);
}

// The part of a line that a warp copies: kPixels neighbours of which a lane copies some chunks. Those of a phase's line
// are `step` bytes apart. kEdges: pixels beyond an edge may be others of the line, which is whole.
template <class L, int kPixels, bool kEdges = false>
struct LineCopy {
  static constexpr int kBytes = kPixels * L::kPixelBytes;
  static constexpr int kCopies = (kBytes / 16 + 31) / 32, kApart = 32 / L::kChunks;  // by a lane; pixels between them
  unsigned there = 0;                                                                // bit k: copy k is of the operand
  int lane, step;                                                                    // between pixels, in bytes
  int pixels[kEdges ? kCopies : 1];                                                  // the lane's, or the first of them

  // Pixels from number `first_pixel` of a line on; the warp's channels begin at byte `at` of a pixel's bytes.
  __device__ LineCopy(int first_pixel, const Edges& edges, int at, int pixel_bytes, int64_t step)
      : lane(threadIdx.x % 32), step(kEdges ? pixel_bytes : static_cast<int>(step)) {
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
  __device__ int64_t Offset() const { return (kEdges ? 0 : int64_t{pixels[0]} * step) + lane % L::kChunks * 16; }
  // Starts the lane's copies of a line, whose first chunk is `Offset` before `from`; zeros if it is outside.
  __device__ void Start(uint32_t to, const char* from, bool inside) const {
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      Copy(k, to, kEdges ? from + int64_t{pixels[k]} * step : from, inside);
      if (kEdges) continue;
      from += kApart * step;
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
