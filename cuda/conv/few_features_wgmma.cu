// Forward convolution of few features, also over a dilated input, and data gradients of few channels, on Hopper's
// tensor cores.
//
// As in few_features.cu a block goes down the lines of its pixels, those of all images side by side, with open sums of
// all lines of the window in registers. But a product's rows are cells of the result: what a pixel of the operand has
// between it and the next, as the stride has it. Its columns are a cell's results in all lines that the pixel's line
// adds to, and its terms the channels of the pixels that add to the cell. These are neighbours, and the operand of the
// next is the same one, read from a row later: so a pixel is in shared memory once, and sums are never added across.
//
// Of a 7x7 window with stride 2 on three channels a cell's results are 2x2x3 in 4 lines of cells, 48 columns, and its
// terms those of 4 pixels: 12288 products for the 9408 that there are. What is beside the window are zeros. They do
// not make up for an infinity, so that results that are NaN are computed again in the end.
#include "cuda/conv/few_features.h"
#include "cuda/conv/few_features_open.cuh"

namespace jaxdnn::conv {
namespace {

template <class T>
__device__ __forceinline__ void Produce(const OpenParams& q, const OpenShared& shared) {
  int first, end;
  const int problem = q.work.Of(blockIdx.x, &first, &end);
  hopper::RingPlace ring;
  while (first < end) {
    const OpenBlock block(q, first, end);
    first += block.end_cell - block.first_cell;
    int place, at[3] = {};
    const int image = q.places.Div(block.first_place, &place) + problem * q.images;
    at[2] = place + q.lower_w;
    at[1] = image;
    if (q.dimensions == 3) {
      at[0] = q.planes.Div(image, &at[1]);
      at[1] += q.lower_d;
    }
#pragma unroll 1
    for (int line = block.first_line; line < block.end_line; ++line)
#pragma unroll 1
      for (int plane = 0; plane < q.window_planes; ++plane)
#pragma unroll 1
        for (int slice = 0; slice < q.slices; ++slice) {
          hopper::WaitBarrier(shared.Empty(ring.stage), ring.parity ^ 1);
          hopper::ArriveExpecting(shared.Full(ring.stage), q.stage_bytes);
          const auto load = [&](auto dimensions) {
            hopper::LoadPixels<decltype(dimensions)::value>(shared.stages + ring.stage * q.stage_pitch, &q.operand,
                                                            shared.Full(ring.stage), slice * q.line_bytes / 2, at, line,
                                                            {0, plane, 0});
          };
          if (q.dimensions == 3)
            load(std::integral_constant<int, 3>());
          else
            load(std::integral_constant<int, 2>());
          ring.Next(q.stages);
        }
  }
}

// sums += the products of a line's pixels, from the warpgroup's first row on, of all planes and slices. The last
// stage's are still under way.
template <class T>
__device__ __forceinline__ void MultiplyLine(const OpenParams& q, const OpenShared& shared, uint32_t rows,
                                             uint32_t columns, hopper::RingPlace& ring, typename T::Sums& sums) {
  constexpr int kAtOnce = FewOpenPlan::kAtOnce;
  constexpr uint32_t kHigh = 0xc0000000 | 8 * kFilterLine >> 4;
  int before = -1;
#pragma unroll 1
  for (int i = 0; i < q.line_stages; ++i) {
    hopper::WaitBarrier(shared.Full(ring.stage), ring.parity);
    // After a shuffle the compiler knows that they are the same in all of a warp, as wgmma wants them; of one alone.
    const uint32_t both = __shfl_sync(~0u, (rows + ring.stage * (q.stage_pitch >> 4)) | columns << 16, 0);
    const uint32_t row = both & 0xffff, column = both >> 16;
    columns += 2 * q.steps * T::kColumns;
#pragma unroll 1
    for (int step = 0; step < q.steps; step += kAtOnce) {
      hopper::BeginProducts();
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        hopper::Multiply<typename T::In, T::kColumns, false, false>(
            sums, uint64_t{q.rows_high} << 32 | (row + 2 * k + 2 * step),
            uint64_t{kHigh} << 32 | (column + 2 * k * T::kColumns + 2 * T::kColumns * step), true);
      hopper::CommitProducts();
    }
    if (i > 0) {
      hopper::WaitForProducts<1>();
      hopper::ArriveOnce(shared.Empty(before));
    }
    before = ring.stage;
    ring.Next(q.stages);
  }
}

// The next line of cells comes first. Of lines that the window does not have there are zeros, or NaN, as of columns.
template <class T>
__device__ __forceinline__ void NextCells(typename T::Sums& sums, typename T::Done& done) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Where a pixel's sums are among a thread's.
    const auto at = [&](int i) { return i / 2 * 4 + half * 2 + i % 2; };
#pragma unroll
    for (int k = 0; k < T::kEach; ++k) done[half * T::kEach + k] = sums[at(k)];
#pragma unroll
    for (int i = 0; i < T::kColumns / 4; ++i) sums[at(i)] = i + T::kEach < T::kColumns / 4 ? sums[at(i + T::kEach)] : 0;
  }
  hopper::Settle(done);
  hopper::Settle(sums);
}

template <class T>
__device__ __forceinline__ void Consume(const OpenParams& q, const OpenShared& shared, int warpgroup, void* out) {
  using In = typename T::In;
  int first, end;
  const int problem = q.work.Of(blockIdx.x, &first, &end);
  FillColumns<T>(q, static_cast<const In*>(q.filter) + problem * q.filter_problem, shared.filter);
  hopper::ShowSharedToTma();
  OpenCells<T> cells(q, shared, problem);
  void* const to = static_cast<char*>(out) + problem * q.out_problem * (q.wide ? sizeof(float) : sizeof(In));
  const uint32_t rows = (shared.stages + warpgroup * 64 * q.line_bytes) >> 4, columns = shared.filter >> 4;
  hopper::SyncThreads(1, q.multipliers);
  hopper::RingPlace ring;
#pragma unroll 1
  while (first < end) {
    const OpenBlock block(q, first, end);
    first += block.end_cell - block.first_cell;
    cells.Place(q, block.first_place);
    typename T::Sums sums = {};
    typename T::Done done = {};
    const auto store = [&](int line) {
      if (line >= block.first_cell) cells.Store(q, done, line * q.stride_h - q.before_h, to);
    };
    int line = block.first_line;
#pragma unroll 1
    for (; line < block.end_line; ++line) {
      MultiplyLine<T>(q, shared, rows, columns, ring, sums);
      store(line - 1);
      hopper::WaitForSums(sums);
      hopper::ArriveOnce(shared.Empty(ring.stage == 0 ? q.stages - 1 : ring.stage - 1));
      NextCells<T>(sums, done);
    }
    // Cells after all of the operand. With the same registers the compiler would wait for each product.
    typename T::Sums rest;
    memcpy(rest, sums, sizeof(rest));
    hopper::Settle(rest);
#pragma unroll 1
    for (; line <= block.end_cell; ++line) {
      store(line - 1);
      NextCells<T>(rest, done);
    }
    if (__any_sync(~0u, cells.not_finite != 0)) {
      const int first_place = block.first_place + threadIdx.x / 32 * 16;
      RepairCells<In>(q, problem, first_place, block.first_cell, block.end_cell, out);
      cells.not_finite = 0;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kMostThreads) FewOpenKernel(const __grid_constant__ OpenParams q, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const OpenShared shared(q, memory);
    if (threadIdx.x == 0) {
      for (int i = 0; i < q.stages; ++i) {
        hopper::InitBarrier(shared.Full(i), 1);
        hopper::InitBarrier(shared.Empty(i), q.multipliers / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
    if (threadIdx.x < q.multipliers)
      Consume<T>(q, shared, __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), out);
    else if (hopper::IsElected())
      Produce<T>(q, shared);
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& problem, const FewOpenPlan& plan, const void* operand, const void* filter,
                       void* out, const Epilogue& epilogue, cudaStream_t stream) {
  const Problem p = AsForward(problem);
  const FewAxis &lines = plan.lines, &columns = plan.columns;
  OpenParams q = {};
  q.epilogue = epilogue;
  q.from = operand;
  q.filter = filter;
  q.mirrored = problem.direction == Direction::kDataGradient;
  q.least = epilogue.activation.kind == activation::Kind::kRelu ? 0 : -INFINITY;
  q.wide = p.out != p.in;
  q.pairs = plan.pairs && IsNone(epilogue) && !q.wide && reinterpret_cast<uintptr_t>(out) % 4 == 0;
  q.images = int(p.images * p.y[0]);
  q.height = int(p.x[1]);
  q.result_height = int(p.y[1]);
  q.result_width = int(p.y[2] * p.features);
  q.features = int(p.features);
  q.channels = int(p.channels);
  q.window_planes = int(p.window[0]);
  q.window_height = int(p.window[1]);
  q.window_width = int(p.window[2]);
  q.after = int(plan.after);
  q.stride_h = int(lines.stride);
  q.stride_w = int(columns.stride);
  q.reach_h = int(lines.reach);
  q.reach_w = int(columns.reach);
  q.first_cell_h = int(lines.first_cell);
  q.first_cell_w = int(columns.first_cell);
  q.before_h = int(lines.before);
  q.before_w = int(columns.before * p.features);
  q.cell = int(plan.cell);
  q.cell_columns = int(plan.CellColumns(p));
  q.multipliers = plan.blocks.warpgroups * kWarpgroup;
  q.cells = plan.blocks.Pixels();
  q.staged_div = FastDiv(16 * q.cell_columns / (q.pairs ? 2 : 1));
  q.line_bytes = int(plan.line_bytes);
  q.steps = int(plan.pixels * plan.line_bytes / kFilterLine);
  q.line_stages = int(plan.slices * plan.planes);
  q.rows_high = (q.line_bytes == 128 ? 1u : q.line_bytes == 64 ? 2u : 3u) << 30 | 8 * q.line_bytes >> 4;
  q.steps_div = FastDiv(plan.line_bytes / kFilterLine);
  q.pixels_div = FastDiv(plan.pixels);
  q.slices_div = FastDiv(plan.slices);
  q.slices = int(plan.slices);
  q.stage_pitch = int(plan.StageBytes());
  q.stage_bytes = int(plan.Rows() * plan.line_bytes);
  q.stages = int(plan.stages);
  q.filter_bytes = int(plan.FilterBytes());
  q.staged_line = int(plan.StagedLine(p));
  q.pad_d = int(p.pad[0]);
  q.depth = int(p.x[0]);
  q.width = int(p.x[2]);
  const bool volume = p.x[0] != 1 || p.y[0] != 1 || p.window[0] != 1;
  q.dimensions = volume ? 3 : 2;
  q.lower_w = int(columns.first_cell - (columns.reach - 1));
  q.lower_d = int(-p.pad[0]);
  q.places = FastDiv(plan.Places());
  q.planes = FastDiv(p.y[0]);
  q.column_div = FastDiv(q.cell_columns);
  q.features_div = FastDiv(p.features);
  q.filter_problem = p.Taps() * p.channels * p.features;
  q.out_problem = p.images * p.YPixels() * p.features;

  const int64_t plane = p.x[1] * p.x[2];
  PixelMap map = {q.dimensions, {}, {}, {1, 1, 1}};
  map.lower[2] = q.lower_w;
  map.upper[2] = int(q.lower_w + plan.Places() - p.x[2]);
  if (volume) {
    map.lower[1] = q.lower_d;
    map.upper[1] = int(p.y[0] - p.pad[0] - p.x[0]);
  }
  const int64_t all_images = p.batch * p.images;
  const int64_t extent[] = {volume ? all_images : 1, volume ? p.x[0] : all_images, p.x[2]};
  // Lines are its images, for it goes over pixels of all images of a line.
  cudaError_t e = EncodePixels(&q.operand, p.in, operand, p.x[1], extent, {p.x[2], p.x[0] * plane, plane, 1},
                               p.channels, map, int(plan.Rows()), true, q.line_bytes);
  if (e != cudaSuccess) return e;

  const auto kernel = FewOpenKernel<T>;
  Grid grid = {0, q.multipliers + 32, size_t(q.stages * q.stage_pitch + q.filter_bytes + plan.BesideBytes(p))};
  int64_t resident;
  if (e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  q.work = FewFeaturesWork(FewFeaturesPieces(plan.tiles, lines, resident, p.batch), lines.cells);
  grid.blocks = q.work.workers.divisor * p.batch;
  return LaunchKernel(kernel, grid, stream, q, out);
}

template <class In, int kShape>
cudaError_t LaunchShape(const Problem& problem, const FewOpenPlan& plan, const void* operand, const void* filter,
                        void* out, const Epilogue& epilogue, cudaStream_t stream) {
  if (kShape == plan.shape)
    return LaunchTile<OpenTile<In, kShape>>(problem, plan, operand, filter, out, epilogue, stream);
  if constexpr (kShape > 0) return LaunchShape<In, kShape - 1>(problem, plan, operand, filter, out, epilogue, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchFewFeaturesWgmma(const Problem& p, const void* operand, const void* filter, void* out,
                                   const Epilogue& epilogue, cudaStream_t stream) {
  FewOpenPlan plan;
  const auto kind = epilogue.activation.kind;
  if (epilogue.residual != nullptr || (kind != activation::Kind::kIdentity && kind != activation::Kind::kRelu) ||
      !IsVectorAligned(operand, filter) || !plan.Fit(AsForward(p)))
    return LaunchFewFeatures(p, operand, filter, out, epilogue, stream);
  constexpr int kLast = int(std::size(kFewOpenShapes)) - 1;
  if (p.in == DType::kF16) return LaunchShape<__half, kLast>(p, plan, operand, filter, out, epilogue, stream);
  return LaunchShape<__nv_bfloat16, kLast>(p, plan, operand, filter, out, epilogue, stream);
}

}  // namespace jaxdnn::conv
