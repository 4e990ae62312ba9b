// Filter gradient on Hopper's tensor cores.
//
// The result's rows are units of a line of channels of one tap, so that a tile's rows may belong to several taps, which
// read the same pixels of y. A step of the reduction is as many pixels as a line has channels: of x one im2col load for
// every unit, at its tap's offset, and of y a box of pixels. Both are MN-major: channels are what lies next to each
// other. Who loads them filter_produce.cuh says, how the work is shared out, filter_spans.cuh, and what becomes of
// shared tiles, filter_pieces.cuh.
//
// wgmma takes MN-major operands of 16 bits only. Of floats it gets x from registers, which can be read from shared
// memory in any order, and y K-major: from the workspace, where another kernel has left it so, or from its stage, where
// two warps have transposed it (filter_together.cuh).
#include "cuda/conv/filter_produce.cuh"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_plan.h"

namespace jaxdnn::conv {
namespace {

// With yt[k][i] = y[pixel][k], of every eight pixels the even ones first: so terms l % 4 and l % 4 + 4 of x, which one
// thread has, are two neighbouring pixels, and the threads of a warp meet in no bank. Zeros after the last pixel.
constexpr int kSide = 32;
__global__ void __launch_bounds__(256) TransposeKernel(const float* y, float* yt, int64_t pixels, int features) {
  __shared__ float tile[kSide][kSide + 1];
  const int64_t pixel = blockIdx.x * int64_t{kSide};
  const int feature = blockIdx.y * kSide, lane = threadIdx.x % kSide, warp = threadIdx.x / kSide;
  const int64_t pitch = gridDim.x * int64_t{kSide};
  for (int i = warp; i < kSide; i += 256 / kSide)
    tile[i][lane] = pixel + i < pixels && feature + lane < features ? y[(pixel + i) * features + feature + lane] : 0;
  __syncthreads();
  const int from = lane / 8 * 8 + lane % 4 * 2 + lane % 8 / 4;
  for (int i = warp; i < kSide && feature + i < features; i += 256 / kSide)
    yt[(feature + i) * pitch + pixel + lane] = tile[from][i];
}

// Calls f with the result, of its type.
template <class T, class F>
__device__ void WithOut(const FilterWgmmaParams& p, const F& f) {
  if (kFloats<T> || p.wide)
    f(static_cast<float*>(p.out));
  else
    f(static_cast<typename T::In*>(p.out));
}

// By a warpgroup that has so many 64 rows of a tile: the first ones, or the last.
template <class T, int kBlocks>
__device__ void Consume(const FilterWgmmaParams& p, Ring<T> ring, int warpgroup) {
  using Own = WgmmaTile<typename T::In, kBlocks * 64, T::kColumns>;
  const int first = warpgroup == 0 ? 0 : T::kBlocks - kBlocks;
  int number = 0;
  for (Pieces piece(p.spans); piece.Next(); ++number) {
    if (!kTogether<T> && number % 2 != warpgroup) {
      ring.Skip(piece.steps);
      continue;
    }
    typename Own::Sums sums;
    if constexpr (kFloats<T>)
      MultiplyHeldStages<T>(ring, piece.steps, warpgroup, p.turns, sums);
    else if constexpr (kTogether<T>)
      MultiplyStagesTogether<T, true, true>(ring, piece.steps, first, sums);
    else
      MultiplyStages<T, true, true>(ring, piece.steps, number, sums);
    if (!piece.whole || p.leaves) {
      LeavePiece<T>(p.pieces + p.spans.Slot(piece.block, piece.tile) * kTileFours<T>, first, sums);
      continue;
    }
    const FilterTilePlace place(p, piece.tile, T());
    WithOut<T>(p, [&](auto* out) {
      StoreSums<Own>(sums, out + place.column, p.rows.columns - place.column,
                     [&](int row) { return p.rows.Begin<T::kLine>(place, place.row + first * 64 + row); });
    });
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) FilterWgmmaKernel(const __grid_constant__ FilterWgmmaParams p) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring<T> ring(shared);
    // A patcher arrives for each unit, and stands in for the producer of x.
    if (p.patched)
      ring.Init(kTogether<T> ? kConsumers : 1, kProducers - 1 + kPatchers * FilterUnits<T>::kCount);
    else
      ring.Init(kTogether<T> ? kConsumers : 1, kProducers, kTurners * 32);
    RunRoles<kProducers, 72>(
        [&](int which) {
          if (which == 1) return ProduceY<T>(p, ring);
          if (p.x_in_boxes) return ProduceXBoxes<T>(p, ring);
          hopper::VisitDimensions(p.dimensions, [&](auto d) { ProduceX<T, decltype(d)::value>(p, ring); });
        },
        [&](int warpgroup) {
          constexpr int kMost = kTogether<T> ? (T::kBlocks + 1) / 2 : T::kBlocks;
          if constexpr (kTogether<T> && kMost != T::kBlocks / 2) {
            if (warpgroup == 1) return Consume<T, T::kBlocks / 2>(p, ring, warpgroup);
          }
          Consume<T, kMost>(p, ring, warpgroup);
        },
        [&](int warp) { Help<T>(p, ring, warp); });
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const Config& config, const void* x, const void* y, void* out, void* workspace,
                       cudaStream_t stream) {
  FilterWgmmaParams q = {};
  TapSet sets[kMaxMaps];
  const int count = MapTaps(p, sets, config.edges);
  if (count == 0) return cudaErrorInvalidValue;
  q.by_sets = count > 1;
  q.dimensions = sets[0].x.dimensions;
  const TileShape t = {config.tile, "", Unit::kWgmma, T::kRows, T::kColumns, T::kThreads};
  const FilterShape shape = FilterShapeOf(p, t, config.edges);
  const int64_t features = p.groups * p.features, channels = p.groups * p.channels;
  const int64_t column_tiles = CeilDiv(features, T::kColumns);
  q.rows = FilterRows(p, sets, count, T::kLine);
  q.group = FastDiv(p.features);
  q.plane = FastDiv(p.window[1] * p.window[2]);
  q.line = FastDiv(p.window[2]);
  for (int d = 0; d < kRank; ++d) q.distance[d] = int(p.rhs_dilation[d]);
  int64_t row_tiles[kMaxMaps];
  for (int i = 0; i < count; ++i) {
    q.set[i] = MappedSet(sets[i], T::kDepth);
    row_tiles[i] = shape.sets[i].tiles / p.batch / column_tiles;
  }
  q.grid = TileGrid(row_tiles, count, column_tiles);
  q.spans = Spans(shape.sets, count, config.blocks, shape.Slots(config.blocks));
  const int64_t pixels = p.images * p.YPixels();
  q.x_in_boxes = ReadsXAsItLies(p);
  cudaError_t e =
      q.x_in_boxes ? EncodeBoxes(&q.x[0], p.in, x, {channels, pixels, p.batch}, {T::kLine, T::kDepth, 1}, !T::kTripled)
                   : cudaSuccess;
  for (int i = 0; !q.x_in_boxes && i < count && e == cudaSuccess; ++i)
    e = EncodePixels(&q.x[i], p.in, x, p.batch * p.images, p.x, channels, sets[i].x, T::kDepth, !T::kTripled);
  for (int i = 0; q.by_sets && i < count && e == cudaSuccess; ++i)
    e = EncodePixels(&q.y[i], p.in, y, p.images, p.y, features, sets[i].y, T::kDepth, !T::kTripled);
  auto* left = static_cast<float*>(workspace);
  q.turns = kFloats<T> && !config.copies;
  if (kFloats<T> && !q.turns) {
    const int64_t pitch = shape.sets[0].steps * T::kDepth;
    auto* yt = left;
    left += pitch * p.features;
    const Grid grid = {shape.sets[0].steps, 256, 0, 1, CeilDiv(p.features, kSide)};
    if (e == cudaSuccess)
      e = LaunchKernel(TransposeKernel, grid, stream, static_cast<const float*>(y), yt, pixels, int(p.features));
    if (e == cudaSuccess) e = EncodeBoxes(&q.y[0], p.in, yt, {pitch, p.features, 1}, {T::kLine, T::kDepth, 1});
  } else if (e == cudaSuccess && !q.by_sets) {
    e = EncodeBoxes(&q.y[0], p.in, y, {features, pixels, p.batch}, {T::kLine, T::kDepth, 1}, !T::kTripled);
  }
  q.images = int(p.images);
  if (HasFrame(p) && kFloats<T>) return cudaErrorInvalidValue;
  if (e == cudaSuccess && HasFrame(p)) e = MakePatches(p, x, T::kLine, &q.patches);
  q.patched = HasFrame(p);
  if (e != cudaSuccess) return e;
  q.pieces = reinterpret_cast<float4*>(left);
  q.leaves = shape.left;
  q.out = out;
  q.wide = p.out != p.in;
  e = LaunchPersistent<T>(FilterWgmmaKernel<T>, config.blocks, 1, stream, q);
  if (e != cudaSuccess || q.spans.slots == 0) return e;
  const PieceTiles tiles = {FastDiv(T::kColumns / 8), q.grid, int(shape.tiles), T::kRows, T::kColumns};
  return SumPieces<typename T::In>(p, shape.left, q.spans, q.rows, tiles, q.pieces, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                              void* workspace, cudaStream_t stream) {
  const auto with_type = [&](auto in) {
    using In = typename decltype(in)::type;
    const auto launch = [&](auto tile) {
      // Of floats a warpgroup has 64 rows, since 128 are too many registers.
      using T = typename decltype(tile)::type;
      if constexpr (kFloats<T> ? T::kRows != 128 : T::kRows == 128 && T::kColumns == 160)
        return cudaErrorInvalidValue;
      else
        return LaunchTile<T>(p, config, x, y, out, workspace, stream);
    };
    if (p.Tripled()) {
      if (config.tile == Tile::kWgmma128x128) return launch(TypeTag<FilterTile<float, 128, 128, true>>());
      if (config.tile == Tile::kWgmma128x64) return launch(TypeTag<FilterTile<float, 128, 64, true>>());
      return cudaErrorInvalidValue;
    }
    switch (config.tile) {
      case Tile::kWgmma128x128:
        return launch(TypeTag<FilterTile<In, 128, 128>>());
      case Tile::kWgmma256x64:
        return launch(TypeTag<FilterTile<In, 256, 64>>());
      case Tile::kWgmma128x64:
        return launch(TypeTag<FilterTile<In, 128, 64>>());
      case Tile::kWgmma64x128:
        return launch(TypeTag<FilterTile<In, 64, 128>>());
      case Tile::kWgmma64x64:
        return launch(TypeTag<FilterTile<In, 64, 64>>());
      case Tile::kWgmma128x160:
        return launch(TypeTag<FilterTile<In, 128, 160>>());
      case Tile::kWgmma128x256:
        return launch(TypeTag<FilterTile<In, 128, 256>>());
      case Tile::kWgmma256x128:
        return launch(TypeTag<FilterTile<In, 256, 128>>());
      case Tile::kWgmma192x128:
        return launch(TypeTag<FilterTile<In, 192, 128>>());
      case Tile::kWgmma192x160:
        return launch(TypeTag<FilterTile<In, 192, 160>>());
      case Tile::kWgmma256x160:
        return launch(TypeTag<FilterTile<In, 256, 160>>());
      default:
        return cudaErrorInvalidValue;
    }
  };
  return p.in == DType::kF32    ? with_type(TypeTag<float>())
         : p.in == DType::kBF16 ? with_type(TypeTag<__nv_bfloat16>())
                                : with_type(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
