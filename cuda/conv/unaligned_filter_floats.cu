// Filter gradient, without stride, of unaligned channels or features of floats, as TF32.
//
// Terms are rows as unaligned_plan.h says, columns are features, and the result's rows are the channels of all taps of
// the window, side by side: 65 channels of nine taps are 585 rows, of which eight warps have 80 each. Both operands lie
// as they are, a pixel's elements next to each other, which wgmma cannot read of floats; mma.sync reads them one by
// one, and every row of the result at a place of its own, its tap's pixels further on. Four warps copy the aligned
// chunks that a pixel's channels lie in, and when these are there shift them in their places.
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

// How some channels of a tile's pixels come to a stage, each pixel's `pitch` bytes further on than the last one's.
struct Channels {
  AlignedArray<float> from;
  int all;              // channels of a pixel
  FastDiv chunks;       // of 16 bytes, that some of them lie in wherever they begin
  int pitch, count;     // pixels
  int place, in_table;  // in the stage, and in the table of its pixels

  // Calls f(at, pixel, chunk) for a warp's chunks of these pixels, kAtOnce of a thread's at a time, of which the last
  // ones may be none: at is -1 then.
  template <int kAtOnce, class F>
  __device__ __forceinline__ void Each(const int* pixels, const F& f) const {
    const int warp = threadIdx.x / 32 - Plan::kWarps, first_line = count * warp / kCopyWarps;
    const int all_chunks = (count * (warp + 1) / kCopyWarps - first_line) * int(chunks.divisor);
#pragma unroll 1
    for (int i = 0; i < all_chunks; i += 32 * kAtOnce) {
      int at[kAtOnce], pixel[kAtOnce], chunk[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int mine = i + 32 * k + int(threadIdx.x % 32);
        const int line = first_line + chunks.Div(min(mine, all_chunks - 1), &chunk[k]);
        pixel[k] = pixels[in_table + line];
        at[k] = mine < all_chunks ? place + line * pitch + chunk[k] * 16 : -1;
      }
      f(at, pixel, chunk);
    }
  }

  // Copies the aligned chunks that the channels from `first` on lie in, zeros for pixels that do not exist.
  __device__ void Copy(int first, const int* pixels, uint32_t to) const {
    Each<2>(pixels, [&](const auto& at, const auto& pixel, const auto& chunk) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* const mine = from.begin + ((int64_t{max(pixel[k], 0)} * all + first) & ~int64_t{3}) + 4 * chunk[k];
        const int bytes = pixel[k] < 0 || mine >= from.end ? 0 : int(min(from.end - mine, int64_t{4})) * 4;
        if (at[k] >= 0) CopyPart(to + at[k], bytes > 0 ? mine : from.begin, bytes);
      }
    });
  }

  // Moves what has been copied to the beginning of its place. A warp goes forward, and reads before it writes.
  __device__ void Shift(int first, const int* pixels, uint32_t to) const {
    if (all % 4 == 0 && first % 4 == 0) return;
    Each<2>(pixels, [&](const auto& at, const auto& pixel, const auto& chunk) {
      uint32_t words[2][8];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t mine = to + max(at[k], 0);
        hopper::LoadWords(reinterpret_cast<uint32_t (&)[4]>(words[k][0]), mine);
        // The last chunk needs no other.
        const uint32_t next = chunk[k] + 1 < static_cast<int>(chunks.divisor) ? mine + 16 : mine;
        hopper::LoadWords(reinterpret_cast<uint32_t (&)[4]>(words[k][4]), next);
        const unsigned shift = (static_cast<unsigned>(pixel[k]) * all + first) & 3;
#pragma unroll
        for (int j = 0; j < 5; ++j) words[k][j] = shift & 2 ? words[k][j + 2] : words[k][j];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[k][j] = shift & 1 ? words[k][j + 1] : words[k][j];
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (at[k] >= 0) StoreChunk(to + at[k], words[k][0], words[k][1], words[k][2], words[k][3]);
      __syncwarp();
    });
  }
};

struct Params : UnalignedSlices {
  FastDiv channel_slices, tap_groups, slice_channels, last_channels, part_warps;
  Channels x, y;
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
  int* pixels;  // of each stage x's, then y's

  __device__ Shared(const Params& q, unsigned char* shared)
      : stages(SharedAddress(shared)),
        barriers(stages + q.shared_bytes),
        sums(reinterpret_cast<float*>(shared)),
        pixels(reinterpret_cast<int*>(shared + q.shared_bytes + 64)) {}
  __device__ uint32_t Full(int i) const { return barriers + 16 * i; }
};

__device__ void Produce(const Params& q, const Shared& shared, const Place& place) {
  const int thread = threadIdx.x - kConsumers;
  int tile = 0;
#pragma unroll 1
  for (; place.Begins(q, tile); ++tile) {
    const int first = place.FirstRow(q, tile), end = place.EndRow(q), turn = tile % 2;
    int* const pixels = shared.pixels + turn * (q.pixels + q.tile_rows);
#pragma unroll 1
    for (int i = thread; i < q.pixels; i += kCopiers)
      pixels[i] = OperandPixel(q, first + place.first_line * q.line_step + i, place.plane_tap);
#pragma unroll 1
    for (int i = thread; i < q.tile_rows; i += kCopiers) {
      bool exists;
      const int pixel = ResultPixel(q, first + i, &exists);
      pixels[q.pixels + i] = exists && first + i < end ? pixel : -1;
    }
    // Nobody is two tiles ahead of another.
    hopper::SyncThreads(4, kCopiers);
    if (tile >= 2) hopper::SyncThreads(kEmpty + turn, kThreads);
    const uint32_t stage = shared.stages + turn * q.stage_bytes;
    q.x.Copy(place.channel, pixels, stage);
    q.y.Copy(place.column, pixels, stage);
    CommitCopies();
    WaitForCopies<0>();
    __syncwarp();
    q.x.Shift(place.channel, pixels, stage);
    q.y.Shift(place.column, pixels, stage);
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
      for (int i = 0; i < 2; ++i) hopper::InitBarrier(shared.Full(i), kCopiers);
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
  q.parts = plan.parts;
  q.part_warps = FastDiv(Plan::kWarps / plan.parts);
  q.tile_rows = plan.tile_rows;
  q.slice_rows = int(CeilDiv(plan.Tiles(), config.splits)) * plan.kUnit;
  q.splits = int(CeilDiv(plan.all_rows, q.slice_rows));
  q.pixels = plan.pixels;
  q.pitch = plan.pitch * 4;
  q.stage_bytes = plan.StageBytes();
  q.shared_bytes = plan.SharedBytes() - 64 - 2 * (plan.pixels + plan.tile_rows) * 4;
  auto* const partial = static_cast<float*>(workspace);
  const Grid grid = {q.splits * plan.BlocksOfSlice(p), kThreads, size_t(plan.SharedBytes())};
  const auto channels = [&](const void* begin, int64_t size, int64_t all, int some) {
    const auto* const from = static_cast<const float*>(begin);
    return Channels{{from, from + size * all}, int(all), FastDiv(CeilDiv(some + plan.Shifts(all), 4))};
  };
  q.x = channels(x, p.images * p.XPixels(), p.channels, plan.channels);
  q.x.pitch = q.pitch, q.x.count = plan.pixels;
  q.y = channels(y, p.images * p.YPixels(), p.features, plan.columns);
  q.y.pitch = kColumns * 4, q.y.count = plan.tile_rows, q.y.place = plan.pixels * q.pitch, q.y.in_table = plan.pixels;
  const cudaError_t e = LaunchKernel(UnalignedFloatsKernel, grid, stream, q, partial);
  return e != cudaSuccess ? e : SumUnaligned<float>(p, q, x, y, partial, out, stream);
}

}  // namespace jaxdnn::conv
