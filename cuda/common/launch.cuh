// Kernel launches that report their own status.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxdnn {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Launches `kernel` on a one-dimensional grid. An empty grid is an error to CUDA and means no work to us.
// cudaGetLastError after <<<>>> could return the failure of somebody else's earlier launch; this status is ours.
template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream, Args&&... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace jaxdnn
