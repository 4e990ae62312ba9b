// Padding that is not zeros, in Hopper's kernels: what the TMA unit has filled with zeros beyond an edge is overwritten
// with the elements that are read there, before the stage is multiplied.
//
// Two warps follow the loads of pixels, with half of a stage's rows each. Once a tap they look which of them leave the
// operand, and where that is mapped to; once a stage, when the zeros are there, they have the TMA unit load these rows'
// lines over them: eight at once where they are neighbours in the operand too, as they are beyond the ends of all
// dimensions but the last.
#pragma once

#include "cuda/conv/edges.cuh"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

// What is read beyond edges, if anything is.
struct Patches {
  CUtensorMap pixel, run;  // of lines of channels, pixel by pixel and kRun side by side
  Edges edges[kRank];
};

// Of x, or in the data gradient of y.
inline cudaError_t MakePatches(const Problem& p, const void* operand, int line, Patches* q) {
  const bool gradient = p.direction == Direction::kDataGradient;
  for (int d = 0; d < kRank; ++d) q->edges[d] = OperandEdges(p, d);
  const int64_t pixels = p.images * (gradient ? p.YPixels() : p.XPixels()),
                channels = gradient ? p.features : p.channels;
  const cudaError_t e = EncodeBoxes(&q->pixel, p.in, operand, {channels, pixels, 1}, {line, 1, 1});
  return e == cudaSuccess ? EncodeBoxes(&q->run, p.in, operand, {channels, pixels, 1}, {line, kRun, 1}) : e;
}

// The rows of a stage that one of the warps looks after, a few to each lane.
template <int kRows_>
struct PatchedRows {
  static constexpr int kRows = kRows_, kEach = (kRows + 31) / 32;
  int image[kEach], at[kEach][kRank];  // where they read the operand at the first tap; image -1 if they do not

  static __device__ int Row(int j) { return 32 * j + threadIdx.x % 32; }

  // Which rows read beyond an edge at a tap: how many in all, and of the lane's the pixel, or -1 where it loads none.
  struct Found {
    int rows, pixel[kEach];
  };
  static constexpr int kWhole = 1 << 30;  // added to a pixel that kRun are loaded from

  // Of a tap so far from the first.
  __device__ Found Find(const Edges (&edges)[kRank], const int (&offset)[kRank]) const {
    const int lane = threadIdx.x % 32;
    Found found = {};
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      int to[kRank], pixel = image[j];
      bool mine = false;
#pragma unroll
      for (int d = 0; d < kRank; ++d) {
        to[d] = at[j][d] + offset[d];
        mine |= static_cast<unsigned>(to[d]) >= static_cast<unsigned>(edges[d].extent);
      }
      found.pixel[j] = -1;
      // In most places nobody leaves the operand.
      if (!__any_sync(~0u, mine)) continue;
      mine &= image[j] >= 0;
#pragma unroll
      for (int d = 0; d < kRank; ++d) {
        mine &= edges[d].FindAny(&to[d]);
        pixel = pixel * edges[d].extent + to[d];
      }
      const uint32_t all = __ballot_sync(~0u, mine);
      if (mine) found.pixel[j] = pixel;
      if (__popc(all) >= kRun) {
        // The lane's place among those that follow one another.
        const uint32_t below = (1u << lane) - 1, above = ~below << 1;
        const bool follows = __shfl_up_sync(~0u, pixel, 1) + 1 == pixel && lane > 0 && (all >> (lane - 1) & 1);
        const uint32_t starts = __ballot_sync(~0u, mine && !follows), ends = (starts | ~all) & above;
        const int start = 31 - __clz(starts & ~above), end = ends == 0 ? 32 : __ffs(ends) - 1;
        if (mine && lane - start < (end - start) / kRun * kRun)
          found.pixel[j] = (lane - start) % kRun == 0 ? pixel + kWhole : -1;
      }
      found.rows += __popc(all);
    }
    return found;
  }

  // Begins to load a line of channels of those found, where `to` is the first row's place; and arrives.
  static __device__ void Load(const Patches& patches, const Found& found, uint32_t to, int channel, uint32_t barrier) {
    if (threadIdx.x % 32 == 0) hopper::ArriveExpecting(barrier, found.rows * kLineBytes);
    if (found.rows == 0) return;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (found.pixel[j] >= 0)
        hopper::LoadBox(to + Row(j) * kLineBytes, found.pixel[j] >= kWhole ? &patches.run : &patches.pixel, barrier,
                        channel, found.pixel[j] % kWhole, 0);
  }
};

}  // namespace jaxdnn::conv
