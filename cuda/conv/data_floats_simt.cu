// Forward convolution and data gradient of float32 on the CUDA cores: the implicit matrix product of data_simt.cu in
// tiles that come near what the multiprocessors' additions and multiplications take (float_tile.cuh).
#include "cuda/conv/data.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/float_tile.cuh"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {
namespace {

struct DataFloatsParams {
  DataParams data;  // channels rounded up to fours
  int channels;
  int first_column, end_column;  // of this launch
  bool whole;  // whether lines of channels and features, and all arrays, are in whole chunks of 16 bytes
};

template <class T, bool kForward>
struct DataFloatsShared {
  static constexpr Major kMajorB = kForward ? Major::kPosition : Major::kDepth;
  typename T::template Shared<Major::kDepth, kMajorB> tile[T::kParts];
  Row rows[T::kRows];
  DataBlock block;  // these are there, to spare registers
  const float* filter;
  int depth, first_column, steps, run;
};

__device__ __forceinline__ int64_t Pixel(const DataParams& p, const int (&at)[kRank]) {
  return (int64_t{at[0]} * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
}

// Four channels of the operand that is gathered, of a depth (tap and channel) and a row of the tile, whose image stands
// for the pixel of its first tap.
struct OperandElement {
  const DataFloatsParams& q;
  const Box& taps;
  const Row* rows;
  const float* in;
  const int& depth;

  __device__ void Prepare(int) const {}
  __device__ int Advance() const { return kFloatDepth; }
  __device__ Found operator()(int k, int i) const {
    const DataParams& p = q.data;
    if (k >= depth) return {};
    int channel, distance[kRank];
    taps.Split(p.channel_div.Div(k, &channel), distance);
    const Row& row = rows[i];
    bool inside = row.result >= 0;
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      distance[d] *= p.tap_distance[d];
      inside &= static_cast<unsigned>(row.origin[d] + distance[d]) < static_cast<unsigned>(p.axis[d].extent);
    }
    return {in + (row.image + Pixel(p, distance) * p.pixel_size + channel), inside ? q.channels - channel : 0};
  }
};

// And of the filter, of a depth and a column: four channels in the data gradient, and otherwise four features of one.
template <bool kForward>
struct FilterElement {
  const DataFloatsParams& q;
  const Box& taps;
  const float* const& filter;  // at the phase's first tap
  const int &depth, &first_column;

  __device__ void Prepare(int) const {}
  __device__ int Advance() const { return kFloatDepth * (kForward ? int(q.data.filter_channel) : 1); }
  __device__ Found operator()(int k, int i) const {
    const DataParams& p = q.data;
    const int column = first_column + i;
    if (k >= depth || column >= q.end_column) return {};
    int channel, tap[kRank];
    taps.Split(p.channel_div.Div(k, &channel), tap);
    int64_t offset = kForward ? channel * p.filter_channel + column : channel + column * p.filter_column;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += tap[d] * p.filter_tap[d];
    const int count = kForward ? (channel < q.channels ? q.end_column - column : 0) : q.channels - channel;
    return {filter + offset, count};
  }
};

template <class T, bool kForward>
__global__ void __launch_bounds__(T::kBlockThreads, T::kBlocks)
    DataFloatsKernel(const __grid_constant__ DataFloatsParams q, const float* in, const float* filter, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  using Shared = DataFloatsShared<T, kForward>;
  auto& shared = *reinterpret_cast<Shared*>(bytes);
  const DataParams& p = q.data;
  const DataBlock& block = shared.block;
  if (threadIdx.x == 0) {
    shared.block = DataBlock(p);
    if (p.by_position) shared.block.LeavePadding(p);
    shared.filter = filter + block.FilterStart(p);
    shared.depth = block.Depth(p);
    shared.first_column = q.first_column + block.column_tile * T::kColumns;
    shared.steps = (shared.depth + T::kDepth - 1) / T::kDepth;
    // Steps of a tap that differ in the channel alone.
    shared.run = q.channels % T::kDepth == 0 ? q.channels / T::kDepth : 1;
  }
  __syncthreads();
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  if (p.by_position)
    block.SetRows<true>(p, shared.rows);
  else
    block.SetRows(p, shared.rows);
  for (int i = threadIdx.x; i < T::kRows; i += T::kBlockThreads)  // as SetRows
    shared.rows[i].image += Pixel(p, shared.rows[i].origin) * p.pixel_size;
  __syncthreads();

  MultiplyFloats<T, Major::kDepth, Shared::kMajorB>(
      shared.tile[T::Part()], shared.steps, shared.run, q.whole,
      OperandElement{q, block.taps, shared.rows, in, shared.depth},
      FilterElement<kForward>{q, block.taps, shared.filter, shared.depth, shared.first_column});

  if (T::kParts > 1) __syncthreads();
  const bool none = IsNone(p.epilogue);
#pragma unroll 1
  for (int four = T::Part(); four < T::kFours; four += T::kParts) {
    constexpr int kPerRow = T::kThreadColumns / 4;
    const int64_t pixel = shared.rows[T::template Row<Major::kDepth>(four / kPerRow)].result;
    const int column = shared.first_column + T::Column(four % kPerRow);
    if (pixel < 0 || column >= q.end_column) continue;
    const int64_t channel = block.group * int64_t{p.columns} + column, offset = pixel * p.result_pixel + channel;
    typename T::Four v = shared.tile[0].sums[four][T::Thread()];
#pragma unroll
    for (int part = 1; part < T::kParts; ++part)
#pragma unroll
      for (int j = 0; j < 4; ++j) v.v[j] += shared.tile[part].sums[four][T::Thread()].v[j];
    if (q.whole) {
      if (!none) {
        Add<float>(v.v, p.epilogue.bias, block.batch * p.result_pixel + channel);
        Add<float>(v.v, p.epilogue.residual, offset);
        Activate<float>(v.v, p.epilogue.activation);
      }
      *reinterpret_cast<typename T::Four*>(out + offset) = v;
    } else {
#pragma unroll 1
      for (int j = 0; j < min(4, q.end_column - column); ++j) {
        float each[] = {v.v[0]};
        if (!none) {
          Add<float>(each, p.epilogue.bias, block.batch * p.result_pixel + channel + j);
          Add<float>(each, p.epilogue.residual, offset + j);
          Activate<float>(each, p.epilogue.activation);
        }
        out[offset + j] = each[0];
        Rotate<1>(v.v);
      }
    }
  }
}

// Of columns [first, end).
cudaError_t LaunchColumns(const Problem& p, Tile tile, int64_t first, int64_t end, const void* operand,
                          const void* filter, void* out, const Epilogue& epilogue, cudaStream_t stream) {
  return VisitFloatTile<true>(tile, InFloatParts(p, kTiles[static_cast<int>(tile)]), [&](auto of) {
    using T = typename decltype(of)::type;
    DataFloatsParams q = {MakeDataParams(p, epilogue, T::kRows, T::kColumns), int(p.DepthChannels())};
    q.first_column = int(first);
    q.end_column = int(end);
    q.whole = InFours(p) && IsVectorAligned(operand, filter, out, epilogue.bias, epilogue.residual);
    q.data.by_position = MetByPosition(p, kTiles[static_cast<int>(tile)]).average < 1;
    q.data.images_div = FastDiv(p.images);
    q.data.channels = int(CeilDiv(q.channels, 4)) * 4;
    q.data.channel_div = FastDiv(q.data.channels);
    q.data.column_tiles = FastDiv(CeilDiv(end - first, T::kColumns));
    constexpr size_t kForward = sizeof(DataFloatsShared<T, true>), kBackward = sizeof(DataFloatsShared<T, false>);
    static_assert(kForward <= 99 << 10 && kBackward <= 99 << 10, "what a block may have on every device since sm_80");
    const auto launch = [&](auto kernel, size_t bytes) {
      return LaunchKernel(kernel, {DataBlocks(p, q.data), T::kBlockThreads, bytes}, stream, q,
                          static_cast<const float*>(operand), static_cast<const float*>(filter),
                          static_cast<float*>(out));
    };
    return p.direction == Direction::kForward ? launch(DataFloatsKernel<T, true>, kForward)
                                              : launch(DataFloatsKernel<T, false>, kBackward);
  });
}

}  // namespace

cudaError_t LaunchDataFloats(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                             const Epilogue& epilogue, cudaStream_t stream) {
  const int64_t columns = GemmOf(p).columns, rest = NarrowRest(p, kTiles[static_cast<int>(config.tile)]);
  const auto launch = [&](Tile tile, int64_t first, int64_t end) {
    return LaunchColumns(p, tile, first, end, operand, filter, out, epilogue, stream);
  };
  if (config.tile == Tile::kSimtPatch) return LaunchDataPatch(p, operand, filter, out, epilogue, stream);
  if (config.tile == Tile::kSimtRuns)
    return IsVectorAligned(operand) ? LaunchDataRuns(p, operand, filter, out, epilogue, stream)
                                    : launch(Tile::kSimt64x32, 0, columns);
  const cudaError_t status = launch(config.tile, 0, columns - rest);
  return status == cudaSuccess && rest > 0 ? launch(NarrowTile(rest), columns - rest, columns) : status;
}

}  // namespace jaxdnn::conv
