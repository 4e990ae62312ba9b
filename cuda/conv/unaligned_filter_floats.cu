// Filter gradient, without stride, of unaligned channels or features of floats, as TF32.
//
// Terms are rows as unaligned_plan.h says, columns are features, and the result's rows are the channels of all taps of
// the window, side by side: 65 channels of nine taps are 585 rows, of which eight warps have 80 each. Both operands lie
// as they are, a pixel's elements next to each other, which wgmma cannot read of floats; mma.sync reads them one by
// one. So four warps copy single elements, of any alignment, and every row of the result reads them at a place of its
// own, its tap's pixels further on.
//
// Rows that are no pixels of y have zeros there, but x may have an infinity where they meet it: see unaligned_sum.cuh.
#include "cuda/conv/unaligned.h"
#include "cuda/conv/unaligned_sum.cuh"

namespace jaxdnn::conv {
namespace {

using Plan = UnalignedFloatsPlan;
constexpr int kColumns = UnalignedPlan::kColumns, kBlocks = Plan::kWarpRows / 16, kConsumers = 32 * Plan::kWarps;
constexpr int kCopiers = 128, kThreads = kConsumers + kCopiers;
using Sums = float[kBlocks][kColumns / 8][4];

struct Params : UnalignedSlices {
  FastDiv channel_slices, tap_groups, slice_channels, last_channels, columns_div, last_columns;
  int parts, tile_rows, slice_rows, pitch, stage_bytes, shared_bytes;
};

// What a block works on.
struct Place {
  int split, column, channel, plane_tap, first_line;
  FastDiv channels, columns;

  __device__ explicit Place(const Params& q) {
    int column_tile, slice, group;
    int rest = q.column_tiles_div.Div(blockIdx.x, &column_tile);
    rest = q.channel_slices.Div(rest, &slice);
    split = q.tap_groups.Div(rest, &group);
    plane_tap = group / q.groups;
    first_line = (group - plane_tap * q.groups) * q.tap_lines;
    column = column_tile * q.columns;
    channel = slice * q.slice_channels.divisor;
    channels = channel + int(q.slice_channels.divisor) > q.channels ? q.last_channels : q.slice_channels;
    columns = column + q.columns > q.features ? q.last_columns : q.columns_div;
  }
  __device__ int FirstRow(const Params& q) const { return split * q.slice_rows; }
  __device__ int EndRow(const Params& q) const { return min(FirstRow(q) + q.slice_rows, q.rows); }
};

struct Shared {
  uint32_t stages, barriers;
  float* sums;
  int* pixels;  // of each stage x's, then y's

  __device__ Shared(const Params& q, unsigned char* shared)
      : stages(SharedAddress(shared)),
        barriers(stages + q.shared_bytes),
        sums(reinterpret_cast<float*>(shared)),
        pixels(reinterpret_cast<int*>(shared + q.shared_bytes + 64)) {}
  __device__ uint32_t Full(int i) const { return barriers + 16 * i; }
  __device__ uint32_t Empty(int i) const { return barriers + 16 * i + 8; }
};

// Some channels of these pixels, each `pitch` bytes further on; zeros for those that do not exist.
__device__ __forceinline__ void CopyPixels(const FastDiv& channels, const int* pixels, int count, const float* from,
                                           int all, int pitch, uint32_t to) {
  constexpr int kAtOnce = 4;
  const int thread = threadIdx.x - kConsumers, each = channels.divisor;
  int channel, further;
  int i = channels.Div(thread, &channel);
  const int apart = channels.Div(kCopiers, &further);
#pragma unroll 1
  while (i < count) {
    int line[kAtOnce], element[kAtOnce], pixel[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      line[k] = i, element[k] = channel, pixel[k] = pixels[min(i, count - 1)];
      i += apart, channel += further;
      if (channel >= each) channel -= each, ++i;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (line[k] < count)
        CopyAsync<4>(to + line[k] * pitch + element[k] * 4, from + (int64_t{max(pixel[k], 0)} * all + element[k]),
                     pixel[k] >= 0);
  }
}

__device__ void Produce(const Params& q, const Shared& shared, const Place& place, const float* x, const float* y) {
  const int thread = threadIdx.x - kConsumers, end = place.EndRow(q);
  UnalignedTurn turn;
  for (int first = place.FirstRow(q); first < end; first += q.tile_rows) {
    int* const x_pixels = shared.pixels + turn.stage * (q.pixels + q.tile_rows);
    int* const y_pixels = x_pixels + q.pixels;
    FindPixels(q, thread, kCopiers, first + place.first_line * q.line_step, place.plane_tap, x_pixels);
    for (int i = thread; i < q.tile_rows; i += kCopiers) {
      bool exists;
      const int pixel = ResultPixel(q, first + i, &exists);
      y_pixels[i] = exists && first + i < end ? pixel : -1;
    }
    // Nobody is two tiles ahead of another.
    hopper::SyncThreads(4, kCopiers);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    const uint32_t stage = shared.stages + turn.stage * q.stage_bytes;
    CopyPixels(place.channels, x_pixels, q.pixels, x + place.channel, q.channels, q.pitch, stage);
    CopyPixels(place.columns, y_pixels, q.tile_rows, y + place.column, q.features, kColumns * 4,
               stage + q.pixels * q.pitch);
    hopper::ArriveWithCopies(shared.Full(turn.stage));
    turn.Next(2);
  }
}

__device__ __forceinline__ uint32_t LoadWord(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// The sums of a warp's rows, from `first_row` on, over every part-th eight of the slice's rows.
__device__ __forceinline__ void Multiply(const Params& q, const Shared& shared, const Place& place, int first_row,
                                         int part, Sums& sums) {
  const int lane = threadIdx.x % 32, end = place.EndRow(q);
  const int rows = q.tap_lines * q.window_width * int(place.channels.divisor);
  uint32_t of_row[kBlocks][2];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int channel;
      const int tap = place.channels.Div(min(first_row + 16 * m + 8 * half + lane / 4, rows - 1), &channel);
      const int line = tap / q.window_width, column = tap - line * q.window_width;
      of_row[m][half] = (line * q.line_step + column * q.dilation[2] + lane % 4) * q.pitch + channel * 4;
    }
  const uint32_t of_column = q.pixels * q.pitch + (lane % 4 * kColumns + lane / 4) * 4;
  UnalignedTurn turn;
#pragma unroll 1
  for (int first = place.FirstRow(q); first < end; first += q.tile_rows) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const uint32_t stage = shared.stages + turn.stage * q.stage_bytes;
    const int eights = (min(end - first, q.tile_rows) + 7) / 8;
#pragma unroll 1
    for (int i = part; i < eights; i += q.parts) {
      const uint32_t x = stage + i * 8 * q.pitch, y = stage + of_column + i * 8 * kColumns * 4;
      uint32_t b[kColumns / 8][2];
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) b[j][k] = LoadWord(y + 32 * j + 4 * k * kColumns * 4);
        RoundToTf32(b[j]);
      }
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        uint32_t a[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) a[k] = LoadWord(x + of_row[m][k % 2] + k / 2 * 4 * q.pitch);
        RoundToTf32(a);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) Mma<float>(sums[m][j], a, b[j][0], b[j][1]);
      }
    }
    ArriveWarp(shared.Empty(turn.stage));
    turn.Next(2);
  }
}

__device__ void Consume(const Params& q, const Shared& shared, const Place& place, float* out) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = Plan::kWarps / q.parts;
  const int part = warp / warps, of_part = warp - part * warps, first_row = of_part * Plan::kWarpRows;
  Sums sums = {};
  Multiply(q, shared, place, first_row, part, sums);

  // The parts are added up in shared memory, in order.
  if (q.parts > 1) {
    constexpr int kOfWarp = Plan::kWarpRows * kColumns;
    hopper::SyncThreads(3, kConsumers);  // all has been read
    float* const mine = shared.sums + (warp - warps) * kOfWarp + lane;
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) f(sums[m][j][k], ((m * (kColumns / 8) + j) * 4 + k) * 32);
    };
    if (part > 0) each([&](float& sum, int i) { mine[i] = sum; });
    hopper::SyncThreads(3, kConsumers);
    if (part > 0) return;
#pragma unroll 1
    for (int other = 1; other < q.parts; ++other)
      each([&](float& sum, int i) { sum += mine[other * warps * kOfWarp + i]; });
  }

  const int rows = q.tap_lines * q.window_width * int(place.channels.divisor);
  const int first_tap = (place.plane_tap * q.plane_groups + place.first_line) * q.window_width;
  const int columns = place.columns.divisor - 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
      if (row >= rows) continue;
      int channel;
      const int tap = first_tap + place.channels.Div(row, &channel);
      float* const to =
          out + (int64_t{tap} * q.channels + place.channel + channel) * q.features + place.column + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (8 * j < columns) to[8 * j] = sums[m][j][2 * half];
        if (8 * j + 1 < columns) to[8 * j + 1] = sums[m][j][2 * half + 1];
      }
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    UnalignedFloatsKernel(const __grid_constant__ Params q, const float* x, const float* y, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared shared(q, memory);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        hopper::InitBarrier(shared.Full(i), kCopiers);
        hopper::InitBarrier(shared.Empty(i), Plan::kWarps);
      }
    }
    __syncthreads();
    const Place place(q);
    if (threadIdx.x >= kConsumers) {
      hopper::SetRegisters<40, false>();
      Produce(q, shared, place, x, y);
    } else {
      hopper::SetRegisters<232, true>();
      Consume(q, shared, place, partial + place.split * q.result_size);
    }
  }
}

}  // namespace

cudaError_t LaunchUnalignedFilterFloats(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                        void* workspace, cudaStream_t stream) {
  Plan plan;
  if (!plan.Fit(p)) return cudaErrorInvalidValue;
  Params q = {};
  static_cast<UnalignedSlices&>(q) = SliceParams(p, plan.line, plan.lines);
  q.columns = plan.columns;
  q.column_tiles_div = FastDiv(plan.column_tiles);
  q.tap_lines = plan.tap_lines;
  q.groups = int(p.window[1] / plan.tap_lines);
  q.tap_groups = FastDiv(p.window[0] * q.groups);
  q.channel_slices = FastDiv(plan.slices);
  q.slice_channels = FastDiv(plan.channels);
  q.last_channels = FastDiv(p.channels - int64_t{plan.slices - 1} * plan.channels);
  q.columns_div = FastDiv(plan.columns);
  q.last_columns = FastDiv(p.features - int64_t{plan.column_tiles - 1} * plan.columns);
  q.parts = plan.parts;
  q.tile_rows = plan.tile_rows;
  q.slice_rows = int(CeilDiv(plan.Tiles(), config.splits)) * plan.kUnit;
  q.splits = int(CeilDiv(plan.all_rows, q.slice_rows));
  q.pixels = plan.pixels;
  q.pitch = plan.pitch * 4;
  q.stage_bytes = plan.StageBytes();
  q.shared_bytes = plan.SharedBytes() - 64 - 2 * (plan.pixels + plan.tile_rows) * 4;
  auto* const partial = static_cast<float*>(workspace);
  const Grid grid = {q.splits * plan.BlocksOfSlice(p), kThreads, size_t(plan.SharedBytes())};
  const cudaError_t e = LaunchKernel(UnalignedFloatsKernel, grid, stream, q, static_cast<const float*>(x),
                                     static_cast<const float*>(y), partial);
  return e != cudaSuccess ? e : SumUnaligned<float>(p, q, x, y, partial, out, stream);
}

}  // namespace jaxdnn::conv
