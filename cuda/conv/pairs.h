// Pairs of neighbouring pixels taken for one of twice the channels, of convolutions that step over two pixels of the
// last dimension, whose channels are half a line of what Hopper's kernels read or store (data_pairs_wgmma.cu). Plain
// host code.
#pragma once

#include <optional>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

constexpr int kPairChannels = 32;  // of a pixel

// Which of the filter's taps in the last dimension the pixels of a pair meet, in place of each of the view's: as one
// of its elements is found by the filter's own extents, the view's do not describe it.
struct PairTaps {
  bool of_result;  // whether the result has pairs, or what is gathered
  int taps;        // of the filter
  int first;       // that the first of a pair meets at the view's first tap, and two more at each
  int second;      // what the second of a pair's tap is beyond that: 1, or -1
};

// The same arrays x and y, one of which has pairs for pixels, so that no step is left.
struct Pairs {
  Problem view;
  PairTaps taps;
};

// Empty where there are no such pairs, or too few taps to be worth it.
std::optional<Pairs> PairsOf(const Problem& p);

}  // namespace jaxdnn::conv
