// Forward convolution and data gradient, without stride, of any numbers of channels and features: what the TMA unit
// cannot read, because lines begin anywhere, on Hopper's tensor cores.
//
// unaligned_plan.h says what rows are. The threads of two warpgroups bring a tile's strip of pixels to shared memory,
// every chunk of 16 bytes shifted once to where it belongs, and not once for every tap as in data_ragged.cu. Chunks lie
// side by side pixel by pixel, so that a tap's operand is that strip from some pixels later on, and wgmma reads it in
// place: its unswizzled operands may begin on any 16 bytes. A first kernel lays the filter out as it is to lie there,
// in slabs, which are copied as they are; all of it stays where there is room, else they come one by one for each tile.
//
// 65 channels are five products of 16 for each tap. An H200 takes some 90 to 110 cycles for one of 64 rows and 72
// columns with all that belongs to it, about a third of what its tensor cores could do.
//
// A tile's results are as many neighbours as it has rows that are pixels of the result. They go through shared memory,
// and leave in fours.
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/unaligned.h"
#include "cuda/conv/unaligned_slabs.cuh"

namespace jaxdnn::conv {
namespace {

// A tile's first row, and column of the result.
struct UnalignedPlace {
  int row, column;

  template <class T>
  __device__ UnalignedPlace(const UnalignedParams& q, int tile, T) {
    row = q.column_tiles_div.Div(tile, &column) * (T::kResident ? 1 : UnalignedPlan::kWarpgroups) * T::kWarpgroupRows;
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

// Stores 64 rows of sums, from row `first` of the result and its `column` on. In shared memory they are side by side,
// as far from an aligned four as in the result where all of its columns are the tile's, with a place left free after
// each four, so that neither rows nor fours meet in a bank.
template <class T, class Out>
__device__ __forceinline__ void StoreRows(const UnalignedParams& q, int first, int column,
                                          const float (&sums)[T::kColumns / 2], int warpgroup, float* staged,
                                          Out* out) {
  const int thread = threadIdx.x % T::kWarpgroup, warp = thread / 32, lane = thread % 32;
  const FastDiv& width_div = q.width_div[column + q.columns >= q.features];
  const int width = width_div.divisor;
  bool exists;
  const int before = ResultPixel(q, first, &exists), count = ResultPixel(q, first + 64, &exists) - before;
  const int64_t origin = int64_t{before} * q.features + column;
  const bool whole = width == q.features;
  const int start = whole ? static_cast<int>(origin % 4) : 0, end = start + count * width;
  const auto place = [](int i) { return i + i / 4; };
  hopper::SyncWarpgroup(1 + warpgroup);  // the last rows are read
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pixel = ResultPixel(q, first + 16 * warp + lane / 4 + 8 * half, &exists);
    const int mine = 2 * (lane % 4), left = exists ? width - mine : 0, at = start + (pixel - before) * width + mine;
    float *const even = staged + place(at), *const odd = staged + place(at + 1);
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j) {
      if (8 * j < left) even[10 * j] = sums[4 * j + 2 * half];
      if (8 * j + 1 < left) odd[10 * j] = sums[4 * j + 2 * half + 1];
    }
  }
  hopper::SyncWarpgroup(1 + warpgroup);

  Out* const to = out + (origin - start);
  const auto load = [&](int four, float (&v)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = staged[5 * four + k];
  };
  const auto store = [&](int four, const float (&v)[4]) {
    const Vec<Out, 4> rounded = Round<Out>(v);
    if (4 * four >= start && 4 * four + 4 <= end) {
      *reinterpret_cast<Vec<Out, 4>*>(to + 4 * four) = rounded;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (4 * four + k >= start && 4 * four + k < end) to[4 * four + k] = rounded.v[k];
    }
  };
  if (whole && !q.finish) {
#pragma unroll 2
    for (int i = thread; 4 * i < end; i += T::kWarpgroup) {
      float v[4];
      load(i, v);
      store(i, v);
    }
    return;
  }
#pragma unroll 1
  for (int i = thread; 4 * i < end; i += T::kWarpgroup) {
    float v[4];
    int64_t at[4];
    load(i, v);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int mine;
      const int row = width_div.Div(max(4 * i + k - start, 0), &mine);
      const bool is_there = 4 * i + k >= start && 4 * i + k < end;
      at[k] = is_there ? origin + int64_t{row} * q.features + mine : -1;
      if (q.finish && is_there) {
        float one[] = {v[k]};
        Add<Out>(one, q.epilogue.bias, column + mine);
        Add<Out>(one, q.epilogue.residual, at[k]);
        v[k] = one[0];
      }
    }
    if (q.finish) Activate<Out>(v, q.epilogue.activation);
    if (whole) {
      store(i, v);
    } else {
      const Vec<Out, 4> rounded = Round<Out>(v);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (at[k] >= 0) out[at[k]] = rounded.v[k];
    }
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
    if constexpr (!T::kResident) {
      slab.Next(q.slabs);
      ++taken;
    }
    ++tap;
    if (++column < q.window_width) return;
    column = 0;
    if (++line < q.tap_lines) return;
    line = tap = 0;
    if constexpr (T::kResident) {
      strip.parity ^= 1;
    } else {
      strip.Next(2);
    }
  }
};

// Calls f with the number of steps of a slice, as a type: products that nothing stands between run on together.
template <int kMost = UnalignedPlan::kMostSteps, class F>
__device__ __forceinline__ void VisitSteps(int steps, const F& f) {
  if constexpr (kMost > 1) {
    if (steps < kMost) return VisitSteps<kMost - 1>(steps, f);
  }
  f(std::integral_constant<int, kMost>());
}

// The sums of a tile's rows that are the warpgroup's.
template <int kSteps, class T>
__device__ __forceinline__ void MultiplyStrips(const UnalignedParams& q, const UnalignedShared<T>& shared,
                                               int warpgroup, UnalignedCursor<T>& at, SlabCopies<T>& copies,
                                               typename T::Sums& sums) {
  using In = typename T::In;
  const int all = q.groups * q.slices * q.tap_lines * q.window_width;
  // From one step's operands to the next's, in 16 bytes.
  const int step_a = 2 * q.pixels, step_b = 2 * T::kColumns;
  const auto later = [](uint64_t descriptor, uint32_t more) {
    return descriptor >> 32 << 32 | (static_cast<uint32_t>(descriptor) + more);
  };
  int last_strip = -1, last_slab = -1;
  at.Begin();
#pragma unroll 1
  for (int i = 0; i < all; ++i) {
    if (at.tap == 0) hopper::WaitBarrier(shared.StripFull(at.strip.stage), at.strip.parity);
    if constexpr (!T::kResident) hopper::WaitBarrier(shared.SlabFull(at.slab.stage), at.slab.parity);
    const int pixel =
        at.line * q.line_step + at.column * q.dilation[2] + (T::kResident ? 0 : warpgroup * T::kWarpgroupRows);
    const uint64_t a =
        hopper::PlainDescriptor(shared.strips + at.strip.stage * q.strip_bytes + pixel * 16, q.pixels * 16, 128, false);
    const uint64_t b = hopper::PlainDescriptor(shared.slabs + (T::kResident ? at.tap : at.slab.stage) * q.slab_bytes,
                                               T::kColumns * 16, 128, false);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int m = 0; m < T::kBlocks; ++m)
        hopper::Multiply<In, T::kColumns, false, false>(sums[m], later(a, k * step_a + m * 64), later(b, k * step_b),
                                                        i > 0 || k > 0);
    hopper::CommitProducts();
    // A tap's products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (i > 0) {
      if constexpr (!T::kResident) ArriveWarp(shared.SlabEmpty(last_slab));
      if (at.tap == 0) ArriveWarp(shared.StripEmpty(last_strip));
    }
    // The slab before the last one has been read by now.
    if constexpr (!T::kResident) {
      if (threadIdx.x == 0 && !at.First()) copies.Next(q, shared);
      __syncwarp();
    }
    last_slab = at.slab.stage;
    last_strip = at.strip.stage;
    at.Next(q);
  }
  hopper::WaitForProducts<0>();
  if constexpr (!T::kResident) ArriveWarp(shared.SlabEmpty(last_slab));
  ArriveWarp(shared.StripEmpty(last_strip));
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& each : block) asm volatile("" : "+f"(each));
}

template <class T>
__device__ void Consume(const UnalignedParams& q, const UnalignedShared<T>& shared, int warpgroup,
                        const unsigned char* slabs, void* out) {
  using In = typename T::In;
  UnalignedCursor<T> at;
  SlabCopies<T> copies(q, slabs);
  if (threadIdx.x == 0) copies.Begin(q, shared);
  __syncwarp();
  if constexpr (T::kResident) {
    at.strip.stage = warpgroup;
    hopper::WaitBarrier(shared.SlabFull(0), 0);
  }
  const int turns = T::kResident ? UnalignedPlan::kWarpgroups : 1, first = T::kResident ? warpgroup : 0;
  for (int tile = blockIdx.x + first * gridDim.x; tile < q.tiles; tile += turns * gridDim.x) {
    const UnalignedPlace place(q, tile, T());
    typename T::Sums sums;
    VisitSteps(q.steps,
               [&](auto steps) { MultiplyStrips<decltype(steps)::value>(q, shared, warpgroup, at, copies, sums); });
    // Not unrolled, since it holds the code of every activation.
#pragma unroll 1
    for (int m = 0; m < T::kBlocks; ++m) {
      const int row = place.row + (T::kResident ? 0 : warpgroup * T::kWarpgroupRows) + m * 64;
      float* const staged = shared.staged + warpgroup * (q.staged_bytes / 4);
      if (sizeof(In) == 4 || q.wide) {
        StoreRows<T>(q, row, place.column, sums[0], warpgroup, staged, static_cast<float*>(out));
      } else {
        StoreRows<T>(q, row, place.column, sums[0], warpgroup, staged, static_cast<In*>(out));
      }
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
    if (threadIdx.x < T::kConsumers)
      Consume(q, shared, threadIdx.x / T::kWarpgroup, slabs, out);
    else
      ProduceStrips(q, shared, threadIdx.x - T::kConsumers, in);
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& problem, const UnalignedPlan& plan, const void* operand, const void* filter,
                       void* out, void* workspace, const Epilogue& epilogue, cudaStream_t stream) {
  using In = typename T::In;
  const Problem p = AsForward(problem);
  const bool forward = problem.direction == Direction::kForward;
  UnalignedParams q = RowParams(problem, UnalignedRows(p));
  q.epilogue = epilogue;
  q.finish = !IsNone(epilogue);
  q.wide = p.out != p.in;
  q.tiles = int(plan.Tiles());
  q.columns = plan.columns;
  q.column_tiles_div = FastDiv(plan.column_tiles);
  q.width_div[0] = FastDiv(plan.columns);
  q.width_div[1] = FastDiv(p.features - (plan.column_tiles - 1) * plan.columns);
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
  q.staged_bytes = plan.StagedBytes();
  q.slabs = plan.slabs;
  q.slab_bytes = plan.SlabBytes();

  int device = 0, multiprocessors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  const int chunks = int(plan.FilterBytes(p) / 16);
  e = LaunchKernel(ArrangeFilterKernel<In>, CeilDiv(chunks, 256), 256, stream, q, FastDiv(q.slab_bytes / 16),
                   FastDiv(q.tap_lines * q.window_width), FastDiv(q.slices), FastDiv(q.groups), forward,
                   static_cast<const In*>(filter), chunks, static_cast<uint4*>(workspace));
  if (e != cudaSuccess) return e;
  const auto* const begin = static_cast<const In*>(operand);
  const AlignedArray<In> array = {begin, begin + p.images * p.XPixels() * p.channels};
  const Grid grid = {std::min<int64_t>(q.tiles, multiprocessors), T::kThreads, size_t(plan.SharedBytes())};
  return LaunchKernel(UnalignedKernel<T>, grid, stream, q, array, static_cast<const unsigned char*>(workspace), out);
}

}  // namespace

cudaError_t LaunchUnaligned(const Problem& p, const void* operand, const void* filter, void* out, void* workspace,
                            const Epilogue& epilogue, cudaStream_t stream) {
  UnalignedPlan plan;
  if (!plan.Fit(AsForward(p))) return cudaErrorInvalidValue;
  return VisitSingleDType(p.in, [&](auto in) {
    using In = typename decltype(in)::type;
    const auto launch = [&](auto tile) {
      return LaunchTile<typename decltype(tile)::type>(p, plan, operand, filter, out, workspace, epilogue, stream);
    };
    return plan.resident ? launch(TypeTag<UnalignedTile<In, true>>()) : launch(TypeTag<UnalignedTile<In, false>>());
  });
}

}  // namespace jaxdnn::conv
