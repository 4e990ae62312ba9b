// How the strips of march.cuh are dealt out to blocks.
#pragma once

#include <algorithm>
#include <climits>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/lrn/lrn.h"

namespace jaxdnn::lrn {

constexpr int kMaxSlices = 16;
constexpr int kMaxChunks = 8;
constexpr int kMultiprocessors = 132;

// A block takes `slices` neighbouring vectors of each of `columns` strips of each of `groups` planes. A plane's strips
// are all there, before empty ones that separate it from its neighbour if there is one; or they are some, which overlap
// with other blocks' by what the outermost cannot sum.
struct Tiles {
  int64_t outer, plane, row, step;  // planes; bytes of a plane, of a row, and from a unit to the next
  int64_t vectors;                  // of a column
  int height, width;                // width in columns
  int units;                        // of a row
  int groups, columns, slices;
  bool pieces;  // whether 16 bytes of a column are a piece
  int origin;   // strips that a block's neighbour has results for
  int64_t slice_tiles;
  int spans, chunks, chunk;
  int64_t time;  // that the device takes, in rows of a multiprocessor's warps
  FastDiv by_slice_tile, by_span, by_chunk, by_slice, by_column;

  int Threads() const { return static_cast<int>(CeilDiv(groups * columns * slices, 32)) * 32; }
  int64_t Blocks() const { return CeilDiv(outer, groups) * chunks * spans * slice_tiles; }
};

// Where a block is, and where a lane of it: the first unit of its strip, and the vector of that.
struct BlockPlace {
  int slice_tile, span, chunk, planes;

  __device__ BlockPlace(const Tiles& t, int block)
      : planes(t.by_chunk.Div(t.by_span.Div(t.by_slice_tile.Div(block, &slice_tile), &span), &chunk)) {}
};

struct LanePlace {
  int group, strip, unit;
  int64_t outer, vector;

  __device__ LanePlace(const Tiles& t, const BlockPlace& b, int lane) {
    int slice;
    group = t.by_column.Div(t.by_slice.Div(lane, &slice), &strip);
    outer = int64_t{b.planes} * t.groups + group;
    vector = int64_t{b.slice_tile} * t.slices + slice;
    unit = 2 * (b.span * (t.columns - 2 * t.origin) + strip);
  }
  __device__ bool Exists(const Tiles& t) const {
    return group < t.groups && outer < t.outer && vector < t.vectors && unit < t.units;
  }
  // In the first row of the plane.
  __device__ int64_t Bytes(const Tiles& t, int vector_bytes) const {
    return outer * t.plane + unit * t.step + vector * vector_bytes;
  }
};

template <class S>
Tiles Tile(const Problem& p, int item) {
  constexpr int N = S::N;
  Tiles t = {};
  t.outer = p.outer * p.extent[0];
  t.height = p.extent[1];
  t.width = p.extent[2];
  t.row = p.extent[2] * p.inner * item;
  t.plane = t.height * t.row;
  t.units = S::kAcross ? t.width / N : t.width;
  t.step = (S::kAcross ? N : p.inner) * item;
  t.vectors = S::kAcross ? 1 : p.inner / N;
  const int64_t strips = CeilDiv(t.units, 2), whole = strips + S::kMargin, alone = S::kAcross ? whole : strips;
  // With at least that many slices to a block; and the lanes that a plane takes.
  const auto cut = [&](int64_t least) {
    if (alone * least <= S::kThreads) {
      const int64_t most = std::max(least, std::min<int64_t>(t.vectors, kMaxSlices));
      const int64_t room = std::clamp<int64_t>(S::kThreads / alone, least, most);
      t.slices = static_cast<int>(std::max(least, CeilDiv(t.vectors, CeilDiv(t.vectors, room))));
      t.groups = static_cast<int>(std::clamp<int64_t>(S::kThreads / (whole * t.slices), 1, t.outer));
      t.columns = static_cast<int>(t.groups > 1 ? whole : alone);
      t.spans = 1;
      t.origin = 0;
    } else {
      t.slices = static_cast<int>(least);
      t.columns = S::kThreads / t.slices - (S::kAcross ? S::kMargin : 0);
      t.groups = 1;
      t.origin = static_cast<int>(CeilDiv(S::kSight, S::kAcross ? 2 * N : 2));
      t.spans = static_cast<int>(std::max<int64_t>(CeilDiv(strips - 2 * t.origin, t.columns - 2 * t.origin), 1));
    }
    t.slice_tiles = CeilDiv(t.vectors, t.slices);
    return t.slice_tiles * t.spans * S::kThreads / t.groups;
  };
  // Smaller visits cost memory its speed, unless the spans' overlap costs more.
  const int64_t visit =
      std::min<int64_t>(t.vectors, S::kAcross ? 1 : std::clamp<int64_t>(S::kVisit / (N * item), 1, kMaxSlices));
  const int64_t half = CeilDiv(visit, 2), lanes = cut(visit);
  if (16 * cut(half) > 15 * lanes) cut(visit);
  // Of the numbers of chunks, the one with which the device takes the least time. Fewer warps than kBusy are no faster,
  // and narrow visits slower. (With the blocks that are resident in fact, which are more, some problems took a tenth
  // less time and as many a tenth more.)
  constexpr int kBusy = 24;
  t.time = INT64_MAX;
  for (int wanted = 1; wanted <= kMaxChunks; ++wanted) {
    Tiles tried = t;
    tried.chunk = static_cast<int>(CeilDiv(t.height, wanted));
    tried.chunks = static_cast<int>(CeilDiv(t.height, tried.chunk));
    const int64_t waves = CeilDiv(tried.Blocks(), kMultiprocessors * S::kResident);
    tried.time = waves * (tried.chunk + S::kLag + (wanted > 1 ? S::kSight : 0)) *
                 std::max(S::kResident * t.Threads() / 32, kBusy);
    if (t.slices < visit) tried.time += tried.time / 4;
    if (tried.time < t.time) t = tried;
  }
  t.pieces = S::kPieces && t.vectors % S::kPiece == 0 && t.slices % S::kPiece == 0;
  t.by_slice_tile = FastDiv(t.slice_tiles), t.by_span = FastDiv(t.spans), t.by_chunk = FastDiv(t.chunks);
  t.by_slice = FastDiv(t.slices), t.by_column = FastDiv(t.columns);
  return t;
}

}  // namespace jaxdnn::lrn
