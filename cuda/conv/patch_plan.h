// What the CUDA cores' kernel of patches (data_patch_simt.cu) takes, how it cuts a problem, and how long it does.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

constexpr int kPatchThreads = 128, kPatchEach = 8;  // pixels of a thread, and columns

// Tiles of the result's pixels of a plane, and the patches of the operand that they meet.
struct PatchTiles {
  int rows, width;       // pixels
  int64_t lines, pitch;  // of the operand, of a plane of the window; and its numbers in a line
  int64_t tiles;         // of a problem
};

struct PatchShape {
  PatchTiles tile;
  int across;                      // threads that share a pixel
  int64_t columns, depth, slices;  // of a block; terms of a sum; blocks that share the tiles
  int64_t shared_bytes, resident;  // of a block; blocks of a multiprocessor
};
PatchShape PatchShapeOf(const Problem& p);

bool TakesPatch(const Problem& p);
double PatchCycles(const Problem& p);

// And of the filter gradient's (filter_patch_simt.cu), whose threads have eight terms and eight features each: as many
// as there are terms make a group, and groups have different pixels of a tile, of some rows and columns.
struct FilterPatchShape {
  PatchTiles tile;
  int across, down;         // threads of a group, along features and terms
  int groups, row_groups;   // of a block; and those that have different rows
  int threads, flush;       // of a block; tiles after which it adds up what it has
  int64_t features, depth;  // of a block; terms
  int64_t shared_bytes, resident;
};
FilterPatchShape FilterPatchShapeOf(const Problem& p);

bool TakesFilterPatch(const Problem& p);
double FilterPatchCycles(const Problem& p, int64_t splits);

}  // namespace jaxdnn::conv
