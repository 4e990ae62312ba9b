// Kernel launches that report their own status.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/int_div.h"

namespace jaxdnn {

// The least that n is no more than 1 << it; 0 for n below 1.
inline int CeilLog2(int64_t n) {
  int log = 0;
  while (int64_t{1} << log < n) ++log;
  return log;
}

// A grid of `blocks`, of which every `cluster` neighbours can reach each other's shared memory; or of some rows of so
// many, and planes of rows, of which CUDA has 65535 at most.
struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;
  int64_t rows = 1, planes = 1;
};

template <class... Params>
cudaError_t AllowSharedBytes(void (*kernel)(Params...), size_t bytes) {
  if (bytes == 0) return cudaSuccess;  // what a kernel declares itself counts too towards the 48 KB that need no asking
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// What the runtime wants to know of a grid. Holds a pointer into itself.
struct LaunchConfig {
  cudaLaunchAttribute cluster = {};
  cudaLaunchConfig_t config = {};

  LaunchConfig(const Grid& grid, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    config.gridDim = {static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.rows),
                      static_cast<unsigned>(grid.planes)};
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = grid.cluster > 1 ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

// Lets the kernel have what such a grid asks for beyond what every kernel gets.
template <class... Params>
cudaError_t Allow(void (*kernel)(Params...), const Grid& grid) {
  constexpr int kClusterByDefault = 8;
  const cudaError_t e = AllowSharedBytes(kernel, grid.shared_bytes);
  if (e != cudaSuccess || grid.cluster <= kClusterByDefault) return e;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Blocks of such a grid that the current device runs at once. Of clusters not all multiprocessors may be of use.
template <class... Params>
cudaError_t ResidentBlocks(void (*kernel)(Params...), Grid grid, int64_t* blocks) {
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t e = Allow(kernel, grid);
  if (e == cudaSuccess && grid.cluster > 1) {
    grid.blocks = grid.cluster;
    const LaunchConfig launch(grid, nullptr);
    e = cudaOccupancyMaxActiveClusters(&each, kernel, &launch.config);
    *blocks = int64_t{each} * grid.cluster;
    return e;
  }
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
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (const cudaError_t e = Allow(kernel, grid); e != cudaSuccess) return e;
  const LaunchConfig launch(grid, stream);
  return cudaLaunchKernelEx(&launch.config, kernel, static_cast<Params>(args)...);
}

template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream, Args&&... args) {
  return LaunchKernel(kernel, Grid{blocks, threads}, stream, args...);
}

}  // namespace jaxdnn
