// How Hopper's kernels of few channels (filled.cuh) cut a convolution into pieces. Plain host declarations.
//
// In shared memory pixels of x are filled up to four channels, so that one of floats, or two neighbours of 16 bits, are
// a chunk of 16 bytes. With a stride of so many pixels, the next result's window begins a chunk later: that is how
// wgmma's operands without swizzle lie, so that results are its rows, and a line of the window some chunks, in place.
// With a larger stride chunks are dealt out to so many parts of a line, in each of which that is so.
#pragma once

#include <algorithm>

#include "cuda/conv/conv.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {

// What kernels are compiled for: at most so many lines of a window, and pixels of one with those before it that its
// first chunks have, the stride along a line, and times 64 features that a block has. ResNet's first layer is of the
// first, ConvNeXt's in 16-bit floats of the second (in others its lines are whole chunks): its units have few products,
// so that their strips are brought once for all features.
struct FilledShape {
  int lines, pixels, stride, tiles;
};
constexpr FilledShape kFilledShapes[] = {{7, 8, 2, 1}, {4, 4, 4, 2}};

struct FilledPlan {
  static constexpr int kHeight = 8, kColumns = 8, kResults = kHeight * kColumns;  // of a unit, which a product has
  static constexpr int kFeatures = 64;                                            // of a product
  static constexpr int kChannels = 4;                                             // of a pixel
  // The filter in shared memory, forward: a term's features in a line, and so many bytes, so that matrix loads of eight
  // lines meet in no bank. Of a volume of 16-bit floats it stays there, so much for each plane, of which there are
  // some.
  static constexpr int kFilterPad = 16;
  static constexpr int kFilterBytes =
      kFilledShapes[0].lines * kFilledShapes[0].pixels * kChannels * (kFeatures * 2 + kFilterPad);
  static constexpr int kMostPlanes = 3;

  int shape;       // of kFilledShapes
  bool volume;     // whether windows have planes, in the first shape
  int planes;      // of x, which a stage has the strips of
  int front;       // pixels of a window's chunks before its own
  int lead;        // strides before the first window: lines are loaded in fours of pixels
  int line_units;  // of a line of y
  int units;       // of a piece, side by side, at most
  int lines;       // of its strip of x
  int fours;       // of pixels in one of them
  int pitch;       // bytes from one to the next
  int bands, groups, column_tiles;
  int64_t pieces;

  // False where the problem is none of this kind.
  bool Fit(const Problem& p);

  // Blocks that share the pieces of a column tile: one of each multiprocessor.
  static constexpr int Workers(int column_tiles) { return std::max(1, kMultiprocessors / column_tiles); }
  int StripBytes() const { return planes * lines * pitch; }
  // Of y, whose pixels are lines of 128 bytes, in the filter gradient.
  int CotangentBytes() const { return kFilledShapes[shape].tiles * kResults * units * kFeatures * 2; }

 private:
  bool FitShape(const Problem& p);
  void SetGroups(const Problem& p, int64_t n);
};

bool TakesFilled(const Problem& p);
int64_t FilledPieces(const Problem& p);
double FilledCycles(const Problem& p, int64_t splits);

}  // namespace jaxdnn::conv
