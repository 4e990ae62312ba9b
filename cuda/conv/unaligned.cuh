// What the kernels of unaligned channels have in shared memory, and how it gets there.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/unaligned_pack.cuh"

namespace jaxdnn::conv {

// Two warpgroups multiply, a warp brings strips and another one the filter.
template <class In_, bool kResident_>
struct UnalignedTile {
  using In = In_;
  static constexpr bool kResident = kResident_;
  static constexpr int kColumns = UnalignedPlan::kColumns, kWarpgroup = 128;
  static constexpr int kRows = UnalignedPlan::kRows, kBlocks = kRows / 64;
  static constexpr int kConsumers = UnalignedPlan::kWarpgroups * kWarpgroup, kThreads = kConsumers + 64;
  static constexpr int kDepth = UnalignedPlan::kStepBytes / sizeof(In);  // channels of a step
  using Sums = float[kBlocks][kColumns / 2];
};

struct UnalignedParams {
  Epilogue epilogue;
  bool finish, wide;                       // whether there is an epilogue; whether the result is of floats
  int tiles, columns;                      // and columns of a tile
  int whole_tiles;                         // tiles of rows that are not halves
  FastDiv column_tiles_div, width_div[2];  // columns of a tile, and of the last
  int channels, features;                  // of the operand and of the result
  int steps, slices;                       // of a slice, and slices of the channels
  int taps, window_width, tap_lines;
  int line_step;             // pixels from line to line of the window
  int groups, plane_groups;  // of the window's lines: all, and those of a plane of it
  FastDiv line_div, lines_div, planes_div;
  FastDiv steps_div, column_pairs;                             // steps of a slice; pairs of chunks of columns
  int planes;                                                  // of the result, of all images
  int extent[kRank], pad[kRank], dilation[kRank], out[kRank];  // of the operand, and of the result
  int pixels, strip_bytes, slab_bytes, slabs, staged_bytes;
  PackedRows packed;
  PackedPlanes packed_planes;
};

inline PackedPlanes PlanesOf(const Problem& p, const UnalignedRows& rows) {
  const bool together = p.window[0] == 1 && p.pad[0] == 0 && p.x[0] == p.y[0];
  return {together, FastDiv(rows.Rows(1)), FastDiv(p.y[0]), int(p.images * p.y[0]), int(p.x[0])};
}

inline UnalignedParams RowParams(const Problem& p, const UnalignedRows& rows) {
  UnalignedParams q = {};
  q.window_width = int(p.window[2]);
  q.line_step = int(p.rhs_dilation[1] * rows.line);
  q.line_div = FastDiv(rows.line);
  q.lines_div = FastDiv(rows.lines);
  q.planes_div = FastDiv(p.y[0]);
  q.planes = int(p.images * p.y[0]);
  for (int d = 0; d < kRank; ++d) {
    q.extent[d] = int(p.x[d]);
    q.out[d] = int(p.y[d]);
    q.pad[d] = int(p.pad[d]);
    q.dilation[d] = int(p.rhs_dilation[d]);
  }
  return q;
}

// The parts of a block's shared memory, and its barriers.
template <class T>
struct UnalignedShared {
  uint32_t strips, slabs;
  float* staged;
  uint32_t barriers;

  __device__ UnalignedShared(const UnalignedParams& q, unsigned char* shared)
      : strips(SharedAddress(shared)), slabs(strips + 2 * q.strip_bytes) {
    unsigned char* next = shared + 2 * q.strip_bytes + q.slabs * q.slab_bytes;
    staged = reinterpret_cast<float*>(next);
    next += UnalignedPlan::kWarpgroups * q.staged_bytes;
    barriers = SharedAddress(next);
  }
  __device__ uint32_t StripFull(int i) const { return barriers + 16 * i; }
  __device__ uint32_t StripEmpty(int i) const { return barriers + 16 * i + 8; }
  __device__ uint32_t SlabFull(int i) const { return StripFull(3 + i); }
  __device__ uint32_t SlabEmpty(int i) const { return StripEmpty(3 + i); }
  // Where a warpgroup waits for its turn to multiply.
  __device__ uint32_t Turn(int warpgroup) const { return StripFull(2) + 8 * warpgroup; }

  // All threads of the block, once.
  __device__ void Init() const {
    if (threadIdx.x == 0) {
      constexpr int kTakers = T::kWarpgroup / 32;
      for (int i = 0; i < 2; ++i) {
        hopper::InitBarrier(StripFull(i), 1);
        hopper::InitBarrier(StripEmpty(i), kTakers);
        hopper::InitBarrier(Turn(i), kTakers);
      }
      for (int i = 0; i < UnalignedPlan::kMostSlabs; ++i) {
        hopper::InitBarrier(SlabFull(i), 1);
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
  __device__ void Skip(int count, int stages) {
    const int rounds = (stage + count) / stages;
    stage += count - rounds * stages;
    parity ^= rounds % 2;
  }
};

// To those who wait for this, of whose warps each arrives once: for threads that multiplied, which is to say read. Each
// that wrote or read by itself arrives by itself.
__device__ inline void ArriveWarp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) hopper::Arrive(barrier);
}

// The operand's pixel at a row, which a plane of the window moves, or -1 for zeros.
__device__ __forceinline__ int OperandPixel(const UnalignedParams& q, int row, int plane_tap) {
  int at[kRank];
  const int line = q.line_div.Div(row, &at[2]), plane = q.lines_div.Div(line, &at[1]);
  int pixel = q.planes_div.Div(plane, &at[0]);
  at[0] += plane_tap * q.dilation[0];
  bool inside = plane < q.planes;
#pragma unroll
  for (int d = 0; d < kRank; ++d) {
    at[d] -= q.pad[d];
    inside &= static_cast<unsigned>(at[d]) < static_cast<unsigned>(q.extent[d]);
    pixel = pixel * q.extent[d] + at[d];
  }
  return inside ? pixel : -1;
}

// Pixels of the result before a row; that of the row, if `exists`.
__device__ __forceinline__ int ResultPixel(const UnalignedParams& q, int row, bool* exists) {
  int x, y;
  const int line = q.line_div.Div(row, &x), plane = q.lines_div.Div(line, &y);
  *exists = x < q.out[2] && y < q.out[1] && plane < q.planes;
  if (plane >= q.planes) return q.planes * q.out[1] * q.out[2];
  return (plane * q.out[1] + min(y, q.out[1])) * q.out[2] + (y < q.out[1] ? min(x, q.out[2]) : 0);
}

}  // namespace jaxdnn::conv
