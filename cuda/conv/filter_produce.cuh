// Hopper's filter gradient: what its kernel is told, and who fills the stages.
#pragma once

#include "cuda/conv/filter_pieces.cuh"
#include "cuda/conv/filter_together.cuh"
#include "cuda/conv/wgmma_patch.cuh"

namespace jaxdnn::conv {

// How a set's positions follow one another in x or y: in each dimension from `lower` on, `one` apart, `all` of them so
// long; and by how much a step of the reduction moves on, which in images MappedSet has.
struct PixelWalk {
  int lower[kRank], one[kRank], all[kRank], by[kRank];

  PixelWalk() = default;
  PixelWalk(const PixelMap& map, const int (&positions)[kRank], int64_t step) {
    for (int d = kRank - 1; d >= 0; --d) {
      lower[d] = map.lower[d];
      one[d] = map.step[d];
      all[d] = positions[d] * one[d];
      by[d] = int(step % positions[d]) * one[d];
      step /= positions[d];
    }
  }
};

// A set of taps, as the kernel needs it. `first` is its first one's place in the window.
struct MappedSet {
  FastDiv all;  // positions of an image
  Box box;
  int images;  // of a step of the reduction
  int first[kRank];
  PixelWalk x, y;

  MappedSet() = default;
  MappedSet(const TapSet& s, int depth)
      : all(s.Positions()),
        box(s.positions),
        images(int(depth / s.Positions())),
        x(s.x, s.positions, depth),
        y(s.y, s.positions, depth) {
    for (int d = 0; d < kRank; ++d) first[d] = s.first[d];
  }
};

struct FilterWgmmaParams {
  int dimensions;  // of pixels
  int images;
  bool by_sets;     // whether y is read by the positions of several, and not as it lies in memory
  bool leaves;      // whole tiles too
  bool turns;       // y, which no other kernel has transposed
  bool x_in_boxes;  // like y, and not in columns of pixels
  bool patched;     // `patches` has some
  bool wide;        // whether the result is of floats
  int distance[kRank];
  FastDiv plane, line;  // of taps of the window
  FastDiv group;        // columns of one
  Spans spans;
  TileGrid grid;
  MappedSet set[kMaxMaps];
  FilterRows rows;
  float4* pieces;
  void* out;
  CUtensorMap x[kMaxMaps], y[kMaxMaps];
  Patches patches;
};

// Where in its problem's result a tile begins.
struct FilterTilePlace : TilePlace {
  template <class T>
  __device__ FilterTilePlace(const FilterWgmmaParams& p, int tile, T) : TilePlace(p.grid.At(tile)) {
    column *= T::kColumns;
    row *= T::kRows;
  }
};

// What a tile's rows read: of each unit a line of channels, so far from where the first tap is.
template <class T>
struct FilterUnits {
  static constexpr int kCount = T::kRows / T::kLine;
  int first_image, tap[kCount], channel[kCount], offset[kCount][kRank];

  __device__ FilterUnits(const FilterWgmmaParams& p, int tile) {
    const FilterTilePlace place(p, tile, T());
    const int first = place.row / T::kLine;
    first_image = place.problem * p.images;
    const int group = p.group.Div(place.column);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      // Past the last unit it is loaded again, and not stored.
      int line;
      tap[u] = p.rows.Tap(place.set, min(first + u, p.rows.units[place.set] - 1), &line);
      channel[u] = group * p.rows.channels + line * T::kLine;
      int in_plane, at[kRank];
      at[0] = p.plane.Div(tap[u], &in_plane);
      at[1] = p.line.Div(in_plane, &at[2]);
#pragma unroll
      for (int d = 0; d < kRank; ++d) offset[u][d] = (at[d] - p.set[place.set].first[d]) * p.distance[d];
    }
  }
};

// A position of a set of taps: the pixel of x that the first tap meets there, or that of y. It moves on by steps,
// without a division: in a dimension by less than there is, and then perhaps by one in the next.
template <int kDimensions>
class FilterPosition {
 public:
  int image, at[kRank];

  __device__ FilterPosition(const MappedSet& s, const PixelWalk& walk, int number) : images_(s.images), walk_(walk) {
    int in_image;
    image = s.all.Div(number, &in_image);
    s.box.Split(in_image, at);
#pragma unroll
    for (int d = 0; d < kRank; ++d) at[d] = walk.lower[d] + at[d] * walk.one[d];
  }
  __device__ void Next() {
    image += images_;
#pragma unroll
    for (int d = kRank - 1; d >= kRank - kDimensions; --d) {
      at[d] += walk_.by[d];
      if (at[d] < walk_.lower[d] + walk_.all[d]) continue;
      at[d] -= walk_.all[d];
      if (d > kRank - kDimensions)
        at[d - 1] += walk_.one[d - 1];
      else
        ++image;
    }
  }

 private:
  const int images_;
  const PixelWalk walk_;
};

// One thread loads x, another y: the first asks for a box for every unit. Of one tap that meets all pixels boxes are as
// good as columns of pixels, come faster, and end where a problem does.
template <class T>
__device__ void ProduceXBoxes(const FilterWgmmaParams& p, Ring<T> ring) {
  hopper::PrefetchMap(&p.x[0]);
  for (Pieces piece(p.spans); piece.Next();) {
    const FilterUnits<T> units(p, piece.tile);
    const int problem = FilterTilePlace(p, piece.tile, T()).problem;
    int pixel = piece.first * T::kDepth;
    for (int step = 0; step < piece.steps; ++step, pixel += T::kDepth) {
      BeginStage(ring, T::kBytesA);
#pragma unroll
      for (int u = 0; u < units.kCount; ++u)
        hopper::LoadBox(ring.Data() + u * kUnitBytes<T>, &p.x[0], ring.Full(), units.channel[u], pixel, problem);
      ring.Next();
    }
  }
}
template <class T, int kDimensions>
__device__ void ProduceX(const FilterWgmmaParams& p, Ring<T> ring) {
  hopper::PrefetchMap(&p.x[0]);
  for (Pieces piece(p.spans); piece.Next();) {
    const FilterUnits<T> units(p, piece.tile);
    const int which = piece.set;
    const MappedSet& set = p.set[which];
    FilterPosition<kDimensions> first(set, set.x, piece.first * T::kDepth);
    for (int step = 0; step < piece.steps; ++step, first.Next()) {
      const uint32_t loaded = p.patched ? ring.Between(ring.stage) : ring.Full();
      BeginStage(ring, T::kBytesA, loaded);
#pragma unroll
      for (int u = 0; u < units.kCount; ++u)
        hopper::LoadPixels<kDimensions>(ring.Data() + u * kUnitBytes<T>, &p.x[which], loaded, units.channel[u],
                                        first.at, units.first_image + first.image, units.offset[u]);
      ring.Next();
    }
  }
}

// By one of the warps that patch stages, half of the pixels of all units. Past the last image there are none.
template <class T>
__device__ void PatchStages(const FilterWgmmaParams& p, Ring<T> ring, int warp) {
  using Rows = PatchedRows<T::kDepth / kPatchers>;
  static_assert(Rows::kEach == 1);
  const int first = warp * Rows::kRows;
  for (Pieces piece(p.spans); piece.Next();) {
    const FilterUnits<T> units(p, piece.tile);
    FilterPosition<kRank> tap(p.set[0], p.set[0].x, piece.first * T::kDepth + first + Rows::Row(0));
    for (int step = 0; step < piece.steps; ++step, tap.Next()) {
      Rows rows;
      rows.image[0] = Rows::Row(0) < Rows::kRows && tap.image < p.images ? tap.image : -1;
#pragma unroll
      for (int d = 0; d < kRank; ++d) rows.at[0][d] = tap.at[d];
      typename Rows::Found found = rows.Find(p.patches.edges, units.offset[0]);
      hopper::WaitBarrier(ring.Between(ring.stage), ring.parity);
#pragma unroll
      for (int u = 0; u < units.kCount; ++u) {
        if (u > 0 && units.tap[u] != units.tap[u - 1]) found = rows.Find(p.patches.edges, units.offset[u]);
        Rows::Load(p.patches, found, ring.Data() + u * kUnitBytes<T> + first * kLineBytes, units.channel[u],
                   ring.Full());
      }
      ring.Next();
    }
  }
}

template <class T, int kDimensions>
__device__ void ProduceYOfSets(const FilterWgmmaParams& p, Ring<T> ring) {
  for (Pieces piece(p.spans); piece.Next();) {
    const FilterTilePlace place(p, piece.tile, T());
    const int which = piece.set;
    const MappedSet& set = p.set[which];
    FilterPosition<kDimensions> position(set, set.y, piece.first * T::kDepth);
    for (int step = 0; step < piece.steps; ++step, position.Next()) {
      BeginStage(ring, T::kBytesB);
#pragma unroll
      for (int i = 0; i * T::kLine < T::kColumns; ++i)
        hopper::LoadPixels<kDimensions>(ring.Data() + T::kBytesA + i * kUnitBytes<T>, &p.y[which], ring.Full(),
                                        place.column + i * T::kLine, position.at, position.image, {});
      ring.Next();
    }
  }
}
template <class T>
__device__ void ProduceY(const FilterWgmmaParams& p, Ring<T> ring) {
  hopper::PrefetchMap(&p.y[0]);
  if (p.by_sets)
    return hopper::VisitDimensions(p.dimensions, [&](auto d) { ProduceYOfSets<T, decltype(d)::value>(p, ring); });
  for (Pieces piece(p.spans); piece.Next();) {
    const FilterTilePlace place(p, piece.tile, T());
    int pixel = piece.first * T::kDepth;
    for (int step = 0; step < piece.steps; ++step, pixel += T::kDepth) {
      BeginStage(ring, T::kBytesB);
#pragma unroll
      for (int i = 0; i * T::kLine < T::kColumns; ++i) {
        const int column = place.column + i * T::kLine;
        const bool transposed = kFloats<T> && !p.turns;
        hopper::LoadBox(ring.Data() + T::kBytesA + i * kUnitBytes<T>, &p.y[0], ring.Full(), transposed ? pixel : column,
                        transposed ? column : pixel, place.problem);
      }
      ring.Next();
    }
  }
}

// By one of the two warps that come between loads and products: transposes y of floats, or patches x of others.
template <class T>
__device__ void Help(const FilterWgmmaParams& p, Ring<T> ring, int warp) {
  if constexpr (!kFloats<T>) {
    if (p.patched) PatchStages(p, ring, warp);
  } else if (p.turns) {
    for (Pieces piece(p.spans); piece.Next();)
      for (int step = 0; step < piece.steps; ++step, ring.Next()) TransposeStage(ring, warp);
  }
}

}  // namespace jaxdnn::conv
