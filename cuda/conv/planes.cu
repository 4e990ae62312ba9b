// Forward convolution and data gradient of few channels without stride, plane by plane (planes_plan.h).
//
// One thread loads planes of the operand, with what the window sees beside a tile and zeros in the padding, by the TMA
// unit. wgmma reads a tap's rows from there: 64 positions, as eight times eight neighbours, which may begin at any
// position, since the swizzle goes by addresses. A product's columns are 32 features of the three planes of results
// that a plane of the operand belongs to: a third is complete then, and is stored, and the others move up.
//
// Floats are rounded to TF32. What fits into a line of shared memory is 32 channels then, so that a plane may be two
// loads, whose products are added up. wgmma wants the filter's channels contiguous: forward, who multiplies exchanges
// them with the features on their way to shared memory.
//
// Each of two warpgroups has two such blocks of 64 rows. It stores the results of one plane while the next one's
// products run.
//
// What bounds it: the tensor cores, whose rate a product of 64x96x16 comes near with 49 cycles of an H200 for 48; or,
// of few channels, memory, which brings the operand once and takes the result.
#include "cuda/conv/planes.cuh"
#include "cuda/conv/planes.h"

namespace jaxdnn::conv {
namespace {

// Loads the filter's taps in the order of the products: one position of the window in its plane after another, and of
// each the window's planes from the last to the first, as the sums of the planes of results lie.
__device__ void LoadFilter(const PlanesParams& q, const PlanesShared& shared, const PlanesPlace& place) {
  hopper::ArriveExpecting(shared.FilterFull(), q.filter_bytes);
  const int plane = q.window[1] * q.window[2];
  uint32_t to = shared.filter;
#pragma unroll 1
  for (int part = 0; part < q.parts; ++part)
#pragma unroll 1
    for (int i = 0; i < plane; ++i)
      for (int j = 0; j < kTaps; ++j, to += q.slab_bytes) {
        // The data gradient's window is mirrored.
        const int tap = q.forward ? (kTaps - 1 - j) * plane + i : j * plane + plane - 1 - i;
        const int at[] = {q.forward ? place.feature : part * q.part_channels, q.forward ? 0 : place.feature, tap,
                          q.grouped || q.shared ? 0 : place.model, q.grouped ? place.model : 0};
        hopper::LoadBox(to, &q.filter, shared.FilterFull(), at);
      }
}

// The same, of a forward filter of floats, by all who multiply: a warp reads neighbouring features of four channels.
template <int kLine, int kFeatures>
__device__ void TransposeFilter(const PlanesParams& q, const PlanesShared& shared, const PlanesPlace& place) {
  constexpr int kChunks = kLine / 16;
  constexpr int kApart = kMultipliers / kFeatures / kChunks, kTogether = 7;  // taps
  const int plane = kTaps * q.window[1], all = kTaps * plane;
  const int row = threadIdx.x % kFeatures, chunk = threadIdx.x / kFeatures % kChunks;
  const int feature = place.feature + row, tap_size = q.channels * q.pixel;
  const int64_t model = q.grouped ? q.features : q.shared ? 0 : all * int64_t{tap_size};
  uint32_t to = hopper::Swizzled(shared.filter + row * kLine + chunk * 16, kLine);
#pragma unroll 1
  for (int part = 0; part < q.parts; ++part) {
    const int channel = part * q.part_channels + chunk * 4;
    const bool exists = channel < q.channels && feature < q.features;
    const float* const from = q.transposed + (exists ? place.model * model + channel * q.pixel + feature : 0);
#pragma unroll 1
    for (int first = threadIdx.x / kFeatures / kChunks; first < all; first += kApart * kTogether) {
      uint32_t words[kTogether][4];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = min(first + i * kApart, all - 1), tap = (kTaps - 1 - at % kTaps) * plane + at / kTaps;
#pragma unroll
        for (int k = 0; k < 4; ++k) words[i][k] = __float_as_uint(__ldg(from + tap * tap_size + k * q.pixel));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (uint32_t& word : words[i]) word = exists ? word : 0;
        RoundToTf32(words[i]);
        if (first + i * kApart < all)
          hopper::StoreWords(to + (part * all + first + i * kApart) * q.slab_bytes, words[i]);
      }
    }
  }
  hopper::ShowSharedToTma();
}

__device__ void ProducePlanes(const PlanesParams& q, const PlanesShared& shared) {
  hopper::PrefetchMap(&q.operand);
  if (q.transposed == nullptr) hopper::PrefetchMap(&q.filter);
  hopper::RingPlace turn;
  uint32_t filter_parity = 0;
  int filter = -1;
  const int end = FirstWork(q, blockIdx.x + 1);
  for (int at = FirstWork(q, blockIdx.x); at < end;) {
    const PlanesPlace place(q, at, end);
    if (q.transposed == nullptr && place.filter != filter) {
      if (filter >= 0) {
        hopper::WaitBarrier(shared.FilterEmpty(), filter_parity);
        filter_parity ^= 1;
      }
      filter = place.filter;
      LoadFilter(q, shared, place);
    }
    const int other = place.other - q.pad[1];
    for (int i = 0; i < place.count + kTaps - 1; ++i) {
      const int plane = place.first - q.pad[0] + i;
      for (int part = 0; part < q.parts; ++part) {
        const int coordinates[] = {part * q.part_channels, place.column - q.pad[2], q.volume ? other : plane,
                                   q.volume ? plane : other, q.volume ? place.image : place.model};
        hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
        hopper::ArriveExpecting(shared.Full(turn.stage), q.box_bytes);
        hopper::LoadBox(shared.stages + turn.stage * q.stage_bytes, &q.operand, shared.Full(turn.stage), coordinates);
        turn.Next(q.stages);
      }
    }
    at += place.count;
  }
}

// Issues the products of a warpgroup's rows with all taps of the window.
template <class In, int kLine, int kLines, int kFeatures>
__device__ __forceinline__ void MultiplyPlane(const PlanesParams& q, const uint32_t (&rows)[2], uint32_t filter,
                                              PlaneSums<kFeatures> (&sums)[2]) {
  const int line_step = q.line_step >> 4, column_step = q.column_step >> 4;
  // What the sums are by now, they are in their registers before the products begin.
  hopper::Settle(sums);
  const uint64_t a[] = {hopper::LineDescriptor(rows[0], kLine, q.next_eight, 0),
                        hopper::LineDescriptor(rows[1], kLine, q.next_eight, 0)};
  const auto multiply = [&](auto transposed, uint64_t b) {
    // From one step's operands to the next's, in bytes: transposed, the filter's lines are of one channel each.
    constexpr bool kTransposed = decltype(transposed)::value;
    constexpr int kSteps = kLine / 32, kSlab = kTaps * kFeatures * kLine, kStep = kTransposed ? 16 * 2 * kFeatures : 32;
    hopper::BeginProducts();
#pragma unroll
    for (int i = 0; i < kLines; ++i)
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
          for (int m = 0; m < 2; ++m)
            hopper::Multiply<In, kTaps * kFeatures, false, kTransposed>(
                sums[m], hopper::Later(a[m], i * line_step + j * column_step + k * 2),
                hopper::Later(b, ((i * kTaps + j) * kSlab + k * kStep) >> 4), true);
    hopper::CommitProducts();  // here, or products of nothing are committed where the branches meet
  };
  if (sizeof(In) == 2 && q.forward) {
    if constexpr (sizeof(In) == 2)
      multiply(std::true_type(), hopper::LineDescriptor(filter, 2 * kFeatures, 8 * 2 * kFeatures, kFeatures * kLine));
  } else {
    multiply(std::false_type(), hopper::LineDescriptor(filter, kLine, 8 * kLine, 0));
  }
}

template <class In, int kLine, int kLines, int kFeatures>
__device__ void ConsumePlanes(const PlanesParams& q, const PlanesShared& shared, int warpgroup, void* out) {
  static_assert(kBlocksOfWarpgroup == 2);
  // Where a plane's products take long, the warpgroups issue them in turn: one takes its sums while the other's run.
  constexpr bool kFloats = sizeof(In) == 4, kTurns = kLines > 1;
  const auto first_row = [&](int i) {
    const int block = 2 * warpgroup + i, down = block >> q.across_bits;
    return down * q.next_block_line + (block - (down << q.across_bits)) * q.next_block;
  };
  // The same in all of a warp, which its instructions then know.
  const uint32_t offset[2] = {__shfl_sync(~0u, uint32_t(first_row(0)), 0), __shfl_sync(~0u, uint32_t(first_row(1)), 0)};
  hopper::RingPlace turn;
  uint32_t filter_parity = 0;
  int filter = -1, step = 0;
  const int end = FirstWork(q, blockIdx.x + 1);
  for (int at = FirstWork(q, blockIdx.x); at < end;) {
    const PlanesPlace place(q, at, end);
    if (kFloats && q.transposed != nullptr && place.filter != filter) {
      filter = place.filter;
      hopper::SyncThreads(1 + kConsumers, kMultipliers);  // all are done with the last one
      TransposeFilter<kLine, kFeatures>(q, shared, place);
      hopper::SyncThreads(1 + kConsumers, kMultipliers);
    } else if (place.filter != filter) {
      if (filter >= 0) hopper::ArriveOnce(shared.FilterEmpty());
      filter = place.filter;
      hopper::WaitBarrier(shared.FilterFull(), filter_parity);
      filter_parity ^= 1;
    }
    const int thread = threadIdx.x % kWarpgroup;
    PlaneStores<In> first;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const PlanesRows rows(q, 2 * warpgroup + i / 2);
      const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
      if constexpr (kFloats)
        first[i / 2][i % 2] = rows.Pixel(q, place, row);
      else
        first[i / 2][i % 2] = rows.Offset(q, place, row);
    }
    PlaneSums<kFeatures> sums[2] = {};
    PlaneResults<kFeatures> results[2] = {};
    // One step more, which only stores the last plane.
    const int planes = place.count + kTaps - 1;
#pragma unroll 1
    for (int i = 0; i <= planes; ++i) {
#pragma unroll 1
      for (int part = 0; part < (kFloats ? q.parts : 1); ++part) {
        const bool more = i < planes;
        uint32_t empty = 0;  // of the stage, found with all else of it before its products: their end is waited for
        if (more) {
          const uint32_t stage = shared.stages + turn.stage * q.stage_bytes;
          empty = shared.Empty(turn.stage);
          hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
          if (kTurns) hopper::WaitBarrier(shared.Turn(warpgroup), (step + (warpgroup == 0)) % 2);
          MultiplyPlane<In, kLine, kLines, kFeatures>(q, {stage + offset[0], stage + offset[1]},
                                                      shared.filter + part * q.part_bytes, sums);
          if (kTurns) hopper::ArriveOnce(shared.Turn(1 - warpgroup));
        }
        // Of the plane before, while these products run; the first ones are another block's.
        if (part == 0 && i >= kTaps) StorePlane<In, kFeatures>(q, place, first, place.first + i - kTaps, results, out);
        hopper::WaitForProducts<0>();
        if (!more) break;
        hopper::ArriveOnce(empty);
        turn.Next(q.stages);
        ++step;
      }
      TakePlane<kFeatures>(sums[0], results[0]);
      TakePlane<kFeatures>(sums[1], results[1]);
    }
    at += place.count;
  }
}

template <class In, int kLine, int kLines, int kFeatures>
__global__ void __launch_bounds__(kThreads, 1) PlanesKernel(const __grid_constant__ PlanesParams q, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const PlanesShared shared(q, memory);
    shared.Init();
    RunRoles<1>([&](int) { ProducePlanes(q, shared); },
                [&](int warpgroup) { ConsumePlanes<In, kLine, kLines, kFeatures>(q, shared, warpgroup, out); });
  }
}

template <class In>
cudaError_t LaunchTyped(const Problem& p, int64_t apart, const PlanesPlan& plan, bool forward, const void* operand,
                        const void* filter, void* out, const Epilogue& epilogue, cudaStream_t stream) {
  constexpr bool kFloats = sizeof(In) == 4;
  const bool volume = plan.volume;
  PlanesParams q = {};
  q.forward = forward && !kFloats;
  q.transposed = kFloats && forward ? static_cast<const float*>(filter) : nullptr;
  q.epilogue = epilogue;
  q.wide = p.out != p.in;
  q.plain = !q.wide && IsNone(epilogue);
  q.volume = volume;
  q.lines = plan.lines;
  const int across = plan.columns / (plan.lines ? 64 : 8);  // 1, 2 or 4
  q.across_bits = across / 2;
  q.columns = plan.columns;
  q.others = plan.others;
  q.out_columns = int(p.y[2]);
  q.out_others = int(volume ? p.y[1] : p.images);
  q.channels = int(p.channels);
  q.features = int(p.features);
  q.tile_features = plan.tile_features;
  // Groups, or the images of a problem whose lines are dealt out (planes_plan.h), are models.
  const int64_t in_pixel = p.groups * p.channels;
  q.pixel = int(p.groups * p.features);
  q.grouped = p.groups > 1;
  q.shared = apart > 1;
  q.bias_of_model = q.shared ? 0 : q.features;
  q.images_of_model = q.grouped ? 0 : q.shared ? 1 : int(p.images);
  q.pixels_of_image = int(p.YPixels() * apart);
  q.pixels_of_other = int(volume || q.shared ? p.y[2] : p.YPixels());
  q.elements_of_plane = (volume ? p.y[1] * p.y[2] : p.y[2] * apart) * q.pixel;
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
  q.stages = plan.Stages();

  const int elements = line / int(sizeof(In));
  q.parts = plan.parts;
  q.part_channels = elements;
  q.part_bytes = plan.filter_bytes / plan.parts;
  const int64_t line_of_x = in_pixel * p.x[2], image_of_x = line_of_x * p.x[1] * apart;
  cudaError_t e =
      volume ? EncodeBoxes(&q.operand, p.in, operand, {p.channels, p.x[2], p.x[1], p.x[0], p.batch * p.images},
                           {elements, plan.box_columns, plan.box_others, 1, 1})
             : EncodeBoxes(&q.operand, p.in, operand, {p.channels, p.x[2], p.x[1], p.images, p.batch * p.groups},
                           {elements, plan.box_columns, 1, plan.box_others, 1}, true, false,
                           {in_pixel, line_of_x * apart, q.shared ? line_of_x : image_of_x,
                            q.grouped  ? p.channels
                            : q.shared ? image_of_x
                                       : image_of_x * p.images});
  // The filter is [taps, channels, features] as the problem had it before AsForward, of all groups.
  const int64_t along = forward ? p.features : p.channels, down = forward ? p.channels : p.features;
  const int64_t tap = p.groups * along * down;
  if (e == cudaSuccess && q.transposed == nullptr)
    e = EncodeBoxes(&q.filter, p.in, filter, {along, down, p.Taps(), q.shared ? 1 : p.batch, p.groups},
                    {forward ? plan.tile_features : elements, forward ? elements : plan.tile_features, 1, 1, 1}, true,
                    false, {p.groups * along, tap, tap * p.Taps(), along});
  if (e != cudaSuccess) return e;
  const Grid grid = {plan.blocks, kThreads, size_t(plan.SharedBytes(q.stages))};
  const auto launch = [&](auto line_bytes, auto features) {
    constexpr int kLine = decltype(line_bytes)::value, kFeatures = decltype(features)::value;
    auto* kernel = volume ? PlanesKernel<In, kLine, kTaps, kFeatures> : PlanesKernel<In, kLine, 1, kFeatures>;
    return LaunchKernel(kernel, grid, stream, q, out);
  };
  constexpr std::integral_constant<int, 64> kHalf;
  constexpr std::integral_constant<int, 128> kWhole;
  constexpr std::integral_constant<int, 32> kFeatures;
  constexpr std::integral_constant<int, 16> kFew;
  constexpr std::integral_constant<int, 16 * sizeof(In)> kShort;
  if (plan.tile_features == kFew) {
    if (line == kShort) return launch(kShort, kFew);
    if constexpr (kFloats) return launch(kWhole, kFew);
  }
  return line == kHalf ? launch(kHalf, kFeatures) : launch(kWhole, kFeatures);
}

}  // namespace

cudaError_t LaunchPlanes(const Problem& problem, const void* operand, const void* filter, void* out,
                         const Epilogue& epilogue, cudaStream_t stream) {
  int64_t apart;
  const Problem p = DealLines(AsForward(problem), &apart);
  PlanesPlan plan;
  if (!plan.Fit(p)) return cudaErrorInvalidValue;
  const bool forward = problem.direction == Direction::kForward;
  const auto launch = [&](auto in) {
    return LaunchTyped<typename decltype(in)::type>(p, apart, plan, forward, operand, filter, out, epilogue, stream);
  };
  return p.in == DType::kF32    ? launch(TypeTag<float>())
         : p.in == DType::kBF16 ? launch(TypeTag<__nv_bfloat16>())
                                : launch(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
