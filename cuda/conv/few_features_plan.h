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

}  // namespace jaxdnn::conv
