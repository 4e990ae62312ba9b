// Filter gradient, without stride, of unaligned channels or features of 16 bits, on Hopper's tensor cores.
//
// The sum is over rows as unaligned_plan.h says, some tiles of 256 for each block. Their pixels of y, and those of x
// that one line of the window meets, come to shared memory as in unaligned.cu, and both are MN-major operands as they
// lie: a tap's is the strip of x from some pixels later on. A block has up to four units of the result's rows, two for
// each of the warpgroups that multiply. A unit is 64 channels of one tap; or of eight channels, where few are left
// over, all taps of the line, for the next tap's are just one pixel further than the last one's.
//
// Rows that are no pixels of y have zeros there, but x may have an infinity where they meet it: sums that are not
// finite are computed once more, one by one, when the slices are added up.
#include "cuda/conv/unaligned.h"
#include "cuda/conv/unaligned_sum.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kRows = 256, kUnits = 2;  // of a tile; of a warpgroup
constexpr int kColumns = UnalignedPlan::kColumns, kEights = kColumns / 8;

struct FilterTile {
  static constexpr int kWarpgroup = 128, kConsumers = 256, kStripThreads = 256, kThreads = 512;
};

struct UnalignedFilterParams : UnalignedSlices {
  int whole_groups;  // of 64 channels; the eights that are left over
  int left, left_units;
  bool appended;  // to the last whole group
  FastDiv unit_groups, channel_groups, window_lines;
  int slice_tiles;
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

template <class In>
struct FilterShared {
  uint32_t x, y, barriers;
  int x_bytes, y_bytes;
  int *x_pixels, *y_pixels;  // of each stage

  static constexpr int kYPitch = kRows + 1;

  __device__ __host__ static int XBytes(int pixels) { return pixels * 10 * 16; }
  static constexpr int kYBytes = kYPitch * kEights * 16;
  __device__ __host__ static int Bytes(int pixels) {
    return 2 * (XBytes(pixels) + kYBytes) + 2 * (pixels + kRows) * 4 + 64;
  }

  __device__ FilterShared(unsigned char* shared, int pixels)
      : x(SharedAddress(shared)),
        y(x + 2 * XBytes(pixels)),
        barriers(y + 2 * kYBytes),
        x_bytes(XBytes(pixels)),
        y_bytes(kYBytes) {
    x_pixels = reinterpret_cast<int*>(shared + 2 * (x_bytes + y_bytes) + 64);
    y_pixels = x_pixels + 2 * pixels;
  }
  __device__ uint32_t Full(int i) const { return barriers + 16 * i; }
  __device__ uint32_t Empty(int i) const { return barriers + 16 * i + 8; }
};

template <class In>
__device__ void ProduceTiles(const UnalignedFilterParams& q, const FilterShared<In>& shared, const FilterPlace& place,
                             const ChannelGroup& group, int thread, const AlignedArray<In>& x,
                             const AlignedArray<In>& y, int tiles) {
  UnalignedTurn turn;
  const int plane_tap = place.line / q.plane_groups, line = place.line - plane_tap * q.plane_groups;
  const FastDiv x_pairs((group.chunks + 1) / 2);
  for (int tile = 0; tile < tiles; ++tile) {
    const int row = (place.split * q.slice_tiles + tile) * kRows;
    int* const x_pixels = shared.x_pixels + turn.stage * q.pixels;
    int* const y_pixels = shared.y_pixels + turn.stage * kRows;
    FindPixels(q, thread, FilterTile::kStripThreads, row + line * q.line_step, plane_tap, x_pixels);
    for (int i = thread; i < kRows; i += FilterTile::kStripThreads) {
      bool exists;
      const int pixel = ResultPixel(q, row + i, &exists);
      y_pixels[i] = exists ? pixel : -1;
    }
    // Nobody is two tiles ahead of another.
    hopper::SyncThreads(4, FilterTile::kStripThreads);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    FillStrip(thread, FilterTile::kStripThreads, x_pairs, q.pixels, x_pixels, q.channels, group.channel, q.channels,
              group.chunks, q.pixels, x, shared.x + turn.stage * shared.x_bytes);
    FillStrip(thread, FilterTile::kStripThreads, q.column_pairs, kRows, y_pixels, q.features, place.column,
              min(place.column + q.columns, q.features), kEights, shared.kYPitch, y,
              shared.y + turn.stage * shared.y_bytes);
    CommitCopies();
    WaitForCopies<0>();
    hopper::ShowSharedToTma();
    hopper::Arrive(shared.Full(turn.stage));
    turn.Next(2);
  }
}

template <class In>
__device__ void ConsumeTiles(const UnalignedFilterParams& q, const FilterShared<In>& shared, const FilterPlace& place,
                             const ChannelGroup& group, int warpgroup, int tiles, float* out) {
  const int first = place.first_unit + warpgroup * kUnits;
  const Unit units[kUnits] = {Unit(q, group, first), Unit(q, group, first + 1)};
  float sums[kUnits][kColumns / 2];
  UnalignedTurn turn;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    uint64_t a[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int apart = units[u].single ? q.dilation[2] : q.pixels;
      a[u] = hopper::PlainDescriptor(
          shared.x + turn.stage * shared.x_bytes + (units[u].chunk * q.pixels + units[u].tap * q.dilation[2]) * 16,
          apart * 16, 128, true);
    }
    const uint64_t b = hopper::PlainDescriptor(shared.y + turn.stage * shared.y_bytes, shared.kYPitch * 16, 128, true);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        hopper::Multiply<In, kColumns, true, true>(sums[u], a[u] + 16 * k, b + 16 * k, tile > 0 || k > 0);
    hopper::CommitProducts();
    hopper::WaitForProducts<0>();
    ArriveWarp(shared.Empty(turn.stage));
    turn.Next(2);
  }
#pragma unroll
  for (auto& unit : sums)
#pragma unroll
    for (float& each : unit) asm volatile("" : "+f"(each));

  const int thread = threadIdx.x % FilterTile::kWarpgroup, warp = thread / 32, lane = thread % 32;
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
__global__ void __launch_bounds__(FilterTile::kThreads, 1)
    UnalignedFilterKernel(const __grid_constant__ UnalignedFilterParams q, AlignedArray<In> x, AlignedArray<In> y,
                          float* partial) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const FilterShared<In> shared(memory, q.pixels);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        hopper::InitBarrier(shared.Full(i), FilterTile::kStripThreads);
        hopper::InitBarrier(shared.Empty(i), FilterTile::kConsumers / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
    const FilterPlace place(q);
    const ChannelGroup group(q, place.group);
    if (place.first_unit >= group.units) return;  // not every group has as many units as the largest
    const int tiles = min(q.slice_tiles, q.tiles - place.split * q.slice_tiles);
    const int thread = threadIdx.x % FilterTile::kConsumers;
    if (threadIdx.x >= FilterTile::kConsumers) {
      ProduceTiles(q, shared, place, group, thread, x, y, tiles);
    } else {
      ConsumeTiles(q, shared, place, group, thread / FilterTile::kWarpgroup, tiles,
                   partial + place.split * q.result_size);
    }
  }
}

template <class In>
cudaError_t LaunchType(const Problem& p, const Config& config, const void* x, const void* y, void* out, void* workspace,
                       cudaStream_t stream) {
  const UnalignedFilterPlan plan(p);
  UnalignedFilterParams q = {};
  static_cast<UnalignedSlices&>(q) = SliceParams(p, plan.line, plan.lines);
  q.columns = plan.columns;
  q.column_tiles_div = FastDiv(plan.column_tiles);
  q.column_pairs = FastDiv(CeilDiv(kEights, 2));
  q.whole_groups = plan.whole_groups;
  q.left = plan.left;
  q.left_units = plan.left_units;
  q.appended = plan.appended;
  q.unit_groups = FastDiv(plan.unit_groups);
  q.channel_groups = FastDiv(plan.channel_groups);
  q.window_lines = FastDiv(p.window[0] * p.window[1]);
  q.pixels = plan.pixels;
  q.tiles = int(plan.Tiles());
  q.slice_tiles = int(CeilDiv(q.tiles, config.splits));
  q.splits = int(CeilDiv(q.tiles, q.slice_tiles));
  const auto array = [](const void* begin, int64_t size) {
    return AlignedArray<In>{static_cast<const In*>(begin), static_cast<const In*>(begin) + size};
  };
  auto* const partial = static_cast<float*>(workspace);
  const Grid grid = {int64_t{q.splits} * plan.BlocksOfSlice(p), FilterTile::kThreads,
                     size_t(FilterShared<In>::Bytes(q.pixels))};
  const cudaError_t e =
      LaunchKernel(UnalignedFilterKernel<In>, grid, stream, q, array(x, p.images * p.XPixels() * p.channels),
                   array(y, p.images * p.YPixels() * p.features), partial);
  if (e != cudaSuccess) return e;
  return SumUnaligned<In>(p, q, x, y, partial, out, stream);
}

}  // namespace

cudaError_t LaunchUnalignedFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                  void* workspace, cudaStream_t stream) {
  if (p.in == DType::kF32) return LaunchUnalignedFilterFloats(p, config, x, y, out, workspace, stream);
  return p.in == DType::kBF16 ? LaunchType<__nv_bfloat16>(p, config, x, y, out, workspace, stream)
                              : LaunchType<__half>(p, config, x, y, out, workspace, stream);
}

}  // namespace jaxdnn::conv
