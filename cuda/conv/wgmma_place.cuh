// Where the tiles of Hopper's forward convolutions and data gradients lie: rows are the positions of one phase after
// another.
#pragma once

#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {

// A tile of the grid.
struct WgmmaPlace {
  int phase, column, row;

  template <class Params, class T>
  __device__ WgmmaPlace(const Params& p, int tile, T) : phase(0) {
    const int row_tile = tile / p.column_tiles;
    column = (tile - row_tile * p.column_tiles) * T::kColumns;
    while (row_tile >= p.first_tile[phase + 1]) ++phase;
    row = (row_tile - p.first_tile[phase]) * T::kRows;
  }
};

// The image of a row, and its position there.
__device__ inline int Split(const MappedPhase& f, int row, int (&position)[kRank]) {
  const int plane = f.positions[1] * f.positions[2], image = row / (f.positions[0] * plane);
  int pixel = row - image * f.positions[0] * plane;
  position[0] = pixel / plane;
  pixel -= position[0] * plane;
  position[1] = pixel / f.positions[2];
  position[2] = pixel - position[1] * f.positions[2];
  return image;
}

// Where a row is in the result, in pixels; -1 past the last. Those of a phase may be scattered.
template <class Params>
__device__ int ResultPixel(const Params& p, const MappedPhase& f, int row, bool scattered) {
  if (row >= f.rows) return -1;
  if (!scattered) return row;
  int at[kRank];
  int pixel = Split(f, row, at);
#pragma unroll
  for (int d = 0; d < kRank; ++d) pixel = pixel * p.out[d] + f.first[d] + at[d] * f.period[d];
  return pixel;
}

}  // namespace jaxdnn::conv
