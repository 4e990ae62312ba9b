// What the CUDA cores' kernel of few columns (data_runs_simt.cu) takes, how it shares out work, and how long it does.
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
RunsShape RunsShapeOf(const Problem& p);

bool TakesRuns(const Problem& p);
double RunsCycles(const Problem& p);

}  // namespace jaxdnn::conv
