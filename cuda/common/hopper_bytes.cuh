// Hopper's matrix products of 8-bit operands (sm_90a), which a warpgroup reads from shared memory, both K-major. PTX
// ISA 8.0: wgmma.mma_async.m64nNk32 of s8, e4m3 and e5m2.
#pragma once

#include "cuda/common/wgmma.cuh"

namespace jaxdnn::hopper {

#define JAXDNN_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define JAXDNN_SUMS4(as, i) as(d[i]), as(d[i + 1]), as(d[i + 2]), as(d[i + 3])
#define JAXDNN_SUMS16(as, i) \
  JAXDNN_SUMS4(as, i), JAXDNN_SUMS4(as, i + 4), JAXDNN_SUMS4(as, i + 8), JAXDNN_SUMS4(as, i + 12)
#define JAXDNN_SUMS32(as, i) JAXDNN_SUMS16(as, i), JAXDNN_SUMS16(as, i + 16)
#define JAXDNN_WGMMA(n, types, operands, a, b, add, more, ...)                                                         \
  asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, " add ", 0;\n wgmma.mma_async.sync.aligned.m64n" n "k32." types \
               " {" operands "}, " a ", " b ", add" more ";\n}"                                                        \
               : __VA_ARGS__                                                                                           \
               : "l"(a_tile), "l"(b_tile), "r"(int{add_to})                                                            \
               : "memory")
#define JAXDNN_WGMMA_OF_TYPES(types, more, as)                                                                \
  if constexpr (kColumns == 64) {                                                                             \
    JAXDNN_WGMMA("64", types, JAXDNN_TEN() JAXDNN_TEN(1) JAXDNN_TEN(2) "%30, %31", "%32", "%33", "%34", more, \
                 JAXDNN_SUMS32(as, 0));                                                                       \
  } else {                                                                                                    \
    static_assert(kColumns == 128);                                                                           \
    JAXDNN_WGMMA("128", types,                                                                                \
                 JAXDNN_TEN() JAXDNN_TEN(1) JAXDNN_TEN(2) JAXDNN_TEN(3) JAXDNN_TEN(4)                         \
                     JAXDNN_TEN(5) "%60, %61, %62, %63",                                                      \
                 "%64", "%65", "%66", more, JAXDNN_SUMS32(as, 0), JAXDNN_SUMS32(as, 32));                     \
  }

// d += A B, or d = A B where `add_to` is false, of 64 rows, kColumns columns and 32 terms, by the 128 threads of a
// warpgroup, which hold d as of 16-bit floats (hopper.cuh). Integers wrap.
template <int kColumns>
__device__ inline void MultiplyIntegers(int (&d)[kColumns / 2], uint64_t a_tile, uint64_t b_tile, bool add_to) {
  if constexpr (kAvailable) {
    JAXDNN_WGMMA_OF_TYPES("s32.s8.s8", "", "+r")
  }
}

template <bool kE5M2A, bool kE5M2B, int kColumns>
__device__ inline void MultiplyFloats8(float (&d)[kColumns / 2], uint64_t a_tile, uint64_t b_tile, bool add_to) {
  if constexpr (!kAvailable) {
  } else if constexpr (kE5M2A && kE5M2B) {
    JAXDNN_WGMMA_OF_TYPES("f32.e5m2.e5m2", ", 1, 1", "+f")
  } else if constexpr (kE5M2A) {
    JAXDNN_WGMMA_OF_TYPES("f32.e5m2.e4m3", ", 1, 1", "+f")
  } else if constexpr (kE5M2B) {
    JAXDNN_WGMMA_OF_TYPES("f32.e4m3.e5m2", ", 1, 1", "+f")
  } else {
    JAXDNN_WGMMA_OF_TYPES("f32.e4m3.e4m3", ", 1, 1", "+f")
  }
}

#undef JAXDNN_TEN
#undef JAXDNN_SUMS4
#undef JAXDNN_SUMS16
#undef JAXDNN_SUMS32
#undef JAXDNN_WGMMA
#undef JAXDNN_WGMMA_OF_TYPES

}  // namespace jaxdnn::hopper
