// Forward convolution and data gradient of float32 on the CUDA cores for few columns: small groups, few features, or,
// in the data gradient, few channels. The product's tiles would have more columns than there are, and read every pixel
// again for every tap.
//
// A thread computes four columns of eight neighbours along the last dimension: with every tap it needs one further
// pixel and forgets the first. Eight threads share a run of pixels, and each takes four of every 32 channels, so that
// their loads are lines of 128 bytes; those of a group add up what they have, each for some of the pixels. Of small
// groups the 32 channels are several. The filter of the block's columns is in shared memory.
#include "cuda/conv/data.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/four.cuh"
#include "cuda/conv/runs_plan.h"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {
namespace {

struct RunsParams {
  DataParams data;  // its groups are sets of so many as eight lanes take
  int groups, channels;
  int first_column;  // of this launch
  int group_lanes;   // 1, 2, 4 or 8 to a group
  int chunks;        // of 32 channels, of a group
  int tiles;         // of kRuns, of a block
  bool whole;        // whether results are stored in fours
};

struct RunsBlock : DataBlock {
  FastDiv in_image;  // runs of an image
  Box in_line;       // and of a line, by positions of a phase
  int runs;

  __device__ explicit RunsBlock(const DataParams& p) : DataBlock(p) {
    const int extent[kRank] = {phase[0].positions, phase[1].positions, (phase[2].positions + kRun - 1) / kRun};
    in_line = Box(extent);
    in_image = FastDiv(extent[0] * extent[1] * extent[2]);
    runs = int(p.images) * in_image.divisor;
  }
};

// The lane's place: its group, and its first channel of a chunk's.
struct Lane {
  int lane, group, channel;

  __device__ Lane(const RunsParams& q, const DataBlock& block) {
    lane = threadIdx.x % kLanes;
    group = block.group * (kLanes / q.group_lanes) + lane / q.group_lanes;
    channel = lane % q.group_lanes * 4;
    if (group >= q.groups) channel = q.channels;  // has none
  }
};

constexpr int kBlockBytes = (sizeof(RunsBlock) + 15) / 16 * 16;
static_assert(kBlockBytes + kMostFilterBytes <= 99 << 10, "what a block may have on every device since sm_80");

// [chunk][tap][channel of the lane's four][lane], each four columns; the taps along the last dimension in the order in
// which they meet pixels.
__device__ void LoadFilter(const RunsParams& q, const DataBlock& block, const float* filter, Four* to) {
  const DataParams& p = q.data;
  const Box& box = block.taps;
  const int taps = box.plane.divisor * block.phase[0].taps, last = block.phase[2].taps - 1;
  const int first_column = q.first_column + block.column_tile * 4;
  const Lane of(q, block);
  const int64_t start = block.FilterStart(p) - block.group * p.filter_group + of.group * p.filter_group;
  for (int i = threadIdx.x / kLanes; i < q.chunks * taps * 4; i += kRuns) {
    const int chunk = i / 4 / taps;
    int tap[kRank];
    box.Split(i / 4 - chunk * taps, tap);
    if (p.tap_distance[2] < 0) tap[2] = last - tap[2];
    int64_t offset = start + first_column * p.filter_column;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += tap[d] * p.filter_tap[d];
    const int channel = chunk * 32 + of.channel + i % 4;
    Four v = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (channel < q.channels && first_column + j < p.columns)
        v.v[j] = filter[offset + channel * p.filter_channel + j * p.filter_column];
    to[i * kLanes + of.lane] = v;
  }
}

// The sums of a run's pixels, kRun of them, over a chunk of channels.
struct Sums {
  float of[kRun][4];

  // Products with a window, of which the first pixel is at `first`, of a tap. To and fro, so that from one product to
  // the next only one operand changes, and channel by channel, so that few share a bank of registers (float_tile.cuh).
  __device__ __forceinline__ void Add(const Four (&window)[kRun], int first, const Four (&w)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int j = i % 2 == 0 ? n : 3 - n;
          of[i][j] += window[(first + i) % kRun].v[c] * w[c].v[j];
        }
  }

  // Of the first 2 kN pixels, the lanes that are `apart` keep kN each, of both's sums.
  template <int kN>
  __device__ __forceinline__ void Halve(int apart) {
    const bool upper = threadIdx.x & apart;
#pragma unroll
    for (int i = 0; i < kN; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float give = upper ? of[i][j] : of[kN + i][j], keep = upper ? of[kN + i][j] : of[i][j];
        of[i][j] = keep + __shfl_xor_sync(0xffffffff, give, apart);
      }
  }
};

__global__ void __launch_bounds__(kRunThreads, 4)
    DataRunsKernel(const __grid_constant__ RunsParams q, const float* in, const float* filter, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& block = *reinterpret_cast<RunsBlock*>(bytes);
  auto* const weights = reinterpret_cast<Four*>(bytes + kBlockBytes);
  const DataParams& p = q.data;
  if (threadIdx.x == 0) block = RunsBlock(p);
  __syncthreads();
  const int taps = block.phase[0].taps * block.phase[1].taps, along = block.phase[2].taps;
  if (block.first_row >= block.runs) return;  // not every phase has as many as the largest
  LoadFilter(q, block, filter, weights);
  __syncthreads();

  const Lane of(q, block);
  const int extent = p.axis[2].extent;
  const bool none = IsNone(p.epilogue);
  for (int tile = 0; tile < q.tiles; ++tile) {
    const int first_run = int(block.first_row) + tile * kRuns, number = first_run + threadIdx.x / kLanes;
    if (first_run >= block.runs) break;
    const bool exists = number < block.runs;
    // The run's place: its image, and the phase's position of its first pixel.
    int in_image, at[kRank], origin[kRank];
    const int64_t image = block.batch * p.images + block.in_image.Div(exists ? number : 0, &in_image);
    block.in_line.Split(in_image, at);
    at[2] *= kRun;
    int64_t result = image;
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      const int to = block.phase[d].phase + p.period[d] * at[d];
      const int position = p.axis[d].Origin(to) + block.phase[d].first_tap * p.axis[d].tap_step;
      const int index = p.axis[d].step.Div(abs(position));
      origin[d] = position < 0 ? -index : index;
      result = result * p.extent[d] + to;
    }
    // In the order of pixels the last tap comes first where their indices fall.
    const int begin = p.tap_distance[2] < 0 ? origin[2] - (along - 1) : origin[2];
    const float* const pixels = in + image * p.image_size + of.group * int64_t{q.channels} + of.channel;

    Sums sums = {};
    for (int chunk = 0; chunk < q.chunks; ++chunk) {
      const bool has = exists && chunk * 32 + of.channel < q.channels;
      for (int tap = 0; tap < taps; ++tap) {
        const int tap_0 = tap / block.phase[1].taps, tap_1 = tap - tap_0 * block.phase[1].taps;
        const int at_0 = origin[0] + tap_0 * p.tap_distance[0], at_1 = origin[1] + tap_1 * p.tap_distance[1];
        const bool has_line = has && static_cast<unsigned>(at_0) < static_cast<unsigned>(p.axis[0].extent) &&
                              static_cast<unsigned>(at_1) < static_cast<unsigned>(p.axis[1].extent);
        const float* const line =
            pixels + chunk * 32 + (int64_t{at_0} * p.axis[1].extent + at_1) * extent * p.pixel_size;
        const auto load = [&](int i) {
          const bool inside = has_line && static_cast<unsigned>(begin + i) < static_cast<unsigned>(extent);
          return inside ? LoadConstant(reinterpret_cast<const Four*>(line + (begin + i) * p.pixel_size)) : Four{};
        };
        const Four* const w = weights + ((chunk * taps + tap) * along) * 4 * kLanes + of.lane;
        Four window[kRun];
#pragma unroll
        for (int i = 0; i < kRun - 1; ++i) window[i] = load(i);
        for (int first = 0; first < along; first += kRun) {
#pragma unroll
          for (int i = 0; i < kRun; ++i) {
            if (first + i >= along) break;
            window[(i + kRun - 1) % kRun] = load(first + i + kRun - 1);
            Four of_tap[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) of_tap[c] = w[((first + i) * 4 + c) * kLanes];
            sums.Add(window, i, of_tap);
          }
        }
      }
    }

    // Each lane of a group keeps as many pixels.
    int first = 0, count = kRun;
    const auto keep = [&](int apart) {
      count /= 2;
      if (threadIdx.x & apart) first += count;
    };
    if (int apart = q.group_lanes / 2; apart > 0) {
      sums.Halve<4>(apart), keep(apart);
      if (apart /= 2; apart > 0) {
        sums.Halve<2>(apart), keep(apart);
        if (apart /= 2; apart > 0) sums.Halve<1>(apart), keep(apart);
      }
    }
    const int column = q.first_column + block.column_tile * 4, columns = min(4, p.columns - column);
    const int64_t channel = of.group * int64_t{p.columns} + column;
    result += int64_t{first} * p.period[2];
    if (!exists || of.group >= q.groups) continue;
#pragma unroll 1
    for (int i = 0; i < count && at[2] + first + i < block.phase[2].positions; ++i, result += p.period[2]) {
      const int64_t offset = result * p.result_pixel + channel;
      float (&v)[4] = sums.of[0];
      if (q.whole) {
        if (!none) {
          Add<float>(v, p.epilogue.bias, block.batch * p.result_pixel + channel);
          Add<float>(v, p.epilogue.residual, offset);
          Activate<float>(v, p.epilogue.activation);
        }
        *reinterpret_cast<Four*>(out + offset) = {v[0], v[1], v[2], v[3]};
      } else {
        if (!none) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (j >= columns) break;
            float each[] = {v[j]};
            Add<float>(each, p.epilogue.bias, block.batch * p.result_pixel + channel + j);
            Add<float>(each, p.epilogue.residual, offset + j);
            v[j] = each[0];
          }
          Activate<float>(v, p.epilogue.activation);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j < columns) out[offset + j] = v[j];
      }
      Rotate<4>(reinterpret_cast<float (&)[kRun * 4]>(sums.of));
    }
  }
}

}  // namespace

cudaError_t LaunchDataRuns(const Problem& p, int64_t first_column, const void* operand, const void* filter, void* out,
                           const Epilogue& epilogue, cudaStream_t stream) {
  const int64_t columns = GemmOf(p).columns - first_column;
  const RunsShape shape = RunsShapeOf(p, columns);
  RunsParams q = {MakeDataParams(p, epilogue, kRuns, 4)};
  q.groups = int(p.groups);
  q.channels = int(p.DepthChannels());
  q.first_column = int(first_column);
  q.group_lanes = shape.group_lanes;
  q.chunks = shape.chunks;
  q.whole = GemmOf(p).columns % 4 == 0 && IsVectorAligned(out, epilogue.bias, epilogue.residual);
  q.tiles = int(shape.tiles);
  q.data.groups = int(shape.sets);
  q.data.group_div = FastDiv(shape.sets);
  q.data.tile_rows = int(shape.tiles) * kRuns;
  q.data.row_tiles = FastDiv(shape.row_tiles);
  q.data.column_tiles = FastDiv(CeilDiv(columns, 4));
  return LaunchKernel(DataRunsKernel, {DataBlocks(p, q.data), kRunThreads, size_t(kBlockBytes + shape.filter_bytes)},
                      stream, q, static_cast<const float*>(operand), static_cast<const float*>(filter),
                      static_cast<float*>(out));
}

}  // namespace jaxdnn::conv
