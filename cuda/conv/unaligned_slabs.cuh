// How the filter comes to shared memory where channels are unaligned: a kernel lays it out in the workspace, from where
// bulk copies bring it slab by slab.
#pragma once

#include "cuda/common/vec.cuh"
#include "cuda/conv/unaligned.cuh"

namespace jaxdnn::conv {

// Lays out the filter: slabs of a tile's columns, a strip's taps and a slice of the channels, tap by tap. A thread has
// a chunk, and a slab's are columns by the depth's chunks.
template <class In>
__global__ void __launch_bounds__(256)
    ArrangeFilterKernel(const __grid_constant__ UnalignedParams q, FastDiv slab_chunks, FastDiv taps, FastDiv slices,
                        FastDiv groups, bool forward, const In* filter, int chunks, uint4* slabs) {
  constexpr int kColumns = UnalignedPlan::kColumns, kVec = kVecLength<In>;
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= chunks) return;
  int in_slab, tap, slice, group;
  const int column_tile = groups.Div(slices.Div(taps.Div(slab_chunks.Div(i, &in_slab), &tap), &slice), &group);
  tap += group * taps.divisor;
  const int mine = in_slab % kColumns, column = column_tile * q.columns + mine;
  const int channel = (slice * 2 * q.steps + in_slab / kColumns) * kVec;
  Vec<In, kVec> chunk;
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const int at = channel + k;
    const bool exists = at < q.channels && mine < q.columns && column < q.features;
    const int64_t from = forward ? (int64_t{tap} * q.channels + at) * q.features + column
                                 : (int64_t{q.taps - 1 - tap} * q.features + column) * q.channels + at;
    chunk.v[k] = filter[exists ? from : 0];
    if (!exists) chunk.v[k] = static_cast<In>(0.0f);
  }
  uint4 bits = *reinterpret_cast<const uint4*>(&chunk);
  if constexpr (sizeof(In) == 4) RoundToTf32(reinterpret_cast<uint32_t (&)[4]>(bits));
  slabs[i] = bits;
}

// Launches it.
template <class In>
cudaError_t ArrangeFilter(const UnalignedParams& q, const Problem& p, const void* filter, int64_t bytes, void* slabs,
                          cudaStream_t stream) {
  if (const cudaError_t e = DivideForNext(ArrangeFilterKernel<In>); e != cudaSuccess) return e;
  const int chunks = int(bytes / 16);
  return LaunchKernel(ArrangeFilterKernel<In>, CeilDiv(chunks, 256), 256, stream, q, FastDiv(q.slab_bytes / 16),
                      FastDiv(q.tap_lines * q.window_width), FastDiv(q.slices), FastDiv(q.groups),
                      p.direction == Direction::kForward, static_cast<const In*>(filter), chunks,
                      static_cast<uint4*>(slabs));
}

// What brings the filter: one of the threads that multiply. Those of a tile are as many slabs in the order that they
// are used in.
template <class T>
struct SlabCopies {
  const unsigned char* slabs;
  int all, tile, next;  // of a tile; the tile's and the slab's that is next
  hopper::RingPlace turn;

  __device__ SlabCopies(const UnalignedParams& q, const unsigned char* slabs)
      : slabs(slabs), all(q.groups * q.slices * q.tap_lines * q.window_width), tile(blockIdx.x), next(0) {}

  __device__ void Begin(const UnalignedParams& q, const UnalignedShared<T>& shared) {
    for (int i = 0; i < q.slabs; ++i) Next(q, shared);
  }
  __device__ void Next(const UnalignedParams& q, const UnalignedShared<T>& shared) {
    if (tile >= q.tiles) return;
    int column_tile;
    q.column_tiles_div.Div(tile, &column_tile);
    hopper::WaitBarrier(shared.SlabEmpty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(shared.SlabFull(turn.stage), q.slab_bytes);
    hopper::CopyBulk(shared.slabs + turn.stage * q.slab_bytes, slabs + int64_t{column_tile * all + next} * q.slab_bytes,
                     q.slab_bytes, shared.SlabFull(turn.stage));
    turn.Next(q.slabs);
    if (++next == all) next = 0, tile += gridDim.x;
  }
};

}  // namespace jaxdnn::conv
