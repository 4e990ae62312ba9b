// Depthwise convolution on the tensor cores, of 16-bit floats in windows without stride: a line of the window is a band
// matrix. Of one channel, eight neighbouring results are the product of the 16 values that they see and a 16x8 matrix
// whose columns hold the line of the window, each a place below the one before. 16 such runs of results are a product's
// rows, so that 7 of 16 multiplications count for a line of seven taps, of a rate 16 times that of the CUDA cores.
//
// A block has 32 channels, of which a warp takes four, and eight strips of 16 results in a line, side by side or of
// other images. Lines of the operand come through a ring in shared memory with what strips side by side have in common;
// channels lie there as they do in memory. A load of four channels of a pixel and the same of its neighbour make a
// register of each channel by permuting bytes.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/conv/depthwise.cuh"

namespace jaxdnn::conv::depthwise {

constexpr int kBandThreads = 128, kBandWarps = kBandThreads / 32;
constexpr int kBandChannels = 16, kBandChunks = kBandChannels / 8;  // of a block; 16 bytes each
constexpr int kBandStrips = 8, kBandStrip = 16, kBandHalo = 8;      // of results; what a run of strips sees besides
constexpr int kBandStages = 4;

// Where a pixel's chunks are in a line in shared memory, in chunks: pixels are five apart, and strips one more, so that
// half a warp's loads of eight bytes find each bank twice, the fewest that chunks of 16 allow.
__host__ __device__ constexpr int BandChunk(int pixel) { return (kBandChunks + 1) * pixel + pixel / kBandStrip; }

// How the strips of a block lie: `across` side by side in a run, and runs of `beside` sequences, which are parts of
// `lines` lines of a plane of an image.
struct BandTile {
  static constexpr int kFewestLines = 7;
  int across_bits, beside, lines;
  FastDiv run_pixels, slabs, tiles, groups, parts, planes;  // tiles of columns; groups of sequences in a problem
  int sequences;                                            // of a problem
  int64_t units;                                            // of one slab

  // Of the results or gradients of `columns` in `height` lines in `planes` planes, seen through `taps` lines.
  BandTile(const Problem& p, int64_t channels, int64_t plane_count, int64_t height, int64_t columns, int taps) {
    // Columns that are computed for nothing cost more than those that runs have in common.
    int64_t least = INT64_MAX;
    across_bits = 0;
    for (int bits = 0; (1 << bits) <= kBandStrips; ++bits) {
      const int64_t cost = CeilDiv(columns, kBandStrip << bits) * ((kBandStrip << bits) + kBandHalo / 2);
      if (cost < least) across_bits = bits, least = cost;
    }
    beside = kBandStrips >> across_bits;
    run_pixels = FastDiv(RunPixels());
    slabs = FastDiv(CeilDiv(channels, kBandChannels));
    tiles = FastDiv(CeilDiv(columns, kBandStrip << across_bits));
    planes = FastDiv(plane_count);
    // Short parts are even work for all multiprocessors, but have lines in common; a ring takes some lines to fill.
    constexpr int kStart = 6;
    least = INT64_MAX;
    int64_t best = 1;
    for (int64_t count = 1; count == 1 || count * kFewestLines <= height; ++count) {
      const int64_t each = CeilDiv(height, count), groups_of = CeilDiv(p.images * plane_count * count, beside);
      const int64_t blocks = p.batch * groups_of * tiles.divisor * slabs.divisor;
      const int64_t cost = CeilDiv(blocks, 2 * kMultiprocessors) * (each + taps - 1 + kStart);
      if (cost < least) best = count, least = cost;
    }
    lines = int(CeilDiv(std::max<int64_t>(height, 1), best));
    parts = FastDiv(CeilDiv(height, lines));
    sequences = int(p.images * plane_count * parts.divisor);
    groups = FastDiv(CeilDiv(sequences, beside));
    units = sequences > 0 && height > 0 && columns > 0 ? p.batch * groups.divisor * tiles.divisor : 0;
  }

  __host__ __device__ int Across() const { return 1 << across_bits; }
  __host__ __device__ int RunPixels() const { return (kBandStrip << across_bits) + kBandHalo; }
  // From one run to the next in shared memory.
  __host__ __device__ int RunChunks() const { return BandChunk(RunPixels() - 1) + kBandChunks + 1; }
  __host__ __device__ int StripChunk(int strip) const {
    return (strip >> across_bits) * RunChunks() + (strip & (Across() - 1)) * BandChunk(kBandStrip);
  }
  __host__ __device__ int LineBytes() const { return beside * RunChunks() * 16; }
};

// The part of an image's plane that a run of strips goes through.
struct BandRun {
  int image, plane, line;  // its first; the image counts through all problems
  bool there;

  __device__ BandRun(const BandTile& t, int images, int problem, int group, int run) {
    const int sequence = group * t.beside + run;
    there = sequence < t.sequences;
    int part;
    image = t.planes.Div(t.parts.Div(there ? sequence : 0, &part), &plane) + problem * images;
    line = part * t.lines;
  }
};

// What a thread copies of a line: some chunks, each of a pixel of a run.
template <int kCopies>
struct BandCopy {
  const char* from[kCopies];
  uint32_t to[kCopies];
  int line[kCopies];  // the next

  // Starts the copies of the next line; zeros where it is outside.
  __device__ void Start(uint32_t stage, int lines, int64_t line_bytes) {
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      if (to[k] != ~0u)
        CopyAsync<16>(stage + to[k], from[k], static_cast<unsigned>(line[k]) < static_cast<unsigned>(lines));
      from[k] += line_bytes;
      ++line[k];
    }
  }
};

// A channel's 16-bit values of two pixels of which a thread has four channels.
__device__ inline uint32_t PairOf(uint2 first, uint2 second, int channel) {
  return channel < 2 ? __byte_perm(first.x, second.x, channel % 2 ? 0x7632 : 0x5410)
                     : __byte_perm(first.y, second.y, channel % 2 ? 0x7632 : 0x5410);
}

}  // namespace jaxdnn::conv::depthwise
