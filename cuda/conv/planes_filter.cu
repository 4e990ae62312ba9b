// Filter gradient of few channels, plane by plane (planes_plan.h).
//
// One thread loads pieces of x, some planes of a tile with what the window sees beside it, and of y, as many planes and
// those before that they meet. Both are MN-major operands of wgmma as they lie: their terms are pixels. A product's
// columns are the features of the three planes of y that meet a plane of x. Its rows are the channels at some places of
// the window, which are so far apart in shared memory. Of 16 channels these are the three columns of a line, and each
// warpgroup has half of the pixels; of 32 one warpgroup has two columns of every line, and the other the third one, of
// two lines to a product. So all of the window's lines are in registers, and x and y are loaded once.
//
// Planes of y that do not exist are zeros, but x may have an infinity where they meet it: sums that are NaN are
// computed once more, one by one, when the slices are added up.
//
// What bounds it: the tensor cores. Of what they compute of a plane of a volume, three quarters are taps of 16
// channels, nine tenths of 32.
#include <type_traits>

#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/planes.h"
#include "cuda/conv/planes_filter.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kThreads = (kConsumers + 1) * kWarpgroup, kMostStages = 8, kBarrierBytes = 256;

// A block's channels and features, the lines of its window, and its stride.
template <int kSide_, int kLines_, int kStride_>
struct Square {
  static constexpr int kSide = kSide_, kLines = kLines_, kStride = kStride_, kColumns = kTaps * kSide;
  static constexpr int kLine = kSide * 2, kXLine = kStride * kLine;  // bytes, of y and of x
  static constexpr bool kShare = kSide == 16;                        // warpgroups the pixels, and not the rows

  // Of the planes of x that a plane of y begins with, which sums of planes of the window a product adds to: one and how
  // many. With a stride of two, the first plane of x meets the window's last and first one, and the second the middle.
  static __device__ constexpr int FirstPlane(int of_stride) { return 2 * of_stride; }
  static __device__ constexpr int Planes(int of_stride) { return kStride == 1 ? kTaps : 2 - of_stride; }
  // The window's plane, of these.
  static __device__ constexpr int Plane(int number) {
    return kStride == 1 ? kTaps - 1 - number : number == 2 ? 1 : 2 - 2 * number;
  }
};

// What a warpgroup multiplies: of 64 rows the places of the window, product by product. Of those that do not share the
// pixels, the second has the window's third column, of two lines to a product, or the second pair of every line.
template <class S, bool kSecond>
struct Part {
  static constexpr bool kTwoLines = kSecond && S::kStride == 1;
  static constexpr int kProducts = kTwoLines ? (S::kLines + 1) / 2 : S::kLines;
  using Sums = float[kProducts][S::kColumns / 2];
  static __device__ int Line(int product, int place) { return kTwoLines ? 2 * product + place : product; }
  // A pair may begin before the window, and end after it.
  static __device__ int Column(int place, int lead) {
    return S::kStride == 2 ? (kSecond ? 2 : 0) + place - lead : kSecond ? kTaps - 1 : place;
  }
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

template <class In, class S, bool kSecond>
__device__ void ConsumePieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                              int warpgroup, typename Part<S, kSecond>::Sums& sums) {
  using P = Part<S, kSecond>;
  // A product's terms are eight pixels of each of two lines.
  constexpr int kSteps = PlanesFilterPlan::kPixels / 16 / (S::kShare ? kConsumers : 1);  // of a plane
  uint32_t step_x[kSteps], step_y[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    // The same in all of a warp, which its instructions then know.
    const int step = (S::kShare ? __shfl_sync(~0u, warpgroup, 0) * kSteps : 0) + k;
    const int across = q.columns / 8, down = step / across;
    step_x[k] = (2 * down * q.x_other + (step - down * across) * 8 * S::kXLine) >> 4;
    step_y[k] = (2 * down * q.y_other + (step - down * across) * 8 * S::kLine) >> 4;
  }
  const int x_plane = q.x_plane >> 4, y_plane = q.y_plane >> 4, product = (P::kTwoLines ? 2 : 1) * q.window_line >> 4;
  const int next_place = P::kTwoLines ? q.window_line : q.window_column;
  const int first_column = kSecond ? (kTaps - S::kStride) * q.window_column : 0;
  hopper::RingPlace turn;
  int last = 0;
#pragma unroll 1
  for (int piece = 0; piece < place.pieces; ++piece) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const uint32_t at = shared.stages + turn.stage * (q.x_bytes + q.y_bytes);
    // Rows that are no place of the window may read what lies behind x, which is y.
    uint64_t a = hopper::LineDescriptor(at + first_column, S::kXLine, q.x_other, next_place);
    uint64_t b = hopper::LineDescriptor(at + q.x_bytes, S::kLine, q.y_other, q.y_plane);
#pragma unroll 1
    for (int plane = 0; plane < q.planes; ++plane, b += y_plane) {
      hopper::BeginProducts();
      const auto multiply = [&](auto of_stride) {
        constexpr int kOf = decltype(of_stride)::value, kColumns = S::Planes(kOf) * S::kSide;
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
          for (int j = 0; j < P::kProducts; ++j)
            hopper::Multiply<In, kColumns, true, true>(
                reinterpret_cast<float (&)[kColumns / 2]>(sums[j][S::FirstPlane(kOf) * S::kSide / 2]),
                a + step_x[k] + j * product, b + step_y[k] + kOf * y_plane, piece > 0 || plane > 0 || k > 0);
        a += x_plane;
      };
      multiply(std::integral_constant<int, 0>());
      if constexpr (S::kStride == 2) multiply(std::integral_constant<int, 1>());
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

template <class S, bool kSecond>
__device__ void StoreFilter(const PlanesFilterParams& q, const FilterPlace& place,
                            typename Part<S, kSecond>::Sums& sums, float* partial) {
  using P = Part<S, kSecond>;
  const int lane = threadIdx.x % 32, first_row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  const int first_feature = place.feature + lane % 4 * 2;
  partial += place.split * q.result_size + int64_t{place.model} * q.taps * q.channels * q.features;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half, channel = place.channel + row % S::kSide;
#pragma unroll
    for (int j = 0; j < P::kProducts; ++j) {
      const int line = P::Line(j, row / S::kSide), column = P::Column(row / S::kSide, q.lead);
      if (line >= S::kLines || column < 0 || column >= kTaps || channel >= q.channels) continue;
#pragma unroll
      for (int i = 0; i < S::kColumns; i += 8) {
        const int tap = (S::Plane(i / S::kSide) * S::kLines + line) * kTaps + column;
        const int feature = first_feature + i % S::kSide;
        if (feature < q.features)
          *reinterpret_cast<float2*>(partial + (int64_t{tap} * q.channels + channel) * q.features + feature) = {
              sums[j][i / 2], sums[j][i / 2 + 1]};
      }
    }
#pragma unroll
    for (auto& each : sums) Rotate<2>(each);
  }
}

template <class In, class S>
__global__ void __launch_bounds__(kThreads, 1)
    PlanesFilterKernel(const __grid_constant__ PlanesFilterParams q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const FilterShared shared(q, memory);
    shared.Init();
    const auto consume = [&](int warpgroup, auto second) {
      constexpr bool kSecond = decltype(second)::value;
      const FilterPlace place(q);
      typename Part<S, kSecond>::Sums sums;
      ConsumePieces<In, S, kSecond>(q, shared, place, warpgroup, sums);
      if constexpr (S::kShare) {
        AddShares(warpgroup, sums, reinterpret_cast<float*>(memory));
        if (warpgroup > 0) return;
      }
      StoreFilter<S, kSecond>(q, place, sums, partial);
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
  const auto launch = [&](auto side, auto lines, auto stride) {
    using S = Square<decltype(side)::value, decltype(lines)::value, decltype(stride)::value>;
    const int sums = S::kShare ? S::kLines * S::kColumns / 2 * kWarpgroup * int(sizeof(float)) : 0;
    const int shared = std::max(q.stages * (q.x_bytes + q.y_bytes), sums) + kBarrierBytes;
    return LaunchKernel(PlanesFilterKernel<In, S>, Grid{q.blocks, kThreads, size_t(shared)}, stream, q, partial);
  };
  const auto with_lines = [&](auto lines) {
    constexpr std::integral_constant<int, 1> kOne;
    constexpr std::integral_constant<int, 2> kTwo;
    constexpr std::integral_constant<int, 16> kFew;
    constexpr std::integral_constant<int, 32> kMany;
    if (q.stride == 2) return launch(kMany, lines, kTwo);
    return q.side == 16 ? launch(kFew, lines, kOne) : launch(kMany, lines, kOne);
  };
  const cudaError_t e =
      q.volume ? with_lines(std::integral_constant<int, kTaps>()) : with_lines(std::integral_constant<int, 1>());
  return e != cudaSuccess ? e : SumSlices(p, partial, config.splits, true, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchPlanesFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                               void* workspace, cudaStream_t stream) {
  if (p.in == DType::kF32) return LaunchPlanesFilterFloats(p, config, x, y, out, workspace, stream);
  return p.in == DType::kBF16 ? LaunchTyped<__nv_bfloat16>(p, config, x, y, out, workspace, stream)
                              : LaunchTyped<__half>(p, config, x, y, out, workspace, stream);
}

}  // namespace jaxdnn::conv
