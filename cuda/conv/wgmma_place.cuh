// Where the tiles of Hopper's forward convolutions and data gradients lie, and the steps of their sums: rows are the
// positions of one phase after another, and a step is a line of channels of one tap.
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

// The pixel of the operand that a row's first tap meets.
__device__ inline int FirstPixel(const MappedPhase& f, int row, int (&at)[kRank]) {
  const int image = Split(f, row, at);
#pragma unroll
  for (int d = 0; d < kRank; ++d) at[d] = f.map.lower[d] + at[d] * f.map.step[d];
  return image;
}

// Calls step(line, tap, offset) for a tile's steps in [first, end), all lines of a tap before the next tap: the tap's
// number in the window, and how far from the first it meets the operand.
template <class Params, class Step>
__device__ __forceinline__ void ForEachStep(const Params& p, const MappedPhase& f, int first, int end,
                                            const Step& step) {
  int tap[kRank] = {}, line = 0;
  if (first > 0) {
    int rest = first / p.lines;
    line = first - rest * p.lines;
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d) tap[d] = rest % f.taps[d], rest /= f.taps[d];
  }
  while (first < end) {
    int number = 0, offset[kRank];
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      offset[d] = (f.reversed[d] ? f.taps[d] - 1 - tap[d] : tap[d]) * f.distance[d];
      number = number * p.window[d] + f.first_tap[d] + tap[d] * f.tap_period[d];
    }
    for (; line < p.lines && first < end; ++line, ++first) step(line, number, offset);
    line = 0;
    if (++tap[2] < f.taps[2]) continue;
    tap[2] = 0;
    if (++tap[1] < f.taps[1]) continue;
    tap[1] = 0;
    ++tap[0];
  }
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
