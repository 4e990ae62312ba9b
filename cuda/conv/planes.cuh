// What the kernels of planes are told of a problem, where a block works, and how it stores results.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/conv/planes_plan.h"
#include "cuda/conv/runs.cuh"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

constexpr int kBlocksOfWarpgroup = PlanesPlan::kBlocks / kConsumers;
constexpr int kMultipliers = kConsumers * kWarpgroup, kThreads = kMultipliers + kWarpgroup;
constexpr int kTaps = PlanesPlan::kTaps;
// Of three planes of results, and of one.
template <int kFeatures>
using PlaneSums = float[kTaps * kFeatures / 2];
template <int kFeatures>
using PlaneResults = float[kFeatures / 2];

struct PlanesParams {
  CUtensorMap operand, filter;
  const float* transposed;  // a filter of floats whose channels are not contiguous, or null
  Epilogue epilogue;
  bool plain;           // sums are stored as they are, in the operands' type
  bool wide;            // the result is of floats
  bool forward;         // the filter's lines are of features
  bool volume, lines;   // as in the plan
  int across_bits;      // of how many blocks of 64 rows are side by side
  int columns, others;  // of a tile
  int out_columns, out_others, channels, features, tile_features;
  int pixel;          // elements of the result, of all groups
  bool grouped;       // models are groups
  bool shared;        // models have one filter and bias
  int bias_of_model;  // elements
  int pixels_of_image, pixels_of_other;
  int64_t elements_of_plane;
  int images_of_model;
  int64_t work;  // planes of all tiles
  FastDiv planes_div, column_div, other_div, image_div, feature_div;
  int pad[kRank];                   // of the planes, the others, the columns
  int window[kRank];                // likewise; of images 1
  int line_step, column_step;       // bytes from tap to tap
  int next_block, next_block_line;  // bytes from 64 rows to the next, beside and below
  int next_eight;                   // and from 8 rows
  int slab_bytes, filter_bytes, stage_bytes, box_bytes, stages;
  int parts, part_channels, part_bytes;  // of a position's channels, and of the filter that meets them
};

// Some planes of a tile.
struct PlanesPlace {
  int first, count;                          // planes of the result
  int column, other, image, model, feature;  // where the tile begins
  int filter;                                // whether the filter is another

  __device__ PlanesPlace(const PlanesParams& q, int at, int end) {
    int rest = q.planes_div.Div(at, &first);
    count = min(end - at, static_cast<int>(q.planes_div.divisor) - first);
    rest = q.column_div.Div(rest, &column);
    rest = q.other_div.Div(rest, &other);
    filter = q.image_div.Div(rest, &image);
    model = q.feature_div.Div(filter, &feature);
    if (q.shared) filter = feature;
    column *= q.columns;
    other *= q.others;
    feature *= q.tile_features;
    image += model * q.images_of_model;
  }

  // Of the tile, among those of all groups.
  __device__ int FirstFeature(const PlanesParams& q) const { return feature + (q.grouped ? model * q.features : 0); }
  __device__ int64_t FirstBias(const PlanesParams& q) const { return int64_t{model} * q.bias_of_model + feature; }
};

// The parts of a block's shared memory, and its barriers.
struct PlanesShared {
  uint32_t filter, stages, barriers;

  // By a shuffle, so that the compiler knows the address to be the same in all lanes, and keeps it: it would find it
  // again for each plane, and wait for that.
  __device__ PlanesShared(const PlanesParams& q, unsigned char* shared)
      : filter(__shfl_sync(~0u, SharedAddress(shared), 0)),
        stages(filter + q.filter_bytes),
        barriers(stages + q.stages * q.stage_bytes) {}
  __device__ uint32_t Full(int stage) const { return barriers + 16 * stage; }
  __device__ uint32_t Empty(int stage) const { return barriers + 16 * stage + 8; }
  __device__ uint32_t FilterFull() const { return Full(PlanesPlan::kMostStages); }
  __device__ uint32_t FilterEmpty() const { return Empty(PlanesPlan::kMostStages); }

  __device__ uint32_t Turn(int warpgroup) const { return Full(PlanesPlan::kMostStages + 1) + 8 * warpgroup; }

  __device__ void Init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i <= PlanesPlan::kMostStages; ++i) {
        hopper::InitBarrier(Full(i), 1);
        hopper::InitBarrier(Empty(i), kMultipliers / 32);
      }
      for (int i = 0; i < kConsumers; ++i) hopper::InitBarrier(Turn(i), kWarpgroup / 32);
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

__device__ inline int FirstWork(const PlanesParams& q, int block) {
  return static_cast<int>(q.work * block / gridDim.x);
}

// Of a block of 64 rows: which it is, and where a row's features begin in the result.
struct PlanesRows {
  int column, other;  // of the first, in the tile

  __device__ PlanesRows(const PlanesParams& q, int block) {
    const int down = block >> q.across_bits, beside = block - (down << q.across_bits);
    column = beside * (q.lines ? 64 : 8);
    other = down * (q.lines ? 1 : 8);
  }
  // In the first plane; -1 for none.
  __device__ int Pixel(const PlanesParams& q, const PlanesPlace& place, int row) const {
    const int x = place.column + column + (q.lines ? row : row % 8), y = place.other + other + (q.lines ? 0 : row / 8);
    if (x >= q.out_columns || y >= q.out_others) return -1;
    return place.image * q.pixels_of_image + y * q.pixels_of_other + x;
  }
  // The same in elements.
  __device__ int64_t Offset(const PlanesParams& q, const PlanesPlace& place, int row) const {
    const int pixel = Pixel(q, place, row);
    return pixel < 0 ? -1 : int64_t{pixel} * q.pixel + place.FirstFeature(q);
  }
};

// Takes the sums of the plane of results that is complete, and moves the others up.
template <int kFeatures>
__device__ __forceinline__ void TakePlane(PlaneSums<kFeatures>& sums, PlaneResults<kFeatures>& results) {
  hopper::Settle(sums);
#pragma unroll
  for (int i = 0; i < kFeatures / 2; ++i) results[i] = sums[i];
  Rotate<kFeatures / 2>(sums);
#pragma unroll
  for (int i = 0; i < kFeatures / 2; ++i) sums[kTaps * kFeatures / 2 - 1 - i] = 0;
}

// Bias, residual and activation, in the registers that the results are in.
template <class In, int kFeatures>
__device__ __forceinline__ void FinishPlane(const PlanesParams& q, const PlanesPlace& place,
                                            const int64_t (&rows)[2][2], int64_t plane,
                                            PlaneResults<kFeatures> (&results)[2]) {
  const int column = threadIdx.x % 4 * 2;
  const auto add = [&](auto type) {
    using Out = typename decltype(type)::type;
#pragma unroll
    for (int j = 0; j < kFeatures / 8; ++j) {
      float bias[2] = {};
      if (place.feature + column + 8 * j < q.features)
        Add<Out>(bias, q.epilogue.bias, place.FirstBias(q) + column + 8 * j);
#pragma unroll
      for (int i = 0; i < 8; ++i) results[i / 4][4 * j + i % 4] += bias[i % 2];
    }
    if (q.epilogue.residual == nullptr) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < kFeatures / 8; ++j)
        if (rows[i / 2][i % 2] >= 0 && place.feature + column + 8 * j < q.features)
          Add<Out>(reinterpret_cast<float (&)[2]>(results[i / 2][4 * j + i % 2 * 2]), q.epilogue.residual,
                   plane + rows[i / 2][i % 2] + column + 8 * j);
  };
  if (q.wide)
    add(TypeTag<float>());
  else
    add(TypeTag<In>());
  ActivateEither<In, 4>(reinterpret_cast<float (&)[kFeatures]>(results), q.epilogue.activation, q.wide);
}

// Stores floats after any epilogue. Two neighbouring lanes exchange what they have of 16 features, so that a warp
// stores whole sectors.
template <int kFeatures>
__device__ __forceinline__ void StoreFloats(const PlanesParams& q, const PlanesPlace& place, const int (&pixels)[2][2],
                                            int64_t offset, const PlaneResults<kFeatures> (&results)[2], float* out) {
  constexpr int kRuns = kFeatures / 16, kRows = 4;
  const int lane = threadIdx.x % 32, column = lane % 2 * 8 + lane % 4 / 2 * 4;
  offset += place.FirstFeature(q) + column;
  // What comes from far away first; four features that do not exist are those before instead.
  float bias[kRuns][4] = {}, residual[kRows][kRuns][4] = {};
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int back = max(0, place.feature + column + 16 * i + 4 - q.features);
    Add<float>(bias[i], q.epilogue.bias, place.FirstBias(q) + column + 16 * i - back);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int pixel = pixels[row / 2][row % 2];
      Add<float>(residual[row][i], q.epilogue.residual,
                 pixel < 0 ? 0 : offset + int64_t{pixel} * q.pixel + 16 * i - back);
    }
  }
  const auto finish = [&](int row, int i, float (&run)[4]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float* const pair = results[row / 2] + 8 * i + row % 2 * 2 + e;
      uint32_t lower = __float_as_uint(pair[0]), upper = __float_as_uint(pair[4]);
      Exchange(lower, upper, 1);
      run[e] = __uint_as_float(lower) + bias[i][e] + residual[row][i][e];
      run[2 + e] = __uint_as_float(upper) + bias[i][2 + e] + residual[row][i][2 + e];
    }
  };
  const auto store = [&](const float (&run)[4], int pixel, int i) {
    if (pixel >= 0 && place.feature + column + 16 * i < q.features)
      __stwb(reinterpret_cast<float4*>(out + offset + int64_t{pixel} * q.pixel + 16 * i),
             make_float4(run[0], run[1], run[2], run[3]));
  };
  const auto kind = q.epilogue.activation.kind;
  if (kind == activation::Kind::kIdentity || kind == activation::Kind::kRelu) {
    const bool relu = kind == activation::Kind::kRelu;
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        float run[4];
        finish(row, i, run);
#pragma unroll
        for (float& each : run) each = relu && each < 0 ? 0 : each;
        store(run, pixels[row / 2][row % 2], i);
      }
    return;
  }
  float rows[kRows * kRuns][4];
#pragma unroll
  for (int i = 0; i < kRows * kRuns; ++i) finish(i / kRuns, i % kRuns, rows[i]);
  int left[kRows] = {pixels[0][0], pixels[0][1], pixels[1][0], pixels[1][1]};
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    Activate<float>(reinterpret_cast<float (&)[4 * kRuns]>(rows), q.epilogue.activation);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) store(rows[i], left[0], i);
    Rotate<1>(left);
    Rotate<4 * kRuns>(reinterpret_cast<float (&)[4 * kRuns * kRows]>(rows));
  }
}

// Where a thread's rows of each block are in the first plane, or -1: of 16 bits the first feature, of floats the pixel.
template <class In>
using PlaneStores = std::conditional_t<sizeof(In) == 4, int, int64_t>[2][2];

// Stores what a warpgroup has taken of a plane.
template <class In, int kFeatures>
__device__ __forceinline__ void StorePlane(const PlanesParams& q, const PlanesPlace& place,
                                           const PlaneStores<In>& first, int plane,
                                           PlaneResults<kFeatures> (&results)[2], void* out) {
  const int64_t offset = plane * q.elements_of_plane;
  if constexpr (sizeof(In) == 4) {
    StoreFloats<kFeatures>(q, place, first, offset, results, static_cast<float*>(out));
  } else {
    if (!q.plain) FinishPlane<In, kFeatures>(q, place, first, offset, results);
    const int feature = FirstOfRun<kFeatures / 8>();
    const bool exists = place.feature + feature < q.features;
    if (q.wide) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float run[kFeatures / 4];
        GatherRun<kFeatures / 8>(results[i / 2] + i % 2 * 2, run);
        if (const int64_t from = first[i / 2][i % 2]; from >= 0 && exists)
          StoreRun(run, static_cast<float*>(out) + offset + from + feature);
      }
      return;
    }
    // All exchanges before all stores: those of one row would wait for each other.
    uint32_t words[4][kFeatures / 8];
#pragma unroll
    for (int i = 0; i < 4; ++i) GatherPacked<In>(results[i / 2] + i % 2 * 2, words[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int64_t from = first[i / 2][i % 2]; from >= 0 && exists)
        StoreWords(static_cast<In*>(out) + offset + from + feature, words[i]);
  }
}

}  // namespace jaxdnn::conv
