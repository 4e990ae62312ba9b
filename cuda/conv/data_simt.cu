// Forward convolution and data gradient as an implicit matrix product on the CUDA cores: every type, shape, stride,
// dilation, padding, rank and group count, with no workspace. data.cuh says what rows, columns and taps are; each
// thread computes, for the element it loads, which pixel its row and tap meet.
#include "cuda/conv/data.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/simt.h"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {
namespace {

template <class T, class In, int kVector>
struct LoadOperand : AlongDepth<T::kRows, T::kDepth, T::kThreads, kVector> {
  const DataParams& p;
  const Box& taps;
  const Row* rows;
  const In* in;
  int depth;

  __device__ LoadOperand(const DataParams& p, const Box& taps, const Row* rows, const In* in, int depth)
      : p(p), taps(taps), rows(rows), in(in), depth(depth) {}

  __device__ void operator()(int step, int i, typename T::Sum* to) const {
    const int k = step * T::kDepth + this->Depth(i);
    if (k >= depth) return LoadNone<kVector>(to);
    int channel, tap[kRank], at[kRank];
    taps.Split(p.channel_div.Div(k, &channel), tap);
    const Row& row = rows[this->Position(i)];
    bool inside = row.result >= 0;
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      at[d] = row.origin[d] + tap[d] * p.tap_distance[d];
      inside &= at[d] >= 0 && at[d] < p.axis[d].extent;
    }
    if (!inside) return LoadNone<kVector>(to);
    const int pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
    LoadElements<kVector>(in + (row.image + pixel * p.pixel_size + channel), to);
  }
};

template <class T, class In, int kVector_>
struct LoadFilter {
  static constexpr int kVector = kVector_;
  using Deep = AlongDepth<T::kColumns, T::kDepth, T::kThreads, kVector>;
  using Wide = AlongPosition<T::kColumns, T::kDepth, T::kThreads, kVector>;
  const DataParams& p;
  const Box& taps;
  const In* filter;  // at the phase's first tap
  int depth, first_column;

  __device__ int Depth(int i) const { return p.filter_channel == 1 ? Deep::Depth(i) : Wide::Depth(i); }
  __device__ int Position(int i) const { return p.filter_channel == 1 ? Deep::Position(i) : Wide::Position(i); }

  __device__ void operator()(int step, int i, typename T::Sum* to) const {
    const int k = step * T::kDepth + Depth(i);
    const int column = first_column + Position(i);
    if (k >= depth || column >= p.columns) return LoadNone<kVector>(to);
    int channel, tap[kRank];
    taps.Split(p.channel_div.Div(k, &channel), tap);
    int64_t offset = channel * p.filter_channel + column * p.filter_column;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += tap[d] * p.filter_tap[d];
    LoadElements<kVector>(filter + offset, to);
  }
};

template <class T, class In, class Out, int kVector>
__global__ void __launch_bounds__(T::kThreads)
    DataKernel(const __grid_constant__ DataParams p, const In* in, const In* filter, Out* out) {
  __shared__ typename T::Shared shared;
  __shared__ Row rows[T::kRows];
  __shared__ DataBlock block;  // there, to spare registers
  if (threadIdx.x == 0) block = DataBlock(p);
  __syncthreads();
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, rows);
  __syncthreads();

  typename T::Sum sums[T::kThreadRows][T::kThreadColumns] = {};
  const int depth = block.Depth(p);
  const LoadOperand<T, In, kVector> load_in(p, block.taps, rows, in, depth);
  const LoadFilter<T, In, kVector> load_filter{p, block.taps, filter + block.FilterStart(p), depth,
                                               block.column_tile * T::kColumns};
  MultiplyTiles<T>(shared, (depth + T::kDepth - 1) / T::kDepth, load_in, load_filter, sums);

  const int first_column = block.column_tile * T::kColumns + T::Column(), count = p.columns - first_column;
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
        Add<Out>(each, p.epilogue.bias, block.batch * p.result_pixel + channel + j);
        Add<Out>(each, p.epilogue.residual, offset + j);
        v[j] = each[0];
      }
      Activate<Out>(v, p.epilogue.activation);
    }
#pragma unroll
    for (int j = 0; j < T::kThreadColumns; ++j)
      if (j < count) out[offset + j] = static_cast<Out>(v[j]);
    Rotate<T::kThreadColumns>(reinterpret_cast<typename T::Sum(&)[T::kThreadRows * T::kThreadColumns]>(sums));
  }
}

}  // namespace

cudaError_t LaunchDataSimt(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                           const Epilogue& epilogue, cudaStream_t stream) {
  return VisitKernelTypes(p, config, [&](auto tile, auto in, auto result) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    using Out = typename decltype(result)::type;
    const DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns);
    const auto launch = [&](auto vector) {
      return LaunchKernel(DataKernel<T, In, Out, decltype(vector)::value>, DataBlocks(p, q), T::kThreads, stream, q,
                          static_cast<const In*>(operand), static_cast<const In*>(filter), static_cast<Out*>(out));
    };
    if constexpr (kLoadsFours<T, In>)
      if (ComesInFours(p, operand, filter)) return launch(std::integral_constant<int, 4>());
    return launch(std::integral_constant<int, 1>());
  });
}

}  // namespace jaxdnn::conv
