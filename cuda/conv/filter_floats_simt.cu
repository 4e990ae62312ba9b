// Filter gradient of float32 on the CUDA cores: the implicit matrix product of filter_simt.cu in the tiles of
// float_tile.cuh.
#include <algorithm>

#include "cuda/conv/filter.cuh"
#include "cuda/conv/float_tile.cuh"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {
namespace {

struct FilterFloatsParams {
  FilterParams filter;  // channels, and so rows, rounded up to fours
  int channels;
  bool dilated;
  bool whole;  // whether lines of channels and features, and all arrays, are in whole chunks of 16 bytes
};

// A pixel of y: what it reads of x at its first tap. Without dilation that is an index, and where it lies.
struct PixelOfSlice {
  int64_t from;
  int at[kRank];
};

template <class T>
struct FilterFloatsShared {
  static constexpr int kPixels = (T::kStages + 1) * T::kDepth;  // of the steps that are on their way, and the next
  typename T::template Shared<Major::kPosition, Major::kPosition> tile;
  FilterBlock block;  // there, to spare registers
  PixelOfSlice pixels[kPixels];
};

// Four channels of x, of a depth (pixel) and a row (tap and channel) of the tile. A thread asks for the same row every
// time, whose tap is decoded once; and a step's pixels are, for all threads.
template <int kPixels>
struct InputElement {
  const FilterFloatsParams& q;
  const float* x;  // at the problem, its first image of the slice, the group, and the row's channel and tap
  const FilterBlock& block;
  PixelOfSlice (&pixels)[kPixels];
  int tap[kRank];  // the row's tap, as a distance
  int count;

  __device__ InputElement(const FilterFloatsParams& q, const FilterBlock& block, const float* x, int row,
                          PixelOfSlice (&pixels)[kPixels])
      : q(q), block(block), pixels(pixels) {
    const FilterParams& p = q.filter;
    int channel;
    p.taps_box.Split(p.channels.Div(row, &channel), tap);
    for (int d = 0; d < kRank; ++d) tap[d] *= p.axis[d].tap_step;
    this->x = x + (block.x_offset + channel + (q.dilated ? 0 : Offset(tap)));
    count = row < p.rows ? q.channels - channel : 0;
  }

  __device__ int64_t Offset(const int (&at)[kRank]) const {
    const FilterParams& p = q.filter;
    return ((int64_t{at[0]} * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2]) * p.x_pixel;
  }

  __device__ void Prepare(int step) const {
    const FilterParams& p = q.filter;
    if (threadIdx.x >= kFloatDepth) return;
    const int pixel = step * kFloatDepth + threadIdx.x;
    int in_image, out[kRank];
    const int image = p.image_pixels.Div(block.first_pixel + min(pixel, block.count), &in_image);
    p.pixels_box.Split(in_image, out);
    PixelOfSlice& to = pixels[pixel % kPixels];
#pragma unroll
    for (int d = 0; d < kRank; ++d) to.at[d] = p.axis[d].Origin(out[d]);
    to.from = image * p.x_image + (q.dilated ? 0 : Offset(to.at));
    if (pixel >= block.count) to.at[0] = INT32_MIN / 2;  // outside, at every tap
  }
  __device__ int Advance() const { return 0; }
  __device__ Found operator()(int pixel, int) const {
    const PixelOfSlice& of = pixels[pixel % kPixels];
    int at[kRank];
    bool inside = true;
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      at[d] = of.at[d] + tap[d];
      inside &= static_cast<unsigned>(at[d]) < static_cast<unsigned>(q.filter.axis[d].extent);
    }
    if (!q.dilated) return {x + of.from, inside ? count : 0};
    inside = true;
#pragma unroll
    for (int d = 0; d < kRank; ++d) inside &= q.filter.axis[d].Find(of.at[d] + tap[d], &at[d]);
    return {x + (of.from + Offset(at)), inside ? count : 0};
  }
};

// And four features of y, of a depth and a column.
struct CotangentElement {
  const FilterParams& p;
  const FilterBlock& block;
  const float* y;  // at the slice's first pixel and the group
  int first_column;

  __device__ int Advance() const { return 0; }
  __device__ Found operator()(int pixel, int i) const {
    const int column = first_column + i;
    return {y + (int64_t{pixel} * p.y_pixel + column), pixel < block.count ? p.columns - column : 0};
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FilterFloatsKernel(const __grid_constant__ FilterFloatsParams q, const float* x, const float* y, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<FilterFloatsShared<T>*>(bytes);
  const FilterParams& p = q.filter;
  const FilterBlock& block = shared.block;
  if (threadIdx.x == 0) shared.block = FilterBlock(p);
  __syncthreads();
  const int first_row = block.row_tile * T::kRows, first_column = block.column_tile * T::kColumns;
  using Input = InputElement<FilterFloatsShared<T>::kPixels>;
  const int row = first_row + Bringer<T, T::kRows, Major::kPosition, Input>::Place();
  MultiplyFloats<T, Major::kPosition, Major::kPosition>(
      shared.tile, Steps{0, (block.count + T::kDepth - 1) / T::kDepth, p.pixels / T::kDepth}, q.whole,
      Input(q, block, x, row, shared.pixels), CotangentElement{p, block, y + block.y_offset, first_column});
#pragma unroll 1
  for (int four = 0; four < T::kFours; ++four) {
    constexpr int kPerRow = T::kThreadColumns / 4;
    const int row = first_row + T::template Row<Major::kPosition>(four / kPerRow);
    const int column = first_column + T::Column(four % kPerRow);
    int channel;
    const int tap = p.channels.Div(row, &channel);
    if (row >= p.rows || channel >= q.channels || column >= p.columns) continue;
    float* result = out + block.ResultOffset(p, tap * q.channels + channel) + column;
    Four v = shared.tile.sums[four][threadIdx.x];
    if (q.whole) {
      *reinterpret_cast<Four*>(result) = v;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < p.columns - column) result[j] = v.v[j];
    }
  }
}

}  // namespace

cudaError_t LaunchFilterFloats(const Problem& p, const Config& config, const void* x, const void* y, float* out,
                               cudaStream_t stream) {
  const auto launch = [&](auto tile) {
    using T = typename decltype(tile)::type;
    const bool dilated = std::any_of(p.lhs_dilation, p.lhs_dilation + kRank, [](int64_t n) { return n > 1; });
    FilterFloatsParams q = {MakeFilterParams(p, config.splits, T::kRows, T::kColumns, T::kDepth), int(p.channels),
                            dilated, InFours(p) && IsVectorAligned(x, y, out)};
    q.filter.channels = FastDiv(CeilDiv(p.channels, 4) * 4);
    q.filter.rows = int(p.Taps()) * q.filter.channels.divisor;
    q.filter.row_tiles = int(CeilDiv(q.filter.rows, T::kRows));
    static_assert(sizeof(FilterFloatsShared<T>) <= 99 << 10, "what a block may have on every device since sm_80");
    return LaunchKernel(FilterFloatsKernel<T>, {FilterBlocks(p, q.filter), T::kThreads, sizeof(FilterFloatsShared<T>)},
                        stream, q, static_cast<const float*>(x), static_cast<const float*>(y), out);
  };
  switch (config.tile) {
    case Tile::kSimt128x64:
      return launch(TypeTag<FloatTile<8, 8>>{});
    case Tile::kSimt64x64:
      return launch(TypeTag<FloatTile<4, 8>>{});
    case Tile::kSimt128x32:
      return launch(TypeTag<FloatTile<8, 4>>{});
    case Tile::kSimt64x32:
      return launch(TypeTag<FloatTile<4, 4>>{});
    case Tile::kSimtRuns:
      return LaunchFilterRuns(p, config.splits, x, y, out, stream);
    case Tile::kSimtPatch:
      return LaunchFilterPatch(p, config.splits, x, y, out, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jaxdnn::conv
