// Filter gradient of few channels without stride, plane by plane (planes_plan.h), of floats as TF32.
//
// wgmma reads floats from shared memory only if their terms, pixels, lie side by side. Of y, three warps make such a
// copy of each piece in shared memory. Of x, who multiplies has it in registers, which can be had in any order: so the
// window's columns are other places to load it from, and a thread's four terms are pixels that meet in no bank.
//
// A product's rows are 32 channels of x at two of the window's columns; or, at the third one, of two planes. Its
// columns are 32 features of a plane of y. Of the six planes of x that four of y meet, each meets up to three.
// Infinities of x that meet no line of y are planes_filter.cu's.
//
// A piece is 160 products of 64x32x8, 2560 cycles at the tensor cores' rate; an H200 takes some 4200, in which all of x
// is loaded to registers three times and y copied.
#include "cuda/conv/planes_filter.cuh"

namespace jaxdnn::conv {
namespace {

using Plan = PlanesFilterPlan;
constexpr int kSide = 32;
constexpr int kLine = kSide * 4, kEight = 8 * kLine;                   // bytes of a pixel, and of eight
constexpr int kSteps = Plan::kPixels / 8 / kConsumers;                 // of a plane, of a warpgroup: eight pixels each
constexpr int kPairs = (Plan::kFloatPlanes + kTaps - 1) / 2;           // of planes of x
constexpr int kPlaneBytes = Plan::kPixels * kLine;                     // of y
constexpr int kThreads = (kConsumers + 1) * kWarpgroup, kCopiers = 3;  // warps that copy
constexpr int kStages = 2, kBarrierBytes = 256;
constexpr int kPitch = kSide + 1, kPartFloats = kTaps * kTaps * kSide * kPitch;  // of a warpgroup's sums

// Of a warpgroup: of the window's planes, and its first two columns; and of the third column, where the upper rows are
// of the window's plane before the lower ones'.
struct FilterSums {
  float pair[kTaps][kSide / 2], third[kTaps + 1][kSide / 2];
};

struct FilterShared {
  uint32_t x, y, copies, barriers;

  __device__ FilterShared(const PlanesFilterParams& q, unsigned char* shared)
      : x(SharedAddress(shared)),
        y(x + kStages * q.x_bytes),
        copies(y + q.y_bytes),
        barriers(copies + kStages * q.y_bytes) {}
  __device__ uint32_t Full(int stage) const { return barriers + 16 * stage; }  // of x
  __device__ uint32_t Empty(int stage) const { return barriers + 16 * stage + 8; }
  __device__ uint32_t CopyFull(int stage) const { return Full(kStages + stage); }
  __device__ uint32_t CopyEmpty(int stage) const { return Empty(kStages + stage); }
  __device__ uint32_t YFull() const { return Full(2 * kStages); }
  __device__ uint32_t YEmpty() const { return Empty(2 * kStages); }

  __device__ void Init() const {
    constexpr int kMultiplyingWarps = kConsumers * kWarpgroup / 32;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        hopper::InitBarrier(Full(i), 1);
        hopper::InitBarrier(Empty(i), kMultiplyingWarps);
        hopper::InitBarrier(CopyFull(i), kCopiers * 32);
        hopper::InitBarrier(CopyEmpty(i), kMultiplyingWarps);
      }
      hopper::InitBarrier(YFull(), 1);
      hopper::InitBarrier(YEmpty(), kCopiers * 32);
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

__device__ void ProducePieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place) {
  hopper::PrefetchMap(&q.x);
  hopper::PrefetchMap(&q.y);
#pragma unroll 1
  for (int i = 0; i < place.pieces; ++i) {
    const PiecePlace at(q, place, i);
    const int stage = i % kStages;
    hopper::WaitBarrier(shared.YEmpty(), i % 2 ^ 1);
    hopper::ArriveExpecting(shared.YFull(), q.y_bytes);
    hopper::LoadBox(shared.y, &q.y, shared.YFull(), at.y);
    hopper::WaitBarrier(shared.Empty(stage), i / kStages % 2 ^ 1);
    hopper::ArriveExpecting(shared.Full(stage), q.x_box_bytes);
    hopper::LoadBox(shared.x + stage * q.x_bytes, &q.x, shared.Full(stage), at.x);
  }
}

// Where eight pixels begin in a plane of x and of y.
__device__ inline int EightOf(const PlanesFilterParams& q, int step, int other_bytes) {
  const int down = step >> q.across_bits;
  return down * other_bytes + (step - (down << q.across_bits)) * kEight;
}

// Copies y to lines of 32 pixels of a feature, of every eight first the even ones. A thread has one feature.
__device__ void CopyPieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                           int warp) {
  constexpr int kInPlane = Plan::kPixels / 8, kEights = Plan::kFloatPlanes * kInPlane, kTogether = 3;
  const int feature = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < place.pieces; ++i) {
    const int stage = i % kStages;
    hopper::WaitBarrier(shared.YFull(), i % 2);
    hopper::WaitBarrier(shared.CopyEmpty(stage), i / kStages % 2 ^ 1);
    const uint32_t copy = shared.copies + stage * q.y_bytes + feature * kLine;
#pragma unroll 1
    for (int first = warp; first < kEights; first += kCopiers * kTogether) {
      uint32_t words[kTogether][2][4];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int eight = min(first + u * kCopiers, kEights - 1), plane = eight / kInPlane, step = eight % kInPlane;
        const uint32_t from = shared.y + plane * q.y_plane + EightOf(q, step, q.y_other);
#pragma unroll
        for (int pixel = 0; pixel < 8; ++pixel)
          asm volatile("ld.shared.b32 %0, [%1];"
                       : "=r"(words[u][pixel % 2][pixel / 2])
                       : "r"(from + pixel * kLine + (feature * 4 ^ pixel << 4)));
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int eight = first + u * kCopiers, plane = eight / kInPlane, step = eight % kInPlane;
        if (eight >= kEights) break;
        const uint32_t to = copy + plane * kPlaneBytes + step / 4 * kSide * kLine;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
          hopper::StoreWords(to + ((step % 4 * 2 + odd ^ feature % 8) << 4), words[u][odd]);
      }
    }
    hopper::ShowSharedToTma();
    hopper::Arrive(shared.CopyFull(stage));
    hopper::Arrive(shared.YEmpty());
  }
}

// The eight pixels of a step are a thread's two even and odd ones, of two neighbouring channels, at these bytes of the
// first plane; rows 8 apart are those channels.
__device__ __forceinline__ void LoadRows(uint32_t (&rows)[4], uint32_t at) {
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const uint32_t from = at + odd * kLine;
    uint32_t words[2];
    hopper::LoadWords(words, hopper::Swizzled(from, 128));
    rows[2 * odd] = words[0];
    rows[2 * odd + 1] = words[1];
  }
}

__device__ void ConsumePieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                              int warpgroup, FilterSums& sums) {
  constexpr int kGroups = kSteps * kPairs;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32, below = warp / 2;
  const int thread = 2 * (lane % 4) * kLine + warp % 2 * 64 + lane / 4 * 8;
  const int pair = thread + below * q.window_column, third = thread + 2 * q.window_column + below * q.x_plane;
  int steps[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) steps[k] = EightOf(q, warpgroup * kSteps + k, q.x_other);
  // A group's rows of two planes of x are loaded while the products of the group before run.
  uint32_t rows[2][3][4];
  const auto load = [&](uint32_t stage, int group) {
    const uint32_t from = stage + steps[group / kPairs] + group % kPairs * 2 * q.x_plane;
    LoadRows(rows[group % 2][0], from + pair);
    LoadRows(rows[group % 2][1], from + q.x_plane + pair);
    LoadRows(rows[group % 2][2], from + third);
  };
#pragma unroll
  for (auto& each : sums.pair)
#pragma unroll
    for (float& sum : each) sum = 0;
#pragma unroll
  for (auto& each : sums.third)
#pragma unroll
    for (float& sum : each) sum = 0;

  const int pieces = place.pieces, own = __shfl_sync(~0u, warpgroup, 0);
  hopper::WaitBarrier(shared.Full(0), 0);
  load(shared.x, 0);
#pragma unroll 1
  for (int i = 0; i < pieces; ++i) {
    const int stage = i % kStages;
    hopper::WaitBarrier(shared.CopyFull(stage), i / kStages % 2);
    const uint32_t x = shared.x + stage * q.x_bytes;
    const uint64_t y = hopper::Descriptor(shared.copies + stage * q.y_bytes + own * kSide * kLine, 0);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t (&held)[3][4] = rows[group % 2];
      const int first = group % kPairs * 2;
      hopper::BeginProducts();
#pragma unroll
      for (int plane = 0; plane < Plan::kFloatPlanes; ++plane) {
        const uint64_t columns = y + ((plane * kPlaneBytes + group / kPairs * 32) >> 4);
        const int tap = first - plane;  // that the first of the planes of x is of
        if (tap >= 0 && tap < kTaps) hopper::MultiplyHeld<kSide>(sums.pair[tap], held[0], columns, true);
        if (tap + 1 >= 0 && tap + 1 < kTaps) hopper::MultiplyHeld<kSide>(sums.pair[tap + 1], held[1], columns, true);
        if (tap + 1 >= 0 && tap < kTaps) hopper::MultiplyHeld<kSide>(sums.third[tap + 1], held[2], columns, true);
      }
      hopper::CommitProducts();
      hopper::WaitForProducts<1>();
      if (group == 0 && i > 0 && lane == 0) {
        hopper::Arrive(shared.Empty(stage ^ 1));
        hopper::Arrive(shared.CopyEmpty(stage ^ 1));
      }
      if (group + 1 < kGroups) load(x, group + 1);
    }
    if (i + 1 == pieces) break;
    hopper::WaitBarrier(shared.Full(stage ^ 1), (i + 1) / kStages % 2);
    load(shared.x + (stage ^ 1) * q.x_bytes, 0);
  }
  hopper::WaitForSums(sums.pair);
  hopper::Settle(sums.third);
}

// Adds up what the warpgroups have, and the rows of the third column, in order, through the shared memory of the
// stages.
__device__ void StoreFilter(const PlanesFilterParams& q, const FilterPlace& place, int warpgroup,
                            const FilterSums& sums, float* parts, float* partial) {
  constexpr int kAll = kConsumers * kWarpgroup, kTap = kSide * kPitch;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32, below = warp / 2;
  const int place_of = (warp % 2 * 16 + lane / 4 * 2) * kPitch + lane % 4 * 2;
  hopper::SyncThreads(3, kAll);  // all products are done with the stages
  const auto leave = [&](const float (&from)[kSide / 2], int part, int plane, int column) {
    float* const to = parts + part * kPartFloats + (plane * kTaps + column) * kTap + place_of;
#pragma unroll
    for (int i = 0; i < kSide / 2; ++i) to[i % 4 / 2 * kPitch + i / 4 * 8 + i % 2] = from[i];
  };
#pragma unroll
  for (int plane = 0; plane < kTaps; ++plane) {
    leave(sums.pair[plane], warpgroup, plane, below);
    // The lower rows' part has nothing else at the third column.
    if (below) {
      leave(sums.third[plane], 2 + warpgroup, plane, kTaps - 1);
    } else {
      leave(sums.third[plane + 1], warpgroup, plane, kTaps - 1);
    }
  }
  hopper::SyncThreads(3, kAll);
#pragma unroll 4
  for (int i = threadIdx.x; i < kTaps * kTaps * kSide * kSide; i += kAll) {
    const int feature = i % kSide, channel = i / kSide % kSide, at = i / (kSide * kSide), plane = at / kTaps;
    if (place.channel + channel >= q.channels || place.feature + feature >= q.features) continue;
    const float* const from = parts + at * kTap + channel * kPitch + feature;
    float sum = from[0] + from[kPartFloats];
    if (at % kTaps == kTaps - 1) sum += from[2 * kPartFloats] + from[3 * kPartFloats];
    const int tap = (plane * q.lines + place.line) * kTaps + at % kTaps;
    const int64_t row = (int64_t{place.model} * q.taps + tap) * q.channels + place.channel + channel;
    partial[place.split * q.result_size + row * q.features + place.feature + feature] = sum;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    PlanesFilterFloatsKernel(const __grid_constant__ PlanesFilterParams q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const FilterShared shared(q, memory);
    shared.Init();
    const FilterPlace place(q);
    const int warpgroup = threadIdx.x / kWarpgroup;
    if (warpgroup == kConsumers) {
      hopper::SetRegisters<56, false>();
      const int warp = threadIdx.x % kWarpgroup / 32;
      if (warp > 0) {
        CopyPieces(q, shared, place, warp - 1);
      } else if (hopper::IsElected()) {
        ProducePieces(q, shared, place);
      }
    } else {
      hopper::SetRegisters<224, true>();
      FilterSums sums;
      ConsumePieces(q, shared, place, warpgroup, sums);
      StoreFilter(q, place, warpgroup, sums, reinterpret_cast<float*>(memory), partial);
    }
  }
}

}  // namespace

cudaError_t LaunchPlanesFilterFloats(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                     void* workspace, cudaStream_t stream) {
  PlanesFilterParams q;
  if (const cudaError_t e = q.Init(p, config, x, y); e != cudaSuccess) return e;
  auto* const partial = static_cast<float*>(workspace);
  const int stages = kStages * q.x_bytes + (kStages + 1) * q.y_bytes + kBarrierBytes;
  const int shared = std::max(stages, 2 * kConsumers * kPartFloats * int(sizeof(float)));
  const cudaError_t e =
      LaunchKernel(PlanesFilterFloatsKernel, Grid{q.blocks, kThreads, size_t(shared)}, stream, q, partial);
  return e != cudaSuccess ? e : SumSlices(p, partial, config.splits, true, x, y, out, stream);
}

}  // namespace jaxdnn::conv
