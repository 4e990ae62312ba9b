// What the direct kernels (direct.h) take, how they cut it up, and how long that takes. A data gradient is the forward
// convolution that AsForward makes of it. Plain host declarations.
//
// A unit has the positions of the operand that some lines of results see in shared memory, those of an image, of
// several, or of a part of one, and a group's channels of each. They lie in one row after the other, of a pitch that
// has room for what the window sees beside them: a result's position is a row, and a tap of the window the row that is
// always as far from it.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// A problem as one of images: a line is an image of one, and planes that no window leaves are images. Of volumes a unit
// has planes of the result that are one by one, and of the operand as many as the window.
//
// With strides, lines are dealt out to as many parts, and so are the pixels of a line, so that in each part the next
// result's window begins a row later. Or, where they make a line of shared memory, so many pixels are one row of their
// channels; those at the end of a line that are no whole row are brought beside the TMA unit.
struct DirectView {
  static constexpr int kMostParts = 4;  // of a plane
  int64_t images;                       // of a problem
  int64_t x[2], y[2], window[2], dilation[2], pad[2], stride[2];
  int64_t beside;    // pixels of a row
  int64_t parts[2];  // of the lines, and of their pixels
  int64_t residues = 1;
  // Of volumes; else one of each.
  bool volumes;
  int64_t x_planes, y_planes, window_planes, plane_dilation, plane_pad, plane_stride;

  bool Fit(const Problem& p);
  // Where a window's lines are so far apart, takes those of both arrays that are for images of their own, as many as
  // there are residues of a line's number: what a window sees beside some lines is less then. There must be whole ones.
  void TakeResidues();
  // Rows, or lines of a part, before the first result's; how many pixels or lines after them its window begins; and
  // those that the last of its taps is after the first.
  int64_t Before(int d) const;
  int64_t First(int d) const { return Before(d) * stride[d] - pad[d]; }
  int64_t Reach(int d) const { return (First(d) + (window[d] - 1) * dilation[d]) / stride[d]; }
  int64_t Taps() const { return window_planes * window[0] * window[1]; }
  int64_t PlaneParts() const { return parts[0] * parts[1]; }
  int64_t Parts() const { return window_planes * PlaneParts(); }
  int64_t WholeRows() const { return x[1] / beside; }
  int64_t PixelsLeft() const { return x[1] % beside; }
};

// The channels, features and number of groups that are computed as one: `merged` neighbours, whose filter is zero off
// its diagonal. Channels that agree but for their last `log` bits are of the same group.
struct DirectGroups {
  static constexpr int kMergedChannels = 32;
  int merged = 1, log = 30;
  int64_t groups, channels, features;

  DirectGroups() = default;
  DirectGroups(const Problem& p, int merged);
  // How many small groups would be one; 1 where they are not.
  static int Mergeable(const Problem& p);
  // Whether groups are an array of their own to the TMA unit: those merged are in one line, of which none is half in a
  // box.
  bool Apart() const { return merged == 1 && groups > 1; }
};

struct DirectPlan {
  static constexpr int kMostSteps = 4;
  static constexpr int kAtOnce = 3, kMostStepsAtOnce = 2, kMostColumnsAtOnce = 32;  // taps, as registers allow
  static constexpr int kRows = 256;                                                 // of a unit's products
  static constexpr int kMostStages = 8;                                             // of some taps of the filter
  static constexpr int kMostOperands = 2;
  // Blocks to a multiprocessor, as registers allow, with so many columns.
  template <int kColumns>
  static constexpr int kTogether = kColumns == 32 ? 3 : 2;
  static constexpr int kMergedTogether = 2;
  static constexpr int kMostSharedBytes = 227 << 10, kBarrierBytes = 1024;

  DirectView view;
  DirectGroups of;
  int columns;                    // of a unit's products: 32, 48 or 64 results
  int steps;                      // of 16 channels
  int x_line, filter_line;        // bytes of a row of the operand, and of the filter
  int images, height, width;      // of a unit's results
  int pitch, box_columns, boxes;  // of the operand's lines, of which a box of the TMA unit has no more than 256 columns
  int part_bytes, x_bytes;        // of the operand in shared memory, of a part of its lines and in all
  int taps_at_once;               // of a line, between two waits for products: kAtOnce or 1
  int stage_taps, stages, x_stages;
  bool resident;   // whether the stages hold all of a filter
  int slab_bytes;  // of a tap
  int image_tiles, line_tiles, column_tiles, feature_tiles;
  int64_t units, blocks;
  double cycles;

  bool Fit(const Problem& p, bool forward);
  int SharedBytes() const;
  int Lines() const { return int(height + view.Reach(0)); }  // of a box

 private:
  bool FitGroups(const Problem& p, bool forward, int merged);
  void FitShape(int64_t of_width);
};

// Of the filter gradient, whose sums go over the positions of y, 16 at a time. Those of a piece are some runs of as
// many positions: of lines that both arrays have in the same pitch, y with zeros at the end of each, whole images are
// runs; else single lines are. A product's rows are 64 channels of x at a tap, or 32 or 16 at as many neighbouring taps
// of a line; a block has all taps, or a range of them, and its warpgroups share these products out.
struct DirectFilterPlan {
  static constexpr int kWarpgroups = 3, kMostProducts = 3, kMostStages = 8;
  static constexpr int kTerms = 16;  // of a product
  static constexpr int kAtOnce = 2;  // products of each tap

  DirectView view;
  DirectGroups of;
  int columns;                // features of a block: 32, 48 or 64
  int x_line, y_line;         // bytes of a position in shared memory
  int neighbours;             // taps of a product
  int line_products;          // of a line of the window
  int products;               // of a warpgroup, at most
  int ranges, range_columns;  // of the products; and between those of a single line, of x
  int feature_tiles;
  int images, height, width;               // of a piece of y
  int pitch, x_lines, y_columns, y_lines;  // of its boxes
  int runs, run_chunks, x_run, y_run;      // chunks of 16 positions; from one run to the next it is so many positions
  int x_rows, y_rows;                      // in the boxes
  int x_more, y_more;                      // and after them, of zeros
  int x_bytes, y_bytes, stages;
  int image_tiles, line_tiles, column_tiles;
  int64_t pieces;  // of a problem
  int64_t units;   // blocks of a slice

  bool Fit(const Problem& p);
  double PieceCycles() const;

 private:
  int64_t RangeReach() const;  // of the taps of a range
  bool FitShape(const Problem& p, bool by_lines, int64_t of_width, int64_t of_height);
};

bool TakesDirect(const Problem& p);
double DirectCycles(const Problem& p, int64_t splits);
int64_t DirectPieces(const Problem& p);  // of the filter gradient

}  // namespace jaxdnn::conv
