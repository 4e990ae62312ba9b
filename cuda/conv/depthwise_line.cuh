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

// What lanes read of a line: a warp has `width` pairs of neighbouring channels, 32 of one strip of pixels, or 16 of two
// strips side by side. Then the first half of a pixel in shared memory is of one strip, and the other half is of the
// other's pixel.
template <class T, Pairing kPairing_ = Pairing::kPlain>
struct Lanes {
  using Type = T;
  static constexpr Pairing kPairing = kPairing_;
  // What a pair reads of a pixel. Where more than two results share a channel, a slab reads less than it copies: half
  // of that or less, which may begin anywhere in its first chunk.
  using Value = std::conditional_t<kPairing == Pairing::kShared, T, Pair<T>>;
  static constexpr int kPixelBytes = 32 * sizeof(Value), kChunks = kPixelBytes / 16;

  // The byte of a pixel that the chunks begin at that a slab copies, and where a lane's pair is in a pixel in shared
  // memory.
  __device__ static int FirstChunk(int slab, int width, FastDiv features) {
    return kPairing == Pairing::kShared ? Shared(slab * width, features) & ~15
                                        : slab * width * static_cast<int>(sizeof(Value));
  }
  __device__ static int Within(int slab, int width, int lane, FastDiv features) {
    if (kPairing != Pairing::kShared) return lane * static_cast<int>(sizeof(Value));
    return lane / width * (kPixelBytes / 2) + Shared(slab * width + lane % width, features) -
           FirstChunk(slab, width, features);
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

// The part of a line that a warp copies: kPixels neighbours of each strip, of which a lane copies some chunks. Those of
// a phase's line are `step` bytes apart. kEdges: pixels beyond an edge may be others of the line, which is whole.
template <class L, int kPixels, bool kEdges = false>
struct LineCopy {
  static constexpr int kBytes = kPixels * L::kPixelBytes;
  static constexpr int kCopies = (kBytes / 16 + 31) / 32, kApart = 32 / L::kChunks;  // by a lane; pixels between them
  unsigned there = 0;                                                                // bit k: copy k is of the operand
  int lane, step, chunk;                                                             // in bytes, of a pixel
  int pixels[kEdges ? kCopies : 1];                                                  // the lane's, or the first of them

  // Pixels from number `first_pixel` of a line on, and those of a second strip `strip` pixels later; the warp's
  // channels begin at byte `at` of a pixel's bytes.
  __device__ LineCopy(int first_pixel, int width, int strip, const Edges& edges, int at, int pixel_bytes, int64_t step)
      : lane(threadIdx.x % 32), step(kEdges ? pixel_bytes : static_cast<int>(step)) {
    const int chunks = width == 32 ? L::kChunks : L::kChunks / 2, number = lane % L::kChunks;
    const bool second = number >= chunks;
    chunk = (second ? number - chunks : number) * 16;
    first_pixel += (second ? strip : 0) + lane / L::kChunks;
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      int pixel = first_pixel + kApart * k;
      if (!kEdges && k == 0) pixels[0] = pixel;
      const bool exists =
          kEdges ? edges.FindAny(&pixel) : static_cast<unsigned>(pixel) < static_cast<unsigned>(edges.extent);
      if (kEdges) pixels[k] = pixel;
      if (at + chunk < pixel_bytes && exists) there |= 1u << k;
    }
  }
  // Of the lane's chunks in a pixel and, without edges, its first pixel, from the line's first chunk of the warp.
  __device__ int64_t Offset() const { return (kEdges ? 0 : int64_t{pixels[0]} * step) + chunk; }
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

// How many pairs of a warp waste the fewest lanes on `channels` in `strips`.
inline int PairsOfWarp(int64_t channels, int64_t strips) {
  const int64_t pairs = CeilDiv(channels, 2);
  return CeilDiv(pairs, 16) * CeilDiv(strips, 2) <= CeilDiv(pairs, 32) * strips ? 16 : 32;
}

}  // namespace jaxdnn::conv
