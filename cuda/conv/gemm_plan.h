// What the implicit matrix products on the CUDA cores and with mma.sync (simt.h, mma.h) take, and how long they do.
// Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// Whether pixels' channels, and features, come in fours.
bool InFours(const Problem& p);

// How blocks of float32 on the CUDA cores share out a tile. Rows may be the same few positions of many images, so that
// a tile can leave out the taps that these find in the padding. Where blocks are few and sums long, those of a cluster
// share a tile's steps, and blocks may have several parts, which do too. And a few columns beyond a multiple of the
// tile's, which would cost as much as all that it has, are a second launch's, in runs or a narrow tile.
constexpr int kFloatParts = 4;
FloatBlocks FloatBlocksOf(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster);
bool MayShareFloats(const Problem& p, const TileShape& t, int64_t cluster);

bool TakesSimt(const Problem& p, const TileShape& t);
bool TakesMma(const Problem& p, const TileShape& t);
double GemmCycles(const Problem& p, const TileShape& t, int64_t splits, int64_t cluster);

}  // namespace jaxdnn::conv
