// Filter gradient of few channels without stride, plane by plane (planes_plan.h).
//
// One thread loads pieces of y, four planes of some lines, and of x with what the window sees beside them. Both are
// MN-major operands of wgmma as they lie: their terms are pixels. A product's columns are 32 channels of x at each of
// the three columns of the window, which are a pixel apart; its rows are 32 features of a plane of y, and of the next
// one. Two planes of y meet four of x: of the eight products six are taps, and the others are dropped.
//
// Lines of y that do not exist are zeros, but x may have an infinity where they meet it: sums that are not finite are
// computed once more, one by one, when the slices are added up.
#include "cuda/conv/filter.cuh"
#include "cuda/conv/planes.h"
#include "cuda/conv/planes_plan.h"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {
namespace {

using Plan = PlanesFilterPlan;
constexpr int kSide = Plan::kSide, kTaps = PlanesPlan::kTaps, kColumns = kTaps * kSide, kLine = kSide * 2;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup, kMostStages = 8, kBarrierBytes = 256;
constexpr int kMet = kTaps + 1;                                             // planes of x that two of y meet
constexpr int kPitch = kColumns + 1, kPartFloats = kTaps * kSide * kPitch;  // of a part of the sums, in shared memory
constexpr int kPartBytes = kPartFloats * 4, kParts = 2 * kConsumers;
using FilterSums = float[kMet][kColumns / 2];

struct PlanesFilterParams {
  CUtensorMap x, y;
  bool volume;
  int columns, others;
  int channels, features, images;
  int lines, taps;            // lines of the window that are blocks of their own; and all taps
  int pad[kRank], line_step;  // of the planes, the others, the columns; and from line to line of the window
  int x_other, x_plane, y_other, y_plane, column_step;  // bytes in shared memory
  int x_bytes, y_bytes, box_bytes, stages;
  int pieces, splits;
  FastDiv column_div, other_div, plane_div, split_div, line_div, channel_div, feature_div;
  int64_t result_size;
};

// What a block does.
struct FilterPlace {
  int split, line, channel, feature, model;
  int first, end;  // pieces

  __device__ explicit FilterPlace(const PlanesFilterParams& q) {
    int rest = q.split_div.Div(blockIdx.x, &split);
    rest = q.feature_div.Div(rest, &feature);
    rest = q.channel_div.Div(rest, &channel);
    model = q.line_div.Div(rest, &line);
    channel *= kSide;
    feature *= kSide;
    first = static_cast<int>(int64_t{q.pieces} * split / q.splits);
    end = static_cast<int>(int64_t{q.pieces} * (split + 1) / q.splits);
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
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int piece = place.first; piece < place.end; ++piece) {
    int column, other, plane;
    int rest = q.plane_div.Div(piece, &plane);
    rest = q.column_div.Div(rest, &column);
    const int image = q.other_div.Div(rest, &other);
    column *= q.columns;
    other *= q.others;
    plane *= Plan::kPlanes;
    const int last = q.volume ? place.model * q.images + image : place.model;
    const int x_other = other - q.pad[1] + place.line * q.line_step, x_plane = plane - q.pad[0];
    const int at_x[] = {place.channel, column - q.pad[2], q.volume ? x_other : x_plane, q.volume ? x_plane : x_other,
                        last};
    const int at_y[] = {place.feature, column, q.volume ? other : plane, q.volume ? plane : other, last};
    const uint32_t to = shared.stages + stage * (q.x_bytes + q.y_bytes);
    hopper::WaitBarrier(shared.Empty(stage), parity ^ 1);
    hopper::ArriveExpecting(shared.Full(stage), q.box_bytes);
    hopper::LoadBox(to, &q.y, shared.Full(stage), at_y);
    hopper::LoadBox(to + q.y_bytes, &q.x, shared.Full(stage), at_x);
    if (++stage == q.stages) stage = 0, parity ^= 1;
  }
}

template <class In>
__device__ void ConsumePieces(const PlanesFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                              int warpgroup, FilterSums& sums) {
  // A product's terms are eight pixels of each of two lines.
  constexpr int kSteps = Plan::kPixels / 16 / kConsumers;  // products of a plane, of a warpgroup
  uint32_t step_x[kSteps], step_y[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    // The same in all of a warp, which its instructions then know.
    const int step = __shfl_sync(~0u, warpgroup, 0) * kSteps + k, across = q.columns / 8, down = step / across;
    step_x[k] = (2 * down * q.x_other + (step - down * across) * 8 * kLine) >> 4;
    step_y[k] = (2 * down * q.y_other + (step - down * across) * 8 * kLine) >> 4;
  }
  const int x_plane = q.x_plane >> 4, y_plane = q.y_plane >> 4;
  int stage = 0, last = 0;
  uint32_t parity = 0;
  const int pieces = place.end - place.first;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    hopper::WaitBarrier(shared.Full(stage), parity);
    const uint32_t at = shared.stages + stage * (q.x_bytes + q.y_bytes);
    const uint64_t a = hopper::LineDescriptor(at, kLine, q.y_other, q.y_plane);
    const uint64_t b = hopper::LineDescriptor(at + q.y_bytes, kLine, q.x_other, q.column_step);
    hopper::BeginProducts();
#pragma unroll
    for (int pair = 0; pair < Plan::kPlanes; pair += 2)
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int j = 0; j < kMet; ++j)
          hopper::Multiply<In, kColumns, true, true>(sums[j], a + pair * y_plane + step_y[k],
                                                     b + (pair + j) * x_plane + step_x[k],
                                                     piece > 0 || pair > 0 || k > 0);
    hopper::CommitProducts();
    hopper::WaitForProducts<1>();
    if (piece > 0 && threadIdx.x % 32 == 0) hopper::Arrive(shared.Empty(last));
    last = stage;
    if (++stage == q.stages) stage = 0, parity ^= 1;
  }
  hopper::WaitForProducts<0>();
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& each : block) asm volatile("" : "+f"(each));
}

// Adds up what the warpgroups have, and both planes of y, in order, through the shared memory of the stages.
__device__ void StoreFilter(const PlanesFilterParams& q, const FilterPlace& place, int warpgroup,
                            const FilterSums& sums, float* parts, float* partial) {
  const int thread = threadIdx.x, warp = thread % kWarpgroup / 32, lane = thread % 32, second = warp / 2;
  constexpr int kAll = kConsumers * kWarpgroup;
  hopper::SyncThreads(3, kAll);  // all products are done with the stages
  float* const mine = parts + (2 * warpgroup + second) * kPartFloats;
#pragma unroll
  for (int j = 0; j < kMet; ++j) {
    const int tap = j - second;  // of the window's planes
    if (tap < 0 || tap >= kTaps) continue;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int row = 16 * (warp % 2) + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
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
    for (int part = 0; part < kParts; ++part)
      sum += parts[part * kPartFloats + (plane * kSide + feature) * kPitch + column];
    const int64_t row = (int64_t{place.model} * q.taps + tap) * q.channels + place.channel + channel;
    partial[place.split * q.result_size + row * q.features + place.feature + feature] = sum;
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads, 1)
    PlanesFilterKernel(const __grid_constant__ PlanesFilterParams q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const FilterShared shared(q, memory);
    shared.Init();
    RunRoles<1>([&](int) { ProducePieces(q, shared, FilterPlace(q)); },
                [&](int warpgroup) {
                  FilterSums sums;
                  ConsumePieces<In>(q, shared, FilterPlace(q), warpgroup, sums);
                  StoreFilter(q, FilterPlace(q), warpgroup, sums, reinterpret_cast<float*>(memory), partial);
                });
  }
}

template <class In>
cudaError_t LaunchTyped(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                        void* workspace, cudaStream_t stream) {
  Plan plan;
  if (!plan.Fit(p)) return cudaErrorInvalidValue;
  const bool volume = plan.volume;
  const int order[kRank] = {volume ? 0 : 1, volume ? 1 : 0, 2};  // planes, others, columns
  const int box_columns = int(plan.columns + (kTaps - 1) * p.rhs_dilation[2]), box_planes = Plan::kPlanes + kTaps - 1;
  PlanesFilterParams q = {};
  q.volume = volume;
  q.columns = plan.columns;
  q.others = plan.others;
  q.channels = int(p.channels);
  q.features = int(p.features);
  q.lines = volume ? kTaps : 1;
  q.taps = int(p.Taps());
  for (int d = 0; d < kRank; ++d) q.pad[d] = int(p.pad[order[d]]);
  q.line_step = int(volume ? p.rhs_dilation[1] : 1);
  q.images = int(p.images);
  // In shared memory the inner one of planes and others comes first.
  const int x_line = box_columns * kLine, y_line = plan.columns * kLine;
  q.x_other = volume ? x_line : box_planes * x_line;
  q.x_plane = volume ? plan.others * x_line : x_line;
  q.y_other = volume ? y_line : Plan::kPlanes * y_line;
  q.y_plane = volume ? plan.others * y_line : y_line;
  q.column_step = int(p.rhs_dilation[2]) * kLine;
  q.x_bytes = plan.x_bytes;
  q.y_bytes = plan.y_bytes;
  q.box_bytes = plan.y_bytes + plan.others * box_planes * x_line;
  q.stages = std::min(kMostStages, ((227 << 10) - kBarrierBytes) / (q.x_bytes + q.y_bytes));
  q.pieces = int(plan.pieces);
  q.splits = int(config.splits);
  q.column_div = FastDiv(plan.column_tiles);
  q.other_div = FastDiv(plan.other_tiles);
  q.plane_div = FastDiv(plan.plane_tiles);
  q.split_div = FastDiv(config.splits);
  q.line_div = FastDiv(q.lines);
  q.channel_div = FastDiv(CeilDiv(p.channels, kSide));
  q.feature_div = FastDiv(CeilDiv(p.features, kSide));
  q.result_size = p.FilterSize();

  const auto encode = [&](CUtensorMap* map, const void* data, int64_t channels, const int64_t (&extent)[kRank],
                          int columns, int planes) {
    return volume ? EncodeBoxes(map, p.in, data, {channels, extent[2], extent[1], extent[0], p.batch * p.images},
                                {kSide, columns, plan.others, planes, 1})
                  : EncodeBoxes(map, p.in, data, {channels, extent[2], extent[1], p.images, p.batch},
                                {kSide, columns, planes, plan.others, 1});
  };
  cudaError_t e = encode(&q.x, x, p.channels, p.x, box_columns, box_planes);
  if (e == cudaSuccess) e = encode(&q.y, y, p.features, p.y, plan.columns, Plan::kPlanes);
  if (e != cudaSuccess) return e;
  auto* const partial = static_cast<float*>(workspace);
  const int shared = std::max(q.stages * (q.x_bytes + q.y_bytes), kParts * kPartBytes) + kBarrierBytes;
  e = LaunchKernel(PlanesFilterKernel<In>, Grid{plan.units * config.splits, kThreads, size_t(shared)}, stream, q,
                   partial);
  return e != cudaSuccess ? e : SumSlices<In, true>(p, partial, config.splits, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchPlanesFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                               void* workspace, cudaStream_t stream) {
  return p.in == DType::kBF16 ? LaunchTyped<__nv_bfloat16>(p, config, x, y, out, workspace, stream)
                              : LaunchTyped<__half>(p, config, x, y, out, workspace, stream);
}

}  // namespace jaxdnn::conv
