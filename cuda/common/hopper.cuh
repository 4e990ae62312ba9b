// Hopper's asynchronous machinery (sm_90a): barriers in shared memory that count arrivals and bytes, and copies of
// tensor boxes by the TMA unit; its matrix products are in wgmma.cuh. PTX ISA 8.0: mbarrier, cp.async.bulk.tensor,
// setmaxnreg, stmatrix.
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

// Calls f with the number of spatial dimensions, as a type.
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
// A column of pixels, as LoadPixels has them.
template <int kDimensions>
__device__ inline void StorePixels(const CUtensorMap* map, uint32_t from, int channel, const int (&at)[3], int image) {
  if constexpr (!kAvailable) {
  } else if constexpr (kDimensions == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(from), "r"(channel), "r"(at[2]), "r"(image)
        : "memory");
  } else if constexpr (kDimensions == 2) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(from), "r"(channel), "r"(at[2]), "r"(at[1]), "r"(image)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
            map),
        "r"(from), "r"(channel), "r"(at[2]), "r"(at[1]), "r"(at[0]), "r"(image)
        : "memory");
  }
}
__device__ inline void CommitStores() {
  if constexpr (kAvailable) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the newest kPending groups have read their shared memory.
template <int kPending>
__device__ inline void WaitForStoreReads() {
  if constexpr (kAvailable) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// True in one thread of a warp, which the compiler then knows to be alone: what it computes for the TMA unit needs no
// vector registers.
__device__ inline bool IsElected() {
  uint32_t elected = 0;
  if constexpr (kAvailable)
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// Registers a thread of this warpgroup may hold from now on.
template <int kRegisters, bool kMore>
__device__ inline void SetRegisters() {
  if constexpr (kAvailable && kMore) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  if constexpr (kAvailable && !kMore) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Where the TMA unit puts what belongs at `address`, in lines of 32, 64 or 128 bytes: 16-byte chunks are exchanged, as
// a function of the address.
__device__ inline uint32_t Swizzled(uint32_t address, int line) { return address ^ (address >> 3 & (line - 16)); }

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
