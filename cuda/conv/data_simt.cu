// Forward convolution and data gradient as an implicit matrix product on the CUDA cores: every type, shape, stride,
// dilation, padding, rank and group count, with no workspace. data.cuh says what rows, columns and taps are; each
// thread computes, for the element it loads, which pixel its row and tap meet.
#include "cuda/common/shared_bytes.cuh"
#include "cuda/conv/data.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/float_tile.cuh"
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
  __device__ int Advance() const { return kFloatDepth; }
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

// And one of the filter, of a depth and a column. Its neighbours are those along the depth in the data gradient, which
// a kernel may know when it is compiled.
template <class In, class IsDeep>
struct FilterElement {
  const DataParams& p;
  const Box& taps;
  const In* const& filter;  // at the phase's first tap
  const int &depth, &first_column;
  IsDeep deep;

  __device__ bool Deep() const { return deep; }
  __device__ int Advance() const { return kFloatDepth * (deep ? 1 : int(p.filter_channel)); }
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

template <bool kIs>
struct Known {
  __device__ operator bool() const { return kIs; }
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
  const int depth = block.Depth(p), tile_column = block.column_tile * T::kColumns;
  const In* first = filter + block.FilterStart(p);
  MultiplyTiles<T, kVector>(
      shared, (depth + T::kDepth - 1) / T::kDepth, OperandElement<In>{p, block.taps, rows, in, depth},
      FilterElement<In, bool>{p, block.taps, first, depth, tile_column, p.filter_channel == 1}, sums);

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

template <class T>
struct DataFloatsShared {
  typename T::Shared tile;
  Row rows[T::kRows];
  DataBlock block;
  const float* filter;
  int depth, first_column, steps, run;
};

template <class T, bool kForward>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    DataFloatsKernel(const __grid_constant__ DataParams p, const float* in, const float* filter, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<DataFloatsShared<T>*>(bytes);
  const DataBlock& block = shared.block;
  if (threadIdx.x == 0) {
    shared.block = DataBlock(p);
    shared.filter = filter + block.FilterStart(p);
    shared.depth = block.Depth(p);
    shared.first_column = block.column_tile * T::kColumns;
    shared.steps = (shared.depth + T::kDepth - 1) / T::kDepth;
    shared.run = p.channels % T::kDepth == 0 ? p.channels / T::kDepth : 1;  // steps of a tap
  }
  __syncthreads();
  if (block.first_row >= block.row_count) return;
  block.SetRows(p, shared.rows);
  __syncthreads();

  MultiplyFloats<T>(
      shared.tile, shared.steps, shared.run, in, OperandElement<float>{p, block.taps, shared.rows, in, shared.depth},
      filter,
      FilterElement<float, Known<!kForward>>{p, block.taps, shared.filter, shared.depth, shared.first_column, {}});

  const bool none = IsNone(p.epilogue);
#pragma unroll 1
  for (int four = 0; four < T::kFours; ++four) {
    const int64_t pixel = shared.rows[T::RowOf(four)].result;
    const int column = shared.first_column + T::ColumnOf(four);
    if (pixel < 0 || column >= p.columns) continue;
    const int64_t channel = block.group * int64_t{p.columns} + column, offset = pixel * p.result_pixel + channel;
    typename T::Four v = shared.tile.sums[four][threadIdx.x];
    if (!none) {
      Add<float>(v.v, p.epilogue.bias, block.batch * p.result_pixel + channel);
      Add<float>(v.v, p.epilogue.residual, offset);
      Activate<float>(v.v, p.epilogue.activation);
    }
    *reinterpret_cast<typename T::Four*>(out + offset) = v;
  }
}

}  // namespace

cudaError_t LaunchDataSimt(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                           const Epilogue& epilogue, cudaStream_t stream) {
  if (TakesFloatTiles(p) && IsVectorAligned(operand, filter, out, epilogue.bias, epilogue.residual)) {
    const auto launch = [&](auto tile) {
      using T = typename decltype(tile)::type;
      const DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns);
      const auto kernel = p.direction == Direction::kForward ? DataFloatsKernel<T, true> : DataFloatsKernel<T, false>;
      return LaunchKernel(kernel, {DataBlocks(p, q), T::kThreads, sizeof(DataFloatsShared<T>)}, stream, q,
                          static_cast<const float*>(operand), static_cast<const float*>(filter),
                          static_cast<float*>(out));
    };
    // Half as wide where a block has too little shared memory, as on devices that are not for servers.
    const bool wide = config.tile == Tile::kSimt128x128;
    if (wide && CanShare(sizeof(DataFloatsShared<FloatTile<128>>))) return launch(TypeTag<FloatTile<128>>{});
    if (wide || config.tile == Tile::kSimt128x64) return launch(TypeTag<FloatTile<64>>{});
  }
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
