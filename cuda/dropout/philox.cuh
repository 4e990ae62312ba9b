// Philox4x32-7: a counter and a key to four random words.
//
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011: seven rounds pass BigCrush,
// and ten would take longer than the memory. The same function in jnp is in jaxdnn/_dropout.py.
#pragma once

#include <cstdint>

namespace jaxdnn::dropout {

__device__ __forceinline__ uint4 Philox(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter.x, b = uint64_t{0xCD9E8D57} * counter.z;
    counter = {static_cast<uint32_t>(b >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(a)};
    key.x += 0x9E3779B9;
    key.y += 0xBB67AE85;
  }
  return counter;
}

}  // namespace jaxdnn::dropout
