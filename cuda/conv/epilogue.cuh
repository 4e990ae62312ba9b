// What the forward kernels do to their sums before they store them.
#pragma once

#include "cuda/activation/functions.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

__host__ __device__ inline bool IsNone(const Epilogue& e) {
  return e.bias == nullptr && e.residual == nullptr && e.scale == nullptr && e.activation.kind == activation::Kind::kIdentity;
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

// Calls f with a pointer to elements of the type, which is of floats of 16 or 32 bits.
template <class F>
__device__ __forceinline__ void WithFloats(DType type, const void* array, const F& f) {
  if (type == DType::kF32) {
    f(static_cast<const float*>(array));
  } else if (type == DType::kF16) {
    f(static_cast<const __half*>(array));
  } else {
    f(static_cast<const __nv_bfloat16*>(array));
  }
}

// Stores kN neighbouring sums of 8-bit operands, whose first belongs at `to` and has the bias and scale at `channel`:
// integers as they are, others as floats of the type, after the epilogue. kN elements of every array are aligned.
template <class Sum, int kN>
__device__ __forceinline__ void StoreAs(DType type, const Vec<Sum, kN>& sums, const Epilogue& epilogue, int64_t channel,
                                        void* out, int64_t to) {
  if (type == DType::kS32) {
    *reinterpret_cast<Vec<Sum, kN>*>(static_cast<Sum*>(out) + to) = sums;
    return;
  }
  float v[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) v[i] = static_cast<float>(sums.v[i]);
  if (epilogue.scale != nullptr) {
    const auto scale = *reinterpret_cast<const Vec<float, kN>*>(epilogue.scale + channel);
    // Rounded before the bias is added, as two operations elsewhere are.
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] = __fmul_rn(v[i], scale.v[i]);
  }
  WithFloats(type, out, [&](auto* typed) {
    using Out = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    Add<Out>(v, epilogue.bias, channel);
    Add<Out>(v, epilogue.residual, to);
  });
  Activate<float>(v, epilogue.activation);
  WithFloats(type, out, [&](auto* typed) {
    using Out = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    *reinterpret_cast<Vec<Out, kN>*>(const_cast<Out*>(typed) + to) = Round<Out>(v);
  });
}

}  // namespace jaxdnn::conv
