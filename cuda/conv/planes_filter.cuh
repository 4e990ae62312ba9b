// What the kernels of planes' filter gradients are told of a problem, and where a block works.
#pragma once

#include "cuda/conv/filter.cuh"
#include "cuda/conv/planes_plan.h"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

constexpr int kTaps = PlanesPlan::kTaps;

struct PlanesFilterParams {
  CUtensorMap x, y;
  bool volume;
  int stride;
  int side;                          // channels, and features, of a block
  int columns, others, across_bits;  // of a piece; and of how many eights are in a line
  int channels, features, images;
  int lines, taps;         // lines of the window that are blocks of their own; and all taps
  int planes, y_before;    // of a piece: planes that are its own, and those of y before those of x
  int pad[2], line_step;   // of the planes and the others; and from line to line of the window
  int first_column, lead;  // where a tile begins in x, or in its pairs, and columns there before the window's first
  int x_other, x_plane, y_other, y_plane, window_column, window_line;  // bytes in shared memory
  int x_bytes, y_bytes, x_box_bytes, stages;
  int pieces, splits;
  FastDiv column_div, inner_div, outer_div, split_div, line_div, channel_div, feature_div;
  int64_t result_size, blocks;

  // All but the stages.
  cudaError_t Init(const Problem& p, const Config& config, const void* x_data, const void* y_data);
};

// What a block does.
struct FilterPlace {
  int split, line, channel, feature, model;
  int pieces;

  __device__ explicit FilterPlace(const PlanesFilterParams& q) {
    int rest = q.split_div.Div(blockIdx.x, &split);
    rest = q.feature_div.Div(rest, &feature);
    rest = q.channel_div.Div(rest, &channel);
    model = q.line_div.Div(rest, &line);
    channel *= q.side;
    feature *= q.side;
    pieces = (q.pieces - split + q.splits - 1) / q.splits;
  }
};

// Where the boxes of a block's piece begin in x and y. Blocks take pieces in turn, in the order of memory: those of the
// same time are neighbours, which find in the cache what they have in common.
struct PiecePlace {
  int x[5], y[5];

  __device__ PiecePlace(const PlanesFilterParams& q, const FilterPlace& place, int number) {
    int column, inner, outer;
    int rest = q.column_div.Div(place.split + number * q.splits, &column);
    rest = q.inner_div.Div(rest, &inner);
    const int image = q.outer_div.Div(rest, &outer);
    column *= q.columns;
    const int other = (q.volume ? inner : outer) * q.others, plane = (q.volume ? outer : inner) * q.planes;
    const int last = q.volume ? place.model * q.images + image : place.model;
    const int x_other = (q.volume ? q.stride : 1) * other - q.pad[1] + place.line * q.line_step;
    Set(x, place.channel, column + q.first_column, q.volume, x_other, q.stride * plane - q.pad[0], last);
    Set(y, place.feature, column, q.volume, other, plane - q.y_before, last);
  }

 private:
  static __device__ void Set(int (&to)[5], int channel, int column, bool volume, int other, int plane, int last) {
    to[0] = channel;
    to[1] = column;
    to[2] = volume ? other : plane;
    to[3] = volume ? plane : other;
    to[4] = last;
  }
};

inline cudaError_t PlanesFilterParams::Init(const Problem& p, const Config& config, const void* x_data,
                                            const void* y_data) {
  *this = {};
  PlanesFilterPlan plan;
  if (!plan.Fit(p)) return cudaErrorInvalidValue;
  const int line = plan.side * int(SizeOf(p.in));
  side = plan.side;
  volume = plan.volume;
  stride = plan.stride;
  columns = plan.columns;
  others = plan.others;
  while (8 << across_bits < columns) ++across_bits;
  channels = int(p.channels);
  features = int(p.features);
  lines = plan.lines_apart;
  taps = int(p.Taps());
  planes = plan.planes;
  y_before = plan.y_planes - planes;
  pad[0] = int(p.pad[volume ? 0 : 1]);
  pad[1] = int(p.pad[volume ? 1 : 0]);
  line_step = int(volume ? p.rhs_dilation[1] : 1);
  images = int(p.images);
  first_column = int(FloorDiv(-p.pad[2], stride));
  lead = int(FloorMod(-p.pad[2], stride));
  // In shared memory the inner one of planes and others comes first. Lines of a volume's result are a stride apart.
  const int x_column = stride * line, x_line = plan.x_columns * x_column, y_line = plan.columns * line;
  x_other = volume ? stride * x_line : plan.x_planes * x_line;
  x_plane = volume ? plan.x_others * x_line : x_line;
  y_other = volume ? y_line : plan.y_planes * y_line;
  y_plane = volume ? plan.others * y_line : y_line;
  window_column = int(p.rhs_dilation[2]) * x_column;
  window_line = volume ? line_step * x_line : 0;
  x_bytes = plan.x_bytes;
  y_bytes = plan.y_bytes;
  x_box_bytes = plan.x_others * plan.x_planes * x_line;
  pieces = int(plan.pieces);
  splits = int(config.splits);
  column_div = FastDiv(plan.column_tiles);
  inner_div = FastDiv(volume ? plan.other_tiles : plan.plane_tiles);
  outer_div = FastDiv(volume ? plan.plane_tiles : plan.other_tiles);
  split_div = FastDiv(config.splits);
  line_div = FastDiv(lines);
  channel_div = FastDiv(CeilDiv(p.channels, side));
  feature_div = FastDiv(CeilDiv(p.features, side));
  result_size = p.FilterSize();
  blocks = plan.units * config.splits;

  // So many pixels are a line of shared memory.
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t channels, const int64_t (&extent)[kRank],
                          int pixels, int columns, int others, int planes) {
    const int64_t all = pixels * channels, count = extent[2] / pixels;
    return volume ? EncodeBoxes(map, p.in, data, {all, count, extent[1], extent[0], p.batch * p.images},
                                {pixels * side, columns, others, planes, 1})
                  : EncodeBoxes(map, p.in, data, {all, count, extent[1], p.images, p.batch},
                                {pixels * side, columns, planes, others, 1});
  };
  cudaError_t e = encode(&x, x_data, p.channels, p.x, stride, plan.x_columns, plan.x_others, plan.x_planes);
  if (e == cudaSuccess) e = encode(&y, y_data, p.features, p.y, 1, plan.columns, plan.others, plan.y_planes);
  return e;
}

// Of floats.
cudaError_t LaunchPlanesFilterFloats(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                     void* workspace, cudaStream_t stream);

}  // namespace jaxdnn::conv
