// What the kernels of planes (planes.h) take, how they cut it up, and how long that takes. A data gradient is the
// forward convolution that AsForward makes of it. Plain host declarations.
//
// A tile goes through the result plane by plane, along the one dimension whose window has three taps: along the depth
// of volumes, or along the lines of several images, which are then a plane. A plane of the operand, with all that the
// window sees of it, is in shared memory once, and meets all taps from there: each plane of the window is a third of
// the product's columns.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

struct PlanesPlan {
  static constexpr int kTaps = 3;        // along the planes
  static constexpr int kBlocks = 4;      // of 64 rows, in a tile
  static constexpr int kMostStages = 8;  // planes of the operand in shared memory

  bool volume;                  // of volumes, else of images side by side
  int columns, others;          // of a tile: positions in a line, and lines of a volume's plane, or images
  bool lines;                   // 64 rows are positions of one line, else 8 of each of 8
  int box_columns, box_others;  // of a plane of the operand
  int line_bytes, parts;        // of a position's channels in shared memory: of a line, and how many those are
  int tile_features;            // 32, or 16 where there are no more or they would not fit
  int column_tiles, other_tiles, feature_tiles;
  int planes;      // of the result
  int64_t chains;  // tiles, each with all planes
  int blocks;      // which share all planes of all tiles evenly
  int slab_bytes, filter_bytes, stage_bytes;
  double cycles;

  bool Fit(const Problem& p);
  int Stages() const;
  int SharedBytes(int stages) const;
};

// Of the filter gradient. The sum is over pixels of y, and a block has 32 channels and 32 features, or 16. It goes
// through pieces of some planes of a tile. Of 16-bit floats these are planes of x, which meet more of y; of floats
// planes of y, which meet more of x, and every line of a volume's window is a block's. With a stride of two, for 16-bit
// floats and 32 channels alone, two pixels of x are a line of shared memory, and a plane of y begins with every second
// of x.
struct PlanesFilterPlan {
  static constexpr int kFloatPlanes = 4, kMostPlanes = 8, kPixels = 64;  // of a piece; and of one of its planes
  static constexpr int kPairChannels = 32;

  bool volume;
  int stride;
  int side;                 // channels, and features, of a block
  int columns, others;      // of a tile of y
  int x_columns, x_others;  // that it meets, in pixels or pairs
  int planes;               // of y, or of a stride of x, that are the piece's own
  int x_planes, y_planes;
  int lines_apart;  // lines of the window that are blocks of their own
  int column_tiles, other_tiles, plane_tiles;
  int64_t pieces;  // of a problem
  int64_t units;   // blocks of a slice
  int x_bytes, y_bytes;
  double piece;  // cycles

  bool Fit(const Problem& p);
};

// Of images whose window's lines are `apart`, the lines deal out to as many images: with each of those the window is
// undilated, and what was an image is a problem by itself, of the same filter. Other problems as they are.
Problem DealLines(const Problem& p, int64_t* apart);

bool TakesPlanes(const Problem& p);
double PlanesCycles(const Problem& p, int64_t splits);
int64_t PlanesPieces(const Problem& p);  // of the filter gradient

}  // namespace jaxdnn::conv
