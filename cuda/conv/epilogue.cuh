// What the forward kernels do to their sums before they store them.
#pragma once

#include "cuda/activation/functions.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

__host__ __device__ inline bool IsNone(const Epilogue& e) {
  return e.bias == nullptr && e.residual == nullptr && e.activation.kind == activation::Kind::kIdentity;
}

// v += the elements of `array`, the epilogue's bias or residual, from `offset` on; nothing where there is none.
template <class Out, int kN>
__device__ __forceinline__ void Add(Accumulator<Out> (&v)[kN], const void* array, int64_t offset) {
  if (array == nullptr) return;
  const auto more = *reinterpret_cast<const Vec<Out, kN>*>(static_cast<const Out*>(array) + offset);
#pragma unroll
  for (int i = 0; i < kN; ++i) v[i] += static_cast<Accumulator<Out>>(more.v[i]);
}

// All activations in one kernel: callers keep to one call, in a loop that is not unrolled, of a few elements.
template <class Out, int kN>
__device__ __forceinline__ void Activate(Accumulator<Out> (&v)[kN], const activation::Activation& activation) {
  activation::WithFunctor<Out>(activation, [&v](auto f) {
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] = f.Forward(v[i]);
  });
}

// Moves what follows the first kCount registers to the front, so that a loop that is not unrolled can take an array
// piece by piece.
template <int kCount, class T, int kN>
__device__ __forceinline__ void Rotate(T (&v)[kN]) {
#pragma unroll
  for (int i = 0; i + kCount < kN; ++i) v[i] = v[i + kCount];
}

template <class Out, int kN>
__device__ __forceinline__ Vec<Out, kN> Round(const Accumulator<Out> (&v)[kN]) {
  Vec<Out, kN> out;
#pragma unroll
  for (int i = 0; i < kN; ++i) out.v[i] = static_cast<Out>(v[i]);
  return out;
}

}  // namespace jaxdnn::conv
