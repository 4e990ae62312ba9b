// Blocks that work together on one slab of memory: each holds its share in shared memory, so that all of it is read
// once; they exchange a few sums through global memory.
//
// The grid is launched cooperatively, so that all of its blocks are resident and none waits for one that cannot start.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cuda/common/launch.cuh"

namespace jaxdnn::group_norm {

// A team's values that each of its blocks may sum for itself.
constexpr int kOwnSums = 512;

// A value that a block sends to others through global memory. Every word of it travels with a mark, in one access,
// which says that it is there: a barrier would wait for all else that the block has written, which is a lot and takes
// longer. Beforehand the memory is zero.
template <class Value>
struct alignas(16) Letter {
  static_assert(sizeof(Value) % 8 == 0, "goes in pairs of words");
  static constexpr int kPairs = sizeof(Value) / 8;
  static constexpr uint32_t kMark = 1;

  uint64_t words[kPairs][2];  // with the mark above

  __device__ void Write(const Value& value) {
    uint32_t v[2 * kPairs];
    memcpy(v, &value, sizeof(Value));
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(words[i]), "l"(Marked(v[2 * i])),
                   "l"(Marked(v[2 * i + 1]))
                   : "memory");
  }
  // Whether it was there.
  __device__ bool Read(Value* value) const {
    uint64_t read[2 * kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                   : "=l"(read[2 * i]), "=l"(read[2 * i + 1])
                   : "l"(words[i])
                   : "memory");
    uint32_t v[2 * kPairs];
    bool there = true;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      v[i] = static_cast<uint32_t>(read[i]);
      there &= read[i] >> 32 == kMark;
    }
    memcpy(value, v, sizeof(Value));
    return there;
  }
  __device__ Value Await() const {
    Value value;
    while (!Read(&value)) __nanosleep(32);
    return value;
  }

 private:
  static __device__ uint64_t Marked(uint32_t word) { return uint64_t{kMark} << 32 | word; }
};

// Blocks rank = 0..size-1 of team i take the units i, i + teams, ...
struct Team {
  int64_t units;
  int size;
  int lag;  // in cycles

  // Blocks that share a multiprocessor begin one after the other, each when what the one before has asked for is there:
  // in step they would all load, then all exchange sums, then all store.
  __device__ void Stagger() const {
    unsigned multiprocessors;
    asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    const int64_t start = clock64(), wait = int64_t{blockIdx.x / multiprocessors} * lag;
    while (clock64() - start < wait) __nanosleep(64);
  }

  // Rows of letters: one of each block of each unit, and one for the result.
  __host__ __device__ int64_t ExchangedRows() const { return units * (size + 1); }

  // Makes the letters of all units, `width` of each block, ready; alone, a block needs none.
  template <class Value>
  cudaError_t Reset(Letter<Value>* letters, int64_t width, cudaStream_t stream) const {
    return size == 1 ? cudaSuccess
                     : cudaMemsetAsync(letters, 0, ExchangedRows() * width * sizeof(Letter<Value>), stream);
  }

  __device__ int64_t First() const { return blockIdx.x / size; }
  __device__ int64_t Step() const { return gridDim.x / size; }
  __device__ int Rank() const { return blockIdx.x % size; }

  // Gives every block the sum of what the blocks have: each writes rows[rank * width + i] for i < width;
  // merge(column, span) sums a column over the ranks by 1 << span lanes; take(i, sum) gets it in one thread for each i.
  // Every block makes few sums itself; of many each makes some for all.
  template <class Value, class Merge, class Take>
  __device__ void Exchange(Letter<Value>* rows, int width, Merge&& merge, Take&& take) const {
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
    Letter<Value>* result = rows + int64_t{size} * width;
    for (int i = Rank() + warp * size; i < width; i += warps * size) {
      const Value sum = merge(rows + i, 5);
      if (threadIdx.x % 32 == 0) result[i].Write(sum);
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) take(i, result[i].Await());
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
