// What the kernels of depthwise convolution in large windows share: blocks of eight channels, whose pixels lie in
// shared memory in planes, so that neighbours of one channel lie side by side and ldmatrix reads the rows of products.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/conv/depthwise.cuh"
#include "cuda/conv/depthwise_plan.h"

namespace jaxdnn::conv::depthwise {

// Strips of 16 results in a line are a product's rows: eight of them, side by side or in `beside` lines, a set.
struct WideTile {
  static constexpr int kChannels = 8, kSets = 14, kStrips = kWideStrips, kStrip = kWideStrip;
  static constexpr int kThreads = 512, kParts = kThreads / 32 / kChannels, kSums = kSets / kParts;
  // Words of a line of the window: pairs of taps that begin with an even one and, apart by half the banks, an odd one.
  // Four come before the first.
  static constexpr int kOddTaps = 44, kLineTaps = 72, kBeforeTaps = 4;
  // Floats of a strip's results, and of a channel's.
  static constexpr int kStaged = 24, kStagedChannel = kSets * kStrips * kStaged;

  int across_bits, beside, sets, in_lines, pitch;  // pitch of lines in shared memory, bytes
  FastDiv chunks, tiles, blocks, planes;           // eights of channels; of columns; of lines
  FastDiv pairs, pairs_y;                          // of pixels of a line, with what a window sees besides or without

  // Blocks of so many sets of the results or gradients `at`, which see 16 `steps` values.
  WideTile(const PhasedAxis (&at)[kRank], int channels, int steps, int sets) : sets(sets) {
    across_bits = WideAcrossBits(at[2].out);
    beside = kStrips >> across_bits;
    in_lines = Lines() + at[1].window - 1;
    // An odd number of 16 bytes: rows of different lines are in different banks.
    pitch = ((2 << across_bits) + 2 * steps - 1) * 16;
    chunks = FastDiv(channels / kChannels);
    tiles = FastDiv(CeilDiv(at[2].out, Columns()));
    blocks = FastDiv(CeilDiv(at[1].out, Lines()));
    planes = FastDiv(at[0].out);
    pairs = FastDiv(pitch / 4);
    pairs_y = FastDiv(PitchY() / 4);
  }
  __host__ __device__ int Columns() const { return kStrip << across_bits; }
  __host__ __device__ int Lines() const { return sets * beside; }
  __host__ __device__ int PitchY() const { return ((2 << across_bits) + 1) * 16; }
  __host__ __device__ int PlaneBytes() const { return in_lines * pitch; }
};

// Eight channels of two neighbouring pixels into planes of shared memory `plane_bytes` apart.
__device__ inline void StorePixels(char* to, int plane_bytes, const uint4& first, const uint4& second) {
  const uint32_t left[] = {first.x, first.y, first.z, first.w}, right[] = {second.x, second.y, second.z, second.w};
#pragma unroll
  for (int c = 0; c < 8; ++c)
    *reinterpret_cast<uint32_t*>(to + c * plane_bytes) =
        __byte_perm(left[c / 2], right[c / 2], c % 2 ? 0x7632 : 0x5410);
}

// Brings a line's pixels from `first` on, and further lines', into planes of shared memory `plane_bytes` apart; lines
// are as many pairs of pixels as `pairs` says. Zeros for what is outside `extents`.
template <class T>
__device__ void LoadPlanes(char* to, int plane_bytes, FastDiv pairs, int lines, const char* from, int first_line,
                           int first, int line_extent, int extent, int64_t line_bytes, int pixel_bytes) {
#pragma unroll 4
  for (int i = threadIdx.x; i < lines * static_cast<int>(pairs.divisor); i += blockDim.x) {
    int at;
    const int line = pairs.Div(i, &at) + first_line;
    uint4 two[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = first + 2 * at + e;
      two[e] = {0, 0, 0, 0};
      if (static_cast<unsigned>(line) < static_cast<unsigned>(line_extent) &&
          static_cast<unsigned>(column) < static_cast<unsigned>(extent))
        two[e] = __ldg(reinterpret_cast<const uint4*>(from + line * line_bytes + int64_t{column} * pixel_bytes));
    }
    StorePixels(to + i * 4, plane_bytes, two[0], two[1]);
  }
}

// Where a row of ldmatrix begins: of a set's strip lane % 8, and 8 `values` on.
__device__ inline uint32_t SetRow(const WideTile& t, const char* plane, int pitch, int values) {
  const int strip = threadIdx.x % 8;
  return SharedAddress(plane) + (strip >> t.across_bits) * pitch +
         (strip & ((1 << t.across_bits) - 1)) * 2 * WideTile::kStrip + 16 * values;
}

// Of the operand: the second matrix of a product's rows is that of the next eight results, which is the third too.
__device__ inline uint32_t SetRow(const WideTile& t, const char* plane) {
  return SetRow(t, plane, t.pitch, (threadIdx.x % 32 / 8 + 1) / 2);
}

}  // namespace jaxdnn::conv::depthwise
