// Hopper's asynchronous machinery (sm_90a): barriers in shared memory that count arrivals and bytes, copies of tensor
// boxes by the TMA unit, and matrix products of a warpgroup that read shared memory by themselves. PTX ISA 8.0:
// mbarrier, cp.async.bulk.tensor, wgmma.mma_async, setmaxnreg, stmatrix.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxdnn::hopper {

// Whether this compilation is for the one architecture that has these instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kAvailable = true;
#else
constexpr bool kAvailable = false;
#endif

// Barriers
// -------------------------------------------------------------------------------------------------------------

// A phase ends when `arrivals` have come, and as many bytes as were announced. `barrier` is a shared-memory address.
__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  if constexpr (kAvailable)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the last of them: shows the barriers to the TMA unit.
__device__ inline void PublishBarriers() {
  if constexpr (kAvailable) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void ArriveExpecting(uint32_t barrier, int bytes) {
  if constexpr (kAvailable)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives when all asynchronous copies that the thread has begun are there.
__device__ inline void ArriveAfterCopies(uint32_t barrier) {
  if constexpr (kAvailable)
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void Arrive(uint32_t barrier) {
  if constexpr (kAvailable) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Of a warp one lane arrives.
__device__ inline void ArriveOnce(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) Arrive(barrier);
}

// Waits for the end of the phase with this parity: of 0, 1, 0, 1, ... in turn.
__device__ inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
  if constexpr (kAvailable)
    asm volatile(
        "{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A place in a ring of stages, and the parity of the barriers there.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// So many threads that wait for each other.
__device__ inline void SyncThreads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Those that the others wait for, but that do not wait themselves.
__device__ inline void ArriveThreads(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The threads of one warpgroup alone.
__device__ inline void SyncWarpgroup(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// Copies bytes, a multiple of 16 between places on 16, and adds them to the barrier.
__device__ inline void CopyBulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  if constexpr (kAvailable)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Tensor boxes
// ---------------------------------------------------------------------------------------------------------

// Of a map that will be needed soon.
__device__ inline void PrefetchMap(const CUtensorMap* map) {
  if constexpr (kAvailable) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at (x, y, z) and adds its bytes to the barrier.
__device__ inline void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  if constexpr (kAvailable)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ inline void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, const int (&at)[5]) {
  if constexpr (kAvailable)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
        : "memory");
}

// A column of pixels, from the one at `at` on, each moved by `offset`: (depth,) (height,) width, as many as the map
// has.
template <int kDimensions>
__device__ inline void LoadPixels(uint32_t to, const CUtensorMap* map, uint32_t barrier, int channel,
                                  const int (&at)[3], int image, const int (&offset)[3]) {
  if constexpr (!kAvailable) {
  } else if constexpr (kDimensions == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(channel), "r"(at[2]), "r"(image), "h"(static_cast<uint16_t>(offset[2]))
        : "memory");
  } else if constexpr (kDimensions == 2) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(channel), "r"(at[2]), "r"(at[1]), "r"(image), "h"(static_cast<uint16_t>(offset[2])),
        "h"(static_cast<uint16_t>(offset[1]))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(to),
        "l"(map), "r"(barrier), "r"(channel), "r"(at[2]), "r"(at[1]), "r"(at[0]), "r"(image),
        "h"(static_cast<uint16_t>(offset[2])), "h"(static_cast<uint16_t>(offset[1])),
        "h"(static_cast<uint16_t>(offset[0]))
        : "memory");
  }
}

// Calls f with the number of spatial dimensions, as a type: by who loads, before
// a loop that must not look at it; so a kernel's other code is there once.
template <class F>
__device__ __forceinline__ void VisitDimensions(int n, F&& f) {
  if (n == 1)
    f(std::integral_constant<int, 1>());
  else if (n == 2)
    f(std::integral_constant<int, 2>());
  else
    f(std::integral_constant<int, 3>());
}

// Stores begun by one thread form groups, as its copies do. What ordinary instructions wrote to shared memory must be
// shown to the TMA unit first.
__device__ inline void ShowSharedToTma() {
  if constexpr (kAvailable) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void StoreBox(const CUtensorMap* map, uint32_t from, int x, int y) {
  if constexpr (kAvailable)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y)
                 : "memory");
}
__device__ inline void StoreBox(const CUtensorMap* map, uint32_t from, const int (&at)[5]) {
  if constexpr (kAvailable)
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(from), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
        : "memory");
}
__device__ inline void CommitStores() {
  if constexpr (kAvailable) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the newest kPending groups have read their shared memory.
template <int kPending>
__device__ inline void WaitForStoreReads() {
  if constexpr (kAvailable) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Matrix products
// ------------------------------------------------------------------------------------------------------

// Registers a thread of this warpgroup may hold from now on.
template <int kRegisters, bool kMore>
__device__ inline void SetRegisters() {
  if constexpr (kAvailable && kMore) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  if constexpr (kAvailable && !kMore) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

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
  if constexpr (kColumns == 32) {                                                                                      \
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

// Neighbouring elements from and to shared memory.
__device__ inline void LoadWords(uint32_t (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address) : "memory");
}
__device__ inline void LoadWords(uint32_t (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}
__device__ inline void StoreWords(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ inline void StorePair(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory: lane i gives the address of row i % 8 of matrix i / 8, and
// holds of each matrix the elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4.
__device__ inline void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  if constexpr (kAvailable)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// The same of their transposes: lane i holds the elements 2 (i % 4) and 2 (i % 4) + 1 of column i / 4.
__device__ inline void StoreTransposed(uint32_t address, const uint32_t (&r)[4]) {
  if constexpr (kAvailable)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace jaxdnn::hopper
