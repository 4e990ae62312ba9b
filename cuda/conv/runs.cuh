// Stores a row's neighbouring features, of which a thread has a run.
#pragma once

#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/exchange.cuh"
#include "cuda/conv/wgmma_store.cuh"

namespace jaxdnn::conv {

template <int kWords>
__device__ __forceinline__ void StoreWords(void* to, const uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4)
    __stwb(static_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
  else
    __stwb(static_cast<uint2*>(to), make_uint2(words[0], words[1]));
}

template <class Out, int kRun>
__device__ __forceinline__ void StoreRun(const float (&run)[kRun], Out* to) {
  if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int i = 0; i < kRun; i += 4)
      __stwb(reinterpret_cast<float4*>(to + i), make_float4(run[i], run[i + 1], run[i + 2], run[i + 3]));
  } else {
    uint32_t words[kRun / 2];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) words[i] = Pack<Out>(run[2 * i], run[2 * i + 1]);
    StoreWords(to, words);
  }
}

// Of a row of kTiles tiles of eight columns, as wgmma's sums lie, the thread's two of each tile become a run.
template <int kTiles>
__device__ __forceinline__ void GatherRun(const float* row, float (&run)[2 * kTiles]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    uint32_t words[kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) words[j] = __float_as_uint(row[4 * j + e]);
    Transpose(words);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) run[2 * j + e] = __uint_as_float(words[j]);
  }
}

// The same, of sums that are stored as they are.
template <class Out, int kTiles>
__device__ __forceinline__ void GatherPacked(const float* row, uint32_t (&words)[kTiles]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) words[j] = Pack<Out>(row[4 * j], row[4 * j + 1]);
  Transpose(words);
}

}  // namespace jaxdnn::conv
