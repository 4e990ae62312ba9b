// Blocks that work together on one slab of memory: each holds its share in shared memory, so that all of it is read
// once; they exchange a few sums through global memory and meet at a barrier.
//
// The grid is launched cooperatively, so that all of its blocks are resident and none waits for one that cannot start.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/launch.cuh"

namespace jaxdnn::group_norm {

// Counters are kept apart, so that teams do not wait for each other's.
constexpr int kCounterWords = 32;

// A team's values that each of its blocks may sum for itself.
constexpr int kOwnSums = 512;

// Reads what another block has written, past this multiprocessor's cache.
template <class Value>
__device__ Value LoadRemote(const Value* p) {
  using Word = std::conditional_t<alignof(Value) % sizeof(double) == 0, double, float>;
  constexpr size_t kWords = sizeof(Value) / sizeof(Word);
  static_assert(sizeof(Value) % sizeof(Word) == 0, "moves whole words");
  Word words[kWords];
#pragma unroll
  for (size_t i = 0; i < kWords; ++i) words[i] = __ldcg(reinterpret_cast<const Word*>(p) + i);
  Value value;
  memcpy(&value, words, sizeof(Value));
  return value;
}

// Blocks rank = 0..size-1 of team i take the units i, i + teams, ... Each unit has a counter, zero beforehand.
struct Team {
  int64_t units;
  int size;
  unsigned* arrived;

  // Rows of values that the blocks write: one each, and one for the result.
  __host__ __device__ int64_t ExchangedRows() const { return units * (size + 1); }
  int64_t CounterBytes() const { return size == 1 ? 0 : units * kCounterWords * sizeof(unsigned); }

  // Sets the counters up in workspace; alone, a block needs none.
  cudaError_t Reset(void* counters, cudaStream_t stream) {
    arrived = static_cast<unsigned*>(counters);
    return size == 1 ? cudaSuccess : cudaMemsetAsync(counters, 0, CounterBytes(), stream);
  }

  __device__ int64_t First() const { return blockIdx.x / size; }
  __device__ int64_t Step() const { return gridDim.x / size; }
  __device__ int Rank() const { return blockIdx.x % size; }

  // Returns when all blocks of the team are here for the `round`-th time; what they wrote to global memory before is
  // visible after.
  __device__ void Meet(int64_t unit, int round) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* counter = arrived + unit * kCounterWords;
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
      unsigned count;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
      } while (count < static_cast<unsigned>(size * round));
    }
    __syncthreads();
  }

  // Gives every block the sum of what the blocks have: rows[rank * width + i] for i < width, which is the block's part,
  // has been written; merge(column, span) sums a column over the ranks by 1 << span lanes; take(i, sum) gets it in one
  // thread for each i. Every block makes few sums itself; of many each makes some for all, which costs a second
  // meeting.
  template <class Value, class Merge, class Take>
  __device__ void Exchange(int64_t unit, Value* rows, int width, Merge&& merge, Take&& take) const {
    Meet(unit, 1);
    if (width * size <= kOwnSums) {
      int span = 5;
      while (span > 0 && width << span > static_cast<int>(blockDim.x)) --span;
      const int lane = threadIdx.x & ((1 << span) - 1);
      for (int first = 0; first < width; first += blockDim.x >> span) {
        const int i = first + static_cast<int>(threadIdx.x >> span);
        const Value sum = merge(rows + min(i, width - 1), span);
        if (lane == 0 && i < width) take(i, sum);
      }
      return;
    }
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Value* result = rows + int64_t{size} * width;
    for (int i = Rank() + warp * size; i < width; i += warps * size) {
      const Value sum = merge(rows + i, 5);
      if (threadIdx.x % 32 == 0) result[i] = sum;
    }
    Meet(unit, 2);
    for (int i = threadIdx.x; i < width; i += blockDim.x) take(i, LoadRemote(result + i));
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

// Launches as many teams as the device runs at once, cooperatively where a team is several blocks.
template <class... Params, class... Args>
cudaError_t LaunchTeams(void (*kernel)(Params...), const Team& team, int threads, int64_t shared_bytes,
                        cudaStream_t stream, Args&&... args) {
  const Grid grid = {team.units, threads, static_cast<size_t>(shared_bytes)};
  int64_t blocks = 0;
  if (cudaError_t e = ResidentBlocks(kernel, grid, &blocks)) return e;
  blocks = std::min(team.units, blocks / team.size) * team.size;
  if (blocks == 0) return cudaErrorCooperativeLaunchTooLarge;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = team.size > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace jaxdnn::group_norm
