// Direct convolution on Hopper's tensor cores, forward and in the data gradient.
//
// direct_plan.h says how a block's part of the operand lies in shared memory. It is there once, and wgmma reads it from
// another row for each tap: the swizzle is a function of the address, so that an operand may begin anywhere. The filter
// comes through a ring, some taps at a time. The TMA unit has a group's channels as an array of their own, so that what
// fills up a row are zeros and no other group's.
//
// Rows that are no position, since they stand for what the window sees beside the results, are multiplied and left out.
#include "cuda/common/fast_div.cuh"
#include "cuda/conv/direct.cuh"
#include "cuda/conv/direct.h"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kMultipliers = kConsumers * kWarpgroup, kThreads = kMultipliers + 32;  // and a warp that loads
constexpr int kBlocksOfWarpgroup = DirectPlan::kRows / 64 / kConsumers;
template <int kColumns>
constexpr int kStagedLine = kColumns * 4 + DirectPlan::kStagedMore;  // bytes
template <int kColumns>
using DirectSums = float[kBlocksOfWarpgroup][kColumns / 2];

struct DirectParams {
  CUtensorMap operand, filter;
  Epilogue epilogue;
  bool forward, wide;  // the result is of floats
  int features, groups, columns;
  int64_t bias_of_problem, pixel;  // elements of all groups
  int images, height, width;       // of a block
  int problem_images, out_height, out_width;
  int pad_height, pad_width;
  FastDiv column_div, line_div, image_div, feature_div, group_div;  // of a block's number
  FastDiv pitch_div, plane_div;                                     // of a row
  int x_line, filter_line, x_bytes, box_bytes, boxes, box_columns;
  int taps, window_width, first_tap, column_step, line_step;  // of a tap's rows, in 16 bytes
  int steps, step_bytes, slab_bytes, stage_taps, stages;
};

// What a block computes.
struct DirectPlace {
  int image, line, column, feature, group, problem;  // where it begins; images of all problems
  int images;                                        // that exist

  __device__ DirectPlace(const DirectParams& q, int block) {
    int rest = q.column_div.Div(block, &column);
    rest = q.line_div.Div(rest, &line);
    rest = q.image_div.Div(rest, &image);
    rest = q.feature_div.Div(rest, &feature);
    problem = q.group_div.Div(rest, &group);
    column *= q.width;
    line *= q.height;
    image *= q.images;
    feature *= q.columns;
    images = min(q.images, q.problem_images - image);
    image += problem * q.problem_images;
  }

  // The pixel of the result that a row stands for, or -1.
  __device__ int Pixel(const DirectParams& q, int row) const {
    int in_plane, x;
    const int i = q.plane_div.Div(row, &in_plane), y = q.pitch_div.Div(in_plane, &x);
    const bool exists = i < images && y < min(q.height, q.out_height - line) && x < min(q.width, q.out_width - column);
    return exists ? ((image + i) * q.out_height + line + y) * q.out_width + column + x : -1;
  }
};

// A block's shared memory: the operand, the ring of the filter's taps, and, when all products are done, the sums.
struct DirectShared {
  uint32_t operand, ring, barriers;

  __device__ DirectShared(const DirectParams& q, unsigned char* shared, int barriers_at)
      : operand(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        ring(operand + q.x_bytes),
        barriers(operand + barriers_at) {}
  __device__ uint32_t Full(int stage) const { return barriers + 16 * stage; }
  __device__ uint32_t Empty(int stage) const { return barriers + 16 * stage + 8; }
  __device__ uint32_t OperandFull() const { return Full(DirectPlan::kMostStages); }

  __device__ void Init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i <= DirectPlan::kMostStages; ++i) {
        hopper::InitBarrier(Full(i), 1);
        hopper::InitBarrier(Empty(i), kMultipliers / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

__device__ void Produce(const DirectParams& q, const DirectShared& shared, const DirectPlace& place) {
  hopper::ArriveExpecting(shared.OperandFull(), q.boxes * q.box_bytes);
#pragma unroll 1
  for (int i = 0; i < q.boxes; ++i) {
    const int at[] = {0, place.group, place.column - q.pad_width + i * q.box_columns, place.line - q.pad_height,
                      place.image};
    hopper::LoadBox(shared.operand + i * q.box_bytes, &q.operand, shared.OperandFull(), at);
  }
  hopper::RingPlace turn;
#pragma unroll 1
  for (int tap = 0; tap < q.taps; tap += q.stage_taps) {
    const int at[] = {q.forward ? place.feature : 0, q.forward ? 0 : place.feature, tap, place.problem, place.group};
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(shared.Full(turn.stage), q.stage_taps * q.slab_bytes);
    hopper::LoadBox(shared.ring + turn.stage * q.stage_taps * q.slab_bytes, &q.filter, shared.Full(turn.stage), at);
    turn.Next(q.stages);
  }
}

// Stores the sums of a warpgroup's rows, which are in shared memory, eight at a time.
template <class Out, int kColumns>
__device__ __forceinline__ void FinishRows(const DirectParams& q, const DirectPlace& place, int first_row,
                                           uint32_t staged, Out* out) {
  constexpr int kRuns = kColumns / 8, kItems = 64 * kBlocksOfWarpgroup * kRuns;
#pragma unroll 1
  for (int i = threadIdx.x % kWarpgroup; i < kItems; i += kWarpgroup) {
    const int row = i / kRuns, feature = place.feature + i % kRuns * 8, pixel = place.Pixel(q, first_row + row);
    if (pixel < 0 || feature >= q.features) continue;
    const int of_groups = place.group * q.features + feature;
    const int64_t to = pixel * q.pixel + of_groups;
    float v[8];
    const uint32_t from = staged + row * kStagedLine<kColumns> + i % kRuns * 32;
    hopper::LoadWords(reinterpret_cast<uint32_t (&)[4]>(v[0]), from);
    hopper::LoadWords(reinterpret_cast<uint32_t (&)[4]>(v[4]), from + 16);
    Add<Out>(v, q.epilogue.bias, place.problem * q.bias_of_problem + of_groups);
    Add<Out>(v, q.epilogue.residual, to);
    Activate<Out>(v, q.epilogue.activation);
    *reinterpret_cast<Vec<Out, 8>*>(out + to) = Round<Out>(v);
  }
}

// The sums of a warpgroup's rows over all taps of the window.
template <class In, bool kForward, int kColumns, int kSteps>
__device__ __forceinline__ void MultiplyTaps(const DirectParams& q, const DirectShared& shared, int first_row,
                                             DirectSums<kColumns>& sums) {
  // From one step's operand, and from 64 rows, to the next, in 16 bytes.
  const int step_b = q.step_bytes >> 4, next_rows = 64 * q.x_line >> 4, slab = q.slab_bytes >> 4;
  const uint64_t rows = hopper::LineDescriptor(shared.operand + first_row * q.x_line, q.x_line, 8 * q.x_line, 0);
  const uint64_t taps = hopper::LineDescriptor(shared.ring, q.filter_line, 8 * q.filter_line, 0);
  hopper::WaitBarrier(shared.OperandFull(), 0);
  hopper::RingPlace turn;
  int a = q.first_tap, b = 0, column = 0, of_stage = 0, before = -1;
#pragma unroll 1
  for (int tap = 0; tap < q.taps; ++tap) {
    if (of_stage == 0) {
      b = turn.stage * q.stage_taps * slab;
      hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    }
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int m = 0; m < kBlocksOfWarpgroup; ++m)
        hopper::Multiply<In, kColumns, false, kForward>(sums[m], hopper::Later(rows, a + m * next_rows + 2 * k),
                                                        hopper::Later(taps, b + k * step_b), true);
    hopper::CommitProducts();
    // A tap's products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (before >= 0 && threadIdx.x % 32 == 0) hopper::Arrive(shared.Empty(before));
    before = -1;
    b += slab;
    a += q.column_step;
    if (++column == q.window_width) {
      column = 0;
      a += q.line_step;
    }
    if (++of_stage == q.stage_taps) {
      of_stage = 0;
      before = turn.stage;
      turn.Next(q.stages);
    }
  }
  hopper::WaitForProducts<0>();
}

template <class In, bool kForward, int kColumns>
__device__ void Consume(const DirectParams& q, const DirectShared& shared, const DirectPlace& place, int warpgroup,
                        void* out) {
  DirectSums<kColumns> sums = {};
  const int first_row = warpgroup * kBlocksOfWarpgroup * 64;
  hopper::VisitSteps<DirectPlan::kMostSteps>(q.steps, [&](auto steps) {
    MultiplyTaps<In, kForward, kColumns, decltype(steps)::value>(q, shared, first_row, sums);
  });
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& each : block) asm volatile("" : "+f"(each));

  hopper::SyncThreads(1 + kConsumers, kMultipliers);  // nobody needs the operands any more
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  constexpr int kLine = kStagedLine<kColumns>;
  const uint32_t staged = shared.operand + first_row * kLine;
#pragma unroll
  for (int m = 0; m < kBlocksOfWarpgroup; ++m)
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int row = 64 * m + 16 * warp + lane / 4 + i % 2 * 8;
      hopper::StorePair(staged + row * kLine + i / 2 * 32 + lane % 4 * 8, sums[m][2 * i], sums[m][2 * i + 1]);
    }
  hopper::SyncWarpgroup(1 + warpgroup);
  if (q.wide) {
    FinishRows<float, kColumns>(q, place, first_row, staged, static_cast<float*>(out));
  } else {
    FinishRows<In, kColumns>(q, place, first_row, staged, static_cast<In*>(out));
  }
}

template <class In, bool kForward, int kColumns>
__global__ void __launch_bounds__(kThreads, 2)
    DirectKernel(const __grid_constant__ DirectParams q, int barriers_at, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const DirectShared shared(q, memory, barriers_at);
    shared.Init();
    const DirectPlace place(q, blockIdx.x);
    if (threadIdx.x < kMultipliers)
      Consume<In, kForward, kColumns>(q, shared, place, threadIdx.x / kWarpgroup, out);
    else if (threadIdx.x == kMultipliers)
      Produce(q, shared, place);
  }
}

template <class In, bool kForward>
cudaError_t LaunchTyped(const Problem& p, const DirectPlan& plan, const void* operand, const void* filter, void* out,
                        const Epilogue& epilogue, cudaStream_t stream) {
  const DirectView& view = plan.view;
  DirectParams q = {};
  q.epilogue = epilogue;
  q.forward = kForward;
  q.wide = p.out != p.in;
  q.features = int(p.features);
  q.columns = plan.columns;
  q.bias_of_problem = q.pixel = p.groups * p.features;
  q.images = plan.images;
  q.height = plan.height;
  q.width = plan.width;
  q.problem_images = int(view.images);
  q.out_height = int(view.y[0]);
  q.out_width = int(view.y[1]);
  q.pad_height = int(view.pad[0]);
  q.pad_width = int(view.pad[1]);
  q.column_div = FastDiv(plan.column_tiles);
  q.line_div = FastDiv(plan.line_tiles);
  q.image_div = FastDiv(plan.image_tiles);
  q.feature_div = FastDiv(plan.feature_tiles);
  q.group_div = FastDiv(p.groups);
  q.pitch_div = FastDiv(plan.pitch);
  const int lines = int(plan.height + view.Reach(0));
  q.plane_div = FastDiv(lines * plan.pitch);
  q.x_line = plan.x_line;
  q.filter_line = plan.filter_line;
  q.x_bytes = plan.x_bytes;
  q.boxes = plan.boxes;
  q.box_columns = plan.box_columns;
  q.box_bytes = plan.images * lines * plan.box_columns * plan.x_line;
  q.taps = int(view.Taps());
  q.window_width = int(view.window[1]);
  // The data gradient's window is mirrored: its taps are met from the last to the first.
  const int sign = kForward ? 1 : -1, row = plan.x_line >> 4;
  const int column = int(view.dilation[1]) * row, line = int(view.dilation[0]) * plan.pitch * row;
  q.first_tap = kForward ? 0 : int(view.window[0] - 1) * line + int(view.window[1] - 1) * column;
  q.column_step = sign * column;
  q.line_step = sign * (line - int(view.window[1]) * column);
  q.steps = plan.steps;
  q.step_bytes = kForward ? 16 * plan.filter_line : 32;
  q.slab_bytes = plan.slab_bytes;
  q.stage_taps = plan.stage_taps;
  q.stages = plan.stages;

  cudaError_t e = EncodeGroups(&q.operand, p.in, operand, p.groups, p.channels, view.x, p.batch * view.images,
                               plan.x_line, plan.box_columns, lines, plan.images);
  // The filter is [taps, channels, features] as the problem had it before AsForward, of all groups.
  const int64_t along = kForward ? p.features : p.channels, down = kForward ? p.channels : p.features;
  const int64_t tap = p.groups * along * down;
  if (e == cudaSuccess)
    e = EncodeBoxes(&q.filter, p.in, filter, {along, down, view.Taps(), p.batch, p.groups},
                    {plan.filter_line / 2, plan.slab_bytes / plan.filter_line, plan.stage_taps, 1, 1}, true, false,
                    {p.groups * along, tap, tap * view.Taps(), along});
  if (e != cudaSuccess) return e;
  const int shared_bytes = plan.SharedBytes();
  const Grid grid = {plan.blocks, kThreads, size_t(shared_bytes)};
  return VisitDirectColumns(plan.columns, [&](auto columns) {
    return LaunchKernel(DirectKernel<In, kForward, decltype(columns)::value>, grid, stream, q,
                        shared_bytes - DirectPlan::kBarrierBytes, out);
  });
}

}  // namespace

cudaError_t LaunchDirect(const Problem& problem, const void* operand, const void* filter, void* out,
                         const Epilogue& epilogue, cudaStream_t stream) {
  const bool forward = problem.direction == Direction::kForward;
  const Problem p = AsForward(problem);
  DirectPlan plan;
  if (!plan.Fit(p, forward)) return cudaErrorInvalidValue;
  const auto launch = [&](auto in) {
    using In = typename decltype(in)::type;
    return forward ? LaunchTyped<In, true>(p, plan, operand, filter, out, epilogue, stream)
                   : LaunchTyped<In, false>(p, plan, operand, filter, out, epilogue, stream);
  };
  return p.in == DType::kBF16 ? launch(TypeTag<__nv_bfloat16>()) : launch(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
