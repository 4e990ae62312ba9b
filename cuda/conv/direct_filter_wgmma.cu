// Filter gradient of the direct convolution on Hopper's tensor cores.
//
// direct_plan.h says what pieces of x and y a block goes through, and what its products are. Both operands are MN-major
// as they lie, a term being a position. A tap is another row of x to begin with, and a product of several neighbouring
// taps has them as columns that are so far apart. The block's sums stay in registers, and slices of all pieces leave
// theirs to a second kernel.
//
// Zeros of y that stand for no position may meet an infinity of x: such sums are computed once more, one by one, when
// the slices are added up.
#include "cuda/common/fast_div.cuh"
#include "cuda/conv/direct.cuh"
#include "cuda/conv/direct.h"
#include "cuda/conv/filter.cuh"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kMultipliers = DirectFilterPlan::kWarpgroups * kWarpgroup;
constexpr int kThreads = kMultipliers + 32;  // and a warp that loads

template <int kColumns, int kProducts>
using FilterSums = float[kProducts][kColumns / 2];

struct DirectFilterParams {
  CUtensorMap x, y;
  FastDiv split_div, range_div, feature_div, group_div;  // of a block's number
  FastDiv column_div, line_div;                          // of a piece's
  FastDiv line_products_div, line_channels_div;          // of a product's, and of its row's
  int splits, pieces;
  int images, height, width, problem_images;  // of a piece; and of a problem
  int pad_height, pad_width, range_columns, range_products;
  GroupSteps steps;
  int columns, channels, features, row_features;
  int group_log;  // of merged groups' channels
  int window_height, window_width, neighbours, taps;
  int x_line, y_line, x_bytes, y_bytes, x_box, y_box, x_zeros, y_zeros, stages;
  int runs, run_chunks, x_jump, y_jump;  // of a piece; and, in 16 bytes, from the end of a run to the next
  int line_step, column_step;            // of the window, likewise
  int64_t result_size;
};

// What a block does.
struct FilterPlace {
  int split, range, feature, group, problem;

  __device__ explicit FilterPlace(const DirectFilterParams& q) {
    int rest = q.split_div.Div(blockIdx.x, &split);
    rest = q.range_div.Div(rest, &range);
    rest = q.feature_div.Div(rest, &feature);
    problem = q.group_div.Div(rest, &group);
    feature *= q.columns;
  }
  __device__ int First(const DirectFilterParams& q) const {
    return static_cast<int>(int64_t{q.pieces} * split / q.splits);
  }
  __device__ int End(const DirectFilterParams& q) const {
    return static_cast<int>(int64_t{q.pieces} * (split + 1) / q.splits);
  }
};

struct FilterShared {
  uint32_t stages, barriers;
  int stage_bytes;

  __device__ FilterShared(const DirectFilterParams& q, unsigned char* shared)
      : stages(SharedAddress(shared)),
        barriers(stages + q.stages * (q.x_bytes + q.y_bytes)),
        stage_bytes(q.x_bytes + q.y_bytes) {}
  __device__ uint32_t Stage(int stage) const { return stages + stage * stage_bytes; }
  __device__ uint32_t Full(int stage) const { return barriers + 16 * stage; }
  __device__ uint32_t Empty(int stage) const { return barriers + 16 * stage + 8; }

  // The rows after the boxes are zeros, and stay so.
  __device__ void Init(const DirectFilterParams& q) const {
    constexpr uint32_t kZeros[4] = {};
    for (int stage = 0; stage < q.stages; ++stage) {
      for (int i = threadIdx.x * 16; i < q.x_zeros; i += kThreads * 16)
        hopper::StoreWords(Stage(stage) + q.x_box + i, kZeros);
      for (int i = threadIdx.x * 16; i < q.y_zeros; i += kThreads * 16)
        hopper::StoreWords(Stage(stage) + q.x_bytes + q.y_box + i, kZeros);
    }
    hopper::ShowSharedToTma();
    if (threadIdx.x == 0) {
      for (int i = 0; i < q.stages; ++i) {
        hopper::InitBarrier(Full(i), 1);
        hopper::InitBarrier(Empty(i), kMultipliers / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

__device__ void Produce(const DirectFilterParams& q, const FilterShared& shared, const FilterPlace& place) {
  hopper::RingPlace turn;
  const int end = place.End(q);
#pragma unroll 1
  for (int piece = place.First(q); piece < end; ++piece) {
    int column, line;
    const int rest = q.column_div.Div(piece, &column);
    const int image = q.line_div.Div(rest, &line) * q.images + place.problem * q.problem_images;
    column *= q.width;
    line *= q.height;
    const int group = place.group * q.steps.groups, channel = place.group * q.steps.channels;
    const int x[] = {channel, group, column - q.pad_width + place.range * q.range_columns, line - q.pad_height, image};
    const int y[] = {channel + place.feature, group, column, line, image};
    const uint32_t to = shared.Stage(turn.stage), full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(full, q.x_box + q.y_box);
    hopper::LoadBox(to, &q.x, full, x);
    hopper::LoadBox(to + q.x_bytes, &q.y, full, y);
    turn.Next(q.stages);
  }
}

// Where a warpgroup's product begins in the window.
struct ProductTap {
  bool exists;
  int line, column;

  __device__ ProductTap(const DirectFilterParams& q, const FilterPlace& place, int product) {
    const int of_all = place.range * q.range_products + product;
    line = q.line_products_div.Div(of_all, &column);
    column *= q.neighbours;
    exists = line < q.window_height;
  }
};

template <class In, int kColumns, int kProducts>
__device__ __forceinline__ void Consume(const DirectFilterParams& q, const FilterShared& shared,
                                        const FilterPlace& place, int warpgroup,
                                        FilterSums<kColumns, kProducts>& sums) {
  uint32_t taps[kProducts];
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const ProductTap tap(q, place, warpgroup * kProducts + i);
    const int first = place.range * q.range_columns;
    const int at = tap.exists ? tap.line * q.line_step + tap.column * q.column_step - first * (q.x_line >> 4) : 0;
    taps[i] = __shfl_sync(~0u, at, 0);  // the same in all of a warp, which its instructions then know
  }
  const uint64_t a = hopper::LineDescriptor(shared.stages, q.x_line, 8 * q.x_line, q.column_step << 4);
  const uint64_t b = hopper::LineDescriptor(shared.stages + q.x_bytes, q.y_line, 8 * q.y_line, 0);
  constexpr int kChunks = DirectFilterPlan::kAtOnce;
  const int x_step = q.x_line, y_step = q.y_line;  // of 16 positions, in 16 bytes
  const int pieces = __shfl_sync(~0u, place.End(q) - place.First(q), 0);
  hopper::RingPlace turn;
  bool begun = false;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    int x = turn.stage * shared.stage_bytes >> 4, y = x;
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
#pragma unroll 1
    for (int run = 0; run < q.runs; ++run) {
#pragma unroll 1
      for (int chunk = 0; chunk < q.run_chunks; chunk += kChunks) {
        hopper::BeginProducts();
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
          for (int k = 0; k < kProducts; ++k)
            hopper::Multiply<In, kColumns, true, true>(sums[k], hopper::Later(a, x + taps[k] + c * x_step),
                                                       hopper::Later(b, y + c * y_step), begun || c > 0);
        hopper::CommitProducts();
        hopper::WaitForProducts<1>();
        begun = true;
        x += kChunks * x_step;
        y += kChunks * y_step;
      }
      x += q.x_jump;
      y += q.y_jump;
    }
    hopper::WaitForProducts<0>();
    hopper::ArriveOnce(shared.Empty(turn.stage));
    turn.Next(q.stages);
  }
  hopper::Settle(sums);
}

// Of merged groups those that are of a channel and a feature of one group.
template <int kColumns, int kProducts>
__device__ __forceinline__ void StoreSums(const DirectFilterParams& q, const FilterPlace& place, int warpgroup,
                                          const FilterSums<kColumns, kProducts>& sums, float* partial) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const int first_feature = place.group * q.features, features = min(q.features, q.row_features - first_feature);
  partial += place.split * q.result_size + first_feature;
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const ProductTap first(q, place, warpgroup * kProducts + i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int channel;
      const int beside = q.line_channels_div.Div(16 * warp + lane / 4 + 8 * half, &channel);
      const int column = first.column + beside;
      if (!first.exists || column >= q.window_width || channel >= q.channels) continue;
      const int tap = first.line * q.window_width + column;
      const int group = channel >> q.group_log;
      const int64_t line = (int64_t{place.problem} * q.taps + tap) * min(q.channels, 1 << q.group_log) + channel -
                           (group << q.group_log);
      float* const to = partial + line * q.row_features;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int feature = place.feature + 8 * j + lane % 4 * 2;
        if (feature < features && feature >> q.group_log == group)
          __stwb(reinterpret_cast<float2*>(to + feature),
                 make_float2(sums[i][4 * j + 2 * half], sums[i][4 * j + 2 * half + 1]));
      }
    }
  }
}

template <class In, int kColumns, int kProducts>
__global__ void __launch_bounds__(kThreads, 1)
    DirectFilterKernel(const __grid_constant__ DirectFilterParams q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const FilterShared shared(q, memory);
    shared.Init(q);
    const FilterPlace place(q);
    if (threadIdx.x < kMultipliers) {
      const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);  // as the compiler then knows
      FilterSums<kColumns, kProducts> sums;
      Consume<In, kColumns, kProducts>(q, shared, place, warpgroup, sums);
      StoreSums<kColumns, kProducts>(q, place, warpgroup, sums, partial);
    } else if (hopper::IsElected()) {
      Produce(q, shared, place);
    }
  }
}

template <class In>
cudaError_t LaunchTyped(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                        void* workspace, cudaStream_t stream) {
  DirectFilterPlan plan;
  if (!plan.Fit(p)) return cudaErrorInvalidValue;
  const DirectView& view = plan.view;
  DirectFilterParams q = {};
  q.split_div = FastDiv(config.splits);
  q.range_div = FastDiv(plan.ranges);
  q.feature_div = FastDiv(plan.feature_tiles);
  q.group_div = FastDiv(plan.of.groups);
  q.column_div = FastDiv(plan.column_tiles);
  q.line_div = FastDiv(plan.line_tiles);
  q.line_products_div = FastDiv(plan.line_products);
  q.line_channels_div = FastDiv(plan.x_line / 2);
  q.splits = int(config.splits);
  q.pieces = int(plan.pieces);
  q.images = plan.images;
  q.height = plan.height;
  q.width = plan.width;
  q.problem_images = int(view.images);
  q.pad_height = int(view.pad[0]);
  q.pad_width = int(view.pad[1]);
  q.range_columns = plan.range_columns;
  q.range_products = DirectFilterPlan::kWarpgroups * plan.products;
  q.columns = plan.columns;
  q.steps = GroupSteps(plan.of);
  q.channels = int(plan.of.channels);
  q.features = int(plan.of.features);
  q.group_log = plan.of.log;
  q.row_features = int(p.groups * p.features);
  q.window_height = int(view.window[0]);
  q.window_width = int(view.window[1]);
  q.neighbours = plan.neighbours;
  q.taps = int(view.Taps());
  q.x_line = plan.x_line;
  q.y_line = plan.y_line;
  q.x_bytes = plan.x_bytes;
  q.y_bytes = plan.y_bytes;
  q.x_box = plan.x_rows * plan.x_line;
  q.y_box = plan.y_rows * plan.y_line;
  q.x_zeros = plan.x_more * plan.x_line;
  q.y_zeros = plan.y_more * plan.y_line;
  q.stages = plan.stages;
  q.run_chunks = plan.run_chunks;
  q.runs = plan.runs;
  const int run = DirectFilterPlan::kTerms * plan.run_chunks;
  q.x_jump = (plan.x_run - run) * (plan.x_line >> 4);
  q.y_jump = (plan.y_run - run) * (plan.y_line >> 4);
  q.column_step = int(view.dilation[1]) * (plan.x_line >> 4);
  q.line_step = int(view.dilation[0]) * plan.pitch * (plan.x_line >> 4);
  q.result_size = p.FilterSize();

  const int64_t images = p.batch * view.images;
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t channels, const int64_t (&extent)[2], int line,
                          int columns, int lines) {
    const int64_t pixel = p.groups * channels, row = pixel * extent[1];
    const int64_t of_box = plan.of.Apart() ? channels : pixel;
    return EncodeArray(map, p.in, data, of_box, {pixel / of_box, extent[1], extent[0], images},
                       {of_box, pixel, row, row * extent[0]}, line, {columns, lines, plan.images});
  };
  cudaError_t e = encode(&q.x, x, p.channels, view.x, plan.x_line, plan.pitch, plan.x_lines);
  if (e == cudaSuccess) e = encode(&q.y, y, p.features, view.y, plan.y_line, plan.y_columns, plan.y_lines);
  if (e != cudaSuccess) return e;
  auto* const partial = static_cast<float*>(workspace);
  const int shared = plan.stages * (plan.x_bytes + plan.y_bytes) + DirectPlan::kBarrierBytes;
  const Grid grid = {plan.units * config.splits, kThreads, size_t(shared)};
  const auto launch = [&](auto columns, auto products) {
    return LaunchKernel(DirectFilterKernel<In, decltype(columns)::value, decltype(products)::value>, grid, stream, q,
                        partial);
  };
  const auto of_products = [&](auto columns) {
    switch (plan.products) {
      case 1:
        return launch(columns, std::integral_constant<int, 1>());
      case 2:
        return launch(columns, std::integral_constant<int, 2>());
      default:
        return launch(columns, std::integral_constant<int, 3>());
    }
  };
  e = VisitDirectColumns(plan.columns, of_products);
  return e != cudaSuccess ? e : SumSlices(p, partial, config.splits, true, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchDirectFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                               void* workspace, cudaStream_t stream) {
  return p.in == DType::kBF16 ? LaunchTyped<__nv_bfloat16>(p, config, x, y, out, workspace, stream)
                              : LaunchTyped<__half>(p, config, x, y, out, workspace, stream);
}

}  // namespace jaxdnn::conv
