// How the sums of Hopper's tiles leave their registers: in slabs of shared memory for the TMA unit, or as they are.
#pragma once

#include <type_traits>

#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

template <class In>
__device__ uint32_t Pack(float a, float b) {
  const Vec<In, 2> v = {static_cast<In>(a), static_cast<In>(b)};
  uint32_t word;
  memcpy(&word, &v, sizeof(word));
  return word;
}

// Some of a tile's rows, in whole parts.
struct Rows {
  int first, end;

  __device__ bool Has(int row) const { return first <= row && row < end; }
};

// Calls f with `which`, one of kCount numbers from kFirst on, as a type: for registers, which have no index.
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void WithConstant(int which, const F& f) {
  if constexpr (kCount == 1) {
    f(std::integral_constant<int, kFirst>());
    asm volatile("");  // or the compiler makes one of all cases, which takes from memory what was in registers
  } else if (constexpr int kHalf = kCount / 2; which < kFirst + kHalf) {
    WithConstant<kHalf, kFirst>(which, f);
  } else {
    WithConstant<kCount - kHalf, kFirst + kHalf>(which, f);
  }
}

// Writes a slab: 64 rows and a line of columns, or what there is of one, in the operands' type, swizzled as the TMA
// unit wants them.
template <class In>
__device__ __forceinline__ void WriteSlab(uint32_t slab, const float* v, int columns) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  constexpr int kHalf = kLineBytes / sizeof(In) / 2;  // of a thread's sums: a number that unrolls
  if constexpr (sizeof(In) == 2) {
    const int row = 16 * warp + lane % 16;
#pragma unroll
    for (int i = 0; i < kHalf; i += 8) {
      if (i >= columns / 2) break;
      const uint32_t words[4] = {Pack<In>(v[i], v[i + 1]), Pack<In>(v[i + 2], v[i + 3]), Pack<In>(v[i + 4], v[i + 5]),
                                 Pack<In>(v[i + 6], v[i + 7])};
      hopper::StoreMatrices(slab + row * kLineBytes + (((i / 4 + lane / 16) ^ (row % 8)) << 4), words);
    }
  } else {
    const int row = 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < kHalf; i += 2)
      hopper::StorePair(
          slab + (row + i / 2 % 2 * 8) * kLineBytes + (((i / 4 * 2 + lane % 4 / 2) ^ (row % 8)) << 4) + lane % 2 * 8,
          v[i], v[i + 1]);
  }
}

// Hands these rows' sums on in slabs: store(row, column, slab) begins to store one, whose first row and column in the
// tile these are, and may be called for the next before it is done. The threads of the warpgroup call it together.
// `turn` is whose turn it is of the slabs. Each has code of its own: one loop for all takes 8 % longer where sums are
// of few steps.
template <class T, class Store>
__device__ void StoreSlabs(uint32_t slabs, int warpgroup, const typename T::Sums& sums, const Rows& rows, int& turn,
                           const Store& store) {
#pragma unroll
  for (int m = 0; m < T::kBlocks; ++m) {
    if (!rows.Has(m * 64)) continue;
#pragma unroll
    for (int line = 0; line < T::kColumns; line += T::kLine, turn = (turn + 1) % kSlabCount<T>) {
      const uint32_t slab = slabs + (warpgroup * kSlabCount<T> + turn) * T::kSlab;
      if (threadIdx.x % kWarpgroup == 0) hopper::WaitForStoreReads<kSlabCount<T> - 1>();
      hopper::SyncWarpgroup(1 + warpgroup);
      WriteSlab<typename T::In>(slab, &sums[m][line / 2], min(T::kLine, T::kColumns - line));
      store(m * 64, line, slab);
    }
  }
}

// Exchanges words among four neighbouring lanes: v[i] becomes what lane i of them has in v[lane].
__device__ inline void TransposeQuad(uint32_t (&v)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
    v[i] = odd ? other : v[i];
    v[i + 1] = odd ? v[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? v[i] : v[i + 2], 2);
    v[i] = upper ? other : v[i];
    v[i + 2] = upper ? v[i + 2] : other;
  }
}

// Stores the sums as they are, in whole sectors of memory: address(row) is where the tile's first column of a row is,
// in elements of `out`, or -1 for no row; of the columns those below `count` exist. A thread's rows take turns, and so
// do a row's parts of 16-bit floats, 32 columns each, of which some leave together; since only to read registers takes
// code of their own.
template <class T, class Out, class Address>
__device__ void StoreSums(const typename T::Sums& sums, Out* out, int count, const Address& address) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  constexpr int kParts = sizeof(Out) == 2 ? T::kColumns / 32 : 1, kTogether = kParts <= 5 ? kParts : 4;
  static_assert(kParts % kTogether == 0, "whole turns");
  constexpr int kTurns = kParts / kTogether;
#pragma unroll 1
  for (int which = 0; which < 2 * T::kBlocks; ++which) {
    const int64_t offset = address(which / 2 * 64 + which % 2 * 8 + thread / 32 * 16 + lane / 4);
    Out* const to = out + offset;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      uint32_t words[kTogether][4] = {};
      WithConstant<2 * T::kBlocks * kTurns>(which * kTurns + turn, [&](auto constant) {
        constexpr int i = decltype(constant)::value;
        const float* v = &sums[i / kTurns / 2][i % kTurns * kTogether * 16 + i / kTurns % 2 * 2];
        if constexpr (sizeof(Out) == 2) {
#pragma unroll
          for (int k = 0; k < 4 * kTogether; ++k) words[k / 4][k % 4] = Pack<Out>(v[4 * k], v[4 * k + 1]);
        } else {
#pragma unroll
          for (int j = 0; j < T::kColumns / 8; ++j) {
            const int column = 8 * j + 2 * (lane % 4);
            if (offset >= 0 && column < count) *reinterpret_cast<Vec<Out, 2>*>(to + column) = {v[4 * j], v[4 * j + 1]};
          }
        }
      });
      if constexpr (sizeof(Out) == 2) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          TransposeQuad(words[k]);
          const int column = 32 * (turn * kTogether + k) + 8 * (lane % 4);
          if (offset >= 0 && column < count)
            *reinterpret_cast<uint4*>(to + column) = {words[k][0], words[k][1], words[k][2], words[k][3]};
        }
      }
    }
  }
}

}  // namespace jaxdnn::conv
