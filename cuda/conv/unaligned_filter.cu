// Filter gradient, without stride, of unaligned channels or features of 16 bits, on Hopper's tensor cores.
//
// The sum is over rows as unaligned_plan.h says, some tiles of 128 for each block. Their pixels of y, and those of x
// that one line of the window meets, come to shared memory packed (unaligned_pack.cu), and both are MN-major operands
// as they lie: a tap's is the strip of x from some pixels later on. A block has up to four units of the result's rows,
// two for each of the warpgroups that multiply. A unit is 64 channels of one tap; or of eight channels, where few are
// left over, all taps of the line, for the next tap's are just one pixel further than the last one's.
//
// Rows that are no pixels of y have zeros there, but x may have an infinity where they meet it: sums that are not
// finite are computed once more, one by one, when the slices are added up.
//
// A tile is 32 products of 64x72x16, 1152 cycles at the tensor cores' rate; an H200 takes some 2400.
#include "cuda/conv/unaligned.h"
#include "cuda/conv/unaligned_sum.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kRows = UnalignedFilterPlan::kRows, kUnits = UnalignedFilterPlan::kUnits / 2;  // of a warpgroup
constexpr int kColumns = UnalignedPlan::kColumns, kEights = kColumns / 8;

constexpr int kWarpgroup = 128, kConsumers = 2 * kWarpgroup, kThreads = kConsumers + 32;

struct UnalignedFilterParams : UnalignedSlices {
  int whole_groups;  // of 64 channels; the eights that are left over
  int left, left_units;
  bool appended;  // to the last whole group
  FastDiv unit_groups, channel_groups, window_lines;
  int slice_tiles, stages, x_bytes;
  PackedRows packed, y;
  PackedPlanes packed_planes;
};

// Channels that a block's strips hold, and the units they make: `whole` of a tap each, and those of single eights.
struct ChannelGroup {
  int channel, chunks, whole, first_single, units;

  __device__ ChannelGroup(const UnalignedFilterParams& q, int group) {
    const bool is_whole = group < q.whole_groups, has_left = !is_whole || (q.appended && group == q.whole_groups - 1);
    const int singles = has_left && q.left_units < q.window_width ? q.left_units : 0;
    channel = group * 64;
    chunks = (is_whole ? 8 : 0) + (has_left ? q.left : 0);
    whole = is_whole || singles == 0 ? q.window_width : 0;
    first_single = is_whole ? 8 : 0;
    units = whole + singles;
  }
};

// 64 rows of the result: eights of channels from `chunk` on of one tap, or of as many taps from `tap` on.
struct Unit {
  bool exists, single;
  int chunk, tap;

  __device__ Unit(const UnalignedFilterParams& q, const ChannelGroup& group, int unit) {
    const int eights = (q.window_width + 7) / 8, i = unit - group.whole;
    exists = unit < group.units;
    single = exists && i >= 0;
    chunk = single ? group.first_single + i / eights : 0;
    tap = !exists ? 0 : single ? i % eights * 8 : unit;
  }
};

// What a block works on.
struct FilterPlace {
  int split, column, first_unit, group, line;

  __device__ explicit FilterPlace(const UnalignedFilterParams& q) {
    int rest = q.column_tiles_div.Div(blockIdx.x, &column);
    column *= q.columns;
    rest = q.unit_groups.Div(rest, &first_unit);
    first_unit *= 2 * kUnits;
    rest = q.channel_groups.Div(rest, &group);
    split = q.window_lines.Div(rest, &line);
  }
};

struct FilterShared {
  uint32_t barriers, stages;
  int x_bytes, stage_bytes;

  __device__ FilterShared(const UnalignedFilterParams& q, unsigned char* shared)
      : barriers(SharedAddress(shared)),
        stages(barriers + UnalignedFilterPlan::kBarrierBytes),
        x_bytes(q.x_bytes),
        stage_bytes(q.strip_bytes) {}
  __device__ uint32_t X(int i) const { return stages + i * stage_bytes; }
  __device__ uint32_t Y(int i) const { return X(i) + x_bytes; }
  __device__ uint32_t Full(int i) const { return barriers + 16 * i; }
  __device__ uint32_t Empty(int i) const { return barriers + 16 * i + 8; }
};

// The tiles' pixels, by a warp: a lane has a chunk of x or of y.
__device__ void ProduceTiles(const UnalignedFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                             const ChannelGroup& group, int lane, int tiles) {
  hopper::RingPlace turn;
  const int plane_tap = place.line / q.plane_groups, line = place.line - plane_tap * q.plane_groups;
  const PackedPlanes same = {true};
  // Columns of no result may be anything.
  const int y_chunks = min(kEights, q.y.chunks - place.column / 8);
  for (int tile = 0; tile < tiles; ++tile) {
    const int row = (place.split * q.slice_tiles + tile) * kRows;
    const uint32_t full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    if (lane == 0) hopper::ArriveExpecting(full, (group.chunks * q.pixels + y_chunks * kRows) * 16);
    __syncwarp();
    for (int i = lane; i < group.chunks + y_chunks; i += 32) {
      const int y_chunk = i - group.chunks;
      if (y_chunk < 0)
        CopyPacked(q.packed, q.packed_planes, group.channel / 8 + i, row + line * q.line_step, q.pixels,
                   plane_tap * q.dilation[0] - q.pad[0], shared.X(turn.stage) + i * q.pixels * 16, full);
      else
        CopyPacked(q.y, same, place.column / 8 + y_chunk, row, kRows, 0, shared.Y(turn.stage) + y_chunk * kRows * 16,
                   full);
    }
    turn.Next(q.stages);
  }
}

template <class In>
__device__ void ConsumeTiles(const UnalignedFilterParams& q, const FilterShared& shared, const FilterPlace& place,
                             const ChannelGroup& group, int warpgroup, int tiles, float* out) {
  const int first = place.first_unit + warpgroup * kUnits;
  const Unit units[kUnits] = {Unit(q, group, first), Unit(q, group, first + 1)};
  float sums[kUnits][kColumns / 2];
  hopper::RingPlace turn, last;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    uint64_t a[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int apart = units[u].single ? q.dilation[2] : q.pixels;
      a[u] = hopper::PlainDescriptor(
          shared.X(turn.stage) + (units[u].chunk * q.pixels + units[u].tap * q.dilation[2]) * 16, apart * 16, 128,
          true);
    }
    const uint64_t b = hopper::PlainDescriptor(shared.Y(turn.stage), kRows * 16, 128, true);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        hopper::Multiply<In, kColumns, true, true>(sums[u], a[u] + 16 * k, b + 16 * k, tile > 0 || k > 0);
    hopper::CommitProducts();
    // A tile's products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (tile > 0) ArriveWarp(shared.Empty(last.stage));
    last = turn;
    turn.Next(q.stages);
  }
  hopper::WaitForSums(sums);

  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int u = 0; u < kUnits; ++u)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int eight = 2 * warp + half, element = lane / 4;
      const int tap = units[u].tap + (units[u].single ? eight : 0);
      const int channel = group.channel + (units[u].chunk + (units[u].single ? 0 : eight)) * 8 + element;
      if (!units[u].exists || tap >= q.window_width || channel >= q.channels) continue;
      float* const to = out + ((int64_t{place.line} * q.window_width + tap) * q.channels + channel) * q.features;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const int mine = 8 * (i / 2) + 2 * (lane % 4) + i % 2, column = place.column + mine;
        if (mine < q.columns && column < q.features) to[column] = sums[u][i / 2 * 4 + 2 * half + i % 2];
      }
    }
}

template <class In>
__global__ void __launch_bounds__(kThreads, 1)
    UnalignedFilterKernel(const __grid_constant__ UnalignedFilterParams q, float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const FilterShared shared(q, memory);
    if (threadIdx.x == 0) {
      for (int i = 0; i < q.stages; ++i) {
        hopper::InitBarrier(shared.Full(i), 1);
        hopper::InitBarrier(shared.Empty(i), kConsumers / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
    const FilterPlace place(q);
    const ChannelGroup group(q, place.group);
    if (place.first_unit >= group.units) return;  // not every group has as many units as the largest
    const int tiles = min(q.slice_tiles, q.tiles - place.split * q.slice_tiles);
    if (threadIdx.x >= kConsumers)
      ProduceTiles(q, shared, place, group, threadIdx.x % 32, tiles);
    else
      ConsumeTiles<In>(q, shared, place, group, threadIdx.x / kWarpgroup, tiles, partial + place.split * q.result_size);
  }
}

// The sums of some of the images, as slices from `partial` on, of which there are so many.
template <class In>
cudaError_t LaunchPart(const Problem& p, int64_t splits, const Packing& of_x, const Packing& of_y, float* partial,
                       int64_t* slices, cudaStream_t stream) {
  const UnalignedFilterPlan plan(p);
  UnalignedFilterParams q = {};
  static_cast<UnalignedSlices&>(q) = SliceParams(p, plan);
  q.columns = plan.columns;
  q.column_tiles_div = FastDiv(plan.column_tiles);
  q.whole_groups = plan.whole_groups;
  q.left = plan.left;
  q.left_units = plan.left_units;
  q.appended = plan.appended;
  q.unit_groups = FastDiv(plan.unit_groups);
  q.channel_groups = FastDiv(plan.channel_groups);
  q.window_lines = FastDiv(p.window[0] * p.window[1]);
  q.pixels = plan.pixels;
  q.stages = plan.stages;
  q.x_bytes = plan.XBytes(q.pixels);
  q.strip_bytes = plan.StageBytes(q.pixels);
  q.tiles = int(plan.Tiles());
  q.slice_tiles = int(CeilDiv(q.tiles, splits));
  *slices = CeilDiv(q.tiles, q.slice_tiles);
  q.packed = RowsOf(of_x, plan);
  q.packed_planes = PlanesOf(p, plan);
  q.y = RowsOf(of_y, plan);
  const Grid grid = {*slices * plan.BlocksOfSlice(p), kThreads, size_t(plan.SharedBytes())};
  return LaunchKernel(UnalignedFilterKernel<In>, grid, stream, q, partial);
}

template <class In>
cudaError_t LaunchType(const Problem& all, const Config& config, const void* x, const void* y, void* out,
                       void* workspace, cudaStream_t stream) {
  Problem p = UnalignedPart(all);
  const UnalignedFilterPlan plan(p);
  const int64_t splits = config.splits / CeilDiv(all.images, p.images);  // of a part
  if (splits == 0) return cudaErrorInvalidValue;
  auto* const partial = static_cast<float*>(workspace);
  char* const packed_x = static_cast<char*>(workspace) + CeilDiv(config.splits * p.FilterSize() * 4, 16) * 16;
  char* const packed_y = packed_x + plan.XPackedBytes(p);
  UnalignedSlices q = SliceParams(all, plan);
  for (int64_t image = 0; image < all.images; image += p.images) {
    p.images = std::min(p.images, all.images - image);
    const Packing of_x = {x,
                          all.images * p.x[0],
                          image * p.x[0],
                          p.images * p.x[0],
                          {OperandEdges(p, 1), OperandEdges(p, 2)},
                          {p.pad[1], p.pad[2]},
                          p.channels,
                          plan.ChunksOf(p.channels),
                          plan.pixels,
                          packed_x};
    const Packing of_y = {y,
                          all.images * p.y[0],
                          image * p.y[0],
                          p.images * p.y[0],
                          {{int(p.y[1])}, {int(p.y[2])}},
                          {0, 0},
                          p.features,
                          plan.ChunksOf(p.features),
                          kRows,
                          packed_y};
    int64_t slices = 0;
    cudaError_t e = PackRows(plan, {of_x, of_y}, stream);
    if (e == cudaSuccess)
      e = LaunchPart<In>(p, splits, of_x, of_y, partial + q.splits * p.FilterSize(), &slices, stream);
    if (e != cudaSuccess) return e;
    q.splits += int(slices);
  }
  return SumUnaligned<In>(all, q, x, y, partial, out, stream);
}

}  // namespace

cudaError_t LaunchUnalignedFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                  void* workspace, cudaStream_t stream) {
  if (p.in == DType::kF32) return LaunchUnalignedFilterFloats(p, config, x, y, out, workspace, stream);
  return p.in == DType::kBF16 ? LaunchType<__nv_bfloat16>(p, config, x, y, out, workspace, stream)
                              : LaunchType<__half>(p, config, x, y, out, workspace, stream);
}

}  // namespace jaxdnn::conv
