// Copies from global to shared memory that run while the thread goes on (sm_80).
#pragma once

#include <cstdint>

namespace jaxdnn {

// Starts a copy of one value. Of less than 4 bytes, which the hardware does not have, it is done at once.
template <class V>
__device__ void CopyAsync(V* shared, const V* global) {
  if constexpr (sizeof(V) < 4) {
    *shared = *global;
  } else {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (sizeof(V) == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(sizeof(V)) : "memory");
  }
}

// Starts a copy of 4, 8 or 16 bytes, or of zeros where the value does not exist. The 128 bytes around it come to the L2
// cache, for who reads them soon.
template <class V>
__device__ void CopyAsyncOrZero(V* shared, const V* global, bool exists) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared)), bytes = exists ? sizeof(V) : 0;
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(sizeof(V)),
               "r"(bytes)
               : "memory");
}

// Starts a copy of the first `bytes` of 16, and of zeros for the rest.
template <class V>
__device__ void CopyAsyncPart(V* shared, const V* global, int bytes) {
  static_assert(sizeof(V) == 16, "the one size that is copied past the first cache");
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

// Starts a copy of 16 bytes by way of the first cache, for what many threads of a multiprocessor read: past it they
// would all ask for the same line of the L2 cache, one after the other.
template <class V>
__device__ void CopyAsyncCached(V* shared, const V* global) {
  static_assert(sizeof(V) == 16, "smaller ones always go that way");
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

// Closes the group of copies that the thread has started since the last.
__device__ inline void CommitAsync() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than kPending of the thread's groups are unfinished.
template <int kPending>
__device__ void WaitAsync() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxdnn
