// The block-level product of floats by a matrix [terms, columns], which TF32's wgmma cannot read: the product's
// transpose is computed, with the columns' elements in registers, which can be had from shared memory in any order.
//
// A thread takes neighbouring columns, four or two of one load, as the rows of wgmma that it holds. So it has as many
// neighbouring elements of the result, and a warp 32, which it can store as they are.
#pragma once

#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

template <int kAllRows, int kColumns>
struct Held {
  static constexpr int kBlocks = kColumns / 64, kVector = 2 * kBlocks;  // columns of a thread
  static constexpr int kRows = std::min(kAllRows, 128), kRowBlocks = kAllRows / kRows;
  static constexpr int kSlab = 32 * kLineBytes;  // 32 terms of 32 columns
  using Sums = float[kBlocks * kRowBlocks][kRows / 2];

  // The thread's first column. Neighbouring threads' are 64 bytes apart, so that of four terms they meet in no bank.
  static __device__ int Column() {
    const int warp = threadIdx.x % kWarpgroup / 32, i = threadIdx.x % 32 / 4;
    if constexpr (kBlocks == 2) return 32 * warp + 16 * (i % 2) + 4 * (i / 2);
    return 32 * (warp / 2) + 16 * (i / 2 % 2) + 8 * (warp % 2) + 4 * (i / 4) + 2 * (i % 2);
  }
  // Of its sums, kVector of every row in turn, the row of the tile.
  static __device__ int Row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
};

// // sums = (A B)^T over the ring's next `steps` stages, at least one, by one warpgroup. A lies K-major at `rows` in a
// stage, and B at `columns` in slabs of 32 of them. Calls wait() for each stage, and end() when all products are
// issued.
template <class H, class T, class Wait, class End>
__device__ void MultiplyHeldStages(Ring<T>& ring, int steps, uint32_t rows, uint32_t columns, const Wait& wait,
                                   const End& end, typename H::Sums& sums) {
  using Terms = Vec<uint32_t, H::kVector>;
  // Where the columns lie at the thread's first term, and at the one 4 below.
  const int column = H::Column(), term = threadIdx.x % 4, chunk = column % 32 / 4;
  const uint32_t place = columns + column / 32 * H::kSlab + column % 4 * 4,
                 first = place + term * kLineBytes + ((chunk ^ term) << 4),
                 second = place + (term + 4) * kLineBytes + ((chunk ^ (term + 4)) << 4);

  int last = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait();
    // Half a stage's products run on while the other half's columns are loaded.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hopper::WaitForProducts<1>();
      if (half == 1 && step > 0) Release(ring, last);
      uint32_t b[2][H::kBlocks][4];
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int below = 0; below < 2; ++below) {
          const uint32_t at = ring.Data() + (below ? second : first) + (2 * half + k) * 8 * kLineBytes;
          Terms t;
          if constexpr (H::kVector == 4)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(t.v[0]), "=r"(t.v[1]), "=r"(t.v[2]), "=r"(t.v[3])
                         : "r"(at)
                         : "memory");
          else
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(t.v[0]), "=r"(t.v[1]) : "r"(at) : "memory");
#pragma unroll
          for (int i = 0; i < H::kVector; ++i) b[k][i / 2][2 * below + i % 2] = t.v[i];
        }
      hopper::BeginProducts();
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int m = 0; m < H::kBlocks; ++m)
#pragma unroll
          for (int n = 0; n < H::kRowBlocks; ++n)
            hopper::MultiplyHeld<H::kRows>(
                sums[m * H::kRowBlocks + n], b[k][m],
                hopper::Descriptor(ring.Data() + rows + n * H::kRows * kLineBytes, T::kSlab) +
                    (2 * half + k) * (32 >> 4),
                step > 0 || half > 0 || k > 0);
      hopper::CommitProducts();
    }
    last = ring.stage;
    ring.Next();
  }
  end();
  hopper::WaitForProducts<0>();
  Release(ring, last);
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& each : block) asm volatile("" : "+f"(each));
}

}  // namespace jaxdnn::conv
