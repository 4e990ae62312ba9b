// Forward convolution and data gradient of few channels without stride, plane by plane (planes_plan.h).
//
// One thread loads planes of the operand, with what the window sees beside a tile and zeros in the padding, by the TMA
// unit. wgmma reads a tap's rows from there: 64 positions, as eight times eight neighbours, which may begin at any
// position, since the swizzle goes by addresses. A product's columns are 32 features of the three planes of results
// that a plane of the operand belongs to: a third is complete then, and is stored, and the others move up.
//
// Each of two warpgroups has two such blocks of 64 rows. It stores the results of one plane while
// the next one's products run.
#include "cuda/conv/planes.cuh"
#include "cuda/conv/planes.h"

namespace jaxdnn::conv {
namespace {

// Loads the filter's taps in the order of the products: one position of the window in its plane after another, and of
// each the window's planes from the last to the first, as the sums of the planes of results lie.
template <bool kForward>
__device__ void LoadFilter(const PlanesParams& q, const PlanesShared& shared, const PlanesPlace& place) {
  hopper::ArriveExpecting(shared.FilterFull(), q.filter_bytes);
  const int plane = q.window[1] * q.window[2];
  uint32_t to = shared.filter;
  for (int i = 0; i < plane; ++i)
    for (int j = 0; j < kTaps; ++j, to += q.slab_bytes) {
      // The data gradient's window is mirrored.
      const int tap = kForward ? (kTaps - 1 - j) * plane + i : j * plane + plane - 1 - i;
      hopper::LoadBox(to, &q.filter, shared.FilterFull(), kForward ? place.feature : 0, kForward ? 0 : place.feature,
                      place.model * kTaps * plane + tap);
    }
}

template <bool kForward>
__device__ void ProducePlanes(const PlanesParams& q, const PlanesShared& shared) {
  hopper::PrefetchMap(&q.operand);
  hopper::PrefetchMap(&q.filter);
  PlanesTurn turn;
  uint32_t filter_parity = 0;
  int filter = -1;
  const int end = FirstWork(q, blockIdx.x + 1);
  for (int at = FirstWork(q, blockIdx.x); at < end;) {
    const PlanesPlace place(q, at, end);
    if (place.filter != filter) {
      if (filter >= 0) {
        hopper::WaitBarrier(shared.FilterEmpty(), filter_parity);
        filter_parity ^= 1;
      }
      filter = place.filter;
      LoadFilter<kForward>(q, shared, place);
    }
    const int other = place.other - q.pad[1];
    for (int i = 0; i < place.count + kTaps - 1; ++i) {
      const int plane = place.first - q.pad[0] + i;
      const int coordinates[] = {0, place.column - q.pad[2], q.volume ? other : plane, q.volume ? plane : other,
                                 q.volume ? place.image : place.model};
      hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
      hopper::ArriveExpecting(shared.Full(turn.stage), q.box_bytes);
      hopper::LoadBox(shared.stages + turn.stage * q.stage_bytes, &q.operand, shared.Full(turn.stage), coordinates);
      turn.Next(q);
    }
    at += place.count;
  }
}

// Issues the products of a warpgroup's rows with all taps of the window.
template <class In, bool kForward, int kLine, int kLines>
__device__ __forceinline__ void MultiplyPlane(const PlanesParams& q, const uint32_t (&rows)[2], uint32_t filter,
                                              PlaneSums (&sums)[2]) {
  // From one step's operands to the next's, in 16 bytes: forward the filter's lines are of one channel each.
  constexpr int kSteps = kLine / 32, kSlab = kTaps * kFeatures * kLine, kStepB = kForward ? 16 * 2 * kFeatures : 32;
  const uint64_t b = kForward ? hopper::LineDescriptor(filter, 2 * kFeatures, 8 * 2 * kFeatures, kFeatures * kLine)
                              : hopper::LineDescriptor(filter, kLine, 8 * kLine, 0);
  const int line_step = q.line_step >> 4, column_step = q.column_step >> 4;
  // What the sums are by now, they are in their registers before the products begin.
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& each : block) asm volatile("" : "+f"(each));
  hopper::BeginProducts();
  const uint64_t a[] = {hopper::LineDescriptor(rows[0], kLine, q.next_eight, 0),
                        hopper::LineDescriptor(rows[1], kLine, q.next_eight, 0)};
#pragma unroll
  for (int i = 0; i < kLines; ++i)
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int m = 0; m < 2; ++m)
          hopper::Multiply<In, kColumns, false, kForward>(sums[m], a[m] + i * line_step + j * column_step + k * 2,
                                                          b + (((i * kTaps + j) * kSlab + k * kStepB) >> 4), true);
  hopper::CommitProducts();
}

template <class In, bool kForward, int kLine, int kLines>
__device__ void ConsumePlanes(const PlanesParams& q, const PlanesShared& shared, int warpgroup, void* out) {
  static_assert(kBlocksOfWarpgroup == 2);
  const auto first_row = [&](int i) {
    const int block = 2 * warpgroup + i, down = block >> q.across_bits;
    return down * q.next_block_line + (block - (down << q.across_bits)) * q.next_block;
  };
  // The same in all of a warp, which its instructions then know.
  const uint32_t offset[2] = {__shfl_sync(~0u, uint32_t(first_row(0)), 0), __shfl_sync(~0u, uint32_t(first_row(1)), 0)};
  const uint32_t staged = shared.staged + 2 * warpgroup * PlanesPlan::kStagedBytes;
  PlanesTurn turn;
  uint32_t filter_parity = 0;
  int filter = -1;
  const int end = FirstWork(q, blockIdx.x + 1);
  for (int at = FirstWork(q, blockIdx.x); at < end;) {
    const PlanesPlace place(q, at, end);
    if (place.filter != filter) {
      if (filter >= 0) ArriveOnce(shared.FilterEmpty());
      filter = place.filter;
      hopper::WaitBarrier(shared.FilterFull(), filter_parity);
      filter_parity ^= 1;
    }
    const int thread = threadIdx.x % kWarpgroup, feature = thread % 4 * 8;
    int64_t first[2][2];  // where the thread stores eight features of a row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t to =
          PlanesRows(q, 2 * warpgroup + i / 2).Offset(q, place, thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8);
      first[i / 2][i % 2] = to < 0 || place.feature + feature >= q.features ? -1 : to + feature;
    }
    PlaneSums sums[2] = {};
    PlaneResults results[2] = {};
#pragma unroll 1
    for (int i = 0; i < place.count + kTaps - 1; ++i) {
      const uint32_t stage = shared.stages + turn.stage * q.stage_bytes;
      hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
      MultiplyPlane<In, kForward, kLine, kLines>(q, {stage + offset[0], stage + offset[1]}, shared.filter, sums);
      // Of the plane before, while these products run; the first ones are another block's.
      if (i >= kTaps) StorePlane<In>(q, place, warpgroup, first, place.first + i - kTaps, staged, results, out);
      hopper::WaitForProducts<0>();
      ArriveOnce(shared.Empty(turn.stage));
      turn.Next(q);
      TakePlane(sums[0], results[0]);
      TakePlane(sums[1], results[1]);
    }
    StorePlane<In>(q, place, warpgroup, first, place.first + place.count - 1, staged, results, out);
    at += place.count;
  }
}

template <class In, bool kForward, int kLine, int kLines>
__global__ void __launch_bounds__(kThreads, 1) PlanesKernel(const __grid_constant__ PlanesParams q, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const PlanesShared shared(q, memory);
    shared.Init();
    RunRoles<1>([&](int) { ProducePlanes<kForward>(q, shared); },
                [&](int warpgroup) { ConsumePlanes<In, kForward, kLine, kLines>(q, shared, warpgroup, out); });
  }
}

template <class In, bool kForward>
cudaError_t LaunchTyped(const Problem& p, const PlanesPlan& plan, const void* operand, const void* filter, void* out,
                        const Epilogue& epilogue, cudaStream_t stream) {
  const bool volume = plan.volume;
  PlanesParams q = {};
  q.epilogue = epilogue;
  q.wide = p.out != p.in;
  q.plain = !q.wide && IsNone(epilogue);
  const auto kind = epilogue.activation.kind;
  q.staged = kind != activation::Kind::kIdentity && kind != activation::Kind::kRelu;
  q.volume = volume;
  q.lines = plan.lines;
  const int across = plan.columns / (plan.lines ? 64 : 8);  // 1, 2 or 4
  q.across_bits = across / 2;
  q.columns = plan.columns;
  q.others = plan.others;
  q.out_columns = int(p.y[2]);
  q.out_others = int(volume ? p.y[1] : p.images);
  q.features = int(p.features);
  q.images_of_model = int(p.images);
  q.pixels_of_image = int(p.YPixels());
  q.pixels_of_other = int(volume ? p.y[2] : p.YPixels());
  q.elements_of_plane = (volume ? p.y[1] * p.y[2] : p.y[2]) * p.features;
  q.work = plan.chains * plan.planes;
  q.planes_div = FastDiv(plan.planes);
  q.column_div = FastDiv(plan.column_tiles);
  q.other_div = FastDiv(plan.other_tiles);
  q.image_div = FastDiv(volume ? p.images : 1);
  q.feature_div = FastDiv(plan.feature_tiles);
  const int order[kRank] = {volume ? 0 : 1, volume ? 1 : 0, 2};  // planes, others, columns
  for (int d = 0; d < kRank; ++d) {
    q.pad[d] = int(p.pad[order[d]]);
    q.window[d] = int(p.window[order[d]]);
  }
  const int line = plan.line_bytes, pitch = plan.box_columns * line;
  q.column_step = int(p.rhs_dilation[2]) * line;
  q.line_step = int(volume ? p.rhs_dilation[1] : 1) * pitch;
  q.next_eight = plan.lines ? 8 * line : pitch;
  q.next_block = (plan.lines ? 64 : 8) * line;
  q.next_block_line = (plan.lines ? 1 : 8) * pitch;
  q.slab_bytes = plan.slab_bytes;
  q.filter_bytes = plan.filter_bytes;
  q.stage_bytes = plan.stage_bytes;
  q.box_bytes = plan.box_others * pitch;
  q.stages = plan.Stages(q.staged);

  const int elements = line / int(sizeof(In));
  cudaError_t e = volume
                      ? EncodeBoxes(&q.operand, p.in, operand, {p.channels, p.x[2], p.x[1], p.x[0], p.batch * p.images},
                                    {elements, plan.box_columns, plan.box_others, 1, 1})
                      : EncodeBoxes(&q.operand, p.in, operand, {p.channels, p.x[2], p.x[1], p.images, p.batch},
                                    {elements, plan.box_columns, 1, plan.box_others, 1});
  // The filter is [taps, channels, features] as the problem had it before AsForward.
  if (e == cudaSuccess)
    e = kForward ? EncodeBoxes(&q.filter, p.in, filter, {p.features, p.channels, p.batch * p.Taps()},
                               {kFeatures, elements, 1})
                 : EncodeBoxes(&q.filter, p.in, filter, {p.channels, p.features, p.batch * p.Taps()},
                               {elements, kFeatures, 1});
  if (e != cudaSuccess) return e;
  const Grid grid = {plan.blocks, kThreads, size_t(plan.SharedBytes(q.stages, q.staged))};
  const auto launch = [&](auto line_bytes, auto lines) {
    return LaunchKernel(PlanesKernel<In, kForward, decltype(line_bytes)::value, decltype(lines)::value>, grid, stream,
                        q, out);
  };
  const auto launch_lines = [&](auto lines) {
    return line == 64 ? launch(std::integral_constant<int, 64>(), lines)
                      : launch(std::integral_constant<int, 128>(), lines);
  };
  return volume ? launch_lines(std::integral_constant<int, kTaps>()) : launch_lines(std::integral_constant<int, 1>());
}

}  // namespace

cudaError_t LaunchPlanes(const Problem& problem, const void* operand, const void* filter, void* out,
                         const Epilogue& epilogue, cudaStream_t stream) {
  const Problem p = AsForward(problem);
  PlanesPlan plan;
  if (!plan.Fit(p)) return cudaErrorInvalidValue;
  const auto launch = [&](auto in, auto forward) {
    return LaunchTyped<typename decltype(in)::type, decltype(forward)::value>(p, plan, operand, filter, out, epilogue,
                                                                              stream);
  };
  const auto typed = [&](auto in) {
    return problem.direction == Direction::kForward ? launch(in, std::true_type()) : launch(in, std::false_type());
  };
  return p.in == DType::kBF16 ? typed(TypeTag<__nv_bfloat16>()) : typed(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
