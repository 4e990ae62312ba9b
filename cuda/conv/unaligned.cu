// Forward convolution and data gradient, without stride, of any numbers of channels and features: what the TMA unit
// cannot read, because lines begin anywhere, on Hopper's tensor cores.
//
// unaligned_plan.h says what rows are. A first kernel packs the operand, every chunk of 16 bytes shifted once to where
// it belongs, and not once for every tap as in data_ragged.cu (unaligned_pack.cu). A tile's strip of pixels comes to
// shared memory chunk by chunk, in bulk copies, so that a tap's operand is that strip from some pixels later on, and
// wgmma reads it in place: its unswizzled operands may begin on any 16 bytes. The same kernel lays the filter out in
// slabs, which are copied as they are; all of it stays where there is room, else they come one by one for each tile.
// The warpgroups take tiles in turn: while one stores, the other multiplies.
//
// A tile's results are as many neighbours as it has rows that are pixels of the result. They go through shared memory,
// and leave in fours.
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/unaligned.cuh"
#include "cuda/conv/unaligned.h"

namespace jaxdnn::conv {
namespace {

// A tile's first row, and column of the result, and whether it has half as many rows.
struct UnalignedPlace {
  int row, column;
  bool is_half;

  template <class T>
  __device__ UnalignedPlace(const UnalignedParams& q, int tile, T) {
    const int row_tile = q.column_tiles_div.Div(tile, &column), further = row_tile - q.whole_tiles;
    is_half = further >= 0;
    row = min(row_tile, q.whole_tiles) * T::kRows + max(further, 0) * (T::kRows / 2);
    column *= q.columns;
  }
};

// The strips of a block's tiles, by a warp: a lane has some of the chunks.
template <class T>
__device__ void ProduceStrips(const UnalignedParams& q, const UnalignedShared<T>& shared, int lane) {
  UnalignedTurn turn;
  for (int tile = blockIdx.x; tile < q.tiles; tile += gridDim.x) {
    const UnalignedPlace place(q, tile, T());
    for (int group = 0; group < q.groups; ++group) {
      const int plane_tap = group / q.plane_groups, line = (group - plane_tap * q.plane_groups) * q.tap_lines;
      for (int slice = 0; slice < q.slices; ++slice) {
        const uint32_t full = shared.StripFull(turn.stage), strip = shared.strips + turn.stage * q.strip_bytes;
        hopper::WaitBarrier(shared.StripEmpty(turn.stage), turn.parity ^ 1);
        if (lane == 0) hopper::ArriveExpecting(full, q.strip_bytes);
        __syncwarp();
        for (int i = lane; i < 2 * q.steps; i += 32)
          CopyPacked(q.packed, q.packed_planes, slice * 2 * q.steps + i, place.row + line * q.line_step, q.pixels,
                     plane_tap * q.dilation[0] - q.pad[0], strip + i * q.pixels * 16, full);
        turn.Next(2);
      }
    }
  }
}

// The filter's slabs, by a thread: all of them once, or those of tile after tile in the order that they are used in.
template <class T>
__device__ void ProduceSlabs(const UnalignedParams& q, const UnalignedShared<T>& shared, const unsigned char* slabs) {
  const int all = q.groups * q.slices * q.tap_lines * q.window_width;
  const auto copy = [&](int stage, int slab, uint32_t barrier) {
    hopper::CopyBulk(shared.slabs + stage * q.slab_bytes, slabs + int64_t{slab} * q.slab_bytes, q.slab_bytes, barrier);
  };
  if constexpr (T::kResident) {
    // Those of the last taps have a barrier together.
    constexpr int kLast = UnalignedPlan::kMostSlabs - 1;
    for (int i = 0; i < all; ++i) {
      const uint32_t full = shared.SlabFull(min(i, kLast));
      if (i <= kLast) hopper::ArriveExpecting(full, (i < kLast ? 1 : all - kLast) * q.slab_bytes);
      copy(i, i, full);
    }
  } else {
    UnalignedTurn turn;
    for (int tile = blockIdx.x; tile < q.tiles; tile += gridDim.x) {
      int column_tile;
      q.column_tiles_div.Div(tile, &column_tile);
      for (int i = 0; i < all; ++i) {
        hopper::WaitBarrier(shared.SlabEmpty(turn.stage), turn.parity ^ 1);
        hopper::ArriveExpecting(shared.SlabFull(turn.stage), q.slab_bytes);
        copy(turn.stage, column_tile * all + i, shared.SlabFull(turn.stage));
        turn.Next(q.slabs);
      }
    }
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
  UnalignedTurn strip, slab;
  int tap, line, column;  // of the strip

  __device__ void Begin() { tap = line = column = 0; }
  __device__ void Next(const UnalignedParams& q) {
    if constexpr (!T::kResident) slab.Next(q.slabs);
    ++tap;
    if (++column < q.window_width) return;
    column = 0;
    if (++line < q.tap_lines) return;
    line = tap = 0;
    strip.Next(2);
  }
  // A tile that is the other warpgroup's.
  __device__ void SkipTile(const UnalignedParams& q) {
    strip.Skip(q.groups * q.slices, 2);
    if constexpr (!T::kResident) slab.Skip(q.groups * q.slices * q.tap_lines * q.window_width, q.slabs);
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

// The sums of a tile's rows that are the warpgroup's: of some blocks of 64.
template <int kSteps, int kBlocks, class T>
__device__ __forceinline__ void MultiplyStrips(const UnalignedParams& q, const UnalignedShared<T>& shared,
                                               int warpgroup, UnalignedCursor<T>& at, typename T::Sums& sums) {
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
    hopper::WaitBarrier(shared.SlabFull(T::kResident ? min(at.tap, UnalignedPlan::kMostSlabs - 1) : at.slab.stage),
                        T::kResident ? 0 : at.slab.parity);
    if (i + 1 == all) ArriveWarp(shared.Turn(1 - warpgroup));
    const int pixel = at.line * q.line_step + at.column * q.dilation[2];
    const uint64_t a =
        hopper::PlainDescriptor(shared.strips + at.strip.stage * q.strip_bytes + pixel * 16, q.pixels * 16, 128, false);
    const uint64_t b = hopper::PlainDescriptor(shared.slabs + (T::kResident ? at.tap : at.slab.stage) * q.slab_bytes,
                                               T::kColumns * 16, 128, false);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
        hopper::Multiply<In, T::kColumns, false, false>(sums[m], later(a, k * step_a + m * 64), later(b, k * step_b),
                                                        i > 0 || k > 0);
    hopper::CommitProducts();
    // A tap's products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (i > 0) {
      if constexpr (!T::kResident) ArriveWarp(shared.SlabEmpty(last_slab));
      if (at.tap == 0) ArriveWarp(shared.StripEmpty(last_strip));
    }
    last_slab = at.slab.stage;
    last_strip = at.strip.stage;
    at.Next(q);
  }
  hopper::WaitForProducts<0>();
  if constexpr (!T::kResident) ArriveWarp(shared.SlabEmpty(last_slab));
  ArriveWarp(shared.StripEmpty(last_strip));
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (float& each : sums[m]) asm volatile("" : "+f"(each));
}

template <class T>
__device__ void Consume(const UnalignedParams& q, const UnalignedShared<T>& shared, int warpgroup, void* out) {
  using In = typename T::In;
  UnalignedCursor<T> at;
  // The warpgroups take tiles in turn: while one stores, the other multiplies.
  for (int tile = blockIdx.x, number = 0; tile < q.tiles; tile += gridDim.x, ++number) {
    if (number % 2 != warpgroup) {
      at.SkipTile(q);
      continue;
    }
    const UnalignedPlace place(q, tile, T());
    typename T::Sums sums = {};
    hopper::WaitBarrier(shared.Turn(warpgroup), (number / 2 + (warpgroup == 0)) % 2);
    const int blocks = place.is_half ? 1 : T::kBlocks;
    VisitSteps(q.steps, [&](auto steps) {
      if (place.is_half)
        MultiplyStrips<decltype(steps)::value, 1>(q, shared, warpgroup, at, sums);
      else
        MultiplyStrips<decltype(steps)::value, T::kBlocks>(q, shared, warpgroup, at, sums);
    });
    // Not unrolled, since it holds the code of every activation.
#pragma unroll 1
    for (int m = 0; m < blocks; ++m) {
      const int row = place.row + m * 64;
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
    UnalignedKernel(const __grid_constant__ UnalignedParams q, const unsigned char* slabs, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const UnalignedShared<T> shared(q, memory);
    shared.Init();
    if (threadIdx.x < T::kConsumers)
      Consume(q, shared, threadIdx.x / T::kWarpgroup, out);
    else if (threadIdx.x < T::kConsumers + 32)
      ProduceStrips(q, shared, threadIdx.x % 32);
    else if (threadIdx.x == T::kConsumers + 32)
      ProduceSlabs(q, shared, slabs);
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const UnalignedPlan& plan, const void* operand, const void* filter, void* out,
                       void* workspace, bool forward, const Epilogue& epilogue, cudaStream_t stream) {
  using In = typename T::In;
  UnalignedParams q = RowParams(p, plan);
  q.epilogue = epilogue;
  q.finish = !IsNone(epilogue);
  q.wide = p.out != p.in;
  q.tiles = int(plan.Tiles());
  q.whole_tiles = int(plan.whole_tiles);
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
  auto* const slabs = static_cast<unsigned char*>(workspace);
  const Packing packing = {operand,          p.images * p.x[0],          0,          p.images * p.x[0],
                           {p.x[1], p.x[2]}, {p.pad[1], p.pad[2]},       p.channels, plan.Chunks(),
                           plan.pixels,      slabs + plan.FilterBytes(p)};
  q.packed = RowsOf(packing, plan);
  q.packed_planes = PlanesOf(p, plan);
  const FilterPacking filter_packing = {filter,
                                        slabs,
                                        int(plan.FilterBytes(p) / 16),
                                        FastDiv(q.slab_bytes / 16),
                                        FastDiv(q.tap_lines * q.window_width),
                                        FastDiv(q.slices),
                                        FastDiv(q.groups),
                                        forward,
                                        int(p.Taps()),
                                        q.channels,
                                        q.features,
                                        q.columns};
  e = PackRows(plan, p.in, &packing, nullptr, filter_packing, stream);
  if (e != cudaSuccess) return e;
  const Grid grid = {std::min<int64_t>(q.tiles, multiprocessors), T::kThreads, size_t(plan.SharedBytes())};
  return LaunchKernel(UnalignedKernel<T>, grid, stream, q, slabs, out);
}

}  // namespace

cudaError_t LaunchUnaligned(const Problem& problem, const void* operand, const void* filter, void* out, void* workspace,
                            const Epilogue& epilogue, cudaStream_t stream) {
  const Problem all = AsForward(problem);
  Problem p = UnalignedPart(all);
  const bool forward = problem.direction == Direction::kForward;
  const auto launch = [&](auto tile, const UnalignedPlan& plan, int64_t image) {
    const auto later = [&](const void* array, int64_t pixels, int64_t channels, DType type) {
      return array == nullptr ? nullptr
                              : static_cast<const char*>(array) + image * pixels * channels * int64_t(SizeOf(type));
    };
    Epilogue mine = epilogue;
    mine.residual = later(epilogue.residual, p.YPixels(), p.features, p.out);
    return LaunchTile<typename decltype(tile)::type>(
        p, plan, later(operand, p.XPixels(), p.channels, p.in), filter,
        const_cast<void*>(static_cast<const void*>(later(out, p.YPixels(), p.features, p.out))), workspace, forward,
        mine, stream);
  };
  for (int64_t image = 0; image < all.images; image += p.images) {
    p.images = std::min(p.images, all.images - image);
    UnalignedPlan plan(p);
    if (!plan.Fit(p)) return cudaErrorInvalidValue;
    const cudaError_t e = VisitSingleDType(p.in, [&](auto in) {
      using In = typename decltype(in)::type;
      return plan.resident ? launch(TypeTag<UnalignedTile<In, true>>(), plan, image)
                           : launch(TypeTag<UnalignedTile<In, false>>(), plan, image);
    });
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace jaxdnn::conv
