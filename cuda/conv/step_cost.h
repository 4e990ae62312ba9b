// What a step of a tile's main loop takes in the kernels on the CUDA cores, and in those with mma.sync.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// In cycles: `latency` when nothing else hides its loads, `busy` when other blocks do; and how many blocks share a
// multiprocessor.
struct StepCost {
  double latency, busy, resident;
};

// How lines of the operands come to shared memory, on the CUDA cores in whole chunks or in pieces, with mma.sync: in
// whole chunks of 16 bytes; with zeros between them, where groups are merged or phases lie side by side (Dense); in
// pieces those of the filter, or in its gradient of y or of few channels; or all in pieces.
enum class Lines { kWhole, kSpread, kSomeInPieces, kInPieces };

StepCost StepCostOf(Tile tile, Direction direction, DType in, Lines lines);

}  // namespace jaxdnn::conv
