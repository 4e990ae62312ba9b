// Filter gradient of few channels without stride, plane by plane (planes_plan.h).
//
// One thread loads pieces of y, four planes of some lines, and of x with what the window sees beside them. Both are
// MN-major operands of wgmma as they lie: their terms are pixels. A product's columns are 32 channels of x at each of
// the three columns of the window, which are a pixel apart; its rows are 32 features of a plane of y, and of the next
// one. Two planes of y meet four of x: of the eight products six are taps, and the others are dropped. Of 16 channels
// and features a product's rows are four planes of y, which meet six of x.
//
// Lines of y that do not exist are zeros, but x may have an infinity where they meet it: sums that are NaN are computed
// once more, one by one, when the slices are added up.
//
// What bounds it: the tensor cores. A piece is 32 products of 64x96x16, 1536 cycles at their rate, of which an H200
// takes some 1600; or, of 16 channels, 24 of 64x48x16, which take longer to read than to multiply.
#include "cuda/conv/planes.h"
#include "cuda/conv/planes_filter.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kThreads = (kConsumers + 1) * kWarpgroup, kMostStages = 8, kBarrierBytes = 256;

// A product of so many channels and features.
template <int kSide_>
struct Square {
  static constexpr int kSide = kSide_, kColumns = kTaps * kSide, kLine = kSide * 2;
  static constexpr int kTogether = 64 / kSide, kMet = kTaps - 1 + kTogether;  // planes of y, and of x that they meet
  // A part of the sums, in shared memory: of a plane of y, by a warpgroup.
  static constexpr int kPitch = kColumns + 1, kPartFloats = kTaps * kSide * kPitch, kParts = kTogether * kConsumers;
  using Sums = float[kMet][kColumns / 2];
};

struct FilterShared {
  uint32_t stages, barriers;

  __device__ FilterShared(const PlanesFilterParams& q, unsigned char* shared)
      : stages(SharedAddress(shared)), barriers(stages + q.stages * (q.x_bytes + q.y_bytes)) {}
  __device__ uint32_t Full(int stage) const { return barriers + 16 * stage; }
  __device__ uint32_t Empty(int stage) const { return barriers + 16 * stage + 8; }

  __device__ void Init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMostStages; ++i) {
        hopper::InitBarrier(Full(i), 1);
        hopper::InitBarrier(Empty(i), kConsumers * kWarpgroup / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

__device__ void ProducePieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place) {
  hopper::PrefetchMap(&q.x);
  hopper::PrefetchMap(&q.y);
  hopper::RingPlace turn;
#pragma unroll 1
  for (int piece = place.first; piece < place.end; ++piece) {
    const PiecePlace at(q, place, piece);
    const uint32_t to = shared.stages + turn.stage * (q.x_bytes + q.y_bytes), full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(full, q.x_box_bytes + q.y_bytes);
    hopper::LoadBox(to, &q.y, full, at.y);
    hopper::LoadBox(to + q.y_bytes, &q.x, full, at.x);
    turn.Next(q.stages);
  }
}

template <class In, class S>
__device__ void ConsumePieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                              int warpgroup, typename S::Sums& sums) {
  constexpr int kLine = S::kLine;
  // A product's terms are eight pixels of each of two lines.
  constexpr int kSteps = PlanesFilterPlan::kPixels / 16 / kConsumers;  // products of a plane, of a warpgroup
  uint32_t step_x[kSteps], step_y[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    // The same in all of a warp, which its instructions then know.
    const int step = __shfl_sync(~0u, warpgroup, 0) * kSteps + k, across = q.columns / 8, down = step / across;
    step_x[k] = (2 * down * q.x_other + (step - down * across) * 8 * kLine) >> 4;
    step_y[k] = (2 * down * q.y_other + (step - down * across) * 8 * kLine) >> 4;
  }
  const int x_plane = q.x_plane >> 4, y_plane = q.y_plane >> 4;
  hopper::RingPlace turn;
  int last = 0;
  const int pieces = place.end - place.first;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const uint32_t at = shared.stages + turn.stage * (q.x_bytes + q.y_bytes);
    const uint64_t a = hopper::LineDescriptor(at, kLine, q.y_other, q.y_plane);
    const uint64_t b = hopper::LineDescriptor(at + q.y_bytes, kLine, q.x_other, q.column_step);
    hopper::BeginProducts();
#pragma unroll
    for (int first = 0; first < PlanesFilterPlan::kPlanes; first += S::kTogether)
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int j = 0; j < S::kMet; ++j)
          hopper::Multiply<In, S::kColumns, true, true>(sums[j], a + first * y_plane + step_y[k],
                                                        b + (first + j) * x_plane + step_x[k],
                                                        piece > 0 || first > 0 || k > 0);
    hopper::CommitProducts();
    hopper::WaitForProducts<1>();
    if (piece > 0 && threadIdx.x % 32 == 0) hopper::Arrive(shared.Empty(last));
    last = turn.stage;
    turn.Next(q.stages);
  }
  hopper::WaitForSums(sums);
}

// Adds up what the warpgroups have, and all planes of y, in order, through the shared memory of the stages.
template <class S>
__device__ void StoreFilter(const PlanesFilterParams& q, const FilterPlace& place, int warpgroup,
                            const typename S::Sums& sums, float* parts, float* partial) {
  constexpr int kAll = kConsumers * kWarpgroup, kWarps = S::kSide / 16;  // of a plane
  constexpr int kSide = S::kSide, kColumns = S::kColumns, kPitch = S::kPitch, kPartFloats = S::kPartFloats;
  const int thread = threadIdx.x, warp = thread % kWarpgroup / 32, lane = thread % 32, of_y = warp / kWarps;
  hopper::SyncThreads(3, kAll);  // all products are done with the stages
  float* const mine = parts + (S::kTogether * warpgroup + of_y) * kPartFloats;
#pragma unroll
  for (int j = 0; j < S::kMet; ++j) {
    const int tap = j - of_y;  // of the window's planes
    if (tap < 0 || tap >= kTaps) continue;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int row = 16 * (warp % kWarps) + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      mine[(tap * kSide + row) * kPitch + column] = sums[j][i];
    }
  }
  hopper::SyncThreads(3, kAll);
#pragma unroll 4
  for (int i = thread; i < kTaps * kSide * kColumns; i += kAll) {
    const int feature = i % kSide, column = i / kSide % kColumns, plane = i / (kSide * kColumns);
    const int channel = column % kSide, tap = (plane * q.lines + place.line) * kTaps + column / kSide;
    if (place.channel + channel >= q.channels || place.feature + feature >= q.features) continue;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part)
      sum += parts[part * kPartFloats + (plane * kSide + feature) * kPitch + column];
    const int64_t row = (int64_t{place.model} * q.taps + tap) * q.channels + place.channel + channel;
    partial[place.split * q.result_size + row * q.features + place.feature + feature] = sum;
  }
}

template <class In, class S>
__global__ void __launch_bounds__(kThreads, 1)
    PlanesFilterKernel(const __grid_constant__ PlanesFilterParams q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const FilterShared shared(q, memory);
    shared.Init();
    RunRoles<1>([&](int) { ProducePieces(q, shared, FilterPlace(q)); },
                [&](int warpgroup) {
                  typename S::Sums sums;
                  ConsumePieces<In, S>(q, shared, FilterPlace(q), warpgroup, sums);
                  StoreFilter<S>(q, FilterPlace(q), warpgroup, sums, reinterpret_cast<float*>(memory), partial);
                });
  }
}

template <class In>
cudaError_t LaunchTyped(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                        void* workspace, cudaStream_t stream) {
  PlanesFilterParams q;
  if (const cudaError_t e = q.Init(p, config, x, y); e != cudaSuccess) return e;
  q.stages = std::min(kMostStages, ((227 << 10) - kBarrierBytes) / (q.x_bytes + q.y_bytes));
  auto* const partial = static_cast<float*>(workspace);
  const auto launch = [&](auto square) {
    using S = decltype(square);
    const int parts = S::kParts * S::kPartFloats * int(sizeof(float));
    const int shared = std::max(q.stages * (q.x_bytes + q.y_bytes), parts) + kBarrierBytes;
    return LaunchKernel(PlanesFilterKernel<In, S>, Grid{q.blocks, kThreads, size_t(shared)}, stream, q, partial);
  };
  const cudaError_t e = q.side == 16 ? launch(Square<16>()) : launch(Square<32>());
  return e != cudaSuccess ? e : SumSlices<In, true>(p, partial, config.splits, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchPlanesFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                               void* workspace, cudaStream_t stream) {
  if (p.in == DType::kF32) return LaunchPlanesFilterFloats(p, config, x, y, out, workspace, stream);
  return p.in == DType::kBF16 ? LaunchTyped<__nv_bfloat16>(p, config, x, y, out, workspace, stream)
                              : LaunchTyped<__half>(p, config, x, y, out, workspace, stream);
}

}  // namespace jaxdnn::conv
