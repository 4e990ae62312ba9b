// Elementwise activations: y = f(x) and dx = g f'(x), the derivative as a function of y.
//
// Bound by memory: 2 (forward) or 3 (backward) passes. A thread moves 16 bytes an access and a grid of a few waves
// strides over the array; the ragged end, and buffers that are not 16-byte aligned, go element by element.
#include <algorithm>

#include "cuda/activation/activation.h"
#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::activation {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 132 * 8 * 4;

// The same rules as ACTIVATIONS in jaxdnn/_activation.py, where the choices about NaN are explained.
struct Relu {
  template <class A>
  static __device__ A Forward(A x) {
    return x <= A(0) ? A(0) : x;
  }
  template <class A>
  static __device__ A Backward(A g, A y) {
    return y > A(0) ? g : A(0);
  }
};

struct Sigmoid {
  static __device__ float Forward(float x) { return 1.0f / (1.0f + expf(-x)); }
  static __device__ double Forward(double x) { return 1.0 / (1.0 + exp(-x)); }
  template <class A>
  static __device__ A Backward(A g, A y) {
    return g * (y * (A(1) - y));
  }
};

struct Tanh {
  static __device__ float Forward(float x) { return tanhf(x); }
  static __device__ double Forward(double x) { return tanh(x); }
  template <class A>
  static __device__ A Backward(A g, A y) {
    return g * (A(1) - y * y);
  }
};

template <class F, class T>
struct ForwardOp {
  __device__ T operator()(T x) const { return static_cast<T>(F::Forward(static_cast<Accumulator<T>>(x))); }
};

template <class F, class T>
struct BackwardOp {
  __device__ T operator()(T g, T y) const {
    using A = Accumulator<T>;
    return static_cast<T>(F::Backward(static_cast<A>(g), static_cast<A>(y)));
  }
};

// out[i] = op(in[i]...), N elements an access.
template <int N, class Op, class T, class... In>
__global__ void MapKernel(int64_t n, T* out, const In*... in) {
  const int64_t start = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t step = gridDim.x * int64_t{kThreads};
  const int64_t vectors = n / N;
  for (int64_t i = start; i < vectors; i += step) {
    Vec<T, N> result;
    auto apply = [&](const Vec<In, N>&... v) {
#pragma unroll
      for (int j = 0; j < N; ++j) result.v[j] = Op{}(v.v[j]...);
    };
    apply(reinterpret_cast<const Vec<In, N>*>(in)[i]...);
    reinterpret_cast<Vec<T, N>*>(out)[i] = result;
  }
  for (int64_t i = vectors * N + start; i < n; i += step) out[i] = Op{}(in[i]...);
}

template <class Op, class T, class... In>
cudaError_t Map(int64_t n, cudaStream_t stream, T* out, const In*... in) {
  const auto blocks = [&](int per_thread) { return std::min(CeilDiv(n, int64_t{kThreads} * per_thread), kMaxBlocks); };
  if (IsVectorAligned(out, in...)) {
    constexpr int kN = kVecLength<T>;
    return LaunchKernel(MapKernel<kN, Op, T, In...>, blocks(kN), kThreads, stream, n, out, in...);
  }
  return LaunchKernel(MapKernel<1, Op, T, In...>, blocks(1), kThreads, stream, n, out, in...);
}

template <class F>
cudaError_t VisitKind(Kind kind, F&& f) {
  switch (kind) {
    case Kind::kRelu:
      return f(TypeTag<Relu>{});
    case Kind::kSigmoid:
      return f(TypeTag<Sigmoid>{});
    case Kind::kTanh:
      return f(TypeTag<Tanh>{});
    default:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t Forward(Kind kind, DType dtype, const void* x, void* y, int64_t n, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitKind(kind, [&](auto function) {
      using Op = ForwardOp<typename decltype(function)::type, T>;
      return Map<Op>(n, stream, static_cast<T*>(y), static_cast<const T*>(x));
    });
  });
}

cudaError_t Backward(Kind kind, DType dtype, const void* g, const void* y, void* dx, int64_t n, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitKind(kind, [&](auto function) {
      using Op = BackwardOp<typename decltype(function)::type, T>;
      return Map<Op>(n, stream, static_cast<T*>(dx), static_cast<const T*>(g), static_cast<const T*>(y));
    });
  });
}

}  // namespace jaxdnn::activation
