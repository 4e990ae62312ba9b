// What the kernels of the filter gradient share: where a block works, and the sum over slices.
//
// Rows are (tap, channel) pairs, columns the output channels of a group, and the reduction runs over all pixels of y.
// The result is small and the reduction long, so the pixels are cut into slices, one block each; a second kernel adds
// the slices' partial sums in order, which makes the result the same in every run.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
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
  FastDiv image_pixels, channels;             // of y per image; of x per group that is computed
  FastDiv group_channels, group_columns;      // of one of the groups that are computed together (Dense)
  int64_t images, x_image, x_pixel, y_pixel;  // strides in elements
  int64_t result_size;                        // elements of the whole result
};

inline FilterParams MakeFilterParams(const Problem& p, const Config& config, int tile_rows, int tile_columns,
                                     int tile_depth, int64_t merged = 1) {
  const Gemm g = GemmOf(p);
  FilterParams q = {};
  q.pixels = g.depth;
  q.slice = std::max<int64_t>(1, CeilDiv(CeilDiv(g.depth, config.splits), tile_depth)) * tile_depth;
  q.rows = int(g.rows * merged);
  q.columns = int(g.columns * merged);
  q.filter_rows = g.rows;
  q.groups = int(p.groups / merged);
  q.row_tiles = int(CeilDiv(q.rows, tile_rows));
  q.column_tiles = int(CeilDiv(q.columns, tile_columns));
  q.splits = int(config.splits);
  for (int d = 0; d < kRank; ++d) q.axis[d] = InputAxis(p, d);
  q.pixels_box = Box(p.y);
  q.taps_box = Box(p.window);
  q.image_pixels = FastDiv(p.YPixels());
  q.channels = FastDiv(p.channels * merged);
  q.group_channels = FastDiv(p.channels);
  q.group_columns = FastDiv(p.features);
  q.images = p.images;
  q.x_pixel = p.groups * p.channels;
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
    x_offset = (batch * p.images + first_image) * p.x_image + group * int64_t{p.channels.divisor};
    y_offset = (batch * p.pixels + begin) * p.y_pixel + group * int64_t{p.columns};
  }

  // Of the first column of the group, in the partial sums of this slice.
  __device__ int64_t ResultOffset(const FilterParams& p, int row) const {
    return split * p.result_size + (batch * p.filter_rows + row) * p.y_pixel + group * int64_t{p.columns};
  }
};

// out[i] = partial[0][i] + partial[1][i] + ...
template <class Sum, class Out>
__global__ void SumSlicesKernel(const Sum* partial, Out* out, int64_t size, int splits) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= size) return;
  Sum sum = 0;
#pragma unroll 8
  for (int s = 0; s < splits; ++s) sum += partial[s * size + i];
  out[i] = static_cast<Out>(sum);
}

// The same of many slices of few elements: a block takes kElements of them, and every kParts-th slice to a thread.
template <class Sum, class Out>
__global__ void SumManySlicesKernel(const Sum* partial, Out* out, int64_t size, int splits) {
  constexpr int kElements = 32, kParts = 16;
  __shared__ Sum parts[kParts][kElements];
  const int element = threadIdx.x % kElements, part = threadIdx.x / kElements;
  const int64_t i = blockIdx.x * int64_t{kElements} + element;
  Sum sum = 0;
  if (i < size) {
#pragma unroll 8
    for (int s = part; s < splits; s += kParts) sum += partial[s * size + i];
  }
  parts[part][element] = sum;
  __syncthreads();
  if (part != 0 || i >= size) return;
#pragma unroll
  for (int k = 1; k < kParts; ++k) sum += parts[k][element];
  out[i] = static_cast<Out>(sum);
}

template <class Sum, class Out>
cudaError_t SumSlices(const Sum* partial, Out* out, int64_t size, int splits, cudaStream_t stream) {
  constexpr int kThreads = 256;
  // With a thread to an element, fewer would not keep the device busy.
  constexpr int64_t kManyElements = int64_t{1} << 17;
  if (splits >= 8 && size < kManyElements)
    return LaunchKernel(SumManySlicesKernel<Sum, Out>, CeilDiv(size, 32), 512, stream, partial, out, size, splits);
  return LaunchKernel(SumSlicesKernel<Sum, Out>, CeilDiv(size, kThreads), kThreads, stream, partial, out, size, splits);
}

}  // namespace jaxdnn::conv
