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

  // A unit's tap, for a loop that is not unrolled.
  __device__ int Get(int u, int* of_channel, int (&of_offset)[kRank]) const {
    int of_tap = tap[0];
    *of_channel = channel[0];
#pragma unroll
    for (int d = 0; d < kRank; ++d) of_offset[d] = offset[0][d];
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      if (i != u) continue;
      of_tap = tap[i];
      *of_channel = channel[i];
#pragma unroll
      for (int d = 0; d < kRank; ++d) of_offset[d] = offset[i][d];
    }
    return of_tap;
  }
};

// A position of a set of taps: the pixel of x that the first tap meets there, or that of y. It moves on by steps,
// without a division: in a dimension by less than there is, and then perhaps by one in the next.
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
    for (int d = kRank - 1; d >= 0; --d) {
      at[d] += walk_.by[d];
      if (at[d] < walk_.lower[d] + walk_.all[d]) continue;
      at[d] -= walk_.all[d];
      if (d > 0)
        at[d - 1] += walk_.one[d - 1];
      else
        ++image;
    }
  }

 private:
  const int images_;
  const PixelWalk walk_;  // a copy: parameters would be loaded anew for each step
};

// One thread loads x, another y: the first asks for a box for every unit. Of one tap that meets all pixels boxes are as
// good as columns of pixels, come faster, and end where a problem does.
template <class T>
__device__ void ProduceX(const FilterWgmmaParams& p, Ring<T> ring) {
  hopper::PrefetchMap(&p.x[0]);
  int dimensions = p.x_in_boxes ? 0 : p.dimensions;  // of columns of pixels; none where there are boxes
  asm volatile("" : "+r"(dimensions));               // or it is loaded anew for each step
  for (Pieces piece(p.spans); piece.Next();) {
    const FilterUnits<T> units(p, piece.tile);
    const CUtensorMap* const map = &p.x[piece.set];
    const MappedSet& set = p.set[piece.set];
    const int problem = p.x_in_boxes ? FilterTilePlace(p, piece.tile, T()).problem : 0;
    int pixel = piece.first * T::kDepth;
    FilterPosition first(set, set.x, pixel);
    for (int step = 0; step < piece.steps; ++step, pixel += T::kDepth) {
      const uint32_t loaded = p.patched ? ring.Between(ring.stage) : ring.Full();
      BeginStage(ring, T::kBytesA, loaded);
      if (dimensions == 0) {
#pragma unroll
        for (int u = 0; u < units.kCount; ++u)
          hopper::LoadBox(ring.Data() + u * kUnitBytes<T>, map, loaded, units.channel[u], pixel, problem);
      } else {
        hopper::VisitDimensions(dimensions, [&](auto d) {
#pragma unroll
          for (int u = 0; u < units.kCount; ++u)
            hopper::LoadPixels<decltype(d)::value>(ring.Data() + u * kUnitBytes<T>, map, loaded, units.channel[u],
                                                   first.at, units.first_image + first.image, units.offset[u]);
        });
        first.Next();
      }
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
    FilterPosition tap(p.set[0], p.set[0].x, piece.first * T::kDepth + first + Rows::Row(0));
    for (int step = 0; step < piece.steps; ++step, tap.Next()) {
      const auto first_pixel = [&](int row, int (&at)[kRank]) {
#pragma unroll
        for (int d = 0; d < kRank; ++d) at[d] = tap.at[d];
        return row < Rows::kRows && tap.image < p.images ? tap.image : -1;
      };
      typename Rows::Found found;
      int last = -1;  // tap that they are of
#pragma unroll 1
      for (int u = 0; u < units.kCount; ++u) {
        int channel, offset[kRank];
        const int tap_of_unit = units.Get(u, &channel, offset);
        if (tap_of_unit != last) found = Rows::Find(p.patches.edges, offset, first_pixel);
        last = tap_of_unit;
        if (u == 0) hopper::WaitBarrier(ring.Between(ring.stage), ring.parity);
        Rows::Load(p.patches, found, ring.Data() + u * kUnitBytes<T> + first * kLineBytes, channel, ring.Full());
      }
      ring.Next();
    }
  }
}

// As ProduceX; but boxes of floats that another kernel has transposed are of pixels, and sets are one problem's.
template <class T>
__device__ void ProduceY(const FilterWgmmaParams& p, Ring<T> ring) {
  hopper::PrefetchMap(&p.y[0]);
  const bool transposed = kFloats<T> && !p.turns;
  for (Pieces piece(p.spans); piece.Next();) {
    const FilterTilePlace place(p, piece.tile, T());
    const CUtensorMap* const map = &p.y[piece.set];
    const MappedSet& set = p.set[piece.set];
    int pixel = piece.first * T::kDepth;
    FilterPosition position(set, set.y, pixel);
    for (int step = 0; step < piece.steps; ++step, pixel += T::kDepth) {
      BeginStage(ring, T::kBytesB);
      const auto load = [&](auto d) {
#pragma unroll
        for (int i = 0; i * T::kLine < T::kColumns; ++i) {
          const uint32_t to = ring.Data() + T::kBytesA + i * kUnitBytes<T>;
          const int column = place.column + i * T::kLine;
          if constexpr (decltype(d)::value > 0)
            hopper::LoadPixels<decltype(d)::value>(to, map, ring.Full(), column, position.at, position.image, {});
          else
            hopper::LoadBox(to, map, ring.Full(), transposed ? pixel : column, transposed ? column : pixel,
                            place.problem);
        }
      };
      if (p.by_sets) {
        hopper::VisitDimensions(p.dimensions, load);
        position.Next();
      } else {
        load(std::integral_constant<int, 0>());
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
