// Depthwise convolution on the tensor cores, of 16-bit floats in windows without stride: a line of the window is a band
// matrix. Of one channel, eight neighbouring results are the product of the 16 values that they see and a 16x8 matrix
// whose columns hold the line of the window, each a place below the one before. 16 such runs of results are a product's
// rows, so that 7 of 16 multiplications count for a line of seven taps, of a rate 16 times that of the CUDA cores. Of
// more than nine taps a line is several such matrices, one below the other.
//
// A block has 16 or 32 channels, of which a warp takes two or four, and eight strips of 16 results in a line, side by
// side or of other images. Lines of the operand come through a ring in shared memory with what strips side by side have
// in common; channels lie there as they do in memory. A load of a warp's channels of a pixel and the same of its
// neighbour make a register of each channel by permuting bytes. Where the window is one line, what follows eight strips
// are the next eight of the line. In the filter gradient of volumes, neighbouring planes are beside one another, and
// see as many planes of the operand and two more.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/conv/depthwise.cuh"
#include "cuda/conv/depthwise_plan.h"

namespace jaxdnn::conv::depthwise {

constexpr int kBandStrips = 8, kBandStrip = 16;  // of results
constexpr int kBandStages = 4;

// Windows of up to so many lines, and of as many columns as eight results see in 16 kSteps values; or, in the filter
// gradient, of kVolumeTaps planes, lines and columns.
template <int kLines_, int kSteps_, int kPlanes_ = 1>
struct Band {
  static constexpr int kLines = kLines_, kSteps = kSteps_, kPlanes = kPlanes_;
  static constexpr bool kOneLine = kLines == 1, kVolume = kPlanes > 1;
  static constexpr int kChannels = BandChannels(kLines);     // of a block
  static constexpr int kChunk = kVolume ? kVolumeChunk : 8;  // channels that a copy brings
  static constexpr int kChunks = kChannels / kChunk;
  static constexpr int kOwn = kLines > 7 ? 2 : 4;  // channels of a warp, whose lines all are in registers
  static constexpr int kWarps = kChannels / kOwn, kThreads = 32 * kWarps;
  // What a run of strips sees besides, and what its last strip's values are besides.
  static constexpr int kColumns = kVolume ? kVolumeTaps : BandColumns(kSteps), kHalo = kColumns - 1,
                       kBeyond = BandColumns(kSteps) - 1;
  static constexpr int kBlocks = BandBlocks(kLines, kColumns);  // of a multiprocessor
  static constexpr int kMostAcross = kVolume ? 2 : kBandStrips;
  static constexpr int kPixels = kBandStrips * kBandStrip + (kOneLine ? 1 : kBandStrips) * kHalo;  // of a line, at most
  using Own = std::conditional_t<kOwn == 4, uint2, uint32_t>;                                      // of a pixel

  // Where a pixel is in a line in shared memory, in bytes: a chunk's place is free after each pixel, and one more after
  // each strip, so that half a warp's loads of eight bytes find each bank twice, the fewest that chunks of 16 allow. Of
  // volumes, whose chunks are smaller, they find each once.
  static constexpr int kPitch = 2 * kChannels + 2 * kChunk, kGap = 16;
  __host__ __device__ static constexpr int PixelAt(int pixel) { return kPitch * pixel + pixel / kBandStrip * kGap; }
};

// Calls f with the least of them that has the problem's window.
template <class F>
auto VisitBand(const Problem& p, F&& f) {
  if (p.window[1] == 1) {
    if (p.window[2] <= BandColumns(2)) return f(Band<1, 2>());
    if (p.window[2] <= BandColumns(3)) return f(Band<1, 3>());
    return f(Band<1, 5>());
  }
  if (p.window[1] <= 5) return f(Band<5, 1>());
  if (p.window[1] <= 7) return f(Band<7, 1>());
  return f(Band<9, 1>());
}

// How the strips of a block lie: `across` side by side in a run, and runs of `beside` sequences, which are parts of
// `lines` lines of a plane of an image; where the window is one line, of as many times eight strips of its only line.
// Of volumes they are the same lines of neighbouring planes, some of which may not be there.
template <class B>
struct BandTile {
  int across_bits, beside, lines;
  FastDiv run_pixels, slabs, tiles, groups, parts, planes;  // tiles of columns; groups of sequences in a problem
  int sequences, depth;                                     // of a problem; planes that are there
  int64_t units;                                            // of one slab

  // Of the results or gradients `at`.
  BandTile(const Problem& p, int64_t channels, const PhasedAxis (&at)[kRank]) {
    const int64_t columns = at[2].out;
    across_bits = 0;
    int64_t least = INT64_MAX;
    depth = at[0].out;
    const auto planes_of = [&](int64_t count) { return B::kVolume ? CeilDiv(depth, count) * count : depth; };
    // Columns that are computed for nothing cost more than those that runs have in common. Of one line all are a run.
    for (int bits = 0; (1 << bits) <= B::kMostAcross; ++bits) {
      const int64_t cost =
          CeilDiv(columns, kBandStrip << bits) * ((kBandStrip << bits) + B::kHalo / 2) * planes_of(kBandStrips >> bits);
      if (B::kOneLine || cost < least) across_bits = bits, least = cost;
    }
    beside = kBandStrips >> across_bits;
    const int64_t all_planes = planes_of(beside);
    run_pixels = FastDiv(RunPixels());
    slabs = FastDiv(CeilDiv(channels, B::kChannels));
    const int64_t across = CeilDiv(columns, Columns()), height = B::kOneLine ? at[1].out * across : at[1].out;
    tiles = FastDiv(B::kOneLine ? 1 : across);
    planes = FastDiv(all_planes);
    // Short parts are even work for all multiprocessors, but have lines in common; a ring takes some lines to fill.
    constexpr int kStart = 6, kFewestLines = std::min(B::kLines, 7);
    least = INT64_MAX;
    int64_t best = 1;
    for (int64_t count = 1; count == 1 || count * kFewestLines <= height; ++count) {
      const int64_t each = CeilDiv(height, count), groups_of = CeilDiv(p.images * all_planes * count, beside);
      const int64_t blocks = p.batch * groups_of * tiles.divisor * slabs.divisor;
      const int64_t cost = CeilDiv(blocks, B::kBlocks * kMultiprocessors) * (each + B::kLines - 1 + kStart);
      if (cost < least) best = count, least = cost;
    }
    lines = int(CeilDiv(std::max<int64_t>(height, 1), best));
    parts = FastDiv(CeilDiv(height, lines));
    sequences = int(p.images * all_planes * parts.divisor);
    groups = FastDiv(CeilDiv(sequences, beside));
    units = sequences > 0 && height > 0 && columns > 0 ? p.batch * groups.divisor * tiles.divisor : 0;
  }

  __host__ __device__ int Across() const { return 1 << across_bits; }
  __host__ __device__ int Columns() const { return kBandStrip << across_bits; }
  __host__ __device__ int RunPixels() const { return Columns() + B::kHalo; }
  __host__ __device__ int Runs() const { return beside + B::kPlanes - 1; }  // of the operand
  // From one run to the next in shared memory.
  __host__ __device__ int RunBytes() const {
    const int least = B::PixelAt(Columns() + B::kBeyond - 1) + B::kPitch;
    // Strips of four lanes begin 32 bytes apart in the banks.
    const int apart = B::kVolume ? 16 * Across() : 0, modulo = B::kVolume ? 32 * Across() : 16;
    return apart + (least - apart + modulo - 1) / modulo * modulo;
  }
  __host__ __device__ int StripAt(int strip) const {
    return (strip >> across_bits) * RunBytes() + (strip & (Across() - 1)) * B::PixelAt(kBandStrip);
  }
  // Of a pixel's chunks, in bytes.
  __host__ __device__ int ChunkAt(int run, int pixel, int chunk) const {
    return run * RunBytes() + B::PixelAt(pixel) + chunk * 2 * B::kChunk;
  }
  __host__ __device__ int LineBytes() const { return (Runs() * RunBytes() + 15) / 16 * 16; }
};

// The part of an image's plane that a run of strips goes through, from its first line and column on. A step goes a line
// on, and where the window is one line, eight strips. Runs of a volume's operand are numbered as those of its results,
// from the first plane on that the first of these sees.
template <class B>
struct BandRun {
  int image, plane, line, column;  // the image counts through all problems
  bool there;

  __device__ BandRun(const BandTile<B>& t, int images, int problem, int group, int tile, int run) {
    const int sequence = group * t.beside + (B::kVolume ? 0 : run);
    there = sequence < t.sequences;
    int part;
    if constexpr (B::kVolume) {
      image = t.parts.Div(t.planes.Div(sequence, &plane), &part) + problem * images;
      plane += run;
      there = plane < t.depth;
    } else {
      image = t.planes.Div(t.parts.Div(there ? sequence : 0, &part), &plane) + problem * images;
    }
    line = B::kOneLine ? 0 : part * t.lines;
    column = (B::kOneLine ? part * t.lines : tile) * t.Columns();
  }

  // Steps in which there is a result `further` columns on, of so many lines and columns of results.
  __device__ int Steps(const BandTile<B>& t, int further, int lines, int columns) const {
    const int from = column + further, left = columns - from;
    if (!there || left <= 0) return 0;
    return min(t.lines, B::kOneLine ? (left + t.Columns() - 1) / t.Columns() : lines - line);
  }
};

// What a thread copies in a step: some chunks, each of a pixel of a run.
template <int kCopies>
struct BandCopy {
  const char* from[kCopies];
  uint32_t to[kCopies];
  int next[kCopies];  // where along the way that a step goes on

  // Starts the copies of the next step, which are `bytes` apart; zeros where it is outside.
  __device__ void Start(uint32_t stage, int apart, int extent, int64_t bytes) {
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      if (to[k] != ~0u)
        CopyAsync<16>(stage + to[k], from[k], static_cast<unsigned>(next[k]) < static_cast<unsigned>(extent));
      from[k] += bytes;
      next[k] += apart;
    }
  }
};

// A channel's 16-bit values of two pixels of which a thread has two or four channels.
__device__ inline uint32_t PairOf(uint32_t first, uint32_t second, int channel) {
  return __byte_perm(first, second, channel % 2 ? 0x7632 : 0x5410);
}
__device__ inline uint32_t PairOf(uint2 first, uint2 second, int channel) {
  return channel < 2 ? PairOf(first.x, second.x, channel) : PairOf(first.y, second.y, channel);
}

}  // namespace jaxdnn::conv::depthwise
