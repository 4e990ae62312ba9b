// What the kernels of the filter gradient share: where a block works, and the sum over slices.
//
// Rows are (tap, channel) pairs, columns the output channels of a group, and the reduction runs over all pixels of y.
// The result is small and the reduction long, so the pixels are cut into slices, one block each; a second kernel adds
// the slices' partial sums in order, which makes the result the same in every run.
#pragma once

#include <algorithm>

#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/axis.cuh"

namespace jaxdnn::conv {

struct FilterParams {
  int64_t pixels;  // of y, per problem
  int64_t slice;   // of them in a block, a multiple of the tile's depth
  int rows, columns, groups;
  int64_t filter_rows;  // of a problem in the result: `rows`, but for groups that are computed together
  int row_tiles, column_tiles, splits;
  Axis axis[kRank];
  Box pixels_box, taps_box;
  FastDiv image_pixels, channels;                      // of y per image; of x per group that is computed
  FastDiv group_channels, group_columns;               // of one of the groups that are computed together (Dense)
  int64_t images, x_image, x_pixel, x_group, y_pixel;  // strides in elements
  int64_t result_size;                                 // elements of the whole result
};

inline FilterParams MakeFilterParams(const Problem& p, int64_t splits, int tile_rows, int tile_columns, int tile_depth,
                                     int64_t merged = 1) {
  const Gemm g = GemmOf(p);
  FilterParams q = {};
  q.pixels = g.depth;
  q.slice = std::max<int64_t>(1, CeilDiv(CeilDiv(g.depth, splits), tile_depth)) * tile_depth;
  q.rows = int(g.rows * merged);
  q.columns = int(g.columns * merged);
  q.filter_rows = g.rows;
  q.groups = int(p.groups / merged);
  q.row_tiles = int(CeilDiv(q.rows, tile_rows));
  q.column_tiles = int(CeilDiv(q.columns, tile_columns));
  q.splits = int(splits);
  for (int d = 0; d < kRank; ++d) q.axis[d] = InputAxis(p, d);
  q.pixels_box = Box(p.y);
  q.taps_box = Box(p.window);
  q.image_pixels = FastDiv(p.YPixels());
  q.channels = FastDiv(p.channels * merged);
  q.group_channels = FastDiv(p.channels);
  q.group_columns = FastDiv(p.features);
  q.images = p.images;
  q.x_pixel = p.groups * p.channels;
  q.x_group = p.channels * merged;
  q.x_image = q.x_pixel * p.XPixels();
  q.y_pixel = p.groups * p.features;
  q.result_size = p.FilterSize();
  return q;
}

inline int64_t FilterBlocks(const Problem& p, const FilterParams& q) {
  return p.batch * q.groups * q.row_tiles * q.column_tiles * q.splits;
}

// What a block of the grid does.
struct FilterBlock {
  int column_tile, row_tile, group, split;
  int64_t batch;
  int count, first_pixel;      // of the slice: its pixels, and the first one's number in its image
  int64_t x_offset, y_offset;  // of its first image, and of its first pixel, at the group

  FilterBlock() = default;
  __device__ explicit FilterBlock(const FilterParams& p) {
    int block = blockIdx.x;
    column_tile = block % p.column_tiles;
    block /= p.column_tiles;
    row_tile = block % p.row_tiles;
    block /= p.row_tiles;
    group = block % p.groups;
    block /= p.groups;
    split = block % p.splits;
    batch = block / p.splits;
    const int64_t begin = min(split * p.slice, p.pixels);
    count = static_cast<int>(min(p.slice, p.pixels - begin));
    const int64_t first_image = begin / p.image_pixels.divisor;
    first_pixel = static_cast<int>(begin - first_image * p.image_pixels.divisor);
    x_offset = (batch * p.images + first_image) * p.x_image + group * p.x_group;
    y_offset = (batch * p.pixels + begin) * p.y_pixel + group * int64_t{p.columns};
  }

  // Of the first column of the group, in the partial sums of this slice.
  __device__ int64_t ResultOffset(const FilterParams& p, int row) const {
    return split * p.result_size + (batch * p.filter_rows + row) * p.y_pixel + group * int64_t{p.columns};
  }
};

template <class Out>
struct StoreInOrder {
  static constexpr bool kInOrder = true;
  Out* out;

  template <class Sum>
  __device__ Out Value(int64_t, Sum sum) const {
    return static_cast<Out>(sum);
  }
  template <class Sum>
  __device__ void operator()(int64_t i, Sum sum) const {
    out[i] = Value(i, sum);
  }
};

// Of the exchanged problem's sums, for the filter of the other one.
template <class In, class Out>
struct StoreExchanged {
  static constexpr bool kInOrder = false;
  FilterParams q;
  const In *x, *y;
  Out* out;

  template <class Sum>
  __device__ void operator()(int64_t i, Sum sum) const {
    const int channels = q.channels.divisor, taps = q.rows / channels;
    int row = int(i / q.y_pixel);
    const int column = int(i - row * q.y_pixel), batch = row / q.rows;
    row -= batch * q.rows;
    const int tap = row / channels, channel = row - tap * channels;
    const int group = column / q.columns, feature = column - group * q.columns;
    // A zero around x may have met an infinity of y. But the other problem has its zeros around y.
    if (isnan(sum)) sum = SumOfExisting<Sum>(batch, group, tap, channel, feature);
    out[(int64_t{batch + 1} * taps - 1 - tap) * q.columns * q.x_pixel + feature * q.x_pixel + group * channels +
        channel] = static_cast<Out>(sum);
  }

  // The sum of the terms alone whose element of x exists. Rarely called.
  template <class Sum>
  __device__ __noinline__ Sum SumOfExisting(int batch, int group, int tap, int channel, int feature) const {
    int taps[kRank];
    q.taps_box.Split(tap, taps);
    Sum sum = 0;
    for (int64_t pixel = 0; pixel < q.pixels && !isnan(sum); ++pixel) {
      const int64_t image = batch * q.images + pixel / q.image_pixels.divisor;
      int to[kRank], at[kRank];
      q.pixels_box.Split(int(pixel % q.image_pixels.divisor), to);
      bool inside = true;
      for (int d = 0; d < kRank; ++d)
        inside &= q.axis[d].Find(q.axis[d].Origin(to[d]) + taps[d] * q.axis[d].tap_step, &at[d]);
      if (!inside) continue;
      const int in_pixel = (at[0] * q.axis[1].extent + at[1]) * q.axis[2].extent + at[2];
      const In of_x = x[image * q.x_image + in_pixel * q.x_pixel + group * int64_t{q.channels.divisor} + channel];
      const In of_y = y[(batch * q.pixels + pixel) * q.y_pixel + group * int64_t{q.columns} + feature];
      sum += static_cast<Sum>(of_x) * static_cast<Sum>(of_y);
    }
    return sum;
  }
};

// Of sums in which a zero that stands for no pixel of y may have met an infinity of x.
template <class In, class Out>
struct StoreChecked {
  static constexpr bool kInOrder = true;
  FilterParams q;
  const In *x, *y;
  Out* out;
  bool may_have = true;  // whether any has

  template <class Sum>
  __device__ Out Value(int64_t i, Sum sum) const {
    if (may_have && isnan(sum)) sum = SumOfPixels<Sum>(i);
    return static_cast<Out>(sum);
  }
  template <class Sum>
  __device__ void operator()(int64_t i, Sum sum) const {
    out[i] = Value(i, sum);
  }

  // The sum over the pixels of y that exist. Rarely called.
  template <class Sum>
  __device__ __noinline__ Sum SumOfPixels(int64_t i) const {
    const int feature = static_cast<int>(i % q.y_pixel), group = feature / q.columns, channels = q.channels.divisor;
    int64_t row = i / q.y_pixel;
    const int64_t batch = row / q.rows;
    row -= batch * q.rows;
    int taps[kRank];
    q.taps_box.Split(static_cast<int>(row / channels), taps);
    Sum sum = 0;
    for (int64_t pixel = 0; pixel < q.pixels && !isnan(sum); ++pixel) {
      const int64_t image = batch * q.images + pixel / q.image_pixels.divisor;
      int to[kRank], at[kRank];
      q.pixels_box.Split(static_cast<int>(pixel % q.image_pixels.divisor), to);
      bool inside = true;
      for (int d = 0; d < kRank; ++d)
        inside &= q.axis[d].Find(q.axis[d].Origin(to[d]) + taps[d] * q.axis[d].tap_step, &at[d]);
      const int in_pixel = (at[0] * q.axis[1].extent + at[1]) * q.axis[2].extent + at[2];
      const int channel = group * channels + static_cast<int>(row % channels);
      const Sum of_x = inside ? static_cast<Sum>(x[image * q.x_image + in_pixel * q.x_pixel + channel]) : Sum(0);
      sum += of_x * static_cast<Sum>(y[(batch * q.pixels + pixel) * q.y_pixel + feature]);
    }
    return sum;
  }
};

// The result, from the `splits` slices of sums that lie one after the other in the workspace (sum_slices.cu). Where
// `checked`, zeros that stand for no pixel of y may have met an infinity of x.
cudaError_t SumSlices(const Problem& p, const void* partial, int64_t splits, bool checked, const void* x, const void* y,
                      void* out, cudaStream_t stream);

}  // namespace jaxdnn::conv
