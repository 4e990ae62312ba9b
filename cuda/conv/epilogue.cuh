// What the forward kernels do to their sums before they store them.
#pragma once

#include "cuda/activation/functions.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/float8.cuh"
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

// What becomes of the sums of 8-bit operands in four neighbouring columns: integers are stored as they are, others as
// floats of the type, after the epilogue.
struct BytesEpilogue {
  static constexpr int kN = 4;
  DType type;
  float scale[kN], bias[kN];

  // channel(i) is the place of column i's scale and bias, or -1 if there is no such column.
  template <class Channel>
  __device__ __forceinline__ BytesEpilogue(DType type, const Epilogue& epilogue, const Channel& channel) : type(type) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int64_t at = channel(i);
      scale[i] = epilogue.scale != nullptr && at >= 0 ? epilogue.scale[at] : 1;
      bias[i] = 0;
      if (epilogue.bias != nullptr && at >= 0)
        WithFloats(type, epilogue.bias, [&](auto* typed) { bias[i] = static_cast<float>(typed[at]); });
    }
  }

  // Column i alone, as a run of one.
  template <class V>
  static __device__ __forceinline__ V Pick(const V (&v)[kN], int i) {
    return i == 0 ? v[0] : i == 1 ? v[1] : i == 2 ? v[2] : v[3];
  }
  template <class Sum>
  __device__ __forceinline__ void StoreOne(const Vec<Sum, kN>& sums, int i, const Epilogue& epilogue, void* out,
                                           int64_t to) const {
    Finish<1>(type, Vec<Sum, 1>{Pick(sums.v, i)}, {Pick(scale, i)}, {Pick(bias, i)}, epilogue, out, to);
  }
  // All of them, where they are aligned in all arrays.
  template <class Sum>
  __device__ __forceinline__ void Store(const Vec<Sum, kN>& sums, const Epilogue& epilogue, void* out,
                                        int64_t to) const {
    Finish<kN>(type, sums, scale, bias, epilogue, out, to);
  }

 private:
  template <int kCount, class Sum>
  static __device__ __forceinline__ void Finish(DType type, const Vec<Sum, kCount>& sums, const float (&scale)[kCount],
                                                const float (&bias)[kCount], const Epilogue& epilogue, void* out,
                                                int64_t to) {
    if (type == DType::kS32) {
      *reinterpret_cast<Vec<Sum, kCount>*>(static_cast<Sum*>(out) + to) = sums;
      return;
    }
    float v[kCount];
    // Rounded before the bias is added, as by two operations elsewhere.
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __fmul_rn(static_cast<float>(sums.v[i]), scale[i]);
    if (epilogue.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += bias[i];
    }
    WithFloats(type, epilogue.residual, [&](auto* typed) {
      using Out = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
      Add<Out>(v, typed, to);
    });
    Activate<float>(v, epilogue.activation);
    WithFloats(type, out, [&](auto* typed) {
      using Out = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
      *reinterpret_cast<Vec<Out, kCount>*>(const_cast<Out*>(typed) + to) = Round<Out>(v);
    });
  }
};

}  // namespace jaxdnn::conv
