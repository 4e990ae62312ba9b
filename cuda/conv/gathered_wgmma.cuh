// The block-level matrix product of mma_tile.cuh with wgmma, which reads what asynchronous copies have gathered from
// anywhere, where both operands are K-major: their lines of 128 bytes lie as TMA's swizzle would leave them.
#pragma once

#include "cuda/common/hopper.cuh"
#include "cuda/conv/mma_tile.cuh"

namespace jaxdnn::conv {

// A warp has 16 rows and all columns of sums, which is how wgmma holds them.
template <class In_, Direction kDirection, int kRows_, int kColumns_, int kBlocks_>
struct GatheredTile : MmaTile<In_, kDirection, kRows_, kColumns_, kRows_ / 16, 1, kBlocks_, 1, 128 / int(sizeof(In_))> {
  static constexpr int kStages = 4;
};

template <class T>
constexpr bool kIsGathered = false;
template <class In, Direction kDirection, int kRows, int kColumns, int kBlocks>
constexpr bool kIsGathered<GatheredTile<In, kDirection, kRows, kColumns, kBlocks>> = true;

// As MultiplyPipelined. Warpgroups whose sums are not wanted only load.
template <class In, class T, class LoadA, class LoadB>
__device__ void MultiplyGathered(uint32_t ring, int steps, LoadA& load_a, LoadB& load_b, typename T::Sums& sums,
                                 bool wanted) {
  using TileA = typename LoadA::Tile;
  using TileB = typename LoadB::Tile;
  constexpr int kLine = 128, kSlab = 64 * kLine, kStageBytes = TileA::kBytes + TileB::kBytes;
  static_assert(TileA::kAlongDepth && TileB::kAlongDepth && T::kDepth * sizeof(In) == kLine);
  auto& own = reinterpret_cast<float (&)[T::kColumns / 2]>(sums);
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t stage = ring + step % T::kStages * kStageBytes;
      load_a(step, stage);
      load_b(step, stage + TileA::kBytes);
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int step = 0; step < T::kStages - 1; ++step) {
    __syncthreads();  // between any two steps: a loader may prepare the next one in shared memory
    load(step);
  }
  if (!wanted) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      WaitForCopies<T::kStages - 2>();
      hopper::ShowSharedToTma();
      __syncthreads();
      load(step + T::kStages - 1);
    }
  } else {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      WaitForCopies<T::kStages - 2>();
      hopper::ShowSharedToTma();  // and to wgmma
      __syncthreads();
      const uint32_t stage = ring + step % T::kStages * kStageBytes;
      const uint64_t a = hopper::Descriptor(stage + threadIdx.x / 128 * kSlab, kSlab);
      const uint64_t b = hopper::Descriptor(stage + TileA::kBytes, kSlab);
      hopper::BeginProducts();
#pragma unroll
      for (int k = 0; k < kLine / 32; ++k)
        hopper::Multiply<In, T::kColumns, false, false>(own, a + k * (32 >> 4), b + k * (32 >> 4), true);
      hopper::CommitProducts();
      load(step + T::kStages - 1);
      hopper::WaitForProducts<0>();
#pragma unroll
      for (float& sum : own) asm volatile("" : "+f"(sum));
    }
  }
  WaitForCopies<0>();
  __syncthreads();
}

}  // namespace jaxdnn::conv
