// How the kernels of few input channels (few_channels.h) cut a convolution into tiles. A data gradient is the forward
// convolution that AsForward makes of it.
//
// Along the last dimension a window's values are next to each other in memory, so a line of it is one run of
// window[2] * channels elements, too short for 16-byte copies only by where it begins. Blocks copy whole strips of the
// input's lines, and read the runs from shared memory a word at a time. Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// A block's tile of y, `height` lines of `width` pixels, and the strips of x that it reads.
//
// Words are two elements of 16 bits. Where windows begin at odd distances from each other, even and odd pixels are two
// classes, whose windows begin in the other half of a word.
struct Strips {
  static constexpr int kStepWords = 8;  // of a step of the product's depth

  int classes, width, height;
  int copy_bytes;               // 16, 4, or one element
  int lead;                     // elements of a strip before the first pixel's window
  int front[2], line_words[2];  // by class: elements in the first word before the window, and words of a window's line
  int lines, plane_lines;       // of x: all, and those of one tap of the first dimension
  int line_bytes, pitch;        // of a strip, and from line to line

  // In a tile of at most `pixels`, with arrays aligned to `alignment` bytes. False where they take too
  // much memory, or the problem is none of this kind.
  bool Fit(const Problem& p, int pixels, int alignment);

  int Bytes() const { return lines * pitch; }
  int64_t Tiles(const Problem& p) const;
  int Steps(const Problem& p) const;  // of the depth, in the class with more of them
};

// Pixels of a tile. In the filter gradient the cotangent's tile too is in shared memory, in 32 KB.
constexpr int FewPixels(const Problem& p) { return p.direction == Direction::kForward ? 256 : 512 / SizeOf(p.in); }
constexpr int FewFeatures(const Problem& p) { return p.features > 32 ? 64 : 32; }
constexpr int kFewMostChannels = 7;
// Steps that the filter takes forward, of both classes together, where its shared memory is any device's or Hopper's.
constexpr int kFewMostSteps = 24, kFewMostStepsHopper = 32;
constexpr int kFewMostRows = 160;  // of the filter gradient that a block has

bool TakesFewChannels(const Problem& p, bool hopper);

// Modelled, of a problem as AsForward has it.
double FewChannelsCycles(const Problem& p, const Strips& s, int64_t splits);

}  // namespace jaxdnn::conv
