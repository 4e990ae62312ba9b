// Blocks that work together on one slab of memory: each holds its share in shared memory, so that all of it is read
// once; they exchange a few sums through global memory and meet at a barrier.
//
// The grid is launched cooperatively, so that all of its blocks are resident and none waits for one that cannot start.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/launch.cuh"

namespace jaxdnn::group_norm {

// Blocks rank = 0..size-1 of team i take the units i, i + teams, ... Each unit has a counter, zero beforehand.
struct Team {
  int64_t units;
  int size;
  unsigned* arrived;

  // Sets the counters up in workspace; alone, a block needs none.
  cudaError_t Reset(void* counters, cudaStream_t stream) {
    arrived = static_cast<unsigned*>(counters);
    return size == 1 ? cudaSuccess : cudaMemsetAsync(counters, 0, units * sizeof(unsigned), stream);
  }

  __device__ int64_t First() const { return blockIdx.x / size; }
  __device__ int64_t Step() const { return gridDim.x / size; }
  __device__ int Rank() const { return blockIdx.x % size; }

  // Returns when all blocks of the team are here; what they wrote to global memory before is visible after.
  __device__ void Meet(int64_t unit) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* counter = arrived + unit;
      asm volatile("fence.acq_rel.gpu; red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
      unsigned count;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
      } while (count < static_cast<unsigned>(size));
    }
    __syncthreads();
  }
};

struct Device {
  int multiprocessors, shared_per_multiprocessor, shared_per_block;
};

// What plans are made for, so that they, and the workspace, are functions of the problem alone: an H100 or H200. On
// a smaller device the teams are smaller, and what they cannot hold they read twice.
constexpr Device kNominal = {132, 228 << 10, 227 << 10};

inline cudaError_t Query(Device* d) {
  int id;
  if (cudaError_t e = cudaGetDevice(&id)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&d->multiprocessors, cudaDevAttrMultiProcessorCount, id)) return e;
  if (cudaError_t e =
          cudaDeviceGetAttribute(&d->shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id))
    return e;
  return cudaDeviceGetAttribute(&d->shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
}

// Launches `teams` teams, cooperatively where a team has more than one block.
template <class... Params, class... Args>
cudaError_t LaunchTeams(void (*kernel)(Params...), int64_t blocks, int team, int threads, size_t shared,
                        cudaStream_t stream, Args&&... args) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return e;
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = team > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace jaxdnn::group_norm
