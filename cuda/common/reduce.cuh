// Reductions over the threads of a warp or a block, in a fixed order: the same bits on every run.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

namespace jaxdnn {

struct Add {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
};

// Of a NaN and a number, the number: a NaN must reach the result on another way.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

// Two sums at a time.
template <class A>
struct Pair {
  A first, second;
};

struct AddPairs {
  template <class A>
  __device__ Pair<A> operator()(const Pair<A>& a, const Pair<A>& b) const {
    return {a.first + b.first, a.second + b.second};
  }
};

// __shfl_xor_sync over the whole warp, for any struct of 32-bit words.
template <class V>
__device__ V ShuffleXor(V value, int mask) {
  static_assert(sizeof(V) % sizeof(int) == 0, "moves whole words");
  int words[sizeof(V) / sizeof(int)];
  memcpy(words, &value, sizeof(V));
#pragma unroll
  for (int& word : words) word = __shfl_xor_sync(~0u, word, mask);
  memcpy(&value, words, sizeof(V));
  return value;
}

// Threads whose values belong together: those of an aligned run of 1 << span threads that agree modulo 1 << stride.
// The run lies in one warp or is the whole block. Stride 0 is the plain reduction of a run.
struct Group {
  int stride;
  int span;
};

// v[i] = op over the group's v[i], in every thread of the group, for W values at once. `op` is associative and
// commutative. `scratch` is shared memory for W values of each thread of the block.
template <int W, class V, class Op>
__device__ void Reduce(V (&v)[W], Op op, Group group, V* scratch) {
#pragma unroll
  for (int i = 0; i < W; ++i)
    for (int mask = 1 << group.stride; mask < min(32, 1 << group.span); mask *= 2)
      v[i] = op(v[i], ShuffleXor(v[i], mask));
  if (group.span <= 5) return;

  __syncthreads();  // An earlier reduction may still be reading the scratch.
#pragma unroll
  for (int i = 0; i < W; ++i) scratch[i * blockDim.x + threadIdx.x] = v[i];
  __syncthreads();
  // Every thread folds the warps' values in the same order, hence to the same bits.
  const int column = threadIdx.x & ((1 << group.stride) - 1);
  const int step = max(32, 1 << group.stride);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    v[i] = scratch[i * blockDim.x + column];
    for (int t = step; t < 1 << group.span; t += step) v[i] = op(v[i], scratch[i * blockDim.x + t + column]);
  }
}

}  // namespace jaxdnn
