// Forward convolution and data gradient as an implicit matrix product on the CUDA cores: every shape, stride,
// dilation, padding, rank and group count, with no workspace.
//
// Rows are output pixels (of y forward, of x in the data gradient), columns are output channels of a group, and the
// reduction runs over (tap, channel). The input's matrix is never formed: each thread computes, for the element it
// loads, which pixel its row and tap meet (axis.cuh). Taps of a strided data gradient that meet no window are loaded
// as zeros, so that gradient costs stride^rank times its arithmetic here.
#include "cuda/common/launch.cuh"
#include "cuda/conv/axis.cuh"
#include "cuda/conv/simt.h"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  int64_t rows;                  // per problem
  int columns, depth, groups;
  int row_tiles, column_tiles;
  Axis axis[kRank];
  Box rows_box, taps_box;
  FastDiv row_pixels, channels;  // of the result per image; of the operand per group
  int64_t image_size, pixel_size, group_size;               // strides of the operand that is gathered, in elements
  int64_t filter_batch, filter_group;                       // strides of the filter, in elements
  int64_t filter_tap, filter_channel, filter_column;
  bool filter_depth_contiguous;
  int64_t images, result_pixel;  // images per problem; channels of a pixel of the result
};

// Where a row of the tile starts reading: its image, and its position at tap 0.
struct Row {
  int64_t image;
  int origin[kRank];
};

template <class T, class In>
struct LoadOperand : AlongDepth<T::kRows, T::kDepth, T::kThreads> {
  const Params& p;
  const In* in;
  const Row* rows;

  __device__ LoadOperand(const Params& p, const In* in, const Row* rows) : p(p), in(in), rows(rows) {}

  __device__ typename T::Sum operator()(int step, int i) const {
    const int k = step * T::kDepth + this->Depth(i);
    if (k >= p.depth) return 0;
    int channel, tap[kRank], at[kRank];
    p.taps_box.Split(p.channels.Div(k, &channel), tap);
    const Row& row = rows[this->Position(i)];
    bool inside = true;
#pragma unroll
    for (int d = 0; d < kRank; ++d)
      inside &= p.axis[d].Find(row.origin[d] + tap[d] * p.axis[d].tap_step, &at[d]);
    if (!inside) return 0;
    const int pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
    return static_cast<typename T::Sum>(in[row.image + pixel * p.pixel_size + channel]);
  }
};

template <class T, class In>
struct LoadFilter {
  using Deep = AlongDepth<T::kColumns, T::kDepth, T::kThreads>;
  using Wide = AlongPosition<T::kColumns, T::kDepth, T::kThreads>;
  const Params& p;
  const In* filter;
  int first_column;

  __device__ int Depth(int i) const { return p.filter_depth_contiguous ? Deep::Depth(i) : Wide::Depth(i); }
  __device__ int Position(int i) const { return p.filter_depth_contiguous ? Deep::Position(i) : Wide::Position(i); }

  __device__ typename T::Sum operator()(int step, int i) const {
    const int k = step * T::kDepth + Depth(i);
    const int column = first_column + Position(i);
    if (k >= p.depth || column >= p.columns) return 0;
    int channel;
    const int tap = p.channels.Div(k, &channel);
    return static_cast<typename T::Sum>(
        filter[tap * p.filter_tap + channel * p.filter_channel + column * p.filter_column]);
  }
};

template <class T, class In, class Out>
__global__ void __launch_bounds__(T::kThreads)
    DataKernel(const __grid_constant__ Params p, const In* in, const In* filter, Out* out) {
  __shared__ typename T::Shared shared;
  __shared__ Row rows[T::kRows];

  // Neighbouring blocks share input pixels: columns first, then groups.
  int block = blockIdx.x;
  const int column_tile = block % p.column_tiles;
  block /= p.column_tiles;
  const int group = block % p.groups;
  block /= p.groups;
  const int64_t first_row = int64_t{block % p.row_tiles} * T::kRows;
  const int64_t batch = block / p.row_tiles;

  // One 64-bit division for the tile, 32-bit ones within it.
  const int64_t first_image = first_row / p.row_pixels.divisor;
  const int first_pixel = static_cast<int>(first_row - first_image * p.row_pixels.divisor);
  for (int i = threadIdx.x; i < T::kRows; i += T::kThreads) {
    int pixel, at[kRank];
    const int64_t image = first_image + p.row_pixels.Div(first_pixel + i, &pixel);
    p.rows_box.Split(pixel, at);
    rows[i].image = (batch * p.images + image) * p.image_size + group * p.group_size;
    for (int d = 0; d < kRank; ++d) rows[i].origin[d] = p.axis[d].Origin(at[d]);
    // A row past the end meets nothing.
    if (first_row + i >= p.rows) rows[i].origin[0] = INT32_MIN / 2;
  }
  __syncthreads();

  typename T::Sum sums[T::kThreadRows][T::kThreadColumns] = {};
  const LoadOperand<T, In> load_in(p, in, rows);
  const LoadFilter<T, In> load_filter{p, filter + batch * p.filter_batch + group * p.filter_group,
                                      column_tile * T::kColumns};
  MultiplyTiles<T>(shared, (p.depth + T::kDepth - 1) / T::kDepth, load_in, load_filter, sums);

#pragma unroll
  for (int i = 0; i < T::kThreadRows; ++i) {
    const int64_t row = first_row + T::Row() + i;
    if (row >= p.rows) break;
    Out* result = out + (batch * p.rows + row) * p.result_pixel + group * p.columns;
#pragma unroll
    for (int j = 0; j < T::kThreadColumns; ++j) {
      const int column = column_tile * T::kColumns + T::Column() + j;
      if (column < p.columns) result[column] = static_cast<Out>(sums[i][j]);
    }
  }
}

Params MakeParams(const Problem& p, int tile_rows, int tile_columns) {
  const bool forward = p.direction == Direction::kForward;
  const Gemm g = GemmOf(p);
  const int64_t k = p.groups * p.features;
  Params q = {};
  q.rows = g.rows;
  q.columns = int(g.columns);
  q.depth = int(g.depth);
  q.groups = int(p.groups);
  q.row_tiles = int(CeilDiv(g.rows, tile_rows));
  q.column_tiles = int(CeilDiv(g.columns, tile_columns));
  for (int d = 0; d < kRank; ++d) q.axis[d] = forward ? InputAxis(p, d) : OutputAxis(p, d);
  q.rows_box = Box(forward ? p.y : p.x);
  q.taps_box = Box(p.window);
  q.row_pixels = FastDiv(forward ? p.YPixels() : p.XPixels());
  q.channels = FastDiv(forward ? p.channels : p.features);
  q.group_size = forward ? p.channels : p.features;
  q.pixel_size = p.groups * q.group_size;
  q.image_size = q.pixel_size * (forward ? p.XPixels() : p.YPixels());
  q.filter_batch = p.Taps() * p.channels * k;
  q.filter_group = p.features;
  q.filter_tap = p.channels * k;
  q.filter_channel = forward ? k : 1;
  q.filter_column = forward ? 1 : k;
  q.filter_depth_contiguous = !forward;
  q.images = p.images;
  q.result_pixel = p.groups * g.columns;
  return q;
}

}  // namespace

cudaError_t LaunchDataSimt(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                           cudaStream_t stream) {
  return VisitKernelTypes(p, config, [&](auto tile, auto in, auto result) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    using Out = typename decltype(result)::type;
    const Gemm g = GemmOf(p);
    const int64_t blocks = g.problems * CeilDiv(g.rows, T::kRows) * CeilDiv(g.columns, T::kColumns);
    return LaunchKernel(DataKernel<T, In, Out>, blocks, T::kThreads, stream, MakeParams(p, T::kRows, T::kColumns),
                  static_cast<const In*>(operand), static_cast<const In*>(filter), static_cast<Out*>(out));
  });
}

}  // namespace jaxdnn::conv
