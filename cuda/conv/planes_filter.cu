// Filter gradient of few channels without stride, plane by plane (planes_plan.h).
//
// One thread loads pieces of x, some planes of a tile with what the window sees beside it, and of y, as many planes and
// the two before. Both are MN-major operands of wgmma as they lie: their terms are pixels. A product's columns are the
// features of the three planes of y that meet a plane of x. Its rows are the channels at some places of the window,
// which are so far apart in shared memory. Of 16 channels these are the three columns of a line, and each warpgroup has
// half of the pixels; of 32 one warpgroup has two columns of every line, and the other the third one, of two lines to a
// product. So all of the window's lines are in registers, and x and y are loaded once.
//
// Planes of y that do not exist are zeros, but x may have an infinity where they meet it: sums that are NaN are
// computed once more, one by one, when the slices are added up.
//
// What bounds it: the tensor cores. Of what they compute of a plane of a volume, three quarters are taps of 16
// channels, nine tenths of 32.
#include <type_traits>

#include "cuda/conv/planes.h"
#include "cuda/conv/planes_filter.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kThreads = (kConsumers + 1) * kWarpgroup, kMostStages = 8, kBarrierBytes = 256;

// A block's channels and features, and the lines of its window.
template <int kSide_, int kLines_>
struct Square {
  static constexpr int kSide = kSide_, kLines = kLines_, kColumns = kTaps * kSide, kLine = kSide * 2;
  static constexpr bool kShare = kSide == 16;  // warpgroups the pixels, and not the rows
};

// What a warpgroup multiplies: of 64 rows the places of the window, product by product. The second of those that do not
// share the pixels has the third column.
template <class S, bool kThird>
struct Part {
  static constexpr int kProducts = kThird ? (S::kLines + 1) / 2 : S::kLines;
  using Sums = float[kProducts][S::kColumns / 2];
  static __device__ int Line(int product, int place) { return kThird ? 2 * product + place : product; }
  static __device__ int Column(int place) { return kThird ? kTaps - 1 : place; }
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
  for (int piece = 0; piece < place.pieces; ++piece) {
    const PiecePlace at(q, place, piece);
    const uint32_t to = shared.stages + turn.stage * (q.x_bytes + q.y_bytes), full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(full, q.x_box_bytes + q.y_bytes);
    hopper::LoadBox(to, &q.x, full, at.x);
    hopper::LoadBox(to + q.x_bytes, &q.y, full, at.y);
    turn.Next(q.stages);
  }
}

template <class In, class S, bool kThird>
__device__ void ConsumePieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                              int warpgroup, typename Part<S, kThird>::Sums& sums) {
  using P = Part<S, kThird>;
  // A product's terms are eight pixels of each of two lines.
  constexpr int kSteps = PlanesFilterPlan::kPixels / 16 / (S::kShare ? kConsumers : 1);  // of a plane
  uint32_t step_x[kSteps], step_y[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    // The same in all of a warp, which its instructions then know.
    const int step = (S::kShare ? __shfl_sync(~0u, warpgroup, 0) * kSteps : 0) + k;
    const int across = q.columns / 8, down = step / across;
    step_x[k] = (2 * down * q.x_other + (step - down * across) * 8 * S::kLine) >> 4;
    step_y[k] = (2 * down * q.y_other + (step - down * across) * 8 * S::kLine) >> 4;
  }
  const int x_plane = q.x_plane >> 4, y_plane = q.y_plane >> 4, product = (kThird ? 2 : 1) * q.window_line >> 4;
  const int next_place = kThird ? q.window_line : q.window_column;
  const int first_column = kThird ? (kTaps - 1) * q.window_column : 0;
  hopper::RingPlace turn;
  int last = 0;
#pragma unroll 1
  for (int piece = 0; piece < place.pieces; ++piece) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const uint32_t at = shared.stages + turn.stage * (q.x_bytes + q.y_bytes);
    // Rows that are no place of the window may read what lies behind x, which is y.
    uint64_t a = hopper::LineDescriptor(at + first_column, S::kLine, q.x_other, next_place);
    uint64_t b = hopper::LineDescriptor(at + q.x_bytes, S::kLine, q.y_other, q.y_plane);
#pragma unroll 1
    for (int plane = 0; plane < q.planes; ++plane, a += x_plane, b += y_plane) {
      hopper::BeginProducts();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int j = 0; j < P::kProducts; ++j)
          hopper::Multiply<In, S::kColumns, true, true>(sums[j], a + step_x[k] + j * product, b + step_y[k],
                                                        piece > 0 || plane > 0 || k > 0);
      hopper::CommitProducts();
      hopper::WaitForProducts<1>();
      if (plane == 0 && piece > 0 && threadIdx.x % 32 == 0) hopper::Arrive(shared.Empty(last));
    }
    last = turn.stage;
    turn.Next(q.stages);
  }
  hopper::WaitForSums(sums);
}

// The sums of the other warpgroup are added to those of the first, by way of the stages.
template <class Sums>
__device__ void AddShares(int warpgroup, Sums& sums, float* other) {
  constexpr int kAll = kConsumers * kWarpgroup, kEach = std::extent_v<Sums, 1>;
  other += threadIdx.x % kWarpgroup;
  hopper::SyncThreads(3, kAll);  // all products are done with the stages
#pragma unroll
  for (int j = 0; j < std::extent_v<Sums>; ++j)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (warpgroup > 0) other[(j * kEach + i) * kWarpgroup] = sums[j][i];
  hopper::SyncThreads(3, kAll);
#pragma unroll
  for (int j = 0; j < std::extent_v<Sums>; ++j)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (warpgroup == 0) sums[j][i] += other[(j * kEach + i) * kWarpgroup];
}

template <class S, bool kThird>
__device__ void StoreFilter(const PlanesFilterParams& q, const FilterPlace& place,
                            const typename Part<S, kThird>::Sums& sums, float* partial) {
  using P = Part<S, kThird>;
  const int lane = threadIdx.x % 32, first_row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  const int first_feature = place.feature + lane % 4 * 2;
  partial += place.split * q.result_size + int64_t{place.model} * q.taps * q.channels * q.features;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half, channel = place.channel + row % S::kSide;
#pragma unroll
    for (int j = 0; j < P::kProducts; ++j) {
      const int line = P::Line(j, row / S::kSide), column = P::Column(row / S::kSide);
      if (line >= S::kLines || column >= kTaps || channel >= q.channels) continue;
#pragma unroll
      for (int i = 0; i < S::kColumns; i += 8) {
        // A plane of x meets that of y with the window's first plane, and those before with the ones after.
        const int tap = ((kTaps - 1 - i / S::kSide) * S::kLines + line) * kTaps + column;
        const int feature = first_feature + i % S::kSide;
        if (feature < q.features)
          *reinterpret_cast<float2*>(partial + (int64_t{tap} * q.channels + channel) * q.features + feature) = {
              sums[j][i / 2 + 2 * half], sums[j][i / 2 + 2 * half + 1]};
      }
    }
  }
}

template <class In, class S>
__global__ void __launch_bounds__(kThreads, 1)
    PlanesFilterKernel(const __grid_constant__ PlanesFilterParams q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const FilterShared shared(q, memory);
    shared.Init();
    const auto consume = [&](int warpgroup, auto third) {
      constexpr bool kThird = decltype(third)::value;
      const FilterPlace place(q);
      typename Part<S, kThird>::Sums sums;
      ConsumePieces<In, S, kThird>(q, shared, place, warpgroup, sums);
      if constexpr (S::kShare) {
        AddShares(warpgroup, sums, reinterpret_cast<float*>(memory));
        if (warpgroup > 0) return;
      }
      StoreFilter<S, kThird>(q, place, sums, partial);
    };
    RunRoles<1>([&](int) { ProducePieces(q, shared, FilterPlace(q)); },
                [&](int warpgroup) {
                  if constexpr (!S::kShare)
                    if (warpgroup > 0) return consume(warpgroup, std::true_type());
                  consume(warpgroup, std::false_type());
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
  const auto launch = [&](auto side, auto lines) {
    using S = Square<decltype(side)::value, decltype(lines)::value>;
    const int sums = S::kShare ? S::kLines * S::kColumns / 2 * kWarpgroup * int(sizeof(float)) : 0;
    const int shared = std::max(q.stages * (q.x_bytes + q.y_bytes), sums) + kBarrierBytes;
    return LaunchKernel(PlanesFilterKernel<In, S>, Grid{q.blocks, kThreads, size_t(shared)}, stream, q, partial);
  };
  const auto with_lines = [&](auto lines) {
    return q.side == 16 ? launch(std::integral_constant<int, 16>(), lines)
                        : launch(std::integral_constant<int, 32>(), lines);
  };
  const cudaError_t e =
      q.volume ? with_lines(std::integral_constant<int, kTaps>()) : with_lines(std::integral_constant<int, 1>());
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
