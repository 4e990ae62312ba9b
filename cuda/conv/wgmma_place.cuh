// Where the tiles of Hopper's forward convolutions and data gradients lie, and the steps of their sums: rows are the
// positions of one phase after another, and a step is a line of channels of one tap.
#pragma once

#include "cuda/conv/axis.cuh"
#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {

// A phase as kernels go over it. What is computed there delays a block's first load, by tens of cycles for every few
// instructions and each 64 bytes of parameters that they read: so the host computes what it can, and kernels divide by
// multiplying.
struct WgmmaPhase {
  int rows, dimensions;
  int steps;  // lines of channels of all taps
  FastDiv image_rows;
  Box image;
  int lower[kRank], step[kRank];          // base pixels (pixel_map.h)
  int offset[kRank], offset_step[kRank];  // from there to what the first tap meets, and from tap to tap
  int number, number_step[kRank];         // of the first tap in the window, and from tap to tap
  int taps[kRank];
  FastDiv all_taps;
  Box window;                       // of the taps
  int first[kRank], period[kRank];  // positions in the result

  WgmmaPhase() = default;
  WgmmaPhase(const Problem& p, const MappedPhase& m, int64_t lines)
      : rows(int(m.rows)),
        dimensions(m.map.dimensions),
        steps(int(m.tap_count * lines)),
        image_rows(m.rows / p.images),
        image(m.positions),
        number(0),
        all_taps(m.tap_count),
        window(m.taps) {
    for (int d = 0; d < kRank; ++d) {
      lower[d] = m.map.lower[d];
      step[d] = m.map.step[d];
      offset[d] = m.reversed[d] ? (m.taps[d] - 1) * m.distance[d] : 0;
      offset_step[d] = m.reversed[d] ? -m.distance[d] : m.distance[d];
      number = number * int(p.window[d]) + m.first_tap[d];
      number_step[d] = m.tap_period[d];
      for (int e = d + 1; e < kRank; ++e) number_step[d] *= int(p.window[e]);
      taps[d] = m.taps[d];
      first[d] = m.first[d];
      period[d] = m.period[d];
    }
  }

  // The image of a row, and its position there.
  __device__ int Split(int row, int (&position)[kRank]) const {
    int pixel;
    const int n = image_rows.Div(row, &pixel);
    image.Split(pixel, position);
    return n;
  }
};

// The tiles of a row of them: those of the result's columns, of one after the other of the phases that are alike; or of
// (tap, column) pairs where taps are columns.
struct WgmmaRow {
  FastDiv tiles;
  bool alone;                 // there is one problem, of one phase
  bool reversed, taps;        // whether the phases' taps are in their order, and are columns
  FastDiv of_phase, columns;  // of the result
  FastDiv problem;            // rows of tiles of a problem of several, which all have filters of their own
  int problem_pixels = 0, problem_taps = 0;
  Box alike;
  int phases;

  WgmmaRow() = default;
  WgmmaRow(int64_t result_columns, int tile_columns, const MappedPhase& f, bool taps_are_columns)
      : reversed(f.reversed[0]), taps(taps_are_columns), columns(result_columns), alike(f.alike), phases(f.Alike()) {
    const int64_t of_one = (result_columns + tile_columns - 1) / tile_columns;
    tiles = FastDiv(taps ? (result_columns * phases + tile_columns - 1) / tile_columns : of_one * phases);
    of_phase = taps ? tiles : FastDiv(of_one);
  }
  // There are so many problems and phases, which have so many rows of tiles, pixels of the result, and taps.
  void SetProblems(int64_t problems, int all_phases, int64_t row_tiles, int64_t pixels, int64_t of_window) {
    alone = problems * all_phases * phases == 1;
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
  __device__ WgmmaPlace(const Params& p, int tile, T) : problem(0), phase(0), pixel(0), tap(0) {
    int row_tile = p.in_row.tiles.Div(tile, &column);
    if (__builtin_expect(!p.in_row.alone, false)) {
      problem = p.in_row.problem.Div(row_tile, &row_tile);
      const int which = p.in_row.of_phase.Div(column, &column);
      pixel = PhasePixel(p, which) + problem * p.in_row.problem_pixels;
      tap = PhaseTap(p, which) + problem * p.in_row.problem_taps;
      while (row_tile >= p.first_tile[phase + 1]) ++phase;
      row_tile -= p.first_tile[phase];
    }
    column *= T::kColumns;
    row = row_tile * T::kRows;
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
  for (int d = 0; d < kRank; ++d) at[d] = f.lower[d] + at[d] * f.step[d];
  return image;
}

// Calls step(line, tap, offset) for a tile's steps in [first, end): the tap's number in the window, and how far from
// the first it meets the operand. A run of lines of one tap is followed by the next tap's, and the last tap's by the
// next run; a run has all lines, or one. What can wait is computed after a step, not before it.
template <class Params, class Step>
__device__ __forceinline__ void ForEachStep(const Params& p, const WgmmaPhase& f, int first, int end,
                                            const Step& step) {
  int run = 0, in_run = 0, tap[kRank] = {}, number = f.number, offset[kRank];
#pragma unroll
  for (int d = 0; d < kRank; ++d) offset[d] = f.offset[d];
  if (__builtin_expect(first > 0, false)) {
    int rest;
    run = f.all_taps.Div(p.run.Div(first, &in_run), &rest);
    f.window.Split(rest, tap);
#pragma unroll
    for (int d = 0; d < kRank; ++d) number += tap[d] * f.number_step[d], offset[d] += tap[d] * f.offset_step[d];
  }
  while (first < end) {
    for (; in_run < static_cast<int>(p.run.divisor) && first < end; ++in_run, ++first)
      step(run + in_run, number, offset);
    in_run = 0;
    bool more = false;
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d)
      if (!more) {
        number += f.number_step[d];
        offset[d] += f.offset_step[d];
        more = ++tap[d] < f.taps[d];
        if (!more) {
          number -= tap[d] * f.number_step[d];
          offset[d] = f.offset[d];
          tap[d] = 0;
        }
      }
    if (!more) ++run;
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
