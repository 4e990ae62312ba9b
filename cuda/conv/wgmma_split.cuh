// Forward convolution and data gradient of floats by three products of TF32: what splits the operands into large parts
// and rests.
#pragma once

#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

// Two warps come between loads and products where there are three of a term: they leave the large parts of A in its
// place, and store the rests.
constexpr int kSplitters = 2;
template <class T>
__device__ void SplitStage(const Ring<T>& ring, int splitter) {
  constexpr int kThreads = kSplitters * 32;
  static_assert(T::kBytesA % (16 * kThreads) == 0, "whole rounds of the threads");
  hopper::WaitBarrier(ring.Full(), ring.parity);
  const uint32_t first = ring.Data() + (splitter * 32 + threadIdx.x % 32) * 16;
#pragma unroll 4
  for (int i = 0; i < T::kBytesA; i += 16 * kThreads) {
    uint32_t words[4], rests[4];
    hopper::LoadWords(words, first + i);
    SplitTf32(words, rests);
    hopper::StoreWords(first + i, words);
    hopper::StoreWords(first + i + T::kRests, rests);
  }
  hopper::ShowSharedToTma();
  hopper::Arrive(ring.Between(ring.stage));
}

// The parts of so many fours as they lie.
constexpr int kSplitThreads = 256;
static __global__ void __launch_bounds__(kSplitThreads)
    SplitKernel(const Words<float, 4>* in, Words<float, 4>* out, Words<float, 4>* rests, int64_t fours) {
  const int64_t i = blockIdx.x * int64_t{kSplitThreads} + threadIdx.x;
  if (i >= fours) return;
  Words<float, 4> v = in[i], rest;
  SplitTf32(v.v, rest.v);
  out[i] = v;
  rests[i] = rest;
}

inline cudaError_t LaunchSplit(const float* in, float* out, float* rests, int64_t size, cudaStream_t stream) {
  const int64_t fours = size / 4;
  return LaunchKernel(SplitKernel, CeilDiv(fours, kSplitThreads), kSplitThreads, stream,
                      reinterpret_cast<const Words<float, 4>*>(in), reinterpret_cast<Words<float, 4>*>(out),
                      reinterpret_cast<Words<float, 4>*>(rests), fours);
}

}  // namespace jaxdnn::conv
