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
#include "cuda/conv/direct.h"
#include "cuda/conv/direct_data.cuh"
#include "cuda/conv/direct_ends.cuh"
#include "cuda/conv/direct_merged.cuh"

namespace jaxdnn::conv {
namespace {

// Of merged groups a whole warp, whose lanes fill the filter's taps in.
template <class In, bool kMerged>
__device__ void Produce(const DirectParams& q, const DirectShared& shared) {
  const DirectShare share(q);
  hopper::RingPlace operand, turn;
  bool loads = true;
  int at_unit = 0;
#pragma unroll 1
  for (int i = blockIdx.x; i < q.units; i += gridDim.x, ++at_unit) {
    const DirectPlace place(q, share.first + at_unit);
    if (!kMerged || hopper::IsElected()) {
      const uint32_t to = shared.Operand(q, operand.stage), full = shared.OperandFull(operand.stage);
      hopper::WaitBarrier(shared.OperandEmpty(operand.stage), operand.parity ^ 1);
      hopper::ArriveExpecting(full, q.window_planes * q.plane_parts * q.boxes * q.box_bytes);
      const int first_plane = place.group * q.of_group.groups + place.plane * q.plane_stride - q.plane_pad;
      uint32_t part_to = to;
#pragma unroll 1
      for (int plane = 0; plane < q.window_planes; ++plane)
#pragma unroll 1
        for (int part = 0; part < q.plane_parts; ++part, part_to += q.part_bytes)
#pragma unroll 1
          for (int box = 0; box < q.boxes; ++box) {
            const int at[] = {place.group * q.of_group.channels, first_plane + plane * q.plane_dilation,
                              place.column - q.before_columns + box * q.box_columns, place.line - q.before_lines,
                              place.image};
            hopper::LoadBox(part_to + box * q.box_bytes, &q.operand[part], full, at);
          }
    }
    operand.Next(q.x_stages);
#pragma unroll 1
    for (int tap = 0; loads && tap < q.taps; tap += q.stage_taps) {
      const int at[] = {q.forward ? place.feature : 0, q.forward ? 0 : place.feature, tap, place.problem, place.group};
      const uint32_t to = shared.Taps(q, turn.stage), full = shared.Full(turn.stage);
      hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
      if constexpr (kMerged) {
        FillTaps<In>(q, place, tap, to);
        hopper::ShowSharedToTma();
        __syncwarp();
        hopper::ArriveOnce(full);
      } else {
        hopper::ArriveExpecting(full, q.stage_bytes);
        hopper::LoadBox(to, &q.filter, full, at);
      }
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
  const int step = q.column_step[0], two_steps = step + q.column_step[1];
  int row = q.first_tap, next = step, tap = 0, column = 0, line = 0, of_stage = 0, before = -1;
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
          hopper::Multiply<In, kColumns, false, kForward>(sums[m],
                                                          hopper::Later(a, row + t * step + m * next_rows + 2 * k),
                                                          hopper::Later(b, tap + t * slab + k * step_b), true);
    hopper::CommitProducts();
    // These products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (leaves && before >= 0) hopper::ArriveOnce(shared.Empty(before));
    before = -1;
    tap += kTaps * slab;
    if constexpr (kTaps > 1) {
      row += kTaps * step;
    } else {
      row += next;
      next = two_steps - next;
    }
    if ((column += kTaps) == q.window_width) {
      column = 0;
      next = step;
      row += q.line_step[line & 1];
      if (++line == q.window_height) {
        line = 0;
        row += q.plane_step;
      }
    }
    if ((of_stage += kTaps) == q.stage_taps) {
      of_stage = 0;
      before = turn.stage;
      turn.Next(q.stages);
    }
  }
  hopper::WaitForSums(sums);
  if (of_stage > 0) {
    before = turn.stage;
    turn.Next(q.stages);
  }
  if (leaves) hopper::ArriveOnce(shared.Empty(before));
}

template <class In, bool kForward, int kColumns, Stored kStored, bool kMerged>
__device__ void Consume(const DirectParams& q, const DirectShared& shared, int warpgroup, void* out) {
  const int first_row = warpgroup * kBlocksOfWarpgroup * 64;
  const DirectShare share(q);
  hopper::RingPlace operand, turn;
  int at_unit = 0;
  uint32_t skew = 0;
  float not_finite = 0;  // or NaN
#pragma unroll 1
  for (int i = blockIdx.x; i < q.units; i += gridDim.x, ++at_unit) {
    const bool leaves = share.Leaves(q, at_unit);
    const uint32_t rows = shared.Operand(q, operand.stage) + first_row * q.x_line;
    DirectSums<kColumns> sums = {};
    WaitForOperand(q, shared, operand, share.first + at_unit);
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
    if constexpr (kMerged) not_finite = ZeroOrNan<kColumns>(stores, sums, not_finite);
    StoreSums<In, kColumns, kStored>(q, stores, place.problem * q.bias_of_problem + stores.first, sums, out);
  }
  if constexpr (kMerged)
    if (__any_sync(~0u, not_finite != 0)) RepairUnits<In, kForward>(q, first_row, out);
}

// 64 columns with an epilogue have more registers.
template <class In, bool kForward, int kColumns, Stored kStored, bool kMerged>
__global__ void __launch_bounds__(kThreads, kStored == Stored::kFinished ? 1
                                            : kMerged                    ? DirectPlan::kMergedTogether
                                                                         : DirectPlan::kTogether<kColumns>)
    DirectKernel(const __grid_constant__ DirectParams q, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const DirectShared shared(memory);
    shared.Init();
    if (threadIdx.x < kMultipliers)
      Consume<In, kForward, kColumns, kStored, kMerged>(q, shared, __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), out);
    else if (kMerged || hopper::IsElected())
      Produce<In, kMerged>(q, shared);
  }
}

// Of a part, rows of one pixel or of several.
cudaError_t EncodeOperand(CUtensorMap* map, const Problem& p, const void* operand, const DirectPlan& plan, int part) {
  const DirectView& view = plan.view;
  const int64_t pixel = p.groups * p.channels, row = view.beside * pixel, line = view.x[1] * pixel;
  const int64_t first_line = part / view.parts[1], first_row = part % view.parts[1];
  const int64_t planes = view.residues * view.x_planes, plane = view.volumes ? view.x[0] * line : line;
  const bool apart = plan.of.Apart();
  return EncodeArray(map, p.in,
                     static_cast<const char*>(operand) + (first_line * line + first_row * row) * SizeOf(p.in),
                     apart ? p.channels : row,
                     {apart ? p.groups : planes, CeilDiv(view.WholeRows() - first_row, view.parts[1]),
                      CeilDiv(view.x[0] - first_line, view.parts[0]), p.batch * view.images},
                     {apart ? p.channels : plane, view.parts[1] * row, view.residues * view.parts[0] * line,
                      planes * view.x[0] * line},
                     plan.x_line, {plan.box_columns, plan.Lines(), plan.images});
}

// Units, and where their results are.
void SetUnits(DirectParams* q, const Problem& p, const DirectPlan& plan) {
  const DirectView& view = plan.view;
  q->units = int(plan.units);
  q->units_of_block = int(plan.units / plan.blocks);
  q->units_left = int(plan.units % plan.blocks);
  q->filter_units = plan.resident ? plan.column_tiles * plan.line_tiles * plan.image_tiles : 1;
  q->filter_div = FastDiv(q->filter_units);
  q->features = int(plan.of.features);
  q->columns = plan.columns;
  q->bias_of_problem = q->pixel = p.groups * p.features;
  q->images = plan.images;
  q->height = plan.height;
  q->width = plan.width;
  q->problem_images = int(view.images);
  q->out_height = int(view.y[0]);
  q->out_width = int(view.y[1]);
  q->out_planes = int(view.y_planes);
  const int64_t planes = view.residues * view.y_planes;
  q->image_pixels = int(planes * view.y[0] * view.y[1]);
  q->plane_pixels = int(view.volumes ? view.y[0] * view.y[1] : view.y[1]);
  q->line_pixels = int(view.residues * view.y[1]);
  q->column_div = FastDiv(plan.column_tiles);
  q->line_div = FastDiv(plan.line_tiles);
  q->plane_div = FastDiv(planes);
  q->image_div = FastDiv(plan.image_tiles);
  q->feature_div = FastDiv(plan.feature_tiles);
  q->group_div = FastDiv(plan.of.groups);
}

// The operand in memory, and in shared memory.
void SetOperand(DirectParams* q, const Problem& p, const DirectPlan& plan, const void* operand) {
  const DirectView& view = plan.view;
  const int lines = plan.Lines();
  q->of_group = GroupSteps(plan.of);
  q->group_log = plan.of.log;
  q->plane_stride = int(view.plane_stride);
  q->plane_pad = int(view.plane_pad);
  q->plane_dilation = int(view.plane_dilation);
  q->before_lines = int(view.Before(0));
  q->before_columns = int(view.Before(1));
  q->pitch_div = FastDiv(plan.pitch);
  q->image_row_div = FastDiv(lines * plan.pitch);
  q->x_line = plan.x_line;
  q->part_bytes = plan.part_bytes;
  q->window_planes = int(view.window_planes);
  q->plane_parts = int(view.PlaneParts());
  q->x_bytes = plan.x_bytes;
  q->x_stages = plan.x_stages;
  q->boxes = plan.boxes;
  q->box_columns = plan.box_columns;
  q->box_bytes = plan.images * lines * plan.box_columns * plan.x_line;

  // As a repair and the ends of lines find it.
  q->from = static_cast<const unsigned char*>(operand);
  q->planes_from = int(view.x_planes);
  q->height_from = int(view.residues * view.x[0]);
  q->width_from = int(view.x[1]);
  q->line_from = view.x[1] * p.groups * p.channels * SizeOf(p.in);
  q->pad_lines = int(p.pad[1]);
  q->pad_columns = int(p.pad[2]);
  for (int d = 0; d < 2; ++d) {
    q->dilation[d] = int(p.rhs_dilation[d + 1]);
    q->stride[d] = int(p.stride[d + 1]);
  }
  const int64_t of_end = view.PixelsLeft() * p.channels * SizeOf(p.in) / 16;
  q->end_row = int(view.WholeRows());
  q->ends = int(plan.images * view.Parts() * lines * of_end);
  q->end_div = FastDiv(of_end);
  q->lines_div = FastDiv(lines);
  q->part_div = FastDiv(view.parts[0]);
  q->window_planes_div = FastDiv(view.window_planes);
}

// The filter, and where a tap's row begins, in 16 bytes. The data gradient's window is mirrored: its taps are met from
// the last on.
template <bool kForward>
void SetTaps(DirectParams* q, const Problem& p, const DirectPlan& plan) {
  const DirectView& view = plan.view;
  q->taps = int(view.Taps());
  q->window_height = int(view.window[0]);
  q->window_width = int(view.window[1]);
  const int row = plan.x_line >> 4, part = plan.part_bytes >> 4;
  const auto line_at = [&](int64_t tap) {
    const int64_t line = view.First(0) + tap * view.dilation[0];
    return int(FloorMod(line, view.parts[0]) * view.parts[1] * part + FloorDiv(line, view.parts[0]) * plan.pitch * row);
  };
  const auto column_at = [&](int64_t tap) {
    const int64_t pixel = view.First(1) + tap * view.dilation[1];
    if (view.beside > 1) return int(pixel * p.channels / 8);
    return int(FloorMod(pixel, view.parts[1]) * part + FloorDiv(pixel, view.parts[1]) * row);
  };
  const auto first_of = [](int64_t taps) { return kForward ? 0 : taps - 1; };
  const int64_t plane = view.PlaneParts() * part, sign = kForward ? 1 : -1;
  const int64_t line = first_of(view.window[0]), column = first_of(view.window[1]);
  const int columns = column_at(column + sign * view.window[1]) - column_at(column);  // from a line's first to its end
  q->first_tap = int(first_of(view.window_planes) * plane) + line_at(line) + column_at(column);
  for (int i = 0; i < 2; ++i) {
    q->column_step[i] = column_at(column + sign * (i + 1)) - column_at(column + sign * i);
    q->line_step[i] = line_at(line + sign * (i + 1)) - line_at(line + sign * i) - columns;
  }
  q->plane_step = int(sign * plane) - (line_at(line + sign * view.window[0]) - line_at(line));
  q->taps_at_once = plan.taps_at_once;
  q->steps = plan.steps;
  q->filter_line = plan.filter_line;
  q->step_bytes = kForward ? 16 * plan.filter_line : 32;
  q->slab_bytes = plan.slab_bytes;
  q->stage_taps = plan.stage_taps;
  q->stage_bytes = plan.stage_taps * plan.slab_bytes;
  q->stages = plan.stages;
  q->ring_at = DirectPlan::kBarrierBytes + plan.x_stages * plan.x_bytes;
}

template <class In, bool kForward>
cudaError_t LaunchTyped(const Problem& p, const DirectPlan& plan, const void* operand, const void* filter, void* out,
                        const Epilogue& epilogue, cudaStream_t stream) {
  DirectParams q = {};
  q.epilogue = epilogue;
  q.forward = kForward;
  q.wide = p.out != p.in;
  q.plain = !q.wide && IsNone(epilogue);
  q.taps_from = filter;
  SetUnits(&q, p, plan);
  SetOperand(&q, p, plan, operand);
  SetTaps<kForward>(&q, p, plan);

  // A filter that the TMA unit does not load is read in vectors, too.
  if (plan.of.merged > 1 && !IsVectorAligned(filter)) return cudaErrorInvalidValue;
  cudaError_t e = cudaSuccess;
  for (int part = 0; part < q.plane_parts && e == cudaSuccess; ++part)
    e = EncodeOperand(&q.operand[part], p, operand, plan, part);
  // The filter is [taps, channels, features] as the problem had it before AsForward, of all groups.
  const int64_t along = kForward ? p.features : p.channels, down = kForward ? p.channels : p.features;
  const int64_t tap = p.groups * along * down;
  if (e == cudaSuccess && plan.of.merged == 1)
    e = EncodeBoxes(&q.filter, p.in, filter, {along, down, plan.view.Taps(), p.batch, p.groups},
                    {plan.filter_line / 2, plan.slab_bytes / plan.filter_line, plan.stage_taps, 1, 1}, true, false,
                    {p.groups * along, tap, tap * plan.view.Taps(), along});
  if (e != cudaSuccess) return e;
  const Grid grid = {plan.blocks, kThreads, size_t(plan.SharedBytes())};
  const auto launch = [&](auto columns, auto stored, auto merged) {
    return LaunchKernel(
        DirectKernel<In, kForward, decltype(columns)::value, decltype(stored)::value, decltype(merged)::value>, grid,
        stream, q, out);
  };
  using Either = std::integral_constant<Stored, Stored::kEither>;
  if (plan.of.merged > 1)
    return launch(std::integral_constant<int, DirectGroups::kMergedChannels>(), Either(), std::true_type());
  return VisitDirectColumns(plan.columns, [&](auto columns) {
    if constexpr (columns < 64)
      return launch(columns, Either(), std::false_type());
    else
      return q.plain ? launch(columns, std::integral_constant<Stored, Stored::kPlain>(), std::false_type())
                     : launch(columns, std::integral_constant<Stored, Stored::kFinished>(), std::false_type());
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
