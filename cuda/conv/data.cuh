// What the forward and data-gradient kernels share: where a block works, and what its rows and taps are.
//
// Rows are output pixels (of y forward, of x in the data gradient), columns are output channels of a group, and the
// reduction runs over (tap, channel). The input's matrix is never formed: a row has the operand's index that it reads
// at its first tap, and every further tap adds a fixed distance (axis.cuh). A block serves rows of one phase, that is,
// rows which meet the same taps, and goes over those alone: a strided data gradient does the arithmetic of the
// convolution and no more.
#pragma once

#include <cstdlib>

#include "cuda/common/float8.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/conv/axis.cuh"

namespace jaxdnn::conv {

struct DataParams {
  int64_t images;  // per problem
  int columns, channels, groups;
  int tile_rows;
  FastDiv row_tiles, column_tiles, group_div, phases;  // row tiles of the largest phase
  // Without strides between the operand's elements every position meets every tap; then its positions and taps.
  bool all_taps;
  Box whole, window_box;
  FastDiv whole_image;
  Axis axis[kRank];
  int out[kRank], window[kRank];
  int period[kRank], tap_period[kRank];  // Phases
  int tap_distance[kRank];               // in the operand's index, between taps of a phase
  FastDiv period_div[kRank], tap_period_div[kRank], distance_div[kRank];  // of their absolute values
  FastDiv channel_div;
  int64_t image_size, pixel_size, group_size;                // strides of the operand that is gathered, in elements
  int64_t filter_batch, filter_group;                        // strides of the filter, in elements
  int64_t filter_tap[kRank], filter_channel, filter_column;  // filter_tap: between taps of a phase
  int64_t first_filter_tap[kRank];                           // between taps of the whole window
  int64_t result_pixel;                                      // channels of a pixel of the result
  int extent[kRank], fold[kRank], first_tap[kRank];          // of the result; and Dense, where it folds
  int filter_taps[kRank];                                    // of the filter, not of what it is folded to
  FastDiv phase_columns;                                     // columns of a phase, or of one of the merged groups,
  int phase_channels;                                        // and how many channels these meet
  int16_t operand_run, filter_run;                           // elements that belong together
  bool whole_runs;                                           // whether chunks of the result's columns do
  DType result_type;
  Float8Kinds e5m2;
  Epilogue epilogue;
  // Whether rows are the first position of all images, then the next one: DataBlock::LeavePadding is for these alone.
  bool by_position;
  FastDiv images_div;
};

inline DataParams MakeDataParams(const Problem& p, const Epilogue& epilogue, int tile_rows, int tile_columns,
                                 const Dense& dense = {}) {
  const bool forward = p.direction == Direction::kForward;
  const Gemm g = GemmOf(p);
  const Phases phases = PhasesOf(p);
  const int64_t k = p.groups * p.features;
  DataParams q = {};
  q.epilogue = epilogue;
  q.result_type = p.out;
  q.e5m2 = {p.in == DType::kE5M2, p.filter == DType::kE5M2};
  q.images = p.images;
  q.columns = int(g.columns * dense.groups);
  q.channels = int(p.DepthChannels() * dense.groups);
  q.groups = int(p.groups / dense.groups);
  q.phase_columns = FastDiv(g.columns);
  q.phase_channels = int(p.DepthChannels());
  int64_t phase_count = 1;
  q.all_taps = true;
  q.first_filter_tap[2] = p.channels * k;
  q.first_filter_tap[1] = q.first_filter_tap[2] * p.window[2];
  q.first_filter_tap[0] = q.first_filter_tap[1] * p.window[1];
  int64_t largest = p.images;
  for (int d = 0; d < kRank; ++d) {
    q.axis[d] = forward ? InputAxis(p, d) : OutputAxis(p, d);
    q.out[d] = q.extent[d] = int(forward ? p.y[d] : p.x[d]);
    q.window[d] = int(p.window[d]);
    q.period[d] = int(phases.period[d]);
    q.tap_period[d] = int(phases.tap_period[d]);
    q.tap_distance[d] = q.axis[d].tap_step * q.tap_period[d] / int(q.axis[d].step.divisor);
    q.filter_tap[d] = q.first_filter_tap[d] * q.tap_period[d];
    q.fold[d] = int(dense.fold[d]);
    q.filter_taps[d] = q.window[d];
    if (q.fold[d] > 1) {
      q.out[d] = int(CeilDiv(q.extent[d], q.fold[d]));
      q.window[d] = int(dense.taps[d]);
      q.axis[d].offset = int(dense.offset[d]);
      q.axis[d].step = FastDiv(1);
      q.period[d] = 1;
      q.first_tap[d] = int(dense.first_tap[d]);
      q.columns *= q.fold[d];
    }
    q.period_div[d] = FastDiv(q.period[d]);
    q.tap_period_div[d] = FastDiv(q.tap_period[d]);
    q.distance_div[d] = FastDiv(std::abs(q.tap_distance[d]));
    phase_count *= q.period[d];
    q.all_taps &= q.axis[d].step.divisor == 1;
    largest *= CeilDiv(q.out[d], q.period[d]);
  }
  q.phases = FastDiv(phase_count);
  q.row_tiles = FastDiv(CeilDiv(largest, tile_rows));
  q.column_tiles = FastDiv(CeilDiv(q.columns, tile_columns));
  q.group_div = FastDiv(q.groups);
  q.tile_rows = tile_rows;
  q.whole = Box(q.out);
  q.whole_image = FastDiv(int64_t{q.out[0]} * q.out[1] * q.out[2]);
  q.window_box = Box(q.window);
  q.channel_div = FastDiv(q.channels);
  q.group_size = q.channels;
  q.pixel_size = q.groups * q.group_size;
  q.image_size = q.pixel_size * (forward ? p.XPixels() : p.YPixels());
  q.filter_batch = p.Taps() * p.channels * k;
  q.filter_group = p.features * dense.groups;
  q.filter_channel = forward ? k : 1;
  q.filter_column = forward ? 1 : k;
  q.result_pixel = p.groups * g.columns;
  return q;
}

inline int64_t DataBlocks(const Problem& p, const DataParams& q) {
  const int64_t tiles = int64_t{q.row_tiles.divisor} * q.column_tiles.divisor * q.phases.divisor;
  const bool empty = p.images == 0 || q.columns == 0 || q.out[0] == 0 || q.out[1] == 0 || q.out[2] == 0;
  return empty ? 0 : p.batch * q.groups * tiles;
}

// One dimension of a phase: its positions phase + period * i, and its taps first_tap + tap_period * j.
struct PhaseAxis {
  int phase, positions, first_tap, taps;

  __device__ void Set(const DataParams& p, int d, int which) {
    const Axis& axis = p.axis[d];
    phase = which;
    positions = p.period_div[d].Div(p.out[d] - phase + p.period[d] - 1);
    const int candidates = min(p.tap_period[d], p.window[d]);
#pragma unroll 1
    for (first_tap = 0; first_tap < candidates; ++first_tap) {
      int remainder;
      axis.step.Div(abs(axis.Origin(phase) + first_tap * axis.tap_step), &remainder);
      if (remainder == 0) break;
    }
    taps = first_tap < candidates ? p.tap_period_div[d].Div(p.window[d] - first_tap + p.tap_period[d] - 1) : 0;
  }
};

// A row of the tile: its image in the operand, the index it reads there at the phase's first tap, and its pixel in the
// result, or -1 if there is no such row.
struct Row {
  int64_t image, result;
  int origin[kRank];
};

// What a block of the grid does.
struct DataBlock {
  int column_tile, group;
  int64_t batch, first_row, row_count;
  PhaseAxis phase[kRank];
  Box positions, taps;
  FastDiv image_div;  // positions of an image

  DataBlock() = default;
  __device__ explicit DataBlock(const DataParams& p) : DataBlock(p, static_cast<int>(blockIdx.x)) {}
  // Neighbouring blocks share input pixels: columns first, then groups, then phases.
  __device__ DataBlock(const DataParams& p, int number) {
    int row_tile, which, rest = p.column_tiles.Div(number, &column_tile);
    rest = p.group_div.Div(rest, &group);
    rest = p.phases.Div(rest, &which);
    batch = p.row_tiles.Div(rest, &row_tile);
    first_row = int64_t{row_tile} * p.tile_rows;
    if (p.all_taps) {
#pragma unroll
      for (int d = 0; d < kRank; ++d) phase[d] = {0, p.out[d], 0, p.window[d]};
      positions = p.whole;
      image_div = p.whole_image;
      taps = p.window_box;
    } else {
      int along[kRank];
      along[0] = p.period_div[1].Div(p.period_div[2].Div(which, &along[2]), &along[1]);
      // Moved up one by one, for a loop that is not unrolled.
#pragma unroll 1
      for (int d = 0; d < kRank; ++d) {
        PhaseAxis axis;
        axis.Set(p, d, along[0]);
        along[0] = along[1], along[1] = along[2];
        phase[0] = phase[1], phase[1] = phase[2], phase[2] = axis;
      }
      positions = Box({phase[0].positions, phase[1].positions, phase[2].positions});
      image_div = FastDiv(Pixels());
      taps = Box({phase[0].taps, phase[1].taps, phase[2].taps});
    }
    row_count = p.images * Pixels();
  }

  // Leaves out the taps that none of the tile's rows, by position, finds in the operand. Of a block in shared memory.
  __device__ void LeavePadding(const DataParams& p) {
    const int64_t last_row = min(first_row + p.tile_rows, row_count) - 1;
    int first[kRank], last[kRank];
    positions.Split(p.images_div.Div(static_cast<int>(first_row)), first);
    positions.Split(p.images_div.Div(static_cast<int>(last_row)), last);
    bool all = false;  // positions of a dimension
#pragma unroll 1
    for (int d = 0; d < kRank; ++d) {
      const int low = Index(p, d, all ? 0 : first[0]), high = Index(p, d, all ? phase[d].positions - 1 : last[0]);
      all |= first[0] != last[0];
      first[0] = first[1], first[1] = first[2], last[0] = last[1], last[1] = last[2];
      int from = phase[d].taps, to = 0;
#pragma unroll 1
      for (int tap = 0; tap < phase[d].taps; ++tap) {
        const int moved = tap * p.tap_distance[d];
        if (high + moved >= 0 && low + moved < p.axis[d].extent) from = min(from, tap), to = tap + 1;
      }
      phase[d].first_tap += min(from, to) * p.tap_period[d];
      phase[d].taps = max(to - from, 0);
    }
    taps = Box({phase[0].taps, phase[1].taps, phase[2].taps});
  }

  // What the i-th position of a phase reads at its first tap.
  __device__ int Index(const DataParams& p, int d, int i) const {
    const int position = p.axis[d].Origin(phase[d].phase + p.period[d] * i) + phase[d].first_tap * p.axis[d].tap_step;
    const int index = p.axis[d].step.Div(abs(position));  // exact, by the choice of the phase
    return position < 0 ? -index : index;
  }

  __device__ int Pixels() const { return phase[0].positions * phase[1].positions * phase[2].positions; }
  __device__ int Taps() const { return phase[0].taps * phase[1].taps * phase[2].taps; }
  __device__ int Depth(const DataParams& p) const { return Taps() * p.channels; }

  // Where the block's part of the filter begins: its problem, group and first tap.
  __device__ int64_t FilterStart(const DataParams& p) const {
    int64_t start = batch * p.filter_batch + group * p.filter_group;
#pragma unroll
    for (int d = 0; d < kRank; ++d) start += phase[d].first_tap * p.first_filter_tap[d];
    return start;
  }

  // All threads of the block, for its tile of rows.
  template <int kRows>
  __device__ __forceinline__ void SetRows(const DataParams& p, Row (&rows)[kRows], bool by_position = false) const {
    const int pixels = Pixels();
    const int64_t first_image =
        first_row <= INT32_MAX ? image_div.Div(static_cast<int>(first_row)) : first_row / pixels;
    const int first_pixel = static_cast<int>(first_row - first_image * pixels);
    for (int i = threadIdx.x; i < kRows; i += blockDim.x) {
      int pixel, out[kRank];
      int64_t image = first_image + image_div.Div(first_pixel + i, &pixel);
      if (by_position) {
        int of_position;
        pixel = p.images_div.Div(static_cast<int>(first_row) + i, &of_position);
        image = of_position;
      }
      image += batch * p.images;
      positions.Split(pixel, out);
#pragma unroll
      for (int d = 0; d < kRank; ++d) {
        rows[i].origin[d] = Index(p, d, out[d]);
        out[d] = phase[d].phase + p.period[d] * out[d];
      }
      rows[i].image = image * p.image_size + group * p.group_size;
      rows[i].result = ((image * p.extent[0] + out[0] * p.fold[0]) * p.extent[1] + out[1] * p.fold[1]) * p.extent[2] +
                       out[2] * p.fold[2];
      if (first_row + i >= row_count) rows[i].result = -1;
    }
  }
};

}  // namespace jaxdnn::conv
