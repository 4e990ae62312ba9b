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

template <class... Params>
cudaError_t AllowSharedBytes(void (*kernel)(Params...), size_t bytes) {
  if (bytes == 0) return cudaSuccess;  // what a kernel declares itself counts too towards the 48 KB that need no asking
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Blocks of such a grid that the current device runs at once.
template <class... Params>
cudaError_t ResidentBlocks(void (*kernel)(Params...), const Grid& grid, int64_t* blocks) {
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t e = AllowSharedBytes(kernel, grid.shared_bytes);
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, grid.threads, grid.shared_bytes);
  *blocks = int64_t{multiprocessors} * each;
  return e;
}

// Launches `kernel`. An empty grid is an error to CUDA and means no work to us.
// cudaGetLastError after <<<>>> could return the failure of somebody else's earlier launch; this status is ours.
template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream, Args&&... args) {
  constexpr int kClusterByDefault = 8;
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (const cudaError_t e = AllowSharedBytes(kernel, grid.shared_bytes); e != cudaSuccess) return e;
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
