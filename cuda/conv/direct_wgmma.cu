// Direct convolution on Hopper's tensor cores, forward and in the data gradient.
//
// direct_plan.h says how a part of the operand lies in shared memory. It is there once, and wgmma reads it from another
// row for each tap: the swizzle is a function of the address, so that an operand may begin anywhere. The filter comes
// through a ring, some taps at a time, or stays there where it has room and the next unit has the same. The TMA unit
// has a group's channels as an array of their own, so that what fills up a row are zeros and no other group's.
//
// Rows that are no position, since they stand for what the window sees beside the results, are multiplied and left out.
// Two or three blocks share a multiprocessor, and each goes through several such units: one stores its sums, straight
// from registers, while others multiply and the next operand is on its way.
#include "cuda/common/fast_div.cuh"
#include "cuda/conv/direct.cuh"
#include "cuda/conv/direct.h"
#include "cuda/conv/runs.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kMultipliers = kConsumers * kWarpgroup, kThreads = kMultipliers + 32;  // and a warp that loads
constexpr int kBlocksOfWarpgroup = DirectPlan::kRows / 64 / kConsumers;
template <int kColumns>
using DirectSums = float[kBlocksOfWarpgroup][kColumns / 2];

struct DirectParams {
  CUtensorMap operand, filter;
  Epilogue epilogue;
  bool forward, plain, wide;              // sums are stored as they are, in the operands' type; the result is of floats
  int units, units_of_block, units_left;  // of a block, and how many have one more
  int filter_units;                       // that follow each other and find their filter in the ring
  int features, groups, columns;
  int64_t bias_of_problem, pixel;  // elements of all groups
  int images, height, width;       // of a unit
  int problem_images, out_height, out_width;
  int pad_height, pad_width;
  FastDiv column_div, line_div, image_div, feature_div, group_div;  // of a unit's number
  FastDiv filter_div;                                               // likewise
  FastDiv pitch_div, plane_div;                                     // of a row
  int x_line, filter_line, x_bytes, x_stages, box_bytes, boxes, box_columns;
  int taps, window_width, first_tap, column_step, line_step;  // of a tap's rows, in 16 bytes
  int taps_at_once, steps, step_bytes, slab_bytes, stage_taps, stage_bytes, stages, ring_at;
};

// A unit of the work.
struct DirectPlace {
  int image, line, column, feature, group, problem;  // where it begins; images of all problems
  int images;                                        // that exist

  __device__ DirectPlace(const DirectParams& q, int unit) {
    int rest = q.column_div.Div(unit, &column);
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

__device__ void Produce(const DirectParams& q, const DirectShared& shared) {
  const DirectShare share(q);
  hopper::RingPlace operand, turn;
  bool loads = true;
  int at_unit = 0;
#pragma unroll 1
  for (int i = blockIdx.x; i < q.units; i += gridDim.x, ++at_unit) {
    const DirectPlace place(q, share.first + at_unit);
    const uint32_t to = shared.Operand(q, operand.stage), full = shared.OperandFull(operand.stage);
    hopper::WaitBarrier(shared.OperandEmpty(operand.stage), operand.parity ^ 1);
    hopper::ArriveExpecting(full, q.boxes * q.box_bytes);
#pragma unroll 1
    for (int i = 0; i < q.boxes; ++i) {
      const int at[] = {0, place.group, place.column - q.pad_width + i * q.box_columns, place.line - q.pad_height,
                        place.image};
      hopper::LoadBox(to + i * q.box_bytes, &q.operand, full, at);
    }
    operand.Next(q.x_stages);
#pragma unroll 1
    for (int tap = 0; loads && tap < q.taps; tap += q.stage_taps) {
      const int at[] = {q.forward ? place.feature : 0, q.forward ? 0 : place.feature, tap, place.problem, place.group};
      hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
      hopper::ArriveExpecting(shared.Full(turn.stage), q.stage_bytes);
      hopper::LoadBox(shared.Taps(q, turn.stage), &q.filter, shared.Full(turn.stage), at);
      turn.Next(q.stages);
    }
    loads = share.Leaves(q, at_unit);
  }
}

// The sums of a warpgroup's rows over all taps of the window, kTaps neighbouring ones of a line at a time. With
// `leaves` the taps make room for others then. `skew` is in the parity of the ring's barriers: as often as a filter
// stayed, they did not go on as `turn` did.
template <class In, bool kForward, int kColumns, int kSteps, int kTaps>
__device__ __forceinline__ void MultiplyTaps(const DirectParams& q, const DirectShared& shared, uint32_t rows,
                                             bool leaves, uint32_t skew, hopper::RingPlace& turn,
                                             DirectSums<kColumns>& sums) {
  // From one step's operand, and from 64 rows, to the next, in 16 bytes.
  const int step_b = q.step_bytes >> 4, next_rows = 64 * q.x_line >> 4, slab = q.slab_bytes >> 4;
  const uint64_t a = hopper::LineDescriptor(rows, q.x_line, 8 * q.x_line, 0);
  const uint64_t b = hopper::LineDescriptor(shared.Taps(q, 0), q.filter_line, 8 * q.filter_line, 0);
  int row = q.first_tap, tap = 0, column = 0, of_stage = 0, before = -1;
#pragma unroll 1
  for (int i = 0; i < q.taps; i += kTaps) {
    if (of_stage == 0) {
      tap = turn.stage * q.stage_bytes >> 4;
      hopper::WaitBarrier(shared.Full(turn.stage), turn.parity ^ skew);
    }
    hopper::BeginProducts();
#pragma unroll
    for (int t = 0; t < kTaps; ++t)
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int m = 0; m < kBlocksOfWarpgroup; ++m)
          hopper::Multiply<In, kColumns, false, kForward>(
              sums[m], hopper::Later(a, row + t * q.column_step + m * next_rows + 2 * k),
              hopper::Later(b, tap + t * slab + k * step_b), true);
    hopper::CommitProducts();
    // These products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (leaves && before >= 0) hopper::ArriveOnce(shared.Empty(before));
    before = -1;
    tap += kTaps * slab;
    row += kTaps * q.column_step;
    if ((column += kTaps) == q.window_width) {
      column = 0;
      row += q.line_step;
    }
    if ((of_stage += kTaps) == q.stage_taps) {
      of_stage = 0;
      before = turn.stage;
      turn.Next(q.stages);
    }
  }
  hopper::WaitForProducts<0>();
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& each : block) asm volatile("" : "+f"(each));
  if (of_stage > 0) {
    before = turn.stage;
    turn.Next(q.stages);
  }
  if (leaves) hopper::ArriveOnce(shared.Empty(before));
}

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
    left = q.features - feature;
    first = place.group * q.features + feature;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
      pixels[i] = place.Pixel(q, first_row + i / 2 * 64 + warp * 16 + lane / 4 + i % 2 * 8);
    }
  }
  __device__ bool Exists(int row, int run) const { return pixels[row] >= 0 && 16 * run < left; }
  __device__ int64_t To(const DirectParams& q, int row) const { return int64_t{pixels[row]} * q.pixel + first; }
};

// Stores rows after an epilogue.
template <class Out, int kColumns>
__device__ __forceinline__ void FinishRows(const DirectParams& q, const DirectStores& stores, int64_t bias,
                                           DirectRuns<kColumns>& runs, Out* out) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j)
      if (stores.Exists(i, j)) AddToRun<Out>(q.epilogue, runs[i][j], bias + 16 * j, stores.To(q, i) + 16 * j);
  const auto kind = q.epilogue.activation.kind;
  float (&all)[kColumns] = reinterpret_cast<float (&)[kColumns]>(runs);
  if (kind == activation::Kind::kRelu) {
#pragma unroll
    for (float& each : all) each = each < 0 ? 0 : each;
  } else if (kind != activation::Kind::kIdentity) {
#pragma unroll 1
    for (int i = 0; i < kColumns; i += kRun) {
      float run[kRun];
#pragma unroll
      for (int k = 0; k < kRun; ++k) run[k] = all[k];
      Activate<Out>(run, q.epilogue.activation);
      Rotate<kRun>(all);
#pragma unroll
      for (int k = 0; k < kRun; ++k) all[kColumns - kRun + k] = run[k];
    }
  }
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j)
      if (stores.Exists(i, j)) StoreRun(runs[i][j], out + stores.To(q, i) + 16 * j);
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
    if (q.wide) {
      FinishRows<float, kColumns>(q, stores, bias, runs, static_cast<float*>(out));
    } else {
      FinishRows<In, kColumns>(q, stores, bias, runs, static_cast<In*>(out));
    }
  }
}

template <class In, bool kForward, int kColumns, Stored kStored>
__device__ void Consume(const DirectParams& q, const DirectShared& shared, int warpgroup, void* out) {
  const int first_row = warpgroup * kBlocksOfWarpgroup * 64;
  const DirectShare share(q);
  hopper::RingPlace operand, turn;
  int at_unit = 0;
  uint32_t skew = 0;
#pragma unroll 1
  for (int i = blockIdx.x; i < q.units; i += gridDim.x, ++at_unit) {
    const bool leaves = share.Leaves(q, at_unit);
    const uint32_t rows = shared.Operand(q, operand.stage) + first_row * q.x_line;
    DirectSums<kColumns> sums = {};
    hopper::WaitBarrier(shared.OperandFull(operand.stage), operand.parity);
    hopper::VisitSteps<DirectPlan::kMostSteps>(q.steps, [&](auto steps) {
      constexpr int kSteps = decltype(steps)::value, kTaps = DirectPlan::kAtOnce;
      constexpr bool kMay = kSteps <= DirectPlan::kMostStepsAtOnce && kColumns <= DirectPlan::kMostColumnsAtOnce;
      if (kMay && q.taps_at_once == kTaps)
        MultiplyTaps<In, kForward, kColumns, kSteps, kTaps>(q, shared, rows, leaves, skew, turn, sums);
      else
        MultiplyTaps<In, kForward, kColumns, kSteps, 1>(q, shared, rows, leaves, skew, turn, sums);
    });
    skew ^= !leaves;
    hopper::ArriveOnce(shared.OperandEmpty(operand.stage));
    operand.Next(q.x_stages);
    __syncwarp();  // its first lane has arrived for all
    const DirectPlace place(q, share.first + at_unit);
    const DirectStores stores(q, place, first_row);
    StoreSums<In, kColumns, kStored>(q, stores, place.problem * q.bias_of_problem + stores.first, sums, out);
  }
}

// 64 columns with an epilogue have more registers.
template <class In, bool kForward, int kColumns, Stored kStored>
__global__ void __launch_bounds__(kThreads, kStored == Stored::kFinished ? 1 : DirectPlan::kTogether<kColumns>)
    DirectKernel(const __grid_constant__ DirectParams q, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const DirectShared shared(memory);
    shared.Init();
    if (threadIdx.x < kMultipliers)
      Consume<In, kForward, kColumns, kStored>(q, shared, __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), out);
    else if (threadIdx.x == kMultipliers)
      Produce(q, shared);
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
  q.plain = !q.wide && IsNone(epilogue);
  q.units = int(plan.units);
  q.units_of_block = int(plan.units / plan.blocks);
  q.units_left = int(plan.units % plan.blocks);
  q.filter_units = plan.resident ? plan.column_tiles * plan.line_tiles * plan.image_tiles : 1;
  q.filter_div = FastDiv(q.filter_units);
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
  q.x_stages = plan.x_stages;
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
  q.taps_at_once = plan.taps_at_once;
  q.steps = plan.steps;
  q.step_bytes = kForward ? 16 * plan.filter_line : 32;
  q.slab_bytes = plan.slab_bytes;
  q.stage_taps = plan.stage_taps;
  q.stage_bytes = plan.stage_taps * plan.slab_bytes;
  q.stages = plan.stages;
  q.ring_at = DirectPlan::kBarrierBytes + plan.x_stages * plan.x_bytes;

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
  const Grid grid = {plan.blocks, kThreads, size_t(plan.SharedBytes())};
  const auto launch = [&](auto columns, auto stored) {
    return LaunchKernel(DirectKernel<In, kForward, decltype(columns)::value, decltype(stored)::value>, grid, stream, q,
                        out);
  };
  return VisitDirectColumns(plan.columns, [&](auto columns) {
    if constexpr (columns < 64)
      return launch(columns, std::integral_constant<Stored, Stored::kEither>());
    else
      return q.plain ? launch(columns, std::integral_constant<Stored, Stored::kPlain>())
                     : launch(columns, std::integral_constant<Stored, Stored::kFinished>());
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
