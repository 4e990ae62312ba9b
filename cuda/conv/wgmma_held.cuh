// The block-level product of floats by a matrix [terms, columns], which TF32's wgmma cannot read: the product's
// transpose is computed, with the columns' elements in registers, which can be had from shared memory in any order.
//
// A thread takes neighbouring columns, four or two of one load, as the rows of wgmma that it holds. So it has as many
// neighbouring elements of the result, and a warp 32, which it can store as they are.
#pragma once

#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

template <class T>
struct Held {
  static constexpr int kBlocks = T::kColumns / 64, kVector = 2 * kBlocks;  // columns of a thread
  static constexpr int kSlab = 32 * kLineBytes;                            // 32 terms of 32 columns
  using Sums = float[kBlocks][T::kRows / 2];

  // The thread's first column. Neighbouring threads' are 64 bytes apart, so that of four terms they meet in no bank.
  static __device__ int Column() {
    const int warp = threadIdx.x % kWarpgroup / 32, i = threadIdx.x % 32 / 4;
    if constexpr (kBlocks == 2) return 32 * warp + 16 * (i % 2) + 4 * (i / 2);
    return 32 * (warp / 2) + 16 * (i / 2 % 2) + 8 * (warp % 2) + 4 * (i / 4) + 2 * (i % 2);
  }
  // Of the T::kRows / 4 rows of which it has sums.
  static __device__ int Row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  // Its columns' sums of such a row.
  static __device__ Vec<float, kVector> Get(const Sums& sums, int i) {
    Vec<float, kVector> v;
#pragma unroll
    for (int k = 0; k < kVector; ++k) v.v[k] = sums[k / 2][i / 2 * 4 + k % 2 * 2 + i % 2];
    return v;
  }
  static __device__ void Add(Sums& sums, int i, const float (&more)[kVector]) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) sums[k / 2][i / 2 * 4 + k % 2 * 2 + i % 2] += more[k];
  }
};

// sums = (A B)^T over the ring's next `steps` stages, at least one, where B lies at `filter` of each, in slabs of 32
// columns. The last products run on; returns the stage that they read.
template <class Part, class T>
__device__ int MultiplyHeldSteps(Ring<T>& ring, int steps, uint32_t filter, typename Held<Part>::Sums& sums) {
  using H = Held<Part>;
  // Where the columns lie at the thread's first term, and at the one 4 below.
  const int column = H::Column(), term = threadIdx.x % 4, chunk = column % 32 / 4;
  const uint32_t place = filter + column / 32 * H::kSlab + column % 4 * 4,
                 first = place + term * kLineBytes + ((chunk ^ term) << 4),
                 second = place + (term + 4) * kLineBytes + ((chunk ^ (term + 4)) << 4);
  // A quarter's terms are loaded while earlier products run. Registers must not change before the product that reads
  // them is done, so each quarter has its own, and three products at most are under way when the next one's are loaded.
  uint32_t held[4][H::kBlocks][4];
  const auto load = [&](int quarter) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      uint32_t words[H::kVector];
      hopper::LoadWords(words, ring.Data() + (below ? second : first) + quarter * 8 * kLineBytes);
#pragma unroll
      for (int i = 0; i < H::kVector; ++i) held[quarter][i / 2][2 * below + i % 2] = words[i];
    }
  };

  hopper::WaitBarrier(ring.Full(), ring.parity);
  load(0);
  int last = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint64_t rows = hopper::Descriptor(ring.Data(), T::kSlab);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      hopper::WaitForProducts<2>();
      if (quarter == 2 && step > 0) Release(ring, last);
      hopper::BeginProducts();
#pragma unroll
      for (int m = 0; m < H::kBlocks; ++m)
        hopper::MultiplyHeld<Part::kRows>(sums[m], held[quarter][m], rows + quarter * (32 >> 4),
                                          step > 0 || quarter > 0);
      hopper::CommitProducts();
      if (quarter < 3) load(quarter + 1);
    }
    last = ring.stage;
    ring.Next();
    if (step + 1 == steps) break;
    hopper::WaitBarrier(ring.Full(), ring.parity);
    load(0);
  }
  return last;
}

// The same of all columns, by the warpgroup whose turn it is at the block's tile of this number.
template <class T>
__device__ void MultiplyHeldStages(Ring<T>& ring, int steps, int number, typename Held<T>::Sums& sums) {
  BeginTurn(ring, number);
  const int last = MultiplyHeldSteps<T>(ring, steps, T::kBytesA, sums);
  EndTurn(ring, number, last, sums);
}

}  // namespace jaxdnn::conv
