// What the direct kernels of forward and data gradient are told of a problem, where a block works, and how it stores.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/conv/direct.cuh"
#include "cuda/conv/runs.cuh"

namespace jaxdnn::conv {

constexpr int kMultipliers = kConsumers * kWarpgroup, kThreads = kMultipliers + 32;  // and a warp that loads
constexpr int kBlocksOfWarpgroup = DirectPlan::kRows / 64 / kConsumers;
template <int kColumns>
using DirectSums = float[kBlocksOfWarpgroup][kColumns / 2];

struct DirectParams {
  CUtensorMap operand[DirectView::kMostParts], filter;  // of the operand's parts
  const unsigned char* from;                            // the operand
  const void* taps_from;                                // the filter
  Epilogue epilogue;
  bool forward, plain, wide;              // sums are stored as they are, in the operands' type; the result is of floats
  int units, units_of_block, units_left;  // of a block, and how many have one more
  int filter_units;                       // that follow each other and find their filter in the ring
  int features, columns;
  int64_t bias_of_problem, pixel;                                   // elements of all groups
  int images, height, width;                                        // of a unit
  int problem_images, out_height, out_width;                        // a plane's or residue's lines
  int image_pixels, plane_pixels, line_pixels;                      // of the result, from one to the next
  int plane_stride, plane_pad, plane_dilation, out_planes;          // of the operand's planes, or residues
  int before_lines, before_columns;                                 // of the operand's rows
  FastDiv column_div, line_div, image_div, feature_div, group_div;  // of a unit's number
  FastDiv plane_div, filter_div;                                    // likewise
  FastDiv pitch_div, image_row_div;                                 // of a row
  int x_line, filter_line, part_bytes, window_planes, plane_parts, x_bytes, x_stages, box_bytes, boxes, box_columns;
  // Of the operand in memory; and the row at the end of a line that is not whole, of which a unit has so many chunks.
  int planes_from, height_from, width_from, end_row, ends;
  int64_t line_from;  // bytes
  FastDiv end_div, lines_div, part_div, window_planes_div;
  int pad_lines, pad_columns, dilation[2], stride[2], group_log;  // of merged groups
  GroupSteps of_group;
  int taps, window_height, window_width;
  int first_tap, column_step[2], line_step[2], plane_step;  // of a tap's rows, in 16 bytes; in turn
  int taps_at_once, steps, step_bytes, slab_bytes, stage_taps, stage_bytes, stages, ring_at;
};

// A unit of the work.
struct DirectPlace {
  int image, plane, line, column, feature, group, problem;  // where it begins; a residue; images of all problems
  int images;                                               // that exist

  __device__ DirectPlace(const DirectParams& q, int unit) {
    int rest = q.column_div.Div(unit, &column);
    rest = q.line_div.Div(rest, &line);
    rest = q.image_div.Div(rest, &image);
    rest = q.feature_div.Div(rest, &feature);
    problem = q.group_div.Div(rest, &group);
    column *= q.width;
    line = q.plane_div.Div(line, &plane) * q.height;
    image *= q.images;
    feature *= q.columns;
    images = min(q.images, q.problem_images - image);
    image += problem * q.problem_images;
  }

  // The pixel of the result that a row stands for, or -1.
  __device__ int Pixel(const DirectParams& q, int row) const {
    int in_plane, x;
    const int i = q.image_row_div.Div(row, &in_plane), y = q.pitch_div.Div(in_plane, &x);
    const bool exists = i < images && y < min(q.height, q.out_height - line) && x < min(q.width, q.out_width - column);
    const int to = (image + i) * q.image_pixels + plane * q.plane_pixels + (line + y) * q.line_pixels + column + x;
    return exists ? to : -1;
  }
};

// A block's units, which follow each other.
struct DirectShare {
  int first;

  __device__ explicit DirectShare(const DirectParams& q)
      : first(blockIdx.x * q.units_of_block + min(static_cast<int>(blockIdx.x), q.units_left)) {}
  // Whether the block's unit `at` is the last one of a filter.
  __device__ bool Leaves(const DirectParams& q, int at) const {
    int of_filter;
    q.filter_div.Div(first + at, &of_filter);
    return of_filter + 1 == q.filter_units;
  }
};

// A block's shared memory: the barriers, operands, and the ring of the filter's taps.
struct DirectShared {
  static constexpr int kMostStages = DirectPlan::kMostStages;
  uint32_t begin;

  __device__ explicit DirectShared(unsigned char* shared) : begin(SharedAddress(shared)) {}
  __device__ uint32_t Operand(const DirectParams& q, int stage) const {
    return begin + DirectPlan::kBarrierBytes + stage * q.x_bytes;
  }
  __device__ uint32_t Taps(const DirectParams& q, int stage) const { return begin + q.ring_at + stage * q.stage_bytes; }
  __device__ uint32_t Full(int stage) const { return begin + 16 * stage; }
  __device__ uint32_t Empty(int stage) const { return begin + 16 * stage + 8; }
  __device__ uint32_t OperandFull(int stage) const { return Full(kMostStages + stage); }
  __device__ uint32_t OperandEmpty(int stage) const { return Empty(kMostStages + stage); }

  __device__ void Init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMostStages + DirectPlan::kMostOperands; ++i) {
        hopper::InitBarrier(Full(i), 1);
        hopper::InitBarrier(Empty(i), kMultipliers / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

// A thread's four rows, each eight after the last or in the next 64, have runs of four results in every 16.
constexpr int kThreadRows = 2 * kBlocksOfWarpgroup, kRun = 4, kRunTiles = 2;
template <int kColumns>
using DirectRuns = float[kThreadRows][kColumns / 16][kRun];

// Where a thread stores.
struct DirectStores {
  int pixels[kThreadRows];  // or -1
  int first, left;          // of its runs' features: the first one, of all groups, and how many there are from there on

  __device__ DirectStores(const DirectParams& q, const DirectPlace& place, int first_row) {
    const int feature = place.feature + FirstOfRun<kRunTiles>();
    first = place.group * q.features + feature;
    left = min(q.features - feature, static_cast<int>(q.pixel) - first);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
      pixels[i] = place.Pixel(q, first_row + i / 2 * 64 + warp * 16 + lane / 4 + i % 2 * 8);
    }
  }
  __device__ bool Exists(int row, int run) const { return pixels[row] >= 0 && 16 * run < left; }
  __device__ int64_t To(const DirectParams& q, int row) const { return int64_t{pixels[row]} * q.pixel + first; }
};

// Stores rows after an epilogue: of the operands' type, or of floats where the result is wide. One row at a time, but
// for what is read of memory.
template <class In, int kColumns>
__device__ __forceinline__ void FinishRows(const DirectParams& q, const DirectStores& stores, int64_t bias,
                                           DirectRuns<kColumns>& runs, void* out) {
  constexpr int kRuns = kColumns / 16;
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    float more[kRun] = {};
    if (16 * j < stores.left) AddEither<In>(more, q.epilogue.bias, bias + 16 * j, q.wide);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int k = 0; k < kRun; ++k) runs[i][j][k] += more[k];
  }
  if (q.epilogue.residual != nullptr && !q.wide)
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int j = 0; j < kRuns; ++j)
        if (stores.Exists(i, j)) Add<In>(runs[i][j], q.epilogue.residual, stores.To(q, i) + 16 * j);
#pragma unroll 1
  for (int row = 0; row < kThreadRows; ++row) {
    float v[kRuns][kRun];
    int pixel = -1;
    WithConstant<kThreadRows>(row, [&](auto i) {
#pragma unroll
      for (int j = 0; j < kRuns; ++j)
#pragma unroll
        for (int k = 0; k < kRun; ++k) v[j][k] = runs[decltype(i)::value][j][k];
      pixel = stores.pixels[decltype(i)::value];
    });
    if (pixel < 0) continue;
    const int64_t to = int64_t{pixel} * q.pixel + stores.first;
    if (q.wide)
#pragma unroll
      for (int j = 0; j < kRuns; ++j)
        if (16 * j < stores.left) Add<float>(v[j], q.epilogue.residual, to + 16 * j);
    ActivateSums<In>(reinterpret_cast<float (&)[kColumns / 4]>(v), q.epilogue.activation, q.wide);
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      if (16 * j >= stores.left) continue;
      if (q.wide)
        StoreRun(v[j], static_cast<float*>(out) + to + 16 * j);
      else
        StoreRun(v[j], static_cast<In*>(out) + to + 16 * j);
    }
  }
}

// Whether sums are stored as they are in the operands' type. Where a kernel does either, it has registers for both.
enum class Stored { kPlain, kFinished, kEither };

template <class In, int kColumns, Stored kStored>
__device__ __forceinline__ void StoreSums(const DirectParams& q, const DirectStores& stores, int64_t bias,
                                          const DirectSums<kColumns>& sums, void* out) {
  if (kStored == Stored::kPlain || (kStored == Stored::kEither && q.plain)) {
    // All exchanges before all stores: those of one row would wait for each other.
    uint32_t words[kThreadRows][kColumns / 16][kRunTiles];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) GatherPacked<In>(sums[i / 2] + 8 * j + i % 2 * 2, words[i][j]);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (stores.pixels[i] < 0) continue;
      In* const to = static_cast<In*>(out) + stores.To(q, i);
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j)
        if (16 * j < stores.left) StoreWords(to + 16 * j, words[i][j]);
    }
  } else if constexpr (kStored != Stored::kPlain) {
    DirectRuns<kColumns> runs;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) GatherRun<kRunTiles>(sums[i / 2] + 8 * j + i % 2 * 2, runs[i][j]);
    FinishRows<In, kColumns>(q, stores, bias, runs, out);
  }
}

}  // namespace jaxdnn::conv
