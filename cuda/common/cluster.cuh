// Thread-block clusters (sm_90): neighbouring blocks that run at the same time and write into each other's shared
// memory.
#pragma once

#include <cstdint>

namespace jaxdnn {

// Whether device code for clusters exists in this compilation; kernels for older architectures are never launched so.
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
