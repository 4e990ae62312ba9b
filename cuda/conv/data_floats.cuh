// Forward convolution and data gradient of float32 on the CUDA cores: the implicit matrix product of data_simt.cu in
// tiles that come near what the multiprocessors' additions and multiplications take (float_tile.cuh).
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/conv/data.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/float_tile.cuh"

namespace jaxdnn::conv {

struct DataFloatsParams {
  DataParams data;  // channels rounded up to fours
  int channels;
  int first_column, end_column;  // of this launch
  FastDiv cluster;               // blocks that share a tile's steps
  // A pixel's channels, of which those that make several whole steps come first, tap after tap, and the rest after all
  // taps. Otherwise there are no such steps.
  FastDiv whole_channels, other_channels;
  int run;
  bool whole;  // whether lines of channels and features, and all arrays, are in whole chunks of 16 bytes
};

// Of a block: all, and those before the rest of the channels.
struct Depths {
  int count, whole;

  // The tap of a depth, and its first channel.
  __device__ int Tap(const DataFloatsParams& q, int k, int* channel) const {
    const bool rest = k >= whole;
    const FastDiv div = rest ? q.other_channels : q.whole_channels;
    const int tap = div.Div(rest ? k - whole : k, channel);
    if (rest) *channel += q.whole_channels.divisor;
    return tap;
  }
};

template <class T, bool kForward>
struct DataFloatsShared {
  static constexpr Major kMajorB = kForward ? Major::kPosition : Major::kDepth;
  using Tile = typename T::template Shared<Major::kDepth, kMajorB>;
  static constexpr Major kRowsOf = Tile::kRowsOf;
  Tile tile[T::kParts];
  Row rows[T::kRows];
  DataBlock block;  // these are there, to spare registers
  const float* filter;
  Depths depths;
  int first_column, rank;
  Steps steps;
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
  const Depths& depths;

  __device__ void Prepare(int) const {}
  __device__ int Advance() const { return kFloatDepth; }
  __device__ Found operator()(int k, int i) const {
    const DataParams& p = q.data;
    if (k >= depths.count) return {};
    int channel, distance[kRank];
    taps.Split(depths.Tap(q, k, &channel), distance);
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
  const Depths& depths;
  const int& first_column;

  __device__ void Prepare(int) const {}
  __device__ int Advance() const { return kFloatDepth * (kForward ? int(q.data.filter_channel) : 1); }
  __device__ Found operator()(int k, int i) const {
    const DataParams& p = q.data;
    const int column = first_column + i;
    if (k >= depths.count || column >= q.end_column) return {};
    int channel, tap[kRank];
    taps.Split(depths.Tap(q, k, &channel), tap);
    int64_t offset = kForward ? channel * p.filter_channel + column : channel + column * p.filter_column;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += tap[d] * p.filter_tap[d];
    const int count = kForward ? (channel < q.channels ? q.end_column - column : 0) : q.channels - channel;
    return {filter + offset, count};
  }
};

// Of the blocks' sums at one place of their shared memory, in their order.
__device__ inline Four SumOfCluster(uint32_t address, int blocks) {
  Four sum = {};
#pragma unroll 2
  for (int rank = 0; rank < blocks; ++rank) {
    const float4 more = LoadRemote(RemoteAddress(address, rank));
    sum.v[0] += more.x, sum.v[1] += more.y, sum.v[2] += more.z, sum.v[3] += more.w;
  }
  return sum;
}

template <class T, bool kForward>
__global__ void __launch_bounds__(T::kBlockThreads, T::kBlocks)
    DataFloatsKernel(const __grid_constant__ DataFloatsParams q, const float* in, const float* filter, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  using Shared = DataFloatsShared<T, kForward>;
  auto& shared = *reinterpret_cast<Shared*>(bytes);
  const DataParams& p = q.data;
  const DataBlock& block = shared.block;
  if (threadIdx.x == 0) {
    shared.block =
        T::kClusters ? DataBlock(p, q.cluster.Div(static_cast<int>(blockIdx.x), &shared.rank)) : DataBlock(p);
    if (p.by_position) shared.block.LeavePadding(p);
    shared.filter = filter + block.FilterStart(p);
    const int depth = block.Depth(p), steps = (depth + T::kDepth - 1) / T::kDepth;
    const int taps = block.Taps();
    shared.depths = {depth, taps * int(q.whole_channels.divisor)};
    shared.first_column = q.first_column + block.column_tile * T::kColumns;
    shared.steps = {0, steps, steps, q.run, taps * q.run};
    if (T::kClusters) {
      const int each = q.cluster.Div(steps + q.cluster.divisor - 1);
      shared.steps.first = min(shared.rank * each, steps);
      shared.steps.count = min(each, steps - shared.steps.first);
    }
  }
  __syncthreads();
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, shared.rows, p.by_position);
  for (int i = threadIdx.x; i < T::kRows; i += T::kBlockThreads)  // as SetRows
    shared.rows[i].image += Pixel(p, shared.rows[i].origin) * p.pixel_size;
  __syncthreads();

  MultiplyFloats<T, Major::kDepth, Shared::kMajorB>(
      shared.tile[T::Part()], shared.steps, q.whole, OperandElement{q, block.taps, shared.rows, in, shared.depths},
      FilterElement<kForward>{q, block.taps, shared.filter, shared.depths, shared.first_column});

  const bool clusters = T::kClusters && q.cluster.divisor > 1;
  if (T::kParts > 1 || clusters) __syncthreads();
  const auto sum_of_parts = [&](int four) {
    Four v = shared.tile[0].sums[four][T::Thread()];
#pragma unroll
    for (int part = 1; part < T::kParts; ++part)
#pragma unroll
      for (int j = 0; j < 4; ++j) v.v[j] += shared.tile[part].sums[four][T::Thread()].v[j];
    return v;
  };
  if (clusters) {
    if (T::kParts > 1)
#pragma unroll 1
      for (int four = T::Part(); four < T::kFours; four += T::kParts)
        shared.tile[0].sums[four][T::Thread()] = sum_of_parts(four);
    ClusterArrive();
    ClusterWait();
  }
  const bool none = IsNone(p.epilogue);
#pragma unroll 1
  for (int four = T::Part(); four < T::kFours; four += T::kParts) {
    constexpr int kPerRow = T::kThreadColumns / 4;
    const int64_t pixel = shared.rows[T::template Row<Shared::kRowsOf>(four / kPerRow)].result;
    const int column = shared.first_column + T::Column(four % kPerRow);
    if (pixel < 0 || column >= q.end_column) continue;
    const int64_t channel = block.group * int64_t{p.columns} + column, offset = pixel * p.result_pixel + channel;
    Four v;
    if (clusters) {
      // Of the blocks each finishes what some warps have.
      int of;
      q.cluster.Div(four * (T::kThreads / 32) + T::Thread() / 32, &of);
      if (of != shared.rank) continue;
      v = SumOfCluster(SharedAddress(&shared.tile[0].sums[four][T::Thread()]), q.cluster.divisor);
    } else {
      v = sum_of_parts(four);
    }
    const int count = q.end_column - column;
    if (!none) {
      const int64_t bias = block.batch * p.result_pixel + channel;
      if (q.whole) {
        Add<float>(v.v, p.epilogue.bias, bias);
        Add<float>(v.v, p.epilogue.residual, offset);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j >= count) continue;
          Add<float>(reinterpret_cast<float (&)[1]>(v.v[j]), p.epilogue.bias, bias + j);
          Add<float>(reinterpret_cast<float (&)[1]>(v.v[j]), p.epilogue.residual, offset + j);
        }
      }
      Activate<float>(v.v, p.epilogue.activation);
    }
    if (q.whole) {
      *reinterpret_cast<Four*>(out + offset) = v;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < count) out[offset + j] = v.v[j];
    }
  }
  if (clusters) {
    ClusterArrive();  // all has been read
    ClusterWait();
  }
}

// Of columns [first, end).
template <class T>
cudaError_t LaunchFloatTile(const Problem& p, const Config& config, int64_t first, int64_t end, const void* operand,
                            const void* filter, void* out, const Epilogue& epilogue, cudaStream_t stream) {
  DataFloatsParams q = {MakeDataParams(p, epilogue, T::kRows, T::kColumns), int(p.DepthChannels())};
  q.first_column = int(first);
  q.end_column = int(end);
  q.cluster = FastDiv(T::kClusters ? config.cluster : 1);
  q.whole = InFours(p) && IsVectorAligned(operand, filter, out, epilogue.bias, epilogue.residual);
  q.data.by_position = config.floats.by_position;
  q.data.images_div = FastDiv(p.images);
  q.data.channels = int(CeilDiv(q.channels, 4)) * 4;
  q.run = q.channels / T::kDepth > 1 ? q.channels / T::kDepth : 0;
  q.whole_channels = FastDiv(q.run > 0 ? q.run * T::kDepth : q.data.channels);
  q.other_channels = FastDiv(q.data.channels - int(q.whole_channels.divisor));
  q.data.column_tiles = FastDiv(CeilDiv(end - first, T::kColumns));
  constexpr size_t kForward = sizeof(DataFloatsShared<T, true>), kBackward = sizeof(DataFloatsShared<T, false>);
  static_assert(kForward <= 99 << 10 && kBackward <= 99 << 10, "what a block may have on every device since sm_80");
  const int cluster = q.cluster.divisor;
  const auto launch = [&](auto kernel, size_t bytes) {
    return LaunchKernel(kernel, {DataBlocks(p, q.data) * cluster, T::kBlockThreads, bytes, cluster}, stream, q,
                        static_cast<const float*>(operand), static_cast<const float*>(filter),
                        static_cast<float*>(out));
  };
  return p.direction == Direction::kForward ? launch(DataFloatsKernel<T, true>, kForward)
                                            : launch(DataFloatsKernel<T, false>, kBackward);
}

}  // namespace jaxdnn::conv
