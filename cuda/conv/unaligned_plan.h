// What the kernels of unaligned channels (unaligned.h) take, how they cut it up, and how long that takes. A data
// gradient is the forward convolution that AsForward makes of it. Plain host declarations.
//
// Their rows are the pixels of all images with some of the padding: a line has what is to its left, and that is also to
// the right of the line before; so it is with the lines of a plane. Padding that is not zeros is there on both sides.
// On these every tap of the window is so many pixels away, wherever the window is, and a tile's operand is one strip of
// pixels, which lies in shared memory once for all taps. Rows that are no pixels of the result are computed for
// nothing.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// The rows of some planes: pixels of a line, and lines of a plane, with their padding.
struct UnalignedRows {
  int line, lines;

  explicit UnalignedRows(const Problem& p);
  int64_t Rows(int64_t planes) const { return planes * lines * line; }
  // Of an array of so many planes in chunks of 16 bytes (unaligned_pack.cuh), and as many zeros as a strip is long.
  int64_t PackedBytes(int64_t planes, int64_t chunks, int64_t strip) const {
    return (Rows(planes) + strip) * chunks * 16;
  }
};

struct UnalignedPlan {
  static constexpr int kColumns = 72;  // of a tile
  static constexpr int kWarpgroupRows = 128, kWarpgroups = 2;
  static constexpr int kStepBytes = 32;  // of a pixel's channels, that one product takes
  static constexpr int kMostSteps = 5;   // of a slice of the channels
  static constexpr int kMostSlabs = 8;   // of the filter's parts that are in shared memory, unless all of them are

  static constexpr int kRows = kWarpgroups * kWarpgroupRows;  // of a tile

  int columns;  // of a tile
  int column_tiles;
  int line, lines;  // pixels of a line, and lines of a plane
  int64_t all_rows;
  int tap_lines;      // of the window, that a strip holds: all or one
  int groups;         // of as many of the window's lines
  int steps, slices;  // of a slice, and slices of the channels
  int pixels;         // of a strip: an odd number, so that its chunks lie in different banks
  int slabs;          // the filter's, of a tap and slice each

  bool Fit(const Problem& p);

  int StripBytes() const { return pixels * steps * kStepBytes; }
  int SlabBytes() const { return kColumns * steps * kStepBytes; }
  int64_t FilterBytes(const Problem& p) const { return int64_t{column_tiles} * slices * p.Taps() * SlabBytes(); }
  int SharedBytes() const;
  int64_t Tiles() const { return (all_rows + kRows - 1) / kRows * column_tiles; }
};

// The same where all of the filter and a ring of rows fit into shared memory: units of 64 rows, a run of them for each
// block, which brings every row once.
struct UnalignedStreamPlan {
  static constexpr int kUnit = 64, kPieces = 4, kMostSlots = 24;  // pieces on their way
  static constexpr int kWarpgroups = 2;                           // that multiply
  static constexpr int kBarrierBytes = (kPieces + kMostSlots + 2 + kWarpgroups) * 16;

  int64_t all_rows;
  int row_bytes, steps, taps;
  int ahead, slots;  // pieces of 64 rows that a unit reads; and that the ring holds, where the first is twice

  bool Fit(const Problem& p);
  int64_t Units() const { return (all_rows + kUnit - 1) / kUnit; }
  int RingRows() const { return (slots + 1) * kUnit; }
  int RingBytes() const { return RingRows() * steps * UnalignedPlan::kStepBytes; }
  int SlabBytes() const { return UnalignedPlan::kColumns * steps * UnalignedPlan::kStepBytes; }
  int64_t FilterBytes(const Problem& p) const { return p.Taps() * SlabBytes(); }
  // As it lies in memory, with what may be read behind its last row, where that lies, and its rows' pixels.
  int PieceBytes() const {
    return (kUnit * row_bytes + 31) / 16 * 16 + steps * UnalignedPlan::kStepBytes + 16 + kUnit * 4;
  }
  int SharedBytes() const {
    return RingBytes() + taps * SlabBytes() + kPieces * PieceBytes() + slots * kUnit * 4 + kBarrierBytes;
  }
};

// Of the filter gradient: a block's units of the result's rows are of one line of the window, and of up to 64 channels
// and those that are left over.
struct UnalignedFilterPlan : UnalignedRows {
  static constexpr int kRows = 128, kUnits = 4;  // of a tile; of a block
  static constexpr int kMostStages = 4, kMostChunks = 10, kBarrierBytes = 128;

  int64_t all_rows;
  int columns, column_tiles;
  int whole_groups, channel_groups;  // of 64 channels, and all
  int left, left_units;              // eights of channels that are left over, and units of single ones
  bool appended;                     // to the last whole group
  int unit_groups, pixels, stages;

  explicit UnalignedFilterPlan(const Problem& p);
  static constexpr int64_t ChunksOf(int64_t channels) { return (channels + 7) / 8; }
  int64_t XPackedBytes(const Problem& p) const;
  int64_t YPackedBytes(const Problem& p) const;
  static constexpr int XBytes(int pixels) { return pixels * kMostChunks * 16; }
  static constexpr int StageBytes(int pixels) { return XBytes(pixels) + kRows * UnalignedPlan::kColumns * 2; }
  int SharedBytes() const { return kBarrierBytes + stages * StageBytes(pixels); }
  int64_t Tiles() const { return (all_rows + kRows - 1) / kRows; }
  int64_t BlocksOfSlice(const Problem& p) const {
    return p.window[0] * p.window[1] * channel_groups * unit_groups * column_tiles;
  }
};

// Of the filter gradient of floats: the result's rows are channels of the window's taps, as many of both as eight warps
// have sums of, or as two, four or eight times fewer warps, which then take every so manieth eight of a tile's rows.
struct UnalignedFloatsPlan : UnalignedRows {
  static constexpr int kWarps = 8, kWarpRows = 80, kDepth = 8;
  static constexpr int kUnit = kWarps * kDepth;  // what slices and tiles are multiples of

  int64_t all_rows;
  int columns, column_tiles;
  int tap_lines;          // of the window, that a block has: all of a plane's or one
  int channels, slices;   // of a block, and such slices of them
  int parts;              // of the warps, that share the rows
  int tile_rows, pixels;  // of a tile, and of x that they meet
  int pitch;              // floats of a pixel of x, so that four pixels lie in different banks
  double cycles;          // of a row

  // How far behind an aligned four lines of so many may begin.
  static int Shifts(int64_t of_line) { return of_line % 4 == 0 ? 0 : 3; }
  explicit UnalignedFloatsPlan(const Problem& p) : UnalignedRows(p) {}
  bool Fit(const Problem& p);
  int StageBytes() const { return (pixels * pitch + tile_rows * UnalignedPlan::kColumns) * 4; }
  int SharedBytes() const;
  int64_t Tiles() const { return (all_rows + kUnit - 1) / kUnit; }
  int64_t BlocksOfSlice(const Problem& p) const {
    return p.window[0] * (p.window[1] / tap_lines) * slices * column_tiles;
  }
};

// What a filter gradient's slices are multiples of, in all.
int64_t UnalignedTiles(const Problem& p);
// The problem of the first images, as many as are packed at once: their arrays are kept so small.
Problem UnalignedPart(const Problem& p);
// Of the operands as the kernels want them.
int64_t UnalignedWorkspace(const Problem& p);
bool TakesUnaligned(const Problem& p);
double UnalignedCycles(const Problem& p, int64_t splits);

}  // namespace jaxdnn::conv
