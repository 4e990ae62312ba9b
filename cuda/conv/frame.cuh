// The frame as kernels have it: the boxes that it consists of, and where the elements beyond the edges are.
#pragma once

#include <algorithm>

#include "cuda/conv/data.cuh"
#include "cuda/conv/edges.cuh"
#include "cuda/conv/filter.cuh"
#include "cuda/conv/frame.h"

namespace jaxdnn::conv {

// Positions beyond an edge that stand for the elements first to last: element i at  sign i + shift + step e  for e
// below `count`.
struct Aliases {
  int first, last, sign, shift, step, count;

  __host__ __device__ bool Has(int i) const { return count > 0 && first <= i && i <= last; }
};

// The frame's results: of the product of a few segments of each dimension the boxes that are not inside. Forward a
// segment is outside where its windows reach beyond an edge; in the data gradient, where its elements stand for
// positions beyond one. Segments end where that changes.
struct Frame {
  static constexpr int kSegments = 5, kBoxes = kSegments * kSegments * kSegments;
  int begin[kRank][kSegments + 1];
  Aliases aliases[kRank][2];
  Edges edges[kRank];
  int extent[kRank], period[kRank];  // of the results
  FastDiv phases, tiles;             // of all boxes
  int boxes;
  int first_tile[kBoxes + 1];
  unsigned char segment[kBoxes][kRank];

  __device__ int Length(int d, int segment) const { return begin[d][segment + 1] - begin[d][segment]; }

  __device__ int BoxOf(int tile) const {
    int low = 0, high = boxes;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_tile[middle] <= tile ? low : high) = middle;
    }
    return low;
  }
};

// In tiles of `tile_rows` of the results of `images` images.
inline Frame MakeFrame(const Problem& p, int64_t images, int tile_rows) {
  const bool gradient = p.direction == Direction::kDataGradient;
  Frame f = {};
  int segments[kRank];
  bool outside[kRank][Frame::kSegments] = {};
  int64_t phases = 1;
  for (int d = 0; d < kRank; ++d) {
    const Reach reach = ReachOf(p, d);
    const int n = int(p.x[d]), out = int(gradient ? p.x[d] : p.y[d]), low = int(reach.low), high = int(reach.high);
    f.extent[d] = out;
    f.edges[d] = gradient ? Edges{int(p.y[d]), 0, 0, 0, false} : InputEdges(p, d);
    int ends[Frame::kSegments] = {out, out, out, out, out};
    if (!gradient) {
      ends[0] = std::min<int>(out, int(CeilDiv(low, p.stride[d])));
      ends[1] = std::max<int>(0, out - int(CeilDiv(high, p.stride[d])));
    } else {
      const AliasedElements of = AliasedBy(p, d);
      const auto alias = [&](int which, const Range& range, int sign, int shift, int step, int count) {
        if (count == 0) return;
        f.aliases[d][which] = {int(range.first), int(range.last), sign, shift, step, count};
        ends[2 * which] = int(range.first);
        ends[2 * which + 1] = int(range.last) + 1;
      };
      const bool replicates = p.mode[d] == PadMode::kReplicate;
      const Edges map = InputEdges(p, d);
      // A position is sign * element + shift as an element is sign * position + a constant; or any as far as it goes.
      alias(0, of.low, map.sign, replicates ? -1 : -map.low * map.sign, -1, replicates ? low : low > 0);
      alias(1, of.high, map.sign, replicates ? n : -map.high * map.sign, 1, replicates ? high : high > 0);
    }
    std::sort(ends, ends + Frame::kSegments);
    int begin = 0, longest = 1;
    segments[d] = 0;
    for (const int end : ends) {
      if (end == begin) continue;
      const int s = segments[d]++;
      f.begin[d][s + 1] = end;
      outside[d][s] = gradient ? f.aliases[d][0].Has(begin) || f.aliases[d][1].Has(begin)
                               : begin < CeilDiv(low, p.stride[d]) || end > out - CeilDiv(high, p.stride[d]);
      longest = std::max(longest, end - begin);
      begin = end;
    }
    // As in PhasesOf: a longer period than there are positions would leave phases empty.
    f.period[d] = gradient ? std::min(int(p.stride[d]), longest) : 1;
    phases *= f.period[d];
  }
  f.phases = FastDiv(phases);
  for (int a = 0; a < segments[0]; ++a)
    for (int b = 0; b < segments[1]; ++b)
      for (int c = 0; c < segments[2]; ++c) {
        const int box[kRank] = {a, b, c};
        int64_t rows = images;
        bool inside = true;
        for (int d = 0; d < kRank; ++d) {
          rows *= CeilDiv(f.begin[d][box[d] + 1] - f.begin[d][box[d]], f.period[d]);
          inside &= !outside[d][box[d]];
          f.segment[f.boxes][d] = static_cast<unsigned char>(box[d]);
        }
        if (inside) continue;
        f.first_tile[f.boxes + 1] = int(f.first_tile[f.boxes] + phases * CeilDiv(rows, tile_rows));
        ++f.boxes;
      }
  f.tiles = FastDiv(f.first_tile[f.boxes]);
  return f;
}

// n / d, where d is mostly 1: a division takes longer than all else that a block finds out once.
__device__ inline int Quotient(int n, int d) { return d == 1 ? n : n / d; }

// A block of the forward convolution or the data gradient: of one box, and one phase of it.
struct FrameBlock : DataBlock {
  int first[kRank], last[kRank], segment[kRank], count[kRank];  // positions of the result
  int readings[kRank];            // positions that the results stand for: their own, and their aliases
  int sign[kRank], shift[kRank];  // of a reading: the position is sign * the result's + shift

  __device__ FrameBlock(const DataParams& p, const Frame& f) {
    int which, tile, rest = p.column_tiles.Div(static_cast<int>(blockIdx.x), &column_tile);
    rest = p.group_div.Div(rest, &group);
    batch = f.tiles.Div(rest, &tile);
    const int box = f.BoxOf(tile);
    first_row = int64_t{f.phases.Div(tile - f.first_tile[box], &which)} * p.tile_rows;
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d) {
      segment[d] = f.segment[box][d];
      const int rest_of = Quotient(which, f.period[d]), start = which - rest_of * f.period[d];
      which = rest_of;
      first[d] = f.begin[d][segment[d]] + start;
      count[d] = max(0, Quotient(f.Length(d, segment[d]) - start + f.period[d] - 1, f.period[d]));
      last[d] = first[d] + f.period[d] * (count[d] - 1);
      readings[d] = 1;
      for (const Aliases& a : f.aliases[d]) readings[d] += a.Has(first[d]) ? a.count : 0;
    }
    row_count = p.images * count[0] * count[1] * count[2];
  }

  // The taps of a reading, in order.
  __device__ Box Taps() const { return Box({phase[0].taps, phase[1].taps, phase[2].taps}); }

  __device__ int Readings() const { return readings[0] * readings[1] * readings[2]; }

  // The image and the result of a row, and its position there; where it reads the operand follows from a reading.
  __device__ Row RowAt(const DataParams& p, const Frame& f, int row, int (&at)[kRank]) const {
    const int line = Quotient(row, count[2]), plane = Quotient(line, count[1]), of = Quotient(plane, count[0]);
    at[0] = first[0] + f.period[0] * (plane - of * count[0]);
    at[1] = first[1] + f.period[1] * (line - plane * count[1]);
    at[2] = first[2] + f.period[2] * (row - line * count[2]);
    const int64_t image = batch * p.images + of;
    const int64_t pixel = ((image * p.extent[0] + at[0]) * p.extent[1] + at[1]) * p.extent[2] + at[2];
    Row to;
    to.image = image * p.image_size + group * p.group_size;
    to.result = row < row_count ? pixel : -1;
    return to;
  }

  // All threads of the block, of which the first have a row each.
  template <int kRows>
  __device__ void SetRows(const DataParams& p, const Frame& f, Row (&rows)[kRows]) {
    if (threadIdx.x < kRows)
      rows[threadIdx.x] = RowAt(p, f, static_cast<int>(first_row + threadIdx.x), Positions<kRows>()[threadIdx.x]);
  }

  // The taps that the results meet at one of their positions.
  __device__ void SetReading(const DataParams& p, const Frame& f, int which) {
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d) {
      const Aliases &low = f.aliases[d][0], &high = f.aliases[d][1];
      const int rest = Quotient(which, readings[d]), e = which - rest * readings[d] - 1,
                below = low.Has(first[d]) ? low.count : 0;
      which = rest;
      sign[d] = e < 0 ? 1 : e < below ? low.sign : high.sign;
      shift[d] = e < 0 ? 0 : e < below ? low.shift + low.step * e : high.shift + high.step * (e - below);
      const Axis& axis = p.axis[d];
      const int candidates = min(p.tap_period[d], p.window[d]);
      const int begin = axis.Origin(sign[d] * first[d] + shift[d]), end = axis.Origin(sign[d] * last[d] + shift[d]);
      int tap = 0;
      while (tap < candidates && Index(axis, begin + tap * axis.tap_step) * StepOf(axis) != begin + tap * axis.tap_step)
        ++tap;
      phase[d].first_tap = tap;
      phase[d].taps = tap < candidates ? Quotient(p.window[d] - tap + p.tap_period[d] - 1, p.tap_period[d]) : 0;
      if (axis.tap_step < 0) {
        // Only taps that some position of the box meets an element at, which beyond the edges are few.
        const int from = Index(axis, min(begin, end) + tap * axis.tap_step),
                  to = Index(axis, max(begin, end) + tap * axis.tap_step);
        const int distance = abs(p.tap_distance[d]), most = f.edges[d].extent - 1;
        const bool up = p.tap_distance[d] > 0;
        const int before = up ? -to : from - most, after = up ? most - from : to;
        const int skipped = before > 0 ? Quotient(before + distance - 1, distance) : 0;
        phase[d].taps = after < 0 ? 0 : max(0, min(phase[d].taps, Quotient(after, distance) + 1) - skipped);
        phase[d].first_tap += skipped * p.tap_period[d];
      }
      if (phase[d].taps == 0) phase[d].first_tap = 0;
    }
  }

  // Where a result there reads the operand at the first of them. Exact, by the choice of the phase.
  __device__ int Origin(const DataParams& p, int d, int at) const {
    return Index(p.axis[d], p.axis[d].Origin(sign[d] * at + shift[d]) + phase[d].first_tap * p.axis[d].tap_step);
  }

  // All threads, between barriers: the same for the rows.
  template <int kRows>
  __device__ void SetReading(const DataParams& p, const Frame& f, int which, Row (&rows)[kRows]) {
    SetReading(p, f, which);
    if (threadIdx.x >= kRows) return;
#pragma unroll
    for (int d = 0; d < kRank; ++d) rows[threadIdx.x].origin[d] = Origin(p, d, Positions<kRows>()[threadIdx.x][d]);
  }

 private:
  // The rows' positions in the result.
  template <int kRows>
  using Places = int[kRows][kRank];
  template <int kRows>
  static __device__ Places<kRows>& Positions() {
    __shared__ Places<kRows> at;
    return at;
  }
  static __device__ int StepOf(const Axis& axis) { return static_cast<int>(axis.step.divisor); }
  static __device__ int Index(const Axis& axis, int position) {
    const int whole = axis.step.Div(abs(position));
    return position < 0 ? -whole : whole;
  }
};

// Where a row reads the operand at a tap of the block's phase: the pixel's first channel, or -1 if nothing is there.
__device__ inline int64_t Find(const DataParams& p, const Frame& f, const Row& row, const int (&tap)[kRank],
                               int planes) {
  bool exists = row.result >= 0 && tap[0] < planes;  // past the last tap the first coordinate is their count
  int at[kRank];
#pragma unroll
  for (int d = 0; d < kRank; ++d) {
    at[d] = row.origin[d] + tap[d] * p.tap_distance[d];
    exists &= f.edges[d].Find(&at[d]);
  }
  const int pixel = (at[0] * f.edges[1].extent + at[1]) * f.edges[2].extent + at[2];
  return exists ? row.image + pixel * p.pixel_size : -1;
}

// In the filter gradient the frame is pixels of y, box by box, in each image (tiles of one). MakeFilterParams, for
// `slices` of them.
inline FilterParams MakeFrameFilterParams(const Problem& p, const Frame& f, int64_t slices, int tile_rows,
                                          int tile_columns, int tile_depth) {
  FilterParams q = MakeFilterParams(p, slices, tile_rows, tile_columns, tile_depth);
  q.pixels = p.images * f.first_tile[f.boxes];
  q.slice = std::max<int64_t>(1, CeilDiv(CeilDiv(q.pixels, slices), tile_depth)) * tile_depth;
  q.image_pixels = f.tiles;
  return q;
}

// One of these pixels: its number in y's image, and where it reads x at the first tap.
struct FramePixel {
  int number, origin[kRank];

  __device__ FramePixel(const FilterParams& p, const Frame& f, int which) {
    const int box = f.BoxOf(which);
    int rest = which - f.first_tile[box], at[kRank];
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d) {
      const int s = f.segment[box][d], length = f.Length(d, s);
      at[d] = f.begin[d][s] + rest % length;
      rest /= length;
      origin[d] = p.axis[d].Origin(at[d]);
    }
    number = (at[0] * f.extent[1] + at[1]) * f.extent[2] + at[2];
  }
};

// The pixel of x that `origin` and a tap's distance meet, or -1 if they meet none, or one that is no further than the
// edges.
__device__ inline int FindBeyond(const Frame& f, const int (&origin)[kRank], const int (&tap)[kRank]) {
  bool exists = true, beyond = false;
  int at[kRank];
#pragma unroll
  for (int d = 0; d < kRank; ++d) {
    at[d] = origin[d] + tap[d];
    beyond |= static_cast<unsigned>(at[d]) >= static_cast<unsigned>(f.edges[d].extent);
    exists &= f.edges[d].Find(&at[d]);
  }
  return exists && beyond ? (at[0] * f.edges[1].extent + at[1]) * f.edges[2].extent + at[2] : -1;
}

// Blocks of such a grid.
inline int64_t FrameBlocks(const Problem& p, const DataParams& q, const Frame& f) {
  const bool empty = p.images == 0 || q.columns == 0 || f.boxes == 0;
  return empty ? 0 : p.batch * q.groups * q.column_tiles.divisor * f.first_tile[f.boxes];
}

}  // namespace jaxdnn::conv
