// Filter gradient as an implicit matrix product on the CUDA cores: every type, shape, stride, dilation, padding, rank
// and group count. filter.cuh says what rows, columns and slices are.
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/filter.cuh"
#include "cuda/conv/simt.h"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {
namespace {

// Where an element of x lies, of a depth (pixel) and a row (tap and channel) of the tile. A thread asks for the same
// row every time, whose tap is then decoded once.
template <class In>
struct InputElement {
  const FilterParams& p;
  const In* x;  // at the problem, its first image of the slice, the group and the row's channel
  const FilterBlock& block;
  int tap[kRank];  // the row's tap, as a distance
  bool valid;

  __device__ InputElement(const FilterParams& p, const FilterBlock& block, const In* x, int row)
      : p(p), block(block), valid(row < p.rows) {
    int channel;
    p.taps_box.Split(p.channels.Div(row, &channel), tap);
    for (int d = 0; d < kRank; ++d) tap[d] *= p.axis[d].tap_step;
    this->x = x + block.x_offset + channel;
  }

  __device__ bool Deep() const { return false; }
  __device__ const In* operator()(int pixel, int) const {
    if (!valid || pixel >= block.count) return nullptr;
    int in_image, out[kRank], at[kRank];
    const int image = p.image_pixels.Div(block.first_pixel + pixel, &in_image);
    p.pixels_box.Split(in_image, out);
    bool inside = true;
#pragma unroll
    for (int d = 0; d < kRank; ++d) inside &= p.axis[d].Find(p.axis[d].Origin(out[d]) + tap[d], &at[d]);
    if (!inside) return nullptr;
    const int in_pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
    return x + (image * p.x_image + in_pixel * p.x_pixel);
  }
};

// And one of y, of a depth and a column.
template <class In>
struct CotangentElement {
  const FilterParams& p;
  const FilterBlock& block;
  const In* y;  // at the slice's first pixel and the group
  int first_column;

  __device__ bool Deep() const { return false; }
  __device__ const In* operator()(int pixel, int i) const {
    const int column = first_column + i;
    return pixel < block.count && column < p.columns ? y + (int64_t{pixel} * p.y_pixel + column) : nullptr;
  }
};

template <class In>
__global__ void __launch_bounds__(WideTile<In>::kThreads)
    FilterKernel(const __grid_constant__ FilterParams p, const In* x, const In* y, DType type, void* out) {
  using T = WideTile<In>;
  __shared__ typename T::Shared shared;
  const FilterBlock block(p);
  typename T::Sum sums[T::kThreadRows][T::kThreadColumns] = {};
  static_assert(T::kThreads % T::kRows == 0, "a thread's loads are of one row");
  const int row = block.row_tile * T::kRows + Share<T, T::kRows>{false}.Position(0);
  MultiplyTiles<T>(shared, (block.count + T::kDepth - 1) / T::kDepth, InputElement<In>(p, block, x, row),
                   CotangentElement<In>{p, block, y + block.y_offset, block.column_tile * T::kColumns}, sums);

  const int first_column = block.column_tile * T::kColumns + T::Column();
#pragma unroll 1
  for (int i = 0; i < T::kThreadRows; ++i) {
    const int row = block.row_tile * T::kRows + T::Row() + i;
    if (row >= p.rows) break;
    const int64_t offset = block.ResultOffset(p, row) + first_column;
    WithFloats<In>(type, out, [&](auto* typed) {
#pragma unroll
      for (int j = 0; j < T::kThreadColumns; ++j)
        if (first_column + j < p.columns)
          typed[offset + j] = static_cast<std::remove_pointer_t<decltype(typed)>>(sums[0][j]);
    });
    Rotate<T::kThreadColumns>(reinterpret_cast<typename T::Sum(&)[T::kThreadRows * T::kThreadColumns]>(sums));
  }
}

}  // namespace

cudaError_t LaunchFilterSimt(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                             void* workspace, cudaStream_t stream) {
  const bool in_slices = UsesWorkspace(p, config.splits);
  void* const to = in_slices ? workspace : out;
  const auto launch = [&](auto in) {
    using In = typename decltype(in)::type;
    using T = WideTile<In>;
    const FilterParams q = MakeFilterParams(p, config.splits, T::kRows, T::kColumns, T::kDepth);
    return LaunchKernel(FilterKernel<In>, FilterBlocks(p, q), T::kThreads, stream, q, static_cast<const In*>(x),
                        static_cast<const In*>(y), in_slices ? DType::kF32 : p.out, to);
  };
  const cudaError_t status = p.in == DType::kF32 ? LaunchFilterFloats(p, config, x, y, static_cast<float*>(to), stream)
                                                 : VisitKernelType(p.in, launch);
  if (status != cudaSuccess || !in_slices) return status;
  return SumSlices(p, workspace, config.splits, false, x, y, out, stream);
}

}  // namespace jaxdnn::conv
