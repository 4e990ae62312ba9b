// Where the tiles of Hopper's forward convolutions and data gradients lie: rows are the positions of one phase after
// another.
#pragma once

#include "cuda/conv/axis.cuh"
#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {

// A phase whose rows are found without a division, which would delay a block's first load by hundreds of cycles.
struct WgmmaPhase : MappedPhase {
  FastDiv image_rows;
  Box image;

  // The image of a row, and its position there.
  __device__ int Split(int row, int (&position)[kRank]) const {
    int pixel;
    const int n = image_rows.Div(row, &pixel);
    image.Split(pixel, position);
    return n;
  }
};

// All phases of a problem; 0 if there are none (pixel_map.h).
inline int MapPhases(const Problem& p, WgmmaPhase (&phases)[kMaxMaps]) {
  MappedPhase mapped[kMaxMaps];
  const int count = MapPhases(p, mapped);
  for (int i = 0; i < count; ++i) phases[i] = {mapped[i], FastDiv(mapped[i].rows / p.images), Box(mapped[i].positions)};
  return count;
}

// A tile of the grid.
struct WgmmaPlace {
  int phase, column, row;

  template <class Params, class T>
  __device__ WgmmaPlace(const Params& p, int tile, T) : phase(0) {
    const int row_tile = p.column_tiles.Div(tile, &column);
    column *= T::kColumns;
    while (row_tile >= p.first_tile[phase + 1]) ++phase;
    row = (row_tile - p.first_tile[phase]) * T::kRows;
  }
};

// Where a row is in the result, in pixels; -1 past the last. Those of a phase may be scattered.
template <class Params>
__device__ int ResultPixel(const Params& p, const WgmmaPhase& f, int row, bool scattered) {
  if (row >= f.rows) return -1;
  if (!scattered) return row;
  int at[kRank];
  int pixel = f.Split(row, at);
#pragma unroll
  for (int d = 0; d < kRank; ++d) pixel = pixel * p.out[d] + f.first[d] + at[d] * f.period[d];
  return pixel;
}

}  // namespace jaxdnn::conv
