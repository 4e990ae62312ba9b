// How much shared memory the current device has.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace jaxdnn {

// Whether a block may have so many bytes: 99 KB on every device since sm_80, more on some.
inline bool CanShare(size_t bytes) {
  int device = 0, most = 99 << 10;
  if (bytes <= static_cast<size_t>(most)) return true;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
         bytes <= static_cast<size_t>(most);
}

}  // namespace jaxdnn
