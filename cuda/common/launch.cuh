// Kernel launches that report their own status.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxdnn {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A one-dimensional grid of `blocks`, of which every `cluster` neighbours can reach each other's shared memory.
struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;
};

// Launches `kernel`. An empty grid is an error to CUDA and means no work to us.
// cudaGetLastError after <<<>>> could return the failure of somebody else's earlier launch; this status is ours.
template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream, Args&&... args) {
  constexpr size_t kSharedByDefault = 48 << 10;
  constexpr int kClusterByDefault = 8;
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (grid.shared_bytes > kSharedByDefault)
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(grid.shared_bytes));
        e != cudaSuccess)
      return e;
  if (grid.cluster > kClusterByDefault)
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        e != cudaSuccess)
      return e;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = grid.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream, Args&&... args) {
  return LaunchKernel(kernel, Grid{blocks, threads}, stream, args...);
}

}  // namespace jaxdnn
