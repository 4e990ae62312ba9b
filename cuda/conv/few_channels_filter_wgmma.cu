// Filter gradient of three or four channels of 16-bit floats with a stride of two or four on Hopper's tensor cores.
//
// As forward, strips of x are wgmma's operand in place (filled_plan.h), here one whose terms are results: a product's
// columns are a line of the window, its rows features, and its terms 8 results of each of two lines of y, which a warp
// loads transposed. So each of y meets all lines of the window from registers. Each plane of a volume's window has
// blocks of its own.
//
// Lines of y that do not exist are zeros, but x may have an infinity where they meet it: sums that are NaN are computed
// once more when slices are added up.
#include "cuda/conv/few_channels.h"
#include "cuda/conv/filled.cuh"
#include "cuda/conv/filter.cuh"

namespace jaxdnn::conv {
namespace {

template <class In_, int kShape, bool kVolume>
struct FilterTile : FilledTile<In_, kShape, kVolume> {
  using In = In_;
  using Base = FilledTile<In, kShape, kVolume>;
  // Warpgroups that multiply, and that bring x and y, and their registers.
  static constexpr int kTakers = 2, kThreads = (kTakers + 1) * kWarpgroup;
  static constexpr int kTakersRegisters = 200, kBringersRegisters = 104;
  static constexpr bool kMarksNotFinite = false;
  static constexpr int kSteps = FilledPlan::kHeight / 2;  // of a unit's results
  // Of the window, that a product has: all whose chunks are equally far apart.
  static constexpr int kProductLines = Base::kApart == Base::kChunks ? Base::kLines : 1;
  static_assert(Base::kApart == 1 || Base::kChunks <= Base::kApart);  // chunks of a line are equally far apart
  using ProductSums = float[kProductLines * Base::kLineTerms / 2];
  using TileSums = float[Base::kLines][Base::kLineTerms / 2];
  using Sums = TileSums[Base::kTiles];
};

// y's boxes come first in a stage, one of each tile of features: they begin on 1024 bytes, as their swizzle asks for.
struct FilledFilterParams {
  CUtensorMap y;
  int box_bytes;
  FastDiv window_planes;
  int64_t result_size;
};

template <class T>
__device__ void ConsumeFilled(const FilledParams& q, const FilledFilterParams& r, FilledRing& ring, int worker,
                              int tiles, int warpgroup, typename T::Sums& sums) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  // The lane's row of the matrices that it loads: of a step's first or second line.
  const int width = FilledPlan::kColumns * q.units;
  const uint32_t mine = (lane / 16 * width + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  int next = warpgroup;  // of a piece's units; every other one is this warpgroup's
  const FilledShare share(q, worker);
#pragma unroll 1
  for (int piece = share.first; piece < share.end; ++piece, ring.Next()) {
    const FilledPlace place(q, piece);
    hopper::WaitBarrier(ring.Full(), ring.parity);
#pragma unroll 1
    for (int unit = next; unit < place.units; unit += T::kTakers) {
      const uint64_t windows = T::Windows(q, ring.Data() + q.strip, unit, true);
      uint32_t rows[T::kTiles][T::kSteps][4];
#pragma unroll
      for (int tile = 0; tile < T::kTiles; ++tile)
#pragma unroll
        for (int step = 0; step < T::kSteps; ++step)
          LoadMatrices<true>(rows[tile][step], ring.Data() + tile * r.box_bytes + mine +
                                                   (2 * step * width + unit * FilledPlan::kColumns) * 128);
      hopper::BeginProducts();
#pragma unroll
      for (int tile = 0; tile < T::kTiles; ++tile) {
        if (tile == tiles) break;
#pragma unroll
        for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
          for (int line = 0; line < T::kLines; line += T::kProductLines)
            hopper::MultiplyHeldShort<typename T::In, T::kProductLines * T::kLineTerms, true>(
                reinterpret_cast<typename T::ProductSums&>(sums[tile][line]), rows[tile][step],
                hopper::Later(windows, (2 * step * q.stride + line) * (q.pitch >> 4)), true);
        }
      }
      hopper::CommitProducts();
      hopper::WaitForProducts<0>();
    }
    if (lane == 0) hopper::Arrive(ring.Empty());
    next = (next + place.units) % T::kTakers;
  }
#pragma unroll
  for (auto& each : sums) hopper::Settle(each);
}

// Adds up what the warpgroups have: each finishes some lines of the window, and gets the other's sums of them through
// the shared memory of the stages.
template <class T>
__device__ __forceinline__ void StoreSums(const FilledParams& q, int first_feature, int warpgroup,
                                          const typename T::TileSums& sums, float* shared, float* partial) {
  constexpr int kAll = T::kTakers * kWarpgroup, kHalf = (T::kLines + 1) / 2, kEach = T::kLineTerms / 2;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int feature = first_feature + thread / 32 * 16 + lane / 4;
  hopper::SyncThreads(3, kAll);  // all products are done with the stages
  float* const mine = shared + thread;
#pragma unroll
  for (int line = 0; line < T::kLines; ++line)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (warpgroup == line < kHalf) mine[(line * kEach + i) * kWarpgroup] = sums[line][i];
  // Where a line's sums are stored, or -1: from one line to the next it is as far for all.
  const int next_line = q.window_width * q.channels * q.features;
  int to[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = q.FilterRow<T>(i / 4 * 8 + lane % 4 * 2 + i % 2), of_row = feature + i % 4 / 2 * 8;
    to[i] = row >= 0 && of_row < q.features ? row * q.features + of_row : -1;
  }
  asm volatile("" : "+l"(partial));  // or it would be found again for each sum
  __builtin_assume(__isGlobal(partial));
  hopper::SyncThreads(3, kAll);
#pragma unroll
  for (int line = 0; line < T::kLines; ++line) {
    if (warpgroup == line < kHalf || line >= q.window_height) continue;
    float whole[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) whole[i] = sums[line][i] + mine[(line * kEach + i) * kWarpgroup];
    hopper::Settle(whole);  // the other's come together, and not one by one where each is stored
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (to[i] >= 0) partial[line * next_line + to[i]] = whole[i];
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    FewChannelsFilterKernel(const __grid_constant__ FilledParams q, const __grid_constant__ FilledFilterParams r,
                            const typename T::In* x, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    FilledRing ring(q, shared);
    ring.Init(kWarpgroup + 1, T::kTakers);
    int column_tile, window_plane = 0;
    int worker = q.column_div.Div(blockIdx.x, &column_tile);
    if constexpr (T::kVolume) worker = r.window_planes.Div(worker, &window_plane);
    const int first_feature = column_tile * T::kTiles * FilledPlan::kFeatures, tiles = q.Tiles<T>(first_feature);
    partial += worker * r.result_size + window_plane * q.PlaneRows() * q.features;
    RunFilled<T>(
        q, ring, worker, window_plane, x,
        [&](const FilledPlace& place) {
          if (threadIdx.x % kWarpgroup != 0) return;
          hopper::ArriveExpecting(ring.Full(), tiles * r.box_bytes);
          for (int tile = 0; tile < tiles; ++tile)
            hopper::LoadBox(ring.Data() + tile * r.box_bytes, &r.y, ring.Full(),
                            {first_feature + tile * FilledPlan::kFeatures, place.column, place.line, place.image, 0});
        },
        [&](int warpgroup) {
          typename T::Sums sums = {};
          ConsumeFilled<T>(q, r, ring, worker, tiles, warpgroup, sums);
#pragma unroll
          for (int tile = 0; tile < T::kTiles; ++tile)
            StoreSums<T>(q, first_feature + tile * FilledPlan::kFeatures, warpgroup, sums[tile],
                         reinterpret_cast<float*>(shared), partial);
        });
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const Config& config, const FilledPlan& plan, const void* x, const void* y,
                       void* out, float* partial, cudaStream_t stream) {
  using In = typename T::In;
  FilledParams q(p, plan, plan.CotangentBytes(), 1024, 0);
  q.workers = int(config.splits);
  FilledFilterParams r = {{}, plan.CotangentBytes() / T::kTiles, FastDiv(p.window[0]), p.FilterSize()};
  cudaError_t e = EncodeBoxes(&r.y, p.in, y, {p.features, p.y[2], p.y[1], p.images * p.y[0], 1},
                              {FilledPlan::kFeatures, FilledPlan::kColumns * plan.units, FilledPlan::kHeight, 1, 1});
  if (e != cudaSuccess) return e;
  constexpr int kSumBytes = T::kLines * T::kLineTerms * FilledPlan::kFeatures * 4;
  const Grid grid = {config.splits * q.column_tiles * p.window[0], T::kThreads,
                     size_t(std::max(q.SharedBytes(), kSumBytes))};
  e = LaunchKernel(FewChannelsFilterKernel<T>, grid, stream, q, r, static_cast<const In*>(x), partial);
  return e != cudaSuccess ? e : SumSlices(p, partial, config.splits, true, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchFewChannelsFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y,
                                         void* out, void* workspace, cudaStream_t stream) {
  FilledPlan plan;
  if (!IsVectorAligned(x, y) || !plan.Fit(p)) return LaunchFewChannelsFilter(p, config, x, y, out, workspace, stream);
  auto* const partial = static_cast<float*>(workspace);
  const auto launch = [&](auto in) {
    using In = typename decltype(in)::type;
    return plan.shape == 1 ? LaunchTile<FilterTile<In, 1, false>>(p, config, plan, x, y, out, partial, stream)
           : plan.volume   ? LaunchTile<FilterTile<In, 0, true>>(p, config, plan, x, y, out, partial, stream)
                           : LaunchTile<FilterTile<In, 0, false>>(p, config, plan, x, y, out, partial, stream);
  };
  return p.in == DType::kBF16 ? launch(TypeTag<__nv_bfloat16>()) : launch(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
