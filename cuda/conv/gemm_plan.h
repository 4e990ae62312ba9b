// What the implicit matrix products on the CUDA cores and with mma.sync (simt.h, mma.h) take, and how long they do.
// Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Whether pixels' channels, and features, come in fours.
bool InFours(const Problem& p);

// How many of the last columns of float32 a second launch computes on the CUDA cores, in a narrow tile: a few beyond a
// multiple of the tile's would cost as much as all that it has, where all multiprocessors are busy.
int64_t NarrowRest(const Problem& p, const TileShape& t);
inline Tile NarrowTile(int64_t columns) { return columns > 4 ? Tile::kSimt256x8 : Tile::kSimt256x4; }

// Of float32 on the CUDA cores, a tile's rows may be the same few positions of many images, so that it can leave out
// the taps that these find in the padding. The share of all products that are left, on average and in the largest tile;
// all where that does not pay, and rows stay image by image.
struct MetShare {
  double average = 1, most = 1;
};
MetShare MetByPosition(const Problem& p, const TileShape& t);

// Whether blocks are so few, and sums so long, that one has several parts, which share the steps.
constexpr int kFloatParts = 4;
bool InFloatParts(const Problem& p, const TileShape& t);

bool TakesSimt(const Problem& p, const TileShape& t);
bool TakesMma(const Problem& p, const TileShape& t);
double GemmCycles(const Problem& p, const TileShape& t, int64_t splits);

}  // namespace jaxdnn::conv
