// Tiles of the filter gradient that the two warpgroups compute together: both take every stage, and half of the rows.
// Those of floats: while one loads its rows into registers, the other's products run. And large ones, of which a stage
// has more products to what it brings.
#pragma once

#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

template <class In, int kRows, int kColumns, bool kTripled = false>
using FilterTile = WgmmaTile<In, kRows, kColumns, false, false, true, kTripled>;

template <class T>
constexpr bool kFloats = sizeof(typename T::In) == 4;

// Bytes of a unit in a stage, of so many rows.
template <class T>
constexpr int kUnitBytes = T::kDepth * kLineBytes;

// Where y has not been transposed by another kernel, these warps do so, in place, when a stage is full.
constexpr int kTurners = 2;

// Swaps the two coordinates of 32 pixels by as many features, and puts the even ones of every eight pixels first. Both
// sides are lines of 128 bytes, swizzled. A thread has two squares of four by four, and eight threads meet no bank
// twice, neither in lines of pixels nor in those of features. Where there are three products of a term, the rests go
// kRests bytes further.
template <int kRests>
__device__ void TransposeFloats(uint32_t square) {
  const int lane = threadIdx.x % 32, c = lane % 8, r = lane / 8;  // of four features
  const int g = ((c & 4) | (c & 1) << 1 | (c >> 1 & 1)) ^ r;      // and of four pixels, even or odd ones of eight
  uint32_t v[2][4][4];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint32_t from = square + ((g ^ (4 * s)) / 2 * 8 + g % 2) * kLineBytes + ((c ^ (g % 2)) << 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) hopper::LoadWords(v[s][i], (from ^ (i << 5)) + 2 * i * kLineBytes);
  }
  __syncwarp();
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint32_t to = square + 4 * c * kLineBytes + ((g ^ (4 * s) ^ (4 * (c % 2))) << 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t feature[4] = {v[s][0][j], v[s][1][j], v[s][2][j], v[s][3][j]};
      if constexpr (kRests > 0) {
        uint32_t rests[4];
        SplitTf32(feature, rests);
        hopper::StoreWords((to ^ (j << 4)) + j * kLineBytes + kRests, rests);
      }
      hopper::StoreWords((to ^ (j << 4)) + j * kLineBytes, feature);
    }
  }
}

template <class T>
__device__ void TransposeStage(const Ring<T>& ring, int turner) {
  hopper::WaitBarrier(ring.Full(), ring.parity);
#pragma unroll 1
  for (int i = turner; i < T::kColumns / 32; i += kTurners)
    TransposeFloats<T::kTripled ? T::kRests : 0>(ring.Data() + T::kBytesA + i * 32 * kLineBytes);
  hopper::ShowSharedToTma();
  hopper::Arrive(ring.Between(ring.stage));
}

template <class T>
constexpr bool kTogether = kFloats<T> || T::kLarge;

// sums = A B over the ring's next `steps` stages, at least one, with the rows of A in registers, when B is `turned`.
template <class T>
__device__ void MultiplyHeldStages(Ring<T>& ring, int steps, int warpgroup, bool turned,
                                   typename HalfTile<T>::Sums& sums) {
  constexpr int kBlocks = HalfTile<T>::kBlocks;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
  // Where in the stage the thread's four elements of the first eight pixels are: two channels of two pixels.
  uint32_t place[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = (16 * warp + lane / 4 + 8 * (i % 2)) % T::kLine, pixel = lane % 4 * 2 + i / 2;
    place[i] = warpgroup * kBlocks * T::kSlab + 16 * warp / T::kLine * kUnitBytes<T> + pixel * kLineBytes +
               ((channel / 4 ^ pixel) << 4) + channel % 4 * 4;
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::WaitBarrier(ring.Full(), ring.parity);
    uint32_t a[kBlocks][4][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          asm volatile("ld.shared.b32 %0, [%1];"
                       : "=r"(a[m][k][i])
                       : "r"(ring.Data() + place[i] + m * T::kSlab + k * 8 * kLineBytes)
                       : "memory");
    uint32_t rests[kBlocks][4][4];
    if constexpr (T::kTripled) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
#pragma unroll
        for (int k = 0; k < 4; ++k) SplitTf32(a[m][k], rests[m][k]);
    }
    if (turned) hopper::WaitBarrier(ring.Between(ring.stage), ring.parity);
    const uint64_t b = hopper::Descriptor(ring.Data() + T::kBytesA, T::kSlab);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const uint64_t columns = b + k * (32 >> 4);
        const bool add = step > 0 || k > 0;
        if constexpr (T::kTripled) {
          hopper::MultiplyHeld<T::kColumns>(sums[m], rests[m][k], columns, add);
          hopper::MultiplyHeld<T::kColumns>(sums[m], a[m][k], columns + (T::kRests >> 4), true);
        }
        hopper::MultiplyHeld<T::kColumns>(sums[m], a[m][k], columns, T::kTripled || add);
      }
    hopper::CommitProducts();
    hopper::WaitForSums(sums);
    Release(ring, ring.stage);
    ring.Next();
  }
}

}  // namespace jaxdnn::conv
