// Depthwise convolution of channels that are no whole chunks of 16 bytes, on Hopper: how lines come to shared memory.
//
// A line, pixels and channels, is one run of bytes. What a block reads of it is copied in bulk, in chunks that begin at
// multiples of 16 in memory, wherever pixels do, so that a few bytes around it come too. In shared memory elements lie
// at addresses that agree modulo 16 with those in memory, which differ from line to line. One warp copies; a thread of
// the others has one channel of a strip of pixels.
#pragma once

#include "cuda/common/hopper.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/conv/depthwise.cuh"
#include "cuda/conv/depthwise_plan.h"

namespace jaxdnn::conv {

// Windows of 3x3 taps, results kStride lines and columns apart.
template <class T_, int kStride_>
struct Unaligned {
  using T = T_;
  static constexpr int kTaps = 3, kStride = kStride_, kStrip = 7;  // results in a strip
  static constexpr int kHeld = (kTaps + kStride - 1) / kStride;    // lines of results that a line is part of
  static constexpr int kWidth = (kStrip - 1) * kStride + kTaps;    // of the operand's strip
  static constexpr int kLines = 2, kSteps = kLines / kStride;      // of the operand and of results, in a stage
  // A block's threads that multiply, and all of them; blocks of a multiprocessor; stages.
  static constexpr int kMost = kUnalignedChannels, kThreads = kMost + 32, kBlocks = 2, kStages = 3;
};

// What a block has of a line: strips side by side of all channels; or, of many channels, a slab of them, which is a
// piece of each pixel.
struct UnalignedTile {
  int width, strips, threads;
  int pieces, piece, pitch, bytes;  // of a line: pieces, and the bytes of one, between pixels, and in all

  UnalignedTile() = default;
  // Of `pixels` of an operand, `apart` more to each further strip.
  template <class U>
  UnalignedTile(U, int64_t channels, int64_t columns, int pixels, int apart) {
    constexpr int kSize = sizeof(typename U::T);
    const int64_t slabs = CeilDiv(channels, int64_t{U::kMost}), all = CeilDiv(columns, int64_t{U::kStrip});
    width = int(slabs > 1 ? CeilDiv(CeilDiv(channels, slabs), int64_t{32}) * 32 : channels);
    int64_t least = INT64_MAX;
    for (int n = 1; n == 1 || (n <= all && n * width <= U::kMost); ++n) {
      const int64_t warps = CeilDiv(n * width, 32), cost = CeilDiv(all, int64_t{n}) * warps;
      if (cost <= least) strips = n, threads = int(32 * warps + 32), least = cost;
    }
    pixels += (strips - 1) * apart;
    const int row = int(channels) * kSize;
    pieces = slabs > 1 ? pixels : 1;
    piece = slabs > 1 ? width * kSize : pixels * row;
    pitch = slabs > 1 ? piece + 32 + row % 16 : row;  // agrees with that in memory modulo 16
    bytes = int(CeilDiv((pieces - 1) * pitch + piece + 32, 16) * 16);
  }

  // Such blocks that run at once.
  template <class U>
  int64_t Places(U, int stage_bytes) const {
    constexpr int kSharedBytes = 224 << 10;
    return kMultiprocessors *
           std::clamp(std::min(U::kBlocks * U::kThreads / threads, kSharedBytes / (U::kStages * stage_bytes)), 1, 16);
  }
};

struct BulkCopy {
  const char* from;
  uint32_t to;
  int bytes;
};

// The piece of a line that a lane copies.
struct UnalignedCopy {
  int first, at, bytes, to;  // where in the line a stage begins; of the piece, in the line and in a stage
  const char* end;           // of the array

  // For pixels from number `pixel` of `extent` on, of channels from byte `channel` on.
  __device__ UnalignedCopy(const UnalignedTile& t, int pixel, int extent, int channel, int row, const char* end)
      : first(pixel * row + channel), end(end) {
    const int lane = threadIdx.x % 32;
    if (t.pieces > 1) {
      at = first + lane * row;
      bytes = lane < t.pieces && static_cast<unsigned>(pixel + lane) < static_cast<unsigned>(extent)
                  ? min(t.piece, row - channel)
                  : 0;
      to = lane * t.pitch;
    } else {
      at = max(first, 0);
      bytes = lane == 0 ? max(min(first + t.piece, extent * row) - at, 0) : 0;
      to = at - first;
    }
  }
  // Where a stage has its first byte, of a line at an address that ends so.
  __device__ int Shift(uint32_t line) const { return (line + first) & 15; }
  // The lane's copy to a stage. What is left of the array behind its last whole chunk comes at once.
  template <class T>
  __device__ BulkCopy Of(const char* line, uint32_t stage) const {
    const char* const piece = line + at;
    const int over = static_cast<int>(reinterpret_cast<uintptr_t>(piece)) & 15;
    BulkCopy c = {piece - over, stage + Shift(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(line))) + to - over,
                  bytes > 0 ? (over + bytes + 15) & ~15 : 0};
    if (c.bytes > 0 && c.from + c.bytes > end) {
      c.bytes -= 16;
      for (int i = c.bytes; c.from + i < end; i += sizeof(T))
        StoreElement(c.to + i, *reinterpret_cast<const T*>(c.from + i));
    }
    return c;
  }
};

// The barriers of a block's stages, at the beginning of its shared memory: one for a stage that is full, when all lanes
// that copy have arrived, and their bytes; one for a stage that all other threads have read.
template <int kStages>
struct UnalignedRing : hopper::RingPlace {
  static constexpr int kBytes = 16 * kStages;
  uint32_t barriers;

  __device__ UnalignedRing(const void* shared, int threads) : barriers(SharedAddress(shared)) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        hopper::InitBarrier(barriers + 16 * i, 32);
        hopper::InitBarrier(barriers + 16 * i + 8, threads - 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
  __device__ uint32_t Stages() const { return barriers + kBytes; }
  __device__ uint32_t Full() const { return barriers + 16 * stage; }
  __device__ void WaitEmpty() const { hopper::WaitBarrier(Full() + 8, parity ^ 1); }
  __device__ void WaitFull() const { hopper::WaitBarrier(Full(), parity); }
  // The barrier knows of all bytes before any can arrive.
  template <int kCopies>
  __device__ void Fill(const BulkCopy (&copies)[kCopies]) {
    int bytes = 0;
#pragma unroll
    for (const BulkCopy& c : copies) bytes += c.bytes;
    hopper::ArriveExpecting(Full(), bytes);
#pragma unroll
    for (const BulkCopy& c : copies)
      if (c.bytes > 0) hopper::CopyBulk(c.to, c.from, c.bytes, Full());
    Next(kStages);
  }
  // Reads must be over, not only begun, when the copy that comes next writes there. Strips of different warps share
  // pixels, so that each thread speaks for its own reads.
  __device__ void Release() {
    hopper::ShowSharedToTma();
    hopper::Arrive(Full() + 8);
    Next(kStages);
  }
};

// Pixels of a strip, `pitch` bytes apart.
template <class T, int kWidth>
__device__ void LoadUnaligned(uint32_t from, int pitch, float (&to)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (sizeof(T) == 4) {
      to[i] = __uint_as_float(LoadWord(from));
    } else {
      to[i] = WidenPair<T>(LoadElement<uint16_t>(from)).x;
    }
    from += pitch;
    asm("" : "+r"(from));  // from one address to the next takes the fewest instructions
  }
}

// Zeros for pixels outside a line.
template <int kWidth>
__device__ void ZeroOutside(int first, int extent, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (static_cast<unsigned>(first + i) >= static_cast<unsigned>(extent)) x[i] = 0;
}

// Lines of a segment: as many as make the blocks' turns the fewest steps, of which it takes some to fill a ring.
inline int SegmentOf(int64_t columns, int lines, int64_t places) {
  constexpr int kStart = 6;
  int best = std::max(lines, 1);
  int64_t least = INT64_MAX;
  for (int count = 1; count <= lines; ++count) {
    const int segment = int(CeilDiv(lines, count));
    const int64_t steps = CeilDiv(columns * CeilDiv(lines, segment), places) * (segment + kStart);
    if (steps < least) best = segment, least = steps;
  }
  return best;
}

// Calls f with how the problem is computed.
template <class T, class F>
auto VisitUnaligned(const Problem& p, F&& f) {
  return p.stride[2] == 2 ? f(Unaligned<T, 2>{}) : f(Unaligned<T, 1>{});
}

}  // namespace jaxdnn::conv
