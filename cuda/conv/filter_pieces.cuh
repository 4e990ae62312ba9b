// What blocks leave behind of the tiles whose steps several of them have, and the kernel that adds it up.
//
// Of a piece of a tile a thread leaves its sums as it has them: in fours, of two columns of a row and of the one 8
// below, and those of a warp next to each other.
#pragma once

#include <cstring>

#include "cuda/conv/filter.cuh"
#include "cuda/conv/filter_spans.cuh"
#include "cuda/conv/wgmma_store.cuh"

namespace jaxdnn::conv {

// Where a tile is in the result of its problem, in tiles, and in rows of its set of taps.
struct TilePlace {
  int problem, set, column, row;
};

// How the tiles are numbered: problem by problem, and set by set, along the shorter side of the result first, so that
// neighbours share the larger operand.
struct TileGrid {
  FastDiv of_problem;

  // Of a set of taps, the shorter side, its first tile of a problem's, and whether rows are the shorter side.
  struct Set {
    FastDiv side;
    int first;
    bool down;
  };
  Set sets[kMaxMaps + 1];

  TileGrid() = default;
  TileGrid(const int64_t (&rows)[kMaxMaps], int count, int64_t columns) : sets{} {
    for (int i = 0; i < kMaxMaps; ++i) {
      const int64_t of_set = i < count ? rows[i] : 1;
      sets[i + 1].first = sets[i].first + int(of_set * columns);
      sets[i].side = FastDiv(std::min(of_set, columns));
      sets[i].down = of_set < columns;
    }
    of_problem = FastDiv(sets[count].first);
  }

  __device__ TilePlace At(int tile) const {
    int across, which = 0;
    const int problem = of_problem.Div(tile, &tile);
    while (tile >= sets[which + 1].first) ++which;
    const Set& set = sets[which];
    const int along = set.side.Div(tile - set.first, &across);
    return set.down ? TilePlace{problem, which, along, across} : TilePlace{problem, which, across, along};
  }
};

// The result's rows, which are (tap, channel) pairs in units of a line of channels, those of one set of taps after the
// other's.
struct FilterRows {
  FastDiv lines;                   // of channels
  int channels;                    // of a group
  int64_t size;                    // of its result
  int columns;                     // of all groups
  bool sets;                       // whether there are several
  int units[kMaxMaps];             // of a set; where there are several, also
  short first_tap[kMaxMaps];       // the first in their order,
  unsigned char tap[kMostInSets];  // in which these are the window's

  FilterRows() = default;
  FilterRows(const Problem& p, const TapSet* of, int count, int line)
      : lines(CeilDiv(p.channels, line)),
        channels(int(p.channels)),
        size(p.FilterSize() / p.batch),
        columns(int(p.groups * p.features)),
        sets(count > 1),
        units{},
        first_tap{},
        tap{} {
    short taps = 0;
    for (int i = 0; i < count; ++i) {
      const TapSet& s = of[i];
      units[i] = int(s.Count() * lines.divisor);
      first_tap[i] = taps;
      for (int n = 0; sets && n < s.Count(); ++n) {
        const int plane = s.taps[1] * s.taps[2];
        const int at[] = {s.first[0] + n / plane, s.first[1] + n % plane / s.taps[2], s.first[2] + n % s.taps[2]};
        tap[taps++] = static_cast<unsigned char>((at[0] * p.window[1] + at[1]) * p.window[2] + at[2]);
      }
    }
  }

  // A unit's tap of the window, and its line.
  __device__ int Tap(int set, int unit, int* line) const {
    const int of_set = lines.Div(unit, line);
    return sets ? tap[first_tap[set] + of_set] : of_set;
  }
  // Where in the result one of them begins, or -1 for no row.
  template <int kLine>
  __device__ int64_t Begin(const TilePlace& at, int row) const {
    const int unit = row / kLine;
    if (unit >= units[at.set]) return -1;
    int line;
    const int of_window = Tap(at.set, unit, &line), channel = line * kLine + row % kLine;
    if (channel >= channels) return -1;
    return at.problem * size + (int64_t{of_window} * channels + channel) * columns;
  }
};

// Fours of a tile.
template <class T>
constexpr int kTileFours = T::kRows * T::kColumns / 4;

// Leaves a warpgroup's sums of a tile's piece, from this 64th row on.
template <class T, class Sums>
__device__ void LeavePiece(float4* piece, int first, const Sums& sums) {
  piece += first * (T::kColumns / 8) * kWarpgroup + threadIdx.x % kWarpgroup;
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j, piece += kWarpgroup)
      *piece = {block[4 * j], block[4 * j + 1], block[4 * j + 2], block[4 * j + 3]};
}

__device__ inline float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

template <class Store>
__device__ void StorePair(const Store& store, int64_t i, float first, float second) {
  using Out = decltype(store.Value(i, first));
  *reinterpret_cast<Vec<Out, 2>*>(store.out + i) = {store.Value(i, first), store.Value(i + 1, second)};
}

// Stores a warp's fours of kEights neighbouring eights of columns: the lane's rows begin at `upper` and `lower` of the
// result (-1: nowhere). Of four eights of 16-bit floats each lane stores one whole.
template <int kEights, class Store>
__device__ void StoreFours(const Store& store, const float4 (&sums)[kEights], int64_t upper, int64_t lower, int column,
                           int columns) {
  const int lane = threadIdx.x % 4;
  const auto own = [&](int e) { return column + e * 8 + lane * 2; };
  if constexpr (!Store::kInOrder) {
    float v[4 * kEights];
#pragma unroll
    for (int e = 0; e < kEights; ++e)
      v[4 * e] = sums[e].x, v[4 * e + 1] = sums[e].y, v[4 * e + 2] = sums[e].z, v[4 * e + 3] = sums[e].w;
    constexpr int kAtOnce = kEights > 1 ? 1 : 4;  // or a register is lost around the call that is rarely made
#pragma unroll kAtOnce
    for (int i = 0; i < 4 * kEights; ++i) {
      const int64_t begin = i & 2 ? lower : upper;
      const int at = own(i / 4) + i % 2;
      if (begin >= 0 && at < columns) store(begin + at, v[0]);
#pragma unroll
      for (int k = 1; k < 4 * kEights; ++k) v[k - 1] = v[k];
    }
  } else if constexpr (kEights == 4 && sizeof(*store.out) == 2) {
    const auto store_row = [&](int64_t begin, const auto& of_sum) {
      uint32_t words[kEights] = {};
#pragma unroll
      for (int e = 0; e < kEights; ++e)
        if (begin >= 0 && own(e) < columns) {
          const float2 sum = of_sum(sums[e]);
          const Vec<decltype(store.Value(0, 0.f)), 2> pair = {store.Value(begin + own(e), sum.x),
                                                              store.Value(begin + own(e) + 1, sum.y)};
          memcpy(&words[e], &pair, sizeof(pair));
        }
      TransposeQuad(words);
      if (const int first = column + lane * 8; begin >= 0 && first < columns)
        *reinterpret_cast<uint4*>(store.out + begin + first) = {words[0], words[1], words[2], words[3]};
    };
    store_row(upper, [](const float4& sum) { return float2{sum.x, sum.y}; });
    store_row(lower, [](const float4& sum) { return float2{sum.z, sum.w}; });
  } else {
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      if (own(e) >= columns) continue;
      if (upper >= 0) StorePair(store, upper + own(e), sums[e].x, sums[e].y);
      if (lower >= 0) StorePair(store, lower + own(e), sums[e].z, sums[e].w);
    }
  }
}

// A tile's place, for a kernel that does not know its extents.
struct PieceTiles {
  FastDiv eights;  // of columns
  TileGrid grid;
  int count, rows, columns;  // tiles of the result, rows and columns of a tile

  // Warps that have kEights eights each.
  template <int kEights>
  __host__ __device__ int Warps() const {
    return rows * columns / (128 * kEights);
  }
};

// How the pieces of a tile are added up, in the order of their blocks: by a warp in 16 rows of four eights of columns;
// or, of many pieces, in 16 rows of one by kParts warps, every kParts-th piece each.
template <bool kMany>
struct Summing {
  static constexpr int kParts = kMany ? 8 : 1, kEights = kMany ? 1 : 4, kWarps = kMany ? 8 : 4;
};

// Whole tiles are left to be added up too where `whole`.
template <int kLine, bool kMany, class Store>
__global__ void __launch_bounds__(Summing<kMany>::kWarps * 32)
    SumPiecesKernel(const float4* pieces, const __grid_constant__ Spans spans, const __grid_constant__ FilterRows rows,
                    const __grid_constant__ PieceTiles tiles, bool whole, const __grid_constant__ Store store) {
  using S = Summing<kMany>;
  constexpr int kParts = S::kParts, kEights = S::kEights;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % kParts;
  const int blocks = tiles.Warps<kEights>() * kParts / S::kWarps, tile = blockIdx.x / blocks;
  const int which = (blockIdx.x - tile * blocks) * (S::kWarps / kParts) + warp / kParts;
  int steps;
  const int begin = spans.FirstStep(tile, &steps);
  const int first = spans.parts > 0 ? tile * spans.parts : spans.BlockOf(begin);
  const int last = spans.parts > 0 ? first + spans.parts - 1 : spans.BlockOf(begin + steps - 1);
  if (first == last && !whole) return;
  // A warpgroup's four warps have 16 rows each, and next to each other what they left of an eight.
  constexpr int kNext = 4 * 32;
  pieces += which / 4 * (kEights * kNext) + which % 4 * 32 + lane;
  const int64_t fours = tiles.rows * tiles.columns / 4;
  // Four pieces are on their way at once. A block's first may be its second slot.
  constexpr int kAtOnce = 4;
  const int64_t second = spans.Slot(first, tile) - first * spans.slots;
  float4 sums[kEights] = {};
#pragma unroll 1
  for (int from = first + part; from <= last; from += kAtOnce * kParts) {
    float4 piece[kAtOnce][kEights];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = from + i * kParts;
      const float4* const left = pieces + (block * spans.slots + (block == first ? second : 0)) * fours;
      if (block <= last)
#pragma unroll
        for (int e = 0; e < kEights; ++e) piece[i][e] = left[e * kNext];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (from + i * kParts <= last)
#pragma unroll
        for (int e = 0; e < kEights; ++e) sums[e] = sums[e] + piece[i][e];
  }
  if constexpr (kParts > 1) {
    static_assert(kEights == 1, "a float4 of each thread");
    __shared__ float4 of_warps[S::kWarps][32];
    of_warps[warp][lane] = sums[0];
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int k = 1; k < kParts; ++k) sums[0] = sums[0] + of_warps[warp + k][lane];
  }
  int eight;
  const TilePlace at = tiles.grid.At(tile);
  const int sixty_four = tiles.eights.Div(which / 4 * kEights, &eight);
  const int row = at.row * tiles.rows + sixty_four * 64 + which % 4 * 16 + lane / 4;
  StoreFours(store, sums, rows.Begin<kLine>(at, row), rows.Begin<kLine>(at, row + 8),
             at.column * tiles.columns + eight * 8, rows.columns);
}

// The result, from the pieces that blocks have left of its tiles; of all tiles where `whole`.
template <class In>
cudaError_t SumPieces(const Problem& p, bool whole, const Spans& spans, const FilterRows& rows, const PieceTiles& tiles,
                      const float4* pieces, const void* x, const void* y, void* out, cudaStream_t stream) {
  constexpr int kLine = kLineBytes / sizeof(In);
  const auto sum = [&](auto store) {
    using Store = decltype(store);
    const auto launch = [&](auto many) {
      constexpr bool kMany = decltype(many)::value;
      using S = Summing<kMany>;
      const int64_t warps = int64_t{tiles.count} * tiles.Warps<S::kEights>() * S::kParts;
      return LaunchKernel(SumPiecesKernel<kLine, kMany, Store>, warps / S::kWarps, S::kWarps * 32, stream, pieces,
                          spans, rows, tiles, whole, store);
    };
    constexpr int kManyPieces = 16;  // of a tile
    return spans.blocks.divisor >= uint32_t(kManyPieces) * tiles.count ? launch(std::true_type())
                                                                       : launch(std::false_type());
  };
  const auto to = [&](auto* result) {
    using Out = std::remove_pointer_t<decltype(result)>;
    const FilterParams q = MakeFilterParams(p, 1, 1, 1, 1);
    const auto *of_x = static_cast<const In*>(x), *of_y = static_cast<const In*>(y);
    if (p.exchanged) return sum(StoreExchanged<In, Out>{q, of_x, of_y, result});
    return whole ? sum(StoreChecked<In, Out>{q, of_x, of_y, result}) : sum(StoreInOrder<Out>{result});
  };
  if constexpr (sizeof(In) == 2)
    if (p.out != p.in) return to(static_cast<float*>(out));
  return to(static_cast<In*>(out));
}

}  // namespace jaxdnn::conv
