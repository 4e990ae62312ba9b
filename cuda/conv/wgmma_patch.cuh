// Padding that is not zeros, in Hopper's forward convolution and data gradient: what the TMA unit has filled with zeros
// beyond an edge is overwritten with the elements that are read there, before the stage is multiplied.
//
// Two warps follow the loads of pixels, with half of a tile's rows each. Once a tap they look which of them leave the
// operand, and where that is mapped to; once a stage, when the zeros are there, they have the TMA unit load these rows'
// lines over them: eight at once where they are neighbours in the operand too, as they are beyond the ends of all
// dimensions but the last.
#pragma once

#include "cuda/conv/data_wgmma.cuh"

namespace jaxdnn::conv {

inline cudaError_t MakePatches(const Problem& p, const void* operand, int line, Patches* q) {
  const bool forward = p.direction == Direction::kForward;
  q->any = true;
  for (int d = 0; d < kRank; ++d) q->edges[d] = OperandEdges(p, d);
  const int64_t pixels = p.images * (forward ? p.XPixels() : p.YPixels());
  const cudaError_t e = EncodeBoxes(&q->pixel, p.in, operand, {p.DepthChannels(), pixels, 1}, {line, 1, 1});
  return e == cudaSuccess ? EncodeBoxes(&q->run, p.in, operand, {p.DepthChannels(), pixels, 1}, {line, kRun, 1}) : e;
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

  struct Found {
    int loads, rows;
  };
  static constexpr int kWhole = 1 << 16;  // added to the first row of kRun

  // Notes down (row, pixel) for those that read beyond an edge at a tap, so far from the first.
  __device__ Found Find(const Edges (&edges)[kRank], const int (&offset)[kRank], int2* found) const {
    const int lane = threadIdx.x % 32;
    Found count = {};
    __syncwarp();  // the last tap's are read
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      int to[kRank], pixel = image[j];
      bool mine = false;
#pragma unroll
      for (int d = 0; d < kRank; ++d) {
        to[d] = at[j][d] + offset[d];
        mine |= static_cast<unsigned>(to[d]) >= static_cast<unsigned>(edges[d].extent);
      }
      // In most places nobody leaves the operand.
      if (!__any_sync(~0u, mine)) continue;
      mine &= image[j] >= 0;
#pragma unroll
      for (int d = 0; d < kRank; ++d) {
        mine &= edges[d].FindAny(&to[d]);
        pixel = pixel * edges[d].extent + to[d];
      }
      const uint32_t all = __ballot_sync(~0u, mine), below = (1u << lane) - 1, above = ~below << 1;
      bool load = mine, whole = false;
      if (__popc(all) >= kRun) {
        // The lane's place among those that follow one another.
        const bool follows = __shfl_up_sync(~0u, pixel, 1) + 1 == pixel && lane > 0 && (all >> (lane - 1) & 1);
        const uint32_t starts = __ballot_sync(~0u, mine && !follows), ends = (starts | ~all) & above;
        const int start = 31 - __clz(starts & ~above), end = ends == 0 ? 32 : __ffs(ends) - 1;
        whole = lane - start < (end - start) / kRun * kRun;
        load = mine && (!whole || (lane - start) % kRun == 0);
      }
      const uint32_t loads = __ballot_sync(~0u, load);
      if (load) found[count.loads + __popc(loads & below)] = {Row(j) + (whole ? kWhole : 0), pixel};
      count.loads += __popc(loads);
      count.rows += __popc(all);
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
    typename PatchedRows<T>::Found count = {-1, 0};
    const auto patch = [&](int line, int, const int (&offset)[kRank]) {
      if (count.loads < 0 || line == 0) count = rows.Find(p.patches.edges, offset, found);
      hopper::WaitBarrier(ring.Between(ring.stage), ring.parity);
      if (lane == 0) hopper::ArriveExpecting(ring.Full(), count.rows * kLineBytes);
#pragma unroll 1
      for (int i = lane; i < count.loads; i += 32) {
        const bool whole = found[i].x >= PatchedRows<T>::kWhole;
        const int row = first + found[i].x % PatchedRows<T>::kWhole;
        hopper::LoadBox(ring.Data() + row * kLineBytes, whole ? &p.patches.run : &p.patches.pixel, ring.Full(),
                        line * T::kLine, found[i].y, 0);
      }
      ring.Next();
    };
    const Share share(max(1, f.tap_count * p.lines), p.team);
    ForEachStep(p, f, share.first, share.end, patch);
  }
}

}  // namespace jaxdnn::conv
