// Forward convolution and data gradient as an implicit matrix product on the CUDA cores: every type, shape, stride,
// dilation, padding, rank and group count, with no workspace. data.cuh says what rows, columns and taps are; each
// thread computes, for the element it loads, which pixel its row and tap meet.
#include "cuda/conv/data.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/simt.h"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {
namespace {

// Where an element of the operand that is gathered lies, of a depth (tap and channel) and a row of the tile.
template <class In>
struct OperandElement {
  const DataParams& p;
  const Box& taps;
  const Row* rows;
  const In* in;
  const int& depth;

  __device__ bool Deep() const { return true; }
  __device__ const In* operator()(int k, int i) const {
    if (k >= depth) return nullptr;
    int channel, tap[kRank], at[kRank];
    taps.Split(p.channel_div.Div(k, &channel), tap);
    const Row& row = rows[i];
    bool inside = row.result >= 0;
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      at[d] = row.origin[d] + tap[d] * p.tap_distance[d];
      inside &= at[d] >= 0 && at[d] < p.axis[d].extent;
    }
    if (!inside) return nullptr;
    const int pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
    return in + (row.image + pixel * p.pixel_size + channel);
  }
};

// And one of the filter, of a depth and a column. Its neighbours are those along the depth in the data gradient.
template <class In>
struct FilterElement {
  const DataParams& p;
  const Box& taps;
  const In* const& filter;  // at the phase's first tap
  const int &depth, &first_column;
  bool deep;

  __device__ bool Deep() const { return deep; }
  __device__ const In* operator()(int k, int i) const {
    const int column = first_column + i;
    if (k >= depth || column >= p.columns) return nullptr;
    int channel, tap[kRank];
    taps.Split(p.channel_div.Div(k, &channel), tap);
    int64_t offset = deep ? channel + column * p.filter_column : channel * p.filter_channel + column;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += tap[d] * p.filter_tap[d];
    return filter + offset;
  }
};

template <class T, class In>
__global__ void __launch_bounds__(T::kThreads)
    DataKernel(const __grid_constant__ DataParams p, const In* in, const In* filter, void* out) {
  __shared__ typename T::Shared shared;
  __shared__ Row rows[T::kRows];
  __shared__ DataBlock block;  // there, to spare registers
  if (threadIdx.x == 0) block = DataBlock(p);
  __syncthreads();
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, rows);
  __syncthreads();

  typename T::Sum sums[T::kThreadRows][T::kThreadColumns] = {};
  const int depth = block.Depth(p), tile_column = block.column_tile * T::kColumns;
  const In* first = filter + block.FilterStart(p);
  MultiplyTiles<T>(shared, (depth + T::kDepth - 1) / T::kDepth, OperandElement<In>{p, block.taps, rows, in, depth},
                   FilterElement<In>{p, block.taps, first, depth, tile_column, p.filter_channel == 1}, sums);

  const int first_column = tile_column + T::Column(), count = p.columns - first_column;
  const bool none = IsNone(p.epilogue);
#pragma unroll 1
  for (int i = 0; i < T::kThreadRows; ++i) {
    const int64_t pixel = rows[T::Row() + i].result;
    if (pixel < 0) break;
    const int64_t channel = block.group * int64_t{p.columns} + first_column, offset = pixel * p.result_pixel + channel;
    typename T::Sum(&v)[T::kThreadColumns] = sums[0];
    if (!none) {
#pragma unroll
      for (int j = 0; j < T::kThreadColumns; ++j) {
        if (j >= count) break;
        typename T::Sum each[1] = {v[j]};
        AddTyped<In>(p.result_type, each, p.epilogue.bias, block.batch * p.result_pixel + channel + j);
        AddTyped<In>(p.result_type, each, p.epilogue.residual, offset + j);
        v[j] = each[0];
      }
      Activate<typename T::Sum>(v, p.epilogue.activation);
    }
    WithFloats<In>(p.result_type, out, [&](auto* typed) {
#pragma unroll
      for (int j = 0; j < T::kThreadColumns; ++j)
        if (j < count) typed[offset + j] = static_cast<std::remove_pointer_t<decltype(typed)>>(v[j]);
    });
    Rotate<T::kThreadColumns>(reinterpret_cast<typename T::Sum(&)[T::kThreadRows * T::kThreadColumns]>(sums));
  }
}

}  // namespace

cudaError_t LaunchDataSimt(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                           const Epilogue& epilogue, cudaStream_t stream) {
  if (p.in == DType::kF32) return LaunchDataFloats(p, config, operand, filter, out, epilogue, stream);
  return VisitKernelType(p.in, [&](auto in) {
    using In = typename decltype(in)::type;
    const auto launch = [&](auto tile) {
      using T = typename decltype(tile)::type;
      const DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns);
      return LaunchKernel(DataKernel<T, In>, DataBlocks(p, q), T::kThreads, stream, q, static_cast<const In*>(operand),
                          static_cast<const In*>(filter), out);
    };
    if constexpr (sizeof(In) == 2)
      if (config.tile == Tile::kSimt128x8) return launch(TypeTag<NarrowTile<In>>());
    return config.tile == Tile::kSimt64x32 ? launch(TypeTag<WideTile<In>>()) : cudaErrorInvalidValue;
  });
}

}  // namespace jaxdnn::conv
