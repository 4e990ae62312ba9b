// Neighbouring lanes of a warp exchange words, until each has neighbouring ones of its own.
#pragma once

#include <cstdint>

namespace jaxdnn::conv {

// Exchanges words between the lanes whose numbers differ in `bit`: the lower gets both lanes' `a`, the upper both `b`.
__device__ __forceinline__ void Exchange(uint32_t& a, uint32_t& b, int bit) {
  const bool upper = threadIdx.x & bit;
  const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? a : b, bit);
  (upper ? a : b) = got;
}

// Four neighbouring lanes have words of the same kTiles tiles, in order; lane t gets four (or two) words of one tile.
template <int kTiles>
__device__ __forceinline__ void Transpose(uint32_t (&words)[kTiles]) {
#pragma unroll
  for (int j = 0; j < kTiles; j += 2) Exchange(words[j], words[j + 1], 1);
  if constexpr (kTiles == 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) Exchange(words[j], words[j + 2], 2);
  }
}

// The column, of the tiles' 8 kTiles, with which a lane's run of neighbours begins after that.
template <int kTiles>
__device__ __forceinline__ int FirstOfRun() {
  const int t = threadIdx.x % 4;
  return kTiles == 4 ? 8 * t : t % 2 * 8 + t / 2 * 4;
}

}  // namespace jaxdnn::conv
