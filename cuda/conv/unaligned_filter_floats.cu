// Filter gradient, without stride, of unaligned channels or features of floats, as TF32.
//
// Terms are rows as unaligned_plan.h says, columns are features, and the result's rows are the channels of all taps of
// the window, side by side: 65 channels of nine taps are 585 rows, of which eight warps have 80 each. Both operands lie
// as they are, a pixel's elements next to each other, which wgmma cannot read of floats; mma.sync reads them one by
// one, and every row of the result at a place of its own, its tap's pixels further on. Four
// warps bring them, a pixel by one thread.
//
// Rows that are no pixels of y have zeros there, but x may have an infinity where they meet it: see unaligned_sum.cuh.
#include "cuda/conv/unaligned.h"
#include "cuda/conv/unaligned_sum.cuh"

namespace jaxdnn::conv {
namespace {

using Plan = UnalignedFloatsPlan;
constexpr int kWarpgroup = 128, kColumns = UnalignedPlan::kColumns, kBlocks = Plan::kWarpRows / 16, kConsumers = 32 * Plan::kWarps;
constexpr int kThreads = kConsumers + kWarpgroup;  // of the last warpgroup one warp does anything
using Sums = float[kBlocks][kColumns / 8][4];

struct Params : UnalignedSlices {
  FastDiv channel_slices, tap_groups, slice_channels, part_warps;
  PackedRows y;
  int parts, tile_rows, slice_rows, x_pitch, y_pitch, stage_bytes, shared_bytes;  // pitches from chunk to chunk
};

// What a block works on: in shared memory, for registers are few.
struct Place {
  int split, column, columns, channel, channels, plane_tap, first_line;

  Place() = default;
  __device__ explicit Place(const Params& q) {
    int column_tile, slice, group;
    int rest = q.column_tiles_div.Div(blockIdx.x, &column_tile);
    rest = q.channel_slices.Div(rest, &slice);
    split = q.tap_groups.Div(rest, &group);
    plane_tap = group / q.groups;
    first_line = (group - plane_tap * q.groups) * q.tap_lines;
    column = column_tile * q.columns;
    channel = slice * q.slice_channels.divisor;
    channels = min(int(q.slice_channels.divisor), q.channels - channel);
    columns = min(q.columns, q.features - column);
  }
  __device__ int FirstRow(const Params& q, int tile) const { return split * q.slice_rows + tile * q.tile_rows; }
  __device__ int EndRow(const Params& q) const { return min((split + 1) * q.slice_rows, q.rows); }
  __device__ bool Begins(const Params& q, int tile) const { return FirstRow(q, tile) < EndRow(q); }
};

struct Shared {
  uint32_t stages, barriers;
  float* sums;

  __device__ Shared(const Params& q, unsigned char* shared)
      : stages(SharedAddress(shared)),
        barriers(stages + q.shared_bytes),
        sums(reinterpret_cast<float*>(shared)) {}
  __device__ uint32_t Full(int i) const { return barriers + 16 * i; }
  __device__ uint32_t Empty(int i) const { return barriers + 16 * i + 8; }
};

// The tiles' pixels, by a warp: a lane has some chunks of x and of y.
__device__ void Produce(const Params& q, const Shared& shared, const Place& place, int lane) {
  const PackedPlanes same = {true};
  const int x_chunks = q.slice_channels.divisor / 4, chunks = x_chunks + kColumns / 4;
#pragma unroll 1
  for (int tile = 0; place.Begins(q, tile); ++tile) {
    const int first = place.FirstRow(q, tile), turn = tile % 2;
    const uint32_t x = shared.stages + turn * q.stage_bytes, y = x + x_chunks * q.x_pitch, full = shared.Full(turn);
    hopper::WaitBarrier(shared.Empty(turn), tile / 2 % 2 ^ 1);
    if (lane == 0) hopper::ArriveExpecting(full, (x_chunks * q.pixels + kColumns / 4 * q.tile_rows) * 16);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < chunks; i += 32) {
      const int y_chunk = i - x_chunks;
      if (y_chunk < 0)
        CopyPacked(q.packed, q.packed_planes, place.channel / 4 + i, first + place.first_line * q.line_step, q.pixels,
                   place.plane_tap * q.dilation[0] - q.pad[0], x + i * q.x_pitch, full);
      else
        CopyPacked(q.y, same, place.column / 4 + y_chunk, first, q.tile_rows, 0, y + y_chunk * q.y_pitch, full);
    }
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
  const int lane = threadIdx.x % 32;
  const int rows = q.tap_lines * q.window_width * int(q.slice_channels.divisor);
  uint32_t of_row[kBlocks][2];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int channel;
      const int tap = q.slice_channels.Div(min(first_row + 16 * m + 8 * half + lane / 4, rows - 1), &channel);
      const int line = tap / q.window_width, column = tap - line * q.window_width;
      of_row[m][half] = channel / 4 * q.x_pitch + (line * q.line_step + column * q.dilation[2] + lane % 4) * 16 +
                        channel % 4 * 4;
    }
  const uint32_t of_column =
      q.slice_channels.divisor / 4 * q.x_pitch + lane / 16 * q.y_pitch + lane % 4 * 16 + lane / 4 % 4 * 4;
#pragma unroll 1
  for (int tile = 0; place.Begins(q, tile); ++tile) {
    hopper::WaitBarrier(shared.Full(tile % 2), tile / 2 % 2);
    const uint32_t stage = shared.stages + tile % 2 * q.stage_bytes;
    const int eights = (min(place.EndRow(q) - place.FirstRow(q, tile), q.tile_rows) + 7) / 8;
#pragma unroll 1
    for (int i = part; i < eights; i += q.parts) {
      const uint32_t x = stage + i * 128, y = x + of_column;
      uint32_t b[kColumns / 8][2];
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) b[j][k] = LoadWord(y + 2 * j * q.y_pitch + k * 64);
      }
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        uint32_t a[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) a[k] = LoadWord(x + of_row[m][k % 2] + k / 2 * 64);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) Mma<float>(sums[m][j], a, b[j][0], b[j][1]);
      }
    }
    ArriveWarp(shared.Empty(tile % 2));
  }
}

__device__ void Consume(const Params& q, const Shared& shared, const Place& place, float* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = q.part_warps.divisor;
  int of_part;
  const int part = q.part_warps.Div(warp, &of_part), first_row = of_part * Plan::kWarpRows;
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

  const int rows = q.tap_lines * q.window_width * int(q.slice_channels.divisor);
  const int first_tap = (place.plane_tap * q.plane_groups + place.first_line) * q.window_width;
  const int columns = place.columns - 2 * (lane % 4);
  float* const out = partial + place.split * q.result_size;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
      if (row >= rows) continue;
      int channel;
      const int tap = first_tap + q.slice_channels.Div(row, &channel);
      if (channel >= place.channels) continue;
      float* const to =
          out + (int64_t{tap} * q.channels + place.channel + channel) * q.features + place.column + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (8 * j < columns) to[8 * j] = sums[m][j][2 * half];
        if (8 * j + 1 < columns) to[8 * j + 1] = sums[m][j][2 * half + 1];
      }
    }
}

__global__ void __launch_bounds__(kThreads, 1) UnalignedFloatsKernel(const __grid_constant__ Params q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared shared(q, memory);
    __shared__ Place place;
    if (threadIdx.x == 0) {
      place = Place(q);
      for (int i = 0; i < 2; ++i) {
        hopper::InitBarrier(shared.Full(i), 1);
        hopper::InitBarrier(shared.Empty(i), kConsumers / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      hopper::SetRegisters<40, false>();
      if (threadIdx.x < kConsumers + 32) Produce(q, shared, place, threadIdx.x % 32);
    } else {
      hopper::SetRegisters<232, true>();
      Consume(q, shared, place, partial);
    }
  }
}

}  // namespace

cudaError_t LaunchUnalignedFilterFloats(const Problem& p, int64_t splits, const Packing& of_x, const Packing& of_y,
                                        float* partial, int64_t* slices, cudaStream_t stream) {
  Plan plan(p);
  if (!plan.Fit(p)) return cudaErrorInvalidValue;
  Params q = {};
  static_cast<UnalignedSlices&>(q) = SliceParams(p, plan);
  q.columns = plan.columns;
  q.column_tiles_div = FastDiv(plan.column_tiles);
  q.tap_lines = plan.tap_lines;
  q.groups = int(p.window[1] / plan.tap_lines);
  q.tap_groups = FastDiv(p.window[0] * q.groups);
  q.channel_slices = FastDiv(plan.slices);
  q.slice_channels = FastDiv(plan.channels);
  q.parts = plan.parts;
  q.part_warps = FastDiv(Plan::kWarps / plan.parts);
  q.tile_rows = plan.tile_rows;
  q.slice_rows = int(CeilDiv(plan.Tiles(), splits)) * plan.kUnit;
  *slices = CeilDiv(plan.all_rows, q.slice_rows);
  q.pixels = plan.pixels;
  q.x_pitch = plan.Pitch(plan.pixels) * 16;
  q.y_pitch = plan.Pitch(plan.tile_rows) * 16;
  q.stage_bytes = plan.StageBytes();
  q.shared_bytes = plan.SharedBytes() - 64;
  q.packed = RowsOf(of_x, plan, p.in);
  q.packed_planes = PlanesOf(p, plan);
  q.y = RowsOf(of_y, plan, p.in);
  const Grid grid = {*slices * plan.BlocksOfSlice(p), kThreads, size_t(plan.SharedBytes())};
  return LaunchKernel(UnalignedFloatsKernel, grid, stream, q, partial);
}

}  // namespace jaxdnn::conv
