// Thread-block clusters (sm_90): neighbouring blocks that run at the same time and write into each other's shared
// memory.
#pragma once

#include <cstdint>

namespace jaxdnn {

// Whether this compilation is for an architecture with clusters. Kernels of others are never launched so: launchers ask
// QueryMaxCluster (device_code.h).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasClusters = false;
#else
constexpr bool kHasClusters = true;
#endif

// Every thread of the cluster arrives, then waits. What was written before the one is visible after the other, remote
// shared memory included. A first pair of these must come before any remote write: the other block may not run yet.
__device__ inline void ClusterArrive() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Tells only that the block runs, and nothing of what it wrote.
__device__ inline void ClusterArriveRelaxed() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Numbers that the cluster's blocks send to each other's shared memory: no barrier of all of them is needed, since a
// counter of the bytes that arrive, in the receiver's shared memory, says when they are there. A barrier would also
// wait for all that the block has written to global memory.
class Mailbox {
 public:
  // By one thread, before the cluster first arrives and waits.
  __device__ void Open() {
    if constexpr (kHasClusters)
      asm volatile("mbarrier.init.shared.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(Address(&counter_))
                   : "memory");
  }
  // By one thread for each round of sending, after the block has waited for the round before.
  __device__ void Expect(int bytes) {
    if constexpr (kHasClusters)
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(Address(&counter_)), "r"(bytes)
                   : "memory");
  }
  // Sends `value` to the place of `*local` in the block of rank `rank`, and counts it there.
  __device__ void Send(float* local, int rank, float value) {
    if constexpr (kHasClusters)
      asm volatile(
          "{\n .reg .b32 to, counter;\n mapa.shared::cluster.u32 to, %0, %2;\n"
          " mapa.shared::cluster.u32 counter, %1, %2;\n"
          " st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [counter];\n}" ::"r"(Address(local)),
          "r"(Address(&counter_)), "r"(rank), "r"(__float_as_uint(value))
          : "memory");
  }
  // The same of four at once, where there are many: each message takes its turn at the receiver.
  __device__ void Send(float4* local, int rank, const float4& v) {
    if constexpr (kHasClusters)
      asm volatile(
          "{\n .reg .b32 to, counter;\n mapa.shared::cluster.u32 to, %0, %2;\n"
          " mapa.shared::cluster.u32 counter, %1, %2;\n"
          " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6}, [counter];\n}" ::"r"(
              Address(local)),
          "r"(Address(&counter_)), "r"(rank), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)),
          "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w))
          : "memory");
  }
  // Begins to copy bytes, a multiple of 16 between places on 16, from global memory, and counts them. What threads did
  // at `local` before is over when each of them has called AfterLocal, and then met the one that copies.
  __device__ void Copy(void* local, const void* from, int bytes) {
    if constexpr (kHasClusters)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       Address(local)),
                   "l"(from), "r"(bytes), "r"(Address(&counter_))
                   : "memory");
  }
  static __device__ void AfterLocal() {
    if constexpr (kHasClusters) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  // Until all of the round's numbers are there. Rounds count from 0. What is sent lies in the block's own shared
  // memory: at a wider scope the wait would also empty the cache of global memory.
  __device__ void Wait(int round = 0) {
    if constexpr (kHasClusters)
      asm volatile(
          "{\n .reg .pred there;\nagain:\n"
          " mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
          " @!there bra again;\n}" ::"r"(Address(&counter_)),
          "r"(round & 1)
          : "memory");
  }

 private:
  static __device__ uint32_t Address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

  uint64_t counter_;
};

// Where the shared memory at `address` of this block lies in the block of rank `rank`, and what is there.
__device__ inline uint32_t RemoteAddress(uint32_t address, int rank) {
  uint32_t remote = 0;
  if constexpr (kHasClusters) asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
__device__ inline float4 LoadRemote(uint32_t remote) {
  float4 v = {};
  if constexpr (kHasClusters)
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote)
                 : "memory");
  return v;
}

__device__ inline void StoreRemote(uint32_t remote, const float4& v) {
  if constexpr (kHasClusters)
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}

// Writes `value` to the place of `*local` in the shared memory of the block of rank `rank`.
__device__ inline void StoreRemote(float* local, int rank, float value) {
  if constexpr (kHasClusters) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    asm volatile(
        "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
        " st.shared::cluster.f32 [remote], %2;\n}" ::"r"(address),
        "r"(rank), "f"(value)
        : "memory");
  }
}
__device__ inline void StoreRemote(double* local, int rank, double value) {
  if constexpr (kHasClusters) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    asm volatile(
        "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
        " st.shared::cluster.f64 [remote], %2;\n}" ::"r"(address),
        "r"(rank), "d"(value)
        : "memory");
  }
}

}  // namespace jaxdnn
