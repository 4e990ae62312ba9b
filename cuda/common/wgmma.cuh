// Hopper's matrix products of a warpgroup, which read shared memory by themselves (sm_90a; PTX ISA 8.0:
// wgmma.mma_async).
#pragma once

#include "cuda/common/hopper.cuh"

namespace jaxdnn::hopper {

// Describes an operand to wgmma: lines of 128 bytes, whose 16-byte chunks are exchanged within 1024 bytes as TMA's
// 128-byte swizzle does. Lines are rows of 64 terms of the reduction (K-major), 8 rows in 1024 bytes; or 64 rows of one
// term (MN-major), 8 terms in 1024 bytes and the next 64 rows `next` bytes on.
__device__ inline uint64_t Descriptor(uint32_t address, uint32_t next) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kGroup = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kGroup | uint64_t{next >> 4} << 16 | (address & 0x3ffff) >> 4;
}

// Describes an operand in lines of 32, 64 or 128 bytes, whose chunks are exchanged as TMA's swizzle of as many bytes
// does. It goes by the address, so that the operand may begin with any line. From eight lines to the next, and,
// MN-major, from the columns that a line holds to those after them, it is so many bytes.
__device__ inline uint64_t LineDescriptor(uint32_t address, int line_bytes, uint32_t next_eight,
                                          uint32_t next_columns) {
  const uint64_t swizzle = uint64_t{line_bytes == 128 ? 1u : line_bytes == 64 ? 2u : 3u} << 62;
  return swizzle | uint64_t{next_eight >> 4} << 32 | uint64_t{next_columns >> 4} << 16 | (address & 0x3ffff) >> 4;
}

// Describes an operand whose chunks of 16 bytes lie as they are, each 8 rows (K-major) or terms (MN-major) in 128
// bytes, which may begin on any 16. From one chunk, and from one eight, to the next it is so many bytes.
__device__ inline uint64_t PlainDescriptor(uint32_t address, uint32_t next_chunk, uint32_t next_eight,
                                           bool transposed) {
  const uint64_t leading = transposed ? next_eight : next_chunk, stride = transposed ? next_chunk : next_eight;
  return (stride >> 4) << 32 | (leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The operand so many times 16 bytes later.
__device__ inline uint64_t Later(uint64_t descriptor, uint32_t more) {
  return descriptor >> 32 << 32 | (static_cast<uint32_t>(descriptor) + more);
}

// Calls f with the number of steps, as a type: products that nothing stands between run on together.
template <int kMost, class F>
__device__ __forceinline__ void VisitSteps(int steps, const F& f) {
  if constexpr (kMost > 1) {
    if (steps < kMost) return VisitSteps<kMost - 1>(steps, f);
  }
  f(std::integral_constant<int, kMost>());
}

// Marks where the sums' registers are handed to wgmma.
__device__ inline void BeginProducts() {
  if constexpr (kAvailable) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void CommitProducts() {
  if constexpr (kAvailable) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the newest kPending groups are done.
template <int kPending>
__device__ inline void WaitForProducts() {
  if constexpr (kAvailable) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// What products sum up is in its registers, and nothing that is done with it moves before this.
__device__ __forceinline__ void Settle(float& sum) { asm volatile("" : "+f"(sum)); }
__device__ __forceinline__ void Settle(int& sum) { asm volatile("" : "+r"(sum)); }
template <class Sums, int kN>
__device__ __forceinline__ void Settle(Sums (&sums)[kN]) {
#pragma unroll
  for (auto& each : sums) Settle(each);
}
// Until all products are done.
template <class Sums>
__device__ __forceinline__ void WaitForSums(Sums& sums) {
  WaitForProducts<0>();
  Settle(sums);
}

// An instruction's operands can only be written out.
#define JAXDNN_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define JAXDNN_TO_29 JAXDNN_TEN() JAXDNN_TEN(1) JAXDNN_TEN(2)
#define JAXDNN_TO_59 JAXDNN_TO_29 JAXDNN_TEN(3) JAXDNN_TEN(4) JAXDNN_TEN(5)
#define JAXDNN_TO_89 JAXDNN_TO_59 JAXDNN_TEN(6) JAXDNN_TEN(7) JAXDNN_TEN(8)
#define JAXDNN_TO_127 \
  JAXDNN_TO_89 JAXDNN_TEN(9) JAXDNN_TEN(10) JAXDNN_TEN(11) "%120" \
                                                           ", %121, %122, %123, %124, %125, %126, %127"
#define JAXDNN_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXDNN_SUMS16(i) JAXDNN_SUMS4(i), JAXDNN_SUMS4(i + 4), JAXDNN_SUMS4(i + 8), JAXDNN_SUMS4(i + 12)
#define JAXDNN_SUMS64(i) JAXDNN_SUMS16(i), JAXDNN_SUMS16(i + 16), JAXDNN_SUMS16(i + 32), JAXDNN_SUMS16(i + 48)
// Of m64nNkK; the operands after the sums are a, b, whether to add to the sums, and, of 16 bits, which are transposed.
#define JAXDNN_TRANSPOSED(t, u) ", %" #t ", %" #u
#define JAXDNN_NO_TRANSPOSED(t, u) ""
#define JAXDNN_WGMMA(type, n, k, transposed, operands, a, b, add, t, u, ...)                                      \
  asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %" #add ", 0;\n wgmma.mma_async.sync.aligned.m64n" n "k" k \
               ".f32." type "." type " {" operands "}, %" #a ", %" #b ", add, 1, 1" transposed(t, u) ";\n}"       \
               : __VA_ARGS__                                                                                      \
               : "l"(a_tile), "l"(b_tile), "r"(int{add_to}), "n"(int{kTransposedA}), "n"(int{kTransposedB})       \
               : "memory")
#define JAXDNN_WGMMA_OF_TYPE(type, k, more)                                                                            \
  if constexpr (kColumns == 16) {                                                                                      \
    JAXDNN_WGMMA(type, "16", k, more, "%0, %1, %2, %3, %4, %5, %6, %7", 8, 9, 10, 11, 12, JAXDNN_SUMS4(0),             \
                 JAXDNN_SUMS4(4));                                                                                     \
  } else if constexpr (kColumns == 24) {                                                                               \
    JAXDNN_WGMMA(type, "24", k, more, JAXDNN_TEN() "%10, %11", 12, 13, 14, 15, 16, JAXDNN_SUMS4(0), JAXDNN_SUMS4(4),   \
                 JAXDNN_SUMS4(8));                                                                                     \
  } else if constexpr (kColumns == 32) {                                                                               \
    JAXDNN_WGMMA(type, "32", k, more, JAXDNN_TEN() "%10, %11, %12, %13, %14, %15", 16, 17, 18, 19, 20,                 \
                 JAXDNN_SUMS16(0));                                                                                    \
  } else if constexpr (kColumns == 48) {                                                                               \
    JAXDNN_WGMMA(type, "48", k, more, JAXDNN_TEN() JAXDNN_TEN(1) "%20, %21, %22, %23", 24, 25, 26, 27, 28,             \
                 JAXDNN_SUMS16(0), JAXDNN_SUMS4(16), JAXDNN_SUMS4(20));                                                \
  } else if constexpr (kColumns == 64) {                                                                               \
    JAXDNN_WGMMA(type, "64", k, more, JAXDNN_TO_29 "%30, %31", 32, 33, 34, 35, 36, JAXDNN_SUMS16(0),                   \
                 JAXDNN_SUMS16(16));                                                                                   \
  } else if constexpr (kColumns == 72) {                                                                               \
    JAXDNN_WGMMA(type, "72", k, more, JAXDNN_TO_29 "%30, %31, %32, %33, %34, %35", 36, 37, 38, 39, 40,                 \
                 JAXDNN_SUMS16(0), JAXDNN_SUMS16(16), JAXDNN_SUMS4(32));                                               \
  } else if constexpr (kColumns == 80) {                                                                               \
    JAXDNN_WGMMA(type, "80", k, more, JAXDNN_TO_29 "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39", 40, 41, 42, 43, \
                 44, JAXDNN_SUMS16(0), JAXDNN_SUMS16(16), JAXDNN_SUMS4(32), JAXDNN_SUMS4(36));                         \
  } else if constexpr (kColumns == 96) {                                                                               \
    JAXDNN_WGMMA(type, "96", k, more, JAXDNN_TO_29 JAXDNN_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47", 48, 49, 50, \
                 51, 52, JAXDNN_SUMS16(0), JAXDNN_SUMS16(16), JAXDNN_SUMS16(32));                                      \
  } else if constexpr (kColumns == 128) {                                                                              \
    JAXDNN_WGMMA(type, "128", k, more, JAXDNN_TO_59 "%60, %61, %62, %63", 64, 65, 66, 67, 68, JAXDNN_SUMS64(0));       \
  } else if constexpr (kColumns == 160) {                                                                              \
    JAXDNN_WGMMA(type, "160", k, more, JAXDNN_TO_59 JAXDNN_TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79",  \
                 80, 81, 82, 83, 84, JAXDNN_SUMS64(0), JAXDNN_SUMS16(64));                                             \
  } else if constexpr (kColumns == 192) {                                                                              \
    JAXDNN_WGMMA(type, "192", k, more, JAXDNN_TO_89 "%90, %91, %92, %93, %94, %95", 96, 97, 98, 99, 100,               \
                 JAXDNN_SUMS64(0), JAXDNN_SUMS16(64), JAXDNN_SUMS16(80));                                              \
  } else if constexpr (kColumns == 208) {                                                                              \
    JAXDNN_WGMMA(type, "208", k, more, JAXDNN_TO_89 JAXDNN_TEN(9) "%100, %101, %102, %103", 104, 105, 106, 107, 108,   \
                 JAXDNN_SUMS64(0), JAXDNN_SUMS16(64), JAXDNN_SUMS16(80), JAXDNN_SUMS4(96), JAXDNN_SUMS4(100));         \
  } else {                                                                                                             \
    static_assert(kColumns == 256);                                                                                    \
    JAXDNN_WGMMA(type, "256", k, more, JAXDNN_TO_127, 128, 129, 130, 131, 132, JAXDNN_SUMS64(0), JAXDNN_SUMS64(64));   \
  }

// d += A B, or d = A B where `add_to` is false, of 64 rows, kColumns columns and 32 bytes of terms, by the 128 threads
// of a warpgroup. Thread 32 w + l holds of row 16 w + l / 4 the columns 8 j + 2 (l % 4) + {0, 1} in d[4 j + {0, 1}],
// and of the row 8 below in d[4 j + {2, 3}]. Transposed operands are MN-major; floats are read as TF32 and cannot be.
template <class In, int kColumns, bool kTransposedA, bool kTransposedB>
__device__ inline void Multiply(float (&d)[kColumns / 2], uint64_t a_tile, uint64_t b_tile, bool add_to) {
  if constexpr (!kAvailable) {
  } else if constexpr (std::is_same_v<In, float>) {
    static_assert(!kTransposedA && !kTransposedB);
    JAXDNN_WGMMA_OF_TYPE("tf32", "8", JAXDNN_NO_TRANSPOSED)
  } else if constexpr (std::is_same_v<In, __nv_bfloat16>) {
    JAXDNN_WGMMA_OF_TYPE("bf16", "16", JAXDNN_TRANSPOSED)
  } else {
    JAXDNN_WGMMA_OF_TYPE("f16", "16", JAXDNN_TRANSPOSED)
  }
}

// The same of 8 terms of floats, whose rows the threads hold: of row 16 w + l / 4 the terms l % 4 and l % 4 + 4 in a[0]
// and a[2], and of the row 8 below in a[1] and a[3]. They must stay as they are until the product is done.
#define JAXDNN_WGMMA_HELD_OF(type, k, transposed, n, operands, rows, b, add, ...)                               \
  asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, " add ", 0;\n wgmma.mma_async.sync.aligned.m64n" n "k" k \
               ".f32." type "." type " {" operands "}, {" rows "}, " b ", add, 1, 1" transposed ";\n}"          \
               : __VA_ARGS__                                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(int{add_to})                      \
               : "memory")
#define JAXDNN_WGMMA_HELD(...) JAXDNN_WGMMA_HELD_OF("tf32", "8", "", __VA_ARGS__)
template <int kColumns>
__device__ inline void MultiplyHeld(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b_tile, bool add_to) {
  if constexpr (!kAvailable) {
  } else if constexpr (kColumns == 32) {
    JAXDNN_WGMMA_HELD("32", JAXDNN_TEN() "%10, %11, %12, %13, %14, %15", "%16, %17, %18, %19", "%20", "%21",
                      JAXDNN_SUMS16(0));
  } else if constexpr (kColumns == 64) {
    JAXDNN_WGMMA_HELD("64", JAXDNN_TO_29 "%30, %31", "%32, %33, %34, %35", "%36", "%37", JAXDNN_SUMS16(0),
                      JAXDNN_SUMS16(16));
  } else if constexpr (kColumns == 160) {
    JAXDNN_WGMMA_HELD("160", JAXDNN_TO_59 JAXDNN_TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79",
                      "%80, %81, %82, %83", "%84", "%85", JAXDNN_SUMS64(0), JAXDNN_SUMS16(64));
  } else if constexpr (kColumns == 192) {
    JAXDNN_WGMMA_HELD("192", JAXDNN_TO_89 "%90, %91, %92, %93, %94, %95", "%96, %97, %98, %99", "%100", "%101",
                      JAXDNN_SUMS64(0), JAXDNN_SUMS16(64), JAXDNN_SUMS16(80));
  } else if constexpr (kColumns == 256) {
    JAXDNN_WGMMA_HELD("256", JAXDNN_TO_127, "%128, %129, %130, %131", "%132", "%133", JAXDNN_SUMS64(0),
                      JAXDNN_SUMS64(64));
  } else {
    static_assert(kColumns == 128);
    JAXDNN_WGMMA_HELD("128", JAXDNN_TO_59 "%60, %61, %62, %63", "%64, %65, %66, %67", "%68", "%69", JAXDNN_SUMS64(0));
  }
}

// The same of 16 terms of 16-bit floats: of row 16 w + l / 4 the terms 2 (l % 4) and 2 (l % 4) + 1 in a[0], those 8
// later in a[2], and of the row 8 below in a[1] and a[3].
#define JAXDNN_WGMMA_HELD_SHORT(type, transposed)                                                                 \
  if constexpr (kColumns == 32) {                                                                                 \
    JAXDNN_WGMMA_HELD_OF(type, "16", ", " transposed, "32", JAXDNN_TEN() "%10, %11, %12, %13, %14, %15",          \
                         "%16, %17, %18, %19", "%20", "%21", JAXDNN_SUMS16(0));                                   \
  } else {                                                                                                        \
    static_assert(kColumns == 64);                                                                                \
    JAXDNN_WGMMA_HELD_OF(type, "16", ", " transposed, "64", JAXDNN_TO_29 "%30, %31", "%32, %33, %34, %35", "%36", \
                         "%37", JAXDNN_SUMS16(0), JAXDNN_SUMS16(16));                                             \
  }
template <class In, int kColumns, bool kTransposedB>
__device__ inline void MultiplyHeldShort(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b_tile,
                                         bool add_to) {
  constexpr bool kBf16 = std::is_same_v<In, __nv_bfloat16>;
  if constexpr (!kAvailable) {
  } else if constexpr (kBf16 && kTransposedB) {
    JAXDNN_WGMMA_HELD_SHORT("bf16", "1")
  } else if constexpr (kBf16) {
    JAXDNN_WGMMA_HELD_SHORT("bf16", "0")
  } else if constexpr (kTransposedB) {
    JAXDNN_WGMMA_HELD_SHORT("f16", "1")
  } else {
    JAXDNN_WGMMA_HELD_SHORT("f16", "0")
  }
}
#undef JAXDNN_WGMMA_HELD
#undef JAXDNN_WGMMA_HELD_OF
#undef JAXDNN_WGMMA_HELD_SHORT

#undef JAXDNN_TO_29
#undef JAXDNN_TO_59
#undef JAXDNN_TO_89
#undef JAXDNN_TO_127
#undef JAXDNN_TRANSPOSED
#undef JAXDNN_NO_TRANSPOSED
#undef JAXDNN_TEN
#undef JAXDNN_SUMS4
#undef JAXDNN_SUMS16
#undef JAXDNN_SUMS64
#undef JAXDNN_WGMMA
#undef JAXDNN_WGMMA_OF_TYPE

}  // namespace jaxdnn::hopper
