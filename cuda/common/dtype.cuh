// Element types, as device code uses them: the C++ type of each DType, and the type its sums are held in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/common/dtype.h"

namespace jaxdnn {

template <class T>
struct TypeTag {
  using type = T;
};

// Calls f with the TypeTag of `t`, which is not double.
template <class F>
cudaError_t VisitSingleDType(DType t, F&& f) {
  switch (t) {
    case DType::kF32:
      return f(TypeTag<float>{});
    case DType::kF16:
      return f(TypeTag<__half>{});
    case DType::kBF16:
      return f(TypeTag<__nv_bfloat16>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// Calls f with the TypeTag of `t`: here and above alone a runtime element type becomes a template argument.
template <class F>
cudaError_t VisitDType(DType t, F&& f) {
  return t == DType::kF64 ? f(TypeTag<double>{}) : VisitSingleDType(t, f);
}

template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};

// 16-bit floats are computed and summed in float, double in double.
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

// Two 16-bit floats, as arithmetic on both at once takes them.
template <class T>
using TwoOf = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;

}  // namespace jaxdnn
