// Which functor the elementwise kernels take for an activation, and for its derivative.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <type_traits>

#include "cuda/activation/functions.cuh"

namespace jaxdnn::activation {

// For host code: calls f with what a kernel of the stored type T takes as its functor. Not of double, a common
// activation is worth a kernel of its own.
template <class T, class F>
cudaError_t VisitActivation(const Activation& activation, F&& f) {
  if constexpr (std::is_same_v<T, double>)
    return f(AnyActivation<T>{activation});
  else
    return WithCommon<T>(activation, f, f);
}

// The same for the forward pass, where long functions would take longer beside others.
template <class T, class F>
cudaError_t VisitForward(const Activation& activation, F&& f) {
  if constexpr (!std::is_same_v<T, double>) {
    const RareActivation<T> rare(activation);
    if (rare.kind == Kind::kSoftplus) return f(rare.softplus);
    if (rare.kind == Kind::kMish) return f(Mish<T>{});
  }
  return VisitActivation<T>(activation, f);
}

// The slopes of a function that has two: where its bit is set, and elsewhere.
struct Slopes {
  double inside, outside;
};

inline std::optional<Slopes> SlopesOf(const Activation& activation) {
  switch (activation.kind) {
    case Kind::kRelu:
    case Kind::kClippedRelu:
    case Kind::kHardTanh:
      return Slopes{1, 0};
    case Kind::kLeakyRelu:
      return Slopes{1, activation.parameter};
    case Kind::kHardSigmoid:
      return Slopes{1.0 / 6, 0};
    default:
      return std::nullopt;
  }
}

// The derivative of sigmoid and tanh from the output: (y + shift) (1 - y).
template <class T>
struct OfOutput {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  A shift;
  __device__ A Derivative(A y) const { return (y + shift) * (A(1) - y); }
};

inline bool IsFromOutput(Kind kind) { return kind == Kind::kSigmoid || kind == Kind::kTanh; }

// For host code: calls f with a functor that has the derivative of an activation without two slopes, from the output or
// the input.
template <class T, class F>
cudaError_t VisitSmooth(const Activation& activation, F&& f) {
  if (IsFromOutput(activation.kind)) return f(OfOutput<T>{Accumulator<T>(activation.kind == Kind::kTanh)});
  return VisitActivation<T>(activation, [&](auto functor) {
    using G = decltype(functor);
    if constexpr (std::is_same_v<G, Relu<T>> || std::is_same_v<G, Sigmoid<T>> || std::is_same_v<G, Tanh<T>>)
      return cudaErrorInvalidValue;
    else
      return f(functor);
  });
}

// Calls g with the functor that f is, or stands for, of those that VisitSmooth is for.
template <class F, class G>
__device__ void WithSmooth(const F& f, G&& g) {
  g(f);
}
template <class T, class G>
__device__ void WithSmooth(const RareActivation<T>& f, G&& g) {
  With(f, [&](auto functor) {
    using H = decltype(functor);
    if constexpr (!H::kMasked && !std::is_same_v<H, Identity<T>>) g(functor);
  });
}

}  // namespace jaxdnn::activation
