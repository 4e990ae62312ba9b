// What the TMA unit's im2col mode can walk: which convolutions are columns of pixels, each column moved by a tap.
//
// The unit goes over base pixels in a box, from `lower` to the operand's last index plus `upper`, `step` apart, width
// first, then height, depth and images; every load moves all of them by one offset per dimension and reads zeros where
// that leaves the operand. So a forward convolution's rows are base pixels and its taps offsets, and so are those of
// each phase (conv.h) of a data gradient or of a convolution over a dilated input. Plain host code.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Phases that one launch takes: those of stride 2 in three dimensions; or the middle, edges and corners of a plane.
constexpr int kMaxMaps = 9;

struct PixelMap {
  int dimensions;  // the last so many; the others have one index, which is 0
  int lower[kRank], upper[kRank], step[kRank];
};

// Positions first + period i, i < positions, of the result, in the order of the base pixels lower + step i; and taps
// j < taps of the operand, which are the window's first_tap + tap_period j, at offset `distance` j, or from the other
// end where they are reversed.
//
// Where windows lie side by side, as wide as the steps between them, every phase meets one tap, and all at the same
// pixels: `alike` of them in a dimension have one map. The a-th has positions a further on, and the a-th tap after
// first_tap, or before it where they are not reversed.
struct MappedPhase {
  PixelMap map;
  int alike[kRank];
  int64_t rows;  // positions of all images
  int positions[kRank], first[kRank], period[kRank];
  int taps[kRank], first_tap[kRank], tap_period[kRank], distance[kRank];
  bool reversed[kRank];
  int tap_count;

  int Alike() const { return alike[0] * alike[1] * alike[2]; }
};

// The phases of a forward convolution or data gradient, or the one of a filter gradient's walk over x; 0 if the unit's
// limits, or an input with holes, do not allow them.
//
// In the dimensions whose bits `edges` has, positions whose windows leave the operand are phases of their own, without
// the taps that none of them finds there.
int MapPhases(const Problem& p, MappedPhase (&phases)[kMaxMaps], int edges = 0);

// Taps of a filter gradient, a box of the window, whose sums are over the same positions of y: all taps; or, in the
// dimensions whose bits `edges` has, those that meet x at all positions, and those that do not at the first ones or at
// the last.
struct TapSet {
  PixelMap x, y;  // what the first tap meets, and y there
  int positions[kRank], first[kRank], taps[kRank];

  int64_t Positions() const { return int64_t{positions[0]} * positions[1] * positions[2]; }
  int Count() const { return taps[0] * taps[1] * taps[2]; }
};

constexpr int kMostInSets = 64;  // taps of a window, where there are several sets

// How many there are; 0 if the unit's limits do not allow them.
int MapTaps(const Problem& p, TapSet (&sets)[kMaxMaps], int edges = 0);

// Whether the one phase there is stands for as many as there are taps. Then a row of all of their results is the
// product of one row of the operand and the whole filter, with (tap, channel) pairs as its columns.
inline bool TapsAreColumns(const Problem& p, int phases, const MappedPhase& f) {
  return p.groups == 1 && phases == 1 && f.Alike() > 1 && f.Alike() == p.Taps();
}

// Whether any 64 rows of a tile are then a box of each phase's pixels in the result, of two dimensions at most.
inline bool RowsAreBoxes(const MappedPhase& f) {
  const int width = f.positions[2];
  return f.positions[0] == 1 && f.alike[0] == 1 && (width % 64 == 0 || 64 % width == 0);
}

}  // namespace jaxdnn::conv
