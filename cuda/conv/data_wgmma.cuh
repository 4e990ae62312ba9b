// Hopper's forward convolution and data gradient: what its kernel is told, and how its sums are stored.
#pragma once

#include <algorithm>

#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma_held.cuh"
#include "cuda/conv/wgmma_patch.cuh"
#include "cuda/conv/wgmma_place.cuh"
#include "cuda/conv/wgmma_plan.h"
#include "cuda/conv/wgmma_team.cuh"

namespace jaxdnn::conv {

// First what all threads begin with, in few of the constant cache's lines.
struct WgmmaParams {
  int tiles, columns;      // those of taps too
  bool in_order;           // each block has tiles of its own, one number of blocks after the other
  bool patched;            // `patches` has some
  bool scattered;          // the rows of a phase are not neighbours in the result
  bool lattices;           // but 64 of them, of a line of one tap's columns, are a box there,
  bool columns_of_pixels;  // or any of one phase are pixels that the unit goes over
  bool boxes;              // the result is of the operands' type
  bool by_pixels;          // something of a tile's rows is stored or read by their pixels in the result
  bool plain;              // the sums are stored as they are
  bool alternates;         // the direction in which blocks go over the tiles
  bool halved;             // tiles of an odd number of half lines of features begin with one, whose box is `halves`
  FastDiv run;             // lines of channels of a tap that follow one another: all, or one
  FastDiv group;           // columns of one, whose channels begin so many later
  int group_channels;
  int residual_lines;  // that come through the ring for each tile (wgmma_finish.cuh)
  WgmmaRow in_row;
  FastDiv team;            // blocks that share a tile
  FastDiv two_rows;        // tiles of two rows of them, if two rows are gone over together
  int biases;              // columns that have one of their own; others have that of as many columns before
  int planes, rest_plane;  // of the filter, one for each tap of all problems; or two, of which rests' begin with this
  int images, all_images;  // of a problem, and of all
  int first_tile[kMaxMaps + 1];  // of each phase, in tiles of rows
  int window[kRank], out[kRank];
  WgmmaPhase phase[kMaxMaps];
  CUtensorMap operand[kMaxMaps], result[kMaxMaps], filter, residual;
  CUtensorMap halves;  // of lines of the filter's features, if those are whole ones
  Patches patches;
  Epilogue epilogue;
};

// Clusters are dealt out in turn to the device's eight groups of multiprocessors, of which each gets from the L2 cache
// once what several of it ask for at the same time. So eight clusters in turn take four columns of two rows of tiles,
// and a group's tiles are of few rows and few columns.
constexpr int kTogetherColumns = 4;

// Whether rows are wgmma's columns (wgmma_across.cuh).
template <class T>
constexpr bool kIsAcross = false;

// Whether the steps of a tile are all taps of a line of channels before the next line, which brings the pixels that
// taps have in common from the L2 cache, where one tap after the other goes over the operand as often as there are
// taps. What is read again that way must be much: small operands stay in the cache, and there it is better to read
// neighbouring lines at a time. Fitted to an H100. Pixels of a frame are found once for each tap.
inline bool TapsComeFirst(const Problem& p) {
  constexpr double kMuch = 60e6;  // bytes
  const double images = double(p.batch) * p.images, pixel_bytes = double(p.DepthChannels()) * SizeOf(p.in);
  const double operand = images * (p.direction == Direction::kForward ? p.XPixels() : p.YPixels());
  return !HasFrame(p) && (images * p.YPixels() * p.Taps() - operand) * pixel_bytes > kMuch;
}

// All but how the filter is read. Where phases are alike, and sums are stored as they are, taps may be columns.
template <class T>
cudaError_t SetParams(const Problem& p, const Config& config, const Epilogue& epilogue, bool taps_may_be_columns,
                      bool taps_may_come_first, const void* operand, void* out, WgmmaParams* to) {
  WgmmaParams& q = *to;
  q = {};
  q.epilogue = epilogue;
  q.team = FastDiv(config.cluster);
  MappedPhase mapped[kMaxMaps];
  const int phases = MapPhases(p, mapped, config.edges);
  if (phases == 0) return cudaErrorInvalidValue;
  const bool forward = p.direction == Direction::kForward;
  const int64_t columns = GemmOf(p).columns * p.groups;
  q.boxes = p.out == p.in;
  q.plain = IsNone(epilogue);
  const bool taps = taps_may_be_columns && q.boxes && q.plain && p.batch == 1 && TapsAreColumns(p, phases, mapped[0]);
  q.in_row = WgmmaRow(columns, T::kColumns, mapped[0], taps);
  q.columns = q.biases = int(taps ? columns * p.Taps() : columns);
  q.group = FastDiv(q.columns / p.groups);
  q.group_channels = int(p.DepthChannels());
  const int64_t lines = CeilDiv(p.DepthChannels(), T::kLine);
  q.planes = int(p.batch * p.Taps());
  q.images = int(p.images);
  q.all_images = int(p.batch * p.images);
  q.run = FastDiv(taps_may_come_first && TapsComeFirst(p) ? 1 : lines);
  q.scattered = phases > 1 || q.in_row.phases > 1;
  // A box past a problem's last row would be stored to the next one's first.
  if (p.batch > 1 && mapped[0].rows % T::kRows != 0) q.scattered = true;
  q.alternates = Alternates(p, config.edges, phases, mapped[0], T::kRows, q.in_row.tiles.divisor);
  if (q.alternates)
    std::stable_sort(mapped, mapped + phases,
                     [](const MappedPhase& a, const MappedPhase& b) { return a.tap_count > b.tap_count; });
  for (int d = 0; d < kRank; ++d) {
    q.window[d] = int(p.window[d]);
    q.out[d] = int(forward ? p.y[d] : p.x[d]);
  }
  constexpr int kStored = kIsAcross<T> ? T::kRows : 64;  // rows
  const auto whole_tiles = [](const MappedPhase& f) { return f.rows % T::kRows == 0; };
  q.columns_of_pixels = q.boxes && phases > 1 && q.in_row.phases == 1 &&
                        (p.batch == 1 || std::all_of(mapped, mapped + phases, whole_tiles));
  cudaError_t e = cudaSuccess;
  for (int i = 0; i < phases; ++i) {
    q.phase[i] = WgmmaPhase(p, mapped[i], lines);
    q.first_tile[i + 1] = q.first_tile[i] + int(CeilDiv(mapped[i].rows, T::kRows));
    if (e == cudaSuccess)
      e = EncodePixels(&q.operand[i], p.in, operand, q.all_images, forward ? p.x : p.y, p.DepthChannels() * p.groups,
                       mapped[i].map, T::kRows, !T::kTripled);
    if (e == cudaSuccess && q.columns_of_pixels)
      e = EncodePhase(&q.result[i], p.in, out, q.all_images, q.out, columns, mapped[i], kStored);
  }
  q.in_row.SetProblems(p.batch, phases, q.first_tile[phases], p.images * (forward ? p.YPixels() : p.XPixels()),
                       p.Taps());
  q.tiles = q.first_tile[phases] * int(q.in_row.tiles.divisor * p.batch);
  if (config.cluster > 1 && q.in_row.tiles.divisor % kTogetherColumns == 0)
    q.two_rows = FastDiv(2 * q.in_row.tiles.divisor);
  q.in_order = config.cluster == 1 && !q.alternates;
  const MappedPhase& first = mapped[0];
  q.lattices = taps && !kIsAcross<T> && T::kColumns % T::kLine == 0 && columns % T::kLine == 0 && RowsAreBoxes(first);
  if (e == cudaSuccess && q.lattices) {
    const int width = first.positions[2], side = std::min(width, 64);
    e = EncodeBoxes(&q.result[0], p.in, out, {columns, first.alike[2], width, first.alike[1], first.rows / width},
                    {T::kLine, 1, side, 1, 64 / side}, false);
  }
  if (e == cudaSuccess && q.boxes && !q.scattered)
    e = EncodeBoxes(&q.result[0], p.in, out, {columns, p.batch * GemmOf(p).rows}, {T::kLine, kStored}, false);
  // Who takes a tile in turn still has its last stage while all of these come (EndTurn).
  constexpr int kLines = (T::kColumns + T::kLine - 1) / T::kLine;
  constexpr bool kTogether = kIsAcross<T> || T::kLarge;
  if (e == cudaSuccess && epilogue.residual != nullptr && q.boxes && !q.scattered && config.cluster == 1 &&
      !HasFrame(p) && (kTogether || kLines < T::kStages)) {
    q.residual_lines = kLines;
    e = EncodeBoxes(&q.residual, p.in, epilogue.residual, {columns, p.batch * GemmOf(p).rows, 1},
                    {T::kLine, T::kRows, 1}, false);
  }
  const bool held = forward && sizeof(typename T::In) == 4 && !T::kCopied;
  q.by_pixels = held || !q.boxes || config.cluster > 1 || (!kIsAcross<T> && T::kColumns % T::kLine != 0) ||
                (q.scattered && !q.columns_of_pixels && !q.lattices) ||
                (epilogue.residual != nullptr && q.residual_lines == 0);
  return e;
}

// The block's tile of this number, which others of its cluster have too; past the last if there is none.
__device__ inline int TileOf(const WgmmaParams& p, int number) {
  if (__builtin_expect(p.in_order, true)) return TileOf(number, blockIdx.x, gridDim.x, false);
  const int tile = TileOf(number, p.team.Div(blockIdx.x), p.team.Div(gridDim.x), p.alternates);
  if (p.two_rows.divisor == 0 || tile >= p.tiles) return tile;
  int in_rows;
  const int rows = p.two_rows.Div(tile, &in_rows);
  if ((rows + 1) * int(p.two_rows.divisor) > p.tiles) return tile;  // a last row alone
  return tile - in_rows + in_rows / (2 * kTogetherColumns) * kTogetherColumns + in_rows % kTogetherColumns +
         (in_rows / kTogetherColumns % 2) * int(p.in_row.tiles.divisor);
}

template <class T>
__device__ WgmmaPlace PlaceOf(const WgmmaParams& p, int tile) {
  WgmmaPlace place(p, tile, T());
  if (T::kColumns % T::kLine != 0 && p.halved) place.turned = place.column % T::kLine;
  return place;
}

// A tile's last steps bring the residual, where it comes through the ring: by the thread that loads pixels,
template <class T>
__device__ void LoadResidual(const WgmmaParams& p, Ring<T>& ring, const WgmmaPlace& place) {
  for (int line = 0; line < p.residual_lines; ++line) {
    BeginStage(ring, T::kBytesA);
    hopper::LoadBox(ring.Data(), &p.residual, ring.Full(), place.Column<T>(line * T::kLine), place.pixel + place.row,
                    0);
    ring.Next();
  }
}
// and not by the one that loads the filter.
template <class T>
__device__ void PassResidual(const WgmmaParams& p, Ring<T>& ring) {
  for (int line = 0; line < p.residual_lines; ++line) {
    BeginStage(ring, 0);
    ring.Next();
  }
}

// The descriptions of arrays lie far away: sends for those that nearly all kernels need, by a warp that nothing waits
// for.
__device__ inline void PrefetchMaps(const WgmmaParams& p) {
  if (threadIdx.x != (kConsumers + 1) * kWarpgroup - 32) return;
  hopper::PrefetchMap(&p.operand[0]);
  hopper::PrefetchMap(&p.filter);
  if (p.boxes) hopper::PrefetchMap(&p.result[0]);
}

// One thread loads pixels and another the filter: one alone would be late. Its instructions are what bounds small
// tiles, so that nothing is chosen in the loop that could be before. Past the last image and tap there are zeros.
template <class T, int kDimensions>
__device__ void ProducePixels(const WgmmaParams& p, Ring<T> ring) {
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    const WgmmaPlace place = PlaceOf<T>(p, tile);
    const WgmmaPhase& f = p.phase[place.phase];
    const int channel = p.group.Div(place.column) * p.group_channels;
    int at[kRank], image = place.problem * p.images + FirstPixel(f, place.row, at);
    const auto load = [&](int line, int, const int (&offset)[kRank]) {
      const uint32_t loaded = p.patched ? ring.Between(ring.stage) : ring.Full();
      BeginStage(ring, T::kBytesA, loaded);
      hopper::LoadPixels<kDimensions>(ring.Data(), &p.operand[place.phase], loaded, channel + line * T::kLine, at,
                                      image, offset);
      ring.Next();
    };
    if (f.steps == 0) image = p.all_images;
    const Share share(max(1, f.steps), p.team);
    ForEachStep(p, f, share.first, share.end, load);
    LoadResidual(p, ring, place);
  }
}

// These of the tile's rows in the result, in pixels, by the threads of a warpgroup for one another; -1 for other rows.
template <class T>
__device__ void FindPixels(const WgmmaParams& p, const WgmmaPhase& f, const WgmmaPlace& place, const Rows& rows,
                           int warpgroup, int* pixels) {
  hopper::SyncWarpgroup(1 + warpgroup);  // the last tile's are read
  for (int i = threadIdx.x % kWarpgroup; i < T::kRows; i += kWarpgroup)
    pixels[i] = rows.Has(i) ? ResultPixel(p, f, place, i, p.scattered) : -1;
  hopper::SyncWarpgroup(1 + warpgroup);
}

// Stores lines of columns, swizzled as the TMA unit has them, to these pixels; of the columns those below `end`. Those
// of taps may be whole halves of 16 bytes only.
template <int kLines, class In>
__device__ void StoreLines(const WgmmaParams& p, uint32_t lines, const int* pixels, In* out, int column, int end) {
  const int thread = threadIdx.x % kWarpgroup, chunk = thread % 8, first = column + chunk * kVecLength<In>;
  if (first >= end) return;
  const int pitch = p.in_row.columns.divisor;
  const bool halves = sizeof(In) == 2 && pitch % kVecLength<In> != 0, both = first + kVecLength<In> / 2 < end;
  In* const high = halves && both ? out + ResultColumn(p, first + kVecLength<In> / 2) : nullptr;
  out += ResultColumn(p, first);
#pragma unroll
  for (int line = thread / 8; line < kLines; line += kWarpgroup / 8) {
    const int pixel = pixels[line];
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(lines + line * kLineBytes + ((chunk ^ (line % 8)) << 4)));
    if (pixel < 0) continue;
    if (!halves) {
      *reinterpret_cast<uint4*>(out + int64_t{pixel} * pitch) = v;
      continue;
    }
    *reinterpret_cast<uint2*>(out + int64_t{pixel} * pitch) = {v.x, v.y};
    if (both) *reinterpret_cast<uint2*>(high + int64_t{pixel} * pitch) = {v.z, v.w};
  }
}

// Stores 64 rows of a line of one tap's columns: the result is [images * H, phases, W, phases, columns].
__device__ inline void StoreLattice(const WgmmaParams& p, const WgmmaPhase& f, uint32_t slab, int column, int row) {
  int which[kRank], at[5];
  p.in_row.alike.Split(p.in_row.Phase(column, &at[0]), which);
  at[1] = which[2];
  at[3] = which[1];
  at[4] = f.image.row.Div(row, &at[2]);
  hopper::StoreBox(&p.result[0], slab, at);
}

// Stores rows of a line of columns by TMA: neighbours in the result, or columns of a phase's pixels.
__device__ inline void StoreColumn(const WgmmaParams& p, const WgmmaPhase& f, uint32_t slab, const WgmmaPlace& place,
                                   int column, int row) {
  if (!p.columns_of_pixels) return hopper::StoreBox(&p.result[0], slab, column, place.pixel + place.row + row);
  int at[kRank];
  const int image = place.problem * p.images + f.Split(place.row + row, at);
  hopper::VisitDimensions(f.dimensions, [&](auto d) {
    hopper::StorePixels<decltype(d)::value>(&p.result[place.phase], slab, column, at, image);
  });
}

// Stores the sums: by TMA, or a phase's positions one by one.
template <class T>
__device__ void StoreBoxes(const WgmmaParams& p, const WgmmaPhase& f, uint32_t slabs, int warpgroup,
                           const WgmmaPlace& place, const typename T::Sums& sums, const Rows& rows, typename T::In* out,
                           const int* pixels, int& turn) {
  const int thread = threadIdx.x % kWarpgroup;
  const bool in_columns = !p.scattered || p.columns_of_pixels;
  StoreSlabs<T>(slabs, warpgroup, sums, rows, turn, [&](int row, int column, uint32_t slab) {
    const bool box = (in_columns || p.lattices) && column + T::kLine <= T::kColumns;
    if (box) hopper::ShowSharedToTma();
    hopper::SyncWarpgroup(1 + warpgroup);
    if (thread == 0) {
      if (box && in_columns)
        StoreColumn(p, f, slab, place, place.Column<T>(column), row);
      else if (box && place.column + column < p.columns)
        StoreLattice(p, f, slab, place.column + column, place.row + row);
      hopper::CommitStores();  // of none too, since those before the last are waited for
    }
    if (box) return;
    const int first = place.Column<T>(column);
    StoreLines<64>(p, slab, pixels + row, out, first, min(p.columns, first + T::kColumns - column));
  });
}

// Stores the sums of a product whose filter went through registers, in which they lie as the result has them.
template <class T>
__device__ void StoreHeld(const WgmmaParams& p, const WgmmaPlace& place, const typename Held<T>::Sums& sums, float* out,
                          const int* pixels) {
  using H = Held<T>;
  using Columns = Vec<float, H::kVector>;
  const int column = place.column + H::Column(), pitch = p.in_row.columns.divisor;
  if (column >= p.columns) return;
  out += ResultColumn(p, column);
#pragma unroll
  for (int i = 0; i < T::kRows / 4; ++i) {
    if (i % 2 == 0) asm volatile("" ::: "memory");  // or all rows' pixels are loaded first, into too many registers
    const int pixel = pixels[H::Row(i)];
    if (pixel >= 0) *reinterpret_cast<Columns*>(out + int64_t{pixel} * pitch) = H::Get(sums, i);
  }
}

// Stores the rows of a shared tile that are this block's, to `wide` if there is that.
template <class T, bool kForward>
__device__ void StoreShare(const WgmmaParams& p, const Ring<T>& ring, const WgmmaPlace& place, const int* pixels,
                           float* wide, typename T::In* out) {
  using In = typename T::In;
  const bool is_wide = sizeof(In) == 2 && wide != nullptr;
  FinishShare<T>(ring.data, int(p.team.divisor), [&](int row, int from, float (&v)[4]) {
    const int pixel = pixels[row], column = place.column + from;
    if (pixel < 0 || column >= p.columns) return;
    const int64_t to = int64_t{pixel} * p.columns + column;
    if (kForward && !p.plain) {
      const EitherVec<In, 4> bias(p.epilogue.bias, column, is_wide), residual(p.epilogue.residual, to, is_wide);
      bias.AddTo(v, is_wide);
      residual.AddTo(v, is_wide);
      if (!ActivateSimply(v, p.epilogue.activation)) ActivateFour<In>(v, p.epilogue.activation, is_wide);
    }
    if (is_wide)
      *reinterpret_cast<Vec<float, 4>*>(wide + to) = Round<float>(v);
    else
      *reinterpret_cast<Vec<In, 4>*>(out + to) = Round<In>(v);
  });
}

}  // namespace jaxdnn::conv
