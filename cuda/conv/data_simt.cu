// Forward convolution and data gradient as an implicit matrix product on the CUDA cores: every shape, stride,
// dilation, padding, rank and group count, with no workspace.
//
// Rows are output pixels (of y forward, of x in the data gradient), columns are output channels of a group, and the
// reduction runs over (tap, channel). The input's matrix is never formed: each thread computes, for the element it
// loads, which pixel its row and tap meet (axis.cuh). A block serves rows of one phase, that is, rows which meet the
// same taps, and goes over those alone: a strided data gradient does the arithmetic of the convolution and no more.
#include "cuda/common/launch.cuh"
#include "cuda/conv/axis.cuh"
#include "cuda/conv/simt.h"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  int64_t images;  // per problem
  int columns, channels, groups;
  int row_tiles, column_tiles, phases;  // row tiles of the largest phase
  Axis axis[kRank];
  int out[kRank], window[kRank];
  int period[kRank], tap_period[kRank];  // Phases
  int tap_distance[kRank];               // in the operand, between taps of a phase
  FastDiv channel_div;
  int64_t image_size, pixel_size, group_size;                // strides of the operand that is gathered, in elements
  int64_t filter_batch, filter_group;                        // strides of the filter, in elements
  int64_t filter_tap[kRank], filter_channel, filter_column;  // filter_tap: between taps of the whole window
  bool filter_depth_contiguous;
  int64_t result_pixel;  // channels of a pixel of the result
};

// One dimension of a phase: its positions phase + period * i, and its taps first_tap + tap_period * j.
struct PhaseAxis {
  int phase, positions, first_tap, taps;

  __device__ void Set(const Params& p, int d, int which) {
    const Axis& axis = p.axis[d];
    const int step = static_cast<int>(axis.step.divisor);
    phase = which;
    positions = (p.out[d] - phase + p.period[d] - 1) / p.period[d];
    const int candidates = min(p.tap_period[d], p.window[d]);
    first_tap = 0;
    while (first_tap < candidates && (axis.Origin(phase) + first_tap * axis.tap_step) % step != 0) ++first_tap;
    taps = first_tap < candidates ? (p.window[d] - first_tap + p.tap_period[d] - 1) / p.tap_period[d] : 0;
  }
};

// A row of the tile: its image in the operand, its position there at the phase's first tap, its pixel in the result.
struct Row {
  int64_t image, result;
  int origin[kRank];
};

template <class T, class In>
struct LoadOperand : AlongDepth<T::kRows, T::kDepth, T::kThreads> {
  const Params& p;
  const Box& taps;
  const Row* rows;
  const In* in;
  int depth;

  __device__ LoadOperand(const Params& p, const Box& taps, const Row* rows, const In* in, int depth)
      : p(p), taps(taps), rows(rows), in(in), depth(depth) {}

  __device__ typename T::Sum operator()(int step, int i) const {
    const int k = step * T::kDepth + this->Depth(i);
    if (k >= depth) return 0;
    int channel, tap[kRank], at[kRank];
    taps.Split(p.channel_div.Div(k, &channel), tap);
    const Row& row = rows[this->Position(i)];
    bool inside = true;
#pragma unroll
    for (int d = 0; d < kRank; ++d) inside &= p.axis[d].Find(row.origin[d] + tap[d] * p.tap_distance[d], &at[d]);
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
  const Box& taps;
  const In* filter;  // at the phase's first tap
  int depth, first_column;

  __device__ int Depth(int i) const { return p.filter_depth_contiguous ? Deep::Depth(i) : Wide::Depth(i); }
  __device__ int Position(int i) const { return p.filter_depth_contiguous ? Deep::Position(i) : Wide::Position(i); }

  __device__ typename T::Sum operator()(int step, int i) const {
    const int k = step * T::kDepth + Depth(i);
    const int column = first_column + Position(i);
    if (k >= depth || column >= p.columns) return 0;
    int channel, tap[kRank];
    taps.Split(p.channel_div.Div(k, &channel), tap);
    int64_t offset = channel * p.filter_channel + column * p.filter_column;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += tap[d] * p.tap_period[d] * p.filter_tap[d];
    return static_cast<typename T::Sum>(filter[offset]);
  }
};

template <class T, class In, class Out>
__global__ void __launch_bounds__(T::kThreads)
    DataKernel(const __grid_constant__ Params p, const In* in, const In* filter, Out* out) {
  __shared__ typename T::Shared shared;
  __shared__ Row rows[T::kRows];
  __shared__ PhaseAxis phase[kRank];
  __shared__ Box taps;

  // Neighbouring blocks share input pixels: columns first, then groups, then phases.
  int block = blockIdx.x;
  const int column_tile = block % p.column_tiles;
  block /= p.column_tiles;
  const int group = block % p.groups;
  block /= p.groups;
  const int which = block % p.phases;
  block /= p.phases;
  const int64_t first_row = int64_t{block % p.row_tiles} * T::kRows;
  const int64_t batch = block / p.row_tiles;

  if (threadIdx.x == 0) {
    phase[2].Set(p, 2, which % p.period[2]);
    phase[1].Set(p, 1, which / p.period[2] % p.period[1]);
    phase[0].Set(p, 0, which / p.period[2] / p.period[1]);
    taps = Box({phase[0].taps, phase[1].taps, phase[2].taps});
  }
  __syncthreads();
  const int pixels = phase[0].positions * phase[1].positions * phase[2].positions;
  const int64_t row_count = p.images * pixels;
  if (first_row >= row_count) return;

  // One 64-bit division for the tile, 32-bit ones within it.
  const int64_t first_image = first_row / pixels;
  const int first_pixel = static_cast<int>(first_row - first_image * pixels);
  for (int i = threadIdx.x; i < T::kRows; i += T::kThreads) {
    const int64_t image = batch * p.images + first_image + (first_pixel + i) / pixels;
    int pixel = (first_pixel + i) % pixels, out[kRank];
    out[2] = pixel % phase[2].positions;
    pixel /= phase[2].positions;
    out[1] = pixel % phase[1].positions;
    out[0] = pixel / phase[1].positions;
    for (int d = 0; d < kRank; ++d) {
      out[d] = phase[d].phase + p.period[d] * out[d];
      rows[i].origin[d] = p.axis[d].Origin(out[d]) + phase[d].first_tap * p.axis[d].tap_step;
    }
    rows[i].image = image * p.image_size + group * p.group_size;
    rows[i].result = ((image * p.out[0] + out[0]) * p.out[1] + out[1]) * p.out[2] + out[2];
    // A row past the end meets nothing.
    if (first_row + i >= row_count) rows[i].origin[0] = INT32_MIN / 2;
  }
  __syncthreads();

  typename T::Sum sums[T::kThreadRows][T::kThreadColumns] = {};
  const int depth = phase[0].taps * phase[1].taps * phase[2].taps * p.channels;
  filter += batch * p.filter_batch + group * p.filter_group;
  for (int d = 0; d < kRank; ++d) filter += phase[d].first_tap * p.filter_tap[d];
  const LoadOperand<T, In> load_in(p, taps, rows, in, depth);
  const LoadFilter<T, In> load_filter{p, taps, filter, depth, column_tile * T::kColumns};
  MultiplyTiles<T>(shared, (depth + T::kDepth - 1) / T::kDepth, load_in, load_filter, sums);

#pragma unroll
  for (int i = 0; i < T::kThreadRows; ++i) {
    if (first_row + T::Row() + i >= row_count) break;
    Out* result = out + rows[T::Row() + i].result * p.result_pixel + group * p.columns;
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
  const Phases phases = PhasesOf(p);
  const int64_t k = p.groups * p.features;
  Params q = {};
  q.images = p.images;
  q.columns = int(g.columns);
  q.channels = int(forward ? p.channels : p.features);
  q.groups = int(p.groups);
  q.phases = 1;
  int64_t largest = p.images;
  for (int d = 0; d < kRank; ++d) {
    q.axis[d] = forward ? InputAxis(p, d) : OutputAxis(p, d);
    q.out[d] = int(forward ? p.y[d] : p.x[d]);
    q.window[d] = int(p.window[d]);
    q.period[d] = int(phases.period[d]);
    q.tap_period[d] = int(phases.tap_period[d]);
    q.tap_distance[d] = q.axis[d].tap_step * q.tap_period[d];
    q.phases *= q.period[d];
    largest *= CeilDiv(q.out[d], q.period[d]);
  }
  q.row_tiles = int(CeilDiv(largest, tile_rows));
  q.column_tiles = int(CeilDiv(g.columns, tile_columns));
  q.channel_div = FastDiv(q.channels);
  q.group_size = q.channels;
  q.pixel_size = p.groups * q.group_size;
  q.image_size = q.pixel_size * (forward ? p.XPixels() : p.YPixels());
  q.filter_batch = p.Taps() * p.channels * k;
  q.filter_group = p.features;
  q.filter_tap[2] = p.channels * k;
  q.filter_tap[1] = q.filter_tap[2] * p.window[2];
  q.filter_tap[0] = q.filter_tap[1] * p.window[1];
  q.filter_channel = forward ? k : 1;
  q.filter_column = forward ? 1 : k;
  q.filter_depth_contiguous = !forward;
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
    const Params q = MakeParams(p, T::kRows, T::kColumns);
    const int64_t blocks = p.batch * p.groups * q.row_tiles * q.column_tiles * q.phases;
    return LaunchKernel(DataKernel<T, In, Out>, blocks, T::kThreads, stream, q, static_cast<const In*>(operand),
                        static_cast<const In*>(filter), static_cast<Out*>(out));
  });
}

}  // namespace jaxdnn::conv
