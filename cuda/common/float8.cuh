// 8-bit floats, every value of which float16 has too: e4m3 (no infinity, one NaN) and e5m2 (float16's upper half).
// Which of the two is known at run time, so that kernels are compiled once for both and for their mixture.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace jaxdnn {

struct Float8 {
  uint8_t bits;
};

// Of the operands of a product: which are e5m2.
struct Float8Kinds {
  bool a, b;
};

// The lower or upper two bytes of `word` as float16.
template <bool kUpper>
__device__ __forceinline__ uint32_t WidenFloat8(uint32_t word, bool e5m2) {
  const uint32_t as_e5m2 = __byte_perm(word, 0, kUpper ? 0x3424 : 0x1404);
#if __CUDA_ARCH__ >= 890
  uint32_t as_e4m3;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(as_e4m3) : "h"(static_cast<uint16_t>(kUpper ? word >> 16 : word)));
#else
  // Exponent and mantissa a bit further down are float16's, 2^8 too small; the carry of NaN alone goes past them.
  const uint32_t magnitude = (as_e5m2 & 0x7F007F00u) >> 1, nan = (magnitude + 0x00800080u) >> 14 & 0x00010001u;
  uint32_t as_e4m3;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(as_e4m3) : "r"(magnitude), "r"(0x5C005C00u));
  as_e4m3 |= (as_e5m2 & 0x80008000u) | nan * 0x7E00u;
#endif
  return e5m2 ? as_e5m2 : as_e4m3;
}

__device__ inline float ToFloat(Float8 v, bool e5m2) {
  const uint32_t pair = WidenFloat8<false>(v.bits, e5m2);
  __half2 halves;
  memcpy(&halves, &pair, sizeof(halves));
  return __low2float(halves);
}
template <class T>
__device__ float ToFloat(T v, bool) {
  return static_cast<float>(v);
}

}  // namespace jaxdnn
