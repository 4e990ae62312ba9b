// What the kernels of unaligned channels have in shared memory, and how it gets there.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/conv/ragged.cuh"
#include "cuda/conv/unaligned_plan.h"

namespace jaxdnn::conv {

// Two warpgroups multiply, two bring the operands.
template <class In_, bool kForward_, bool kResident_>
struct UnalignedTile {
  using In = In_;
  static constexpr bool kForward = kForward_, kResident = kResident_;
  static constexpr int kColumns = UnalignedPlan::kColumns, kWarpgroup = 128;
  static constexpr int kWarpgroupRows = UnalignedPlan::kWarpgroupRows, kBlocks = kWarpgroupRows / 64;
  static constexpr int kConsumers = UnalignedPlan::kWarpgroups * kWarpgroup, kThreads = 2 * kConsumers;
  // Where the filter stays, all of the others bring strips.
  static constexpr int kStripThreads = kResident ? kThreads - kConsumers : kWarpgroup;
  // Forward the filter's columns are next to each other, else its depth. Floats must come K-major.
  static constexpr bool kTransposed = kForward && sizeof(In) == 2;
  static constexpr int kDepth = UnalignedPlan::kStepBytes / sizeof(In);  // channels of a step
  using Sums = float[kBlocks][kColumns / 2];
};

struct UnalignedParams {
  Epilogue epilogue;
  bool finish, wide;  // whether there is an epilogue; whether the result is of floats
  int tiles, columns;  // and columns of a tile
  FastDiv column_tiles_div, columns_div;
  int channels, features;  // of the operand and of the result
  int steps, slices;
  int taps, window_width, tap_lines;
  int line_step;             // pixels from line to line of the window
  int groups, plane_groups;  // of the window's lines: all, and those of a plane of it
  FastDiv line_div, lines_div, planes_div;
  FastDiv chunks_div[2];  // of a slice of the fewest steps, and of one more
  int planes;                        // of the result, of all images
  int extent[kRank], pad[kRank], dilation[kRank], out[kRank];  // of the operand, and of the result
  int pixels, strip_bytes, slab_bytes, slabs;
};

// The parts of a block's shared memory, and its barriers.
template <class T>
struct UnalignedShared {
  uint32_t strips, slabs;
  float* staged;
  int* pixels;
  uint32_t barriers;

  __device__ UnalignedShared(const UnalignedParams& q, unsigned char* shared)
      : strips(SharedAddress(shared)), slabs(strips + 2 * q.strip_bytes) {
    unsigned char* next = shared + 2 * q.strip_bytes + q.slabs * q.slab_bytes;
    staged = reinterpret_cast<float*>(next);
    next += UnalignedPlan::kWarpgroups * 64 * T::kColumns * 4;
    barriers = SharedAddress(next);
    pixels = reinterpret_cast<int*>(next + (2 + UnalignedPlan::kMostSlabs) * 16);
  }
  __device__ uint32_t StripFull(int i) const { return barriers + 16 * i; }
  __device__ uint32_t StripEmpty(int i) const { return barriers + 16 * i + 8; }
  __device__ uint32_t SlabFull(int i) const { return StripFull(2 + i); }
  __device__ uint32_t SlabEmpty(int i) const { return StripEmpty(2 + i); }

  // All threads of the block, once.
  __device__ void Init() const {
    if (threadIdx.x == 0) {
      constexpr int kTakers = (T::kResident ? T::kWarpgroup : T::kConsumers) / 32;
      for (int i = 0; i < 2; ++i) {
        hopper::InitBarrier(StripFull(i), T::kStripThreads / 32);
        hopper::InitBarrier(StripEmpty(i), kTakers);
      }
      for (int i = 0; i < UnalignedPlan::kMostSlabs; ++i) {
        hopper::InitBarrier(SlabFull(i), T::kWarpgroup / 32);
        hopper::InitBarrier(SlabEmpty(i), kTakers);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

// A place in a round of stages, and the parity of its barriers.
struct UnalignedTurn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// What one strip holds: of the tile's pixels, moved by a group of the window's lines, a slice of the channels.
struct UnalignedPart {
  int first_step, steps;
  bool longer;

  __device__ UnalignedPart(const UnalignedParams& q, int slice) {
    const int each = q.chunks_div[0].divisor / 2, more = q.steps - each * q.slices;
    longer = slice < more;
    first_step = slice * each + min(slice, more);
    steps = each + longer;
  }
};

// Threads that wait for each other.
__device__ inline void SyncThreads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// To those who wait for this, of whose warps each arrives once.
__device__ inline void ArriveWarp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) hopper::Arrive(barrier);
}

// A chunk of an operand: `count` elements from `from` on, if any, to `to`.
template <class In>
struct UnalignedChunk {
  const In* from;
  int count;
  uint32_t to;
};

// Copies `all` chunks, of which chunk(i) says all, by kThreads threads. So many of a thread are on their way at once.
template <int kAtOnce, class In, class Chunk>
__device__ __forceinline__ void CopyChunks(int thread, int threads, int all, const Bounds<In>& array,
                                           const Chunk& chunk) {
#pragma unroll 1
  for (int first = thread; first < all; first += kAtOnce * threads) {
    RaggedChunk<In> chunks[kAtOnce];
    int count[kAtOnce];
    uint32_t to[kAtOnce];
    bool at_end = false;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * threads;
      const UnalignedChunk<In> mine = chunk(min(i, all - 1));
      count[j] = min(mine.count, kChunk<In>);
      to[j] = mine.to;
      chunks[j].Fetch(mine.from, i < all ? count[j] : 0, array);
      at_end |= chunks[j].at_end;
    }
    if (at_end) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (chunks[j].at_end) chunks[j].FetchOneByOne(chunk(first + j * threads).from, count[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      chunks[j].Shift(count[j]);
      uint32_t words[4] = {chunks[j].words[0], chunks[j].words[1], chunks[j].words[2], chunks[j].words[3]};
      if constexpr (sizeof(In) == 4) RoundToTf32(words);
      if (first + j * threads < all) StoreChunk(to[j], words);
    }
  }
}

// Where the pixels of a strip come from, which begins at row `first` of the group's plane of the window: numbers of
// pixels of the operand, or -1 for zeros.
__device__ __forceinline__ void FindPixels(const UnalignedParams& q, int thread, int threads, int first, int plane_tap,
                                           int* pixels) {
  for (int i = thread; i < q.pixels; i += threads) {
    int at[kRank];
    const int line = q.line_div.Div(first + i, &at[2]), plane = q.lines_div.Div(line, &at[1]);
    int pixel = q.planes_div.Div(plane, &at[0]);
    at[0] += plane_tap * q.dilation[0];
    bool inside = plane < q.planes;
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      at[d] -= q.pad[d];
      inside &= static_cast<unsigned>(at[d]) < static_cast<unsigned>(q.extent[d]);
      pixel = pixel * q.extent[d] + at[d];
    }
    pixels[i] = inside ? pixel : -1;
  }
}

// Chunk after chunk of the channels, each of all pixels.
template <class T>
__device__ __forceinline__ void FillStrip(const UnalignedParams& q, int thread, const UnalignedPart& part,
                                          const int* pixels, const Bounds<typename T::In>& in, uint32_t strip) {
  using In = typename T::In;
  const int chunks = 2 * part.steps, first = part.first_step * T::kDepth;
  const FastDiv& chunks_div = q.chunks_div[part.longer];
  CopyChunks<5>(thread, T::kStripThreads, q.pixels * chunks, in, [&](int i) {
    int chunk;
    const int at = chunks_div.Div(i, &chunk), pixel = pixels[at], channel = first + chunk * kChunk<In>;
    return UnalignedChunk<In>{in.begin + int64_t{pixel} * q.channels + channel, pixel < 0 ? 0 : q.channels - channel,
                              strip + (chunk * q.pixels + at) * 16};
  });
}

// A tap's filter between a slice of the channels and a tile's columns.
template <class T>
__device__ __forceinline__ void FillSlab(const UnalignedParams& q, int thread, int threads, const UnalignedPart& part,
                                         int tap, int column, const Bounds<typename T::In>& filter, uint32_t slab) {
  using In = typename T::In;
  constexpr int kColumns = T::kColumns;
  const int first = part.first_step * T::kDepth, depth = part.steps * T::kDepth;
  if constexpr (T::kTransposed) {
    constexpr int kChunks = kColumns / kChunk<In>;
    const In* const from = filter.begin + (int64_t{tap} * q.channels + first) * q.features + column;
    CopyChunks<6>(thread, threads, depth * kChunks, filter, [&](int i) {
      const int line = i / kChunks, chunk = i % kChunks;
      return UnalignedChunk<In>{from + int64_t{line} * q.features + chunk * kChunk<In>,
                                first + line < q.channels ? min(q.columns, q.features - column) - chunk * kChunk<In>
                                                          : 0,
                                slab + (chunk * (depth + 1) + line) * 16};
    });
  } else if constexpr (!T::kForward) {
    const int chunks = 2 * part.steps;
    const FastDiv& chunks_div = q.chunks_div[part.longer];
    const In* const from = filter.begin + (int64_t{q.taps - 1 - tap} * q.features + column) * q.channels + first;
    CopyChunks<6>(thread, threads, kColumns * chunks, filter, [&](int i) {
      int chunk;
      const int line = chunks_div.Div(i, &chunk);
      return UnalignedChunk<In>{
          from + int64_t{line} * q.channels + chunk * kChunk<In>,
          line < q.columns && column + line < q.features ? q.channels - first - chunk * kChunk<In> : 0,
          slab + (chunk * (kColumns + 1) + line) * 16};
    });
  } else {
    // A chunk of the depth is a column's elements of four lines.
    constexpr int kAtOnce = 6;
    const In* const from = filter.begin + (int64_t{tap} * q.channels + first) * q.features + column;
    const int all = kColumns * 2 * part.steps;
#pragma unroll 1
    for (int begin = thread; begin < all; begin += kAtOnce * threads) {
      uint32_t words[kAtOnce][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j * threads, line = i / kColumns * 4, mine = i % kColumns;
        const bool exists = i < all && mine < q.columns && column + mine < q.features;
        const In* const at = from + int64_t{line} * q.features + mine;
#pragma unroll
        for (int k = 0; k < 4; ++k)
          words[j][k] = exists && first + line + k < q.channels
                            ? __float_as_uint(__ldg(at + k * int64_t{q.features}))
                            : 0;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j * threads;
        RoundToTf32(words[j]);
        if (i < all) StoreChunk(slab + (i / kColumns * (kColumns + 1) + i % kColumns) * 16, words[j]);
      }
    }
  }
}

}  // namespace jaxdnn::conv
