// What the mma.sync kernels of the forward convolution and the data gradient share: the rows that a thread gathers, and
// how the sums leave.
#pragma once

#include "cuda/conv/mma_tile.cuh"
#include "cuda/conv/taps.cuh"

namespace jaxdnn::conv {

// The rows that a thread copies chunks of: where they read at the block's first tap, and which taps they have.
template <class Mine, class In>
struct GatheredRows {
  const In* first[Mine::kCount];
  TapRange taps[Mine::kCount];

  template <int kRows>
  __device__ GatheredRows(const DataParams& p, const DataBlock& block, const Row (&tile)[kRows], const In* in) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const Row& row = tile[Mine::Line() + j * Mine::kLinesApart];
      const int64_t line = int64_t{row.origin[0]} * p.axis[1].extent + row.origin[1];
      first[j] = in + row.image + (line * p.axis[2].extent + row.origin[2]) * p.pixel_size;
      taps[j] = TapRange(row, p, block.phase);
    }
  }
};

// The operand, in pieces of kVec elements.
template <class T, int kVec, class In>
struct LoadOperand {
  using Tile = OperandTile<In, T::kRows, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const int depth, place;
  Walk walk;
  const GatheredRows<Mine, In> rows;

  __device__ LoadOperand(const DataParams& p, const DataBlock& block, const Row (&tile)[T::kRows], const In* in,
                         int depth)
      : p(p),
        block(block),
        depth(depth),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>),
        rows(p, block, tile, in) {}

  __device__ void operator()(int step, uint32_t stage) {
    if constexpr (kVec == kChunk<In>) {
      Copy<kVec>(stage + place, walk);
      walk.template Advance<T::kDepth>(p, block.phase);
    } else {
      // The chunk's elements may belong to several taps.
#pragma unroll 1
      for (int i = 0; i < kChunk<In>; i += kVec)
        Copy<kVec>(stage + place + sizeof(In) * i,
                   Walk(p, block.taps, step * T::kDepth + Mine::Chunk() * kChunk<In> + i));
    }
  }

  template <int kN>
  __device__ void Copy(uint32_t to, const Walk& at) const {
    const int64_t offset = at.operand + at.channel;
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j)
      CopyElements<kN>(to + Mine::Step(j), rows.first[j] + offset, rows.taps[j].Contains(at.packed));
  }
};

// Stores the block's sums, through the epilogue if there is one. address(row, column) says where to, or is -1;
// bias(column) is the place of a column's bias, and `wide` whether floats come of shorter operands.
template <class T, bool kForward, class In, class Address, class Bias>
__device__ __forceinline__ void StoreData(const DataParams& p, unsigned char* ring, const typename T::Sums& sums,
                                          const Address& address, const Bias& bias, bool whole_runs, bool wide,
                                          void* out) {
  const auto store = [&](auto* result) {
    if constexpr (kForward)
      if (!IsNone(p.epilogue)) return StoreFinished<T>(ring, sums, result, address, whole_runs, p.epilogue, bias);
    StoreSums<T, kChunk<In>>(ring, sums, result, address, whole_runs);
  };
  if (sizeof(In) == 4 || wide) {
    store(static_cast<float*>(out));
  } else {
    store(static_cast<In*>(out));
  }
}

}  // namespace jaxdnn::conv
