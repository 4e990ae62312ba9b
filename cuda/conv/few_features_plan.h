// What the kernels of few features (few_features.h) take, what a block of them works on, and how long they do. Plain
// host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

constexpr int kFewMostFeatures = 8;      // and twice as many of a result that has a stride
constexpr int kFewMostLines = 7;         // of a window
constexpr int kFewFewLines = 4;          // of one that kernels with fewer registers take
constexpr int kFewMostParts = 7;         // of 8 values of a line of a window
constexpr int kFewMostPlanes = 7;        // of a volume's window
constexpr int kFewPixels = 64;           // of a warp
constexpr int kFewSlots = 2;             // of a ring of pixels
constexpr int kFewSlotBytes = 128;       // of a pixel in a slot
constexpr int kFewMostBytes = 99 << 10;  // of shared memory, that every device since sm_80 gives a block

// A dimension of the result, in which results are counted from the first that an operand's pixel 0 adds to. In each
// cell are as many as the operand is dilated, or the forward convolution's stride. Pixel i adds to the results of cell
// i, from its first on, and of the next ones: to those of `reach` cells.
struct FewAxis {
  int64_t stride, reach;
  int64_t before;             // so many of them come before the result's first
  int64_t first_cell, cells;  // that have results
};

// How the workers of a problem, as many as its device runs at once, share the lines of cells of all tiles: so many of
// them have a share, of pieces that differ by a line.
struct FewFeaturesPieces {
  int64_t workers, pieces, share;

  FewFeaturesPieces(int64_t tiles, const FewAxis& axis, int64_t resident, int64_t batch);

  bool Apart(int64_t tiles) const { return workers == pieces * tiles; }  // whether a share is a tile's
  int64_t Lines() const { return (share + pieces - 1) / pieces; }        // of a piece, at most
};

// Of a problem as AsForward has it.
struct FewFeaturesPlan {
  FewAxis lines, columns;
  int64_t planes;         // of the window: planes of the result are images, which so many of the operand's add to
  int64_t steps, slices;  // of a pixel's channels: of 32 bytes, and of a slot's
  int64_t run, parts;     // values of a line of the window, and groups of 8 of them
  int64_t strips;         // warps of a block side by side, each with as many pixels
  int64_t row;            // columns of a pixel's values in shared memory
  int64_t filter_lines;   // each of a value, that shared memory has of the filter
  int64_t cells;          // of the columns that a block has
  int64_t tiles;          // of as many

  explicit FewFeaturesPlan(const Problem& p);

  int64_t Pixels() const { return strips * kFewPixels; }
  // Places of an image's columns: pixels, also beyond its edges, that results add.
  int64_t Places() const { return columns.cells + columns.reach - 1; }
  int64_t Elements(const Problem& p) const { return cells * columns.stride * p.features; }
  int64_t RingBytes() const { return kFewSlots * Pixels() * kFewSlotBytes; }
  int64_t FilterBytes() const { return planes * filter_lines * slices * kFewSlotBytes; }
  int64_t ValueBytes() const { return lines.stride > 1 ? 8 : 4; }  // of a column: of two lines of the result, or one
  int64_t RowBytes() const { return row * ValueBytes(); }
  int64_t SharedBytes(const Problem& p) const {
    return RingBytes() + FilterBytes() + Pixels() * RowBytes() + (planes * Pixels() + 2 * Elements(p)) * 4;
  }
};

bool TakesFewFeatures(const Problem& p);
double FewFeaturesCycles(const Problem& p);

// What Hopper's kernels are compiled for: a thread has so many neighbouring results of a cell, in four lanes those of
// all, and open sums of so many lines of cells.
struct FewOpenShape {
  int each, lines;

  constexpr int Columns() const { return 4 * each * lines; }  // of a product
};
constexpr int kFewOpenMostColumns = 48;  // of which two blocks' registers fit into a multiprocessor
constexpr FewOpenShape kFewOpenShapes[] = {{1, 4}, {1, 8}, {2, 4}, {3, 2}, {3, 4}, {4, 2}, {4, 4}};

// Warpgroups of a block that multiply, and blocks of a multiprocessor. Four warpgroups fill the time in which one
// waits; a block prepares once for all of its own; and the fewer there are, the fewer lines are read beside another's.
struct FewOpenBlocks {
  int warpgroups, blocks;

  constexpr int Pixels() const { return 64 * warpgroups; }  // of which a block has results, in a line
};
constexpr FewOpenBlocks kFewOpenBlocks[] = {{4, 1}, {2, 2}, {2, 1}};

// How Hopper's kernels (few_features_wgmma.cu) cut up a problem as AsForward has it.
struct FewOpenPlan {
  static constexpr int kLeastStages = 3, kMostStages = 12, kAtOnce = 4;   // steps of 32 bytes of a pixel
  static constexpr int kMostBytes = 227 << 10, kHalfOfBytes = 113 << 10;  // of shared memory, for one or two blocks

  FewAxis lines, columns;
  int shape;               // of kFewOpenShapes
  FewOpenBlocks blocks;    // of kFewOpenBlocks
  double cycles;           // that they take
  int64_t cell;            // results of a cell
  int64_t planes, slices;  // of the window; and of a pixel's channels
  int64_t line_bytes;      // of a slice's pixel
  int64_t pixels;          // that a cell's terms are of, and those that make up whole kAtOnce
  int64_t after;           // the window's first column is so many after its first cell's
  bool pairs;              // whether two neighbouring results are always stored together
  int64_t stages;          // of a block's ring
  int64_t tiles;

  // False where the problem is none of this kind.
  bool Fit(const Problem& p);

  int64_t Places() const { return columns.cells + columns.reach - 1; }
  int64_t CellColumns(const Problem& p) const { return columns.stride * p.features; }
  int64_t Rows() const { return blocks.Pixels() + pixels - 1; }  // pixels of a stage
  int64_t StageBytes() const { return (Rows() * line_bytes + 1023) / 1024 * 1024; }
  int64_t FilterBytes() const { return planes * slices * pixels * kFewOpenShapes[shape].Columns() * line_bytes; }
  // From one of a cell's lines to the next, in a warp's finished sums: an odd number of 16 banks.
  int64_t StagedLine(const Problem& p) const { return (16 * CellColumns(p) + 15) / 32 * 32 + 16; }
  int64_t BesideBytes(const Problem& p) const {
    return 4 * blocks.warpgroups * lines.stride * StagedLine(p) * 4 + 16 * kMostStages;
  }

 private:
  bool FitBlocks(const Problem& p, const FewOpenBlocks& candidate);
};

bool TakesFewOpen(const Problem& p);
double FewOpenCycles(const Problem& p);

}  // namespace jaxdnn::conv
