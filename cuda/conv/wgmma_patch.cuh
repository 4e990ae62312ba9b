// Padding that is not zeros, in Hopper's forward convolution and data gradient: what the TMA unit has filled with zeros
// beyond an edge is overwritten with the elements that are read there, before the stage is multiplied.
//
// Two warps follow the loads of pixels, with half of a tile's rows each. Once a tap they look which of them leave the
// operand, and where that is mapped to; once a stage, when the zeros are there, they have the TMA unit load these rows'
// lines over them.
#pragma once

#include "cuda/conv/data_wgmma.cuh"
#include "cuda/conv/frame.h"

namespace jaxdnn::conv {

inline cudaError_t MakePatches(const Problem& p, const void* operand, int line, Patches* q) {
  const bool forward = p.direction == Direction::kForward;
  q->any = true;
  for (int d = 0; d < kRank; ++d) {
    const Reach reach = ReachOf(p, d);
    q->edges[d] = InputEdges(p, d);
    q->edges[d].mapped = reach.low > 0 || reach.high > 0;
    // A circular data gradient without strides is a circular convolution of y.
    if (!forward) q->edges[d].extent = int(p.y[d]);
  }
  return EncodeBoxes(&q->pixel, p.in, operand, {p.DepthChannels(), p.images * (forward ? p.XPixels() : p.YPixels()), 1},
                     {line, 1, 1});
}

// The rows of a tile that one of the warps looks after, a few to each lane.
template <class T>
struct PatchedRows {
  static constexpr int kRows = T::kRows / kPatchers, kEach = (kRows + 31) / 32;
  int image[kEach], at[kEach][kRank];  // where they read the operand at the first tap; image -1 if they do not

  __device__ PatchedRows(const WgmmaPhase& f, int first) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int row = Row(j);
      image[j] = FirstPixel(f, first + row, at[j]);
      if (f.tap_count == 0 || row >= kRows || first + row >= f.rows) image[j] = -1;
    }
  }

  static __device__ int Row(int j) { return 32 * j + threadIdx.x % 32; }

  // Notes down (row, pixel) for those that read beyond an edge at a tap, so far from the first; returns their number.
  __device__ int Find(const Edges (&edges)[kRank], const int (&offset)[kRank], int2* found) const {
    int count = 0;
    __syncwarp();  // the last tap's are read
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      bool exists = image[j] >= 0, beyond = false;
      int pixel = image[j];
#pragma unroll
      for (int d = 0; d < kRank; ++d) {
        const unsigned extent = edges[d].extent;
        int to = at[j][d] + offset[d];
        beyond |= static_cast<unsigned>(to) >= extent;
        exists &= edges[d].Find(&to) && static_cast<unsigned>(to) < extent;
        pixel = pixel * extent + to;
      }
      const uint32_t all = __ballot_sync(~0u, exists && beyond);
      if (exists && beyond) found[count + __popc(all & ((1u << threadIdx.x % 32) - 1))] = {Row(j), pixel};
      count += __popc(all);
    }
    __syncwarp();
    return count;
  }
};

template <class T>
__device__ void PatchStages(const WgmmaParams& p, Ring<T> ring, int warp, int2* found) {
  const int lane = threadIdx.x % 32, first = warp * PatchedRows<T>::kRows;
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    const WgmmaPlace place(p, tile, T());
    const WgmmaPhase& f = p.phase[place.phase];
    const PatchedRows<T> rows(f, place.row + first);
    int count = -1;
    const auto patch = [&](int line, int, const int (&offset)[kRank]) {
      if (count < 0 || line == 0) count = rows.Find(p.patches.edges, offset, found);
      hopper::WaitBarrier(ring.Between(ring.stage), ring.parity);
      if (lane == 0) hopper::ArriveExpecting(ring.Full(), count * kLineBytes);
#pragma unroll 1
      for (int i = lane; i < count; i += 32)
        hopper::LoadBox(ring.Data() + (first + found[i].x) * kLineBytes, &p.patches.pixel, ring.Full(), line * T::kLine,
                        found[i].y, 0);
      ring.Next();
    };
    const Share share(max(1, f.tap_count * p.lines), p.team);
    ForEachStep(p, f, share.first, share.end, patch);
  }
}

}  // namespace jaxdnn::conv
