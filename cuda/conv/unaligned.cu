// Forward convolution and data gradient, without stride, of any numbers of channels and features: what the TMA unit
// cannot read, because lines begin anywhere, on Hopper's tensor cores.
//
// unaligned_plan.h says what rows are. The threads of two warpgroups bring a tile's strip of pixels to shared memory,
// every chunk of 16 bytes shifted once to where it belongs, and not once for every tap as in data_ragged.cu. Chunks lie
// side by side pixel by pixel, so that a tap's operand is that strip from some pixels later on, and wgmma reads it in
// place: its unswizzled operands may begin on any 16 bytes. A first kernel lays the filter out as it is to lie there,
// in slabs, which are copied as they are, one by one for each tile. Where there is room for all of them,
// unaligned_stream.cu is faster.
#include "cuda/conv/unaligned.h"
#include "cuda/conv/unaligned_slabs.cuh"
#include "cuda/conv/unaligned_store.cuh"

namespace jaxdnn::conv {
namespace {

// A tile's first row, and column of the result.
struct UnalignedPlace {
  int row, column;

  template <class T>
  __device__ UnalignedPlace(const UnalignedParams& q, int tile, T) {
    row = q.column_tiles_div.Div(tile, &column) * UnalignedPlan::kWarpgroups * T::kWarpgroupRows;
    column *= q.columns;
  }
};

// Calls bring(group, slice) for one strip of a tile after another, of a slice of the channels.
template <class Bring>
__device__ __forceinline__ void ForStrips(const UnalignedParams& q, const Bring& bring) {
  for (int group = 0; group < q.groups; ++group)
    for (int slice = 0; slice < q.slices; ++slice) bring(group, slice);
}

template <class T>
__device__ void ProduceStrips(const UnalignedParams& q, const UnalignedShared<T>& shared, int thread,
                              const AlignedArray<typename T::In>& in) {
  hopper::RingPlace turn;
  for (int tile = blockIdx.x; tile < q.tiles; tile += gridDim.x) {
    const UnalignedPlace place(q, tile, T());
    ForStrips(q, [&](int group, int slice) {
      const int channel = slice * q.steps * T::kDepth;
      const int plane_tap = group / q.plane_groups, line = (group - plane_tap * q.plane_groups) * q.tap_lines;
      int* const pixels = shared.pixels + turn.stage * q.pixels;
      FindPixels(q, thread, T::kStripThreads, place.row + line * q.line_step, plane_tap, pixels);
      // Nobody is two strips ahead of another.
      hopper::SyncThreads(4, T::kStripThreads);
      hopper::WaitBarrier(shared.StripEmpty(turn.stage), turn.parity ^ 1);
      const uint32_t strip = shared.strips + turn.stage * q.strip_bytes;
      FillStrip(thread, T::kStripThreads, q.steps_div, q.pixels, pixels, q.channels, channel, q.channels, 2 * q.steps,
                q.pixels, in, strip);
      CommitCopies();
      WaitForCopies<0>();
      hopper::ShowSharedToTma();
      hopper::Arrive(shared.StripFull(turn.stage));
      turn.Next(2);
    });
  }
}

// Which strip and part of the filter a tap's products read, tap by tap of a strip.
template <class T>
struct UnalignedCursor {
  hopper::RingPlace strip, slab;
  int taken = 0, tap, line, column;  // slabs; of the strip

  // Whether a slab is one of the first two of all.
  __device__ bool First() const { return taken < 2; }

  __device__ void Begin() { tap = line = column = 0; }
  __device__ void Next(const UnalignedParams& q) {
    slab.Next(q.slabs);
    ++taken;
    ++tap;
    if (++column < q.window_width) return;
    column = 0;
    if (++line < q.tap_lines) return;
    line = tap = 0;
    strip.Next(2);
  }
};

// The sums of a tile's rows that are the warpgroup's.
template <int kSteps, class T>
__device__ __forceinline__ void MultiplyStrips(const UnalignedParams& q, const UnalignedShared<T>& shared,
                                               int warpgroup, UnalignedCursor<T>& at, SlabCopies<T>& copies,
                                               typename T::Sums& sums) {
  using In = typename T::In;
  const int all = q.groups * q.slices * q.tap_lines * q.window_width;
  // From one step's operands to the next's, in 16 bytes.
  const int step_a = 2 * q.pixels, step_b = 2 * T::kColumns;
  int last_strip = -1, last_slab = -1;
  at.Begin();
#pragma unroll 1
  for (int i = 0; i < all; ++i) {
    if (at.tap == 0) hopper::WaitBarrier(shared.StripFull(at.strip.stage), at.strip.parity);
    hopper::WaitBarrier(shared.SlabFull(at.slab.stage), at.slab.parity);
    const int pixel = at.line * q.line_step + at.column * q.dilation[2] + warpgroup * T::kWarpgroupRows;
    const uint64_t a =
        hopper::PlainDescriptor(shared.strips + at.strip.stage * q.strip_bytes + pixel * 16, q.pixels * 16, 128, false);
    const uint64_t b =
        hopper::PlainDescriptor(shared.slabs + at.slab.stage * q.slab_bytes, T::kColumns * 16, 128, false);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int m = 0; m < T::kBlocks; ++m)
        hopper::Multiply<In, T::kColumns, false, false>(sums[m], hopper::Later(a, k * step_a + m * 64),
                                                        hopper::Later(b, k * step_b), true);
    hopper::CommitProducts();
    // A tap's products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (i > 0) {
      ArriveWarp(shared.SlabEmpty(last_slab));
      if (at.tap == 0) ArriveWarp(shared.StripEmpty(last_strip));
    }
    // The slab before the last one has been read by now.
    if (threadIdx.x == 0 && !at.First()) copies.Next(q, shared);
    __syncwarp();
    last_slab = at.slab.stage;
    last_strip = at.strip.stage;
    at.Next(q);
  }
  hopper::WaitForProducts<0>();
  ArriveWarp(shared.SlabEmpty(last_slab));
  ArriveWarp(shared.StripEmpty(last_strip));
  hopper::Settle(sums);
}

template <class T>
__device__ void Consume(const UnalignedParams& q, const UnalignedShared<T>& shared, int warpgroup,
                        const unsigned char* slabs, void* out) {
  using In = typename T::In;
  UnalignedCursor<T> at;
  SlabCopies<T> copies(q, slabs);
  if (threadIdx.x == 0) copies.Begin(q, shared);
  __syncwarp();
  const int warp = threadIdx.x / 32;
  for (int tile = blockIdx.x; tile < q.tiles; tile += gridDim.x) {
    const UnalignedPlace place(q, tile, T());
    typename T::Sums sums = {};
    hopper::VisitSteps<UnalignedPlan::kMostSteps>(
        q.steps, [&](auto steps) { MultiplyStrips<decltype(steps)::value>(q, shared, warpgroup, at, copies, sums); });
#pragma unroll 1
    for (int m = 0; m < T::kBlocks; ++m) {
      const int row = place.row + warpgroup * T::kWarpgroupRows + m * 64 + warp % 4 * 16;
      const StorePlaces places([&](int i) { return ResultPixel(q, row + i); });
      StoreRowsAs<In>(q, places, place.column, sums[0], out);
#pragma unroll
      for (int i = 0; i + 1 < T::kBlocks; ++i)
#pragma unroll
        for (int k = 0; k < T::kColumns / 2; ++k) sums[i][k] = sums[i + 1][k];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    UnalignedKernel(const __grid_constant__ UnalignedParams q, AlignedArray<typename T::In> in,
                    const unsigned char* slabs, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const UnalignedShared<T> shared(q, memory);
    shared.Init();
    if (threadIdx.x < T::kConsumers) {
      hopper::SetRegisters<144, true>();
      Consume(q, shared, threadIdx.x / T::kWarpgroup, slabs, out);
    } else {
      hopper::SetRegisters<112, false>();
      ProduceStrips(q, shared, threadIdx.x - T::kConsumers, in);
    }
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& problem, const UnalignedPlan& plan, const void* operand, const void* filter,
                       void* out, void* workspace, const Epilogue& epilogue, cudaStream_t stream) {
  using In = typename T::In;
  const Problem p = AsForward(problem);
  UnalignedParams q = RowParams(problem, UnalignedRows(p));
  q.epilogue = epilogue;
  q.finish = !IsNone(epilogue);
  q.wide = p.out != p.in;
  q.tiles = int(plan.Tiles());
  q.columns = plan.columns;
  q.column_tiles_div = FastDiv(plan.column_tiles);
  q.channels = int(p.channels);
  q.features = int(p.features);
  q.steps = plan.steps;
  q.slices = plan.slices;
  q.steps_div = FastDiv(plan.steps);
  q.taps = int(p.Taps());
  q.tap_lines = plan.tap_lines;
  q.groups = plan.groups;
  q.plane_groups = int(p.window[1] / plan.tap_lines);
  q.pixels = plan.pixels;
  q.strip_bytes = plan.StripBytes();
  q.slabs = plan.slabs;
  q.slab_bytes = plan.SlabBytes();

  int device = 0, multiprocessors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = ArrangeFilter<In>(q, problem, filter, plan.FilterBytes(p), workspace, stream);
  if (e != cudaSuccess) return e;
  const auto* const begin = static_cast<const In*>(operand);
  const AlignedArray<In> array = {begin, begin + p.images * p.XPixels() * p.channels};
  const Grid grid = {std::min<int64_t>(q.tiles, multiprocessors), T::kThreads, size_t(plan.SharedBytes())};
  return LaunchKernel(UnalignedKernel<T>, grid, stream, q, array, static_cast<const unsigned char*>(workspace), out);
}

}  // namespace

cudaError_t LaunchUnaligned(const Problem& p, const void* operand, const void* filter, void* out, void* workspace,
                            const Epilogue& epilogue, cudaStream_t stream) {
  if (UnalignedStreamPlan stream_plan; stream_plan.Fit(AsForward(p)))
    return LaunchUnalignedStream(p, stream_plan, operand, filter, out, workspace, epilogue, stream);
  UnalignedPlan plan;
  if (!plan.Fit(AsForward(p))) return cudaErrorInvalidValue;
  return VisitSingleDType(p.in, [&](auto in) {
    using T = UnalignedTile<typename decltype(in)::type>;
    return LaunchTile<T>(p, plan, operand, filter, out, workspace, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
