// Filter gradient as an implicit matrix product on the CUDA cores: every type, shape, stride, dilation, padding, rank
// and group count. filter.cuh says what rows, columns and slices are.
#include "cuda/conv/filter.cuh"
#include "cuda/conv/simt.h"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {
namespace {

template <class T, class In, int kVector>
struct LoadInput : AlongPosition<T::kRows, T::kDepth, T::kThreads, kVector> {
  // Every load of a thread is for the same rows, of one tap, which is then decoded once.
  static_assert(T::kThreads * kVector % T::kRows == 0);
  const FilterParams& p;
  const In* x;      // at the problem, its first image of the slice, the group and the row's channel
  int count;        // pixels in the slice
  int first_pixel;  // of the slice, within its first image
  int tap[kRank];   // the row's tap, as a distance
  bool valid;

  __device__ LoadInput(const FilterParams& p, const In* base, int first_pixel, int count, int row)
      : p(p), count(count), first_pixel(first_pixel), valid(row < p.rows) {
    int channel;
    p.taps_box.Split(p.channels.Div(row, &channel), tap);
    for (int d = 0; d < kRank; ++d) tap[d] *= p.axis[d].tap_step;
    x = base + channel;
  }

  __device__ void operator()(int step, int i, typename T::Sum* to) const {
    const int pixel = step * T::kDepth + this->Depth(i);
    if (!valid || pixel >= count) return LoadNone<kVector>(to);
    int in_image, out[kRank], at[kRank];
    const int image = p.image_pixels.Div(first_pixel + pixel, &in_image);
    p.pixels_box.Split(in_image, out);
    bool inside = true;
#pragma unroll
    for (int d = 0; d < kRank; ++d) inside &= p.axis[d].Find(p.axis[d].Origin(out[d]) + tap[d], &at[d]);
    if (!inside) return LoadNone<kVector>(to);
    const int in_pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
    LoadElements<kVector>(x + (image * p.x_image + in_pixel * p.x_pixel), to);
  }
};

template <class T, class In, int kVector>
struct LoadCotangent : AlongPosition<T::kColumns, T::kDepth, T::kThreads, kVector> {
  const FilterParams& p;
  const In* y;  // at the slice's first pixel and the group
  int count;
  int first_column;

  __device__ LoadCotangent(const FilterParams& p, const In* y, int count, int first_column)
      : p(p), y(y), count(count), first_column(first_column) {}

  __device__ void operator()(int step, int i, typename T::Sum* to) const {
    const int pixel = step * T::kDepth + this->Depth(i);
    const int column = first_column + this->Position(i);
    if (pixel >= count || column >= p.columns) return LoadNone<kVector>(to);
    LoadElements<kVector>(y + (int64_t{pixel} * p.y_pixel + column), to);
  }
};

template <class T, class In, class Out, int kVector>
__global__ void __launch_bounds__(T::kThreads)
    FilterKernel(const __grid_constant__ FilterParams p, const In* x, const In* y, Out* out) {
  __shared__ typename T::Shared shared;
  const FilterBlock block(p);
  typename T::Sum sums[T::kThreadRows][T::kThreadColumns] = {};
  using LoadX = LoadInput<T, In, kVector>;
  const LoadX load_x(p, x + block.x_offset, block.first_pixel, block.count,
                     block.row_tile * T::kRows + LoadX::Position(0));
  const LoadCotangent<T, In, kVector> load_y(p, y + block.y_offset, block.count, block.column_tile * T::kColumns);
  MultiplyTiles<T>(shared, (block.count + T::kDepth - 1) / T::kDepth, load_x, load_y, sums);

#pragma unroll
  for (int i = 0; i < T::kThreadRows; ++i) {
    const int row = block.row_tile * T::kRows + T::Row() + i;
    if (row >= p.rows) break;
    Out* result = out + block.ResultOffset(p, row);
#pragma unroll
    for (int j = 0; j < T::kThreadColumns; ++j) {
      const int column = block.column_tile * T::kColumns + T::Column() + j;
      if (column < p.columns) result[column] = static_cast<Out>(sums[i][j]);
    }
  }
}

}  // namespace

cudaError_t LaunchFilterSimt(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                             void* workspace, cudaStream_t stream) {
  return VisitKernelTypes(p, config, [&](auto tile, auto in, auto result) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    using Out = typename decltype(result)::type;
    using Sum = typename T::Sum;
    const FilterParams q = MakeFilterParams(p, config.splits, T::kRows, T::kColumns, T::kDepth);
    const auto run = [&](auto* destination) {
      using Destination = std::remove_pointer_t<decltype(destination)>;
      const auto launch = [&](auto vector) {
        return LaunchKernel(FilterKernel<T, In, Destination, decltype(vector)::value>, FilterBlocks(p, q), T::kThreads,
                            stream, q, static_cast<const In*>(x), static_cast<const In*>(y), destination);
      };
      if constexpr (kLoadsFours<T, In>)
        if (ComesInFours(p, x, y)) return launch(std::integral_constant<int, 4>());
      return launch(std::integral_constant<int, 1>());
    };
    if (!UsesWorkspace(p, config.splits)) return run(static_cast<Out*>(out));
    if (const cudaError_t status = run(static_cast<Sum*>(workspace)); status != cudaSuccess) return status;
    return SumSlices<In>(p, static_cast<const Sum*>(workspace), config.splits, x, y, out, stream);
  });
}

}  // namespace jaxdnn::conv
