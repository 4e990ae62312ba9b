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
constexpr int kColumns = UnalignedPlan::kColumns, kBlocks = Plan::kWarpRows / 16, kConsumers = 32 * Plan::kWarps;
constexpr int kCopyWarps = 4, kCopiers = 32 * kCopyWarps, kThreads = kConsumers + kCopiers;
constexpr int kEmpty = 5;  // of stages, named barriers: others would take a register too many where sums are
using Sums = float[kBlocks][kColumns / 8][4];

// The first of the aligned chunks that a pixel's channels lie in, and bytes from there to their end, or none for zeros.
struct PixelChunks {
  uint32_t first;
  int bytes;
};

// Some channels of an array's pixels. Each comes by one thread: the chunks by a bulk copy, then shifted in place.
struct Channels {
  AlignedArray<float> from;
  int all, first, some;  // channels of a pixel, the first of these, and how many

  __device__ __forceinline__ PixelChunks Find(int pixel) const {
    const int64_t at = int64_t{pixel} * all + first;
    if (pixel < 0) return {0, 0};
    return {static_cast<uint32_t>(at / 4), (static_cast<int>(at % 4) + some) * 4};
  }
  __device__ __forceinline__ const float* Begin(const PixelChunks& pixel) const {
    return from.begin + int64_t{pixel.first} * 4;
  }
  // In whole chunks of the array.
  __device__ __forceinline__ int CopiedBytes(const PixelChunks& pixel) const {
    const int bytes = (pixel.bytes + 15) / 16 * 16;
    return Begin(pixel) + bytes / 4 > from.end ? bytes - 16 : bytes;
  }
  // Begins to copy them. What is left of the array behind its last whole chunk comes at once.
  __device__ __forceinline__ void Copy(const PixelChunks& pixel, uint32_t to, uint32_t barrier) const {
    if (pixel.bytes == 0) return;
    const int bytes = CopiedBytes(pixel);
    if (bytes > 0) hopper::CopyBulk(to, Begin(pixel), bytes, barrier);
    for (int at = bytes; at < pixel.bytes; at += 4)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + at), "f"(Begin(pixel)[at / 4]) : "memory");
  }
  // Moves them to the beginning of their place, rounded. Behind the last comes anything: rows or columns of no result.
  __device__ __forceinline__ void Shift(const PixelChunks& pixel, uint32_t place) const {
    constexpr int kAtOnce = 3;  // for registers
    const int chunks = (some + 3) / 4, copied = (some + 6) / 4, shift = pixel.bytes / 4 - some;
    const uint32_t mask = pixel.bytes > 0 ? ~0u : 0;
    uint32_t words[4 * (kAtOnce + 1)];
    const auto load = [&](int i, int chunk) {
      hopper::LoadWords(reinterpret_cast<uint32_t (&)[4]>(words[4 * i]), place + min(chunk, copied - 1) * 16);
    };
    load(0, 0);
#pragma unroll 1
    for (int begin = 0; begin < chunks; begin += kAtOnce) {
#pragma unroll
      for (int i = 1; i <= kAtOnce; ++i) load(i, begin + i);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint32_t v[5];
#pragma unroll
        for (int k = 0; k < 5; ++k) v[k] = shift & 2 ? words[4 * i + k + 2] : words[4 * i + k];
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = (shift & 1 ? v[k + 1] : v[k]) & mask;
        RoundToTf32(reinterpret_cast<uint32_t (&)[4]>(v[0]));
        if (begin + i < chunks) StoreChunk(place + (begin + i) * 16, v[0], v[1], v[2], v[3]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = words[4 * kAtOnce + k];
    }
  }
};

struct Params : UnalignedSlices {
  FastDiv channel_slices, tap_groups, slice_channels, last_channels, part_warps;
  AlignedArray<float> x, y;
  int parts, tile_rows, slice_rows, pitch, stage_bytes, shared_bytes;
};

// What a block works on: in shared memory, for registers are few.
struct Place {
  int split, column, columns, channel, plane_tap, first_line;
  FastDiv channels;

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
    channels = channel + int(q.slice_channels.divisor) > q.channels ? q.last_channels : q.slice_channels;
    columns = min(q.columns, q.features - column);
  }
  __device__ int FirstRow(const Params& q, int tile) const { return split * q.slice_rows + tile * q.tile_rows; }
  __device__ int EndRow(const Params& q) const { return min((split + 1) * q.slice_rows, q.rows); }
  __device__ bool Begins(const Params& q, int tile) const { return FirstRow(q, tile) < EndRow(q); }
};

struct Shared {
  uint32_t stages, barriers;
  float* sums;
  PixelChunks* pixels;  // of each stage x's, then y's

  __device__ Shared(const Params& q, unsigned char* shared)
      : stages(SharedAddress(shared)),
        barriers(stages + q.shared_bytes),
        sums(reinterpret_cast<float*>(shared)),
        pixels(reinterpret_cast<PixelChunks*>(shared + q.shared_bytes + 64)) {}
  __device__ uint32_t Full(int i) const { return barriers + 16 * i; }
  __device__ uint32_t CopyFull(int i) const { return barriers + 16 * i + 8; }
};

__device__ void Produce(const Params& q, const Shared& shared, const Place& place) {
  const int thread = threadIdx.x - kConsumers;
  const Channels of_x = {q.x, q.channels, place.channel, static_cast<int>(place.channels.divisor)};
  const Channels of_y = {q.y, q.features, place.column, place.columns};
  int tile = 0;
#pragma unroll 1
  for (; place.Begins(q, tile); ++tile) {
    const int first = place.FirstRow(q, tile), end = place.EndRow(q), turn = tile % 2;
    const uint32_t x = shared.stages + turn * q.stage_bytes, y = x + q.pixels * q.pitch, full = shared.CopyFull(turn);
    PixelChunks* const pixels = shared.pixels + turn * (q.pixels + q.tile_rows);
    int bytes = 0;
#pragma unroll 1
    for (int i = thread; i < q.pixels; i += kCopiers) {
      pixels[i] = of_x.Find(OperandPixel(q, first + place.first_line * q.line_step + i, place.plane_tap));
      if (pixels[i].bytes > 0) bytes += of_x.CopiedBytes(pixels[i]);
    }
#pragma unroll 1
    for (int i = thread; i < q.tile_rows; i += kCopiers) {
      pixels[q.pixels + i] = of_y.Find(first + i < end ? ResultPixel(q, first + i) : -1);
      if (pixels[q.pixels + i].bytes > 0) bytes += of_y.CopiedBytes(pixels[q.pixels + i]);
    }
    if (tile >= 2) hopper::SyncThreads(kEmpty + turn, kThreads);
    hopper::ShowSharedToTma();
    hopper::ArriveExpecting(full, bytes);
#pragma unroll 1
    for (int i = thread; i < q.pixels; i += kCopiers) of_x.Copy(pixels[i], x + i * q.pitch, full);
#pragma unroll 1
    for (int i = thread; i < q.tile_rows; i += kCopiers) of_y.Copy(pixels[q.pixels + i], y + i * kColumns * 4, full);
    hopper::WaitBarrier(full, tile / 2 % 2);
#pragma unroll 1
    for (int i = thread; i < q.pixels; i += kCopiers) of_x.Shift(pixels[i], x + i * q.pitch);
#pragma unroll 1
    for (int i = thread; i < q.tile_rows; i += kCopiers) of_y.Shift(pixels[q.pixels + i], y + i * kColumns * 4);
    hopper::Arrive(shared.Full(turn));
  }
  for (int last = max(tile - 2, 0); last < tile; ++last) hopper::SyncThreads(kEmpty + last % 2, kThreads);
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
#pragma unroll 1
  for (int tile = 0; place.Begins(q, tile); ++tile) {
    hopper::WaitBarrier(shared.Full(tile % 2), tile / 2 % 2);
    const uint32_t stage = shared.stages + tile % 2 * q.stage_bytes;
    const int eights = (min(place.EndRow(q) - place.FirstRow(q, tile), q.tile_rows) + 7) / 8;
#pragma unroll 1
    for (int i = part; i < eights; i += q.parts) {
      const uint32_t x = stage + i * 8 * q.pitch, y = stage + of_column + i * 8 * kColumns * 4;
      uint32_t b[kColumns / 8][2];
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) b[j][k] = LoadWord(y + 32 * j + 4 * k * kColumns * 4);
      }
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        uint32_t a[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) a[k] = LoadWord(x + of_row[m][k % 2] + k / 2 * 4 * q.pitch);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) Mma<float>(sums[m][j], a, b[j][0], b[j][1]);
      }
    }
    hopper::ArriveThreads(kEmpty + tile % 2, kThreads);
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

  const int rows = q.tap_lines * q.window_width * int(place.channels.divisor);
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

__global__ void __launch_bounds__(kThreads, 1) UnalignedFloatsKernel(const __grid_constant__ Params q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared shared(q, memory);
    __shared__ Place place;
    if (threadIdx.x == 0) {
      place = Place(q);
      for (int i = 0; i < 2; ++i) {
        hopper::InitBarrier(shared.Full(i), kCopiers);
        hopper::InitBarrier(shared.CopyFull(i), kCopiers);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      hopper::SetRegisters<40, false>();
      Produce(q, shared, place);
    } else {
      hopper::SetRegisters<232, true>();
      Consume(q, shared, place, partial);
    }
  }
}

}  // namespace

cudaError_t LaunchUnalignedFilterFloats(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                        void* workspace, cudaStream_t stream) {
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
  q.last_channels = FastDiv(p.channels - int64_t{plan.slices - 1} * plan.channels);
  q.parts = plan.parts;
  q.part_warps = FastDiv(Plan::kWarps / plan.parts);
  q.tile_rows = plan.tile_rows;
  q.slice_rows = int(CeilDiv(plan.Tiles(), config.splits)) * plan.kUnit;
  q.splits = int(CeilDiv(plan.all_rows, q.slice_rows));
  q.pixels = plan.pixels;
  q.pitch = plan.pitch * 4;
  q.stage_bytes = plan.StageBytes();
  q.shared_bytes = plan.SharedBytes() - 64 - 2 * (plan.pixels + plan.tile_rows) * 8;
  auto* const partial = static_cast<float*>(workspace);
  const Grid grid = {q.splits * plan.BlocksOfSlice(p), kThreads, size_t(plan.SharedBytes())};
  const auto array = [](const void* begin, int64_t size) {
    return AlignedArray<float>{static_cast<const float*>(begin), static_cast<const float*>(begin) + size};
  };
  q.x = array(x, p.images * p.XPixels() * p.channels);
  q.y = array(y, p.images * p.YPixels() * p.features);
  const cudaError_t e = LaunchKernel(UnalignedFloatsKernel, grid, stream, q, partial);
  return e != cudaSuccess ? e : SumUnaligned<float>(p, q, x, y, partial, out, stream);
}

}  // namespace jaxdnn::conv
