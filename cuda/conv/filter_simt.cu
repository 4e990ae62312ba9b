// Filter gradient as an implicit matrix product on the CUDA cores: every shape, stride, dilation, padding, rank and
// group count.
//
// Rows are (tap, channel) pairs, columns the output channels of a group, and the reduction runs over all pixels of y.
// The result is small and the reduction long, so the pixels are cut into slices, one block each; a second kernel adds
// the slices' partial sums in order, which makes the result the same in every run.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/conv/axis.cuh"
#include "cuda/conv/simt.h"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  int64_t pixels;  // of y, per problem
  int64_t slice;   // of them in a block, a multiple of the tile's depth
  int rows, columns, groups;
  int row_tiles, column_tiles, splits;
  Axis axis[kRank];
  Box pixels_box, taps_box;
  FastDiv image_pixels, channels;             // of y per image; of x per group
  int64_t images, x_image, x_pixel, y_pixel;  // strides in elements
  int64_t result_size;                        // elements of the whole result
};

template <class T, class In>
struct LoadInput : AlongPosition<T::kRows, T::kDepth, T::kThreads> {
  // Every load of a thread is for the same row, whose tap is then decoded once.
  static_assert(T::kThreads % T::kRows == 0);
  const Params& p;
  const In* x;      // at the problem, its first image of the slice, the group and the row's channel
  int count;        // pixels in the slice
  int first_pixel;  // of the slice, within its first image
  int tap[kRank];   // the row's tap, as a distance
  bool valid;

  __device__ LoadInput(const Params& p, const In* base, int64_t first_image, int first_pixel, int count, int row)
      : p(p), count(count), first_pixel(first_pixel), valid(row < p.rows) {
    int channel;
    p.taps_box.Split(p.channels.Div(row, &channel), tap);
    for (int d = 0; d < kRank; ++d) tap[d] *= p.axis[d].tap_step;
    x = base + first_image * p.x_image + channel;
  }

  __device__ typename T::Sum operator()(int step, int i) const {
    const int pixel = step * T::kDepth + this->Depth(i);
    if (!valid || pixel >= count) return 0;
    int in_image, out[kRank], at[kRank];
    const int image = p.image_pixels.Div(first_pixel + pixel, &in_image);
    p.pixels_box.Split(in_image, out);
    bool inside = true;
#pragma unroll
    for (int d = 0; d < kRank; ++d) inside &= p.axis[d].Find(p.axis[d].Origin(out[d]) + tap[d], &at[d]);
    if (!inside) return 0;
    const int in_pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
    return static_cast<typename T::Sum>(x[image * p.x_image + in_pixel * p.x_pixel]);
  }
};

template <class T, class In>
struct LoadCotangent : AlongPosition<T::kColumns, T::kDepth, T::kThreads> {
  const Params& p;
  const In* y;  // at the slice's first pixel and the group
  int count;
  int first_column;

  __device__ LoadCotangent(const Params& p, const In* y, int count, int first_column)
      : p(p), y(y), count(count), first_column(first_column) {}

  __device__ typename T::Sum operator()(int step, int i) const {
    const int pixel = step * T::kDepth + this->Depth(i);
    const int column = first_column + this->Position(i);
    if (pixel >= count || column >= p.columns) return 0;
    return static_cast<typename T::Sum>(y[int64_t{pixel} * p.y_pixel + column]);
  }
};

template <class T, class In, class Out>
__global__ void __launch_bounds__(T::kThreads)
    FilterKernel(const __grid_constant__ Params p, const In* x, const In* y, Out* out) {
  __shared__ typename T::Shared shared;

  int block = blockIdx.x;
  const int column_tile = block % p.column_tiles;
  block /= p.column_tiles;
  const int row_tile = block % p.row_tiles;
  block /= p.row_tiles;
  const int group = block % p.groups;
  block /= p.groups;
  const int split = block % p.splits;
  const int64_t batch = block / p.splits;

  const int64_t begin = min(split * p.slice, p.pixels);
  const int count = static_cast<int>(min(p.slice, p.pixels - begin));
  const int64_t first_image = begin / p.image_pixels.divisor;
  const int first_pixel = static_cast<int>(begin - first_image * p.image_pixels.divisor);

  typename T::Sum sums[T::kThreadRows][T::kThreadColumns] = {};
  const LoadInput<T, In> load_x(p, x + batch * p.images * p.x_image + group * int64_t{p.channels.divisor}, first_image,
                                first_pixel, count, row_tile * T::kRows + static_cast<int>(threadIdx.x % T::kRows));
  const LoadCotangent<T, In> load_y(p, y + (batch * p.pixels + begin) * p.y_pixel + group * int64_t{p.columns}, count,
                                    column_tile * T::kColumns);
  MultiplyTiles<T>(shared, (count + T::kDepth - 1) / T::kDepth, load_x, load_y, sums);

  out += split * p.result_size;
#pragma unroll
  for (int i = 0; i < T::kThreadRows; ++i) {
    const int row = row_tile * T::kRows + T::Row() + i;
    if (row >= p.rows) break;
    Out* result = out + (batch * p.rows + row) * p.y_pixel + group * int64_t{p.columns};
#pragma unroll
    for (int j = 0; j < T::kThreadColumns; ++j) {
      const int column = column_tile * T::kColumns + T::Column() + j;
      if (column < p.columns) result[column] = static_cast<Out>(sums[i][j]);
    }
  }
}

// out[i] = partial[0][i] + partial[1][i] + ...
template <class Sum, class Out>
__global__ void SumSlicesKernel(const Sum* partial, Out* out, int64_t size, int splits) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= size) return;
  Sum sum = 0;
  for (int s = 0; s < splits; ++s) sum += partial[s * size + i];
  out[i] = static_cast<Out>(sum);
}

Params MakeParams(const Problem& p, const Config& config, int tile_rows, int tile_columns) {
  const Gemm g = GemmOf(p);
  Params q = {};
  q.pixels = g.depth;
  const int64_t depth = TileDepth(p.in);
  q.slice = std::max<int64_t>(1, CeilDiv(CeilDiv(g.depth, config.splits), depth)) * depth;
  q.rows = int(g.rows);
  q.columns = int(g.columns);
  q.groups = int(p.groups);
  q.row_tiles = int(CeilDiv(g.rows, tile_rows));
  q.column_tiles = int(CeilDiv(g.columns, tile_columns));
  q.splits = int(config.splits);
  for (int d = 0; d < kRank; ++d) q.axis[d] = InputAxis(p, d);
  q.pixels_box = Box(p.y);
  q.taps_box = Box(p.window);
  q.image_pixels = FastDiv(p.YPixels());
  q.channels = FastDiv(p.channels);
  q.images = p.images;
  q.x_pixel = p.groups * p.channels;
  q.x_image = q.x_pixel * p.XPixels();
  q.y_pixel = p.groups * p.features;
  q.result_size = p.FilterSize();
  return q;
}

}  // namespace

cudaError_t LaunchFilterSimt(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                             void* workspace, cudaStream_t stream) {
  return VisitKernelTypes(p, config, [&](auto tile, auto in, auto result) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    using Out = typename decltype(result)::type;
    using Sum = typename T::Sum;
    const Params q = MakeParams(p, config, T::kRows, T::kColumns);
    const int64_t blocks = p.batch * p.groups * q.row_tiles * q.column_tiles * config.splits;
    const auto run = [&](auto* destination) {
      using Destination = std::remove_pointer_t<decltype(destination)>;
      return LaunchKernel(FilterKernel<T, In, Destination>, blocks, T::kThreads, stream, q, static_cast<const In*>(x),
                          static_cast<const In*>(y), destination);
    };
    if (config.splits == 1) return run(static_cast<Out*>(out));
    if (const cudaError_t status = run(static_cast<Sum*>(workspace)); status != cudaSuccess) return status;
    constexpr int kThreads = 256;
    return LaunchKernel(SumSlicesKernel<Sum, Out>, CeilDiv(q.result_size, kThreads), kThreads, stream,
                        static_cast<const Sum*>(workspace), static_cast<Out*>(out), q.result_size, q.splits);
  });
}

}  // namespace jaxdnn::conv
