// What the kernels of planes (planes.h) take, how they cut it up, and how long that takes. A data gradient is the forward
// convolution that AsForward makes of it. Plain host declarations.
//
// A tile goes through the result plane by plane, along the one dimension whose window has three taps: along the depth of
// volumes, or along the lines of several images, which are then a plane. A plane of the operand, with all that the window
// sees of it, is in shared memory once, and meets all taps from there: each plane of the window is a third of the
// product's columns.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

struct PlanesPlan {
  static constexpr int kTaps = 3;           // along the planes
  static constexpr int kFeatures = 32;      // of a tile
  static constexpr int kBlocks = 4;         // of 64 rows, in a tile
  static constexpr int kMostStages = 8;     // planes of the operand in shared memory
  static constexpr int kStagedBytes = 8192; // of 64 rows' results on their way, as floats

  bool volume;            // of volumes, else of images side by side
  int columns, others;    // of a tile: positions in a line, and lines of a volume's plane, or images
  bool lines;             // 64 rows are positions of one line, else 8 of each of 8
  int box_columns, box_others;  // of a plane of the operand
  int line_bytes;         // of a position's channels in shared memory
  int column_tiles, other_tiles, feature_tiles;
  int planes;             // of the result
  int64_t chains;         // tiles, each with all planes
  int blocks;             // which share all planes of all tiles evenly
  int slab_bytes, filter_bytes, stage_bytes;
  double cycles;

  bool Fit(const Problem& p);
  int Stages(bool staged) const;
  int SharedBytes(int stages, bool staged) const;
};

bool TakesPlanes(const Problem& p);
double PlanesCycles(const Problem& p);

}  // namespace jaxdnn::conv
