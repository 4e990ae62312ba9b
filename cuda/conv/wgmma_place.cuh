// Where the tiles of Hopper's forward convolutions and data gradients lie, and the steps of their sums: rows are the
// positions of one phase after another, and a step is a line of channels of one tap.
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
inline int MapPhases(const Problem& p, WgmmaPhase (&phases)[kMaxMaps], int edges = 0) {
  MappedPhase mapped[kMaxMaps];
  const int count = MapPhases(p, mapped, edges);
  for (int i = 0; i < count; ++i) phases[i] = {mapped[i], FastDiv(mapped[i].rows / p.images), Box(mapped[i].positions)};
  return count;
}

// The tiles of a row of them: those of the result's columns, of one after the other of the phases that are alike; or of
// (tap, column) pairs where taps are columns.
struct WgmmaRow {
  FastDiv tiles, of_phase, columns;  // of the result
  FastDiv problem;                   // rows of tiles of a problem of several, which all have filters of their own
  int problem_pixels = 0, problem_taps = 0;
  Box alike;
  int phases;
  bool reversed, taps;  // whether the phases' taps are in their order, and are columns

  WgmmaRow() = default;
  WgmmaRow(int64_t result_columns, int tile_columns, const MappedPhase& f, bool taps_are_columns)
      : columns(result_columns), alike(f.alike), phases(f.Alike()), reversed(f.reversed[0]), taps(taps_are_columns) {
    const int64_t of_one = (result_columns + tile_columns - 1) / tile_columns;
    tiles = FastDiv(taps ? (result_columns * phases + tile_columns - 1) / tile_columns : of_one * phases);
    of_phase = taps ? tiles : FastDiv(of_one);
  }
  // The problems have so many rows of tiles, pixels of the result, and taps.
  void SetProblems(int64_t row_tiles, int64_t pixels, int64_t of_window) {
    problem = FastDiv(row_tiles);
    problem_pixels = int(pixels);
    problem_taps = int(of_window);
  }

  // Of a column where taps are columns; and which of the result's it is.
  __device__ int Phase(int column, int* of_result) const {
    const int tap = columns.Div(column, of_result);
    return reversed ? tap : phases - 1 - tap;
  }
};

// How far from the first phase's are the pixels of another, in the result, and its tap in the window.
template <class Params>
__device__ int PhasePixel(const Params& p, int phase) {
  int which[kRank];
  p.in_row.alike.Split(phase, which);
  return (which[0] * p.out[1] + which[1]) * p.out[2] + which[2];
}
template <class Params>
__device__ int PhaseTap(const Params& p, int phase) {
  int which[kRank];
  p.in_row.alike.Split(phase, which);
  const int tap = (which[0] * p.window[1] + which[1]) * p.window[2] + which[2];
  return p.in_row.reversed ? tap : -tap;
}

// Where a column lies from a row's first one, in elements of the result.
template <class Params>
__device__ int64_t ResultColumn(const Params& p, int column) {
  if (!p.in_row.taps) return column;
  int rest;
  const int phase = p.in_row.Phase(column, &rest);
  return int64_t{PhasePixel(p, phase)} * p.in_row.columns.divisor + rest;
}

// The block's tile of this number, where `blocks` go over all tiles, in the same direction or there and back.
__device__ inline int TileOf(int number, int block, int blocks, bool alternates) {
  return number * blocks + (alternates && number % 2 == 1 ? blocks - 1 - block : block);
}

// A tile of the grid; and how far from the first problem's and phase's are its pixels and its tap.
struct WgmmaPlace {
  int problem, phase, column, row, pixel, tap;
  int turned = 0;  // the product's columns begin with this one of the tile's, and end with those before it

  template <class Params, class T>
  __device__ WgmmaPlace(const Params& p, int tile, T) : phase(0) {
    int row_tile;
    problem = p.in_row.problem.Div(p.in_row.tiles.Div(tile, &column), &row_tile);
    const int which = p.in_row.of_phase.Div(column, &column);
    pixel = PhasePixel(p, which) + problem * p.in_row.problem_pixels;
    tap = PhaseTap(p, which) + problem * p.in_row.problem_taps;
    column *= T::kColumns;
    while (row_tile >= p.first_tile[phase + 1]) ++phase;
    row = (row_tile - p.first_tile[phase]) * T::kRows;
  }

  // Of the result, for one of the product's.
  template <class T>
  __device__ int Column(int of_product) const {
    const int of_tile = of_product + turned;
    return column + (of_tile < T::kColumns ? of_tile : of_tile - T::kColumns);
  }
};

// The pixel of the operand that a row's first tap meets.
__device__ inline int FirstPixel(const WgmmaPhase& f, int row, int (&at)[kRank]) {
  const int image = f.Split(row, at);
#pragma unroll
  for (int d = 0; d < kRank; ++d) at[d] = f.map.lower[d] + at[d] * f.map.step[d];
  return image;
}

// Calls step(line, tap, offset) for a tile's steps in [first, end): the tap's number in the window, and how far from
// the first it meets the operand. All lines of a tap come before the next tap, or all taps of a line before the next
// line. Where steps are short, what is computed between two of them is what they wait for.
template <class Params, class Step>
__device__ __forceinline__ void ForEachStep(const Params& p, const MappedPhase& f, int first, int end, const Step& step,
                                            bool taps_first = false) {
  int tap[kRank] = {}, line = 0;
  if (first > 0) {
    const int each = taps_first ? f.tap_count : p.lines, quotient = first / each, remainder = first - quotient * each;
    line = taps_first ? quotient : remainder;
    int rest = taps_first ? remainder : quotient;
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
    if (taps_first) {
      const int farther = f.reversed[2] ? -f.distance[2] : f.distance[2];
      for (; tap[2] < f.taps[2] && first < end; ++tap[2], ++first) {
        step(line, number, offset);
        number += f.tap_period[2];
        offset[2] += farther;
      }
    } else {
      for (; line < p.lines && first < end; ++line, ++first) step(line, number, offset);
      line = 0;
      ++tap[2];
    }
    if (tap[2] < f.taps[2]) continue;
    tap[2] = 0;
    if (++tap[1] < f.taps[1]) continue;
    tap[1] = 0;
    if (++tap[0] < f.taps[0]) continue;
    tap[0] = 0;
    ++line;
  }
}

// Where a tile's row is in the result, in pixels; -1 past its problem's last. Those of a phase may be scattered.
template <class Params>
__device__ int ResultPixel(const Params& p, const WgmmaPhase& f, const WgmmaPlace& place, int row, bool scattered) {
  row += place.row;
  if (row >= f.rows) return -1;
  if (!scattered) return row + place.pixel;
  int at[kRank];
  int pixel = f.Split(row, at);
#pragma unroll
  for (int d = 0; d < kRank; ++d) pixel = pixel * p.out[d] + f.first[d] + at[d] * f.period[d];
  return pixel + place.pixel;
}

}  // namespace jaxdnn::conv
