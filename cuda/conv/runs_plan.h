// What the CUDA cores' kernels of few columns (data_runs_simt.cu) and small groups (filter_runs_simt.cu) take, how they
// share out work, and how long they do.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

constexpr int kRun = 8, kLanes = 8;                             // pixels of a run, and threads that share it
constexpr int kRunThreads = 128, kRuns = kRunThreads / kLanes;  // of a block
constexpr int64_t kMostFilterBytes = 96 << 10;

struct RunsShape {
  int group_lanes, chunks;         // lanes of a group, of eight; and its chunks of 32 channels
  int64_t sets, tiles, row_tiles;  // of groups; of runs to a block; and blocks of those
  int64_t filter_bytes;            // in shared memory
};
RunsShape RunsShapeOf(const Problem& p, int64_t columns);

// Of the filter gradient's (filter_runs_simt.cu).
constexpr int kFilterRunsWarps = 4;  // of a block, each with lines of its own

// Taps whose sums a thread has; blocks that a multiprocessor has at once; cycles that warps take for a pixel of y each,
// one block alone, all at once, and those with a stride.
struct FilterRunsTile {
  int lines, columns, at_once;
  double alone, all, strided;

  int64_t Parts(const Problem& p) const;  // of the window
  double Cycles(const Problem& p, int64_t blocks) const;
};

struct FilterRunsShape {
  FilterRunsTile tile;
  int64_t parts, units, lanes, sets;  // fours of channels by fours of features; lanes side by side; sets of so many
  int64_t length, sequences;          // pixels that a warp goes along at once; and how many such pieces a line has
  int64_t bands;                      // of those of as many lines as a block has at once

  int64_t Blocks(const Problem& p) const { return p.batch * parts * sets; }  // of a slice
};
FilterRunsShape FilterRunsShapeOf(const Problem& p, int64_t splits);

bool TakesRuns(const Problem& p);
double RunsCycles(const Problem& p, int64_t splits, int64_t columns);  // of all columns or, of data, of some

}  // namespace jaxdnn::conv
