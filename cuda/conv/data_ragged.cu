// Forward convolution and data gradient on the tensor cores where lines are no whole chunks (ragged.cuh): an implicit
// matrix product as in data_mma.cu, of one group at a time.
//
// Bound by the tensor cores as long as the shifting, some thirty instructions for each chunk, keeps up: a step of
// 128x64 sums has six chunks a thread and 32 products a warp.
#include "cuda/conv/mma.h"
#include "cuda/conv/ragged.cuh"

namespace jaxdnn::conv {
namespace {

template <class T, bool kForward, class In>
using LoadRaggedFilter =
    std::conditional_t<kForward, LoadRaggedFilterForward<T, In>, LoadRaggedFilterTransposed<T, In>>;

// kAligned: the operand's lines are whole chunks, only the filter's are not.
template <class T, bool kAligned, bool kForward, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    DataRaggedKernel(const __grid_constant__ DataParams p, Bounds<In> in, Bounds<In> filter, bool wide, void* out) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Row rows[T::kRows];
  const DataBlock block(p);
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, rows);
  __syncthreads();

  typename T::Sums sums = {};
  const int depth = block.Depth(p), steps = (depth + T::kDepth - 1) / T::kDepth;
  LoadRaggedFilter<T, kForward, In> load_b(p, block, filter);
  const auto multiply = [&](auto load_a) {
    MultiplyPipelined<In, T>(SharedAddress(ring), steps, load_a, load_b, sums);
  };
  if constexpr (kAligned) {
    multiply(LoadOperand<T, kChunk<In>, In>(p, block, rows, in.begin, depth));
  } else {
    multiply(LoadRaggedOperand<T, In>(p, block, rows, in));
  }

  const int first_column = block.column_tile * T::kColumns;
  const auto channel = [&](int column) { return block.group * int64_t{p.columns} + first_column + column; };
  const auto address = [&](int row, int column) -> int64_t {
    const int64_t pixel = rows[row].result;
    return pixel < 0 || first_column + column >= p.columns ? -1 : pixel * p.result_pixel + channel(column);
  };
  const auto bias = [&](int column) { return block.batch * p.result_pixel + channel(column); };
  StoreData<T, kForward, In>(p, ring, sums, address, bias, p.whole_runs, wide, out);
}

template <Direction kDirection, class In, int kProducts>
cudaError_t LaunchType(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                       const Epilogue& epilogue, cudaStream_t stream) {
  constexpr bool kForward = kDirection == Direction::kForward;
  const bool aligned = IsChunk(AlignedRun(p.DepthChannels(), p.in, {operand}), p.in);
  const auto launch = [&](auto tile, auto is_aligned) {
    using T = typename decltype(tile)::type;
    constexpr bool kAligned = decltype(is_aligned)::value;
    DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns);
    q.channels = int(CeilDiv(q.channels, kChunk<In>)) * kChunk<In>;
    q.channel_div = FastDiv(q.channels);
    q.whole_runs = IsChunk(AlignedRun(GemmOf(p).columns, p.out, {out, epilogue.bias, epilogue.residual}), p.out);
    const auto bounds = [](const void* array, int64_t size) {
      return Bounds<In>{static_cast<const In*>(array), static_cast<const In*>(array) + size};
    };
    const Grid grid = {DataBlocks(p, q), T::kThreads,
                       kSharedBytes<T, LoadRaggedOperand<T, In>, LoadRaggedFilter<T, kForward, In>>};
    return LaunchKernel(DataRaggedKernel<T, kAligned, kForward, In>, grid, stream, q,
                        bounds(operand, p.batch * p.images * q.image_size), bounds(filter, p.FilterSize()),
                        p.out != p.in, out);
  };
  const auto with_tile = [&](auto tile) {
    return aligned ? launch(tile, std::true_type()) : launch(tile, std::false_type());
  };
  if (config.tile == Tile::kMma128x32)
    return with_tile(TypeTag<MmaTile<In, kDirection, 128, 32, 4, 1, 3, kProducts>>());
  return with_tile(TypeTag<MmaTile<In, kDirection, 128, 64, 2, 2, 2, kProducts>>());
}

template <Direction kDirection, class... Args>
cudaError_t LaunchDirection(const Problem& p, const Args&... args) {
  if (p.in == DType::kBF16) return LaunchType<kDirection, __nv_bfloat16, 1>(p, args...);
  if (p.in == DType::kF16) return LaunchType<kDirection, __half, 1>(p, args...);
  return p.products == 3 ? LaunchType<kDirection, float, 3>(p, args...) : LaunchType<kDirection, float, 1>(p, args...);
}

}  // namespace

cudaError_t LaunchDataRagged(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                             const Epilogue& epilogue, cudaStream_t stream) {
  return p.direction == Direction::kForward
             ? LaunchDirection<Direction::kForward>(p, config, operand, filter, out, epilogue, stream)
             : LaunchDirection<Direction::kDataGradient>(p, config, operand, filter, out, epilogue, stream);
}

}  // namespace jaxdnn::conv
