// What the Hopper kernels (wgmma.h) take, and how long that takes. Plain host declarations.
#pragma once

#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {

// Whether the tile's kernel can do the problem, on a device that has it.
bool TakesWgmma(const Problem& p, const TileShape& t);

// Whether so many blocks may share a tile (wgmma_team.cuh).
bool MayShare(const Problem& p, const TileShape& t, int64_t blocks);

// Whether the edges of an image in these dimensions, by bits, may be computed apart (pixel_map.h), in one tile's steps.
bool MaySplitEdges(const Problem& p, const TileShape& t, int edges);

// Whether blocks go over the tiles there and back, those of most taps first, so that who had many next has few: where a
// phase is less than a round of tiles, or phases are as different as the edges of an image. Others share the phases
// evenly, and what neighbours store is neighbours in memory.
bool Alternates(const Problem& p, int edges, int phases, const MappedPhase& first, int tile_rows, int64_t tiles_of_row);

// Whether a 128x128 tile's filter stays in shared memory (KeptTile), of 16-bit floats, forward and in the data
// gradient: where sums are of few steps, and each of the blocks, which then have one column of tiles each, has several
// tiles of it.
constexpr int kMostKeptSteps = 4;
bool KeepsFilter(const Problem& p, const Config& config);

// Bytes of workspace for a copy of an operand that wgmma wants K-major, since TF32 has no MN-major operands: forward,
// of some tiles, the filter, and y in the filter gradient, which can do without. Of three products a term the filter's
// two parts, in the data gradient too.
int64_t TransposedBytes(const Problem& p, const TileShape& t);

// The tiles of a set of taps (pixel_map.h), and the steps of each.
struct SetTiles {
  int64_t tiles, steps;
};

// A filter gradient's tiles, one set's after the other's, which `blocks` blocks share (filter_spans.cuh): by tiles, or
// by steps; those of several sets only by steps.
struct FilterShape {
  SetTiles sets[kMaxMaps];
  int count;            // of the sets
  int64_t tiles, work;  // of all; and their steps
  bool left;            // whole tiles too go to the workspace first: blocks have a part of one tile each, or one

  // Pieces of tiles that a block may have to leave in the workspace.
  int64_t Slots(int64_t blocks) const {
    if (count > 1) return 2;
    if (blocks % tiles == 0) return blocks > tiles || left;
    return tiles % blocks == 0 ? 0 : 2;
  }
};
FilterShape FilterShapeOf(const Problem& p, const TileShape& t, int edges);

// Whether a filter gradient's x is read like y, pixel by pixel, so that zeros are past a problem's last one and not
// what the next one has: of 1x1 windows on all of x.
bool ReadsXAsItLies(const Problem& p);

// The best of a filter gradient's configurations of that tile within `workspace_limit` bytes.
std::optional<Config> PlanFilterWgmma(const Problem& p, const TileShape& t, int64_t workspace_limit, int edges);

// The modelled time of the others.
double WgmmaCycles(const Problem& p, const TileShape& t, int64_t cluster, int edges);

}  // namespace jaxdnn::conv
